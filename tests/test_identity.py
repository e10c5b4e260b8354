"""Which database it is: nothing that is known by its id outlives the rows that it was about."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spoold.ledger import REMEMBERED, Entry, Ledger
from spoold.spool import notes as notes_module
from tests.support.batches import tree
from tests.support.daemons import Running, mv, start
from tests.support.rollouts import Rollouts, make_rollouts, open_rollouts

BAD = "no JSON"


@pytest.fixture
def rollouts(tmp_path: Path) -> Iterator[Rollouts]:
    made = make_rollouts(tmp_path / "rollout.db")
    yield made
    with contextlib.suppress(sqlite3.Error):
        made.close()


def complete(rollouts: Rollouts, count: int = 1, *, group: str = "", **facts: Any) -> list[int]:
    ids = rollouts.register(count, group=group)
    with rollouts.together():
        for one in ids:
            rollouts.complete(one, **facts)
    return ids


def back_up(rollouts: Rollouts, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "older.db")) as copy:
        rollouts.db.backup(copy)


def restore_in_place(rollouts: Rollouts, tmp_path: Path) -> Rollouts:
    with contextlib.closing(sqlite3.connect(tmp_path / "older.db")) as copy:
        copy.backup(rollouts.db)
    return rollouts


def replace_the_file(rollouts: Rollouts, tmp_path: Path) -> Rollouts:
    rollouts.close()
    for suffix in ("", "-wal", "-shm"):
        Path(f"{tmp_path}/rollout.db{suffix}").unlink(missing_ok=True)
    shutil.copy(tmp_path / "older.db", tmp_path / "rollout.db")
    return open_rollouts(tmp_path / "rollout.db")


RESTORES = pytest.mark.parametrize("restore", [restore_in_place, replace_the_file])


def env_ids(it: Running, *folders: str) -> list[str]:
    """Whose samples lie in a run directory."""
    names = [name for name in tree(it.run, *folders) if name.endswith(".jsonl")]
    lines = [line for name in names for line in Path(it.run.root, name).read_bytes().splitlines()]
    return [json.loads(line)["extra_info"]["env_id"] for line in lines]


def notes(it: Running) -> list[str]:
    return [name for name in tree(it.run, "rejected") if name.endswith(".json")]


# ---- notes ------------------------------------------------------------------------------------


def bad_row(rollouts: Rollouts, it: Running) -> None:
    complete(rollouts, messages=BAD)


def null_reward(rollouts: Rollouts, it: Running) -> None:
    complete(rollouts, reward=None, step_reward=1.0)


def too_big_group(rollouts: Rollouts, it: Running) -> None:
    complete(rollouts, 2, group="big", response="x" * 1500)


def late_member(rollouts: Rollouts, it: Running) -> None:
    (late,) = rollouts.register(1, group="a")
    it.go()
    rollouts.complete(late)


def partial_group(rollouts: Rollouts, it: Running) -> None:
    complete(rollouts, 1, group="d")
    it.go()
    it.go(2000.0)


def missing_row(rollouts: Rollouts, it: Running) -> None:
    rollouts.finish(*rollouts.register(1, group=""))
    it.go(61.0)
    it.go(700.0)


@RESTORES
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(
    ("makes_a_note", "reason"),
    [
        (bad_row, "bad-json"),
        (null_reward, "null-reward"),
        (too_big_group, "too-big"),
        (late_member, "late"),
        (partial_group, "partial-group"),
        (missing_row, "missing-row"),
    ],
)
def test_a_note_of_a_database_that_is_no_more_sets_nobody_aside(
    tmp_path: Path,
    rollouts: Rollouts,
    makes_a_note: Callable[[Rollouts, Running], None],
    reason: str,
    restore: Callable[[Rollouts, Path], Rollouts],
    restarted: bool,
) -> None:
    facts = {
        "group_size": 2,
        "partial_groups": "reject",
        "null_reward": "reject",
        "max_sample_bytes": 3000,
    }
    complete(rollouts, 2, group="a")
    it = start(tmp_path, **facts)
    it.go()
    back_up(rollouts, tmp_path)
    makes_a_note(rollouts, it)
    it.go()
    assert {name.split(".")[1] for name in notes(it)} == {reason}
    assert len(env_ids(it)) == 2
    if restarted:
        it.kill()
    rollouts = restore(rollouts, tmp_path)
    others = complete(rollouts, 8)
    if restarted:
        it = start(tmp_path, **facts)
    it.go(61.0)
    assert os.listdir(f"{it.run.root}/retired")
    assert notes(it) == []
    assert {rollouts.env_id(one) for one in (*range(1, 3), *others)} == set(env_ids(it))
    it.kill()
    rollouts.close()


def test_every_note_says_whom_it_is_about(tmp_path: Path, rollouts: Rollouts) -> None:
    ids = complete(rollouts, 3, group="a")
    strange = "\u200b\x00\t" + "é" * 30
    ids += [rollouts.register(1, group="", env_id=strange)[0]]
    rollouts.complete(ids[-1], messages=BAD)
    it = start(tmp_path, group_size=2)
    it.go()
    for environment, reason in ((ids[2], "late"), (ids[3], "bad-json")):
        note = json.loads(Path(it.run.rejected, f"env-{environment}.{reason}.json").read_bytes())
        assert note["env_id"] == rollouts.env_id(environment)
    it.kill()
    it = start(tmp_path, group_size=2)
    it.go(61.0)
    assert len(notes(it)) == 2
    it.kill()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        "no JSON",
        '{"environment": 7, "env_id": 7, "job": "job-1"}',
        # A copy of the note of another environment, or of another run directory.
        '{"environment": 6, "env_id": "another", "job": "job-1"}',
        '{"environment": 7, "env_id": "another", "job": "job-2"}',
    ],
)
def test_a_note_that_people_wrote_sets_aside_and_says_nothing_of_the_database(
    tmp_path: Path, rollouts: Rollouts, text: str
) -> None:
    ids = complete(rollouts, 8)
    it = start(tmp_path)
    Path(it.run.rejected, "env-7.by-hand.json").write_text(text)
    it.go()
    it.go(61.0)
    assert sorted(env_ids(it)) == sorted(rollouts.env_id(one) for one in ids if one != 7)
    assert notes(it) == ["rejected/env-7.by-hand.json"]
    assert not Path(it.run.retired).exists()
    it.kill()


def test_of_many_notes_the_highest_are_remembered_and_no_more(
    tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes_module, "REMEMBERED", 2)
    ids = []
    for _ in range(20):
        ids += complete(rollouts, 1, messages=BAD) + complete(rollouts, 1)
    highest = ids[-2]
    it = start(tmp_path)
    it.go()
    memory = it.daemon.inventory._note_memory
    assert highest in memory.remembered()
    assert len(memory.remembered()) <= 4
    it.kill()
    it = start(tmp_path)
    memory = it.daemon.inventory._note_memory
    assert memory.remembered() == {one: rollouts.env_id(one) for one in (ids[-4], highest)}
    assert it.daemon.inventory.latest()[highest] == rollouts.env_id(highest)
    it.kill()


def test_the_highest_environment_that_was_delivered_is_never_forgotten() -> None:
    ledger = Ledger()
    ledger.add("first", Entry((10**6,), "highest"))
    for number in range(3 * REMEMBERED):
        ledger.add(f"{number}", Entry((number + 1,), f"e{number}"))
    assert ledger.remembered[10**6] == "highest"
    assert len(ledger.remembered) <= 2 * REMEMBERED + 1
    merged = Ledger()
    parts = [(f"{number:05d}", Entry((number + 1,), f"e{number}")) for number in range(1500)]
    first = merged.merge([("00000", Entry((10**6,), "highest")), *parts], [])
    again = merged.merge(parts, [first])
    assert (10**6, "highest") in again.remembered
    assert len(again.remembered) == REMEMBERED + 1


# ---- what was found and not published ---------------------------------------------------------


@RESTORES
def test_a_row_that_did_not_fit_is_not_published_for_a_database_that_lacks_it(
    tmp_path: Path, rollouts: Rollouts, restore: Callable[[Rollouts, Path], Rollouts]
) -> None:
    complete(rollouts)
    back_up(rollouts, tmp_path)
    complete(rollouts)
    it = start(tmp_path, batch_bytes=800, max_pending_batches=1)
    it.go()
    assert env_ids(it) == [rollouts.env_id(1)]  # the second was read, and waits for room
    rollouts = restore(rollouts, tmp_path)
    others = complete(rollouts, 8)
    it.daemon.looking._look_at = it.clock.now + 50.0  # no look comes before it delivers
    mv(it.run, tree(it.run, "pending")[0], "acked")
    for _ in range(30):
        it.clock.now += 0.1
        it.daemon.hint(source=False, spool=True)
        it.daemon.step()
        mine = {rollouts.env_id(one) for one in (1, *others)}
        assert set(env_ids(it)) <= mine
    it.kill()
    rollouts.close()


@RESTORES
def test_a_row_that_did_not_fit_is_forgotten_when_its_database_is(
    tmp_path: Path, rollouts: Rollouts, restore: Callable[[Rollouts, Path], Rollouts]
) -> None:
    complete(rollouts)
    back_up(rollouts, tmp_path)
    complete(rollouts)
    it = start(tmp_path, batch_bytes=800)
    it.daemon.step()
    while not env_ids(it):
        it.daemon.step()
    assert env_ids(it) == [rollouts.env_id(1)]  # the second was read, and comes next
    rollouts = restore(rollouts, tmp_path)
    others = complete(rollouts, 8)
    it.daemon.hint(source=True, spool=True)
    mine = {rollouts.env_id(one) for one in (1, *others)}
    for _ in range(30):
        it.daemon.step()
        assert set(env_ids(it)) <= mine
    it.kill()
    rollouts.close()


@RESTORES
def test_a_group_is_not_made_of_members_of_two_databases(
    tmp_path: Path, rollouts: Rollouts, restore: Callable[[Rollouts, Path], Rollouts]
) -> None:
    complete(rollouts)
    back_up(rollouts, tmp_path)
    complete(rollouts, 1, group="a")
    it = start(tmp_path, group_size=2)
    it.go()
    assert [group.key for group in it.daemon.plan.waiting()] == ["a"]
    rollouts = restore(rollouts, tmp_path)
    other = complete(rollouts, 1, group="b") + complete(rollouts, 1, group="a")
    rollouts.register(8)
    it.go()
    it.go(61.0)
    assert env_ids(it) == [rollouts.env_id(1)]
    whole = other[:1] + complete(rollouts, 1, group="b")
    it.go()
    assert sorted(env_ids(it)) == sorted(rollouts.env_id(one) for one in (1, *whole))
    it.kill()
    rollouts.close()


def test_rows_that_hide_below_the_highest_are_looked_at_as_soon_as_it_is_another(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    ids = rollouts.register(4, group="")
    back_up(rollouts, tmp_path)
    for _ in range(3):
        rollouts.step(ids[0])
    it = start(tmp_path)
    it.go()
    restore_in_place(rollouts, tmp_path)
    for one in ids[1:]:
        rollouts.complete(one)
    rollouts.step(ids[0])
    it.go()
    assert sorted(env_ids(it)) == sorted(map(rollouts.env_id, ids[1:]))
    it.kill()
