"""`spoold claim`, `ack`, `release`, `reject`, `requeue`, `rewind`: moves of batches by hand.

Each prints where the batch lies afterwards. A batch that lies there already is fine: the words say
so and the exit code is 0.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from typing import Final

import click

from spoold import fs
from spoold.cli.words import counted, debug_option, run_dir_argument, say
from spoold.errors import EX_TRY_AGAIN, ConfigError, SpooldError, UnknownBatch
from spoold.layout import CORRUPT, Place, RunDir, State
from spoold.spool import moves, setup
from spoold.spool.moves import Found
from spoold.spool.overview import open_run_dir

__all__ = ["ack", "claim", "open_whole", "reject", "release", "requeue", "rewind", "step_type"]

_PAUSE_SECONDS: Final = 1.0
_batch_argument = click.argument("batch")
step_type: Final = click.IntRange(min=0, max=10**18 - 1)


def open_whole(path: str) -> RunDir:
    """Return the run directory at `path`. ConfigError where it lacks one of its folders."""
    run = open_run_dir(path)
    setup.check_format(run)
    for state in State:
        if not os.path.isdir(run.of(Place(state))):
            raise ConfigError(
                f"{run.root} has no {state.value}/",
                hint=f"`spoold run --run-dir {run.root}` makes it again",
            )
    return run


@click.command()
@run_dir_argument
@click.option(
    "--timeout",
    "timeout_seconds",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Wait this long for a batch to be published.",
)
@debug_option
def claim(run_dir: str, timeout_seconds: float) -> None:
    """Claim the oldest pending batch for nobody in particular, and print its path.

    It lies directly in inflight/ then: no lock guards it, and only a person (or a script) acks it
    or puts it back. Exits 75 when nothing is there.
    """
    run = open_whole(run_dir)
    found = _claim_oldest(run)
    if found is None and timeout_seconds > 0:
        found = _wait_and_claim(run, timeout_seconds)
    if found is None:
        say(f"nothing is pending in {run.root}; `spoold status {run.root}` says why")
        raise click.exceptions.Exit(EX_TRY_AGAIN)
    click.echo(found.path(run))


def _claim_oldest(run: RunDir) -> Found | None:
    for waiting in sorted(moves.find(run, State.PENDING), key=lambda found: found.name.seq):
        found = moves.claim(run, waiting.name)
        if found is None:
            continue  # RACE: another consumer won
        try:
            digest = hashlib.sha256(fs.read(found.path(run))).hexdigest()
        except FileNotFoundError:
            continue  # RACE: somebody moved it on
        except SpooldError:
            moves.release(run, found)
            raise
        if digest.startswith(found.name.digest):
            return found
        moves.set_aside(run, found, CORRUPT)
        say(f"{found.name.file_name} fails its digest; it lies in rejected/{CORRUPT}/ now")
    return None


def _wait_and_claim(run: RunDir, timeout_seconds: float) -> Found | None:
    """Claim when something is published. A hint saves waiting; the timed look is what counts."""
    from spoold.watch import Hints

    end = time.monotonic() + timeout_seconds
    hints = Hints()
    try:
        hints.watch(run.pending, tag=State.PENDING.value)
        while True:
            found = _claim_oldest(run)
            left = end - time.monotonic()
            if found is not None or left <= 0:
                return found
            hints.wait(min(left, _PAUSE_SECONDS))
    finally:
        hints.close()


@click.command()
@run_dir_argument
@_batch_argument
@click.option("--step", type=step_type, help="The trainer step, for a later rewind.")
@debug_option
def ack(run_dir: str, batch: str, step: int | None) -> None:
    """Acknowledge a claimed batch: inflight/ to acked/, durably."""
    run = open_whole(run_dir)
    _move(run, batch, lambda found: moves.ack(run, found, step), there=State.ACKED)


@click.command()
@run_dir_argument
@_batch_argument
@debug_option
def release(run_dir: str, batch: str) -> None:
    """Give a claimed batch back: inflight/ to pending/, under the same name."""
    run = open_whole(run_dir)
    _move(run, batch, lambda found: moves.release(run, found), there=State.PENDING)


@click.command()
@run_dir_argument
@_batch_argument
@click.option("--reason", required=True, metavar="SLUG", help="Names the folder in rejected/.")
@debug_option
def reject(run_dir: str, batch: str, reason: str) -> None:
    """Refuse a batch, wherever it lies: to rejected/SLUG/, never handed out again."""
    run = open_whole(run_dir)
    _move(run, batch, lambda found: moves.reject(run, found, reason), there=State.REJECTED)


@click.command()
@run_dir_argument
@_batch_argument
@debug_option
def requeue(run_dir: str, batch: str) -> None:
    """Put a batch whose consumer is gone back into pending/, as its next try."""
    run = open_whole(run_dir)
    found = moves.locate(run, batch)
    consumer = found.place.folder if found.place.state is State.INFLIGHT else ""
    if consumer and fs.lock_is_held(run.consumer_lock(consumer)):
        say(f"{consumer} is alive; its ack of {found.name.id} will fail with BatchLost")
    _move(run, batch, lambda found: moves.requeue(run, found), there=State.PENDING)


@click.command()
@run_dir_argument
@click.option(
    "--step",
    type=click.IntRange(min=-1, max=10**18 - 1),
    required=True,
    help="The step of the checkpoint loaded; -1 for none.",
)
@debug_option
def rewind(run_dir: str, step: int) -> None:
    """Put every batch acked with a later step back into pending/.

    Batches acked without a step, and stale ones, stay. Steps belong to one training run: do this
    while no consumer of it is training.
    """
    run = open_whole(run_dir)
    number = 0
    for back in moves.rewind(run, step):
        number += 1
        click.echo(back.path(run))
    say(f"{counted(number, 'batch')} acked after step {step} put back into pending/")


def _move(run: RunDir, text: str, act: Callable[[Found], Found | None], *, there: State) -> None:
    """Do a move and print where the batch lies then; also when it lies there already."""
    found = moves.locate(run, text)
    if found.place.state is there:
        say(f"{found.name.id} lies in {found.place.path}/ already; nothing moved")
        click.echo(found.path(run))
        return
    moved = act(found)
    if moved is None:
        raise UnknownBatch(
            f"{found.name.id} was moved away from {found.place.path}/ meanwhile",
            hint=f"`spoold ls {run.root}` shows where it lies now",
        )
    click.echo(moved.path(run))
