"""`spoold serve`: the gateway for trainers that fetch over HTTP."""

from __future__ import annotations

import os
from importlib.util import find_spec

import click

from spoold import config, log
from spoold.cli.words import LOGS_ERRORS, debug_option, run_dir_argument
from spoold.errors import ConfigError
from spoold.model import AckWhen

__all__ = ["serve"]


@click.command()
@run_dir_argument
@click.option("--host", default="127.0.0.1", help="Where to listen.  [default: 127.0.0.1]")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8889, help="0: any.  [default: 8889]"
)
@click.option("--name", default="gateway", help="Which consumer it is.  [default: gateway]")
@click.option(
    "--ack",
    type=click.Choice([when.value for when in AckWhen]),
    default=AckWhen.EXPLICIT.value,
    help="When a batch is acked: when the client says so, or when it asks for the next, too.",
)
@click.option("--token-file", metavar="FILE", help="A file with the token; else SPOOLD_TOKEN.")
@click.option("--log-level", metavar="|".join(["debug", "info", "warning", "error"]))
@click.option("--log-format", metavar="text|json")
@debug_option
@click.pass_context
def serve(
    ctx: click.Context,
    /,
    run_dir: str,
    host: str,
    port: int,
    name: str,
    ack: str,
    token_file: str | None,
    **given: str | None,
) -> None:
    """Serve a run directory over HTTP, as SAfactory's buffer server does; until SIGTERM.

    Speaks to unmodified Slime generator clients. One consumer of the spool: a batch is answered
    until it is acked. Needs `pip install 'spoold[http]'`. Everybody who reaches an address other
    than the loopback needs the token: as a bearer, or in the URL, http://spoold:TOKEN@host:8889.
    """
    level, form = config.log_settings({n: value for n, value in given.items() if value is not None})
    log.setup(level, form, journal=config.stderr_is_journal())
    if config.stderr_is_journal() or form == "json":
        ctx.find_root().ensure_object(dict)[LOGS_ERRORS] = True
    token = _token(token_file)
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ConfigError("starlette and uvicorn are missing", hint="pip install 'spoold[http]'")
    from spoold import gateway, systemd

    service = systemd.Service(config.notify_socket(), watchdog_seconds=config.watchdog_seconds())
    gateway.serve(
        run_dir,
        name=name,
        host=host,
        port=port,
        ack=AckWhen(ack),
        token=token,
        service=service,
    )


def _token(path: str | None) -> str:
    word, where = config.token_variable(), "SPOOLD_TOKEN"
    if path is not None:
        where = path
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                word = file.read().strip()
        except OSError as error:
            raise ConfigError(
                f"cannot read the token in {path}: {os.strerror(error.errno or 0).lower()}",
                hint="--token-file is a file that this user can read",
            ) from error
    elif not word:
        return ""
    if not (word.isascii() and word.isprintable() and word) or " " in word:
        raise ConfigError(
            f"the token in {where} is no word",
            hint="a token is letters, digits and signs: `openssl rand -hex 32` makes one",
        )
    return word
