"""Batch files put into a run directory by hand, for tests that need no daemon."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from spoold.layout import BatchName


def sample(environment: int, *, group: str = "", weight_version: int = 7) -> dict[str, object]:
    """Return one sample as DESIGN.md lays it out."""
    env_id = f"env-{environment:04d}"
    return {
        "uid": f"{env_id}:{environment}",
        "instance_id": group or env_id,
        "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
        "reward": 0.5,
        "extra_info": {
            "environment": environment,
            "env_id": env_id,
            "session_id": env_id,
            "group_id": group,
            "job_id": "job",
            "env_name": "arithmetic",
            "llm_model": "policy",
            "step_pk": environment,
            "steps": 1,
            "step_reward": 0.5,
            "reward_source": "reward",
            "weight_version": weight_version,
            "truncated": False,
            "finish_reason": "stop",
            "is_session_completed": True,
            "timestamp": 1796000000.0,
        },
    }


def make_run_dir(root: Path) -> Path:
    """Make the folders that a daemon makes."""
    for folder in ("pending", "inflight", "acked", "rejected", ".spoold/tmp", ".spoold/ledger"):
        (root / folder).mkdir(parents=True)
    return root


def put(
    root: Path,
    seq: int,
    *,
    where: str = "pending",
    samples: list[dict[str, object]] | None = None,
    weights: tuple[int, int] = (7, 7),
    attempt: int = 1,
) -> BatchName:
    """Put a batch file with the right digest into a folder of the run directory, atomically."""
    rows = [sample(seq, weight_version=weights[1])] if samples is None else samples
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    name = BatchName(
        seq=seq,
        samples=len(rows),
        lo=weights[0],
        hi=weights[1],
        digest=hashlib.sha256(data).hexdigest()[:12],
        attempt=attempt,
    )
    (root / where).mkdir(parents=True, exist_ok=True)
    written = root / f".written-{seq}"
    written.write_bytes(data)
    os.rename(written, root / where / name.file_name)
    return name


def ls(root: Path) -> list[str]:
    """Return the paths of all files but locks and the daemon's own, as `find` would."""
    return sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and path.name != ".lock" and ".spoold" not in path.parts
    )
