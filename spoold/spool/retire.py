"""Retire: put the whole spool of a source that was replaced into retired/<time>-<job>/.

source.json moves first. A run directory without source.json, beside a retired folder that has one,
is a retirement that was cut off: the next start finishes it. Then a new source.json is written.
Consumer folders and their locks stay, and so do files that nobody knows; batches, notes and ledger
entries move.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable

from spoold import fs
from spoold.errors import SpoolWriteError
from spoold.layout import NoteName, RunDir, State, batch_id_of
from spoold.ledger import parse_merged_name

__all__ = ["finish_retirement", "retire"]

log = logging.getLogger("spoold.spool")


def retire(run: RunDir, job: str, *, at: float) -> str:
    """Move batches, notes, ledger and source.json away. Returns the folder they are in now."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", job)[:48]
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at))
    fs.make_dirs(run.retired)
    folder = f"{run.retired}/{stamp}-{safe}"
    number = 1
    while os.path.lexists(folder):
        number += 1
        folder = f"{run.retired}/{stamp}.{number}-{safe}"
    fs.make_dirs(f"{folder}/.spoold")
    fs.move(run.source_json, f"{folder}/.spoold/source.json")
    try:
        _move_all(run, folder)
    except SpoolWriteError as error:
        error.state_unknown = True  # neither the old spool nor a new one: the next start ends it
        raise
    return folder


def finish_retirement(run: RunDir) -> str | None:
    """Finish a retirement that was cut off. Returns its folder, None when there was none."""
    if os.path.lexists(run.source_json):
        return None
    try:
        names = sorted(fs.scan(run.retired).folders, reverse=True)
    except FileNotFoundError:
        return None
    for name in names:
        folder = f"{run.retired}/{name}"
        if os.path.lexists(f"{folder}/.spoold/source.json"):
            _move_all(run, folder)
            return folder
    return None


def _move_all(run: RunDir, folder: str) -> None:
    # RACE: a consumer may move a batch behind us; whatever it does, it ends in a later pass.
    while sum(_move_state(run, folder, state) for state in State):
        continue
    _move_files(run.ledger, RunDir(folder).ledger, _is_entry)
    log.warning("spool retired", extra={"fields": {"to": folder}})


def _move_state(run: RunDir, folder: str, state: State) -> int:
    top = f"{run.root}/{state.value}"
    into = f"{folder}/{state.value}"
    moved = _move_files(top, into, _is_note if state is State.REJECTED else _is_batch)
    for name in fs.scan(top).folders:
        moved += _move_files(f"{top}/{name}", f"{into}/{name}", _is_batch)
    return moved


def _is_batch(name: str) -> bool:
    return batch_id_of(name) is not None


def _is_note(name: str) -> bool:
    return _is_batch(name) or NoteName.parse(name) is not None


def _is_entry(name: str) -> bool:
    return batch_id_of(f"{name}.jsonl") == name or parse_merged_name(name) is not None


def _move_files(source: str, target: str, wanted: Callable[[str], bool]) -> int:
    """Move the files of a folder that are wanted, durably. Returns how many were moved."""
    try:
        names = [name for name in fs.scan(source).files if wanted(name)]
    except FileNotFoundError:
        return 0  # RACE: an empty folder was removed
    if not names:
        return 0
    fs.make_dirs(target)
    moved = 0
    for name in names:
        try:
            fs.rename_noreplace(f"{source}/{name}", f"{target}/{name}")
        except (FileNotFoundError, FileExistsError):
            continue
        moved += 1
    fs.sync_dir(target)
    fs.sync_dir(source)
    return moved
