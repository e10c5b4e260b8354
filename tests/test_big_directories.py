"""Folders with very many files: what moved is looked at by its name, and nothing is lost."""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from spoold import Consumer, fs
from spoold.daemon import _serve
from spoold.layout import BatchName, Place, State
from spoold.spool import inventory, shelves
from spoold.spool.inventory import Inventory
from spoold.watch import Hints
from tests.support.batches import PENDING, empty_run, put_batch
from tests.support.daemons import running

ACKED = Place(State.ACKED)
STALE = Place(State.ACKED, "stale")
STEP = Place(State.ACKED, "step-000000007")
TRAINER = Place(State.INFLIGHT, "trainer-0")
MANY = 5
RESCAN_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _few_names_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "MANY_NAMES", MANY)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every folder that is listed from here on, by its path, by whatever call."""
    paths: list[str] = []

    def spy(function: Callable[..., object]) -> Callable[..., object]:
        def call(path: str = ".") -> object:
            paths.append(os.fspath(path))
            return function(path)

        return call

    monkeypatch.setattr(os, "scandir", spy(os.scandir))
    monkeypatch.setattr(os, "listdir", spy(os.listdir))
    return paths


class Spool:
    """A run directory with more in acked/ than is many, and what the daemon makes of it."""

    def __init__(self, root: Path) -> None:
        self.run = empty_run(root / "run")
        self.acked = [put_batch(self.run, seq, [seq], ACKED) for seq in range(1, MANY + 2)]
        self.now = 1000.0
        self.inventory = Inventory(self.run, relist_seconds=RESCAN_SECONDS)
        self.inventory.load(now=0.0)
        self.moved: set[str] = set()
        self.look(moved=None)

    def mv(self, name: BatchName, source: Place, target: Place) -> None:
        """`mv`; both ends are hinted at in the next look."""
        paths = self.run.file(source, name.file_name), self.run.file(target, name.file_name)
        folder = self.run.of(target)
        if not os.path.isdir(folder):
            os.mkdir(folder)
            self.moved.add(folder)
        os.rename(*paths)
        self.moved |= {path for path in paths if not path.startswith(self.run.pending)}

    def look(self, *, seconds: float = 0.06, moved: set[str] | None) -> None:
        self.now += seconds
        self.inventory.refresh(now=self.now, moved=moved)
        self.moved = set()

    @property
    def entries(self) -> set[str]:
        return set(os.listdir(self.run.ledger))


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path)


def test_an_ack_into_a_big_folder_is_seen_without_listing_it(
    spool: Spool, listed: list[str]
) -> None:
    name = put_batch(spool.run, 50, [50], TRAINER)
    spool.look(moved={spool.run.of(TRAINER)})
    listed.clear()
    spool.mv(name, TRAINER, ACKED)
    spool.look(moved=spool.moved)
    assert spool.run.acked not in listed
    assert name.id in spool.entries
    assert not spool.inventory.unsettled


def test_a_timed_look_without_a_hint_lists_nothing_big(spool: Spool, listed: list[str]) -> None:
    put_batch(spool.run, 50, [50], ACKED)
    spool.look(moved=set())
    assert spool.run.acked not in listed


def test_where_nobody_gives_hints_a_big_folder_is_listed_when_it_changed(
    spool: Spool, listed: list[str]
) -> None:
    name = put_batch(spool.run, 50, [50], ACKED)
    spool.look(moved=None)
    assert spool.run.acked in listed
    assert name.id in spool.entries


def test_a_lost_hint_is_made_up_for_after_rescan_seconds(spool: Spool, listed: list[str]) -> None:
    name = put_batch(spool.run, 50, [50], ACKED)
    spool.look(seconds=RESCAN_SECONDS - 1, moved=set())
    assert name.id not in spool.entries
    spool.look(seconds=1.0, moved=set())
    assert name.id in spool.entries
    assert listed.count(spool.run.acked) == 1


def test_an_ack_whose_hint_comes_a_pass_later_costs_no_listing(
    spool: Spool, listed: list[str]
) -> None:
    name = put_batch(spool.run, 50, [50], TRAINER)
    spool.look(moved={spool.run.of(TRAINER)})
    listed.clear()
    spool.mv(name, TRAINER, ACKED)
    spool.look(moved={spool.run.file(TRAINER, name.file_name)})
    assert spool.inventory.unsettled
    spool.look(moved={spool.run.file(ACKED, name.file_name)})
    assert spool.run.acked not in listed
    assert name.id in spool.entries
    assert not spool.inventory.unsettled


def test_an_ack_whose_hint_never_comes_is_found_by_listing(spool: Spool, listed: list[str]) -> None:
    name = put_batch(spool.run, 50, [50], TRAINER)
    spool.look(moved={spool.run.of(TRAINER)})
    spool.mv(name, TRAINER, ACKED)
    for _ in range(3):
        spool.look(moved=set())
    assert listed.count(spool.run.acked) == 1
    assert name.id in spool.entries
    assert 50 in spool.inventory.skip


def test_a_batch_that_is_removed_is_missing_although_hints_alone_never_say_so(
    spool: Spool,
) -> None:
    name = put_batch(spool.run, 50, [50], TRAINER)
    spool.look(moved={spool.run.of(TRAINER)})
    os.unlink(spool.run.file(TRAINER, name.file_name))
    spool.look(moved={spool.run.file(TRAINER, name.file_name)})
    assert 50 in spool.inventory.skip
    for _ in range(4):
        spool.look(moved=set())
    assert 50 not in spool.inventory.skip
    assert spool.inventory.undelivered


def test_a_batch_that_leaves_a_big_folder_loses_its_entry(spool: Spool, listed: list[str]) -> None:
    name = spool.acked[0]
    spool.mv(name, ACKED, PENDING)
    spool.look(moved=spool.moved)
    assert spool.run.acked not in listed
    assert name.id not in spool.entries
    assert spool.inventory.pending_batches == 1


def test_folders_of_steps_come_and_go_without_listing_those_of_others(
    spool: Spool, listed: list[str]
) -> None:
    first, second = spool.acked[:2]
    spool.mv(first, ACKED, STEP)
    spool.look(moved=spool.moved)
    assert first.id in spool.entries
    listed.clear()
    spool.mv(second, ACKED, STALE)
    spool.look(moved=spool.moved)
    assert listed.count(spool.run.of(STEP)) == listed.count(spool.run.acked) == 0
    spool.mv(first, STEP, ACKED)
    os.rmdir(spool.run.of(STEP))
    spool.look(moved=spool.moved | {spool.run.of(STEP)})
    assert STEP not in spool.inventory.shelves.by_place
    assert {first.id, second.id} <= spool.entries
    assert not spool.inventory.unsettled


@pytest.mark.parametrize("hinted", [True, False])
def test_a_removed_folder_is_forgotten(spool: Spool, hinted: bool) -> None:
    os.mkdir(spool.run.of(STEP))
    spool.look(moved={spool.run.of(STEP)})
    assert STEP in spool.inventory.shelves.by_place
    os.rmdir(spool.run.of(STEP))
    spool.look(moved={spool.run.of(STEP)} if hinted else None)
    assert STEP not in spool.inventory.shelves.by_place


def test_a_pass_by_hints_is_no_proof_that_nothing_moved(spool: Spool) -> None:
    found = spool.inventory.shelves.go_through(now=spool.now, moved=set())
    assert (found.by_hints, found.still) == (True, False)


def test_a_folder_that_is_gone_with_all_that_was_in_it_takes_that_out(spool: Spool) -> None:
    name = spool.acked[0]
    spool.mv(name, ACKED, STEP)
    spool.look(moved=spool.moved)
    os.rename(spool.run.of(STEP), f"{spool.run.root}/elsewhere")
    for moved in ({spool.run.of(STEP)}, set(), set(), set()):
        spool.look(moved=moved)
    assert spool.inventory.shelves.acked_places(name.file_name) == []
    assert not spool.inventory.unsettled


def test_an_unknown_file_in_a_big_folder_is_reported_until_it_goes(
    spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    strange = Path(spool.run.acked, "notes.txt")
    strange.touch()
    with caplog.at_level(logging.WARNING):
        spool.look(moved={str(strange)})
    assert [record.message for record in caplog.records] == ["unknown file"]
    spool.look(moved={spool.run.file(ACKED, spool.acked[0].file_name)})
    assert spool.inventory.shelves.unknown() == ["acked/notes.txt"]
    strange.unlink()
    spool.look(moved={str(strange)})
    assert spool.inventory.shelves.unknown() == []


def test_a_name_that_cannot_be_looked_at_never_counts_as_gone(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, listed: list[str]
) -> None:
    path = spool.run.file(ACKED, spool.acked[0].file_name)

    def refuse(path: str) -> os.stat_result:
        raise PermissionError(errno.EACCES, "denied", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", refuse)
        spool.look(moved={path})
    assert [error.errno for error in spool.inventory.unreadable] == [errno.EACCES]
    assert spool.acked[0].id in spool.entries
    os.utime(spool.run.acked)
    spool.look(moved=set())
    assert spool.run.acked in listed
    assert spool.inventory.unreadable == []


def test_a_batch_that_comes_back_to_where_its_going_was_not_heard_is_found(spool: Spool) -> None:
    name = spool.acked[0]
    spool.mv(name, ACKED, TRAINER)
    spool.look(moved={spool.run.of(TRAINER), spool.run.file(TRAINER, name.file_name)})
    spool.mv(name, TRAINER, ACKED)
    spool.look(moved={spool.run.file(TRAINER, name.file_name)})
    for _ in range(5):
        spool.look(moved=set())
    assert name.id in spool.entries
    assert name.seq in spool.inventory.skip
    assert not spool.inventory.unsettled


@pytest.fixture
def hints(spool: Spool) -> Iterator[Hints]:
    hints = Hints()
    for folder in (spool.run.inflight, spool.run.acked, spool.run.rejected):
        hints.watch(folder, tag="spool", recursive=True, created=True, deleted=True)
    yield hints
    hints.close()


@pytest.mark.parametrize("lost", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_whatever_moves_the_picture_is_that_of_a_fresh_start(
    spool: Spool, hints: Hints, seed: int, lost: float
) -> None:
    chance = random.Random(seed)
    steps = [Place(State.ACKED, f"step-{number:09d}") for number in range(4)]
    places = [PENDING, TRAINER, ACKED, STALE, *steps, Place(State.REJECTED, "oom")]
    names = spool.acked + [put_batch(spool.run, seq, [seq], ACKED) for seq in range(50, 70)]
    where = dict.fromkeys(names, ACKED)
    for _ in range(60):
        for name in chance.sample(names, chance.randrange(4)):
            place = chance.choice(places)
            if place != where[name]:
                spool.mv(name, where[name], place)
                where[name] = place
        for place in steps:
            if os.path.isdir(spool.run.of(place)) and not os.listdir(spool.run.of(place)):
                os.rmdir(spool.run.of(place))
        heard = hints.wait(0).get("spool", set())
        if heard is not None:
            heard = {path for path in heard if chance.random() >= lost}
        spool.look(moved=heard)
    if lost:
        spool.look(seconds=RESCAN_SECONDS, moved=set())
    for _ in range(6):
        spool.look(moved=hints.wait(0).get("spool", set()))
    assert not spool.inventory.unsettled
    assert spool.entries == {n.id for n, place in where.items() if place.state is State.ACKED}
    fresh = Inventory(spool.run)
    fresh.load(now=0.0)
    assert fresh.skip == spool.inventory.skip
    assert fresh.pending_batches == spool.inventory.pending_batches
    kept = {p: s.names for p, s in spool.inventory.shelves.by_place.items()}
    assert {p: s.names for p, s in fresh.shelves.by_place.items()} == kept


def test_the_daemon_keeps_every_hint_until_it_has_looked(tmp_path: Path, listed: list[str]) -> None:
    run = empty_run(tmp_path / "run")
    for seq in range(1, MANY + 2):
        put_batch(run, seq, [seq], ACKED)
    with running(tmp_path, scan_seconds=3600) as it:
        it.go()
        names = [put_batch(run, seq, [seq], ACKED) for seq in (50, 51)]
        listed.clear()
        for name in names:
            moved = {run.file(ACKED, name.file_name)}
            it.daemon.hint(source=False, spool=True, moved=moved)
        it.daemon.step()
        assert run.acked not in listed
        assert {50, 51} <= set(it.daemon.inventory.skip)
        put_batch(run, 52, [52], ACKED)
        it.daemon.hint(source=False, spool=True, moved=None)
        it.daemon.hint(source=False, spool=True, moved=set())
        it.daemon.step()
        assert 52 in it.daemon.inventory.skip


def test_a_huge_ledger_is_merged_some_at_a_time_oldest_first(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "MERGE_MOST", 2)
    kept, *removed = spool.acked
    for name in removed:
        os.unlink(spool.run.file(ACKED, name.file_name))
    for _ in range(4):
        spool.look(moved=None)
    assert spool.inventory.merge(least=2) == 2
    assert spool.entries == {"merged-1", kept.id, *(name.id for name in removed[2:])}
    while spool.inventory.merge(least=1):
        pass
    assert len(spool.entries) == 2
    assert kept.id in spool.entries
    fresh = Inventory(spool.run)
    fresh.load(now=0.0)
    assert set(fresh.skip) == {name.seq for name in spool.acked}


@pytest.mark.parametrize("watched", [True, False])
def test_the_daemon_tells_what_moved_only_where_events_tell_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    if not watched:
        monkeypatch.setattr("watchdog.observers.inotify_c.inotify_init", lambda: -1)
    told: list[set[str] | None] = []
    ended = SimpleNamespace(stopping=[], reload=False)
    service = MagicMock(shorten=lambda _: 0.0)
    hints = Hints()
    with running(tmp_path) as it:
        path = f"{it.run.acked}/a"

        def hint(*, source: bool, spool: bool, moved: set[str] | None) -> None:
            told.append(moved)
            Path(path).touch()
            if len(told) == 2:
                ended.stopping = [15]

        monkeypatch.setattr(it.daemon, "hint", hint)
        _serve(it.daemon, hints, ended, service, None)
    hints.close()
    assert told == ([set(), {path}] if watched else [None, None])


def test_a_reload_of_rescan_seconds_counts_from_the_next_look(
    tmp_path: Path, listed: list[str]
) -> None:
    run = empty_run(tmp_path / "run")
    for seq in range(1, MANY + 2):
        put_batch(run, seq, [seq], ACKED)
    with running(tmp_path, rescan_seconds=100_000) as it:
        it.go()
        it.daemon.reload(it.daemon.settings.model_copy(update={"rescan_seconds": 10.0}))
        it.go()
        put_batch(run, 50, [50], ACKED)
        it.clock.now += 10
        it.daemon.hint(source=False, spool=True, moved=set())
        it.daemon.step()
        assert 50 in it.daemon.inventory.skip


def test_a_consumer_never_lists_acked(tmp_path: Path, listed: list[str]) -> None:
    run = empty_run(tmp_path / "run")
    for seq in range(1, 6):
        put_batch(run, seq, [seq])
    listed.clear()
    with Consumer(run.root) as consumer:
        for step in (None, 1, 1, 2):
            batch = consumer.claim(timeout=0.0)
            assert batch is not None
            batch.ack(step=step)
        assert consumer.claim(timeout=0.0, min_weight_version=100) is None
    assert run.pending in listed
    assert [path for path in listed if path.startswith(run.acked)] == []
    assert fs.scan(run.pending).files == []
