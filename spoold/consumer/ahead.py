"""A batch that was read before it was claimed: its bytes need not be read again to check them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from spoold import fs
from spoold.consumer.batch import fits
from spoold.layout import BatchName

__all__ = ["Ahead", "Room"]

Room: TypeAlias = Callable[[int], bytearray]
"""Gives a place for so many bytes, or more."""


class _Known(NamedTuple):
    """A file, wherever it is moved: written to, or replaced by another, it is not the same."""

    digest: str
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int


class Ahead:
    """The last file that was read ahead, if its bytes fit its name. Holds no bytes."""

    def __init__(self) -> None:
        self._known: _Known | None = None

    def read(self, path: str, name: BatchName, room: Room) -> memoryview | None:
        """Return the bytes of a batch; None where it is gone, or where they don't fit its name.

        Raises SpoolWriteError where it cannot be read.
        """
        self._known = None
        try:
            with fs.open_file(path) as file:
                known = _known(os.fstat(file.fileno()), name)  # before its bytes
                data = memoryview(room(known.size_bytes))[: known.size_bytes]
                read = 0
                while more := file.readinto(data[read:]):
                    read += more
        except FileNotFoundError:
            return None
        except OSError as error:
            raise fs.failed("read", path, error) from error
        data = data[:read]
        if not fits(data, name):
            return None
        self._known = known
        return data

    def fits(self, path: str, name: BatchName) -> bool:
        """Whether the bytes at `path` fit the name. Reads them, unless that was done ahead.

        FileNotFoundError passes; SpoolWriteError where it cannot be read.
        """
        ahead, self._known = self._known, None
        if ahead is not None and ahead.digest == name.digest:
            try:
                if _known(os.lstat(path), name) == ahead:
                    return True
            except OSError:
                pass  # reading says what is wrong
        return fits(fs.read(path), name)


def _known(facts: os.stat_result, name: BatchName) -> _Known:
    return _Known(name.digest, facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
