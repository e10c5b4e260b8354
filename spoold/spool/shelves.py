"""What the folders of a run directory hold, listed again only where something changed.

To list acked/ with 200,000 files takes 0.2 s and as many names of memory, and each ack changes it.
So where there is much, and hints tell what moved, a pass looks only at the names that were hinted
at, each by itself. Hints get lost: every `relist_seconds`, and whenever a batch is missed, the
folders that changed are listed all the same.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Final

from spoold import fs
from spoold.errors import SpoolWriteError
from spoold.layout import (
    LOCK_NAME,
    TOPS,
    NoteName,
    Place,
    RunDir,
    State,
    batch_id_of,
    plain_name,
)
from spoold.model import Mark

__all__ = ["Pass", "Shelf", "Shelves"]

# A folder whose mtime is this young at its listing may change again without showing it: the
# kernel's clock for mtimes ticks every few milliseconds.
RACY_NS: Final = 100_000_000
REJECTED: Final = TOPS[State.REJECTED]
PROBE_PREFIX: Final = ".probe-"
# From so many names on, a pass goes by hints where there are any.
MANY_NAMES: Final = 10_000
# In pending/ hints tell what goes, not what comes: that is mostly the daemon's own doing.
HINTED_BOTH_WAYS: Final = frozenset(State) - {State.PENDING}


@dataclass(slots=True)
class Shelf:
    """One folder as it was last listed."""

    place: Place
    path: str
    mtime_ns: int = -1
    racy: bool = True
    names: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    unknown: tuple[str, ...] = ()


@dataclass(slots=True)
class Pass:
    """What one pass over all folders found changed.

    `appeared`: batch id → where its name is new. `vanished`: batch ids whose name is gone from a
    folder. `still`: no folder changed since the pass before. `is_whole`: every folder was listed,
    and none changed meanwhile, so that no batch was missed. `by_hints`: some names were not looked
    at, because no hint named them. `unreadable`: never counts as empty.
    """

    appeared: dict[str, list[tuple[Place, str]]] = field(default_factory=dict)
    vanished: set[str] = field(default_factory=set)
    notes_changed: bool = False
    still: bool = True
    is_whole: bool = False
    by_hints: bool = False
    unreadable: list[SpoolWriteError] = field(default_factory=list)
    settled: Container[str] = frozenset()


class Shelves:
    """Listings of pending/, inflight/, acked/ and rejected/ with the folders in them.

    A pass goes through them in this order, so that a batch on its way forward is seen at least
    once. A folder is listed again when its mtime changed, or was too young to be trusted; but see
    above.
    """

    def __init__(self, run: RunDir, *, relist_seconds: float = 0.0) -> None:
        self.run = run
        self.by_place: dict[Place, Shelf] = {}
        self.relist_seconds = relist_seconds
        self._settled: set[str] = set()
        self.unknown_changed = False
        self._many: set[State] = set()
        self._relist_at = -math.inf

    def of(self, state: State) -> Iterator[Shelf]:
        """Yield the folders of a state as they were last listed."""
        top = self.by_place.get(TOPS[state])
        if top is not None:
            yield top
            yield from (self.by_place[Place(state, name)] for name in top.folders)

    def has(self, place: Place, file_name: str) -> bool:
        """Whether the last listing of a folder had this name."""
        shelf = self.by_place.get(place)
        return shelf is not None and file_name in shelf.names

    def add(self, place: Place, file_name: str) -> None:
        """Take in a file that this process put there itself."""
        self.by_place[place].names.add(file_name)

    def drop(self, place: Place, file_name: str) -> None:
        """Take in that this process removed a file."""
        self.by_place[place].names.discard(file_name)
        self._settled.discard(file_name)

    def unknown(self) -> list[str]:
        """Return the paths, relative to the run directory, that are neither batch nor note."""
        return sorted(
            f"{shelf.place.path}/{name}"
            for shelf in self.by_place.values()
            for name in shelf.unknown
        )

    def notes(self) -> list[NoteName]:
        """Return the notes in rejected/."""
        shelf = self.by_place.get(REJECTED)
        names = map(NoteName.parse, shelf.names) if shelf else ()
        return [name for name in names if name is not None]

    def sync(self) -> None:
        """Make every name durable that a pass could find: state comes from synced folders only."""
        for state in State:
            top = f"{self.run.root}/{state.value}"
            fs.sync_dir(top)
            for folder in fs.scan(top).folders:
                try:
                    fs.sync_dir(f"{top}/{folder}")
                except FileNotFoundError:
                    continue

    def settle(self, file_name: str) -> None:
        """Take in that a file in acked/ is where it belongs."""
        self._settled.add(file_name)

    def acked_places(self, file_name: str) -> list[Place]:
        """Return the places in acked/ that have this name."""
        return [shelf.place for shelf in self.of(State.ACKED) if file_name in shelf.names]

    def is_settled(self, file_name: str) -> bool:
        """Whether a file in acked/ was taken in as where it belongs."""
        return file_name in self._settled

    def unsettled(self) -> Iterator[str]:
        """Yield the names of all other files in acked/."""
        for shelf in self.of(State.ACKED):
            yield from shelf.names - self._settled

    def settled_count(self) -> int:
        """Return how many files in acked/ are where they belong."""
        return len(self._settled)

    def relist_at(self) -> float:
        """Return when what mostly goes by hints is to be listed again."""
        return self._relist_at if self._many else math.inf

    def marks(self) -> Iterator[Mark]:
        """Yield what tells whether a pass would list a folder, as long as no hint comes."""
        for shelf in self.by_place.values():
            if shelf.place.state not in self._many:
                # Too young a time proves nothing.
                yield fs.mtime_ns, shelf.path, None if shelf.racy else shelf.mtime_ns

    def go_through(
        self,
        *,
        now: float = 0.0,
        everything: bool = False,
        moved: Set[str] | None = None,
        settled: Container[str] = frozenset(),
    ) -> Pass:
        """Look at every folder; list those that changed, or all of them.

        `moved`: the paths where hints told, since the last pass, that something came or went;
        None where they cannot be relied on. What appears in acked/ under the plain name of a
        `settled` batch id is passed over: a hundred thousand files that are where they belong cost
        a look at their names.
        """
        this = Pass()
        this.settled = settled
        hinted: dict[str, set[str]] | None = None
        if moved is not None and not everything and now < self._relist_at:
            hinted = _by_folder(moved)
        else:
            self._relist_at = now + self.relist_seconds
        for state in TOPS:
            if hinted is not None and state in self._many:
                self._go_by_hints(state, hinted, this)
            else:
                self._go_through_all(state, this, everything)
        if everything:
            # RACE: a batch may have gone back while this ran, and mtimes tick: by milliseconds.
            for state in (State.PENDING, State.INFLIGHT):
                self._go_through_all(state, this, everything=False)
            this.is_whole = all(map(_is_unchanged, self.by_place.values()))
            this.still = this.still and this.is_whole
        if this.unreadable:
            self._relist_at = -math.inf
        return this

    def _go_through_all(self, state: State, this: Pass, everything: bool) -> None:
        place = TOPS[state]
        before = set(self.by_place[place].folders) if place in self.by_place else set()
        top = self._look_at(place, this, everything)
        if removed := before - top.folders:
            self._forget(state, removed, this)
        number = len(top.names) + len(top.folders)
        for folder in sorted(top.folders):
            number += len(self._look_at(Place(state, folder), this, everything).names)
        if number > MANY_NAMES and state in HINTED_BOTH_WAYS:
            self._many.add(state)
        else:
            self._many.discard(state)

    def _go_by_hints(self, state: State, hinted: dict[str, set[str]], this: Pass) -> None:
        """Look only at what hints named: names directly in the state's folder, folders in it."""
        this.by_hints, this.still = True, False
        top = self.by_place[TOPS[state]]
        path = top.path
        names = hinted.get(path, set())
        before = top.folders & names
        self._look_at_names(top, names, this)
        self._forget(state, before - top.folders, this)
        parts = [folder_path.rpartition("/") for folder_path in hinted]
        inside = {folder for parent, _, folder in parts if parent == path}
        for folder in sorted((inside | names) & top.folders):
            shelf = self.by_place.get(Place(state, folder))
            if shelf is None or folder in names or len(shelf.names) <= MANY_NAMES:
                self._look_at(Place(state, folder), this, everything=False)
            else:
                self._look_at_names(shelf, hinted[f"{path}/{folder}"], this)

    def _forget(self, state: State, folders: Iterable[str], this: Pass) -> None:
        for folder in folders:
            shelf = self.by_place.pop(Place(state, folder))
            this.still = False
            self.unknown_changed |= bool(shelf.unknown)
            self._take_out(shelf, shelf.names, this)

    def _look_at(self, place: Place, this: Pass, everything: bool) -> Shelf:
        shelf = self.by_place.get(place)
        if shelf is None:
            shelf = self.by_place[place] = Shelf(place, self.run.of(place))
        path = shelf.path
        try:
            mtime_ns = os.stat(path).st_mtime_ns
            if mtime_ns == shelf.mtime_ns and not shelf.racy and not everything:
                return shelf
            listing = fs.scan(path)
        except FileNotFoundError as error:
            if place.folder:
                # RACE: an empty folder was removed; its parent's next listing lacks it.
                listing, mtime_ns = fs.Listing([], [], []), -1
            else:
                this.unreadable.append(fs.failed("list", path, error))
                return shelf
        except SpoolWriteError as error:
            this.unreadable.append(error)
            return shelf
        except OSError as error:
            this.unreadable.append(fs.failed("list", path, error))
            return shelf
        if mtime_ns != shelf.mtime_ns:
            this.still = False
        shelf.mtime_ns = mtime_ns
        shelf.racy = abs(time.time_ns() - mtime_ns) < RACY_NS
        self._compare(shelf, listing, this)
        return shelf

    def _look_at_names(self, shelf: Shelf, names: Set[str], this: Pass) -> None:
        """Look at some names in a folder, and at no other."""
        try:
            listing = fs.look_up(shelf.path, names)
        except SpoolWriteError as error:
            this.unreadable.append(error)
            return
        self._compare(shelf, listing, this, only=names)

    def _compare(
        self, shelf: Shelf, listing: fs.Listing, this: Pass, *, only: Set[str] | None = None
    ) -> None:
        """Take in what was found in a folder; `only`: which names were looked for, None for all."""
        place, names = shelf.place, set(listing.files)
        if not place.folder:
            shelf.folders -= shelf.folders if only is None else only
            shelf.folders |= set(listing.folders)
        new = names - shelf.names
        gone = (shelf.names if only is None else shelf.names & only) - names
        strange = []
        acked = place.state is State.ACKED
        for name in new:
            # A name that another folder of acked/ has, too, is not passed over.
            plain = acked and name[:-6] in this.settled and name == plain_name(name[:-6])
            if plain and name not in self._settled:
                self._settled.add(name)
                continue
            batch_id = batch_id_of(name)
            if batch_id is None:
                strange.append(name)
            elif place.counts:
                this.appeared.setdefault(batch_id, []).append((place, name))
        if place == REJECTED and new:
            this.notes_changed = True
        self._take_out(shelf, gone, this)
        if not shelf.names:
            shelf.names = names  # at start: one more set of 200,000 names would be 8 MB
        else:
            shelf.names |= new
            shelf.names -= gone
        odd = {*listing.others, *(listing.folders if place.folder else ())}
        kept = names if only is None else names | (set(shelf.unknown) - only)
        odd.update(name for name in shelf.unknown if name in kept)
        odd.update(name for name in strange if not self._is_known(place, name))
        unknown = tuple(sorted(odd))
        self.unknown_changed |= unknown != shelf.unknown
        shelf.unknown = unknown

    def _take_out(self, shelf: Shelf, names: set[str], this: Pass) -> None:
        if shelf.place == REJECTED and names:
            this.notes_changed = True
        if shelf.place.state is State.ACKED:
            self._settled -= names
        if shelf.place.counts:
            ids = map(batch_id_of, names)
            this.vanished.update(batch_id for batch_id in ids if batch_id is not None)

    @staticmethod
    def _is_known(place: Place, name: str) -> bool:
        if name.startswith(PROBE_PREFIX):
            return True
        if place.state is State.INFLIGHT and place.folder:
            return name == LOCK_NAME
        return place == REJECTED and NoteName.parse(name) is not None


def _by_folder(paths: Iterable[str]) -> dict[str, set[str]]:
    """Sort paths by the folder that they are in: folder → names."""
    sorted_: defaultdict[str, set[str]] = defaultdict(set)
    for path in paths:
        folder, _, name = path.rpartition("/")
        sorted_[folder].add(name)
    return sorted_


def _is_unchanged(shelf: Shelf) -> bool:
    """Whether a folder has the mtime that it had when it was listed; -1: it was not there."""
    return fs.mtime_ns(shelf.path) == shelf.mtime_ns
