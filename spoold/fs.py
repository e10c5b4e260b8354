"""The only module that creates, renames, removes and syncs.

Each function states what is durable when it returns. A failed call raises SpoolWriteError, which
names operation, path and cause; FileNotFoundError and FileExistsError pass through, because to the
caller they mean that somebody else was faster. A failed fsync is never retried on the same file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from spoold.errors import ConfigError, SpoolWriteError
from spoold.layout import DIRECTORY_MODE, FILE_MODE, LOCK_MODE
from spoold.oserrors import PASSING, doing, failed
from spoold.reading import (
    Listing,
    free_bytes,
    holder_of,
    is_left_behind,
    is_out_of_inodes,
    is_read_only,
    is_there,
    look_up,
    mtime_ns,
    open_file,
    read,
    read_each,
    scan,
)

if TYPE_CHECKING:
    from filelock import FileLock

__all__ = [
    "PASSING",
    "Listing",
    "Lock",
    "failed",
    "free_bytes",
    "holder_of",
    "is_left_behind",
    "is_out_of_inodes",
    "is_read_only",
    "is_there",
    "lock_is_held",
    "look_up",
    "make_dirs",
    "move",
    "mtime_ns",
    "open_file",
    "probe_renames",
    "put",
    "put_many",
    "read",
    "read_each",
    "remove",
    "remove_dir",
    "rename_noreplace",
    "rename_over",
    "scan",
    "sync_dir",
    "write_new",
    "write_tmp",
]

_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1
# A directory between mkdir and chmod: sticky, which no directory of a spool is, and closed to
# others. Whoever dies there leaves it like this, and the next make_dirs knows that it is not done.
_HALF_MADE: Final = 0o1770
_HALF_MADE_MASK: Final = 0o5707  # the umask may take bits of the group, the parent may set setgid
_Renameat2 = Callable[[int, bytes, int, bytes, int], int]


def _find_renameat2() -> _Renameat2 | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    function.argtypes = (
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_uint,
    )
    found: _Renameat2 = function
    return found


# None where the C library has no such call: then link + unlink does it. Tests on a fake file system
# set it to None, because a call by ctypes would reach the real one.
renameat2: _Renameat2 | None = _find_renameat2()


def sync_dir(path: str) -> None:
    """Make the names in a directory durable.

    An error has `state_unknown`: a name was changed before, and nobody can say what of it outlives
    a power cut. Trying again proves nothing: the kernel may have dropped what it could not write.
    """
    try:
        with doing("sync", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    except SpoolWriteError as error:
        error.state_unknown = True
        raise


def make_dirs(path: str) -> bool:
    """Make a directory and its missing parents, each with mode 2770, durably.

    Returns whether anything was made. Every parent is synced up to the first that existed, so that
    a new run directory outlives a power cut as a whole. A directory that is there is left as it
    is, unless whoever made it died before it had its mode.
    """
    missing = []
    at = path
    while not _is_made(at):
        missing.append(at)
        parent = os.path.dirname(at) or "."
        if parent == at:
            break
        at = parent
    for folder in reversed(missing):
        with doing("make", folder):
            try:
                os.mkdir(folder, _HALF_MADE)
            except FileExistsError:
                if not os.path.isdir(folder):
                    raise NotADirectoryError(errno.ENOTDIR, "not a directory", folder) from None
                if _is_made(folder):
                    continue  # RACE: another process was faster
            except PermissionError as error:
                parent = os.path.dirname(folder) or "."
                raise SpoolWriteError(
                    f"cannot make {folder}: {os.strerror(error.errno or 0).lower()}",
                    hint=f"give this user permission to write in {parent}",
                    errno=error.errno,
                ) from error
            os.chmod(folder, DIRECTORY_MODE)
            sync_dir(os.path.dirname(folder) or ".")
    return bool(missing)


def _is_made(path: str) -> bool:
    try:
        facts = os.stat(path)
    except OSError:
        return False
    is_half = facts.st_mode & _HALF_MADE_MASK == _HALF_MADE & _HALF_MADE_MASK
    return stat.S_ISDIR(facts.st_mode) and not (is_half and facts.st_uid == os.geteuid())


def write_new(path: str, data: bytes | Sequence[bytes | memoryview]) -> None:
    """Create a file that must not exist, with mode 0640, and sync its bytes.

    `data` may be pieces, so that nobody has to join them. The name is not durable yet. When
    anything fails the file is removed: it is never half there.
    """
    with doing("write", path):
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE)
        try:
            try:
                os.fchmod(fd, FILE_MODE)
                for piece in (data,) if isinstance(data, bytes) else data:
                    _write_all(fd, piece)
                os.fsync(fd)
            finally:
                os.close(fd)
        except BaseException:
            # A failed fsync may have dropped the dirty pages: this file is never written to again.
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise


def write_tmp(path: str, data: bytes | Sequence[bytes | memoryview]) -> None:
    """Write a file of tmp/, as write_new does; what lies there under its name is a leftover.

    A leftover (of a write that failed, and whose file could not be removed then) is never written
    to again: it is removed, and the file made anew.
    """
    try:
        try:
            write_new(path, data)
        except FileExistsError:
            remove(path)
            write_new(path, data)
    except (FileNotFoundError, FileExistsError) as error:
        raise failed("write", path, error) from error


def _write_all(fd: int, data: bytes | memoryview) -> None:
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])


def rename_noreplace(old: str, new: str) -> None:
    """Rename on one file system, atomically, never over another file. Syncs nothing.

    FileNotFoundError: `old` (or the folder of `new`) is not there. FileExistsError: `new` is there.
    """
    with doing("rename", f"{old} to {new}"):
        if renameat2 is not None:
            if not renameat2(
                _AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), _RENAME_NOREPLACE
            ):
                return
            code = ctypes.get_errno()
            if code not in (errno.ENOSYS, errno.EINVAL):
                raise OSError(code, os.strerror(code), old, None, new)
        # RACE: between link and unlink both names are there; whoever lists sees one batch id twice
        # and leaves the file that is further on.
        os.link(old, new, follow_symlinks=False)
        try:
            os.unlink(old)
        except FileNotFoundError:
            pass
        except OSError:
            # Nothing was moved, then; a caller that hears of an error believes that.
            os.unlink(new)
            raise


def move(old: str, new: str) -> None:
    """Rename without replacing; durable when it returns: destination synced, then source."""
    rename_noreplace(old, new)
    target, source = os.path.dirname(new), os.path.dirname(old)
    # RACE: a folder that is gone was empty: the file was moved on from it by somebody who has
    # synced that, and with the folder that the file came from its name there is gone.
    with contextlib.suppress(FileNotFoundError):
        sync_dir(target)
    if source != target:
        with contextlib.suppress(FileNotFoundError):
            sync_dir(source)


def put(
    path: str, data: bytes, *, tmp_dir: str, durable: bool = True, mode: int = FILE_MODE
) -> None:
    """Write a file under its name, over an older one: the old bytes or the new, never a mixture.

    durable=False is for text that may be lost in a power cut (status, metrics): it has `mode`,
    nothing is synced, and where the disk is full the old file is written over in its place, with
    newlines up to its old length.
    """
    tmp = f"{tmp_dir}/{os.path.basename(path)}.{os.getpid()}"
    if durable:
        write_tmp(tmp, data)
        _put_in_place(tmp, path)
        sync_dir(os.path.dirname(path))
        return
    try:
        _write_unsynced(tmp, data, mode)
        _put_in_place(tmp, path)
    except SpoolWriteError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _write_over(path, data):
            raise


def _write_unsynced(path: str, data: bytes, mode: int) -> None:
    with doing("write", path):
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            os.fchmod(fd, mode)
            _write_all(fd, data)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(fd)


def _write_over(path: str, data: bytes) -> bool:
    """Write over the bytes of a file, in the blocks that it has. Returns whether that was done."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            whole = data.ljust(os.fstat(fd).st_size, b"\n")
            return os.pwrite(fd, whole, 0) == len(whole)
        finally:
            os.close(fd)
    return False


