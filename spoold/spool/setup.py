"""A run directory before its first batch: made, probed, locked, and tied to one shard of one job.

source.json says to which: {"format": 1, "job": …, "url": …}, and for one of several shards
{"format": 2, "job": …, "url": …, "shard": "I/N"}, which a spoold that knows no shards refuses.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterable
from typing import Final, NamedTuple

from spoold import fs
from spoold.errors import ConfigError, LockLost, SpoolError, SpoolLocked, SpoolWriteError
from spoold.layout import WHOLE, RunDir, State
from spoold.spool.shelves import PROBE_PREFIX

__all__ = [
    "Visit",
    "check_shard",
    "clean_tmp",
    "last_visit",
    "leave_visit",
    "lock_run",
    "make_run",
    "tie",
]

log = logging.getLogger("spoold.spool")

FORMAT: Final = 2
_NO_FILE: Final = (errno.EINVAL, errno.EISDIR, errno.ELOOP)  # a pipe, a directory, a link


def make_run(root: str) -> RunDir:
    """Make a run directory with all its folders, durably; what is there already stays as it is.

    Raises ConfigError where that cannot be: a file in the way, no permission, another mount;
    SpoolError where the ledger of a run directory in use is gone.
    """
    run = RunDir(os.path.abspath(root))
    if os.path.lexists(run.source_json) and not os.path.lexists(run.ledger):
        raise SpoolError(
            f"{run.ledger} is missing: which acked batches were delivered is not known",
            hint="restore it from a backup, or make it: then environments of acked batches whose "
            f"files are gone are delivered again; `spoold check {run.root}` says more",
        )
    folders = [f"{run.root}/{state.value}" for state in State]
    _check_mounts(run, (*folders, run.house, run.tmp, run.ledger))
    try:
        for folder in (run.root, *folders, run.house, run.tmp, run.ledger):
            fs.make_dirs(folder)
    except SpoolWriteError as error:
        if error.errno in fs.PASSING:
            raise
        raise ConfigError(
            error.message, hint=error.hint or "choose another run directory or move what is there"
        ) from error
    return run


def _check_mounts(run: RunDir, folders: Iterable[str]) -> None:
    """Refuse a run directory whose parts are on several file systems, before anything is made."""
    for folder in folders:
        if os.path.isdir(folder) and os.stat(folder).st_dev != os.stat(run.root).st_dev:
            raise ConfigError(
                f"{folder} is on another file system than {run.root}",
                hint="all of a run directory must lie on one mount; spoold never copies",
            )


def lock_run(run: RunDir) -> fs.Lock | None:
    """Take the daemon's lock. None while another process holds it.

    Raises ConfigError where this user may not write.
    """
    lock = fs.Lock(run.lock)
    try:
        return lock if lock.acquire() else None
    except SpoolWriteError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ConfigError(error.message, hint=error.hint) from error
        raise


def locked_by(run: RunDir) -> SpoolLocked:
    """Return the error that names who holds a run directory."""
    holder = fs.holder_of(run.lock) or "another process"
    if fs.is_left_behind(run.lock):
        # Of a daemon that was killed: the process that writes its batches, in the middle of one.
        return SpoolLocked(
            f"{run.root} is locked: a process that {holder} left behind holds its lock",
            hint="it ends when the batch that it began is written, and the next start goes on; "
            f"`fuser {run.lock}` finds it",
        )
    return SpoolLocked(
        f"{run.root} is locked: {holder} runs a daemon on it",
        hint="stop that one first, or choose another run directory",
    )


class Visit(NamedTuple):
    """A daemon that was turned away: who it was, in words, and when, in nanoseconds."""

    who: str
    at_ns: int


def leave_visit(run: RunDir) -> None:
    """Leave word for the daemon that runs here that this one was turned away, if that can be."""
    who = {"pid": os.getpid(), "host": os.uname().nodename}
    try:
        fs.put(run.visit_json, json.dumps(who).encode(), tmp_dir=run.tmp, durable=False)
    except (SpoolWriteError, OSError) as error:
        log.debug("no word left", extra={"fields": {"error": str(error)}})


def last_visit(run: RunDir) -> Visit | None:
    """Return which daemon was turned away last since this one started."""
    try:
        at_ns = os.stat(run.visit_json).st_mtime_ns
    except OSError:
        return None
    return Visit(fs.holder_of(run.visit_json) or "a process", at_ns)


def lock_lost(path: str) -> LockLost:
    """Return the error for a daemon whose lock file was removed or replaced while it held it."""
    return LockLost(
        f"the lock file {path} was removed or replaced while it was held",
        hint="another daemon may have this run directory; this one stops",
    )


def probe(run: RunDir) -> None:
    """Rename a file through every folder, so that a move that cannot work is found at start."""
    folders = [f"{run.root}/{state.value}" for state in State]
    inside = [f"{top}/{name}" for top in folders for name in sorted(fs.scan(top).folders)]
    for folder in (*folders, *inside):
        fs.make_dirs(folder)  # one whose maker was killed has its mode now
        for name in fs.scan(folder).files:
            if name.startswith(PROBE_PREFIX):
                fs.remove(f"{folder}/{name}")  # of a start that was killed
    fs.probe_renames([*folders, *inside], run.tmp)


def clean_tmp(run: RunDir) -> None:
    """Remove what a daemon that died left half written. Only files: they were never visible."""
    for name in fs.scan(run.tmp).files:
        fs.remove(f"{run.tmp}/{name}")


def tie(run: RunDir, *, job: str, url: str, shard: str = WHOLE) -> None:
    """Record which job, shard and database this run directory belongs to.

    Raises ConfigError when it belongs to another job or shard, or was written by a newer format.
    Another URL is recorded and logged: a database may move.
    """
    known = read_source(run)
    if known is not None:
        check_job(run, job)
        check_shard(run, shard)
        if known["url"] == url:
            return
        log.warning("source url changed", extra={"fields": {"was": known["url"], "now": url}})
    facts: dict[str, object] = {"format": 1, "job": job, "url": url}
    if shard != WHOLE:
        facts |= {"format": FORMAT, "shard": shard}
    fs.put(run.source_json, json.dumps(facts).encode() + b"\n", tmp_dir=run.tmp)


def check_job(run: RunDir, job: str) -> None:
    """Raise ConfigError where a run directory belongs to another job. Changes nothing."""
    known = read_source(run)
    if known is not None and known["job"] != job:
        raise ConfigError(
            f"{run.root} belongs to job {known['job']!r}, not to {job!r}",
            hint="use one run directory a job: give --run-dir another one, or --job that job",
        )


def check_shard(run: RunDir, shard: str) -> None:
    """Raise ConfigError where a run directory belongs to another shard. Changes nothing."""
    known = read_source(run)
    if known is not None and known["shard"] != shard:
        raise ConfigError(
            f"{run.root} belongs to shard {known['shard']}, not to {shard}",
            hint=f"give --shard {known['shard']}, or --run-dir the one of this shard; how many "
            "shards there are is fixed for a run",
        )


def check_format(run: RunDir) -> None:
    """Raise ConfigError for a run directory that a newer spoold wrote. All else is not asked."""
    try:
        fmt = json.loads(fs.read(run.source_json))["format"]
    except (OSError, SpoolWriteError, ValueError, KeyError, TypeError):
        return
    if isinstance(fmt, int) and fmt > FORMAT:
        raise _newer(run, fmt)


def _newer(run: RunDir, fmt: object) -> ConfigError:
    return ConfigError(
        f"{run.root} was written by a newer spoold: format {fmt}, this one knows {FORMAT}",
        hint="upgrade spoold, or use another run directory",
    )


def read_source(run: RunDir) -> dict[str, str] | None:
    """Return {"job", "url", "shard"} of a run directory, None where it is not tied to a job yet.

    Raises ConfigError for a source.json that is of a higher format or cannot be understood.
    """
    try:
        facts = json.loads(fs.read(run.source_json))
        fmt, job, url = facts["format"], facts["job"], facts["url"]
        shard = facts.get("shard", WHOLE)
    except FileNotFoundError:
        return None
    except (SpoolWriteError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, SpoolWriteError):
            if error.errno in fs.PASSING:
                raise
            if error.errno not in _NO_FILE:
                raise ConfigError(error.message, hint=error.hint) from error
        raise ConfigError(
            f"{run.source_json} cannot be understood",
            hint='it holds {"format": 1, "job": …, "url": …}, for one of several shards '
            '{"format": 2, "job": …, "url": …, "shard": "I/N"}; write it anew, or restore it',
        ) from error
    if type(fmt) is not int or fmt > FORMAT:
        raise _newer(run, fmt)
    return {"job": str(job), "url": str(url), "shard": str(shard)}
