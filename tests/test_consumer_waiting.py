"""A consumer waits, is stopped, killed, forked, and shares a spool with others."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from watchdog.observers import inotify_c

from spoold import Batch, Consumer, ConsumerError
from spoold.consumer import claims
from spoold.fs import lock_is_held
from tests.support.handmade import ls, make_run_dir, put

SOON = 5.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run_dir(tmp_path / "run")


def later(seconds: float, act: object, *arguments: object, **options: object) -> None:
    timer = threading.Timer(seconds, act, arguments, options)  # type: ignore[arg-type]
    timer.daemon = True
    timer.start()


# Waiting ------------------------------------------------------------------------------------------


def test_a_batch_published_while_waiting_wakes_within_milliseconds(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "LOOK_SECONDS", 60.0)
    with Consumer(run) as consumer:
        for seq in range(1, 4):
            later(0.05, put, run, seq)
            began = time.monotonic()
            batch = consumer.claim(timeout=30.0)
            assert batch is not None
            assert time.monotonic() - began < 5.0  # a timed look would come after a minute
            batch.ack()


def test_a_batch_moved_into_the_own_folder_by_hand_wakes(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "LOOK_SECONDS", 60.0)
    with Consumer(run) as consumer:
        later(0.05, put, run, 1, where="inflight/trainer-0")
        began = time.monotonic()
        batch = consumer.claim(timeout=30.0)
        assert batch is not None
        assert time.monotonic() - began < 5.0


def test_own_claims_do_not_wake_the_consumer_that_made_them(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Consumer(run) as consumer:
        consumer.claim(timeout=0.001)  # watches from here on
        put(run, 1)
        batch = consumer.claim(timeout=SOON)
        assert batch is not None
        batch.ack()
        monkeypatch.setattr(consumer._names, "heard", lambda *heard: pytest.fail(str(heard)))
        assert consumer.claim(timeout=0.2) is None


def test_a_batch_published_between_listing_and_watching_is_not_missed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "LOOK_SECONDS", 60.0)
    with Consumer(run) as consumer:
        hints = consumer._hints
        assert hints is not None
        real = hints.watch

        def watch(path: str, **options: object) -> bool:
            if path.endswith("pending"):
                put(run, 1)
            return real(path, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(hints, "watch", watch)
        began = time.monotonic()
        assert consumer.claim(timeout=30.0) is not None
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("call", ["inotify_init", "inotify_add_watch"])
def test_without_inotify_timed_looks_find_everything(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def failing(*_: object) -> int:
        ctypes.set_errno(errno.ENOSPC if call == "inotify_add_watch" else errno.EMFILE)
        return -1

    monkeypatch.setattr(inotify_c, call, failing)
    monkeypatch.setattr(claims, "LOOK_WITHOUT_HINTS_SECONDS", 0.05)
    with Consumer(run) as consumer:
        for seq in (1, 2):
            later(0.1, put, run, seq)
            assert consumer.claim(timeout=SOON) is not None
    assert caplog.text.count("going on by timed looks") == 1


def test_a_run_directory_made_while_waiting_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "LOOK_WITHOUT_HINTS_SECONDS", 0.02)
    root = tmp_path / "run"

    def make() -> None:
        make_run_dir(root)
        put(root, 1)

    with Consumer(root) as consumer:
        later(0.1, make)
        assert consumer.claim(timeout=SOON) is not None


def test_claim_gives_up_when_its_time_is_over(run: Path) -> None:
    with Consumer(run) as consumer:
        began = time.monotonic()
        assert consumer.claim(timeout=0.1) is None
        assert 0.1 <= time.monotonic() - began < 2.0


# Stop ---------------------------------------------------------------------------------------------


def test_stop_from_another_thread_ends_claim_and_iteration(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "LOOK_SECONDS", 60.0)
    began = time.monotonic()
    put(run, 1)
    with Consumer(run) as consumer:
        later(0.1, consumer.stop)
        seen = list(consumer)
        assert len(seen) == 1
        assert time.monotonic() - began < 5.0
        put(run, 2)
        assert consumer.claim(timeout=None) is None
        seen[0].ack()


def test_stop_from_a_signal_handler_ends_the_iteration(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "LOOK_SECONDS", 60.0)
    began = time.monotonic()
    consumer = Consumer(run)
    before = signal.signal(signal.SIGALRM, lambda *_: consumer.stop())
    try:
        with consumer:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            assert list(consumer) == []
            assert time.monotonic() - began < 5.0
    finally:
        signal.signal(signal.SIGALRM, before)


def test_stop_before_the_first_claim_holds(run: Path) -> None:
    put(run, 1)
    consumer = Consumer(run)
    consumer.stop()
    with consumer:
        assert list(consumer) == []


# Forks --------------------------------------------------------------------------------------------


def in_child(act: object) -> int:
    """Run `act` in a forked child; its exit status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()  # type: ignore[operator]
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_neither_uses_nor_drops_the_lock(run: Path) -> None:
    put(run, 1)
    lock = str(run / "inflight/trainer-0/.lock")
    with Consumer(run) as consumer:
        batch = consumer.claim()
        assert batch is not None

        def child() -> None:
            acts = [consumer.claim, lambda: consumer.rewind(0), batch.ack, batch.release]
            for act in acts:
                with pytest.raises(ConsumerError, match="belongs to process"):
                    act()
            consumer.stop()
            assert len(batch.samples()) == 1
            assert len(Batch.open(batch.path).samples()) == 1
            consumer.close()
            assert lock_is_held(lock)

        assert in_child(child) == 0
        assert lock_is_held(lock)
        batch.ack()
        put(run, 2)
        assert consumer.claim(timeout=SOON) is not None


