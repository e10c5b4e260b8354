"""Why something is not delivered now: said when it begins, when it ends, and ever more rarely."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from spoold.errors import (
    ConfigError,
    LockLost,
    SourceReplaced,
    SourceSchemaError,
    SourceUnavailable,
    SpooldError,
    SpoolLocked,
    SpoolWriteError,
)
from spoold.reasons import Urgency, urgency
from spoold.spool.statusfile import Reason

__all__ = ["Conditions", "code_of", "reason_of", "words_of"]

log = logging.getLogger("spoold.daemon")

FIRST_REMINDER_SECONDS: Final = 60.0
_CODES: Final = (
    (SourceUnavailable, "source-unavailable"),
    (SourceSchemaError, "source-schema"),
    (SourceReplaced, "source-replaced"),
    (LockLost, "lock-lost"),
    (SpoolLocked, "second-daemon"),
    (SpoolWriteError, "write-failed"),
    (ConfigError, "settings"),
)


_WRITE_CODES: Final = {
    errno.ENOSPC: "disk-space",
    errno.EDQUOT: "disk-space",
    errno.EROFS: "read-only",
}
_LEVELS: Final = {
    Urgency.ATTENTION: (logging.WARNING, logging.WARNING),
    Urgency.NOTICE: (logging.INFO, logging.WARNING),
    Urgency.WAIT: (logging.DEBUG, logging.INFO),
}


def code_of(error: SpooldError) -> str:
    """Return the code of the reason that an error is."""
    if isinstance(error, SpoolWriteError) and error.errno in _WRITE_CODES:
        return _WRITE_CODES[error.errno]
    return next((code for kind, code in _CODES if isinstance(error, kind)), "bug")


def words_of(error: Exception) -> tuple[str, str, str]:
    """Return code, detail and remedy of the reason that an error is; a bug's remedy is "".

    Any error that nobody expected is a bug.
    """
    if isinstance(error, SpooldError):
        return code_of(error), error.message, error.hint
    return "bug", f"{type(error).__name__}: {error}", ""


def reason_of(error: Exception, *, since: float) -> Reason:
    """Return the reason that an error is."""
    return Reason.of(*words_of(error), since=since)


@dataclass(slots=True)
class _Condition:
    reason: Reason
    began: float
    remind_at: float


class Conditions:
    """The reasons that hold now, each with when it began. `changes` counts beginnings and ends.

    Each is logged when it begins, again after one minute, two, four, …, and when it ends: as a
    warning where a person should come, as information where one should know, for debugging where
    a healthy run waits. What lasts for a minute is one level more important than at first.
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
            level = _level(code, elapsed)
            said = {"what": reason.text, "remedy": reason.remedy}
            fields = {"reason": code, **said, "for": round(elapsed)}
            log.log(level, "waiting", extra={"fields": fields})

    def end(self, *codes: str, now: float) -> None:
        """Note that reasons hold no more."""
        if self._holding.keys().isdisjoint(codes):
            return  # mostly, and several times at each look
        for code in codes:
            held = self._holding.pop(code, None)
            if held is not None:
                self.changes += 1
                elapsed = now - held.began
                fields = {"reason": code, "for": round(elapsed)}
                level = min(_level(code, elapsed), logging.INFO)
                log.log(level, "waiting over", extra={"fields": fields})

    def tell(self, code: str, problem: tuple[str, str] | None, *, now: float) -> None:
        """Note that a reason holds because of a problem (detail, remedy); None: no more."""
        if problem is None:
            self.end(code, now=now)
        else:
            self.begin(code, *problem, now=now)

    def holds(self, codes: Iterable[str]) -> bool:
        """Whether one of these reasons holds."""
        return not self._holding.keys().isdisjoint(codes)

    def reasons(self) -> tuple[Reason, ...]:
        """Return what holds now, the most urgent first, then by age."""
        held = (condition.reason for condition in self._holding.values())
        return tuple(sorted(held, key=Reason.order))


def _level(code: str, elapsed: float) -> int:
    at_first, later = _LEVELS[urgency(code)]
    return at_first if elapsed < FIRST_REMINDER_SECONDS else later
