"""Progress of long work, on standard error, in one line that replaces itself.

Only where standard error is a terminal, and only once the work has taken half a second: a log
file is never filled with it, and short work shows nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from spoold.cli import terminal

__all__ = ["Line", "progress"]

_T = TypeVar("_T")
FIRST_SECONDS: Final = 0.5
AGAIN_SECONDS: Final = 0.1


class Line:
    """The line itself: `pruning 1,200 of 100,000 (1 %)`. Shown by `say`, gone after `wipe`.

    The cursor stays at its beginning, so that whatever else is written there begins a line.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_seen = terminal.is_terminal(sys.stderr)
        self._say_at = time.monotonic() + FIRST_SECONDS
        self._is_said = False

    def say(self, done: int, total: int) -> None:
        """Say how many of how many are done, if it is time to."""
        if not self._is_seen or (now := time.monotonic()) < self._say_at:
            return
        self._say_at, self._is_said = now + AGAIN_SECONDS, True
        percent = 100 * done // total if total else 100
        sys.stderr.write(f"\r\x1b[K{self._what} {done:,} of {total:,} ({percent} %)\r")
        sys.stderr.flush()

    def wipe(self) -> None:
        """Leave nothing behind."""
        if self._is_said:
            self._is_said = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def progress(items: Iterable[_T], *, total: int, what: str) -> Iterator[_T]:
    """Yield the items, and say how many of `total` are done."""
    line = Line(what)
    try:
        for done, item in enumerate(items):
            line.say(done, total)
            yield item
    finally:
        line.wipe()
