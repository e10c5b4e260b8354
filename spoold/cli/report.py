"""`spoold report`: a page with plots of what happened in a run directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator

import click

from spoold import fs
from spoold import report as reporting
from spoold.cli.progress import progress
from spoold.cli.words import debug_option, run_dir_argument, say
from spoold.errors import ConfigError
from spoold.spool import overview
from spoold.spool.overview import BatchFile

__all__ = ["report"]


@click.command()
@run_dir_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    default="report.html",
    metavar="FILE",
    help="Where to write the page; - is standard output. [default: report.html]",
)
@debug_option
def report(run_dir: str, output: str) -> None:
    """Write one self-contained page with plots, from what lies in the run directory.

    Throughput, queue depth, ages from completion to publish to ack, rewards, weight versions,
    groups, rejects. Reads every batch file; changes nothing in the run directory.
    """
    run = overview.open_run_dir(run_dir)
    gathered = reporting.gather(run, now=time.time(), watch=_watch)
    html = reporting.page(gathered)
    if output == "-":
        click.echo(html, nl=False)
        return
    folder = os.path.dirname(os.path.abspath(output))
    try:
        fs.put(output, html.encode(), tmp_dir=folder, durable=False, mode=0o644)
    except FileNotFoundError as error:
        raise ConfigError(
            f"cannot write {output}: there is no {folder}", hint="make it, or choose another place"
        ) from error
    say(f"{output} shows {len(gathered.batches):,} batches")


def _watch(files: Iterable[BatchFile], total: int) -> Iterator[BatchFile]:
    return progress(files, total=total, what="reading batches")
