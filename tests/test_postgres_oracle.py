"""What comes out of PostgreSQL, against SQLite with the same rows, and against a naive oracle."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from spoold.codec import encode, parse_samples
from spoold.model import NullReward, ReadyWhen, Samples
from spoold.sources import Source, open_source
from tests.support import oddities
from tests.support.oddities import fill
from tests.support.oracle import answers
from tests.support.postgres import STYLES, PostgresRollouts, postgres_rollouts
from tests.support.rollouts import GENERATIONS, JOB, Rollouts, ddl
from tests.support.servers import postgres_server

SHARED = Path(os.environ.get("SPOOLD_SHARED", Path(__file__).parents[2] / "shared"))
JOBS = [
    ("safactory-main", "job-main-0001"),
    ("safactory-v2", "job-v2-0001"),
    ("safactory-newest", "job-newest-0001"),
    ("safactory-newest", "job-other"),
]


GENERATION_OF = {"safactory-main": "first", "safactory-v2": "second", "safactory-newest": "newest"}


def copied(database: Path, rollouts: PostgresRollouts) -> None:
    """Copy all rows of a SQLite database, as a migration to PostgreSQL does."""
    db = sqlite3.connect(database)
    for table in ("job_environments", "session_steps"):
        names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        marks = ", ".join("?" * len(names))
        for row in db.execute(f"SELECT {', '.join(names)} FROM {table}"):
            rollouts.db.execute(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})", row)
    db.close()


@pytest.mark.parametrize(("name", "job"), JOBS)
def test_a_real_database_gives_the_same_lines_in_postgresql(
    tmp_path: Path, name: str, job: str
) -> None:
    database = SHARED / "data" / f"{name}.db"
    if not database.exists():
        pytest.skip(f"{database} is not there: the databases lie beside the project, not in it")
    shutil.copy(database, tmp_path / "rollouts.db")
    gate = ReadyWhen(json.loads((SHARED / "data" / f"{name}.expected.json").read_bytes())["gate"])
    with postgres_rollouts(postgres_server(), GENERATION_OF[name]) as rollouts:
        copied(tmp_path / "rollouts.db", rollouts)
        lines = []
        for url in (str(tmp_path / "rollouts.db"), rollouts.url):
            source = open_source(url, job=job, ready_when=gate, samples=Samples.STEPS)
            source.open()
            skip = BitMap64()
            ids = [c.id for look in source.reconcile(skip) for c in look.candidates]
            found = [
                encode(rows, null_reward=NullReward.FALLBACK, max_sample_bytes=1 << 30)
                for _, rows in source.read(ids)
                if rows
            ]
            lines.append(found)
            source.close()
    assert lines[0]
    assert lines[0] == lines[1]


# ---- random databases -------------------------------------------------------------------------

# PostgreSQL takes no text that is not UTF-8, or with a NUL in it.
META = [one for one in oddities.META if not isinstance(one, bytes)]
MESSAGES = [
    one for one in oddities.MESSAGES if not any("\0" in message["content"] for message in one)
]
RESPONSES = [one for one in oddities.RESPONSES if "\0" not in one]

STEP = st.fixed_dictionaries(
    {
        "meta": st.sampled_from(META),
        "messages": st.sampled_from(MESSAGES),
        "response": st.sampled_from(RESPONSES),
        "reward": st.sampled_from([None, 0.0, -1.5, 2.0]),
        "step_reward": st.sampled_from([0.0, 0.25]),
        "terminal": st.booleans(),
        "truncated": st.sampled_from([False, False, True]),
        "completed": st.booleans(),
        "model": st.sampled_from(["m", "m", "judge"]),
        "job": st.sampled_from([JOB, JOB, "", None, "other"]),
    }
)
ENVIRONMENT = st.fixed_dictionaries(
    {
        "steps": st.lists(STEP, max_size=5),
        "finished": st.booleans(),
        "deleted": st.sampled_from([False, False, False, True]),
        "job": st.sampled_from([JOB, JOB, JOB, "other"]),
        "group": st.sampled_from(["g1", "g2", "", None]),
    }
)


DATABASE = {
    "environments": st.lists(ENVIRONMENT, max_size=8),
    "order": st.lists(st.integers(0, 9), max_size=5),
    "gate": st.sampled_from([ReadyWhen.FINISHED, ReadyWhen.TERMINAL]),
    "samples": st.sampled_from(Samples),
    "by_looks": st.booleans(),
    "indexes": st.booleans(),
}


def found_in(
    source: Source,
    rollouts: Rollouts,
    environments: list[dict[str, Any]],
    order: list[int],
    *,
    by_looks: bool,
) -> list[dict[str, Any]]:
    """Every sample of a database that is filled while a source is open."""
    skip = BitMap64()
    source.open()
    if by_looks:
        assert not [c for look in source.reconcile(skip) for c in look.candidates]
        source.look(skip)
    fill(rollouts, environments, order)
    looks = [source.look(skip)] if by_looks else list(source.reconcile(skip))
    ids = [candidate.id for look in looks for candidate in look.candidates]
    assert ids == sorted(set(ids))
    found = []
    for _, rows in source.read(ids):
        if rows:
            encoded = encode(rows, null_reward=NullReward.FALLBACK, max_sample_bytes=1 << 30)
            assert isinstance(encoded, list)
            found += parse_samples(b"".join(sample.line for sample in encoded))
    source.close()
    return found


def as_sqlite(rollouts: PostgresRollouts) -> sqlite3.Connection:
    """Copy all rows back: the oracle reads SQLite."""
    db = sqlite3.connect(":memory:")
    db.executescript(ddl(rollouts.generation))
    for table in ("job_environments", "session_steps"):
        cursor = rollouts.db.execute(f"SELECT * FROM {table}")
        names = [column.name for column in cursor.description]
        marks = ", ".join("?" * len(names))
        insert = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})"
        db.executemany(insert, [tuple(map(as_text, row)) for row in cursor])
    return db


def as_text(value: Any) -> Any:
    if isinstance(value, list | dict):
        return json.dumps(value)
    return str(value) if isinstance(value, uuid.UUID | datetime) else value


@pytest.mark.parametrize("style", STYLES)
def test_random_databases_in_postgresql_give_what_a_naive_oracle_gives(style: str) -> None:
    server = postgres_server()

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(generation=st.sampled_from(GENERATIONS), **DATABASE)
    def check(
        generation: str,
        environments: list[dict[str, Any]],
        order: list[int],
        gate: ReadyWhen,
        samples: Samples,
        by_looks: bool,
        indexes: bool,
    ) -> None:
        with postgres_rollouts(server, generation, style, indexes=indexes) as rollouts:
            rollouts.register(group="first")
            source = open_source(rollouts.url, job=JOB, ready_when=gate, samples=samples)
            found = found_in(source, rollouts, environments, order, by_looks=by_looks)
            wanted = answers(as_sqlite(rollouts), job=JOB, gate=gate, samples=samples)
            assert found == [sample for answer in wanted.values() for sample in answer.samples]

    check()
