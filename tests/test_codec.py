"""Rows to lines and back: what a trainer reads is what the model was shown, or a note says why."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spoold.codec import (
    are_sound,
    build_batch,
    choose,
    encode,
    environment_refs,
    is_trajectory,
    parse_samples,
    samples_of,
)
from spoold.errors import BatchCorrupt
from spoold.model import Note, NullReward, Ref, Sample, StepRow

PROMPT = b'[{"role": "user", "content": "q"}]'
ROW = StepRow(
    environment=17,
    env_id=b"env-17",
    group_id=b"g1",
    job_id=b"job-1",
    env_name=b"math",
    pk=96,
    session_id=b"env-17",
    step_id=4,
    llm_model=b"m",
    messages=PROMPT,
    response=b"a",
    step_reward=0.25,
    reward=0.5,
    meta=b'{"weight_version": 6}',
    is_terminal=True,
    is_truncated=False,
    is_completed=True,
    created_at=b"2026-11-29 19:42:46.043713+00:00",
)


def encoded(
    *rows: StepRow,
    null_reward: NullReward = NullReward.FALLBACK,
    max_sample_bytes: int = 1 << 28,
    trusted: bool = False,
) -> list[Sample] | Note | None:
    return encode(rows, null_reward=null_reward, max_sample_bytes=max_sample_bytes, trusted=trusted)


def line_of(**facts: Any) -> bytes:
    samples = encoded(ROW._replace(**facts))
    assert isinstance(samples, list), samples
    (sample,) = samples
    return sample.line


def read(**facts: Any) -> dict[str, Any]:
    line = line_of(**facts)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    found: dict[str, Any] = json.loads(line)
    (same,) = parse_samples(line)
    assert same == found
    return found


def note(**facts: Any) -> Note:
    found = encoded(ROW._replace(**facts))
    assert isinstance(found, Note), found
    json.dumps([found.env_id, found.what, found.excerpt], ensure_ascii=False).encode()
    return found


def messages(**facts: Any) -> list[Any]:
    found: list[Any] = read(**facts)["messages"]
    return found


# ---- the line -----------------------------------------------------------------------------------


def test_a_line_is_what_the_design_says_to_the_byte() -> None:
    assert line_of() == (
        b'{"uid":"env-17:96","instance_id":"g1","messages":[{"role": "user", "content": "q"},'
        b'{"role":"assistant","content":"a"}],"reward":0.5,"extra_info":{"environment":17,'
        b'"env_id":"env-17","session_id":"env-17","group_id":"g1","job_id":"job-1",'
        b'"env_name":"math","llm_model":"m","step_pk":96,"steps":4,"step_reward":0.25,'
        b'"reward_source":"reward","weight_version":6,"truncated":false,"finish_reason":"stop",'
        b'"is_session_completed":true,"timestamp":1795981366.043713}}\n'
    )


@pytest.mark.parametrize("group", [b"", None])
def test_without_a_group_the_environment_is_its_own_instance(group: object) -> None:
    found = read(group_id=group)
    assert (found["instance_id"], found["extra_info"]["group_id"]) == ("env-17", "")


def test_truncation_gives_length_as_the_reason() -> None:
    extra = read(is_truncated=True, is_completed=False)["extra_info"]
    assert (extra["truncated"], extra["finish_reason"]) == (True, "length")
    assert extra["is_session_completed"] is False


@pytest.mark.parametrize(
    ("created_at", "seconds"),
    [
        (b"2026-11-29 19:42:46.043713+00:00", 1795981366.043713),
        (b"2026-11-29 19:42:46.043713", 1795981366.043713),
        (b"2026-11-29 21:42:46+02:00", 1795981366.0),
        (b"2026-11-29T19:42:46Z", 1795981366.0),
        (b"1970-01-01 00:00:00", 0.0),
        (1795981366, 1795981366.0),
        (b"yesterday", 0.0),
        (b"\xff", 0.0),
        (math.inf, 0.0),
        (None, 0.0),
    ],
)
def test_created_at_becomes_epoch_seconds_in_utc(created_at: object, seconds: float) -> None:
    found = read(created_at=created_at)["extra_info"]["timestamp"]
    assert isinstance(found, float)
    assert found == seconds


@pytest.mark.parametrize(
    ("meta", "version"),
    [
        (b'{"weight_version": 7}', 7),
        (b'{"weight_version": "12"}', 12),
        (b'{"weight_version": 0}', 0),
        (b'{"weight_version": 9223372036854775807}', 2**63 - 1),
        (b'{"weight_version": NaN, "weight_version": 5, "loss": NaN}', 5),
        (b'{"weight_version": 9223372036854775808}', None),
        (b'{"weight_version": "9223372036854775808"}', None),
        (b'{"weight_version": -1}', None),
        (b'{"weight_version": 3.0}', None),
        (b'{"weight_version": true}', None),
        (b'{"weight_version": "default"}', None),
        (b'{"weight_version": " 5"}', None),
        (b'{"weight_version": "\xd9\xa3"}', None),
        (b'{"weight_version": "' + b"9" * 5000 + b'"}', None),
        (b'{"weight_version": null}', None),
        (b"{}", None),
        (b"[5]", None),
        (b"not json {", None),
        (b"[" * 100_000, None),
        (b"", None),
        (None, None),
    ],
)
def test_a_weight_version_is_an_integer_or_a_string_of_one(
    meta: object, version: int | None
) -> None:
    samples = encoded(ROW._replace(meta=meta))
    assert isinstance(samples, list)
    assert samples[0].weight_version == version
    assert read(meta=meta)["extra_info"]["weight_version"] == (version or 0)


# ---- reward -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "step_reward", "wanted"),
    [
        (1, 2, (1.0, "reward", 2.0)),
        (0.0, 2.0, (0.0, "reward", 2.0)),
        (None, 2, (2.0, "step_reward", 2.0)),
        (None, 0.0, (0.0, "step_reward", 0.0)),
        (None, None, (0.0, "default", 0.0)),
    ],
)
def test_a_reward_falls_back_and_says_so(
    reward: object, step_reward: object, wanted: tuple[float, str, float]
) -> None:
    found = read(reward=reward, step_reward=step_reward)
    extra = found["extra_info"]
    assert (found["reward"], extra["reward_source"], extra["step_reward"]) == wanted
    assert isinstance(found["reward"], float)
    assert isinstance(extra["step_reward"], float)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, b"0.5", b"nan"])
@pytest.mark.parametrize("column", ["reward", "step_reward"])
def test_a_reward_that_is_no_finite_number_is_a_note(column: str, bad: object) -> None:
    assert note(**{column: bad}).reason == "bad-reward"


def test_null_reward_waits_or_is_rejected_where_that_is_asked_for() -> None:
    row = ROW._replace(reward=None)
    assert encoded(row, null_reward=NullReward.WAIT) is None
    rejected = encoded(row, null_reward=NullReward.REJECT)
    assert isinstance(rejected, Note)
    assert (rejected.reason, rejected.policy, rejected.rows) == ("null-reward", True, (96,))
    assert isinstance(encoded(ROW, null_reward=NullReward.REJECT), list)


# ---- messages -----------------------------------------------------------------------------------


def test_messages_are_spliced_so_that_wide_integers_stay_exact() -> None:
    raw = b'[{"role":"tool","content":123456789012345678901234567890,"x":1.10}]'
    assert raw[:-1] in line_of(messages=raw)
    assert messages(messages=raw, response=b"")[0]["content"] == 123456789012345678901234567890


def test_pretty_printed_messages_come_out_on_one_line() -> None:
    turns = [{"role": "user", "content": "a\nb\r\n\u2028"}]
    raw = json.dumps(turns, indent=2).replace("\n", "\r\n").encode() + b" \n\t"
    assert messages(messages=raw, response=b"") == turns
    assert messages(messages=raw, response=b"x")[:-1] == turns


@pytest.mark.parametrize("raw", [b"[]", b"[ ]", b" [\n] "])
def test_an_answer_to_no_messages_stands_alone(raw: bytes) -> None:
    assert messages(messages=raw) == [{"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "bad-json"),
        (b'[{"role": "user"', "bad-json"),
        (b'[{"x": NaN}]', "bad-json"),
        (b'[{"x": 1e400}]', "bad-json"),
        (b'[{"x": "\\ud800"}]', "bad-json"),
        (b'[{"x": "\xed\xa0\x80"}]', "bad-json"),
        (b'[{"x": "\xff"}]', "bad-json"),
        (b'[{"x": "a\x00b"}]', "bad-json"),
        (b'[{"x": ' + b"[" * 600 + b"]" * 600 + b"}]", "bad-json"),
        (b"[" * 100_000, "bad-json"),
        (b'{"role": "user"}', "bad-messages"),
        (b'"text"', "bad-messages"),
        (b"null", "bad-messages"),
        (b'["text"]', "bad-messages"),
        (b'[{"role": "user"}, 1]', "bad-messages"),
        (None, "bad-messages"),
        (7, "bad-messages"),
    ],
)
def test_messages_that_cannot_be_read_are_a_note(raw: object, reason: str) -> None:
    found = note(messages=raw)
    assert (found.environment, found.env_id, found.reason) == (17, "env-17", reason)
    assert found.rows == (96,)
    assert not found.policy
    assert "96" in found.what
    assert len(found.excerpt) <= 200


def test_as_many_levels_as_readers_follow_are_fine() -> None:
    deep = b'[{"x": ' + b"[" * 400 + b"]" * 400 + b"}]"
    assert len(messages(messages=deep)) == 2


def test_a_line_above_max_sample_bytes_is_a_note() -> None:
    line = line_of()
    assert isinstance(encoded(ROW, max_sample_bytes=len(line)), list)
    too_big = encoded(ROW, max_sample_bytes=len(line) - 1)
    assert isinstance(too_big, Note)
    assert too_big.reason == "too-big"
    huge = encoded(ROW._replace(messages=b"x" * 2000), max_sample_bytes=1000)
    assert isinstance(huge, Note)
    assert huge.reason == "too-big"


def test_a_row_of_a_hundred_megabytes_is_a_sample() -> None:
    raw = b'[{"role":"user","content":"' + b"x" * 100_000_000 + b'"}]'
    assert len(line_of(messages=raw)) > 100_000_000


# ---- the assistant turn -------------------------------------------------------------------------

ENVELOPE = {
    "object": "chat.completion",
    "choices": [
        {
            "message": {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            }
        }
    ],
}


def turn(response: object) -> Any:
    found = messages(response=response)
    assert found[0] == json.loads(PROMPT)[0]
    assert len(found) == 2
    return found[1]


@pytest.mark.parametrize("response", [b"", None])
def test_an_empty_response_appends_nothing(response: object) -> None:
    assert len(messages(response=response)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        " ",
        'a "quoted" \\ \n\r\t\x00 \u2028 数学 \U0001f600',
        "{not json",
        '{"a": 1}',
        '{"choices": []}',
        '{"choices": [{"message": null}]}',
        '{"role": 5}',
        '[{"role": "assistant"}]',
        '"text"',
        "NaN",
    ],
)
def test_text_is_the_content_whether_it_is_json_or_not(text: str) -> None:
    assert turn(text.encode()) == {"role": "assistant", "content": text}


@pytest.mark.parametrize("blank", ["", " \r\n"])
def test_a_chat_completion_gives_its_message_with_tool_calls(blank: str) -> None:
    wanted = ENVELOPE["choices"][0]["message"]  # type: ignore[index]
    assert turn((blank + json.dumps(ENVELOPE, indent=1)).encode()) == wanted


def test_an_object_with_a_role_is_the_message() -> None:
    message = {"role": "assistant", "content": [{"type": "text", "text": "é"}]}
    assert turn(json.dumps(message).encode()) == message


@pytest.mark.parametrize("number", [2**63, 2**64, -(2**63) - 1, 10**40, 5, 2**63 - 1])
def test_integers_of_any_size_in_a_turn_stay_exact(number: int) -> None:
    message = {"role": "assistant", "content": None, "n": {"deep": [number]}, "f": 0.1}
    assert f'"deep":[{number}]'.encode() in line_of(response=json.dumps(message).encode())
    assert turn(json.dumps(message).encode()) == message


def test_what_is_wrong_outside_of_the_message_does_not_matter() -> None:
    text = '{"choices": [{"message": {"role": "assistant", "content": "a"}, "logprob": NaN}]}'
    assert turn(text.encode()) == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    "content",
    [
        '"\\ud800"',
        "NaN",
        "Infinity",
        "1e400",
        "9" * 5000,
        "[" * 2000 + "]" * 2000,
        "[" * 600 + "]" * 600,
    ],
    ids=["surrogate", "nan", "infinity", "overflow", "endless", "deep", "deep enough"],
)
def test_a_message_that_cannot_be_written_again_is_a_note(content: str) -> None:
    assert (
        note(response=f'{{"role": "assistant", "content": {content}}}'.encode()).reason
        == "bad-json"
    )


def test_a_turn_of_three_hundred_levels_is_written_again() -> None:
    content: Any = "x"
    for _ in range(300):
        content = [content]
    message = {"role": "assistant", "content": content}
    assert turn(json.dumps(message).encode()) == message


@pytest.mark.parametrize("column", ["response", "env_id", "group_id", "llm_model", "session_id"])
def test_text_that_is_not_utf8_is_a_note(column: str) -> None:
    assert note(**{column: b"a\xed\xa0\x80\xff"}).reason == "bad-json"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=10,
)


@settings(max_examples=150, deadline=None)
@given(
    turns=st.lists(st.dictionaries(st.text(), JSON), max_size=3),
    message=st.dictionaries(st.text(), JSON),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_every_history_and_turn_comes_back_exact(
    turns: list[Any], message: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    message = {**message, "role": "assistant"}
    message.pop("choices", None)
    found = messages(
        messages=json.dumps(turns, indent=indent, ensure_ascii=ascii_only).encode(),
        response=json.dumps(message, indent=indent, ensure_ascii=ascii_only).encode(),
    )
    assert json.dumps(found) == json.dumps([*turns, message])


# ---- which rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meta", "wanted"),
    [
        (b'{"event_type": "gateway_inference", "status_code": 200}', True),
        (b'{"event_type": "gateway_inference", "status_code": 399}', True),
        (b'{"event_type": "gateway_inference", "status_code": 400}', False),
        (b'{"event_type": "gateway_inference", "status_code": "503"}', False),
        (b'{"event_type": "gateway_inference", "status_code": null}', True),
        (b'{"event_type": "gateway_session_close"}', False),
        (b'{"event_type": "episode_summary", "x": NaN}', False),
        (b'{"event_type": "evaluation_summary"}', False),
        (b'{"event_type": ["evaluation_summary"]}', True),
        (b'{"synthetic_stop": true}', False),
        (b'{"synthetic_stop": false}', True),
        (b"not json {", True),
        (None, True),
    ],
)
def test_rows_that_are_no_turn_are_told_by_their_meta(meta: object, wanted: bool) -> None:
    assert is_trajectory(meta, PROMPT, b"a") is wanted


def test_nothing_said_and_nothing_answered_is_no_turn() -> None:
    assert not is_trajectory(None, b"[]", b"")
    assert not is_trajectory(None, b" [ ]\n", b"")
    assert is_trajectory(None, b"[]", b"a")
    assert is_trajectory(None, b"", b"")
    assert is_trajectory(None, PROMPT, b"")


def step(pk: int, flags: str = "", model: bytes = b"m") -> StepRow:
    return ROW._replace(
        pk=pk,
        is_completed="c" in flags,
        is_terminal="e" in flags,
        is_truncated="t" in flags,
        llm_model=model,
    )


def test_the_highest_completed_row_is_chosen_else_the_highest_that_ended() -> None:
    assert choose([step(1), step(2, "c"), step(3, "c"), step(4, "e"), step(5)]) == step(3, "c")
    assert choose([step(1, "e"), step(3, "t"), step(2, "e"), step(4)]) == step(3, "t")
    assert choose([step(1), step(2)]) is None
    assert choose([]) is None


def test_steps_start_after_the_run_before_and_are_of_one_model() -> None:
    rows = [step(1), step(2, "c"), step(3), step(4, model=b"judge"), step(5, "c"), step(6)]
    assert [row.pk for row in samples_of(rows)] == [3, 5]
    assert samples_of([step(1)]) == ()


def test_steps_share_the_reward_of_the_chosen_row_and_keep_their_own_step_reward() -> None:
    first = ROW._replace(pk=90, reward=None, step_reward=0.1, is_completed=False)
    samples = encoded(first, ROW)
    assert isinstance(samples, list)
    found = parse_samples(b"".join(sample.line for sample in samples))
    assert [one["reward"] for one in found] == [0.5, 0.5]
    assert [one["extra_info"]["reward_source"] for one in found] == ["reward", "reward"]
    assert [one["extra_info"]["step_reward"] for one in found] == [0.1, 0.25]
    assert [one["uid"] for one in found] == ["env-17:90", "env-17:96"]


def test_one_bad_step_makes_the_environment_one_note() -> None:
    found = encoded(ROW._replace(pk=90, messages=b"{"), ROW)
    assert isinstance(found, Note)
    assert (found.reason, found.rows) == ("bad-json", (90, 96))


# ---- batches ------------------------------------------------------------------------------------


def samples(*facts: dict[str, Any]) -> list[Sample]:
    made: list[Sample] = []
    for some in facts:
        found = encoded(ROW._replace(**some))
        assert isinstance(found, list)
        made += found
    return made


def test_a_batch_is_ordered_and_named_after_its_bytes() -> None:
    made = samples(
        {"environment": 9, "pk": 5, "meta": b'{"weight_version": 8}'},
        {"environment": 3, "pk": 7, "meta": b'{"weight_version": "x"}'},
        {"environment": 3, "pk": 6, "meta": b'{"weight_version": 4}'},
    )
    name, pieces = build_batch(42, made)
    data = b"".join(pieces)
    digest = hashlib.sha256(data).hexdigest()[:12]
    assert name.file_name == f"000000042-n3-w4.8-{digest}.jsonl"
    assert [(ref.environment, ref.step_pk) for ref in environment_refs(data)] == [
        (3, 6),
        (3, 7),
        (9, 5),
    ]
    assert build_batch(42, reversed(made)) == (name, pieces)


def test_a_large_batch_is_not_copied_and_is_the_same_bytes() -> None:
    long = json.dumps([{"role": "user", "content": "x" * 3_000_000}]).encode()
    made = samples(*({"environment": n, "pk": n, "messages": long} for n in (3, 1, 2, 4)))
    name, pieces = build_batch(1, made)
    assert {id(piece) for piece in pieces} == {id(one) for sample in made for one in sample.pieces}
    assert {len(piece) for piece in pieces} >= {len(long) - 1}  # all of it but its bracket
    assert name.digest == hashlib.sha256(b"".join(pieces)).hexdigest()[:12]


def test_a_batch_without_a_usable_version_is_named_zero() -> None:
    name, _ = build_batch(1, samples({"meta": None}))
    assert (name.lo, name.hi) == (0, 0)


def test_refs_say_what_a_batch_is_of_however_nasty_its_texts() -> None:
    inner = b'"extra_info": {"environment": 2}'
    nasty = b'[{"content": ",\\"extra_info\\":{\\"environment\\":1}", ' + inner + b"}]"
    data = b"".join(
        sample.line
        for sample in samples(
            {"messages": nasty, "env_id": b'a","extra_info":{"environment":5}}', "reward": -1.5},
            {"environment": 18, "response": b'{"role": "a", "extra_info": {"environment": 3}}'},
        )
    )
    first, second = environment_refs(data)
    env_id = 'a","extra_info":{"environment":5}}'
    assert first == Ref(17, env_id, "g1", "job-1", 96, 6, -1.5)
    assert second.environment == 18


def test_refs_of_lines_that_another_hand_wrote_are_the_same() -> None:
    line = line_of()
    other = json.dumps(json.loads(line), sort_keys=True).encode() + b"\n"
    assert environment_refs(other) == environment_refs(line)


@pytest.mark.parametrize(
    "data",
    [
        b"{}\n",
        b"[]\n",
        b"null\n",
        b"\n",
        b"x",
        b'{"extra_info":{"environment":1}}\n',
        b'{"a":1,"reward":1.0,"extra_info":{"environment":"1"}}\n',
        b"\0" * 100 + b"\n",
        b"\xff\n",
        b"[" * 5000 + b"\n",
    ],
)
def test_what_is_no_sample_is_corrupt(data: bytes) -> None:
    with pytest.raises(BatchCorrupt):
        environment_refs(line_of() + data)


@pytest.mark.parametrize("data", [b"x\n", b"[1]\n", b"{}", b"1" * 30 + b"x\n", b"\xff\n"])
def test_lines_that_do_not_parse_are_corrupt(data: bytes) -> None:
    with pytest.raises(BatchCorrupt):
        parse_samples(line_of() + data)


@settings(max_examples=200, deadline=None)
@given(data=st.binary() | st.binary().map(lambda tail: line_of() + tail + b"\n"))
def test_bytes_at_random_are_refs_or_corrupt(data: bytes) -> None:
    try:
        environment_refs(data)
    except BatchCorrupt:
        return
    assert data == b"" or data.startswith(b"{")


_PIECES = st.sampled_from(
    [
        *(b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\", b" ", b"\n", b"null", b"1e999", b"NaN"),
        *(b'{"role": "user", "content": "q"}', b'"\\ud800"', b"123456789012345678901234567890"),
        *(b'"reward": 9', b"[[[[", b"]]]]", b"\xff", b"\x00", b'"a": ', b"x" * 70, b"\r"),
    ]
)
_MESSAGES = st.one_of(
    st.lists(_PIECES, max_size=8).map(b"".join),
    st.lists(_PIECES, max_size=4).map(lambda inside: b"[" + b"".join(inside) + b"]"),
    st.builds(
        lambda before, after: b"[{" + before + b'"content": "' + b"x" * 70 + b'"' + after + b"}]",
        *[st.lists(_PIECES, max_size=3).map(b"".join)] * 2,
    ),
)


_RESPONSES = st.sampled_from([b"", b"text", b'{"role": "assistant"}']) | st.lists(
    _PIECES | st.sampled_from([b"\t", b"\x1b[0m", b"\x7f", "\xe9\u20ac".encode(), b"\xed\xa0\x80"]),
    max_size=8,
).map(b"".join)


@settings(max_examples=1000, deadline=None)
@given(messages=_MESSAGES, response=_RESPONSES)
def test_what_is_trusted_and_found_sound_is_what_was_looked_into_and_nothing_else(
    messages: bytes, response: bytes
) -> None:
    row = ROW._replace(messages=messages, response=response)
    looked_into = encoded(row)
    trusted = encode(
        (row,), null_reward=NullReward.FALLBACK, max_sample_bytes=1 << 28, trusted=True
    )
    if isinstance(trusted, list) and are_sound(trusted[0].line, [trusted[0].messages]):
        assert looked_into == trusted
    else:
        # Line breaks are taken out, and rare control characters escaped, where somebody looks;
        # nothing else is ever mended.
        is_rare = any(c < 0x20 and c not in b"\t\n\r" for c in response)
        has_breaks = b"\n" in messages or b"\r" in messages
        assert isinstance(looked_into, Note) or has_breaks or is_rare


def test_what_is_sound_is_found_so() -> None:
    for messages in (PROMPT, b"[" + PROMPT[1:-1] + b", " + b'{"content": "' + b"x" * 90 + b'"}]'):
        texts = (
            b"text",
            b"\x1b[1mbold",
            b' "of" C:\\ \t\r\n\\" \x7f',
            "\xe9\u20ac\U0001f600".encode(),
        )
        for response in (b"", *texts, b'{"role": "assistant", "content": [{"a": [1]}]}'):
            row = ROW._replace(messages=messages, response=response)
            assert isinstance(encoded(row), list)
            made = encode(
                (row,), null_reward=NullReward.FALLBACK, max_sample_bytes=999, trusted=True
            )
            assert made == encoded(row)
            assert isinstance(made, list)
            assert are_sound(made[0].line, [made[0].messages])
            start, end = made[0].messages
            assert json.loads(made[0].line)["messages"] == json.loads(made[0].line[start:end])
