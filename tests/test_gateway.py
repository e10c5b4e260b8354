"""The gateway: what clients are answered, what their acks do, and what lies where afterwards."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spoold import Consumer, fs
from spoold.errors import SpoolWriteError
from spoold.layout import BatchName, RunDir
from spoold.ledger import Entry
from spoold.spool import moves, statusfile
from spoold.spool.statusfile import Status
from tests.support.gateways import Client, needs_http, serving
from tests.support.handmade import ls, make_run_dir, put, sample
from tests.support.processes import until


@pytest.fixture(autouse=True)
def gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_http()
    monkeypatch.setattr("spoold.gateway.app.WAIT_SECONDS", 0.1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run_dir(tmp_path / "run")


def put_lines(run: Path, seq: int, *lines: bytes) -> BatchName:
    """Put a batch of any bytes, with the right digest."""
    data = b"".join(lines)
    digest = hashlib.sha256(data).hexdigest()[:12]
    name = BatchName(seq=seq, samples=len(lines), lo=7, hi=7, digest=digest)
    (run / "pending" / name.file_name).write_bytes(data)
    return name


def line(**changes: Any) -> bytes:
    return json.dumps(sample(1) | changes).encode() + b"\n"


def groups(seq: int, *sizes: int) -> list[dict[str, object]]:
    """Samples of groups of these sizes."""
    return [
        sample(100 * seq + 10 * number + member, group=f"g{seq}-{number}")
        for number, size in enumerate(sizes)
        for member in range(size)
    ]


# --- get -----------------------------------------------------------------------------------------


def test_items_are_the_lines_of_the_batch_to_the_byte(run: Path) -> None:
    odd = b'{"uid": "e:1",  "instance_id":"g","messages":[{"n":123456789012345678901234567890}],'
    odd += b'"reward":1E-2,"extra_info":{"weight_version":7,"text":"a\\n\\u00e9"}}\n'
    put_lines(run, 1, line(), odd)
    with serving(run) as client:
        reply = client.get()
    assert reply.status == 200
    assert int(reply.headers["content-length"]) == len(reply.body)
    assert b'"data":[' + line().rstrip() + b"," + odd.rstrip() + b"]" in reply.body
    assert reply.json["data"]["data"][1]["messages"][0]["n"] == 123456789012345678901234567890


def test_meta_info_says_what_the_batch_holds(run: Path) -> None:
    rows = groups(1, 2, 1)
    rows[0]["reward"], rows[1]["reward"], rows[2]["reward"] = 1, 0.25, -0.5
    rows[2]["extra_info"]["weight_version"] = 10
    name = put(run, 1, samples=rows, weights=(7, 10))
    with serving(run) as client:
        data = client.get().json["data"]
    assert data["meta_info"] == {
        "total_samples": 3,
        "avg_reward": 0.25,
        "finished_groups": ["g1-0", "g1-1"],
        "avg_weight_version": 8.0,
        "max_weight_version": 10,
        "batch_id": name.id,
    }
    assert [item["uid"] for item in data["data"]] == [row["uid"] for row in rows]


def test_numbers_in_meta_info_are_finite_whatever_the_samples_hold(run: Path) -> None:
    version = 2**63 - 1
    extra = {"weight_version": version}
    put_lines(run, 1, *(line(reward=1.7e308, extra_info=extra) for _ in range(3)))
    with serving(run) as client:
        meta = client.get().json["data"]["meta_info"]
    assert math.isfinite(meta["avg_reward"])
    assert meta["avg_reward"] == pytest.approx(1.7e308)
    assert meta["max_weight_version"] == version
    assert meta["avg_weight_version"] == pytest.approx(version)


def test_the_same_batch_comes_until_it_is_acked_then_the_next(run: Path) -> None:
    first, second = put(run, 1), put(run, 2)
    with serving(run) as client:
        replies = [client.get() for _ in range(3)]
        assert [reply.batch_id for reply in replies] == [first.id] * 3
        assert len({json.dumps(reply.json["data"]) for reply in replies}) == 1
        assert ls(run) == [f"inflight/gateway/{first.file_name}", f"pending/{second.file_name}"]
        client.ack(first.id)
        assert client.get().batch_id == second.id
        assert ls(run) == [f"acked/{first.file_name}", f"inflight/gateway/{second.file_name}"]


def test_who_asks_again_before_the_ack_is_told_and_the_log_says_it_once(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(run, 1)
    with serving(run) as client, caplog.at_level(logging.WARNING, "spoold"):
        words = [client.get().json["message"] for _ in range(3)]
    assert ["answered before" in one for one in words] == [False, True, True]
    said = [record.fields for record in caplog.records if "asked again" in record.message]
    assert len(said) == 1
    assert "--ack on-next-get" in said[0]["remedy"]


def test_nothing_there_is_no_success_and_says_why(run: Path) -> None:
    with serving(run) as client:
        reply = client.get()
    assert reply.status == 200
    assert reply.json["success"] is False
    assert "no daemon runs on" in reply.json["message"]
    assert reply.json["data"] == {
        "data": [],
        "meta_info": {
            "total_samples": 0,
            "avg_reward": 0.0,
            "finished_groups": [],
            "avg_weight_version": 0.0,
            "max_weight_version": 0,
            "batch_id": "",
        },
    }


def in_thread(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    came: list[Any] = []
    thread = threading.Thread(target=lambda: came.append(act()))
    thread.start()
    return thread, came


def test_a_get_waits_a_little_and_others_are_served_meanwhile(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spoold.gateway.app.WAIT_SECONDS", 30.0)
    acked = put(run, 1, where="acked")
    with serving(run) as client:
        threads = [in_thread(client.get) for _ in range(8)]
        assert client.ack(acked.id).status == 200
        assert client.health().status == 200
        assert not any(came for _, came in threads)
        name = put(run, 2)
        for thread, came in threads:
            thread.join(30)
            assert came[0].batch_id == name.id


def test_a_batch_is_answered_whole_whatever_max_groups_says(run: Path) -> None:
    put(run, 1, samples=groups(1, 2, 2, 2))
    with serving(run) as client:
        reply = client.get(max_groups=2)
        assert reply.json["data"]["meta_info"]["total_samples"] == 6
        assert "3 groups, not 2: a batch is answered and acked whole" in reply.json["message"]
        assert "whole" not in client.get(max_groups=3).json["message"]


@pytest.mark.parametrize(
    "bad",
    [b"{}\n", b"nonsense\n", b"[1]\n", b"\n", line(reward=None), line(reward="1"),
     line(extra_info={"weight_version": "7"}), line(instance_id=None), line().rstrip()],
)  # fmt: skip
def test_a_batch_that_cannot_be_sent_is_set_aside_and_the_next_one_sent(
    run: Path, bad: bytes
) -> None:
    name, good = put_lines(run, 1, line(), bad), put(run, 2)
    with serving(run, releases=False) as client:
        assert client.get().batch_id == good.id
    assert ls(run) == [
        f"inflight/gateway/{good.file_name}",
        f"rejected/unreadable/{name.file_name}",
    ]


def test_a_batch_that_fails_its_digest_is_passed_over(run: Path) -> None:
    bad, good = put(run, 1), put(run, 2)
    (run / "pending" / bad.file_name).write_bytes(b"\0" * 100)
    with serving(run) as client:
        assert client.get().batch_id == good.id
    assert f"rejected/corrupt/{bad.file_name}" in ls(run)


def test_a_held_batch_that_was_moved_away_is_not_waited_for(run: Path) -> None:
    first, second = put(run, 1), put(run, 2)
    with serving(run) as client:
        client.get()
        source = run / "inflight/gateway" / first.file_name
        source.rename(run / "rejected" / first.file_name)
        assert client.get().batch_id == second.id


# --- ack -----------------------------------------------------------------------------------------


def test_an_ack_with_a_step_goes_under_that_step_and_may_be_repeated(run: Path) -> None:
    name = put(run, 1)
    with serving(run) as client:
        client.get()
        for step in (12, 13):
            reply = client.ack(name.id, step=step)
            assert (reply.status, reply.json["success"]) == (200, True)
        assert ls(run) == [f"acked/step-000000012/{name.file_name}"]
        assert "acked before" in reply.json["message"]


def test_an_ack_without_a_step_is_final(run: Path) -> None:
    name = put(run, 1)
    with serving(run) as client:
        client.get()
        client.ack(name.id, step=None)
        assert client.rewind(step=-1).json["batch_ids"] == []
    assert ls(run) == [f"acked/{name.file_name}"]


@pytest.mark.parametrize("where", ["inflight/gateway", "pending"])
def test_an_ack_is_right_after_a_restart_wherever_the_batch_went(run: Path, where: str) -> None:
    name = put(run, 1)
    with serving(run, releases=where == "pending") as client:
        client.get()
    assert ls(run) == [f"{where}/{name.file_name}"]
    with serving(run) as client:
        assert client.ack(name.id, step=3).status == 200
        assert client.ack(name.id, step=3).status == 200
    assert ls(run) == [f"acked/step-000000003/{name.file_name}"]


def test_an_ack_is_right_for_a_batch_that_the_daemon_gave_back_meanwhile(run: Path) -> None:
    name = put(run, 1)
    with serving(run) as client:
        client.get()
        (found,) = moves.find(RunDir(str(run)), moves.State.INFLIGHT)
        moves.requeue(RunDir(str(run)), found)
        assert client.ack(name.id).status == 200
    assert ls(run) == [f"acked/{name.next_attempt().file_name}"]


def test_an_ack_that_was_made_by_hand_is_an_ack(run: Path) -> None:
    name, following = put(run, 1), put(run, 2)
    with serving(run) as client:
        client.get()
        (run / "inflight/gateway" / name.file_name).rename(run / "acked" / name.file_name)
        assert client.ack(name.id).status == 200
        assert client.get().batch_id == following.id


@pytest.mark.parametrize("where", ["inflight/trainer-1", "inflight", "rejected/oom"])
def test_a_batch_in_other_hands_is_not_acked(run: Path, where: str) -> None:
    name = put(run, 1, where=where)
    with serving(run) as client:
        reply = client.ack(name.id)
    assert reply.status == 409
    assert f"it lies in {where}/ now" in reply.json["message"]
    assert ls(run) == [f"{where}/{name.file_name}"]


def test_an_ack_of_a_batch_whose_file_was_pruned_succeeds(run: Path) -> None:
    name = put(run, 1, where="acked")
    (run / ".spoold/ledger" / name.id).write_bytes(Entry((1,), "env-0001").dump())
    (run / "acked" / name.file_name).unlink()
    with serving(run) as client:
        assert client.ack(name.id).status == 200


def test_an_ack_after_the_source_was_replaced_succeeds(run: Path) -> None:
    held, other = put(run, 1), put(run, 2)
    retired = run / "retired/2026-11-29T20:00:00Z-job"
    for state in ("pending", "inflight"):
        (retired / state).mkdir(parents=True)
    with serving(run) as client:
        client.get()
        (run / "inflight/gateway" / held.file_name).rename(retired / "inflight" / held.file_name)
        (run / "pending" / other.file_name).rename(retired / "pending" / other.file_name)
        assert client.ack(held.id).status == 200
        assert client.ack(other.id).status == 200
        fresh = put(run, 3)
        assert client.get().batch_id == fresh.id


@pytest.mark.parametrize(
    "batch_id",
    ["", "nonsense", "../../etc/passwd", "\0", "000000001", "é" * 1000, "{id}.jsonl",
     "000000009-n1-w7.7-000000000000"],
)  # fmt: skip
def test_an_unknown_batch_is_404_with_words(run: Path, batch_id: str) -> None:
    name = put(run, 1)
    with serving(run) as client:
        client.get()
        reply = client.ack(batch_id.format(id=name.id))
    assert (reply.status, reply.json["success"], reply.json["retryable"]) == (404, False, False)
    assert 'the "batch_id" of meta_info' in reply.json["message"]


class Disk:
    """Lets moves into a folder fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails = ""
        self.after_rename = False
        move = fs.move

        def failing(source: str, target: str) -> None:
            if self.fails and f"/{self.fails}/" in target:
                if self.after_rename:
                    os.rename(source, target)
                raise SpoolWriteError(
                    f"cannot move {source}: no space left on device",
                    hint="free some space",
                    errno=errno.ENOSPC,
                    state_unknown=self.after_rename,
                )
            move(source, target)

        monkeypatch.setattr(fs, "move", failing)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("after_rename", [False, True])
