"""kill -9 of daemon, writer and trainers at random moments; each environment is there once.

A moment is "so many batches further, and some milliseconds": it depends on what has happened, not
on how fast the machine is. The seed is printed; SPOOLD_TEST_SEED sets it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from spoold.demo import database
from spoold.demo.account import Account, account, batches
from spoold.demo.children import daemon_command, trainer_command, writer_command
from spoold.layout import NoteName, State
from tests.support.chance import a_seed
from tests.support.processes import (
    HAND,
    SHARING_TRAINER,
    Players,
    batch_names,
    ledger,
    run_once,
    until,
)

pytestmark = pytest.mark.slow

ENVIRONMENTS = 1_000
KILLS = 24
OPTIONS = ("--batch-size=8", "--linger-seconds=0.05", "--min-free-bytes=0")
EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer.sh"


class Scene:
    """A rollout database, a run directory, and the processes around them."""

    def __init__(self, folder: Path, players: Players) -> None:
        self.players = players
        self.db = str(folder / "rollouts.db")
        self.run_dir = str(folder / "run")
        self.checkpoint = folder / "checkpoint.json"
        self.seed = a_seed()
        self.rng = random.Random(self.seed)
        self.ids_by_seq: dict[int, str] = {}
        database.create(self.db, environments=ENVIRONMENTS, seed=self.seed)

    def start(self, *daemon_options: str) -> None:
        self.players.start(
            "daemon", daemon_command(self.db, self.run_dir, *OPTIONS, *daemon_options)
        )
        self.players.start("writer", writer_command(self.db, "--seconds=6", f"--seed={self.seed}"))

    def progress(self) -> int:
        """Publishes and acks so far. Checks on the way that no number is used twice."""
        acked = batch_names(self.run_dir, State.ACKED)
        other = [batch_names(self.run_dir, s) for s in State if s is not State.ACKED]
        for name in [*acked, *(name for names in other for name in names)]:
            assert self.ids_by_seq.setdefault(name.seq, name.id) == name.id
        return len(self.ids_by_seq) + len(acked)

    def kill_at_random(
        self,
        victims: list[str],
        kills: int,
        *,
        progress: Callable[[], int] | None = None,
        strides: tuple[int, int] = (1, 4),
    ) -> None:
        """Kill, after random progress, one victim or two at once, and start them again."""
        done, progress = 0, progress or self.progress
        while done < kills:
            wanted = progress() + self.rng.randint(*strides)
            self.await_progress(progress, wanted, victims)
            chosen = self.rng.sample(victims, self.rng.choice((1, 1, 2)))
            moment = self.await_moment(chosen)
            print(f"{wanted=}, {moment}: kill -9 {' '.join(chosen)}")
            for name in chosen:
                self.players.kill(name)
                done += 1
            for name in chosen:
                self.players.start(name)

    def await_progress(self, progress: Callable[[], int], wanted: int, victims: list[str]) -> None:
        def there() -> bool:
            self.players.check(*(name for name in victims if name != "writer"))
            return progress() >= wanted

        until(there, f"progress up to {wanted}")

    def await_moment(self, chosen: list[str]) -> str:
        """Wait a few random milliseconds, or for the daemon to be in the middle of a publish."""
        if "daemon" in chosen and self.rng.random() < 0.5:
            tmp = f"{self.run_dir}/.spoold/tmp"
            deadline = time.monotonic() + 0.2
            while time.monotonic() < deadline:
                if os.listdir(tmp):
                    return "a file in tmp/"
        after_seconds = self.rng.uniform(0.0, 0.03)
        time.sleep(after_seconds)
        return f"{after_seconds * 1e3:.1f} ms later"

    def completed(self) -> frozenset[int]:
        with closing(database.connect(self.db)) as db:
            return database.completed(db)

    def drain(self, *trainers: str) -> None:
        """Let the writer end, the daemon deliver the rest, and the trainers ack it."""
        until(lambda: self.players.has_ended("writer"), "the writer to end")
        completed = len(self.completed())
        rejected = Path(self.run_dir, "rejected")

        def all_acked() -> bool:
            self.players.check("daemon", *trainers)
            acked = sum(name.samples for name in batch_names(self.run_dir, State.ACKED))
            notes = sum(NoteName.parse(path.name) is not None for path in rejected.iterdir())
            return acked + notes >= completed

        until(all_acked, f"{completed} environments to be acked")

    def settle(self) -> Account:
        """Stop the daemon, let another one look at everything once, and check what is there."""
        assert self.players.stop("daemon") == 0
        run_once(daemon_command(self.db, self.run_dir, *OPTIONS, "--once"))
        self.progress()
        result = account(self.run_dir, self.completed())
        assert result.is_clean, result
        held = batches(self.run_dir)
        assert {batch.state for batch in held} == {State.ACKED}
        assert len({batch.name.seq for batch in held}) == len(held) == len(self.ids_by_seq)
        assert ledger(self.run_dir) == {
            batch.name.id: frozenset(batch.environments) for batch in held
        }
        assert os.listdir(f"{self.run_dir}/.spoold/tmp") == []
        return result


@pytest.fixture
def scene(tmp_path: Path):
    with Players(tmp_path) as players:
        yield Scene(tmp_path, players)


def sharing_trainer(scene: Scene, name: str) -> list[str]:
    return [sys.executable, "-c", SHARING_TRAINER, scene.run_dir, name]


def test_each_sample_is_trained_on_once_though_daemon_writer_and_trainer_are_killed(scene: Scene):
    scene.start()
    command = trainer_command(scene.run_dir, str(scene.checkpoint), "--seconds-per-step=0.01")
    scene.players.start("trainer-0", command)

    scene.kill_at_random(["daemon", "trainer-0", "writer"], KILLS)
    scene.drain("trainer-0")

    def saved() -> list[str]:
        return json.loads(scene.checkpoint.read_text())["trained"]

    acked = sum(name.samples for name in batch_names(scene.run_dir, State.ACKED))
    until(lambda: len(saved()) >= acked, "the last checkpoint")
    scene.players.kill("trainer-0")
    result = scene.settle()
    trained = account(scene.run_dir, result.completed, trained=saved())
    assert trained.mistrained == frozenset()
    assert len(result.completed) > ENVIRONMENTS / 2


def test_each_batch_is_acked_by_one_of_two_trainers_though_all_are_killed(scene: Scene):
    scene.start()
    trainers = ["trainer-0", "trainer-1"]
    for name in trainers:
        scene.players.start(name, sharing_trainer(scene, name))

    scene.kill_at_random(["daemon", *trainers], KILLS)
    scene.drain(*trainers)

    for name in trainers:
        scene.players.kill(name)
    result = scene.settle()
    said = [line for name in trainers for line in scene.players.log(name).read_text().split("\n")]
    acks = [line.removeprefix("acked ") for line in said if line.startswith("acked ")]
    assert len(acks) == len(set(acks))
    # A trainer that is killed between the rename and its print has acked and not said so.
    assert set(acks) <= set(scene.ids_by_seq.values())
    assert len(acks) >= result.batches - KILLS


def test_each_environment_is_there_once_though_batches_are_moved_by_hand_meanwhile(scene: Scene):
    # What the trainer acked and a hand moved back it passes over: pending/ fills up with those.
    scene.start("--max-pending-batches=10000")
    scene.players.start("trainer-0", sharing_trainer(scene, "trainer-0"))
    until(lambda: scene.progress() > 4, "the first batches")
    hand = [sys.executable, "-c", HAND, scene.run_dir, "800", str(scene.seed)]
    scene.players.start("hand", hand)

    scene.kill_at_random(
        ["daemon", "trainer-0"],
        8,
        progress=lambda: scene.players.log("hand").read_text().count("\n"),
        strides=(20, 60),
    )
    until(lambda: scene.players.has_ended("hand"), "the hand to rest")
    until(lambda: scene.players.has_ended("writer"), "the writer to end")
    scene.players.kill("trainer-0")
    for state in (State.INFLIGHT, State.REJECTED):
        for path in Path(scene.run_dir, state).glob("*.jsonl"):
            path.rename(Path(scene.run_dir, "pending", path.name))
    scene.players.start("trainer-0")
    scene.drain("trainer-0")
    scene.players.kill("trainer-0")

    scene.settle()
    assert not list(Path(scene.run_dir, "rejected").glob("*/*.jsonl"))


def test_each_batch_is_acked_though_daemon_and_the_trainer_in_bash_are_killed(scene: Scene):
    scene.start()
    until(lambda: scene.progress() > 0, "the first batch")
    scene.players.start("trainer.sh", ["bash", str(EXAMPLE), scene.run_dir, "wc", "-l"])

    scene.kill_at_random(["daemon", "trainer.sh"], KILLS // 2)
    scene.drain("trainer.sh")

    scene.players.kill("trainer.sh")
    scene.settle()
    assert "lost:" not in scene.players.log("trainer.sh").read_text()
