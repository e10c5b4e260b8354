"""A consumer waits for a batch, with and without hints, and is stopped."""

from __future__ import annotations

import ctypes
import errno
import signal
import threading
import time
from pathlib import Path

import pytest
from watchdog.observers import inotify_c

from spoold import Consumer
from spoold.consumer import claims
from tests.support.handmade import make_run_dir, put

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
