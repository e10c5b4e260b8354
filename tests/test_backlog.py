"""A backlog that two processes work off leaves what one would have left: files, bytes, notes.

Messages are not looked into before they go to the second process, so whatever is decided on the
way must not hang on them: how a batch is cut, which note an environment gets, when reading stops.
"""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spoold.daemon import collecting, delivery, loop
from spoold.errors import SpoolWriteError
from spoold.spool.writer import Writer
from tests.support.beside import beside_at_once
from tests.support.daemons import environments, running
from tests.support.rollouts import Rollouts, make_rollouts

QUICK = range(8)
MANY = range(100, 160)
LONG = b"x" * 80
BROKEN = b'[{"role": "user", "content": "' + LONG + b'"},]'


def left_by(run: Path) -> dict[str, Any]:
    """Every file of a run directory that somebody may look for, notes without their time."""
    found: dict[str, Any] = {}
    for path in sorted(run.glob("[!.]*/**/*")):
        if path.is_file() and not path.name.startswith("."):
            data: Any = path.read_bytes()
            if path.name.startswith("env-"):
                data = {key: value for key, value in json.loads(data).items() if key != "at"}
            found[str(path.relative_to(run))] = data
    return found


def drain(
    folder: Path, patch: pytest.MonkeyPatch, how: str, *, busy: float = 0.0, **settings: Any
) -> tuple[dict[str, Any], bool]:
    """Work a database off, with or without a second process: what is left, and whether it stopped.

    `busy`: how often the other process has no time to look into messages.
    """
    with patch.context() as only:
        if how == "alone":
            only.setattr(delivery, "BACKLOG_BATCHES", 1_000_000)
        else:
            beside_at_once(only)
            dice = random.Random(7)
            only.setattr(Writer, "has_answered", lambda _: dice.random() >= busy)
        with running(folder, run_dir=folder / how, **settings) as it:
            for _ in range(3):
                it.go(5.0)  # beyond the waits of groups and missing rows
            stopped = "bad-rows" in it.reasons
    return left_by(folder / how), stopped


def messages(dice: random.Random, *, bad: bool) -> object:
    text = b"x" * dice.choice([1, 60, 100, 400, 3000])
    if not bad:
        said: list[dict[str, object]] = [{"role": "user", "content": text.decode()}]
        if dice.random() < 0.2:
            said.append({"role": "tool", "content": [{"type": "text", "text": "y"}]})
        written = json.dumps(said, indent=dice.choice([None, None, 1]))
        return dice.choice([written] * 8 + [written + " ", "[" + " " * 90 + "]", "[]"])
    opened = b'[{"role": "user", "content": "' + text
    return dice.choice(
        [
            *(opened + end for end in (b'"},]', b'\xff"}]', b'\\ud800"}]', b'"}]x')),
            opened + b'", "y": NaN}]',
            *(opened + end for end in (b"]", b'\n."}]', b'\r."}]', b'", "y": 1\n2}]')),
            *(b'["' + text + b'"]', b'{"role": "' + text + b'"}', b"null", b"", opened),
            *(b'[{"a":' + b"[" * depth + b"]" * depth + b"}]" for depth in (498, 499, 600)),
        ]
    )


def response(dice: random.Random, *, bad: bool) -> object:
    if not bad:
        return dice.choice(["4", "", {"role": "assistant", "n": 2**70}, "{not json"])
    depth = dice.choice([497, 499, 600])
    deep = '{"role": "a", "x": ' + "[" * depth + "]" * depth + "}"
    return dice.choice([deep, '{"role": "a", "x": NaN}', b"\xff"])


def fill(rollouts: Rollouts, dice: random.Random, *, steps: bool, groups: bool) -> None:
    share = dice.choice([0.0, 0.01, 0.05, 0.3, 0.9])
    with rollouts.together():
        for group in range(dice.randint(10, 60)):
            members = dice.randint(1, 4) if groups else 1
            for one in rollouts.register(members, group=f"g{group}"):
                for _ in range(dice.randint(0, 2) if steps else 0):
                    rollouts.step(one, messages=messages(dice, bad=dice.random() < share / 2))
                if dice.random() < share / 10:
                    rollouts.finish(one)
                    continue
                rollouts.complete(
                    one,
                    messages=messages(dice, bad=dice.random() < share),
                    response=response(dice, bad=dice.random() < share / 3),
                    reward=dice.choice([1.0, None]) if share > 0.04 else 1.0,
                    step_reward="much" if dice.random() < share / 5 else 0.0,
                    meta={"weight_version": dice.randint(0, 9)},
                )


def compare(folder: Path, patch: pytest.MonkeyPatch, seed: int) -> None:
    dice = random.Random(seed)
    samples, group_size = dice.choice(["terminal", "steps"]), dice.choice([0, 0, 2, 3])
    rollouts = make_rollouts(folder / "rollout.db", dice.choice(["second", "newest"]))
    fill(rollouts, dice, steps=samples == "steps", groups=group_size > 0)
    settings = {
        "samples": samples,
        "ready_when": "finished",
        "group_size": group_size,
        "batch_size": dice.choice([1, 2, 3, 5]),
        "batch_bytes": dice.choice([1 << 26, 1500, 5000]),
        "max_sample_bytes": dice.choice([1 << 28, 900, 2000, 3500]),
        "null_reward": dice.choice(["fallback", "wait", "reject"]),
        "partial_groups": dice.choice(["wait", "deliver", "reject"]),
        "group_timeout_seconds": dice.choice([1, 1800]),
        "missing_row_seconds": dice.choice([1, 600]),
        "max_pending_batches": 1000,
    }
    alone = drain(folder, patch, "alone", **settings)
    assert drain(folder, patch, "beside", busy=dice.choice([0.0, 0.3, 1.0]), **settings) == alone
    rollouts.close()