def test_an_ack_that_the_disk_refuses_may_be_repeated(
    run: Path, disk: Disk, after_rename: bool
) -> None:
    name = put(run, 1)
    with serving(run) as client:
        client.get()
        disk.fails, disk.after_rename = "acked", after_rename
        reply = client.ack(name.id)
        assert (reply.status, reply.json["retryable"]) == (503, True)
        assert "no space left on device; free some space" in reply.json["message"]
        disk.fails = ""
        assert client.ack(name.id).status == 200
    assert ls(run) == [f"acked/{name.file_name}"]


def test_a_run_directory_that_goes_away_is_no_500_and_may_come_back(run: Path) -> None:
    first, second = put(run, 1), put(run, 2)
    with serving(run) as client:
        assert client.get().batch_id == first.id
        run.rename(run.with_name("away"))
        reply = client.get()
        assert (reply.status, reply.json["success"]) == (200, False)
        assert "is not there yet" in reply.json["message"]
        reply = client.ack(first.id)
        assert (reply.status, reply.json["retryable"]) == (503, True)
        assert client.health().status == 503
        run.with_name("away").rename(run)
        assert client.ack(first.id).status == 200
        assert client.get().batch_id == second.id
        assert client.health().json["status"] == "healthy"


def test_a_folder_that_cannot_be_read_is_no_batch_and_the_reason(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = put(run, 1)
    with serving(run) as client:
        with monkeypatch.context() as broken:
            broken.setattr(
                "spoold.consumer.names._names_in",
                lambda path: (_ for _ in ()).throw(
                    SpoolWriteError(f"cannot list {path}: permission denied")
                ),
            )
            reply = client.get()
            assert (reply.status, reply.json["success"]) == (200, False)
            assert "permission denied" in reply.json["message"]
            assert client.health().status == 503
        assert client.get().batch_id == name.id
        assert client.health().status == 200


# --- clients that never ack ----------------------------------------------------------------------


def test_on_next_get_each_get_acks_the_one_before(run: Path) -> None:
    names = [put(run, seq) for seq in (1, 2)]
    with serving(run, ack="on-next-get", releases=False) as client:
        assert [client.get().batch_id for _ in range(3)] == [names[0].id, names[1].id, ""]
    assert ls(run) == [f"acked/{name.file_name}" for name in names]


def test_on_next_get_an_ack_may_come_all_the_same(run: Path) -> None:
    first, second = put(run, 1), put(run, 2)
    with serving(run, ack="on-next-get", releases=False) as client:
        client.get()
        assert client.ack(first.id, step=4).status == 200
        assert client.get().batch_id == second.id
        assert client.ack(first.id, step=4).status == 200
    assert ls(run)[0] == f"acked/step-000000004/{first.file_name}"


def big_row(number: int) -> dict[str, object]:
    return sample(number) | {"messages": [{"role": "user", "content": "x" * (8 << 20)}]}


class SlowReader:
    """Asks for a batch, and reads no more of it than it must."""

    def __init__(self, client: Client, reads: int = 1000) -> None:
        host, port = client.url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect((host, int(port)))
        head = f"POST /get_rollout_data HTTP/1.1\r\nhost: {host}\r\ncontent-length: 0\r\n\r\n"
        self.socket.sendall(head.encode())
        self.read = self.socket.recv(reads)

    def __enter__(self) -> SlowReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def test_on_next_get_an_answer_that_was_not_read_to_its_end_comes_again(run: Path) -> None:
    first, second = put(run, 1, samples=[big_row(1)]), put(run, 2)
    with serving(run, ack="on-next-get") as client:
        with SlowReader(client) as reader:
            assert reader.read.startswith(b"HTTP/1.1 200 OK")
            assert client.get().batch_id == first.id  # while the other is still reading
        assert client.get().batch_id == second.id
    assert f"acked/{first.file_name}" in ls(run)


def test_on_next_get_a_client_that_left_early_gets_it_again(run: Path) -> None:
    first = put(run, 1, samples=[big_row(1)])
    put(run, 2)
    with serving(run, ack="on-next-get") as client:
        for _ in range(3):
            with SlowReader(client):
                pass
        assert client.get().batch_id == first.id


def test_on_next_get_a_client_that_starts_gets_what_the_one_before_may_have_died_with(
    run: Path,
) -> None:
    first, second = put(run, 1), put(run, 2)
    with serving(run, ack="on-next-get") as client:
        client.get()
        client.start(num_repeat_per_sample=1)
        assert client.get().batch_id == first.id
        assert client.get().batch_id == second.id


def test_on_next_get_nothing_new_comes_while_the_ack_fails(run: Path, disk: Disk) -> None:
    first, second = put(run, 1), put(run, 2)
    with serving(run, ack="on-next-get") as client:
        client.get()
        disk.fails = "acked"
        for _ in range(2):
            reply = client.get()
            assert (reply.status, reply.json["success"]) == (200, False)
            assert "no space left on device" in reply.json["message"]
        assert f"inflight/gateway/{first.file_name}" in ls(run)
        disk.fails = ""
        assert client.get().batch_id == second.id


# --- start and rewind ----------------------------------------------------------------------------


def say_group_size(run: Path, group_size: int | None) -> None:
    status = Status(
        version="0",
        pid=1,
        host="h",
        started=0.0,
        updated=0.0,
        job="j",
        url="u",
        ready_when="finished",
        group_size=group_size,
        state="delivering",
    )
    statusfile.write(RunDir(str(run)), status)


STARTED = {
    "num_process": "100",
    "task_type": "math",
    "num_repeat_per_sample": 4,
    "sampling_params": {"temperature": 1.0},
    "skip_instance_ids": ["g1", "g2"],
    "restart_training": True,
}


@pytest.mark.parametrize(
    ("told", "wanted", "differs"), [(8, 4, True), (4, 4, False), (0, 1, False), (0, 4, True),
                                    (None, 4, False), (8, "4", True)],
)  # fmt: skip
def test_a_group_size_that_is_not_the_daemons_is_said_loudly(
    run: Path, caplog: pytest.LogCaptureFixture, told: int, wanted: object, differs: bool
) -> None:
    say_group_size(run, told)
    with serving(run) as client, caplog.at_level(logging.WARNING, "spoold"):
        reply = client.start(**STARTED | {"num_repeat_per_sample": wanted})
    assert (reply.status, reply.json["success"]) == (200, True)
    assert reply.json["message"].startswith("WARNING: ") is differs
    assert any(record.message == "group sizes differ" for record in caplog.records) is differs
    if differs:
        assert f"groups of {told}: run the daemon with --group-size 4" in reply.json["message"]


def test_groups_of_another_size_are_said_loudly_with_each_batch(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    right, wrong = put(run, 1, samples=groups(1, 4, 4)), put(run, 2, samples=groups(2, 4, 3))
    with serving(run) as client, caplog.at_level(logging.WARNING, "spoold"):
        client.start(**STARTED)
        assert "groups of" not in client.get().json["message"]
        client.ack(right.id)
        assert "groups of 3, 4 samples, not 4" in client.get().json["message"]
        assert "groups of 3, 4 samples, not 4" in client.start(**STARTED).json["message"]
        client.ack(wrong.id)
    said = [record.fields for record in caplog.records if record.message == "group sizes differ"]
    assert [fields["batch"] for fields in said] == [wrong.id]


def test_a_start_throws_nothing_away(run: Path) -> None:
    names = [put(run, 1, samples=groups(1, 4)), put(run, 2, samples=groups(2, 4))]
    with serving(run) as client:
        client.get()
        before = ls(run)
        reply = client.start(**STARTED | {"skip_instance_ids": ["g1-0", "g2-0"]})
        assert "2 skip_instance_ids are ignored" in reply.json["message"]
        assert "restart_training is ignored" in reply.json["message"]
        assert ls(run) == before
        assert client.get().batch_id == names[0].id


def test_a_client_may_have_finished_a_hundred_thousand_groups(run: Path) -> None:
    finished = [f"{number:036x}" for number in range(100_000)]
    with serving(run) as client:
        assert client.start(**STARTED | {"skip_instance_ids": finished}).status == 200


def test_a_rewind_brings_back_what_was_acked_later_in_its_order(run: Path) -> None:
    names = [put(run, seq) for seq in (1, 2, 3)]
    with serving(run) as client:
        for step, name in enumerate(names, start=1):
            assert client.get().batch_id == name.id
            client.ack(name.id, step=step)
        reply = client.rewind(step=1)
        assert reply.json["batch_ids"] == [name.id for name in names[1:]]
        for step, name in enumerate(names[1:], start=2):
            assert client.get().batch_id == name.id
            client.ack(name.id, step=step)
    assert [path.split("/")[1] for path in ls(run)] == [f"step-00000000{n}" for n in (1, 2, 3)]


# --- beside others -------------------------------------------------------------------------------


def test_it_shares_the_spool_with_other_consumers(run: Path) -> None:
    first, second = put(run, 1), put(run, 2)
    with serving(run) as client, Consumer(run, name="trainer-0") as consumer:
        assert client.get().batch_id == first.id
        batch = consumer.claim()
        assert batch is not None
        assert batch.id == second.id
        assert client.ack(second.id).status == 409
        batch.ack()
        assert client.ack(second.id).status == 200


def test_a_stop_gives_back_what_is_held_under_the_same_name(run: Path) -> None:
    name = put(run, 1)
    with serving(run) as client:
        client.get()
    assert ls(run) == [f"pending/{name.file_name}"]


def test_a_removed_run_directory_does_not_keep_it_from_ending(run: Path) -> None:
    put(run, 1)
    with serving(run, releases=False) as client:
        client.get()
        shutil.rmtree(run)
        assert client.get().json["success"] is False


def test_waiting_costs_next_to_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spoold.gateway.app.WAIT_SECONDS", 0.5)
    with serving(run) as client:
        client.get()
        before = time.process_time()
        client.get()
        assert time.process_time() - before < 0.25


def test_the_answer_to_many_at_once_is_the_same_batch(run: Path) -> None:
    name = put(run, 1)
    put(run, 2)
    with serving(run) as client:
        threads = [in_thread(client.get) for _ in range(16)]
        until(lambda: all(came for _, came in threads), "all answers")
        assert {came[0].batch_id for _, came in threads} == {name.id}
