"""What a consumer passed over as too old, and when that was all there was."""

from __future__ import annotations

import logging

from spoold.layout import BatchName

__all__ = ["Stale"]

_log = logging.getLogger("spoold.consumer")


class Stale:
    """Counts, and says once each time that nothing but stale batches comes."""

    def __init__(self) -> None:
        self.count = 0
        # Since a batch was last handed out:
        self._in_a_row = 0
        self._newest = 0
        self._said = False
        self._warned_of_unversioned = False

    def passed_over(self, name: BatchName) -> None:
        """Count a batch that went to acked/stale/."""
        self.count += 1
        self._in_a_row += 1
        self._newest = max(self._newest, name.hi)
        if name.hi == 0 and not self._warned_of_unversioned:
            self._warned_of_unversioned = True
            _log.warning(
                "batch %s has no usable weight version and counts as stale: now in acked/stale/",
                name.id,
            )

    def ended(self) -> None:
        """Note that a batch was handed out."""
        self._in_a_row, self._newest, self._said = 0, 0, False

    def say_if_all(self, wanted: int) -> None:
        """Warn, once, that all that came was stale; called when nothing is left to be claimed."""
        if self._in_a_row and not self._said:
            self._said = True
            _log.warning(
                "nothing but stale batches came: %d, with weight versions up to %d where %d is the "
                "least; they lie in acked/stale/",
                self._in_a_row,
                self._newest,
                wanted,
            )

    def words(self) -> list[str]:
        """Say what was passed over."""
        words = []
        if self.count:
            words.append(f"{self.count} batches were passed over as stale")
        if self._in_a_row:
            words.append(
                f"the last {self._in_a_row} that came were all stale: weight versions up to "
                f"{self._newest}"
            )
        return words
