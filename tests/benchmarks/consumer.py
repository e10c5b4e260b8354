"""What a consumer costs: claim and ack beside two bare renames, and how soon it wakes.

    python -m tests.benchmarks.consumer [FOLDER]

The floor does what cannot be left out: reads and digests the file, renames it twice, and syncs both
folders after the second. Rounds of both take turns, and the best of each is compared: a disk is
noisy. Put FOLDER on the file system of real runs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from spoold import Consumer
from tests.support.handmade import make_run_dir, put, sample

BATCHES = 1000
ROUNDS = 3
WAITS = 50
SAMPLE_BYTES = 64 << 10


def fill(run: Path) -> None:
    """Put batches of one sample of 64 KB into pending/, durably enough to be out of the way."""
    row = sample(1)
    row["messages"] = [{"role": "user", "content": "x" * SAMPLE_BYTES}]
    for seq in range(1, BATCHES + 1):
        put(run, seq, samples=[row])
    os.sync()


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def bare(run: Path, *, digest: bool) -> None:
    """Claim and ack all that is pending by renames alone."""
    pending, own, acked = run / "pending", run / "inflight/bare", run / "acked"
    own.mkdir(exist_ok=True)
    for name in sorted(os.listdir(pending)):
        os.rename(pending / name, own / name)
        if digest:
            data = (own / name).read_bytes()
            assert hashlib.sha256(data).hexdigest()[:12] in name
        os.rename(own / name, acked / name)
        sync(acked)
        sync(own)


def consume(run: Path) -> None:
    """Claim and ack all that is pending with a Consumer."""
    with Consumer(run) as consumer:
        while (batch := consumer.claim()) is not None:
            batch.ack()


def timed(folder: Path, number: int, act: Callable[[Path], None]) -> float:
    run = make_run_dir(folder / f"run-{number}")
    fill(run)
    began = time.perf_counter()
    act(run)
    seconds = time.perf_counter() - began
    assert len(os.listdir(run / "acked")) == BATCHES
    return seconds


def latencies(folder: Path) -> list[float]:
    """Seconds from a rename into an empty pending/ until the waiting claim returns."""
    run = make_run_dir(folder / "waiting")
    parked = [(put(run, seq, where="parked")) for seq in range(1, WAITS + 1)]
    gone_in: list[float] = []
    acked = threading.Event()

    def publish() -> None:
        for name in parked:
            time.sleep(0.02)
            acked.clear()
            gone_in.append(time.perf_counter())
            os.rename(run / "parked" / name.file_name, run / "pending" / name.file_name)
            acked.wait(10)

    came = []
    with Consumer(run) as consumer:
        assert consumer.claim(timeout=0.05) is None
        thread = threading.Thread(target=publish)
        thread.start()
        for _ in parked:
            batch = consumer.claim(timeout=10.0)
            came.append(time.perf_counter())
            assert batch is not None
            batch.ack()
            acked.set()
        thread.join()
    return [after - before for before, after in zip(gone_in, came, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.consumer")
    parser.add_argument("folder", nargs="?", default=None)
    with tempfile.TemporaryDirectory(dir=parser.parse_args().folder) as made:
        acts: dict[str, Callable[[Path], None]] = {
            "bare renames": lambda run: bare(run, digest=False),
            "bare renames + digest": lambda run: bare(run, digest=True),
            "claim + ack": consume,
        }
        with Consumer(make_run_dir(Path(made) / "warm")) as consumer:
            consumer.claim()  # loads what a consumer loads late
        seconds: dict[str, list[float]] = {name: [] for name in acts}
        for turn in range(ROUNDS):
            for number, (name, act) in enumerate(acts.items()):
                seconds[name].append(timed(Path(made), turn * len(acts) + number, act))
        best = {name: min(all_) for name, all_ in seconds.items()}
        for name, each in best.items():
            print(f"{name:24} {each / BATCHES * 1e6:8.0f} us a batch")
        for name in ("bare renames", "bare renames + digest"):
            print(f"claim + ack runs at {best[name] / best['claim + ack']:.2f} of {name}")
        waits = sorted(latencies(Path(made)))
        print(
            f"a waiting claim returns after {statistics.median(waits) * 1e6:.0f} us (median), "
            f"{waits[-1] * 1e6:.0f} us (slowest of {WAITS})"
        )


if __name__ == "__main__":
    main()
