"""Whom nobody waits for any longer: missing rows, and groups that are not whole.

All of the source must have been seen: else what is late cannot be told from what is out of sight.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyroaring import BitMap64

from spoold.daemon.delivery import Delivery
from spoold.model import Note
from spoold.policy import Overdue
from spoold.sources import Source
from spoold.spool.inventory import MISSING_ROW

__all__ = ["give_up_groups", "give_up_missing_rows"]


def give_up_missing_rows(delivery: Delivery, source: Source, overdue: Overdue, now: float) -> None:
    """Note what is finished and has had no usable row for `missing_row_seconds`."""
    due = overdue.due(now)
    if not due:
        return
    overdue.drop(due)
    # One whose row turned up in between waits for its group, or for its reward. Who was deleted in
    # between is only known when it is read.
    waited_for = BitMap64(due) & delivery.missing_rows(source)
    without = BitMap64([one for one, rows in source.read(list(waited_for)) if not rows])
    for environment in without & delivery.missing_rows(source):
        what = f"finished, and no usable row in {delivery.settings.missing_row_seconds:g} s"
        delivery.note(_note(environment, MISSING_ROW, what), source.job, now)


def give_up_groups(delivery: Delivery, source: Source, now: float) -> None:
    """Reject what there is of groups that are to be, where there is something of them."""
    plan = delivery.plan
    if unread := plan.unread(now - delivery.settings.rescan_seconds):
        _leave_out(delivery, unread)
    for group in plan.give_up(now):
        for environment in _leave_out(delivery, tuple(group.complete)):
            what = f"its group {group.key} is not whole"
            note = _note(environment, "partial-group", what)
            delivery.note(note, source.job, now, group=group.key)


def _leave_out(delivery: Delivery, environments: Iterable[int]) -> list[int]:
    """Take out of their groups what is not complete though it looked so; return the others."""
    complete = [one for one in environments if delivery.is_complete(one)]
    delivery.plan.drop(set(environments).difference(complete))
    return complete


def _note(environment: int, reason: str, what: str) -> Note:
    return Note(environment=environment, env_id="", reason=reason, what=what, policy=True)
