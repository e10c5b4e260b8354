"""What lies where in a run directory, for people: from names alone, with the daemon dead or alive.

Nothing is opened but lock files, which are probed for less than a millisecond, and nothing is
changed. It is a snapshot of a place where others move files: a batch on its way forward is seen
once, one that comes back may be missed once.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from spoold import fs
from spoold.errors import ConfigError, SpoolWriteError
from spoold.layout import NoteName, Place, RunDir, State, batch_id_of, parse_seq
from spoold.spool.shelves import Shelves

__all__ = [
    "MANY_NOTES",
    "BatchFile",
    "ConsumerFolder",
    "Count",
    "Overview",
    "open_run_dir",
    "shown",
    "since",
    "take",
]

MANY_NOTES: Final = 1000
_TOP: Final = frozenset({*State, "retired", ".spoold"})
_HOUSE: Final = frozenset({"lock", "tmp", "ledger", "source.json", "status.json"})


class BatchFile(NamedTuple):
    """A batch file: where it lies, its name, its batch id. Facts are cut from the id when asked."""

    place: Place
    name: str
    id: str

    @property
    def seq(self) -> int:
        """Its number."""
        return int(self.id.partition("-")[0])

    @property
    def samples(self) -> int:
        """How many samples it holds."""
        return int(self.id.split("-", 2)[1][1:])

    @property
    def weights(self) -> tuple[int, int]:
        """The least and the greatest weight version in it."""
        lo, _, hi = self.id.split("-", 3)[2][1:].partition(".")
        return int(lo), int(hi)


class Count(NamedTuple):
    """How much lies in a place. `oldest` and `newest` are numbers of batches, 0 for none."""

    batches: int
    samples: int
    oldest: int
    newest: int

    @classmethod
    def of(cls, files: Iterable[BatchFile]) -> Count:
        """Count some batches."""
        seqs, samples = [], 0
        for file in files:
            seqs.append(file.seq)
            samples += file.samples
        return cls(len(seqs), samples, min(seqs, default=0), max(seqs, default=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerFolder:
    """A folder in inflight/. `alive`: its lock is held; None where it has no lock file.

    `since`: when it claimed the batch with the lowest number that it holds.
    """

    name: str
    alive: bool | None
    count: Count
    since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A snapshot of a run directory. `files` in order of state, folder and name.

    `unknown`: paths, relative to the run directory, that are neither batch nor note nor spoold's
    own. `unreadable`: what could not be listed, and therefore is not counted as empty. `settled`:
    batch ids with a ledger entry.
    """

    run: RunDir
    files: tuple[BatchFile, ...]
    slices: dict[State, tuple[int, int]]
    notes: tuple[NoteName, ...]
    unknown: tuple[str, ...]
    unreadable: tuple[SpoolWriteError, ...]
    settled: frozenset[str]
    consumer_names: tuple[str, ...]

    def of(self, state: State) -> list[BatchFile]:
        """Return the batches that lie in a state."""
        first, end = self.slices[state]
        return list(self.files[first:end])

    def oldest_since(self, state: State, folder: str | None = None) -> float | None:
        """Return since when the batch with the lowest number lies in a state, or in a folder."""
        files = (f for f in self.of(state) if folder is None or f.place.folder == folder)
        first = min(files, key=lambda file: file.id, default=None)
        return since(self.run, first.place, first.name) if first is not None else None

    def by_folder(self, state: State) -> dict[str, Count]:
        """Return what lies in each folder of a state that holds batches, by name."""
        folders: dict[str, list[BatchFile]] = {}
        for file in self.of(state):
            folders.setdefault(file.place.folder, []).append(file)
        return {folder: Count.of(files) for folder, files in sorted(folders.items())}

    def notes_by_reason(self) -> dict[str, int]:
        """Return how many notes there are for each reason."""
        return dict(sorted(Counter(note.reason for note in self.notes).items()))

    def consumers(self) -> list[ConsumerFolder]:
        """Return the consumers' folders by name, each with whether its consumer lives now."""
        held = self.by_folder(State.INFLIGHT)
        nothing = Count.of(())
        return [
            ConsumerFolder(
                name=name,
                alive=fs.lock_is_held(self.run.consumer_lock(name)),
                count=held.get(name, nothing),
                since=self.oldest_since(State.INFLIGHT, name),
            )
            for name in self.consumer_names
        ]


