"""A restart, over how many environments were acked before: until the first publish, and memory."""

from __future__ import annotations

import shutil
from pathlib import Path

from spoold.layout import BatchName, seq_name
from spoold.ledger import Entry
from tests.benchmarks import floor, machine
from tests.benchmarks.databases import build
from tests.benchmarks.table import MEMORY, Figure, Line, Panel, Report, number
from tests.support.batches import empty_run, env_id_of

NUMBERS = (10_000, 100_000, 1_000_000)
BATCH_SIZE = 64
ROUNDS = 3


def run(folder: Path, *, small: bool) -> Report:
    """Measure starts with one new environment to deliver, all others in the ledger."""
    figures: list[Figure] = []
    ours, limits, memory = [], [], []
    for delivered in (2000,) if small else NUMBERS:
        db = build(
            folder / "all.db", registered=delivered + 1, finished=delivered + 1, row_bytes=1000
        )
        seconds, limit, peak_mb = [], [], []
        for turn in range(1 if small else ROUNDS):
            run_dir = folder / f"run-{turn}"
            lay_down(run_dir, delivered)
            limit.append(floor.start(db, run_dir))
            shutil.rmtree(run_dir / "floor")
            with machine.serving(db, run_dir, linger_seconds=0) as daemon:
                seconds.append(daemon.wait_for("pending", 1) - daemon.began)
                daemon.come_to_rest()
                peak_mb.append(daemon.peak_mb())
            shutil.rmtree(run_dir)
        db.unlink()
        ours.append((delivered, min(seconds)))
        limits.append((delivered, min(limit)))
        memory.append((delivered, max(peak_mb)))
        at = f"{number(delivered)} acked"
        figures += [
            Figure(
                piece="delivered",
                what=f"{at}: exec to first publish",
                value=min(seconds),
                unit="s",
                beside=min(limit),
                of="list, read, scan",
            ),
            Figure(piece="delivered", what=f"{at}: memory", value=max(peak_mb), unit="MB"),
        ]
    panel = Panel("start to first publish", "environments acked before", "s")
    return Report(
        figures=tuple(figures),
        lines=(
            Line(name="spoold", points=tuple(ours), panel=panel),
            Line(name="list, read, scan", points=tuple(limits), limit=True, panel=panel),
            Line(
                panel=MEMORY,
                name="delivered",
                points=tuple(memory),
            ),
        ),
    )


def lay_down(run_dir: Path, delivered: int) -> None:
    """Make a run directory whose ledger has environments 1 … `delivered`, in pruned batches."""
    run = empty_run(run_dir)
    Path(run.house, seq_name(delivered)).touch()
    for seq, first in enumerate(range(1, delivered + 1, BATCH_SIZE), start=1):
        environments = tuple(range(first, min(first + BATCH_SIZE, delivered + 1)))
        name = BatchName(seq=seq, samples=len(environments), lo=3, hi=3, digest=f"{seq:012x}")
        entry = Entry(environments, env_id_of(environments[-1]))
        Path(run.ledger, name.id).write_bytes(entry.dump())
