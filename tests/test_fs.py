from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyfakefs.fake_filesystem import FakeFilesystem

from spoold import fs
from spoold.errors import ConfigError, SpoolWriteError


def mode(path: Path | str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture(params=["renameat2", "link + unlink"])
def either_rename(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "renameat2":
        monkeypatch.setattr(fs, "renameat2", None)


@pytest.fixture
def umask_077() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("either_rename")
class TestRename:
    def test_moves_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"x")
        fs.rename_noreplace(f"{tmp_path}/a", f"{tmp_path}/b")
        assert os.listdir(tmp_path) == ["b"]

    def test_never_replaces_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"new")
        (tmp_path / "b").write_bytes(b"old")
        with pytest.raises(FileExistsError):
            fs.rename_noreplace(f"{tmp_path}/a", f"{tmp_path}/b")
        assert (tmp_path / "a").read_bytes() == b"new"
        assert (tmp_path / "b").read_bytes() == b"old"

    def test_says_that_somebody_was_faster(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            fs.rename_noreplace(f"{tmp_path}/a", f"{tmp_path}/b")


@pytest.mark.usefixtures("umask_077")
def test_28_modes_are_set_whatever_the_umask(tmp_path: Path) -> None:
    fs.make_dirs(f"{tmp_path}/run/pending")
    fs.write_new(f"{tmp_path}/run/pending/x", b"x")
    lock = fs.Lock(f"{tmp_path}/run/lock")
    assert lock.acquire()
    lock.release()
    assert mode(tmp_path / "run") == 0o2770
    assert mode(tmp_path / "run/pending") == 0o2770
    assert mode(tmp_path / "run/pending/x") == 0o640
    assert mode(tmp_path / "run/lock") == 0o660


def test_make_dirs_leaves_a_directory_that_is_there_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    assert not fs.make_dirs(f"{tmp_path}/run")
    assert mode(tmp_path / "run") == 0o700


def test_make_dirs_names_the_file_in_its_way(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(SpoolWriteError, match=r"cannot make .*/run: not a directory"):
        fs.make_dirs(f"{tmp_path}/run")


def test_a_new_file_may_come_in_pieces(tmp_path: Path) -> None:
    fs.write_new(f"{tmp_path}/x", [b"one\n", b"two\n"])
    assert (tmp_path / "x").read_bytes() == b"one\ntwo\n"


def test_a_file_that_could_not_be_written_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SpoolWriteError) as caught:
        fs.write_new(f"{tmp_path}/x", b"x")
    assert caught.value.errno == errno.ENOSPC
    assert "no space left" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_nothing_half_written(fs_: FakeFilesystem) -> None:
    fs_.create_dir("/run")
    fs_.set_disk_usage(100)
    with pytest.raises(SpoolWriteError) as caught:
        fs.write_new("/run/x", b"x" * 1000)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir("/run") == []
    assert caught.value.retryable


@pytest.fixture
def fs_(fs: FakeFilesystem, monkeypatch: pytest.MonkeyPatch) -> FakeFilesystem:
    monkeypatch.setattr("spoold.fs.renameat2", None)
    return fs


def test_a_rename_whose_sync_failed_leaves_the_state_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a/x").write_bytes(b"")

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(SpoolWriteError) as caught:
        fs.move(f"{tmp_path}/a/x", f"{tmp_path}/b/x")
    assert caught.value.state_unknown


def test_put_shows_the_old_bytes_or_the_new(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    for data in (b"one", b"two"):
        fs.put(f"{tmp_path}/x", data, tmp_dir=f"{tmp_path}/tmp")
        assert (tmp_path / "x").read_bytes() == data
    fs.put(f"{tmp_path}/x", b"three", tmp_dir=f"{tmp_path}/tmp", durable=False)
    assert (tmp_path / "x").read_bytes() == b"three"
    assert os.listdir(tmp_path / "tmp") == []


def test_a_link_is_not_followed_and_a_pipe_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(SpoolWriteError, match="cannot read"):
            fs.read(f"{tmp_path}/{name}")
    assert fs.scan(str(tmp_path)).files == ["real"]
    assert sorted(fs.scan(str(tmp_path)).others) == ["link", "pipe"]


class TestProbe:
    def test_leaves_nothing_behind(self, tmp_path: Path) -> None:
        for name in ("tmp", "a", "b"):
            (tmp_path / name).mkdir()
        fs.probe_renames([f"{tmp_path}/a", f"{tmp_path}/b"], f"{tmp_path}/tmp")
        assert [os.listdir(tmp_path / name) for name in ("tmp", "a", "b")] == [[], [], []]

    def test_29_a_folder_with_the_sticky_bit_is_named(self, tmp_path: Path) -> None:
        for name in ("tmp", "a"):
            (tmp_path / name).mkdir()
        (tmp_path / "a").chmod(0o1777)
        with pytest.raises(ConfigError, match="sticky bit"):
            fs.probe_renames([f"{tmp_path}/a"], f"{tmp_path}/tmp")
        assert os.listdir(tmp_path / "tmp") == []

    def test_refuses_another_mount(self, tmp_path: Path) -> None:
        shm = Path("/dev/shm")
        if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("no second file system to write to")
        (tmp_path / "tmp").mkdir()
        with tempfile.TemporaryDirectory(dir=shm) as other:
            with pytest.raises(ConfigError, match=r"cross-device.*one mount"):
                fs.probe_renames([other], f"{tmp_path}/tmp")
            assert os.listdir(other) == []
        assert os.listdir(tmp_path / "tmp") == []


class TestLock:
    def test_one_at_a_time(self, tmp_path: Path) -> None:
        first, second = fs.Lock(f"{tmp_path}/lock"), fs.Lock(f"{tmp_path}/lock")
        assert first.acquire()
        assert not second.acquire()
        first.release()
        assert second.acquire()
        second.release()
        assert os.listdir(tmp_path) == ["lock"]

    def test_the_holder_is_named(self, tmp_path: Path) -> None:
        lock = fs.Lock(f"{tmp_path}/lock")
        assert lock.acquire()
        assert f"pid {os.getpid()} " in fs.holder_of(lock.path)
        lock.release()

    def test_a_probe_tells_held_free_and_not_there(self, tmp_path: Path) -> None:
        lock = fs.Lock(f"{tmp_path}/lock")
        assert fs.lock_is_held(lock.path) is None
        assert lock.acquire()
        assert fs.lock_is_held(lock.path) is True
        lock.release()
        assert fs.lock_is_held(lock.path) is False

    def test_a_lock_whose_file_was_removed_or_replaced_is_not_held_any_more(
        self, tmp_path: Path
    ) -> None:
        lock = fs.Lock(f"{tmp_path}/lock")
        assert lock.acquire()
        assert lock.still_held()
        os.unlink(lock.path)
        assert not lock.still_held()
        Path(lock.path).write_text("")
        assert not lock.still_held()
        lock.release()

    def test_the_kernel_drops_it_when_its_holder_is_killed(self, tmp_path: Path) -> None:
        code = (
            "import sys; from spoold import fs; lock = fs.Lock(sys.argv[1]);"
            "print(lock.acquire(), flush=True); sys.stdin.read()"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code, f"{tmp_path}/lock"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "True\n"
        assert fs.lock_is_held(f"{tmp_path}/lock")
        child.kill()
        child.communicate()
        assert fs.lock_is_held(f"{tmp_path}/lock") is False


def test_a_leftover_in_tmp_is_removed_and_the_file_made_anew(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("left by a write that failed")
    before = os.stat(tmp_path / "x").st_ino
    keep = os.open(tmp_path / "x", os.O_RDONLY)  # so that the number of its inode is not used again
    fs.write_tmp(f"{tmp_path}/x", b"new")
    os.close(keep)
    assert (tmp_path / "x").read_bytes() == b"new"
    assert os.stat(tmp_path / "x").st_ino != before


def test_a_file_that_cannot_be_put_in_place_is_not_left_in_tmp(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "x").mkdir()
    with pytest.raises(SpoolWriteError, match="is a directory"):
        fs.put(f"{tmp_path}/x", b"new", tmp_dir=f"{tmp_path}/tmp")
    with pytest.raises(SpoolWriteError, match="no such file or directory; restart spoold"):
        fs.put_many([("x", b"new")], folder=f"{tmp_path}/gone", tmp_dir=f"{tmp_path}/tmp")
    assert os.listdir(tmp_path / "tmp") == []


def test_of_two_names_of_one_file_the_old_one_goes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a/x").write_text("x")
    os.link(tmp_path / "a/x", tmp_path / "b/x")
    fs.rename_over(f"{tmp_path}/a/x", f"{tmp_path}/b/x")
    assert os.listdir(tmp_path / "a") == []
    assert os.listdir(tmp_path / "b") == ["x"]


def test_without_renameat2_a_move_that_fails_half_way_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("x")
    unlink = os.unlink

    def denied(path: str) -> None:
        if path.endswith("/a"):
            raise OSError(errno.EPERM, "denied")
        unlink(path)

    monkeypatch.setattr(fs, "renameat2", None)
    monkeypatch.setattr(os, "unlink", denied)
    with pytest.raises(SpoolWriteError):
        fs.rename_noreplace(f"{tmp_path}/a", f"{tmp_path}/b")
    assert os.listdir(tmp_path) == ["a"]


def test_a_directory_whose_maker_was_killed_gets_its_mode_and_others_keep_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_path: str, _mode: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "chmod", killed)
        with pytest.raises(KeyboardInterrupt):
            fs.make_dirs(f"{tmp_path}/half")
    assert fs.make_dirs(f"{tmp_path}/half")
    assert mode(tmp_path / "half") == 0o2770
    for kept in (0o700, 0o755, 0o1777, 0o2770, 0o3777):
        (tmp_path / f"{kept:o}").mkdir()
        (tmp_path / f"{kept:o}").chmod(kept)
        assert not fs.make_dirs(f"{tmp_path}/{kept:o}")
        assert mode(tmp_path / f"{kept:o}") == kept

    @pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
    def test_a_file_system_without_locks_is_refused_with_the_reason(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        def none(_fd: int, _how: int) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr("fcntl.flock", none)
        with pytest.raises(ConfigError, match=r"its file system has no locks; put the run") as no:
            fs.Lock(f"{tmp_path}/lock").acquire()
        assert no.value.exit_code == 78
        assert os.listdir(tmp_path) in ([], ["lock"])

    def test_a_probe_that_fails_is_not_taken_for_a_holder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "lock").touch()

        def broken(_fd: int, _how: int) -> None:
            raise OSError(errno.ENOLCK, "no locks")

        monkeypatch.setattr("fcntl.flock", broken)
        with pytest.raises(SpoolWriteError, match="no locks"):
            fs.lock_is_held(f"{tmp_path}/lock")

    def test_a_forked_child_that_lives_on_keeps_no_lock(self, tmp_path: Path) -> None:
        lock = fs.Lock(f"{tmp_path}/lock")
        assert lock.acquire()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        os.close(reader)
        lock.release()
        other = fs.Lock(lock.path)
        assert other.acquire()
        other.release()
        os.close(writer)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
