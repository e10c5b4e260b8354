"""Decisions: what goes into the next batch and when, what is missing, when to try again. Pure.

Time is an argument everywhere: monotonic seconds, counted from this daemon's first sight.
"""

from spoold.policy.groups import GroupPlan
from spoold.policy.plan import Group, Plan, Unit
from spoold.policy.shards import WHOLE, Shard
from spoold.policy.waits import Abandoned, Absence, Backoff, Overdue, Pressure, pressure

__all__ = [
    "WHOLE",
    "Abandoned",
    "Absence",
    "Backoff",
    "Group",
    "GroupPlan",
    "Overdue",
    "Plan",
    "Pressure",
    "Shard",
    "Unit",
    "pressure",
]
