"""A process that writes one batch while the daemon reads the rows of the next.

Reading and converting keeps one processor busy, digesting and writing another; as threads of one
interpreter they would stand in each other's way. A batch goes over in shared memory, with a line of
JSON about it behind it, and the answer comes back through a pipe. There is room for two: while one
is written the next is laid beside it. An eventfd rings for it: whom a pipe wakes the kernel runs in
the waker's place.

The writer holds the lock of the run directory, too: until the batch that it began is whole no other
daemon starts, whatever became of this one. It ends when its pipe does, and on nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, Any, Final, NamedTuple

import orjson

from spoold import codec, fs
from spoold.errors import LockLost, SpoolLocked, SpoolWriteError
from spoold.layout import BatchName, RunDir
from spoold.model import Sample
from spoold.spool.publish import publish

__all__ = ["MAX_BYTES", "Writer", "main"]

MAX_BYTES: Final = 16 << 20
_MAX_SAMPLES: Final = 16384
# For the line of JSON behind the samples: it names two places in each of them.
_ORDER_BYTES: Final = 1 << 20
_ROOM_BYTES: Final = MAX_BYTES + _ORDER_BYTES
# Whoever stops the daemon stops it, and it ends the writer; a half-written batch helps nobody.
_DEAF_TO: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MFD_CLOEXEC: Final = 1


class Written(NamedTuple):
    """A batch that lies in pending/, and how long that took."""

    name: BatchName
    seconds: float


class Writer:
    """The daemon's end of it. Writes one batch at a time, of up to MAX_BYTES.

    Raises OSError where no process can be had.
    """

    def __init__(self, run: RunDir, lock: fs.Lock) -> None:
        self._is_ready = False
        # The batch that was loaded last: where it lies, and in it the messages of each sample.
        self._start = self._end = 0
        self._places: list[tuple[int, int]] = []
        with contextlib.ExitStack() as on_error:
            shared = _memory_file()
            with os.fdopen(shared, "rb"):
                os.ftruncate(shared, 2 * _ROOM_BYTES)
                self._memory = on_error.enter_context(mmap.mmap(shared, 2 * _ROOM_BYTES))
                self._bell = os.eventfd(0)
                on_error.callback(os.close, self._bell)
                self._process = _started(run, lock.fileno(), shared, self._bell)
            self._answers = select.poll()
            self._answers.register(_end(self._process.stdout), select.POLLIN)
            on_error.pop_all()

    def is_ready(self) -> bool:
        """Whether it has started up, and has not ended. Does not wait."""
        if self._process.poll() is not None:
            return False
        if not self._is_ready and self.has_answered():
            self._is_ready = bool(_end(self._process.stdout).readline())
        return self._is_ready

    def exit_code(self) -> int | None:
        """How it ended, of its own accord or killed; None while it lives."""
        return self._process.poll()

    def fits(self, samples: int, size_bytes: int) -> bool:
        """Whether a batch of so many samples and bytes is small enough."""
        return samples <= _MAX_SAMPLES and size_bytes <= MAX_BYTES

    def load(self, samples: Sequence[Sample]) -> None:
        """Lay a batch that fits into memory, its samples in their order, in place of the last load.

        What was begun and is being written lies elsewhere.
        """
        memory = self._memory
        memory.seek(self._start)
        end = self._start
        self._places = []
        for sample in samples:
            for piece in sample.pieces:
                memory.write(piece)
            self._places.append((end + sample.messages[0], end + sample.messages[1]))
            end += sample.size_bytes
        self._end = end

    def begin(self, name: BatchName, *, sound: int) -> None:
        """Publish the batch that was loaded, and whose digest is not known yet, in the background.

        Of its first `sound` samples it is known that the messages are. No other may be under way.
        """
        facts = {"seq": name.seq, "samples": name.samples, "lo": name.lo, "hi": name.hi}
        order = {"name": facts, "start": self._start, "places": self._places[sound:]}
        self._memory.seek(self._end)
        self._memory.write(orjson.dumps(order) + b"\n")
        os.eventfd_write(self._bell, self._end)
        self._start = 0 if self._start else _ROOM_BYTES

    def has_answered(self) -> bool:
        """Whether `finish` would not wait."""
        return bool(self._answers.poll(0))

    def finish(self) -> Written | None:
        """Wait until the batch lies in pending/.

        None where messages are not sound: nothing is published then. Raises what `publish` raises.
        Where the process is gone `state_unknown` is set: it may have made the batch visible before.
        """
        answer = _end(self._process.stdout).readline()
        if not answer:
            self._process.wait()
            raise SpoolWriteError(
                f"the process that wrote a batch ended (exit code {self._process.returncode})",
                hint="start spoold again: the batch is either whole or not there",
                state_unknown=True,
            )
        said = orjson.loads(answer)
        if "locked" in said:
            raise LockLost(**said["locked"])
        if "failed" in said:
            raise SpoolWriteError(**said["failed"])
        if "unsound" in said:
            return None
        return Written(BatchName(**said["name"]), said["seconds"])

    def close(self) -> None:
        """End the process. A batch that it is writing is whole when this returns."""
        if not self.is_ready():
            self._process.kill()  # it never began one
        with self._process:
            pass
        self._memory.close()
        os.close(self._bell)


def _end(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _memory_file() -> int:
    """Return a file in memory. `os.memfd_create` is missing in many a Python.

    Those of uv and conda are built for an older C library than the one that is there.
    """
    try:
        fd: int = ctypes.CDLL(None, use_errno=True).memfd_create(b"batch", _MFD_CLOEXEC)
    except AttributeError as error:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from error
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return fd


def _started(run: RunDir, *inherited: int) -> subprocess.Popen[bytes]:
    # Modules are found where this process finds them, and nowhere else: no stray json.py.
    code = f"import sys; sys.path[:] = {sys.path!a}; import {__name__} as w; w.main(*sys.argv[1:])"
    # What comes until it has made itself deaf waits, and is lost then: no traceback at a Ctrl-C.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _DEAF_TO)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", code, run.root, *map(str, inherited)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=inherited,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _heard(*fds: int) -> list[int]:
    """Wait. Return which of these can be read, or are at their end."""
    # Not select, which knows no descriptor above 1023: whoever started us may have left many open.
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll()]


def main(root: str, lock: str, shared: str, bell: str) -> None:
    """Publish one batch after another, until nobody is there any more to ask for one."""
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _DEAF_TO)
    run = RunDir(root)
    held = fs.Lock.inherited(run.lock, int(lock))
    memory = mmap.mmap(int(shared), 2 * _ROOM_BYTES, prot=mmap.PROT_READ)
    _say({"ready": True})
    while int(bell) in _heard(int(bell), sys.stdin.fileno()):
        end = os.eventfd_read(int(bell))
        memory.seek(end)
        order = orjson.loads(memory.readline())
        began = time.monotonic()
        if codec.are_sound(memory, order["places"]):
            answer = _publish(run, held, order["name"], memoryview(memory)[order["start"] : end])
        else:
            answer = {"unsound": True}
        _say({**answer, "seconds": time.monotonic() - began})
    os._exit(0)  # nothing is open that would have to be ended in order, and somebody waits


def _publish(
    run: RunDir, lock: fs.Lock, facts: dict[str, Any], lines: memoryview
) -> dict[str, Any]:
    facts["digest"] = hashlib.sha256(lines).hexdigest()[:12]
    try:
        publish(run, lock, BatchName(**facts), (lines,))
    except SpoolWriteError as error:
        known = {"errno": error.errno, "state_unknown": error.state_unknown}
        return {"failed": {"message": error.message, "hint": error.hint, **known}}
    except SpoolLocked as error:
        return {"locked": {"message": error.message, "hint": error.hint}}
    return {"name": facts}


def _say(answer: dict[str, Any]) -> None:
    # RACE: a daemon that was killed meanwhile hears no answer; the next one finds the batch.
    with contextlib.suppress(BrokenPipeError):
        os.write(1, orjson.dumps(answer) + b"\n")
