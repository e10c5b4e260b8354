"""A process that writes one batch while the daemon reads the rows of the next.

Reading and converting keeps one processor busy, digesting and writing another; as threads of one
interpreter they would stand in each other's way. A batch goes over in shared memory, behind a line
of JSON about it, and the answer comes back through a pipe. An eventfd rings for it: whom a pipe
wakes the kernel runs in the waker's place.

The writer holds the lock of the run directory, too: until the batch that it began is whole no other
daemon starts, whatever became of this one. It ends when its pipe does, and on nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, Any, Final, NamedTuple

from spoold import codec, fs
from spoold.errors import SpoolLocked, SpoolWriteError
from spoold.layout import BatchName, RunDir
from spoold.model import Sample
from spoold.spool.publish import publish

__all__ = ["MAX_BYTES", "Writer", "main"]

MAX_BYTES: Final = 8 << 20
_MAX_SAMPLES: Final = 16384
# For the line of JSON behind the samples: it names two places in each of them.
_ORDER_BYTES: Final = 1 << 20


class Written(NamedTuple):
    """A batch that lies in pending/, and how long that took."""

    name: BatchName
    seconds: float


class Writer:
    """The daemon's end of it. One batch at a time, of up to MAX_BYTES.

    Raises OSError where no process can be had.
    """

    def __init__(self, run: RunDir, lock: fs.Lock) -> None:
        shared = os.memfd_create("batch")
        self._bell = os.eventfd(0)
        try:
            os.ftruncate(shared, MAX_BYTES + _ORDER_BYTES)
            self._memory = mmap.mmap(shared, MAX_BYTES + _ORDER_BYTES)
            # What a module is found by in this process, and nothing else: no stray json.py.
            path = [] if os.getcwd() in sys.path else ["-P"]
            inherited = lock.fileno(), shared, self._bell
            self._process = subprocess.Popen(
                [sys.executable, *path, "-m", __name__, run.root, *map(str, inherited)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=inherited,
            )
        except BaseException:
            os.close(self._bell)
            raise
        finally:
            os.close(shared)
        self._is_ready = False

    def is_ready(self) -> bool:
        """Whether it has started up, and has not ended. Does not wait."""
        if self._process.poll() is not None:
            return False
        if not self._is_ready and select.select([_end(self._process.stdout)], [], [], 0)[0]:
            self._is_ready = bool(_end(self._process.stdout).readline())
        return self._is_ready

    def fits(self, samples: Sequence[Sample]) -> bool:
        """Whether a batch is small enough."""
        return len(samples) <= _MAX_SAMPLES and sum(len(s.line) for s in samples) <= MAX_BYTES

    def begin(self, name: BatchName, samples: Sequence[Sample], *, is_sound: bool) -> None:
        """Publish a batch that fits, and whose digest is not known yet, in the background.

        `is_sound`: somebody has seen already that the messages are.
        """
        end = 0
        places = []
        for sample in samples:
            at, end = end, end + len(sample.line)
            self._memory[at:end] = sample.line
            if not is_sound:
                places.append((at + sample.messages[0], at + sample.messages[1]))
        facts = {"seq": name.seq, "samples": name.samples, "lo": name.lo, "hi": name.hi}
        order = json.dumps({"name": facts, "places": places}).encode() + b"\n"
        self._memory[end : end + len(order)] = order
        os.eventfd_write(self._bell, end)

    def has_answered(self) -> bool:
        """Whether `finish` would not wait."""
        return bool(select.select([_end(self._process.stdout)], [], [], 0)[0])

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
        said = json.loads(answer)
        if "locked" in said:
            raise SpoolLocked(**said["locked"])
        if "failed" in said:
            raise SpoolWriteError(**said["failed"])
        if "unsound" in said:
            return None
        return Written(BatchName(**said["name"]), said["seconds"])

    def close(self) -> None:
        """End the process. A batch that it is writing is whole when this returns."""
        with self._process:
            pass
        self._memory.close()
        os.close(self._bell)


def _end(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def main(root: str, lock: str, shared: str, bell: str) -> None:
    """Publish one batch after another, until nobody is there any more to ask for one."""
    # Whoever stops the daemon stops it, and it ends the writer; a half-written batch helps nobody.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run = RunDir(root)
    held = fs.Lock.inherited(run.lock, int(lock))
    memory = mmap.mmap(int(shared), MAX_BYTES + _ORDER_BYTES, prot=mmap.PROT_READ)
    _say({"ready": True})
    while int(bell) in select.select([int(bell), sys.stdin], [], [])[0]:
        end = os.eventfd_read(int(bell))
        memory.seek(end)
        order = json.loads(memory.readline())
        began = time.monotonic()
        if codec.are_sound(memory, order["places"]):
            answer = _publish(run, held, order["name"], memoryview(memory)[:end])
        else:
            answer = {"unsound": True}
        _say({**answer, "seconds": time.monotonic() - began})


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
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
