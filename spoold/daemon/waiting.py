"""What a healthy run waits for, as status shows it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Final

from spoold.daemon.conditions import Conditions
from spoold.policy import Group, GroupPlan, Plan
from spoold.spool.statusfile import WaitingGroup

__all__ = ["Waiting", "note_waiting", "unknown_groups", "waiting_groups"]

SHOWN_GROUPS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Numbers of environments that are not delivered yet, by what they lack; of groups the rest.

    `ready` lack nothing: they wait for their batch.
    """

    is_open: bool
    running: int
    ready: int
    missing_rows: int
    unrewarded: int
    groups: int
    first_group: Group | None
    group_size: int


def note_waiting(conditions: Conditions, waiting: Waiting, now: float) -> None:
    """Begin and end the reasons that belong to a healthy run."""
    facts = {
        "waiting-for-environments": (waiting.running, _environments(waiting.running)),
        "groups-incomplete": (waiting.groups, _groups_words(waiting)),
        "missing-rows": (waiting.missing_rows, _environments(waiting.missing_rows)),
        "null-rewards": (waiting.unrewarded, _environments(waiting.unrewarded)),
        "linger": (waiting.ready, _environments(waiting.ready)),
    }
    anything = any(holds for holds, _ in facts.values())
    facts["source-empty"] = (waiting.is_open and not anything, "")
    for code, (holds, text) in facts.items():
        if holds:
            conditions.begin(code, text, now=now)
        else:
            conditions.end(code, now=now)


def _environments(number: int) -> str:
    return f"{number:,} environment{'' if number == 1 else 's'}"


def _groups_words(waiting: Waiting) -> str:
    words = f"{waiting.groups:,} group{'' if waiting.groups == 1 else 's'}"
    group = waiting.first_group
    if group is None:
        return words
    words += f"; {group.key} has {len(group.complete)} of {waiting.group_size}"
    for what, who in (("waits for", group.missing), ("set aside:", sorted(group.lost))):
        if who:
            words += f", {what} {', '.join(map(str, who[:5]))}{', …' if len(who) > 5 else ''}"
    return words


def unknown_groups(plan: Plan | GroupPlan) -> frozenset[str]:
    """Return the groups that status shows and whose members were not asked for yet."""
    shown = islice(plan.waiting(), SHOWN_GROUPS)
    return frozenset(group.key for group in shown if group.members is None)


def waiting_groups(
    plan: Plan | GroupPlan, group_size: int, now: float, wall: float
) -> tuple[WaitingGroup, ...]:
    """Return the groups that wait for members, the first few that were seen."""
    return tuple(
        WaitingGroup(
            group=group.key,
            have=len(group.complete),
            want=group_size,
            missing=group.missing,
            set_aside=tuple(sorted(group.lost)),
            since=round(wall - (now - group.since)),
        )
        for group in islice(plan.waiting(), SHOWN_GROUPS)
    )
