"""Which environments of a database belong to the shard: each is hashed once. Ids only; no I/O.

Two bits an environment, so that what belongs to others is passed over by its id ever after, and a
reconcile leaves it out as it leaves out what is delivered. It is not believed for ever: rows may
change under an id without a sign, say in a database that was restored in place and has grown since.
"""

from __future__ import annotations

from typing import Final

from pyroaring import BitMap64

from spoold.policy import Shard

__all__ = ["Share"]

ASKED_ANEW: Final = 20_000


class Share:
    """The shard's environments of one job of one database, as far as they were asked for."""

    def __init__(self, shard: Shard, *, job: str) -> None:
        self.shard = shard
        self.job = job
        self._own = BitMap64()
        self._others = BitMap64()
        self._doubted = 0

    @property
    def is_whole(self) -> bool:
        """Whether there is but one shard, so that nobody needs to ask."""
        return self.shard.is_whole

    def owns(self, environment: int, group: str | bytes | None, env_id: str | bytes) -> bool:
        """Whether an environment belongs to the shard. Bytes are UTF-8, or replaced."""
        if environment in self._own:
            return True
        if environment in self._others:
            return False
        is_own = self.shard.owns(self.job, _text(group), _text(env_id))
        (self._own if is_own else self._others).add(environment)
        return is_own

    def with_others(self, skip: BitMap64) -> BitMap64:
        """Return `skip`, and with it what is known to belong to others."""
        return skip | self._others if self._others else skip

    def doubt(self) -> None:
        """Forget the next 20,000 ids, and begin again after the last: at each reconcile."""
        first, end = self._doubted, self._doubted + ASKED_ANEW
        highest = max((ids.max() for ids in (self._own, self._others) if ids), default=0)
        self._own.remove_range(first, end)
        self._others.remove_range(first, end)
        self._doubted = end if end <= highest else 0


def _text(value: str | bytes | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""
