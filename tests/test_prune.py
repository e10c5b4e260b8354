"""Prune by hand and by the daemon: what goes, what stays, and that nothing is delivered again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spoold import Consumer, fs
from spoold.layout import STALE, BatchName, Place, RunDir, State, step_folder
from spoold.spool import moves
from spoold.spool.inventory import Inventory
from tests.support.batches import empty_run, put_batch, tree
from tests.support.commands import spoold
from tests.support.daemons import Running, environments, mv, start
from tests.support.rollouts import Rollouts, make_rollouts

Capsys = pytest.CaptureFixture[str]
ACKED = Place(State.ACKED)
OLD = Place(State.ACKED, STALE)


def step(number: int) -> Place:
    return Place(State.ACKED, step_folder(number))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return empty_run(tmp_path / "run")


@pytest.fixture
def rollouts(tmp_path: Path) -> Iterator[Rollouts]:
    made = make_rollouts(tmp_path / "rollout.db")
    yield made
    made.close()


def settle(run: RunDir) -> None:
    """Write the ledger, as a daemon does that starts and stops."""
    Inventory(run).load(now=0.0)


def paths(run: RunDir, *where: tuple[Place, BatchName]) -> list[str]:
    return sorted(f"{place.path}/{name.file_name}" for place, name in where)


# By hand ------------------------------------------------------------------------------------------


def test_prune_removes_final_acks_and_with_a_step_what_was_acked_before_it(
    run: RunDir, capsys: Capsys
) -> None:
    places = [ACKED, OLD, step(4), step(5), Place(State.PENDING), Place(State.REJECTED, "oom")]
    names = [put_batch(run, seq, [seq], place) for seq, place in enumerate(places, 1)]
    where = list(zip(places, names, strict=True))
    settle(run)

    ran = spoold(capsys, "prune", run.root)
    assert ran.code == 0
    assert ran.out.splitlines() == [f"{run.root}/{path}" for path in paths(run, *where[:2])]
    assert ran.err.startswith("spoold: 2 batches removed, ")
    assert list(tree(run)) == paths(run, *where[2:])

    assert spoold(capsys, "prune", run.root, "--before-step", 5).code == 0
    assert list(tree(run)) == paths(run, *where[3:])
    assert sorted(os.listdir(run.acked)) == [STALE, step_folder(5)]
    # All of them are still delivered.
    inventory = Inventory(run)
    inventory.load(now=0.0)
    assert set(inventory.skip) == {1, 2, 3, 4, 5, 6}


def test_what_is_not_in_the_ledger_stays_and_is_counted(run: RunDir, capsys: Capsys) -> None:
    settled = put_batch(run, 1, [1], step(1))
    settle(run)
    new = put_batch(run, 2, [2], step(1))
    torn = put_batch(run, 3, [3], ACKED)
    Path(run.ledger, torn.id).write_bytes(b"")
    ran = spoold(capsys, "prune", run.root, "--before-step", 9)
    assert ran.out == f"{run.root}/{step(1).path}/{settled.file_name}\n"
    assert "1 batch kept: not in the ledger yet" in ran.err
    assert list(tree(run)) == paths(run, (step(1), new), (ACKED, torn))


def test_a_batch_that_lies_there_twice_stays_until_one_of_the_two_is_set_aside(
    run: RunDir, capsys: Capsys
) -> None:
    # Without its file in acked/ the copy in pending/ would beat the ledger, and be delivered.
    put_batch(run, 1, [1], ACKED)
    settle(run)
    put_batch(run, 1, [1])
    assert "1 batch kept" in spoold(capsys, "prune", run.root).err
    settle(run)
    assert spoold(capsys, "prune", run.root).out != ""
    assert [path.partition("/")[0] for path in tree(run)] == ["rejected"]


def test_unknown_files_and_folders_stay(run: RunDir, capsys: Capsys) -> None:
    for path in ("mine.jsonl", "step-5/mine", f"{step_folder(3)}/mine", "other/mine"):
        Path(run.acked, path).parent.mkdir(exist_ok=True)
        Path(run.acked, path).touch()
    put_batch(run, 1, [1], Place(State.ACKED, "other"))
    put_batch(run, 2, [2], step(3))
    settle(run)
    before = [path for path in tree(run) if "000000002" not in path]
    assert spoold(capsys, "prune", run.root, "--before-step", 99).code == 0
    assert list(tree(run)) == before


def test_an_ack_into_a_step_folder_that_is_pruned_meanwhile_makes_it_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_batch(run, 1, [1])
    real, removed = fs.move, []

    def move(old: str, new: str) -> None:
        folder = os.path.dirname(new)
        if not removed:
            os.rmdir(folder)  # prune
            removed.append(folder)
            with pytest.raises(FileNotFoundError):
                real(old, new)
            os.mkdir(folder)  # another consumer, that acks with the same step
            raise FileNotFoundError(folder)
        real(old, new)

    monkeypatch.setattr(fs, "move", move)
    with Consumer(run.root) as consumer:
        batch = consumer.claim()
        assert batch is not None
        batch.ack(step=3)
    assert removed
    assert tree(run, "acked")[0].startswith(step(3).path)


def test_a_file_moved_on_and_its_folder_removed_before_the_sync_is_no_failure(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = put_batch(run, 1, [1], Place(State.INFLIGHT))
    real = fs.rename_noreplace

    def rename(old: str, new: str) -> None:
        real(old, new)
        os.rename(new, f"{run.pending}/{name.file_name}")  # rewound at once
        os.rmdir(os.path.dirname(new))  # and pruned

    monkeypatch.setattr(fs, "rename_noreplace", rename)
    found = moves.Found(Place(State.INFLIGHT), name)
    assert moves.ack(run, found, 3) is not None


def retired(run: RunDir) -> RunDir:
    old = empty_run(Path(run.retired, "20261129T194246Z-job"))
    Path(old.source_json).write_text("{}")
    put_batch(old, 1, [1], ACKED)
    put_batch(old, 2, [2], Place(State.INFLIGHT, "trainer-0"))
    Path(old.rejected, "env-3.bad-json.json").write_text("{}")
    settle(old)
    os.rmdir(old.tmp)
    return old


def test_retired_spools_go_when_asked_for(run: RunDir, capsys: Capsys) -> None:
    old = retired(run)
    Path(run.source_json).write_text("{}")
    before = tree(old)
    assert spoold(capsys, "prune", run.root).code == 0
    assert tree(old) == before
    assert spoold(capsys, "prune", run.root, "--retired").out == f"{old.root}\n"
    assert os.listdir(run.retired) == []


def test_what_a_living_consumer_holds_of_a_retired_spool_stays_and_can_be_acked(
    run: RunDir, capsys: Capsys
) -> None:
    Path(run.source_json).write_text("{}")
    name = put_batch(run, 2, [2])
    with Consumer(run.root) as consumer:
        batch = consumer.claim()
        assert batch is not None
        old = retired(run)
        os.remove(batch.path)  # it was moved to where `retired` has put one
        Path(old.root, "mine").touch()
        assert spoold(capsys, "prune", run.root, "--retired").out == ""
        assert list(tree(old)) == [f"inflight/trainer-0/{name.file_name}"]
        batch.ack()
    assert spoold(capsys, "prune", run.root, "--retired").out == ""
    assert os.listdir(old.root) == ["mine"]


def test_a_retirement_that_is_half_done_is_not_pruned(run: RunDir, capsys: Capsys) -> None:
    old = retired(run)
    before = tree(old)
    ran = spoold(capsys, "prune", run.root, "--retired")
    assert ran.code == 78
    assert "half done" in ran.err
    assert tree(old) == before


# By the daemon ------------------------------------------------------------------------------------


def acked_by_step(tmp_path: Path, rollouts: Rollouts, **settings: object) -> Running:
    """A daemon whose six batches were acked with the steps 1 to 6."""
    for one in rollouts.register(6, group=None):
        rollouts.complete(one)
    it = start(tmp_path, batch_size=1, **settings)
    it.go()
    for number, path in enumerate(tree(it.run, "pending"), 1):
        mv(it.run, path, step(number).path)
    return it


def environments_by_step(it: Running) -> set[str]:
    return {path.split("/")[1] for path in tree(it.run, "acked")}


def test_keep_steps_prunes_what_lies_further_below_the_highest_step(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    it = acked_by_step(tmp_path, rollouts, keep_steps=2)
    it.go()
    assert sorted(os.listdir(it.run.acked)) == [step_folder(n) for n in (4, 5, 6)]
    it.settle()
    assert it.status.delivered == 6
    it.kill()

    again = start(tmp_path, batch_size=1, keep_steps=0)
    again.settle()
    assert sorted(os.listdir(again.run.acked)) == [step_folder(6)]
    assert environments(again.run, "pending") == []
    again.kill()


def test_without_keep_steps_everything_stays(tmp_path: Path, rollouts: Rollouts) -> None:
    it = acked_by_step(tmp_path, rollouts)
    it.settle()
    assert len(tree(it.run, "acked")) == 6
    it.kill()


def test_a_foreign_file_in_a_step_folder_does_not_make_it_the_highest_step(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    it = acked_by_step(tmp_path, rollouts, keep_steps=5)
    Path(it.run.of(step(900))).mkdir()
    Path(it.run.of(step(900)), "mine").touch()
    it.settle()
    assert len(environments(it.run, "acked/" + step_folder(1))) == 1
    it.kill()


def test_what_was_rewound_is_pruned_only_after_it_was_acked_again(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    it = acked_by_step(tmp_path, rollouts, keep_steps=3)
    it.go()
    with Consumer(it.run.root) as consumer:
        assert len(consumer.rewind(step=4)) == 2
        it.settle()
        # Pruned up to step 2 before the rewind, and no further by it.
        assert [name[-1] for name in sorted(environments_by_step(it))] == ["3", "4"]
        for number in (5, 6):
            batch = consumer.claim()
            assert batch is not None
            batch.ack(step=number)
            it.settle()
        assert consumer.claim() is None
    assert it.status.delivered == 6
    it.kill()


def test_the_daemon_prunes_a_thousand_at_a_time_and_then_the_rest(
    tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spoold.daemon.retention.MOST_AT_ONCE", 2)
    it = acked_by_step(tmp_path, rollouts, keep_steps=0)
    it.go()
    left = len(tree(it.run, "acked"))
    assert 1 <= left <= 4
    for _ in range(3):
        it.go(2.0)
    assert len(tree(it.run, "acked")) == 1
    it.kill()
