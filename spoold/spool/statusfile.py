"""What the daemon last said of itself: `.spoold/status.json`.

The daemon writes it when something in it changes, for `spoold status` and for consumers that wait.
It is never an input of the daemon, and may be lost in a power cut: nothing is synced. Whoever reads
it must live with an old one (`updated`), none, or one of another version; whether the daemon runs
is told by its lock alone. Times are seconds since the epoch, `None` where there was none yet.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from types import UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

from spoold import fs
from spoold.errors import SpoolWriteError
from spoold.layout import WHOLE, RunDir
from spoold.reasons import REASONS, say, urgency

__all__ = [
    "FORMAT",
    "LatestNote",
    "Published",
    "Reason",
    "Rejected",
    "SourceState",
    "Status",
    "WaitingGroup",
    "mark_failed",
    "read",
    "write",
]

FORMAT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why something is not delivered now. `remedy` is what a person can do, "" for nothing."""

    code: str
    since: float
    text: str
    remedy: str = ""

    @classmethod
    def of(cls, code: str, detail: str = "", remedy: str = "", *, since: float) -> Reason:
        """Return a reason in the words of `spoold.reasons`."""
        remedy = remedy or REASONS[code].remedy
        return cls(code=code, since=since, text=say(code, detail), remedy=remedy)

    @property
    def words(self) -> str:
        """What it says, and the remedy."""
        return f"{self.text}; {self.remedy}" if self.remedy else self.text

    def order(self) -> tuple[int, float]:
        """Return what to sort by: the most urgent first, then the oldest."""
        return urgency(self.code), self.since


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingGroup:
    """A group that is not whole: `have` of `want` members are complete.

    `missing` are not complete, `set_aside` have a note and will not be. Whoever is in neither is
    not registered, or deleted, or was not asked for yet.
    """

    group: str
    have: int
    want: int
    missing: tuple[int, ...] = ()
    set_aside: tuple[int, ...] = ()
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """What the last look found: running with step rows, complete and unpublished, without a row.

    `without_reward` are complete but for that, under `null_reward = wait`. `oldest_ready`: since
    when the oldest of those that are complete and unpublished is known.
    """

    running: int = 0
    ready: int = 0
    missing_rows: int = 0
    without_reward: int = 0
    groups: tuple[WaitingGroup, ...] = ()
    oldest_ready: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What this daemon has published since it started; `last` is when."""

    batches: int = 0
    samples: int = 0
    environments: int = 0
    bytes: int = 0
    last: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestNote:
    """The newest note."""

    environment: int
    reason: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Notes that lie in rejected/, and the newest of them or of those that were removed since."""

    notes: int = 0
    latest: LatestNote | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One report. `state` is delivering, waiting, held, stopped, or failed (ended by an error).

    `delivered` counts environments, over the whole life of the run directory. All numbers are of
    `shard`, the I/N of the environments that are delivered here. `group_size` is the setting, None
    in a report of a version that did not tell it.
    """

    version: str
    pid: int
    host: str
    started: float
    updated: float
    job: str
    url: str
    ready_when: str
    group_size: int | None = None
    state: str
    shard: str = WHOLE
    reasons: tuple[Reason, ...] = ()
    source: SourceState = field(default_factory=SourceState)
    published: Published = field(default_factory=Published)
    delivered: int = 0
    rejected: Rejected = field(default_factory=Rejected)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as what JSON can hold, `format` first."""
        return {"format": FORMAT, **asdict(self)}

    def to_json(self) -> bytes:
        """Return the bytes of status.json: for people, each fact of the report has its line."""
        facts = {"format": FORMAT, **_shallow(self)}
        encode = json.JSONEncoder(default=_shallow).encode
        lines = [f'"{name}": {encode(fact)}' for name, fact in facts.items()]
        return ("{\n " + ",\n ".join(lines) + "\n}\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> Status:
        """Read the bytes of status.json back; keys that are not known are passed over.

        Raises ValueError, with the reason, where they are no such report.
        """
        try:
            facts = json.loads(data)
            if facts["format"] > FORMAT:
                raise ValueError(f"it has format {facts['format']}, of a newer spoold")
            return cls(**_fields(cls, facts))
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError("it is no report of spoold") from error


def _shallow(value: Any) -> dict[str, Any]:
    """Return the fields of one of the values above, as they are: asdict copies all of them."""
    return {name: getattr(value, name) for name in value.__slots__}


def _fields(kind: type, facts: Any) -> dict[str, Any]:
    if not isinstance(facts, dict):
        raise TypeError(kind)
    hints = get_type_hints(kind)
    return {name: _value(hint, facts[name]) for name, hint in hints.items() if name in facts}


def _value(hint: Any, value: Any) -> Any:
    """Return a JSON value as the declared type, or raise TypeError where it is another."""
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return hint(**_fields(hint, value))
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_value(get_args(hint)[0], each) for each in value)
    if isinstance(hint, UnionType):
        return None if value is None else _value(get_args(hint)[0], value)
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return value
    if hint in (int, str) and type(value) is hint:
        return value
    raise TypeError(value)


def write(run: RunDir, status: Status) -> None:
    """Replace status.json; whoever reads sees the old report or the new one. Not durable."""
    fs.put(run.status_json, status.to_json(), tmp_dir=run.tmp, durable=False)


def mark_failed(run: RunDir, reason: Reason, *, at: float) -> None:
    """Let the last report tell why a daemon could not even start. Only who holds the lock may.

    Where no report is, or none can be written, nothing is told.
    """
    said, _ = read(run)
    if said is not None:
        with suppress(SpoolWriteError, OSError):
            write(run, replace(said, state="failed", reasons=(reason,), updated=at))


def read(run: RunDir) -> tuple[Status | None, str]:
    """Return the last report, or None and why there is none ("" where none was written yet)."""
    try:
        return Status.from_json(fs.read(run.status_json)), ""
    except FileNotFoundError:
        return None, ""
    except ValueError as error:
        return None, f"{run.status_json} cannot be used: {error}"
    except SpoolWriteError as error:
        return None, str(error)
