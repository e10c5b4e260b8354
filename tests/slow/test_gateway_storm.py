"""A gateway in a storm, and against its own description: no 500, and the spool as it should be."""

from __future__ import annotations

import http.client
import importlib.util
import itertools
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.chance import a_seed
from tests.support.gateways import Client, ask, needs_http, serve_command, url_of
from tests.support.handmade import ls, make_run_dir, put, sample
from tests.support.needs import needs
from tests.support.processes import ENVIRON, Players, until

pytestmark = [pytest.mark.slow, pytest.mark.alone]

CONNECTIONS, BATCHES = 64, 80
MEMORY_MB = 300


@pytest.fixture
def players(tmp_path: Path) -> Iterator[Players]:
    needs_http()
    with Players(tmp_path) as players:
        yield players


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run_dir(tmp_path / "run")


class Storm:
    """Whatever may come over a network, from many threads, until it is over."""

    def __init__(self, client: Client, seed: int) -> None:
        self.client = client
        self.is_over = threading.Event()
        self.statuses: Counter[int] = Counter()
        self.done: Counter[str] = Counter()
        self._numbers = itertools.count(seed)
        host, port = client.url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self._threads = [threading.Thread(target=self._blow) for _ in range(CONNECTIONS)]

    def __enter__(self) -> Storm:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _blow(self) -> None:
        rng = random.Random(next(self._numbers))
        acts: list[Callable[[random.Random], None]] = [
            self.ask_wrongly, self.ask_for_a_batch, self.half_close, self.leave, self.send_too_much,
            self.read_slowly, self.say_nonsense,
        ]  # fmt: skip
        while not self.is_over.is_set():
            act = rng.choice(acts)
            try:
                act(rng)
            except (OSError, http.client.HTTPException):
                self.done["cut off"] += 1
            self.done[act.__name__] += 1

    def _connect(self, sent: bytes) -> socket.socket:
        connected = socket.create_connection(self._address, 30)
        connected.sendall(sent)
        return connected

    def ask_wrongly(self, rng: random.Random) -> None:
        path = rng.choice(["/get_rollout_data", "/ack_rollout_data", "/rewind", "/x", "/health"])
        body = rng.choice([b"", b"{", b"[" * 1000, b'{"step":-5}', b'{"batch_id":"000000001"}',
                           b'{"max_groups":"all"}', rng.randbytes(500)])  # fmt: skip
        self.statuses[ask(self.client.url, path, body=body).status] += 1

    def ask_for_a_batch(self, rng: random.Random) -> None:
        self.statuses[self.client.get(max_groups=rng.randint(1, 9)).status] += 1

    def half_close(self, rng: random.Random) -> None:
        whole = b"POST /get_rollout_data HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
        with self._connect(whole[: rng.randint(1, len(whole))]) as connected:
            connected.shutdown(socket.SHUT_WR)
            while connected.recv(1 << 16):
                pass

    def leave(self, rng: random.Random) -> None:
        with self._connect(b"POST /get_rollout_data HTTP/1.1\r\nhost: x\r\n\r\n") as connected:
            connected.recv(rng.randint(1, 1 << 18))

    def send_too_much(self, rng: random.Random) -> None:
        path = rng.choice([b"/ack_rollout_data", b"/start_rollout"])
        encoding = rng.choice([b"content-length: 104857600", b"transfer-encoding: chunked"])
        head = b"POST " + path + b" HTTP/1.1\r\nhost: x\r\n" + encoding + b"\r\n\r\n"
        piece = b"x" * (1 << 20)
        if b"chunked" in encoding:
            piece = b"100000\r\n" + piece + b"\r\n"
        with self._connect(head) as connected:
            for _ in range(100):
                connected.sendall(piece)

    def read_slowly(self, rng: random.Random) -> None:
        with self._connect(b"POST /get_rollout_data HTTP/1.1\r\nhost: x\r\n\r\n") as connected:
            for _ in range(rng.randint(1, 20)):
                connected.recv(4096)
                if self.is_over.wait(0.05):
                    return

    def say_nonsense(self, rng: random.Random) -> None:
        said = rng.choice([b"\x16\x03\x01", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 50, b"A" * 70_000])
        with self._connect(said) as connected:
            connected.settimeout(1.0)
            connected.recv(1000)


def peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def test_a_storm_leaves_the_spool_as_it_should_be_and_one_client_served(
    run: Path, players: Players
) -> None:
    seed = a_seed()
    names, uids = [], []
    for seq in range(1, BATCHES + 1):
        text = "x" * (4 << 20 if seq % 20 == 0 else 20_000)
        rows = [sample(10 * seq + n) | {"messages": [{"content": text}]} for n in range(4)]
        names.append(put(run, seq, samples=rows))
        uids += [row["uid"] for row in rows]
    child = players.start("gateway", serve_command(run))
    client = Client(url_of(players))
    trained: list[str] = []
    last = ""
    with Storm(client, seed) as storm:
        began = time.monotonic()
        while len(trained) < len(uids):
            assert time.monotonic() - began < 240
            try:
                reply = client.get()
                if reply.status != 200 or not reply.json["success"]:
                    continue
                if reply.batch_id != last:
                    trained += reply.uids
                    last = reply.batch_id
                client.ack(reply.batch_id)
            except (OSError, http.client.HTTPException):
                continue
    until(lambda: client.health().status == 200, "a sign of health")
    print(f"{sum(storm.done.values())} acts: {storm.done}, answers: {storm.statuses}")
    assert trained == uids
    assert ls(run) == [f"acked/{name.file_name}" for name in names]
    # 503 is what too many connections at once get.
    assert set(storm.statuses) <= {200, 400, 404, 405, 413, 503}
    assert all(storm.done[act] for act in ("send_too_much", "half_close", "read_slowly", "leave"))
    print(f"{peak_mb(child.pid):.0f} MB at most")
    assert peak_mb(child.pid) < MEMORY_MB
    assert players.stop("gateway") == 0
    log = players.log("gateway").read_text()
    assert "bug" not in log
    assert "Traceback" not in log


def test_it_keeps_to_its_own_description(run: Path, players: Players, tmp_path: Path) -> None:
    needs(importlib.util.find_spec("schemathesis"), "schemathesis is in the dev extra")
    for seq in range(1, 200):
        put(run, seq)
    players.start("gateway", serve_command(run))
    schema = f"{url_of(players)}/openapi.json"
    command = [sys.executable, "-m", "schemathesis.cli", "run", schema, "--max-examples=40"]
    ran = subprocess.run(
        [*command, "--no-color"],
        cwd=tmp_path,
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr
    players.check("gateway")
    assert "bug" not in players.log("gateway").read_text()
    states = Counter(path.split("/")[0] for path in ls(run))
    assert states["pending"] + states["inflight"] + states["acked"] == 199
