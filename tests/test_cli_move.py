"""claim, ack, release, reject, requeue, rewind by hand: the directory before and after."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from spoold import fs
from spoold.layout import Place, RunDir, State
from spoold.spool import moves
from spoold.spool.moves import Found
from tests.support.commands import spoold
from tests.support.spools import ls, make_run_dir, put_batch

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run_dir(tmp_path / "run")
    return tmp_path / "run"


def test_claim_moves_the_oldest_pending_batch_into_inflight_and_prints_its_path(
    run: Path, capsys: Capsys
) -> None:
    newer, older = put_batch(run, 2), put_batch(run, 1)
    ran = spoold(capsys, "claim", run)
    assert ran == (0, f"{run}/inflight/{older.file_name}\n", "")
    assert ls(run) == [f"inflight/{older.file_name}", f"pending/{newer.file_name}"]


def test_claim_with_nothing_pending_exits_75_and_says_what_next(run: Path, capsys: Capsys) -> None:
    ran = spoold(capsys, "claim", run)
    assert ran == (
        75,
        "",
        f"spoold: nothing is pending in {run}; `spoold status {run}` says why\n",
    )


@pytest.mark.parametrize("damage", [b"", b"\0" * 100, b"torn"])
def test_claim_sets_a_corrupt_batch_aside_and_takes_the_next(
    run: Path, capsys: Capsys, damage: bytes
) -> None:
    corrupt, whole = put_batch(run, 1), put_batch(run, 2)
    (run / "pending" / corrupt.file_name).write_bytes(damage)
    ran = spoold(capsys, "claim", run)
    assert (ran.code, ran.out) == (0, f"{run}/inflight/{whole.file_name}\n")
    assert f"{corrupt.file_name} fails its digest" in ran.err
    assert ls(run) == [f"inflight/{whole.file_name}", f"rejected/corrupt/{corrupt.file_name}"]


def test_claim_with_a_timeout_returns_what_is_published_meanwhile(
    run: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, waiting, looks = fs.scan, threading.Event(), []

    def scan(path: str) -> fs.Listing:
        listing = real(path)
        looks.append(path)
        if len(looks) >= 4:  # two looks, each lists pending/ for folders and for files
            waiting.set()
        return listing

    monkeypatch.setattr(fs, "scan", scan)

    def publish() -> None:
        waiting.wait(10)
        put_batch(run, 1)

    publisher = threading.Thread(target=publish)
    publisher.start()
    began = time.monotonic()
    ran = spoold(capsys, "claim", run, "--timeout", 30)
    publisher.join()
    assert ran.code == 0
    assert [ran.out] == [f"{run}/{path}\n" for path in ls(run)]
    assert time.monotonic() - began < 10


def test_claim_with_a_timeout_gives_up_after_it(run: Path, capsys: Capsys) -> None:
    assert spoold(capsys, "claim", run, "--timeout", 0.05).code == 75


def test_ack_moves_to_acked_and_with_a_step_into_its_folder(run: Path, capsys: Capsys) -> None:
    first, second = put_batch(run, 1, where="inflight"), put_batch(run, 2, where="inflight/t-0")
    assert spoold(capsys, "ack", run, first.id).out == f"{run}/acked/{first.file_name}\n"
    ran = spoold(capsys, "ack", run, second.id, "--step", 120)
    assert ran.out == f"{run}/acked/step-000000120/{second.file_name}\n"
    assert ls(run) == [f"acked/{first.file_name}", f"acked/step-000000120/{second.file_name}"]


@pytest.mark.parametrize("form", ["id", "beginning", "file name", "path", "path in another folder"])
def test_a_batch_is_named_by_id_unique_beginning_or_path(
    run: Path, capsys: Capsys, form: str
) -> None:
    put_batch(run, 12, where="inflight")
    name = put_batch(run, 11, where="inflight")
    text = {
        "id": name.id,
        "beginning": "000000011",
        "file name": name.file_name,
        "path": f"{run}/inflight/{name.file_name}",
        "path in another folder": f"{run}/pending/{name.file_name}",
    }[form]
    assert spoold(capsys, "ack", run, text).code == 0
    assert f"acked/{name.file_name}" in ls(run)


def test_a_beginning_that_fits_several_batches_is_65_and_moves_nothing(
    run: Path, capsys: Capsys
) -> None:
    put_batch(run, 1, where="inflight")
    put_batch(run, 2, where="inflight")
    before = ls(run)
    ran = spoold(capsys, "ack", run, "00000000")
    assert ran.code == 65
    assert "2 batches" in ran.err
    assert ran.err.endswith("give more of the name\n")
    assert ls(run) == before


def test_an_unknown_batch_is_65(run: Path, capsys: Capsys) -> None:
    for word in (["ack"], ["release"], ["requeue"], ["reject", "--reason", "oom"], ["show"]):
        ran = spoold(capsys, word[0], run, "000000009", *word[1:])
        assert (ran.code, ran.out) == (65, "")
        assert "no batch '000000009'" in ran.err


def test_acking_twice_is_fine_and_says_so(run: Path, capsys: Capsys) -> None:
    name = put_batch(run, 1, where="inflight")
    spoold(capsys, "ack", run, name.id, "--step", 7)
    ran = spoold(capsys, "ack", run, name.id)
    assert (ran.code, ran.out) == (0, f"{run}/acked/step-000000007/{name.file_name}\n")
    assert "already" in ran.err
    assert ls(run) == [f"acked/step-000000007/{name.file_name}"]


def test_acking_a_batch_that_is_not_in_flight_is_65_and_says_where_it_lies(
    run: Path, capsys: Capsys
) -> None:
    name = put_batch(run, 1)
    ran = spoold(capsys, "ack", run, name.id)
    assert ran.code == 65
    assert "it lies in pending/" in ran.err
    assert ls(run) == [f"pending/{name.file_name}"]


def test_release_gives_a_batch_back_under_the_same_name(run: Path, capsys: Capsys) -> None:
    name = put_batch(run, 1, where="inflight/t-0", attempt=2)
    assert spoold(capsys, "release", run, name.id).code == 0
    assert ls(run) == [f"pending/{name.file_name}"]


def test_requeue_gives_a_batch_back_as_its_next_try(run: Path, capsys: Capsys) -> None:
    name = put_batch(run, 1, where="inflight/t-0")
    ran = spoold(capsys, "requeue", run, name.id)
    assert ran == (0, f"{run}/pending/{name.id}.try02.jsonl\n", "")
    assert ls(run) == [f"pending/{name.id}.try02.jsonl"]


def test_requeue_from_a_consumer_that_lives_says_what_will_happen(
    run: Path, capsys: Capsys
) -> None:
    name = put_batch(run, 1, where="inflight/t-0")
    lock = fs.Lock(f"{run}/inflight/t-0/.lock")
    assert lock.acquire()
    try:
        ran = spoold(capsys, "requeue", run, name.id)
    finally:
        lock.release()
    assert ran.code == 0
    assert ran.err == f"spoold: t-0 is alive; its ack of {name.id} will fail with BatchLost\n"


@pytest.mark.parametrize("where", ["pending", "inflight/t-0", "acked/step-000000001"])
def test_reject_moves_a_batch_from_anywhere_into_a_folder_named_after_the_reason(
    run: Path, capsys: Capsys, where: str
) -> None:
    name = put_batch(run, 1, where=where)
    ran = spoold(capsys, "reject", run, name.id, "--reason", "oom")
    assert (ran.code, ran.out) == (0, f"{run}/rejected/oom/{name.file_name}\n")
    assert ls(run) == [f"rejected/oom/{name.file_name}"]


def test_rejecting_twice_leaves_the_batch_where_it_is(run: Path, capsys: Capsys) -> None:
    name = put_batch(run, 1, where="rejected/oom")
    assert spoold(capsys, "reject", run, name.id, "--reason", "oom").code == 0
    assert ls(run) == [f"rejected/oom/{name.file_name}"]


def test_a_move_to_where_the_batch_lies_is_no_copy_of_it(run: Path) -> None:
    name = put_batch(run, 1, where="rejected/oom")
    found = Found(Place(State.REJECTED, "oom"), name)
    assert moves.reject(RunDir(str(run)), found, "oom") == found
    assert ls(run) == [f"rejected/oom/{name.file_name}"]


@pytest.mark.parametrize("reason", ["", "..", "a/b", "duplicate", "corrupt", "x" * 49])
def test_a_reason_that_cannot_name_a_folder_is_refused(
    run: Path, capsys: Capsys, reason: str
) -> None:
    name = put_batch(run, 1)
    assert spoold(capsys, "reject", run, name.id, "--reason", reason).code == 78
    assert ls(run) == [f"pending/{name.file_name}"]


def test_rewind_puts_later_steps_back_and_nothing_else(run: Path, capsys: Capsys) -> None:
    places = [
        "acked/step-000000005",
        "acked/step-000000006",
        "acked",
        "acked/stale",
        "inflight/t-0",
    ]
    names = [put_batch(run, seq, where=place) for seq, place in enumerate(places, 1)]
    ran = spoold(capsys, "rewind", run, "--step", 5)
    assert ran.out == f"{run}/pending/{names[1].file_name}\n"
    assert "1 batch acked after step 5" in ran.err
    places[1] = "pending"
    assert ls(run) == sorted(
        f"{place}/{name.file_name}" for place, name in zip(places, names, strict=True)
    )


@pytest.mark.parametrize(
    "args",
    [
        ["claim"],
        ["ack", "1"],
        ["release", "1"],
        ["reject", "1", "--reason", "oom"],
        ["requeue", "1"],
        ["rewind", "--step", "1"],
        ["prune"],
        ["status"],
        ["ls"],
        ["show", "1"],
    ],
)
def test_without_a_run_directory_every_command_exits_78_and_makes_nothing(
    tmp_path: Path, capsys: Capsys, args: list[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for folder in ("none", "file", "empty", "empty/"):
        path = f"{tmp_path}/{folder}"
        ran = spoold(capsys, args[0], path, *args[1:])
        assert (ran.code, ran.out) == (78, "")
        assert "no run directory" in ran.err
        assert f"`spoold run --run-dir {path.rstrip('/')}` makes one" in ran.err
        assert ran.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_directory_that_lacks_a_folder_is_not_moved_in(run: Path, capsys: Capsys) -> None:
    name = put_batch(run, 1)
    os.rmdir(run / "acked")
    ran = spoold(capsys, "claim", run)
    assert ran.code == 78
    assert "has no acked/" in ran.err
    assert ls(run) == [f"pending/{name.file_name}"]


def test_show_prints_a_line_for_each_sample(run: Path, capsys: Capsys) -> None:
    name = put_batch(run, 1, where="acked/step-000000003")
    ran = spoold(capsys, "show", run, "000000001")
    assert ran.code == 0
    size = os.path.getsize(run / "acked/step-000000003" / name.file_name)
    assert ran.out.splitlines() == [
        f"{run}/acked/step-000000003/{name.file_name}",
        f"1 sample, {size} bytes, weight versions 7 to 7",
        "env-0001:1  env-0001  reward 0.5 (reward)  w7  2 messages  stop",
    ]
    facts = json.loads(spoold(capsys, "show", run, "000000001", "--json").out)
    assert facts["id"] == name.id
    assert (facts["state"], facts["folder"]) == ("acked", "step-000000003")
    assert facts["samples"] == [
        {
            "uid": "env-0001:1",
            "instance_id": "env-0001",
            "environment": 1,
            "reward": 0.5,
            "reward_source": "reward",
            "weight_version": 7,
            "finish_reason": "stop",
            "messages": 2,
        }
    ]


def test_show_of_a_batch_that_fails_its_digest_is_65(run: Path, capsys: Capsys) -> None:
    name = put_batch(run, 1)
    with open(run / "pending" / name.file_name, "ab") as file:
        file.write(b" ")
    ran = spoold(capsys, "show", run, name.id)
    assert (ran.code, ran.out) == (65, "")
    assert "do not fit its name" in ran.err
