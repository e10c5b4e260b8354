"""The daemon: watches a rollout database, publishes each completed environment once."""

from __future__ import annotations

import gc
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final

from spoold import fs
from spoold.daemon.loop import Daemon
from spoold.spool import setup
from spoold.watch import Hints

if TYPE_CHECKING:
    from spoold.config import Settings
    from spoold.layout import RunDir

__all__ = ["Daemon", "run"]

log = logging.getLogger("spoold.daemon")

LOCK_SECONDS: Final = 5.0
LOCK_PAUSE_SECONDS: Final = 0.05
GC_THRESHOLD: Final = 50_000


def run(settings: Settings, *, once: bool = False) -> None:
    """Run the daemon until SIGTERM or SIGINT; with `once` publish what there is and return.

    Raises the SpooldError that ended it: its `exit_code` is the process's. After a signal it
    returns, and nothing is half done.
    """
    # What is loaded by now stays; each row makes and drops a tree of objects without a cycle.
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    hints = Hints()
    with _signals(hints) as stopping:
        run_dir = setup.make_run(settings.run_dir)
        lock = _lock(run_dir, hints, stopping)
        if lock is None:
            return
        try:
            daemon = Daemon(settings, clock=time.monotonic, wall=time.time)
            daemon.start(lock, run_dir)
            try:
                if once:
                    daemon.once()
                else:
                    _serve(daemon, hints, stopping)
            finally:
                daemon.stop()
        finally:
            lock.release()
            hints.close()


def _lock(run_dir: RunDir, hints: Hints, stopping: list[int]) -> fs.Lock | None:
    """Take the lock. Whoever probes it holds it for a moment, so a busy one is tried again."""
    give_up = time.monotonic() + LOCK_SECONDS
    while (lock := setup.lock_run(run_dir)) is None:
        if stopping:
            return None
        if time.monotonic() >= give_up:
            raise setup.locked_by(run_dir)
        hints.wait(LOCK_PAUSE_SECONDS)
    return lock


def _serve(daemon: Daemon, hints: Hints, stopping: list[int]) -> None:
    run_dir = daemon.run
    hints.watch(run_dir.pending, tag="spool", created=False, deleted=True)
    for folder in (run_dir.inflight, run_dir.acked, run_dir.rejected):
        hints.watch(folder, tag="spool", recursive=True, created=True, deleted=True)
    _watch_source(daemon, hints)
    while not stopping:
        heard = hints.wait(daemon.step())
        daemon.hint(source="source" in heard, spool="spool" in heard)
    log.info("stopping", extra={"fields": {"signal": signal.Signals(stopping[0]).name}})


def _watch_source(daemon: Daemon, hints: Hints) -> None:
    watched = daemon.looking.source.watched()
    for folder, names in watched.items():
        hints.watch(folder, tag="source", modified=True, names=names.__contains__)


@contextmanager
def _signals(hints: Hints) -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT; each wakes whoever waits for hints."""
    got: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        got.append(number)
        hints.wake("signal")

    before = {
        number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
