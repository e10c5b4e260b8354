"""A consumer's name: whose it is, as long as its lock is held."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Final

from spoold import fs
from spoold.errors import ConfigError, ConsumerBusy, ConsumerError
from spoold.layout import Place, RunDir, State, is_name

__all__ = ["Identity"]

_log = logging.getLogger("spoold.consumer")

# Whoever only probes the lock holds it for less than a millisecond.
BUSY_SECONDS: Final = 5.0
BUSY_PAUSE_SECONDS: Final = 0.05


class Identity:
    """The name of one consumer, held by a lock on inflight/<name>/.lock, by one process.

    `pause(seconds)` waits between two tries for a busy lock; False gives up.
    """

    def __init__(
        self,
        run: RunDir,
        name: str,
        *,
        clock: Callable[[], float],
        pause: Callable[[float], bool],
    ) -> None:
        if not is_name(name):
            raise ConfigError(
                f"{name!r} cannot be the name of a consumer",
                hint="a name is 1 to 48 letters, digits, - and _, and begins with none of the last",
            )
        self.run = run
        self.name = name
        self.place = Place(State.INFLIGHT, name)
        self._clock = clock
        self._pause = pause
        self._pid: int | None = None
        self._lock: fs.Lock | None = None
        self._closed = False

    @property
    def is_held(self) -> bool:
        """Whether the lock was taken and not let go."""
        return self._lock is not None

    def check_usable(self, act: str) -> None:
        """Raise ConsumerError after `close`, and in a process forked from the one that began."""
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

    def belongs_to_this_process(self) -> None:
        """Note which process may use the name from now on."""
        if self._pid is None:
            self._pid = os.getpid()

    def acquire(self) -> bool:
        """Take the lock; makes the folder. False when `pause` gave up.

        Raises ConsumerBusy when another process holds it for longer than a probe does.
        """
        fs.make_dirs(self.run.of(self.place))
        lock = fs.Lock(self.run.consumer_lock(self.name))
        give_up = self._clock() + BUSY_SECONDS
        while not lock.acquire():
            if self._clock() >= give_up:
                raise self._busy(lock.path)
            if not self._pause(BUSY_PAUSE_SECONDS):
                return False
        self._lock = lock
        return True

    def is_still_held(self) -> bool:
        """Whether the lock is held; it is let go where somebody removed the file or the folder."""
        if self._lock is None:
            return False
        if self._lock.still_held():
            return True
        _log.warning("%s was removed while it was held; locking anew", self._lock.path)
        self._lock.release()
        self._lock = None
        return False

    def close(self) -> None:
        """Let go of the name, for good. A forked child leaves the lock to its parent."""
        self._closed = True
        lock, self._lock = self._lock, None
        if lock is not None and self._pid == os.getpid():
            lock.release()

    def _busy(self, path: str) -> ConsumerBusy:
        message = f"another process is consumer {self.name} of {self.run.root}"
        holder = fs.holder_of(path)
        if fs.is_left_behind(path):
            return ConsumerBusy(
                f"{message}: a process that {holder} left behind holds its lock",
                hint=f"`fuser {path}` finds it; end it, or give this one another name",
            )
        return ConsumerBusy(
            message + (f" ({holder})" if holder else ""),
            hint="stop it, or give this one another name",
        )
