"""Damaged run directories: the daemon goes on with the rest, `check` says what is wrong.

Every case begins with three batches, in pending/, inflight/ and acked/ (settled), and damages them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spoold.errors import SpoolError
from spoold.layout import RunDir, State
from spoold.spool import moves
from spoold.spool.check import look
from tests.crash import acts, verdict
from tests.support.commands import Ran, spoold

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    acts.database(tmp_path, 6)
    acts.once(tmp_path)
    _, claimed, acked = moves.find(RunDir(f"{tmp_path}/run"), State.PENDING)
    acts.shift(tmp_path, claimed, "inflight/trainer-0")
    acts.shift(tmp_path, acked, "acked/step-000000001")
    acts.once(tmp_path)
    return tmp_path / "run"


def the(run: Path, state: str) -> Path:
    (path,) = (run / state).rglob("*.jsonl")
    return path


def entry(run: Path) -> Path:
    (path,) = (run / ".spoold/ledger").iterdir()
    return path


def found(ran: Ran) -> list[tuple[str, str]]:
    return [(finding["code"], finding["path"]) for finding in ran.json["findings"]]


def test_all_is_well_in_a_run_directory_that_is_as_it_should_be(run: Path, capsys: Capsys) -> None:
    ran = spoold(capsys, "check", run)
    assert ran == (0, "", "spoold: 3 batches and 1 ledger file read: all is well\n")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def changed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"user", b"USER", 1))


@pytest.mark.parametrize("state", ["pending", "inflight", "acked"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        truncated,
        changed,
        lambda path: path.write_bytes(b"\0" * path.stat().st_size),
    ],
    ids=["empty", "truncated", "another byte", "NULs"],
)
def test_14_a_damaged_batch_is_found_set_aside_and_delivered_anew_unless_it_was_acked(
    run: Path, state: str, damage: Callable[[Path], None], capsys: Capsys, tmp_path: Path
) -> None:
    bad = the(run, state)
    damage(bad)
    ran = spoold(capsys, "check", run, "--json")
    assert (ran.code, found(ran)) == (65, [("corrupt", str(bad.relative_to(run)))])
    ran = spoold(capsys, "check", run, "--repair")
    assert (ran.code, ran.out.rpartition("; ")[2]) == (0, "mended\n")
    assert (run / "rejected/corrupt" / bad.name).exists()
    assert spoold(capsys, "check", run).code == 0
    acts.once(tmp_path)
    verdict.assert_each_once(tmp_path, verdict.look(run))


def test_16_31_35_unknown_things_are_named_and_left_alone(
    run: Path, capsys: Capsys, tmp_path: Path
) -> None:
    good = the(run, "pending").name
    with open(os.fsencode(run) + b"/pending/\xff\xfe.jsonl", "wb"):
        pass
    (run / "pending" / good.replace("000000001", "000000077")).mkdir()
    (run / "acked" / good.replace("000000001", "000000078")).symlink_to("/etc/passwd")
    os.mkfifo(run / "inflight" / good.replace("000000001", "000000079"))
    (run / "rejected/readme.txt").touch()
    (run / "core.1").touch()
    (run / ".spoold/ledger/x").touch()
    before = sorted(map(str, run.rglob("*")))
    ran = spoold(capsys, "check", run, "--repair", "--json")
    assert ran.code == 65
    assert {code for code, _ in found(ran)} == {"unknown"}
    assert len(found(ran)) == 7
    assert ("unknown", "pending/\\xff\\xfe.jsonl") in found(ran)
    acts.once(tmp_path)
    assert sorted(map(str, run.rglob("*"))) == before
    (run / ".spoold/ledger/x").unlink()
    verdict.assert_each_once(tmp_path, verdict.look(run))


def test_35_fifty_thousand_unknown_files_cost_little_and_stop_nothing(
    run: Path, capsys: Capsys, tmp_path: Path
) -> None:
    for number in range(50_000):
        os.close(os.open(f"{run}/pending/core.{number}", os.O_CREAT | os.O_WRONLY))
    acts.complete_more(tmp_path, 2)
    it = acts.daemon(tmp_path)
    it.go()
    began = time.process_time()
    for _ in range(20):
        it.go(2.0)
    assert time.process_time() - began < 10.0
    it.daemon.stop()
    it.kill()
    ran = spoold(capsys, "check", run)
    assert ran.code == 65
    assert len(ran.out.splitlines()) == 21
    assert "49980 more are neither batch nor note" in ran.out
    for path in (run / "pending").glob("core.*"):
        path.unlink()
    verdict.assert_each_once(tmp_path, verdict.look(run))


def test_a_copy_is_found_and_set_aside(run: Path, capsys: Capsys, tmp_path: Path) -> None:
    acked = the(run, "acked")
    shutil.copy(acked, run / "pending")
    ran = spoold(capsys, "check", run, "--json")
    assert (ran.code, found(ran)) == (65, [("duplicate", f"pending/{acked.name}")])
    assert spoold(capsys, "check", run, "--repair").code == 0
    assert (run / "rejected/duplicate" / acked.name).exists()
    acts.once(tmp_path)
    verdict.assert_each_once(tmp_path, verdict.look(run))


def test_an_environment_in_two_batches_needs_a_person(run: Path, capsys: Capsys) -> None:
    pending = the(run, "pending")
    (run / "pending" / pending.name.replace("000000001", "000000009")).write_bytes(
        pending.read_bytes()
    )
    (run / ".spoold/seq-000000003").rename(run / ".spoold/seq-000000009")
    ran = spoold(capsys, "check", run, "--repair", "--json")
    assert ran.code == 65
    ((code, path),) = found(ran)
    assert (code, path) == ("delivered-twice", pending.stem)
    assert "environments 1, 2 are in 000000009-" in ran.json["findings"][0]["text"]


@pytest.mark.parametrize("name", ["pending", "inflight", "acked", "rejected", ".spoold/tmp"])
def test_a_missing_folder_is_found_and_made(
    run: Path, name: str, capsys: Capsys, tmp_path: Path
) -> None:
    shutil.rmtree(run / name)
    ran = spoold(capsys, "check", run, "--json")
    assert (ran.code, found(ran)) == (65, [("missing-folder", name)])
    assert spoold(capsys, "check", run, "--repair").code == 0
    assert (run / name).is_dir()
    acts.once(tmp_path)
    verdict.assert_each_once(tmp_path, verdict.look(run))


def test_a_missing_ledger_stops_the_start_until_a_person_has_decided(
    run: Path, capsys: Capsys, tmp_path: Path
) -> None:
    shutil.rmtree(run / ".spoold/ledger")
    with pytest.raises(SpoolError, match=r"ledger is missing.*restore it.*or make it") as no:
        acts.once(tmp_path)
    assert no.value.exit_code == 65
    ran = spoold(capsys, "check", run, "--repair", "--json")
    assert (ran.code, found(ran)) == (65, [("missing-ledger", ".spoold/ledger")])
    (run / ".spoold/ledger").mkdir()
    acts.once(tmp_path)
    verdict.assert_each_once(tmp_path, verdict.look(run))


@pytest.mark.parametrize("data", [b"", b"\0\0\0", b'{"environments": [9', b"[]"])
def test_a_torn_entry_is_written_anew_from_its_batch(
    run: Path, data: bytes, capsys: Capsys, tmp_path: Path
) -> None:
    whole = entry(run).read_bytes()
    entry(run).write_bytes(data)
    ran = spoold(capsys, "check", run, "--json")
    assert (ran.code, found(ran)) == (65, [("torn-entry", f".spoold/ledger/{entry(run).name}")])
    assert spoold(capsys, "check", run, "--repair").code == 0
    assert entry(run).read_bytes() == whole
    acts.once(tmp_path)
    verdict.assert_each_once(tmp_path, verdict.look(run))


def test_an_entry_that_contradicts_its_batch_is_written_anew(run: Path, capsys: Capsys) -> None:
    whole = entry(run).read_bytes()
    entry(run).write_bytes(whole.replace(b"[5,6]", b"[5,7]"))
    ran = spoold(capsys, "check", run, "--json")
    assert (ran.code, found(ran)) == (65, [("wrong-entry", f".spoold/ledger/{entry(run).name}")])
    assert spoold(capsys, "check", run, "--repair").code == 0
    assert entry(run).read_bytes() == whole


@pytest.mark.parametrize("name", [None, "merged-1"])
def test_a_torn_entry_without_its_batch_needs_a_person(
    run: Path, name: str | None, capsys: Capsys, tmp_path: Path
) -> None:
    torn = run / ".spoold/ledger" / (name or entry(run).name)
    torn.write_bytes(b"")
    the(run, "acked").unlink()
    with pytest.raises(SpoolError, match=r"cannot be read.*restore it from a backup, or remove"):
        acts.once(tmp_path)
    ran = spoold(capsys, "check", run, "--repair", "--json")
    assert (ran.code, found(ran)) == (65, [("torn-entry", f".spoold/ledger/{torn.name}")])
    assert "restore it from a backup, or remove it" in ran.json["findings"][0]["remedy"]
    torn.unlink()
    acts.once(tmp_path)
    verdict.assert_each_once(tmp_path, verdict.look(run))


def test_a_lost_seq_file_is_found_and_written_anew(
    run: Path, capsys: Capsys, tmp_path: Path
) -> None:
    (run / ".spoold/seq-000000003").unlink()
    ran = spoold(capsys, "check", run, "--json")
    assert (ran.code, found(ran)) == (65, [("seq", ".spoold/seq-000000003")])
    assert spoold(capsys, "check", run, "--repair").code == 0
    assert (run / ".spoold/seq-000000003").exists()


def test_a_half_done_retirement_is_said_before_the_next_start_ends_it(
    tmp_path: Path, capsys: Capsys
) -> None:
    acts.BY_NAME["end of retire"].prepare(tmp_path)
    run = tmp_path / "run"
    for name in acts.STRANGERS:
        (run / name).unlink()
    ran = spoold(capsys, "check", run, "--repair", "--json")
    assert ran.code == 65
    assert [code for code, _ in found(ran) if code != "unknown"] == ["half-retired"]


@pytest.mark.parametrize("name", ["lock", "source.json", "status.json"])
def test_a_directory_where_a_file_should_be_is_found(run: Path, name: str, capsys: Capsys) -> None:
    (run / ".spoold" / name).unlink()
    (run / ".spoold" / name).mkdir()
    assert [finding.code for finding in look(RunDir(str(run))).findings] == ["no-file"]


@pytest.mark.parametrize("name", ["tmp", "ledger"])
def test_a_file_where_a_folder_should_be_is_found(run: Path, name: str, capsys: Capsys) -> None:
    shutil.rmtree(run / ".spoold" / name)
    (run / ".spoold" / name).touch()
    ran = spoold(capsys, "check", run, "--json")
    assert ran.code == 65
    assert ("no-folder", f".spoold/{name}") in found(ran)


def test_repair_is_refused_while_a_daemon_runs_and_check_is_not(
    run: Path, capsys: Capsys, tmp_path: Path
) -> None:
    it = acts.daemon(tmp_path)
    ran = spoold(capsys, "check", run, "--repair")
    assert ran.code == 75
    assert f"locked: pid {os.getpid()}" in ran.err
    assert spoold(capsys, "check", run).code == 0
    it.kill()


def test_27_order_is_by_number_and_not_by_time(run: Path, tmp_path: Path) -> None:
    """Files from the future, or from 1970: a clock that was set changes nothing."""
    for when, path in enumerate(run.rglob("*")):
        os.utime(path, (0, 0) if when % 2 else (4e9, 4e9))
    acts.complete_more(tmp_path, 2)
    acts.once(tmp_path)
    verdict.assert_each_once(tmp_path, verdict.look(run))
    names = sorted(path.name[:9] for path in (run / "pending").glob("*.jsonl"))
    assert names == ["000000001", "000000004"]


def test_30_a_folder_on_another_mount_is_refused_and_nothing_is_copied(
    run: Path, tmp_path: Path
) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system to write to")
    elsewhere = shm / f"spoold-{os.getpid()}"
    shutil.move(run / "acked", elsewhere)
    (run / "acked").symlink_to(elsewhere)
    try:
        with pytest.raises(Exception, match="on another file system than") as no:
            acts.once(tmp_path)
        assert no.value.exit_code == 78  # type: ignore[attr-defined]
        assert len(list(elsewhere.rglob("*.jsonl"))) == 1
    finally:
        shutil.rmtree(elsewhere)
