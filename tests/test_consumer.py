"""A consumer claims, acks, releases, rejects; what lies where afterwards."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path

import pytest

from spoold import (
    Batch,
    BatchCorrupt,
    BatchLost,
    ConfigError,
    Consumer,
    ConsumerBusy,
    ConsumerError,
    SpoolWriteError,
    fs,
)
from spoold.consumer import identity, names
from spoold.errors import UnknownBatch
from spoold.layout import BatchName
from tests.support.handmade import ls, make_run_dir, put, sample


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    make_run_dir(root)
    return root


def claimed(consumer: Consumer, **options: int) -> Batch:
    batch = consumer.claim(**options)
    assert batch is not None
    return batch


# Claim, ack, release, reject ----------------------------------------------------------------------


def test_batches_are_claimed_oldest_first_and_acked(run: Path) -> None:
    names = [put(run, seq) for seq in (3, 1, 2)]
    first = min(names, key=lambda name: name.seq)
    with Consumer(run, name="trainer-0") as consumer:
        batch = claimed(consumer)
        assert ls(run)[0] == f"inflight/trainer-0/{first.file_name}"
        assert batch.id == first.id
        assert batch.path == str(run / "inflight/trainer-0" / first.file_name)
        assert (batch.attempt, batch.weight_versions, len(batch)) == (1, (7, 7), 1)
        batch.ack(step=120)
        assert batch.path == str(run / "acked/step-000000120" / first.file_name)
        claimed(consumer).ack()
        assert claimed(consumer).id.startswith("000000003")
        assert consumer.claim() is None
    assert [path.rpartition("/")[0] for path in ls(run)] == [
        "acked",
        "acked/step-000000120",
        "inflight/trainer-0",
    ]


def test_a_number_of_ten_digits_is_younger_than_one_of_nine(run: Path) -> None:
    put(run, 1_000_000_000)
    put(run, 999_999_999)
    with Consumer(run) as consumer:
        assert [claimed(consumer).id[:10] for _ in range(2)] == ["999999999-", "1000000000"]


def test_claim_returns_none_when_another_consumer_won(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = put(run, 1), put(run, 2)
    with Consumer(run, name="slow") as slow, Consumer(run, name="fast") as fast:
        monkeypatch.setattr(names, "LISTING_SECONDS", 1000.0)
        assert claimed(slow).id == first.id  # and has listed the second
        assert claimed(fast).id == second.id
        assert slow.claim() is None
        assert slow.reason().startswith("no daemon runs on")


def test_acking_twice_is_a_no_op(run: Path) -> None:
    name = put(run, 1)
    with Consumer(run) as consumer:
        batch = claimed(consumer)
        batch.ack(step=5)
        os.rename(batch.path, run / "acked" / name.file_name)
        batch.ack(step=6)
        assert ls(run) == [f"acked/{name.file_name}"]


def test_a_batch_that_is_held_or_acked_is_never_handed_out_again(run: Path) -> None:
    name = put(run, 1)
    with Consumer(run) as consumer:
        batch = claimed(consumer)
        put(run, 1)  # a copy turns up, as from cp
        assert consumer.claim() is None
        batch.ack()
        assert consumer.claim() is None
        put(run, 1, where="inflight/trainer-0", attempt=2)
        assert consumer.claim() is None
    assert ls(run) == [
        f"acked/{name.file_name}",
        f"inflight/trainer-0/{name.id}.try02.jsonl",
        f"pending/{name.file_name}",
    ]


def test_several_batches_can_be_held_and_acked_together(run: Path) -> None:
    names = [put(run, seq) for seq in range(1, 5)]
    with Consumer(run) as consumer:
        batches = [claimed(consumer) for _ in names]
        assert consumer.held == tuple(batches)
        assert "holds 4 batches" in consumer.reason()
        for batch in reversed(batches):
            batch.ack(step=1)
        assert consumer.held == ()
    assert ls(run) == [f"acked/step-000000001/{name.file_name}" for name in names]


def test_release_gives_back_under_the_same_name_and_at_once(run: Path) -> None:
    name = put(run, 1, attempt=3)
    put(run, 2)
    with Consumer(run) as consumer:
        batch = claimed(consumer)
        batch.release()
        assert f"pending/{name.file_name}" in ls(run)
        again = claimed(consumer)
        assert (again.id, again.attempt) == (batch.id, 3)
        with pytest.raises(ConsumerError, match="released before"):
            batch.ack()


def test_reject_moves_into_a_folder_of_that_reason(run: Path) -> None:
    name = put(run, 1)
    with Consumer(run) as consumer:
        batch = claimed(consumer)
        for reason in ("", "../x", "duplicate", "a b"):
            with pytest.raises(ConfigError):
                batch.reject(reason)
        batch.reject("oom")
        with pytest.raises(ConsumerError, match="rejected before"):
            batch.release()
    assert ls(run) == [f"rejected/oom/{name.file_name}"]


@pytest.mark.parametrize("act", ["ack", "release", "reject"])
def test_a_batch_that_was_moved_away_is_lost_and_the_error_says_where_it_lies(
    run: Path, act: str
) -> None:
    name = put(run, 1)
    with Consumer(run) as consumer:
        batch = claimed(consumer)
        (run / "inflight/other").mkdir()
        os.rename(batch.path, run / "inflight/other" / name.file_name)
        with pytest.raises(BatchLost, match="it lies in inflight/other/ now"):
            batch.reject("oom") if act == "reject" else getattr(batch, act)()
        assert consumer.held == ()
        with pytest.raises(BatchLost):
            batch.samples()
    assert ls(run) == [f"inflight/other/{name.file_name}"]


def test_ack_of_a_removed_batch_is_lost(run: Path) -> None:
    put(run, 1)
    with Consumer(run) as consumer:
        batch = claimed(consumer)
        os.unlink(batch.path)
        with pytest.raises(BatchLost, match="somebody removed it"):
            batch.ack()


def test_ack_of_a_retired_batch_warns_and_succeeds(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = put(run, 1)
    with Consumer(run) as consumer:
        batch = claimed(consumer)
        there = run / "retired/20261129-job/inflight/trainer-0"
        there.mkdir(parents=True)
        os.rename(batch.path, there / name.file_name)
        batch.ack(step=1)
        assert batch.path == str(there / name.file_name)
    assert "source that was replaced" in caplog.text


def test_ack_makes_acked_when_it_is_missing(run: Path) -> None:
    name = put(run, 1)
    (run / "acked").rmdir()
    with Consumer(run) as consumer:
        claimed(consumer).ack()
    assert ls(run) == [f"acked/{name.file_name}"]


def test_an_impossible_step_is_refused_and_the_batch_stays(run: Path) -> None:
    put(run, 1)
    with Consumer(run) as consumer:
        batch = claimed(consumer)
        with pytest.raises(ConfigError):
            batch.ack(step=-1)
        batch.ack(step=0)
    assert ls(run)[0].startswith("acked/step-000000000/")


# Damaged and unknown files ------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [b"", b"\0" * 40, b'{"uid": "torn'])
def test_a_batch_that_fails_its_digest_is_set_aside_and_the_next_is_handed_out(
    run: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    bad, good = put(run, 1), put(run, 2)
    (run / "pending" / bad.file_name).write_bytes(damage)
    with Consumer(run) as consumer:
        assert claimed(consumer).id == good.id
    assert ls(run) == [
        f"inflight/trainer-0/{good.file_name}",
        f"rejected/corrupt/{bad.file_name}",
    ]
    assert bad.id in caplog.text


def test_what_is_no_batch_is_left_alone(run: Path) -> None:
    good = put(run, 9)
    (run / "pending" / "000000001-notes.jsonl").write_text("mine\n")
    (run / "pending" / BatchName.parse(good.file_name).next_attempt().file_name).mkdir()  # type: ignore[union-attr]
    os.symlink("/etc/hostname", run / "pending" / f"000000001{good.file_name[9:]}")
    os.close(os.open(os.fsencode(run) + b"/pending/\xff.jsonl", os.O_CREAT))
    with Consumer(run) as consumer:
        claimed(consumer).ack()
        assert consumer.claim() is None
    assert len(os.listdir(run / "pending")) == 4
    assert len(os.listdir(run / "acked")) == 1


def test_a_folder_that_cannot_be_read_never_counts_as_empty(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    with Consumer(run) as consumer:
        monkeypatch.setattr(os, "scandir", denied)
        with pytest.raises(SpoolWriteError, match="cannot list"):
            consumer.claim()


# Restart ------------------------------------------------------------------------------------------


def test_own_batches_come_first_after_a_restart_as_their_next_try(run: Path) -> None:
    with Consumer(run) as consumer:
        put(run, 2)
        held = claimed(consumer)
    put(run, 1)
    with Consumer(run) as consumer:
        again = claimed(consumer)
        assert (again.id, again.attempt) == (held.id, 2)
        assert os.path.basename(again.path) == f"{held.id}.try02.jsonl"
        assert claimed(consumer).attempt == 1


def test_a_batch_moved_in_by_hand_is_handed_out_as_it_is(run: Path) -> None:
    name = put(run, 5, attempt=2)
    with Consumer(run) as consumer:
        os.rename(run / "pending" / name.file_name, run / "inflight/trainer-0" / name.file_name)
        put(run, 1)
        batch = claimed(consumer)
        assert (batch.id, batch.attempt) == (name.id, 2)


def test_past_max_attempts_a_left_over_batch_is_rejected(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = put(run, 1)
    for attempt in (1, 2):
        with Consumer(run, max_attempts=2) as consumer:
            assert claimed(consumer).attempt == attempt
    with Consumer(run, max_attempts=2) as consumer:
        assert consumer.claim() is None
    assert ls(run) == [f"rejected/attempts/{name.id}.try02.jsonl"]
    assert "handed out 2 times" in caplog.text


def test_an_exception_in_the_loop_leaves_the_batch_in_flight(run: Path) -> None:
    name = put(run, 1)

    def train() -> None:
        with Consumer(run) as consumer:
            for batch in consumer:
                assert not batch.samples()

    with pytest.raises(AssertionError):
        train()
    assert ls(run) == [f"inflight/trainer-0/{name.file_name}"]
    with Consumer(run) as consumer:
        assert claimed(consumer).attempt == 2


def test_a_closed_consumer_neither_claims_nor_acks(run: Path) -> None:
    put(run, 1)
    with Consumer(run) as consumer:
        batch = claimed(consumer)
    consumer.close()
    with pytest.raises(ConsumerError, match="is closed"):
        consumer.claim()
    with pytest.raises(ConsumerError, match="is closed"):
        batch.ack()
    with pytest.raises(ConsumerError, match="is closed"), consumer:
        pass


# The name and its lock ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a/b", "..", ".lock", "-a", "a" * 49, "ä", "a b"])
def test_a_name_that_cannot_be_a_folder_is_refused(run: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        Consumer(run, name=name)


def test_a_second_consumer_of_a_name_is_busy_and_the_first_goes_on(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "BUSY_SECONDS", 0.1)
    put(run, 1)
    with Consumer(run) as first:
        with pytest.raises(ConsumerBusy, match=f"pid {os.getpid()}"), Consumer(run):
            pass
        claimed(first).ack()


def test_a_busy_lock_is_tried_again_for_five_seconds(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.5
        return now

    monkeypatch.setattr(identity, "BUSY_PAUSE_SECONDS", 0.0)
    with Consumer(run), pytest.raises(ConsumerBusy):
        Consumer(run, clock=clock).claim()
    assert 5.0 <= now <= 15.0


def test_a_lock_that_was_only_probed_is_had(run: Path) -> None:
    put(run, 1)
    first = Consumer(run)
    first.claim()
    tries = 0

    def clock() -> float:
        nonlocal tries
        tries += 1
        if tries == 4:
            first.close()
        return 0.0

    with Consumer(run, clock=clock) as second:
        assert claimed(second).attempt == 2


def test_a_lock_file_removed_while_held_is_locked_anew_or_the_consumer_stops(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(identity, "BUSY_SECONDS", 0.0)
    put(run, 1)
    with Consumer(run) as first:
        (run / "inflight/trainer-0/.lock").unlink()
        claimed(first).ack()
        assert "was removed while it was held" in caplog.text
        (run / "inflight/trainer-0/.lock").unlink()
        with Consumer(run), pytest.raises(ConsumerBusy):
            first.claim()


def test_modes_do_not_depend_on_the_umask(run: Path) -> None:
    put(run, 1)
    before = os.umask(0o077)
    try:
        with Consumer(run) as consumer:
            claimed(consumer).ack(step=1)
    finally:
        os.umask(before)
    modes = {
        path: stat.S_IMODE((run / path).stat().st_mode)
        for path in ("inflight/trainer-0", "inflight/trainer-0/.lock", "acked/step-000000001")
    }
    assert modes == {
        "inflight/trainer-0": 0o2770,
        "inflight/trainer-0/.lock": 0o660,
        "acked/step-000000001": 0o2770,
    }


# The run directory --------------------------------------------------------------------------------


def test_a_run_directory_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with Consumer(root) as consumer:
        assert consumer.claim() is None
        assert consumer.claim(timeout=0.01) is None
        assert consumer.rewind(step=3) == []
        assert not root.exists()
        assert "is not there yet" in consumer.reason()
        root.mkdir()
        assert consumer.claim() is None
        assert ls(root) == []
        assert "has no pending/ yet" in consumer.reason()
        for folder in ("pending", "inflight", "acked", "rejected"):
            (root / folder).mkdir()
        put(root, 1)
        assert claimed(consumer).attempt == 1


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_file_is_no_run_directory(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is no directory"), Consumer(tmp_path / path):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_a_relative_run_directory_outlives_a_change_of_folder(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(run, 1)
    monkeypatch.chdir(run.parent)
    with Consumer("run") as consumer:
        monkeypatch.chdir("/")
        batch = claimed(consumer)
        assert os.path.isabs(batch.path)
        batch.ack()


# Rewind -------------------------------------------------------------------------------------------


def test_rewind_puts_back_exactly_the_later_steps_under_the_same_names(run: Path) -> None:
    names = [put(run, seq, attempt=2 if seq == 8 else 1) for seq in range(1, 13)]
    with Consumer(run) as consumer:
        batches = [claimed(consumer) for _ in range(11)]
        for step, batch in zip(range(1, 11), batches, strict=False):
            batch.ack(step=step)
        batches[10].ack()
        before = {name.file_name: (run / "acked").rglob(name.file_name) for name in names}
        assert all(before)
        assert consumer.rewind(step=5) == [name.id for name in names[5:10]]
        assert sorted(os.listdir(run / "pending")) == sorted(
            n.file_name for n in names[5:10] + names[11:]
        )
        assert sorted(p.name for p in (run / "acked").rglob("*.jsonl")) == sorted(
            n.file_name for n in names[:5] + names[10:11]
        )
        # This very object hands them out again, in order.
        assert [claimed(consumer).id for _ in range(5)] == [name.id for name in names[5:10]]
        assert consumer.rewind(step=5) == []


def test_rewind_before_the_first_claim_holds_the_lock(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "BUSY_SECONDS", 0.0)
    put(run, 1, where="acked/step-000000007")
    with Consumer(run), pytest.raises(ConsumerBusy):
        Consumer(run).rewind(step=0)
    assert Consumer(run).rewind(step=6) != []
    with pytest.raises(ConfigError):
        Consumer(run).rewind(step=None)  # type: ignore[arg-type]


# Staleness ----------------------------------------------------------------------------------------


def test_stale_batches_are_passed_over_by_name_and_counted(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = put(run, 1, weights=(3, 4))
    unversioned = put(run, 2, weights=(0, 0))
    edge = put(run, 3, weights=(2, 5))
    os.truncate(run / "pending" / old.file_name, 0)  # it is never opened
    with Consumer(run) as consumer:
        assert claimed(consumer, min_weight_version=5).id == edge.id
        assert consumer.stale == 2
        assert consumer.claim(min_weight_version=5) is None
        assert "2 batches were passed over as stale" in consumer.reason()
    assert ls(run) == [
        f"acked/stale/{old.file_name}",
        f"acked/stale/{unversioned.file_name}",
        f"inflight/trainer-0/{edge.file_name}",
    ]
    assert caplog.text.count("no usable weight version") == 1


# What a trainer reads -----------------------------------------------------------------------------


def test_samples_are_what_the_file_holds_exactly(run: Path) -> None:
    rows = [sample(1), sample(2)]
    rows[0]["messages"] = [{"role": "user", "content": "\u2028 ü \U0001f600", "n": 2**80}]
    put(run, 1, samples=rows)
    with Consumer(run) as consumer:
        batch = claimed(consumer)
        assert batch.samples() == rows
        batch.ack()
        assert batch.samples() == rows


def test_groups_come_whole_and_in_order(run: Path) -> None:
    groups = ["b", "b", "", "a", "a"]
    put(run, 1, samples=[sample(i, group=group) for i, group in enumerate(groups)])
    with Consumer(run) as consumer:
        ids = [[s["uid"] for s in group] for group in claimed(consumer).groups()]
    assert ids == [["env-0000:0", "env-0001:1"], ["env-0002:2"], ["env-0003:3", "env-0004:4"]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize(
    "sizes", [[1] * 13, [8] * 8, [8] * 5, [1], [3, 1, 1, 4, 2], [1, 7]], ids=str
)
def test_shards_have_equal_counts_whole_groups_and_leave_nothing_out(
    run: Path, sizes: list[int], world_size: int
) -> None:
    rows = [
        sample(100 * g + member, group=f"g{g}") for g, n in enumerate(sizes) for member in range(n)
    ]
    put(run, 1, samples=rows)
    batch = Batch.open(next((run / "pending").iterdir()))
    shards = [batch.shard(rank, world_size) for rank in range(world_size)]
    assert len({len(shard) for shard in shards}) == 1
    own: list[str] = []
    for shard in shards:
        uids = [row["uid"] for row in shard]
        first = list(dict.fromkeys(uids))
        if not set(first) & set(own):
            own += first
            groups = {row["instance_id"] for row in shard}
            assert all(
                sum(uid in first for uid in members) == len(members)
                for members in (
                    [r["uid"] for r in rows if r["instance_id"] == group] for group in groups
                )
            )
            # What follows a rank's own samples repeats them from the beginning.
            assert uids == (first * len(uids))[: len(uids)]
    assert sorted(own) == sorted(str(row["uid"]) for row in rows)


def test_equal_groups_are_dealt_round_robin_without_repeats_when_they_come_out_even(
    run: Path,
) -> None:
    put(run, 1, samples=[sample(i, group=f"g{i // 2}") for i in range(8)])
    batch = Batch.open(next((run / "pending").iterdir()))
    assert [[row["extra_info"]["environment"] for row in batch.shard(r, 2)] for r in (0, 1)] == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]
    for rank, world_size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError):
            batch.shard(rank, world_size)


def test_a_rank_that_opens_a_batch_reads_it_and_cannot_ack_it(run: Path) -> None:
    put(run, 1)
    with Consumer(run) as consumer:
        batch = claimed(consumer)
        opened = Batch.open(batch.path)
        assert (opened.id, opened.samples()) == (batch.id, batch.samples())
        with pytest.raises(ConsumerError, match="opened for reading"):
            opened.ack()
        with pytest.raises(UnknownBatch):
            Batch.open(run / "pending" / "nothing.jsonl")
        damaged = Batch.open(batch.path)
        Path(batch.path).write_bytes(b"{}\n")
        with pytest.raises(BatchCorrupt):
            damaged.samples()


# Reasons ------------------------------------------------------------------------------------------


def status(**changes: object) -> bytes:
    facts: dict[str, object] = {
        "format": 1, "version": "0.1.0", "pid": 1, "host": "h", "started": 0.0, "updated": 0.0,
        "job": "job", "url": "x.db", "ready_when": "finished", "state": "waiting", "reasons": [],
        "source": {"running": 0, "ready": 0, "missing_rows": 0, "groups": []},
        "published": {"batches": 0, "samples": 0, "environments": 0, "bytes": 0, "last": None},
        "delivered": 40, "rejected": {"notes": 0, "latest": None},
    }  # fmt: skip
    return json.dumps(facts | changes).encode()


def test_reason_tells_an_absent_daemon_from_a_waiting_one_and_from_the_end(run: Path) -> None:
    from spoold.fs import Lock

    report = run / ".spoold/status.json"
    severe = {"code": "disk-space", "since": 0, "text": "the disk is full", "remedy": "free some"}
    other = {"code": "linger", "since": 0, "text": "a batch lingers", "remedy": ""}
    with Consumer(run) as consumer:
        assert consumer.reason() == f"no daemon runs on {run}"
        report.write_bytes(status(reasons=[severe]))
        assert consumer.reason().endswith("1970-01-01T00:00:00Z: the disk is full)")
        lock = Lock(str(run / ".spoold/lock"))
        assert lock.acquire()
        report.write_bytes(status(reasons=[other, severe]))
        assert consumer.reason() == "the disk is full (free some); a batch lingers"
        report.write_bytes(status())
        assert "nothing is running any more: all 40 environments" in consumer.reason()
        report.write_bytes(b"{torn")
        assert "cannot be used" in consumer.reason()
        report.unlink()
        assert "has not reported yet" in consumer.reason()
        put(run, 1)
        assert "1 batches are pending" in consumer.reason()
        consumer.stop()
        assert consumer.reason() == "stop() was called"
        lock.release()


def test_a_long_wait_says_why_after_a_minute_and_then_ever_more_rarely(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 30.0
        return now

    caplog.set_level(logging.INFO, "spoold")
    with Consumer(run, clock=clock) as consumer:
        assert consumer.claim(timeout=1000.0) is None
    # After 1 minute, about 2, 4, …: of a thousand seconds, here four to the look.
    assert caplog.text.count("waits for a batch: no daemon runs on") == 3


def test_who_holds_a_name_is_said_also_when_it_left_a_process_behind(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "BUSY_SECONDS", 0.0)
    with Consumer(run):
        lock = run / "inflight/trainer-0/.lock"
        facts = json.loads(lock.read_text())
        lock.write_text(json.dumps(facts | {"pid": 2**30}))
        with pytest.raises(ConsumerBusy, match=r"left behind holds its lock; `fuser .*\.lock`"):
            Consumer(run).claim()


def test_reason_says_when_nothing_has_begun_and_who_holds_the_rest(run: Path) -> None:
    report, lock = run / ".spoold/status.json", fs.Lock(str(run / ".spoold/lock"))
    assert lock.acquire()
    with Consumer(run) as consumer:
        report.write_bytes(status(delivered=0))
        assert consumer.reason() == "no environment is running yet"
        report.write_bytes(status())
        put(run, 1, where="inflight/trainer-1")
        put(run, 2, where="inflight")
        assert consumer.reason().endswith("; claimed and not acked: 1 by hand, 1 by trainer-1")
    lock.release()
