"""What comes out of PostgreSQL, against SQLite with the same rows, and against a naive oracle."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from spoold.codec import encode, parse_samples
from spoold.model import NullReward, ReadyWhen, Samples
from spoold.sources import Source, open_source
from tests.support.postgres import STYLES, PostgresRollouts, postgres_rollouts
from tests.support.rollouts import GENERATIONS, JOB, Rollouts
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

META = [
    {"weight_version": 7},
    {"weight_version": "12", "event_type": "gateway_inference", "status_code": 200},
    {"weight_version": "default"},
    {"weight_version": None},
    {"event_type": "gateway_session_close"},
    {"event_type": "episode_summary"},
    {"event_type": "evaluation_summary"},
    {"event_type": "gateway_inference", "status_code": 503},
    {"synthetic_stop": True},
    {"synthetic_stop": False, "weight_version": 2},
    "not json {",
    None,
]
MESSAGES = [
    [{"role": "user", "content": "q"}],
    [{"role": "user", "content": "数学 \U0001f600"}, {"role": "assistant", "content": "a"}],
    [],
]
RESPONSES = [
    "",
    "plain",
    '{"half": ',
    '{"role": "assistant", "content": "direct"}',
    '{"choices": [{"message": {"role": "assistant", "content": null, "tool_calls": []}}]}',
]

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


def fill(rollouts: Rollouts, environments: list[dict[str, Any]], order: list[int]) -> None:
    ids = [rollouts.register(job=facts["job"], group=facts["group"])[0] for facts in environments]
    turns = [(k, step) for k, facts in enumerate(environments) for step in facts["steps"]]
    turns.sort(key=lambda turn: order[turn[0] % len(order)] if order else 0)
    for k, step in turns:
        rollouts.step(ids[k], **step)
    for environment, facts in zip(ids, environments, strict=True):
        if facts["finished"]:
            rollouts.finish(environment)
        if facts["deleted"]:
            rollouts.delete(environment)


Facts = Mapping[str, Any]


def oracle(
    everything: Sequence[Facts], *, needs_finished: bool, all_steps: bool
) -> list[dict[str, Any]]:
    """Every sample, by filtering all that there is."""
    sessions: dict[int, list[Facts]] = {}
    for row in everything:
        own = row["job"] == JOB and row["step_job"] in (JOB, "", None)
        ready = not row["is_deleted"] and (row["finished"] or not needs_finished)
        if own and ready and is_turn(row):
            sessions.setdefault(row["environment"], []).append(row)
    answer = []
    for rows in sessions.values():
        completed = [row for row in rows if row["is_session_completed"]]
        ended = [row for row in rows if row["is_terminal"] or row["is_truncated"]]
        if not completed and not ended:
            continue
        chosen = (completed or ended)[-1]
        before = max([row["pk"] for row in completed if row["pk"] < chosen["pk"]], default=0)
        steps = [row for row in rows if before < row["pk"] <= chosen["pk"]]
        steps = [row for row in steps if row["llm_model"] == chosen["llm_model"]]
        answer += [as_sample(row, chosen) for row in (steps if all_steps else [chosen])]
    return answer


def meta_of(row: Facts) -> dict[str, Any]:
    text = row["meta_json"] if "meta_json" in row else row["env_state"]
    try:
        return json.loads(text or "{}")  # type: ignore[no-any-return]
    except ValueError:
        return {}


def as_sample(row: Facts, chosen: Facts) -> dict[str, Any]:
    version = str(meta_of(row).get("weight_version"))
    reward = chosen["step_reward"] if chosen["reward"] is None else chosen["reward"]
    return {
        "uid": f"{row['env_id']}:{row['pk']}",
        "instance_id": row["own_group"] or row["env_id"],
        "messages": json.loads(row["messages"]) + turn_of(row["response"]),
        "reward": reward,
        "extra_info": {
            "environment": row["environment"],
            "env_id": row["env_id"],
            "session_id": row["session_id"],
            "group_id": row["own_group"] or "",
            "job_id": JOB,
            "env_name": "math",
            "llm_model": row["llm_model"],
            "step_pk": row["pk"],
            "steps": row["step_id"],
            "step_reward": row["step_reward"],
            "reward_source": "step_reward" if chosen["reward"] is None else "reward",
            "weight_version": int(version) if version.isdigit() else 0,
            "truncated": bool(row["is_truncated"]),
            "finish_reason": "length" if row["is_truncated"] else "stop",
            "is_session_completed": bool(row["is_session_completed"]),
            "timestamp": 1795981366.043713,
        },
    }


def turn_of(response: str) -> list[dict[str, Any]]:
    if not response:
        return []
    try:
        found = json.loads(response)
    except ValueError:
        return [{"role": "assistant", "content": response}]
    return [found["choices"][0]["message"] if "choices" in found else found]


def is_turn(row: Facts) -> bool:
    meta = meta_of(row)
    event = meta.get("event_type")
    if event in ("gateway_session_close", "episode_summary", "evaluation_summary"):
        return False
    if meta.get("synthetic_stop"):
        return False
    if event == "gateway_inference" and meta.get("status_code", 0) >= 400:
        return False
    return not (json.loads(row["messages"]) == [] and row["response"] == "")


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


# In PostgreSQL, the JSON of a typed column reads as the text that it is.
AS_TEXT = """
SELECT e.finished::int AS finished, e.is_deleted::int AS is_deleted, e.env_id::text AS env_id,
    {messages} AS messages, {response} AS response, {meta} AS {meta_column},
    s.step_reward, s.reward, s.is_terminal::int AS is_terminal, s.is_truncated::int AS is_truncated,
    s.is_session_completed::int AS is_session_completed, s.session_id::text AS session_id,
    s.step_id, s.llm_model, s.id AS pk, s.job_id AS step_job,
    e.id AS environment, e.job_id AS job, e.group_id AS own_group
FROM job_environments AS e JOIN session_steps AS s ON s.session_id = e.env_id
ORDER BY e.id, s.id
"""


def everything_in(rollouts: PostgresRollouts) -> list[dict[str, Any]]:
    def text(column: str) -> str:
        kept = f"s.{column}::jsonb"
        return f"coalesce({kept} #>> '{{}}', '')" if rollouts.style == "typed" else f"s.{column}"

    query = AS_TEXT.format(
        messages=text("messages"),
        response=text("response"),
        meta=text(rollouts.meta_column),
        meta_column=rollouts.meta_column,
    )
    cursor = rollouts.db.execute(query)
    names = [column.name for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


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
            assert found == oracle(
                everything_in(rollouts),
                needs_finished=gate is ReadyWhen.FINISHED,
                all_steps=samples is Samples.STEPS,
            )

    check()
