"""Put, get and ack the same 64 KB batches: out of a database through spoold, and other queues.

spoold's put is the whole of `spoold run --once`: SQL, JSON, digest and every fsync. The queues are
given the bytes ready made. dirq never syncs.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from spoold import Consumer
from tests.benchmarks import machine
from tests.benchmarks.databases import build
from tests.benchmarks.table import Figure, Report

NUMBER = 400
ROUNDS = 3
BATCH_BYTES = 64_000


def dirq(folder: Path, batches: list[bytes]) -> None:
    queue = import_module("dirq.QueueSimple").QueueSimple(str(folder))
    for data in batches:
        queue.add(data)
    for name in list(queue):
        if queue.lock(name):
            queue.get(name)
            queue.remove(name)


def persist_queue(folder: Path, batches: list[bytes]) -> None:
    queue = import_module("persistqueue").SQLiteAckQueue(str(folder), auto_commit=True)
    for data in batches:
        queue.put(data)
    for _ in batches:
        queue.ack(queue.get(block=False))


def litequeue(folder: Path, batches: list[bytes]) -> None:
    folder.mkdir()
    queue = import_module("litequeue").LiteQueue(str(folder / "queue.db"))
    for data in batches:
        queue.put(data.decode())
    for _ in batches:
        queue.done(queue.pop().message_id)


Peer: TypeAlias = Callable[[Path, list[bytes]], None]
PEERS: dict[str, tuple[str, Peer]] = {
    "litequeue": ("litequeue", litequeue),
    "persist-queue SQLiteAckQueue": ("persistqueue", persist_queue),
    "dirq QueueSimple, never synced": ("dirq", dirq),
}


def run(folder: Path, *, small: bool) -> Report:
    """Compare batches a second; rounds of all take turns, the best of each counts."""
    number, rounds = (10, 1) if small else (NUMBER, ROUNDS)
    db = build(folder / "rows.db", registered=number, finished=number, row_bytes=BATCH_BYTES)
    ours: list[float] = []
    peers: dict[str, list[float]] = {name: [] for name in PEERS if _is_there(name)}
    for _ in range(rounds):
        run_dir = folder / "run"
        put = machine.once(db, run_dir, batch_size=1).seconds
        batches = [path.read_bytes() for path in sorted((run_dir / "pending").iterdir())]
        began = time.perf_counter()
        with Consumer(run_dir) as consumer:
            while (batch := consumer.claim()) is not None:
                batch.ack()
        ours.append(put + time.perf_counter() - began)
        shutil.rmtree(run_dir)
        for name, seconds in peers.items():
            seconds.append(_timed(PEERS[name][1], folder / "peer", batches))
            shutil.rmtree(folder / "peer")
    speed = number / min(ours)
    return Report(
        figures=tuple(
            Figure(
                piece="hops",
                what="64 KB: put, get, ack",
                value=speed,
                unit="batches/s",
                beside=number / min(seconds),
                of=name,
                higher_is_better=True,
            )
            for name, seconds in peers.items()
        )
        or (Figure(piece="hops", what="64 KB: put, get, ack", value=speed, unit="batches/s"),)
    )


def _is_there(name: str) -> bool:
    module, _ = PEERS[name]
    there = find_spec(module) is not None
    if not there:
        print(f"  hops: {name} is skipped: no module {module}; pip install '.[bench]'", flush=True)
    return there


def _timed(peer: Peer, folder: Path, batches: list[bytes]) -> float:
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        peer(folder, batches)
    return time.perf_counter() - began
