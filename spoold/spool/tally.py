"""How many batches moved, by word, as one pass over the folders after the other sees it. Pure.

A batch that moved twice between two passes counts for where it came to lie. What moved while no
daemon ran is not counted.
"""

from __future__ import annotations

from collections import Counter

from spoold.layout import STALE, BatchName, Place, State

__all__ = ["Tally"]


class Tally:
    """Counts of moves since this daemon started.

    `batches` and `samples` by word: claimed, acked, stale, released, requeued, rewound. `rejected`:
    batches by reason. `stale_in_a_row`: passed over as stale with no other ack between them.
    """

    def __init__(self) -> None:
        self.batches: Counter[str] = Counter()
        self.samples: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.stale_in_a_row = 0

    def moved(self, was: Place, place: Place, old_name: str, new_name: str) -> None:
        """Count a batch, if it lies elsewhere than it lay before."""
        if was == place or (was.state is place.state is State.ACKED):
            return
        name, before = BatchName.parse(new_name), BatchName.parse(old_name)
        if name is None or before is None:
            return
        if place.state is State.REJECTED:
            self.rejected[place.folder] += 1
            return
        word = _word(was, place, name.attempt > before.attempt)
        self.batches[word] += 1
        self.samples[word] += name.samples
        if word == "stale":
            self.stale_in_a_row += 1
        elif word in ("acked", "rewound"):
            self.stale_in_a_row = 0


def _word(was: Place, place: Place, is_next_try: bool) -> str:
    if place.state is State.ACKED:
        return "stale" if place.folder == STALE else "acked"
    if place.state is State.INFLIGHT:
        return "claimed"
    if was.state is State.ACKED:
        return "rewound"
    return "requeued" if is_next_try else "released"
