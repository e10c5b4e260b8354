"""The command line: parse, call, print.

Data goes to standard output, words to standard error. An error is one line, `spoold: what and
where; what next`, and its exit code is the one that `spoold.errors` gives it. Each group of
subcommands is a module that is loaded when one of them is called, so that `status` and `ls` cost
next to nothing.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final, NoReturn

import click

from spoold import __version__
from spoold.cli.words import LOGS_ERRORS, debug_option, say
from spoold.errors import EX_BUG, EX_IO, EX_USAGE, SpooldError

__all__ = ["COMMANDS", "main"]

COMMANDS: Final = {
    "run": "run",
    "demo": "run",
    "serve": "serve",
    "config": "config",
    "status": "status",
    "top": "top",
    "report": "report",
    "ls": "ls",
    "show": "ls",
    "claim": "move",
    "ack": "move",
    "release": "move",
    "reject": "move",
    "requeue": "move",
    "rewind": "move",
    "prune": "prune",
    "check": "check",
}
_EX_SIGINT: Final = 130
# A listing is thousands of small objects without a cycle: to look for cycles in them, again and
# again, was 8 % of what `status` and `ls` cost with 5,000 files.
_GC_THRESHOLD: Final = 50_000
_EX_SIGPIPE: Final = 141


class _Commands(click.Group):
    """The subcommands, in the order of the table, each loaded when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's signature
        cmd_name: str,
    ) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"spoold.cli.{COMMANDS[cmd_name]}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            result: object = super().invoke(ctx)
            if sys.stdout is not None:  # closed by whoever started us: `>&-`
                sys.stdout.flush()
        except BrokenPipeError:
            # `spoold ls … | head`: whoever read us has seen enough. Nothing must be flushed into
            # the closed pipe when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(_EX_SIGPIPE)
        return result


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
@debug_option
def _spoold() -> None:
    """Spool completed environments of a rollout database for a trainer.

    Where the batch files lie is the checkpoint: pending/, inflight/, acked/, rejected/. Moving them
    by hand with `mv -n` is safe at any time.
    """


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    _open_standard_streams()
    gc.set_threshold(_GC_THRESHOLD)
    flags: dict[str, bool] = {}
    sys.exit(_run(sys.argv[1:] if args is None else list(args), flags))


def _open_standard_streams() -> None:
    """Let no file of ours become one of them where they were closed: `<&- >&- 2>&-`."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _run(args: list[str], flags: dict[str, bool]) -> int:
    try:
        code = _spoold.main(args, prog_name="spoold", standalone_mode=False, obj=flags)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EX_USAGE
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "spoold"
        say(f"{_as_clause(error.format_message())}; see `{command} --help`")
        return EX_USAGE
    except (click.Abort, KeyboardInterrupt):
        return _EX_SIGINT
    except SpooldError as error:
        _show_traceback(flags)
        _tell(flags, str(error), error.exit_code)
        return error.exit_code
    except OSError as error:
        _show_traceback(flags)
        where = str(error.filename) if error.filename else "standard output or another file"
        _tell(flags, f"cannot use {where}: {os.strerror(error.errno or 0).lower()}", EX_IO)
        return EX_IO
    except Exception as error:  # noqa: BLE001 - the last stop: a bug is one line and its own code
        _show_traceback(flags)
        what = f"bug: {type(error).__name__}: {error}; run it again with --debug and report that"
        _tell(flags, what, EX_BUG)
        return EX_BUG
    return code if isinstance(code, int) else 0


def _tell(flags: dict[str, bool], what: str, exit_code: int) -> None:
    if flags.get(LOGS_ERRORS):
        import logging

        fields = {"error": what, "exit": exit_code}
        logging.getLogger("spoold").error("ended", extra={"fields": fields})
    else:
        say(what)


def _as_clause(sentence: str) -> str:
    text = sentence.rstrip(".")
    return text[:1].lower() + text[1:]


def _show_traceback(flags: dict[str, bool]) -> None:
    if flags.get("debug"):
        sys.excepthook(*sys.exc_info())