def _put_in_place(tmp: str, path: str) -> None:
    """Rename a written file over whatever lies at `path`; when that fails it is removed."""
    try:
        with doing("rename", path):
            os.rename(tmp, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(tmp)
        if isinstance(error, FileNotFoundError | FileExistsError):
            raise failed("rename", path, error) from error
        raise


def put_many(files: Iterable[tuple[str, bytes]], *, folder: str, tmp_dir: str) -> None:
    """Write files, by name, into one folder: each synced and renamed, then the folder synced."""
    for name, data in files:
        tmp = f"{tmp_dir}/{name}"
        write_tmp(tmp, data)
        _put_in_place(tmp, f"{folder}/{name}")
    sync_dir(folder)


def remove(path: str) -> None:
    """Unlink a file; fine when it is gone already. Syncs nothing."""
    with doing("remove", path), contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_dir(path: str) -> bool:
    """Remove a directory if nothing is in it. Returns whether it is gone. Syncs nothing."""
    with doing("remove", path), contextlib.suppress(FileNotFoundError):
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            return False
    return True


def rename_over(old: str, new: str) -> None:
    """Rename over whatever file lies at `new`; destination and source directory are synced."""
    with doing("rename", f"{old} to {new}"):
        os.rename(old, new)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(old), os.lstat(new)):
                os.unlink(old)  # two names of one file: rename did nothing, as POSIX wants it
    sync_dir(os.path.dirname(new))
    sync_dir(os.path.dirname(old))


