"""Prune: remove files of batches that nobody will ask for again. Decided by name, then unlinked.

| lies in                         | goes                                                   |
|---------------------------------|--------------------------------------------------------|
| acked/, acked/stale/            | any time: such an ack is final                         |
| acked/step-N/                   | where N is below the step that was given               |
| pending/, inflight/, rejected/  | never                                                  |
| retired/                        | when asked for; not what a consumer that lives holds   |

Only what is in the synced ledger goes: its environments stay delivered. A batch that also lies
elsewhere stays until the daemon has set one of the two aside, because a file outside acked/ beats
the ledger. Nothing is synced: what a power cut brings back is pruned again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from spoold import fs
from spoold.errors import ConfigError
from spoold.layout import STALE, BatchName, NoteName, Place, RunDir, State, is_batch_id
from spoold.ledger import parse_merged_name
from spoold.spool import ledgerdir
from spoold.spool.moves import Found, find, folders_of

__all__ = ["is_prunable", "prunable", "remove", "remove_empty_steps", "remove_retired"]


def is_prunable(place: Place, before_step: int | None) -> bool:
    """Whether settled batches in a place may go; None keeps all that was acked with a step."""
    if place.state is not State.ACKED:
        return False
    if place.folder in ("", STALE):
        return True
    return before_step is not None and place.step is not None and place.step < before_step


def prunable(run: RunDir, before_step: int | None) -> tuple[list[Found], list[Found]]:
    """Return the batches that may be removed now, and those that have to be settled before."""
    settled = ledgerdir.settled(run)
    others = (state for state in State if state is not State.ACKED)
    elsewhere = {f.name.id for state in others for f in find(run, state) if f.place.counts}
    ready: list[Found] = []
    unsettled: list[Found] = []
    for found in find(run, State.ACKED):
        if is_prunable(found.place, before_step):
            is_ready = found.name.id in settled and found.name.id not in elsewhere
            (ready if is_ready else unsettled).append(found)
    return ready, unsettled


def remove(run: RunDir, found: Found) -> int | None:
    """Unlink a settled batch. Returns its bytes; None where it is gone, or is not settled.

    RACE: an entry is withdrawn when the daemon has seen the batch outside acked/. Between the look
    at the entry and the unlink the batch would have to be rewound, seen, claimed and acked with the
    same step: then its environments would be delivered anew.
    """
    path = found.path(run)
    try:
        size: int = os.lstat(path).st_size
    except FileNotFoundError:
        return None
    if not ledgerdir.has_entry(run, found.name.id):
        return None
    fs.remove(path)
    return size


def remove_empty_steps(run: RunDir, before_step: int) -> None:
    """Remove folders of lower steps that nothing lies in. Whoever acks into one makes it again."""
    for place in folders_of(run, State.ACKED):
        if place.step is not None and place.step < before_step:
            fs.remove_dir(run.of(place))


def remove_retired(run: RunDir) -> Iterator[str]:
    """Remove what was retired; yields each folder in retired/ that is gone as a whole.

    A batch that a living consumer of this run directory claimed before it was retired stays, so
    that it can be acked, and so does what is no file of spoold. Raises ConfigError while a
    retirement is not finished: what it has not moved yet would count for the new source.
    """
    try:
        folders = sorted(fs.scan(run.retired).folders)
    except FileNotFoundError:
        return
    # In this order: a retirement that begins after the listing is not in it.
    if not os.path.lexists(run.source_json):
        raise ConfigError(
            f"{run.root} has no source.json: a retirement may be half done",
            hint="start `spoold run` once, so that it finishes that; then prune",
        )
    for name in folders:
        folder = f"{run.retired}/{name}"
        held = _held(run, RunDir(folder))
        for parent, _, files in os.walk(folder, topdown=False):
            if parent in held:
                continue
            for file in files:
                if _is_known(os.path.relpath(parent, folder), file):
                    fs.remove(f"{parent}/{file}")
            fs.remove_dir(parent)
        if not os.path.lexists(folder):
            yield folder


def _held(run: RunDir, retired: RunDir) -> set[str]:
    """Return the folders, of a retired spool, of consumers that live."""
    try:
        names = fs.scan(retired.inflight).folders
    except FileNotFoundError:
        return set()
    alive = (name for name in names if fs.lock_is_held(run.consumer_lock(name)))
    return {retired.of(Place(State.INFLIGHT, name)) for name in alive}


def _is_known(folder: str, file: str) -> bool:
    if folder == ".spoold":
        return file == "source.json"
    if folder == ".spoold/ledger":
        return is_batch_id(file) or parse_merged_name(file) is not None
    return BatchName.parse(file) is not None or NoteName.parse(file) is not None
