"""A batch that is read before it is claimed: it stays everybody's, and is what its name says."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spoold import Batch, Consumer
from spoold.layout import BatchName
from spoold.reading import open_file, read
from tests.support.gateways import Client, needs_http, serving
from tests.support.handmade import ls, make_run_dir, put, sample
from tests.support.processes import until


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run_dir(tmp_path / "run")


@pytest.fixture
def consumer(run: Path) -> Iterator[Consumer]:
    with Consumer(run) as consumer:
        yield consumer


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the batches that were read, in order, each as often as it was."""
    names: list[str] = []

    def noted(act: Callable[[str], Any]) -> Callable[[str], Any]:
        def noting(path: str) -> Any:
            if path.endswith(".jsonl"):
                names.append(os.path.basename(path))
            return act(path)

        return noting

    monkeypatch.setattr("spoold.fs.read", noted(read))
    monkeypatch.setattr("spoold.fs.open_file", noted(open_file))
    return names


def ahead(consumer: Consumer) -> str:
    """Read ahead; return the id of the batch, "" for none."""
    found = consumer.read_ahead(bytearray)
    return found[0] if found is not None else ""


def claimed(consumer: Consumer) -> Batch:
    batch = consumer.claim()
    assert batch is not None
    return batch


# --- a consumer ----------------------------------------------------------------------------------


def test_reading_ahead_returns_the_bytes_of_the_oldest_and_claims_nothing(
    run: Path, consumer: Consumer
) -> None:
    first, second = put(run, 1), put(run, 2)
    before = ls(run)
    found = consumer.read_ahead(bytearray)
    assert found is not None
    assert (found[0], bytes(found[1])) == (
        first.id,
        (run / "pending" / first.file_name).read_bytes(),
    )
    assert ls(run) == before
    assert consumer.held == ()
    with Consumer(run, name="other") as other:
        assert [claimed(other).id, claimed(other).id] == [first.id, second.id]
    assert consumer.claim() is None
    assert ahead(consumer) == ""


def test_what_was_read_ahead_is_not_read_again_by_its_claim(
    run: Path, consumer: Consumer, reads: list[str]
) -> None:
    names = [put(run, seq) for seq in (1, 2)]
    for name in names:
        assert ahead(consumer) == name.id
        assert claimed(consumer).id == name.id
    assert reads == [name.file_name for name in names]


def test_what_came_back_is_claimed_first_whatever_was_read_ahead(
    run: Path, consumer: Consumer, reads: list[str]
) -> None:
    first, second = put(run, 1), put(run, 2)
    claimed(consumer).ack(step=5)
    assert ahead(consumer) == second.id
    consumer.rewind(step=4)
    assert [claimed(consumer).id, claimed(consumer).id] == [first.id, second.id]
    assert len(reads) == 4


def _rewritten(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"0.5", b"0.7"))
    os.utime(path, ns=(1, 1))


def _replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"0.5", b"0.7"))
    before = path.stat()
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


def _truncated(path: Path) -> None:
    before = path.stat()
    os.truncate(path, before.st_size - 1)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _exchanged(path: Path) -> None:
    """Give the file that was read the name of another batch."""
    name = BatchName.parse(path.name)
    assert name is not None
    path.rename(path.with_name(path.name.replace(name.digest, "0123456789ab")))


@pytest.mark.parametrize("change", [_rewritten, _replaced, _truncated, _exchanged])
def test_a_file_that_was_changed_after_it_was_read_ahead_is_set_aside(
    run: Path, consumer: Consumer, change: Callable[[Path], None]
) -> None:
    name = put(run, 1)
    assert ahead(consumer) == name.id
    change(run / "pending" / name.file_name)
    assert consumer.claim() is None
    (aside,) = (run / "rejected/corrupt").iterdir()
    assert aside.name.startswith("000000001-")


def test_a_file_that_fails_its_digest_is_left_to_its_claim(run: Path, consumer: Consumer) -> None:
    first, second = put(run, 1), put(run, 2)
    _rewritten(run / "pending" / first.file_name)
    before = ls(run)
    assert ahead(consumer) == ""
    assert ls(run) == before
    assert claimed(consumer).id == second.id
    assert ls(run) == [
        f"inflight/trainer-0/{second.file_name}",
        f"rejected/corrupt/{first.file_name}",
    ]


