"""`spoold run --once` on databases that the writer's own code made, against their oracle."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(os.environ.get("SPOOLD_SHARED", Path(__file__).parents[2] / "shared"))
NAMES = ("safactory-main", "safactory-v2", "safactory-newest")
JOBS = [
    ("safactory-main", "job-main-0001"),
    ("safactory-v2", "job-v2-0001"),
    ("safactory-newest", "job-newest-0001"),
    ("safactory-newest", "job-other"),
]


def expected_of(name: str) -> dict[str, Any]:
    path = SHARED / "data" / f"{name}.expected.json"
    if not path.exists():
        pytest.skip(f"{path} is not there: the databases lie beside the project, not in it")
    facts: dict[str, Any] = json.loads(path.read_bytes())
    return facts


def run_once(tmp_path: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    if not (tmp_path / "rollout.db").exists():
        shutil.copy(SHARED / "data" / f"{name}.db", tmp_path / "rollout.db")
    command = [sys.executable, "-m", "spoold", "run", "--once", "--db", f"{tmp_path}/rollout.db"]
    return subprocess.run(
        [*command, "--run-dir", f"{tmp_path}/run", *options],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("SPOOLD_")},
        check=False,
        timeout=60,
    )


def samples_in(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]


def hash_of(messages: list[Any]) -> str:
    text = json.dumps(messages, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(("name", "job"), JOBS)
def test_exactly_the_deliverable_environments_are_delivered_each_once(
    tmp_path: Path, name: str, job: str
) -> None:
    expected = expected_of(name)
    wanted = {e["id"]: e for e in expected["environments"] if e["job_id"] == job}
    options = ("--job", job, "--ready-when", expected["gate"], "--min-free-bytes", "0")
    ran = run_once(tmp_path, name, *options)
    assert ran.returncode == 0, ran.stderr
    samples = samples_in(tmp_path / "run/pending")
    delivered = [sample["extra_info"]["environment"] for sample in samples]
    assert sorted(delivered) == [number for number, e in wanted.items() if e["deliverable"]]
    for sample in samples:
        extra = sample["extra_info"]
        right = wanted[extra["environment"]]
        assert extra["env_id"] == right["env_id"]
        assert sample["instance_id"] == (right["group_id"] or right["env_id"])
        assert extra["step_pk"] == right["terminal_pk"]
        assert sample["reward"] == right["reward"]
        assert extra["reward_source"] == right["reward_fallback"]
        assert extra["weight_version"] == right["weight_version"]
        assert extra["truncated"] == right["truncated"]
        assert len(sample["messages"]) == right["n_messages"]
        assert hash_of(sample["messages"]) == right["messages_sha256"]


@pytest.mark.parametrize(("name", "job"), JOBS)
def test_a_second_run_delivers_nothing_and_changes_no_file(
    tmp_path: Path, name: str, job: str
) -> None:
    expected = expected_of(name)
    options = ("--job", job, "--ready-when", expected["gate"], "--min-free-bytes", "0")
    assert run_once(tmp_path, name, *options).returncode == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "run/pending").iterdir()}
    assert before
    assert run_once(tmp_path, name, *options).returncode == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "run/pending").iterdir()} == before


def test_several_jobs_without_a_choice_are_listed(tmp_path: Path) -> None:
    expected = expected_of("safactory-newest")
    ran = run_once(tmp_path, "safactory-newest", "--min-free-bytes", "0")
    assert ran.returncode == 78
    for job in expected["jobs"]:
        assert job in ran.stderr


@pytest.mark.parametrize("name", NAMES)
def test_the_database_is_not_changed(tmp_path: Path, name: str) -> None:
    expected = expected_of(name)
    before = (SHARED / "data" / f"{name}.db").read_bytes()
    assert run_once(tmp_path, name, "--job", expected["jobs"][0]).returncode in (0, 75)
    assert (tmp_path / "rollout.db").read_bytes() == before
