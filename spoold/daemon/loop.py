"""The loop: look → plan → publish → settle → wait.

One thread. `Daemon.step` does what is due and returns when something will be due again; between
two steps the process waits for a hint, a signal or that time. Every decision is made in
`spoold.policy`, every move in `spoold.spool`.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Set
from typing import Final

from pyroaring import BitMap64

from spoold import fs
from spoold.config import Settings
from spoold.daemon.collecting import BAD_ROWS
from spoold.daemon.conditions import Conditions, words_of
from spoold.daemon.delivery import Delivery
from spoold.daemon.giving_up import give_up_groups, give_up_missing_rows
from spoold.daemon.looking import Looking
from spoold.daemon.notices import ClockWatch, LateRows, TurnedAway, note_spool
from spoold.daemon.outage import Outage
from spoold.daemon.report import Report
from spoold.daemon.requeue import Requeue
from spoold.daemon.retention import Retention
from spoold.daemon.stillness import Stillness
from spoold.daemon.waiting import unknown_groups
from spoold.errors import (
    SourceReplaced,
    SourceUnavailable,
    SpoolHeld,
    SpoolLocked,
    SpoolWriteError,
)
from spoold.layout import RunDir
from spoold.model import Look, OnReplaced
from spoold.policy import GroupPlan, Overdue, Plan, pressure
from spoold.spool import setup
from spoold.spool.inventory import Inventory
from spoold.spool.notes import newest_note
from spoold.spool.publish import Numbers
from spoold.spool.retire import finish_retirement, retire
from spoold.spool.statusfile import LatestNote

__all__ = ["Daemon"]

log = logging.getLogger("spoold.daemon")

UNSETTLED_SECONDS: Final = 0.06
TOGETHER: Final = 0.25  # of a scan
HOLD_CODES: Final = (
    *("unreadable", "batches-move", "bad-rows", "backpressure"),
    *("disk-space", "read-only", "write-failed"),
)


class Daemon:
    """One run directory, one job, one source. Owns the lock from `start` to `stop`."""

    def __init__(
        self, settings: Settings, *, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.wall = wall
        self.conditions = Conditions(wall)
        self._refresh_at = 0.0
        self._due_at = 0.0
        self._moved: set[str] | None = None
        self._outage = Outage(self.conditions)
        self._overdue = Overdue(seconds=settings.missing_row_seconds)
        self._late_rows = LateRows()
        self.report = Report(settings, self.conditions, wall)
        self._is_unknown = False
        self._clock_watch = ClockWatch(wall=wall(), now=clock())
        self._turned_away = TurnedAway()
        self._end_state = "stopped"
        self._is_stopping: Callable[[], bool] = lambda: False

    # --- from start to stop ----------------------------------------------------------------------

    def start(self, lock: fs.Lock, run: RunDir) -> None:
        """Read the run directory: from here on its state is known."""
        settings = self.settings
        self.run = run
        self.lock = lock
        self.looking = Looking(
            settings,
            run,
            self.conditions,
            waiting_groups=lambda: unknown_groups(self.plan),
            wall=self.wall,
        )
        retired = finish_retirement(run)
        if retired is not None:
            log.warning("retirement finished", extra={"fields": {"folder": retired}})
        setup.clean_tmp(run)
        setup.probe(run)
        setup.check_shard(run, str(settings.shard))
        self.inventory = Inventory(run, relist_seconds=settings.rescan_seconds)
        self.inventory.load(now=self.clock())
        self._refresh_at = self.clock() + settings.scan_seconds
        newest = newest_note(run, self.inventory.shelves.notes())
        self._requeue = Requeue(run, settings)
        self._retention = Retention(run, keep_steps=settings.keep_steps)
        self.numbers = Numbers(run)
        self.numbers.load(self.inventory.highest_seq)
        self.delivery = Delivery(
            run=run,
            lock=lock,
            inventory=self.inventory,
            numbers=self.numbers,
            plan=self._new_plan(),
            settings=settings,
            wall=self.wall,
            source=lambda: self.looking.source,
        )
        self._still = Stillness(
            self.delivery,
            self.looking,
            self._requeue,
            self.conditions,
            self._clock_watch,
            self._turned_away,
            self.wall,
        )
        if newest is not None:
            self.delivery.counts.latest_note = LatestNote(
                environment=newest.environment, reason=newest.reason, file=newest.file_name
            )
        fields = {
            "run_dir": run.root,
            "delivered": self.inventory.delivered,
            "pending": self.inventory.pending_batches,
            "notes": self.inventory.note_count,
        }
        log.info("started", extra={"fields": fields})

    def stop(self) -> None:
        """Give back what is reserved and say so. Nothing is half done between two steps.

        Where the lock is lost, nothing is touched: it may be another daemon's by now. Nor where a
        sync failed: another one on the same directory would prove nothing.
        """
        try:
            self.delivery.finish(self.looking.source.job, self.clock())
            self.looking.close()
            if self.lock.still_held() and not self._is_unknown:
                self.numbers.give_back()
                self.report.write(self._end_state, self.looking, self.delivery, self.clock())
        except (SpoolWriteError, SpoolLocked) as error:
            log.warning("stopping", extra={"fields": {"failed": str(error)}})
        finally:
            self.delivery.close()
        counts = self.delivery.counts
        fields = {"batches": counts.batches, "environments": counts.environments}
        log.info("stopped", extra={"fields": fields})

    def failed(self, error: Exception) -> None:
        """Take in what ends the daemon: `stop` leaves it in the last report, for status."""
        self._end_state = "failed"
        self.conditions.begin(*words_of(error), now=self.clock())

    def hear(self, problem: tuple[str, str] | None) -> None:
        """Take in why there are no hints (what, remedy), or that there are."""
        self.conditions.tell("hints-off", problem, now=self.clock())

    def _new_plan(self) -> Plan | GroupPlan:
        settings = self.settings
        if not settings.group_size:
            return Plan(batch_size=settings.batch_size, linger_seconds=settings.linger_seconds)
        return GroupPlan(
            group_size=settings.group_size,
            batch_size=settings.batch_size,
            linger_seconds=settings.linger_seconds,
            timeout_seconds=settings.group_timeout_seconds,
            partial=settings.partial_groups,
        )

    def reload(self, settings: Settings) -> None:
        """Go on with settings that `config.reloaded` gave, from the next step."""
        self.settings = settings
        self.looking.reload(settings, self.clock())
        self.delivery.reload(settings)
        self.report.reload(settings)
        self._requeue.reload(settings)
        self._retention.keep_steps = settings.keep_steps
        self._overdue.seconds = settings.missing_row_seconds
        self.inventory.shelves.relist_seconds = settings.rescan_seconds
        self._refresh_at = self._due_at = 0.0
        self._moved = None

    @property
    def plan(self) -> Plan | GroupPlan:
        """What is complete and not published yet."""
        return self.delivery.plan

    # --- one step --------------------------------------------------------------------------------

    def hint(self, *, source: bool, spool: bool, moved: Set[str] | None = None) -> None:
        """Take in a hint: what it is about is looked at in the next step.

        `moved`: the paths in the run directory where something came or went since the last hint,
        all of them; None where that is not known.
        """
        if source:
            self.looking.hint()
        if spool:
            self._refresh_at = self._due_at = 0.0
        self._moved = None if moved is None or self._moved is None else self._moved | moved

    def step(self) -> float:
        """Do what is due. Returns the seconds after which something is due again, 0 for now."""
        now = self.clock()
        if now < self._due_at and (self._is_held() or self.looking.is_quiet(now)):
            return self._pause(now)
        if self._moved == set() and self._still.holds(now):
            self._due_at = min(now + self.settings.scan_seconds, self._still.until)
            return self._due_at - now
        self._clock_watch.look(self.conditions, wall=self.wall(), now=now)
        try:
            self._step(now)
            if now >= self._outage.until and self._can_write():
                self._outage.over(now)
        except SpoolWriteError as error:
            self._write_failed(error, now)
        state = "held" if self._is_held() else "delivering" if len(self.plan) else "waiting"
        self.report.tell(state, self.looking, self.delivery, now)
        if (read_only := self.report.new_read_only()) is not None:
            # Nothing could be delivered: a daemon that has nothing to deliver says so, too.
            self._write_failed(read_only, now)
        now = self.clock()
        self._due_at = self._next_due(now)
        is_busy = self._is_held() or now < self._outage.until or len(self._overdue) > 0
        self._still.note(self.report.due_at(), is_busy=is_busy)
        return self._pause(now)

    def _pause(self, now: float) -> float:
        peek_at = self._due_at if self._is_held() else self.looking.peek_at()
        return max(0.0, min(self._due_at, peek_at) - now)

    def _step(self, now: float) -> None:
        soon = now
        if now >= min(self._refresh_at, self.looking.due_at()):
            soon += TOGETHER * self.settings.scan_seconds  # done along: one wake-up a scan
        if soon >= self._refresh_at or self._is_unsettled():
            self._refresh(now)
        if self.inventory.undelivered:
            self.plan.reopen()
        if now < self._outage.until:
            return
        if not self._may_read(now):
            self.delivery.rest(self.looking.source.job, now)
            self.delivery.collector.forget()  # it may be long until it is wanted again
            return
        try:
            for look in self.looking.looks(self.inventory, now, soon=soon):
                self._take(look, now)
            self._give_up(now)
            self._deliver(now)
        except SourceUnavailable as error:
            self.looking.failed(error, now)
            self.delivery.collector.forget()
        except SourceReplaced as error:
            self._retire(error, now)
        self.looking.went_well(now)

    def _can_write(self) -> bool:
        """Whether what failed has worked since, or there is nothing left to write."""
        if self.delivery.in_flight or self.report.is_read_only:
            return False
        return not len(self.plan) or self._outage.has_worked(self.delivery.counts.batches)

    def _write_failed(self, error: SpoolWriteError, now: float) -> None:
        if error.state_unknown:
            self._is_unknown = True
            raise error
        self._outage.failed(error, batches=self.delivery.counts.batches, now=now)

    def _next_due(self, now: float) -> float:
        """Return when something other than a peek is due."""
        dues: list[float | None] = [self._refresh_at, self.report.due_at()]
        if self._is_unsettled():
            dues.append(now + UNSETTLED_SECONDS)
        if now < self._outage.until:
            dues.append(self._outage.until)
        elif self.delivery.in_flight:
            dues.append(now)
        elif not self._is_held() and self.inventory.is_whole:
            dues.append(self.looking.due_at())
            if self.looking.is_open:
                dues += [self.plan.due_at(), self._overdue.due_at()]
                dues += [now] if self.inventory.undelivered else []
        return min([due for due in dues if due is not None])

    def _is_unsettled(self) -> bool:
        # What cannot be read is tried again at every scan, not at once.
        return self.inventory.unsettled and not self.inventory.unreadable

    def _is_held(self) -> bool:
        return self.conditions.holds(HOLD_CODES)

    # --- the run directory -----------------------------------------------------------------------

    def _refresh(self, now: float) -> None:
        self._refresh_at = now + self.settings.scan_seconds
        if not self.lock.still_held():
            raise setup.lock_lost(self.lock.path)
        self.delivery.finish(self.looking.source.job, now)
        self.inventory.refresh(now=now, moved=self._moved)
        self._moved = set()
        if self._requeue.tend(self.inventory, now):
            self.inventory.refresh(now=now)
        failed = self._requeue.failed
        problem = None if failed is None else (failed.message, failed.hint)
        self.conditions.tell("requeue-failed", problem, now=now)
        # Of a daemon that was killed between its publish and the removal of the note.
        notes = self.inventory.missing_row_notes
        self.delivery.drop_missing_row_notes([one for one in notes if one in self.inventory.skip])
        self._retention.tend(self.inventory)
        self._turned_away.look(self.conditions, self.run, now)
        note_spool(self.conditions, self.inventory, self._requeue.gone, now)

    def _may_read(self, now: float) -> bool:
        """Whether anything may be published; the conditions say why not."""
        inventory, settings = self.inventory, self.settings
        if inventory.unreadable:
            error = inventory.unreadable[0]
            self.conditions.begin("unreadable", error.message, error.hint, now=now)
            return False
        self.conditions.end("unreadable", now=now)
        if not inventory.is_whole:
            self.conditions.begin("batches-move", now=now)
            return False
        self.conditions.end("batches-move", now=now)
        if self.delivery.collector.bad_in_a_row >= BAD_ROWS:
            text = f"{BAD_ROWS} bad environments, no good one between them"
            self.conditions.begin("bad-rows", text, now=now)
            return False
        over = pressure(
            batches=inventory.pending_batches + self.delivery.in_flight,
            max_batches=settings.max_pending_batches,
            size_bytes=inventory.pending_bytes + self.delivery.in_flight_bytes,
            max_bytes=settings.max_pending_bytes,
            free_bytes=fs.free_bytes(self.run.root) if settings.min_free_bytes else 0,
            min_free_bytes=settings.min_free_bytes,
        )
        if over is None:
            self.conditions.end("backpressure", now=now)
            if not self._outage.holds("disk-space"):
                self.conditions.end("disk-space", now=now)
            return True
        if over.code == "min_free_bytes":
            text = f"{over.value} bytes are free on {self.run.root}, fewer than {over.mark}"
            self.conditions.begin("disk-space", text, now=now)
            self._outage.hand_over("disk-space")
        else:
            text = f"{over.value} in pending/ reach {over.code} = {over.mark}"
            self.conditions.begin("backpressure", text, now=now)
        return False

    # --- looking ---------------------------------------------------------------------------------

    def _retire(self, error: SourceReplaced, now: float) -> None:
        """Begin anew with a source that was replaced, or end the daemon, as the setting says."""
        if self.settings.on_replaced is OnReplaced.REFUSE:
            raise error
        # What is still being written is of the old source, and goes with it.
        self.delivery.finish(self.looking.source.job, now)
        folder = retire(self.run, self.looking.source.job, at=self.wall())
        fields = {"what": error.message, "retired_to": folder}
        log.warning("source replaced", extra={"fields": fields})
        self.looking.start_over()
        self.inventory = Inventory(self.run, relist_seconds=self.settings.rescan_seconds)
        self.inventory.load(now=now)
        self._forget_found()
        self._refresh_at = now

    def _forget_found(self) -> None:
        """Forget all that is known by its id and was not published: ids mean others now."""
        self.delivery.start_over(self.inventory, self._new_plan())
        self._late_rows = LateRows()
        self._overdue = Overdue(seconds=self.settings.missing_row_seconds)

    def _take(self, look: Look, now: float) -> None:
        if look.went_back:
            try:
                # It was read, and verified, before.
                self.delivery.finish(self.looking.source.job, now)
            finally:
                self._forget_found()
        for member in look.members:
            if member.id in self.inventory.set_aside:
                self.plan.lose(member.id, member.group, now)
            else:
                for environment in self.plan.close(member.group):
                    self.delivery.note_late(environment, self.looking.source.job, now)
        self.plan.drop(look.gone)
        self.delivery.collector.unrewarded.difference_update(BitMap64(look.gone))
        self._overdue.drop(look.gone)
        for environment in self.plan.offer(look.candidates, now):
            self.delivery.note_late(environment, self.looking.source.job, now)
        noted = self.inventory.missing_row_notes
        self._overdue.seen((one for one in look.missing if one not in noted), now)
        self.plan.registered(look.asked, look.registered)
        self._late_rows.tell(look.late, self.inventory.set_aside)

    def _give_up(self, now: float) -> None:
        """Decide about what waited long enough.

        Not before all of the source was seen: what comes late must not be mistaken for what was
        only out of sight, say while the source could not be read.
        """
        if self.looking.has_seen_all:
            give_up_missing_rows(self.delivery, self.looking.source, self._overdue, now)
            give_up_groups(self.delivery, self.looking.source, now)

    # --- delivering ------------------------------------------------------------------------------

    def _deliver(self, now: float) -> None:
        """Publish one batch, if one is due."""
        units = self.plan.next_batch(now) if self.looking.is_open else ()
        if not units:
            self.delivery.finish(self.looking.source.job, now)
            return
        self.delivery.deliver(self.looking.source, units, now)
        self._overdue.keep_out(self.inventory.skip)

    # --- once ------------------------------------------------------------------------------------

    def once(self, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """Publish all that is deliverable now, or until `is_stopping`; raises what stopped it.

        One reconcile and one look, without lingering; settles the ledger.
        """
        self._is_stopping = is_stopping
        now = self.clock()
        self._refresh(now)
        self._moved = None  # nobody gives hints
        try:
            self._publish_all(now)
        except SourceUnavailable as error:
            raise SourceUnavailable(
                error.message, hint="run it again when it is there; is the path right?"
            ) from error
        except SpoolWriteError as error:
            self._is_unknown = error.state_unknown
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and not error.state_unknown:
                raise SpoolHeld(error.message, hint=error.hint) from error
            raise
        finally:
            if not self._is_unknown:
                self._refresh(self.clock())
        if not is_stopping():
            self._say_what_waits()

    def _publish_all(self, now: float) -> None:
        try:
            self._take_all(now)
        except SourceReplaced as error:
            self._retire(error, now)
            self._take_all(now)

    def _take_all(self, now: float) -> None:
        while not (self.inventory.is_whole or self.inventory.unreadable or self._is_stopping()):
            time.sleep(UNSETTLED_SECONDS)
            self._refresh(self.clock())
        for look in self.looking.all_looks(self.inventory, now):
            self._take(look, now)
            self._drain(now)
            if self._is_stopping():
                return
        self._give_up(now)
        self._drain(now, lingered=self.settings.linger_seconds)

    def _drain(self, now: float, *, lingered: float = 0.0) -> None:
        """Publish every batch that is due now, or would be after so many seconds."""
        while not self._is_stopping() and (units := self.plan.next_batch(now + lingered)):
            if not self._may_read(now):
                reason = next(r for r in self.conditions.reasons() if r.code in HOLD_CODES)
                raise SpoolHeld(reason.text, hint=reason.remedy)
            self.delivery.deliver(self.looking.source, units, now)
        self.delivery.finish(self.looking.source.job, now)

    def _say_what_waits(self) -> None:
        fields = {
            "running": self.looking.running,
            "missing_rows": len(self.delivery.missing_rows(self.looking.source)),
            "without_reward": len(self.delivery.collector.unrewarded),
            "groups": sum(1 for _ in self.plan.waiting()),
            "notes": self.inventory.note_count,
            "delivered": self.inventory.delivered,
        }
        log.info("done", extra={"fields": fields})
