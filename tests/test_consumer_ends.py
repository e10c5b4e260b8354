"""A trainer ends, however it ends, or forks: what lies where then, and who has its name."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spoold import Batch, Consumer, ConsumerBusy, ConsumerError
from spoold.consumer import identity
from spoold.fs import lock_is_held
from tests.support.handmade import ls, make_run_dir, put
from tests.support.processes import ENVIRON, until

SOON = 5.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run_dir(tmp_path / "run")


@contextmanager
def script(text: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run a script whose stdin is a pipe that is closed at the end, and so are its children's."""
    process = subprocess.Popen(
        [sys.executable, "-c", text, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRON,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait()


# However it ends ----------------------------------------------------------------------------------

TRAINS_TWO = """
import os, signal, sys
from spoold import Consumer

how = sys.argv[2]
with Consumer(sys.argv[1], name="t") as consumer:
    if how == "stop":
        signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    for step, batch in enumerate(consumer, 1):
        if step == 2:
            print("trains", flush=True)
            if how == "exception":
                raise RuntimeError("out of memory")
            if how == "os._exit":
                os._exit(3)
            sys.stdin.readline()
        batch.ack(step=step)
"""
SIGNALS = {"ctrl-c": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}


@pytest.mark.parametrize("how", ["exception", "os._exit", *SIGNALS])
def test_what_was_acked_stays_and_what_was_held_comes_first_to_the_next_of_the_name(
    run: Path, how: str
) -> None:
    names = [put(run, seq) for seq in (1, 2, 3)]
    with script(TRAINS_TWO, run, how) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "trains\n"
        if how in SIGNALS:
            process.send_signal(SIGNALS[how])
        assert process.wait(30) != 0
    assert ls(run) == [
        f"acked/step-000000001/{names[0].file_name}",
        f"inflight/t/{names[1].file_name}",
        f"pending/{names[2].file_name}",
    ]
    assert lock_is_held(str(run / "inflight/t/.lock")) is False
    with Consumer(run, name="t") as consumer:
        batch = consumer.claim()
        assert batch is not None
        assert (batch.id, batch.attempt) == (names[1].id, 2)


def test_a_trainer_that_stops_on_sigterm_ends_after_the_batch_in_hand(run: Path) -> None:
    names = [put(run, seq) for seq in (1, 2, 3)]
    with script(TRAINS_TWO, run, "stop") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "trains\n"
        process.send_signal(signal.SIGTERM)
        process.stdin.write("trained\n")
        process.stdin.flush()
        assert process.wait(30) == 0
    assert ls(run) == [
        f"acked/step-000000001/{names[0].file_name}",
        f"acked/step-000000002/{names[1].file_name}",
        f"pending/{names[2].file_name}",
    ]


# Forks --------------------------------------------------------------------------------------------


def fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns about the threads that pytest-xdist has.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def in_child(act: object) -> int:
    """Run `act` in a forked child; its exit status."""
    child = fork()
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
        child = fork()
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


LEAVES_A_CHILD = """
import ctypes, multiprocessing, os, subprocess, sys
from spoold import Consumer

def wait_for_the_end():
    os.read(0, 1)
    os._exit(0)

how = sys.argv[2]
consumer = Consumer(sys.argv[1], name="t")
with consumer:
    assert consumer.claim() is not None
    if how == "os.fork":
        if os.fork() == 0:
            wait_for_the_end()
    elif how == "multiprocessing":
        multiprocessing.get_context("fork").Process(target=wait_for_the_end).start()
    elif how == "posix_spawn":
        os.posix_spawn("/bin/sh", ["sh", "-c", "read line"], os.environ)
    elif how == "subprocess":
        subprocess.Popen(["sh", "-c", "read line"], close_fds=False)
    elif ctypes.PyDLL(None).fork() == 0:
        wait_for_the_end()
    if sys.argv[3] == "close":
        consumer.close()
    print("left", flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("ends", ["close", "kill"])
@pytest.mark.parametrize("how", ["os.fork", "multiprocessing", "posix_spawn", "subprocess", "C"])
def test_a_process_that_a_trainer_leaves_behind_does_not_have_its_name(
    run: Path, how: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(run, 1)
    lock = str(run / "inflight/t/.lock")
    with script(LEAVES_A_CHILD, run, how, ends) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "left\n"
        assert process.wait(30) == -signal.SIGKILL
        if (how, ends) == ("C", "kill"):
            # One that C code forked has the lock too, and Python is not asked to close it there.
            monkeypatch.setattr(identity, "BUSY_SECONDS", 0.0)
            with pytest.raises(ConsumerBusy, match="left behind holds its lock"):
                Consumer(run, name="t").claim()
        else:  # a child that has not come to its exec yet is waited for
            with Consumer(run, name="t") as consumer:
                assert consumer.claim() is not None
    until(lambda: not lock_is_held(lock), "the child to end", timeout_seconds=20.0)


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
