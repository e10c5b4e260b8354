"""With `keep_steps` set, batches that no checkpoint needs any more are removed.

These are the ones that `spoold prune` with `--before-step` removes: acked more than `keep_steps`
below the highest step in acked/, acked without a step, or passed over as stale.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import Final

from spoold.layout import RunDir, State, batch_id_of
from spoold.spool import prune
from spoold.spool.inventory import Inventory
from spoold.spool.moves import Found
from spoold.spool.shelves import Shelf

__all__ = ["Retention"]

log = logging.getLogger("spoold.daemon")

# So that a first pass over a large acked/ does not keep anybody waiting.
MOST_AT_ONCE: Final = 1000


class Retention:
    """Prunes what lies in acked/. `keep_steps` is None: keeps all."""

    def __init__(self, run: RunDir, *, keep_steps: int | None) -> None:
        self.run = run
        self.keep_steps = keep_steps

    def tend(self, inventory: Inventory) -> int:
        """Remove what may go, a thousand files a pass at most. Returns how many went."""
        if self.keep_steps is None or inventory.unreadable:
            return 0
        shelves = [shelf for shelf in inventory.shelves.of(State.ACKED) if shelf.names]
        steps = [s.place.step for s in shelves if s.place.step is not None and _has_batch(s)]
        before_step = max(steps, default=0) - self.keep_steps
        places = [s.place for s in shelves if prune.is_prunable(s.place, before_step)]
        number = size_bytes = 0
        for place in sorted(places, key=lambda place: place.path):
            for name in list(islice(inventory.settled_in(place), MOST_AT_ONCE - number)):
                found = Found(place, name)
                size = prune.remove(self.run, found)
                if size is not None:
                    gone = {"batch": name.id, "from": place.path}
                    log.info("batch pruned", extra={"fields": gone})
                    inventory.pruned(found)
                    number += 1
                    size_bytes += size
        if number:
            prune.remove_empty_steps(self.run, before_step)
            fields = {"batches": number, "bytes": size_bytes, "before_step": max(before_step, 0)}
            log.info("pruned", extra={"fields": fields})
        return number


def _has_batch(shelf: Shelf) -> bool:
    return any(batch_id_of(name) is not None for name in shelf.names)
