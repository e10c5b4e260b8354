"""Retire: put the whole spool of a source that was replaced into retired/<time>-<job>/.

source.json moves first. A run directory without source.json, beside a retired folder that has one,
is a retirement that was cut off: the next start finishes it. Then a new source.json is written.
Consumer folders and their locks stay; the files in them move.
"""

from __future__ import annotations

import logging
import os
import re
import time

from spoold import fs
from spoold.layout import LOCK_NAME, RunDir, State
from spoold.spool.shelves import PROBE_PREFIX

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
    _move_all(run, folder)
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
    _move_files(run.ledger, RunDir(folder).ledger)
    log.warning("spool retired", extra={"fields": {"to": folder}})


def _move_state(run: RunDir, folder: str, state: State) -> int:
    top = f"{run.root}/{state.value}"
    into = f"{folder}/{state.value}"
    moved = _move_files(top, into)
    for name in fs.scan(top).folders:
        moved += _move_files(f"{top}/{name}", f"{into}/{name}")
    return moved


def _move_files(source: str, target: str) -> int:
    """Move the files of a folder durably. Returns how many were moved."""
    names = [
        name
        for name in fs.scan(source).files
        if name != LOCK_NAME and not name.startswith(PROBE_PREFIX)
    ]
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
