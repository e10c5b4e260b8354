"""The source as the loop sees it: opened when it is there, looked at when something changed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, TypeAlias

from pyroaring import BitMap64

from spoold.config import Settings
from spoold.daemon.conditions import Conditions
from spoold.errors import SourceUnavailable
from spoold.layout import RunDir
from spoold.metrics import Durations
from spoold.model import Candidate, Look
from spoold.policy import Backoff
from spoold.sources import Source, open_source
from spoold.spool import setup
from spoold.spool.inventory import Inventory

__all__ = ["Looking", "Watch"]

log = logging.getLogger("spoold.daemon")

Watch: TypeAlias = Callable[[int, int], None]
"""Hears how many environments of how many the first look has come to; as many as there are: all."""

ADVICE: Final = ("open-transaction", "missing-index")


class Looking:
    """Opens the source, makes sure it is the right one, and decides when to look how.

    A look when something changed, at every hint and every `scan_seconds`; a reconcile at start,
    every `rescan_seconds`, and when something delivered is to come again, a slice a step.
    """

    def __init__(
        self,
        settings: Settings,
        run: RunDir,
        conditions: Conditions,
        *,
        waiting_groups: Callable[[], Collection[str]],
        wall: Callable[[], float],
    ) -> None:
        self._waiting_groups = waiting_groups
        self._wall = wall
        self.watch: Watch | None = None
        self.settings = settings
        self.run = run
        self.source = self._new_source()
        self.is_open = False
        self._conditions = conditions
        self._backoff = Backoff(first=0.5, longest=15.0)
        self._reconcile: Iterator[Look] | None = None
        self._reconcile_at = 0.0
        self._look_at = 0.0
        self._peek_at = math.inf
        self._peeks: Iterator[float] = iter(())
        self._is_news = False
        # What the source said, and nobody was told yet: that nothing holds of what was found.
        self._starts_over = False
        # Rows of delivered environments that were deleted, as far as was noticed.
        self._gone: BitMap64 | None = None
        # Until it is known which groups are closed nothing else is looked at.
        self._learning_groups = False
        # Whether a reconcile came to its end since the source was opened.
        self.looked_through = False
        self.durations = Durations()
        self.last_look: float | None = None

    def _new_source(self) -> Source:
        settings = self.settings
        tied = setup.read_source(self.run)
        return open_source(
            settings.db,
            job=settings.job,
            ready_when=settings.ready_when,
            samples=settings.samples,
            known_job=tied["job"] if tied is not None else None,
            shard=settings.shard,
        )

    def reload(self, settings: Settings, now: float) -> None:
        """Go on with other settings: pauses that have become shorter are cut short."""
        self.settings = settings
        self._look_at = min(self._look_at, now + settings.scan_seconds)
        self._reconcile_at = min(self._reconcile_at, now + settings.rescan_seconds)

    @property
    def running(self) -> int:
        """How many environments have step rows and are not complete."""
        return self.source.running if self.is_open else 0

    @property
    def has_seen_all(self) -> bool:
        """Whether a whole reconcile has come to its end since the source was opened.

        Before that, and while another one is under way, nobody can say for how long something has
        been absent: the source may have been out of reach for hours.
        """
        return self.is_open and self._reconcile is None

    def hint(self) -> None:
        """Take in a hint that the source changed."""
        self._peek_at = 0.0
        self._peeks = iter(self.source.peek_seconds)

    def due_at(self) -> float:
        """Return when there is something to do; 0 while a reconcile is under way."""
        if not self.is_open:
            return self._backoff.until
        return 0.0 if self._reconcile is not None else min(self._look_at, self._reconcile_at)

    def peek_at(self) -> float:
        """Return when to see whether what was hinted at is visible."""
        return self._peek_at if self.is_open else math.inf

    def reconcile_at(self) -> float:
        """Return when a reconcile is due; 0 while one is under way, or the source is not open."""
        return self._reconcile_at if self.has_seen_all else 0.0

    def is_quiet(self, now: float) -> bool:
        """Whether a peek is due and nothing was committed: then it is made, and no look is due."""
        if now < self.peek_at() or self._reconcile is not None:
            return False
        self._is_news = self.source.committed()
        if not self._is_news:
            self._plan_peek(now)
        return now < self._peek_at

    def open(self, inventory: Inventory, now: float) -> None:
        """Open the source and tie the run directory to it.

        Raises SourceUnavailable, SourceReplaced, and what is wrong for good: SourceSchemaError,
        ConfigError (another job).
        """
        self._starts_over |= self.source.open()
        self.is_open = True
        shard = str(self.settings.shard)
        setup.tie(self.run, job=self.source.job, url=self.source.url, shard=shard)
        gone = self.source.verify(inventory.remembered(), inventory.highest_environment)
        is_news = self._gone is not None and bool(gone - self._gone)
        self._gone = gone
        fields = {
            "url": self.source.url,
            "job": self.source.job,
            "shard": shard,
            "ready_when": self.source.ready_when.value,
        }
        # While it only opens, and cannot be read, that is one outage and one pause that grows.
        level = logging.DEBUG if self._backoff.tries else logging.INFO
        log.log(level, "source open", extra={"fields": fields})
        self._begin(inventory, now, with_groups=True)
        inventory.undelivered = is_news  # what is planned for their groups is to be forgotten first

    def close(self) -> None:
        """Close the source; it is opened again when it is needed."""
        self.is_open = False
        self._reconcile = None
        self._learning_groups = self.looked_through = False
        self.source.close()

    def start_over(self) -> None:
        """Forget all that was found: the source is not the one it was."""
        self.close()
        self._gone = None
        self.source = self._new_source()

    def failed(self, error: SourceUnavailable, now: float) -> None:
        """Note that the source is out of reach, and pause."""
        self.close()
        self._conditions.end("first-look", now=now)
        pause = self._backoff.failed(now)
        self._conditions.begin("source-unavailable", error.message, error.hint, now=now)
        log.debug("source failed", extra={"fields": {"error": str(error), "pause": pause}})

    def went_well(self, now: float) -> None:
        """Note that a step came to its end: where the source is open, all of it could be read."""
        if self.is_open:
            self._backoff.succeeded()
            self._conditions.end("source-unavailable", now=now)

    def looks(self, inventory: Inventory, now: float, *, soon: float) -> Iterator[Look]:
        """Yield what is new: of a look, if one is due until `soon`, and of a slice of a reconcile.

        `went_back` comes alone and first: nothing holds then of what was found before.
        Raises SourceUnavailable, and SourceReplaced when the rows are not those of before.
        """
        if self.is_open and self.source.moved():
            log.warning("source file replaced", extra={"fields": {"url": self.source.url}})
            self.close()
        if not self.is_open:
            if now < self._backoff.until:
                return
            self.open(inventory, now)
            if inventory.undelivered:
                return
        if self._starts_over:
            self._starts_over = False
            yield Look(went_back=True)
        if inventory.undelivered:
            self._verify(inventory.remembered(), inventory)
            self._begin(inventory, now, with_groups=True)
        if (now >= self._peek_at or soon >= self._look_at) and not self._learning_groups:
            yield from self._look(inventory, now)
        if self._reconcile is None and now >= self._reconcile_at:
            self._verify(inventory.remembered(), inventory)
            inventory.merge()
            if not inventory.undelivered:
                self._begin(inventory, now, with_groups=False)
        yield from self._slice(inventory, now)

    def all_looks(self, inventory: Inventory, now: float) -> Iterator[Look]:
        """Yield everything: a whole reconcile, then a look."""
        self.open(inventory, now)
        if self._reconcile is not None:
            for look in self._reconcile:
                self._note_progress(look, now)
                yield look
            self._note_progress(None, now)
            self._reconcile = None
        look = self.source.look(inventory.skip)
        yield look
        if look.more_after is not None:
            yield self.source.look(inventory.skip)

    def _look(self, inventory: Inventory, now: float) -> Iterator[Look]:
        pause = self.settings.scan_seconds
        if self._is_news or self.source.changed():
            self._is_news = False
            began = time.monotonic()
            # RACE: with the look, so that what it has seen is what is verified. Where it is not
            # taken in, a reconcile comes.
            highest = inventory.highest_environment
            look = self.source.look(inventory.skip, inventory.latest(), highest)
            self.durations.add(time.monotonic() - began)
            self._note_deleted(BitMap64(look.deleted), inventory)
            if inventory.undelivered and not look.went_back:
                return
            self._peeks = iter(self.source.peek_seconds)
            self._peek_at = now
            self._pass_on_advice(now)
            if look.more_after is not None:
                pause = min(pause, look.more_after)
            if look.went_back:
                log.warning("source went back", extra={"fields": {"url": self.source.url}})
                self._verify(inventory.remembered(), inventory)
                inventory.undelivered = True
                yield look
                self._begin(inventory, now, with_groups=True)
                return
            yield look
        self.last_look = self._wall()
        self._look_at = now + pause
        if now >= self._peek_at:
            self._plan_peek(now)

    def _plan_peek(self, now: float) -> None:
        """Decide when to see whether what is being written is visible. Its hint may be used up."""
        # RACE: in this order. Whoever has written by the first question is seen by the second.
        if self.source.is_writing():
            self._peek_at = now + next(self._peeks, math.inf)
        else:
            self._peek_at = now if self.source.committed() else math.inf

    def _pass_on_advice(self, now: float) -> None:
        """Say what the source would have a person do, and no more what it no longer says."""
        advice = {one.code: one for one in reversed(self.source.advice())}
        self._conditions.end(*[code for code in ADVICE if code not in advice], now=now)
        for code, one in advice.items():
            self._conditions.begin(code, one.detail, one.remedy, now=now)

    def _slice(self, inventory: Inventory, now: float) -> Iterator[Look]:
        """Yield one slice of the reconcile that is under way, if one is."""
        if self._reconcile is None:
            return
        look = next(self._reconcile, None)
        # RACE: a slice may come long after the one before, when there is room again. What was
        # learnt of groups that were deleted since, and written anew, does not hold for it.
        if not self.source.is_verified():
            self._verify(inventory.latest(), inventory)
        if inventory.undelivered:
            return
        self._note_progress(look, now)
        if look is None:
            self._reconcile = None
        else:
            yield look

    def _note_progress(self, look: Look | None, now: float) -> None:
        """Say how far the first reconcile has come; the others nobody waits for."""
        if look is None:
            self.looked_through = True
            self._conditions.end("first-look", now=now)
            if self.watch is not None:
                self.watch(1, 1)
        elif not self.looked_through and look.highest and look.reached < look.highest:
            if self.watch is not None:
                self.watch(look.reached, look.highest)
            detail = f"{look.reached:,} of {look.highest:,} environments"
            self._conditions.begin("first-look", detail, now=now)

    def _verify(self, remembered: Mapping[int, str], inventory: Inventory) -> None:
        deleted = self.source.verify(remembered, inventory.highest_environment)
        self._note_deleted(deleted, inventory)

    def _note_deleted(self, deleted: BitMap64, inventory: Inventory) -> None:
        known = self._gone or BitMap64()
        if deleted - known:
            # The rows of a job were deleted, and may be written anew: its groups are new ones then.
            self._gone = known | deleted
            inventory.undelivered = True

    def _begin(self, inventory: Inventory, now: float, *, with_groups: bool) -> None:
        inventory.undelivered = False
        # Of a reconcile that is under way, what it has not learnt yet is still to be learnt.
        self._learning_groups |= with_groups and self.settings.group_size > 0
        self._reconcile = self._everything(inventory)
        self._reconcile_at = now + self.settings.rescan_seconds

    def _everything(self, inventory: Inventory) -> Iterator[Look]:
        """Yield a reconcile; before it, which groups are closed; after it, for whom groups wait."""
        if self._learning_groups:
            for members in self.source.groups(inventory.skip.copy()):
                yield Look(members=members)
            self._learning_groups = False
        yield from self.source.reconcile(inventory.skip)
        asked = frozenset(self._waiting_groups())
        if asked:
            registered: list[Candidate] = []
            for part in self.source.members(asked):
                registered += part
                yield Look()
            yield Look(asked=asked, registered=tuple(registered))
