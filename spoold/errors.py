"""What can go wrong, with exit codes.

Every error says what happened and where; `hint` says what to do next. `exit_code` is what the
command line exits with (sysexits.h), `retryable` whether the same call may succeed later.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "EX_BAD_SPOOL",
    "EX_BUG",
    "EX_CONFIG",
    "EX_IO",
    "EX_TRY_AGAIN",
    "EX_USAGE",
    "AddressInUse",
    "BatchCorrupt",
    "BatchLost",
    "ConfigError",
    "ConsumerBusy",
    "ConsumerError",
    "LockLost",
    "SourceError",
    "SourceReplaced",
    "SourceSchemaError",
    "SourceUnavailable",
    "SpoolError",
    "SpoolHeld",
    "SpoolLocked",
    "SpoolWriteError",
    "SpooldError",
    "UnknownBatch",
]

EX_USAGE = 2
EX_BAD_SPOOL = 65
EX_BUG = 70
EX_IO = 74
EX_TRY_AGAIN = 75
EX_CONFIG = 78


class SpooldError(Exception):
    """Root of all errors of spoold.

    Fields: `message` (what and where), `hint` (what to do next, may be empty), `retryable`,
    `exit_code`.
    """

    exit_code: ClassVar[int] = EX_BUG
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class ConfigError(SpooldError):
    """A setting, an option or a run directory is not usable as it is."""

    exit_code = EX_CONFIG


class AddressInUse(SpooldError):
    """Another process listens where the gateway should."""

    exit_code = EX_TRY_AGAIN
    retryable = True


class SourceError(SpooldError):
    """The rollout database cannot be read as it is."""

    exit_code = EX_CONFIG


class SourceUnavailable(SourceError):
    """The rollout database is not there yet, locked or out of reach; later it may be there."""

    exit_code = EX_TRY_AGAIN
    retryable = True


class SourceSchemaError(SourceError):
    """The file is no rollout database, or one whose columns are not known."""


class SourceReplaced(SourceError):
    """The rollout database is not the one that this run directory was filled from."""


class SpoolError(SpooldError):
    """Something about the run directory."""

    exit_code = EX_BAD_SPOOL


class SpoolLocked(SpoolError):
    """Another daemon holds this run directory."""

    exit_code = EX_TRY_AGAIN
    retryable = True


class LockLost(SpoolLocked):
    """The lock file was removed or replaced while this daemon held it."""


class SpoolHeld(SpoolError):
    """Not all that is deliverable could be published: backpressure or a full disk."""

    exit_code = EX_TRY_AGAIN
    retryable = True


class SpoolWriteError(SpoolError):
    """A system call on the run directory failed.

    Fields beyond the root's: `errno`, and `state_unknown`: True when a rename was made whose sync
    failed, so that nobody can say whether it outlives a power cut.
    """

    exit_code = EX_IO
    retryable = True

    def __init__(
        self, message: str, *, hint: str = "", errno: int | None = None, state_unknown: bool = False
    ) -> None:
        super().__init__(message, hint=hint)
        self.errno = errno
        self.state_unknown = state_unknown


class BatchCorrupt(SpoolError):
    """The bytes of a batch file do not fit its name."""


class UnknownBatch(SpoolError):
    """No batch, or more than one, goes by that name."""


class ConsumerError(SpooldError):
    """Something about a consumer."""

    exit_code = EX_BAD_SPOOL


class ConsumerBusy(ConsumerError):
    """Another process holds this consumer's name."""

    exit_code = EX_TRY_AGAIN
    retryable = True


class BatchLost(ConsumerError):
    """A claimed batch was moved away before it was acknowledged."""
