"""`spoold status`: how a run directory is, in 80 columns or in JSON. Changes nothing."""

from __future__ import annotations

import json
import textwrap
import time
from typing import Final

import click

from spoold.cli.words import age, counted, debug_option, json_option, printable, run_dir_argument
from spoold.errors import EX_TRY_AGAIN
from spoold.layout import State
from spoold.spool import health, overview
from spoold.spool.health import MANY_NOTES, Health
from spoold.spool.overview import Count, Overview, shown
from spoold.spool.statusfile import Reason

__all__ = ["status"]

_WIDTH: Final = 80
_LABEL: Final = 11
_SHOWN_UNKNOWN: Final = 5


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
        click.echo(_text(_status_lines(found, now)))
    if check and found.severe:
        ctx.exit(EX_TRY_AGAIN)


def _text(lines: list[str]) -> str:
    return "\n".join(printable(line).rstrip() for line in lines)


def _status_lines(found: Health, now: float) -> list[str]:
    lines = [found.overview.run.root, *_daemon_lines(found, now)]
    for reason in found.reasons:
        label = "attention" if reason in found.severe else "waits for"
        lines += _reason_lines(label, reason, now)
    lines += _source_lines(found, now)
    for state in State:
        lines += _state_lines(found, state)
    lines += _note_lines(found)
    return lines + _unknown_lines(found.overview)


def _line(label: str, text: str) -> list[str]:
    """Wrap a text beside its label; a long path is never broken."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"{label:<{_LABEL}}",
        subsequent_indent=" " * _LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _daemon_lines(found: Health, now: float) -> list[str]:
    said = found.said
    if not found.running:
        heard = "" if said is None else f", last heard {age(said.updated, now)} ago"
        lines = _line("daemon", f"not running{heard}")
    else:
        state = "" if said is None else f": {said.state}, since {age(said.started, now)}"
        lines = _line("daemon", f"running, {found.holder or 'holder unknown'}{state}")
    if said is not None:
        job = f"job {said.job}, " if said.job else ""
        lines += _line("source", f"{job}{said.url}, ready when {said.ready_when}")
        made = said.published
        if made.batches:
            last = "" if made.last is None else f", the last {age(made.last, now)} ago"
            words = f"{counted(made.batches, 'batch')}, {counted(made.samples, 'sample')}{last}"
            lines += _line("published", f"{words} (since the daemon started)")
        lines += _line("delivered", f"{counted(said.delivered, 'environment')} in all")
    return lines


def _reason_lines(label: str, reason: Reason, now: float) -> list[str]:
    passed = now - reason.since
    since = f" (since {age(reason.since, now)})" if passed >= 1 else ""
    remedy = f"; {reason.remedy}" if reason.remedy else ""
    return _line(label, f"{reason.code}: {reason.text}{since}{remedy}")


def _source_lines(found: Health, now: float) -> list[str]:
    if not found.running or found.said is None:
        return []
    source = found.said.source
    lines = _line(
        "running",
        f"{counted(source.running, 'environment')}, {source.ready:,} ready, "
        f"{source.missing_rows:,} finished without row"
        + (f", {source.without_reward:,} without reward" if source.without_reward else ""),
    )
    for group in source.groups[:_SHOWN_UNKNOWN]:
        words = f"{group.group} has {group.have} of {group.want} (since {age(group.since, now)})"
        if group.missing:
            words += f", missing environments {_some(group.missing)}"
        if group.set_aside:
            words += f", set aside {_some(group.set_aside)}"
        lines += _line("group", words)
    if len(source.groups) > _SHOWN_UNKNOWN:
        lines += _line("", f"and {len(source.groups) - _SHOWN_UNKNOWN:,} groups more")
    return lines


def _some(environments: tuple[int, ...]) -> str:
    few = ", ".join(str(each) for each in environments[:_SHOWN_UNKNOWN])
    return f"{few}, …" if len(environments) > _SHOWN_UNKNOWN else few


def _state_lines(found: Health, state: State) -> list[str]:
    count = Count.of(found.overview.of(state))
    lines = _line(state.value, _count_words(count))
    if state is State.INFLIGHT:
        for consumer in found.consumers:
            life = "alive" if consumer.alive else "gone"
            lines.append(f"  {consumer.name:<{_LABEL}} {life:<6} {_count_words(consumer.count)}")
        folders = found.overview.by_folder(state)
        if "" in folders:
            lines.append(f"  {'by hand':<{_LABEL}} {'':<6} {_count_words(folders[''])}")
    elif state is State.REJECTED:
        for folder, each in found.overview.by_folder(state).items():
            lines.append(f"  {folder or '(no reason)':<{_LABEL}} {'':<6} {_count_words(each)}")
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
    lines = _line("notes", f"{number:,}: {reasons}")
    if number > MANY_NOTES:
        lines += _line("", "so many are unusual: read some of rejected/env-*.json")
    latest = found.said.rejected.latest if found.said is not None else None
    if latest is not None:
        lines += _line("", f"latest: environment {latest.environment}: {latest.reason}")
    return lines


def _unknown_lines(view: Overview) -> list[str]:
    if not view.unknown:
        return []
    few = ", ".join(shown(path) for path in view.unknown[:_SHOWN_UNKNOWN])
    more = ", …" if len(view.unknown) > _SHOWN_UNKNOWN else ""
    number = counted(len(view.unknown), "file")
    return _line("unknown", f"{number}, left alone: {few}{more}")
