"""Why something is not delivered, or what a person should know: code → sentence, remedy. Pure.

One table for all who say so. The sentence is constant; what it is about now follows after a colon
(`say`). Status, log, the service manager and `spoold_reason{reason=…,sentence=…}` of the metrics
show the same sentence; a remedy that fits the case better takes the place of the one given here.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["REASONS", "SEVERE", "Kind", "say"]


class Kind(NamedTuple):
    """What a code means, what a person can do, and whether one should come."""

    sentence: str
    remedy: str
    severe: bool = False


REASONS: Final[dict[str, Kind]] = {
    # --- a person should come --------------------------------------------------------------------
    "daemon-gone": Kind("no daemon delivers here", "start it: `spoold run`", severe=True),
    "daemon-silent": Kind(
        "the daemon holds its lock and has said nothing for minutes",
        "read its log; if it hangs, kill it and start it again: nothing gets lost",
        severe=True,
    ),
    "source-unavailable": Kind(
        "the rollout database cannot be read", "spoold tries again by itself", severe=True
    ),
    "source-schema": Kind(
        "the database is no rollout database that spoold knows",
        "give the right one to --db, then start spoold again",
        severe=True,
    ),
    "source-replaced": Kind(
        "the rollout database is not the one that was delivered from",
        "use another run directory, or on_replaced = retire",
        severe=True,
    ),
    "settings": Kind(
        "the settings do not fit the run directory or the database",
        "correct them, then start spoold again",
        severe=True,
    ),
    "lock-lost": Kind(
        "the daemon stopped because its lock file is not its own any more",
        "make sure that no other daemon runs here, then start spoold again",
        severe=True,
    ),
    "bug": Kind("the daemon ended by a bug", "report the end of its log, start it again", True),
    "disk-space": Kind(
        "too little disk space is left", "free some space; spoold goes on by itself", severe=True
    ),
    "read-only": Kind(
        "the run directory is on a file system that is mounted read-only",
        "mount it read-write; spoold goes on by itself",
        severe=True,
    ),
    "write-failed": Kind(
        "a write to the run directory failed", "spoold tries again by itself", severe=True
    ),
    "requeue-failed": Kind(
        "the batches of a dead consumer cannot be requeued",
        "look at its folder in inflight/, then restart the daemon if it does not go on by itself",
        severe=True,
    ),
    "unreadable": Kind(
        "something in the run directory cannot be read",
        "make it readable for the daemon, or move it away",
        severe=True,
    ),
    "bad-rows": Kind(
        "reading stopped: too many rows in a row were of no use",
        "look at the newest notes in rejected/, then restart spoold",
        severe=True,
    ),
    "corrupt-batch": Kind(
        "batches did not fit their digest and were set aside",
        "look for the cause (disk, memory, an edit), then remove rejected/corrupt/",
        severe=True,
    ),
    "all-stale": Kind(
        "trainers pass everything over as stale",
        "lower their min_weight_version, or see why rollouts use old weights",
        severe=True,
    ),
    "status-unusable": Kind(
        "what the daemon said of itself cannot be used", "restart the daemon", severe=True
    ),
    "held": Kind("the daemon holds delivery back", "read its log", severe=True),
    # --- good to know ----------------------------------------------------------------------------
    "consumer-gone": Kind(
        "a consumer is dead and holds batches",
        "start it again under its name; else the daemon requeues them after requeue_seconds",
    ),
    "backpressure": Kind(
        "trainers are slower than rollouts: pending/ is full",
        "start a trainer, or raise the mark",
    ),
    "first-look": Kind("the first look at the whole database is under way", ""),
    "waiting-for-environments": Kind("rollouts are under way and not complete yet", ""),
    "groups-incomplete": Kind(
        "groups are not whole yet",
        "see who is missing; partial_groups = deliver or reject decides after a timeout",
    ),
    "missing-rows": Kind(
        "environments are marked as finished and have no usable row",
        "their rows may still come; after missing_row_seconds each gets a note",
    ),
    "null-rewards": Kind(
        "environments are complete but for their reward",
        "run their evaluation, or set null_reward to fallback or reject",
    ),
    "linger": Kind("complete environments are about to be published", ""),
    "source-empty": Kind(
        "no environment is running, and all that completed is delivered or set aside", ""
    ),
    "claimed-by-hand": Kind(
        "batches lie in inflight/ itself, claimed by hand or by a script",
        "nobody requeues them: ack them, or give them back with `spoold requeue`",
    ),
    "duplicates": Kind(
        "second files of batches were set aside",
        "find out who copies files here, then remove rejected/duplicate/",
    ),
    "unknown-files": Kind(
        "files that spoold does not know are left alone", "`spoold ls` names them: move them away"
    ),
    "many-notes": Kind(
        "unusually many environments were set aside", "read some of rejected/env-*.json"
    ),
    "hints-off": Kind(
        "the kernel gives no hints of changes: they are found by timed looks",
        "raise fs.inotify.max_user_watches and max_user_instances",
    ),
    "clock-jump": Kind(
        "the system clock was set",
        "ages may be off until then; order is by number: nothing to do, but see to the clock",
    ),
}

SEVERE: Final = frozenset(code for code, kind in REASONS.items() if kind.severe)
"""Codes of reasons for which a person should come. The others belong to a healthy run."""


def say(code: str, detail: str = "") -> str:
    """Return the sentence of a reason, and what it is about now."""
    sentence = REASONS[code].sentence
    return f"{sentence}: {detail}" if detail else sentence
