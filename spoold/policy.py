"""Decisions: what goes into the next batch and when, what is missing, when to try again. Pure.

Time is an argument everywhere: monotonic seconds, counted from this daemon's first sight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeAlias

from pyroaring import BitMap64

from spoold.model import Candidate, PartialGroups

__all__ = [
    "Abandoned",
    "Absence",
    "Backoff",
    "Group",
    "GroupPlan",
    "Overdue",
    "Plan",
    "Pressure",
    "Unit",
    "pressure",
]

Unit: TypeAlias = tuple[int, ...]
"""Environments that are delivered together or not at all: one, or the members of a group."""

PASS_SECONDS: Final = 0.05
MANY_PASSES: Final = 10
MANY_PASSES_SECONDS: Final = 10.0


class Plan:
    """Which complete environments go into the next batch, and when it is due.

    A batch is due when `batch_size` environments are ready, or when the first of them has waited
    `linger_seconds`. Lowest id first. Holds ids only.
    """

    def __init__(self, *, batch_size: int, linger_seconds: float) -> None:
        self.batch_size = batch_size
        self.linger_seconds = linger_seconds
        self.ready = BitMap64()
        self._since: float | None = None

    def offer(self, candidates: Iterable[Candidate], now: float) -> tuple[int, ...]:
        """Take in complete environments. Returns those that are late: without groups, none."""
        self.ready.update([candidate.id for candidate in candidates])
        if self.ready and self._since is None:
            self._since = now
        return ()

    def drop(self, environments: Iterable[int]) -> None:
        """Forget environments: set aside, or not complete after all."""
        for environment in environments:
            self.ready.discard(environment)
        if not self.ready:
            self._since = None

    def take(self, units: Iterable[Unit], now: float) -> None:
        """Take out what is being written to a batch; what is left begins to linger anew."""
        for unit in units:
            self.drop(unit)
        if self.ready:
            self._since = now

    def restore(self, units: Iterable[Unit], now: float) -> None:
        """Put back what was taken: it could not be written."""
        for unit in units:
            self.ready.update(unit)
        self._since = now

    def published(self, units: Iterable[Unit]) -> tuple[int, ...]:
        """Forget what was taken. Returns the members that are late by that: there are none."""
        del units
        return ()

    def close(self, group: str) -> None:
        """Note that a member of a group is delivered: without groups, nothing."""
        del group

    def reopen(self) -> None:
        """Forget which groups are closed: without groups, nothing."""

    def lose(self, environment: int, group: str, now: float) -> None:
        """Note that an environment has a note: it will not complete."""
        del group, now
        self.drop((environment,))

    def expired(self, now: float) -> tuple[Group, ...]:
        """Return the groups that are given up now: there are none."""
        del now
        return ()

    def waiting(self) -> Iterator[Group]:
        """Yield the groups that wait for members: there are none."""
        return iter(())

    def due_at(self) -> float | None:
        """Return when the next batch is due; None while nothing is ready."""
        if self._since is None:
            return None
        if len(self.ready) >= self.batch_size:
            return self._since
        return self._since + self.linger_seconds

    def next_batch(self, now: float) -> tuple[Unit, ...]:
        """Return the units of the batch that is due now, each the ids that must stay together."""
        due = self.due_at()
        if due is None or now < due:
            return ()
        units: list[Unit] = []
        for environment in self.ready:
            units.append((environment,))
            if len(units) == self.batch_size:
                break
        return tuple(units)

    def __len__(self) -> int:
        return len(self.ready)


@dataclass(slots=True)
class Group:
    """The members of one group as far as they are known.

    `complete` in order of completion; `lost` have a note; `unit` is what waits to be published.
    """

    key: str
    since: float
    complete: dict[int, None] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    unit: Unit = ()


class GroupPlan:
    """Which whole groups go into the next batch, and what becomes of those that are not whole.

    A group is whole when `group_size` members are complete: the first that completed. It is closed
    once a member is delivered; what completes after that is late. An environment without a group
    is whole by itself. Holds ids and group ids, never rows.
    """

    def __init__(
        self,
        *,
        group_size: int,
        batch_size: int,
        linger_seconds: float,
        timeout_seconds: float,
        partial: PartialGroups,
    ) -> None:
        self.group_size = group_size
        self.batch_size = batch_size
        self.linger_seconds = linger_seconds
        self.timeout_seconds = timeout_seconds
        self.partial = partial
        self.closed: set[str] = set()
        self.open: dict[str, Group] = {}
        self._group_of: dict[int, str] = {}
        self._whole: dict[Unit, str] = {}
        self._since: float | None = None

    def close(self, group: str) -> None:
        """Note that a member of a group is delivered."""
        if group:
            self.closed.add(group)

    def reopen(self) -> None:
        """Forget which groups are closed: what was delivered is to come again."""
        self.closed.clear()

    def lose(self, environment: int, group: str, now: float) -> None:
        """Note that a member has a note: it will not complete."""
        if group and group not in self.closed:
            self._forget(environment)
            self._group(group, now).lost.add(environment)

    def offer(self, candidates: Iterable[Candidate], now: float) -> tuple[int, ...]:
        """Take in complete environments. Returns those that are late: their group is closed."""
        late = []
        for candidate in candidates:
            if candidate.id in self._group_of:
                continue
            if candidate.group in self.closed:
                late.append(candidate.id)
                continue
            self._group_of[candidate.id] = candidate.group
            if not candidate.group:
                self._queue((candidate.id,), "", now)
                continue
            group = self._group(candidate.group, now)
            group.lost.discard(candidate.id)
            group.complete[candidate.id] = None
            group.since = now
            if len(group.complete) >= self.group_size and not group.unit:
                self._queue_group(group, now)
        return tuple(late)

    def drop(self, environments: Iterable[int]) -> None:
        """Forget environments that are not complete after all; their groups wait again."""
        for environment in environments:
            self._forget(environment)

    def take(self, units: Iterable[Unit], now: float) -> None:
        """Take out what is being written to a batch; what is left begins to linger anew."""
        for unit in units:
            self._whole.pop(unit, None)
        self._since = now if self._whole else None

    def restore(self, units: Iterable[Unit], now: float) -> None:
        """Put back what was taken: it could not be written."""
        for unit in units:
            self._queue(unit, self._group_of.get(unit[0], ""), now)

    def published(self, units: Iterable[Unit]) -> tuple[int, ...]:
        """Close the groups of what was taken. Returns the members that are late by that."""
        late: list[int] = []
        for unit in units:
            key = self._group_of.get(unit[0], "")
            group = self.open.pop(key, None) if key else None
            if group is not None:
                self.closed.add(key)
                late += [one for one in group.complete if one not in unit]
            for environment in unit:
                self._group_of.pop(environment, None)
        for environment in late:
            self._group_of.pop(environment, None)
        return tuple(sorted(late))

    def expired(self, now: float) -> tuple[Group, ...]:
        """Return the groups that `partial_groups = reject` gives up now."""
        if self.partial is not PartialGroups.REJECT:
            return ()
        return tuple(group for group in self.waiting() if self._is_due(group, now))

    def due_at(self) -> float | None:
        """Return when a batch, or a decision about a group, is due; None while nothing is."""
        dues = []
        if self._since is not None:
            full = len(self._whole) >= self.batch_size
            dues.append(self._since if full else self._since + self.linger_seconds)
        if self.partial is not PartialGroups.WAIT:
            dues += [
                group.since
                if self._nothing_to_wait_for(group)
                else group.since + self.timeout_seconds
                for group in self.waiting()
            ]
        return min(dues, default=None)

    def next_batch(self, now: float) -> tuple[Unit, ...]:
        """Return the units of the batch that is due now, each the ids that must stay together."""
        if self.partial is PartialGroups.DELIVER:
            for group in list(self.waiting()):
                if self._is_due(group, now):
                    self._queue_group(group, now)
        if self._since is None:
            return ()
        full = len(self._whole) >= self.batch_size
        if not full and now < self._since + self.linger_seconds:
            return ()
        return tuple(islice(self._whole, self.batch_size))

    def waiting(self) -> Iterator[Group]:
        """Yield the groups that have complete members and wait for more."""
        return (group for group in self.open.values() if group.complete and not group.unit)

    def __len__(self) -> int:
        return sum(len(unit) for unit in self._whole)

    def _group(self, key: str, now: float) -> Group:
        group = self.open.get(key)
        if group is None:
            group = self.open[key] = Group(key, now)
        return group

    def _nothing_to_wait_for(self, group: Group) -> bool:
        return len(group.complete) + len(group.lost) >= self.group_size

    def _is_due(self, group: Group, now: float) -> bool:
        return self._nothing_to_wait_for(group) or now >= group.since + self.timeout_seconds

    def _queue_group(self, group: Group, now: float) -> None:
        group.unit = tuple(sorted(islice(group.complete, self.group_size)))
        self._queue(group.unit, group.key, now)

    def _queue(self, unit: Unit, key: str, now: float) -> None:
        self._whole[unit] = key
        if self._since is None:
            self._since = now

    def _forget(self, environment: int) -> None:
        key = self._group_of.pop(environment, None)
        if key is None:
            return
        self._whole.pop((environment,), None)
        group = self.open.get(key)
        if group is not None:
            group.complete.pop(environment, None)
            if environment in group.unit:
                self._whole.pop(group.unit, None)
                group.unit = ()
                if len(group.complete) >= self.group_size:
                    self._queue_group(group, group.since)
            if not group.complete and not group.lost:
                del self.open[key]
        if not self._whole:
            self._since = None


class Absence:
    """Decides when a batch file that no pass finds is missing: moves race with listings.

    Missing: two passes at least 50 ms apart did not find it, and no folder's mtime changed during
    either; or ten passes over at least ten seconds did not.
    """

    def __init__(self) -> None:
        self._still_since: dict[str, float] = {}
        self._passes: dict[str, tuple[float, int]] = {}

    def passed(self, absent: Iterable[str], *, at: float, still: bool) -> tuple[str, ...]:
        """Take in a whole pass that ended `at`. Returns the batch ids that are missing now.

        `absent`: known batches that the pass did not find; `still`: no folder's mtime changed
        while it ran.
        """
        ids = set(absent)
        self._passes = {i: self._passes.get(i, (at, 0)) for i in ids}
        self._still_since = {i: t for i, t in self._still_since.items() if i in ids}
        missing = []
        for batch_id in ids:
            first, passes = self._passes[batch_id]
            self._passes[batch_id] = (first, passes + 1)
            if passes + 1 >= MANY_PASSES and at - first >= MANY_PASSES_SECONDS:
                missing.append(batch_id)
            elif still:
                since = self._still_since.setdefault(batch_id, at)
                if at - since >= PASS_SECONDS:
                    missing.append(batch_id)
        for batch_id in missing:
            del self._passes[batch_id]
            self._still_since.pop(batch_id, None)
        return tuple(sorted(missing))

    def __bool__(self) -> bool:
        return bool(self._passes)


class Overdue:
    """Finished environments without a usable row, and for how long they have been that."""

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds
        self._since: dict[int, float] = {}

    def seen(self, environments: Iterable[int], now: float) -> None:
        """Take in environments that are finished and have no usable row."""
        for environment in environments:
            self._since.setdefault(environment, now)

    def drop(self, environments: Iterable[int]) -> None:
        """Forget environments: their row turned up, or they were set aside."""
        if self._since:
            for environment in environments:
                self._since.pop(environment, None)

    def due(self, now: float) -> tuple[int, ...]:
        """Return the environments that have waited long enough."""
        return tuple(sorted(e for e, since in self._since.items() if now >= since + self.seconds))

    def keep_out(self, skip: BitMap64) -> None:
        """Forget environments that are delivered or set aside."""
        if self._since:
            self.drop([environment for environment in self._since if environment in skip])

    def due_at(self) -> float | None:
        """Return when the next one has waited long enough."""
        return min(self._since.values()) + self.seconds if self._since else None

    def __len__(self) -> int:
        return len(self._since)


class Abandoned:
    """Consumers whose lock has been free for `seconds`: what they hold is to be requeued."""

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds
        self._free_since: dict[str, float] = {}

    def seen(self, free: Iterable[str], now: float) -> tuple[str, ...]:
        """Take in whose lock is free now. Returns those for whom it has been so long enough."""
        self._free_since = {name: self._free_since.get(name, now) for name in free}
        due = (n for n, since in self._free_since.items() if now >= since + self.seconds)
        return tuple(sorted(due))


class Backoff:
    """Growing pauses between tries: 1, 2, 4, … seconds, at most `longest`."""

    def __init__(self, *, first: float = 1.0, longest: float = 30.0) -> None:
        self.first = first
        self.longest = longest
        self.tries = 0
        self.until = 0.0

    def failed(self, now: float) -> float:
        """Note a failure. Returns how long to pause, in seconds."""
        pause: float = min(self.longest, self.first * 2.0 ** min(self.tries, 20))
        self.tries += 1
        self.until = now + pause
        return pause

    def succeeded(self) -> None:
        """Begin again with the shortest pause."""
        self.tries = 0
        self.until = 0.0


@dataclass(frozen=True, slots=True)
class Pressure:
    """Why reading has to stop: what is too much, and the mark that it is measured against."""

    code: str
    value: int
    mark: int


def pressure(
    *,
    batches: int,
    max_batches: int,
    size_bytes: int,
    max_bytes: int,
    free_bytes: int,
    min_free_bytes: int,
) -> Pressure | None:
    """Return why nothing more may be published now, or None."""
    if batches >= max_batches:
        return Pressure("max_pending_batches", batches, max_batches)
    if size_bytes >= max_bytes:
        return Pressure("max_pending_bytes", size_bytes, max_bytes)
    if free_bytes < min_free_bytes:
        return Pressure("min_free_bytes", free_bytes, min_free_bytes)
    return None
