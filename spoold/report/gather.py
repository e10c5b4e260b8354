"""What a run directory tells of its history: names, times, sample lines, notes. Changes nothing.

Completed: the timestamp in a sample, when the writer stored its row. Published: the mtime of the
batch file, which no move changes. Acked: its ctime in acked/, which the move there set; where the
file is pruned, the mtime of its ledger entry. A cp or a restored backup makes these times wrong,
and merged ledger entries have none: they are left out.

Names and times are those of every batch. Sample lines are read of all of them, too, up to half a
gigabyte and ten thousand files; of more, every second one, or every hundredth, is read.
"""

from __future__ import annotations

import io
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import orjson

from spoold import fs
from spoold.errors import SpoolWriteError
from spoold.layout import STALE, Place, RunDir, State, is_batch_id
from spoold.spool import health
from spoold.spool.health import Health
from spoold.spool.overview import BatchFile

__all__ = ["BatchFacts", "Gathered", "PrunedFacts", "Watch", "gather"]

MOST_READ_BYTES: Final = 512 << 20
MOST_READ_FILES: Final = 10_000
MOST_GROUPS: Final = 200_000
_MOST: Final = 1e100

Watch = Callable[[Iterable[BatchFile], int], Iterator[BatchFile]]
"""Passes items through, and may show how far it is: (items, how many) → the items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """A batch whose file is there. Times are epoch seconds; `acked` is None where it is not.

    `rewards` is (p10, mean, p90), None where no sample was read; `completed` the times at which its
    samples were stored: (first, median, last).
    """

    file: BatchFile
    published: float
    acked: float | None
    size_bytes: int
    rewards: tuple[float, float, float] | None
    completed: tuple[float, float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedFacts:
    """An acked batch whose file is gone; its ledger entry is there."""

    samples: int
    acked: float


@dataclass(slots=True, kw_only=True)
class Gathered:
    """All that the page is made of.

    `groups`: samples by group id, of the batches that were read. `read_every`: of so many batches
    the sample lines of one were read. `unread` counts batch files that could not be read.
    """

    health: Health
    at: float
    batches: list[BatchFacts] = field(default_factory=list)
    pruned: list[PrunedFacts] = field(default_factory=list)
    notes: list[tuple[float, str]] = field(default_factory=list)
    groups: Counter[str] = field(default_factory=Counter)
    read_every: int = 1
    unread: int = 0

    @property
    def rejects(self) -> dict[str, tuple[int, int]]:
        """Return notes and refused batches by reason."""
        notes = Counter(reason for _, reason in self.notes)
        folders = Counter(
            each.place.folder or "(no reason)" for each in self.health.overview.of(State.REJECTED)
        )
        return {reason: (notes[reason], folders[reason]) for reason in sorted(notes | folders)}


def gather(run: RunDir, *, now: float, watch: Watch | None = None) -> Gathered:
    """Read everything. What moves or goes meanwhile is seen once or not at all."""
    found = health.take(run, now=now)
    gathered = Gathered(health=found, at=now)
    files = sorted(found.overview.files, key=lambda file: file.seq)
    counting = [file for file in files if file.place.counts]
    sizes = _sizes(run, counting)
    gathered.read_every = every = max(
        math.ceil(sum(sizes) / MOST_READ_BYTES), math.ceil(len(counting) / MOST_READ_FILES), 1
    )
    for number, file in enumerate(watch(counting, len(counting)) if watch else counting):
        facts = _batch(run, file, gathered.groups, reads=number % every == 0)
        if facts is None:
            gathered.unread += 1
        else:
            gathered.batches.append(facts)
    here = {file.id for file in files}
    gathered.pruned = list(_pruned(run, here))
    for note in found.overview.notes:
        at = _mtime(f"{run.rejected}/{note.file_name}")
        if at is not None:
            gathered.notes.append((at, note.reason))
    return gathered


def _sizes(run: RunDir, files: Iterable[BatchFile]) -> list[int]:
    sizes = []
    for file in files:
        # RACE: it may have moved since it was listed.
        with suppress(OSError):
            sizes.append(os.stat(run.file(file.place, file.name)).st_size)
    return sizes


def _mtime(path: str) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None  # RACE: removed since it was listed


def _batch(run: RunDir, file: BatchFile, groups: Counter[str], *, reads: bool) -> BatchFacts | None:
    path = run.file(file.place, file.name)
    try:
        times = os.stat(path)
        data = fs.read(path) if reads else b""
    except (OSError, SpoolWriteError):
        return None  # RACE: moved or pruned since it was listed; or not for this user
    is_acked = file.place.state is State.ACKED and file.place.folder != STALE
    rewards: list[float] = []
    completed: list[float] = []
    for line in io.BytesIO(data):
        try:
            sample = orjson.loads(line)
            extra = sample["extra_info"]
            reward, at, group = (
                float(sample["reward"]),
                float(extra["timestamp"]),
                extra["group_id"],
            )
            # So that sums and scales stay finite; nobody can see the difference.
            rewards.append(min(max(reward, -_MOST), _MOST))
            completed.append(min(max(at, -_MOST), _MOST))
            if group and (len(groups) < MOST_GROUPS or group in groups):
                groups[group] += 1
        except (ValueError, KeyError, TypeError):
            continue  # a line that is no sample: `spoold check` is for that
    return BatchFacts(
        file=file,
        published=times.st_mtime,
        acked=times.st_ctime if is_acked else None,
        size_bytes=times.st_size,
        rewards=_spread(rewards),
        completed=(min(completed), statistics.median(completed), max(completed))
        if completed
        else None,
    )


def _spread(values: list[float]) -> tuple[float, float, float] | None:
    if not values:
        return None
    values.sort()
    last = len(values) - 1
    mean = statistics.fmean(values)
    return values[round(0.1 * last)], mean, values[round(0.9 * last)]


def _pruned(run: RunDir, here: set[str]) -> Iterator[PrunedFacts]:
    try:
        names = fs.scan(run.ledger).files
    except (FileNotFoundError, SpoolWriteError):
        return
    for name in names:
        if is_batch_id(name) and name not in here:
            at = _mtime(f"{run.ledger}/{name}")
            if at is not None:
                file = BatchFile(Place(State.ACKED), name, name)
                yield PrunedFacts(samples=file.samples, acked=at)
