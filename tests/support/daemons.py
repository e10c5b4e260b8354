"""The daemon in this process, under a clock that only the test moves."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spoold import fs
from spoold.config import load
from spoold.daemon.loop import Daemon
from spoold.layout import RunDir
from spoold.spool import setup
from spoold.spool.statusfile import Status, read
from tests.support.batches import tree


@dataclass
class Clock:
    """Monotonic seconds."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Running:
    """A started daemon. `go` lets time pass and lets it do all that is due."""

    daemon: Daemon
    run: RunDir
    lock: fs.Lock
    clock: Clock = field(default_factory=Clock)

    def go(self, seconds: float = 0.0) -> None:
        """Let time pass, and step until nothing is due; less than a scan: hint at both sides."""
        self.clock.now += seconds
        if seconds >= self.daemon.settings.scan_seconds:
            self.daemon.hint(source=False, spool=False, moved=set())
        else:
            self.daemon.hint(source=True, spool=True)
        for _ in range(10_000):
            pause = self.daemon.step()
            if pause > 0.2:
                return
            self.clock.now += pause
        raise AssertionError("the daemon does not come to rest")

    def settle(self) -> None:
        """Let enough passes happen for a missing file to be believed missing."""
        for _ in range(5):
            self.go(0.1)

    def kill(self) -> None:
        """Drop it on the floor: nothing is given back, nothing is said.

        A kill spares what runs beside: a batch that is being written is written first, since the
        next daemon of this process would find it under its hands.
        """
        self.daemon.delivery.close()
        self.lock.release()
        self.daemon.looking.close()

    @property
    def status(self) -> Status:
        """What the daemon last said."""
        self.go(2.0)
        status, why = read(self.run)
        assert status is not None, why
        return status

    @property
    def reasons(self) -> dict[str, str]:
        """Why nothing is delivered: code → words."""
        return {reason.code: reason.text for reason in self.status.reasons}


def start(
    tmp_path: Path,
    clock: Clock | None = None,
    wall: Callable[[], float] | None = None,
    **settings: Any,
) -> Running:
    """Start a daemon on `rollout.db` and `run` in a folder."""
    chosen = {
        "db": f"{tmp_path}/rollout.db",
        "run_dir": f"{tmp_path}/run",
        "min_free_bytes": "0",
        "linger_seconds": "0",
    } | {name: str(value) for name, value in settings.items()}
    db = chosen.pop("db")
    clock = clock or Clock()
    run = setup.make_run(chosen["run_dir"])
    # A writer that outlived its daemon holds it for a moment; `spoold run` tries again, too.
    give_up = time.monotonic() + 30.0
    while (lock := setup.lock_run(run)) is None:
        assert time.monotonic() < give_up, "an earlier daemon still runs"
        time.sleep(0.005)
    daemon = Daemon(
        # Not as an option: there a password would be refused.
        load(None, chosen, {"SPOOLD_DB": db}),
        clock=clock,
        wall=wall or (lambda: 1_796_000_000.0 + clock.now),
    )
    try:
        daemon.start(lock, run)
    except BaseException:
        lock.release()
        raise
    return Running(daemon, run, lock, clock)


@contextlib.contextmanager
def running(tmp_path: Path, **settings: Any) -> Iterator[Running]:
    """Start a daemon, and stop it at the end as SIGTERM does."""
    it = start(tmp_path, **settings)
    try:
        yield it
        it.daemon.stop()
    finally:
        it.kill()


def environments(run: RunDir, *folders: str) -> list[int]:
    """Environment ids of every sample below `folders` (all four), in order of file and line."""
    found = []
    for name in tree(run, *folders):
        if name.endswith(".jsonl"):
            lines = Path(run.root, name).read_bytes().splitlines()
            found += [json.loads(line)["extra_info"]["environment"] for line in lines]
    return found


def mv(run: RunDir, name: str, target: str) -> None:
    """`mv -n` of a file, both relative to the run directory; makes the folder."""
    Path(run.root, target).mkdir(exist_ok=True)
    os.rename(f"{run.root}/{name}", f"{run.root}/{target}/{os.path.basename(name)}")
