"""Rows to sample lines, and sample lines back. Pure.

A line is made by splicing: the messages column is parsed to see that it is a list of objects, and
then its own bytes go into the line, the assistant turn appended before the closing bracket. So
what a trainer reads is what the model was shown, to the digit, and no history is encoded twice.
The same rows give the same bytes.

A row that cannot become a line becomes a Note, never an exception. Reasons: `bad-json` (broken,
not UTF-8, lone surrogates, NaN or infinity, nested too deeply), `bad-messages` (no list of
objects), `bad-reward` (not a finite number), `too-big`, `null-reward` (policy).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple

import orjson

from spoold.errors import BatchCorrupt
from spoold.layout import BatchName
from spoold.model import Note, NullReward, Ref, Sample, StepRow

__all__ = [
    "build_batch",
    "choose",
    "encode",
    "environment_refs",
    "is_trajectory",
    "parse_samples",
    "samples_of",
]

_SMALL_META: Final = 256
_SUMMARIES: Final = frozenset({"gateway_session_close", "episode_summary", "evaluation_summary"})
_MAX_VERSION: Final = 2**63 - 1
_BLANK: Final = b" \t\r\n"
_EXCERPT_CHARACTERS: Final = 200
# Parsers of trainers give up at about a thousand levels; a line must never be one they can't read.
_MAX_DEPTH: Final = 500
_TAIL: Final = b',"extra_info":{'
_REWARD: Final = b',"reward":'
# Every digit to "0": finding a run of digits like this costs a tenth of a regular expression.
_DIGITS: Final = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER: Final = b"0" * 19


class _Unusable(Exception):
    """Why a row cannot become a sample; leaves this module as a Note."""

    def __init__(self, reason: str, what: str, row: StepRow, excerpt: object) -> None:
        super().__init__(what)
        self.reason = reason
        self.what = what
        self.row = row
        self.excerpt = excerpt


# ---- which rows -------------------------------------------------------------------------------


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


# ---- rows to lines ----------------------------------------------------------------------------


def encode(
    rows: Sequence[StepRow], *, null_reward: NullReward, max_sample_bytes: int
) -> list[Sample] | Note | None:
    """Return the samples of one environment, or the note that says why there are none.

    `rows`: the chosen one last, before it its other steps where they are samples too. The reward is
    the chosen row's, on each. None: its reward is null and `null_reward = wait`. One unusable row
    makes the whole environment a note. `max_sample_bytes` bounds a line.
    """
    chosen = rows[-1]
    if chosen.reward is None and null_reward is not NullReward.FALLBACK:
        if null_reward is NullReward.WAIT:
            return None
        what = "the reward is null and null_reward = reject"
        return _note(_Unusable("null-reward", what, chosen, b""), rows, policy=True)
    try:
        reward, reward_source = _reward(chosen)
        return [_sample(row, reward, reward_source, max_sample_bytes) for row in rows]
    except _Unusable as unusable:
        return _note(unusable, rows)


def _note(unusable: _Unusable, rows: Sequence[StepRow], *, policy: bool = False) -> Note:
    pk = unusable.row.pk
    return Note(
        environment=unusable.row.environment,
        env_id=_shown(unusable.row.env_id),
        reason=unusable.reason,
        what=f"row {pk} of session_steps: {unusable.what}",
        rows=(pk, *(row.pk for row in rows if row.pk != pk)),
        excerpt=_shown(unusable.excerpt),
        policy=policy,
    )


def _shown(value: object) -> str:
    """Return the beginning of a value as text that can be printed and encoded, whatever it is."""
    if isinstance(value, bytes):
        text = value[: 4 * _EXCERPT_CHARACTERS].decode("utf-8", "replace")
    else:
        text = "" if value is None else str(value)
    return "".join(c if c.isprintable() else "\ufffd" for c in text[:_EXCERPT_CHARACTERS])


def _reward(row: StepRow) -> tuple[float, str]:
    if row.reward is not None:
        return _number(row, "reward", row.reward), "reward"
    if row.step_reward is not None:
        return _number(row, "step_reward", row.step_reward), "step_reward"
    return 0.0, "default"


def _number(row: StepRow, column: str, value: object) -> float:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    raise _Unusable("bad-reward", f"{column} is not a finite number", row, value)


def _sample(row: StepRow, reward: float, reward_source: str, max_sample_bytes: int) -> Sample:
    # This runs once a row: the usual case, texts that are UTF-8, is spelled out.
    env_id, group_id, session_id, job_id, env_name, llm_model = _texts(row)
    environment, pk, step_id, step_reward = row.environment, row.pk, row.step_id, row.step_reward
    truncated = bool(row.is_truncated)
    version = _meta(row.meta).weight_version
    head = orjson.dumps({"uid": f"{env_id}:{pk}", "instance_id": group_id or env_id})
    tail = orjson.dumps(
        {
            "reward": reward,
            # Last, and `environment` first in it: environment_refs reads lines from their end.
            "extra_info": {
                "environment": environment,
                "env_id": env_id,
                "session_id": session_id,
                "group_id": group_id,
                "job_id": job_id,
                "env_name": env_name,
                "llm_model": llm_model,
                "step_pk": pk,
                "steps": step_id if isinstance(step_id, int) else 0,
                "step_reward": 0.0
                if step_reward is None
                else _number(row, "step_reward", step_reward),
                "reward_source": reward_source,
                "weight_version": version or 0,
                "truncated": truncated,
                "finish_reason": "length" if truncated else "stop",
                "is_session_completed": bool(row.is_completed),
                "timestamp": _timestamp(row.created_at),
            },
        },
        option=orjson.OPT_APPEND_NEWLINE,
    )
    # One copy of what may be megabytes, straight into the line.
    messages = _messages(row, max_sample_bytes)
    line = b"".join((head[:-1], b',"messages":', *messages, b",", tail[1:]))
    if len(line) > max_sample_bytes:
        raise _too_big(row, len(line), max_sample_bytes)
    return Sample(environment, env_id, pk, version, line)


def _texts(row: StepRow) -> tuple[str, str, str, str, str, str]:
    """Return env_id, group_id, session_id, job_id, env_name and llm_model."""
    values = (
        row.env_id,
        row.group_id or b"",
        row.session_id,
        row.job_id,
        row.env_name,
        row.llm_model,
    )
    try:
        a, b, c, d, e, f = map(bytes.decode, values)  # type: ignore[arg-type]
    except (TypeError, UnicodeDecodeError):
        names = ("env_id", "group_id", "session_id", "job_id", "env_name", "llm_model")
        a, b, c, d, e, f = (_text(row, name, getattr(row, name)) for name in names)
    return a, b, c, d, e, f


def _too_big(row: StepRow, size_bytes: int, max_sample_bytes: int) -> _Unusable:
    what = f"{size_bytes} bytes, more than max_sample_bytes = {max_sample_bytes}"
    return _Unusable("too-big", what, row, row.messages)


def _text(row: StepRow, column: str, value: object) -> str:
    """Return a text column; NULL is "". Raises _Unusable where it is not UTF-8."""
    if value is None:
        return ""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise _Unusable("bad-json", f"{column} is not UTF-8", row, value) from error


def _timestamp(created_at: object) -> float:
    """Return epoch seconds; UTC where no zone is given, 0.0 where it is no time at all."""
    if isinstance(created_at, int | float):
        return float(created_at) if math.isfinite(created_at) else 0.0
    if not isinstance(created_at, bytes):
        return 0.0
    try:
        at = datetime.fromisoformat(created_at.decode())
        return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _messages(row: StepRow, max_sample_bytes: int) -> tuple[bytes | memoryview, ...]:
    """Return the JSON of the messages in pieces, on one line, with the assistant turn appended."""
    raw = row.messages
    if not isinstance(raw, bytes):
        raise _Unusable("bad-messages", "messages is no text", row, raw)
    if len(raw) > max_sample_bytes:
        raise _too_big(row, len(raw), max_sample_bytes)
    try:
        messages = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _Unusable("bad-json", f"messages: {error.msg}", row, raw) from error
    nested = _is_nested(messages)
    if nested is None:
        raise _Unusable("bad-messages", "messages is not a list of objects", row, raw)
    if nested and _is_too_deep(messages):
        raise _Unusable("bad-json", "messages: nested too deeply", row, raw)
    # In valid JSON a raw line break is white space: strings must escape theirs.
    if b"\n" in raw or b"\r" in raw:
        raw = raw.translate(None, b"\r\n")
    turn = _assistant_turn(row)
    if not turn:
        return (raw,)
    return memoryview(raw.rstrip(_BLANK))[:-1], b"," if messages else b"", turn, b"]"


def _is_nested(messages: object) -> bool | None:
    """Whether a message holds more than plain values; None where this is no list of objects."""
    if type(messages) is not list:
        return None
    nested = False
    for message in messages:
        if type(message) is not dict:
            return None
        for value in message.values():
            if type(value) is list or type(value) is dict:
                nested = True
    return nested


def _assistant_turn(row: StepRow) -> bytes:
    """Return the JSON of the turn that the response column holds, b"" where it is empty."""
    response = row.response
    if response is None:
        return b""
    if not isinstance(response, bytes):
        response = str(response).encode()
    if not response:
        return b""
    if response.lstrip(_BLANK).startswith(b"{") and (turn := _turn_of_object(row, response)):
        return turn
    text = _text(row, "response", response)
    return orjson.dumps({"role": "assistant", "content": text})


def _turn_of_object(row: StepRow, response: bytes) -> bytes | None:
    """Return the message in a response that is a JSON object; None where it is only text."""
    try:
        message = _message_in(orjson.loads(response))
        if message is None:
            return None
        if not _needs_care(message):
            return orjson.dumps(message)
    except orjson.JSONDecodeError:
        pass
    # Numbers beyond 64 bits, NaN, lone surrogates, deep nesting, or no JSON at all. The standard
    # library reads them exactly; whether they can be written is another question.
    try:
        message = _message_in(json.loads(response.decode()))
        if message is None:
            return None
        text = json.dumps(message, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        turn = text.encode()
    except json.JSONDecodeError:
        return None
    except RecursionError as error:
        raise _Unusable("bad-json", "response: nested too deeply", row, response) from error
    except ValueError as error:
        what = "response: not UTF-8, or a lone surrogate, NaN, infinity or endless number in it"
        raise _Unusable("bad-json", what, row, response) from error
    if _is_too_deep(message):
        raise _Unusable("bad-json", "response: nested too deeply", row, response)
    return turn


def _message_in(found: object) -> dict[str, Any] | None:
    """Return `choices[0].message` of a chat.completion, or the object itself if it has a role."""
    if not isinstance(found, dict):
        return None
    choices = found.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        message = choices[0].get("message")
        if isinstance(message, dict):
            return message
    return found if isinstance(found.get("role"), str) else None


def _needs_care(message: dict[str, Any]) -> bool:
    """Whether orjson may have rounded an integer in a message, or will not write it again.

    It reads integers beyond 64 bits as floats, and writes 254 levels.
    """
    level: list[Any] = [message]
    for _ in range(250):
        level = [child for value in level for child in _children(value)]
        if not level:
            return False
        if any(type(value) is float and abs(value) >= 2.0**63 for value in level):
            return True
    return True


def _is_too_deep(value: dict[str, Any] | list[Any]) -> bool:
    """Whether there are more levels of objects and lists than a reader can be asked to follow."""
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for outer in level
            for child in _children(outer)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return False
    return True


def _children(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value if type(value) is list else ()


# ---- lines to batches, and back ---------------------------------------------------------------


def build_batch(seq: int, samples: Iterable[Sample]) -> tuple[BatchName, bytes]:
    """Return the name and the bytes of a batch: by environment, then step_pk. Never empty."""
    ordered = sorted(samples, key=lambda sample: (sample.environment, sample.step_pk))
    assert ordered, "an empty batch is never published"
    data = b"".join([sample.line for sample in ordered])
    versions = [s.weight_version for s in ordered if s.weight_version is not None] or [0]
    name = BatchName(
        seq=seq,
        samples=len(ordered),
        lo=min(versions),
        hi=max(versions),
        digest=hashlib.sha256(data).hexdigest()[:12],
    )
    return name, data


def environment_refs(data: bytes) -> list[Ref]:
    """Return, line by line, which environment each sample of a batch is of.

    Reads the end of each line only. Does not check the messages: the digest in the name does.
    Raises BatchCorrupt where a line is no sample.
    """
    if not data.endswith(b"\n"):
        raise BatchCorrupt("a batch ends with a newline, this one does not")
    refs = []
    start, number = 0, 1
    while start < len(data):
        end = data.index(b"\n", start)
        try:
            refs.append(_ref(data, start, end))
        except (ValueError, KeyError, TypeError) as error:
            raise BatchCorrupt(f"line {number} is no sample") from error
        start, number = end + 1, number + 1
    return refs


def _ref(data: bytes, start: int, end: int) -> Ref:
    # Exact: in a string the quote would be escaped, and what follows must be one object and the
    # line's last brace, so this is the key of the line itself and not of something inside it.
    at = data.rfind(_TAIL, start, end)
    if at >= 0 and data[end - 1] == 0x7D:
        reward_at = data.rfind(_REWARD, start, at)
        try:
            reward = float(data[reward_at + len(_REWARD) : at]) if reward_at >= 0 else None
            facts = orjson.loads(data[at + len(_TAIL) - 1 : end - 1])
        except ValueError:
            facts = reward = None
        if reward is not None:
            return _checked_ref(facts, reward)
    whole = orjson.loads(data[start:end])
    return _checked_ref(whole["extra_info"], whole["reward"])


def _checked_ref(facts: dict[str, Any], reward: float) -> Ref:
    ref = Ref(
        facts["environment"],
        facts["env_id"],
        facts["group_id"],
        facts["job_id"],
        facts["step_pk"],
        facts["weight_version"],
        float(reward),
    )
    if not all(map(isinstance, ref, _REF_TYPES)) or ref.environment < 1:
        raise ValueError("a value of the wrong type")
    return ref


_REF_TYPES: Final = (int, str, str, str, int, int, float)


def parse_samples(data: bytes) -> list[dict[str, Any]]:
    """Return the samples of a batch, integers of any size exact. Raises BatchCorrupt."""
    lines = data.split(b"\n")
    if lines.pop():
        raise BatchCorrupt("a batch ends with a newline, this one does not")
    samples = []
    for number, line in enumerate(lines, 1):
        exact = _LONG_NUMBER in line.translate(_DIGITS)
        try:
            sample = json.loads(line.decode()) if exact else orjson.loads(line)
        except (ValueError, RecursionError) as error:
            raise BatchCorrupt(f"line {number} is no sample: {error}") from error
        if not isinstance(sample, dict):
            raise BatchCorrupt(f"line {number} is no sample: not an object")
        samples.append(sample)
    return samples
