"""`spoold run` and `spoold demo`: the commands that start something.

The options of `run` are made from the table in `spoold.config`; none is typed here twice.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import click

from spoold import config, log
from spoold.cli.progress import Line
from spoold.cli.words import LOGS_ERRORS, debug_option
from spoold.config import Settings

__all__ = ["config_option", "demo", "run", "setting_options"]

_log = logging.getLogger("spoold.config")

config_option: Final = click.option(
    "--config", "config_file", metavar="FILE", help="TOML file with settings."
)


def setting_options() -> list[click.Parameter]:
    """Return an option for every setting."""
    return [
        click.Option([option.name, *option.forms], metavar=option.metavar, help=option.help)
        for option in config.setting_options()
    ]


@click.command(params=setting_options())
@config_option
@click.option("--once", is_flag=True, help="Deliver all that is deliverable now, then exit.")
@debug_option
@click.pass_context
def run(ctx: click.Context, /, config_file: str | None, once: bool, **given: Any) -> None:
    """Deliver the completed environments of a rollout database into a run directory.

    A setting is taken from its option, else from its variable (SPOOLD_BATCH_SIZE), else from the
    file (batch_size = 64), else from its default. SIGHUP reads the file again.
    """
    chosen = {name: value for name, value in given.items() if value is not None}

    def read_again() -> Settings:
        settings = config.load(config_file, chosen)
        _set_up_log(settings)
        return settings

    settings = read_again()
    if config.stderr_is_journal() or settings.log_format == "json":
        ctx.find_root().ensure_object(dict)[LOGS_ERRORS] = True
    unknown = config.unknown_variables()
    if unknown:
        fields = {"variables": "; ".join(f"{name}: {hint}" for name, hint in unknown.items())}
        _log.warning("unknown variables", extra={"fields": fields})
    from spoold import daemon, systemd

    line = Line("looking at environments")

    def watch(done: int, total: int) -> None:
        if done < total:
            line.say(done, total)
        else:
            line.wipe()

    service = systemd.Service(config.notify_socket(), watchdog_seconds=config.watchdog_seconds())
    daemon.run(
        settings,
        once=once,
        service=service,
        read_again=read_again if config_file else None,
        watch=watch,
    )


def _set_up_log(settings: Settings) -> None:
    log.setup(settings.log_level, settings.log_format, journal=config.stderr_is_journal())


@click.command()
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path())
@debug_option
@click.pass_context
def demo(ctx: click.Context, folder: str | None) -> None:
    """Show the whole thing in fifteen seconds: a writer, the daemon, a trainer, and two kills."""
    from spoold import demo as whole

    ctx.exit(whole.run(folder))
