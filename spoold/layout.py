"""Names and places of the files in a run directory, and which moves are legal. Pure.

    <run>/
      pending/                 000000042-n64-w7.7-5f3c9a1b2c3d.jsonl    to be claimed
      inflight/
        <consumer>/            claimed; .lock in it is held while the consumer lives
        …                      claimed by hand: owned by nobody
      acked/
        step-000000120/        acknowledged with a trainer step
        stale/                 passed over as too old
        …                      acknowledged without a step
      rejected/
        env-<id>.<reason>.json a note: an environment that cannot become a sample, and why
        <reason>/              refused batches; duplicate/ and corrupt/ count for nothing
      retired/<time>-<job>/    the whole spool of a source that was replaced
      .spoold/                 lock  tmp/  ledger/  seq-000000042  source.json  status.json

A batch is one file, `{seq:09d}-n{samples}-w{lo}.{hi}-{digest}[.try{k:02d}].jsonl`: seq is never
used twice; lo and hi are the least and greatest weight version in it; digest is the first 12 hex
digits of the SHA-256 of its bytes. The batch id is all before `.try` and `.jsonl` and never
changes. Where a batch lies is the checkpoint:

    an environment is delivered iff its id is in a batch under pending/, inflight/, acked/ or
    rejected/ (duplicate/ and corrupt/ aside), or in the ledger; it is set aside iff it has a note;
    all others are still to come.

`MOVES` names every legal move of a batch; `spoold.spool.moves` makes them.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

__all__ = [
    "CORRUPT",
    "DIRECTORY_MODE",
    "DUPLICATE",
    "FILE_MODE",
    "LOCK_MODE",
    "LOCK_NAME",
    "MAX_ATTEMPTS_FOLDER",
    "MOVES",
    "STALE",
    "TOPS",
    "WHOLE",
    "BatchName",
    "Move",
    "NoteName",
    "Place",
    "RunDir",
    "State",
    "batch_id_of",
    "is_batch_id",
    "is_name",
    "parse_seq",
    "parse_step_folder",
    "plain_name",
    "precedence",
    "seq_name",
    "step_folder",
]

DIRECTORY_MODE: Final = 0o2770
FILE_MODE: Final = 0o640
LOCK_MODE: Final = 0o660

LOCK_NAME: Final = ".lock"
STALE: Final = "stale"
DUPLICATE: Final = "duplicate"
CORRUPT: Final = "corrupt"
MAX_ATTEMPTS_FOLDER: Final = "attempts"

WHOLE: Final = "0/1"
"""The shard of a run directory whose source.json names none: all there is."""

_BATCH = re.compile(
    r"(?P<id>(?P<seq>[0-9]{9,18})-n(?P<samples>[1-9][0-9]{0,8})"
    r"-w(?P<lo>0|[1-9][0-9]{0,18})\.(?P<hi>0|[1-9][0-9]{0,18})-(?P<digest>[0-9a-f]{12}))"
    r"(?:\.try(?P<attempt>[0-9]{2,6}))?\.jsonl"
)
_SUFFIX: Final = ".jsonl"
_NOTE = re.compile(r"env-(?P<id>[1-9][0-9]{0,18})\.(?P<reason>[a-z0-9]+(?:-[a-z0-9]+)*)\.json")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}")
_STEP = re.compile(r"step-([0-9]{9,18})")
_SEQ = re.compile(r"seq-([0-9]{9,18})")


class State(enum.StrEnum):
    """The four directories that a batch can lie in."""

    PENDING = "pending"
    INFLIGHT = "inflight"
    ACKED = "acked"
    REJECTED = "rejected"

    # As a str, which it equals: Enum's own hash is that of the name, and written in Python.
    __hash__ = str.__hash__


class Move(enum.StrEnum):
    """What moves a batch, by its word."""

    CLAIM = "claim"
    ACK = "ack"
    RELEASE = "release"
    REQUEUE = "requeue"
    REJECT = "reject"
    REWIND = "rewind"
    SKIP_STALE = "skip-stale"


MOVES: Final[dict[Move, tuple[frozenset[State], State]]] = {
    Move.CLAIM: (frozenset({State.PENDING}), State.INFLIGHT),
    Move.ACK: (frozenset({State.INFLIGHT}), State.ACKED),
    Move.RELEASE: (frozenset({State.INFLIGHT}), State.PENDING),
    Move.REQUEUE: (frozenset({State.INFLIGHT}), State.PENDING),
    Move.REJECT: (frozenset(State), State.REJECTED),
    Move.REWIND: (frozenset({State.ACKED}), State.PENDING),
    Move.SKIP_STALE: (frozenset({State.PENDING, State.INFLIGHT}), State.ACKED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchName:
    """A batch file's name, taken apart. `attempt` is 1 where there is no `.try`.

    `id` is the batch id, the same for every attempt; `file_name` the name on disk. Both are made
    once, because they are asked for a dozen times in the life of a batch.
    """

    seq: int
    samples: int
    lo: int
    hi: int
    digest: str
    attempt: int = 1
    id: str = field(init=False, repr=False, compare=False)
    file_name: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        batch_id = f"{self.seq:09d}-n{self.samples}-w{self.lo}.{self.hi}-{self.digest}"
        tried = f".try{self.attempt:02d}" if self.attempt > 1 else ""
        object.__setattr__(self, "id", batch_id)
        object.__setattr__(self, "file_name", f"{batch_id}{tried}{_SUFFIX}")

    def next_attempt(self) -> BatchName:
        """Return the name under which the batch is handed out once more."""
        return replace(self, attempt=self.attempt + 1)

    @classmethod
    def parse(cls, file_name: str) -> BatchName | None:
        """Take a file name apart; None where it is no batch's name, to the letter."""
        found = _BATCH.fullmatch(file_name)
        if found is None:
            return None
        name = cls(
            seq=int(found["seq"]),
            samples=int(found["samples"]),
            lo=int(found["lo"]),
            hi=int(found["hi"]),
            digest=found["digest"],
            attempt=int(found["attempt"] or 1),
        )
        return name if name.file_name == file_name else None


