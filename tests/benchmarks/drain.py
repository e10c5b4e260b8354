"""Drain a backlog with `--once`, over the size of a row: MB/s beside the bare loop's."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.benchmarks import floor, machine
from tests.benchmarks.databases import build
from tests.benchmarks.table import Figure, Line, Panel, Report

TOTAL_BYTES = 200_000_000
SIZES = (2_000, 20_000, 200_000, 2_000_000)
BATCH_SIZE = 64
BATCH_BYTES = 64 << 20
ROUNDS = 3


def run(folder: Path, *, small: bool) -> Report:
    """Measure each size; loading Python and its modules is left out."""
    total = 2_000_000 if small else TOTAL_BYTES
    rounds = 1 if small else ROUNDS
    sizes = SIZES[1:2] if small else SIZES
    figures, ours, limits = [], [], []
    for size in sizes:
        db = build(
            folder / "rows.db", registered=total // size, finished=total // size, row_bytes=size
        )
        speed, limit, peak_mb = _measure(db, folder, size, rounds=rounds)
        db.unlink()
        ours.append((size, speed))
        limits.append((size, limit))
        figures += [
            Figure(
                piece="drain",
                what=f"rows of {size // 1000} KB",
                value=speed,
                unit="MB/s",
                beside=limit,
                of="bare loop",
                higher_is_better=True,
            ),
            Figure(
                piece="drain", what=f"rows of {size // 1000} KB, memory", value=peak_mb, unit="MB"
            ),
        ]
    panel = Panel("draining a backlog", "bytes in a row", "MB/s")
    return Report(
        figures=tuple(figures),
        lines=(
            Line(name="spoold", points=tuple(ours), panel=panel),
            Line(name="bare loop", points=tuple(limits), limit=True, panel=panel),
        ),
    )


def _measure(db: Path, folder: Path, size: int, *, rounds: int) -> tuple[float, float, float]:
    """Return MB/s, the limit's MB/s, and the peak of memory: best of some rounds in turns."""
    batch_size = min(BATCH_SIZE, max(1, BATCH_BYTES // size))
    seconds, limit_seconds, peak_mb, written = [], [], 0.0, 0
    for _ in range(rounds):
        run_dir = folder / "run"
        ran = machine.once(db, run_dir, batch_size=batch_size)
        seconds.append(ran.seconds)
        peak_mb = max(peak_mb, ran.peak_mb)
        files = list((run_dir / "pending").iterdir())
        written = sum(file.stat().st_size for file in files)
        lines = sum(int(file.name.split("-")[1][1:]) for file in files)
        shutil.rmtree(run_dir)
        bare = folder / "bare"
        limit_seconds.append(
            floor.drain(db, bare, batch_size=batch_size, line_bytes=written // lines)
        )
        shutil.rmtree(bare)
    return written / min(seconds) / 1e6, written / min(limit_seconds) / 1e6, peak_mb
