"""A command in a pseudo terminal of its own, and the screen that a person would see."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping

import pyte

from tests.support.processes import ENVIRON


class Terminal:
    """A command in a pseudo terminal of its own, and the screen that a person would see."""

    def __init__(
        self,
        *args: object,
        columns: int = 90,
        lines: int = 24,
        term: str = "linux",
        environ: Mapping[str, str] | None = None,
        ignores_hangup: bool = False,
        stdout: int | None = None,
        program: tuple[str, ...] = ("-m", "spoold"),
    ) -> None:
        self.seen = b""
        self.master, self.slave = pty.openpty()
        self.screen = pyte.Screen(columns, lines)
        self.stream = pyte.ByteStream(self.screen)
        self.resize(columns, lines)
        self.before = termios.tcgetattr(self.slave)

        def prepare() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            if ignores_hangup:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)

        self.process = subprocess.Popen(
            [sys.executable, *program, *map(str, args)],
            stdin=self.slave,
            stdout=self.slave if stdout is None else stdout,
            stderr=self.slave,
            env=ENVIRON | {"TERM": term, "LC_ALL": "C.UTF-8"} | dict(environ or {}),
            start_new_session=True,
            preexec_fn=prepare,
        )

    def resize(self, columns: int, lines: int) -> None:
        self.screen.resize(lines, columns)
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)  # the kernel sends SIGWINCH

    def _read(self, *, wait_seconds: float = 0.1) -> bool:
        if not select.select([self.master], [], [], wait_seconds)[0]:
            return False
        data = os.read(self.master, 65536)
        self.seen += data
        self.stream.feed(data)
        return True

    def drain(self) -> None:
        """Take in all that was written until now."""
        while self._read(wait_seconds=0.0):
            pass

    def hang_up(self) -> None:
        """Take the terminal away, as the end of a connection does."""
        os.close(self.slave)
        os.close(self.master)
        self.master = self.slave = -1

    def until(self, wanted: str, *, timeout_seconds: float = 20.0) -> None:
        """Return as soon as a text stands on the screen."""
        deadline = time.monotonic() + timeout_seconds
        while not any(wanted in line for line in self.screen.display):
            assert time.monotonic() < deadline, "\n".join(self.screen.display)
            self._read()

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def end(self, *, timeout_seconds: float = 60.0) -> int:
        """Wait until the command has ended; its exit code."""
        deadline = time.monotonic() + timeout_seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            self._read()
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for fd in (self.master, self.slave):
            if fd >= 0:
                os.close(fd)
