"""A row of more than a hundred megabytes, through the real daemon: delivered, or noted."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from spoold.layout import RunDir
from tests.support.batches import tree
from tests.support.daemons import environments
from tests.support.processes import run_once
from tests.support.rollouts import make_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.alone]

ROW_BYTES = 120_000_000


@pytest.fixture
def database(home: Path) -> Path:
    path = home / "rollout.db"
    rollouts = make_rollouts(path, journal="delete")
    small, large, images, after = rollouts.register(4, group="")
    rollouts.complete(small)
    rollouts.complete(large, response="é" * (ROW_BYTES // 2))
    parts = [{"type": "image_url", "image_url": {"url": "x" * (ROW_BYTES // 3)}}] * 3
    rollouts.complete(images, messages=[{"role": "user", "content": parts}])
    rollouts.complete(after)
    rollouts.close()
    return path


# wait4 would tell the memory of this process, too, which made the rows.
DAEMON = """
import sys
from spoold.cli import main

try:
    main()
finally:
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(int(status["VmHWM"].split()[0]) * 1024)
"""


def run(database: Path, name: str, *options: str) -> tuple[RunDir, int]:
    """Let the daemon deliver all there is. Returns the most memory that it had, in bytes, too."""
    run_dir = database.parent / name
    words = ["run", f"--db={database}", f"--run-dir={run_dir}", "--once", "--min-free-bytes=0"]
    out = run_once([sys.executable, "-c", DAEMON, *words, *options])
    return RunDir(str(run_dir)), int(out)


def test_a_row_of_more_than_a_hundred_megabytes_is_delivered_in_bounded_memory(
    database: Path,
) -> None:
    found, most_memory = run(database, "delivered")
    assert environments(found) == [1, 2, 3, 4]
    # The row, what is parsed of it, and its line; never two rows.
    assert most_memory < 4 * ROW_BYTES + (64 << 20)


def test_below_its_size_max_sample_bytes_makes_it_a_note_and_the_others_flow(
    database: Path,
) -> None:
    found, _ = run(database, "noted", f"--max-sample-bytes={ROW_BYTES}")
    assert environments(found) == [1, 4]
    notes = [name for name in tree(found, "rejected") if name.endswith(".json")]
    assert notes == ["rejected/env-2.too-big.json", "rejected/env-3.too-big.json"]
    for name in notes:
        assert os.stat(f"{found.root}/{name}").st_size < 2000
        assert json.loads(Path(found.root, name).read_bytes())["reason"] == "too-big"
