"""One system call fails, with any error: what is there then, and after the next start."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from spoold.errors import SpooldError
from tests.crash import acts, verdict
from tests.crash.syscalls import Call, watching

ERRORS: Final = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.EXDEV,
)


class Syncs:
    """Notices when a file whose fsync failed is synced again.

    The kernel may have dropped what it could not write, so that a second fsync proves nothing.
    """

    def __init__(self) -> None:
        self.again: list[str] = []
        self._failed: dict[tuple[int, int], object] = {}

    def look(self, call: Call, *, fails: bool) -> None:
        """Take in a call; of a fsync, whether it will fail."""
        if call.name != "fsync":
            return
        facts = os.stat(call.path)
        inode = facts.st_dev, facts.st_ino
        if inode in self._failed:
            self.again.append(call.path)
        if fails:
            # Held open, so that its number is not used again.
            held = None if os.path.isdir(call.path) else open(call.path, "rb")  # noqa: SIM115
            self._failed[inode] = held

    def close(self) -> None:
        for held in self._failed.values():
            if held is not None:
                held.close()  # type: ignore[attr-defined]


class Fault:
    """Fails the n-th call of those that an act makes, and all like it after it if it `stays`."""

    def __init__(self, number: int, code: int, *, stays: bool = False) -> None:
        self.number = number
        self.code = code
        self.stays = stays
        self.failed: list[Call] = []
        self.syncs = Syncs()

    def __call__(self, call: Call) -> None:
        fails = call.number == self.number or (
            self.stays and bool(self.failed) and call.name == self.failed[0].name
        )
        self.syncs.look(call, fails=fails)
        if fails:
            self.failed.append(call)
            raise OSError(self.code, os.strerror(self.code), call.path)


def calls_of(act: acts.Act, template: Path, folder: Path) -> int:
    """Do an act once, undisturbed. Returns how many calls it makes."""
    shutil.copytree(template, folder)
    with watching(f"{folder}/run", lambda _call: None) as calls:
        act.do(folder)
    shutil.rmtree(folder)
    return len(calls)


def try_fault(act: acts.Act, template: Path, folder: Path, fault: Fault) -> str:
    """Do an act with one call that fails, then start the daemon normally. Returns what failed.

    Fails where anything but a SpooldError comes out of it, anything is half visible, or, after the
    start, any environment is not there once.
    """
    before = verdict.look(template / "run")
    before.may_go = act.removes
    shutil.copytree(template, folder)
    acts.said_file(folder).unlink(missing_ok=True)
    try:
        with watching(f"{folder}/run", fault):
            error = _error_of(act, folder)
        if error is not None:
            assert error.exit_code in (74, 75, 78), error
            assert os.strerror(fault.code).lower() in str(error).lower(), error
        assert not fault.syncs.again
        now = verdict.at_rest(folder, before)
        verdict.assert_kept(folder, now)
        verdict.after_restart(folder, now)
    except BaseException as error:
        what = fault.failed[0] if fault.failed else "nothing"
        error.add_note(f"{act.name}, {errno.errorcode[fault.code]} at {what}")
        raise
    finally:
        fault.syncs.close()
        shutil.rmtree(folder, ignore_errors=True)
    return fault.failed[0].name if fault.failed else ""


def _error_of(act: acts.Act, folder: Path) -> SpooldError | None:
    try:
        act.do(folder)
    except SpooldError as error:
        return error
    return None


def errors_for(number: int, *, all_of_them: bool) -> tuple[int, ...]:
    """Every error, or two of them, other ones at the next call."""
    if all_of_them:
        return ERRORS
    return (ERRORS[number % len(ERRORS)], ERRORS[(number + 3) % len(ERRORS)])


def sweep(
    act: acts.Act,
    home: Path,
    *,
    errors: Callable[[int], tuple[int, ...]],
    stays: bool = False,
) -> int:
    """Try a fault at every call of an act. Returns how many were tried."""
    template = home / "template"
    template.mkdir()
    act.prepare(template)
    tried = 0
    for number in range(1, calls_of(act, template, home / "counted") + 1):
        for code in errors(number):
            tried += bool(
                try_fault(act, template, home / "tried", Fault(number, code, stays=stays))
            )
    return tried
