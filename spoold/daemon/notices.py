"""What a person should know of the run directory and of the clock, begun and ended as reasons."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final

from pyroaring import BitMap64

from spoold import fs
from spoold.daemon.conditions import Conditions
from spoold.layout import CORRUPT, DUPLICATE, Place, RunDir, State, batch_id_of
from spoold.model import Mark
from spoold.spool import setup
from spoold.spool.inventory import Inventory
from spoold.spool.overview import MANY_NOTES, shown

__all__ = ["ClockWatch", "LateRows", "TurnedAway", "note_spool"]

log = logging.getLogger("spoold.daemon")

STALE_IN_A_ROW: Final = 3
JUMP_SECONDS: Final = 5.0
SHOWN_SECONDS: Final = 600.0
_CORRUPT: Final = Place(State.REJECTED, CORRUPT)
_DUPLICATE: Final = Place(State.REJECTED, DUPLICATE)
_INFLIGHT: Final = Place(State.INFLIGHT)


def note_spool(
    conditions: Conditions, inventory: Inventory, gone: Mapping[str, int], now: float
) -> None:
    """Begin and end the reasons that lie in the folders. `gone`: dead consumer → its batches."""
    unknown = inventory.unknown
    stale = inventory.tally.stale_in_a_row
    facts = {
        "consumer-gone": "; ".join(
            f"{name} holds {_counted(batches)}" for name, batches in sorted(gone.items())
        ),
        "corrupt-batch": _lying(inventory, _CORRUPT),
        "duplicates": _lying(inventory, _DUPLICATE),
        "claimed-by-hand": _lying(inventory, _INFLIGHT),
        "all-stale": f"the last {_counted(stale)}" if stale >= STALE_IN_A_ROW else "",
        "unknown-files": f"{len(unknown)}, such as {shown(min(unknown))}" if unknown else "",
        "many-notes": f"{inventory.note_count}" if inventory.note_count > MANY_NOTES else "",
    }
    for code, detail in facts.items():
        if detail:
            conditions.begin(code, detail, now=now)
    conditions.end(*[code for code, detail in facts.items() if not detail], now=now)


def _counted(batches: int) -> str:
    return "1 batch" if batches == 1 else f"{batches} batches"


def _lying(inventory: Inventory, place: Place) -> str:
    shelf = inventory.shelves.by_place.get(place)
    ids = [name for name in shelf.names if batch_id_of(name)] if shelf is not None else []
    return f"{_counted(len(ids))} in {place.path}/" if ids else ""


class ClockWatch:
    """Notes when wall time and monotonic time part: somebody set the clock, or the host slept."""

    def __init__(self, *, wall: float, now: float) -> None:
        self._offset = wall - now
        self._end_at = 0.0

    def has_jumped(self, wall: float, now: float) -> bool:
        """Whether they parted since the last look."""
        return abs(wall - now - self._offset) >= JUMP_SECONDS

    def look(self, conditions: Conditions, *, wall: float, now: float) -> None:
        """Begin the reason at a jump; end it some minutes later."""
        if self.has_jumped(wall, now):
            jump = wall - now - self._offset
            self._offset += jump
            self._end_at = now + SHOWN_SECONDS
            detail = f"{'forward' if jump > 0 else 'back'} by {abs(jump):.0f} s"
            conditions.begin("clock-jump", detail, now=now)
        elif now >= self._end_at:
            conditions.end("clock-jump", now=now)


class TurnedAway:
    """Notes that another daemon was started on this run directory, and found this one here."""

    def __init__(self) -> None:
        self._seen: setup.Visit | None = None
        self._end_at = 0.0

    def mark(self, run: RunDir) -> Mark:
        """Return what tells whether one was turned away since the last look."""
        if self._seen is None:
            return fs.is_there, run.visit_json, False
        return fs.mtime_ns, run.visit_json, self._seen.at_ns

    def look(self, conditions: Conditions, run: RunDir, now: float) -> None:
        """Begin the reason when one was turned away; end it some minutes after the last one."""
        visit = setup.last_visit(run)
        if visit is not None and visit != self._seen:
            self._end_at = now + SHOWN_SECONDS
            conditions.begin("second-daemon", f"{visit.who} was turned away", now=now)
        elif now >= self._end_at:
            conditions.end("second-daemon", now=now)
        self._seen = visit


class LateRows:
    """Says once of each environment that its new rows are not looked at."""

    def __init__(self) -> None:
        self._told = BitMap64()

    def tell(self, environments: Iterable[int], set_aside: BitMap64) -> None:
        """Take in environments with new rows that are delivered, or `set_aside`."""
        for environment in environments:
            if environment in self._told:
                continue
            self._told.add(environment)
            if environment in set_aside:
                said = "new rows of what is set aside are not looked at until its note is removed"
            else:
                said = "new rows after delivery are not looked at"
            log.warning(said, extra={"fields": {"environment": environment}})
