"""Hints: what is heard, and that nothing depends on hearing it."""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from watchdog.observers import inotify_c

from spoold.watch import Hints

SOON = 5.0  # nobody waits this long when things are right


@pytest.fixture
def hints() -> Iterator[Hints]:
    hints = Hints()
    yield hints
    hints.close()


def move_in(folder: Path, name: str, *, via: Path | None = None) -> str:
    outside = (via or folder.parent) / name
    outside.write_text("x")
    os.rename(outside, folder / name)
    return str(folder / name)


def make(path: Path) -> Path:
    path.mkdir()
    return path


class Clock:
    """Time that passes only when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_file_moved_in_is_heard_with_its_path(hints: Hints, tmp_path: Path) -> None:
    folder = make(tmp_path / "pending")
    assert hints.watch(str(folder), tag="pending")
    assert hints.wait(0) == {}
    path = move_in(folder, "a")
    assert hints.wait(SOON) == {"pending": {path}}
    assert hints.wait(0) == {}


def test_a_wait_may_be_shorter_than_a_millisecond(hints: Hints) -> None:
    def waited() -> float:
        began = time.perf_counter()
        assert hints.wait(0.0002) == {}
        return time.perf_counter() - began

    assert 0.0002 <= min(waited() for _ in range(100)) < 0.001


def test_what_happens_between_two_waits_is_heard(hints: Hints, tmp_path: Path) -> None:
    folder = make(tmp_path / "pending")
    hints.watch(str(folder), tag="pending")
    hints.wait(0)
    paths = {move_in(folder, f"f{i}") for i in range(300)}
    assert hints.wait(SOON) == {"pending": paths}


def test_only_what_was_asked_for_is_heard(hints: Hints, tmp_path: Path) -> None:
    folder = make(tmp_path / "pending")
    move_in(folder, "old")
    hints.watch(str(folder), tag="gone", created=False, deleted=True)
    move_in(folder, "new")
    (folder / "old").write_text("written to")
    assert hints.wait(0) == {}
    os.rename(folder / "old", tmp_path / "old")
    (folder / "new").unlink()
    assert hints.wait(SOON) == {"gone": {str(folder / "old"), str(folder / "new")}}


def test_one_folder_can_be_watched_for_two_purposes(hints: Hints, tmp_path: Path) -> None:
    folder = make(tmp_path / "pending")
    hints.watch(str(folder), tag="in")
    hints.watch(str(folder), tag="out", created=False, deleted=True)
    path = move_in(folder, "a")
    assert hints.wait(SOON) == {"in": {path}}
    os.unlink(path)
    assert hints.wait(SOON) == {"out": {path}}


def test_names_that_do_not_matter_end_no_wait(hints: Hints, tmp_path: Path) -> None:
    folder = make(tmp_path / "own")
    hints.watch(str(folder), tag="own", names={"mine"}.__contains__)
    move_in(folder, "other")
    before = time.monotonic()
    assert hints.wait(0.05) == {}
    assert time.monotonic() - before >= 0.05
    path = move_in(folder, "mine")
    assert hints.wait(SOON) == {"own": {path}}


def test_names_that_are_no_utf8_are_heard(hints: Hints, tmp_path: Path) -> None:
    folder = make(tmp_path / "pending")
    hints.watch(str(folder), tag="pending")
    os.close(os.open(os.fsencode(folder) + b"/\xff", os.O_CREAT))
    assert hints.wait(SOON) == {"pending": {f"{folder}/\udcff"}}


def test_folders_are_followed_as_they_come_and_go(hints: Hints, tmp_path: Path) -> None:
    top = make(tmp_path / "acked")
    there = make(top / "step-1")
    hints.watch(str(top), tag="acked", recursive=True)
    assert hints.wait(0) == {}
    path = move_in(there, "a", via=tmp_path)
    assert hints.wait(SOON) == {"acked": {path}}
    # A folder that is filled before anybody could watch it.
    os.makedirs(tmp_path / "step-2" / "deep")
    (tmp_path / "step-2" / "b").write_text("x")
    (tmp_path / "step-2" / "deep" / "c").write_text("x")
    os.rename(tmp_path / "step-2", top / "step-2")
    heard = hints.wait(SOON)["acked"]
    assert heard is not None
    assert {f"{top}/step-2/b", f"{top}/step-2/deep/c"} <= heard
    path = move_in(top / "step-2", "d", via=tmp_path)
    assert hints.wait(SOON) == {"acked": {path}}
    os.rename(top / "step-2", tmp_path / "elsewhere")
    hints.wait(0)
    move_in(tmp_path / "elsewhere", "e")
    assert hints.wait(0) == {}
    shutil.rmtree(there)
    make(there)
    hints.wait(SOON)
    path = move_in(there, "f", via=tmp_path)
    assert hints.wait(SOON) == {"acked": {path}}
    assert hints.healthy()


def test_a_folder_removed_and_made_again_is_watched_anew(tmp_path: Path) -> None:
    clock = Clock()
    hints = Hints(clock=clock)
    folder = make(tmp_path / "pending")
    hints.watch(str(folder), tag="pending")
    assert hints.wait(0) == {}
    folder.rmdir()
    assert hints.wait(0) == {"pending": None}
    assert not hints.healthy()
    make(folder)
    move_in(folder, "missed")
    clock.now += 5
    assert hints.wait(0) == {"pending": None}
    assert hints.healthy()
    path = move_in(folder, "a")
    assert hints.wait(0) == {"pending": {path}}
    hints.close()


def test_health_can_be_asked_for_one_tag(hints: Hints, tmp_path: Path) -> None:
    hints.watch(str(make(tmp_path / "there")), tag="spool")
    hints.watch(str(tmp_path / "not-there"), tag="source")
    assert hints.healthy("spool")
    assert not hints.healthy("source")
    assert not hints.healthy()


def test_a_folder_replaced_by_a_rename_is_watched_anew(tmp_path: Path) -> None:
    clock = Clock()
    hints = Hints(clock=clock)
    folder, other = make(tmp_path / "pending"), make(tmp_path / "other")
    hints.watch(str(folder), tag="pending")
    hints.wait(0)
    os.rename(folder, tmp_path / "was")
    os.rename(other, folder)
    hints.wait(0)
    clock.now += 5
    hints.wait(0)
    path = move_in(folder, "a")
    assert hints.wait(0) == {"pending": {path}}
    hints.close()


def test_a_folder_that_is_not_there_yet_is_no_cause_to_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    hints = Hints(clock=clock)
    assert not hints.watch(str(tmp_path / "pending"), tag="pending")
    assert not hints.healthy()
    assert hints.problem is None
    assert hints.wait(0) == {}
    make(tmp_path / "pending")
    clock.now += 5
    assert hints.wait(0) == {"pending": None}
    assert hints.healthy()
    assert not caplog.records
    hints.close()


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("inotify_init", errno.EMFILE),
        ("inotify_init", errno.ENOSYS),
        ("inotify_add_watch", errno.ENOSPC),
    ],
)
def test_without_inotify_it_warns_once_and_waits_for_the_time_given(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    code: int,
) -> None:
    import ctypes

    def failing(*_: object) -> int:
        ctypes.set_errno(code)
        return -1

    clock = Clock()
    hints = Hints(clock=clock)
    with monkeypatch.context() as patch:
        patch.setattr(inotify_c, call, failing)
        assert not hints.watch(str(make(tmp_path / "a")), tag="a")
        assert not hints.watch(str(make(tmp_path / "b")), tag="b", recursive=True)
        for _ in range(3):
            clock.now += 100
            assert hints.wait(0.001) == {}
    assert not hints.healthy()
    assert len(caplog.records) == 1
    assert os.strerror(code).lower() in caplog.text
    assert hints.problem is not None
    assert os.strerror(code).lower() in hints.problem[0]
    clock.now += 100
    assert hints.wait(0) == {"a": None, "b": None}
    assert hints.healthy()
    assert hints.problem is None
    hints.close()


def test_an_overflow_means_that_anything_may_have_changed(
    hints: Hints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = make(tmp_path / "acked")
    hints.watch(str(top), tag="acked", recursive=True)
    hints.wait(0)
    move_in(top, "a")
    overflow = b"\xff\xff\xff\xff" + (0x4000).to_bytes(4, "little") + bytes(8)
    real = os.read
    monkeypatch.setattr(os, "read", lambda fd, n: (real(fd, n), overflow)[1])
    assert hints.wait(SOON) == {"acked": None}
    monkeypatch.undo()
    assert hints.wait(0) == {"acked": None}  # watched wholly again
    assert hints.healthy()


def test_too_many_paths_are_not_kept(
    hints: Hints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spoold.watch._MOST_PATHS", 5)
    folder = make(tmp_path / "pending")
    hints.watch(str(folder), tag="pending")
    for i in range(6):
        move_in(folder, str(i))
    assert hints.wait(SOON) == {"pending": None}


def test_wake_ends_a_wait_from_another_thread(hints: Hints) -> None:
    threading.Timer(0.05, hints.wake, ("stop",)).start()
    assert hints.wait(None) == {"stop": None}
    hints.wake("a")
    hints.wake("b")
    assert hints.wait(SOON) == {"a": None, "b": None}
    assert hints.wait(0) == {}


def test_wake_ends_a_wait_from_a_signal_handler(hints: Hints) -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: hints.wake("stop"))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert hints.wait(SOON) == {"stop": None}
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_forked_child_does_not_wake_its_parent(hints: Hints) -> None:
    child = os.fork()
    if child == 0:
        hints.wake("stop")
        hints.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert select.select([hints._wake], [], [], 0) == ([], [], [])


def test_reading_a_database_in_wal_mode_is_not_heard_and_a_commit_is(
    hints: Hints, tmp_path: Path
) -> None:
    path = tmp_path / "x.db"
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("CREATE TABLE t (x)")
    writer.execute("INSERT INTO t VALUES (1)")
    names = {"x.db", "x.db-wal"}.__contains__
    hints.watch(str(tmp_path), tag="source", modified=True, names=names)
    reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    assert reader.execute("SELECT count(*) FROM t").fetchone() == (1,)
    assert hints.wait(0) == {}
    writer.execute("INSERT INTO t VALUES (2)")
    assert hints.wait(SOON) == {"source": {f"{path}-wal"}}
    reader.close()
    writer.close()


def test_no_thread_is_started_and_no_descriptor_is_left(tmp_path: Path) -> None:
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    hints = Hints()
    hints.watch(str(tmp_path), tag="a", recursive=True)
    hints.wait(0)
    assert threading.active_count() == threads
    hints.close()
    hints.close()
    hints.wake("late")
    assert len(os.listdir("/proc/self/fd")) == fds
