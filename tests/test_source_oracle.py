"""The source and the codec against answers that were found without them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from spoold.codec import encode, parse_samples
from spoold.model import Note, NullReward, ReadyWhen, Sample, Samples, StepRow
from spoold.sources import Source, open_source
from tests.support.oddities import (
    MESSAGES,
    META,
    ODD_MESSAGES,
    ODD_RESPONSES,
    ODD_REWARDS,
    RESPONSES,
    REWARDS,
    fill,
)
from tests.support.oracle import Answer, answers
from tests.support.rollouts import GENERATIONS, JOB, make_rollouts

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


def mostly(usual: list[Any], odd: list[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(*[st.sampled_from(usual)] * 4, st.sampled_from(odd))


STEP = st.fixed_dictionaries(
    {
        "meta": st.sampled_from(META),
        "messages": mostly(MESSAGES, ODD_MESSAGES),
        "response": mostly(RESPONSES, ODD_RESPONSES),
        "reward": mostly(REWARDS, ODD_REWARDS),
        "step_reward": mostly([0.0, 0.25, 1], [math.inf, "many", ""]),
        "terminal": st.booleans(),
        "truncated": st.sampled_from([False, False, True]),
        "completed": st.booleans(),
        "model": mostly(["m", "m", "judge"], ["", b"\xff", "m\0"]),
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


@pytest.mark.parametrize("generation", GENERATIONS)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    environments=st.lists(ENVIRONMENT, max_size=8),
    order=st.lists(st.integers(0, 9), max_size=5),
    gate=st.sampled_from([ReadyWhen.FINISHED, ReadyWhen.TERMINAL]),
    null_reward=st.sampled_from(NullReward),
    samples=st.sampled_from(Samples),
    by_looks=st.booleans(),
    indexes=st.booleans(),
)
def test_random_databases_give_what_a_naive_oracle_gives(
    generation: str,
    environments: list[dict[str, Any]],
    order: list[int],
    gate: ReadyWhen,
    null_reward: NullReward,
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
        wanted = {
            one: answer
            for one, answer in answers(
                rollouts.db, job=JOB, gate=gate, null_reward=null_reward, samples=samples
            ).items()
            if not answer.missing
        }
        found = set()
        for environment, rows in source.read(ids):
            if rows:
                found.add(environment)
                is_what_the_oracle_says(wanted[environment], rows, null_reward)
        assert found == wanted.keys()
        source.close()
        rollouts.close()


def is_what_the_oracle_says(
    answer: Answer, rows: tuple[StepRow, ...], null_reward: NullReward
) -> None:
    encoded = encode(rows, null_reward=null_reward, max_sample_bytes=1 << 30)
    if encoded is None:
        assert answer.waits
    elif isinstance(encoded, Note):
        assert encoded.reason in answer.reasons
        assert encoded.env_id == answer.env_id
        assert sorted(encoded.rows) == sorted(row.pk for row in rows)
        assert encoded.excerpt.isprintable() or encoded.excerpt == ""
        assert encoded.policy == (encoded.reason == "null-reward")
    else:
        lines = [sample.line for sample in encoded]
        assert [json.loads(line) for line in lines] == answer.samples
        assert parse_samples(b"".join(lines))  # the trainer's own parser takes them, too
