"""Which rows of a session are turns of the model, and which of them become samples. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import orjson

from spoold.model import StepRow

__all__ = ["choose", "is_trajectory", "samples_of", "weight_version"]

_SMALL_META: Final = 256
_SUMMARIES: Final = frozenset({"gateway_session_close", "episode_summary", "evaluation_summary"})
_MAX_VERSION: Final = 2**63 - 1
_BLANK: Final = b" \t\r\n"


def is_trajectory(meta: object, messages: object, response: object) -> bool:
    """Whether a row is a turn of the model, by its env_state or meta_json and its texts.

    Rows that close a session, sum it up, or record a failed request share the session with it.
    `messages` need only be true to its first 64 bytes.
    """
    if not _meta(meta).is_turn:
        return False
    if response or not isinstance(messages, bytes) or len(messages) >= 64:
        return True
    return messages.translate(None, _BLANK) != b"[]"


class _Meta(NamedTuple):
    """What env_state or meta_json says of a row."""

    is_turn: bool
    weight_version: int | None


def _meta(meta: object) -> _Meta:
    if not isinstance(meta, bytes) or not meta:
        return _NO_META
    # Early writers put the same few bytes into every row.
    return _cached_meta(meta) if len(meta) <= _SMALL_META else _read_meta(meta)


def _read_meta(meta: bytes) -> _Meta:
    facts = _parse_meta(meta)
    if not facts:
        return _NO_META
    event = facts.get("event_type")
    is_turn = not (
        (isinstance(event, str) and event in _SUMMARIES)
        or facts.get("synthetic_stop")
        or (event == "gateway_inference" and _is_failure(facts.get("status_code")))
    )
    return _Meta(is_turn, _weight_version(facts.get("weight_version")))


_cached_meta = lru_cache(maxsize=64)(_read_meta)
_NO_META: Final = _Meta(True, None)


def _is_failure(status: object) -> bool:
    if isinstance(status, str) and status.isascii() and status.isdigit() and len(status) <= 9:
        status = int(status)
    return isinstance(status, int | float) and status >= 400


def choose(rows: Iterable[StepRow]) -> StepRow | None:
    """Return the row that an environment's sample is made of, None where none is usable.

    `rows` are the trajectory rows of the job in one session. Of several completed ones the highest
    id; without a completed one the highest terminal or truncated one.
    """
    completed: StepRow | None = None
    ended: StepRow | None = None
    for row in rows:
        if row.is_completed:
            if completed is None or row.pk > completed.pk:
                completed = row
        elif (row.is_terminal or row.is_truncated) and (ended is None or row.pk > ended.pk):
            ended = row
    return completed or ended


def samples_of(rows: Sequence[StepRow]) -> tuple[StepRow, ...]:
    """Return the rows that become samples with `samples = steps`: the last one is the chosen one.

    After the last completed row before the chosen one (that was an earlier run), up to the chosen
    one, of its llm_model, by id. `rows` as for `choose`; () where none is usable.
    """
    chosen = choose(rows)
    if chosen is None:
        return ()
    start = max((row.pk for row in rows if row.is_completed and row.pk < chosen.pk), default=0)
    own = [row for row in rows if start < row.pk <= chosen.pk and row.llm_model == chosen.llm_model]
    return tuple(sorted(own, key=lambda row: row.pk))


def _parse_meta(meta: bytes) -> dict[str, Any] | None:
    """Return the object in env_state or meta_json, None where there is none that can be read."""
    try:
        facts = orjson.loads(meta)
    except orjson.JSONDecodeError:
        # Writers dump state with NaN and lone surrogates in it; what we need of it is still good.
        try:
            facts = json.loads(meta.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return None
    return facts if isinstance(facts, dict) else None


def _weight_version(version: object) -> int | None:
    """Return the policy that made a row: an integer from 0 to 2^63-1, or a string of one."""
    if isinstance(version, str) and version.isascii() and version.isdigit():
        # The bound keeps int() from refusing thousands of digits.
        version = int(version) if len(version) <= 4000 else None
    if isinstance(version, int) and not isinstance(version, bool) and 0 <= version <= _MAX_VERSION:
        return version
    return None


def weight_version(meta: object) -> int | None:
    """Return the policy that made a row, by its env_state or meta_json; None: not usable."""
    return _meta(meta).weight_version
