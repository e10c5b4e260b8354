"""Processes that are started, killed and stopped by pid, and that never outlive this one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Final

__all__ = ["Child", "daemon_command", "interruptible", "trainer_command", "writer_command"]

_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None)


def daemon_command(db: str, run_dir: str, *options: str) -> list[str]:
    """Return the command line of the daemon."""
    return [sys.executable, "-m", "spoold", "run", "--db", db, "--run-dir", run_dir, *options]


def writer_command(db: str, *options: str) -> list[str]:
    """Return the command line of the demo's writer."""
    return [sys.executable, "-m", "spoold.demo.writer", db, *options]


def trainer_command(run_dir: str, checkpoint: str, *options: str) -> list[str]:
    """Return the command line of the demo's trainer."""
    return [sys.executable, "-m", "spoold.demo.trainer", run_dir, checkpoint, *options]


class Child:
    """A process in a session of its own, whose output goes to the end of a file.

    A terminal's Ctrl-C does not reach it: whoever started it stops it. When its parent dies without
    having done so (kill -9), the kernel sends it SIGTERM.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: str,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        parent = os.getpid()

        def die_with_parent() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # RACE: it died before we could ask
                os._exit(1)

        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
                env=environ,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return how it ended (minus the signal's number), None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Send SIGKILL and reap it. Afterwards it is gone, and so are its locks."""
        self._process.kill()
        self._process.wait()

    def wait(self, timeout_seconds: float) -> int | None:
        """Wait for its end; its exit code, or None when the time is up."""
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, timeout_seconds: float = 10.0) -> int:
        """Send SIGTERM, wait, and kill it when it does not end in time. Returns its exit code."""
        try:
            self._process.terminate()
            code = self.wait(timeout_seconds)
        except BaseException:
            self.kill()  # a second Ctrl-C means now
            raise
        if code is None:
            self.kill()
        return self._process.returncode

    def last_words(self, lines: int = 6) -> str:
        """Return the end of its log."""
        with open(self.log, "rb") as file:
            return b"\n".join(file.read().splitlines()[-lines:]).decode(errors="replace")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that children get stopped."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _ENDINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_ENDINGS: Final = (signal.SIGTERM, signal.SIGHUP)
