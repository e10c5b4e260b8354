"""What goes into the next batch where every environment is its own unit. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TypeAlias

from pyroaring import BitMap64

from spoold.model import Candidate

__all__ = ["Group", "Plan", "Unit"]

Unit: TypeAlias = tuple[int, ...]
"""Environments that are delivered together or not at all: one, or the members of a group."""


@dataclass(slots=True)
class Group:
    """The members of one group as far as they are known.

    `complete` in order of completion; `lost` have a note; `unit` is what waits to be published.
    `since` is when a member completed that had not completed before (`seen`); `read` are complete
    members whose rows were read while the group waited. `members` are all that are registered and
    not deleted, None while nobody asked.
    """

    key: str
    since: float
    complete: dict[int, None] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    unit: Unit = ()
    members: frozenset[int] | None = None

    @property
    def missing(self) -> tuple[int, ...]:
        """The members that are neither complete nor lost, as far as they are known."""
        return tuple(sorted((self.members or frozenset()) - self.complete.keys() - self.lost))


class Plan:
    """Which complete environments go into the next batch, and when it is due.

    A batch is due when `batch_size` environments are ready, or when the first of them has waited
    `linger_seconds`. Lowest id first. Holds ids only.
    """

    def __init__(self, *, batch_size: int, linger_seconds: float) -> None:
        self.batch_size = batch_size
        self.linger_seconds = linger_seconds
        self.ready = BitMap64()
        self.taken = BitMap64()
        self.changes = 0
        self._since: float | None = None

    def offer(self, candidates: Iterable[Candidate], now: float) -> tuple[int, ...]:
        """Take in complete environments. Returns those that are late: without groups, none."""
        self.ready.update([candidate.id for candidate in candidates])
        # RACE: what is being written is not known to be delivered yet, and may be found again.
        self.ready -= self.taken
        if self.ready and self._since is None:
            self._since = now
        return ()

    def drop(self, environments: Iterable[int]) -> None:
        """Forget environments: set aside, or not complete after all."""
        for environment in environments:
            self.ready.discard(environment)
        if not self.ready:
            self._since = None

    def take(self, units: Sequence[Unit], now: float) -> None:
        """Take out what is being written to a batch; what is left begins to linger anew."""
        taken = BitMap64(chain.from_iterable(units))
        self.taken |= taken
        self.ready -= taken
        self._since = now if self.ready else None

    def restore(self, units: Sequence[Unit], now: float) -> None:
        """Put back what was taken: it could not be written."""
        put_back = BitMap64(chain.from_iterable(units))
        self.taken -= put_back
        self.ready |= put_back
        self._since = now

    def published(self, units: Sequence[Unit]) -> tuple[int, ...]:
        """Forget what was taken. Returns the members that are late by that: there are none."""
        self.taken -= BitMap64(chain.from_iterable(units))
        return ()

    def close(self, group: str) -> tuple[int, ...]:
        """Note that a member of a group is delivered: without groups, nothing."""
        del group
        return ()

    def reopen(self) -> None:
        """Forget what was decided about groups: without groups, nothing."""

    def lose(self, environment: int, group: str, now: float) -> None:
        """Note that an environment has a note: it will not complete."""
        del group, now
        self.drop((environment,))

    def give_up(self, now: float) -> tuple[Group, ...]:
        """Return the groups that are given up now: there are none."""
        del now
        return ()

    def waiting(self) -> Iterator[Group]:
        """Yield the groups that wait for members: there are none."""
        return iter(())

    def unread(self, before: float) -> tuple[int, ...]:
        """Return whom to read while their group waits: without groups, nobody."""
        del before
        return ()

    def registered(self, groups: Iterable[str], members: Iterable[Candidate]) -> None:
        """Take in who belongs to groups: without groups, nothing."""
        del groups, members

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
        return tuple((environment,) for environment in islice(self.ready, self.batch_size))

    def __len__(self) -> int:
        return len(self.ready)
