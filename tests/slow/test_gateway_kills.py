"""kill -9 of gateway, daemon and client while samples are fetched over HTTP; each comes once.

A moment is "so many environments further, and some milliseconds". The seed is printed;
SPOOLD_TEST_SEED sets it.
"""

from __future__ import annotations

import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from spoold.demo.children import daemon_command
from spoold.layout import State as Folder
from tests.support.chance import a_seed
from tests.support.gateways import needs_http, serve_command, url_of
from tests.support.processes import Players, batch_names, until
from tests.support.rollouts import make_rollouts
from tests.support.slime_client import State

pytestmark = pytest.mark.slow

GROUPS, MEMBERS, KILLS = 160, 4, 24
BATCH = 2 * MEMBERS


class Scene:
    """A database that fills up as the test goes on, and the processes behind it."""

    def __init__(self, folder: Path, players: Players) -> None:
        self.players = players
        self.run_dir = folder / "run"
        self.state_file = folder / "state.json"
        seed = a_seed()
        self.rng = random.Random(seed)
        self.rollouts = make_rollouts(folder / "rollouts.db")
        with self.rollouts.together():
            self.to_come = [
                one
                for number in range(GROUPS)
                for one in self.rollouts.register(MEMBERS, group=f"group-{number}")
            ]
        # Members of a group end at different times, but not far from each other.
        self.to_come.sort(key=lambda one: self.to_come_at(one))
        self.kills: Counter[str] = Counter()

    def to_come_at(self, environment: int) -> float:
        return environment + self.rng.uniform(0, 40)

    def start(self, *, ack: str, round_groups: int, acks: bool) -> None:
        options = [f"--group-size={MEMBERS}", "--batch-size=2", "--min-free-bytes=0"]
        options += ["--scan=0.05", "--linger=0.05", "--requeue=0.5"]
        db = self.rollouts.db.execute("PRAGMA database_list").fetchone()[2]
        self.players.start("daemon", daemon_command(db, str(self.run_dir), *options))
        until((self.run_dir / "rejected").is_dir, "the run directory")
        port = free_port()
        command = serve_command(self.run_dir, f"--ack={ack}", f"--port={port}")
        self.players.start("gateway", command)
        client = [sys.executable, "-m", "tests.support.slime_client", url_of(self.players)]
        client += [str(self.state_file), str(MEMBERS), str(round_groups), "--dwell=0.03"]
        self.players.start("client", [*client, "--acks"] if acks else client)

    def complete(self, number: int) -> None:
        """Complete so many environments more."""
        with self.rollouts.together():
            for one in self.to_come[:number]:
                self.rollouts.complete(one, reward=self.rng.random())
        del self.to_come[:number]

    def in_whole_groups(self) -> int:
        """How many of the completed ones can be delivered by now."""
        waiting = {(one - 1) // MEMBERS for one in self.to_come}
        return (GROUPS - len(waiting)) * MEMBERS

    def kill_at_random(self) -> None:
        for left in range(KILLS, 0, -1):
            self.complete(self.rng.randint(1, 3 * len(self.to_come) // left + 1))
            enough = self.count(Folder.ACKED) + self.rng.randint(1, 4) * BATCH
            if enough <= self.in_whole_groups():
                self.await_samples(Folder.ACKED, at_least=enough)
            time.sleep(self.rng.uniform(0.0, 0.05))
            victims = self.rng.sample(["gateway", "daemon", "client"], self.rng.choice((1, 1, 2)))
            for name in victims:
                self.players.kill(name)
                self.kills[name] += 1
            if self.rng.random() < 0.15:
                time.sleep(0.8)  # long enough for the daemon to give a batch back
            for name in victims:
                self.players.start(name)
        self.complete(len(self.to_come))

    def count(self, folder: Folder) -> int:
        return sum(name.samples for name in batch_names(self.run_dir, folder))

    def await_samples(self, folder: Folder, at_least: int = GROUPS * MEMBERS) -> None:
        def are_there() -> bool:
            self.players.check("daemon", "gateway", "client")
            return self.count(folder) >= at_least

        until(are_there, f"{at_least} samples in {folder}")

    def seen(self) -> Counter[str]:
        return Counter(State.load(self.state_file).seen)


def free_port() -> int:
    """A port that stays free for a while: the kernel deals them out in turn."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    needs_http()
    with Players(tmp_path) as players:
        yield Scene(tmp_path, players)


def test_with_acks_each_sample_comes_once_whoever_is_killed(scene: Scene) -> None:
    scene.start(ack="explicit", round_groups=6, acks=True)
    scene.kill_at_random()
    scene.await_samples(Folder.ACKED)
    until(lambda: len(scene.seen()) == GROUPS * MEMBERS, "the client's last state")

    assert set(scene.seen().values()) == {1}
    state = State.load(scene.state_file)
    assert state.lost_rounds == 0
    print(f"{scene.kills}, {state.rounds} rounds, {state.passed_over} batches passed over")
    assert "bug" not in scene.players.log("gateway").read_text()


def test_without_acks_none_is_lost_and_no_more_than_a_batch_a_kill_comes_twice(
    scene: Scene,
) -> None:
    scene.start(ack="on-next-get", round_groups=2, acks=False)
    scene.kill_at_random()
    # What was answered last is acked by a get that finds nothing more.
    scene.await_samples(Folder.ACKED)

    seen = scene.seen()
    lost = GROUPS * MEMBERS - len(seen)
    doubled = sum(seen.values()) - len(seen)
    print(f"{scene.kills}: {lost} samples lost, {doubled} came twice")
    assert lost == 0
    assert doubled <= (scene.kills["client"] + scene.kills["gateway"]) * BATCH
    assert "bug" not in scene.players.log("gateway").read_text()
