"""Publish: make a batch visible in pending/, whole and durable, under a number never used before.

The order of system calls: O_EXCL create in .spoold/tmp/, write, fsync, rename without replacing
into pending/, fsync pending/. Numbers are reserved 64 at a time in the name of .spoold/seq-…, which
is renamed and synced before the first of them is used, and given back at a clean stop.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Final

from spoold import fs
from spoold.errors import SpoolWriteError
from spoold.layout import BatchName, Place, RunDir, State, batch_id_of, parse_seq, seq_name
from spoold.spool.setup import lock_lost

__all__ = ["RESERVE", "Numbers", "publish"]

log = logging.getLogger("spoold.spool")

RESERVE: Final = 64


class Numbers:
    """The sequence of batch numbers, as the name of .spoold/seq-… keeps it."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.used = 0
        self.reserved = 0

    def load(self, highest_seen: int) -> None:
        """Read the highest reserved number; at least `highest_seen`, the greatest on any file.

        Where the file was lost, the numbers go on after the greatest that any name still bears.
        """
        found = {name: parse_seq(name) for name in fs.scan(self.run.house).files}
        reserved = {name: seq for name, seq in found.items() if seq is not None}
        highest = max(reserved.values(), default=-1)
        if highest < highest_seen or not reserved:
            highest_seen = max(highest_seen, self._highest_retired())
            if highest_seen:
                log.warning("seq file lost, going on", extra={"fields": {"after": highest_seen}})
        self.used = self.reserved = max(highest, highest_seen)
        keep = seq_name(self.reserved)
        if keep not in reserved:
            self._make(keep)
        for name in reserved.keys() - {keep}:
            fs.remove(f"{self.run.house}/{name}")

    def next(self) -> int:
        """Return a number that was never used; reserves more when there is none left."""
        if self.used >= self.reserved:
            self._rename(self.reserved + RESERVE)
        self.used += 1
        return self.used

    def put_back(self, seq: int) -> None:
        """Take a number back whose batch did not become visible."""
        if seq == self.used:
            self.used -= 1

    def give_back(self) -> None:
        """Give the reserved numbers that were not used back."""
        if self.reserved > self.used:
            self._rename(self.used)

    def _rename(self, reserved: int) -> None:
        house = self.run.house
        old = f"{house}/{seq_name(self.reserved)}"
        try:
            fs.rename_over(old, f"{house}/{seq_name(reserved)}")
        except FileNotFoundError:
            # Removed by hand under us: what we know still holds.
            log.warning("seq file lost, going on", extra={"fields": {"after": self.used}})
            self._make(seq_name(reserved))
        self.reserved = reserved

    def _make(self, name: str) -> None:
        path = f"{self.run.house}/{name}"
        try:
            fs.write_new(path, b"")
        except FileExistsError as error:  # a directory, or a link
            raise fs.failed("write", path, error) from error
        fs.sync_dir(self.run.house)

    def _highest_retired(self) -> int:
        highest = 0
        for _, _, names in os.walk(self.run.retired):
            ids = filter(None, map(batch_id_of, names))
            highest = max([highest, *(int(i.partition("-")[0]) for i in ids)])
        return highest


def publish(
    run: RunDir, lock: fs.Lock, name: BatchName, data: bytes | Sequence[bytes | memoryview]
) -> None:
    """Make a batch visible in pending/, whole and durable.

    Raises SpoolLocked when the lock file is not the one that this daemon holds any more (nothing
    is published then), and SpoolWriteError; with `state_unknown` when the sync of pending/ failed
    after the rename.
    """
    if not lock.still_held():
        raise lock_lost(lock.path)
    tmp = f"{run.tmp}/{name.file_name}"
    fs.write_tmp(tmp, data)
    try:
        fs.rename_noreplace(tmp, run.file(Place(State.PENDING), name.file_name))
    except (FileExistsError, FileNotFoundError, SpoolWriteError) as error:
        with contextlib.suppress(SpoolWriteError):
            fs.remove(tmp)
        if isinstance(error, SpoolWriteError):
            raise
        raise fs.failed("publish", name.file_name, error) from error
    fs.sync_dir(run.pending)
