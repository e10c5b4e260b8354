"""Several batches at once, several consumers at once, and batches that are too old."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spoold import Batch, BatchLost, ConfigError, Consumer
from tests.support.commands import spoold
from tests.support.handmade import ls, make_run_dir, put, sample


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run_dir(tmp_path / "run")


def claimed(consumer: Consumer) -> Batch:
    batch = consumer.claim()
    assert batch is not None
    return batch


# Several at once ----------------------------------------------------------------------------------


def test_collect_claims_until_enough_samples_are_in_hand_and_all_are_acked_together(
    run: Path,
) -> None:
    names = [put(run, seq, samples=[sample(seq), sample(seq + 100)]) for seq in (1, 2, 3, 4)]
    with Consumer(run) as consumer:
        batches = consumer.collect(samples=5)
        assert batches is not None
        assert [batch.id for batch in batches] == [name.id for name in names[:3]]
        consumer.ack_held(step=9)
        assert consumer.held == ()
    assert ls(run) == [
        *(f"acked/step-000000009/{name.file_name}" for name in names[:3]),
        f"pending/{names[3].file_name}",
    ]


def test_collect_counts_a_group_that_lies_in_two_batches_once(run: Path) -> None:
    for seq, groups in enumerate([["a", "a"], ["a", "b"], ["c"], ["d"]], 1):
        put(run, seq, samples=[sample(10 * seq + i, group=g) for i, g in enumerate(groups)])
    with Consumer(run) as consumer:
        assert len(consumer.collect(groups=2) or ()) == 2
        # What is in hand counts; nothing more is claimed than is asked for.
        assert len(consumer.collect(groups=2) or ()) == 2
        assert len(consumer.collect(groups=3) or ()) == 3


def test_collect_that_does_not_get_enough_keeps_it_in_hand_and_says_so(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 30.0
        return now

    put(run, 1)
    with Consumer(run, clock=clock) as consumer:
        assert consumer.collect(samples=2, timeout=500.0) is None
        assert caplog.records[0].levelname == "WARNING"
        assert "this consumer holds 1 batches (1 samples) that are not acked" in caplog.text
        (batch,) = consumer.held
        put(run, 2)
        assert consumer.collect(samples=2, timeout=500.0) == (batch, consumer.held[1])
        consumer.stop()
        assert consumer.collect(samples=3) is None


def test_collect_passes_over_a_batch_that_was_moved_away_before_it_was_read(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(run, 1)
    second = put(run, 2)
    with Consumer(run) as consumer:
        held = claimed(consumer)
        os.rename(held.path, run / "rejected" / os.path.basename(held.path))
        assert [batch.id for batch in consumer.collect(groups=1) or ()] == [second.id]


@pytest.mark.parametrize("wanted", [{}, {"samples": 1, "groups": 1}, {"samples": -1}])
def test_collect_wants_samples_or_groups(run: Path, wanted: dict[str, int]) -> None:
    with Consumer(run) as consumer, pytest.raises(ConfigError):
        consumer.collect(**wanted)


def test_ack_held_acks_all_that_are_there_before_it_says_that_one_is_lost(run: Path) -> None:
    names = [put(run, seq) for seq in (1, 2, 3)]
    with Consumer(run) as consumer:
        batches = consumer.collect(samples=3) or ()
        os.rename(batches[1].path, run / "pending" / names[1].file_name)
        with pytest.raises(BatchLost, match="it lies in pending/ now"):
            consumer.ack_held(step=1)
    assert ls(run) == [
        f"acked/step-000000001/{names[0].file_name}",
        f"acked/step-000000001/{names[2].file_name}",
        f"pending/{names[1].file_name}",
    ]


# Rewind early, and nothing but stale batches ------------------------------------------------------


def test_a_rewind_before_there_is_a_run_directory_is_made_before_the_first_claim(
    tmp_path: Path,
) -> None:
    # As when the file system with it is mounted late: what it missed would be trained on twice,
    # or never.
    root = tmp_path / "run"
    with Consumer(root) as consumer:
        assert consumer.rewind(step=5) == []
        make_run_dir(root)
        later = put(root, 1, where="acked/step-000000006")
        kept = put(root, 2, where="acked/step-000000005")
        assert claimed(consumer).id == later.id
        assert consumer.claim() is None
    assert ls(root)[0] == f"acked/step-000000005/{kept.file_name}"


def test_without_a_checkpoint_a_trainer_rewinds_to_minus_one(run: Path) -> None:
    name = put(run, 1, where="acked/step-000000000")
    with Consumer(run) as consumer:
        assert consumer.rewind(step=0) == []
        assert consumer.rewind(step=-1) == [name.id]


def test_a_consumer_takes_the_least_weight_version_for_iteration_and_it_may_rise(
    run: Path,
) -> None:
    for seq, weight in enumerate((3, 5, 5, 6), 1):
        put(run, seq, weights=(weight, weight))
    seen = []
    with Consumer(run, min_weight_version=4) as consumer:
        for batch in consumer:
            seen.append(batch.weight_versions[1])
            batch.ack()
            consumer.min_weight_version = 6
            if seen[-1] == 6:
                consumer.stop()
        assert seen == [5, 6]
        assert consumer.stale == 2


def test_when_everything_is_stale_the_consumer_waits_and_says_so_once(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for seq in (1, 2):
        put(run, seq, weights=(3, 4))
    with Consumer(run, min_weight_version=6) as consumer:
        for _ in range(3):
            assert consumer.claim(timeout=0.01) is None
        assert caplog.text.count("nothing but stale batches came: 2, with weight versions up") == 1
        assert "up to 4 where 6 is the least" in caplog.text
        assert "the last 2 that came were all stale: weight versions up to 4" in consumer.reason()
        put(run, 3, weights=(6, 6))
        claimed(consumer).ack()
        assert "2 batches were passed over" in consumer.reason()
        assert "the last" not in consumer.reason()
        put(run, 4, weights=(5, 5))
        assert consumer.claim() is None
        assert caplog.text.count("nothing but stale batches came") == 2


# Sharing ------------------------------------------------------------------------------------------


def test_a_slow_consumer_keeps_nothing_from_the_others(run: Path) -> None:
    for seq in range(1, 8):
        put(run, seq)
    with Consumer(run, name="slow") as slow, Consumer(run, name="fast") as fast:
        held = claimed(slow)
        assert len([claimed(fast).ack() for _ in range(6)]) == 6
        assert fast.claim() is None
        held.ack()


def test_a_batch_moved_into_another_consumers_folder_is_that_ones(run: Path) -> None:
    name = put(run, 1)
    with Consumer(run, name="a") as a, Consumer(run, name="b") as b:
        batch = claimed(a)
        os.rename(batch.path, run / "inflight/b" / name.file_name)
        taken = claimed(b)
        assert (taken.id, taken.attempt) == (name.id, 1)
        with pytest.raises(BatchLost, match="it lies in inflight/b/ now"):
            batch.ack(step=1)
        taken.ack(step=1)
    assert ls(run) == [f"acked/step-000000001/{name.file_name}"]


def test_a_batch_requeued_by_hand_under_a_living_consumer_is_lost_to_it_and_comes_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(run, 1)
    with Consumer(run) as consumer:
        batch = claimed(consumer)
        ran = spoold(capsys, "requeue", run, batch.id)
        assert (
            ran.err
            == f"spoold: trainer-0 is alive; its ack of {batch.id} will fail with BatchLost\n"
        )
        with pytest.raises(BatchLost, match="it lies in pending/ now"):
            batch.ack(step=1)
        again = claimed(consumer)
        assert (again.id, again.attempt) == (batch.id, 2)
        again.ack(step=1)
    assert ls(run) == [f"acked/step-000000001/{batch.id}.try02.jsonl"]
