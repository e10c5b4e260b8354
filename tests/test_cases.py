"""What went wrong for others, turned into inputs: each case of delivery, and where its test is.

| case | what | test |
|---|---|---|
| 1 | polled again before acking | `test_consumer.py`: claims; here: two consumers, one batch |
| 2 | terminal row whose reward is null | here; `test_delivery.py::TestRewards` |
| 3 | killed after 64 of 100 | here |
| 4 | late, long rollouts lost at restarts | here |
| 6 | a fresh run in a used directory | here |
| 7 | a stuck member of a group | here; `test_delivery.py::TestGroups` |
| 8 | hours of waiting, no reason shown | here; `test_delivery.py::TestReasons`, `TestOutOfReach` |
| 11 | a column that is null in the first file | here |
| 12 | "database is locked" for the writer | `slow/test_beside_a_writer.py` |
| 19 | own reads wake the watcher | here; `test_watch.py` |
| 20 | sidecars under another uid | `test_source_guest.py` |
| 21 | read-only directory, no sidecars | `test_source_guest.py`; here |
| 22 | a long reader pins the WAL | here (100,000 rows: slow) |
| 23 | restored from a backup | `test_delivery.py::TestIdentity`, `test_model_writer.py` |
| 32 | surrogates, endless integers, NaN | here; `test_codec.py` |
| 33 | every rollout failed | here |
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spoold.consumer import Consumer
from spoold.errors import ConfigError
from spoold.sources.sqlite_open import Database
from spoold.watch import Hints
from tests.support.batches import tree
from tests.support.daemons import Running, environments, running, start
from tests.support.rollouts import Rollouts, make_rollouts


@pytest.fixture
def rollouts(tmp_path: Path) -> Iterator[Rollouts]:
    made = make_rollouts(tmp_path / "rollout.db")
    yield made
    made.close()


def complete(rollouts: Rollouts, count: int, *, group: str = "", **facts: Any) -> list[int]:
    ids = rollouts.register(count, group=group)
    with rollouts.together():
        for one in ids:
            rollouts.complete(one, **facts)
    return ids


def samples(it: Running) -> list[dict[str, Any]]:
    lines = []
    for name in tree(it.run):
        if name.endswith(".jsonl"):
            lines += Path(it.run.root, name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_case_1_a_batch_that_is_held_is_handed_to_nobody_else_and_acked_once(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    complete(rollouts, 1)
    with running(tmp_path) as it:
        it.go()
        with Consumer(it.run.root, name="a") as one, Consumer(it.run.root, name="b") as two:
            batch = one.claim(timeout=0)
            assert batch is not None
            assert one.claim(timeout=0) is None
            assert two.claim(timeout=0) is None
            batch.ack(step=1)
            batch.ack(step=1)
        it.go()
        assert environments(it.run) == [1]


def test_case_2_a_null_reward_is_delivered_at_the_first_look_and_never_read_again(
    tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = complete(rollouts, 2, reward=None, step_reward=0.25)
    read: list[int] = []
    with running(tmp_path) as it:
        source = it.daemon.looking.source
        inner = source.read

        def counted(ids: list[int]) -> Any:
            read.extend(ids)
            return inner(ids)

        monkeypatch.setattr(source, "read", counted)
        it.go()
        for _ in range(5):
            it.go(61.0)
        assert read == ids
        rows = samples(it)
        assert [(row["reward"], row["extra_info"]["reward_source"]) for row in rows] == [
            (0.25, "step_reward")
        ] * 2


def test_case_3_killed_after_64_of_100_the_restart_delivers_the_other_36(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    ids = complete(rollouts, 100)
    it = start(tmp_path, max_pending_batches=1)
    it.go()
    assert environments(it.run) == ids[:64]
    it.kill()
    with running(tmp_path) as again:
        again.go()
        assert environments(again.run) == ids


@pytest.mark.parametrize("seed", range(2))
def test_case_4_two_hundred_in_reverse_order_and_twenty_kills(
    tmp_path: Path, rollouts: Rollouts, seed: int
) -> None:
    ids = rollouts.register(200, group="")
    rng = random.Random(seed)
    kills = set(rng.sample(range(200), 20))
    it = start(tmp_path, batch_size=7, max_pending_batches=1000)
    for k, one in enumerate(reversed(ids)):
        rollouts.complete(one)
        if rng.random() < 0.5:
            it.daemon.hint(source=True, spool=False)
            it.daemon.step()
        if k in kills:
            it.kill()
            it = start(tmp_path, batch_size=7, max_pending_batches=1000)
    it.go()
    it.kill()
    assert sorted(environments(it.run)) == ids


def test_case_6_a_used_run_directory_refuses_another_job_and_stays_as_it_is(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    complete(rollouts, 1)
    with running(tmp_path) as it:
        it.go()
        before = {name: Path(it.run.root, name).read_bytes() for name in tree(it.run)}
    rollouts.complete(*rollouts.register(1, job="job-2"))
    other = start(tmp_path, job="job-2")
    with pytest.raises(ConfigError, match=r"'job-1'.*'job-2'") as caught:
        other.go()
    other.kill()
    assert caught.value.exit_code == 78
    assert {name: Path(it.run.root, name).read_bytes() for name in tree(it.run)} == before


def test_case_7_a_stuck_member_blocks_nobody_and_comes_late_after_a_restart(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    stuck = rollouts.register(4, group="stuck")
    for one in stuck[:3]:
        rollouts.complete(one)
    facts = {"group_size": 4, "partial_groups": "deliver", "group_timeout_seconds": 100}
    it = start(tmp_path, **facts)
    it.go()
    flows = complete(rollouts, 4, group="flows")
    it.go(50.0)
    assert environments(it.run) == flows
    it.kill()
    with running(tmp_path, **facts) as again:
        again.go(99.0)
        again.go(99.0)  # a restart starts the wait again
        assert environments(again.run) == flows
        again.go(99.0)
        assert environments(again.run) == [*flows, *stuck[:3]]
    rollouts.complete(stuck[3])
    with running(tmp_path, **facts) as again:
        again.go()
        assert tree(again.run, "rejected") == [f"rejected/env-{stuck[3]}.late.json"]


def test_case_8_status_names_the_reason_whatever_it_is(tmp_path: Path, rollouts: Rollouts) -> None:
    with running(tmp_path, group_size=2, max_pending_batches=1) as it:
        it.go()
        assert list(it.reasons) == ["source-unavailable"]
        assert it.status.reasons[0].since > 0
        rollouts.step(*rollouts.register(1))
        it.go(20.0)
        assert list(it.reasons) == ["waiting-for-environments"]
        complete(rollouts, 1, group="half")
        it.go()
        assert "half has 1 of 2" in it.reasons["groups-incomplete"]
        complete(rollouts, 2, group="whole")
        it.go()
        assert "backpressure" in it.reasons
        os.rename(tmp_path / "rollout.db", tmp_path / "away.db")
        os.unlink(f"{it.run.root}/{tree(it.run)[0]}")
        it.settle()
        it.go(20.0)
        assert "no database at" in it.reasons["source-unavailable"]


def test_case_11_a_key_has_one_type_in_every_row(tmp_path: Path, rollouts: Rollouts) -> None:
    one, two, three = rollouts.register(2, group=None) + rollouts.register(1, group="g")
    rollouts.complete(one, reward=None, meta=None, created_at="never")
    rollouts.complete(two, reward=1, meta={"weight_version": "7"})
    rollouts.complete(three, truncated=True, job=None)
    with running(tmp_path, batch_size=1) as it:
        it.go()
        rows = samples(it)

    def types(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: types(each) for key, each in value.items() if key != "messages"}
        return type(value).__name__

    assert len(rows) == 3
    assert types(rows[0]) == types(rows[1]) == types(rows[2])
    assert "NoneType" not in str(types(rows[0]))


def test_case_19_idle_means_idle_beside_an_open_database(
    tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real events: what we read ourselves does not wake us, whatever the clock says."""
    complete(rollouts, 5)
    hints = Hints()
    with running(tmp_path) as it:
        it.go()
        source = it.daemon.looking.source
        for folder, names in source.watched().items():
            hints.watch(folder, tag="source", modified=True, names=names.__contains__)
        hints.wait(0)
        heard: set[str] = set()
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            it.daemon.looking.hint()
            it.daemon.step()
            list(source.read([1, 2, 3]))
            heard |= set(hints.wait(0.01))
        assert heard == set()
        complete(rollouts, 1)
        assert "source" in hints.wait(10.0)
    hints.close()


