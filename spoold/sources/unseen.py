"""Which ids of a table have not been seen and may still turn up, where commits come in any order.

A sequence hands out ids in order, but a row shows only when its transaction commits: a low id may
turn up long after a high one, and the id of one that was rolled back never does. So every id below
the highest seen one that was not there is a gap, and is looked for again until nobody is left who
could fill it:

    born      the look that saw a higher id and not this one
    marked    GRACE_SECONDS later: xmax of that look's snapshot; whoever drew an id of the gap has
              begun to write by now, so its transaction is below this mark
    settled   xmin of a later look's snapshot has come up to the mark: all transactions below it
              have ended, and what they left is visible to that look. The gap is dropped.

Transaction ids are the 64 bit ones of pg_snapshot: they don't wrap around. Only xmin and xmax are
used, which a standby knows as well (its pg_snapshot lists no running transactions).

Not promised: who keeps an id for longer than GRACE_SECONDS before its transaction writes anything
(a sequence with CACHE above 1, a block of ids drawn in advance) may fill a gap that was dropped. A
reconcile finds that environment. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

__all__ = ["GRACE_SECONDS", "HIGHEST_ID", "Gap", "Snapshot", "Unseen"]

GRACE_SECONDS: Final = 10.0
HIGHEST_ID: Final = 2**63 - 1
_MAX_GAPS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is visible to a look: all below `xmin` has ended, nothing from `xmax` on has.

    `at`: the server's clock, in seconds; on a standby that of the last commit it replayed.
    """

    xmin: int
    xmax: int
    at: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Ids from `low` to `high` that were not there at `born`. `mark`: None until it is marked."""

    low: int
    high: int
    born: float
    mark: int | None = None


@dataclass(frozen=True, slots=True)
class Unseen:
    """All above `top`, and the gaps below it, in order. A value: each step returns another one."""

    top: int
    gaps: tuple[Gap, ...] = ()

    def __contains__(self, one: int) -> bool:
        """Whether an id was not seen yet, and is not given up."""
        at = bisect_right(self.gaps, one, key=lambda gap: gap.low) - 1
        return one > self.top or (at >= 0 and one <= self.gaps[at].high)

    def ranges(self) -> list[tuple[int, int]]:
        """Return what is to be looked at, (first, last) each, in order."""
        return [*((gap.low, gap.high) for gap in self.gaps), (self.top + 1, HIGHEST_ID)]

    def saw(self, ids: Sequence[int], at: float) -> Unseen:
        """Take in rows that are there, by id, in order: all there is up to the last of them."""
        if not ids:
            return self
        gaps: list[Gap] = []
        done = 0
        for gap in self.gaps:
            first = bisect_left(ids, gap.low, done)
            done = bisect_right(ids, gap.high, first)
            if first == done:
                gaps.append(gap)
            else:
                holes = _holes(gap.low, gap.high, ids[first:done])
                gaps += [replace(gap, low=low, high=high) for low, high in holes]
        new = ids[bisect_right(ids, self.top, done) :]
        if not new:
            return Unseen(self.top, tuple(gaps))
        gaps += [Gap(low, high, at) for low, high in _holes(self.top + 1, new[-1], new)]
        return Unseen(new[-1], tuple(_fewer(gaps)))

    def marked(self, snapshot: Snapshot) -> Unseen:
        """Mark the gaps that are old enough, at the beginning of a look."""
        if not self.gaps:
            return self
        ripe = snapshot.at - GRACE_SECONDS
        gaps = (
            replace(gap, mark=snapshot.xmax) if gap.mark is None and gap.born <= ripe else gap
            for gap in self.gaps
        )
        return Unseen(self.top, tuple(gaps))

    def settled(self, snapshot: Snapshot) -> Unseen:
        """Drop the gaps that nobody can fill any more, when a look that began so has read them."""
        if not self.gaps:
            return self
        gaps = (gap for gap in self.gaps if gap.mark is None or gap.mark > snapshot.xmin)
        return Unseen(self.top, tuple(gaps))


def _holes(low: int, high: int, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield what of `low` … `high` is not in `ids`, which are within, in order."""
    if len(ids) == high - low + 1:
        return
    for one in ids:
        if one > low:
            yield low, one - 1
        low = one + 1
    if low <= high:
        yield low, high


def _fewer(gaps: list[Gap]) -> list[Gap]:
    """Join neighbours where there are too many: rows between them are seen again, none is lost."""
    reach = 1
    while len(gaps) > _MAX_GAPS:
        joined = gaps[:1]
        for gap in gaps[1:]:
            last = joined[-1]
            if gap.low - last.high <= reach:
                marks = (last.mark, gap.mark)
                mark = None if None in marks else max(m for m in marks if m is not None)
                joined[-1] = Gap(last.low, gap.high, max(last.born, gap.born), mark)
            else:
                joined.append(gap)
        gaps, reach = joined, reach * 2
    return gaps
