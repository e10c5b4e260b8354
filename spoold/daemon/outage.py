"""While writes to the run directory fail: a pause that grows, and the one reason that says why."""

from __future__ import annotations

import errno
import logging
from typing import Final

from spoold.daemon.conditions import Conditions, code_of
from spoold.errors import SpoolWriteError
from spoold.policy import Backoff

__all__ = ["Outage"]

log = logging.getLogger("spoold.daemon")

GO_ON: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


class Outage:
    """Begun by a write that failed, over when one has worked, or there is nothing left to write.

    `until`: nothing is written before.
    """

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._backoff = Backoff(first=0.25, longest=10.0)
        self._batches = -1
        self._code = ""

    @property
    def until(self) -> float:
        """When to try again."""
        return self._backoff.until

    def failed(self, error: SpoolWriteError, *, batches: int, now: float) -> None:
        """Take in a failure, and how many batches were published by then."""
        self._batches = batches
        pause = self._backoff.failed(now)
        code = code_of(error)
        if code != self._code:
            self._end(now)
        self._code = code
        remedy = f"{error.hint}; spoold goes on by itself" if error.errno in GO_ON else error.hint
        self._conditions.begin(code, error.message, remedy, now=now)
        log.debug("write failed", extra={"fields": {"error": str(error), "pause": pause}})

    def has_worked(self, batches: int) -> bool:
        """Whether a batch was published since."""
        return batches > self._batches

    def over(self, now: float) -> None:
        """Take in that writes work."""
        self._backoff.succeeded()
        self._end(now)

    def _end(self, now: float) -> None:
        if self._code:
            self._conditions.end(self._code, now=now)
            self._code = ""

    # The mark of free bytes and a full disk are one reason, and one of the two owns it.

    def hand_over(self, code: str) -> None:
        """Leave it to the caller to end a reason from now on."""
        if self._code == code:
            self._code = ""

    def holds(self, code: str) -> bool:
        """Whether a failed write is why this reason holds."""
        return self._code == code
