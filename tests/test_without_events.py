"""Events that do not come: nothing is missed for longer than one scan."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash import acts, verdict
from tests.support.batches import tree
from tests.support.daemons import Running, environments, mv
from tests.support.processes import Players, until

SCAN_SECONDS = 2.0
DEAF = {
    # inotify(7) may refuse an instance, or a watch; or be there, and never say anything.
    "no instance": "c.inotify_init = lambda: (ctypes.set_errno(errno.EMFILE), -1)[1]",
    "no watch": "c.inotify_add_watch = lambda *a: (ctypes.set_errno(errno.ENOSPC), -1)[1]",
    "silence": (
        "c.inotify_init = lambda: os.eventfd(0); c.inotify_rm_watch = lambda *a: 0;"
        "c.inotify_add_watch = lambda *a, n=itertools.count(1): next(n)"
    ),
}


def one_scan(it: Running) -> None:
    """Let the time of one scan pass, and do what is due then. Nobody gives a hint."""
    end = it.clock.now + SCAN_SECONDS
    while it.clock.now < end:
        it.clock.now = min(end, it.clock.now + it.daemon.step())
    it.daemon.step()


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Running]:
    acts.database(tmp_path, 2)
    it = acts.daemon(tmp_path, scan_seconds=SCAN_SECONDS)
    it.go()
    yield it
    it.daemon.stop()
    it.kill()


def test_17_what_completes_is_published_within_one_scan(it: Running, tmp_path: Path) -> None:
    acts.complete_more(tmp_path, 2)
    one_scan(it)
    assert environments(it.run) == [1, 2, 4, 5]


def test_17_what_is_acked_has_its_entry_after_one_scan(it: Running) -> None:
    (name,) = tree(it.run)
    mv(it.run, name, "acked")
    one_scan(it)
    one_scan(it)
    assert os.listdir(it.run.ledger) == [os.path.basename(name).removesuffix(".jsonl")]


def test_17_what_is_removed_is_delivered_anew(it: Running) -> None:
    (name,) = tree(it.run)
    os.unlink(f"{it.run.root}/{name}")
    for _ in range(3):
        one_scan(it)
    assert environments(it.run) == [1, 2]
    assert tree(it.run) != [name]


def test_18_a_folder_removed_and_made_again_doubles_nothing(it: Running, tmp_path: Path) -> None:
    shutil.copytree(it.run.pending, tmp_path / "backup")
    shutil.rmtree(it.run.pending)
    it.daemon.step()
    os.mkdir(it.run.pending)
    for path in (tmp_path / "backup").iterdir():
        shutil.copy(path, it.run.pending)
    acts.complete_more(tmp_path, 2)
    for _ in range(3):
        one_scan(it)
    assert environments(it.run) == [1, 2, 4, 5]


@pytest.mark.parametrize("how", list(DEAF))
def test_17_18_a_daemon_without_inotify_warns_once_and_goes_on_by_timed_scan(
    tmp_path: Path, how: str
) -> None:
    acts.database(tmp_path, 2)
    code = (
        "import ctypes, errno, itertools, os, sys, watchdog.observers.inotify_c as c;"
        f"{DEAF[how]}\nfrom spoold.cli import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "run", f"--db={tmp_path}/rollout.db"]
    command += [f"--run-dir={tmp_path}/run", "--scan-seconds=0.2", "--linger=0"]
    run = tmp_path / "run"
    with Players(tmp_path) as players:
        players.start("daemon", [*command, "--min-free-bytes=0"])
        until(lambda: list(run.glob("pending/*.jsonl")), "the first batch")
        acts.complete_more(tmp_path, 2)
        until(lambda: len(list(run.glob("pending/*.jsonl"))) == 2, "the second batch")
        for path in run.glob("pending/*.jsonl"):
            path.rename(run / "acked" / path.name)
        until(lambda: len(os.listdir(run / ".spoold/ledger")) == 2, "the ledger entries")
        assert players.stop("daemon") == 0
    said = players.log("daemon").read_text()
    assert said.count("WARNING inotify cannot") == (how != "silence")
    verdict.assert_each_once(tmp_path, verdict.look(run))
