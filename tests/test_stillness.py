"""Scans that would find nothing are spared; what changes without a hint is seen by the next one."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyroaring import BitMap64

from spoold.errors import SpoolLocked
from spoold.layout import RunDir
from spoold.model import Look
from spoold.sources.sqlite import SqliteSource
from spoold.spool import setup
from spoold.spool.inventory import Inventory
from spoold.spool.statusfile import read
from tests.support.batches import tree
from tests.support.daemons import Clock, Running, environments, mv, running
from tests.support.rollouts import Rollouts, make_rollouts

SCAN = 2.0


@pytest.fixture
def rollouts(tmp_path: Path) -> Iterator[Rollouts]:
    made = make_rollouts(tmp_path / "rollout.db")
    yield made
    made.close()


def complete(rollouts: Rollouts, *, group: str = "") -> int:
    (one,) = rollouts.register(1, group=group)
    rollouts.complete(one)
    return one


def pass_time(it: Running, seconds: float) -> None:
    """Let time pass; nothing is hinted at, though all is watched."""
    end = it.clock.now + seconds
    while it.clock.now < end:
        it.daemon.hint(source=False, spool=False, moved=set())
        it.clock.now = min(end, it.clock.now + max(it.daemon.step(), 0.0001))


class Counted:
    """How often the folders were gone through, and the source was looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes = self.looks = 0
        refresh, look = Inventory.refresh, SqliteSource.look

        def refreshed(*args: object, **how: object) -> None:
            self.passes += 1
            refresh(*args, **how)  # type: ignore[arg-type]

        def looked(*args: object) -> object:
            self.looks += 1
            return look(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(Inventory, "refresh", refreshed)
        monkeypatch.setattr(SqliteSource, "look", looked)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def set_back(run: RunDir) -> None:
    """Set back the times of all folders: too young a time proves nothing."""
    for folder, _, _ in os.walk(run.root):
        os.utime(folder, (1_700_000_000, 1_700_000_000))


def make_old(it: Running) -> None:
    set_back(it.run)


def broken(path: str) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), path)


def come_to_rest(it: Running, counted: Counted) -> None:
    """Deliver what there is, and go on until scans are spared."""
    it.go()
    make_old(it)
    pass_time(it, 5 * SCAN)
    before = counted.passes
    pass_time(it, SCAN)
    assert counted.passes == before


def test_only_for_a_report_a_scan_is_made_that_finds_nothing(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000) as it:
        come_to_rest(it, counted)
        passes, looks, looked_at = counted.passes, counted.looks, it.daemon.looking.last_look
        pass_time(it, 110.0)  # of three reports, the last one twenty seconds ago
        assert counted.passes - passes in (3, 4)
        assert counted.looks == looks
        assert it.daemon.looking.last_look is not None
        assert looked_at is not None
        assert it.daemon.looking.last_look - looked_at == pytest.approx(110.0, abs=SCAN)


