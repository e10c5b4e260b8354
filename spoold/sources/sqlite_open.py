"""A read-only connection to a SQLite file that leaves nothing behind for its writer.

A database in WAL mode cannot be read without `-wal` and `-shm` beside it, and SQLite makes them
where they are missing, even for a reader. Made by another uid they lock the writer out. So:

    we own the file, and may write its folder     mode=ro; the writer can use what SQLite makes
    else, -wal and -shm are there                 mode=ro, and they are kept from going away
    else, -wal without -shm                       unavailable: reading would make a -shm
    else, neither                                 immutable=1, and every transaction is believed
                                                  only if nothing has changed when it ends

Transactions are short and explicit; the connection closes itself when one fails.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import stat
import struct
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple
from urllib.parse import quote

from spoold.errors import SourceSchemaError, SourceUnavailable
from spoold.model import Mark

__all__ = ["Database", "FileId", "Held", "Stamp", "connect", "file_id", "real_path"]

FileId = tuple[int, int]
Facts = tuple[int, int, int, int]


class Held:
    """A file that is told from every other one: no new file gets its inode while this holds it.

    Opened with O_PATH: that takes no permission to read it, and closing it drops no lock that this
    process has on it.
    """

    def __init__(self, path: str) -> None:
        """Hold what lies at a path, until this is dropped. Raises OSError."""
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        facts = os.fstat(fd)
        self.id: FileId = facts.st_dev, facts.st_ino

    def is_at(self, path: str) -> bool:
        """Whether it lies at this path. Raises SourceUnavailable."""
        return file_id(path) == self.id


class Stamp(NamedTuple):
    """The state of a database: what the -shm says of it, and the stat of file and -wal.

    Without a -shm, the data_version instead.
    """

    content: bytes | int
    file: Facts | None
    wal: Facts | None


_BUSY_SECONDS: Final = 0.25
# Where SQLite's readers hold their shared lock (os_unix.c: PENDING_BYTE + 2, SHARED_SIZE).
_SHARED_FIRST: Final = 0x40000000 + 2
_SHARED_SIZE: Final = 510
_WAL_FORMAT: Final = b"\2\2"
# Where those who write hold theirs in the -shm, until what they wrote is visible (os_unix.c:
# UNIX_SHM_BASE; wal.c: WAL_WRITE_LOCK). As a struct flock: type, whence, start, length, process.
_WRITE_LOCK: Final = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 120, 1, 0)
_NO_LOCK: Final = struct.pack("h", fcntl.F_UNLCK)
# How the -shm begins: with what a reader compares to see whether it is up to date (wal.c:
# WalIndexHdr). Four bytes of it count the commits (iChange), from anew after each recovery.
_HEADER_BYTES: Final = 48
_COMMITS: Final = slice(8, 12)
_TRIES_AGAIN: Final = "spoold tries again by itself"

_UNAVAILABLE: Final = {
    sqlite3.SQLITE_BUSY: (
        "locked by another process",
        f"{_TRIES_AGAIN}; a writer in locking_mode = EXCLUSIVE lets nobody read",
    ),
    sqlite3.SQLITE_LOCKED: ("locked by another process", _TRIES_AGAIN),
    sqlite3.SQLITE_PROTOCOL: ("locked by another process", _TRIES_AGAIN),
    sqlite3.SQLITE_CANTOPEN: (
        "the file, its -wal or its -shm cannot be opened",
        "give this user read permission on all three, and on the folder",
    ),
    sqlite3.SQLITE_PERM: ("no permission", "give this user read permission on the file"),
    sqlite3.SQLITE_READONLY: (
        "what a writer left half done cannot be undone by a reader",
        "start the writer, or give this user write permission on -shm and -wal",
    ),
    sqlite3.SQLITE_IOERR: ("it cannot be read", "look at the kernel's log for errors of the disk"),
    sqlite3.SQLITE_CORRUPT: (
        "its pages do not fit together",
        "`PRAGMA integrity_check` tells more; it was copied while in use, or the disk fails",
    ),
}

# Pages are read once, mostly: what stays in the processor's cache is worth more than many of them.
_CACHE_KIB: Final = 512

_NO_SHARED_MEMORY: Final = frozenset(
    {
        sqlite3.SQLITE_IOERR_SHMOPEN,
        sqlite3.SQLITE_IOERR_SHMSIZE,
        sqlite3.SQLITE_IOERR_SHMLOCK,
        sqlite3.SQLITE_IOERR_SHMMAP,
    }
)


def connect(path: str, *, has_stale_wal: bool = False) -> Database:
    """Open the database at an absolute path.

    `has_stale_wal`: a -wal lies there that belongs to another file. As long as it does nothing is
    read: SQLite would take its pages for this file's. Raises SourceUnavailable, and
    SourceSchemaError for what is no file.
    """
    path = real_path(path)
    try:
        facts = os.stat(path)
    except FileNotFoundError as error:
        raise SourceUnavailable(f"no database at {path} yet", hint=_TRIES_AGAIN) from error
    except OSError as error:
        raise _os_failed(path, error) from error
    if not stat.S_ISREG(facts.st_mode):
        what = "a folder" if stat.S_ISDIR(facts.st_mode) else "no regular file"
        raise SourceSchemaError(f"{path} is {what}", hint="name the database file itself")
    if has_stale_wal:
        raise SourceUnavailable(
            f"{path} was replaced, and {path}-wal still belongs to the old file",
            hint="stop the writer, then remove the old -wal and -shm",
        )
    is_ours = facts.st_uid == os.geteuid() and os.access(os.path.dirname(path), os.W_OK)
    database = Database(path) if is_ours else _connect_as_guest(path)
    if database.id != (facts.st_dev, facts.st_ino):
        database.close()
        raise SourceUnavailable(f"{path} was replaced while it was opened", hint=_TRIES_AGAIN)
    return database


def real_path(path: str) -> str:
    """Return where the file itself lies: SQLite follows links, -wal and -shm are beside it."""
    return os.path.realpath(path)


def _connect_as_guest(path: str) -> Database:
    try:
        guard = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _os_failed(path, error) from error
    try:
        # RACE: when its last connection closes, the writer removes -wal and -shm, and SQLite would
        # make new ones for us. To remove them it needs this lock for itself alone.
        try:
            fcntl.lockf(guard, fcntl.LOCK_SH | fcntl.LOCK_NB, _SHARED_SIZE, _SHARED_FIRST)
        except OSError as error:
            text, hint = _UNAVAILABLE[sqlite3.SQLITE_BUSY]
            raise SourceUnavailable(f"cannot read {path}: {text}", hint=hint) from error
        if os.pread(guard, 2, 18) != _WAL_FORMAT:
            return Database(path)
        has_shm = _facts(path + "-shm") is not None
        if _facts(path + "-wal") is None:
            return Database(path, immutable=True)
        if not has_shm:
            raise SourceUnavailable(
                f"cannot read {path}: it has a -wal and no -shm, and one made by this user would "
                "lock its writer out",
                hint="start the writer, or run spoold as the owner of the file",
            )
        handed_over, guard = guard, -1  # it closes it, too, where it cannot be made
        return Database(path, guard=handed_over)
    finally:
        # Closing a file drops all locks that this process has on it; the connection has none yet.
        if guard >= 0:
            os.close(guard)


class Database:
    """An open connection. Not for several threads. `is_open`: whether it can still be used."""

    def __init__(self, path: str, *, immutable: bool = False, guard: int = -1) -> None:
        self.path = path
        self.immutable = immutable
        self._guard = guard
        self._shm = -1
        self.is_open = False
        self._connection: sqlite3.Connection | None = None
        self._facts = _facts(path)
        self.id: FileId | None = None
        self.wal: Held | None = None
        uri = f"file:{quote(os.fsencode(path))}?mode=ro{'&immutable=1' if immutable else ''}"
        try:
            connection = sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)
            self._connection = connection
            connection.text_factory = bytes
            connection.execute("PRAGMA query_only = 1")
            connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            # Reads the file for the first time: -wal and -shm are open after this.
            connection.execute("PRAGMA schema_version").fetchone()
            (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
            self.wal, self.id = _held(path + "-wal"), file_id(path)
        except sqlite3.Error as error:
            self.close()
            raise self._failed(error) from error
        except BaseException:
            self.close()
            raise
        self.is_open = True
        # In another mode what lies there is of one that was killed, and says nothing any more.
        if not immutable and mode == b"wal":
            with contextlib.suppress(OSError):
                self._shm = os.open(path + "-shm", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Disconnect; fine when that was done."""
        self.is_open = False
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        # After the connection: closing a file drops all locks that this process has on it.
        for fd in (self._guard, self._shm):
            if fd >= 0:
                os.close(fd)
        self._guard = self._shm = -1

    def define(self, name: str, function: Callable[[int, bytes | None, bytes], bool]) -> None:
        """Give queries a function of an environment's id, group id and env id."""
        if self._connection is not None:
            self._connection.create_function(name, 3, function)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Read from one state of the database. Closes the connection where that fails.

        What was read counts only once the block has ended without an error. A generator that is
        closed in the middle of it, because nobody wants the rest, is none.
        """
        connection = self._connection
        if connection is None:
            raise SourceUnavailable(f"{self.path} is not open", hint=_TRIES_AGAIN)
        try:
            connection.execute("BEGIN")
            yield connection
            connection.execute("COMMIT")
            if self.immutable:
                self._believe()
        except sqlite3.Error as error:
            self.close()
            raise self._failed(error) from error
        except GeneratorExit:
            try:
                connection.execute("ROLLBACK")
            except sqlite3.Error:
                self.close()  # the next call opens it anew, or says what is wrong
            raise
        except BaseException:
            self.close()
            raise

    def version(self) -> int:
        """Return what differs after each commit of somebody else, unless the file is immutable."""
        connection = self._connection
        if connection is None:
            raise SourceUnavailable(f"{self.path} is not open", hint=_TRIES_AGAIN)
        try:
            (version,) = connection.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error as error:
            self.close()
            raise self._failed(error) from error
        return int(version)

    def is_writing(self) -> bool:
        """Whether another process is in a write transaction; True where nothing tells."""
        if self._shm < 0:
            return True
        try:
            answer = fcntl.fcntl(self._shm, fcntl.F_GETLK, _WRITE_LOCK)
        except OSError:
            return True
        return answer[: len(_NO_LOCK)] != _NO_LOCK

    def commits(self) -> int | None:
        """Return how many commits there were, from wherever it counts; None where nothing tells."""
        header = _header(self._shm)
        return int.from_bytes(header[_COMMITS], sys.byteorder) if header else None

    def stamp(self) -> Stamp:
        """Return what differs after each commit, or where the files were changed without one.

        Raises SourceUnavailable, and closes the connection, where others use another -wal or -shm:
        what they commit would never be seen.
        """
        wal = _facts(self.path + "-wal")
        # One that is merely missing: whoever has it open may well go on with it.
        if wal is not None and self.wal is not None and wal[:2] != self.wal.id:
            raise self._another("-wal")
        if self._shm >= 0:
            own, shm = os.fstat(self._shm), _facts(self.path + "-shm")
            if shm is not None and shm[:2] != (own.st_dev, own.st_ino):
                raise self._another("-shm")
        # Not the version, where it can be helped: that takes SQLite locks and a page of the -wal.
        return Stamp(_header(self._shm) or self.version(), _facts(self.path), wal)

    def marks(self, stamp: Stamp) -> tuple[Mark, ...]:
        """Return what tells whether `stamp` would give this one again."""
        if self._shm < 0 or not isinstance(stamp.content, bytes):
            return ((Database.stamp, self, stamp),)
        own, shm = os.fstat(self._shm), file_id(self.path + "-shm")
        return (
            (_header, self._shm, stamp.content),
            (_facts, self.path, stamp.file),
            (_facts, self.path + "-wal", stamp.wal),
            (file_id, self.path + "-shm", None if shm is None else (own.st_dev, own.st_ino)),
        )

    def _another(self, suffix: str) -> SourceUnavailable:
        self.close()
        return SourceUnavailable(
            f"{self.path}{suffix} was removed, and there is another one", hint=_TRIES_AGAIN
        )

    def _believe(self) -> None:
        """Raise SourceUnavailable where a file opened as immutable was not."""
        if _facts(self.path) != self._facts or _facts(self.path + "-wal") is not None:
            raise SourceUnavailable(
                f"{self.path} was written to while it was read", hint=_TRIES_AGAIN
            )

    def _failed(self, error: sqlite3.Error) -> Exception:
        extended = getattr(error, "sqlite_errorcode", 0)
        if extended in _NO_SHARED_MEMORY:
            return SourceUnavailable(
                f"cannot read {self.path}: its file system has no shared memory, which WAL needs",
                hint="move the database to a local file system; spoold tries again by itself",
            )
        code = extended & 0xFF
        if code == sqlite3.SQLITE_NOTADB and self.id is not None:
            return SourceUnavailable(
                f"{self.path} was overwritten by what is no SQLite database", hint=_TRIES_AGAIN
            )
        if code == sqlite3.SQLITE_NOTADB:
            return SourceSchemaError(
                f"{self.path} is no SQLite database", hint="name the rollout database"
            )
        if code not in _UNAVAILABLE:
            return error
        text, hint = _UNAVAILABLE[code]
        return SourceUnavailable(f"cannot read {self.path}: {text}", hint=hint)


def file_id(path: str) -> FileId | None:
    """Return (device, inode), None where there is no file. Raises SourceUnavailable."""
    facts = _facts(path)
    return None if facts is None else facts[:2]


def _header(shm: int) -> bytes:
    """Return how a -shm begins, nothing where nothing tells; -1: it is not open."""
    if shm < 0:
        return b""
    try:
        return os.pread(shm, _HEADER_BYTES, 0)
    except OSError:
        return b""


def _held(path: str) -> Held | None:
    try:
        return Held(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _os_failed(path, error) from error


def _facts(path: str) -> Facts | None:
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _os_failed(path, error) from error
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def _os_failed(path: str, error: OSError) -> SourceUnavailable:
    hint = "give this user read permission on it" if error.errno == errno.EACCES else _TRIES_AGAIN
    return SourceUnavailable(
        f"cannot read {path}: {os.strerror(error.errno or 0).lower()}", hint=hint
    )
