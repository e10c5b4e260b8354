"""What the daemon makes of a run directory: each test shows the files before and after."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from spoold import fs
from spoold.errors import SpoolError, SpoolWriteError
from spoold.layout import BatchName, Place, RunDir, State
from spoold.ledger import Entry, parse_merged
from spoold.spool.inventory import Inventory
from spoold.spool.publish import Numbers, publish
from tests.support.batches import batch, empty_run, env_id_of, put_batch, tree

PENDING = Place(State.PENDING)
INFLIGHT = Place(State.INFLIGHT)
TRAINER = Place(State.INFLIGHT, "trainer-0")
ACKED = Place(State.ACKED)
STEP = Place(State.ACKED, "step-000000007")
OOM = Place(State.REJECTED, "oom")
DUPLICATE = Place(State.REJECTED, "duplicate")
CORRUPT = Place(State.REJECTED, "corrupt")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return empty_run(tmp_path / "run")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def later(self, seconds: float = 0.06) -> float:
        self.now += seconds
        return self.now


def loaded(run: RunDir) -> Inventory:
    inventory = Inventory(run)
    inventory.load(now=0.0)
    return inventory


def settle(inventory: Inventory, clock: Clock | None = None) -> None:
    """As many passes as it takes for a missing file to be believed missing."""
    clock = clock or Clock()
    for _ in range(4):
        inventory.refresh(now=clock.later())


def mv(run: RunDir, name: BatchName, source: Place, target: Place) -> None:
    Path(run.of(target)).mkdir(exist_ok=True)
    os.rename(run.file(source, name.file_name), run.file(target, name.file_name))


def entries(run: RunDir) -> list[str]:
    return sorted(os.listdir(run.ledger))


@pytest.mark.parametrize("place", [PENDING, INFLIGHT, TRAINER, ACKED, STEP, OOM])
def test_an_environment_in_a_batch_file_is_delivered(run: RunDir, place: Place) -> None:
    put_batch(run, 1, [1, 2], place)
    assert set(loaded(run).skip) == {1, 2}


@pytest.mark.parametrize("place", [DUPLICATE, CORRUPT])
def test_what_lies_in_duplicate_or_corrupt_counts_for_nothing(run: RunDir, place: Place) -> None:
    name = put_batch(run, 1, [1, 2], place)
    inventory = loaded(run)
    assert set(inventory.skip) == set()
    assert tree(run) == [f"{place.path}/{name.file_name}"]


def test_a_batch_in_acked_gets_its_ledger_entry(run: RunDir) -> None:
    name = put_batch(run, 1, [4, 2], STEP)
    loaded(run)
    assert entries(run) == [name.id]
    entry = json.loads(Path(run.ledger, name.id).read_bytes())
    assert entry == {"environments": [2, 4], "env_id": env_id_of(4)}


def test_an_acked_batch_that_is_removed_is_gone_for_good(run: RunDir) -> None:
    name = put_batch(run, 1, [1], ACKED)
    inventory = loaded(run)
    os.unlink(run.file(ACKED, name.file_name))
    settle(inventory)
    assert set(inventory.skip) == {1}
    assert not inventory.undelivered
    assert set(loaded(run).skip) == {1}


@pytest.mark.parametrize("place", [PENDING, TRAINER, OOM])
def test_a_batch_without_an_entry_that_is_removed_is_delivered_anew(
    run: RunDir, place: Place
) -> None:
    name = put_batch(run, 1, [1, 2], place)
    put_batch(run, 2, [3], PENDING)
    inventory = loaded(run)
    os.unlink(run.file(place, name.file_name))
    settle(inventory)
    assert set(inventory.skip) == {3}
    assert inventory.undelivered
    assert inventory.pending_batches == 1


def test_one_pass_that_misses_a_file_does_not_make_it_missing(run: RunDir) -> None:
    name = put_batch(run, 1, [1], PENDING)
    inventory, clock = loaded(run), Clock()
    aside = f"{run.root}/elsewhere"
    os.rename(run.file(PENDING, name.file_name), aside)
    inventory.refresh(now=clock.later())
    inventory.refresh(now=clock.later(0.01))
    assert set(inventory.skip) == {1}
    os.rename(aside, run.file(ACKED, name.file_name))
    settle(inventory, clock)
    assert set(inventory.skip) == {1}
    assert entries(run) == [name.id]


def test_a_batch_that_leaves_acked_loses_its_entry_and_gets_it_back(run: RunDir) -> None:
    name = put_batch(run, 1, [1], ACKED)
    inventory, clock = loaded(run), Clock()
    mv(run, name, ACKED, PENDING)
    settle(inventory, clock)
    assert entries(run) == []
    assert set(inventory.skip) == {1}
    mv(run, name, PENDING, STEP)
    settle(inventory, clock)
    assert entries(run) == [name.id]


def test_a_batch_that_left_acked_and_is_then_removed_is_delivered_anew(run: RunDir) -> None:
    name = put_batch(run, 1, [1], ACKED)
    inventory, clock = loaded(run), Clock()
    mv(run, name, ACKED, PENDING)
    settle(inventory, clock)
    os.unlink(run.file(PENDING, name.file_name))
    settle(inventory, clock)
    assert set(inventory.skip) == set()


def test_moves_while_the_daemon_was_down_are_taken_in_at_start(run: RunDir) -> None:
    acked = put_batch(run, 1, [1], ACKED)
    pending = put_batch(run, 2, [2], PENDING)
    loaded(run)
    mv(run, acked, ACKED, PENDING)
    mv(run, pending, PENDING, STEP)
    inventory = loaded(run)
    assert entries(run) == [pending.id]
    assert set(inventory.skip) == {1, 2}


class TestTwoFiles:
    @pytest.mark.parametrize(
        ("stays", "goes"),
        [(ACKED, TRAINER), (TRAINER, OOM), (OOM, PENDING), (INFLIGHT, PENDING), (STEP, PENDING)],
    )
    def test_the_one_that_is_further_on_stays(self, run: RunDir, stays: Place, goes: Place) -> None:
        name = put_batch(run, 1, [1], stays)
        put_batch(run, 1, [1], goes)
        inventory = loaded(run)
        assert tree(run) == sorted(
            [f"{stays.path}/{name.file_name}", f"{DUPLICATE.path}/{name.file_name}"]
        )
        assert set(inventory.skip) == {1}

    def test_in_one_state_the_higher_try_stays(self, run: RunDir) -> None:
        first = put_batch(run, 1, [1], PENDING)
        second = put_batch(run, 1, [1], PENDING, attempt=2)
        loaded(run)
        assert tree(run) == sorted(
            [f"pending/{second.file_name}", f"{DUPLICATE.path}/{first.file_name}"]
        )

    def test_a_copy_made_while_the_daemon_runs_is_set_aside(self, run: RunDir) -> None:
        name = put_batch(run, 1, [1], PENDING)
        inventory = loaded(run)
        mv(run, name, PENDING, ACKED)
        shutil.copy(run.file(ACKED, name.file_name), run.file(PENDING, name.file_name))
        settle(inventory)
        assert tree(run) == [f"acked/{name.file_name}", f"{DUPLICATE.path}/{name.file_name}"]
        assert entries(run) == [name.id]

    @pytest.mark.parametrize("restarted", [True, False])
    def test_of_two_in_acked_one_stays(self, run: RunDir, restarted: bool) -> None:
        name = put_batch(run, 1, [1], STEP)
        inventory = loaded(run)
        shutil.copy(run.file(STEP, name.file_name), run.file(ACKED, name.file_name))
        if restarted:
            inventory = loaded(run)
        settle(inventory)
        assert len(tree(run, "acked")) == 1
        assert tree(run, "rejected") == [f"{DUPLICATE.path}/{name.file_name}"]
        assert entries(run) == [name.id]

    def test_a_copy_of_an_acked_batch_in_pending_is_set_aside_after_a_restart(
        self, run: RunDir
    ) -> None:
        name = put_batch(run, 1, [1], STEP)
        loaded(run)
        put_batch(run, 1, [1], PENDING)
        loaded(run)
        assert tree(run) == sorted(
            [f"{STEP.path}/{name.file_name}", f"{DUPLICATE.path}/{name.file_name}"]
        )
        assert entries(run) == [name.id]

    def test_a_copy_replaces_an_older_copy_in_duplicate(self, run: RunDir) -> None:
        name = put_batch(run, 1, [1], ACKED)
        put_batch(run, 1, [1], DUPLICATE)
        put_batch(run, 1, [1], PENDING)
        loaded(run)
        assert tree(run) == [f"acked/{name.file_name}", f"{DUPLICATE.path}/{name.file_name}"]


class TestDamage:
    @pytest.mark.parametrize("place", [PENDING, TRAINER, STEP])
    @pytest.mark.parametrize("damage", ["empty", "truncated", "nul"])
    def test_a_damaged_batch_is_set_aside_and_its_environments_come_anew(
        self, run: RunDir, damage: str, place: Place
    ) -> None:
        good = put_batch(run, 1, [1], PENDING)
        bad = put_batch(run, 2, [2, 3], place)
        path = Path(run.file(place, bad.file_name))
        data = path.read_bytes()
        path.write_bytes({"empty": b"", "truncated": data[:-9], "nul": b"\0" * len(data)}[damage])
        inventory = loaded(run)
        assert tree(run) == [f"pending/{good.file_name}", f"rejected/corrupt/{bad.file_name}"]
        assert set(inventory.skip) == {1}
        assert entries(run) == []

    def test_environments_of_a_damaged_batch_that_the_ledger_has_stay_delivered(
        self, run: RunDir
    ) -> None:
        name = put_batch(run, 1, [1], ACKED)
        loaded(run)
        mv(run, name, ACKED, PENDING)
        Path(run.file(PENDING, name.file_name)).write_bytes(b"")
        assert set(loaded(run).skip) == {1}
        assert tree(run) == [f"rejected/corrupt/{name.file_name}"]

    def test_one_bad_name_among_a_hundred_is_reported_and_left_alone(
        self, run: RunDir, caplog: pytest.LogCaptureFixture
    ) -> None:
        for seq in range(1, 101):
            put_batch(run, seq, [seq])
        odd = os.fsencode(run.pending) + b"/\xff\xfe.jsonl"
        with open(odd, "wb"):
            pass
        Path(run.acked, "notes.txt").write_text("mine")
        Path(run.pending, batch(200, [200])[0].file_name).mkdir()
        Path(run.pending, batch(201, [201])[0].file_name).symlink_to("/etc/passwd")
        with caplog.at_level(logging.WARNING):
            inventory = loaded(run)
        assert inventory.pending_batches == 100
        assert len(inventory.skip) == 100
        assert len(inventory.shelves.unknown()) >= 3
        told = [r.fields["file"] for r in caplog.records if r.message == "unknown file"]
        assert "pending/\\xff\\xfe.jsonl" in told
        assert "acked/notes.txt" in told
        assert Path(run.acked, "notes.txt").read_text() == "mine"

    def test_thousands_of_unknown_files_are_counted_and_a_few_named(
        self, run: RunDir, caplog: pytest.LogCaptureFixture
    ) -> None:
        put_batch(run, 1, [1])
        for number in range(2000):
            Path(run.pending, f"core.{number}").touch()
        inventory = loaded(run)
        settle(inventory)
        assert set(inventory.skip) == {1}
        told = [r for r in caplog.records if r.message == "unknown file"]
        assert len(told) == 20
        (rest,) = (r.fields for r in caplog.records if r.message == "more unknown files")
        assert rest["files"] == 1980

    def test_a_batch_that_cannot_be_read_never_counts_as_empty(
        self, run: RunDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = put_batch(run, 1, [1])
        read = fs.read

        def denied(path: str) -> bytes:
            if path.endswith(name.file_name):
                raise fs.failed("read", path, OSError(errno.EACCES, "denied"))
            return read(path)

        monkeypatch.setattr(fs, "read", denied)
        inventory = loaded(run)
        assert [error.errno for error in inventory.unreadable] == [errno.EACCES]
        monkeypatch.setattr(fs, "read", read)
        settle(inventory)
        assert inventory.unreadable == []
        assert set(inventory.skip) == {1}

    def test_a_folder_that_cannot_be_listed_never_counts_as_empty(
        self, run: RunDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put_batch(run, 1, [1], STEP)
        inventory = loaded(run)
        scan = fs.scan

        def denied(path: str) -> fs.Listing:
            if path.endswith(STEP.folder):
                raise fs.failed("list", path, OSError(errno.EACCES, "denied"))
            return scan(path)

        monkeypatch.setattr(fs, "scan", denied)
        os.utime(run.of(STEP))
        settle(inventory)
        assert inventory.unreadable
        assert set(inventory.skip) == {1}

    def test_a_batch_in_a_folder_that_nobody_may_list_is_not_missing(
        self, run: RunDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = put_batch(run, 1, [1])
        inventory, clock = loaded(run), Clock()
        mv(run, name, PENDING, STEP)
        scan = fs.scan

        def denied(path: str) -> fs.Listing:
            if path.endswith(STEP.folder):
                raise fs.failed("list", path, OSError(errno.EACCES, "denied"))
            return scan(path)

        monkeypatch.setattr(fs, "scan", denied)
        for _ in range(20):
            inventory.refresh(now=clock.later(1.0))
        assert set(inventory.skip) == {1}
        assert not inventory.undelivered
        monkeypatch.setattr(fs, "scan", scan)
        settle(inventory, clock)
        assert entries(run) == [name.id]

    def test_a_torn_ledger_entry_is_written_anew_from_its_batch(self, run: RunDir) -> None:
        name = put_batch(run, 1, [1], ACKED)
        loaded(run)
        Path(run.ledger, name.id).write_bytes(b"\0\0\0")
        assert set(loaded(run).skip) == {1}
        assert json.loads(Path(run.ledger, name.id).read_bytes())["environments"] == [1]

    def test_a_torn_ledger_entry_without_a_batch_stops_the_start(self, run: RunDir) -> None:
        name = put_batch(run, 1, [1], ACKED)
        loaded(run)
        os.unlink(run.file(ACKED, name.file_name))
        Path(run.ledger, name.id).write_bytes(b"")
        with pytest.raises(SpoolError, match=r"cannot be read.*restore it"):
            loaded(run)


class TestNotes:
    def test_an_environment_with_a_note_is_set_aside(self, run: RunDir) -> None:
        Path(run.rejected, "env-5.bad-json.json").write_text("{}")
        assert set(loaded(run).skip) == {5}

    def test_removing_a_note_retries_its_environment(self, run: RunDir) -> None:
        note = Path(run.rejected, "env-5.bad-json.json")
        note.write_text("{}")
        inventory = loaded(run)
        note.unlink()
        settle(inventory)
        assert set(inventory.skip) == set()
        assert inventory.undelivered

    def test_a_missing_row_is_not_set_aside(self, run: RunDir) -> None:
        Path(run.rejected, "env-5.missing-row.json").write_text("{}")
        inventory = loaded(run)
        assert set(inventory.skip) == set()
        assert inventory.missing_row_notes == {5: "env-5.missing-row.json"}


class TestMerge:
    def test_entries_whose_batch_is_gone_become_one_file(self, run: RunDir) -> None:
        names = [put_batch(run, seq, [seq, seq + 100], ACKED) for seq in range(1, 11)]
        inventory = loaded(run)
        for name in names[:9]:
            os.unlink(run.file(ACKED, name.file_name))
        settle(inventory)
        assert inventory.merge(least=10) == 0
        assert inventory.merge(least=9) == 9
        assert entries(run) == sorted([names[9].id, "merged-1"])
        merged = parse_merged(Path(run.ledger, "merged-1").read_bytes())
        assert len(merged.environments) == 18
        again = loaded(run)
        assert set(again.skip) == {n for seq in range(1, 11) for n in (seq, seq + 100)}
        assert again.highest_environment == 110

    def test_a_second_merge_takes_the_first_in(self, run: RunDir) -> None:
        for seq in (1, 2):
            name = put_batch(run, seq, [seq], ACKED)
            inventory = loaded(run)
            os.unlink(run.file(ACKED, name.file_name))
            settle(inventory)
            assert inventory.merge(least=1) == 1
        assert entries(run) == ["merged-2"]
        assert set(loaded(run).skip) == {1, 2}

    def test_a_batch_that_comes_back_after_its_entry_was_merged_stays_delivered(
        self, run: RunDir
    ) -> None:
        name = put_batch(run, 1, [1], ACKED)
        inventory, clock = loaded(run), Clock()
        os.unlink(run.file(ACKED, name.file_name))
        settle(inventory, clock)
        inventory.merge(least=1)
        put_batch(run, 1, [1], PENDING)
        settle(inventory, clock)
        os.unlink(run.file(PENDING, name.file_name))
        settle(inventory, clock)
        assert set(inventory.skip) == {1}

    def test_an_entry_removed_by_hand_before_the_merge_is_delivered_anew(self, run: RunDir) -> None:
        names = [put_batch(run, seq, [seq], ACKED) for seq in (1, 2)]
        inventory = loaded(run)
        for name in names:
            os.unlink(run.file(ACKED, name.file_name))
        settle(inventory)
        os.unlink(f"{run.ledger}/{names[0].id}")
        inventory.merge(least=1)
        assert set(inventory.skip) == {2}
        assert inventory.undelivered

    def test_an_entry_torn_before_the_merge_ends_the_daemon_with_the_remedy(
        self, run: RunDir
    ) -> None:
        name = put_batch(run, 1, [1], ACKED)
        inventory = loaded(run)
        os.unlink(run.file(ACKED, name.file_name))
        settle(inventory)
        Path(run.ledger, name.id).write_bytes(b"")
        with pytest.raises(SpoolError, match=r"cannot be read.*or remove it"):
            inventory.merge(least=1)


class TestNumbers:
    def test_numbers_are_reserved_sixty_four_at_a_time_and_given_back(self, run: RunDir) -> None:
        numbers = Numbers(run)
        numbers.load(0)
        assert [numbers.next() for _ in range(65)] == list(range(1, 66))
        assert self.seq(run) == ["seq-000000128"]
        numbers.give_back()
        assert self.seq(run) == ["seq-000000065"]

    def test_after_a_crash_numbers_go_on_behind_the_reserved_ones(self, run: RunDir) -> None:
        numbers = Numbers(run)
        numbers.load(0)
        numbers.next()
        again = Numbers(run)
        again.load(1)
        assert again.next() == 65

    def test_a_lost_seq_file_is_made_up_for_from_every_name_that_is_left(self, run: RunDir) -> None:
        put_batch(run, 7, [7], CORRUPT)
        name = put_batch(run, 9, [9], ACKED)
        loaded(run)
        os.unlink(run.file(ACKED, name.file_name))
        retired = Path(run.retired, "20261129T000000Z-job/acked")
        retired.mkdir(parents=True)
        (retired / batch(11, [11])[0].file_name).write_bytes(b"")
        numbers = Numbers(run)
        numbers.load(loaded(run).highest_seq)
        assert numbers.next() == 12

    def test_of_several_seq_files_the_highest_counts(self, run: RunDir) -> None:
        for seq in (3, 70):
            Path(run.house, f"seq-{seq:09d}").touch()
        numbers = Numbers(run)
        numbers.load(0)
        assert self.seq(run) == ["seq-000000070"]
        assert numbers.next() == 71

    @staticmethod
    def seq(run: RunDir) -> list[str]:
        return [name for name in os.listdir(run.house) if name.startswith("seq-")]


class TestPublish:
    def test_a_batch_is_visible_whole_or_not_at_all(
        self, run: RunDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lock = fs.Lock(run.lock)
        assert lock.acquire()
        name, data = batch(1, [1])

        def broken(fd: int) -> None:
            raise OSError(errno.EIO, "broken")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", broken)
            with pytest.raises(SpoolWriteError) as caught:
                publish(run, lock, name, data)
        assert not caught.value.state_unknown
        assert tree(run) == []
        assert os.listdir(run.tmp) == []
        publish(run, lock, name, data)
        assert tree(run) == [f"pending/{name.file_name}"]
        assert Path(run.pending, name.file_name).read_bytes() == data
        lock.release()

    def test_what_was_published_is_known_without_reading_it_again(self, run: RunDir) -> None:
        inventory = loaded(run)
        name = put_batch(run, 1, [1, 2])
        inventory.published(name, Entry((1, 2), env_id_of(2)), 10)
        mv(run, name, PENDING, TRAINER)
        settle(inventory)
        assert set(inventory.skip) == {1, 2}
        assert inventory.pending_batches == 0
        assert inventory.pending_bytes == 0


class TestMovedWhileTheDaemonStarts:
    """Consumers go on while a daemon starts: until it knows what they hold nothing is published."""

    def read_after(self, monkeypatch: pytest.MonkeyPatch, *moves: Callable[[], None]) -> None:
        """Have something moved before each read of a batch."""
        left, read = list(moves), fs.read

        def moved_before(path: str) -> bytes:
            if path.endswith(".jsonl") and left:
                left.pop(0)()
            return read(path)

        monkeypatch.setattr(fs, "read", moved_before)

    def listed_after(
        self, monkeypatch: pytest.MonkeyPatch, moves: dict[str, list[Callable[[], None] | None]]
    ) -> None:
        """Have something moved before a folder is listed for the first time, the second, …"""
        scan = fs.scan

        def moved_before(path: str) -> fs.Listing:
            move = moves[path].pop(0) if moves.get(path) else None
            if move is not None:
                move()
            return scan(path)

        monkeypatch.setattr(fs, "scan", moved_before)

    def test_what_moved_on_before_it_was_read_is_waited_for(
        self, run: RunDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = put_batch(run, 1, [7], TRAINER)
        again = name.next_attempt()

        def own(name: BatchName) -> str:
            return run.file(TRAINER, name.file_name)

        self.read_after(
            monkeypatch,
            lambda: os.rename(
                run.file(TRAINER, name.file_name), run.file(TRAINER, again.file_name)
            ),
            lambda: mv(run, again, TRAINER, STEP),
        )
        inventory, clock = loaded(run), Clock()
        assert not inventory.is_whole
        inventory.refresh(now=clock.later())
        assert not inventory.is_whole
        inventory.refresh(now=clock.later())
        assert inventory.is_whole
        assert list(inventory.skip) == [7]

    def test_a_listing_may_miss_it_after_that(
        self, run: RunDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = put_batch(run, 1, [7], TRAINER)
        away = run.root + "/away"
        self.read_after(monkeypatch, lambda: os.rename(run.file(TRAINER, name.file_name), away))
        inventory, clock = loaded(run), Clock()
        inventory.refresh(now=clock.later())
        assert not inventory.is_whole
        assert inventory.unsettled
        os.rename(away, run.file(PENDING, name.file_name))
        inventory.refresh(now=clock.later())
        assert inventory.is_whole
        assert list(inventory.skip) == [7]

    def test_what_was_removed_before_it_was_read_is_no_more_waited_for(
        self, run: RunDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = put_batch(run, 1, [7], TRAINER)
        self.read_after(monkeypatch, lambda: os.unlink(run.file(TRAINER, name.file_name)))
        inventory = loaded(run)
        assert not inventory.is_whole
        settle(inventory)
        assert inventory.is_whole
        assert not inventory.unsettled
        assert list(inventory.skip) == []

    def test_what_goes_back_during_the_first_pass_is_seen_by_it(
        self, run: RunDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = put_batch(run, 1, [7], TRAINER)
        back = partial(mv, run, name, TRAINER, PENDING)
        inventory = Inventory(run)
        inventory.shelves.sync()
        self.listed_after(monkeypatch, {run.inflight: [None, back]})
        inventory.load(now=0.0)
        assert list(inventory.skip) == [7]

    def test_what_no_listing_of_the_first_pass_has_is_looked_for(
        self, run: RunDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = put_batch(run, 1, [7])
        mv(run, name, PENDING, ACKED)
        Path(run.of(TRAINER)).mkdir()
        forth = partial(mv, run, name, ACKED, TRAINER)
        back = partial(mv, run, name, TRAINER, PENDING)
        # The folders are listed for their sync, too.
        self.listed_after(monkeypatch, {run.acked: [None, forth], run.of(TRAINER): [None, back]})
        inventory, clock = loaded(run), Clock()
        assert list(inventory.skip) == []
        assert not inventory.is_whole
        inventory.refresh(now=clock.later())
        assert inventory.is_whole
        assert list(inventory.skip) == [7]

    def test_where_consumers_never_rest_ten_passes_over_ten_seconds_are_enough(
        self, run: RunDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put_batch(run, 1, [7])
        clock, scan, stamps = Clock(), fs.scan, itertools.count()

        def acked_meanwhile(path: str) -> fs.Listing:
            if path == run.rejected:
                os.utime(run.acked, ns=(0, next(stamps)))
            return scan(path)

        monkeypatch.setattr(fs, "scan", acked_meanwhile)
        inventory = Inventory(run)
        inventory.load(now=clock.now)
        passes = 1
        while not inventory.is_whole:
            inventory.refresh(now=clock.later(0.6))
            passes += 1
        assert (passes, clock.now) == (18, pytest.approx(110.2))

    def test_a_start_where_nothing_moves_needs_one_pass(self, run: RunDir) -> None:
        put_batch(run, 1, [7])
        assert loaded(run).is_whole


def test_a_pass_over_folders_that_did_not_change_lists_none(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_batch(run, 1, [1], STEP)
    inventory = loaded(run)
    for place in inventory.shelves.by_place:
        os.utime(run.of(place), ns=(0, 10**18))
    inventory.refresh(now=1.0)
    listed: list[str] = []
    scan = fs.scan
    monkeypatch.setattr(fs, "scan", lambda path: listed.append(path) or scan(path))
    inventory.refresh(now=2.0)
    assert listed == []
