"""The daemon as a service: ready, status, watchdog, SIGHUP; what its manager hears and when."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spoold import daemon, fs
from spoold.config import Settings, load
from spoold.daemon.delivery import Delivery
from spoold.daemon.loop import Daemon
from spoold.demo.children import Child
from spoold.errors import ConfigError, SourceSchemaError, SpoolLocked
from spoold.layout import RunDir, State
from spoold.reasons import REASONS
from spoold.spool import setup, statusfile
from spoold.systemd import Service
from tests.support.manager import Manager
from tests.support.processes import ENVIRON, Players, batch_names, until
from tests.support.rollouts import Rollouts, make_rollouts

SPOOLD = [sys.executable, "-m", "spoold"]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with Manager(f"{tmp_path}/notify") as listening:
        yield listening


@pytest.fixture
def players(tmp_path: Path) -> Iterator[Players]:
    with Players(tmp_path) as started:
        yield started


class Place:
    """A folder with a settings file, a run directory and a database that may come later."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "exp7.toml"
        self.run_dir = folder / "run"
        self.db = folder / "rollout.db"
        self.configure()

    def configure(self, **settings: Any) -> None:
        chosen = {"db": str(self.db), "run_dir": str(self.run_dir), "min_free_bytes": 0} | settings
        self.file.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in chosen.items()))

    def rollouts(self, count: int) -> Rollouts:
        rollouts = make_rollouts(self.db)
        for one in rollouts.register(count, group=""):
            rollouts.complete(one)
        return rollouts

    def start(self, players: Players, manager: Manager, **environ: str) -> Child:
        command = [*SPOOLD, "run", "--config", str(self.file)]
        return players.start(
            "daemon", command, environ={"NOTIFY_SOCKET": manager.address, **environ}
        )

    def log(self) -> str:
        return (self.folder / "daemon.log").read_text()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def delivered(place: Place) -> int:
    return sum(name.samples for name in batch_names(place.run_dir, State.PENDING))


def is_ready(message: str) -> bool:
    return message == "READY=1"


def test_ready_is_said_without_a_source_and_its_status_says_what_is_missing(
    place: Place, manager: Manager, players: Players
) -> None:
    place.start(players, manager)
    before = manager.wait_for(is_ready)
    assert before[:-1] == [f"STATUS=reading {place.run_dir}"]
    assert fs.lock_is_held(f"{place.run_dir}/.spoold/lock")
    said = manager.wait_for(lambda message: "no database at" in message)[-1]
    report = json.loads((place.run_dir / ".spoold/status.json").read_text())
    first = report["reasons"][0]
    assert said == f"STATUS={first['text']}; {first['remedy']}"
    assert players.stop("daemon") == 0
    assert "STOPPING=1" in manager.heard()


def test_ready_is_not_said_before_the_lock_is_held(
    tmp_path: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "LOCK_SECONDS", 0.0)
    run_dir = f"{tmp_path}/run"
    lock = setup.lock_run(setup.make_run(run_dir))
    assert lock is not None
    settings = load(None, {"db": f"{tmp_path}/none.db", "run_dir": run_dir}, {})
    with pytest.raises(SpoolLocked):
        daemon.run(settings, service=Service(manager.address))
    reading, locked = manager.heard()
    assert reading == f"STATUS=reading {run_dir}"
    sentence = REASONS["second-daemon"].sentence
    visit = setup.last_visit(RunDir(run_dir))
    assert visit is not None
    assert visit.who == f"pid {os.getpid()} on {os.uname().nodename}"
    assert locked.startswith(f"STATUS={sentence}: {run_dir} is locked: pid {os.getpid()} on ")
    lock.release()


