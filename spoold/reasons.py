"""Why something is not delivered, or what a person should know: code → sentence, remedy. Pure.

One table for all who say so. The sentence is constant; what it is about now follows after a colon
(`say`). Status, log, the service manager and `spoold_reason{reason=…,sentence=…}` of the metrics
show the same sentence, in the same order: by urgency, then by age. A remedy that fits the case
better takes the place of the one given here.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

__all__ = ["REASONS", "SEVERE", "Kind", "Urgency", "say", "urgency"]


class Urgency(enum.IntEnum):
    """Whether a person should come, should know, or a healthy run just waits. Most urgent first."""

    ATTENTION = 0
    NOTICE = 1
    WAIT = 2


class Kind(NamedTuple):
    """What a code means, what a person can do, and how urgent that is."""

    sentence: str
    remedy: str
    urgency: Urgency


_ATTENTION, _NOTICE, _WAIT = Urgency

REASONS: Final[dict[str, Kind]] = {
    # --- a person should come --------------------------------------------------------------------
    "daemon-gone": Kind("no daemon delivers here", "start it: `spoold run`", _ATTENTION),
    "daemon-silent": Kind(
        "the daemon holds its lock and has said nothing for minutes",
        "read its log; if it hangs, kill it and start it again: nothing gets lost",
        _ATTENTION,
    ),
    "source-unavailable": Kind(
        "the rollout database cannot be read", "spoold tries again by itself", _ATTENTION
    ),
    "source-schema": Kind(
        "the database is no rollout database that spoold knows",
        "give the right one to --db, then start spoold again",
        _ATTENTION,
    ),
    "source-replaced": Kind(
        "the rollout database is not the one that was delivered from",
        "use another run directory, or on_replaced = retire",
        _ATTENTION,
    ),
    "settings": Kind(
        "the settings do not fit the run directory or the database",
        "correct them, then start spoold again",
        _ATTENTION,
    ),
    "lock-lost": Kind(
        "the daemon stopped because its lock file is not its own any more",
        "make sure that no other daemon runs here, then start spoold again",
        _ATTENTION,
    ),
    "bug": Kind(
        "the daemon ended by a bug", "report the end of its log, start it again", _ATTENTION
    ),
    "disk-space": Kind(
        "too little disk space is left", "free some space; spoold goes on by itself", _ATTENTION
    ),
    "read-only": Kind(
        "the run directory is on a file system that is mounted read-only",
        "mount it read-write; spoold goes on by itself",
        _ATTENTION,
    ),
    "write-failed": Kind(
        "a write to the run directory failed", "spoold tries again by itself", _ATTENTION
    ),
    "requeue-failed": Kind(
        "the batches of a dead consumer cannot be requeued",
        "look at its folder in inflight/, then restart the daemon if it does not go on by itself",
        _ATTENTION,
    ),
    "unreadable": Kind(
        "something in the run directory cannot be read",
        "make it readable for the daemon, or move it away",
        _ATTENTION,
    ),
    "bad-rows": Kind(
        "reading stopped: too many rows in a row were of no use",
        "look at the newest notes in rejected/, then restart spoold",
        _ATTENTION,
    ),
    "corrupt-batch": Kind(
        "batches did not fit their digest and were set aside",
        "look for the cause (disk, memory, an edit), then remove rejected/corrupt/",
        _ATTENTION,
    ),
    "all-stale": Kind(
        "trainers pass everything over as stale",
        "lower their min_weight_version, or see why rollouts use old weights",
        _ATTENTION,
    ),
    "status-unusable": Kind(
        "what the daemon said of itself cannot be used", "restart the daemon", _ATTENTION
    ),
    "held": Kind("the daemon holds delivery back", "read its log", _ATTENTION),
    # --- a person should know -------------------------------------------------------------------
    "consumer-gone": Kind(
        "a consumer is dead and holds batches",
        "start it again under its name; else the daemon requeues them after requeue_seconds",
        _NOTICE,
    ),
    "claimed-by-hand": Kind(
        "batches lie in inflight/ itself, claimed by hand or by a script",
        "nobody requeues them: ack them, or give them back with `spoold requeue`",
        _NOTICE,
    ),
    "duplicates": Kind(
        "second files of batches were set aside",
        "find out who copies files here, then remove rejected/duplicate/",
        _NOTICE,
    ),
    "unknown-files": Kind(
        "files that spoold does not know are left alone",
        "`spoold ls` names them: move them away",
        _NOTICE,
    ),
    "many-notes": Kind(
        "unusually many environments were set aside", "read some of rejected/env-*.json", _NOTICE
    ),
    "hints-off": Kind(
        "the kernel gives no hints of changes: they are found by timed looks",
        "raise fs.inotify.max_user_watches and max_user_instances",
        _NOTICE,
    ),
    "open-transaction": Kind(
        "a transaction in the database has been open for long: what it wrote cannot be seen yet",
        "end it if it was forgotten",
        _NOTICE,
    ),
    "missing-index": Kind(
        "the database lacks an index that would help", "make it: spoold creates nothing", _NOTICE
    ),
    "clock-jump": Kind(
        "the system clock was set",
        "nothing to do here: batches go by number, and waits by a clock that nobody sets; ages "
        "may be wrong for what happened before",
        _NOTICE,
    ),
    "second-daemon": Kind(
        "a second daemon was started on this run directory",
        "there is one daemon a run directory: stop the other one, or give it another --run-dir",
        _NOTICE,
    ),
    "metrics-unwritten": Kind(
        "the numbers for Prometheus cannot be written",
        "let the daemon write in metrics_dir, or leave it unset",
        _NOTICE,
    ),
    # --- a healthy run waits ---------------------------------------------------------------------
    "backpressure": Kind(
        "trainers are slower than rollouts: pending/ is full",
        "start a trainer, or raise the mark",
        _WAIT,
    ),
    "batches-move": Kind(
        "batches are moved while the daemon looks for what was delivered",
        "it goes on when they rest for a moment, or after ten seconds",
        _WAIT,
    ),
    "first-look": Kind("the first look at the whole database is under way", "", _WAIT),
    "waiting-for-environments": Kind("rollouts are under way and not complete yet", "", _WAIT),
    "groups-incomplete": Kind(
        "groups are not whole yet",
        "see who is missing; partial_groups = deliver or reject decides after a timeout",
        _WAIT,
    ),
    "missing-rows": Kind(
        "environments are marked as finished and have no usable row",
        "their rows may still come; after missing_row_seconds each gets a note",
        _WAIT,
    ),
    "null-rewards": Kind(
        "environments are complete but for their reward",
        "run their evaluation, or set null_reward to fallback or reject",
        _WAIT,
    ),
    "linger": Kind("complete environments are about to be published", "", _WAIT),
    "source-empty": Kind(
        "no environment is running, and all that completed is delivered or set aside", "", _WAIT
    ),
}

SEVERE: Final = frozenset(c for c, kind in REASONS.items() if kind.urgency is Urgency.ATTENTION)
"""Codes of reasons for which a person should come."""


def urgency(code: str) -> Urgency:
    """Return how urgent a reason is; one that only a newer daemon knows is shown, and no more."""
    kind = REASONS.get(code)
    return kind.urgency if kind is not None else Urgency.WAIT


def say(code: str, detail: str = "") -> str:
    """Return the sentence of a reason, and what it is about now."""
    sentence = REASONS[code].sentence
    return f"{sentence}: {detail}" if detail else sentence
