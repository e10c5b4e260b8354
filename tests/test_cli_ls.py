"""ls: one line a file, from names alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spoold import fs
from spoold.errors import SpoolWriteError
from tests.support.commands import spoold
from tests.support.spools import make_run_dir, put_batch

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run_dir(tmp_path / "run")
    return tmp_path / "run"


def words(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


def test_ls_lists_batches_notes_and_unknown_files_with_where_they_lie(
    run: Path, capsys: Capsys
) -> None:
    waiting = put_batch(run, 4, samples=3, weight=9)
    claimed = put_batch(run, 3, where="inflight/t-0", attempt=2)
    acked = put_batch(run, 2, where="acked/step-000000120")
    put_batch(run, 1, where="rejected/corrupt")
    (run / ".spoold/ledger" / acked.id).touch()
    (run / "rejected/env-1077.bad-json.json").touch()
    (run / "pending/what is this").touch()
    (run / "notes.txt").touch()
    ran = spoold(capsys, "ls", run)
    assert (ran.code, ran.err) == (0, "")
    assert words(ran.out) == [
        [waiting.file_name, "pending", "3", "samples", "w9.9"],
        [claimed.file_name, "inflight/t-0", "1", "sample", "w7.7"],
        [acked.file_name, "acked/step-000000120", "1", "sample", "w7.7", "settled"],
        [put_batch(run, 1).file_name, "rejected/corrupt", "1", "sample", "w7.7"],
        ["env-1077.bad-json.json", "rejected", "note", "bad-json"],
        ["notes.txt", ".", "unknown"],
        ["what", "is", "this", "pending", "unknown"],
    ]


def test_ls_of_one_state_lists_only_that(run: Path, capsys: Capsys) -> None:
    put_batch(run, 1)
    name = put_batch(run, 2, where="acked/stale")
    (run / "pending/odd").touch()
    (run / "rejected/env-1.bad-json.json").touch()
    assert [row[0] for row in words(spoold(capsys, "ls", run, "acked").out)] == [name.file_name]
    found = spoold(capsys, "ls", run, "acked", "--json").json
    assert [each["id"] for each in found["batches"]] == [name.id]
    assert (found["notes"], found["unknown"]) == ([], [])


def test_ls_of_an_empty_run_directory_prints_nothing(run: Path, capsys: Capsys) -> None:
    assert spoold(capsys, "ls", run) == (0, "", "")


def test_the_json_of_ls_is_a_contract(run: Path, capsys: Capsys) -> None:
    name = put_batch(run, 2, where="acked/step-000000120", samples=2)
    (run / ".spoold/ledger" / name.id).touch()
    (run / "rejected/env-1077.bad-json.json").touch()
    (run / "acked/junk").touch()
    assert spoold(capsys, "ls", run, "--json").json == {
        "format": 1,
        "run_dir": str(run),
        "batches": [
            {
                "id": name.id,
                "path": f"acked/step-000000120/{name.file_name}",
                "state": "acked",
                "folder": "step-000000120",
                "seq": 2,
                "samples": 2,
                "weights": [7, 7],
                "settled": True,
            }
        ],
        "notes": [
            {
                "path": "rejected/env-1077.bad-json.json",
                "environment": 1077,
                "reason": "bad-json",
            }
        ],
        "unknown": ["acked/junk"],
        "unreadable": [],
    }


def test_long_adds_size_and_age_and_clamps_an_age_in_the_future(run: Path, capsys: Capsys) -> None:
    name = put_batch(run, 1)
    path = run / "pending" / name.file_name
    os.utime(path, (4e9, 4e9))
    size_bytes = path.stat().st_size
    assert words(spoold(capsys, "ls", run, "--long").out) == [
        [name.file_name, "pending", "1", "sample", "w7.7", str(size_bytes), "bytes", "0", "s"]
    ]
    facts = spoold(capsys, "ls", run, "--long", "--json").json["batches"][0]
    assert (facts["bytes"], facts["modified"]) == (size_bytes, 4e9)


def test_a_name_that_is_no_utf8_and_one_with_a_newline_stay_one_line(
    run: Path, capsys: Capsys
) -> None:
    os.close(os.open(os.fsencode(run) + b"/pending/\xff\xfe", os.O_CREAT))
    os.close(os.open(os.fsencode(run) + b"/pending/a\nb\x1b[31m", os.O_CREAT))
    name = put_batch(run, 1)
    ran = spoold(capsys, "ls", run)
    assert [row[0] for row in words(ran.out)] == [name.file_name, "a\\nb\\x1b[31m", "\\xff\\xfe"]
    assert spoold(capsys, "ls", run, "--json").json["unknown"] == [
        "pending/a\\nb\\x1b[31m",
        "pending/\\xff\\xfe",
    ]


def test_folders_links_and_pipes_with_a_batch_name_are_unknown(run: Path, capsys: Capsys) -> None:
    name = put_batch(run, 1)
    os.rename(run / "pending" / name.file_name, run / "real")
    os.symlink(run / "real", run / "pending" / name.file_name)
    os.mkfifo(run / "acked" / name.file_name)
    os.makedirs(run / "rejected/oom" / name.file_name)
    found = spoold(capsys, "ls", run, "--json").json
    assert found["batches"] == []
    assert found["unknown"] == [
        f"acked/{name.file_name}",
        f"pending/{name.file_name}",
        "real",
        f"rejected/oom/{name.file_name}",
    ]


def test_a_real_copy_is_listed_twice_and_a_batch_that_moved_meanwhile_once(
    run: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = put_batch(run, 1)
    put_batch(run, 2)
    copied = put_batch(run, 2, where="inflight")
    real = fs.scan

    def claim_between(path: str) -> fs.Listing:
        if path.endswith("/inflight") and (run / "pending" / name.file_name).exists():
            (run / "pending" / name.file_name).rename(run / "inflight" / name.file_name)
        return real(path)

    monkeypatch.setattr(fs, "scan", claim_between)
    assert [row[:2] for row in words(spoold(capsys, "ls", run).out)] == [
        [copied.file_name, "pending"],
        [name.file_name, "inflight"],
        [copied.file_name, "inflight"],
    ]


def test_a_folder_that_cannot_be_read_is_not_empty_but_an_error_after_the_rest(
    run: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = put_batch(run, 1)
    real = fs.scan

    def refuse(path: str) -> fs.Listing:
        if path.endswith("/acked"):
            raise SpoolWriteError(f"cannot list {path}: permission denied", hint="chmod it")
        return real(path)

    monkeypatch.setattr(fs, "scan", refuse)
    ran = spoold(capsys, "ls", run)
    assert words(ran.out)[0][0] == name.file_name
    assert (ran.code, ran.err) == (
        74,
        f"spoold: cannot list {run}/acked: permission denied; chmod it\n",
    )


def test_ls_opens_no_file(run: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    put_batch(run, 1)
    (run / "rejected/env-1.bad-json.json").touch()

    def refuse(path: str) -> bytes:
        raise AssertionError(path)

    monkeypatch.setattr(fs, "read", refuse)
    assert spoold(capsys, "ls", run).code == 0
