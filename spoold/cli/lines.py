"""Lines that `status` and `top` share: the daemon, and reasons, wrapped beside a label."""

from __future__ import annotations

import textwrap
from typing import Final

from spoold.cli import terminal
from spoold.cli.words import age
from spoold.reasons import Urgency, urgency
from spoold.spool.health import Health
from spoold.spool.statusfile import Reason

__all__ = ["LABEL_WIDTH", "all_reason_lines", "daemon_lines", "wrapped"]

LABEL_WIDTH: Final = 11
_LABELS: Final = {
    Urgency.ATTENTION: "attention",
    Urgency.NOTICE: "notice",
    Urgency.WAIT: "waits for",
}


def wrapped(label: str, text: str, width: int | None = None) -> list[str]:
    """Wrap a text beside its label; a long path is never broken."""
    return textwrap.wrap(
        text,
        terminal.width() if width is None else width,
        initial_indent=f"{label:<{LABEL_WIDTH}}",
        subsequent_indent=" " * LABEL_WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
    )


def daemon_lines(found: Health, now: float, width: int | None = None) -> list[str]:
    """Return whether the daemon runs, and since when."""
    said = found.said
    if not found.running:
        heard = "" if said is None else f", last heard {age(said.updated, now)} ago"
        return wrapped("daemon", f"not running{heard}", width)
    state = "" if said is None else f": {said.state}, since {age(said.started, now)}"
    return wrapped("daemon", f"running, {found.holder or 'holder unknown'}{state}", width)


def all_reason_lines(
    found: Health, now: float, width: int | None = None
) -> tuple[list[str], list[str]]:
    """Return the lines of what a person should come for, and of all other reasons."""
    severe: list[str] = []
    others: list[str] = []
    for reason in found.reasons:
        urgent = urgency(reason.code)
        lines = severe if urgent is Urgency.ATTENTION else others
        lines += _reason_lines(_LABELS[urgent], reason, now, width)
    return severe, others


def _reason_lines(label: str, reason: Reason, now: float, width: int | None) -> list[str]:
    passed = now - reason.since
    since = f" (since {age(reason.since, now)})" if passed >= 1 else ""
    remedy = f"; {reason.remedy}" if reason.remedy else ""
    return wrapped(label, f"{reason.code}: {reason.text}{since}{remedy}", width)
