from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from spoold.ledger import (
    REMEMBERED,
    Entry,
    Ledger,
    Merged,
    parse_entry,
    parse_merged,
    parse_merged_name,
)


def test_an_entry_is_one_json_object_as_agreed() -> None:
    entry = Entry((1001, 1002), "b")
    assert json.loads(entry.dump()) == {"environments": [1001, 1002], "env_id": "b"}
    assert parse_entry(entry.dump()) == entry


def test_a_merged_file_is_one_json_object_as_agreed() -> None:
    merged = Merged(BitMap64([1, 2, 2**40]), ((2, "b"), (2**40, "c")))
    facts = json.loads(merged.dump())
    assert facts["remembered"] == [[2, "b"], [2**40, "c"]]
    assert set(BitMap64.deserialize(base64.b64decode(facts["roaring64"]))) == {1, 2, 2**40}
    assert parse_merged(merged.dump()) == merged


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 64,
        b"[]",
        b'{"environments": [1, 2',
        b'{"environments": [], "env_id": "a"}',
        b'{"environments": [1]}',
        b'{"environments": [true], "env_id": "a"}',
        b'{"environments": ["1"], "env_id": "a"}',
        b'{"environments": [0], "env_id": "a"}',
    ],
)
def test_a_torn_or_foreign_entry_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_entry(data)


@given(st.binary(max_size=80))
def test_no_bytes_break_the_parsers(data: bytes) -> None:
    for parse in (parse_entry, parse_merged):
        with pytest.raises(ValueError):
            parse(data)


@given(st.binary(max_size=60))
def test_no_bitmap_breaks_the_parser(data: bytes) -> None:
    text = json.dumps({"roaring64": base64.b64encode(data).decode(), "remembered": []})
    try:
        merged = parse_merged(text.encode())
    except ValueError:
        return
    assert isinstance(merged.environments, BitMap64)


def test_the_ledger_remembers_the_highest_environment_of_the_last_thousand_batches() -> None:
    ledger = Ledger()
    for n in range(1, 3 * REMEMBERED):
        ledger.add(f"batch-{n}", Entry((n,), f"env-{n}"))
    assert len(ledger.environments) == 3 * REMEMBERED - 1
    assert REMEMBERED <= len(ledger.remembered) <= 2 * REMEMBERED
    last = 3 * REMEMBERED - 1
    assert all(ledger.remembered[n] == f"env-{n}" for n in range(last - REMEMBERED + 1, last + 1))


def test_a_merged_file_stands_for_its_parts_and_older_merged_files() -> None:
    ledger = Ledger()
    older = Merged(BitMap64([1, 2]), ((2, "b"),))
    parts = [("x", Entry((3, 5), "e")), ("y", Entry((4,), "d"))]
    merged = ledger.merge(parts, [older])
    assert set(merged.environments) == {1, 2, 3, 4, 5}
    assert merged.remembered == ((2, "b"), (5, "e"), (4, "d"))


def test_only_merged_names_are_merged_names() -> None:
    assert parse_merged_name("merged-12") == 12
    assert parse_merged_name("merged-") is None
    assert parse_merged_name("xmerged-1") is None
