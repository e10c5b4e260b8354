"""The spool's side of the gateway: which batch is answered, and what an ack does.

Everything here blocks on the disk, and is called from one thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from typing import Final

from spoold import fs
from spoold.consumer import Batch, Consumer
from spoold.errors import BatchLost, SpooldError, SpoolWriteError, UnknownBatch
from spoold.gateway.answers import (
    Envelope,
    Summary,
    from_file,
    from_memory,
    join,
    pieces,
    summarize,
)
from spoold.layout import Place, State, is_batch_id
from spoold.model import AckWhen
from spoold.spool import moves, statusfile

__all__ = ["Answer", "Desk", "Held", "Nothing"]

log = logging.getLogger("spoold.gateway")

# A longer batch is not kept in memory, only what is said of it.
KEPT_BYTES: Final = 8 << 20
UNREADABLE: Final = "unreadable"
_PENDING: Final = Place(State.PENDING)


class Held:
    """The batch that is answered until it is acked.

    `answered`: how often it was sent whole since the client started.
    """

    __slots__ = ("answered", "batch", "summary")

    def __init__(self, batch: Batch, summary: Summary) -> None:
        self.batch = batch
        self.summary = summary
        self.answered = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """A batch that was read before it is claimed. `lines`: joined; None where they are not kept.

    Whichever file of this id is claimed, it holds these bytes: the digest is in the id.
    """

    batch_id: str
    summary: Summary
    lines: memoryview | None


class Answer:
    """A batch to be sent: whoever gets this closes it. `words` are for the client's log.

    Its lines are in memory, or read from the disk as they are sent.
    """

    __slots__ = ("_source", "held", "words")

    def __init__(self, held: Held, source: memoryview | BufferedReader, words: str) -> None:
        self.held = held
        self.words = words
        self._source: memoryview | BufferedReader | None = source

    @property
    def is_in_memory(self) -> bool:
        """Whether lines are kept in memory for it."""
        return isinstance(self._source, memoryview)

    def pieces(self, around: Envelope) -> Iterator[bytes]:
        """Yield it, a piece at a time."""
        source = self._source
        assert source is not None
        lines = from_memory(source) if isinstance(source, memoryview) else from_file(around, source)
        return pieces(around, lines)

    def close(self) -> None:
        """Let go of the lines."""
        source, self._source = self._source, None
        if isinstance(source, BufferedReader):
            source.close()


@dataclass(frozen=True, slots=True)
class Nothing:
    """No batch. `reason` is "" where none came in time."""

    reason: str = ""


class Desk:
    """One consumer of the spool, one batch at a time."""

    def __init__(self, consumer: Consumer, *, ack: AckWhen = AckWhen.EXPLICIT) -> None:
        self._consumer = consumer
        self._ack = ack
        self._held: Held | None = None
        self._ready: Ready | None = None
        # Of the batch that is next, then of the answer that is sent: one client may take minutes
        # to read it, the others are sent what lies on the disk meanwhile.
        self._buffer = bytearray()
        self._from_memory: Answer | None = None
        self._group_size: int | None = None
        self._problem = ""
        self._sizes_said: set[tuple[int, ...]] = set()

    @property
    def sentence(self) -> str:
        """What the gateway does, in one line."""
        held = self._held
        if self._problem:
            return self._problem
        if held is None:
            return "holds no batch"
        return f"holds {held.batch.id}, not acked (answers: {held.answered})"

    # --- get ----------------------------------------------------------------------------------

    def hand_out(self, wait_seconds: float) -> Answer | Nothing:
        """Return the batch that is held, else claim the next; wait that long for one to come.

        What is wrong with the spool is a reason for nothing, and no error.
        """
        try:
            answer = self._hand_out(wait_seconds)
        except SpooldError as error:
            if str(error) != self._problem:
                log.warning("no batch", extra={"fields": {"error": str(error)}})
            self._problem = str(error)
            return Nothing(str(error))
        self._problem = ""
        return answer

    def _hand_out(self, wait_seconds: float) -> Answer | Nothing:
        if self._ack is AckWhen.ON_NEXT_GET and self._held is not None and self._held.answered:
            self._ack_unasked(self._held)
        while True:
            lines: memoryview | None = None
            if self._held is None:
                claimed = self._claim(wait_seconds)
                if claimed is None:
                    return Nothing()
                self._held, lines = claimed
            held = self._held
            try:
                source = lines if lines is not None else held.batch.file()
            except BatchLost as error:
                self._held = None
                log.warning("batch lost", extra={"fields": {"error": str(error)}})
                continue
            answer = Answer(held, source, self._words(held))
            if answer.is_in_memory:
                self._from_memory = answer
            return answer

    def _claim(self, wait_seconds: float) -> tuple[Held, memoryview | None] | None:
        """Claim the next batch, read ahead or now. One that cannot be sent is set aside."""
        if self._ready is None:
            self._make_ready()
        ready, self._ready = self._ready, None
        while (batch := self._consumer.claim(wait_seconds)) is not None:
            lines: memoryview | None = None
            if ready is not None and ready.batch_id == batch.id:
                summary, lines = ready.summary, ready.lines
            else:
                try:
                    with batch.file() as file:
                        summary = summarize(batch.id, file)
                except BatchLost:
                    continue  # RACE: somebody moved it away by hand
                except ValueError as error:
                    self._set_aside(batch, error)
                    continue
            held = Held(batch, summary)
            facts = {"batch": batch.id, "samples": summary.samples, "attempt": batch.attempt}
            log.info("claimed", extra={"fields": facts})
            self._say_sizes(held)
            return held, lines
        return None

    def _set_aside(self, batch: Batch, error: ValueError) -> None:
        """Reject, for a person to see: the digest fits, so whoever wrote the file wrote this."""
        batch.reject(UNREADABLE)
        fields = {"batch": batch.id, "problem": str(error), "now_in": "rejected/unreadable"}
        log.warning("batch cannot be sent", extra={"fields": fields})

    def read_ahead(self) -> None:
        """Read the batch that will be next, while the client has none to ask for. Claims nothing.

        What is wrong with it is dealt with when it is claimed.
        """
        if self._held is not None and self._ready is None:
            self._make_ready()

    def _make_ready(self) -> None:
        with contextlib.suppress(SpooldError, ValueError):
            found = self._consumer.read_ahead(self._room)
            if found is not None:
                batch_id, lines = found
                summary = summarize(batch_id, join(lines))
                is_kept = lines.obj is self._buffer
                self._ready = Ready(batch_id, summary, lines if is_kept else None)

    def _room(self, size_bytes: int) -> bytearray:
        before = self._from_memory
        if size_bytes > KEPT_BYTES or (before is not None and before.is_in_memory):
            return bytearray(size_bytes)
        if size_bytes > len(self._buffer):
            self._buffer = bytearray(size_bytes)
        return self._buffer

    def _words(self, held: Held) -> str:
        words = [f"{held.summary.samples} samples of batch {held.batch.id}"]
        if held.answered:
            words.append("answered before, and not acked")
            if held.answered == 1:
                fields = {"batch": held.batch.id, "remedy": _ASKED_AGAIN}
                log.warning("asked again before the ack", extra={"fields": fields})
        sizes = self._sizes_differ(held)
        return "; ".join([*words, sizes] if sizes else words)

    def reason(self) -> str:
        """Return why no batch comes."""
        return self._consumer.reason()

    # --- ack ----------------------------------------------------------------------------------

    def ack(self, batch_id: str, step: int | None = None) -> str:
        """Ack a batch, durably, and return what was done. Safe to call again, at any time.

        Raises UnknownBatch where no batch has this id, BatchLost where it lies in somebody else's
        hands, SpoolWriteError where the disk refuses: then the same call may succeed later.
        """
        if not is_batch_id(batch_id):
            raise UnknownBatch(f"{batch_id[:100]!r} is no batch id", hint=_WHICH_ID)
        for batch in self._consumer.held:
            if batch.id == batch_id:
                try:
                    batch.ack(step)
                except BatchLost:
                    break  # moved away by hand, or by an ack whose sync failed
                finally:
                    self._held = self._held if batch in self._consumer.held else None
                return self._acked(batch_id, step)
        return self._ack_from_elsewhere(batch_id, step)

    def _ack_from_elsewhere(self, batch_id: str, step: int | None) -> str:
        run, name = self._consumer.run, self._consumer.name
        for _ in range(3):  # RACE: it may be moved between a look and the next
            try:
                found = moves.locate(run, batch_id)
            except UnknownBatch:
                break
            except FileNotFoundError as error:
                raise fs.failed("look into", run.root, error) from error
            if found.place.state is State.ACKED:
                return f"{batch_id} was acked before: it lies in {found.place.path}/"
            if found.place == _PENDING:
                claimed = moves.claim(run, found.name, name)
                if claimed is None:
                    continue
                found = claimed
            if found.place != Place(State.INFLIGHT, name):
                raise BatchLost(
                    f"cannot ack {batch_id}: it lies in {found.place.path}/ now",
                    hint="another consumer or a person has it",
                )
            if moves.ack(run, found, step) is not None:
                return self._acked(batch_id, step)
        return self._past(batch_id)

    def _past(self, batch_id: str) -> str:
        """Return what became of a batch that is in none of the four directories."""
        run = self._consumer.run
        try:
            fs.read(f"{run.ledger}/{batch_id}")
        except FileNotFoundError:
            path = moves.find_retired(run, batch_id)
            if path is None:
                raise UnknownBatch(f"no batch {batch_id}", hint=_WHICH_ID) from None
            log.warning("acked after its source was replaced", extra={"fields": {"path": path}})
            return f"{batch_id} counts as acked: its source was replaced"
        return f"{batch_id} was acked before, and its file removed since"

    def _acked(self, batch_id: str, step: int | None) -> str:
        where = "without a step" if step is None else f"with step {step}"
        fields: dict[str, object] = {"batch": batch_id}
        if step is not None:
            fields["step"] = step
        log.info("acked", extra={"fields": fields})
        return f"acked {batch_id} {where}"

    def _ack_unasked(self, held: Held) -> None:
        try:
            self.ack(held.batch.id)
        except (BatchLost, UnknownBatch) as error:
            log.warning("batch lost", extra={"fields": {"error": str(error)}})
        self._held = None

    # --- the rest -----------------------------------------------------------------------------

    def rewind(self, step: int) -> list[str]:
        """Put back into pending/ what was acked with a greater step; return the batch ids."""
        return self._consumer.rewind(step)

    def start(self, group_size: int | None) -> str:
        """Take note of a client that has just started; return what does not fit it, in words.

        What the one before was answered and did not ack is answered again, whatever `ack` is: it
        may have died with it. `group_size` is what the client trains on.
        """
        if self._held is not None:
            self._held.answered = 0
        self._group_size = group_size
        self._sizes_said.clear()
        if group_size is None:
            return ""
        status, _ = statusfile.read(self._consumer.run)
        told = None if status is None else status.group_size
        if told is not None and max(told, 1) != group_size:
            fields = {"client": group_size, "daemon": told, "remedy": _remedy(group_size)}
            log.warning("group sizes differ", extra={"fields": fields})
            return f"the daemon delivers groups of {told}: {_remedy(group_size)}"
        return "" if self._held is None else self._sizes_differ(self._held)

    def _sizes_differ(self, held: Held) -> str:
        sizes = held.summary.group_sizes
        if self._group_size is None or sizes == (self._group_size,):
            return ""
        return (
            f"groups of {_few(sizes)} samples, not {self._group_size}: {_remedy(self._group_size)}"
        )

    def _say_sizes(self, held: Held) -> None:
        """Warn, once for each mixture of sizes."""
        sizes = held.summary.group_sizes
        if self._sizes_differ(held) and sizes not in self._sizes_said:
            self._sizes_said.add(sizes)
            assert self._group_size is not None
            fields = {
                "batch": held.batch.id,
                "sizes": _few(sizes),
                "client": self._group_size,
                "remedy": _remedy(self._group_size),
            }
            log.warning("group sizes differ", extra={"fields": fields})

    def check(self) -> str:
        """Return what is wrong with the run directory, "" where it can be used."""
        run = self._consumer.run
        try:
            for path in (run.pending, run.inflight, run.acked):
                fs.free_bytes(path)
        except FileNotFoundError:
            return f"{run.root} is not there, or not whole"
        except SpoolWriteError as error:
            return str(error)
        return self._problem

    def release(self) -> None:
        """Give back what is held. Raises the first error, after all were tried."""
        first: SpooldError | None = None
        for batch in self._consumer.held:
            try:
                batch.release()
            except BatchLost as error:
                log.warning("batch lost", extra={"fields": {"error": str(error)}})
            except SpooldError as error:
                first = first or error
            else:
                log.info("released", extra={"fields": {"batch": batch.id}})
        self._held = None
        if first is not None:
            raise first


_WHICH_ID: Final = 'give the "batch_id" of meta_info in the answer that held the batch'
_ASKED_AGAIN: Final = (
    "let the client ack each batch before it asks for the next; a client that acks once a round "
    "needs batches that fill a round (spoold run --batch-size), one that never acks "
    "--ack on-next-get"
)


def _remedy(group_size: int) -> str:
    return f"run the daemon with --group-size {group_size}, or the client will drop groups"


def _few(sizes: tuple[int, ...]) -> str:
    shown = [str(size) for size in sizes[:3]]
    return ", ".join([*shown, "…"] if len(sizes) > 3 else shown)
