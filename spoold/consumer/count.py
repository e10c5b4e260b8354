"""How many samples and groups a consumer has in hand."""

from __future__ import annotations

from spoold.consumer.batch import Batch
from spoold.errors import BatchLost

__all__ = ["Count"]


class Count:
    """Each batch is read once, and only where groups are counted."""

    def __init__(self) -> None:
        self._groups: dict[str, frozenset[str]] = {}

    def add(self, batch: Batch, *, read: bool) -> None:
        """Count a batch, if it was not counted before."""
        if read and batch.id not in self._groups:
            try:
                rows = batch.samples()
            except BatchLost:
                return  # RACE: somebody moved it away by hand; it is not held any more
            self._groups[batch.id] = frozenset(row["instance_id"] for row in rows)

    def groups(self, held: tuple[Batch, ...]) -> int:
        """Return how many different groups there are; 0 where none were counted."""
        return len(frozenset().union(*(self._groups.get(batch.id, ()) for batch in held)))

    @staticmethod
    def samples(held: tuple[Batch, ...]) -> int:
        """Return how many samples there are."""
        return sum(map(len, held))
