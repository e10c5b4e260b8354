"""Names of batches that may be claimed, oldest first, listed no more often than it pays."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from spoold import fs
from spoold.layout import Place, RunDir, State

__all__ = ["Names"]

# For how long a listing is believed: an older batch that comes back is claimed this much too late.
LISTING_SECONDS: Final = 0.1
# A huge pending/ is listed less often: listing takes a twentieth of the time at most.
LISTING_SHARE: Final = 20.0

_PENDING: Final = Place(State.PENDING)


class Names:
    """What was listed in the own folder and in pending/, and not tried yet; own ones come first."""

    def __init__(self, run: RunDir, own: Place, *, clock: Callable[[], float]) -> None:
        self._run = run
        self._own = own
        self._clock = clock
        # The next one last.
        self._own_names: list[str] = []
        self._pending_names: list[str] = []
        self._until = -math.inf

    @property
    def are_old(self) -> bool:
        """Whether it is worth listing again."""
        return not (self._own_names or self._pending_names) or self._clock() >= self._until

    def expire(self) -> None:
        """Believe the last listing no more."""
        self._until = -math.inf

    def forget(self) -> None:
        """Forget what was listed."""
        self._own_names, self._pending_names = [], []

    def list(self) -> None:
        """List both folders. Nothing where one of them was removed just now."""
        self.forget()
        began = self._clock()
        try:
            self._own_names = _oldest_last(fs.scan(self._run.of(self._own)).files)
            self._pending_names = _oldest_last(_names_in(self._run.pending))
        except FileNotFoundError:
            return
        now = self._clock()
        self._until = now + max(LISTING_SECONDS, LISTING_SHARE * (now - began))

    def heard(self, own: Iterable[str], pending: Iterable[str]) -> None:
        """Try these paths next, without listing; all else was tried before."""
        self._own_names = _oldest_last([path.rpartition("/")[2] for path in own])
        self._pending_names = _oldest_last([path.rpartition("/")[2] for path in pending])
        self._until = self._clock() + LISTING_SECONDS

    def following(self) -> Iterator[tuple[Place, str]]:
        """Yield what was not tried yet, the next one first."""
        yield from ((self._own, name) for name in reversed(self._own_names))
        yield from ((_PENDING, name) for name in reversed(self._pending_names))

    def pop(self) -> tuple[Place, str] | None:
        """Return the next one, None when all were tried."""
        if self._own_names:
            return self._own, self._own_names.pop()
        if self._pending_names:
            return _PENDING, self._pending_names.pop()
        return None


def _names_in(path: str) -> list[str]:
    # Faster than a scan: what is no regular file is left out when it is its turn.
    try:
        return os.listdir(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise fs.failed("list", path, error) from error


def _oldest_last(names: list[str]) -> list[str]:
    """Sort batch names for popping; what is no batch is left out later, when it is its turn."""
    names.sort(key=_age, reverse=True)
    return names


def _age(name: str) -> str:
    # A number of ten digits is younger than one of nine.
    return name if name[9:10] == "-" else "~" * (name.find("-") - 9) + name
