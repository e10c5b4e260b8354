"""What the subcommands share: words on standard error, options, times and counts for people."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

__all__ = [
    "LOGS_ERRORS",
    "age",
    "counted",
    "debug_option",
    "json_option",
    "printable",
    "run_dir_argument",
    "say",
    "size",
]

LOGS_ERRORS: Final = "logs_errors"
"""Set in the context's object by a command whose standard error is a log of events: the error that
ends it becomes one of them."""

_Command = TypeVar("_Command", bound=Callable[..., Any])
_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "min"))


def say(text: str) -> None:
    """Print words, in one line, on standard error."""
    click.echo(f"spoold: {printable(text)}", err=True)


def printable(text: str) -> str:
    """Return text that any terminal can show in one line, undecodable bytes of names escaped."""
    line = " ".join(text.splitlines())
    return os.fsencode(line).decode("utf-8", "backslashreplace") if not _is_utf8(line) else line


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def age(since: float, now: float) -> str:
    """Return how long ago something was, in one unit; a clock that was set back gives 0 s."""
    seconds = now - since
    if not math.isfinite(seconds) or seconds < 0:
        seconds = 0
    for size, unit in _UNITS:
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def counted(number: int, word: str) -> str:
    """Return `1 batch`, `2 batches`, `3,000 samples`."""
    if number == 1:
        return f"1 {word}"
    return f"{number:,} {word}{'es' if word.endswith('ch') else 's'}"


def size(number: int) -> str:
    """Return `12 bytes`, `3.4 MiB`, `120.0 GiB`."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 1 << power:
            return f"{number / (1 << power):.1f} {unit}"
    return counted(number, "byte")


def _remember_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_root().ensure_object(dict)["debug"] = True


debug_option: Final[Callable[[_Command], _Command]] = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_remember_debug,
    help="Show the traceback of an error.",
)
json_option: Final[Callable[[_Command], _Command]] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: a contract, keys are only ever added."
)
run_dir_argument: Final[Callable[[_Command], _Command]] = click.argument(
    "run_dir", type=click.Path()
)
