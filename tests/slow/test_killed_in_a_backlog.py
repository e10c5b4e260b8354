"""kill -9 of the daemon, or of the process that writes for it, while a backlog is worked off."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from spoold.demo.children import Child
from spoold.layout import RunDir, State
from tests.support.chance import a_seed
from tests.support.daemons import environments
from tests.support.processes import Players, batch_names, run_once, until
from tests.support.rollouts import make_rollouts

pytestmark = pytest.mark.slow

ENVIRONMENTS = 16_000
BATCH_SIZE = 4
KILLS = 16
# Its process is up when it has come so far.
MORE_BATCHES = 80


def children_of(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except FileNotFoundError:
        return []


def holds(run: RunDir, batches: int) -> bool:
    return len(batch_names(run.root, State.PENDING)) >= batches


def has_ended_or_holds(daemon: Child, run: RunDir, batches: int) -> bool:
    return daemon.exit_code() is not None or holds(run, batches)


def test_each_environment_is_there_once_whoever_is_killed(tmp_path: Path) -> None:
    seed = a_seed()
    dice = random.Random(seed)
    rollouts = make_rollouts(tmp_path / "rollouts.db")
    ids = rollouts.register(ENVIRONMENTS)
    with rollouts.together():
        for one in ids:
            rollouts.complete(one)
    rollouts.close()
    run = RunDir(str(tmp_path / "run"))
    command = [sys.executable, "-m", "spoold", "run", "--once", f"--db={tmp_path}/rollouts.db"]
    command += [f"--run-dir={run.root}", f"--batch-size={BATCH_SIZE}"]
    command += ["--max-pending-batches=9999", "--min-free-bytes=0"]
    beside = 0
    ends: Counter[int | None] = Counter()
    with Players(tmp_path) as players:
        for number in range(KILLS):
            # Early on the daemon writes alone.
            more = dice.randint(1, 20) if number % 4 == 0 else MORE_BATCHES
            wanted = len(batch_names(run.root, State.PENDING)) + more
            child = players.start("daemon", command)
            until(partial(holds, run, wanted), f"{wanted} batches")
            time.sleep(dice.random() * 0.003)
            writers = children_of(child.pid)
            beside += bool(writers)
            if writers and dice.random() < 0.5:
                os.kill(writers[0], signal.SIGKILL)
                # Between two batches nothing was in its hands: the daemon goes on without it.
                wanted = len(batch_names(run.root, State.PENDING)) + 10
                until(partial(has_ended_or_holds, child, run, wanted), "what comes of that")
                # 74: the batch in its hands is there or not, and nobody may say which.
                ends[child.exit_code()] += 1
            players.kill("daemon")
    run_once(command)
    assert environments(run) == ids
    assert os.listdir(run.tmp) == []
    assert beside >= KILLS // 3
    assert ends.keys() <= {None, 74}
