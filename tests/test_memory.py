"""The heap is laid together in huge pages; where that cannot be nothing happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spoold.daemon import memory


def in_huge_pages() -> int:
    """Bytes of this process's memory that are in huge pages."""
    found = re.search(
        r"^AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE
    )
    return int(found[1]) * 1024 if found else 0


def test_the_heap_lies_in_huge_pages_and_is_what_it_was() -> None:
    objects = [str(number) for number in range(300_000)]
    size = memory.lay_together()
    if not size:
        pytest.skip("this kernel lays no memory together (Linux 6.1 does)")
    assert in_huge_pages() >= size > 0
    assert objects == [str(number) for number in range(300_000)]


def test_without_huge_pages_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_HUGE_BYTES", "/nowhere/hpage_pmd_size")
    assert memory.lay_together() == 0
