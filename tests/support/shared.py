"""The rollout databases beside the project, made by the writer's own code, and a spool of one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from spoold.demo.children import daemon_command
from tests.support.processes import run_once

SHARED = Path(os.environ.get("SPOOLD_SHARED", Path(__file__).parents[3] / "shared"))


def expected_of(name: str) -> dict[str, Any]:
    """Return what is right for a database; skips where it is not there."""
    path = SHARED / "data" / f"{name}.expected.json"
    if not path.exists():
        pytest.skip(f"{path} is not there: the databases lie beside the project, not in it")
    facts: dict[str, Any] = json.loads(path.read_bytes())
    return facts


def spool_of(folder: Path, name: str, job: str, *options: str) -> tuple[Path, list[dict[str, Any]]]:
    """Let the real daemon publish a job. Returns the run directory and what is deliverable."""
    expected = expected_of(name)
    shutil.copy(SHARED / "data" / f"{name}.db", folder / "rollout.db")
    gate = f"--ready-when={expected['gate']}"
    run_once(
        daemon_command(
            str(folder / "rollout.db"), str(folder / "run"), "--once", "--min-free-bytes=0",
            f"--job={job}", gate, *options,
        )
    )  # fmt: skip
    wanted = [e for e in expected["environments"] if e["job_id"] == job and e["deliverable"]]
    return folder / "run", wanted
