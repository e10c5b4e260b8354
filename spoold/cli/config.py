"""`spoold config`: what the settings are, where each comes from, whether they are good."""

from __future__ import annotations

from typing import Any

import click

from spoold import config as settings
from spoold.cli.run import config_option, setting_options
from spoold.cli.words import counted, debug_option, say
from spoold.errors import ConfigError

__all__ = ["config"]


@click.group()
@debug_option
def config() -> None:
    """Check settings, or show what `spoold run` would make of them."""


def _warn_of_unknown_variables() -> None:
    for name, hint in settings.unknown_variables().items():
        say(f"{name} is no setting; {hint}")


@config.command(params=setting_options())
@config_option
@debug_option
@click.pass_context
def check(ctx: click.Context, /, config_file: str | None, **options: Any) -> None:
    """Say all that is wrong with the settings of `spoold run`, started with the same options.

    Looks at names and values, neither at the database nor at the run directory. Exits 78 when a
    setting is unknown, missing or impossible; an unknown SPOOLD_ variable is only warned about.
    """
    given = _gather(config_file, options)
    problems = settings.problems(given)
    for error in problems:
        say(str(error))
    _warn_of_unknown_variables()
    if problems:
        ctx.exit(ConfigError.exit_code)
    say(f"good: {counted(len(given), 'setting')} given, the others have their defaults")


@config.command(params=setting_options())
@config_option
@debug_option
def show(config_file: str | None, **options: Any) -> None:
    """Print every setting that `spoold run` would have, as TOML, and where it comes from.

    Passwords in URLs are masked.
    """
    given = _gather(config_file, options)
    rows = settings.shown(settings.make(given), given)
    lines = [
        f"{row.name} = {row.value}" if row.value else f"# {row.name} is not set" for row in rows
    ]
    width = min(max(map(len, lines)), 60)
    for line, row in zip(lines, rows, strict=True):
        click.echo(f"{line:<{width}}  # {row.origin}" if row.value else line)
    _warn_of_unknown_variables()


def _gather(config_file: str | None, options: dict[str, Any]) -> dict[str, settings.Given]:
    chosen = {name: value for name, value in options.items() if value is not None}
    return settings.gather(config_file, chosen)