def test_case_21_a_daemon_on_a_folder_that_cannot_be_read_waits_and_says_so(
    tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(rollouts, 1)
    real = os.stat

    def denied(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if str(path).endswith("rollout.db"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **kwargs)

    with running(tmp_path) as it:
        with monkeypatch.context() as patch:
            patch.setattr("spoold.sources.sqlite_open.os.stat", denied)
            for _ in range(5):
                it.go(10.0)
            assert "permission denied" in it.reasons["source-unavailable"]
            assert "read permission" in it.status.reasons[0].remedy
        it.go(30.0)
        assert environments(it.run) == [1]


@pytest.mark.parametrize(
    "count", [3_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.alone])]
)
def test_case_22_no_transaction_of_a_drain_takes_a_second_and_the_wal_is_truncated_between(
    tmp_path: Path, rollouts: Rollouts, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(rollouts, count)
    took: list[float] = []
    inner = Database.transaction

    @contextlib.contextmanager
    def timed(database: Database) -> Iterator[sqlite3.Connection]:
        began = time.monotonic()
        with inner(database) as connection:
            yield connection
        took.append(time.monotonic() - began)

    monkeypatch.setattr(Database, "transaction", timed)
    truncated = 0
    it = start(tmp_path, batch_size=512, max_pending_batches=10_000)
    while len(it.daemon.inventory.skip) < count:
        it.daemon.step()
        rollouts.step(1)
        (busy, _, _) = rollouts.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        truncated += not busy
    it.kill()
    assert max(took) < 1.0
    assert truncated > 0


def test_case_32_bytes_are_always_utf8_json_exact_or_rejected_with_the_reason(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    texts = {
        "surrogate": '[{"role": "user", "content": "\\ud800"}]',
        "integer": '[{"role": "user", "n": 123456789012345678901234567890}]',
        "nan": '[{"role": "user", "n": NaN}]',
        "nul": '[{"role": "user", "content": "a\\u0000b"}]',
        "empty": "",
        "no list": '{"role": "user"}',
        "broken": '[{"role": "us',
    }
    ids = dict(zip(texts, rollouts.register(len(texts), group=""), strict=True))
    for name, text in texts.items():
        rollouts.complete(ids[name], messages=text, response="")
    with running(tmp_path) as it:
        it.go()
        rows = {row["extra_info"]["environment"]: row["messages"][0] for row in samples(it)}
        assert rows == {
            ids["integer"]: {"role": "user", "n": 123456789012345678901234567890},
            ids["nul"]: {"role": "user", "content": "a\0b"},
        }
        assert tree(it.run, "rejected") == sorted(
            f"rejected/env-{ids[name]}.{reason}.json"
            for name, reason in {
                "surrogate": "bad-json",
                "nan": "bad-json",
                "empty": "bad-json",
                "broken": "bad-json",
                "no list": "bad-messages",
            }.items()
        )


def test_case_33_where_every_rollout_failed_no_batch_is_published(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    complete(rollouts, 5, messages="{}")
    with running(tmp_path, batch_size=2) as it:
        it.go()
        assert tree(it.run, "pending") == []
        assert it.status.rejected.notes == 5
        assert tree(it.run, ".spoold/tmp") == []
