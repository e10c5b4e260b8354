from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spoold.layout import (
    MOVES,
    BatchName,
    NoteName,
    Place,
    State,
    batch_id_of,
    is_name,
    parse_step_folder,
    precedence,
    step_folder,
)

NAME = "000000042-n64-w6.7-5f3c9a1b2c3d.jsonl"


def test_a_batch_name_is_taken_apart_and_put_together_again() -> None:
    name = BatchName.parse(NAME)
    assert name == BatchName(seq=42, samples=64, lo=6, hi=7, digest="5f3c9a1b2c3d")
    assert name.file_name == NAME
    assert name.id == NAME.removesuffix(".jsonl")


def test_the_batch_id_is_the_same_for_every_attempt() -> None:
    name = BatchName.parse(NAME)
    assert name is not None
    third = name.next_attempt().next_attempt()
    assert third.file_name == "000000042-n64-w6.7-5f3c9a1b2c3d.try03.jsonl"
    assert third.id == name.id
    assert batch_id_of(third.file_name) == name.id


@pytest.mark.parametrize(
    "name",
    [
        "",
        "000000042-n64-w6.7-5f3c9a1b2c3d",
        "42-n64-w6.7-5f3c9a1b2c3d.jsonl",
        "0000000042-n64-w6.7-5f3c9a1b2c3d.jsonl",
        "000000042-n0-w6.7-5f3c9a1b2c3d.jsonl",
        "000000042-n64-w06.7-5f3c9a1b2c3d.jsonl",
        "000000042-n64-w6.7-5F3C9A1B2C3D.jsonl",
        "000000042-n64-w6.7-5f3c9a1b2c3d.try01.jsonl",
        "000000042-n64-w6.7-5f3c9a1b2c3d.try2.jsonl",
        "000000042-n64-w6.7-5f3c9a1b2c3d.try002.jsonl",
        "000000042-n64-w6.7-5f3c9a1b2c3d.jsonl.tmp",
        "000000042-n64-w6.7-5f3c9a1b2c3d.jsonl\n",
        "00000004\uff12-n64-w6.7-5f3c9a1b2c3d.jsonl",
    ],
)
def test_what_is_not_a_batch_name_to_the_letter_is_none(name: str) -> None:
    assert BatchName.parse(name) is None
    assert batch_id_of(name) is None


@given(
    seq=st.integers(1, 10**18 - 1),
    samples=st.integers(1, 10**9 - 1),
    lo=st.integers(0, 2**63 - 1),
    hi=st.integers(0, 2**63 - 1),
    digest=st.from_regex(r"[0-9a-f]{12}", fullmatch=True),
    attempt=st.integers(1, 999_999),
)
def test_every_name_that_is_made_can_be_read(
    seq: int, samples: int, lo: int, hi: int, digest: str, attempt: int
) -> None:
    name = BatchName(seq=seq, samples=samples, lo=lo, hi=hi, digest=digest, attempt=attempt)
    assert BatchName.parse(name.file_name) == name
    assert batch_id_of(name.file_name) == name.id
    assert name.file_name.isascii()
    assert len(name.file_name) < 120


@given(st.text(max_size=60))
def test_no_text_breaks_the_parsers(text: str) -> None:
    name = BatchName.parse(text)
    assert (name is None) == (batch_id_of(text) is None)
    note = NoteName.parse(text)
    assert note is None or note.file_name == text
    step = parse_step_folder(text)
    assert step is None or step_folder(step) == text


def test_a_note_name_tells_environment_and_reason() -> None:
    assert NoteName.parse("env-1077.bad-json.json") == NoteName(environment=1077, reason="bad-json")
    assert NoteName.parse("env-01077.bad-json.json") is None
    assert NoteName.parse("env-1077.json") is None


def test_duplicate_and_corrupt_count_for_nothing() -> None:
    assert Place(State.REJECTED, "oom").counts
    assert not Place(State.REJECTED, "duplicate").counts
    assert not Place(State.REJECTED, "corrupt").counts
    assert Place(State.ACKED, "duplicate").counts


def test_of_two_files_the_one_that_is_further_on_stays_then_the_higher_try() -> None:
    ranks = [
        precedence(Place(State.PENDING), 9),
        precedence(Place(State.REJECTED, "oom"), 1),
        precedence(Place(State.INFLIGHT, "t"), 1),
        precedence(Place(State.INFLIGHT, "t"), 2),
        precedence(Place(State.ACKED), 1),
    ]
    assert ranks == sorted(ranks)


def test_every_move_ends_in_another_state_than_it_may_begin_in_but_reject() -> None:
    for word, (sources, target) in MOVES.items():
        assert (target in sources) == (word == "reject")


@pytest.mark.parametrize("name", ["trainer-0", "A", "9_x", "a" * 48])
def test_names_of_consumers(name: str) -> None:
    assert is_name(name)


@pytest.mark.parametrize("name", ["", "-a", "_a", ".a", "a/b", "a b", "é", "a" * 49, "a\n"])
def test_what_cannot_name_a_consumer(name: str) -> None:
    assert not is_name(name)
