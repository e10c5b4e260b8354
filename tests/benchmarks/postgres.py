"""The same on PostgreSQL: a drain, a completion and idling, beside a loop over the same connection.

The server is one of our own on loopback, on the same cores, and does not sync.
"""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import drain, floor, machine, registered
from tests.benchmarks.databases import META, messages
from tests.benchmarks.table import Figure, Line, Panel, Report, number
from tests.support.postgres import PostgresRollouts, make_postgres
from tests.support.rollouts import CREATED_AT
from tests.support.servers import Server, own_server

_MESSAGES, _RESPONSE = 3, 4
_ENVIRONMENTS = """
INSERT INTO job_environments (job_id, env_id, env_name, env_params, group_id, finished)
SELECT 'job-1', 'env-' || n, 'math', '{}', 'group-' || n / 8, (n <= %(finished)s)::int
FROM generate_series(1, %(registered)s) AS n"""
_STEPS = """
INSERT INTO session_steps (record_id, session_id, step_id, env_name, llm_model, group_id, job_id,
    messages, response, step_reward, reward, meta_json, is_terminal, is_session_completed,
    created_at)
SELECT 'r' || n, 'env-' || n, 1, 'math', 'm', 'group-' || n / 8, 'job-1',
    (%(texts)s::text[])[1 + n %% 7], '4', 1.0, CASE WHEN n <= %(finished)s THEN 1.0 END, %(meta)s,
    (n <= %(finished)s)::int, (n <= %(finished)s)::int, %(at)s
FROM generate_series(1, %(steps)s) AS n"""


def build(
    server: Server, *, registered: int, finished: int = 0, running: int = 0, row_bytes: int = 2000
) -> PostgresRollouts:
    """Make a database as `databases.build` does."""
    made = make_postgres(server)
    facts = {"registered": registered, "finished": finished, "steps": finished + running}
    texts = [messages(row_bytes, seed) for seed in range(7)]
    made.db.db.execute(_ENVIRONMENTS, facts)
    made.db.db.execute(_STEPS, facts | {"texts": texts, "meta": META, "at": CREATED_AT})
    made.db.db.execute("VACUUM ANALYZE")
    return made


def run(folder: Path, *, small: bool) -> Report:
    """Measure drains over the size of a row, then a live database over what is registered."""
    try:
        with own_server() as server:
            drains, lines = _drains(server, folder, small=small)
            lives, curves = _lives(server, folder, small=small)
    except pytest.skip.Exception as skipped:
        print(f"  postgres: skipped: {skipped}", flush=True)
        return Report(figures=())
    return Report(figures=(*drains, *lives), lines=(*lines, *curves))


# ---- a drain ------------------------------------------------------------------------------------


