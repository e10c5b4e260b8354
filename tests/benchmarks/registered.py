"""A live database, over how many environments are registered: a completion, idling, memory."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks import floor, machine
from tests.benchmarks.databases import build
from tests.benchmarks.table import MEMORY, Figure, Line, Panel, Report, number
from tests.support.rollouts import Rollouts, open_rollouts

NUMBERS = (10_000, 100_000, 1_000_000)
RUNNING = 1000
COMPLETIONS = 40
PAUSE_SECONDS = 0.05
IDLE_SECONDS = 6.0
ROW_BYTES = 20_000


def run(folder: Path, *, small: bool) -> Report:
    """Measure a daemon with 1,000 running environments, some of which complete."""
    figures: list[Figure] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    full = (NUMBERS, IDLE_SECONDS, COMPLETIONS)
    numbers, idle_seconds, completions = ((2000,), 0.2, 3) if small else full
    for registered in numbers:
        db = build(
            folder / "live.db",
            registered=registered,
            finished=1,
            running=RUNNING,
            row_bytes=ROW_BYTES,
        )
        found = _measure(db, folder, idle_seconds=idle_seconds, completions=completions)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name, value in found.items():
            curves.setdefault(name, []).append((registered, value))
        figures += _figures(registered, found)
    cpu = Panel("CPU of one completion", "environments registered", "ms")
    return Report(
        figures=tuple(figures),
        lines=(
            Line(name="spoold", points=tuple(curves["cpu_ms"]), panel=cpu),
            Line(name="told by key", points=tuple(curves["limit_ms"]), limit=True, panel=cpu),
            Line(name="one full scan", points=tuple(curves["scan_ms"]), limit=True, panel=cpu),
            Line(
                panel=Panel("idle", "environments registered", "% CPU"),
                name="spoold",
                points=tuple(curves["idle_percent"]),
            ),
            Line(
                panel=MEMORY,
                name="registered",
                points=tuple(curves["memory_mb"]),
            ),
        ),
    )


def _figures(registered: int, found: dict[str, float]) -> list[Figure]:
    at = f"{number(registered)} registered"
    cpu_ms, piece = found["cpu_ms"], "registered"
    return [
        Figure(
            piece=piece,
            what=f"{at}: CPU of a completion",
            value=cpu_ms,
            unit="ms",
            beside=found["limit_ms"],
            of="told by key",
        ),
        Figure(
            piece=piece,
            what=f"{at}: the same",
            value=cpu_ms,
            unit="ms",
            beside=found["scan_ms"],
            of="one full scan",
        ),
        Figure(
            piece=piece, what=f"{at}: commit to file, median", value=found["delay_ms"], unit="ms"
        ),
        Figure(piece=piece, what=f"{at}: idle", value=found["idle_percent"], unit="% CPU"),
        Figure(piece=piece, what=f"{at}: memory", value=found["memory_mb"], unit="MB"),
    ]


def complete(writer: Rollouts, environment: int) -> None:
    """Write the terminal row and set finished, in one commit."""
    with writer.together():
        writer.complete(environment)


def _measure(db: Path, folder: Path, *, idle_seconds: float, completions: int) -> dict[str, float]:
    writer = open_rollouts(db)
    pending = folder / "run/pending"
    with machine.serving(db, folder / "run", linger_seconds=0) as daemon:
        daemon.wait_for("pending", 1)
        daemon.come_to_rest()
        before = daemon.cpu_seconds()
        time.sleep(idle_seconds)
        idle = (daemon.cpu_seconds() - before) / idle_seconds
        before, began, delays = daemon.cpu_seconds(), time.perf_counter(), []
        for n in range(completions):
            complete(writer, 2 + n)
            committed = time.perf_counter()
            delays.append(daemon.wait_for("pending", 2 + n) - committed)
            time.sleep(PAUSE_SECONDS)
        spent = daemon.cpu_seconds() - before - idle * (time.perf_counter() - began)
        memory_mb = daemon.peak_mb()
    assert len(list(pending.iterdir())) == completions + 1

    def complete_next() -> Iterator[int]:
        for environment in range(2 + completions, 2 + 2 * completions):
            time.sleep(PAUSE_SECONDS)
            complete(writer, environment)
            yield environment

    limit = floor.complete(db, folder / "bare", complete_next)
    writer.close()
    return {
        "cpu_ms": spent / completions * 1e3,
        "limit_ms": limit * 1e3,
        "scan_ms": floor.scan(db) * 1e3,
        "delay_ms": statistics.median(delays) * 1e3,
        "idle_percent": idle * 100,
        "memory_mb": memory_mb,
    }
