"""`spoold prune`: remove files of batches that nobody will ask for again, and print their paths."""

from __future__ import annotations

import sys

import click

from spoold.cli import terminal
from spoold.cli.move import open_whole, step_type
from spoold.cli.progress import progress
from spoold.cli.words import counted, debug_option, run_dir_argument, say
from spoold.spool import prune as pruning

__all__ = ["prune"]


@click.command()
@run_dir_argument
@click.option(
    "--before-step",
    type=step_type,
    metavar="N",
    help="Also what was acked with a lower step: no checkpoint below N will be loaded again.",
)
@click.option("--retired", is_flag=True, help="Also the spools of sources that were replaced.")
@debug_option
def prune(run_dir: str, before_step: int | None, retired: bool) -> None:
    """Remove batches whose ack is final: acked without a step, or passed over as stale.

    Only what the ledger has goes, so that nothing is delivered again. What lies in rejected/ stays.
    """
    run = open_whole(run_dir)
    ready, unsettled = pruning.prunable(run, before_step)
    number = size_bytes = 0
    # Where a person sees the paths go by, these are the progress.
    watched = (
        ready
        if terminal.is_terminal(sys.stdout)
        else progress(ready, total=len(ready), what="removing batches")
    )
    for found in watched:
        size = pruning.remove(run, found)
        if size is not None:
            number += 1
            size_bytes += size
            click.echo(found.path(run))
    if before_step is not None:
        pruning.remove_empty_steps(run, before_step)
    say(f"{counted(number, 'batch')} removed, {counted(size_bytes, 'byte')}")
    if unsettled:
        say(
            f"{counted(len(unsettled), 'batch')} kept: not in the ledger yet, or a second file of "
            "it lies elsewhere; a running daemon settles that within seconds"
        )
    if retired:
        for folder in pruning.remove_retired(run):
            click.echo(folder)
