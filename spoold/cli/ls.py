"""`spoold ls` and `spoold show`: which batches there are, and what one holds. Changes nothing."""

from __future__ import annotations

import os
import time
from typing import Any

import click

from spoold import fs
from spoold.cli.words import age, counted, debug_option, json_option, run_dir_argument, say
from spoold.errors import EX_IO, BatchCorrupt, UnknownBatch
from spoold.layout import State
from spoold.spool import overview
from spoold.spool.overview import BatchFile, Overview, shown

__all__ = ["ls", "show"]


@click.command()
@run_dir_argument
@click.argument("state", required=False, type=click.Choice([state.value for state in State]))
@click.option("--long", "-l", "long", is_flag=True, help="Add size and age: a stat for each file.")
@json_option
@debug_option
@click.pass_context
def ls(ctx: click.Context, run_dir: str, state: str | None, long: bool, as_json: bool) -> None:
    """List batches, notes and unknown files, one a line: name, where it lies, samples, weights.

    A batch that has its ledger entry is marked settled: its file may go, it stays delivered. Reads
    names only, unless --long.
    """
    view = overview.take(overview.open_run_dir(run_dir))
    states = [State(state)] if state else list(State)
    now = time.time()
    if as_json:
        import json

        click.echo(json.dumps(_ls_facts(view, states, long=long)))
    else:
        lines = _ls_lines(view, states, now if long else None)
        if lines:
            click.echo("\n".join(lines))
    for error in view.unreadable:
        say(str(error))
    if view.unreadable:
        ctx.exit(EX_IO)


def _unknown_in(view: Overview, states: list[State]) -> list[str]:
    if len(states) == len(State):
        return list(view.unknown)
    return [path for path in view.unknown if path.partition("/")[0] in states]


def _ls_lines(view: Overview, states: list[State], now: float | None) -> list[str]:
    rows: list[tuple[str, str, str]] = []
    for file in view.files:
        if file.place.state in states:
            _, samples, weights, _ = file.id.split("-")
            facts = f"{samples[1:]} sample{'s' if samples != 'n1' else ''}  {weights}"
            if now is not None:
                facts += _size_and_age(view, file, now)
            if file.id in view.settled:
                facts += "  settled"
            rows.append((file.name, file.place.path, facts))
    if State.REJECTED in states:
        rows += [(note.file_name, "rejected", f"note  {note.reason}") for note in view.notes]
    for path in _unknown_in(view, states):
        folder, _, name = shown(path).rpartition("/")
        rows.append((name, folder or ".", "unknown"))
    width = max((len(name) for name, _, _ in rows), default=0)
    depth = max((len(place) for _, place, _ in rows), default=0)
    return [f"{name:<{width}}  {place:<{depth}}  {facts}" for name, place, facts in rows]


def _facts_of(view: Overview, file: BatchFile) -> os.stat_result | None:
    try:
        return os.stat(view.run.file(file.place, file.name))
    except OSError:
        return None  # RACE: moved since it was listed


def _size_and_age(view: Overview, file: BatchFile, now: float) -> str:
    facts = _facts_of(view, file)
    if facts is None:
        return "  moved"
    return f"  {facts.st_size} bytes  {age(facts.st_mtime, now)}"


def _ls_facts(view: Overview, states: list[State], *, long: bool) -> dict[str, Any]:
    batches = []
    for file in view.files:
        if file.place.state in states:
            place, name, batch_id = file
            seq, samples, weights, _ = batch_id.split("-")
            lo, _, hi = weights[1:].partition(".")
            facts: dict[str, Any] = {
                "id": batch_id,
                "path": f"{place.path}/{name}",
                "state": place.state,
                "folder": place.folder,
                "seq": int(seq),
                "samples": int(samples[1:]),
                "weights": [int(lo), int(hi)],
                "settled": batch_id in view.settled,
            }
            if long:
                stat = _facts_of(view, file)
                facts["bytes"] = None if stat is None else stat.st_size
                facts["modified"] = None if stat is None else stat.st_mtime
            batches.append(facts)
    notes = [
        {
            "path": f"rejected/{note.file_name}",
            "environment": note.environment,
            "reason": note.reason,
        }
        for note in view.notes
        if State.REJECTED in states
    ]
    return {
        "format": 1,
        "run_dir": view.run.root,
        "batches": batches,
        "notes": notes,
        "unknown": [shown(path) for path in _unknown_in(view, states)],
        "unreadable": [str(error) for error in view.unreadable],
    }


@click.command()
@run_dir_argument
@click.argument("batch")
@json_option
@debug_option
def show(run_dir: str, batch: str, as_json: bool) -> None:
    """Show a batch: where it lies, and a line for each sample.

    BATCH is a batch id, a unique beginning of one, or a path. Exits 65 when its bytes do not fit
    its name.
    """
    import hashlib
    import json

    from spoold import codec
    from spoold.spool import moves

    run = overview.open_run_dir(run_dir)
    found = moves.locate(run, batch)
    path = found.path(run)
    try:
        data = fs.read(path)
    except FileNotFoundError as error:
        raise UnknownBatch(f"{path} was moved away meanwhile", hint="try again") from error
    if not hashlib.sha256(data).hexdigest().startswith(found.name.digest):
        raise BatchCorrupt(
            f"the bytes of {path} do not fit its name",
            hint="the daemon moves it to rejected/corrupt/ and delivers its environments anew",
        )
    try:
        samples = [_sample_facts(sample) for sample in codec.parse_samples(data)]
    except (KeyError, TypeError) as error:
        raise BatchCorrupt(f"{path} holds what is no sample: {error}") from error
    facts = {
        "format": 1,
        "id": found.name.id,
        "path": path,
        "state": found.place.state.value,
        "folder": found.place.folder,
        "attempt": found.name.attempt,
        "bytes": len(data),
        "weights": [found.name.lo, found.name.hi],
        "samples": samples,
    }
    click.echo(json.dumps(facts) if as_json else "\n".join(_show_lines(facts)))


def _sample_facts(sample: dict[str, Any]) -> dict[str, Any]:
    extra = sample["extra_info"]
    return {
        "uid": sample["uid"],
        "instance_id": sample["instance_id"],
        "environment": extra["environment"],
        "reward": sample["reward"],
        "reward_source": extra["reward_source"],
        "weight_version": extra["weight_version"],
        "finish_reason": extra["finish_reason"],
        "messages": len(sample["messages"]),
    }


def _show_lines(facts: dict[str, Any]) -> list[str]:
    lo, hi = facts["weights"]
    number = counted(len(facts["samples"]), "sample")
    summary = f"{number}, {facts['bytes']:,} bytes, weight versions {lo} to {hi}"
    if facts["attempt"] > 1:
        summary += f", try {facts['attempt']}"
    return [facts["path"], summary, *map(_sample_line, facts["samples"])]


def _sample_line(sample: dict[str, Any]) -> str:
    return (
        f"{sample['uid']}  {sample['instance_id']}  reward {sample['reward']:g} "
        f"({sample['reward_source']})  w{sample['weight_version']}  "
        f"{counted(sample['messages'], 'message')}  {sample['finish_reason']}"
    )
