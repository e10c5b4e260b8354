"""How a run directory is, for people: what lies where, whether the daemon lives, what is wrong.

Works with the daemon dead: then it says so, and what the daemon last said is only history.
`to_dict` is the contract of `spoold status --json`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from spoold import fs
from spoold.errors import SpoolWriteError
from spoold.layout import WHOLE, RunDir, State
from spoold.reasons import SEVERE
from spoold.spool import overview, statusfile
from spoold.spool.overview import MANY_NOTES, ConsumerFolder, Count, Overview
from spoold.spool.statusfile import Reason, Status

__all__ = ["MANY_NOTES", "Health", "take"]

FORMAT: Final = 1
SILENT_SECONDS: Final = 120.0
LITTLE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A run directory at one moment.

    `since`: since when the oldest batch lies in pending/ and in inflight/, None for none.
    `running` is told by the lock alone. `said` is the daemon's last report, `said_problem` why it
    cannot be used. `reasons`: why nothing or less is delivered now, the severe ones among them.
    """

    overview: Overview
    running: bool
    holder: str
    said: Status | None
    said_problem: str
    consumers: tuple[ConsumerFolder, ...]
    reasons: tuple[Reason, ...]
    since: dict[State, float | None]
    free_bytes: int | None

    @property
    def severe(self) -> tuple[Reason, ...]:
        """The reasons for which a person should come."""
        return tuple(reason for reason in self.reasons if reason.code in SEVERE)

    def to_dict(self) -> dict[str, Any]:
        """Return the contract of `spoold status --json`; keys are added, never changed."""
        view = self.overview
        said = self.said
        return {
            "format": FORMAT,
            "run_dir": view.run.root,
            "healthy": not self.severe,
            "reasons": [asdict(reason) for reason in self.reasons],
            "daemon": {"running": self.running, "holder": self.holder},
            "said": None if said is None else said.to_dict(),
            "said_problem": self.said_problem,
            "directories": {
                state.value: {
                    **Count.of(view.of(state))._asdict(),
                    "folders": {
                        folder: count._asdict()
                        for folder, count in view.by_folder(state).items()
                        if folder
                    },
                }
                for state in State
            },
            "since": {state.value: at for state, at in self.since.items()},
            "free_bytes": self.free_bytes,
            "consumers": [
                {
                    "name": each.name,
                    "alive": each.alive,
                    **each.count._asdict(),
                    "since": each.since,
                }
                for each in self.consumers
            ],
            "notes": {"count": len(view.notes), "by_reason": view.notes_by_reason()},
            "unknown": [overview.shown(path) for path in view.unknown],
            "unreadable": [str(error) for error in view.unreadable],
        }


def take(run: RunDir, *, now: float) -> Health:
    """Look at a run directory once. Changes nothing; opens the locks and the daemon's report."""
    view = overview.take(run)
    running = fs.lock_is_held(run.lock)
    said, problem = statusfile.read(run)
    consumers = tuple(view.consumers())
    reasons = _about_files(view, problem, now)
    if running:
        reasons += _about_running(said, now, known=reasons)
    else:
        reasons += _about_gone(view, running, said, now)
        reasons += _about_dead(consumers, now)
    free_bytes = None
    # RACE: the run directory may be gone by now; then it was unreadable above.
    with suppress(SpoolWriteError, FileNotFoundError):
        free_bytes = fs.free_bytes(run.root)
        known = {reason.code for reason in reasons}
        reasons += [each for each in _about_disk(run, free_bytes, now) if each.code not in known]
    return Health(
        overview=view,
        running=running is True,
        holder=_holder(run) if running else "",
        said=said,
        said_problem=problem,
        consumers=consumers,
        reasons=tuple(sorted(reasons, key=Reason.order)),
        since={state: view.oldest_since(state) for state in (State.PENDING, State.INFLIGHT)},
        free_bytes=free_bytes,
    )


def _holder(run: RunDir) -> str:
    holder = fs.holder_of(run.lock)
    return f"a process that {holder} left behind" if fs.is_left_behind(run.lock) else holder


def _about_disk(run: RunDir, free_bytes: int, now: float) -> list[Reason]:
    """Return what may keep the daemon from saying so itself: its report cannot be written."""
    if fs.is_read_only(run.root):
        return [Reason.of("read-only", run.root, since=now)]
    if free_bytes < LITTLE_BYTES:
        return [Reason.of("disk-space", f"{free_bytes} bytes are free on {run.root}", since=now)]
    if fs.is_out_of_inodes(run.root):
        return [Reason.of("disk-space", f"no inode is free on {run.root}", since=now)]
    return []


def _about_files(view: Overview, problem: str, now: float) -> list[Reason]:
    reasons = []
    if view.unreadable:
        first, *others = view.unreadable
        more = f" (and {len(others)} more)" if others else ""
        reasons.append(Reason.of("unreadable", first.message + more, first.hint, since=now))
    if problem:
        reasons.append(Reason.of("status-unusable", problem, since=now))
    return reasons


def _about_running(said: Status | None, now: float, *, known: list[Reason]) -> list[Reason]:
    """Return what a daemon that runs says, or that it says nothing."""
    if said is None:
        return []
    codes = {reason.code for reason in known}
    reasons = [reason for reason in said.reasons if reason.code not in codes]
    if now - said.updated > SILENT_SECONDS:
        reasons.append(Reason.of("daemon-silent", since=said.updated))
    if said.state == "held" and not reasons:
        reasons.append(Reason.of("held", since=said.updated))
    return reasons


def _about_gone(
    view: Overview, running: bool | None, said: Status | None, now: float
) -> list[Reason]:
    """Return that no daemon runs, and what ended the last one."""
    ended: tuple[Reason, ...] = ()
    if said is None:
        detail, since = "none ever ran" if running is None else "it was killed or crashed", now
    elif said.state == "stopped":
        detail, since = "it was stopped", said.updated
    elif said.state == "failed":
        detail, since = "it ended by an error", said.updated
        ended = tuple(reason for reason in said.reasons if reason.code in SEVERE)
    else:
        detail, since = "it was killed or crashed", said.updated
    source = f"--db {said.url if said is not None else 'URL'}"
    if said is not None and said.shard != WHOLE:
        source += f" --shard {said.shard}"
    remedy = f"`spoold run {source} --run-dir {view.run.root}` starts it"
    return [Reason.of("daemon-gone", detail, remedy, since=since), *ended]


def _about_dead(consumers: tuple[ConsumerFolder, ...], now: float) -> list[Reason]:
    """Return which dead consumers hold batches: while no daemon runs nobody else says so."""
    dead = [each for each in consumers if not each.alive and each.count.batches]
    if not dead:
        return []
    detail = "; ".join(
        f"{each.name} holds {each.count.batches} batch{'' if each.count.batches == 1 else 'es'}"
        for each in dead
    )
    remedy = "start it again under its name, or start the daemon, which requeues them"
    return [Reason.of("consumer-gone", detail, remedy, since=now)]
