"""The source and the codec against answers that were found without them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from spoold.codec import encode, parse_samples
from spoold.model import Note, NullReward, ReadyWhen, Sample, Samples
from spoold.sources import Source, open_source
from tests.support.rollouts import GENERATIONS, JOB, Rollouts, make_rollouts

SHARED = Path(os.environ.get("SPOOLD_SHARED", Path(__file__).parents[2] / "shared"))
JOBS = [
    ("safactory-main", "job-main-0001"),
    ("safactory-v2", "job-v2-0001"),
    ("safactory-newest", "job-newest-0001"),
    ("safactory-newest", "job-other"),
]


def deliver(source: Source) -> dict[int, dict[str, Any] | Note]:
    """All that one reconcile and one look offer, converted."""
    skip = BitMap64()
    looks = [*source.reconcile(skip), source.look(skip)]
    ids = sorted({candidate.id for look in looks for candidate in look.candidates})
    found: dict[int, dict[str, Any] | Note] = {}
    for environment, rows in source.read(ids):
        if rows:
            encoded = encode(rows, null_reward=NullReward.FALLBACK, max_sample_bytes=1 << 30)
            assert encoded is not None
            found[environment] = encoded if isinstance(encoded, Note) else parsed(encoded)
    return found


def parsed(samples: list[Sample]) -> dict[str, Any]:
    (sample,) = parse_samples(b"".join(sample.line for sample in samples))
    return sample


@pytest.mark.parametrize(("name", "job"), JOBS)
def test_every_deliverable_environment_of_a_real_database_comes_out_as_the_oracle_says(
    tmp_path: Path, name: str, job: str
) -> None:
    database, answer = SHARED / "data" / f"{name}.db", SHARED / "data" / f"{name}.expected.json"
    if not answer.exists():
        pytest.skip(f"{answer} is not there: the databases lie beside the project, not in it")
    shutil.copy(database, tmp_path / "rollouts.db")
    expected = json.loads(answer.read_bytes())
    source = open_source(
        f"{tmp_path}/rollouts.db",
        job=job,
        ready_when=ReadyWhen(expected["gate"]),
        samples=Samples.TERMINAL,
    )
    source.open()
    found = deliver(source)
    wanted = {
        facts["id"]: facts
        for facts in expected["environments"]
        if facts["job_id"] == job and facts["deliverable"]
    }
    assert sorted(found) == sorted(wanted)
    for environment, sample in found.items():
        facts = wanted[environment]
        assert isinstance(sample, dict)
        text = json.dumps(
            sample["messages"], ensure_ascii=False, sort_keys=True, separators=(",", ":")
        )
        assert hashlib.sha256(text.encode()).hexdigest() == facts["messages_sha256"]
        extra = sample["extra_info"]
        assert sample["reward"] == facts["reward"]
        assert extra["reward_source"] == facts["reward_fallback"]
        assert extra["weight_version"] == facts["weight_version"]
        assert extra["truncated"] is facts["truncated"]
        assert extra["step_pk"] == facts["terminal_pk"]
        assert extra["group_id"] == (facts["group_id"] or "")
    source.close()


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


def oracle(path: Path, *, needs_finished: bool, all_steps: bool) -> dict[int, list[int]]:
    """Which rows of which environments, by reading everything and filtering it."""
    db = sqlite3.connect(path)
    db.row_factory = sqlite3.Row
    answer = {}
    for environment in db.execute("SELECT * FROM job_environments"):
        if environment["is_deleted"] or environment["job_id"] != JOB:
            continue
        if needs_finished and not environment["finished"]:
            continue
        rows = db.execute(
            "SELECT * FROM session_steps WHERE session_id = ? ORDER BY id", (environment["env_id"],)
        ).fetchall()
        rows = [row for row in rows if row["job_id"] in (JOB, "", None) and is_turn(row)]
        completed = [row for row in rows if row["is_session_completed"]]
        ended = [row for row in rows if row["is_terminal"] or row["is_truncated"]]
        if not completed and not ended:
            continue
        chosen = (completed or ended)[-1]
        if all_steps:
            before = [row["id"] for row in completed if row["id"] < chosen["id"]]
            rows = [
                row
                for row in rows
                if max(before, default=0) < row["id"] <= chosen["id"]
                and row["llm_model"] == chosen["llm_model"]
            ]
            answer[environment["id"]] = [row["id"] for row in rows]
        else:
            answer[environment["id"]] = [chosen["id"]]
    db.close()
    return answer


def is_turn(row: sqlite3.Row) -> bool:
    text = row["meta_json"] if "meta_json" in row.keys() else row["env_state"]  # noqa: SIM118
    try:
        meta = json.loads(text or "{}")
    except ValueError:
        meta = {}
    if meta.get("event_type") in (
        "gateway_session_close",
        "episode_summary",
        "evaluation_summary",
    ):
        return False
    if meta.get("synthetic_stop") or (
        meta.get("event_type") == "gateway_inference" and meta.get("status_code", 0) >= 400
    ):
        return False
    return not (json.loads(row["messages"]) == [] and row["response"] == "")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    generation=st.sampled_from(GENERATIONS),
    environments=st.lists(ENVIRONMENT, max_size=8),
    order=st.lists(st.integers(0, 9), max_size=5),
    gate=st.sampled_from([ReadyWhen.FINISHED, ReadyWhen.TERMINAL]),
    samples=st.sampled_from(Samples),
    by_looks=st.booleans(),
    indexes=st.booleans(),
)
def test_random_databases_give_what_a_naive_oracle_gives(
    generation: str,
    environments: list[dict[str, Any]],
    order: list[int],
    gate: ReadyWhen,
    samples: Samples,
    by_looks: bool,
    indexes: bool,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.db"
        rollouts = make_rollouts(path, generation, indexes=indexes)
        rollouts.register(group="first")
        source = open_source(str(path), job=JOB, ready_when=gate, samples=samples)
        skip = BitMap64()
        source.open()
        if by_looks:
            assert not [c for look in source.reconcile(skip) for c in look.candidates]
            source.look(skip)
        fill(rollouts, environments, order)
        looks = [source.look(skip)] if by_looks else list(source.reconcile(skip))
        ids = [candidate.id for look in looks for candidate in look.candidates]
        assert ids == sorted(set(ids))
        found = {
            environment: [row.pk for row in rows] for environment, rows in source.read(ids) if rows
        }
        wanted = oracle(
            path,
            needs_finished=gate is ReadyWhen.FINISHED,
            all_steps=samples is Samples.STEPS,
        )
        assert found == wanted
        source.close()
        rollouts.close()
