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


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"enabled": "always madvise [never]\n", "hpage_pmd_size": "2097152\n"},
        {"enabled": "[always] madvise never\n", "hpage_pmd_size": "\n"},
    ],
)
def test_without_huge_pages_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "_HUGE_PAGES", str(tmp_path))
    assert memory.lay_together() == 0