def test_a_bug_that_ends_the_daemon_stands_in_its_last_report(
    tmp_path: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = f"{tmp_path}/run"
    settings = load(None, {"db": f"{tmp_path}/none.db", "run_dir": run_dir}, {})
    monkeypatch.setattr(Daemon, "step", lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        daemon.run(settings, service=Service(manager.address))
    said, _ = statusfile.read(RunDir(run_dir))
    assert said is not None
    assert said.state == "failed"
    (bug,) = (reason for reason in said.reasons if reason.code == "bug")
    assert bug.text.startswith(f"{REASONS['bug'].sentence}: ZeroDivisionError: ")
    assert bug.remedy == REASONS["bug"].remedy
    assert manager.heard()[-1] == f"STATUS={bug.words}"


def test_a_start_that_fails_stands_in_the_last_report_and_keeps_what_else_it_says(
    tmp_path: Path, manager: Manager
) -> None:
    place = Place(tmp_path)
    place.rollouts(1).close()
    chosen = {"db": str(place.db), "run_dir": str(place.run_dir), "min_free_bytes": "0"}
    daemon.run(load(None, chosen, {}), once=True)
    before, _ = statusfile.read(RunDir(str(place.run_dir)))
    assert before is not None
    nowhere = chosen | {"metrics_dir": f"{tmp_path}/nowhere"}
    with pytest.raises(ConfigError):
        daemon.run(load(None, nowhere, {}), service=Service(manager.address))
    said, _ = statusfile.read(RunDir(str(place.run_dir)))
    assert said is not None
    (reason,) = said.reasons
    assert reason.code == "settings"
    assert "nowhere is no directory" in reason.text
    assert manager.heard()[-1] == f"STATUS={reason.words}"
    assert (said.state, said.delivered, said.published) == ("failed", 1, before.published)


def test_a_wrong_database_is_told_by_the_report_of_a_run_directory_in_use_and_makes_none(
    tmp_path: Path, manager: Manager
) -> None:
    place = Place(tmp_path)
    place.rollouts(1).close()
    wrong = tmp_path / "wrong.db"
    with sqlite3.connect(wrong) as songs:
        songs.execute("CREATE TABLE songs (id INTEGER PRIMARY KEY)")
    songs.close()
    chosen = {"db": str(place.db), "run_dir": str(place.run_dir), "min_free_bytes": "0"}
    with pytest.raises(SourceSchemaError):
        daemon.run(load(None, chosen | {"db": str(wrong)}, {}), service=Service(manager.address))
    assert not place.run_dir.exists()
    daemon.run(load(None, chosen, {}), once=True)
    with pytest.raises(SourceSchemaError):
        daemon.run(load(None, chosen | {"db": str(wrong)}, {}), service=Service(manager.address))
    said, _ = statusfile.read(RunDir(str(place.run_dir)))
    assert said is not None
    assert (said.state, said.reasons[0].code) == ("failed", "source-schema")
    assert manager.heard()[-1] == f"STATUS={said.reasons[0].words}"


def test_a_signal_ends_once_after_the_batch_at_hand_and_the_next_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "spoold")
    place = Place(tmp_path)
    place.rollouts(12).close()
    chosen = {"db": str(place.db), "run_dir": str(place.run_dir), "min_free_bytes": "0"}
    settings = load(None, chosen | {"batch_size": "1"}, {})
    with monkeypatch.context() as patch:
        deliver = Delivery.deliver

        def and_stop(self: Delivery, *args: Any) -> None:
            deliver(self, *args)
            if self.counts.batches == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        patch.setattr(Delivery, "deliver", and_stop)
        daemon.run(settings, once=True)
    assert len(batch_names(place.run_dir, State.PENDING)) == 2
    events = [record.message for record in caplog.records]
    assert events[-2:] == ["stopping", "stopped"]
    assert "done" not in events
    daemon.run(settings, once=True)
    assert len(batch_names(place.run_dir, State.PENDING)) == 12


def test_a_wrong_job_leaves_the_run_directory_of_another_as_it_is(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.rollouts(1).close()
    chosen = {"db": str(place.db), "run_dir": str(place.run_dir), "min_free_bytes": "0"}
    daemon.run(load(None, chosen, {}), once=True)

    def everything() -> list[tuple[str, bytes]]:
        files = sorted(path for path in place.run_dir.rglob("*") if path.is_file())
        return [(str(path), path.read_bytes()) for path in files]

    before = everything()
    other = make_rollouts(tmp_path / "other.db", job="job-2")
    other.register(1)
    other.close()
    with pytest.raises(ConfigError, match="belongs to job"):
        daemon.run(load(None, chosen | {"db": f"{tmp_path}/other.db"}, {}), once=True)
    assert everything() == before


def test_an_idle_daemon_pings_in_time_however_long_its_own_pauses_are(
    place: Place, manager: Manager, players: Players
) -> None:
    place.rollouts(1).close()
    place.configure(scan_seconds=3600, rescan_seconds=3600)
    place.start(players, manager, WATCHDOG_USEC="200000")
    began = time.monotonic()
    for _ in range(8):
        manager.wait_for(lambda message: message == "WATCHDOG=1")
    assert time.monotonic() - began < 60.0
    assert players.stop("daemon") == 0


def test_a_loop_that_hangs_does_not_ping(
    tmp_path: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer in a thread would: the pings come out of the loop alone."""
    heard_while_it_hung: list[str] = []

    class Hanging(Daemon):
        steps = 0

        def step(self) -> float:
            self.steps += 1
            if self.steps == 2:
                manager.heard()
                time.sleep(0.3)  # thirty times the time of the watchdog
                heard_while_it_hung.extend(manager.heard())
                os.kill(os.getpid(), signal.SIGTERM)
            return 0.0

    settings = load(None, {"db": f"{tmp_path}/none.db", "run_dir": f"{tmp_path}/run"}, {})
    monkeypatch.setattr(daemon, "Daemon", Hanging)
    daemon.run(settings, service=Service(manager.address, watchdog_seconds=0.01))
    assert heard_while_it_hung == []
    assert "WATCHDOG=1" in manager.heard()


def test_a_manager_that_goes_away_stops_nothing(
    place: Place, tmp_path: Path, players: Players
) -> None:
    rollouts = place.rollouts(1)
    with Manager(f"{tmp_path}/gone") as manager:
        child = place.start(players, manager, WATCHDOG_USEC="200000")
        manager.wait_for(is_ready)
    until(lambda: "service manager does not hear" in place.log(), "the warning")
    for one in rollouts.register(1, group=""):
        rollouts.complete(one)
    until(lambda: delivered(place) == 2, "both environments")
    assert child.exit_code() is None
    assert players.stop("daemon") == 0
    assert place.log().count("service manager does not hear") == 1
    rollouts.close()


class TestSighup:
    def test_reads_the_file_again_and_says_what_changed_and_what_needs_a_restart(
        self, place: Place, manager: Manager, players: Players
    ) -> None:
        rollouts = place.rollouts(1)
        place.configure(linger_seconds=3600, rescan_seconds=3600)
        child = place.start(players, manager)
        manager.wait_for(is_ready)
        place.configure(linger_seconds=0, group_size=4, log_format="json", rescan_seconds=3600)
        os.kill(child.pid, signal.SIGHUP)
        assert manager.wait_for(is_ready)[-2].startswith("RELOADING=1\nMONOTONIC_USEC=")
        until(lambda: delivered(place), "the batch that lingered")
        assert players.stop("daemon") == 0
        events = [json.loads(line) for line in place.log().splitlines() if line[0] == "{"]
        said = {event["event"]: event for event in events}
        assert said["settings reloaded"]["changed"] == "linger_seconds log_format"
        assert said["settings need a restart"]["settings"] == "group_size"
        rollouts.close()

    def test_goes_on_with_the_old_settings_when_the_new_ones_are_no_good(
        self, place: Place, manager: Manager, players: Players
    ) -> None:
        rollouts = place.rollouts(1)
        child = place.start(players, manager)
        manager.wait_for(is_ready)
        place.configure(batch_size=0)
        os.kill(child.pid, signal.SIGHUP)
        manager.wait_for(is_ready)
        assert "WARNING settings not reloaded" in place.log()
        assert "batch_size cannot be 0" in place.log()
        until(lambda: delivered(place), "a batch")
        assert players.stop("daemon") == 0
        rollouts.close()

    def test_without_a_file_it_stops_the_daemon_cleanly(
        self, place: Place, manager: Manager, players: Players
    ) -> None:
        command = [*SPOOLD, "run", "--db", str(place.db), "--run-dir", str(place.run_dir)]
        child = players.start("daemon", command, environ={"NOTIFY_SOCKET": manager.address})
        manager.wait_for(is_ready)
        os.kill(child.pid, signal.SIGHUP)
        until(lambda: child.exit_code() is not None, "the end")
        assert child.exit_code() == 0
        assert "stopping signal=SIGHUP" in place.log()

    def test_that_is_ignored_at_start_stays_ignored_as_nohup_wants(
        self, place: Place, manager: Manager, players: Players
    ) -> None:
        command = [*SPOOLD, "run", "--db", str(place.db), "--run-dir", str(place.run_dir)]
        environ = {"NOTIFY_SOCKET": manager.address}
        child = players.start("daemon", ["nohup", *command], environ=environ)
        manager.wait_for(is_ready)
        os.kill(child.pid, signal.SIGHUP)
        assert players.stop("daemon") == 0
        assert "signal=SIGTERM" in place.log()


def test_every_setting_that_may_change_is_taken_over_by_the_running_daemon(tmp_path: Path) -> None:
    """Each is read where it is used, or handed on by `Daemon.reload`."""
    from spoold.config import NEEDS_RESTART, reloaded
    from tests.support.daemons import running

    old: dict[str, Any] = {"group_size": 4, "partial_groups": "wait", "keep_steps": 3}
    with running(tmp_path, **old) as it:
        before = it.daemon.settings
        changed = {
            name: value + 7 if isinstance(value, int | float) else value
            for name, value in before.model_dump().items()
            if name not in NEEDS_RESTART
        } | {"partial_groups": "deliver", "on_replaced": "refuse"}
        new = Settings.model_validate(before.model_dump() | changed)
        outcome = reloaded(before, new)
        assert outcome.needs_restart == ()
        it.daemon.reload(outcome.settings)
        daemon_ = it.daemon
        for holder in (daemon_, daemon_.delivery, daemon_.looking):
            assert holder.settings == new
        plan: Any = daemon_.plan
        assert plan.batch_size == new.batch_size
        assert plan.linger_seconds == new.linger_seconds
        assert plan.timeout_seconds == new.group_timeout_seconds
        assert plan.partial == new.partial_groups
        assert daemon_._overdue.seconds == new.missing_row_seconds
        assert daemon_._requeue.abandoned.seconds == new.requeue_seconds
        assert daemon_._requeue.max_attempts == new.max_attempts
        assert daemon_._retention.keep_steps == new.keep_steps


def test_under_the_journal_the_error_that_ends_it_has_a_priority(tmp_path: Path) -> None:
    import subprocess

    (tmp_path / "run").write_text("in the way")
    with open(tmp_path / "journal", "wb") as journal:
        facts = os.fstat(journal.fileno())
        ran = subprocess.run(
            [*SPOOLD, "run", "--db", "x", "--run-dir", str(tmp_path / "run")],
            stderr=journal,
            env=ENVIRON | {"JOURNAL_STREAM": f"{facts.st_dev}:{facts.st_ino}"},
            timeout=60,
        )
    assert ran.returncode == 78
    (line,) = (tmp_path / "journal").read_text().splitlines()
    assert line.startswith('<3>ended error="')
    assert line.endswith(" exit=78")


def test_a_run_directory_of_a_higher_format_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """So that going back to an older version is safe to try."""
    from tests.support.batches import put_batch, tree

    run = setup.make_run(f"{tmp_path}/run")
    name = put_batch(run, 41, [1, 2])
    newer = b'{"format": 3, "job": "job-1", "url": "x", "more": true}\n'
    Path(run.source_json).write_bytes(newer)
    settings = load(None, {"db": f"{tmp_path}/none.db", "run_dir": run.root}, {})
    with pytest.raises(ConfigError, match="written by a newer spoold: format 3") as caught:
        daemon.run(settings)
    assert caught.value.exit_code == 78
    assert tree(run) == [f"pending/{name.file_name}"]
    assert Path(run.source_json).read_bytes() == newer