def probe_renames(folders: Iterable[str], tmp_dir: str) -> None:
    """Rename an empty file through all folders and back.

    Raises ConfigError where a folder is on another mount, not writable, or keeps files from being
    moved (a sticky bit). Finding that out at start beats finding it out at the first batch.
    """
    name = f"probe-{os.getpid()}"
    at = f"{tmp_dir}/{name}"
    try:
        write_tmp(at, b"")
        for folder in folders:
            with doing("stat", folder):
                facts = os.stat(folder)
            if facts.st_mode & stat.S_ISVTX:
                raise ConfigError(
                    f"{folder} has the sticky bit: trainers under another uid cannot move files",
                    hint=f"chmod -t {folder}",
                )
            # A dot name: nobody who lists the folder takes it for a batch.
            rename_noreplace(at, f"{folder}/.{name}")
            at = f"{folder}/.{name}"
        rename_noreplace(at, f"{tmp_dir}/{name}")
        at = f"{tmp_dir}/{name}"
    except SpoolWriteError as error:
        if error.errno in PASSING:
            raise
        raise ConfigError(error.message, hint=error.hint) from error
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename} went away while it was probed") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(at)


class Lock:
    """An exclusive lock on a file that the kernel drops when this process dies, however it dies.

    The file is never removed. It holds a line about its holder for people; only the lock counts.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        self._lock: FileLock | None = None

    @classmethod
    def inherited(cls, path: str, fd: int) -> Lock:
        """Return a lock that the process that made this one holds, and keeps held through `fd`."""
        lock = cls(path)
        lock._fd = fd
        return lock

    def fileno(self) -> int:
        """Return the descriptor that holds the lock: whoever inherits it holds it, too."""
        return self._fd

    def acquire(self) -> bool:
        """Try once. False where another process holds it.

        Raises FileNotFoundError where its folder is not there, ConfigError where the file system
        cannot lock, SpoolWriteError where the file cannot be opened.
        """
        from filelock import FileLock, Timeout

        while True:
            lock = FileLock(
                self.path,
                mode=LOCK_MODE,
                thread_local=False,
                blocking=False,
                fallback_to_soft=False,
                preserve_lock_file=True,
                on_acquired=self._acquired,
            )
            try:
                # filelock would make a folder that is not there, with modes of its own.
                os.stat(os.path.dirname(self.path))
                lock.acquire()
            except Timeout:
                return False
            except FileNotFoundError:
                raise
            except OSError as error:
                if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                    raise ConfigError(
                        f"cannot lock {self.path}: its file system has no locks",
                        hint="put the run directory on a local file system (ext4, xfs)",
                    ) from error
                raise failed("lock", self.path, error) from error
            if self._is_file_on_disk():
                self._lock = lock
                return True
            # RACE: the file was removed or replaced between open and lock; lock the one that is
            # there now.
            lock.release()

    def _acquired(self, fd: int) -> None:
        self._fd = fd
        holder = {"pid": os.getpid(), "host": os.uname().nodename, "since": round(time.time(), 3)}
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(holder).encode() + b"\n", 0)

    def _is_file_on_disk(self) -> bool:
        try:
            held, there = os.fstat(self._fd), os.stat(self.path)
        except OSError:
            return False
        return (held.st_dev, held.st_ino) == (there.st_dev, there.st_ino)

    def still_held(self) -> bool:
        """Whether the lock file on disk is still the one that this object locked."""
        return self._fd >= 0 and self._is_file_on_disk()

    def release(self) -> None:
        """Let go; fine when nothing is held."""
        lock, self._lock, self._fd = self._lock, None, -1
        if lock is not None:
            lock.release()


def lock_is_held(path: str) -> bool | None:
    """Whether some process holds the lock file at `path`; None where there is no such file.

    Held for less than a millisecond, and shared, so that two who probe don't see each other.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise failed("open", path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        raise failed("probe", path, error) from error
    finally:
        os.close(fd)
    return False
