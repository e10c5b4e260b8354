"""What the terminal can show: colours, width. With `spoold.config` the only reader of variables."""

from __future__ import annotations

import os
import sys
from typing import Final, TextIO

import click

__all__ = ["WIDTH", "follow_resizing", "is_terminal", "painted", "shows_colours", "width"]

WIDTH: Final = 80
_LEAST: Final = 40


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person looks at a stream as it is written."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False  # closed


def shows_colours(stream: TextIO | None) -> bool:
    """Whether a stream may be coloured: a terminal, and nobody has set NO_COLOR."""
    return (
        is_terminal(stream)
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "") not in ("", "dumb")
    )


def follow_resizing() -> None:
    """Let the terminal itself say how large it is.

    curses believes LINES and COLUMNS first, where somebody has exported them, and for ever.
    """
    for name in ("LINES", "COLUMNS"):
        os.environ.pop(name, None)


def width() -> int:
    """Return how wide text may be: 80 columns, fewer where the terminal is narrower."""
    if not is_terminal(sys.stdout):
        return WIDTH
    exported = os.environ.get("COLUMNS", "")
    try:
        columns = int(exported) if exported.isdecimal() else 0
        columns = columns or os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        columns = 0  # one that does not know its size
    return max(_LEAST, min(WIDTH, columns or WIDTH))


def painted(text: str, colour: str | None, *, bold: bool = False) -> str:
    """Return text in a colour where standard output shows colours, else as it is."""
    if colour is None or not shows_colours(sys.stdout):
        return text
    return click.style(text, fg=colour, bold=bold)
