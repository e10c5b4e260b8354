"""What a failed system call on the run directory means, and what to do about it."""

from __future__ import annotations

import errno
import os
from typing import Final

from spoold.errors import SpoolWriteError

__all__ = ["PASSING", "doing", "failed"]

# Errors that go away by themselves or by somebody who is called: no reason to refuse a start for
# good.
PASSING: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
)
_HINTS: Final = {
    errno.ENOSPC: "free some space, or inodes (`df -i`)",
    errno.EDQUOT: "free some space or raise the quota",
    errno.EROFS: "mount it read-write",
    errno.EACCES: "give this user permission on it",
    errno.EPERM: "give this user permission on it",
    errno.EXDEV: "all of a run directory must lie on one mount; spoold never copies",
    errno.EMFILE: "raise the limit of open files (LimitNOFILE=)",
    errno.ENFILE: "raise the limit of open files (fs.file-max)",
    errno.EIO: "look at the kernel's log: the disk reports an error",
    errno.ENOENT: "restart spoold: it makes folders that are missing",
}


def failed(act: str, path: str, error: OSError, *, state_unknown: bool = False) -> SpoolWriteError:
    """Return the SpoolWriteError that says what failed, where, and what to do next."""
    hint = _HINTS.get(error.errno or 0, "")
    return SpoolWriteError(
        f"cannot {act} {path}: {os.strerror(error.errno or 0).lower()}",
        hint=hint,
        errno=error.errno,
        state_unknown=state_unknown,
    )


class doing:  # noqa: N801  # reads as a verb: with _doing("sync", path)
    """Say what was being done, and where, when a system call fails. A class, because it is hot."""

    __slots__ = ("act", "path")

    def __init__(self, act: str, path: str) -> None:
        self.act = act
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(
            error, FileNotFoundError | FileExistsError
        ):
            raise failed(self.act, self.path, error) from error
