"""A run directory filled by hand, whole batches in it, and how `find` shows it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from spoold.layout import BatchName, RunDir, State


def sample(environment: int, *, weight: int) -> dict[str, object]:
    """Return a sample with every key of the contract."""
    env_id = f"env-{environment:04d}"
    return {
        "uid": f"{env_id}:{environment}",
        "instance_id": env_id,
        "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
        "reward": 0.5,
        "extra_info": {
            "environment": environment,
            "env_id": env_id,
            "session_id": env_id,
            "group_id": "",
            "job_id": "job",
            "env_name": "arithmetic",
            "llm_model": "policy",
            "step_pk": environment,
            "steps": 1,
            "step_reward": 0.5,
            "reward_source": "reward",
            "weight_version": weight,
            "truncated": False,
            "finish_reason": "stop",
            "is_session_completed": True,
            "timestamp": 1796000000.0,
        },
    }


def make_run_dir(root: Path) -> RunDir:
    """Make the folders that a daemon makes."""
    for folder in (*State, ".spoold/tmp", ".spoold/ledger"):
        (root / folder).mkdir(parents=True)
    return RunDir(str(root))


def put_batch(
    root: Path,
    seq: int,
    *,
    where: str = "pending",
    samples: int = 1,
    weight: int = 7,
    attempt: int = 1,
) -> BatchName:
    """Put a batch file into a folder of the run directory; seq is its first environment too."""
    rows = [sample(seq + number, weight=weight) for number in range(samples)]
    data = b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)
    name = BatchName(
        seq=seq,
        samples=samples,
        lo=weight,
        hi=weight,
        digest=hashlib.sha256(data).hexdigest()[:12],
        attempt=attempt,
    )
    folder, tmp = root / where, root / ".spoold/tmp" / name.file_name
    folder.mkdir(parents=True, exist_ok=True)
    tmp.write_bytes(data)
    tmp.rename(folder / name.file_name)
    return name


def ls(root: Path) -> list[str]:
    """Return every file of the four directories, by path, without the locks."""
    files = (path for state in State for path in (root / state).rglob("*") if path.is_file())
    return sorted(str(path.relative_to(root)) for path in files if path.name != ".lock")