@pytest.mark.parametrize("seed", QUICK)
def test_any_database_with_any_bad_rows_gives_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    compare(tmp_path, monkeypatch, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MANY)
def test_many_databases_with_any_bad_rows_give_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    compare(tmp_path, monkeypatch, seed)


@pytest.fixture
def rollouts(tmp_path: Path) -> Iterator[Rollouts]:
    made = make_rollouts(tmp_path / "rollout.db")
    yield made
    made.close()


def both(
    folder: Path, patch: pytest.MonkeyPatch, **settings: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    alone, _ = drain(folder, patch, "alone", **settings)
    beside, _ = drain(folder, patch, "beside", **settings)
    return alone, beside


@pytest.mark.parametrize("broken", ['"content": "' + "x" * 80 + '\n"', '"content": 1\n2'])
def test_a_line_break_is_not_taken_out_of_messages_before_they_are_looked_into(
    tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    for one in rollouts.register(8):
        text = f'[{{"x": "{"x" * 80}", {broken}}}]' if one == 6 else "[]"
        rollouts.complete(one, messages=text)
    alone, beside = both(tmp_path, monkeypatch, batch_size=1)
    assert alone == beside
    assert "rejected/env-6.bad-json.json" in beside


def test_of_two_faults_the_note_names_the_one_that_comes_first(
    tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in rollouts.register(8):
        broken = {"messages": BROKEN, "response": b"\xff"} if one == 6 else {}
        rollouts.complete(one, **broken)
    alone, beside = both(tmp_path, monkeypatch, batch_size=1)
    assert alone == beside
    assert "messages" in beside["rejected/env-6.bad-json.json"]["what"]


def test_a_broken_member_of_a_group_is_not_taken_for_one_that_makes_it_too_big(
    tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group in range(8):
        for at, one in enumerate(rollouts.register(2, group=f"g{group}")):
            rollouts.complete(one, messages=BROKEN * 10 if (group, at) == (5, 0) else "[]")
    settings = {"group_size": 2, "batch_size": 1, "max_sample_bytes": 1500}
    alone, beside = both(tmp_path, monkeypatch, **settings)
    assert alone == beside
    assert [name for name in beside if "env-" in name] == ["rejected/env-11.bad-json.json"]


def test_a_batch_is_not_cut_because_of_what_cannot_be_part_of_it(
    tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in rollouts.register(16):
        rollouts.complete(one, messages=BROKEN * 20 if one == 10 else "[]")
    alone, beside = both(tmp_path, monkeypatch, batch_size=4, batch_bytes=2500)
    assert alone == beside
    assert "rejected/env-10.bad-json.json" in beside


def test_a_hundred_bad_rows_stop_reading_wherever_they_are_found_out(
    tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rollouts.together():
        for one in rollouts.register(240):
            bad = 8 < one <= 150
            in_reward = bad and one <= 70
            rollouts.complete(
                one,
                messages=BROKEN if bad and not in_reward else "[]",
                step_reward="much" if in_reward else 0.0,
            )
    alone = drain(tmp_path, monkeypatch, "alone", batch_size=4)
    assert drain(tmp_path, monkeypatch, "beside", batch_size=4) == alone
    left, stopped = alone
    assert stopped
    assert sum(name.startswith("rejected/env-") for name in left) == 100


def test_a_bad_row_is_counted_once_however_often_its_note_cannot_be_written(
    tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in rollouts.register(3):
        rollouts.complete(one, messages=BROKEN if one == 2 else "[]")
    full = [True]
    write_note = delivery.write_note

    def on_a_full_disk(*args: Any, **facts: Any) -> str:
        if full:
            raise SpoolWriteError("no space left", errno=errno.ENOSPC)
        return write_note(*args, **facts)

    monkeypatch.setattr(delivery, "write_note", on_a_full_disk)
    for where in (collecting, loop):
        monkeypatch.setattr(where, "BAD_ROWS", 5)
    with running(tmp_path, batch_size=1) as it:
        for _ in range(15):
            it.go(10.0)
        assert environments(it.run) == [1]
        full.clear()
        it.go(10.0)
        it.go(10.0)
        assert environments(it.run) == [1, 3]
        assert "bad-rows" not in it.reasons


def test_a_batch_of_groups_that_could_not_be_written_comes_before_those_after_it(
    tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group in range(6):
        for one in rollouts.register(2, group=f"g{group}"):
            rollouts.complete(one)
    publish = delivery.publish
    failures = [SpoolWriteError("no space left", errno=errno.ENOSPC)]

    def on_a_full_disk(*args: Any) -> None:
        if failures:
            raise failures.pop()
        publish(*args)

    monkeypatch.setattr(delivery, "publish", on_a_full_disk)
    with running(tmp_path, group_size=2, batch_size=2) as it:
        it.go()
        it.go(10.0)
        assert environments(it.run) == list(range(1, 13))
