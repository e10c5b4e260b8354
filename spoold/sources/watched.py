"""Which environments a source keeps an eye on between two looks. Ids only; no I/O.

active   have step rows, do not pass the gate yet, got rows within the last ten minutes or so
resting  the same, but quiet for longer: left to the reconcile
offered  were returned as candidates: not returned again until something about them changes
tried    of these, the ones that had no usable row when they were read
missing  finished, without a usable row, and reported as such
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pyroaring import BitMap64

from spoold.model import Candidate, Look

__all__ = ["Found", "Row", "Watched", "group_of"]

_QUIET_SECONDS: Final = 600.0
_MANY: Final = 256


Row: TypeAlias = tuple[int, object, object, object]
"""An environment that is finished or has step rows: id, group id, whether each of these is so."""


@dataclass(slots=True, kw_only=True)
class Found:
    """What a reconcile found in a range of ids: every environment that is not in `skip`.

    `unusable` are tried ones that still have no usable row; `missing` those of them, and those
    without any row, that are finished.
    """

    candidates: BitMap64 = field(default_factory=BitMap64)
    running: BitMap64 = field(default_factory=BitMap64)
    unusable: BitMap64 = field(default_factory=BitMap64)
    missing: BitMap64 = field(default_factory=BitMap64)
    finished: BitMap64 = field(default_factory=BitMap64)
    groups: dict[int, object] = field(default_factory=dict)

    @classmethod
    def among(cls, rows: Sequence[Row], ended: BitMap64 | None) -> Found:
        """Sort rows; those `ended` pass the gate if they have rows, None: those that finished."""
        finished = BitMap64([row[0] for row in rows if row[2]])
        with_rows = BitMap64([row[0] for row in rows if row[3]])
        candidates = with_rows & (finished if ended is None else ended)
        return cls(
            candidates=candidates,
            running=with_rows - candidates,
            missing=finished - candidates,
            finished=finished,
            groups={row[0]: row[1] for row in rows},
        )

    def cannot_use(self, ids: BitMap64) -> None:
        """Note of candidates that they still have no usable row."""
        self.candidates -= ids
        self.unusable |= ids
        self.missing |= ids & self.finished

    def look(self, *, gone: tuple[int, ...]) -> Look:
        """Return what it says to the daemon."""
        return Look(
            candidates=tuple(Candidate(one, group_of(self.groups[one])) for one in self.candidates),
            missing=tuple(self.missing),
            gone=gone,
        )


def group_of(group: object) -> str:
    """Return a group id as it was read, "" where there is none."""
    return group.decode("utf-8", "replace") if isinstance(group, bytes) else ""


class Watched:
    """The sets, and how they change. An id is in one of active, resting and offered at most."""

    def __init__(self, now: float) -> None:
        self.offered = BitMap64()
        self.tried = BitMap64()
        self.missing = BitMap64()
        self.resting = BitMap64()
        # Active in two halves: what got no rows for a whole turn of the clock goes to rest.
        self._recent = BitMap64()
        self._older = BitMap64()
        self._turned = now
        self._untold = BitMap64()
        # Of the active ones, those with the newest rows: likely to be finished next. None if many.
        self.lately = BitMap64()
        # Rows that were read before a look came to them: they are no news when it does.
        self.ahead: dict[int, int] = {}

    def caught_up(self, highest_step: int) -> None:
        """Note up to which row a look has come."""
        self.ahead = {one: pk for one, pk in self.ahead.items() if pk > highest_step}

    def active(self, skip: BitMap64) -> BitMap64:
        """Return the environments that each look checks."""
        return (self._recent | self._older) - skip

    @property
    def running(self) -> int:
        """How many have step rows and are neither delivered nor candidates nor missing a row."""
        return len((self._recent | self._older | self.resting | self.tried) - self.missing)

    @property
    def has_untold(self) -> bool:
        """Whether a missing row was found that no look has reported."""
        return bool(self._untold)

    @property
    def highest(self) -> int:
        """The highest id that is known here, 0 for none."""
        sets = (self._recent, self._older, self.resting, self.offered, self.missing)
        return max((one.max() for one in sets if one), default=0)

    def got_rows(self, ids: Iterable[int], now: float) -> None:
        """Note that there are new step rows of these."""
        if now - self._turned >= _QUIET_SECONDS:
            self.resting |= self._older
            self._older, self._recent = self._recent, BitMap64()
            self._turned = now
        new = BitMap64(ids)
        if new:
            _remove(new, self._older, self.resting, self.offered, self.tried)
            self._recent |= new
            self.lately = self.lately | new if len(self.lately) < _MANY else new
            if len(new) > _MANY:
                self.lately = BitMap64()

    def offer(self, ids: Iterable[int]) -> None:
        """Note that these are returned as candidates."""
        new = BitMap64(ids)
        if new:
            _remove(new, self._recent, self._older, self.resting, self.lately)
            _remove(new, self.tried, self.missing, self._untold)
            self.offered |= new

    def was_unusable(self, environment: int, is_missing: bool) -> None:
        """Note that no usable row was there; `is_missing`: though it is there, and finished."""
        if environment in self.offered:
            self.tried.add(environment)
        if not is_missing:
            _remove(BitMap64([environment]), self.missing, self._untold)
        elif environment not in self.missing:
            self.missing.add(environment)
            self._untold.add(environment)

    def tell(self) -> tuple[int, ...]:
        """Return the missing ones that no look has reported; they count as reported now."""
        told = tuple(self._untold)
        self._untold.clear()
        return told

    def reconciled(self, first: int, end: int, found: Found, skip: BitMap64) -> tuple[int, ...]:
        """Take in all that is true of the ids from `first` up to `end`, exclusive.

        Returns those that were candidates or missing before and are neither now, in order.
        """
        here = BitMap64(range(first, end))
        before = (self.offered | self.missing) & here
        _remove(here, self.offered, self.tried, self.missing, self._untold)
        _remove(here - found.running, self._recent, self._older, self.resting, self.lately)
        # What got rows since was found by a look; the rest is new to us, not active again.
        self._recent |= found.running - self._older - self.resting
        self.offered |= found.candidates | found.unusable
        self.tried |= found.unusable
        self.missing |= found.missing
        return tuple(before - self.offered - self.missing - skip)


def _remove(ids: BitMap64, *others: BitMap64) -> None:
    for other in others:
        other.difference_update(ids)
