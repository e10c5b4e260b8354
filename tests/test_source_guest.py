"""Reading a database that another uid owns: nothing is left that its writer cannot use."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyroaring import BitMap64

from spoold.errors import SourceUnavailable
from spoold.model import ReadyWhen, Samples
from spoold.sources.sqlite import SqliteSource
from tests.support.daemons import environments, start
from tests.support.needs import needs
from tests.support.rollouts import make_rollouts, open_rollouts

pytestmark = [
    # The children do nothing but this file's few calls, and leave by _exit.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

OWNER, GUEST = 12_001, 12_002


def run_as(uid: int, act: Callable[[], None]) -> None:
    """Run in a child with another uid; what it raises fails the test."""
    done, told = os.pipe()
    child = os.fork()
    if child == 0:
        code, text = 1, b""
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            act()
            code = 0
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".encode()
        os.write(told, text)
        os._exit(code)
    os.close(told)
    with os.fdopen(done, "rb") as pipe:
        text = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    assert status == 0, text


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that both users may write, so that only care keeps sidecars from being made."""
    needs(os.geteuid() == 0, "root, to act as two other users")
    folder = Path(tempfile.mkdtemp())
    os.chmod(folder, 0o777)
    yield folder
    shutil.rmtree(folder)


def make(folder: Path) -> None:
    def act() -> None:
        rollouts = make_rollouts(folder / "rollouts.db")
        rollouts.complete(*rollouts.register())
        rollouts.close()

    run_as(OWNER, act)
    assert os.listdir(folder) == ["rollouts.db"]


def read_all(folder: Path) -> list[int]:
    source = SqliteSource(
        [f"{folder}/rollouts.db"], job=None, ready_when=ReadyWhen.AUTO, samples=Samples.TERMINAL
    )
    source.open()
    ids = [c.id for look in source.reconcile(BitMap64()) for c in look.candidates]
    found = [environment for environment, rows in source.read(ids) if rows]
    source.close()
    return found


def test_without_sidecars_a_guest_makes_none(folder: Path) -> None:
    make(folder)

    def act() -> None:
        assert read_all(folder) == [1]

    run_as(GUEST, act)
    assert os.listdir(folder) == ["rollouts.db"]


def test_a_guest_in_a_folder_that_is_read_only_reads_all_the_same(folder: Path) -> None:
    make(folder)
    os.chmod(folder, 0o555)

    def act() -> None:
        assert read_all(folder) == [1]

    run_as(GUEST, act)


def test_root_is_a_guest_too(folder: Path) -> None:
    make(folder)
    assert read_all(folder) == [1]
    assert os.listdir(folder) == ["rollouts.db"]


def test_a_guest_who_may_not_read_the_wal_is_told_so(folder: Path) -> None:
    make(folder)
    rollouts = open_rollouts(folder / "rollouts.db")
    rollouts.complete(*rollouts.register())
    os.chmod(folder / "rollouts.db-wal", 0o600)

    def act() -> None:
        with pytest.raises(SourceUnavailable, match="cannot read"):
            read_all(folder)

    run_as(GUEST, act)
    rollouts.close()


def test_a_guest_reads_beside_a_writer_and_leaves_its_files_alone(folder: Path) -> None:
    make(folder)
    os.chmod(folder / "rollouts.db", 0o666)
    ready, go = os.pipe(), os.pipe()
    writer = os.fork()
    if writer == 0:
        os.setgid(OWNER)
        os.setuid(OWNER)
        os.umask(0)
        rollouts = open_rollouts(folder / "rollouts.db")
        rollouts.complete(*rollouts.register())
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        rollouts.complete(*rollouts.register())
        rollouts.close()
        os._exit(0)
    os.read(ready[0], 1)

    def act() -> None:
        source = SqliteSource(
            [f"{folder}/rollouts.db"], job=None, ready_when=ReadyWhen.AUTO, samples=Samples.TERMINAL
        )
        source.open()
        source.look(BitMap64())
        os.write(go[1], b"x")
        while not source.changed():
            os.sched_yield()
        found: list[int] = []
        while not found:
            found = [c.id for c in source.look(BitMap64()).candidates]
        assert found == [3]
        source.close()

    run_as(GUEST, act)
    assert os.waitpid(writer, 0)[1] == 0
    for fd in (*ready, *go):
        os.close(fd)
    owners = {path.name: path.stat().st_uid for path in folder.iterdir()}
    assert set(owners.values()) == {OWNER}

    def act_again() -> None:
        assert read_all(folder) == [1, 2, 3]

    run_as(OWNER, act_again)
    run_as(GUEST, act_again)


