"""Which scans are spared: nothing moved since the last one, nothing was written, nothing is due.

A scan that finds nothing is hundreds of calls, and after two seconds of sleep hardly any of them is
in a cache of the processor: that is most of what an idle daemon costs. What could change its
outcome shows in the times of a few files and folders; they are asked for instead, one after the
other, in as few lines as can be. What shows nowhere (whether a consumer lives, whether a disk that
was full has room) is a reason not to spare it. Nothing depends on it: when a report is due, twice a
minute, the scan is made all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from spoold import fs
from spoold.daemon.conditions import Conditions
from spoold.daemon.delivery import Delivery
from spoold.daemon.looking import Looking
from spoold.daemon.notices import ClockWatch, TurnedAway
from spoold.daemon.requeue import Requeue
from spoold.errors import SpooldError
from spoold.model import Mark

__all__ = ["Stillness"]


class Stillness:
    """What the last whole step left behind.

    `until`: when something is due by time; in the past while something is under way.
    """

    def __init__(
        self,
        delivery: Delivery,
        looking: Looking,
        requeue: Requeue,
        conditions: Conditions,
        clock_watch: ClockWatch,
        turned_away: TurnedAway,
        wall: Callable[[], float],
    ) -> None:
        self._delivery = delivery
        self._looking = looking
        self._requeue = requeue
        self._conditions = conditions
        self._clock_watch = clock_watch
        self._turned_away = turned_away
        self._wall = wall
        self.until = -math.inf
        self._changes = -1
        self._marks: tuple[Mark, ...] = ()

    def note(self, due: float, *, is_busy: bool) -> None:
        """Note after a whole step when it has to be made again; `is_busy`: at each scan."""
        inventory, plan = self._delivery.inventory, self._delivery.plan
        is_busy = is_busy or bool(
            len(plan)
            or self._delivery.in_flight
            or inventory.unsettled
            or inventory.undelivered
            or self._requeue.is_watching
            or next(plan.waiting(), None)
        )
        due = min(due, self._looking.reconcile_at(), inventory.shelves.relist_at())
        self.until = -math.inf if is_busy else due
        self._changes = self._conditions.changes
        self._marks = ()

    def holds(self, now: float) -> bool:
        """Whether a scan would find what the last one found, as far as files and folders tell.

        That counts as a look. Hints tell more: where one of the run directory came since, or may
        have been lost, this is not to be asked.
        """
        if now >= self.until or self._looking.peek_at() < math.inf:
            return False
        wall = self._wall()
        if self._conditions.changes != self._changes or self._clock_watch.has_jumped(wall, now):
            return False
        try:
            self._marks = self._marks or self._all_marks()
            for ask, of, answer in self._marks:
                if ask(of) != answer:
                    return False
        except (SpooldError, OSError):
            return False  # the scan says why
        self._looking.last_look = wall
        return True

    def _all_marks(self) -> tuple[Mark, ...]:
        delivery = self._delivery
        marks = (
            *delivery.inventory.shelves.marks(),
            (fs.Lock.still_held, delivery.lock, True),
            *self._looking.source.marks(),
            self._turned_away.mark(delivery.run),
        )
        if not delivery.settings.min_free_bytes:
            return marks
        return *marks, (Stillness._has_room, self, True)

    def _has_room(self) -> bool:
        delivery = self._delivery
        return fs.free_bytes(delivery.run.root) >= delivery.settings.min_free_bytes
