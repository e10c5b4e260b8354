"""Daemon and trainers under several uids of one group, all with umask 077: who may move what."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from spoold.layout import State
from tests.support.needs import needs
from tests.support.processes import ENVIRON, batch_names, until
from tests.support.rollouts import make_rollouts

GROUP, DAEMON, TRAINER, OTHER = 64_000, 64_001, 64_002, 64_003

# Imports first, as root: the code may lie where no other user may look.
AS_USER = """
import importlib, os, pkgutil, sys
import filelock, spoold, sqlite3, tests
from watchdog.observers import inotify_c

for module in pkgutil.walk_packages(spoold.__path__, "spoold."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
uid, gid = int(sys.argv.pop(1)), int(sys.argv.pop(1))
os.setgroups([])
os.setresgid(gid, gid, gid)
os.setresuid(uid, uid, uid)
os.umask(0o077)
os.chdir("/")
"""
RUNS_SPOOLD = "from spoold.cli import main\nmain(sys.argv[1:])\n"
TRAINS = """
from spoold import Consumer
with Consumer(sys.argv[1], name=sys.argv[2]) as consumer:
    step = int(sys.argv[3])
    if step:
        print(*consumer.rewind(step=step), flush=True)
    batch = consumer.claim(timeout=20.0)
    assert batch is not None, consumer.reason()
    assert batch.samples()
    if sys.argv[4] == "die":
        os.kill(os.getpid(), 9)
    batch.ack(step=step + 1)
    print(batch.id, batch.attempt, flush=True)
"""


@pytest.fixture(autouse=True)
def _root() -> None:
    needs(os.geteuid() == 0, "only root may become other users")


def as_user(uid: int, text: str, *arguments: object) -> subprocess.Popen[str]:
    code = AS_USER + text
    command = [sys.executable, "-c", code, str(uid), str(GROUP), *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRON
    )


def said(uid: int, text: str, *arguments: object, code: int = 0) -> str:
    with as_user(uid, text, *arguments) as process:
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        return out


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: its parents are closed to other users.
    made = Path(tempfile.mkdtemp(prefix="spoold-users-"))
    try:
        os.chown(made, DAEMON, GROUP)
        made.chmod(0o2770)
        yield made
    finally:
        shutil.rmtree(made)


@contextlib.contextmanager
def daemon(folder: Path) -> Iterator[Path]:
    made = make_rollouts(folder / "rollout.db", journal="delete")
    for one in made.register(3, group=None):
        made.complete(one)
    made.close()
    os.chown(folder / "rollout.db", DAEMON, GROUP)
    options = "--batch-size=1 --min-free-bytes=0 --scan=0.05 --requeue=0.2 --log-level=error"
    process = as_user(
        DAEMON, RUNS_SPOOLD, "run", "--db", folder / "rollout.db", "--run-dir", folder / "run",
        *options.split(),
    )  # fmt: skip
    try:
        pending = folder / "run/pending"
        until(lambda: pending.is_dir() and len(os.listdir(pending)) == 3, "three batches")
        yield folder / "run"
        process.terminate()
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, "")
    finally:
        process.kill()
        process.communicate()


def test_two_users_of_one_group_share_a_spool_whatever_their_umask(folder: Path) -> None:
    with daemon(folder) as run:
        assert said(TRAINER, TRAINS, run, "a", 0, "ack").endswith(" 1\n")
        # One that dies: the daemon, under its own uid, gives the batch back.
        said(TRAINER, TRAINS, run, "a", 0, "die", code=-9)
        until(lambda: any(n.attempt == 2 for n in batch_names(run, State.PENDING)), "a requeue")
        # A third user claims it, into a folder that the second one has made too.
        assert said(OTHER, TRAINS, run, "a", 0, "ack").endswith(" 2\n")
        # And rewinds what the second one acked, into a step folder that is the second one's.
        rewound = said(OTHER, TRAINS, run, "b", 0, "ack")
        assert rewound.count("\n") == 1
        assert said(OTHER, RUNS_SPOOLD, "rewind", run, "--step", 0).count("\n") == 3
        until(lambda: not list((run / ".spoold/ledger").iterdir()), "the ledger to see that")
        for user, name in ((DAEMON, "c"), (TRAINER, "a"), (OTHER, "b")):
            said(user, TRAINS, run, name, 0, "ack")
        assert len(batch_names(run, State.ACKED)) == 3
        until(lambda: len(list((run / ".spoold/ledger").iterdir())) == 3, "the ledger")
        assert "acked" in said(TRAINER, RUNS_SPOOLD, "status", run)
        assert said(OTHER, RUNS_SPOOLD, "prune", run, "--before-step", 2).count("\n") == 3
        check_modes(run)


def check_modes(run: Path) -> None:
    for path in [run, *run.rglob("*")]:
        facts = path.lstat()
        mode = stat.S_IMODE(facts.st_mode)
        assert facts.st_gid == GROUP, path
        if path.is_dir():
            assert mode == 0o2770, path
        elif path.name in (".lock", "lock"):
            assert mode == 0o660, path
        else:
            assert mode == 0o640, path


def test_a_user_outside_the_group_is_told_so(folder: Path) -> None:
    with daemon(folder) as run:
        code = AS_USER + TRAINS
        command = [sys.executable, "-c", code, str(OTHER), "64009", str(run), "a", "0", "ack"]
        ran = subprocess.run(command, capture_output=True, text=True, env=ENVIRON, timeout=60)
        assert ran.returncode == 1
        assert "SpoolWriteError: cannot look into" in ran.stderr
        assert "give this user permission on it" in ran.stderr
