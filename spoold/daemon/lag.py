"""How long complete environments wait to be published. Pure: time is an argument."""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["Lag"]

MOST_MARKS: Final = 4096


class Lag:
    """Since when the oldest environment that is complete and unpublished is known.

    What became complete first is published first, so counts are enough: nothing is kept for each
    environment. One that turns out not to be complete after all makes the answer a bit too old.
    """

    def __init__(self) -> None:
        # (how many were known as complete by then, when), oldest first.
        self._marks: deque[tuple[int, float]] = deque()
        self._known = 0

    def update(self, *, published: int, ready: int, now: float) -> float | None:
        """Take in counts of environments. Returns since when the oldest ready one is known."""
        known = published + ready
        if known > self._known:
            if len(self._marks) >= MOST_MARKS:
                self._marks.pop()
            self._marks.append((known, now))
        self._known = known
        while self._marks and (not ready or self._marks[0][0] <= published):
            self._marks.popleft()
        return self._marks[0][1] if self._marks else None
