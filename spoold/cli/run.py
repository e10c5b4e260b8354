"""`spoold run` and `spoold demo`: the commands that start something.

The options of `run` are made from the table in `spoold.config`; none is typed here twice.
"""

from __future__ import annotations

import logging
from typing import Any

import click

from spoold import config, log
from spoold.cli.words import debug_option

__all__ = ["demo", "run"]


def _setting_options() -> list[click.Parameter]:
    return [
        click.Option([option.name, *option.forms], metavar=option.metavar, help=option.help)
        for option in config.setting_options()
    ]


@click.command(params=_setting_options())
@click.option("--config", "config_file", metavar="FILE", help="TOML file with settings.")
@click.option("--once", is_flag=True, help="Deliver all that is deliverable now, then exit.")
@debug_option
def run(config_file: str | None, once: bool, **given: Any) -> None:
    """Deliver the completed environments of a rollout database into a run directory.

    A setting is taken from its option, else from its variable (SPOOLD_BATCH_SIZE), else from the
    file (batch_size = 64), else from its default.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    settings = config.load(config_file, chosen)
    log.setup(settings.log_level, settings.log_format, journal=config.stderr_is_journal())
    unknown = config.unknown_variables()
    if unknown:
        fields = {"variables": "; ".join(f"{name}: {hint}" for name, hint in unknown.items())}
        logging.getLogger("spoold.config").warning("unknown variables", extra={"fields": fields})
    from spoold import daemon

    daemon.run(settings, once=once)


@click.command()
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path())
@debug_option
@click.pass_context
def demo(ctx: click.Context, folder: str | None) -> None:
    """Show the whole thing in fifteen seconds: a writer, the daemon, a trainer, and two kills."""
    from spoold import demo as whole

    ctx.exit(whole.run(folder))
