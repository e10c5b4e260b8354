"""A database on a file system that has no shared memory, as some network file systems have none."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemons import environments, running
from tests.support.needs import needs
from tests.support.rollouts import make_rollouts, open_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("mounts")]


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Path]:
    """A folder whose files are those of `tmp_path/real`, and cannot be mapped to be shared."""
    needs(os.geteuid() == 0 and os.path.exists("/dev/fuse"), "only root can mount, and with FUSE")
    needs(shutil.which("bindfs"), "bindfs makes the file system")
    real, beside = tmp_path / "real", tmp_path / "beside"
    real.mkdir()
    beside.mkdir()
    # What the kernel caches of names is another matter.
    options = "direct_io,attr_timeout=0,entry_timeout=0,negative_timeout=0"
    subprocess.run(["bindfs", "-o", options, str(real), str(beside)], check=True)
    try:
        yield beside
    finally:
        # Lazily: FUSE lets go of what was closed a moment ago when it comes to it.
        subprocess.run(["umount", "--lazy", str(beside)], check=True)


def test_a_file_system_without_shared_memory_is_named_and_tried_again_ever_more_rarely(
    tmp_path: Path, beside: Path
) -> None:
    rollouts = make_rollouts(tmp_path / "real" / "rollout.db")
    rollouts.complete(rollouts.register(1)[0])
    with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
        open_rollouts(beside / "rollout.db").db.execute("SELECT 1 FROM job_environments")
    with running(tmp_path, db=beside / "rollout.db") as it:
        it.go()
        said = it.reasons["source-unavailable"]
        assert "its file system has no shared memory, which WAL needs" in said
        pauses = []
        for _ in range(6):
            pauses.append(it.daemon.looking.due_at() - it.clock.now)
            it.go(pauses[-1])
        assert pauses == sorted(pauses)
        assert pauses[-1] > 4 * pauses[0] > 0
        assert environments(it.run) == []
        # The way out for a writer that has to stay there: no WAL.
        rollouts.db.execute("PRAGMA journal_mode = delete")
        it.go(30.0)
        assert environments(it.run) == [1]
        assert "source-unavailable" not in it.reasons
    rollouts.close()
