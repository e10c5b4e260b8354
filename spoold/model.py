"""Frozen values that flow from the source to the spool."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = [
    "Candidate",
    "Look",
    "Note",
    "NullReward",
    "OnReplaced",
    "PartialGroups",
    "ReadyWhen",
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


class OnReplaced(enum.StrEnum):
    """What to do when the source is not the one that this run directory was filled from."""

    RETIRE = "retire"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Candidate:
    """An environment that passes the gate of `ready_when` and may have a usable terminal row.

    `group` is its group id, "" where there is none.
    """

    id: int
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one pass over the source found.

    `candidates`: by id. `late`: delivered environments that got new step rows. `unfinished`: how
    many environments have step rows and are not candidates. `missing`: finished environments
    without a usable terminal row, as far as this pass has seen. `gone`: environments named to the
    planner before that were deleted since.
    """

    candidates: tuple[Candidate, ...] = ()
    late: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepRow:
    """One row of session_steps with what a sample needs of its environment. Texts are UTF-8 bytes.

    `group_id`, `job_id` and `env_name` are the environment's. `meta` is env_state or meta_json.
    """

    environment: int
    env_id: bytes
    group_id: bytes
    job_id: bytes
    env_name: bytes
    pk: int
    session_id: bytes
    step_id: int
    llm_model: bytes
    messages: object
    response: object
    step_reward: object
    reward: object
    meta: object
    is_truncated: bool
    is_completed: bool
    created_at: object


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a batch, newline included. `weight_version` is None where it is not usable."""

    environment: int
    env_id: str
    step_pk: int
    weight_version: int | None
    line: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Why an environment is set aside. `rows` are step ids, `excerpt` shows the beginning."""

    environment: int
    env_id: str
    reason: str
    what: str
    rows: tuple[int, ...] = ()
    excerpt: str = ""
    policy: bool = False
