"""What moves between two snapshots of a run directory: events, and flow per second. Pure."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final, NamedTuple

from spoold.layout import Place, State
from spoold.spool.overview import Overview

__all__ = ["Event", "Flow", "Rate"]

WINDOW_SECONDS: Final = 10.0


class Event(NamedTuple):
    """A batch that came, moved or went. `was` and `now` are paths of places, "" for nowhere."""

    at: float
    batch_id: str
    was: str
    now: str


class Rate(NamedTuple):
    """Batches a second that came into a directory, and that left it."""

    into: float
    out: float


class Flow:
    """Compares each snapshot with the one before it.

    What moved twice between two snapshots counts as one move to where it lies now.
    """

    def __init__(self) -> None:
        self._where: dict[str, Place] | None = None
        self._came: Counter[State] = Counter()
        self._left: Counter[State] = Counter()
        self._history: deque[tuple[float, Counter[State], Counter[State]]] = deque()

    def update(self, view: Overview, *, at: float, now: float) -> list[Event]:
        """Take in a snapshot, `at` wall time and `now` monotonic. Returns what moved."""
        where = {file.id: file.place for file in view.files if file.place.counts}
        events = [] if self._where is None else self._compare(self._where, where, at)
        self._where = where
        self._history.append((now, self._came.copy(), self._left.copy()))
        while len(self._history) > 2 and self._history[1][0] <= now - WINDOW_SECONDS:
            self._history.popleft()
        return events

    def _compare(self, before: dict[str, Place], where: dict[str, Place], at: float) -> list[Event]:
        events = []
        for batch_id, place in where.items():
            was = before.get(batch_id)
            if was != place:
                events.append(Event(at, batch_id, was.path if was else "", place.path))
                self._count(was, place)
        for batch_id, was in before.items():
            if batch_id not in where:
                events.append(Event(at, batch_id, was.path, ""))
                self._count(was, None)
        return sorted(events, key=lambda event: event.batch_id)

    def _count(self, was: Place | None, place: Place | None) -> None:
        if was is not None and place is not None and was.state is place.state:
            return
        if was is not None:
            self._left[was.state] += 1
        if place is not None:
            self._came[place.state] += 1

    def rate(self, state: State) -> Rate:
        """Return the flow through a directory over the last ten seconds or so."""
        if len(self._history) < 2:
            return Rate(0.0, 0.0)
        began, came, left = self._history[0]
        seconds = self._history[-1][0] - began
        if seconds <= 0:
            return Rate(0.0, 0.0)
        return Rate(
            (self._came[state] - came[state]) / seconds, (self._left[state] - left[state]) / seconds
        )
