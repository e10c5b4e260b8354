"""Why a consumer gets nothing, in words. Reads names, the daemon's lock and its last report."""

from __future__ import annotations

import os
import time
from collections import Counter

from spoold import fs
from spoold.errors import SpoolWriteError
from spoold.layout import RunDir, State, batch_id_of
from spoold.spool import statusfile
from spoold.spool.moves import find

__all__ = ["why_nothing_comes"]


def why_nothing_comes(run: RunDir) -> str:
    """Return why no batch comes from this run directory, as far as its files tell."""
    try:
        return _why(run)
    except SpoolWriteError as error:
        return str(error)


def _why(run: RunDir) -> str:
    try:
        pending = sum(batch_id_of(name) is not None for name in fs.scan(run.pending).files)
    except FileNotFoundError:
        there = "has no pending/ yet" if os.path.isdir(run.root) else "is not there yet"
        return f"{run.root} {there}: `spoold run --run-dir {run.root} …` makes it"
    if pending:
        return f"nothing: {pending} batches are pending"
    status, problem = statusfile.read(run)
    if not fs.lock_is_held(run.lock):
        return f"no daemon runs on {run.root}{_last_words(status)}"
    if status is None:
        return problem or "the daemon has just started and has not reported yet"
    if status.reasons:
        reasons = sorted(status.reasons, key=statusfile.Reason.order)
        return "; ".join(f"{r.text} ({r.remedy})" if r.remedy else r.text for r in reasons)
    source = status.source
    if not (source.running or source.ready or source.missing_rows or source.groups):
        if not status.delivered:
            return "no environment is running yet"
        began = f"all {status.delivered} environments that began are delivered"
        return f"nothing is running any more: {began}{_in_flight(run)}"
    return f"{source.running} environments are running, {source.ready} are about to be published"


def _in_flight(run: RunDir) -> str:
    held = Counter(found.place.folder for found in find(run, State.INFLIGHT))
    shown = [f"{number} by {name or 'hand'}" for name, number in sorted(held.items())]
    return f"; claimed and not acked: {', '.join(shown)}" if shown else ""


def _last_words(status: statusfile.Status | None) -> str:
    if status is None:
        return ""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(status.updated))
    words = "; ".join(reason.text for reason in status.reasons) or status.state
    return f" (its last report, of {at}: {words})"
