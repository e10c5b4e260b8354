"""File systems of their own, in an image on a loop device, whose power can be cut."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

# FS_IOC_SHUTDOWN with NOLOGFLUSH: what `xfs_io -x -c shutdown` does. Nothing that is not on the
# disk now gets there any more, the journal in memory included.
_SHUTDOWN: Final = 0x8004587D
_NO_LOG_FLUSH: Final = 2
# xfs wants no less than 300 MB. The images are sparse.
SIZES: Final = {"ext4": 64 << 20, "xfs": 320 << 20}


def cut_power(path: str | Path) -> None:
    """Shut the file system of `path` down, as a power cut does."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(fd)


def sync(path: str | Path) -> None:
    """Make all that is on the file system of `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(fd)


class Disk:
    """An image, mounted at `at`."""

    def __init__(self, kind: str, image: Path, at: Path) -> None:
        self.kind = kind
        self.at = at
        self._image = image
        with open(image, "wb") as file:
            file.truncate(SIZES[kind])
        _run(f"mkfs.{kind}", "-q", image)
        at.mkdir()
        self.mount()

    def mount(self) -> None:
        _run("mount", "-t", self.kind, "-o", "loop", self._image, self.at)

    def umount(self) -> None:
        give_up = time.monotonic() + 30
        while (code := subprocess.run(["umount", self.at], capture_output=True).returncode) == 32:
            # Busy: the kernel has not let go of all that a killed process held.
            assert time.monotonic() < give_up, f"{self.at} is busy"
            time.sleep(0.005)
        assert code == 0, f"umount {self.at}: exit code {code}"

    def power_up_again(self) -> None:
        """Take it off and mount it: the journal that reached the disk is replayed."""
        self.umount()
        self.mount()


@contextmanager
def disk(kind: str, folder: Path) -> Iterator[Disk]:
    """Make, mount and in the end remove a file system."""
    it = Disk(kind, folder / f"{kind}.img", folder / kind)
    try:
        yield it
    finally:
        it.umount()


def why_not(kind: str) -> str:
    """Return why no such file system can be mounted here, "" where it can."""
    lacking = [tool for tool in (f"mkfs.{kind}", "mount", "umount") if not shutil.which(tool)]
    if lacking:
        return f"{' and '.join(lacking)} not found"
    if os.geteuid() != 0:
        return "only root can mount"
    known = {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines()}
    if kind not in known:
        subprocess.run(["modprobe", kind], capture_output=True)
        known = {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines()}
    if kind not in known:
        return f"this kernel has no {kind}"
    if not os.path.exists("/dev/loop-control"):
        return "there are no loop devices"
    return ""


def _run(*command: str | Path) -> None:
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert ran.returncode == 0, f"{command}: {ran.stderr}"
