"""Batches of consumers that died go back to pending/.

A consumer lives while it holds the lock in its folder; the kernel drops the lock when it dies,
however it dies. When a lock has been free for `requeue_seconds` the daemon takes it, so that the
consumer cannot start meanwhile, and moves what lies in the folder. Batches directly in inflight/
are owned by nobody: only people move them.
"""

from __future__ import annotations

import logging

from spoold import fs
from spoold.config import Settings
from spoold.errors import SpoolWriteError
from spoold.layout import MAX_ATTEMPTS_FOLDER, BatchName, Place, RunDir, State, is_name
from spoold.policy import Abandoned
from spoold.spool.inventory import Inventory
from spoold.spool.moves import Found, reject, requeue

__all__ = ["Requeue"]

log = logging.getLogger("spoold.daemon")


class Requeue:
    """Tends the folders of consumers that hold batches.

    `gone`: who of them is dead, and how many batches each holds. `is_watching`: whether anybody
    holds any: who dies with them is only seen by looking.
    """

    def __init__(self, run: RunDir, settings: Settings) -> None:
        self.run = run
        self.max_attempts = settings.max_attempts
        self.abandoned = Abandoned(seconds=settings.requeue_seconds)
        self.failed: SpoolWriteError | None = None
        self.gone: dict[str, int] = {}
        self.is_watching = False

    def reload(self, settings: Settings) -> None:
        """Go on with other settings; who was seen free stays seen."""
        self.max_attempts = settings.max_attempts
        self.abandoned.seconds = settings.requeue_seconds

    def tend(self, inventory: Inventory, now: float) -> int:
        """Move what consumers hold that have been dead long enough. Returns how many moved.

        A folder that cannot be tended stops nobody else: `failed` says why, until it can.
        """
        self.failed = None
        held = {
            shelf.place.folder: names
            for shelf in inventory.shelves.of(State.INFLIGHT)
            if is_name(shelf.place.folder)
            if (names := [name for name in map(BatchName.parse, shelf.names) if name])
        }
        self.is_watching = bool(held)
        free = [name for name in held if self._is_free(name)]
        due = self.abandoned.seen(free, now)
        self.gone = {name: len(held[name]) for name in free if name not in due}
        return sum(self._move(name, held[name]) for name in due)

    def _is_free(self, consumer: str) -> bool:
        try:
            return not fs.lock_is_held(self.run.consumer_lock(consumer))
        except SpoolWriteError as error:
            self.failed = error
            return False

    def _move(self, consumer: str, names: list[BatchName]) -> int:
        lock = fs.Lock(self.run.consumer_lock(consumer))
        moved = 0
        try:
            if lock.acquire():
                for name in sorted(names, key=lambda name: name.seq):
                    moved += self._move_one(Found(Place(State.INFLIGHT, consumer), name))
        except FileNotFoundError:
            pass  # RACE: the folder was removed
        except SpoolWriteError as error:
            if error.state_unknown:
                raise
            self.failed = error
        finally:
            lock.release()
        return moved

    def _move_one(self, found: Found) -> bool:
        fields = {"batch": found.name.id, "consumer": found.place.folder}
        if self.max_attempts and found.name.attempt >= self.max_attempts:
            if reject(self.run, found, MAX_ATTEMPTS_FOLDER) is None:
                return False
            log.warning("rejected", extra={"fields": fields | {"reason": "attempts"}})
            return True
        moved = requeue(self.run, found)
        if moved is None:
            return False
        log.warning("requeued", extra={"fields": fields | {"try": moved.name.attempt}})
        return True
