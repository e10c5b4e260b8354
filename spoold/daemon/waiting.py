"""What a healthy run waits for, as status shows it."""

from __future__ import annotations

from itertools import islice
from typing import Final

from spoold.daemon.conditions import Conditions
from spoold.policy import GroupPlan, Overdue, Plan
from spoold.spool.statusfile import WaitingGroup

__all__ = ["note_waiting", "waiting_groups"]

SHOWN_GROUPS: Final = 20


def note_waiting(
    conditions: Conditions, plan: Plan | GroupPlan, overdue: Overdue, running: int, now: float
) -> None:
    """Begin and end the reasons that belong to a healthy run."""
    groups = sum(1 for _ in plan.waiting())
    facts = {
        "waiting-for-environments": (running, f"{running} environments are running"),
        "groups-incomplete": (groups, f"{groups} groups wait for members"),
        "missing-rows": (
            len(overdue),
            f"{len(overdue)} environments are finished and have no usable row",
        ),
    }
    for code, (holds, text) in facts.items():
        if holds:
            conditions.begin(code, text, now=now)
        else:
            conditions.end(code, now=now)


def waiting_groups(
    plan: Plan | GroupPlan, group_size: int, now: float, wall: float
) -> tuple[WaitingGroup, ...]:
    """Return the groups that wait for members, the first few that were seen."""
    return tuple(
        WaitingGroup(
            group=group.key,
            have=len(group.complete),
            want=group_size,
            since=round(wall - (now - group.since)),
        )
        for group in islice(plan.waiting(), SHOWN_GROUPS)
    )
