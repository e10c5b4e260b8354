"""The daemon on real SQLite databases: what is on disk after what the writer and people did."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spoold import fs
from spoold.errors import ConfigError, SourceReplaced, SpoolHeld, SpoolLocked, SpoolWriteError
from spoold.model import Look
from spoold.sources.sqlite import SqliteSource
from spoold.sources.sqlite_open import Database
from spoold.spool import setup
from spoold.spool.inventory import Inventory
from tests.support.batches import tree
from tests.support.daemons import Running, environments, mv, running, start
from tests.support.other_writer import OtherWriter, other_writer
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


def seq(run_root: str) -> list[str]:
    return [name for name in os.listdir(f"{run_root}/.spoold") if name.startswith("seq-")]


class TestDelivery:
    def test_completed_environments_are_published_the_others_are_not(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(3)
        rollouts.complete(ids[2])
        rollouts.step(ids[1])
        with running(tmp_path) as it:
            it.go()
            (name,) = tree(it.run)
            assert name.startswith("pending/000000001-n1-w3.3-")
            assert environments(it.run) == [ids[2]]
            rollouts.complete(ids[0])
            rollouts.complete(ids[1])
            it.go()
            assert environments(it.run) == [ids[2], ids[0], ids[1]]

    def test_a_batch_lingers_for_more(self, tmp_path: Path, rollouts: Rollouts) -> None:
        complete(rollouts, 1)
        with running(tmp_path, linger_seconds=5, batch_size=3) as it:
            it.go()
            assert tree(it.run) == []
            complete(rollouts, 1)
            it.go(4.0)
            assert tree(it.run) == []
            it.go(1.0)
            assert environments(it.run) == [1, 2]
            complete(rollouts, 3)
            it.go()
            assert environments(it.run) == [1, 2, 3, 4, 5]

    def test_the_restart_after_a_kill_delivers_exactly_the_rest(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        complete(rollouts, 100)
        first = start(tmp_path, max_pending_batches=1)
        first.go()
        assert environments(first.run) == list(range(1, 65))
        first.kill()
        with running(tmp_path) as again:
            again.go()
            files = tree(again.run)
            assert environments(again.run) == list(range(1, 101))
            assert [name[:17] for name in files] == ["pending/000000001", "pending/000000065"]

    def test_completion_in_reverse_order_and_twenty_kills_skip_nothing(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(200, group="")
        rng = random.Random(4)
        kills = sorted(rng.sample(range(200), 20))
        it = start(tmp_path, batch_size=7, max_pending_batches=1000)
        for k, one in enumerate(reversed(ids)):
            rollouts.complete(one)
            if rng.random() < 0.3:
                it.go()
            if k in kills:
                it.kill()
                it = start(tmp_path, batch_size=7, max_pending_batches=1000)
        it.go()
        it.kill()
        assert sorted(environments(it.run)) == ids

    def test_numbers_are_given_back_at_a_clean_stop(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        complete(rollouts, 2)
        with running(tmp_path, batch_size=1) as it:
            it.go()
            assert seq(it.run.root) == ["seq-000000064"]
        assert seq(it.run.root) == ["seq-000000002"]

    def test_the_same_rows_give_the_same_bytes(self, tmp_path: Path, rollouts: Rollouts) -> None:
        complete(rollouts, 5)
        contents = []
        for name in ("one", "two"):
            with running(tmp_path, run_dir=tmp_path / name) as it:
                it.go()
                (file,) = tree(it.run)
                contents.append((file, Path(it.run.root, file).read_bytes()))
        assert contents[0] == contents[1]

    def test_a_batch_is_closed_at_batch_bytes_and_one_environment_may_exceed_it(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(5, group="")
        for one, size in zip(ids, (400, 400, 9000, 400, 400), strict=True):
            rollouts.complete(one, response="x" * size)
        with running(tmp_path, batch_bytes=3000) as it:
            it.go()
            lines = [Path(it.run.root, n).read_bytes().count(b"\n") for n in tree(it.run)]
            assert lines == [2, 1, 2]
            assert environments(it.run) == ids

    def test_what_did_not_fit_into_a_batch_does_not_linger_again(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(7, group="")
        for one in ids:
            rollouts.complete(one, response="x" * 900)
        with running(tmp_path, linger_seconds=100, batch_bytes=3000) as it:
            it.go()
            assert tree(it.run) == []
            it.go(100.0)
            assert environments(it.run) == ids

    def test_new_rows_of_a_delivered_environment_are_logged_and_not_delivered_again(
        self, tmp_path: Path, rollouts: Rollouts, caplog: pytest.LogCaptureFixture
    ) -> None:
        complete(rollouts, 1)
        with running(tmp_path) as it:
            it.go()
            rollouts.end(1)
            rollouts.end(1)
            it.go()
            it.go(100.0)
            assert environments(it.run) == [1]
        said = [r.fields for r in caplog.records if "after delivery" in r.message]
        assert said == [{"environment": 1}]

    def test_nothing_complete_publishes_no_empty_batch(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        rollouts.register(3)
        with running(tmp_path) as it:
            it.go(100.0)
            assert tree(it.run) == []


class TestHints:
    @staticmethod
    def pass_time(it: Running, seconds: float) -> None:
        """Let time pass without a hint, stepping whenever the daemon asked for it."""
        end = it.clock.now + seconds
        for _ in range(1000):
            pause = it.daemon.step()
            if it.clock.now + pause > end:
                break
            it.clock.now += max(pause, 0.0001)
        it.clock.now = end

    @pytest.fixture
    def other(self, tmp_path: Path, rollouts: Rollouts) -> Iterator[OtherWriter]:
        rollouts.register(1)
        with other_writer(tmp_path / "rollout.db") as other:
            yield other

    def test_a_commit_that_shows_only_after_its_hint_is_seen_within_a_quarter_second(
        self, tmp_path: Path, other: OtherWriter
    ) -> None:
        with running(tmp_path, scan_seconds=1000, rescan_seconds=1000) as it:
            it.go()
            self.pass_time(it, 5.0)
            other.write()
            it.daemon.hint(source=True, spool=False)
            it.daemon.step()
            other.commit()
            self.pass_time(it, 0.25)
            assert environments(it.run) == [2]

    def test_a_hint_that_comes_to_nothing_asks_the_database_nothing(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rollouts.register(1)
        with running(tmp_path, scan_seconds=1000, rescan_seconds=1000) as it:
            it.go()
            self.pass_time(it, 5.0)
            statements, peeks = self.watched(it, monkeypatch)
            it.daemon.hint(source=True, spool=False)
            self.pass_time(it, 5.0)
            assert statements == []
            assert len(peeks) == 2

    def test_a_writer_that_does_not_commit_is_waited_for_a_quarter_second_only(
        self, tmp_path: Path, other: OtherWriter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running(tmp_path, scan_seconds=1000, rescan_seconds=1000) as it:
            it.go()
            self.pass_time(it, 5.0)
            statements, peeks = self.watched(it, monkeypatch)
            other.write()
            it.daemon.hint(source=True, spool=False)
            self.pass_time(it, 0.3)
            assert 10 < len(peeks) < 20
            peeks.clear()
            self.pass_time(it, 5.0)
            assert peeks == statements == []

    @staticmethod
    def watched(it: Running, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[int]]:
        """Collect what the database is asked from here on, and the numbers of commits seen."""
        source = it.daemon.looking.source
        assert isinstance(source, SqliteSource)
        assert source._database is not None
        assert source._database._connection is not None
        statements: list[str] = []
        source._database._connection.set_trace_callback(statements.append)
        commits, peeks = Database.commits, list[int]()

        def seen(database: Database) -> int | None:
            number = commits(database)
            assert number is not None
            peeks.append(number)
            return number

        monkeypatch.setattr(Database, "commits", seen)
        return statements, peeks

    def test_nobody_wakes_up_again_after_the_commit_that_was_hinted_at(
        self, tmp_path: Path, other: OtherWriter
    ) -> None:
        with running(tmp_path, scan_seconds=1000, rescan_seconds=1000) as it:
            it.go()
            self.pass_time(it, 5.0)
            other.write()
            it.daemon.hint(source=True, spool=False)
            it.clock.now += it.daemon.step()
            other.commit()
            it.daemon.step()
            assert environments(it.run) == [2]
            # Until status.json may be written again.
            assert it.daemon.step() > 0.5

    @contextmanager
    def beside_a_hundred_that_run(self, tmp_path: Path, rollouts: Rollouts) -> Iterator[Running]:
        """Yield a daemon with nothing to do. Each of them has its last row, and is not finished."""
        with rollouts.together():
            for environment in rollouts.register(100):
                rollouts.end(environment)
        with running(tmp_path, scan_seconds=1000, rescan_seconds=1000) as it:
            it.go()
            self.pass_time(it, 5.0)
            yield it

    def test_a_batch_of_the_likely_ones_puts_nobody_else_off(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        with self.beside_a_hundred_that_run(tmp_path, rollouts) as it:
            complete(rollouts, 1)
            with rollouts.together():
                rollouts.finish(3)
            it.daemon.hint(source=True, spool=False)
            it.daemon.step()
            assert environments(it.run) == [101]
            # The next commit's hint was used up by the first look, as above.
            complete(rollouts, 1)
            self.pass_time(it, 0.3)
            assert environments(it.run) == [101, 3, 102]

    def test_who_is_finished_along_with_rows_of_others_waits_two_seconds_at_most(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        with self.beside_a_hundred_that_run(tmp_path, rollouts) as it:
            rollouts.step(7)
            it.daemon.hint(source=True, spool=False)
            self.pass_time(it, 5.0)
            with rollouts.together():  # as no writer does it
                rollouts.step(7)
                rollouts.finish(3)
            it.daemon.hint(source=True, spool=False)
            self.pass_time(it, 1.9)
            assert environments(it.run) == []
            self.pass_time(it, 0.2)
            assert environments(it.run) == [3]

    def test_a_look_that_found_one_commit_does_not_use_up_the_hint_of_the_next(
        self, tmp_path: Path, rollouts: Rollouts, other: OtherWriter
    ) -> None:
        with running(tmp_path, scan_seconds=1000, rescan_seconds=1000) as it:
            it.go()
            self.pass_time(it, 5.0)
            complete(rollouts, 1)
            other.write()
            it.daemon.hint(source=True, spool=False)
            self.pass_time(it, 0.1)
            assert environments(it.run) == [2]
            other.commit()
            self.pass_time(it, 0.2)
            assert environments(it.run) == [2, 3]

    def test_a_look_without_a_hint_waits_for_what_is_being_written(
        self, tmp_path: Path, rollouts: Rollouts, other: OtherWriter
    ) -> None:
        with running(tmp_path, scan_seconds=10, rescan_seconds=1000) as it:
            it.go()
            self.pass_time(it, 25.0)
            complete(rollouts, 1)
            other.write()
            it.clock.now += 10.0
            it.daemon.step()
            assert environments(it.run) == [2]
            other.commit()
            self.pass_time(it, 0.3)
            assert environments(it.run) == [2, 3]

    def test_a_hint_is_no_reason_to_spin_while_batches_are_looked_for(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rollouts.register(1)
        with running(tmp_path) as it:
            it.go()
            monkeypatch.setattr(Inventory, "is_whole", False)
            complete(rollouts, 1)
            it.daemon.hint(source=True, spool=False)
            assert it.daemon.step() > 0.0
            monkeypatch.undo()
            it.go(2.0)
            assert environments(it.run) == [2]

    def test_whoever_has_nothing_to_do_wakes_once_a_scan(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        rollouts.register(1)
        with running(tmp_path, scan_seconds=2, rescan_seconds=1000) as it:
            it.go()
            self.pass_time(it, 9.7)
            complete(rollouts, 1)
            it.daemon.hint(source=True, spool=False)  # from here on looks are due at another time
            self.pass_time(it, 10.0)
            steps = 0
            end = it.clock.now + 100.0
            while it.clock.now < end:
                it.clock.now += max(it.daemon.step(), 0.0001)
                steps += 1
            assert 49 <= steps <= 55

    def test_a_commit_that_shows_while_a_batch_is_published_is_delivered_at_once(
        self,
        tmp_path: Path,
        rollouts: Rollouts,
        other: OtherWriter,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        with running(tmp_path, scan_seconds=1000, rescan_seconds=1000) as it:
            it.go()
            self.pass_time(it, 5.0)
            complete(rollouts, 1)
            other.write()
            rename = fs.rename_noreplace

            def meanwhile(old: str, new: str) -> None:
                other.commit()
                monkeypatch.undo()
                rename(old, new)

            monkeypatch.setattr(fs, "rename_noreplace", meanwhile)
            it.daemon.hint(source=True, spool=False)
            pause = it.daemon.step()
            assert environments(it.run) == [2]
            assert pause < 0.001
            it.clock.now += pause
            it.daemon.step()
            assert environments(it.run) == [2, 3]

    def test_a_commit_that_shows_while_it_is_looked_is_delivered_at_once(
        self,
        tmp_path: Path,
        rollouts: Rollouts,
        other: OtherWriter,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        with running(tmp_path, scan_seconds=1000, rescan_seconds=1000) as it:
            it.go()
            self.pass_time(it, 5.0)
            source = it.daemon.looking.source
            complete(rollouts, 1)
            other.write()
            look = source.look

            def and_then(*wanted: Any) -> Look:
                found = look(*wanted)
                other.commit()
                monkeypatch.undo()
                return found

            monkeypatch.setattr(source, "look", and_then)
            it.daemon.hint(source=True, spool=False)
            assert it.daemon.step() == 0.0
            assert environments(it.run) == [2]
            it.daemon.step()
            assert environments(it.run) == [2, 3]


class TestHeld:
    def test_reading_stops_at_max_pending_batches_and_goes_on_by_itself(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        complete(rollouts, 10)
        with running(tmp_path, batch_size=2, max_pending_batches=2) as it:
            it.go()
            assert len(tree(it.run)) == 2
            assert it.status.state == "held"
            assert "2 in pending/ reach max_pending_batches = 2" in it.reasons["backpressure"]
            mv(it.run, tree(it.run)[0], "acked")
            it.go()
            assert len(tree(it.run, "pending")) == 2
            assert "backpressure" in it.reasons
            for name in tree(it.run, "pending"):
                mv(it.run, name, "acked")
            it.go()
            assert environments(it.run, "acked", "pending") == list(range(1, 11))

    def test_reading_stops_at_max_pending_bytes(self, tmp_path: Path, rollouts: Rollouts) -> None:
        complete(rollouts, 10)
        with running(tmp_path, batch_size=1, max_pending_bytes=1500) as it:
            it.go()
            assert 0 < len(tree(it.run)) < 10
            assert "max_pending_bytes" in it.reasons["backpressure"]

    def test_reading_stops_when_the_disk_is_nearly_full(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        complete(rollouts, 1)
        free = [10]
        monkeypatch.setattr(fs, "free_bytes", lambda _path: free[0])
        with running(tmp_path, min_free_bytes=100) as it:
            it.go()
            assert tree(it.run) == []
            assert "disk-space" in it.reasons
            free[0] = 100
            it.go()
            assert environments(it.run) == [1]
            assert list(it.reasons) == ["source-empty"]

    def test_a_full_disk_leaves_no_partial_file_and_is_survived(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        complete(rollouts, 3)
        with running(tmp_path) as it:
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", _fail(errno.ENOSPC))
                it.go()
                assert tree(it.run) == []
                assert os.listdir(it.run.tmp) == []
                it.go(1.0)
                assert "no space left" in next(
                    c.reason.text for c in it.daemon.conditions._holding.values()
                )
            it.go(20.0)
            assert environments(it.run) == [1, 2, 3]
            assert [name[:17] for name in tree(it.run)] == ["pending/000000001"]
            assert list(it.reasons) == ["source-empty"]

    def test_a_disk_that_stays_full_is_said_once_and_tried_ever_more_rarely(
        self,
        tmp_path: Path,
        rollouts: Rollouts,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        complete(rollouts, 3)
        caplog.set_level("INFO")
        with running(tmp_path, linger_seconds=0.1) as it:
            monkeypatch.setattr(os, "write", _fail(errno.ENOSPC))
            for _ in range(20):
                it.go(1.0)
            monkeypatch.undo()
            it.go(20.0)
            assert environments(it.run) == [1, 2, 3]
        said = [r.message for r in caplog.records if "waiting" in r.message]
        assert said == ["waiting", "waiting over"]

    def test_an_unknown_state_after_a_failed_sync_ends_the_daemon(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        complete(rollouts, 1)
        it = start(tmp_path)
        sync_dir = fs.sync_dir

        def broken(path: str) -> None:
            if path == it.run.pending:
                error = OSError(errno.EIO, "broken")
                raise fs.failed("sync", path, error, state_unknown=True)
            sync_dir(path)

        monkeypatch.setattr(fs, "sync_dir", broken)
        with pytest.raises(SpoolWriteError) as caught:
            it.go()
        assert caught.value.state_unknown
        assert caught.value.exit_code == 74
        it.kill()
        monkeypatch.undo()
        with running(tmp_path) as again:
            again.go()
            assert environments(again.run) == [1]

    def test_a_batch_that_cannot_be_read_stops_delivery_with_the_remedy(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        complete(rollouts, 1)
        with running(tmp_path) as it:
            it.go()
        complete(rollouts, 1)
        read = fs.read

        def denied(path: str) -> bytes:
            if path.endswith(".jsonl"):
                raise fs.failed("read", path, OSError(errno.EACCES, "denied"))
            return read(path)

        monkeypatch.setattr(fs, "read", denied)
        with running(tmp_path) as it:
            it.go()
            assert len(tree(it.run)) == 1
            assert "cannot read" in it.reasons["unreadable"]
            monkeypatch.setattr(fs, "read", read)
            it.go(5.0)
            assert environments(it.run) == [1, 2]

    def test_the_daemon_stops_before_it_publishes_under_a_lost_lock(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        it = start(tmp_path)
        os.unlink(it.run.lock)
        complete(rollouts, 1)
        with pytest.raises(SpoolLocked):
            it.go()
        assert tree(it.run) == []
        it.kill()

    def test_24_a_daemon_that_lost_its_lock_stops_within_a_scan_and_touches_nothing(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        complete(rollouts, 1)
        it = start(tmp_path)
        it.go()
        os.unlink(it.run.lock)
        other = setup.lock_run(it.run)
        assert other is not None
        before = sorted(os.listdir(it.run.house)), Path(it.run.status_json).read_bytes()
        it.clock.now += it.daemon.settings.scan_seconds
        with pytest.raises(SpoolLocked, match="another daemon may have this run directory"):
            it.daemon.step()
        it.daemon.stop()
        it.kill()
        assert before == (sorted(os.listdir(it.run.house)), Path(it.run.status_json).read_bytes())
        other.release()

    def test_a_missing_folder_is_said_and_nothing_crashes(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        complete(rollouts, 1)
        with running(tmp_path) as it:
            it.go()
            shutil.rmtree(it.run.tmp)
            complete(rollouts, 1)
            it.go()
            held = it.daemon.conditions.reasons()
            assert held[0].code == "write-failed"
            assert "restart spoold" in held[0].remedy
            assert environments(it.run) == [1]
        with running(tmp_path) as again:
            again.go()
            assert environments(again.run) == [1, 2]


class TestNotes:
    def test_a_bad_row_becomes_a_note_once_and_the_rest_flows(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(3)
        rollouts.complete(ids[0])
        bad = rollouts.complete(ids[1], messages="[{broken")
        rollouts.complete(ids[2])
        with running(tmp_path) as it:
            it.go()
            assert environments(it.run) == [ids[0], ids[2]]
            note = json.loads(Path(it.run.rejected, f"env-{ids[1]}.bad-json.json").read_text())
            assert note["environment"] == ids[1]
            assert note["rows"] == [bad]
            assert note["excerpt"].startswith("[{broken")
            assert it.status.rejected.notes == 1
            latest = it.status.rejected.latest
            assert latest is not None
            assert (latest.environment, latest.reason) == (ids[1], "bad-json")

    def test_removing_a_note_retries_its_environment(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(1)
        bad = rollouts.complete(ids[0], messages="{}")
        with running(tmp_path) as it:
            it.go()
            (note,) = tree(it.run)
            rollouts.update_step(bad, messages='[{"role": "user", "content": "x"}]')
            it.go(100.0)
            assert tree(it.run) == [note]
            os.unlink(f"{it.run.root}/{note}")
            it.settle()
            assert environments(it.run) == ids

    def test_a_hundred_bad_rows_in_a_row_stop_reading_until_the_next_start(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(130, group="")
        with rollouts.together():
            for one in ids[:120]:
                rollouts.complete(one, messages="{}")
            for one in ids[120:]:
                rollouts.complete(one)
        with running(tmp_path, batch_size=10) as it:
            it.go()
            assert len(tree(it.run)) == 100
            assert "bad-rows" in it.reasons
        with running(tmp_path, batch_size=10) as it:
            it.go()
            assert environments(it.run, "pending") == ids[120:]
            assert len(tree(it.run, "rejected")) == 120

    def test_a_missing_row_gets_a_note_and_is_delivered_when_it_turns_up(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(1)
        rollouts.finish(ids[0])
        with running(tmp_path, missing_row_seconds=600, rescan_seconds=60) as it:
            it.go()
            it.go(590.0)
            assert tree(it.run) == []
            assert "missing-rows" in it.reasons
            it.go(10.0)
            assert tree(it.run) == [f"rejected/env-{ids[0]}.missing-row.json"]
            it.go(1000.0)
            rollouts.end(ids[0])
            it.go()
            assert environments(it.run) == ids
            assert tree(it.run, "rejected") == []

    def test_a_missing_row_note_of_a_daemon_killed_after_its_publish_goes_at_the_next_start(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        complete(rollouts, 1)
        with running(tmp_path) as it:
            it.go()
        note = Path(it.run.rejected, "env-1.missing-row.json")
        note.write_text("{}")
        with running(tmp_path) as it:
            it.go()
            assert not note.exists()
            assert environments(it.run) == [1]

    def test_null_rewards_are_rejected_once_or_waited_for_as_the_setting_says(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(1)
        pk = rollouts.complete(ids[0], reward=None)
        with running(tmp_path, run_dir=tmp_path / "fallback") as it:
            it.go()
            assert environments(it.run) == ids
        with running(tmp_path, run_dir=tmp_path / "reject", null_reward="reject") as it:
            it.go()
            assert tree(it.run) == [f"rejected/env-{ids[0]}.null-reward.json"]
        with running(tmp_path, run_dir=tmp_path / "wait", null_reward="wait") as it:
            it.go(100.0)
            assert tree(it.run) == []
            rollouts.update_step(pk, reward=0.75)
            it.go(100.0)
            assert environments(it.run) == ids


class TestGroups:
    def test_only_whole_groups_are_delivered(self, tmp_path: Path, rollouts: Rollouts) -> None:
        first = rollouts.register(3, group="a")
        second = rollouts.register(3, group="b")
        for one in (*first[:2], *second):
            rollouts.complete(one)
        with running(tmp_path, group_size=3) as it:
            it.go()
            assert environments(it.run) == second
            status = it.status
            assert [(g.group, g.have, g.want) for g in status.source.groups] == [("a", 2, 3)]
            rollouts.complete(first[2])
            it.go()
            assert environments(it.run) == [*second, *first]

    def test_a_late_member_becomes_a_note_also_after_a_restart(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(5, group="a")
        for one in ids[:3]:
            rollouts.complete(one)
        with running(tmp_path, group_size=3) as it:
            it.go()
            rollouts.complete(ids[3])
            it.go()
            assert tree(it.run, "rejected") == [f"rejected/env-{ids[3]}.late.json"]
        rollouts.complete(ids[4])
        with running(tmp_path, group_size=3) as it:
            it.go()
            assert tree(it.run, "rejected") == [
                f"rejected/env-{ids[3]}.late.json",
                f"rejected/env-{ids[4]}.late.json",
            ]
            assert environments(it.run, "pending") == ids[:3]

    @pytest.mark.parametrize("partial", ["wait", "deliver", "reject"])
    def test_a_group_with_a_stuck_member_blocks_nobody_and_the_policy_decides(
        self, tmp_path: Path, rollouts: Rollouts, partial: str
    ) -> None:
        stuck = rollouts.register(3, group="a")
        whole = rollouts.register(3, group="b")
        for one in (*stuck[:2], *whole):
            rollouts.complete(one)
        with running(
            tmp_path, group_size=3, partial_groups=partial, group_timeout_seconds=100
        ) as it:
            it.go()
            assert environments(it.run, "pending") == whole
            it.go(101.0)
            rejected = [f"rejected/env-{one}.partial-group.json" for one in stuck[:2]]
            pending = environments(it.run, "pending")
            assert pending == (whole + stuck[:2] if partial == "deliver" else whole)
            assert tree(it.run, "rejected") == (rejected if partial == "reject" else [])
            rollouts.complete(stuck[2])
            it.go()
            pending = environments(it.run, "pending")
            assert (stuck[2] in pending) == (partial == "wait")


class TestIdentity:
    def test_a_used_run_directory_refuses_another_job(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        complete(rollouts, 1)
        with running(tmp_path) as it:
            it.go()
            before = tree(it.run)
        rollouts.register(1, job="job-2")
        other = start(tmp_path, job="job-2")
        with pytest.raises(ConfigError, match="belongs to job 'job-1', not to 'job-2'"):
            other.go()
        other.kill()
        assert tree(other.run) == before

    def test_another_url_is_recorded_and_logged(
        self, tmp_path: Path, rollouts: Rollouts, caplog: pytest.LogCaptureFixture
    ) -> None:
        complete(rollouts, 1)
        with running(tmp_path) as it:
            it.go()
        rollouts.close()
        shutil.move(tmp_path / "rollout.db", tmp_path / "moved.db")
        with running(tmp_path, db=tmp_path / "moved.db") as it:
            it.go()
            assert len(tree(it.run)) == 1
            source = json.loads(Path(it.run.source_json).read_text())
            assert source["url"].endswith("/moved.db")
        assert "source url changed" in caplog.messages

    @pytest.mark.parametrize("live", [True, False])
    def test_a_replaced_database_retires_the_spool_and_delivery_starts_anew(
        self, tmp_path: Path, rollouts: Rollouts, live: bool
    ) -> None:
        complete(rollouts, 3)
        it = start(tmp_path, batch_size=1)
        it.go()
        mv(it.run, tree(it.run)[0], "acked")
        it.go()
        old = tree(it.run)
        unknown = [Path(it.run.root, name) for name in ("pending/mine.txt", ".spoold/ledger/odd")]
        for path in unknown:
            path.write_text("mine")
        if not live:
            it.kill()
        self._replace(tmp_path, rollouts)
        if not live:
            it = start(tmp_path, batch_size=1)
        it.go(5.0)
        assert environments(it.run, "pending") == [1, 2]
        (retired,) = os.listdir(it.run.retired)
        assert retired.endswith("-job-1")
        there = [p for p in tree(it.run, f"retired/{retired}") if "/.spoold/" not in p]
        assert there == [f"retired/{retired}/{name}" for name in old]
        assert os.listdir(it.run.ledger) == ["odd"]
        assert [path.read_text() for path in unknown] == ["mine", "mine"]
        assert os.listdir(f"{it.run.retired}/{retired}/.spoold/ledger")
        it.kill()

    def test_a_replaced_database_is_refused_when_the_setting_says_so(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        complete(rollouts, 3)
        with running(tmp_path) as it:
            it.go()
            old = tree(it.run)
        self._replace(tmp_path, rollouts)
        again = start(tmp_path, on_replaced="refuse")
        with pytest.raises(SourceReplaced) as caught:
            again.go()
        assert caught.value.exit_code == 78
        again.kill()
        assert tree(again.run) == old

    def test_a_half_done_retirement_is_finished_at_the_next_start(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        complete(rollouts, 6)
        it = start(tmp_path, batch_size=1)
        it.go()
        for name in tree(it.run)[:3]:
            mv(it.run, name, "acked")
        it.go()
        it.kill()
        old = tree(it.run)
        self._replace(tmp_path, rollouts)
        rename, left = fs.rename_noreplace, [4]

        def cut_off(source: str, target: str) -> None:
            if "/retired/" in target:
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt
            rename(source, target)

        monkeypatch.setattr(fs, "rename_noreplace", cut_off)
        it = start(tmp_path, batch_size=1)
        with pytest.raises(KeyboardInterrupt):
            it.go()
        it.kill()
        monkeypatch.undo()
        with running(tmp_path, batch_size=1) as again:
            again.go()
            assert environments(again.run) == [1, 2]
            (retired,) = os.listdir(again.run.retired)
            there = [p for p in tree(again.run, f"retired/{retired}") if "/.spoold/" not in p]
            assert there == [f"retired/{retired}/{name}" for name in old]

    def test_a_job_that_was_deleted_and_written_anew_is_delivered_beside_the_old(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        complete(rollouts, 2)
        with running(tmp_path) as it:
            it.go()
            rollouts.db.execute("DELETE FROM session_steps")
            rollouts.db.execute("DELETE FROM job_environments")
            complete(rollouts, 2)
            it.go(100.0)
            assert environments(it.run) == [1, 2, 3, 4]
            assert not os.path.exists(it.run.retired)

    @staticmethod
    def _replace(tmp_path: Path, rollouts: Rollouts) -> None:
        rollouts.close()
        for suffix in ("", "-wal", "-shm"):
            (tmp_path / f"rollout.db{suffix}").unlink(missing_ok=True)
        fresh = make_rollouts(tmp_path / "rollout.db")
        complete(fresh, 2)
        rollouts.db = fresh.db


class TestWaiting:
    def test_a_database_that_is_not_there_yet_is_waited_for(self, tmp_path: Path) -> None:
        with running(tmp_path, job="job-1") as it:
            it.go()
            assert "rollout.db" in it.reasons["source-unavailable"]
            made = make_rollouts(tmp_path / "rollout.db")
            it.go(20.0)
            assert "no job yet" in it.reasons["source-unavailable"]
            complete(made, 1)
            it.go(20.0)
            assert environments(it.run) == [1]
            assert list(it.reasons) == ["source-empty"]
            made.close()

    def test_status_says_how_many_environments_run(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        for one in rollouts.register(3):
            rollouts.step(one)
        with running(tmp_path) as it:
            it.go()
            assert it.status.source.running == 3
            assert "not complete yet: 3 environments" in it.reasons["waiting-for-environments"]
            assert it.status.state == "waiting"


class TestConsumersThatDied:
    def claimed(self, tmp_path: Path, rollouts: Rollouts, **settings: object) -> Running:
        complete(rollouts, 2)
        it = start(tmp_path, requeue_seconds=60, batch_size=1, **settings)
        it.go()
        mv(it.run, tree(it.run)[0], "inflight/trainer-0")
        it.go()
        return it

    def test_what_they_hold_is_pending_again_after_requeue_seconds(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        it = self.claimed(tmp_path, rollouts)
        it.go(50.0)
        assert len(tree(it.run, "inflight")) == 1
        it.go(15.0)
        assert [n for n in tree(it.run, "inflight") if n.endswith(".jsonl")] == []
        first, second = tree(it.run, "pending")
        assert first.endswith(".try02.jsonl")
        assert not second.endswith(".try02.jsonl")
        assert sorted(environments(it.run)) == [1, 2]
        it.kill()

    def test_a_consumer_that_lives_keeps_what_it_holds(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        it = self.claimed(tmp_path, rollouts)
        lock = fs.Lock(it.run.consumer_lock("trainer-0"))
        assert lock.acquire()
        it.go(1000.0)
        assert len([n for n in tree(it.run, "inflight") if n.endswith(".jsonl")]) == 1
        lock.release()
        it.go(50.0)
        it.go(100.0)
        assert len(tree(it.run, "pending")) == 2
        it.kill()

    def test_a_folder_that_cannot_be_locked_stops_no_other(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        it = self.claimed(tmp_path, rollouts)
        mv(it.run, tree(it.run, "pending")[0], "inflight/aaa")
        held = fs.lock_is_held

        def denied(path: str) -> bool | None:
            if "/aaa/" in path:
                raise fs.failed("open", path, OSError(errno.EACCES, "denied"))
            return held(path)

        monkeypatch.setattr(fs, "lock_is_held", denied)
        it.go()
        it.go(100.0)
        assert len(tree(it.run, "pending")) == 1
        assert "aaa" in it.reasons["requeue-failed"]
        monkeypatch.setattr(fs, "lock_is_held", held)
        it.go()
        it.go(100.0)
        assert len(tree(it.run, "pending")) == 2
        assert "requeue-failed" not in it.reasons
        it.kill()

    def test_past_max_attempts_a_batch_is_rejected(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        it = self.claimed(tmp_path, rollouts, max_attempts=2)
        it.go(100.0)
        (second_try,) = [n for n in tree(it.run, "pending") if n.endswith(".try02.jsonl")]
        mv(it.run, second_try, "inflight/trainer-0")
        it.go()
        it.go(100.0)
        assert [n for n in tree(it.run) if "try02" in n] == [
            f"rejected/attempts/{os.path.basename(second_try)}"
        ]
        it.kill()

    def test_what_was_claimed_by_hand_is_left_alone(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        complete(rollouts, 1)
        with running(tmp_path, requeue_seconds=1) as it:
            it.go()
            mv(it.run, tree(it.run)[0], "inflight")
            it.go(1000.0)
            assert len(tree(it.run, "inflight")) == 1


class TestOnce:
    def test_publishes_all_and_settles_the_ledger(self, tmp_path: Path, rollouts: Rollouts) -> None:
        complete(rollouts, 70)
        it = start(tmp_path, linger_seconds=100)
        it.daemon.once()
        assert [name.split("-")[1] for name in tree(it.run)] == ["n64", "n6"]
        mv(it.run, tree(it.run)[0], "acked")
        it.daemon.stop()
        it.kill()
        again = start(tmp_path)
        again.daemon.once()
        assert len(os.listdir(again.run.ledger)) == 1
        assert len(tree(again.run)) == 2
        again.kill()

    def test_publishes_also_what_did_not_fit_into_a_batch(
        self, tmp_path: Path, rollouts: Rollouts
    ) -> None:
        ids = rollouts.register(7, group="")
        for one in ids:
            rollouts.complete(one, response="x" * 900)
        it = start(tmp_path, linger_seconds=100, batch_bytes=3000)
        it.daemon.once()
        assert environments(it.run) == ids
        assert len(tree(it.run)) > 2
        it.kill()

    def test_says_that_backpressure_stopped_it(self, tmp_path: Path, rollouts: Rollouts) -> None:
        complete(rollouts, 5)
        it = start(tmp_path, batch_size=1, max_pending_batches=3)
        with pytest.raises(SpoolHeld) as caught:
            it.daemon.once()
        assert caught.value.exit_code == 75
        assert len(tree(it.run)) == 3
        it.kill()


def _fail(code: int) -> object:
    def failing(*_args: object) -> int:
        raise OSError(code, os.strerror(code))

    return failing
