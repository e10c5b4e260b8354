"""Batch files made by hand, as the contract describes them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from spoold.layout import BatchName, Place, RunDir, State

PENDING = Place(State.PENDING)


def env_id_of(environment: int) -> str:
    return f"env-{environment:08d}"


def sample_line(environment: int, *, weight_version: int = 7, group: str = "") -> bytes:
    """One valid sample; the environment's id says all else."""
    env_id = env_id_of(environment)
    sample = {
        "uid": f"{env_id}:{environment * 10}",
        "instance_id": group or env_id,
        "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        "reward": 0.5,
        "extra_info": {
            "environment": environment,
            "env_id": env_id,
            "session_id": env_id,
            "group_id": group,
            "job_id": "job",
            "env_name": "math",
            "llm_model": "m",
            "step_pk": environment * 10,
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
    return json.dumps(sample, separators=(",", ":")).encode() + b"\n"


def batch(
    seq: int, environments: Iterable[int], *, weight_version: int = 7, group: str = ""
) -> tuple[BatchName, bytes]:
    """The name and the bytes of a batch."""
    lines = [
        sample_line(one, weight_version=weight_version, group=group) for one in sorted(environments)
    ]
    data = b"".join(lines)
    name = BatchName(
        seq=seq,
        samples=len(lines),
        lo=weight_version,
        hi=weight_version,
        digest=hashlib.sha256(data).hexdigest()[:12],
    )
    return name, data


def put_batch(
    run: RunDir, seq: int, environments: Iterable[int], place: Place = PENDING, attempt: int = 1
) -> BatchName:
    """Write a batch file into a place; returns its name."""
    name, data = batch(seq, environments)
    name = BatchName(
        seq=name.seq,
        samples=name.samples,
        lo=name.lo,
        hi=name.hi,
        digest=name.digest,
        attempt=attempt,
    )
    folder = Path(run.of(place))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name.file_name).write_bytes(data)
    return name


def empty_run(root: Path) -> RunDir:
    """A run directory as the daemon makes it, without a daemon."""
    run = RunDir(str(root))
    for state in State:
        Path(root, state.value).mkdir(parents=True)
    Path(run.tmp).mkdir(parents=True)
    Path(run.ledger).mkdir()
    return run


def tree(run: RunDir, *folders: str) -> Sequence[str]:
    """All files below pending/, inflight/, acked/ and rejected/ (or `folders`), by path."""
    found = []
    for top in folders or tuple(state.value for state in State):
        for parent, _, names in os.walk(f"{run.root}/{top}"):
            found += [os.path.relpath(f"{parent}/{name}", run.root) for name in names]
    return sorted(found)
