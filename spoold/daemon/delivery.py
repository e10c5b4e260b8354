"""From complete environments to a batch in pending/: collect, note, publish."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from pyroaring import BitMap64

from spoold import codec, fs
from spoold.config import Settings
from spoold.daemon.collecting import Collected, Collector
from spoold.errors import SourceUnavailable, SpooldError, SpoolWriteError
from spoold.layout import BatchName, RunDir
from spoold.ledger import Entry
from spoold.metrics import Durations
from spoold.model import Note, NullReward
from spoold.policy import GroupPlan, Plan, Unit
from spoold.sources import Source
from spoold.spool.inventory import MISSING_ROW, Inventory
from spoold.spool.notes import remove_note, write_note
from spoold.spool.publish import Numbers, publish
from spoold.spool.statusfile import LatestNote, Published
from spoold.spool.writer import Writer, Written

__all__ = ["Counts", "Delivery"]

log = logging.getLogger("spoold.daemon")

# So many batches one after the other are a backlog that is worth a process.
BACKLOG_BATCHES: Final = 4


@dataclass(slots=True)
class Counts:
    """What this daemon has done since it started."""

    batches: int = 0
    samples: int = 0
    environments: int = 0
    size_bytes: int = 0
    last_published: float | None = None
    latest_note: LatestNote | None = None
    notes: Counter[str] = field(default_factory=Counter)
    durations: Durations = field(default_factory=Durations)
    latest_weights: tuple[int, int] | None = None

    def published(self) -> Published:
        """Return what was published, as status shows it."""
        return Published(
            batches=self.batches,
            samples=self.samples,
            environments=self.environments,
            bytes=self.size_bytes,
            last=self.last_published,
        )


@dataclass(frozen=True, slots=True)
class Writing:
    """A batch on its way to pending/; its lines are in the writer's memory."""

    name: BatchName
    entry: Entry
    collected: Collected
    writer: Writer


