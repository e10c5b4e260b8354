"""No query of a look, a reconcile or a read walks over a table."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from pyroaring import BitMap64

from spoold.model import ReadyWhen, Samples
from spoold.policy import WHOLE, Shard
from spoold.sources.sqlite import SqliteSource
from spoold.sources.sqlite_schema import OWNS
from tests.support.rollouts import GENERATIONS, Rollouts, make_rollouts

ALLOWED = ("SCAN CONSTANT ROW", "SCAN w VIRTUAL TABLE INDEX 1:", "SCAN q")


def fill(rollouts: Rollouts) -> None:
    """Enough rows, and statistics of them, for a planner that wants to be clever."""
    with rollouts.together():
        ids = rollouts.register(400)
        for environment in ids[:100]:
            rollouts.step(environment)
            rollouts.end(environment)
            rollouts.step(environment, model="judge")
        rollouts.finish(*ids[:50])
    rollouts.db.execute("ANALYZE")


def traced(source: SqliteSource, statements: set[str]) -> None:
    database = source._database
    assert database is not None
    assert database._connection is not None
    database._connection.set_trace_callback(statements.add)


@pytest.mark.parametrize("shard", [WHOLE, Shard(0, 2)], ids=str)
@pytest.mark.parametrize("samples", Samples)
@pytest.mark.parametrize("gate", [ReadyWhen.FINISHED, ReadyWhen.TERMINAL])
@pytest.mark.parametrize("indexes", [True, False], ids=["indexes", "bare"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_planner_is_held_to_primary_keys_and_session_id(
    tmp_path: Path,
    generation: str,
    indexes: bool,
    gate: ReadyWhen,
    samples: Samples,
    shard: Shard,
) -> None:
    path = tmp_path / "rollouts.db"
    rollouts = make_rollouts(path, generation, indexes=indexes)
    fill(rollouts)
    source = SqliteSource([str(path)], job=None, ready_when=gate, samples=samples, shard=shard)
    source.open()
    statements: set[str] = set()
    traced(source, statements)
    skip = BitMap64(range(1, 20))
    offered = [c.id for look in source.reconcile(skip) for c in look.candidates]
    offered += [c.id for look in source.reconcile(skip) for c in look.candidates]
    with rollouts.together():
        for environment in (1, 60, 150):
            rollouts.end(environment)
        rollouts.finish(150, 160)
    offered += [c.id for c in source.look(skip).candidates]
    assert len(list(source.read(offered))) == len(offered)
    source.verify({1: rollouts.env_id(1)}, 1)
    source.close()

    planner = sqlite3.connect(path)
    planner.create_function(OWNS, 3, lambda *_: True)
    selects = [text for text in statements if text.lstrip().startswith("SELECT")]
    assert len(selects) >= 8
    walks = [
        (row[3], text)
        for text in selects
        for row in planner.execute(f"EXPLAIN QUERY PLAN {text}")
        # The array of ids; and two rows without an index in any database.
        if row[3].startswith("SCAN") and row[3] not in ALLOWED
    ]
    by_job = [
        (row[3], text)
        for text in selects
        for row in planner.execute(f"EXPLAIN QUERY PLAN {text}")
        if "idx_" in row[3]
    ]
    planner.close()
    rollouts.close()
    assert walks == []
    assert by_job == []
