"""Three shards of a database, each with a daemon and a trainer, beside a writer; all are killed."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from contextlib import closing
from pathlib import Path

import pytest

from spoold.demo import database
from spoold.demo.account import account
from spoold.demo.children import daemon_command, writer_command
from spoold.layout import State
from tests.support.chance import a_seed
from tests.support.processes import SHARING_TRAINER, Players, batch_names, run_once, until

pytestmark = pytest.mark.slow

ENVIRONMENTS, SHARDS, KILLS = 1_200, 3, 24
OPTIONS = ("--batch-size=8", "--linger-seconds=0.05", "--min-free-bytes=0")


def owners(db: str) -> dict[int, int]:
    """Return the shard of each environment, computed here as the documentation says."""
    found = {}
    with closing(database.connect(db)) as connection:
        rows = connection.execute("SELECT id, job_id, group_id, env_id FROM job_environments")
        for environment, job, group, env_id in rows:
            key = f"{job}\0g{group}" if group else f"{job}\0e{env_id}"
            number = int(hashlib.sha256(key.encode()).hexdigest()[:12], 16)
            found[environment] = number % SHARDS
    return found


def test_three_shards_hold_each_environment_once_though_all_daemons_and_trainers_are_killed(
    tmp_path: Path,
) -> None:
    seed = a_seed()
    rng = random.Random(seed)
    db = str(tmp_path / "rollouts.db")
    database.create(db, environments=ENVIRONMENTS, seed=seed)
    owner = owners(db)
    runs = [str(tmp_path / f"run-{i}") for i in range(SHARDS)]
    commands = [
        daemon_command(db, run, *OPTIONS, f"--shard={i}/{SHARDS}") for i, run in enumerate(runs)
    ]
    daemons = [f"daemon-{i}" for i in range(SHARDS)]
    trainers = [f"trainer-{i}" for i in range(SHARDS)]

    with Players(tmp_path) as players:

        def acked(run: str) -> int:
            return sum(name.samples for name in batch_names(run, State.ACKED))

        def all_acked() -> int:
            players.check(*daemons, *trainers)
            return sum(acked(run) for run in runs if os.path.isdir(run))

        for name, command in zip(daemons, commands, strict=True):
            players.start(name, command)
        players.start("writer", writer_command(db, "--seconds=6", f"--seed={seed}"))
        until(lambda: all(os.path.isdir(f"{run}/.spoold/ledger") for run in runs), "the folders")
        for name, run in zip(trainers, runs, strict=True):
            # One name on every host: each has its own run directory.
            players.start(name, [sys.executable, "-c", SHARING_TRAINER, run, "trainer"])

        for _ in range(KILLS):
            wanted = all_acked() + rng.randint(8, 40)
            until(
                lambda wanted=wanted: all_acked() >= wanted or players.has_ended("writer"),
                f"{wanted} acked",
            )
            for name in rng.sample([*daemons, *trainers], rng.choice((1, 1, 2, 3))):
                players.kill(name)
                players.start(name)
        until(lambda: players.has_ended("writer"), "the writer to end")
        with closing(database.connect(db)) as connection:
            completed = database.completed(connection)

        def all_there() -> bool:
            notes = sum(len(list(Path(run, "rejected").glob("env-*.json"))) for run in runs)
            return all_acked() + notes >= len(completed)

        until(all_there, f"{len(completed)} environments to be acked")
        for name in trainers:
            players.kill(name)
        for name in daemons:
            assert players.stop(name) == 0

    for shard, (run, command) in enumerate(zip(runs, commands, strict=True)):
        run_once([*command, "--once"])
        own = {one for one in completed if owner[one] == shard}
        result = account(run, own)
        # Clean: all of its own, each once, and nothing that belongs to others.
        assert result.is_clean, (shard, result)
        assert own
    assert len(completed) > ENVIRONMENTS / 2