def test_what_is_no_batch_is_passed_over(run: Path, consumer: Consumer) -> None:
    names = [put(run, seq) for seq in (1, 2, 3, 4)]
    paths = [run / "pending" / name.file_name for name in names]
    paths[0].rename(run / "elsewhere")
    paths[0].symlink_to(run / "elsewhere")
    paths[1].unlink()
    os.mkfifo(paths[1])
    paths[2].unlink()
    paths[2].mkdir()
    (run / "pending/000000000-notes.txt").touch()
    assert ahead(consumer) == names[3].id


def test_nothing_is_read_ahead_while_own_batches_come_first(run: Path) -> None:
    own = put(run, 2, where="inflight/trainer-0")
    put(run, 1)
    with Consumer(run) as consumer:
        assert ahead(consumer) == ""
        assert claimed(consumer).id == own.id
        assert ahead(consumer) != ""


# --- the gateway ---------------------------------------------------------------------------------


@pytest.fixture
def client(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    needs_http()
    monkeypatch.setattr("spoold.gateway.app.WAIT_SECONDS", 0.1)
    with serving(run) as client:
        yield client


def rest(client: Client) -> None:
    """Return when all that the thread of the disk was asked for is done."""
    client.health()


def test_while_a_client_trains_the_next_batch_is_read_and_nobody_is_kept_from_it(
    run: Path, client: Client, reads: list[str]
) -> None:
    names = [put(run, seq) for seq in (1, 2, 3)]
    assert client.get().batch_id == names[0].id
    until(lambda: len(reads) == 2, "the next one to be read")
    rest(client)
    assert ls(run) == [
        f"inflight/gateway/{names[0].file_name}",
        *(f"pending/{name.file_name}" for name in names[1:]),
    ]
    with Consumer(run) as other:
        assert claimed(other).id == names[1].id
        client.ack(names[0].id)
        reply = client.get()
        assert (reply.batch_id, reply.uids) == (names[2].id, ["env-0003:3"])


def test_each_batch_is_read_once_if_it_lies_there_in_time(
    run: Path, client: Client, reads: list[str]
) -> None:
    names = [put(run, seq, samples=[sample(seq), sample(seq + 100)]) for seq in range(1, 6)]
    for name in names:
        reply = client.get()
        assert (reply.batch_id, len(reply.uids)) == (name.id, 2)
        rest(client)
        client.ack(name.id)
    assert reads == [name.file_name for name in names]


def test_a_batch_that_was_changed_after_it_was_read_ahead_is_not_answered(
    run: Path, client: Client, reads: list[str]
) -> None:
    names = [put(run, seq) for seq in (1, 2, 3)]
    client.get()
    until(lambda: len(reads) == 2, "the next one to be read")
    rest(client)
    _rewritten(run / "pending" / names[1].file_name)
    client.ack(names[0].id)
    assert client.get().batch_id == names[2].id
    assert f"rejected/corrupt/{names[1].file_name}" in ls(run)


def test_a_slow_reader_gets_its_own_batch_whatever_others_are_answered_meanwhile(
    run: Path, client: Client
) -> None:
    # Too much for the buffers of the connection, little enough to be kept in memory.
    texts = {seq: f"{seq}" * (7 << 20) for seq in range(1, 5)}
    names = [
        put(run, seq, samples=[sample(seq) | {"messages": [{"content": text}]}])
        for seq, text in texts.items()
    ]
    host, port = client.url.removeprefix("http://").split(":")
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(30)
        slow.connect((host, int(port)))
        slow.sendall(b"POST /get_rollout_data HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        came = bytearray(slow.recv(1000))
        for seq, name in enumerate(names, start=1):
            reply = client.get()
            assert reply.batch_id == name.id
            assert reply.json["data"]["data"][0]["messages"] == [{"content": texts[seq]}]
            rest(client)
            client.ack(name.id)
        while b'"batch_id"' not in came[-300:]:
            came += slow.recv(1 << 20)
    item = json.loads(came.partition(b"\r\n\r\n")[2])["data"]["data"][0]
    assert (item["uid"], item["messages"]) == ("env-0001:1", [{"content": texts[1]}])