def open_run_dir(path: str) -> RunDir:
    """Return the run directory at `path`. ConfigError where there is none. Reads names only."""
    root = path.rstrip("/") or "/"
    run = RunDir(root)
    make = f"`spoold run --run-dir {root}` makes one"
    if not os.path.lexists(root):
        raise ConfigError(f"no run directory at {root}", hint=make)
    if not os.path.isdir(root):
        raise ConfigError(f"{root} is no run directory: it is a file", hint=make)
    lacking = [state.value for state in State if not os.path.isdir(run.of(Place(state)))]
    if len(lacking) == len(State):
        if not os.access(root, os.X_OK):
            raise ConfigError(
                f"{root} cannot be entered", hint="give this user permission, or use its group"
            )
        raise ConfigError(f"{root} is no run directory: it has no pending/", hint=make)
    return run


def take(run: RunDir) -> Overview:
    """Look at all folders of a run directory once."""
    shelves = Shelves(run)
    this = shelves.go_through()
    files: list[BatchFile] = []
    for batch_id, where in this.appeared.items():
        for place, name in where:
            # RACE: a batch that moved during the pass was seen at both ends. What is still there
            # afterwards is a real second file.
            if len(where) == 1 or os.path.lexists(run.file(place, name)):
                files.append(BatchFile(place, name, batch_id))
    for place, shelf in shelves.by_place.items():
        if not place.counts:
            ids = ((name, batch_id_of(name)) for name in shelf.names)
            files += [BatchFile(place, name, batch_id) for name, batch_id in ids if batch_id]
    files.sort(key=lambda file: (_ORDER[file.place.state], file.place.folder, file.name))
    unreadable = this.unreadable
    return Overview(
        run=run,
        files=tuple(files),
        slices=_slices(files),
        notes=tuple(sorted(shelves.notes(), key=lambda note: note.environment)),
        unknown=tuple(sorted([*shelves.unknown(), *_unknown_beside(run, unreadable)])),
        unreadable=tuple(unreadable),
        settled=_settled(run, unreadable),
        consumer_names=tuple(sorted(shelves.by_place[Place(State.INFLIGHT)].folders)),
    )


def since(run: RunDir, place: Place, file_name: str) -> float | None:
    """Return since when a batch lies in a place, epoch seconds; None where it is gone.

    That is its ctime, which a rename sets; mtime is when it was written.
    """
    try:
        return os.stat(run.file(place, file_name)).st_ctime
    except OSError:
        return None  # RACE: moved since it was listed


_ORDER: Final = {state: number for number, state in enumerate(State)}


def _slices(files: list[BatchFile]) -> dict[State, tuple[int, int]]:
    """Return which part of the sorted files lies in each state."""
    slices, first = {}, 0
    for state in State:
        end = bisect_right(files, _ORDER[state], key=lambda file: _ORDER[file.place.state])
        slices[state] = (first, end)
        first = end
    return slices


def _unknown_beside(run: RunDir, unreadable: list[SpoolWriteError]) -> list[str]:
    """Return what lies beside the four directories, and in .spoold/, and is not spoold's."""
    top = [name for name in _names(run.root, unreadable) if name not in _TOP]
    house = [
        f".spoold/{name}"
        for name in _names(run.house, unreadable)
        if name not in _HOUSE and parse_seq(name) is None
    ]
    return top + house


def _settled(run: RunDir, unreadable: list[SpoolWriteError]) -> frozenset[str]:
    return frozenset(_names(run.ledger, unreadable))


def _names(path: str, unreadable: list[SpoolWriteError]) -> list[str]:
    try:
        listing = fs.scan(path)
    except SpoolWriteError as error:
        unreadable.append(error)
        return []
    except FileNotFoundError as error:
        unreadable.append(fs.failed("list", path, error))
        return []
    return [*listing.files, *listing.folders, *listing.others]


def shown(name: str) -> str:
    """Return a file name as printable text: bytes that are no UTF-8, and controls, escaped."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
