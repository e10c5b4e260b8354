"""Scans that would find nothing are spared; what changes without a hint is seen by the next one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from spoold.errors import SpoolLocked
from spoold.sources.sqlite import SqliteSource
from spoold.spool.inventory import Inventory
from tests.support.batches import tree
from tests.support.daemons import Running, environments, mv, running
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


def come_to_rest(it: Running, counted: Counted) -> None:
    """Deliver what there is, and go on until scans are spared."""
    it.go()
    for folder, _, _ in os.walk(it.run.root):
        os.utime(folder, (1_700_000_000, 1_700_000_000))  # too young a time proves nothing
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
        pass_time(it, 120.0)
        assert counted.passes - passes == 4
        assert counted.looks == looks
        assert it.daemon.looking.last_look is not None
        assert looked_at is not None
        assert it.daemon.looking.last_look - looked_at == pytest.approx(120.0, abs=SCAN)


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


def test_whoever_holds_batches_is_looked_at_by_each_scan(
    tmp_path: Path, rollouts: Rollouts, counted: Counted
) -> None:
    """That a consumer dies shows in no file."""
    complete(rollouts)
    with running(tmp_path, rescan_seconds=1000, requeue_seconds=20) as it:
        come_to_rest(it, counted)
        (name,) = tree(it.run, "pending")
        mv(it.run, name, "inflight/t1")
        pass_time(it, 20.0)
        assert tree(it.run, "pending") == []
        pass_time(it, 2 * SCAN)
        assert tree(it.run, "pending") == [name.replace(".jsonl", ".try02.jsonl")]


def test_what_is_held_goes_on_at_the_next_scan(
    tmp_path: Path, rollouts: Rollouts, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(rollouts)
    free = [10**12]
    monkeypatch.setattr("spoold.fs.free_bytes", lambda _: free[0])
    with running(tmp_path, rescan_seconds=1000, min_free_bytes=1000) as it:
        come_to_rest(it, counted)
        free[0] = 0
        one = complete(rollouts)
        pass_time(it, 30.0)
        assert environments(it.run, "pending") == [1]
        free[0] = 10**12
        pass_time(it, 1.5 * SCAN)
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