def test_a_wal_without_shm_is_refused_with_the_way_out(folder: Path) -> None:
    make(folder)
    Path(f"{folder}/rollouts.db-wal").touch()
    os.chown(folder / "rollouts.db-wal", OWNER, OWNER)

    def act() -> None:
        with pytest.raises(SourceUnavailable, match="or run spoold as the owner of the file"):
            read_all(folder)

    run_as(GUEST, act)
    assert sorted(os.listdir(folder)) == ["rollouts.db", "rollouts.db-wal"]


def test_what_a_guest_read_while_the_file_was_written_does_not_count(folder: Path) -> None:
    make(folder)
    source = SqliteSource(
        [f"{folder}/rollouts.db"], job=None, ready_when=ReadyWhen.AUTO, samples=Samples.TERMINAL
    )
    source.open()
    assert source.look(BitMap64()).candidates == ()

    def act() -> None:
        rollouts = make_rollouts_again(folder)
        rollouts()

    run_as(OWNER, act)
    assert source.committed()
    with pytest.raises(SourceUnavailable, match="was written to while it was read"):
        source.look(BitMap64())
    assert [c.id for c in source.look(BitMap64()).candidates] == [2]
    source.close()


def make_rollouts_again(folder: Path) -> Callable[[], None]:
    def act() -> None:
        rollouts = open_rollouts(folder / "rollouts.db")
        rollouts.complete(*rollouts.register())
        rollouts.close()

    return act


def test_no_permission_is_said_with_the_way_out(folder: Path) -> None:
    make(folder)
    os.chmod(folder / "rollouts.db", 0o600)

    def act() -> None:
        with pytest.raises(SourceUnavailable, match="give this user read permission"):
            read_all(folder)

    run_as(GUEST, act)


def test_the_rest_drains_after_the_writer_and_its_wal_are_gone(folder: Path) -> None:
    """The end of a run, beside a daemon under another uid that goes on to the last environment."""

    def write() -> None:
        rollouts = make_rollouts(folder / "rollout.db")
        for one in rollouts.register(5, group=""):
            rollouts.complete(one)
        rollouts.close()

    def deliver(first: bool) -> Callable[[], None]:
        def act() -> None:
            it = start(folder, batch_size=1, max_pending_batches=2 if first else 64)
            it.go()
            assert environments(it.run) == ([1, 2] if first else [1, 2, 3, 4, 5])
            it.daemon.stop()
            it.kill()

        return act

    run_as(OWNER, write)
    for first in (True, False):
        run_as(GUEST, deliver(first))
        assert sorted(os.listdir(folder)) == ["rollout.db", "run"]


def test_a_daemon_beside_a_writer_that_leaves_goes_on_and_takes_nothing_with_it(
    folder: Path,
) -> None:
    leave, left = os.pipe(), os.pipe()
    wrote = os.pipe()
    writer = os.fork()
    if writer == 0:
        os.setgid(OWNER)
        os.setuid(OWNER)
        rollouts = make_rollouts(folder / "rollout.db")
        os.chmod(folder / "rollout.db-shm", 0o644)
        for one in rollouts.register(3, group=""):
            rollouts.complete(one)
        os.write(wrote[1], b"x")
        os.read(leave[0], 1)
        for one in rollouts.register(3, group=""):
            rollouts.complete(one)
        rollouts.close()
        os.write(left[1], b"x")
        os._exit(0)
    os.read(wrote[0], 1)

    def act() -> None:
        it = start(folder)
        it.go()
        assert environments(it.run) == [1, 2, 3]
        os.write(leave[1], b"x")
        os.read(left[0], 1)
        it.go(2.0)
        it.go(20.0)
        assert environments(it.run) == [1, 2, 3, 4, 5, 6]
        it.kill()

    run_as(GUEST, act)
    assert os.waitpid(writer, 0)[1] == 0
    for fd in (*leave, *left, *wrote):
        os.close(fd)
    owners = {path.stat().st_uid for path in folder.iterdir() if path.is_file()}
    assert owners == {OWNER}

    def write_on() -> None:
        rollouts = open_rollouts(folder / "rollout.db")
        rollouts.complete(*rollouts.register(1, group=""))
        rollouts.close()

    run_as(OWNER, write_on)
