"""What the folders of a run directory hold, listed again only where something changed."""

from __future__ import annotations

import os
import time
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final

from spoold import fs
from spoold.errors import SpoolWriteError
from spoold.layout import LOCK_NAME, NoteName, Place, RunDir, State, batch_id_of, plain_name

__all__ = ["Pass", "Shelf", "Shelves"]

# A folder whose mtime is this young at its listing may change again without showing it: the
# kernel's clock for mtimes ticks every few milliseconds.
RACY_NS: Final = 100_000_000
PROBE_PREFIX: Final = ".probe-"


@dataclass(slots=True)
class Shelf:
    """One folder as it was last listed."""

    place: Place
    mtime_ns: int = -1
    racy: bool = True
    names: set[str] = field(default_factory=set)
    folders: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(slots=True)
class Pass:
    """What one pass over all folders found changed.

    `appeared`: batch id → where its name is new. `vanished`: batch ids whose name is gone from a
    folder. `still`: no folder changed while the pass ran. `unreadable`: never counts as empty.
    """

    appeared: dict[str, list[tuple[Place, str]]] = field(default_factory=dict)
    vanished: set[str] = field(default_factory=set)
    notes_changed: bool = False
    still: bool = True
    unreadable: list[SpoolWriteError] = field(default_factory=list)
    settled: Container[str] = frozenset()


class Shelves:
    """Listings of pending/, inflight/, acked/ and rejected/ with the folders in them.

    A pass goes through them in this order, so that a batch on its way forward is seen at least
    once. A folder is listed again when its mtime changed, or was too young to be trusted.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.by_place: dict[Place, Shelf] = {}
        self._settled: set[str] = set()
        self.unknown_changed = False

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
        shelf = self.by_place.get(Place(State.REJECTED))
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
        return [
            place
            for place, shelf in self.by_place.items()
            if place.state is State.ACKED and file_name in shelf.names
        ]

    def go_through(
        self, *, everything: bool = False, settled: Container[str] = frozenset()
    ) -> Pass:
        """Look at every folder; list those that changed, or all of them.

        What appears in acked/ under the plain name of a `settled` batch id is passed over: a
        hundred thousand files that are where they belong cost a look at their names.
        """
        this = Pass()
        this.settled = settled
        before = set(self.by_place)
        seen: set[Place] = set()
        for state in State:
            top = self._look_at(Place(state), this, everything)
            seen.add(Place(state))
            for folder in top.folders:
                place = Place(state, folder)
                self._look_at(place, this, everything)
                seen.add(place)
        for place in before - seen:
            shelf = self.by_place.pop(place)
            this.still = False
            self.unknown_changed |= bool(shelf.unknown)
            self._take_out(shelf, shelf.names, this)
        if everything:
            this.still = this.still and all(
                self._mtime_ns(place) == self.by_place[place].mtime_ns for place in seen
            )
        return this

    def _mtime_ns(self, place: Place) -> int:
        try:
            return os.stat(self.run.of(place)).st_mtime_ns
        except OSError:
            return -1

    def _look_at(self, place: Place, this: Pass, everything: bool) -> Shelf:
        shelf = self.by_place.setdefault(place, Shelf(place))
        path = self.run.of(place)
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

    def _compare(self, shelf: Shelf, listing: fs.Listing, this: Pass) -> None:
        place, names = shelf.place, set(listing.files)
        shelf.folders = () if place.folder else tuple(sorted(listing.folders))
        new = names - shelf.names
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
        if place == Place(State.REJECTED) and new:
            this.notes_changed = True
        self._take_out(shelf, shelf.names - names, this)
        shelf.names = names
        odd = {*listing.others, *(listing.folders if place.folder else ())}
        odd.update(name for name in shelf.unknown if name in names)
        odd.update(name for name in strange if not self._is_known(place, name))
        unknown = tuple(sorted(odd))
        self.unknown_changed |= unknown != shelf.unknown
        shelf.unknown = unknown

    def _take_out(self, shelf: Shelf, names: set[str], this: Pass) -> None:
        if shelf.place == Place(State.REJECTED) and names:
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
        return place == Place(State.REJECTED) and NoteName.parse(name) is not None
