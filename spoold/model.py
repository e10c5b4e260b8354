"""Frozen values that flow from the source to the spool.

Those that exist once a row or once an environment are tuples: a drain makes tens of thousands a
second.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "AckWhen",
    "Advice",
    "Candidate",
    "Look",
    "Mark",
    "Note",
    "NullReward",
    "OnReplaced",
    "PartialGroups",
    "ReadyWhen",
    "Ref",
    "Rows",
    "Sample",
    "Samples",
    "StepRow",
]


class ReadyWhen(enum.StrEnum):
    """When an environment counts as complete, beside having a usable terminal row."""

    AUTO = "auto"
    FINISHED = "finished"
    TERMINAL = "terminal"


class Samples(enum.StrEnum):
    """Which rows of an environment become samples."""

    TERMINAL = "terminal"
    STEPS = "steps"


class NullReward(enum.StrEnum):
    """What becomes of an environment whose reward column is null."""

    FALLBACK = "fallback"
    WAIT = "wait"
    REJECT = "reject"


class PartialGroups(enum.StrEnum):
    """What becomes of a group that made no progress for `group_timeout_seconds`."""

    WAIT = "wait"
    DELIVER = "deliver"
    REJECT = "reject"


class AckWhen(enum.StrEnum):
    """When the gateway acks a batch that it answered: when told to, or at the next get, too."""

    EXPLICIT = "explicit"
    ON_NEXT_GET = "on-next-get"


class OnReplaced(enum.StrEnum):
    """What to do when the source is not the one that this run directory was filled from."""

    RETIRE = "retire"
    REFUSE = "refuse"


class Candidate(NamedTuple):
    """An environment that passes the gate of `ready_when` and may have a usable terminal row.

    `group` is its group id, "" where there is none.
    """

    id: int
    group: str


class Advice(NamedTuple):
    """What a person could do about the database: a code of `spoold.reasons`, of what, how."""

    code: str
    detail: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one pass over the source found. All ids are of environments.

    `candidates`: by id, none of them in `skip`. `late`: environments in `skip` that got new step
    rows. `missing`: finished ones without a usable terminal row. `gone`: offered as candidates
    before, and now deleted or not past the gate any more (only a reconcile tells). `went_back`:
    ids are lower than they were, so the rows are not those of the last look: verify, reconcile.
    `members`: environments in `skip` with their groups, where groups are asked for. `registered`:
    all members of the groups in `asked`, deleted ones aside. `reached`: up to which id of `highest`
    a reconcile has come; 0 where it does not tell. `more_after`: only those were asked that were
    likely to be candidates; a look for the others is due so many seconds later. None: all were.
    `deleted`: those of `remembered` whose row is gone.
    """

    candidates: tuple[Candidate, ...] = ()
    late: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    went_back: bool = False
    members: tuple[Candidate, ...] = ()
    asked: frozenset[str] = frozenset()
    registered: tuple[Candidate, ...] = ()
    reached: int = 0
    highest: int = 0
    more_after: float | None = None
    deleted: tuple[int, ...] = ()


class StepRow(NamedTuple):
    """One row of session_steps with what a sample needs of its environment.

    Texts are bytes as they lie in the database, not checked to be UTF-8; what is typed `object` is
    whatever the writer put there. `group_id`, `job_id` and `env_name` are the environment's. `meta`
    is env_state or meta_json. Flags are 1, 0 or, where the column is null, None.
    """

    environment: int
    env_id: object
    group_id: object
    job_id: object
    env_name: object
    pk: int
    session_id: object
    step_id: object
    llm_model: object
    messages: object
    response: object
    step_reward: object
    reward: object
    meta: object
    is_terminal: int | None
    is_truncated: int | None
    is_completed: int | None
    created_at: object


Mark: TypeAlias = tuple[Callable[[Any], object], Any, object]
"""What to ask, of what, and the answer that there was: another one tells that something changed."""


Rows: TypeAlias = Generator[tuple[int, tuple[StepRow, ...]], None, None]
"""The rows that become samples, of one environment after the other: its id, and they."""


class Sample(NamedTuple):
    """One line of a batch, newline included. `weight_version` is None where it is not usable.

    The line comes in pieces: of what may be megabytes no copy is made but the one that is written.
    `messages` is where in the line they lie: from, to.
    """

    environment: int
    env_id: str
    step_pk: int
    weight_version: int | None
    pieces: tuple[bytes | memoryview, ...]
    size_bytes: int
    messages: tuple[int, int] = (0, 0)

    @property
    def line(self) -> bytes:
        """The pieces, joined."""
        return b"".join(self.pieces)


class Ref(NamedTuple):
    """What one line of a batch says of its environment. `weight_version` is 0 where none is."""

    environment: int
    env_id: str
    group_id: str
    job_id: str
    step_pk: int
    weight_version: int
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Why an environment is set aside. `rows` are step ids, `excerpt` shows the beginning.

    `env_id` is exact, or "" where it is not at hand.
    `policy`: made by a rule that the operator chose, not by a row that nobody could use.
    """

    environment: int
    env_id: str
    reason: str
    what: str
    rows: tuple[int, ...] = ()
    excerpt: str = ""
    policy: bool = False
