"""Which whole groups go into the next batch, and what becomes of those that are not whole. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from spoold.model import Candidate, PartialGroups
from spoold.policy.plan import Group, Unit

__all__ = ["GroupPlan"]


class GroupPlan:
    """Which whole groups go into the next batch, and what becomes of those that are not whole.

    A group is whole when `group_size` members are complete: the first that completed. It is closed
    once a member is delivered; what completes after that is late. An environment without a group
    is whole by itself. Holds ids and group ids, never rows. `changes` goes up when groups change.
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
        self.changes = 0
        self._group_of: dict[int, str] = {}
        self._taken: set[int] = set()
        self._whole: dict[Unit, str] = {}
        self._since: float | None = None

    def close(self, group: str) -> tuple[int, ...]:
        """Note that a member of a group is delivered. Returns the members that are late by that."""
        if not group or group in self.closed:
            return ()
        self.closed.add(group)
        late = tuple(self.open[group].complete) if group in self.open else ()
        self.drop(late)
        self.open.pop(group, None)
        return late

    def reopen(self) -> None:
        """Forget which groups are closed and who is lost: both are learnt anew."""
        self.closed.clear()
        for group in list(self.open.values()):
            group.lost.clear()
            self._drop_empty(group)

    def lose(self, environment: int, group: str, now: float) -> None:
        """Note that an environment has a note: it will not complete."""
        self.changes += 1
        self._forget(environment)
        if group and group not in self.closed:
            self._group(group, now).lost.add(environment)

    def offer(self, candidates: Iterable[Candidate], now: float) -> tuple[int, ...]:
        """Take in complete environments. Returns those that are late: their group is closed."""
        late = []
        for candidate in candidates:
            self.changes += 1
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
            # One that is offered again, say because it still waits for its reward, is no progress.
            if candidate.id not in group.seen:
                group.seen.add(candidate.id)
                group.since = now
            if len(group.complete) >= self.group_size and not group.unit:
                self._queue_group(group, now)
        return tuple(late)

    def drop(self, environments: Iterable[int]) -> None:
        """Forget environments that are not complete after all; their groups wait again."""
        for environment in environments:
            self._forget(environment)

    def take(self, units: Sequence[Unit], now: float) -> None:
        """Take out what is being written to a batch; what is left begins to linger anew."""
        for unit in units:
            self._whole.pop(unit, None)
            self._taken.update(unit)
        self._since = now if self._whole else None

    def restore(self, units: Sequence[Unit], now: float) -> None:
        """Put back what was taken, before all others: it could not be written."""
        self._taken.difference_update(*units)
        taken = {unit: self._group_of.get(unit[0], "") for unit in units}
        self._whole = taken | self._whole
        if self._since is None:
            self._since = now

    def published(self, units: Sequence[Unit]) -> tuple[int, ...]:
        """Close the groups of what was taken. Returns the members that are late by that."""
        late: list[int] = []
        self._taken.difference_update(*units)
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

    def give_up(self, now: float) -> tuple[Group, ...]:
        """Decide about the groups that wait for nobody, or have waited long enough.

        What there is of them is queued for delivery, or they are returned to be rejected.
        """
        if self.partial is PartialGroups.WAIT:
            return ()
        due = tuple(group for group in self.waiting() if self._is_due(group, now))
        if self.partial is PartialGroups.REJECT:
            return due
        for group in due:
            self._queue_group(group, now)
        return ()

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
        if self._since is None:
            return ()
        full = len(self._whole) >= self.batch_size
        if not full and now < self._since + self.linger_seconds:
            return ()
        return tuple(islice(self._whole, self.batch_size))

    def waiting(self) -> Iterator[Group]:
        """Yield the groups that have complete members and wait for more."""
        return (group for group in self.open.values() if group.complete and not group.unit)

    def unread(self, before: float) -> tuple[int, ...]:
        """Return complete members of groups that wait since `before`; each once.

        What is offered is said to be complete by its flags alone. Where nobody reads its rows,
        since its group is not whole, nobody would ever find out that there is nothing to deliver.
        """
        found: list[int] = []
        for group in self.waiting():
            if group.since <= before:
                new = group.complete.keys() - group.read
                found += new
                group.read |= new
        return tuple(sorted(found))

    def registered(self, groups: Iterable[str], members: Iterable[Candidate]) -> None:
        """Take in all members of these groups that are registered and not deleted."""
        found: dict[str, set[int]] = {key: set() for key in groups}
        for member in members:
            found[member.group].add(member.id)
        self.changes += len(found)
        for key, ids in found.items():
            if key in self.open:
                self.open[key].members = frozenset(ids)

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
        if environment in self._taken:
            # RACE: it is being written. Deleted meanwhile, it is delivered all the same, or put
            # back and found gone then; its group must not be made up anew from other members.
            return
        key = self._group_of.pop(environment, None)
        if key is None:
            return
        self.changes += 1
        self._whole.pop((environment,), None)
        group = self.open.get(key)
        if group is not None:
            group.complete.pop(environment, None)
            group.read.discard(environment)
            if environment in group.unit:
                self._whole.pop(group.unit, None)
                group.unit = ()
                if len(group.complete) >= self.group_size:
                    self._queue_group(group, group.since)
            self._drop_empty(group)
        if not self._whole:
            self._since = None

    def _drop_empty(self, group: Group) -> None:
        if not group.complete and not group.lost:
            del self.open[group.key]