def batch_id_of(file_name: str) -> str | None:
    """Return the batch id in a file name, None where it is no batch's name. Cheaper than parse."""
    found = _BATCH.fullmatch(file_name)
    if found is None:
        return None
    attempt = found["attempt"]
    if attempt is not None and (int(attempt) < 2 or f"{int(attempt):02d}" != attempt):
        return None
    if len(found["seq"]) > 9 and found["seq"][0] == "0":
        return None
    return found["id"]


def plain_name(batch_id: str) -> str:
    """Return the file name of a batch that was handed out once at most."""
    return f"{batch_id}{_SUFFIX}"


def is_batch_id(text: str) -> bool:
    """Whether `text` is a batch id, which is also the name of a ledger entry."""
    return batch_id_of(f"{text}{_SUFFIX}") == text


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteName:
    """The name of a note: an environment's id, and the reason it was set aside."""

    environment: int
    reason: str

    @property
    def file_name(self) -> str:
        """The name on disk, in rejected/."""
        return f"env-{self.environment}.{self.reason}.json"

    @classmethod
    def parse(cls, file_name: str) -> NoteName | None:
        """Take a file name apart; None where it is no note's name."""
        found = _NOTE.fullmatch(file_name)
        return cls(environment=int(found["id"]), reason=found["reason"]) if found else None


class Place(NamedTuple):
    """Where a batch lies: a state, and the folder in it ("" for the state's directory itself).

    The folder is a consumer's name in inflight/, `step-…` or `stale` in acked/, a reason in
    rejected/.
    """

    state: State
    folder: str = ""

    @property
    def path(self) -> str:
        """Relative to the run directory."""
        return f"{self.state}/{self.folder}" if self.folder else str(self.state)

    @property
    def counts(self) -> bool:
        """Whether a batch here makes its environments delivered."""
        return not (self.state is State.REJECTED and self.folder in (DUPLICATE, CORRUPT))

    @property
    def step(self) -> int | None:
        """The trainer step that batches here were acknowledged with."""
        return parse_step_folder(self.folder) if self.state is State.ACKED else None


TOPS: Final = {state: Place(state) for state in State}
"""The place of each state's directory itself, in the order of the states."""


_RANK: Final = {State.ACKED: 3, State.INFLIGHT: 2, State.REJECTED: 1, State.PENDING: 0}


def precedence(place: Place, attempt: int) -> tuple[int, int]:
    """Of two files with one batch id, the one with the greater precedence stays."""
    return _RANK[place.state], attempt


def is_name(text: str) -> bool:
    """Whether `text` may name a consumer or a reject reason."""
    return _NAME.fullmatch(text) is not None


def step_folder(step: int) -> str:
    """Return the folder in acked/ for a trainer step."""
    return f"step-{step:09d}"


def parse_step_folder(folder: str) -> int | None:
    """Return the trainer step of a folder in acked/, None where it is none."""
    found = _STEP.fullmatch(folder)
    if found is None:
        return None
    step = int(found[1])
    return step if step_folder(step) == folder else None


def seq_name(seq: int) -> str:
    """Return the name, in .spoold/, of the file that reserves numbers up to `seq`."""
    return f"seq-{seq:09d}"


def parse_seq(file_name: str) -> int | None:
    """Return the highest reserved number that a file name tells, None where it tells none."""
    found = _SEQ.fullmatch(file_name)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths in a run directory. Nothing here touches the disk."""

    root: str

    def of(self, place: Place) -> str:
        """Return the path of a place."""
        return f"{self.root}/{place.path}"

    def file(self, place: Place, file_name: str) -> str:
        """Return the path of a file in a place."""
        return f"{self.root}/{place.path}/{file_name}"

    @property
    def pending(self) -> str:
        """Batches to be claimed."""
        return f"{self.root}/pending"

    @property
    def inflight(self) -> str:
        """Claimed batches, a folder a consumer."""
        return f"{self.root}/inflight"

    @property
    def acked(self) -> str:
        """Acknowledged batches."""
        return f"{self.root}/acked"

    @property
    def rejected(self) -> str:
        """Notes, and refused batches in folders named after the reason."""
        return f"{self.root}/rejected"

    @property
    def retired(self) -> str:
        """Whole spools of sources that were replaced."""
        return f"{self.root}/retired"

    @property
    def house(self) -> str:
        """The daemon's own corner."""
        return f"{self.root}/.spoold"

    @property
    def lock(self) -> str:
        """Held by the daemon while it lives."""
        return f"{self.root}/.spoold/lock"

    @property
    def tmp(self) -> str:
        """Files being written; whatever lies here when the daemon starts is a leftover."""
        return f"{self.root}/.spoold/tmp"

    @property
    def visit_json(self) -> str:
        """Which daemon was turned away last, because one runs: gone with its next start."""
        return f"{self.tmp}/visit.json"

    @property
    def ledger(self) -> str:
        """A file for each acknowledged batch."""
        return f"{self.root}/.spoold/ledger"

    @property
    def source_json(self) -> str:
        """Which job, shard and database this run directory belongs to."""
        return f"{self.root}/.spoold/source.json"

    @property
    def status_json(self) -> str:
        """What the daemon last said of itself."""
        return f"{self.root}/.spoold/status.json"

    def consumer_lock(self, name: str) -> str:
        """Return the lock file of a consumer."""
        return f"{self.root}/inflight/{name}/{LOCK_NAME}"