class Delivery:
    """Publishes what the plan says is due.

    Where there is a backlog, another process writes a batch of up to 16 MiB while the next one is
    read here.
    """

    def __init__(
        self,
        *,
        run: RunDir,
        lock: fs.Lock,
        inventory: Inventory,
        numbers: Numbers,
        plan: Plan | GroupPlan,
        settings: Settings,
        wall: Callable[[], float],
        source: Callable[[], Source],
    ) -> None:
        self.run = run
        self.lock = lock
        self.inventory = inventory
        self.numbers = numbers
        self.plan = plan
        self.settings = settings
        self.counts = Counts()
        self.collector = Collector(inventory, settings)
        self._wall = wall
        self._source = source
        self._writer: Writer | None = None
        self._writing: Writing | None = None
        self._written: tuple[Writing, Written] | None = None
        self._in_a_row = 0
        # Some row of this backlog cannot be used: each is looked into before it goes anywhere.
        self._is_careful = False

    @property
    def in_flight(self) -> int:
        """How many batches are being written and are not counted as pending yet: 0 or 1."""
        return int(self._writing is not None)

    @property
    def in_flight_bytes(self) -> int:
        """How many bytes these have."""
        return self._writing.collected.size_bytes if self._writing is not None else 0

    def missing_rows(self, source: Source) -> BitMap64:
        """Return the finished environments that have no usable row, and no note of it yet."""
        inventory = self.inventory
        return source.missing - inventory.skip - BitMap64(inventory.missing_row_notes)

    def reload(self, settings: Settings) -> None:
        """Go on with other settings; what is ready stays ready."""
        self.settings = self.collector.settings = settings
        self.plan.batch_size = settings.batch_size
        self.plan.linger_seconds = settings.linger_seconds
        if isinstance(self.plan, GroupPlan):
            self.plan.timeout_seconds = settings.group_timeout_seconds
            self.plan.partial = settings.partial_groups

    def start_over(self, inventory: Inventory, plan: Plan | GroupPlan) -> None:
        """Begin anew, with a source that was replaced."""
        self.inventory, self.plan = inventory, plan
        self.collector = Collector(inventory, self.settings)

    def deliver(self, source: Source, units: Sequence[Unit], now: float) -> None:
        """Publish one batch out of `units`, and note what cannot be delivered.

        The batch may still be being written when this returns, if another one is due: `finish`
        waits for it. When publishing fails everything stays to come. Raises SourceUnavailable, and
        SourceReplaced where it is not certain any more whose rows were read.
        """
        writer = self._ready_writer()
        collected = self._collect(source, units, writer)
        if not self._await(now):
            return  # what nobody can read of it becomes notes first
        # The next batch begins first: no time of the writer goes by with accounts of the last one.
        try:
            self._verify(source, now)
            for note, group in collected.notes:
                self.note(note, source.job, now, group=group)
            self.collector.bad_in_a_row = collected.bad_in_a_row
            self.plan.drop(collected.incomplete)
            if collected.samples:
                self._publish(collected, writer, source.job, now)
        finally:
            self._account(source.job, now)
        if not self.plan.next_batch(now):
            self.rest(source.job, now)

    def _verify(self, source: Source, now: float) -> None:
        """Make sure that what was read is of the source that all before was read of."""
        # RACE: a database may be restored in place between the last look and the read.
        if not source.is_verified():
            self._account(source.job, now)
            source.verify(self.inventory.latest(), self.inventory.highest_environment)

    def _collect(self, source: Source, units: Sequence[Unit], writer: Writer | None) -> Collected:
        """Read a batch. Its messages are looked into here as long as the writer has no time for it.

        The result is the same: what the writer finds unsound is read once more, and becomes notes.
        So is what has notes already: of messages that nobody has looked into they may be wrong.
        """
        is_trusted = writer is not None and not self._is_careful
        collected = self.collector.collect(source, units, trusted=is_trusted)
        self._load(collected, writer)

        def is_enough() -> bool:
            busy = self._writing is not None and not self._writing.writer.has_answered()
            return collected.is_loaded and not busy

        if is_trusted and not (collected.is_clean and collected.check(is_enough)):
            self._is_careful = True
            collected = self.collector.collect(source, units)
            self._load(collected, writer)
        return collected

    def _load(self, collected: Collected, writer: Writer | None) -> None:
        if writer is not None and writer.fits(len(collected.samples), collected.size_bytes):
            writer.load(collected.samples)
            collected.is_loaded = True

    def _publish(self, collected: Collected, writer: Writer | None, job: str, now: float) -> None:
        seq = self.numbers.next()
        self.plan.take(
            collected.units, now - self.settings.linger_seconds if collected.is_full else now
        )
        samples, entry = collected.samples, collected.entry()
        collected.samples = []
        if writer is not None and collected.is_loaded:
            name = codec.name_batch(seq, samples, "")
            writer.begin(name, sound=collected.sound)
            self._writing = Writing(name, entry, collected, writer)
            return
        assert collected.sound == len(samples)
        with self._restoring(seq, collected.units, now):
            began = time.monotonic()
            name, data = codec.build_batch(seq, samples)
            publish(self.run, self.lock, name, data)
            seconds = time.monotonic() - began
        self._take_in(name, entry, collected, seconds, job, now)

    def finish(self, job: str, now: float) -> bool:
        """Wait for the batch that is being written, and take it in.

        False where its messages were not sound: its environments are to come again, and are looked
        into. So they are when its writing raised something; that is raised.
        """
        is_sound = self._await(now)
        self._account(job, now)
        return is_sound

    def _await(self, now: float) -> bool:
        """Wait for the batch that is being written; `finish` without taking it in."""
        writing, self._writing = self._writing, None
        if writing is None:
            return True
        seq, units = writing.name.seq, writing.collected.units
        with self._restoring(seq, units, now):
            written = writing.writer.finish()
        if written is None:
            self._is_careful = True
            self.collector.bad_in_a_row = writing.collected.bad_before
            self.numbers.put_back(seq)
            self.plan.restore(units, now)
            return False
        self._written = writing, written
        return True

    def _account(self, job: str, now: float) -> None:
        """Take in the batch that was written beside, if that was not done yet."""
        if self._written is not None:
            (writing, (name, seconds)), self._written = self._written, None
            self._take_in(name, writing.entry, writing.collected, seconds, job, now)

    def rest(self, job: str, now: float) -> None:
        """Finish what is being written, and end its writer: there is no backlog any more."""
        try:
            self.finish(job, now)
        finally:
            self._end_writer()

    def close(self) -> None:
        """End what runs beside. A batch that is being written is whole when this returns."""
        self._end_writer()

    def _end_writer(self) -> None:
        self._in_a_row = 0
        self._is_careful = False
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    @contextmanager
    def _restoring(self, seq: int, units: Sequence[Unit], now: float) -> Iterator[None]:
        """Put back what was taken for a batch where the batch does not become visible."""
        try:
            yield
        except SpooldError as error:
            self.plan.restore(units, now)
            if not (isinstance(error, SpoolWriteError) and error.state_unknown):
                self.numbers.put_back(seq)
            self._end_writer()
            raise

    def _ready_writer(self) -> Writer | None:
        """Return the process that writes; None where there is no backlog, or no process yet."""
        self._in_a_row += 1
        if self._writer is not None and self._writing is None:
            code = self._writer.exit_code()
            if code is not None:
                self._writer.close()
                self._writer = None
                _go_on_alone(f"it ended (exit code {code})")
        if self._writer is None and self._in_a_row == BACKLOG_BATCHES:
            try:
                self._writer = Writer(self.run, self.lock)
            except OSError as error:
                _go_on_alone(str(error))
        return self._writer if self._writer is not None and self._writer.is_ready() else None

    def note(self, note: Note, job: str, now: float, *, group: str = "") -> None:
        """Set an environment aside with a note.

        Raises SourceUnavailable where it cannot be said whom the note is about.
        """
        if not note.env_id:
            env_ids = self._source().env_ids((note.environment,))
            note = replace(note, env_id=env_ids.get(note.environment, ""))
        name = write_note(self.run, note, job=job, at=self._wall())
        self.inventory.noted(name, note.env_id)
        if note.reason != MISSING_ROW:
            self.plan.lose(note.environment, group, now)
        self.counts.notes[note.reason] += 1
        self.counts.latest_note = LatestNote(
            environment=note.environment, reason=note.reason, file=name.file_name
        )
        fields = {"environment": note.environment, "reason": note.reason, "what": note.what}
        log.warning("environment set aside", extra={"fields": fields})

    def _take_in(
        self,
        name: BatchName,
        entry: Entry,
        collected: Collected,
        seconds: float,
        job: str,
        now: float,
    ) -> None:
        counts = self.counts
        self.inventory.published(name, entry, collected.size_bytes)
        counts.batches += 1
        counts.samples += name.samples
        counts.environments += len(entry.environments)
        counts.size_bytes += collected.size_bytes
        counts.last_published = self._wall()
        counts.latest_weights = name.lo, name.hi
        counts.durations.add(seconds)
        fields = {
            "batch": name.id,
            "environments": len(entry.environments),
            "samples": name.samples,
            "bytes": collected.size_bytes,
        }
        log.info("published", extra={"fields": fields})
        self.drop_missing_row_notes(entry.environments)
        try:
            for environment in self.plan.published(collected.units):
                self.note_late(environment, job, now)
        except SourceUnavailable as error:
            # They are late at the next reconcile, too.
            log.debug("late members not noted", extra={"fields": {"error": str(error)}})

    def is_complete(self, environment: int) -> bool:
        """Whether what was offered can be read: it passes the gate, and has its row and reward."""
        ((_, rows),) = self._source().read((environment,))
        if not rows:
            return False
        if rows[-1].reward is None and self.settings.null_reward is NullReward.WAIT:
            self.collector.unrewarded.add(environment)
            return False
        return True

    def note_late(self, environment: int, job: str, now: float) -> None:
        """Set an environment aside that completed after its group was delivered, if it did."""
        if not self.is_complete(environment):
            return
        what = "completed after its group was delivered"
        note = Note(environment=environment, env_id="", reason="late", what=what, policy=True)
        self.note(note, job, now)

    def drop_missing_row_notes(self, environments: Iterable[int]) -> None:
        """Remove the missing-row notes of environments that are delivered."""
        notes = self.inventory.missing_row_notes
        for environment in environments:
            file_name = notes.get(environment)
            if file_name is not None:
                remove_note(self.run, file_name)
                self.inventory.unnoted(file_name, environment)
                fields = {"environment": environment, "note": file_name}
                log.info("missing row turned up", extra={"fields": fields})


def _go_on_alone(why: str) -> None:
    log.warning("no process to write batches, going on alone", extra={"fields": {"error": why}})
