"""Which scans are spared: nothing moved since the last one, nothing was written, nothing is due.

A scan that finds nothing is hundreds of calls, and after two seconds of sleep hardly any of them is
in a cache of the processor: that is most of what an idle daemon costs. What could change its
outcome shows in the times of a few files and folders, and those are looked at instead. What shows
nowhere (whether a consumer lives, whether a disk that was full has room) is a reason not to spare
it. Nothing depends on it: when a report is due, twice a minute, the scan is made all the same.
"""

from __future__ import annotations

import math

from spoold import fs
from spoold.daemon.conditions import Conditions
from spoold.daemon.delivery import Delivery
from spoold.daemon.looking import Looking
from spoold.daemon.requeue import Requeue
from spoold.errors import SourceUnavailable, SpoolWriteError

__all__ = ["Stillness"]


class Stillness:
    """`until`: when something is due by time; in the past while something is under way."""

    def __init__(
        self,
        delivery: Delivery,
        looking: Looking,
        requeue: Requeue,
        conditions: Conditions,
        lock: fs.Lock,
    ) -> None:
        self.until = -math.inf
        self._conditions = conditions
        self._changes = -1
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
            or inventory.undelivered
            or self._requeue.is_watching
            or next(plan.waiting(), None)
        )
        due = min(due, self._looking.reconcile_at(), inventory.shelves.relist_at())
        self.until = -math.inf if is_busy else due
        self._changes = self._conditions.changes

    def holds(self, now: float) -> bool:
        """Whether a scan would find what the last one found, as far as files and folders tell.

        Hints tell more: where one of the run directory came since, or may have been lost, this is
        not to be asked.
        """
        if now >= self.until or self._looking.peek_at() < math.inf:
            return False
        if self._conditions.changes != self._changes:
            return False
        try:
            return (
                self._has_room()
                and self._delivery.inventory.shelves.are_still()
                and self._lock.still_held()
                and self._looking.is_still()
            )
        except SpoolWriteError:
            return False  # the scan says why
        except SourceUnavailable as error:
            self._looking.failed(error, now)
            self._delivery.collector.forget()
            return False

    def _has_room(self) -> bool:
        least = self._delivery.settings.min_free_bytes
        return not least or fs.free_bytes(self._delivery.run.root) >= least
