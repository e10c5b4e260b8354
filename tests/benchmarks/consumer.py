"""What a consumer costs: claim and ack beside two bare renames, and how soon it wakes.

Rounds of both take turns, and the best of each is compared: a disk is noisy.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from spoold import Consumer
from tests.benchmarks import floor
from tests.benchmarks.table import Figure, Report
from tests.support.handmade import make_run_dir, put, sample

BATCHES = 1000
ROUNDS = 3
WAITS = 50
SAMPLE_BYTES = 64 << 10


def fill(run_dir: Path, batches: int) -> None:
    """Put batches of one sample of 64 KB into pending/, durably enough to be out of the way."""
    row = sample(1)
    row["messages"] = [{"role": "user", "content": "x" * SAMPLE_BYTES}]
    for seq in range(1, batches + 1):
        put(run_dir, seq, samples=[row])
    os.sync()


def consume(run_dir: Path) -> None:
    """Claim and ack all that is pending with a Consumer."""
    with Consumer(run_dir) as consumer:
        while (batch := consumer.claim()) is not None:
            batch.ack()


def timed(run_dir: Path, batches: int, act: Callable[[Path], None]) -> float:
    """Return the seconds that one batch takes."""
    make_run_dir(run_dir)
    fill(run_dir, batches)
    began = time.perf_counter()
    act(run_dir)
    seconds = time.perf_counter() - began
    assert len(os.listdir(run_dir / "acked")) == batches
    return seconds / batches


def latencies(run_dir: Path, waits: int) -> list[float]:
    """Seconds from a rename into an empty pending/ until the waiting claim returns."""
    make_run_dir(run_dir)
    parked = [(put(run_dir, seq, where="parked")) for seq in range(1, waits + 1)]
    gone_in: list[float] = []
    acked = threading.Event()

    def publish() -> None:
        for name in parked:
            time.sleep(0.02)
            acked.clear()
            gone_in.append(time.perf_counter())
            os.rename(run_dir / "parked" / name.file_name, run_dir / "pending" / name.file_name)
            acked.wait(10)

    came = []
    with Consumer(run_dir) as consumer:
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


def run(folder: Path, *, small: bool) -> Report:
    """Measure one consumer that drains pending/, and one that waits."""
    batches, rounds, waits = (20, 1, 5) if small else (BATCHES, ROUNDS, WAITS)
    acts: dict[str, Callable[[Path], None]] = {
        "spoold": consume,
        "bare renames": lambda run_dir: floor.claim_and_ack(run_dir, digest=False),
        "bare renames + digest": lambda run_dir: floor.claim_and_ack(run_dir, digest=True),
    }
    with Consumer(make_run_dir(folder / "warm")) as consumer:
        consumer.claim()  # loads what a consumer loads late
    seconds: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(rounds):
        for name, act in acts.items():
            run_dir = folder / f"{turn}-{name.replace(' ', '-')}"
            seconds[name].append(timed(run_dir, batches, act))
    speeds = {name: 1 / min(all_) for name, all_ in seconds.items()}
    woken = statistics.median(latencies(folder / "waiting", waits))
    return Report(
        figures=(
            *(
                Figure(
                    piece="consumer",
                    what="claim + ack, 64 KB",
                    value=speeds["spoold"],
                    unit="batches/s",
                    beside=speeds[name],
                    of=name,
                    higher_is_better=True,
                )
                for name in acts
                if name != "spoold"
            ),
            Figure(
                piece="consumer",
                what="rename to waiting claim, median",
                value=woken * 1e6,
                unit="us",
            ),
        )
    )
