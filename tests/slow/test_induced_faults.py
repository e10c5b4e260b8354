"""Each fault really induced, on a daemon that is a process: recognised from `spoold status` alone.

And the same sentence in status, in the log, in what the service manager is told, and in the gauge.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spoold.demo.children import Child
from spoold.layout import RunDir
from spoold.reasons import REASONS, SEVERE
from tests.crash import disks
from tests.support.batches import tree
from tests.support.commands import Ran, spoold_process
from tests.support.manager import Manager
from tests.support.needs import needs
from tests.support.processes import ENVIRON, until
from tests.support.rollouts import Rollouts, make_rollouts
from tests.support.spools import ls

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("mounts")]

LABELS = ("attention", "notice", "waits for")

# Claims so many batches, or passes all over as stale, and then holds still.
TRAINER = """
import sys, time
from spoold import Consumer

with Consumer(sys.argv[1], name="trainer-0", min_weight_version=int(sys.argv[3])) as consumer:
    held = [consumer.claim(timeout=float(sys.argv[4])) for _ in range(int(sys.argv[2]))]
    print("holds", sum(each is not None for each in held), flush=True)
    while True:
        time.sleep(60)
"""


class Service:
    """A daemon as a service, and all that is said of it."""

    def __init__(self, folder: Path, run: Path, manager: Manager) -> None:
        self.folder, self.run = folder, RunDir(str(run))
        self.metrics = folder / "metrics"
        self.metrics.mkdir()
        self.log = folder / "daemon.log"
        self.environ: dict[str, str] = {}
        self._manager = manager
        self._told = ""
        self._children: list[Child] = []

    def start(self, *options: str, before: tuple[str, ...] = (), **settings: object) -> Child:
        """Start a daemon. `before`: words before its command, that exec it in the end."""
        chosen = {
            "db": f"{self.folder}/rollout.db",
            "run_dir": self.run.root,
            "metrics_dir": self.metrics,
            "scan_seconds": 0.2,
            "linger_seconds": 0,
            "min_free_bytes": 0,
            "batch_size": 1,
            "log_level": "debug",
            "log_format": "json",
        } | settings
        words = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
        return self.child(
            *before,
            *(sys.executable, "-m", "spoold", "run", *words, *options),
            log=self.log,
            environ={"NOTIFY_SOCKET": self._manager.address} | self.environ,
        )

    def child(self, *command: str, log: Path, environ: Mapping[str, str] | None = None) -> Child:
        child = Child("child", command, log=str(log), environ=ENVIRON | dict(environ or {}))
        self._children.append(child)
        return child

    def trainer(self, *words: object) -> Child:
        log = self.folder / "trainer.log"
        child = self.child(sys.executable, "-c", TRAINER, self.run.root, *map(str, words), log=log)
        until(lambda: "holds" in log.read_text(), "the trainer")
        return child

    def end(self) -> None:
        for child in self._children:
            child.kill()

    # --- what is said ----------------------------------------------------------------------------

    def status(self, *options: str) -> Ran:
        return spoold_process("status", self.run.root, *options, environ=self.environ)

    def reasons(self) -> dict[str, dict[str, Any]]:
        ran = self.status("--json")
        # There is no run directory yet.
        return {each["code"]: each for each in ran.json["reasons"]} if ran.out else {}

    def told(self) -> str:
        """What the service manager shows now."""
        for message in self._manager.heard():
            for line in message.splitlines():
                if line.startswith("STATUS="):
                    self._told = line.removeprefix("STATUS=")
        return self._told

    def logged(self) -> set[tuple[str, str]]:
        """Code and sentence of all reasons that were logged."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line[:1] == "{"]
        said = [line for line in lines if line["event"] == "waiting"]
        return {(line["reason"], line["what"].partition(": ")[0]) for line in said}

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Code → sentence and value."""
        text = "".join(path.read_text() for path in self.metrics.glob("*.prom"))
        pattern = r'^spoold_reason{reason="(.*?)",run_dir=".*?",sentence="(.*?)",.*?} (.*)$'
        found = re.findall(pattern, text, re.MULTILINE)
        return {code: (sentence, float(value)) for code, sentence, value in found}

    def sees(self, code: str, detail: str, remedy: str = "") -> None:
        """Wait until all four say it, in the same words."""
        sentence = REASONS[code].sentence
        label = f"{LABELS[REASONS[code].urgency]} {code}: "
        words: tuple[str, ...] = (f"{label}{sentence}", detail)
        words += (remedy or REASONS[code].remedy,)

        def is_shown() -> bool:
            shown = " ".join(self.status().out.split())
            return all(word in shown for word in words) and shown.count(label) == 1

        until(is_shown, f"{words} in status:\n{self.status().out}")
        assert (self.status("--check").code == 75) == bool(SEVERE & set(self.reasons()))
        first = sentence.partition(": ")[0]  # a sentence may hold a colon itself
        until(lambda: (code, first) in self.logged(), f"{code} in the log")
        until(lambda: sentence in self.told(), f"{code} in what the manager is told")
        until(lambda: self.gauges().get(code) == (sentence, 1.0), f"{code} in the gauge")

    def manager_shows_the_first_line(self) -> None:
        """Wait until what the manager shows begins as the first reason of status does."""

        def same() -> bool:
            first = next(iter(self.reasons().values()))
            words = first["text"] + (f"; {first['remedy']}" if first["remedy"] else "")
            return self.told().partition("; also: ")[0] == words

        until(same, "the first reason as the service manager's status")

    def sees_no_more(self, code: str) -> None:
        until(lambda: code not in self.reasons(), f"the end of {code}")
        until(lambda: REASONS[code].sentence not in self.told(), f"the end of {code} elsewhere")
        until(lambda: self.gauges()[code][1] == 0, f"the end of {code} in the gauge")


@contextmanager
def serving(folder: Path, run: Path | None = None) -> Iterator[Service]:
    with Manager(f"@spoold-faults-{os.getpid()}") as manager:
        made = Service(folder, run or folder / "run", manager)
        try:
            yield made
        finally:
            made.end()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(tmp_path) as made:
        yield made


@pytest.fixture
def rollouts(tmp_path: Path) -> Iterator[Rollouts]:
    made = make_rollouts(tmp_path / "rollout.db")
    made.register(1)  # a job, with nothing to deliver yet
    yield made
    made.close()


def complete(rollouts: Rollouts, count: int = 1) -> None:
    for one in rollouts.register(count, group=""):
        rollouts.complete(one)


def pending(service: Service, count: int) -> list[str]:
    """Wait for so many batches. A daemon that starts renames a file of its own through here."""

    def names() -> list[str]:
        return [name for name in tree(service.run, "pending") if name.endswith(".jsonl")]

    until(lambda: len(names()) >= count, f"{count} batches")
    return names()


def mv(service: Service, name: str, target: str) -> None:
    subprocess.run(["mv", "-n", f"{service.run.root}/{name}", f"{service.run.root}/{target}/"])


# --- the rollout database -------------------------------------------------------------------------


def test_a_database_that_is_gone(service: Service, rollouts: Rollouts, tmp_path: Path) -> None:
    complete(rollouts)
    service.start()
    pending(service, 1)
    rollouts.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    os.rename(tmp_path / "rollout.db", tmp_path / "away.db")
    service.sees("source-unavailable", "rollout.db")
    service.manager_shows_the_first_line()
    os.rename(tmp_path / "away.db", tmp_path / "rollout.db")
    service.sees_no_more("source-unavailable")


def test_a_database_that_another_process_locks(
    service: Service, rollouts: Rollouts, tmp_path: Path
) -> None:
    complete(rollouts)
    rollouts.db.execute("PRAGMA journal_mode = delete")
    service.start()
    pending(service, 1)
    lock = "import sqlite3, sys, time; d = sqlite3.connect(sys.argv[1], isolation_level=None)"
    lock += "; d.execute('BEGIN EXCLUSIVE'); time.sleep(600)"
    holder = service.child(
        sys.executable, "-c", lock, f"{tmp_path}/rollout.db", log=tmp_path / "holder.log"
    )
    service.sees("source-unavailable", "locked")
    holder.kill()
    service.sees_no_more("source-unavailable")


def test_a_database_whose_schema_changes_under_the_daemon(
    service: Service, rollouts: Rollouts
) -> None:
    complete(rollouts)
    service.start()
    pending(service, 1)
    rename = "ALTER TABLE session_steps RENAME COLUMN"
    rollouts.db.execute(f"{rename} reward TO prize")
    lacks = "table session_steps has no column reward"
    service.sees("source-unavailable", lacks, "waits out a migration")
    rollouts.db.execute(f"{rename} prize TO reward")
    service.sees_no_more("source-unavailable")


def test_a_database_of_a_wrong_schema_ends_a_daemon_that_starts_and_status_says_why(
    service: Service, rollouts: Rollouts, tmp_path: Path
) -> None:
    complete(rollouts)
    daemon = service.start()
    pending(service, 1)
    assert daemon.stop() == 0
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE songs (id INTEGER PRIMARY KEY)")
    other.close()
    daemon = service.start(db=f"{tmp_path}/other.db")
    assert daemon.wait(60) == 78
    service.sees("source-schema", "job_environments", "--db")
    shown = " ".join(service.status().out.split())
    assert "daemon-gone: no daemon delivers here: it ended by an error" in shown
    assert service.told().startswith(REASONS["source-schema"].sentence)
    service.start()
    service.sees_no_more("source-schema")


# --- the disk -------------------------------------------------------------------------------------


def mount(*words: object) -> None:
    ran = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def fill(folder: str, *, with_files: bool) -> list[Path]:
    """Take every inode, or every byte."""
    files: list[Path] = []
    try:
        while True:
            files.append(Path(folder, f"ballast-{len(files)}"))
            files[-1].write_bytes(b"" if with_files else b"x" * 65536)
    except OSError:
        return files


@pytest.mark.parametrize("what", ["bytes", "inodes"])
def test_a_full_disk(rollouts: Rollouts, tmp_path: Path, what: str) -> None:
    needs(os.geteuid() == 0, "only root can mount")
    (tmp_path / "run").mkdir()
    size = "size=8m" if what == "bytes" else "size=64m,nr_inodes=80"
    mount("-t", "tmpfs", "-o", size, "tmpfs", tmp_path / "run")
    try:
        with serving(tmp_path) as service:
            service.start()
            until(lambda: "source-empty" in service.reasons(), "an idle daemon")
            ballast = fill(service.run.root, with_files=what == "inodes")
            complete(rollouts)
            service.sees("disk-space", service.run.root, "free some space")
            service.manager_shows_the_first_line()
            assert tree(service.run, "pending") == []
            for path in ballast:
                path.unlink(missing_ok=True)
            service.sees_no_more("disk-space")
            pending(service, 1)
    finally:
        subprocess.run(["umount", tmp_path / "run"], check=True)


def test_a_disk_so_full_that_there_is_no_report_at_all(rollouts: Rollouts, tmp_path: Path) -> None:
    needs(os.geteuid() == 0, "only root can mount")
    (tmp_path / "run").mkdir()
    mount("-t", "tmpfs", "-o", "size=64m,nr_inodes=80", "tmpfs", tmp_path / "run")
    try:
        with serving(tmp_path) as service:
            daemon = service.start()
            until(lambda: "source-empty" in service.reasons(), "an idle daemon")
            daemon.kill()
            os.unlink(service.run.status_json)
            fill(service.run.root, with_files=True)
            found = service.reasons()
            assert found["disk-space"]["text"].endswith(f"no inode is free on {service.run.root}")
            assert "free some space" in found["disk-space"]["remedy"]
            assert service.start().wait(60) == 74
            assert service.told().startswith(REASONS["disk-space"].sentence)
    finally:
        subprocess.run(["umount", tmp_path / "run"], check=True)


def test_a_disk_that_the_kernel_made_read_only_after_an_error(
    rollouts: Rollouts, tmp_path: Path
) -> None:
    needs(not disks.why_not("ext4"), f"no ext4 can be mounted here: {disks.why_not('ext4')}")
    with disks.disk("ext4", tmp_path) as disk:
        mount("-o", "remount,errors=remount-ro", disk.at)
        with serving(tmp_path, disk.at / "run") as service:
            service.start()
            until(lambda: "source-empty" in service.reasons(), "an idle daemon")
            device = os.stat(disk.at).st_dev
            loop = os.path.basename(
                os.readlink(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
            )
            trigger = Path(f"/sys/fs/ext4/{loop}/trigger_fs_error")
            needs(trigger.exists(), "this kernel's ext4 cannot be made to fail")
            trigger.write_text("an error on the disk")
            # The daemon has nothing to deliver, and says so all the same.
            service.sees("read-only", f"{disk.at}/run", "mount it read-write")
            complete(rollouts)
            service.sees("read-only", f"{disk.at}/run", "mount it read-write")


def test_a_run_directory_that_is_mounted_read_only(
    service: Service, rollouts: Rollouts, tmp_path: Path
) -> None:
    needs(os.geteuid() == 0, "only root can mount")
    service.start()
    until(lambda: "source-empty" in service.reasons(), "an idle daemon")
    # Over itself: one that somebody writes in cannot be remounted.
    mount("--bind", service.run.root, service.run.root)
    try:
        mount("-o", "remount,bind,ro", service.run.root)
        complete(rollouts)
        service.sees("read-only", service.run.root, "mount it read-write")
    finally:
        subprocess.run(["umount", service.run.root], check=True)
    service.sees_no_more("read-only")
    pending(service, 1)


# --- those who share the run directory ------------------------------------------------------------


def test_a_trainer_that_is_killed_with_batches_in_flight(
    service: Service, rollouts: Rollouts
) -> None:
    complete(rollouts, 2)
    service.start(requeue_seconds=15)
    pending(service, 2)
    trainer = service.trainer(2, 0, 30)
    assert "consumer-gone" not in service.reasons()
    trainer.kill()
    service.sees("consumer-gone", "trainer-0 holds 2 batches")
    assert "trainer-0 gone 2 batches, 2 samples" in " ".join(service.status().out.split())
    pending(service, 2)
    service.sees_no_more("consumer-gone")


def test_a_trainer_to_whom_everything_is_stale(service: Service, rollouts: Rollouts) -> None:
    complete(rollouts, 4)
    service.start()
    pending(service, 4)
    service.trainer(1, 99, 2)
    service.sees("all-stale", "the last 4 batches", "min_weight_version")


def test_a_second_daemon(service: Service, rollouts: Rollouts, tmp_path: Path) -> None:
    service.start()
    until(lambda: "source-empty" in service.reasons(), "an idle daemon")
    command = [sys.executable, "-m", "spoold", "run", "--db", f"{tmp_path}/rollout.db"]
    second = service.child(*command, "--run-dir", service.run.root, log=tmp_path / "second.log")
    assert second.wait(60) == 75
    holder = service.status("--json").json["daemon"]["holder"]
    assert f"{holder} runs a daemon on it" in (tmp_path / "second.log").read_text()
    service.sees("second-daemon", f"pid {second.pid} on {os.uname().nodename} was turned away")
    assert service.status("--json").json["daemon"] == {"running": True, "holder": holder}


def test_a_group_with_a_straggler(service: Service, rollouts: Rollouts) -> None:
    ids = rollouts.register(3, group="g-7")
    for one in ids[:2]:
        rollouts.complete(one)
    rollouts.step(ids[2])
    service.start(group_size=3, rescan_seconds=1)
    service.sees("groups-incomplete", f"g-7 has 2 of 3, waits for {ids[2]}")
    rollouts.complete(ids[2])
    pending(service, 1)
    service.sees_no_more("groups-incomplete")


def test_a_batch_whose_bytes_changed(service: Service, rollouts: Rollouts) -> None:
    complete(rollouts)
    service.start()
    (name,) = pending(service, 1)
    path = Path(service.run.root, name)
    path.write_bytes(path.read_bytes().replace(b"4", b"5", 1))
    spoold_process("claim", service.run.root, "--timeout", "5")
    service.sees("corrupt-batch", "1 batch in rejected/corrupt/")
    shutil.rmtree(f"{service.run.rejected}/corrupt")
    service.sees_no_more("corrupt-batch")


def test_files_that_people_move_and_copy(service: Service, rollouts: Rollouts) -> None:
    complete(rollouts, 2)
    service.start()
    first, second = pending(service, 2)
    mv(service, first, "inflight")
    service.sees("claimed-by-hand", "1 batch in inflight/")
    Path(service.run.pending, "notes.txt").touch()
    service.sees("unknown-files", "1, such as pending/notes.txt")
    subprocess.run(["cp", f"{service.run.root}/{second}", service.run.inflight], check=True)
    service.sees("duplicates", "1 batch in rejected/duplicate/")
    service.manager_shows_the_first_line()
    # What is told of several at once has all of their sentences.
    told = service.told()
    for code in ("claimed-by-hand", "unknown-files", "duplicates"):
        assert REASONS[code].sentence in told


def test_a_metrics_folder_that_is_full(
    service: Service, rollouts: Rollouts, tmp_path: Path
) -> None:
    """Nobody can see it in the metrics; everywhere else it is said, and delivery goes on."""
    needs(os.geteuid() == 0, "only root can mount")
    mount("-t", "tmpfs", "-o", "size=64k,nr_inodes=4", "tmpfs", service.metrics)
    try:
        fill(str(service.metrics), with_files=True)
        service.start()
        until(lambda: "metrics-unwritten" in service.reasons(), "the notice")
        shown = " ".join(service.status().out.split())
        assert f"notice metrics-unwritten: {REASONS['metrics-unwritten'].sentence}" in shown
        assert "no space left on device" in shown
        assert ("metrics-unwritten", REASONS["metrics-unwritten"].sentence) in service.logged()
        until(lambda: REASONS["metrics-unwritten"].sentence in service.told(), "the manager")
        complete(rollouts)
        pending(service, 1)
        for path in service.metrics.iterdir():
            path.unlink()
        service.sees_no_more("metrics-unwritten")
    finally:
        subprocess.run(["umount", "-l", service.metrics], check=True)


# --- the machine ----------------------------------------------------------------------------------

SANDBOX = 'set -e; echo {value} >/proc/sys/user/max_inotify_{what}; exec "$@"'


@pytest.mark.parametrize(
    ("what", "value", "words", "remedy"),
    [
        ("instances", 0, "too many open files", "fs.inotify.max_user_instances"),
        ("watches", 1, "no space left on device", "fs.inotify.max_user_watches"),
    ],
)
def test_a_user_whose_inotify_is_used_up(
    service: Service, rollouts: Rollouts, what: str, value: int, words: str, remedy: str
) -> None:
    """In a user namespace, which has limits of its own."""
    inside = ("unshare", "--user", "--map-root-user")
    ran = subprocess.run([*inside, "true"], capture_output=True)
    needs(ran.returncode == 0, "user namespaces")
    script = SANDBOX.format(value=value, what=what)
    service.start(before=(*inside, "sh", "-c", script, "sh"))
    service.sees("hints-off", words, remedy)
    complete(rollouts)
    pending(service, 1)  # by a timed look


def libfaketime() -> str:
    return next(iter(glob.glob("/usr/lib/*/faketime/libfaketime.so.1")), "")


@pytest.mark.parametrize(
    ("jump", "words"), [("+7200s", "forward by 7200 s"), ("-7200s", "back by 7200 s")]
)
def test_a_clock_that_is_set_while_the_daemon_runs(
    service: Service, rollouts: Rollouts, tmp_path: Path, jump: str, words: str
) -> None:
    """For the daemon and for whoever asks, by libfaketime; the monotonic clock is left alone."""
    needs(libfaketime(), "libfaketime")
    file = tmp_path / "faketime"
    file.write_text("+0s\n")
    service.environ = {
        "LD_PRELOAD": libfaketime(),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }
    complete(rollouts)
    service.start()
    (first,) = pending(service, 1)
    replaced = tmp_path / "faketime.new"
    replaced.write_text(f"{jump}\n")
    os.rename(replaced, file)
    service.sees("clock-jump", words)
    assert not SEVERE & set(service.reasons())
    # Order is by number, and whatever is shown as an age is never below zero.
    complete(rollouts)
    assert pending(service, 2)[0] == first
    assert not re.search(r"-\d+ (s|min|h|d)\b", service.status().out)
    assert len(ls(Path(service.run.root))) == 2


def test_every_fault_is_told_from_every_other_by_its_sentence(
    service: Service, rollouts: Rollouts
) -> None:
    """The codes above are the faults that were asked for, and each is a sentence of its own."""
    source = Path(__file__).read_text()
    codes = set(re.findall(r'service\.sees\(\s*"([a-z-]+)"', source))
    assert codes == {
        *("source-unavailable", "source-schema", "disk-space", "read-only", "consumer-gone"),
        *("second-daemon", "groups-incomplete", "all-stale", "hints-off", "clock-jump"),
        *("corrupt-batch", "claimed-by-hand", "unknown-files", "duplicates"),
    }