def _drains(server: Server, folder: Path, *, small: bool) -> tuple[list[Figure], tuple[Line, ...]]:
    total, rounds = (2_000_000, 1) if small else (drain.TOTAL_BYTES, drain.ROUNDS)
    figures, ours, limits = [], [], []
    for size in drain.SIZES[1:2] if small else drain.SIZES:
        rows = total // size
        made = build(server, registered=rows, finished=rows, row_bytes=size)
        url = server.url(schema=made.schema)
        batch_size = min(drain.BATCH_SIZE, max(1, drain.BATCH_BYTES // size))
        seconds, limit_seconds, written = [], [], 0
        for _ in range(rounds):
            seconds.append(machine.once(url, folder / "run", batch_size=batch_size).seconds)
            files = list((folder / "run/pending").iterdir())
            written = sum(file.stat().st_size for file in files)
            shutil.rmtree(folder / "run")
            bare = folder / "bare"
            limit_seconds.append(_bare_drain(url, bare, batch_size, line_bytes=written // rows))
            shutil.rmtree(bare)
        made.drop()
        speed, limit = written / min(seconds) / 1e6, written / min(limit_seconds) / 1e6
        ours.append((float(size), speed))
        limits.append((float(size), limit))
        what = f"rows of {size // 1000} KB"
        figures += [
            Figure(
                piece="postgres",
                what=what,
                value=speed,
                unit="MB/s",
                beside=limit,
                of="bare loop",
                higher_is_better=True,
            ),
        ]
    panel = Panel("draining PostgreSQL", "bytes in a row", "MB/s")
    return figures, (
        Line(name="spoold", points=tuple(ours), panel=panel),
        Line(name="bare loop", points=tuple(limits), limit=True, panel=panel),
    )


def _connect(url: str) -> Any:
    import psycopg
    from psycopg.adapt import Loader

    class Raw(Loader):
        load = staticmethod(bytes)  # type: ignore[assignment]

    db = psycopg.connect(url, autocommit=True)
    for name in ("text", "varchar", "timestamptz"):
        db.adapters.register_loader(name, Raw)
    return db


def _finished(db: Any) -> list[tuple[int, bytes]]:
    query = (
        "SELECT id, env_id FROM job_environments WHERE is_deleted = 0 AND finished = 1 ORDER BY id"
    )
    found: list[tuple[int, bytes]] = db.execute(query).fetchall()
    return found


def _rows(db: Any, env_ids: list[bytes]) -> list[tuple[bytes, ...]]:
    query = (
        f"SELECT {floor.COLUMNS} FROM session_steps WHERE session_id = ANY(%s) AND is_terminal = 1"
    )
    found: list[tuple[bytes, ...]] = db.execute(
        query, ([one.decode() for one in env_ids],)
    ).fetchall()
    return found


def _bare_drain(url: str, run_dir: Path, batch_size: int, *, line_bytes: int) -> float:
    """Read the rows of each batch, write as many bytes as its lines have. Returns seconds."""
    began = time.perf_counter()
    db, publisher = _connect(url), floor.Publisher(run_dir)
    environments = _finished(db)
    for first in range(0, len(environments), batch_size):
        parts: list[bytes] = []
        for row in _rows(db, [env_id for _, env_id in environments[first : first + batch_size]]):
            body = row[_MESSAGES] + row[_RESPONSE]
            parts += (body, b" " * (line_bytes - len(body) - 1), b"\n")
        publisher.publish(b"".join(parts))
    db.close()
    return time.perf_counter() - began


# ---- a live database ----------------------------------------------------------------------------


def _lives(server: Server, folder: Path, *, small: bool) -> tuple[list[Figure], tuple[Line, ...]]:
    figures: list[Figure] = []
    cpu: list[tuple[float, float]] = []
    idle: list[tuple[float, float]] = []
    for registered_ in (2000,) if small else registered.NUMBERS:
        made = build(
            server,
            registered=registered_,
            finished=1,
            running=registered.RUNNING,
            row_bytes=registered.ROW_BYTES,
        )
        found = _live(made, folder, small=small)
        made.drop()
        shutil.rmtree(folder / "run")
        shutil.rmtree(folder / "bare")
        cpu.append((float(registered_), found["cpu_ms"]))
        idle.append((float(registered_), found["idle_percent"]))
        at = f"{number(registered_)} registered"
        figures += [
            Figure(
                piece="postgres",
                what=f"{at}: CPU of a completion",
                value=found["cpu_ms"],
                unit="ms",
                beside=found["limit_ms"],
                of="told by key",
            ),
            Figure(
                piece="postgres",
                what=f"{at}: commit to file, median",
                value=found["delay_ms"],
                unit="ms",
            ),
            Figure(
                piece="postgres",
                what=f"{at}: a look that finds one",
                value=found["look_ms"],
                unit="ms",
                beside=found["scan_ms"],
                of="one full scan",
            ),
            Figure(piece="postgres", what=f"{at}: idle", value=found["idle_percent"], unit="% CPU"),
        ]
    return figures, (
        Line(
            panel=Panel("a completion on PostgreSQL", "environments registered", "ms"),
            name="spoold",
            points=tuple(cpu),
        ),
        Line(
            panel=Panel("idle on PostgreSQL", "environments registered", "% CPU"),
            name="spoold",
            points=tuple(idle),
        ),
    )


def _complete(made: PostgresRollouts, environment: int) -> None:
    with made.together():
        made.complete(environment)


def _live(made: PostgresRollouts, folder: Path, *, small: bool) -> dict[str, float]:
    completions = 3 if small else registered.COMPLETIONS
    idle_seconds = 0.2 if small else registered.IDLE_SECONDS
    url = made.server.url(schema=made.schema)
    delays = []
    with machine.serving(url, folder / "run", linger_seconds=0) as daemon:
        daemon.wait_for("pending", 1)
        daemon.come_to_rest()
        before = daemon.cpu_seconds()
        time.sleep(idle_seconds)
        idle = (daemon.cpu_seconds() - before) / idle_seconds
        before, began = daemon.cpu_seconds(), time.perf_counter()
        for n in range(completions):
            _complete(made, 2 + n)
            committed = time.perf_counter()
            delays.append(daemon.wait_for("pending", 2 + n) - committed)
            time.sleep(registered.PAUSE_SECONDS)
        spent = daemon.cpu_seconds() - before - idle * (time.perf_counter() - began)
    limit = _bare_completions(made, url, folder / "bare", 2 + completions, completions)
    looks, scan = _looks(made, url, 2 + 2 * completions, completions)
    return {
        "cpu_ms": spent / completions * 1e3,
        "limit_ms": limit * 1e3,
        "delay_ms": statistics.median(delays) * 1e3,
        "look_ms": looks * 1e3,
        "scan_ms": scan * 1e3,
        "idle_percent": idle * 100,
    }


def _bare_completions(
    made: PostgresRollouts, url: str, run_dir: Path, first: int, count: int
) -> float:
    """Be told of each completion, read its row by key, publish. Returns CPU seconds of one."""
    db, publisher = _connect(url), floor.Publisher(run_dir)
    cpu = 0.0
    for environment in range(first, first + count):
        time.sleep(registered.PAUSE_SECONDS)
        _complete(made, environment)
        before = time.process_time()
        query = "SELECT env_id FROM job_environments WHERE id = %s AND finished = 1"
        (env_id,) = db.execute(query, (environment,)).fetchone()
        ((*_, text, response), *_) = [row[: _RESPONSE + 1] for row in _rows(db, [env_id])]
        publisher.publish(text + response + b"\n")
        cpu += time.process_time() - before
    db.close()
    return cpu / count


def _looks(made: PostgresRollouts, url: str, first: int, count: int) -> tuple[float, float]:
    """Return the seconds of a look that finds one completion, and of asking for all finished."""
    from pyroaring import BitMap64

    from spoold.model import ReadyWhen, Samples
    from spoold.sources import open_source

    source = open_source(url, job=None, ready_when=ReadyWhen.FINISHED, samples=Samples.TERMINAL)
    source.open()
    skip = BitMap64(range(1, first))
    for _ in source.reconcile(skip):
        pass
    source.look(skip)
    looks, scans = [], []
    db = _connect(url)
    for environment in range(first, first + count):
        _complete(made, environment)
        began = time.perf_counter()
        assert source.changed()
        (found,) = source.look(skip).candidates
        looks.append(time.perf_counter() - began)
        assert found.id == environment
        began = time.perf_counter()
        _finished(db)
        scans.append(time.perf_counter() - began)
    db.close()
    source.close()
    return statistics.median(looks), statistics.median(scans)