def test_a_reconcile_is_made_when_it_is_due(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    rollouts.register(1)
    with running(tmp_path, rescan_seconds=15) as it:
        come_to_rest(it, counted)
        passes = counted.passes
        pass_time(it, 60.0)
        assert counted.passes - passes >= 4


def completed(it: Running, rollouts: Rollouts) -> Callable[[], bool]:
    one = complete(rollouts)
    return lambda: environments(it.run, "pending") == [1, one]


def acked(it: Running, rollouts: Rollouts) -> Callable[[], bool]:
    (name,) = tree(it.run, "pending")
    mv(it.run, name, "acked")
    return lambda: len(os.listdir(it.run.ledger)) == 1


def acked_in_a_step(it: Running, rollouts: Rollouts) -> Callable[[], bool]:
    (name,) = tree(it.run, "pending")
    mv(it.run, name, "acked/step-000000007")
    return lambda: len(os.listdir(it.run.ledger)) == 1


def removed(it: Running, rollouts: Rollouts) -> Callable[[], bool]:
    (name,) = tree(it.run, "pending")
    os.unlink(f"{it.run.root}/{name}")
    os.utime(it.run.pending, (1_600_000_000, 1_600_000_000))  # as where the clock is another one
    return lambda: tree(it.run, "pending") not in ([], [name])


def a_strange_file(it: Running, rollouts: Rollouts) -> Callable[[], bool]:
    Path(it.run.root, "pending", "notes.txt").touch()
    return lambda: it.daemon.conditions.holds(["unknown-files"])


def claimed_by_hand(it: Running, rollouts: Rollouts) -> Callable[[], bool]:
    (name,) = tree(it.run, "pending")
    mv(it.run, name, "inflight")
    return lambda: it.daemon.conditions.holds(["claimed-by-hand"])


def claimed_by_one_that_died(it: Running, rollouts: Rollouts) -> Callable[[], bool]:
    (name,) = tree(it.run, "pending")
    mv(it.run, name, "inflight/t1")
    return lambda: it.daemon.conditions.holds(["consumer-gone"])


def no_database(it: Running, rollouts: Rollouts) -> Callable[[], bool]:
    rollouts.close()
    os.unlink(f"{os.path.dirname(it.run.root)}/rollout.db")
    return lambda: it.daemon.conditions.holds(["source-unavailable"])


def another_database(it: Running, rollouts: Rollouts) -> Callable[[], bool]:
    rollouts.close()
    path = Path(it.run.root).parent / "rollout.db"
    path.unlink()
    with closing(make_rollouts(path)) as made:
        complete(made)
    return lambda: os.path.isdir(it.run.retired) and len(tree(it.run, "pending")) == 1


CHANGES = [
    completed,
    acked,
    acked_in_a_step,
    removed,
    a_strange_file,
    claimed_by_hand,
    claimed_by_one_that_died,
    no_database,
    another_database,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_without_a_hint_is_seen_by_the_next_scan(
    tmp_path: Path,
    rollouts: Rollouts,
    counted: Counted,
    change: Callable[[Running, Rollouts], Callable[[], bool]],
) -> None:
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000) as it:
        come_to_rest(it, counted)
        is_seen = change(it, rollouts)
        assert not is_seen()
        pass_time(it, 1.5 * SCAN)
        assert is_seen()


def test_a_lost_lock_is_seen_by_the_next_scan(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000) as it:
        come_to_rest(it, counted)
        os.unlink(it.run.lock)
        with pytest.raises(SpoolLocked):
            pass_time(it, 1.5 * SCAN)


def test_another_wal_is_said_by_the_next_scan(
    tmp_path: Path, rollouts: Rollouts, counted: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000) as it:
        come_to_rest(it, counted)
        wal = tmp_path / "rollout.db-wal"
        data = wal.read_bytes()
        wal.rename(tmp_path / "old-wal")
        wal.write_bytes(data)
        pass_time(it, 1.5 * SCAN)
        said = [record.fields for record in caplog.records if record.message == "waiting"]  # type: ignore[attr-defined]
        assert "-wal was removed, and there is another one" in said[-1]["what"]


@pytest.mark.parametrize("is_asked_for_first", [True, False])
def test_another_shm_is_said_by_the_next_scan(
    tmp_path: Path,
    rollouts: Rollouts,
    counted: Counted,
    caplog: pytest.LogCaptureFixture,
    is_asked_for_first: bool,
) -> None:
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000) as it:
        come_to_rest(it, counted)
        if is_asked_for_first:
            pass_time(it, SCAN)
        else:
            it.go()
        shm = tmp_path / "rollout.db-shm"
        shm.rename(tmp_path / "old-shm")
        shutil.copy(tmp_path / "old-shm", shm)
        pass_time(it, 1.5 * SCAN)
        said = [record.fields for record in caplog.records if record.message == "waiting"]  # type: ignore[attr-defined]
        assert "-shm was removed, and there is another one" in said[-1]["what"]


def test_without_a_shm_scans_are_spared_all_the_same(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000) as it:
        come_to_rest(it, counted)
        os.unlink(tmp_path / "rollout.db-shm")
        pass_time(it, 5 * SCAN)
        passes = counted.passes
        pass_time(it, 60.0)
        assert counted.passes - passes <= 3


