"""kill -9 of the server, of three shards' daemons and trainers, beside eight writers: all once.

The server syncs what it commits, so what a writer was told is there after a crash. The seed is
printed; SPOOLD_TEST_SEED sets it.
"""

from __future__ import annotations

import contextlib
import queue
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from spoold.demo.account import account, batches
from spoold.layout import State
from spoold.policy.shards import Shard, number_of
from tests.support import processes
from tests.support.chance import a_seed
from tests.support.postgres import PostgresRollouts, make_postgres
from tests.support.processes import SHARING_TRAINER, Players, batch_names, run_once, until
from tests.support.rollouts import JOB
from tests.support.servers import Server, own_server

pytestmark = pytest.mark.slow

psycopg = pytest.importorskip("psycopg", reason="pip install 'psycopg[binary]'")

WRITERS = 8
SHARDS = 3
ENVIRONMENTS = 4_000
KILLS = 16
SECONDS = 20.0
OPTIONS = (
    "--batch-size=8", "--linger-seconds=0.05", "--min-free-bytes=0", "--scan-seconds=0.2",
    "--rescan-seconds=3600",  # only looks find what comes after a start
)  # fmt: skip


class Writers:
    """Threads that complete environments, each over a connection of its own, until all are done.

    Whatever they were not told to be committed they look up when the server is back.
    """

    def __init__(self, rollouts: PostgresRollouts, ids: list[int], seed: int) -> None:
        self._rollouts = rollouts
        self._todo: queue.Queue[int] = queue.Queue()
        for one in ids:
            self._todo.put(one)
        self.failed: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._write, args=(random.Random(seed + n),))
            for n in range(WRITERS)
        ]
        for thread in self._threads:
            thread.start()

    def is_done(self) -> bool:
        assert not self.failed, self.failed
        return not any(thread.is_alive() for thread in self._threads)

    def give_up(self) -> None:
        """Leave the rest undone."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._todo.get_nowait()
        for thread in self._threads:
            thread.join(60)

    def _write(self, rng: random.Random) -> None:
        db: PostgresRollouts | None = None
        try:
            while True:
                try:
                    one = self._todo.get_nowait()
                except queue.Empty:
                    break
                while True:
                    try:
                        db = db or self._rollouts.another()
                        self._complete(db, one, rng)
                        break
                    except psycopg.OperationalError:
                        if db is not None:
                            db.close()
                        db = None
                        time.sleep(0.05)
        except BaseException as error:
            self.failed.append(error)
        finally:
            if db is not None:
                db.close()

    def _complete(self, db: PostgresRollouts, one: int, rng: random.Random) -> None:
        query = "SELECT finished FROM job_environments WHERE id = ?"
        if db.db.execute(query, (one,)).fetchone()[0]:
            return
        how = rng.random()
        if how < 0.15:  # an id that never comes
            with contextlib.suppress(ZeroDivisionError), db.together():
                db.step(one)
                raise ZeroDivisionError
        with db.together():
            db.step(one)
            if how < 0.1:
                time.sleep(rng.uniform(0.05, 0.4))  # ids of others are committed meanwhile
            db.end(one, response="x" * rng.randint(0, 4000))
            if how < 0.5:
                db.finish(one)
        if how >= 0.5:
            db.finish(one)
        time.sleep(rng.uniform(0.0, 2 * SECONDS * WRITERS / ENVIRONMENTS))


def test_each_environment_is_in_one_of_three_shards_though_all_are_killed(tmp_path: Path) -> None:
    seed = a_seed()
    rng = random.Random(seed)
    shards = [Shard(i, SHARDS) for i in range(SHARDS)]
    run_dirs = [str(tmp_path / f"run-{i}") for i in range(SHARDS)]
    daemons = [f"daemon-{i}" for i in range(SHARDS)]
    trainers = [f"trainer-{i}" for i in range(SHARDS)]
    commands = [
        [sys.executable, "-m", "spoold", "run", f"--shard={shard}", "--run-dir", run_dir, *OPTIONS]
        for shard, run_dir in zip(shards, run_dirs, strict=True)
    ]
    with own_server(sync=True) as server, Players(tmp_path) as players:
        rollouts = make_postgres(server)
        with rollouts.together():
            ids = rollouts.register(ENVIRONMENTS, group=None)
        query = "SELECT id, env_id FROM job_environments"
        owner = {
            one: number_of(JOB, "", env_id) % SHARDS for one, env_id in rollouts.db.execute(query)
        }
        environ = {"SPOOLD_DB": rollouts.url}
        rollouts.close()
        for name, command in zip(daemons, commands, strict=True):
            players.start(name, command, environ=environ)
        writers = Writers(rollouts, ids, seed)
        try:
            for name, run_dir in zip(trainers, run_dirs, strict=True):
                until(Path(run_dir, "pending").is_dir, "the run directory")
                players.start(name, [sys.executable, "-c", SHARING_TRAINER, run_dir, "trainer"])
            killed = _kill(rng, players, server, writers, run_dirs, [*daemons, *trainers])
            until(writers.is_done, "the writers to end", timeout_seconds=120)
        finally:
            writers.give_up()
        rollouts = rollouts.another()
        rows = rollouts.db.execute("SELECT id FROM job_environments WHERE finished = 1")
        assert {one for (one,) in rows} == set(ids)
        rollouts.close()

        def all_acked() -> bool:
            players.check(*daemons, *trainers)
            acked = [name for one in run_dirs for name in batch_names(one, State.ACKED)]
            return sum(name.samples for name in acked) >= len(ids)

        until(all_acked, f"{len(ids)} environments to be acked", timeout_seconds=120)
        for daemon, trainer in zip(daemons, trainers, strict=True):
            players.kill(trainer)
            assert players.stop(daemon) == 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(processes.ENVIRON, "SPOOLD_DB", environ["SPOOLD_DB"])
            for command in commands:
                run_once([*command, "--once"])
    for shard, run_dir in zip(shards, run_dirs, strict=True):
        own = frozenset(one for one in ids if owner[one] == shard.index)
        result = account(run_dir, own)
        assert result.is_clean, result
        assert {batch.state for batch in batches(run_dir)} == {State.ACKED}
    assert killed["server"] > 0, killed
    for name in daemons:
        said = players.log(name).read_text()
        assert "Traceback" not in said
        assert "s3cret" not in said


def _kill(
    rng: random.Random,
    players: Players,
    server: Server,
    writers: Writers,
    run_dirs: list[str],
    names: list[str],
) -> Counter[str]:
    """Kill one or two at a time, when a few more batches were published; start them again."""
    killed: Counter[str] = Counter()
    seen = 0
    for _ in range(KILLS):
        wanted = seen + rng.randint(1, 12)

        def there(wanted: int = wanted) -> bool:
            nonlocal seen
            players.check(*names)
            now = sum(len(batch_names(one, state)) for one in run_dirs for state in State)
            seen = max(seen, now)
            return seen >= wanted or writers.is_done()

        until(there, f"batch {wanted}")
        time.sleep(rng.uniform(0.0, 0.1))
        # The server as often as all others together: whoever reads is in the middle of it then.
        chosen = {rng.choice(["server", rng.choice(names)]) for _ in range(rng.choice((1, 1, 2)))}
        print(f"{seen=}: kill -9 {' '.join(chosen)}")
        killed.update(chosen)
        for name in chosen:
            server.kill() if name == "server" else players.kill(name)
        for name in chosen:
            server.start() if name == "server" else players.start(name)
    return killed
