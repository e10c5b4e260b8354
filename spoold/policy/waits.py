"""What is missing, overdue or abandoned, how long to pause, and when reading stops. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pyroaring import BitMap64

__all__ = ["Abandoned", "Absence", "Backoff", "Overdue", "Pressure", "pressure"]

PASS_SECONDS: Final = 0.05
MANY_PASSES: Final = 10
MANY_PASSES_SECONDS: Final = 10.0


class Absence:
    """Decides when a batch file that no pass finds is missing: moves race with listings.

    Missing: two passes at least 50 ms apart did not find it, and no folder's mtime changed during
    either; or ten passes over at least ten seconds did not.
    """

    def __init__(self) -> None:
        self._still_since: dict[str, float] = {}
        self._passes: dict[str, tuple[float, int]] = {}

    def passed(self, absent: Iterable[str], *, at: float, still: bool) -> tuple[str, ...]:
        """Take in a whole pass that ended `at`. Returns the batch ids that are missing now.

        `absent`: known batches that the pass did not find; `still`: no folder's mtime changed
        while it ran.
        """
        ids = set(absent)
        if not ids and not self._passes:
            return ()
        self._passes = {i: self._passes.get(i, (at, 0)) for i in ids}
        self._still_since = {i: t for i, t in self._still_since.items() if i in ids}
        missing = []
        for batch_id in ids:
            first, passes = self._passes[batch_id]
            self._passes[batch_id] = (first, passes + 1)
            if passes + 1 >= MANY_PASSES and at - first >= MANY_PASSES_SECONDS:
                missing.append(batch_id)
            elif still:
                since = self._still_since.setdefault(batch_id, at)
                if at - since >= PASS_SECONDS:
                    missing.append(batch_id)
        for batch_id in missing:
            del self._passes[batch_id]
            self._still_since.pop(batch_id, None)
        return tuple(sorted(missing))

    def __bool__(self) -> bool:
        return bool(self._passes)


class Overdue:
    """Finished environments without a usable row, and for how long they have been that."""

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds
        self._since: dict[int, float] = {}

    def seen(self, environments: Iterable[int], now: float) -> None:
        """Take in environments that are finished and have no usable row."""
        for environment in environments:
            self._since.setdefault(environment, now)

    def drop(self, environments: Iterable[int]) -> None:
        """Forget environments: their row turned up, or they were set aside."""
        if self._since:
            for environment in environments:
                self._since.pop(environment, None)

    def due(self, now: float) -> tuple[int, ...]:
        """Return the environments that have waited long enough."""
        return tuple(sorted(e for e, since in self._since.items() if now >= since + self.seconds))

    def keep_out(self, skip: BitMap64) -> None:
        """Forget environments that are delivered or set aside."""
        if self._since:
            self.drop([environment for environment in self._since if environment in skip])

    def due_at(self) -> float | None:
        """Return when the next one has waited long enough."""
        return min(self._since.values()) + self.seconds if self._since else None

    def __len__(self) -> int:
        return len(self._since)


class Abandoned:
    """Consumers whose lock has been free for `seconds`: what they hold is to be requeued."""

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds
        self._free_since: dict[str, float] = {}

    def seen(self, free: Iterable[str], now: float) -> tuple[str, ...]:
        """Take in whose lock is free now. Returns those for whom it has been so long enough."""
        self._free_since = {name: self._free_since.get(name, now) for name in free}
        due = (n for n, since in self._free_since.items() if now >= since + self.seconds)
        return tuple(sorted(due))


class Backoff:
    """Growing pauses between tries: 1, 2, 4, … seconds, at most `longest`."""

    def __init__(self, *, first: float = 1.0, longest: float = 30.0) -> None:
        self.first = first
        self.longest = longest
        self.tries = 0
        self.until = 0.0

    def failed(self, now: float) -> float:
        """Note a failure. Returns how long to pause, in seconds."""
        pause: float = min(self.longest, self.first * 2.0 ** min(self.tries, 20))
        self.tries += 1
        self.until = now + pause
        return pause

    def succeeded(self) -> None:
        """Begin again with the shortest pause."""
        self.tries = 0
        self.until = 0.0


@dataclass(frozen=True, slots=True)
class Pressure:
    """Why reading has to stop: what is too much, and the mark that it is measured against."""

    code: str
    value: int
    mark: int


def pressure(
    *,
    batches: int,
    max_batches: int,
    size_bytes: int,
    max_bytes: int,
    free_bytes: int,
    min_free_bytes: int,
) -> Pressure | None:
    """Return why nothing more may be published now, or None."""
    if batches >= max_batches:
        return Pressure("max_pending_batches", batches, max_batches)
    if size_bytes >= max_bytes:
        return Pressure("max_pending_bytes", size_bytes, max_bytes)
    if free_bytes < min_free_bytes:
        return Pressure("min_free_bytes", free_bytes, min_free_bytes)
    return None
