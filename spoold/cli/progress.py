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

__all__ = ["progress"]

_T = TypeVar("_T")
FIRST_SECONDS: Final = 0.5
AGAIN_SECONDS: Final = 0.1


def progress(items: Iterable[_T], *, total: int, what: str) -> Iterator[_T]:
    """Yield the items, and say how many of `total` are done: `pruning 1,200 of 100,000 (1 %)`."""
    if not terminal.is_terminal(sys.stderr):
        yield from items
        return
    say_at, said = time.monotonic() + FIRST_SECONDS, False
    try:
        for done, item in enumerate(items):
            now = time.monotonic()
            if now >= say_at:
                say_at, said = now + AGAIN_SECONDS, True
                percent = 100 * done // total if total else 100
                sys.stderr.write(f"\r\x1b[K{what} {done:,} of {total:,} ({percent} %)")
                sys.stderr.flush()
            yield item
    finally:
        if said:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
