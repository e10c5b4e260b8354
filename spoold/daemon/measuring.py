"""The numbers that the metrics file tells, taken from what the daemon knows."""

from __future__ import annotations

from collections import Counter

from spoold import fs
from spoold.daemon.delivery import Delivery
from spoold.daemon.looking import Looking
from spoold.errors import SpoolWriteError
from spoold.layout import BatchName, Place, RunDir, State, batch_id_of
from spoold.metrics import Facts
from spoold.spool import overview
from spoold.spool.inventory import Inventory
from spoold.spool.statusfile import Status

__all__ = ["measure"]


def measure(status: Status, looking: Looking, delivery: Delivery) -> Facts:
    """Return all numbers as they are now. Opens nothing but the consumers' locks."""
    run, inventory, counts = delivery.run, delivery.inventory, delivery.counts
    return Facts(
        run_dir=run.root,
        report=status,
        batches=_batches(inventory),
        oldest=_oldest(run, inventory),
        pending_bytes=inventory.pending_bytes,
        tally=inventory.tally,
        notes=Counter(note.reason for note in inventory.shelves.notes()),
        notes_written=counts.notes,
        consumers=_consumers(run, inventory),
        looks=looking.durations,
        publishes=counts.durations,
        last_look=looking.last_look,
        weights=counts.latest_weights,
        free_bytes=_free_bytes(run),
    )


def _free_bytes(run: RunDir) -> int | None:
    try:
        return fs.free_bytes(run.root)
    except SpoolWriteError:
        return None


def _batches(inventory: Inventory) -> dict[State, int]:
    counted: Counter[State] = Counter()
    for place, shelf in inventory.shelves.by_place.items():
        # A folder that only batches lie in has no other names; the rest is looked at.
        counted[place.state] += sum(1 for name in shelf.names if name.endswith(".jsonl"))
    return dict(counted)


def _oldest(run: RunDir, inventory: Inventory) -> dict[State, float]:
    """Return since when the batch with the lowest number lies in pending/, and in inflight/."""
    oldest: dict[State, float] = {}
    for place, shelf in inventory.shelves.by_place.items():
        if place.state in (State.PENDING, State.INFLIGHT):
            first = min((name for name in shelf.names if batch_id_of(name)), default=None)
            at = overview.since(run, place, first) if first is not None else None
            if at is not None:
                oldest[place.state] = min(at, oldest.get(place.state, at))
    return oldest


def _consumers(run: RunDir, inventory: Inventory) -> dict[str, tuple[bool, int]]:
    consumers = {}
    shelves = inventory.shelves.by_place
    for name in shelves[Place(State.INFLIGHT)].folders:
        shelf = shelves.get(Place(State.INFLIGHT, name))
        held = sum(1 for each in shelf.names if BatchName.parse(each)) if shelf is not None else 0
        try:
            alive = fs.lock_is_held(run.consumer_lock(name)) is True
        except SpoolWriteError:
            continue
        consumers[name] = alive, held
    return consumers
