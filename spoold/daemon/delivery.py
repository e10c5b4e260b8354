"""From complete environments to a batch in pending/: read, convert, cut, publish."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from pyroaring import BitMap64

from spoold import codec, fs
from spoold.config import Settings
from spoold.errors import SpooldError, SpoolWriteError
from spoold.layout import BatchName, RunDir
from spoold.ledger import Entry
from spoold.metrics import Durations
from spoold.model import Note, Sample, StepRow
from spoold.policy import GroupPlan, Plan, Unit
from spoold.sources import Source
from spoold.spool.inventory import MISSING_ROW, Inventory
from spoold.spool.notes import remove_note, write_note
from spoold.spool.publish import Numbers, publish
from spoold.spool.statusfile import LatestNote, Published

__all__ = ["BAD_ROWS", "Counts", "Delivery"]

log = logging.getLogger("spoold.daemon")

BAD_ROWS: Final = 100
WRITE_AHEAD_BYTES: Final = 8 << 20


@dataclass(slots=True)
class Counts:
    """What this daemon has done since it started."""

    batches: int = 0
    samples: int = 0
    environments: int = 0
    size_bytes: int = 0
    last_published: float | None = None
    latest_note: LatestNote | None = None
    bad_in_a_row: int = 0
    """Rows that nobody could use, with no good one between them."""
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


@dataclass(slots=True)
class Collected:
    """The rows of one batch, converted, and what was found on the way."""

    units: list[Unit] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    size_bytes: int = 0
    notes: list[tuple[Note, str]] = field(default_factory=list)
    incomplete: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Written:
    """A batch that lies in pending/."""

    name: BatchName
    entry: Entry
    size_bytes: int
    seconds: float


class Delivery:
    """Publishes what the plan says is due.

    While one batch is written and synced the next one is read: a helper thread does the system
    calls of at most one batch of up to 8 MiB. Only the thread that calls changes what is known.
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
    ) -> None:
        self.run = run
        self.lock = lock
        self.inventory = inventory
        self.numbers = numbers
        self.plan = plan
        self.settings = settings
        self.counts = Counts()
        # Complete but for their reward, under `null_reward = wait`.
        self.unrewarded = BitMap64()
        self._wall = wall
        # What was read but did not fit into the last batch.
        self._carry: tuple[Unit, list[Sample]] | None = None
        self._helper: ThreadPoolExecutor | None = None
        self._writing: tuple[Future[Written], int, Collected] | None = None

    @property
    def in_flight(self) -> int:
        """How many batches are being written and are not counted as pending yet: 0 or 1."""
        return int(self._writing is not None)

    @property
    def in_flight_bytes(self) -> int:
        """How many bytes these have."""
        return self._writing[2].size_bytes if self._writing is not None else 0

    def missing_rows(self, source: Source) -> BitMap64:
        """Return the finished environments that have no usable row, and no note of it yet."""
        inventory = self.inventory
        return source.missing - inventory.skip - BitMap64(inventory.missing_row_notes)

    def reload(self, settings: Settings) -> None:
        """Go on with other settings; what is ready stays ready."""
        self.settings = settings
        self.plan.batch_size = settings.batch_size
        self.plan.linger_seconds = settings.linger_seconds
        if isinstance(self.plan, GroupPlan):
            self.plan.timeout_seconds = settings.group_timeout_seconds
            self.plan.partial = settings.partial_groups

    def forget(self) -> None:
        """Forget what was read and not published: the source is not the same any more."""
        self._carry = None

    def deliver(self, source: Source, units: Sequence[Unit], now: float) -> None:
        """Publish one batch out of `units`, and note what cannot be delivered.

        The batch may still be being written when this returns, if another one is due: `finish`
        waits for it. When publishing fails everything stays to come. Raises SourceUnavailable, and
        SourceReplaced where it is not certain any more whose rows were read.
        """
        collected = self._collect(source, units)
        self.finish(source.job, now)
        # RACE: a database may be restored in place between the last look and the read.
        if source.changed():
            source.verify(self.inventory.latest(), self.inventory.highest_environment)
        for note, group in collected.notes:
            self.note(note, source.job, now, group=group)
        self.plan.drop(collected.incomplete)
        if not collected.samples:
            return
        # What did not fit into a batch that is full of bytes has lingered long enough.
        is_full = self._carry is not None or collected.size_bytes >= self.settings.batch_bytes
        self.plan.take(collected.units, now - self.settings.linger_seconds if is_full else now)
        seq = self.numbers.next()
        more = collected.size_bytes <= WRITE_AHEAD_BYTES and self.plan.next_batch(now)
        if more:
            if self._helper is None:
                self._helper = ThreadPoolExecutor(1, thread_name_prefix="spoold-write")
            future = self._helper.submit(self._write, seq, collected.samples)
        else:
            future = Future()
            try:
                future.set_result(self._write(seq, collected.samples))
            except SpooldError as error:
                future.set_exception(error)
        collected.samples = []
        self._writing = (future, seq, collected)
        if not more:
            self.finish(source.job, now)

    def finish(self, job: str, now: float) -> None:
        """Wait for the batch that is being written, and take it in.

        Raises what its writing raised; its environments are to come again then.
        """
        if self._writing is None:
            return
        future, seq, collected = self._writing
        try:
            written = future.result()
        except SpooldError as error:
            self.plan.restore(collected.units, now)
            if not (isinstance(error, SpoolWriteError) and error.state_unknown):
                self.numbers.put_back(seq)
            raise
        finally:
            self._writing = None
        self._take_in(written, collected, job, now)

    def close(self) -> None:
        """End the helper thread. A batch that it is writing is whole when this returns."""
        if self._helper is not None:
            self._helper.shutdown()

    def note(self, note: Note, job: str, now: float, *, group: str = "") -> None:
        """Set an environment aside with a note."""
        file_name = write_note(self.run, note, job=job, at=self._wall())
        self.inventory.noted(file_name, note.environment, note.reason)
        if note.reason != MISSING_ROW:
            self.plan.lose(note.environment, group, now)
        self.counts.notes[note.reason] += 1
        self.counts.latest_note = LatestNote(
            environment=note.environment, reason=note.reason, file=file_name
        )
        fields = {"environment": note.environment, "reason": note.reason, "what": note.what}
        log.warning("environment set aside", extra={"fields": fields})

    def _collect(self, source: Source, units: Sequence[Unit]) -> Collected:
        into = Collected()
        carry, self._carry = self._carry, None
        known = {carry[0]: carry[1]} if carry is not None else {}
        if not self.inventory.skip.isdisjoint(BitMap64([one for unit in units for one in unit])):
            units = self._without_delivered(units, into)
        rows = source.read([one for unit in units if unit not in known for one in unit])
        for unit in units:
            if self.counts.bad_in_a_row >= BAD_ROWS:
                break
            samples = known.get(unit) or self._convert(unit, rows, into)
            if samples is None:
                continue
            size = sum([len(sample.line) for sample in samples])
            if into.units and into.size_bytes + size > self.settings.batch_bytes:
                self._carry = (unit, samples)
                break
            into.units.append(unit)
            into.samples += samples
            into.size_bytes += size
            if into.size_bytes >= self.settings.batch_bytes:
                break
        return into

    def _without_delivered(self, units: Sequence[Unit], into: Collected) -> list[Unit]:
        """Leave out what was delivered or set aside by other means since it was offered."""
        skip, left = self.inventory.skip, []
        for unit in units:
            if any(one in skip for one in unit):
                into.incomplete += unit
            else:
                left.append(unit)
        return left

    def _convert(
        self, unit: Unit, rows: Iterator[tuple[int, tuple[StepRow, ...]]], into: Collected
    ) -> list[Sample] | None:
        """Return the samples of a unit; None where it cannot be delivered as a whole."""
        settings = self.settings
        samples: list[Sample] = []
        group = ""
        size_bytes = 0
        whole = True
        for wanted in unit:
            environment, steps = next(rows)
            assert environment == wanted
            if not steps:
                into.incomplete.append(environment)
                whole = False
                continue
            group = group or _group_of(steps[0])
            encoded = codec.encode(
                steps,
                null_reward=settings.null_reward,
                max_sample_bytes=settings.max_sample_bytes,
            )
            self._count(environment, encoded)
            if encoded is None:
                into.incomplete.append(environment)
                whole = False
            elif isinstance(encoded, Note):
                into.notes.append((encoded, group))
                whole = False
            elif whole:
                size_bytes += sum(len(sample.line) for sample in encoded)
                samples += encoded
                if size_bytes > settings.max_sample_bytes:
                    samples.clear()  # of what is too big no more than this is ever held
        if not whole:
            return None
        if size_bytes > settings.max_sample_bytes:
            into.notes += [(note, group) for note in _too_big(unit, group, size_bytes, settings)]
            return None
        return samples

    def _count(self, environment: int, encoded: list[Sample] | Note | None) -> None:
        """Count bad rows in a row, and who waits for a reward."""
        if encoded is None:
            self.unrewarded.add(environment)
            return
        self.unrewarded.discard(environment)
        if not isinstance(encoded, Note):
            self.counts.bad_in_a_row = 0
        elif not encoded.policy:
            self.counts.bad_in_a_row += 1

    def _write(self, seq: int, samples: list[Sample]) -> Written:
        """Make a batch and publish it. Runs in the helper thread: changes nothing that is known."""
        began = time.monotonic()
        name, data = codec.build_batch(seq, samples)
        publish(self.run, self.lock, name, data)
        env_ids = {sample.environment: sample.env_id for sample in samples}
        environments = tuple(sorted(env_ids))
        entry = Entry(environments, env_ids[environments[-1]])
        return Written(name, entry, sum(map(len, data)), time.monotonic() - began)

    def _take_in(self, written: Written, collected: Collected, job: str, now: float) -> None:
        name, entry, counts = written.name, written.entry, self.counts
        self.inventory.published(name, entry, written.size_bytes)
        counts.batches += 1
        counts.samples += name.samples
        counts.environments += len(entry.environments)
        counts.size_bytes += written.size_bytes
        counts.last_published = self._wall()
        counts.latest_weights = name.lo, name.hi
        counts.durations.add(written.seconds)
        fields = {
            "batch": name.id,
            "environments": len(entry.environments),
            "samples": name.samples,
            "bytes": written.size_bytes,
        }
        log.info("published", extra={"fields": fields})
        self.drop_missing_row_notes(entry.environments)
        for environment in self.plan.published(collected.units):
            self.note_late(environment, job, now)

    def note_late(self, environment: int, job: str, now: float) -> None:
        """Set an environment aside that completed after its group was delivered."""
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


def _too_big(unit: Unit, group: str, size_bytes: int, settings: Settings) -> Iterator[Note]:
    """Yield a note for each member of a group that is too big as a whole."""
    bound = f"more than max_sample_bytes = {settings.max_sample_bytes}"
    for environment in unit:
        what = f"its group {group} is {size_bytes} bytes, {bound}"
        yield Note(environment=environment, env_id="", reason="too-big", what=what)


def _group_of(row: StepRow) -> str:
    group = row.group_id
    return group.decode(errors="replace") if isinstance(group, bytes) else ""
