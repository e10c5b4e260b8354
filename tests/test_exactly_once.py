"""A trainer that keeps the order trains on each sample once, wherever it is killed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spoold import fs
from spoold.demo.children import daemon_command
from spoold.layout import State
from tests.support.handmade import make_run_dir, put, sample
from tests.support.processes import Players, batch_names, run_once, until
from tests.support.rollouts import make_rollouts

LINES = {
    "checkpoint loaded", "name locked", "rewound", "claimed", "samples read",
    "optimizer step taken", "acked", "checkpoint half written", "checkpoint written",
    "checkpoint saved", "name unlocked", "before rename_noreplace", "after rename_noreplace",
    "before sync_dir", "after sync_dir", "before make_dirs", "after make_dirs",
}  # fmt: skip
BATCHES = 3


def toy_trainer(run_dir: Path, checkpoint: Path, *options: str) -> list[str]:
    module = "tests.support.toy_trainer"
    return [sys.executable, "-m", module, str(run_dir), str(checkpoint), *options]


@pytest.fixture
def players(tmp_path: Path) -> Iterator[Players]:
    with Players(tmp_path) as players:
        yield players


class Scene:
    """A rollout database with a few complete environments, and a daemon that has published them."""

    def __init__(self, folder: Path, players: Players) -> None:
        self.run = folder / "run"
        self.players = players
        made = make_rollouts(folder / "rollout.db")
        for one in made.register(2 * BATCHES, group=None):
            made.complete(one)
        made.close()
        # The daemon gives a dead trainer's batches back at once: as much of a race as can be.
        options = ["--batch-size=2", "--min-free-bytes=0", "--scan=0.02", "--requeue=0"]
        self.command = daemon_command(str(folder / "rollout.db"), str(self.run), *options)
        players.start("daemon", self.command)
        until(lambda: self.run.is_dir() and self.pending() == BATCHES, "all batches")

    def pending(self) -> int:
        return len(batch_names(self.run, State.PENDING))

    def is_daemon_up(self) -> bool:
        return fs.lock_is_held(f"{self.run}/.spoold/lock") is True

    def settle(self) -> None:
        """Stop the daemon; everything is acked, and another one finds nothing to deliver."""
        until(self.is_daemon_up, "the daemon to have started")
        assert self.players.stop("daemon") == 0
        run_once([*self.command, "--once"])
        assert len(batch_names(self.run, State.ACKED)) == BATCHES
        assert self.pending() == 0
        assert len(list((self.run / ".spoold/ledger").iterdir())) == BATCHES


def test_with_the_daemon_down_at_every_point(tmp_path: Path) -> None:
    run = make_run_dir(tmp_path / "run")
    for seq in range(1, BATCHES + 1):
        put(run, seq, samples=[sample(2 * seq), sample(2 * seq + 1)])
    told = json.loads(run_once(toy_trainer(run, tmp_path / "checkpoint")))
    # As many points as there are, and each kind of them.
    assert told["last"] > 50
    assert set(told["killed"]) == LINES


def test_with_the_daemon_up_at_some_points(tmp_path: Path, players: Players) -> None:
    scene = Scene(tmp_path, players)
    trainer = toy_trainer(scene.run, tmp_path / "checkpoint", "--first=14", "--last=22")
    told = json.loads(run_once(trainer))
    assert sum(told["killed"].values()) > 15
    players.check("daemon")
    scene.settle()


@pytest.mark.slow
def test_with_the_daemon_up_at_every_point(tmp_path: Path, players: Players) -> None:
    scene = Scene(tmp_path, players)
    told = json.loads(run_once(toy_trainer(scene.run, tmp_path / "checkpoint")))
    assert told["last"] > 50
    assert set(told["killed"]) == LINES
    players.check("daemon")
    scene.settle()


@pytest.mark.slow
def test_with_the_daemon_killed_again_and_again_at_every_point(
    tmp_path: Path, players: Players
) -> None:
    scene = Scene(tmp_path, players)
    players.start("trainer", toy_trainer(scene.run, tmp_path / "checkpoint"))
    kills = 0
    while not players.has_ended("trainer"):
        lock_is_held = scene.is_daemon_up()
        # By what it has come to, not by the clock: at its start, and after it.
        if lock_is_held or kills % 2:
            players.kill("daemon")
            players.start("daemon")
            kills += 1
        time.sleep(0.05)
    told = json.loads(players.log("trainer").read_text())
    assert told["last"] > 50
    assert kills > 2
    scene.settle()
