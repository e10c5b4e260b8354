"""A tmpfs that is really full, of bytes or of inodes, and a disk that is really read-only."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from spoold.errors import ConfigError
from spoold.reasons import SEVERE
from tests.crash import acts, disks, verdict
from tests.support.commands import spoold
from tests.support.daemons import Running
from tests.support.needs import needs

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("mounts")]


def mount(*args: object) -> None:
    ran = subprocess.run(["mount", *map(str, args)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    needs(os.geteuid() == 0, "only root can mount")
    at = folder / "run"
    at.mkdir()
    mount("-t", "tmpfs", "-o", options, "tmpfs", at)
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)


@pytest.fixture(params=["size=1m", "size=1m,nr_inodes=60"], ids=["of bytes", "of inodes"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    yield from tmpfs(tmp_path, request.param)


def fill(run: Path) -> list[Path]:
    """Take every inode where they are few, and else every byte."""
    files = []
    few = os.statvfs(run).f_ffree < 100
    with contextlib.suppress(OSError):
        while len(files) < 1000:
            files.append(run / f"ballast-{len(files)}")
            files[-1].write_bytes(b"" if few else b"x" * 4096)
    facts = os.statvfs(run)
    assert not (facts.f_ffree if few else facts.f_bavail)
    return files


def severe(it: Running) -> dict[str, str]:
    return {r.code: r.text for r in it.daemon.conditions.reasons() if r.code in SEVERE}


def test_09_a_full_tmpfs_shows_nothing_partial_says_why_and_is_left_by_itself(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    acts.database(tmp_path, 2)
    it = acts.daemon(tmp_path)
    it.go()
    before = verdict.look(small)
    assert len(before.places) == 1
    acts.complete_more(tmp_path, 6)
    ballast = fill(small)
    it.go()
    assert "no space left" in severe(it)["disk-space"]
    it.go(2.0)
    said = spoold(capsys, "status", small, "--check")
    assert said.code == 75
    assert "no space left" in said.out.replace("\n           ", " ")
    assert verdict.at_rest(tmp_path, before).places == before.places
    for file in ballast:
        file.unlink(missing_ok=True)
    it.go(20.0)
    assert severe(it) == {}
    verdict.assert_each_once(tmp_path, verdict.look(small))
    it.daemon.stop()
    it.kill()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    needs(not disks.why_not("ext4"), f"no ext4 can be mounted here: {disks.why_not('ext4')}")
    image = tmp_path / "image"
    made = disks.Disk("ext4", image, tmp_path / "run")
    try:
        yield made.at
    finally:
        made.umount()


def test_a_read_only_remount_is_said_and_left_by_itself(disk: Path, tmp_path: Path) -> None:
    (disk / "lost+found").rmdir()
    acts.database(tmp_path, 2)
    it = acts.daemon(tmp_path)
    it.go()
    before = verdict.look(disk)
    acts.complete_more(tmp_path, 6)
    # The lock file is open for writing: an orderly remount would be refused, a broken disk is not.
    it.lock.release()
    mount("-o", "remount,ro", disk)
    it.daemon.lock = _Held()  # type: ignore[assignment]
    it.daemon.delivery.lock = _Held()  # type: ignore[assignment]
    it.go()
    assert "read-only" in severe(it)["read-only"]
    assert verdict.at_rest(tmp_path, before).places == before.places
    mount("-o", "remount,rw", disk)
    it.go(20.0)
    assert severe(it) == {}
    verdict.assert_each_once(tmp_path, verdict.look(disk))
    it.daemon.looking.close()


class _Held:
    """A lock that nobody took away."""

    path = "lock"

    def still_held(self) -> bool:
        return True


def test_a_start_on_a_read_only_disk_is_refused_with_the_reason(disk: Path, tmp_path: Path) -> None:
    (disk / "lost+found").rmdir()
    acts.database(tmp_path, 2)
    acts.once(tmp_path)
    before = verdict.look(disk)
    mount("-o", "remount,ro", disk)
    with pytest.raises(ConfigError, match="read-only file system; mount it read-write"):
        acts.once(tmp_path)
    mount("-o", "remount,rw", disk)
    verdict.after_restart(tmp_path, before)
