"""What the daemon says of itself, for status and for its service manager."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from typing import Final

from spoold import __version__
from spoold.config import Settings
from spoold.daemon.conditions import Conditions
from spoold.daemon.delivery import Delivery
from spoold.daemon.lag import Lag
from spoold.daemon.looking import Looking
from spoold.daemon.measuring import measure
from spoold.daemon.waiting import Waiting, note_waiting, waiting_groups
from spoold.errors import SpoolWriteError
from spoold.metrics import Textfile
from spoold.reasons import REASONS, Urgency, urgency
from spoold.spool import statusfile

__all__ = ["Report"]

log = logging.getLogger("spoold.daemon")

STATUS_SECONDS: Final = 2.0
HEARTBEAT_SECONDS: Final = 30.0


class Report:
    """Writes status.json when something in it changed, at most every two seconds.

    When nothing changes it is written twice a minute, so that silence means something. `sentence`
    says the same in one line, for the service manager: the first reason of status in full, then the
    sentences of the others. Metrics, where they are on, are written every few seconds, and with the
    report when something begins or ends that a person should know. `is_read_only`: the last report
    met a read-only file system.
    """

    def __init__(
        self, settings: Settings, conditions: Conditions, wall: Callable[[], float]
    ) -> None:
        self.sentence = "starting"
        self.is_read_only = False
        self._read_only: SpoolWriteError | None = None
        self._gauged: frozenset[str] = frozenset()
        self._conditions = conditions
        self._wall = wall
        self._started = wall()
        self._host = os.uname().nodename
        self._told: tuple[object, ...] = ()
        self._is_old = False
        self._write_at = 0.0
        self._heartbeat_at = 0.0
        self._lag = Lag()
        self._metrics = _textfile(settings)
        if self._metrics is not None:
            self._metrics.check()

    def reload(self, settings: Settings) -> None:
        """Go on with other settings."""
        self._metrics = _textfile(settings)

    def due_at(self) -> float:
        """Return when something is to be written."""
        due = self._write_at if self._is_old else self._heartbeat_at
        return due if self._metrics is None else min(due, self._metrics.due_at)

    def tell(self, state: str, looking: Looking, delivery: Delivery, now: float) -> None:
        """Write a report if one is due."""
        counts, inventory, plan = delivery.counts, delivery.inventory, delivery.plan
        facts = (
            state,
            counts.batches,
            counts.latest_note,
            inventory.pending_batches,
            inventory.delivered,
            inventory.note_count,
            len(plan),
            looking.running,
            plan.changes,
            len(looking.source.missing),
            len(delivery.collector.unrewarded),
            looking.looked_through,
            self._conditions.changes,
        )
        self._is_old = self._is_old or facts != self._told or now >= self._heartbeat_at
        self._told = facts
        if self._is_old and now >= self._write_at:
            self.write(state, looking, delivery, now)
        elif self._is_metrics_due(now):
            self._measure(self._status(state, looking, delivery, now), looking, delivery, now)

    def write(self, state: str, looking: Looking, delivery: Delivery, now: float) -> None:
        """Write a report. One that cannot be written is left out: the next one tells more.

        While the file system is read-only that is tried again each time.
        """
        self._is_old = False
        self._write_at = now + STATUS_SECONDS
        self._heartbeat_at = now + HEARTBEAT_SECONDS
        status = self._status(state, looking, delivery, now)
        self.sentence = _sentence(status)
        try:
            statusfile.write(delivery.run, status)
        except (SpoolWriteError, OSError) as error:
            if isinstance(error, SpoolWriteError) and error.errno == errno.EROFS:
                self._read_only = error
                self.is_read_only = self._is_old = True
            log.debug("status not written", extra={"fields": {"error": str(error)}})
        else:
            self.is_read_only = False
        urgent = frozenset(r.code for r in status.reasons if urgency(r.code) < Urgency.WAIT)
        is_news = state in ("stopped", "failed") or urgent != self._gauged
        self._gauged = urgent
        if is_news or self._is_metrics_due(now):
            self._measure(status, looking, delivery, now)

    def new_read_only(self) -> SpoolWriteError | None:
        """Return the error where a report met a read-only file system since the last call."""
        error, self._read_only = self._read_only, None
        return error

    def _is_metrics_due(self, now: float) -> bool:
        return self._metrics is not None and now >= self._metrics.due_at

    def _measure(
        self, status: statusfile.Status, looking: Looking, delivery: Delivery, now: float
    ) -> None:
        if self._metrics is None:
            return
        error = self._metrics.write(measure(status, looking, delivery), now)
        problem = None if error is None else (error.message, error.hint)
        self._conditions.tell("metrics-unwritten", problem, now=now)

    def _status(
        self, state: str, looking: Looking, delivery: Delivery, now: float
    ) -> statusfile.Status:
        source, inventory, plan = looking.source, delivery.inventory, delivery.plan
        settings = delivery.settings
        delivery.collector.unrewarded.difference_update(inventory.skip)
        waiting = Waiting(
            is_open=looking.is_open and looking.looked_through,
            running=looking.running,
            ready=len(plan),
            missing_rows=len(delivery.missing_rows(source)),
            unrewarded=len(delivery.collector.unrewarded),
            groups=sum(1 for _ in plan.waiting()),
            first_group=next(plan.waiting(), None),
            group_size=settings.group_size,
        )
        note_waiting(self._conditions, waiting, now)
        published = delivery.counts.environments
        oldest = self._lag.update(published=published, ready=len(plan), now=now)
        wall = self._wall()
        return statusfile.Status(
            version=__version__,
            pid=os.getpid(),
            host=self._host,
            started=self._started,
            updated=wall,
            job=source.job or settings.job or "",
            shard=str(settings.shard),
            url=source.url,
            ready_when=source.ready_when.value,
            group_size=settings.group_size,
            state=state,
            reasons=self._conditions.reasons(),
            source=statusfile.SourceState(
                running=waiting.running,
                ready=waiting.ready,
                missing_rows=waiting.missing_rows,
                without_reward=waiting.unrewarded,
                groups=waiting_groups(plan, settings.group_size, now, wall),
                oldest_ready=None if oldest is None else wall - (now - oldest),
            ),
            published=delivery.counts.published(),
            delivered=inventory.delivered,
            rejected=statusfile.Rejected(
                notes=inventory.note_count, latest=delivery.counts.latest_note
            ),
        )


def _textfile(settings: Settings) -> Textfile | None:
    folder = settings.metrics_dir
    return None if folder is None else Textfile(folder, settings.run_dir)


def _sentence(status: statusfile.Status) -> str:
    if not status.reasons:
        return f"{status.state}; {status.delivered} environments delivered"
    first, *others = status.reasons
    if not others:
        return first.words
    return f"{first.words}; also: {'; '.join(REASONS[each.code].sentence for each in others)}"
