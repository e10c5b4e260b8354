"""A big acked/, over how many files it holds: CPU until an ack is settled, memory, pruning."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from spoold.layout import BatchName, Place, RunDir, State, seq_name
from spoold.ledger import Entry
from tests.benchmarks import floor, machine
from tests.benchmarks.databases import build
from tests.benchmarks.table import MEMORY, Figure, Line, Panel, Report, number
from tests.support.batches import empty_run, env_id_of, put_batch
from tests.support.processes import ENVIRON, until

NUMBERS = (1_000, 10_000, 50_000, 200_000)
ACKS = 200
ROUNDS = 4
PAUSE_SECONDS = 0.005
PRUNED_BARE = 10_000
INFLIGHT = Place(State.INFLIGHT)
ACKED = Place(State.ACKED)


def run(folder: Path, *, small: bool) -> Report:
    """Measure acks one by one into one folder that grows; then prune it."""
    run_dir = folder / "run"
    Path(empty_run(run_dir).house, seq_name(NUMBERS[-1] + ACKS)).touch()
    numbers, acks = ((50,), 5) if small else (NUMBERS, ACKS)
    db = build(folder / "idle.db", registered=numbers[-1] + acks)
    figures: list[Figure] = []
    cpu, memory = [], []
    there = 0
    for files in numbers:
        fill(run_dir, there, files)
        seconds, peak_mb = _ack(db, run_dir, first=files, acks=acks)
        there = files + acks
        cpu.append((files, seconds * 1e3))
        memory.append((files, peak_mb))
        at = f"{number(files)} files in acked/"
        figures += [
            Figure(
                piece="acked",
                what=f"{at}: CPU of an ack",
                value=cpu[-1][1],
                unit="ms",
                beside=cpu[0][1],
                of=f"with {number(numbers[0])} files",
            ),
            Figure(piece="acked", what=f"{at}: memory", value=peak_mb, unit="MB"),
        ]
    figures.append(_prune(folder, run_dir, bare=100 if small else PRUNED_BARE))
    return Report(
        figures=tuple(figures),
        lines=(
            Line(
                panel=Panel("CPU of an ack seen", "files in acked/", "ms"),
                name="spoold",
                points=tuple(cpu),
            ),
            Line(
                panel=MEMORY,
                name="files in acked/",
                points=tuple(memory),
            ),
        ),
    )


def fill(run_dir: Path, first: int, end: int) -> None:
    """Put files into acked/ that the ledger has; nobody reads a byte of them."""
    for seq in range(first + 1, end + 1):
        name = BatchName(seq=seq, samples=1, lo=3, hi=3, digest=f"{seq:012x}")
        (run_dir / "acked" / name.file_name).touch()
        entry = Entry((seq,), env_id_of(seq))
        (run_dir / ".spoold/ledger" / name.id).write_bytes(entry.dump())


def _ack(db: Path, run_dir: Path, *, first: int, acks: int) -> tuple[float, float]:
    """Return the CPU seconds that an ack costs the daemon, in the best round, and its memory."""
    run = RunDir(str(run_dir))
    Path(run.status_json).unlink(missing_ok=True)
    names = [put_batch(run, seq, [seq], INFLIGHT) for seq in range(first + 1, first + acks + 1)]
    with machine.serving(db, run_dir) as daemon:
        until(lambda: os.path.exists(run.status_json), "the daemon to start")
        daemon.come_to_rest()
        best = math.inf
        size = -(-acks // ROUNDS)
        for some in (names[at : at + size] for at in range(0, acks, size)):
            before = daemon.cpu_seconds()
            for name in some:
                os.rename(run.file(INFLIGHT, name.file_name), run.file(ACKED, name.file_name))
                time.sleep(PAUSE_SECONDS)
            entries = [f"{run.ledger}/{name.id}" for name in some]
            until(partial(_all_exist, entries), "the entries of what was acked")
            best = min(best, (daemon.cpu_seconds() - before) / len(some))
        return best, daemon.peak_mb()


def _all_exist(paths: list[str]) -> bool:
    return all(map(os.path.exists, paths))


def _prune(folder: Path, run_dir: Path, *, bare: int) -> Figure:
    other = folder / "bare"
    empty_run(other)
    fill(other, 0, bare)
    limit = floor.prune(other) / bare
    number_of_files = len(os.listdir(run_dir / "acked"))
    began = time.perf_counter()
    command = [sys.executable, "-m", "spoold", "prune", str(run_dir)]
    subprocess.run(
        command, check=True, env=ENVIRON, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    seconds = time.perf_counter() - began
    assert os.listdir(run_dir / "acked") == []
    return Figure(
        piece="acked",
        what=f"prune {number(number_of_files)} files, each",
        value=seconds / number_of_files * 1e6,
        unit="us",
        beside=limit * 1e6,
        of="read the entry, unlink",
    )
