"""Five hundred batches, four racing consumers that give some back, random kills of them and of the
daemon, which requeues, and has to find out anew what is delivered while they go on.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spoold.demo.children import daemon_command
from spoold.layout import State
from tests.support.chance import a_seed
from tests.support.processes import Players, batch_names, ledger, run_once, until
from tests.support.rollouts import make_rollouts

pytestmark = pytest.mark.slow

BATCHES, CONSUMERS, KILLS = 500, 4, 60

# Says what it acked; killed in between, it has acked and not said so.
TRAINER = """
import os, sys, time
from spoold import Consumer

given_back = set()
with Consumer(sys.argv[1], name=sys.argv[2]) as consumer:
    for batch in consumer:
        if int(batch.id[:9]) % 5 == 0 and batch.id not in given_back:
            given_back.add(batch.id)
            batch.release()
            continue
        assert batch.samples()
        time.sleep(0.02)
        batch.ack(step=int(batch.id[:9]))
        os.write(1, f"acked {batch.id}\\n".encode())
"""


@pytest.fixture
def players(tmp_path: Path) -> Iterator[Players]:
    with Players(tmp_path) as players:
        yield players


def test_every_batch_is_acked_by_exactly_one_consumer(tmp_path: Path, players: Players) -> None:
    seed = a_seed()
    rng = random.Random(seed)
    made = make_rollouts(tmp_path / "rollout.db")
    with made.together():
        for one in made.register(BATCHES, group=None):
            made.complete(one)
    made.close()
    run = tmp_path / "run"
    options = ["--batch-size=1", "--max-pending-batches=1000", "--min-free-bytes=0"]
    command = daemon_command(
        str(tmp_path / "rollout.db"), str(run), *options, "--scan=0.1", "--requeue=0.3"
    )
    run_once([*command, "--once"])
    published = {name.id for name in batch_names(run, State.PENDING)}
    assert len(published) == BATCHES

    players.start("daemon", command)
    names = [f"t{number}" for number in range(CONSUMERS)]
    for name in names:
        players.start(name, [sys.executable, "-c", TRAINER, str(run), name])

    log, said_before = tmp_path / "daemon.log", 0

    def acked() -> int:
        return len(batch_names(run, State.ACKED))

    for kill in range(KILLS):
        enough = acked() + rng.randint(1, 6)
        until(lambda enough=enough: acked() >= min(enough, BATCHES), "the next acks")
        time.sleep(rng.uniform(0.0, 0.02))
        victim = rng.choice(names)
        players.kill(victim)
        if kill % 10 == 9:  # never comes back under this name: the daemon gives back what it held
            names.remove(victim)
            victim = f"t{CONSUMERS + kill}"
            names.append(victim)
            players.start(victim, [sys.executable, "-c", TRAINER, str(run), victim])
        else:
            players.start(victim)
        if kill % 3 == 2:
            players.kill("daemon")
            said_before = len(log.read_bytes())
            players.start("daemon")
    until(lambda: acked() >= BATCHES, "every batch to be acked")
    players.check("daemon", *names)
    for name in names:
        players.kill(name)
    until(lambda: len(ledger(run)) == BATCHES, "the ledger")
    # The last daemon may have been started a moment ago, and hears no signal yet.
    until(lambda: b"source open" in log.read_bytes()[said_before:], "the last daemon")
    assert players.stop("daemon") == 0

    files = batch_names(run, State.ACKED)
    assert {name.id for name in files} == published
    assert len(files) == BATCHES
    assert not [n for state in State if state is not State.ACKED for n in batch_names(run, state)]
    logs = "".join(path.read_text() for path in tmp_path.glob("t*.log"))
    said = [line.removeprefix("acked ") for line in logs.splitlines()]
    assert len(said) == len(set(said))
    assert set(said) <= published
    assert len(said) >= BATCHES - KILLS
    # Who was killed holding one got it back, or another did, as its next try.
    assert max(name.attempt for name in files) > 1
