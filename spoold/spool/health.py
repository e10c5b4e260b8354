"""How a run directory is, for people: what lies where, whether the daemon lives, what is wrong.

Works with the daemon dead: then it says so, and what the daemon last said is only history.
`to_dict` is the contract of `spoold status --json`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from spoold import fs
from spoold.layout import RunDir, State
from spoold.spool import overview, statusfile
from spoold.spool.overview import ConsumerFolder, Count, Overview
from spoold.spool.statusfile import SEVERE, Reason, Status

__all__ = ["MANY_NOTES", "Health", "take"]

FORMAT: Final = 1
MANY_NOTES: Final = 1000
_SEVERE_HERE: Final = SEVERE | {"daemon-gone", "held", "status-unusable"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A run directory at one moment.

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

    @property
    def severe(self) -> tuple[Reason, ...]:
        """The reasons for which a person should come."""
        return tuple(reason for reason in self.reasons if reason.code in _SEVERE_HERE)

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
            "consumers": [
                {"name": each.name, "alive": each.alive, **each.count._asdict()}
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
    return Health(
        overview=view,
        running=running is True,
        holder=fs.holder_of(run.lock) if running else "",
        said=said,
        said_problem=problem,
        consumers=tuple(view.consumers()),
        reasons=tuple(_reasons(view, running, said, problem, now)),
    )


def _reasons(
    view: Overview, running: bool | None, said: Status | None, problem: str, now: float
) -> list[Reason]:
    reasons = [
        Reason(code="unreadable", since=now, text=error.message, remedy=error.hint)
        for error in view.unreadable
    ]
    if problem:
        reasons.append(
            Reason(code="status-unusable", since=now, text=problem, remedy="restart the daemon")
        )
    if running:
        reasons += said.reasons if said is not None else ()
        if said is not None and said.state == "held" and not _is_severe(reasons):
            reasons.append(
                Reason(
                    code="held",
                    since=said.updated,
                    text="the daemon holds delivery back",
                    remedy="read its log",
                )
            )
        return reasons
    if running is None:
        text, since = "no daemon ever ran here", now
    elif said is not None and said.state == "stopped":
        text, since = "the daemon was stopped", said.updated
    else:
        text, since = "the daemon is gone", said.updated if said is not None else now
    url = said.url if said is not None else "URL"
    remedy = f"`spoold run --db {url} --run-dir {view.run.root}` starts it"
    return [Reason(code="daemon-gone", since=since, text=text, remedy=remedy), *reasons]


def _is_severe(reasons: list[Reason]) -> bool:
    return any(reason.code in SEVERE for reason in reasons)
