"""The daemon: watches a rollout database, publishes each completed environment once."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final

from spoold import config, fs
from spoold.daemon.conditions import reason_of
from spoold.daemon.looking import Watch
from spoold.daemon.loop import Daemon
from spoold.daemon.memory import lay_together
from spoold.errors import ConfigError, SourceSchemaError, SourceUnavailable, SpooldError
from spoold.layout import RunDir
from spoold.sources import open_source
from spoold.spool import setup, statusfile
from spoold.systemd import Service
from spoold.watch import Hints

if TYPE_CHECKING:
    from spoold.config import Settings

__all__ = ["Daemon", "run"]

log = logging.getLogger("spoold.daemon")

LOCK_SECONDS: Final = 5.0
LOCK_PAUSE_SECONDS: Final = 0.05
GC_THRESHOLD: Final = 50_000


class _Signals:
    """The signals that came. What stops stays; a wish to read the settings again is taken once."""

    def __init__(self) -> None:
        self.stopping: list[int] = []
        self.reload = False


def run(
    settings: Settings,
    *,
    once: bool = False,
    service: Service | None = None,
    read_again: Callable[[], Settings] | None = None,
    watch: Watch | None = None,
) -> None:
    """Run the daemon until SIGTERM or SIGINT; with `once` publish what there is and return.

    `service`: who is told how it goes. `read_again`: what SIGHUP calls for the new settings;
    without it SIGHUP stops, too. `watch`: hears how far the first look is. Raises the SpooldError
    that ended it: its `exit_code` is the process's. After a signal it returns, and nothing is half
    done.
    """
    # What is loaded by now stays; each row makes and drops a tree of objects without a cycle.
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    service = service or Service()
    hints = Hints()
    try:
        with _signals(hints, reloads=read_again is not None) as signals:
            service.status(f"reading {settings.run_dir}")
            problem = _check_source(settings)
            run_dir = setup.make_run(settings.run_dir)
            lock = _lock(run_dir, hints, signals)
            if lock is None:
                return
            try:
                daemon = _started(settings, lock, run_dir, watch)
                try:
                    _insist(problem)
                    if once:
                        daemon.once(lambda: bool(signals.stopping))
                    else:
                        _serve(daemon, hints, signals, service, read_again)
                    if signals.stopping:
                        fields = {"signal": signal.Signals(signals.stopping[0]).name}
                        log.info("stopping", extra={"fields": fields})
                except Exception as error:
                    daemon.failed(error)
                    raise
                finally:
                    service.stopping()
                    daemon.stop()
            finally:
                lock.release()
                hints.close()
    except Exception as error:
        service.status(reason_of(error, since=time.time()).words)
        raise


def _started(settings: Settings, lock: fs.Lock, run_dir: RunDir, watch: Watch | None) -> Daemon:
    """Return a daemon that knows its run directory; where it cannot start, status says why."""
    try:
        daemon = Daemon(settings, clock=time.monotonic, wall=time.time)
        daemon.start(lock, run_dir)
        daemon.looking.watch = watch
    except SpooldError as error:
        now = time.time()
        statusfile.mark_failed(run_dir, reason_of(error, since=now), at=now)
        raise
    return daemon


def _check_source(settings: Settings) -> SourceSchemaError | None:
    """Raise what is wrong with the source for good, before anything is made on disk.

    One that is not there yet is fine: it is waited for. A wrong one is returned where the run
    directory is in use: the daemon starts, and leaves it in its last report.
    """
    run_dir = RunDir(os.path.abspath(settings.run_dir))
    tied = setup.read_source(run_dir)
    setup.check_shard(run_dir, str(settings.shard))
    source = open_source(
        settings.db,
        job=settings.job,
        ready_when=settings.ready_when,
        samples=settings.samples,
        known_job=tied["job"] if tied is not None else None,
        shard=settings.shard,
    )
    try:
        source.open()
        setup.check_job(run_dir, source.job)
    except SourceUnavailable:
        return None
    except SourceSchemaError as error:
        if tied is None:
            raise
        return error
    finally:
        source.close()
    return None


def _lock(run_dir: RunDir, hints: Hints, signals: _Signals) -> fs.Lock | None:
    """Take the lock. Whoever probes it holds it for a moment, so a busy one is tried again."""
    give_up = time.monotonic() + LOCK_SECONDS
    while (lock := setup.lock_run(run_dir)) is None:
        if signals.stopping:
            return None
        if time.monotonic() >= give_up:
            setup.leave_visit(run_dir)
            raise setup.locked_by(run_dir)
        hints.wait(LOCK_PAUSE_SECONDS)
    return lock


def _insist(problem: SourceSchemaError | None) -> None:
    if problem is not None:
        raise problem


def _serve(
    daemon: Daemon,
    hints: Hints,
    signals: _Signals,
    service: Service,
    read_again: Callable[[], Settings] | None,
) -> None:
    run_dir = daemon.run
    hints.watch(run_dir.pending, tag="spool", created=False, deleted=True)
    for folder in (run_dir.inflight, run_dir.acked, run_dir.rejected):
        hints.watch(folder, tag="spool", recursive=True, created=True, deleted=True)
    _watch_source(daemon, hints)
    service.ready()
    is_together = False
    while not signals.stopping:
        daemon.hear(hints.problem)
        pause = daemon.step()
        if not is_together and daemon.looking.looked_through and pause:
            is_together = True
            log.debug("memory laid together", extra={"fields": {"bytes": lay_together()}})
        service.progress()
        service.status(daemon.report.sentence)
        heard = hints.wait(service.shorten(pause))
        moved = heard.get("spool", set()) if hints.healthy("spool") else None
        daemon.hint(source="source" in heard, spool="spool" in heard, moved=moved)
        if signals.reload and read_again is not None:
            signals.reload = False
            _reload(daemon, service, read_again)


def _reload(daemon: Daemon, service: Service, read_again: Callable[[], Settings]) -> None:
    """Go on with settings that were read again; with those of before where they are no good."""
    service.reloading()
    try:
        outcome = config.reloaded(daemon.settings, read_again())
    except ConfigError as error:
        fields = {"error": error.message, "remedy": error.hint}
        log.warning("settings not reloaded", extra={"fields": fields})
    else:
        daemon.reload(outcome.settings)
        fields = {"changed": " ".join(outcome.changed) or "nothing"}
        log.info("settings reloaded", extra={"fields": fields})
        if outcome.needs_restart:
            fields = {"settings": " ".join(outcome.needs_restart)}
            log.warning("settings need a restart", extra={"fields": fields})
    service.ready()


def _watch_source(daemon: Daemon, hints: Hints) -> None:
    watched = daemon.looking.source.watched()
    for folder, names in watched.items():
        hints.watch(folder, tag="source", modified=True, names=names.__contains__)


@contextmanager
def _signals(hints: Hints, *, reloads: bool) -> Iterator[_Signals]:
    """Collect SIGTERM, SIGINT and SIGHUP; each wakes whoever waits for hints.

    A SIGHUP that is ignored at start stays so: `nohup` asked for that.
    """
    got = _Signals()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP and reloads:
            got.reload = True
        else:
            got.stopping.append(number)
        hints.wake("signal")

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
