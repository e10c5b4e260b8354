"""status: what lies where and what is wrong, with the daemon dead or alive."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spoold import fs
from spoold.errors import SpoolWriteError
from spoold.layout import RunDir
from spoold.reasons import SEVERE
from spoold.spool import statusfile
from spoold.spool.statusfile import (
    LatestNote,
    Published,
    Reason,
    Rejected,
    SourceState,
    Status,
    WaitingGroup,
)
from tests.support.commands import spoold
from tests.support.spools import make_run_dir, put_batch

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run_dir(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def alive(run: Path) -> Iterator[None]:
    lock = fs.Lock(f"{run}/.spoold/lock")
    assert lock.acquire()
    yield
    lock.release()


def report(run: Path, **changed: Any) -> Status:
    """Write what a daemon says, and return it."""
    now = time.time()
    facts: dict[str, Any] = {
        "version": "0.1.0",
        "pid": os.getpid(),
        "host": "gpu3",
        "started": now - 7300,
        "updated": now - 30,
        "job": "exp7",
        "url": "sqlite:///rollouts.db",
        "ready_when": "finished",
        "state": "waiting",
    }
    status = Status(**(facts | changed))
    statusfile.write(RunDir(str(run)), status)
    return status


def test_status_json_holds_all_of_a_report_and_is_read_back_as_it_was(run: Path) -> None:
    status = report(
        run,
        host="gpu\udcff",
        reasons=(Reason.of("linger", "3 environments", since=2.5),),
        source=SourceState(
            running=3,
            groups=(WaitingGroup(group="é", have=1, want=2, missing=(7,), set_aside=(), since=1),),
        ),
    )
    written = (run / ".spoold/status.json").read_bytes()
    assert json.loads(written) == json.loads(json.dumps(status.to_dict()))
    assert len(written.splitlines()) == 2 + len(status.to_dict())  # a line each, for people
    assert Status.from_json(written) == status


def test_status_counts_every_directory_and_fits_80_columns(
    run: Path, capsys: Capsys, alive: None
) -> None:
    put_batch(run, 7, samples=64)
    put_batch(run, 8, samples=64)
    put_batch(run, 3, where="inflight/trainer-0", samples=2)
    put_batch(run, 2, where="inflight")
    put_batch(run, 1, where="acked/step-000000120")
    put_batch(run, 4, where="rejected/oom")
    (run / "rejected/env-1077.bad-json.json").touch()
    (run / "rejected/env-1078.late.json").touch()
    (run / "pending/odd").touch()
    now = time.time()
    report(
        run,
        reasons=(
            Reason(
                code="groups-incomplete",
                since=now - 720,
                text="2 groups are not whole, and each waits for a member that is still running",
                remedy="set partial_groups to deliver or reject them after a timeout",
            ),
        ),
        source=SourceState(
            running=1000,
            ready=3,
            missing_rows=1,
            oldest_ready=now - 9,
            groups=(WaitingGroup(group="g-1", have=7, want=8, missing=(1099,), since=now - 720),),
        ),
        published=Published(batches=8, samples=200, environments=200, bytes=1, last=now - 4),
        delivered=200,
        rejected=Rejected(
            notes=2,
            latest=LatestNote(environment=1078, reason="late", file="env-1078.late.json"),
        ),
    )
    ran = spoold(capsys, "status", run)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[-1].startswith("disk       ")
    assert lines[:-1] == [
        str(run),
        f"daemon     running, pid {os.getpid()} on {os.uname().nodename}: waiting, since 2 h",
        "waits for  groups-incomplete: 2 groups are not whole, and each waits for a",
        "           member that is still running (since 12 min); set partial_groups to",
        "           deliver or reject them after a timeout",
        "source     job exp7, sqlite:///rollouts.db, ready when finished",
        "published  8 batches, 200 samples, the last 4 s ago (since the daemon started)",
        "delivered  200 environments in all",
        "running    1,000 environments, 3 ready (oldest 9 s), 1 finished without row",
        "group      g-1 has 7 of 8 (since 12 min), missing environments 1099",
        "pending    2 batches, 128 samples, numbers 7 to 8, oldest 0 s",
        "inflight   2 batches, 3 samples, numbers 2 to 3, oldest 0 s",
        "  trainer-0   gone   1 batch, 2 samples, number 3, 0 s",
        "  by hand            1 batch, 1 sample, number 2",
        "acked      1 batch, 1 sample, number 1",
        "rejected   1 batch, 1 sample, number 4",
        "  oom                1 batch, 1 sample, number 4",
        "notes      2: 1 bad-json, 1 late",
        "           latest: environment 1078: late",
        "unknown    1 file, left alone: pending/odd",
    ]
    assert max(map(len, lines[1:])) <= 80


def test_a_run_directory_without_a_daemon_says_so_and_is_not_healthy(
    run: Path, capsys: Capsys
) -> None:
    ran = spoold(capsys, "status", run)
    assert ran.code == 0
    assert "daemon     not running\n" in ran.out
    assert "\nattention  daemon-gone: no daemon delivers here: none ever ran;" in ran.out
    assert spoold(capsys, "status", run, "--check").code == 75


@pytest.mark.parametrize(
    ("state", "text"), [("stopped", "it was stopped"), ("waiting", "it was killed or crashed")]
)
def test_a_stopped_daemon_is_told_from_one_that_died(
    run: Path, capsys: Capsys, state: str, text: str
) -> None:
    (run / ".spoold/lock").touch()
    linger = Reason(code="linger", since=time.time(), text="history")
    said = report(run, state=state, reasons=(linger,))
    found = spoold(capsys, "status", run, "--json").json
    assert found["daemon"] == {"running": False, "holder": ""}
    assert [(each["code"], each["text"]) for each in found["reasons"]] == [
        ("daemon-gone", f"no daemon delivers here: {text}")
    ]
    assert found["reasons"][0]["since"] == said.updated
    remedy = f"`spoold run --db {said.url} --run-dir {run}` starts it"
    assert found["reasons"][0]["remedy"] == remedy
    assert "not running, last heard 30 s ago" in " ".join(spoold(capsys, "status", run).out.split())


def test_check_is_0_for_a_daemon_that_waits_and_75_for_one_that_needs_a_person(
    run: Path, capsys: Capsys, alive: None
) -> None:
    for code in ("backpressure", "linger", "waiting-for-environments", "groups-incomplete"):
        report(run, reasons=(Reason(code=code, since=1.0, text="x"),))
        assert spoold(capsys, "status", run, "--check").code == 0, code
    for code in SEVERE:
        report(run, reasons=(Reason(code=code, since=1.0, text="x"),))
        assert spoold(capsys, "status", run, "--check").code == 75, code
        assert spoold(capsys, "status", run).code == 0
        assert spoold(capsys, "status", run, "--json").json["healthy"] is False


@pytest.mark.parametrize(
    "damage", [b"", b"\0\0\0", b'{"format": 1', b"[]", b"null", b'{"format": 1}', b"\xff", b'"x"']
)
def test_a_torn_or_foreign_report_is_said_and_stops_nothing(
    run: Path, capsys: Capsys, alive: None, damage: bytes
) -> None:
    (run / ".spoold/status.json").write_bytes(damage)
    put_batch(run, 1)
    ran = spoold(capsys, "status", run)
    assert ran.code == 0
    assert "status-unusable" in ran.out
    assert "pending    1 batch" in ran.out
    assert spoold(capsys, "status", run, "--check").code == 75


def test_a_report_of_a_newer_spoold_is_named_as_such(
    run: Path, capsys: Capsys, alive: None
) -> None:
    (run / ".spoold/status.json").write_bytes(b'{"format": 2}')
    assert "format 2, of a newer spoold" in " ".join(spoold(capsys, "status", run).out.split())


def test_a_report_keeps_everything_through_json(run: Path) -> None:
    said = report(
        run,
        reasons=(Reason(code="linger", since=1.5, text="t", remedy="r"),),
        source=SourceState(
            groups=(WaitingGroup(group="g", have=1, want=2, missing=(3, 4), since=5.5),)
        ),
        published=Published(last=6.0),
        rejected=Rejected(notes=1, latest=LatestNote(environment=1, reason="r", file="f")),
    )
    assert statusfile.read(RunDir(str(run))) == (said, "")


def test_consumers_are_alive_by_their_lock_alone(run: Path, capsys: Capsys, alive: None) -> None:
    for name in ("alive", "dead", "no-lock"):
        put_batch(run, 1, where=f"inflight/{name}")
    (run / "inflight/dead/.lock").touch()
    lock = fs.Lock(f"{run}/inflight/alive/.lock")
    assert lock.acquire()
    try:
        found = spoold(capsys, "status", run, "--json").json["consumers"]
    finally:
        lock.release()
    assert {each["name"]: each["alive"] for each in found} == {
        "alive": True,
        "dead": False,
        "no-lock": None,
    }


def test_a_folder_that_cannot_be_read_is_named_and_is_not_healthy(
    run: Path, capsys: Capsys, alive: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    report(run)
    real = fs.scan

    def refuse(path: str) -> fs.Listing:
        if path.endswith("/acked"):
            raise SpoolWriteError(f"cannot list {path}: permission denied", hint="chmod it")
        return real(path)

    monkeypatch.setattr(fs, "scan", refuse)
    found = spoold(capsys, "status", run, "--json", "--check")
    assert found.code == 75
    assert found.json["reasons"][0]["code"] == "unreadable"
    assert found.json["reasons"][0]["remedy"] == "chmod it"


def test_the_json_of_status_is_a_contract(run: Path, capsys: Capsys, alive: None) -> None:
    said = report(run)
    put_batch(run, 5, samples=3)
    put_batch(run, 1, where="acked/stale")
    (run / "inflight/t-0").mkdir()
    (run / "inflight/t-0/.lock").touch()
    (run / "rejected/env-9.late.json").touch()
    nothing = {"batches": 0, "samples": 0, "oldest": 0, "newest": 0}
    stale = {"batches": 1, "samples": 1, "oldest": 1, "newest": 1}
    waiting = {"batches": 1, "samples": 3, "oldest": 5, "newest": 5}
    found = spoold(capsys, "status", run, "--json").json
    assert found.pop("free_bytes") > 0
    assert 0 < found["since"].pop("pending") <= time.time()
    assert found == {
        "since": {"inflight": None},
        "format": 1,
        "run_dir": str(run),
        "healthy": True,
        "reasons": [],
        "daemon": {"running": True, "holder": f"pid {os.getpid()} on {os.uname().nodename}"},
        "said": {
            "format": 1,
            "version": "0.1.0",
            "pid": os.getpid(),
            "host": "gpu3",
            "started": said.started,
            "updated": said.updated,
            "job": "exp7",
            "url": "sqlite:///rollouts.db",
            "ready_when": "finished",
            "group_size": None,
            "state": "waiting",
            "shard": "0/1",
            "reasons": [],
            "source": {
                "running": 0,
                "ready": 0,
                "missing_rows": 0,
                "without_reward": 0,
                "groups": [],
                "oldest_ready": None,
            },
            "published": {"batches": 0, "samples": 0, "environments": 0, "bytes": 0, "last": None},
            "delivered": 0,
            "rejected": {"notes": 0, "latest": None},
        },
        "said_problem": "",
        "directories": {
            "pending": waiting | {"folders": {}},
            "inflight": nothing | {"folders": {}},
            "acked": stale | {"folders": {"stale": stale}},
            "rejected": nothing | {"folders": {}},
        },
        "consumers": [{"name": "t-0", "alive": False, "since": None} | nothing],
        "notes": {"count": 1, "by_reason": {"late": 1}},
        "unknown": [],
        "unreadable": [],
    }


def test_ages_are_never_negative_when_the_clock_was_set_back(
    run: Path, capsys: Capsys, alive: None
) -> None:
    future = time.time() + 86400
    report(
        run,
        started=future,
        updated=future,
        reasons=(Reason(code="linger", since=future, text="x"),),
        published=Published(batches=1, samples=1, last=future),
    )
    out = spoold(capsys, "status", run).out
    assert "since 0 s" in out
    assert "the last 0 s ago" in out
    assert "waits for  linger: x\n" in out


def test_status_changes_nothing(run: Path, capsys: Capsys) -> None:
    put_batch(run, 1)
    report(run)

    def everything() -> list[tuple[str, int]]:
        return sorted((str(path), path.stat().st_mtime_ns) for path in run.rglob("*"))

    before = everything()
    spoold(capsys, "status", run)
    spoold(capsys, "ls", run)
    assert everything() == before
