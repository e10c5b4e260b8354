"""Delivery by the rules, whatever the writer does: lateness, groups, bad rows, reasons."""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyroaring import BitMap64

from spoold import fs
from spoold.daemon import collecting
from spoold.daemon.loop import UNSETTLED_SECONDS
from spoold.errors import SourceUnavailable
from spoold.model import Rows
from spoold.sources import Source
from spoold.sources.sqlite import SqliteSource
from spoold.sources.sqlite_news import News
from tests.support.batches import tree
from tests.support.beside import beside_at_once
from tests.support.daemons import environments, mv, running, start
from tests.support.rollouts import Rollouts, make_rollouts


@pytest.fixture
def rollouts(tmp_path: Path) -> Iterator[Rollouts]:
    made = make_rollouts(tmp_path / "rollout.db")
    yield made
    made.close()


def complete(rollouts: Rollouts, count: int, *, group: str = "") -> list[int]:
    ids = rollouts.register(count, group=group)
    with rollouts.together():
        for one in ids:
            rollouts.complete(one)
    return ids


def notes(run_root: str) -> list[str]:
    return sorted(name for name in os.listdir(f"{run_root}/rejected") if name.startswith("env-"))


class TestMissingRows:
    def test_a_row_that_turned_up_and_waits_for_its_group_is_missing_no_more(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        early, late = rollouts.register(2, group="a")
        rollouts.finish(early)
        with running(tmp_path, group_size=2, missing_row_seconds=600) as it:
            it.go()
            assert it.status.source.missing_rows == 1
            rollouts.end(early)
            it.go()
            assert it.status.source.missing_rows == 0
            it.go(2000.0)
            assert tree(it.run) == []
            rollouts.complete(late)
            it.go()
            assert environments(it.run) == [early, late]

    def test_time_in_which_the_source_was_out_of_reach_gives_nobody_up(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        early, slow = rollouts.register(2, group="a")
        (rowless,) = rollouts.register(1, group="")
        rollouts.complete(early)
        rollouts.step(slow)
        rollouts.finish(rowless)
        database, away = tmp_path / "rollout.db", tmp_path / "away.db"
        with running(
            tmp_path, group_size=2, group_timeout_seconds=600, partial_groups="reject"
        ) as it:
            it.go()
            os.rename(database, away)
            it.go(5000.0)
            assert "source-unavailable" in it.reasons
            rollouts.complete(slow)
            rollouts.end(rowless)
            os.rename(away, database)
            it.go(5000.0)
            assert environments(it.run) == [early, slow, rowless]
            assert notes(it.run.root) == []

    def test_a_note_of_a_missing_row_is_no_missing_row_beside(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        rollouts.finish(*rollouts.register(1))
        with running(tmp_path, missing_row_seconds=10) as it:
            it.go()
            it.go(11.0)
            it.go(100.0)
            assert notes(it.run.root) == ["env-1.missing-row.json"]
            status = it.status
            assert (status.source.missing_rows, status.rejected.notes) == (0, 1)
            assert "missing-rows" not in it.reasons

    def test_once_and_a_daemon_count_the_same(self, tmp_path: Path, rollouts: Rollouts) -> None:
        ids = rollouts.register(3, group="")
        rollouts.step(ids[0])
        rollouts.step(ids[1], meta={"event_type": "episode_summary"}, completed=True)
        rollouts.finish(*ids)
        it = start(tmp_path, run_dir=tmp_path / "one", linger_seconds=100)
        it.daemon.once()
        assert len(it.daemon.delivery.missing_rows(it.daemon.looking.source)) == 3
        it.kill()
        with running(tmp_path) as it:
            it.go()
            assert it.status.source.missing_rows == 3


class TestRewards:
    def test_an_environment_that_waits_for_its_reward_is_told_and_never_called_missing(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        (one,) = rollouts.register(1)
        rollouts.finish(one)
        with running(tmp_path, null_reward="wait", missing_row_seconds=60) as it:
            it.go()
            pk = rollouts.end(one, reward=None)
            it.go()
            it.go(1000.0)
            assert tree(it.run) == []
            assert it.status.source.without_reward == 1
            assert list(it.reasons) == ["null-rewards"]
            rollouts.update_step(pk, reward=0.5)
            it.go(61.0)
            assert environments(it.run) == [one]
            assert it.status.source.without_reward == 0

    def test_a_member_that_waits_for_its_reward_is_no_progress_of_its_group(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(3, group="a")
        rollouts.complete(ids[0])
        rollouts.complete(ids[1], reward=None)
        with running(
            tmp_path,
            group_size=2,
            null_reward="wait",
            group_timeout_seconds=1000,
            partial_groups="deliver",
            rescan_seconds=60,
        ) as it:
            for _ in range(16):
                it.go(61.0)
            assert environments(it.run) == []
            it.go(61.0)
            it.go(61.0)
            assert environments(it.run) == [ids[0]]


class TestGroups:
    def test_status_names_who_is_missing_and_who_is_set_aside(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(4, group="a")
        rollouts.register(4, group="b")
        (deleted,) = rollouts.register(1, group="a")
        rollouts.delete(deleted)
        rollouts.complete(ids[0])
        rollouts.complete(ids[2], messages="{}")
        with running(tmp_path, group_size=3) as it:
            it.go()
            it.go(61.0)
            rollouts.complete(ids[1])
            it.go(5.0)
            (group,) = it.status.source.groups
            assert (group.group, group.have, group.want) == ("a", 2, 3)
            assert (group.missing, group.set_aside) == ((ids[3],), (ids[2],))
            rollouts.complete(ids[3])
            it.go()
            assert notes(it.run.root) == [f"env-{ids[2]}.bad-messages.json"]
            assert environments(it.run) == [ids[0], ids[1], ids[3]]

    def test_a_member_that_is_bad_counts_as_lost_at_once(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(3, group="a")
        for one, messages in zip(ids, ("[]", "{}", "[]"), strict=True):
            rollouts.complete(one, messages=messages)
        with running(tmp_path, group_size=3, partial_groups="deliver") as it:
            it.go()
            assert environments(it.run) == [ids[0], ids[2]]
            assert notes(it.run.root) == [f"env-{ids[1]}.bad-messages.json"]

    def test_lost_members_are_known_again_after_a_restart(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(3, group="a")
        for one, messages in zip(ids, ("[]", "{}", "[]"), strict=True):
            rollouts.complete(one, messages=messages)
        with running(tmp_path, group_size=3) as it:
            it.go()
            assert environments(it.run) == []
            assert it.status.source.groups[0].set_aside == (ids[1],)
        with running(tmp_path, group_size=3) as it:
            it.go()
            group = it.status.source.groups[0]
            assert (group.have, group.missing, group.set_aside) == (2, (), (ids[1],))
            assert f"a has 2 of 3, set aside: {ids[1]}" in it.reasons["groups-incomplete"]
        with running(tmp_path, group_size=3, partial_groups="deliver") as it:
            it.go()
            assert environments(it.run) == [ids[0], ids[2]]

    def test_removing_the_note_of_a_member_makes_its_group_whole(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(3, group="a")
        for one in ids[:2]:
            rollouts.complete(one)
        bad = rollouts.complete(ids[2], messages="{}")
        with running(tmp_path, group_size=3) as it:
            it.go()
            rollouts.update_step(bad, messages="[]")
            os.unlink(f"{it.run.rejected}/env-{ids[2]}.bad-messages.json")
            it.settle()
            assert environments(it.run) == ids
            assert it.status.source.groups == ()

    def test_removing_notes_reopens_a_group_that_was_rejected(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(3, group="a")
        for one in ids[:2]:
            rollouts.complete(one)
        with running(
            tmp_path, group_size=3, partial_groups="reject", group_timeout_seconds=100
        ) as it:
            it.go()
            it.go(101.0)
            assert len(notes(it.run.root)) == 2
            for name in notes(it.run.root):
                os.unlink(f"{it.run.rejected}/{name}")
            it.settle()
            rollouts.complete(ids[2])
            it.go()
            assert environments(it.run) == ids

    def test_a_removed_note_of_one_that_is_complete_no_more_leaves_nobody_lost(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(3, group="a")
        rollouts.complete(ids[0])
        rollouts.complete(ids[1], messages="{}")
        with running(tmp_path, group_size=2, partial_groups="wait") as it:
            it.go()
            rollouts.complete(ids[2], messages="{}")
            it.go()
            rollouts.finish(ids[1], finished=0)
            rollouts.finish(ids[2], finished=0)
            for name in notes(it.run.root):
                os.unlink(f"{it.run.rejected}/{name}")
            it.settle()
            assert it.status.source.groups[0].set_aside == ()

    def test_a_removed_batch_reopens_its_groups_and_no_other(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        first = complete(rollouts, 2, group="a")
        second = complete(rollouts, 2, group="b")
        with running(tmp_path, group_size=2, batch_size=1) as it:
            it.go()
            one, two = tree(it.run)
            os.unlink(f"{it.run.root}/{one}")
            late = complete(rollouts, 1, group="b")
            it.settle()
            assert environments(it.run) == [*second, *first]
            assert notes(it.run.root) == [f"env-{late[0]}.late.json"]
            assert two in tree(it.run)

    def test_members_of_a_batch_that_somebody_brings_close_their_group(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(4, group="a")
        rollouts.complete(ids[0])
        rollouts.complete(ids[1])
        with running(tmp_path, group_size=2) as it:
            it.go()
            (name,) = tree(it.run)
            data = Path(it.run.root, name).read_bytes()
            os.unlink(f"{it.run.root}/{name}")
            rollouts.delete(*ids[:2])
            it.settle()
            rollouts.complete(ids[2])
            it.go()
            assert tree(it.run) == []
            Path(it.run.root, name).write_bytes(data)
            it.settle()
            assert environments(it.run) == ids[:2]
            rollouts.complete(ids[3])
            it.go()
            assert notes(it.run.root) == [f"env-{one}.late.json" for one in ids[2:]]

    def test_a_deleted_member_does_not_complete(self, tmp_path: Path, rollouts: Rollouts) -> None:
        ids = complete(rollouts, 2, group="a")
        rollouts.delete(ids[0])
        with running(tmp_path, group_size=2) as it:
            it.go(1000.0)
            assert tree(it.run) == []
            (third,) = complete(rollouts, 1, group="a")
            it.go()
            assert environments(it.run) == [ids[1], third]

    def test_a_member_deleted_after_it_completed_leaves_its_group(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = complete(rollouts, 2, group="a")
        with running(tmp_path, group_size=3) as it:
            it.go()
            assert it.status.source.groups[0].have == 2
            rollouts.delete(ids[0])
            it.go(61.0)
            assert it.status.source.groups[0].have == 1

    def test_empty_and_null_group_ids_are_groups_of_one(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        rollouts.complete(*rollouts.register(1, group=""))
        rollouts.complete(*rollouts.register(1, group=None))
        rollouts.complete(*rollouts.register(1, group=None), messages="{}")
        with running(tmp_path, group_size=4, batch_size=1) as it:
            it.go()
            assert environments(it.run) == [1, 2]
            assert notes(it.run.root) == ["env-3.bad-messages.json"]

    def test_the_same_group_id_in_another_job_is_another_group(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        mine = complete(rollouts, 1, group="a")
        (other,) = rollouts.register(1, group="a", job="other")
        rollouts.complete(other)
        with running(tmp_path, group_size=2, job="job-1") as it:
            it.go()
            assert tree(it.run) == []
            assert it.status.source.groups[0].missing == ()
            mine += complete(rollouts, 1, group="a")
            it.go()
            assert environments(it.run) == mine

    def test_a_group_that_is_too_big_as_a_whole_becomes_notes(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        big = rollouts.register(3, group="a")
        for one in big:
            rollouts.complete(one, response="x" * 1500)
        small = complete(rollouts, 3, group="b")
        with running(tmp_path, group_size=3, max_sample_bytes=4000) as it:
            it.go()
            assert environments(it.run) == small
            assert notes(it.run.root) == [f"env-{one}.too-big.json" for one in big]


class TestBadRows:
    def test_bad_rows_with_good_ones_between_never_stop_reading(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(240, group="")
        with rollouts.together():
            for k, one in enumerate(ids):
                rollouts.complete(one, messages="{}" if k % 4 else "[]")
        with running(tmp_path, batch_size=240) as it:
            it.go()
            assert environments(it.run) == ids[::4]
            assert len(notes(it.run.root)) == 180
            assert "bad-rows" not in it.reasons

    def test_reading_stops_at_the_hundredth_bad_row_however_large_a_batch_is(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(150, group="")
        with rollouts.together():
            for one in ids:
                rollouts.complete(one, messages="{}")
        with running(tmp_path, batch_size=1000) as it:
            it.go()
            assert len(notes(it.run.root)) == collecting.BAD_ROWS == 100
            assert it.status.state == "held"
            assert "bad-rows" in it.reasons

    def test_an_environment_whose_steps_are_too_big_together_becomes_a_note(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        (one,) = rollouts.register(1)
        for _ in range(4):
            rollouts.step(one, response="x" * 900)
        rollouts.complete(one)
        with running(tmp_path, samples="steps", max_sample_bytes=3000) as it:
            it.go()
            assert notes(it.run.root) == [f"env-{one}.too-big.json"]

    def test_the_newest_note_is_known_after_a_restart(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(2, group="")
        with running(tmp_path) as it:
            for one in reversed(ids):
                rollouts.complete(one, messages="{}")
                it.go()
                name = f"{it.run.rejected}/env-{one}.bad-messages.json"
                os.utime(name, ns=(0, 10**9 * (100 - one)))
        with running(tmp_path) as it:
            latest = it.status.rejected.latest
            assert latest is not None
            assert (latest.environment, latest.reason) == (ids[0], "bad-messages")

    def test_new_rows_of_what_is_set_aside_are_told_once_with_the_way_out(
        self, tmp_path: Path, rollouts: Rollouts, caplog: pytest.LogCaptureFixture
    ) -> None:
        (one,) = rollouts.register(1)
        rollouts.complete(one, messages="{}")
        with running(tmp_path) as it:
            it.go()
            for _ in range(3):
                rollouts.end(one)
                it.go(1.0)
            assert tree(it.run) == [f"rejected/env-{one}.bad-messages.json"]
        said = [r.message for r in caplog.records if "new rows" in r.message]
        assert said == ["new rows of what is set aside are not looked at until its note is removed"]

    def test_a_row_of_many_megabytes_flows_or_becomes_a_note(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(3, group="")
        for one, size in zip(ids, (1, 20 << 20, 1), strict=True):
            rollouts.complete(one, response="x" * size)
        with running(tmp_path, run_dir=tmp_path / "flows") as it:
            it.go()
            assert environments(it.run) == ids
        with running(tmp_path, run_dir=tmp_path / "note", max_sample_bytes=10 << 20) as it:
            it.go()
            assert environments(it.run) == [ids[0], ids[2]]
            (note,) = notes(it.run.root)
            facts = json.loads(Path(it.run.rejected, note).read_bytes())
            assert (facts["reason"], len(facts["excerpt"])) == ("too-big", len(facts["excerpt"]))
            assert len(facts["excerpt"]) <= 200


class TestOnce:
    def test_a_reconcile_while_a_batch_is_written_offers_nothing_of_it_again(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ids = complete(rollouts, 6)
        asked = beside_at_once(monkeypatch)
        with running(tmp_path, batch_size=1) as it:
            step = it.daemon._deliver

            def deliver(now: float) -> None:
                step(now)
                if it.daemon.delivery.in_flight:
                    it.daemon.inventory.undelivered = True  # everything is looked at again

            it.daemon._deliver = deliver  # type: ignore[method-assign]
            it.go()
            assert asked
            assert environments(it.run) == ids


class TestConsumersGoOn:
    @pytest.mark.parametrize("once", [False, True])
    def test_what_moves_while_a_daemon_starts_is_not_delivered_again(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch, once: bool
    ) -> None:
        ids = complete(rollouts, 2)
        with running(tmp_path, batch_size=1) as it:
            it.go()
        name = tree(it.run, "pending")[0]
        mv(it.run, name, "inflight/trainer-0")
        read, at = fs.read, f"inflight/trainer-0/{os.path.basename(name)}"
        moves = [at.replace(".jsonl", ".try02.jsonl"), "acked/" + os.path.basename(name)]

        def moved_before(path: str) -> bytes:
            nonlocal at
            if path == f"{it.run.root}/{at}" and moves:
                os.rename(path, f"{it.run.root}/{moves[0]}")
                at = moves.pop(0)
            return read(path)

        monkeypatch.setattr(fs, "read", moved_before)
        with running(tmp_path, batch_size=1) as it:
            if once:
                it.daemon.once()
            else:
                it.go()
                it.go(2.0)
            assert sorted(environments(it.run)) == ids
        assert not moves

    def test_between_two_passes_it_pauses(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        complete(rollouts, 1)
        scan, stamps = fs.scan, itertools.count()

        def acked_meanwhile(path: str) -> fs.Listing:
            if path == f"{tmp_path}/run/rejected":
                os.utime(f"{tmp_path}/run/acked", ns=(0, next(stamps)))
            return scan(path)

        monkeypatch.setattr(fs, "scan", acked_meanwhile)
        with running(tmp_path, batch_size=1) as it:
            assert not it.daemon.inventory.is_whole
            assert it.daemon.step() == pytest.approx(UNSETTLED_SECONDS)
            assert environments(it.run) == []
            monkeypatch.undo()
            it.go(1.0)
            assert environments(it.run) == [1]


class TestIdentity:
    def test_a_database_restored_in_place_and_moved_on_is_noticed_at_the_next_look(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        old = complete(rollouts, 2)
        copy = sqlite3.connect(tmp_path / "older.db")
        rollouts.db.backup(copy)
        late = rollouts.register(40)
        with running(tmp_path, batch_size=1, max_pending_batches=1000) as it:
            it.go()
            rollouts.complete(late[-1])
            it.go()
            for one in late[:12]:
                rollouts.complete(one)
                it.go()
            assert len(environments(it.run)) == 15
            copy.backup(rollouts.db)
            copy.close()
            # Now it has other environments at the same ids, and more rows than there ever were.
            anew = complete(rollouts, 50)
            it.go(2.0)
            assert sorted(environments(it.run)) == sorted(old + anew)
            assert len(os.listdir(it.run.retired)) == 1

    def test_rows_read_after_a_restore_in_place_are_never_mixed_into_the_old_spool(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        complete(rollouts, 1)
        copy = sqlite3.connect(tmp_path / "older.db")
        rollouts.db.backup(copy)
        with running(tmp_path, batch_size=1) as it:
            complete(rollouts, 1)
            it.go()
            old = tree(it.run)
            third = complete(rollouts, 1)
            read = SqliteSource.read

            def restored_first(self: SqliteSource, ids: list[int]) -> object:
                monkeypatch.undo()
                copy.backup(rollouts.db)
                copy.close()
                complete(rollouts, 2)
                return read(self, ids)

            monkeypatch.setattr(SqliteSource, "read", restored_first)
            it.go(2.0)
            (retired,) = os.listdir(it.run.retired)
            kept = [n for n in tree(it.run, f"retired/{retired}") if n.endswith(".jsonl")]
            assert kept == [f"retired/{retired}/{name}" for name in old]
            assert environments(it.run) == [1, 2, *third]

    def test_groups_of_a_database_that_went_back_in_the_middle_of_a_look_are_not_mixed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rollouts = make_rollouts(tmp_path / "rollout.db", "first")
        with running(tmp_path, group_size=2) as it:
            complete(rollouts, 2, group="before")
            it.go()
            before = sqlite3.connect(tmp_path / "before.db")
            rollouts.db.backup(before)
            monkeypatch.setattr("spoold.sources.sqlite_news.SLICE", 4)
            complete(rollouts, 2, group="a")
            for one in rollouts.register(6):
                rollouts.step(one)
            read_on = News.read_on

            def restored(self: News, *wanted: Any) -> bool:
                was_all = read_on(self, *wanted)
                assert not was_all
                monkeypatch.undo()
                before.backup(rollouts.db)
                before.close()
                for group in ("x", "y"):
                    complete(rollouts, 1, group=group)
                return was_all

            monkeypatch.setattr(News, "read_on", restored)
            it.go()
            it.go(130.0)
            assert environments(it.run) == [1, 2]
        rollouts.close()

    def test_where_a_commit_came_in_between_all_that_is_published_is_looked_for(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ids = complete(rollouts, 8)
        asked = beside_at_once(monkeypatch)
        read, verify = SqliteSource.read, SqliteSource.verify
        publishing: list[bool] = []
        looked_for: list[int] = []
        with running(tmp_path, batch_size=2) as it:

            def committed_first(self: SqliteSource, wanted: Sequence[int]) -> Rows:
                rollouts.register(1)
                return read(self, wanted)

            def verified(self: SqliteSource, known: Mapping[int, str], highest: int) -> BitMap64:
                if publishing:
                    looked_for.append(highest)
                    assert highest == max(environments(it.run), default=0)
                return verify(self, known, highest)

            def publish(source: Source, now: float) -> None:
                publishing.append(True)
                before(source, now)
                publishing.clear()

            before = it.daemon.delivery._verify
            monkeypatch.setattr(it.daemon.delivery, "_verify", publish)
            monkeypatch.setattr(SqliteSource, "read", committed_first)
            monkeypatch.setattr(SqliteSource, "verify", verified)
            it.go()
            assert environments(it.run) == ids
            assert asked
            assert looked_for == [0, *ids[1:-1:2]]

    def test_a_batch_that_is_being_written_goes_with_the_source_that_it_is_of(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        complete(rollouts, 8)
        beside_at_once(monkeypatch)
        it = start(tmp_path, batch_size=2)
        step = it.daemon._deliver
        replaced: list[bool] = []

        def deliver(now: float) -> None:
            step(now)
            if it.daemon.delivery.in_flight and not replaced:
                replaced.append(True)
                rollouts.db.execute("DELETE FROM session_steps")
                rollouts.db.execute("DELETE FROM job_environments")
                rollouts.db.execute("DELETE FROM sqlite_sequence")
                complete(rollouts, 1)
                it.daemon.hint(source=True, spool=False)

        monkeypatch.setattr(it.daemon, "_deliver", deliver)
        it.go()
        assert replaced
        assert environments(it.run) == [1]
        it.daemon.stop()
        it.kill()

    def test_a_file_overwritten_by_something_else_is_out_of_reach_not_the_end(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        rollouts.db.execute("PRAGMA journal_mode = delete")
        complete(rollouts, 1)
        database = tmp_path / "rollout.db"
        with running(tmp_path) as it:
            it.go()
            data = database.read_bytes()
            database.write_bytes(b"half of a copy" * 1000)
            it.go(5.0)
            assert "source-unavailable" in it.reasons
            it.go(50.0)
            database.write_bytes(data)
            complete(rollouts, 1)
            it.go(50.0)
            assert environments(it.run) == [1, 2]


class TestOutOfReach:
    def test_pauses_grow_though_it_can_be_opened_and_it_is_one_outage(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        complete(rollouts, 1)
        with running(tmp_path) as it:
            it.go()
            tries = []

            def fail(self: SqliteSource, *wanted: object) -> None:
                tries.append(it.clock.now)
                raise SourceUnavailable("the disk is broken", hint="mend it")

            with monkeypatch.context() as patch:
                patch.setattr(SqliteSource, "look", fail)
                complete(rollouts, 1)
                for _ in range(1200):
                    it.go(0.1)
                reason = it.status.reasons[0]
                assert (reason.code, reason.text, reason.remedy) == (
                    "source-unavailable",
                    "the rollout database cannot be read: the disk is broken",
                    "mend it",
                )
                assert reason.since == pytest.approx(1_796_000_000 + tries[0], abs=1)
                pauses = [b - a for a, b in itertools.pairwise(tries)]
                assert pauses[0] < 1
                assert all(b > a * 1.4 for a, b in itertools.pairwise(pauses[:4]))
                assert max(pauses) < 20
            it.go(30.0)
            assert environments(it.run) == [1, 2]

    def test_with_something_to_deliver_anew_it_does_not_spin(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        complete(rollouts, 1)
        with running(tmp_path) as it:
            it.go()
            os.rename(tmp_path / "rollout.db", tmp_path / "away.db")
            it.go(5.0)
            os.unlink(f"{it.run.root}/{tree(it.run)[0]}")
            it.settle()
            assert it.daemon.inventory.undelivered
            os.rename(tmp_path / "away.db", tmp_path / "rollout.db")
            it.go(30.0)
            assert environments(it.run) == [1]

    def test_a_writer_that_lets_nobody_read_is_named(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        complete(rollouts, 1)
        rollouts.db.execute("PRAGMA journal_mode = delete")
        rollouts.db.execute("PRAGMA locking_mode = exclusive")
        rollouts.register()
        with running(tmp_path) as it:
            it.go()
            assert "locked by another process" in it.reasons["source-unavailable"]
            remedy = it.status.reasons[0].remedy
            assert "locking_mode = EXCLUSIVE lets nobody read" in remedy
            rollouts.db.execute("PRAGMA locking_mode = normal")
            rollouts.db.execute("SELECT 1 FROM job_environments").fetchall()
            it.go(30.0)
            assert environments(it.run) == [1]

    def test_a_file_system_without_shared_memory_is_named(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        from spoold.sources.sqlite_open import Database

        database = Database(str(tmp_path / "rollout.db"))
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMMAP
        found = database._failed(error)
        database.close()
        assert isinstance(found, SourceUnavailable)
        assert "no shared memory, which WAL needs" in found.message


class TestReasons:
    def test_a_spool_that_has_nothing_to_wait_for_says_so(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        complete(rollouts, 1)
        with running(tmp_path) as it:
            it.go()
            assert "all that completed is delivered" in it.reasons["source-empty"]

    def test_what_is_complete_and_lingers_is_counted(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        complete(rollouts, 3)
        with running(tmp_path, linger_seconds=100) as it:
            it.go()
            assert it.reasons["linger"].endswith("about to be published: 3 environments")
            assert it.status.state == "delivering"

    def test_a_deleted_environment_that_gets_rows_is_not_running(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        (one,) = rollouts.register(1)
        rollouts.delete(one)
        with running(tmp_path) as it:
            it.go()
            rollouts.step(one)
            it.go()
            assert it.status.source.running == 0


def test_mv_of_a_batch_says_nothing_about_groups(tmp_path: Path, rollouts: Rollouts) -> None:
    complete(rollouts, 2, group="a")
    with running(tmp_path, group_size=2) as it:
        it.go()
        mv(it.run, tree(it.run)[0], "acked")
        it.go()
        late = complete(rollouts, 2, group="a")
        it.go()
        assert notes(it.run.root) == [f"env-{one}.late.json" for one in late]
        assert fs.free_bytes(it.run.root) > 0


@pytest.mark.parametrize("partial", ["wait", "deliver", "reject"])
def test_a_member_with_nothing_to_deliver_is_not_counted_in_a_group_that_waits(
    tmp_path: Path, rollouts: Rollouts, partial: str
) -> None:
    empty, slow = rollouts.register(2, group="a")
    failed = {"event_type": "gateway_inference", "status_code": 500}
    rollouts.complete(empty, meta=failed)
    with running(tmp_path, group_size=2, partial_groups=partial, group_timeout_seconds=5000) as it:
        it.go()
        assert [list(group.complete) for group in it.daemon.plan.waiting()] == [[empty]]
        it.go(61.0)
        assert list(it.daemon.plan.waiting()) == []
        it.go(2.0)  # the next look tells that its row is missing
        it.go(601.0)
        assert notes(it.run.root) == [f"env-{empty}.missing-row.json"]
        rollouts.complete(slow)
        rollouts.complete(empty)
        it.go()
        assert environments(it.run) == [empty, slow]
        assert notes(it.run.root) == []


def test_who_is_deleted_while_its_row_is_missing_gets_no_note(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    gone, there = rollouts.register(2, group="")
    for one in (gone, there):
        rollouts.finish(one)
    with running(tmp_path, missing_row_seconds=100, rescan_seconds=1000) as it:
        it.go()
        it.go(99.0)
        rollouts.delete(gone)
        it.go(2.0)
        assert notes(it.run.root) == [f"env-{there}.missing-row.json"]


def test_what_cannot_be_delivered_is_not_late(tmp_path: Path, rollouts: Rollouts) -> None:
    complete(rollouts, 2, group="a")
    (empty,) = rollouts.register(1, group="a")
    with running(tmp_path, group_size=2) as it:
        it.go()
        rollouts.complete(empty, meta={"event_type": "gateway_session_close"})
        it.go(61.0)
        it.go(601.0)
        assert notes(it.run.root) == [f"env-{empty}.missing-row.json"]
        rollouts.complete(empty)
        it.go()
        it.go(2.0)
        assert notes(it.run.root) == [f"env-{empty}.late.json"]


def test_groups_written_anew_in_the_middle_of_a_reconcile_are_others(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    complete(rollouts, 2, group="a")
    with running(tmp_path, group_size=2) as it:
        it.go()
        mv(it.run, tree(it.run, "pending")[0], "acked")
        it.daemon.inventory.undelivered = True
        it.daemon.step()  # which groups are closed is learnt; to look at everything comes next
        with rollouts.together():
            rollouts.db.execute("DELETE FROM session_steps")
            rollouts.db.execute("DELETE FROM job_environments")
        anew = complete(rollouts, 2, group="a")
        it.go()
        assert environments(it.run, "pending") == anew
        assert notes(it.run.root) == []


def test_groups_written_anew_before_a_look_are_others(tmp_path: Path, rollouts: Rollouts) -> None:
    complete(rollouts, 2, group="a")
    with running(tmp_path, group_size=2, rescan_seconds=1000) as it:
        it.go()
        mv(it.run, tree(it.run, "pending")[0], "acked")
        it.go(10.0)
        with rollouts.together():
            rollouts.db.execute("DELETE FROM session_steps")
            rollouts.db.execute("DELETE FROM job_environments")
        anew = complete(rollouts, 2, group="a")
        it.daemon.hint(source=True, spool=False)
        it.go(10.0)
        assert environments(it.run, "pending") == anew
        assert notes(it.run.root) == []


def rewritten(rollouts: Rollouts, old: list[int], *, group: str) -> list[int]:
    """Delete environments with their rows, and complete as many new ones of the same group."""
    with rollouts.together():
        for one in old:
            session = rollouts.env_id(one)
            rollouts.db.execute("DELETE FROM session_steps WHERE session_id = ?", (session,))
            rollouts.db.execute("DELETE FROM job_environments WHERE id = ?", (one,))
    return complete(rollouts, len(old), group=group)


def test_groups_written_anew_while_another_is_read_are_others(
    tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = complete(rollouts, 2, group="a")
    with running(tmp_path, group_size=2, rescan_seconds=1000) as it:
        it.go()
        it.go(10.0)
        new: list[int] = []
        collect = it.daemon.delivery._collect

        def meanwhile(*facts: Any) -> Any:
            collected = collect(*facts)
            monkeypatch.undo()
            new.extend(rewritten(rollouts, old, group="a"))
            return collected

        monkeypatch.setattr(it.daemon.delivery, "_collect", meanwhile)
        other = complete(rollouts, 2, group="b")
        it.go(2.0)
        it.go(2.0)
        it.go(2.0)
        assert environments(it.run, "pending") == [*old, *other, *new]
        assert notes(it.run.root) == []


def test_groups_written_anew_while_the_source_was_closed_are_others(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    old = complete(rollouts, 2, group="a")
    with running(tmp_path, group_size=2, rescan_seconds=60) as it:
        it.go()
        it.go(10.0)
        rollouts.db.execute("DELETE FROM session_steps")
        rollouts.db.execute("DELETE FROM job_environments")
        it.go(61.0)
        assert "source-unavailable" in it.reasons
        new = complete(rollouts, 2, group="a")
        it.go(20.0)
        assert environments(it.run, "pending") == [*old, *new]
        assert notes(it.run.root) == []


def test_what_is_deleted_before_there_is_room_for_it_is_not_delivered(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    first, second, third = complete(rollouts, 3)
    with running(tmp_path, batch_size=1, max_pending_batches=1) as it:
        it.go()
        assert environments(it.run) == [first]
        rollouts.delete(second)
        mv(it.run, tree(it.run, "pending")[0], "acked")
        it.go()
        assert environments(it.run) == [first, third]