def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_lock(run: Path) -> None:
    lock = str(run / "inflight/trainer-0/.lock")
    read_end, write_end = os.pipe()
    with Consumer(run) as consumer:
        child = os.fork()
        if child == 0:
            os.close(write_end)
            os.read(read_end, 1)  # lives on until the test is over
            os._exit(0)
        assert lock_is_held(lock)
        consumer.close()
    assert lock_is_held(lock) is False
    os.close(write_end)
    os.waitpid(child, 0)
    os.close(read_end)


# Processes ----------------------------------------------------------------------------------------

TRAINER = """
import os, sys, time
from spoold import Consumer
with Consumer(sys.argv[1], name=sys.argv[2]) as consumer:
    while (batch := consumer.claim(timeout=0.3)) is not None:
        batch.samples()
        time.sleep(0.001)
        batch.ack(step=int(batch.id[:9]))
        os.write(1, f"{batch.id}\\n".encode())
"""


def trainer(run: Path, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(run), name], stdout=subprocess.PIPE, text=True
    )


def test_a_killed_consumer_gets_its_own_batch_back_first(run: Path) -> None:
    script = TRAINER.replace("batch.ack", "print('held', flush=True); time.sleep(60); batch.ack")
    name = put(run, 1)
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(run), "t"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert lock_is_held(str(run / "inflight/t/.lock"))
    process.kill()
    process.communicate()
    assert ls(run) == [f"inflight/t/{name.file_name}"]
    put(run, 2)
    with Consumer(run, name="t") as consumer:
        batch = consumer.claim()
        assert batch is not None
        assert (batch.id, batch.attempt) == (name.id, 2)


def test_racing_consumers_that_are_killed_ack_each_batch_once(run: Path) -> None:
    names = [put(run, seq) for seq in range(1, 201)]
    rng = random.Random(7)
    running = {f"t{k}": trainer(run, f"t{k}") for k in range(3)}
    said: list[str] = []
    for _ in range(5):
        time.sleep(0.15)
        victim = rng.choice(sorted(running))
        running[victim].kill()
        said += running[victim].communicate()[0].split()
        running[victim] = trainer(run, victim)
    for process in running.values():
        said += process.communicate()[0].split()
        assert process.returncode == 0
    acked = sorted(path.name.partition(".jsonl")[0] for path in (run / "acked").rglob("*.jsonl"))
    # What was said to be acked was acked once; nothing is lost, whoever held it when killed.
    assert len(said) == len(set(said))
    ids = sorted(name.partition(".try")[0] for name in acked)
    assert ids == sorted(name.id for name in names)
    assert len(ls(run)) == 200


MODEL = """
import json, os, sys
from spoold import Consumer

root, checkpoint, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
points = 0

def point():
    global points
    points += 1
    if points == kill_at:
        os.kill(os.getpid(), 9)

step, seen = 0, []
if os.path.exists(checkpoint):
    step, seen = json.load(open(checkpoint))
with Consumer(root) as consumer:
    consumer.rewind(step=step)
    point()
    while (batch := consumer.claim()) is not None:
        point()
        seen += [row["uid"] for row in batch.samples()]
        step += 1
        point()
        batch.ack(step=step)
        point()
        if step % 2 == 0:
            with open(checkpoint + ".new", "w") as file:
                json.dump([step, seen], file)
            point()
            os.rename(checkpoint + ".new", checkpoint)
            point()
with open(checkpoint + ".new", "w") as file:
    json.dump([step, seen], file)
os.rename(checkpoint + ".new", checkpoint)
print("done", flush=True)
"""


def test_a_trainer_that_keeps_the_order_sees_each_sample_once_whenever_it_is_killed(
    run: Path, tmp_path: Path
) -> None:
    names = [put(run, seq) for seq in range(1, 7)]
    checkpoint = tmp_path / "checkpoint.json"
    kills = 0
    for kill_at in [*range(1, 14), 3, 5, 0]:
        process = subprocess.run(
            [sys.executable, "-c", MODEL, str(run), str(checkpoint), str(kill_at)],
            check=False,
            capture_output=True,
            text=True,
        )
        kills += process.returncode == -signal.SIGKILL
        assert process.returncode in (0, -signal.SIGKILL), process.stderr
    _, seen = json.loads(checkpoint.read_text())
    assert sorted(seen) == sorted(f"env-{name.seq:04d}:{name.seq}" for name in names)
    assert kills >= 8
    assert all(path.startswith("acked/step-") for path in ls(run))
