"""Which scans are spared: nothing moved since the last one, nothing was written, nothing is due.

A scan that finds nothing is hundreds of calls, and after two seconds of sleep hardly any of them is
in a cache of the processor: that is most of what an idle daemon costs. What could change its
outcome are the times of a few files and folders, and those are looked at instead. Nothing depends
on it: whenever a report is due, twice a minute, the scan is made all the same.
"""

from __future__ import annotations

import math

from spoold import fs
from spoold.daemon.delivery import Delivery
from spoold.daemon.looking import Looking
from spoold.daemon.requeue import Requeue
from spoold.errors import SourceUnavailable

__all__ = ["Stillness"]


class Stillness:
    """`until`: when something is due by time; in the past while something is under way."""

    def __init__(
        self, delivery: Delivery, looking: Looking, requeue: Requeue, lock: fs.Lock
    ) -> None:
        self.until = -math.inf
        self._delivery = delivery
        self._looking = looking
        self._requeue = requeue
        self._lock = lock

    def note(self, due: float, *, is_busy: bool) -> None:
        """Note after a whole step when it has to be made again; `is_busy`: at each scan."""
        inventory, plan = self._delivery.inventory, self._delivery.plan
        is_busy = is_busy or bool(
            len(plan)
            or self._delivery.in_flight
            or inventory.unsettled
            or inventory.unreadable
            or inventory.undelivered
            or self._requeue.is_watching
            or next(plan.waiting(), None)
        )
        self.until = -math.inf if is_busy else min(due, self._looking.reconcile_at())

    def holds(self, now: float) -> bool:
        """Whether a scan would find what the last one found, as far as files and folders tell.

        Hints tell more: where one came since, or may have been lost, this is not to be asked.
        """
        if now >= self.until or not self._delivery.inventory.shelves.are_still():
            return False
        try:
            return self._looking.is_still() and self._lock.still_held()
        except SourceUnavailable as error:
            self._looking.failed(error, now)
            return False
