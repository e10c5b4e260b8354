"""A consumer: hands out its own batches first, then claims the oldest, and waits for the next."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Final

from spoold import fs
from spoold.consumer.ahead import Ahead, Room
from spoold.consumer.batch import Batch
from spoold.consumer.count import Count
from spoold.consumer.identity import Identity
from spoold.consumer.names import Names
from spoold.consumer.reason import why_nothing_comes
from spoold.consumer.stale import Stale
from spoold.errors import BatchLost, ConfigError
from spoold.layout import (
    CORRUPT,
    MAX_ATTEMPTS_FOLDER,
    BatchName,
    Place,
    RunDir,
    State,
    batch_id_of,
)
from spoold.spool import moves, setup
from spoold.watch import Hints

__all__ = ["Consumer"]

_log = logging.getLogger("spoold.consumer")

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
    lock, and cannot use the consumer; one that execs (subprocess) does not inherit it. One that C
    code forks without exec keeps the lock busy for as long as it lives, if this process dies before
    `close`.

    `min_weight_version`: batches none of whose samples has at least this weight version go to
    acked/stale/ instead; may be set anew between two claims. `max_attempts`: a batch found in the
    own folder that was handed out so often already goes to rejected/attempts/; 0 = never.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        name: str = "trainer-0",
        *,
        min_weight_version: int = 0,
        max_attempts: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_attempts < 0:
            raise ConfigError(f"max_attempts is 0 (never reject) or more, not {max_attempts}")
        self.name = name
        self.min_weight_version = min_weight_version
        self.max_attempts = max_attempts
        self._run = RunDir(os.path.abspath(run_dir))
        self._clock = clock
        self._identity = Identity(self._run, name, clock=clock, pause=self._pause)
        self._own = self._identity.place
        self._names = Names(self._run, self._own, clock=clock)
        self._ahead = Ahead()
        self._stale = Stale()
        self._hints: Hints | None = None
        self._watching = False
        self._stopping = False
        self._rewind_to: int | None = None
        self._held: dict[str, Batch] = {}
        self._acked: set[str] = set()
        self._left_over: set[str] = set()

    @property
    def run(self) -> RunDir:
        """The run directory."""
        return self._run

    @property
    def held(self) -> tuple[Batch, ...]:
        """The batches handed out and not yet acked, released or rejected."""
        return tuple(self._held.values())

    @property
    def stale(self) -> int:
        """How many batches this consumer passed over as too old."""
        return self._stale.count

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

    def claim(
        self, timeout: float | None = 0.0, *, min_weight_version: int | None = None
    ) -> Batch | None:
        """Return the next batch: own ones first, then the oldest pending. None when none came.

        `timeout` in seconds: 0 looks once, None waits for ever. None is also returned at once,
        whatever lies there, after `stop`. A batch that this object holds or has acked is never
        handed out again. `min_weight_version`: for this call, instead of the consumer's.

        After a power cut a claimed batch may be pending again. Raises ConsumerBusy where another
        process has this name, ConfigError where run_dir is a file, SpoolWriteError where a folder
        or a batch cannot be read.
        """
        least = self.min_weight_version if min_weight_version is None else min_weight_version
        began = self._clock()
        give_up = None if timeout is None else began + timeout
        speak_at = began + LONG_WAIT_SECONDS
        while True:
            ready = self._is_ready("claim")
            if self._stopping:
                return None
            batch = self._next(least) if ready else None
            if batch is not None:
                self._stale.ended()
                return batch
            self._stale.say_if_all(least)
            now = self._clock()
            if give_up is not None and now >= give_up:
                return None
            if now >= speak_at:
                speak_at = now + (now - began)  # after 1 minute, 2, 4, …
                level = logging.WARNING if self._held else logging.INFO
                _log.log(level, "consumer %s waits for a batch: %s", self.name, self.reason())
            self._wait(None if give_up is None else give_up - now)

    def collect(
        self,
        *,
        samples: int = 0,
        groups: int = 0,
        timeout: float | None = None,
        min_weight_version: int | None = None,
    ) -> tuple[Batch, ...] | None:
        """Claim until at least so many samples, or groups, are in hand; return all that is held.

        One of the two is given. What was in hand before counts too. None when not enough came
        within `timeout` seconds (None waits for ever), or after `stop`: then what came stays in
        hand, and the next call goes on from there. Ack it, or release it, all together with
        `ack_held` or one by one.

        Waits with batches in hand, which nobody else can have meanwhile: after a minute, and then
        ever more rarely, a warning says how many, and what is waited for. To count groups each
        batch is read.
        """
        if (samples > 0) == (groups > 0):
            raise ConfigError(f"collect needs samples or groups, not {samples} and {groups}")
        give_up = None if timeout is None else self._clock() + timeout
        count = Count()
        while True:
            for batch in self.held:
                count.add(batch, read=groups > 0)
            if count.samples(self.held) >= samples and count.groups(self.held) >= groups:
                return self.held
            left = None if give_up is None else max(0.0, give_up - self._clock())
            if self.claim(left, min_weight_version=min_weight_version) is None:
                return None

    def ack_held(self, step: int | None = None) -> None:
        """Ack every batch in hand, durably, with one step.

        Where some were moved away all others are acked first; then BatchLost is raised for the
        first of those. Killed in between, some are acked with this step and some are in flight:
        after a rewind to a lower step that is as good as none.
        """
        lost: BatchLost | None = None
        for batch in self.held:
            try:
                batch.ack(step)
            except BatchLost as error:
                lost = lost or error
        if lost is not None:
            raise lost

    def read_ahead(self, room: Room) -> tuple[str, memoryview] | None:
        """Return id and bytes of the batch that a claim would take from pending/ now; claim none.

        For time that would pass idly: the claim that takes it does not read it again. None where
        there is none, where own ones come first, or where the claim will have to set it aside.
        """
        if not self._is_ready("read ahead"):
            return None
        if self._names.are_old:
            self._list()
        for place, file_name in self._names.following():
            name = BatchName.parse(file_name)
            if name is None or not self._is_new(name.id):
                continue
            if place is self._own:
                return None
            if self._is_still_pending(file_name):
                data = self._ahead.read(self._run.file(place, file_name), name, room)
                return None if data is None else (name.id, data)
        return None

    def rewind(self, step: int) -> list[str]:
        """Put back into pending/, durably, what was acked with a greater step; return the ids.

        For a trainer that loaded the checkpoint of `step` (-1: none), before its first claim. Names
        and bytes stay; batches acked without a step or passed over as stale stay where they are.
        Steps are shared by all consumers of a run directory. Where that is not there yet, the
        rewind is made as soon as it is, before anything is claimed, and the answer is empty.
        """
        if isinstance(step, bool) or not isinstance(step, int):
            raise ConfigError(f"a step is an integer, not {step!r}")
        self._rewind_to = step
        return self._rewind() if self._is_ready("rewind") else []

    def reason(self) -> str:
        """Return why no batch comes, in words; callable at any time.

        Tells an absent daemon, an unreadable source, groups that are not whole, back-pressure, and
        a run that is over from mere waiting; and what this consumer holds or passed over.
        """
        words = ["stop() was called" if self._stopping else why_nothing_comes(self._run)]
        if self._held:
            samples = sum(map(len, self.held))
            words.append(
                f"this consumer holds {len(self._held)} batches ({samples} samples) "
                "that are not acked"
            )
        return "; ".join([*words, *self._stale.words()])

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
        self._identity.close()
        hints, self._hints = self._hints, None
        if hints is not None:
            hints.close()

    # --- for the batches --------------------------------------------------------------------

    def check_usable(self, act: str) -> None:
        """Raise ConsumerError after `close`, and in a process forked from the one that claims."""
        self._identity.check_usable(act)

    def let_go(self, batch_id: str, *, acked: bool) -> None:
        """Take note that a batch is held no more."""
        if acked:
            self._acked.add(batch_id)
        self._held.pop(batch_id, None)
        if not acked:
            self._names.expire()

    # --- ready to claim -----------------------------------------------------------------------

    def _is_ready(self, act: str) -> bool:
        """Hold the lock, rewound as far as was asked; False where there is no run directory yet."""
        self.check_usable(act)
        if not self._identity.is_held:
            if self._hints is None:
                self._identity.belongs_to_this_process()
                self._hints = Hints(clock=self._clock)
            if not _is_run_dir(self._run) or not self._identity.acquire():
                return False
            self._left_over = {
                name
                for name in fs.scan(self._run.of(self._own)).files
                if batch_id_of(name) not in self._held
            }
        if self._rewind_to is not None and act != "rewind":
            self._rewind()
        return True

    def _rewind(self) -> list[str]:
        """Make the rewind that was asked for, if it was not made yet."""
        if self._rewind_to is None:
            return []
        rewound = [found.name.id for found in moves.rewind(self._run, self._rewind_to)]
        self._acked.difference_update(rewound)
        self._names.expire()
        if rewound:
            step, number = self._rewind_to, len(rewound)
            _log.info("rewound to step %d: %d batches are pending again", step, number)
        self._rewind_to = None
        return rewound

    def _pause(self, seconds: float) -> bool:
        assert self._hints is not None
        self._hints.wait(seconds)
        return not self._stopping

    # --- the next batch -----------------------------------------------------------------------

    def _next(self, min_weight_version: int) -> Batch | None:
        """Return the first batch that can be had: one pass that lists the folders once at most."""
        looked = self._names.are_old
        if looked:
            self._list()
        while not self._stopping:
            following = self._names.pop()
            if following is None:
                if looked:
                    return None
                self._list()
                looked = True
                continue
            place, file_name = following
            if place is not self._own and not self._is_still_pending(file_name):
                continue
            name = BatchName.parse(file_name)
            if name is None:
                continue
            batch_id = name.id
            if self._is_new(batch_id):
                batch = self._hand_out(moves.Found(place, name), batch_id, min_weight_version)
                if batch is not None:
                    return batch
        return None

    def _list(self) -> None:
        # The lock is taken anew where somebody removed the file or the folder.
        if self._identity.is_still_held() or self._is_ready("claim"):
            self._names.list()
        else:
            self._names.forget()

    def _hand_out(self, found: moves.Found, batch_id: str, min_weight_version: int) -> Batch | None:
        """Return the batch, claimed and checked; None where it is lost, stale or set aside."""
        if found.name.hi < min_weight_version:
            if moves.skip_stale(self._run, found) is not None:
                self._stale.passed_over(found.name)
            return None
        own = (
            self._next_try(found)
            if found.place is self._own
            else moves.claim(self._run, found.name, self.name)
        )
        if own is None:
            return None
        try:
            is_sound = self._ahead.fits(own.path(self._run), own.name)
        except FileNotFoundError:
            return None  # RACE: somebody moved it away by hand
        if not is_sound:
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

    # --- waiting ------------------------------------------------------------------------------

    def _wait(self, left: float | None) -> None:
        """Return when it may be worth looking again, at the latest after a second or two."""
        hints = self._hints
        assert hints is not None
        self._names.expire()
        if self._identity.is_held and not self._watching:
            self._watching = True
            # Our own claims are no news: not in the own folder, and not as what was pending.
            hints.watch(self._run.pending, tag="pending", names=self._is_news)
            hints.watch(self._run.of(self._own), tag="own", names=self._is_news)
            return  # what came before the watch is found by looking once more
        with_hints = self._watching and hints.healthy()
        pause = LOOK_SECONDS if with_hints else LOOK_WITHOUT_HINTS_SECONDS
        heard = hints.wait(pause if left is None else min(left, pause))
        if heard:
            own, pending = heard.get("own", set()), heard.get("pending", set())
            if own is not None and pending is not None:
                self._names.heard(own, pending)
        elif self._identity.is_held:
            # NFS shows new names in a folder only after its parent was looked at.
            with contextlib.suppress(FileNotFoundError):
                fs.scan(self._run.root)

    def _is_news(self, file_name: str) -> bool:
        batch_id = batch_id_of(file_name)
        return batch_id is not None and self._is_new(batch_id)

    def _is_new(self, batch_id: str) -> bool:
        return batch_id not in self._held and batch_id not in self._acked


def _is_run_dir(run: RunDir) -> bool:
    """Whether the run directory is there.

    Raises ConfigError where a file lies at its path, or a newer spoold made it.
    """
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
    setup.check_format(run)
    return True
