"""What is on the disk: bytes, listings, free space. Changes nothing.

A failed call raises SpoolWriteError; FileNotFoundError passes through.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from io import BufferedReader, FileIO
from typing import Final, NamedTuple

from spoold.errors import SpoolWriteError
from spoold.oserrors import doing

__all__ = [
    "Listing",
    "free_bytes",
    "holder_of",
    "is_left_behind",
    "is_out_of_inodes",
    "is_read_only",
    "is_there",
    "look_up",
    "mtime_ns",
    "open_file",
    "read",
    "read_each",
    "scan",
]

_SMALL_BYTES: Final = 1 << 16
_BUFFER_BYTES: Final = 1 << 18


def read(path: str) -> bytes:
    """Return the bytes of a regular file; a link, pipe or directory is an error, never followed.

    FileNotFoundError passes; all else is a SpoolWriteError that names the remedy.
    """
    with doing("read", path):
        fd, facts = _open(path)
        try:
            data = os.read(fd, facts.st_size + 1)
            while len(data) < facts.st_size:
                more = os.read(fd, facts.st_size - len(data) + 1)
                if not more:
                    break
                data += more
            return data
        finally:
            os.close(fd)


def open_file(path: str) -> BufferedReader:
    """Return a regular file, open for reading at its beginning. Fails as `read` does."""
    with doing("read", path):
        return BufferedReader(FileIO(_open(path)[0]), _BUFFER_BYTES)


def _open(path: str) -> tuple[int, os.stat_result]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd, facts


def read_each(folder: str, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the bytes of small files in one folder. Fails as `read` does."""
    with doing("read", folder):
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            with doing("read", f"{folder}/{name}"):
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                fd = os.open(name, flags, dir_fd=folder_fd)
                try:
                    data = os.read(fd, _SMALL_BYTES)
                    while len(data) % _SMALL_BYTES == 0 and (more := os.read(fd, _SMALL_BYTES)):
                        data += more
                finally:
                    os.close(fd)
            yield name, data
    finally:
        os.close(folder_fd)


class Listing(NamedTuple):
    """The names in a directory: regular files, directories, and all else (links, pipes, …)."""

    files: list[str]
    folders: list[str]
    others: list[str]


def scan(path: str) -> Listing:
    """List a directory. FileNotFoundError when it is not there; unreadable is never empty."""
    listing = Listing([], [], [])
    with doing("list", path), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                listing.files.append(entry.name)
            elif entry.is_dir(follow_symlinks=False):
                listing.folders.append(entry.name)
            else:
                listing.others.append(entry.name)
    return listing


def look_up(path: str, names: Iterable[str]) -> Listing:
    """Tell apart some names in a directory, as `scan` would; those that are not there are left out.

    Fails as `scan` does, but for FileNotFoundError.
    """
    listing = Listing([], [], [])
    for name in names:
        try:
            with doing("look at", f"{path}/{name}"):
                mode = os.lstat(f"{path}/{name}").st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISREG(mode):
            listing.files.append(name)
        elif stat.S_ISDIR(mode):
            listing.folders.append(name)
        else:
            listing.others.append(name)
    return listing


def is_there(path: str) -> bool:
    """Whether something lies at a path, as far as that can be told. Never raises."""
    return os.access(path, os.F_OK)


def mtime_ns(path: str) -> int:
    """Return when a file or folder was changed, in nanoseconds; -1 where that cannot be told."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return -1


def free_bytes(path: str) -> int:
    """Return how many bytes an unprivileged process may still write beside `path`."""
    with doing("stat", path):
        facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize


def is_out_of_inodes(path: str) -> bool:
    """Whether no file can be made beside `path`, however many bytes are free (`df -i`)."""
    with doing("stat", path):
        facts = os.statvfs(path)
    return facts.f_files > 0 and facts.f_favail == 0


def is_read_only(path: str) -> bool:
    """Whether the file system that `path` lies on is mounted read-only, or the kernel made it so.

    After an error on the disk ext4 refuses every write, and newer kernels (seen with Linux 6.18)
    say so in the options of the mount alone.
    """
    with doing("stat", path):
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return True
        device = os.stat(path).st_dev
    number = b" %d:%d " % (os.major(device), os.minor(device))
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", "rb") as mounts:
        return any(b"emergency_ro" in line and number in line for line in mounts)
    return False


def holder_of(path: str) -> str:
    """Return who last wrote a lock file, in words ("" where nothing is known)."""
    pid, host = _holder(path)
    return f"pid {pid} on {host}" if host else ""


def is_left_behind(path: str) -> bool:
    """Whether who last wrote a lock file ran on this host and runs no more.

    If the lock is held nevertheless, a process holds it that inherited it from that one.
    """
    pid, host = _holder(path)
    if host != os.uname().nodename:
        return False
    try:
        os.kill(pid, 0)  # asks only; /proc may hide the processes of others
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return False


def _holder(path: str) -> tuple[int, str]:
    try:
        facts = json.loads(read(path))
        return int(facts["pid"]), str(facts["host"])
    except (SpoolWriteError, OSError, ValueError, KeyError, TypeError):
        return 0, ""
