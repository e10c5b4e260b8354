"""Why something is not delivered now: said when it begins, when it ends, and ever more rarely."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from spoold.errors import (
    ConfigError,
    SourceReplaced,
    SourceSchemaError,
    SourceUnavailable,
    SpooldError,
    SpoolLocked,
    SpoolWriteError,
)
from spoold.reasons import SEVERE
from spoold.spool.statusfile import Reason

__all__ = ["Conditions", "code_of"]

log = logging.getLogger("spoold.daemon")

FIRST_REMINDER_SECONDS: Final = 60.0
_CODES: Final = (
    (SourceUnavailable, "source-unavailable"),
    (SourceSchemaError, "source-schema"),
    (SourceReplaced, "source-replaced"),
    (SpoolLocked, "lock-lost"),
    (SpoolWriteError, "write-failed"),
    (ConfigError, "settings"),
)


def code_of(error: SpooldError) -> str:
    """Return the code of the reason that an error is when it ends the daemon."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), "bug")


@dataclass(slots=True)
class _Condition:
    reason: Reason
    began: float
    remind_at: float


class Conditions:
    """The reasons that hold now, each with when it began. `changes` counts beginnings and ends.

    A severe one is logged as a warning when it begins, again after one minute, two, four, …, and
    when it ends. The others are only shown by status.
    """

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._holding: dict[str, _Condition] = {}
        self.changes = 0

    def begin(self, code: str, detail: str = "", remedy: str = "", *, now: float) -> None:
        """Note that a reason holds; `detail` may change while it does.

        The words are those of `spoold.reasons`; a remedy given here fits the case better.
        """
        held = self._holding.get(code)
        since = held.reason.since if held is not None else self._wall()
        reason = Reason.of(code, detail, remedy, since=since)
        if held is None:
            held = _Condition(reason, now, now)
            self._holding[code] = held
            self.changes += 1
        elif held.reason != reason:
            self.changes += 1
        held.reason = reason
        if now >= held.remind_at:
            elapsed = now - held.began
            held.remind_at = now + max(FIRST_REMINDER_SECONDS, elapsed)
            level = logging.WARNING if code in SEVERE else logging.DEBUG
            said = {"what": reason.text, "remedy": reason.remedy}
            fields = {"reason": code, **said, "for": round(elapsed)}
            log.log(level, "waiting", extra={"fields": fields})

    def end(self, *codes: str, now: float) -> None:
        """Note that reasons hold no more."""
        for code in codes:
            held = self._holding.pop(code, None)
            if held is not None:
                self.changes += 1
                level = logging.INFO if code in SEVERE else logging.DEBUG
                fields = {"reason": code, "for": round(now - held.began)}
                log.log(level, "waiting over", extra={"fields": fields})

    def holds(self, codes: Iterable[str]) -> bool:
        """Whether one of these reasons holds."""
        return any(code in self._holding for code in codes)

    def reasons(self) -> tuple[Reason, ...]:
        """Return what holds now, severe reasons first, then by age."""
        held = (condition.reason for condition in self._holding.values())
        return tuple(sorted(held, key=lambda r: (r.code not in SEVERE, r.since)))
