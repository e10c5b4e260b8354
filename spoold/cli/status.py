"""`spoold status`: how a run directory is, in 80 columns or in JSON. Changes nothing."""

from __future__ import annotations

import json
import time
from typing import Final

import click

from spoold.cli import terminal
from spoold.cli.lines import LABEL_WIDTH, all_reason_lines, daemon_lines, wrapped
from spoold.cli.words import (
    age,
    counted,
    debug_option,
    json_option,
    printable,
    run_dir_argument,
    size,
)
from spoold.errors import EX_TRY_AGAIN
from spoold.layout import WHOLE, State
from spoold.spool import health, overview
from spoold.spool.health import Health
from spoold.spool.overview import Count, Overview, shown

__all__ = ["status", "status_lines"]

_SHOWN_UNKNOWN: Final = 5
_COLOURS: Final = {"attention": "red", "notice": "yellow", "waits for": "cyan"}


@click.command()
@run_dir_argument
@json_option
@click.option("--check", is_flag=True, help="Exit 75 when a person should come.")
@debug_option
@click.pass_context
def status(ctx: click.Context, run_dir: str, as_json: bool, check: bool) -> None:
    """Say what lies where, whether the daemon lives, and what delivery waits for."""
    now = time.time()
    run = overview.open_run_dir(run_dir)
    found = health.take(run, now=now)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=1))
    else:
        click.echo("\n".join(status_lines(found, now)))
    if check and found.severe:
        ctx.exit(EX_TRY_AGAIN)


def status_lines(found: Health, now: float) -> list[str]:
    """Return the lines for people: what is wrong first, then what lies where."""
    lines = [found.overview.run.root]
    severe, others = all_reason_lines(found, now)
    lines += [*severe, *daemon_lines(found, now), *others]
    lines += _said_lines(found, now)
    lines += _source_lines(found, now)
    for state in State:
        lines += _state_lines(found, state, now)
    lines += _note_lines(found)
    lines += _unknown_lines(found.overview)
    if found.free_bytes is not None:
        lines += wrapped("disk", f"{size(found.free_bytes)} free")
    return [_painted(printable(line).rstrip()) for line in lines]


def _painted(line: str) -> str:
    """Colour the label of a line where it says that something is wrong, or well."""
    label, rest = line[:LABEL_WIDTH], line[LABEL_WIDTH:]
    colour = _COLOURS.get(label.strip())
    if label.startswith("daemon"):
        colour = "green" if rest.startswith("running") else "red"
    return terminal.painted(label, colour, bold=label.startswith("attention")) + rest


def _said_lines(found: Health, now: float) -> list[str]:
    said = found.said
    lines: list[str] = []
    if said is not None:
        job = f"job {said.job}, " if said.job else ""
        shard = f"shard {said.shard}, " if said.shard != WHOLE else ""
        lines += wrapped("source", f"{job}{shard}{said.url}, ready when {said.ready_when}")
        made = said.published
        if made.batches:
            last = "" if made.last is None else f", the last {age(made.last, now)} ago"
            words = f"{counted(made.batches, 'batch')}, {counted(made.samples, 'sample')}{last}"
            lines += wrapped("published", f"{words} (since the daemon started)")
        lines += wrapped("delivered", f"{counted(said.delivered, 'environment')} in all")
    return lines


def _source_lines(found: Health, now: float) -> list[str]:
    if not found.running or found.said is None:
        return []
    source = found.said.source
    lag = "" if source.oldest_ready is None else f" (oldest {age(source.oldest_ready, now)})"
    lines = wrapped(
        "running",
        f"{counted(source.running, 'environment')}, {source.ready:,} ready{lag}, "
        f"{source.missing_rows:,} finished without row"
        + (f", {source.without_reward:,} without reward" if source.without_reward else ""),
    )
    for group in source.groups[:_SHOWN_UNKNOWN]:
        words = f"{group.group} has {group.have} of {group.want} (since {age(group.since, now)})"
        if group.missing:
            words += f", missing environments {_some(group.missing)}"
        if group.set_aside:
            words += f", set aside {_some(group.set_aside)}"
        lines += wrapped("group", words)
    if len(source.groups) > _SHOWN_UNKNOWN:
        lines += wrapped("", f"and {len(source.groups) - _SHOWN_UNKNOWN:,} groups more")
    return lines


def _some(environments: tuple[int, ...]) -> str:
    few = ", ".join(str(each) for each in environments[:_SHOWN_UNKNOWN])
    return f"{few}, …" if len(environments) > _SHOWN_UNKNOWN else few


def _state_lines(found: Health, state: State, now: float) -> list[str]:
    count = Count.of(found.overview.of(state))
    since = found.since.get(state)
    oldest = "" if since is None else f", oldest {age(since, now)}"
    lines = wrapped(state.value, f"{_count_words(count)}{oldest}")
    if state is State.INFLIGHT:
        for consumer in found.consumers:
            life = "alive" if consumer.alive else "gone"
            held = "" if consumer.since is None else f", {age(consumer.since, now)}"
            words = f"{_count_words(consumer.count)}{held}"
            lines.append(f"  {consumer.name:<{LABEL_WIDTH}} {life:<6} {words}")
        folders = found.overview.by_folder(state)
        if "" in folders:
            lines.append(f"  {'by hand':<{LABEL_WIDTH}} {'':<6} {_count_words(folders[''])}")
    elif state is State.REJECTED:
        for folder, each in found.overview.by_folder(state).items():
            lines.append(f"  {folder or '(no reason)':<{LABEL_WIDTH}} {'':<6} {_count_words(each)}")
    return lines


def _count_words(count: Count) -> str:
    if not count.batches:
        return "nothing"
    words = f"{counted(count.batches, 'batch')}, {counted(count.samples, 'sample')}"
    if count.oldest == count.newest:
        return f"{words}, number {count.oldest}"
    return f"{words}, numbers {count.oldest} to {count.newest}"


def _note_lines(found: Health) -> list[str]:
    notes = found.overview.notes_by_reason()
    if not notes:
        return []
    number = len(found.overview.notes)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in notes.items())
    lines = wrapped("notes", f"{number:,}: {reasons}")
    latest = found.said.rejected.latest if found.said is not None else None
    if latest is not None:
        lines += wrapped("", f"latest: environment {latest.environment}: {latest.reason}")
    return lines


def _unknown_lines(view: Overview) -> list[str]:
    if not view.unknown:
        return []
    few = ", ".join(shown(path) for path in view.unknown[:_SHOWN_UNKNOWN])
    more = ", …" if len(view.unknown) > _SHOWN_UNKNOWN else ""
    number = counted(len(view.unknown), "file")
    return wrapped("unknown", f"{number}, left alone: {few}{more}")