def test_a_commit_that_shows_in_the_shm_alone_is_seen_by_the_next_scan(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    rollouts.db.execute("PRAGMA wal_autocheckpoint = 0")
    with running(tmp_path, rescan_seconds=1000) as it:
        it.go()
        assert rollouts.db.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()[0] == 0
        come_to_rest(it, counted)
        wal = tmp_path / "rollout.db-wal"
        was = wal.stat()
        one = complete(rollouts)  # at the beginning of the -wal, anew
        assert wal.stat().st_size == was.st_size
        os.utime(wal, ns=(was.st_atime_ns, was.st_mtime_ns))  # within a tick of the kernel's clock
        pass_time(it, 1.5 * SCAN)
        assert environments(it.run, "pending") == [1, one]


def test_a_file_that_was_written_to_without_a_commit_is_looked_at(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000) as it:
        come_to_rest(it, counted)
        looks = counted.looks
        os.utime(tmp_path / "rollout.db", (1_700_000_000, 1_700_000_000))
        pass_time(it, 1.5 * SCAN)
        assert counted.looks == looks + 1


def test_without_a_wal_a_commit_is_seen_by_the_next_scan(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    rollouts.db.execute("PRAGMA journal_mode = DELETE")
    with running(tmp_path, rescan_seconds=1000) as it:
        come_to_rest(it, counted)
        one = complete(rollouts)
        pass_time(it, 1.5 * SCAN)
        assert environments(it.run, "pending") == [1, one]


def test_a_file_in_a_folder_in_a_folder_is_seen_by_the_next_scan(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000) as it:
        folder = Path(it.run.acked, "step-000000007")
        folder.mkdir()
        come_to_rest(it, counted)
        (folder / "strange").touch()
        pass_time(it, 1.5 * SCAN)
        assert "acked/step-000000007/strange" in it.daemon.inventory.unknown


def test_a_hint_that_nothing_follows_costs_no_scan(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000) as it:
        come_to_rest(it, counted)
        passes = counted.passes
        for _ in range(25):
            pass_time(it, 0.77)
            it.daemon.hint(source=True, spool=False, moved=set())
        assert counted.passes - passes <= 1


def test_what_is_being_written_is_waited_for_though_a_scan_is_due(
    tmp_path: Path, rollouts: Rollouts, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000) as it:
        come_to_rest(it, counted)
        monkeypatch.setattr(SqliteSource, "is_writing", lambda _: True)  # for another process
        for _ in range(60):
            it.clock.now += 0.05
            it.daemon.hint(source=True, spool=False, moved=set())
            assert it.daemon.step() < 0.1


def test_while_batches_pile_up_commits_cost_no_step_and_all_is_there_once_there_is_room(
    tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("spoold.fs.free_bytes", lambda path: asked.append(path) or 10**12)
    ids = [complete(rollouts), complete(rollouts)]
    settings = {"max_pending_batches": 1, "batch_size": 1, "min_free_bytes": 1}
    with running(tmp_path, rescan_seconds=1000, **settings) as it:
        it.go()
        assert it.daemon.conditions.holds(["backpressure"])
        asked.clear()
        for _ in range(20):
            ids.append(complete(rollouts))
            it.clock.now += 0.05
            it.daemon.hint(source=True, spool=False, moved=set())
            assert 0 < it.daemon.step() <= SCAN
        assert len(asked) <= 1
        for _ in ids[1:]:
            (name,) = tree(it.run, "pending")
            mv(it.run, name, "acked")
            it.go()
        assert environments(it.run) == ids


def test_settings_that_are_read_again_count_at_once(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000) as it:
        come_to_rest(it, counted)
        it.daemon.reload(it.daemon.settings.model_copy(update={"max_pending_batches": 1}))
        it.daemon.step()
        assert it.daemon.conditions.holds(["backpressure"])


def test_after_a_start_the_first_pass_is_made_by_the_next_scan(
    tmp_path: Path, rollouts: Rollouts, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However old the folders are by then: what is done along with a pass was not done yet."""
    complete(rollouts)
    with running(tmp_path) as it:
        it.go()
        (name,) = tree(it.run, "pending")
        mv(it.run, name, "inflight/t1")
    probe = setup.probe

    def probed_long_ago(run: RunDir) -> None:
        probe(run)
        set_back(run)

    monkeypatch.setattr(setup, "probe", probed_long_ago)
    with running(tmp_path, rescan_seconds=1000) as it:
        pass_time(it, 1.5 * SCAN)
        assert it.daemon.conditions.holds(["consumer-gone"])


def test_whoever_holds_batches_is_looked_at_by_each_scan(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    """That a consumer dies shows in no file."""
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000, requeue_seconds=20) as it:
        come_to_rest(it, counted)
        (name,) = tree(it.run, "pending")
        mv(it.run, name, "inflight/t1")
        for _ in range(2):
            pass_time(it, 1.5 * SCAN)
            make_old(it)
        pass_time(it, 14.0)
        assert tree(it.run, "pending") == []
        pass_time(it, 2 * SCAN)
        assert tree(it.run, "pending") == [name.replace(".jsonl", ".try02.jsonl")]


def test_a_full_disk_is_said_by_the_next_scan_and_taken_back_by_the_next(
    tmp_path: Path, rollouts: Rollouts, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(rollouts)
    free = [10**12]
    monkeypatch.setattr("spoold.fs.free_bytes", lambda _: free[0])
    with running(tmp_path, rescan_seconds=1000, min_free_bytes=1000) as it:
        come_to_rest(it, counted)
        free[0] = 0
        pass_time(it, 1.5 * SCAN)
        assert it.daemon.conditions.holds(["disk-space"])
        pass_time(it, 35.0)
        free[0] = 10**12
        pass_time(it, 1.5 * SCAN)
        assert not it.daemon.conditions.holds(["disk-space"])


def test_a_disk_that_does_not_say_how_full_it_is_ends_no_daemon(
    tmp_path: Path, rollouts: Rollouts, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000, min_free_bytes=1) as it:
        come_to_rest(it, counted)
        one = complete(rollouts)
        with monkeypatch.context() as patch:
            patch.setattr("os.statvfs", broken)
            pass_time(it, 5 * SCAN)
            assert it.daemon.conditions.holds(["write-failed"])
        pass_time(it, 15.0)
        assert environments(it.run, "pending") == [1, one]


def test_a_row_that_is_missing_is_given_up_in_time(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000, missing_row_seconds=12) as it:
        come_to_rest(it, counted)
        (one,) = rollouts.register(1)
        rollouts.step(one)
        rollouts.finish(one)
        pass_time(it, 12.0 + 1.5 * SCAN)
        assert tree(it.run, "rejected") == ["rejected/env-2.missing-row.json"]


def test_a_group_that_is_not_whole_is_decided_about_in_time(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts, group="whole")
    complete(rollouts, group="whole")
    settings = {"group_size": 2, "group_timeout_seconds": 11, "partial_groups": "deliver"}
    with running(tmp_path, rescan_seconds=1000, **settings) as it:
        come_to_rest(it, counted)
        one = complete(rollouts, group="half")
        pass_time(it, 10.0)
        assert environments(it.run, "pending") == [1, 2]
        pass_time(it, 1.0 + 1.5 * SCAN)
        assert environments(it.run, "pending") == [1, 2, one]


def test_what_lingers_is_published_in_time(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000, linger_seconds=9) as it:
        pass_time(it, 10.0)
        come_to_rest(it, counted)
        one = complete(rollouts)
        pass_time(it, 1.5 * SCAN)
        make_old(it)
        pass_time(it, 9.0)
        assert environments(it.run, "pending") == [1, one]


def test_groups_that_were_deleted_and_written_anew_are_delivered_in_time(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    for _ in range(2):
        complete(rollouts, group="g")
    with running(tmp_path, rescan_seconds=1000, group_size=2) as it:
        come_to_rest(it, counted)
        with rollouts.together():
            rollouts.db.execute("DELETE FROM job_environments")
            rollouts.db.execute("DELETE FROM session_steps")
            ids = [complete(rollouts, group="g") for _ in range(2)]
        pass_time(it, 1.5 * SCAN)
        assert environments(it.run, "pending") == [1, 2, *ids]


def test_a_reconcile_that_is_under_way_is_not_held_up(
    tmp_path: Path, rollouts: Rollouts, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(rollouts)
    with rollouts.together():
        for one in rollouts.register(20):
            rollouts.step(one)
    with running(tmp_path, rescan_seconds=40) as it:
        come_to_rest(it, counted)
        monkeypatch.setattr("spoold.sources.sqlite.SLICE", 4)
        monkeypatch.setattr("spoold.sources.sqlite._FEW", 0)
        slices = []
        reconcile = SqliteSource.reconcile

        def timed(self: SqliteSource, skip: BitMap64) -> Iterator[Look]:
            for look in reconcile(self, skip):
                slices.append(it.clock.now)
                yield look

        monkeypatch.setattr(SqliteSource, "reconcile", timed)
        pass_time(it, 60.0)
        assert len(slices) == 6
        assert slices[-1] - slices[0] < 0.1


def test_a_link_that_leads_to_another_database_is_seen_by_the_next_scan(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    link = tmp_path / "link.db"
    link.symlink_to("rollout.db")
    with running(tmp_path, db=link, rescan_seconds=1000) as it:
        come_to_rest(it, counted)
        with closing(make_rollouts(tmp_path / "other.db")) as other:
            complete(other)
            (tmp_path / "new.db").symlink_to("other.db")
            os.rename(tmp_path / "new.db", link)
            pass_time(it, 1.5 * SCAN)
            assert os.path.isdir(it.run.retired)


def test_one_that_was_turned_away_is_said_by_the_next_scan_and_holds_up_nothing(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000) as it:
        come_to_rest(it, counted)
        setup.leave_visit(it.run)
        pass_time(it, 1.5 * SCAN)
        assert it.daemon.conditions.holds(["second-daemon"])
        come_to_rest(it, counted)
        passes = counted.passes
        setup.leave_visit(it.run)  # another one
        pass_time(it, 1.5 * SCAN)
        assert counted.passes == passes + 1
        os.unlink(it.run.visit_json)
        come_to_rest(it, counted)


@pytest.mark.parametrize("seconds", [100.0, -100.0])
def test_a_clock_that_was_set_is_said_by_the_next_scan(
    tmp_path: Path, rollouts: Rollouts, counted: Counted, seconds: float
) -> None:
    complete(rollouts)
    clock, ahead = Clock(), [0.0]
    settings = {"clock": clock, "wall": lambda: 1_796_000_000.0 + clock.now + ahead[0]}
    with running(tmp_path, rescan_seconds=1000, **settings) as it:
        come_to_rest(it, counted)
        ahead[0] = seconds
        pass_time(it, 1.5 * SCAN)
        assert it.daemon.conditions.holds(["clock-jump"])


def test_that_there_are_no_hints_is_reported_by_the_next_scan(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000) as it:
        come_to_rest(it, counted)
        it.daemon.hear(("the kernel watches no more", "raise the limit"))
        pass_time(it, 1.5 * SCAN)
        status, why = read(it.run)
        assert status is not None, why
        assert "hints-off" in [reason.code for reason in status.reasons]


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three names are many."""
    monkeypatch.setattr("spoold.spool.shelves.MANY_NAMES", 2)


@contextmanager
def with_many_names(tmp_path: Path, counted: Counted, **settings: Any) -> Iterator[Running]:
    """A daemon at rest whose acked/ has so many names that it goes by hints there."""
    with running(tmp_path, **settings) as it:
        for number in range(5):
            Path(it.run.acked, f"strange-{number}").touch()
        come_to_rest(it, counted)
        yield it


@pytest.mark.usefixtures("many")
def test_a_folder_of_many_names_is_listed_anew_when_it_is_due(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    with with_many_names(tmp_path, counted, rescan_seconds=60) as it:
        pass_time(it, 25.0)
        it.daemon.hint(source=False, spool=True, moved=None)  # what is relied on is listed now
        it.daemon.step()
        Path(it.run.acked, "lost").touch()  # its hint is lost
        pass_time(it, 55.0)
        assert "acked/lost" not in it.daemon.inventory.unknown
        pass_time(it, 5.0 + 1.5 * SCAN)
        assert "acked/lost" in it.daemon.inventory.unknown


@pytest.mark.usefixtures("many")
def test_a_hint_in_a_folder_of_many_names_is_gone_by(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    with with_many_names(tmp_path, counted, rescan_seconds=1000) as it:
        Path(it.run.acked, "new").touch()
        it.daemon.hint(source=False, spool=True, moved={f"{it.run.acked}/new"})
        it.daemon.step()
        assert "acked/new" in it.daemon.inventory.unknown


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(
    ("strange", "moved"),
    [
        pytest.param("pending/strange", set(), id="in another folder"),
        pytest.param("acked/strange", None, id="once hints may have been lost"),
    ],
)
def test_beside_a_folder_of_many_names_the_next_scan_lists(
    tmp_path: Path, rollouts: Rollouts, counted: Counted, strange: str, moved: set[str] | None
) -> None:
    complete(rollouts)
    with with_many_names(tmp_path, counted, rescan_seconds=1000) as it:
        Path(it.run.root, strange).touch()
        it.daemon.hint(source=False, spool=False, moved=moved)
        pass_time(it, 1.5 * SCAN)
        assert strange in it.daemon.inventory.unknown


def test_a_time_that_was_too_young_proves_nothing(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000) as it:
        come_to_rest(it, counted)
        acked = Path(it.run.root, "acked")
        (acked / "first").touch()
        pass_time(it, 1.5 * SCAN)
        young = acked.stat()
        (acked / "second").touch()  # within the same tick of the kernel's clock
        os.utime(acked, ns=(young.st_atime_ns, young.st_mtime_ns))
        pass_time(it, 1.5 * SCAN)
        assert "acked/second" in it.daemon.inventory.unknown


def test_reports_are_made_in_time_where_scans_are_rare(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    complete(rollouts)
    with running(tmp_path, scan_seconds=70, rescan_seconds=1000) as it:
        it.go()
        make_old(it)
        pass_time(it, 200.0)
        for _ in range(3):
            pass_time(it, 30.5)
            status, why = read(it.run)
            assert status is not None, why
            assert 1_796_000_000.0 + it.clock.now - status.updated < 31.0
