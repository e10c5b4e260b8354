"""Anything in any order: people, consumers, kills, power cuts; each environment is there once.

The daemon, its consumer and a person share a run directory on a disk that loses at a power cut all
that was not synced. Whatever they did: after a start, every complete environment is delivered by
the sentence in DESIGN.md (in a batch that counts, or in the ledger), once, and what a process was
told is durable is there.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spoold import Consumer
from spoold.consumer import Batch
from spoold.errors import BatchLost
from spoold.layout import BatchName, State
from tests.crash import acts, verdict
from tests.crash.lossy import Disk
from tests.crash.syscalls import Call, watching
from tests.support.daemons import Clock, Running

FOLDERS = ("pending", "inflight", "inflight/trainer-0", "acked", "acked/step-000000003", "rejected")


# What hypothesis draws must not depend on how fast this machine is, so it draws no names.
WHICH = st.integers(0, 100)


def batch_id(path: Path) -> str:
    name = BatchName.parse(path.name)
    assert name is not None
    return name.id


class Killed(BaseException):
    """The process is dead: from now on it makes no call."""


class Spool(RuleBasedStateMachine):
    """The world of one run directory. `promised`: batch id → where it was said to be, durably."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self.run = self.folder / "run"
        self.run.mkdir()
        self.disk = Disk(str(self.run))
        self.kill_in = 0
        self.daemon: Running | None = None
        self.consumer: Consumer | None = None
        self.held: list[Batch] = []
        self.promised: dict[str, State] = {}
        self.copied: set[str] = set()
        self.clock = Clock()
        acts.database(self.folder, 3)
        self.watch = watching(str(self.run), self.on_call, self.disk.done)
        self.watch.__enter__()
        self.settle()

    def teardown(self) -> None:
        self.kill_all()
        self.watch.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    def on_call(self, _call: Call) -> None:
        if self.kill_in:
            self.kill_in -= 1
            if self.kill_in <= 0:
                self.kill_in = 1  # and every call after this one
                raise Killed

    # --- the daemon -----------------------------------------------------------------------------

    def started(self) -> Running:
        if self.daemon is None:
            self.daemon = acts.daemon(self.folder, clock=self.clock, max_pending_batches=50)
        return self.daemon

    def go(self) -> None:
        for _ in range(3):
            self.started().go(2.0)

    @rule()
    def deliver(self) -> None:
        self.go()

    @rule(calls=st.integers(1, 60))
    def deliver_and_be_killed(self, calls: int) -> None:
        self.kill_in = calls
        try:
            self.go()
        except Killed:
            pass
        finally:
            self.kill_in = 0
        self.kill_daemon()

    @rule()
    def kill_daemon(self) -> None:
        if self.daemon is not None:
            self.daemon.daemon.delivery.close()
            self.daemon.kill()
            self.daemon = None

    @rule(count=st.integers(1, 5))
    def complete(self, count: int) -> None:
        acts.complete_more(self.folder, count)

    # --- the consumer ---------------------------------------------------------------------------

    @rule()
    def claim(self) -> None:
        if self.consumer is None:
            self.consumer = Consumer(self.run)
        batch = self.consumer.claim()
        if batch is not None:
            self.held.append(batch)
            self.promised.pop(batch.id, None)  # a claim is not durable, and promises nothing

    @rule(act=st.sampled_from(["ack", "ack with step", "release", "reject"]))
    def end(self, act: str) -> None:
        if not self.held:
            return
        batch = self.held.pop(0)
        try:
            if act == "release":
                batch.release()
                self.promise(batch.id, State.PENDING)
            elif act == "reject":
                batch.reject("oom")
                self.promise(batch.id, State.REJECTED)
            else:
                batch.ack(step=3 if "step" in act else None)
                self.promise(batch.id, State.ACKED)
        except BatchLost:
            self.promised.pop(batch.id, None)

    @rule(step=st.integers(2, 3))
    def rewind(self, step: int) -> None:
        if self.consumer is not None:
            for batch in self.consumer.rewind(step):
                self.promise(batch, State.PENDING)

    @rule()
    def kill_consumer(self) -> None:
        if self.consumer is not None:
            self.consumer.close()
            self.consumer = None
        self.held.clear()

    # --- a person -------------------------------------------------------------------------------

    def files(self) -> list[Path]:
        """The batches that count; what nobody should bring back is left where it lies."""
        found = (path for state in State for path in (self.run / state).rglob("*.jsonl"))
        nothing = ("duplicate", "corrupt")
        return sorted(
            path for path in found if path.parent.name not in nothing and BatchName.parse(path.name)
        )

    def pick(self, which: int) -> Path | None:
        files = self.files()
        return files[which % len(files)] if files else None

    def forget_promise(self, path: Path, *, copied: bool = False) -> None:
        self.promised.pop(batch_id(path), None)
        if copied:  # of two files one is set aside, and that may be the one of a promise
            self.copied.add(batch_id(path))

    def promise(self, batch: str, state: State) -> None:
        if batch not in self.copied:
            self.promised[batch] = state

    def folder_for(self, name: str) -> Path:
        folder = self.run / name
        if not folder.is_dir():
            os.mkdir(folder)
        return folder

    @rule(which=WHICH, place=st.sampled_from(FOLDERS))
    def mv(self, which: int, place: str) -> None:
        path = self.pick(which)
        if path is None:
            return
        into = self.folder_for(place) / path.name
        if not into.exists():
            os.rename(path, into)
            self.forget_promise(path)

    @rule(which=WHICH)
    def rm(self, which: int) -> None:
        path = self.pick(which)
        if path is None:
            return
        os.unlink(path)
        self.forget_promise(path)

    @rule(which=WHICH, place=st.sampled_from(FOLDERS))
    def cp(self, which: int, place: str) -> None:
        path = self.pick(which)
        if path is None:
            return
        into = self.folder_for(place) / path.name
        if not into.exists():
            fd = os.open(into, os.O_CREAT | os.O_WRONLY, 0o640)
            os.write(fd, path.read_bytes())
            os.fchmod(fd, 0o640)
            os.close(fd)
            self.forget_promise(path, copied=True)

    # --- the end of all -------------------------------------------------------------------------

    def kill_all(self) -> None:
        self.kill_daemon()
        self.kill_consumer()

    @rule(seed=st.integers(0, 10**6))
    def cut_power(self, seed: int) -> None:
        self.kill_all()
        self.disk.cut(random.Random(seed))
        self.keep_promises()
        self.count_doubles()
        self.settle()

    def count_doubles(self) -> None:
        """A batch whose older name the cut brought back is there twice, like after a `cp`."""
        files = self.files()
        count = Counter(batch_id(path) for path in files)
        for path in files:
            if count[batch_id(path)] > 1:
                self.forget_promise(path, copied=True)

    @rule()
    def settle(self) -> None:
        """Let the daemon come to rest, and count."""
        self.go()
        now = verdict.look(self.run, lost=True)
        verdict.assert_each_once(self.folder, now)

    @invariant()
    def keep_promises(self) -> None:
        """What was said to be durable is there, until somebody moves it."""
        for batch, state in self.promised.items():
            found = list((self.run / state).rglob(f"{batch}*"))
            assert found, f"{batch} was said to be in {state.value}/"


def of_size(max_examples: int, steps: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


class TestSpool(Spool.TestCase):
    """A few worlds; the slow tests try many more."""

    settings = of_size(20, 25)


@pytest.mark.slow
class TestManySpools(Spool.TestCase):
    """More than a hundred worlds."""

    settings = of_size(120, 40)
