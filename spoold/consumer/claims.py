"""A consumer: holds its name by a lock, hands out its own batches first, then claims the oldest."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Final

from spoold import fs
from spoold.consumer.batch import Batch, fits
from spoold.consumer.reason import why_nothing_comes
from spoold.errors import ConfigError, ConsumerBusy, ConsumerError
from spoold.layout import (
    CORRUPT,
    MAX_ATTEMPTS_FOLDER,
    BatchName,
    Place,
    RunDir,
    State,
    batch_id_of,
    is_name,
)
from spoold.spool import moves
from spoold.watch import Heard, Hints

__all__ = ["Consumer"]

_log = logging.getLogger("spoold.consumer")

# Whoever only probes the lock holds it for less than a millisecond.
BUSY_SECONDS: Final = 5.0
BUSY_PAUSE_SECONDS: Final = 0.05
# For how long a listing is believed: an older batch that comes back is claimed this much too late.
LISTING_SECONDS: Final = 0.1
# A huge pending/ is listed less often: listing takes a twentieth of the time at most.
LISTING_SHARE: Final = 20.0
LOOK_SECONDS: Final = 2.0
LOOK_WITHOUT_HINTS_SECONDS: Final = 1.0
LONG_WAIT_SECONDS: Final = 60.0

_PENDING: Final = Place(State.PENDING)


class Consumer:
    """A named trainer process: the only one of its name on a run directory.

    It holds an exclusive lock on inflight/<name>/.lock from `with` (or its first claim or rewind)
    until `close`; the kernel drops it when the process dies. What is held then stays in
    inflight/<name>/ for the next process of this name. The run directory need not be there yet.

    Claim from one thread; `stop` may be called from any thread and from signal handlers. A process
    forked by Python (os.fork, multiprocessing, DataLoader workers) neither keeps nor drops the
    lock, and cannot use the consumer. One forked by C code that does not exec keeps the lock busy
    for as long as it lives.

    `max_attempts`: a batch found in the own folder that was handed out so often already goes to
    rejected/attempts/ instead; 0 = never. `stale` counts the batches passed over as too old.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        name: str = "trainer-0",
        *,
        max_attempts: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not is_name(name):
            raise ConfigError(
                f"{name!r} cannot be the name of a consumer",
                hint="a name is 1 to 48 letters, digits, - and _, and begins with none of the last",
            )
        if max_attempts < 0:
            raise ConfigError(f"max_attempts is 0 (never reject) or more, not {max_attempts}")
        self.name = name
        self.max_attempts = max_attempts
        self.stale = 0
        self._run = RunDir(os.path.abspath(run_dir))
        self._own = Place(State.INFLIGHT, name)
        self._clock = clock
        self._pid: int | None = None
        self._lock: fs.Lock | None = None
        self._hints: Hints | None = None
        self._watching = False
        self._closed = False
        self._stopping = False
        self._warned_of_unversioned = False
        self._held: dict[str, Batch] = {}
        self._acked: set[str] = set()
        self._left_over: set[str] = set()
        # Names that were listed and not tried yet, the next one last; own ones come first.
        self._own_names: list[str] = []
        self._pending_names: list[str] = []
        self._listed_until = -math.inf

    @property
    def run(self) -> RunDir:
        """The run directory."""
        return self._run

    @property
    def held(self) -> tuple[Batch, ...]:
        """The batches handed out and not yet acked, released or rejected."""
        return tuple(self._held.values())

    def __repr__(self) -> str:
        return f"<Consumer {self.name} of {self._run.root}, {len(self._held)} held>"

    def __enter__(self) -> Consumer:
        """Lock the name if the run directory is there. Raises ConsumerBusy after 5 s."""
        try:
            self._is_ready("start")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches, waiting for the next for ever, until `stop`."""
        while (batch := self.claim(timeout=None)) is not None:
            yield batch

    def claim(self, timeout: float | None = 0.0, *, min_weight_version: int = 0) -> Batch | None:
        """Return the next batch: own ones first, then the oldest pending. None when none came.

        `timeout` in seconds: 0 looks once, None waits for ever. None is also returned at once,
        whatever lies there, after `stop`. A batch that this object holds or has acked is never
        handed out again.

        A batch none of whose samples has at least `min_weight_version` goes to acked/stale/.

        After a power cut a claimed batch may be pending again. Raises ConsumerBusy where another
        process has this name, ConfigError where run_dir is a file, SpoolWriteError where a folder
        or a batch cannot be read.
        """
        began = self._clock()
        give_up = None if timeout is None else began + timeout
        quiet = True
        while True:
            ready = self._is_ready("claim")
            if self._stopping:
                return None
            batch = self._next(min_weight_version) if ready else None
            if batch is not None:
                return batch
            now = self._clock()
            if give_up is not None and now >= give_up:
                return None
            if quiet and now - began >= LONG_WAIT_SECONDS:
                quiet = False
                _log.info("consumer %s waits for a batch: %s", self.name, self.reason())
            self._wait(None if give_up is None else give_up - now)

    def rewind(self, step: int) -> list[str]:
        """Put back into pending/, durably, what was acked with a greater step; return the ids.

        For a trainer that loaded the checkpoint of `step`, before its first claim. Names and bytes
        stay; batches acked without a step or passed over as stale stay where they are. Steps are
        shared by all consumers of a run directory.
        """
        if isinstance(step, bool) or not isinstance(step, int):
            raise ConfigError(f"a step is an integer, not {step!r}")
        if not self._is_ready("rewind"):
            return []
        rewound = []
        for found in self._acked_after(step):
            if moves.rewind(self._run, found) is not None:
                self._acked.discard(found.name.id)
                rewound.append(found.name.id)
        self._listed_until = -math.inf
        if rewound:
            _log.info("rewound to step %d: %d batches are pending again", step, len(rewound))
        return rewound

    def reason(self) -> str:
        """Return why no batch comes, in words; callable at any time.

        Tells an absent daemon, an unreadable source, groups that are not whole, back-pressure, and
        a run that is over from mere waiting.
        """
        words = "stop() was called" if self._stopping else why_nothing_comes(self._run)
        if self._held:
            words += f"; this consumer holds {len(self._held)} batches that are not acked"
        if self.stale:
            words += f"; {self.stale} batches were passed over as stale"
        return words

    def stop(self) -> None:
        """Make a waiting claim return None and an iteration end, now and from now on.

        Batches that are held can still be acked.
        """
        self._stopping = True
        hints = self._hints
        if hints is not None:
            hints.wake("stop")

    def close(self) -> None:
        """Let go of the name; held batches stay in inflight/<name>/. Fine when called twice."""
        self._closed = True
        lock, self._lock = self._lock, None
        hints, self._hints = self._hints, None
        # A forked child leaves the lock to its parent.
        if lock is not None and self._pid == os.getpid():
            lock.release()
        if hints is not None:
            hints.close()

    # --- for the batches --------------------------------------------------------------------

    def check_usable(self, act: str) -> None:
        """Raise ConsumerError after `close`, and in a process forked from the one that claims."""
        if self._pid is not None and self._pid != os.getpid():
            raise ConsumerError(
                f"cannot {act}: consumer {self.name} belongs to process {self._pid}",
                hint="a forked process only reads: give it the samples, or Batch.open(batch.path)",
            )
        if self._closed:
            raise ConsumerError(
                f"cannot {act}: consumer {self.name} is closed",
                hint="its batches stay in flight; the next consumer of this name gets them first",
            )

    def let_go(self, batch_id: str, *, acked: bool) -> None:
        """Take note that a batch is held no more."""
        if acked:
            self._acked.add(batch_id)
        self._held.pop(batch_id, None)
        if not acked:
            self._listed_until = -math.inf

    # --- the lock -----------------------------------------------------------------------------

    def _is_ready(self, act: str) -> bool:
        """Hold the lock; False where there is no run directory yet."""
        self.check_usable(act)
        if self._lock is not None:
            return True
        if self._hints is None:
            self._pid = os.getpid()
            self._hints = Hints(clock=self._clock)
        if not _is_run_dir(self._run):
            return False
        lock = self._acquire(self._hints)
        if lock is None:
            return False
        self._lock = lock
        self._left_over = {
            name
            for name in fs.scan(self._run.of(self._own)).files
            if batch_id_of(name) not in self._held
        }
        return True

    def _acquire(self, hints: Hints) -> fs.Lock | None:
        fs.make_dirs(self._run.of(self._own))
        lock = fs.Lock(self._run.consumer_lock(self.name))
        give_up = self._clock() + BUSY_SECONDS
        while not lock.acquire():
            if self._clock() >= give_up:
                holder = fs.holder_of(lock.path)
                raise ConsumerBusy(
                    f"another process is consumer {self.name} of {self._run.root}"
                    + (f" ({holder})" if holder else ""),
                    hint="stop it, or give this one another name",
                )
            hints.wait(BUSY_PAUSE_SECONDS)
            if self._stopping:
                return None
        return lock

    def _is_still_locked(self) -> bool:
        """Whether the lock is held; taken again where somebody removed the file or the folder."""
        if self._lock is not None and self._lock.still_held():
            return True
        if self._lock is not None:
            _log.warning("%s was removed while it was held; locking anew", self._lock.path)
            self._lock.release()
            self._lock = None
        return self._is_ready("claim")

    # --- the next batch -----------------------------------------------------------------------

    def _next(self, min_weight_version: int) -> Batch | None:
        """Return the first batch that can be had: one pass that lists the folders once at most."""
        looked = False
        while not self._stopping:
            names = self._own_names or self._pending_names
            if not looked and (not names or self._clock() >= self._listed_until):
                self._list()
                looked = True
                names = self._own_names or self._pending_names
            if not names:
                return None
            place = self._own if names is self._own_names else _PENDING
            file_name = names.pop()
            if place is _PENDING and not self._is_still_pending(file_name):
                continue
            name = BatchName.parse(file_name)
            if name is None:
                continue
            batch_id = name.id
            if batch_id not in self._held and batch_id not in self._acked:
                batch = self._hand_out(moves.Found(place, name), batch_id, min_weight_version)
                if batch is not None:
                    return batch
        return None

    def _list(self) -> None:
        self._own_names, self._pending_names = [], []
        if not self._is_still_locked():
            return
        began = self._clock()
        try:
            self._own_names = _oldest_last(fs.scan(self._run.of(self._own)).files)
            self._pending_names = _oldest_last(_names_in(self._run.pending))
        except FileNotFoundError:
            return  # removed just now: as if it were not there yet
        now = self._clock()
        self._listed_until = now + max(LISTING_SECONDS, LISTING_SHARE * (now - began))

    def _hand_out(self, found: moves.Found, batch_id: str, min_weight_version: int) -> Batch | None:
        """Return the batch, claimed and checked; None where it is lost, stale or set aside."""
        if found.name.hi < min_weight_version:
            self._pass_over(found)
            return None
        own = (
            moves.claim(self._run, found.name, self.name)
            if found.place is _PENDING
            else self._next_try(found)
        )
        if own is None:
            return None
        try:
            data = fs.read(own.path(self._run))
        except FileNotFoundError:
            return None  # RACE: somebody moved it away by hand
        if not fits(data, own.name):
            aside = moves.set_aside(self._run, own, CORRUPT)
            if aside is not None:
                _log.warning(
                    "batch %s fails the digest in its name: now in %s",
                    batch_id,
                    aside.path(self._run),
                )
            return None
        batch = Batch(own.name, found=own, holder=self)
        self._held[batch_id] = batch
        return batch

    def _is_still_pending(self, file_name: str) -> bool:
        # Among many consumers most names of a listing are gone. A stat costs less than a rename
        # that fails, for us and for those who rename in pending/ at the same time. And a link or
        # a folder with the name of a batch stays where it is.
        try:
            return stat.S_ISREG(os.lstat(f"{self._run.pending}/{file_name}").st_mode)
        except FileNotFoundError:
            return False

    def _next_try(self, found: moves.Found) -> moves.Found | None:
        """Rename a batch that was left over by this name's last process; others are as they are."""
        file_name = found.name.file_name
        if file_name not in self._left_over:
            return found
        if self.max_attempts and found.name.attempt >= self.max_attempts:
            if moves.reject(self._run, found, MAX_ATTEMPTS_FOLDER) is not None:
                _log.warning(
                    "batch %s was handed out %d times and never acked: now in rejected/%s/",
                    found.name.id,
                    found.name.attempt,
                    MAX_ATTEMPTS_FOLDER,
                )
            return None
        again = replace(found, name=found.name.next_attempt())
        try:
            fs.rename_noreplace(found.path(self._run), again.path(self._run))
        except (FileNotFoundError, FileExistsError):
            return None
        self._left_over.discard(file_name)
        return again

    def _pass_over(self, found: moves.Found) -> None:
        if moves.skip_stale(self._run, found) is None:
            return
        self.stale += 1
        if found.name.hi == 0 and not self._warned_of_unversioned:
            self._warned_of_unversioned = True
            _log.warning(
                "batch %s has no usable weight version and counts as stale: now in acked/stale/",
                found.name.id,
            )

    def _acked_after(self, step: int) -> list[moves.Found]:
        found = []
        try:
            places = moves.folders_of(self._run, State.ACKED)
        except FileNotFoundError:
            return []
        for place in places:
            if place.step is not None and place.step > step:
                names = map(BatchName.parse, fs.scan(self._run.of(place)).files)
                found += [moves.Found(place, name) for name in names if name is not None]
        return sorted(found, key=lambda each: each.name.seq)

    # --- waiting ------------------------------------------------------------------------------

    def _wait(self, left: float | None) -> None:
        """Return when it may be worth looking again, at the latest after a second or two."""
        hints = self._hints
        assert hints is not None
        self._listed_until = -math.inf
        if self._lock is not None and not self._watching:
            self._watching = True
            # Our own claims are no news: not in the own folder, and not as what was pending.
            hints.watch(self._run.pending, tag="pending", names=self._is_news)
            hints.watch(self._run.of(self._own), tag="own", names=self._is_news)
            return  # what came before the watch is found by looking once more
        with_hints = self._watching and hints.healthy()
        pause = LOOK_SECONDS if with_hints else LOOK_WITHOUT_HINTS_SECONDS
        heard = hints.wait(pause if left is None else min(left, pause))
        if heard:
            self._take_hints(heard)
        elif self._lock is not None:
            # NFS shows new names in a folder only after its parent was looked at.
            with contextlib.suppress(FileNotFoundError):
                fs.scan(self._run.root)

    def _take_hints(self, heard: Heard) -> None:
        """Try what the hints name, without listing; all else was tried before this wait."""
        own, pending = heard.get("own", set()), heard.get("pending", set())
        if own is None or pending is None:
            return
        self._own_names = _oldest_last([path.rpartition("/")[2] for path in own])
        self._pending_names = _oldest_last([path.rpartition("/")[2] for path in pending])
        self._listed_until = self._clock() + LISTING_SECONDS

    def _is_news(self, file_name: str) -> bool:
        batch_id = batch_id_of(file_name)
        return batch_id is not None and batch_id not in self._held and batch_id not in self._acked


def _is_run_dir(run: RunDir) -> bool:
    """Whether the run directory is there. Raises ConfigError where a file lies at its path."""
    for path in (run.root, run.pending):
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            mode = 0
        except OSError as error:
            raise fs.failed("look into", path, error) from error
        if not stat.S_ISDIR(mode):
            raise ConfigError(
                f"{path} is no directory",
                hint="give the run directory of a daemon: what `spoold run --run-dir` was given",
            )
    return True


def _names_in(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise fs.failed("list", path, error) from error


def _oldest_last(names: list[str]) -> list[str]:
    """Sort batch names for popping; what is no batch is left out later, when it is its turn."""
    names.sort(key=_age, reverse=True)
    return names


def _age(name: str) -> str:
    # A number of ten digits is younger than one of nine.
    return name if name[9:10] == "-" else "~" * (name.find("-") - 9) + name
