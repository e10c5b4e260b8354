"""Rows to sample lines. Pure.

A line is made by splicing: the messages column is parsed to see that it is a list of objects, and
then its own bytes go into the line, the assistant turn appended before the closing bracket. So
what a trainer reads is what the model was shown, to the digit, and no history is encoded twice.
The same rows give the same bytes.

A row that cannot become a line becomes a Note, never an exception. Reasons: `bad-json` (broken,
not UTF-8, lone surrogates, NaN or infinity, nested too deeply), `bad-messages` (no list of
objects), `bad-reward` (not a finite number), `too-big`, `null-reward` (policy).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

import orjson

from spoold.codec.rows import weight_version
from spoold.model import Note, NullReward, Sample, StepRow

if TYPE_CHECKING:
    from mmap import mmap

__all__ = ["are_sound", "encode"]

_BLANK: Final = b" \t\r\n"
_MESSAGES: Final = b',"messages":'
_FEW_BYTES: Final = 64
# Of what texts are full of. The backslash first.
_ESCAPES: Final = (
    (b"\\", rb"\\"),
    (b'"', rb"\""),
    (b"\n", rb"\n"),
    (b"\t", rb"\t"),
    (b"\r", rb"\r"),
)
# And of what few are, but whole runs may be: colours of a terminal. It takes the careful way.
_ESC: Final = b"\x1b"
_EXCERPT_CHARACTERS: Final = 200
# Parsers of trainers give up at about a thousand levels; a line must never be one they can't read.
_MAX_DEPTH: Final = 500


class _Unusable(Exception):
    """Why a row cannot become a sample; leaves this module as a Note."""

    def __init__(self, reason: str, what: str, row: StepRow, excerpt: object) -> None:
        super().__init__(what)
        self.reason = reason
        self.what = what
        self.row = row
        self.excerpt = excerpt


def encode(
    rows: Sequence[StepRow],
    *,
    null_reward: NullReward,
    max_sample_bytes: int,
    trusted: bool = False,
) -> list[Sample] | Note | None:
    """Return the samples of one environment, or the note that says why there are none.

    `rows`: the chosen one last, before it its other steps where they are samples too. The reward is
    the chosen row's, on each. None: its reward is null and `null_reward = wait`. One unusable row
    makes the whole environment a note. `max_sample_bytes` bounds all of its lines together.
    `trusted`: messages and response are taken to be sound. `are_sound` has to say so before a line
    goes anywhere; where it does not, this has to be asked again without trust.
    """
    chosen = rows[-1]
    if chosen.reward is None and null_reward is not NullReward.FALLBACK:
        if null_reward is NullReward.WAIT:
            return None
        what = "the reward is null and null_reward = reject"
        return _note(_Unusable("null-reward", what, chosen, b""), rows, policy=True)
    try:
        return _samples(rows, max_sample_bytes, trusted)
    except _Unusable as unusable:
        return _note(unusable, rows)


def _note(unusable: _Unusable, rows: Sequence[StepRow], *, policy: bool = False) -> Note:
    pk = unusable.row.pk
    env_id = _shown(unusable.row.env_id)
    return Note(
        environment=unusable.row.environment,
        # By it a replaced source is told: exact, or not at all.
        env_id="" if "\ufffd" in env_id or len(env_id) == _EXCERPT_CHARACTERS else env_id,
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
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    raise _Unusable("bad-reward", f"{column} is not a finite number", row, value)


def are_sound(lines: bytes | mmap, places: Iterable[tuple[int, int]]) -> bool:
    """Whether at each of these places in `lines` lie messages as `encode` writes them."""
    view = memoryview(lines)
    for start, end in places:
        if lines.find(b"\n", start, end) >= 0 or lines.find(b"\r", start, end) >= 0:
            return False
        try:
            messages = orjson.loads(view[start:end])
        except orjson.JSONDecodeError:
            return False
        nested = _is_nested(messages)
        if nested is None or (nested and _is_too_deep(messages)):
            return False
    return True


def _samples(rows: Sequence[StepRow], max_sample_bytes: int, trusted: bool) -> list[Sample]:
    """Return a sample for each row. Raises _Unusable as soon as they are too big together."""
    reward, reward_source = _reward(rows[-1])
    samples = []
    size_bytes = 0
    for row in rows:
        sample = _sample(row, reward, reward_source, max_sample_bytes, trusted)
        size_bytes += sample.size_bytes
        if size_bytes > max_sample_bytes:
            raise _too_big(row, size_bytes, max_sample_bytes)
        samples.append(sample)
    return samples


def _sample(
    row: StepRow, reward: float, reward_source: str, max_sample_bytes: int, trusted: bool
) -> Sample:
    # This runs once a row: the usual case, texts that are UTF-8, is spelled out.
    env_id, group_id, session_id, job_id, env_name, llm_model = _texts(row)
    environment, pk, step_id, step_reward = row.environment, row.pk, row.step_id, row.step_reward
    truncated = bool(row.is_truncated)
    version = weight_version(row.meta)
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
    history, end = _messages(row, max_sample_bytes, trusted)
    before, after = head[:-1] + _MESSAGES, b"%b,%b" % (end, tail[1:])
    size_bytes = len(before) + len(history) + len(after)
    place = len(before), size_bytes - len(tail)
    return Sample(environment, env_id, pk, version, (before, history, after), size_bytes, place)


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
    return _epoch_seconds(created_at) if isinstance(created_at, bytes) else 0.0


@lru_cache(maxsize=64)
def _epoch_seconds(created_at: bytes) -> float:
    # Rows that a writer flushes together have one time.
    try:
        at = datetime.fromisoformat(created_at.decode())
        return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _messages(
    row: StepRow, max_sample_bytes: int, trusted: bool
) -> tuple[bytes | memoryview, bytes]:
    """Return the JSON of the messages in two parts, on one line: theirs, and the assistant turn."""
    raw = row.messages
    if not isinstance(raw, bytes):
        raise _Unusable("bad-messages", "messages is no text", row, raw)
    if len(raw) > max_sample_bytes:
        raise _too_big(row, len(raw), max_sample_bytes)
    # Between the brackets of so many bytes lies something. Where that is no list of objects it is
    # none with a turn appended either: the text before the last bracket is all of one list, or not.
    # Line breaks are found later, too: without them what was broken may be whole, or other numbers.
    is_list = trusted and len(raw) > _FEW_BYTES and raw[0] == 0x5B and raw[-1] == 0x5D
    is_empty = not is_list and not _parsed(row, raw)
    # In valid JSON a raw line break is white space: strings must escape theirs.
    if not is_list and (b"\n" in raw or b"\r" in raw):
        raw = raw.translate(None, b"\r\n")
    turn = _assistant_turn(row, trusted)
    if not turn:
        return raw, b""
    return memoryview(raw.rstrip(_BLANK))[:-1], b"%b%b]" % (b"" if is_empty else b",", turn)


def _parsed(row: StepRow, raw: bytes) -> list[Any]:
    """Return the messages. Raises _Unusable where they are no list of objects."""
    try:
        messages = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _Unusable("bad-json", f"messages: {error.msg}", row, raw) from error
    nested = _is_nested(messages)
    if nested is None:
        raise _Unusable("bad-messages", "messages is not a list of objects", row, raw)
    if nested and _is_too_deep(messages):
        raise _Unusable("bad-json", "messages: nested too deeply", row, raw)
    return cast(list[Any], messages)


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


def _assistant_turn(row: StepRow, trusted: bool) -> bytes:
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
    if trusted and _ESC not in response:
        # What else must not lie in a string makes it no JSON, and is found later.
        for plain, escaped in _ESCAPES:
            response = response.replace(plain, escaped)
        return b'{"role":"assistant","content":"%b"}' % response
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
