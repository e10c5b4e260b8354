"""What a look, a reconcile and a read find, and what they don't touch."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyroaring import BitMap64

from spoold.errors import ConfigError, SourceSchemaError, SourceUnavailable
from spoold.model import Look, ReadyWhen, Samples
from spoold.sources import open_source, sqlite, sqlite_open, sqlite_rows
from spoold.sources.sqlite import SqliteSource
from spoold.sources.sqlite_news import News
from spoold.sources.sqlite_open import Database
from tests.support.other_writer import other_writer
from tests.support.rollouts import Rollouts, make_rollouts, open_rollouts

NOTHING = BitMap64()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.db"


@pytest.fixture
def rollouts(path: Path) -> Rollouts:
    return made(path)


OPEN: list[Rollouts | SqliteSource] = []


@pytest.fixture(autouse=True)
def _close_all() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def made(path: Path, generation: str = "newest") -> Rollouts:
    OPEN.append(rollouts := make_rollouts(path, generation))
    return rollouts


def opened(
    path: Path | str,
    *,
    job: str | None = None,
    ready_when: ReadyWhen = ReadyWhen.AUTO,
    samples: Samples = Samples.TERMINAL,
    clock: Clock | None = None,
) -> SqliteSource:
    source = SqliteSource(
        [str(path)], job=job, ready_when=ready_when, samples=samples, clock=clock or Clock()
    )
    OPEN.append(source)
    source.open()
    return source


def reconciled(source: SqliteSource, skip: BitMap64 = NOTHING) -> Look:
    looks = list(source.reconcile(skip))
    return Look(
        candidates=tuple(c for look in looks for c in look.candidates),
        missing=tuple(one for look in looks for one in look.missing),
        gone=tuple(one for look in looks for one in look.gone),
    )


def ids_of(look: Look) -> list[int]:
    return [candidate.id for candidate in look.candidates]


def rows_of(source: SqliteSource, *ids: int) -> dict[int, list[int]]:
    return {environment: [row.pk for row in rows] for environment, rows in source.read(ids)}


# ---- open ---------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_yet_is_waited_for(path: Path) -> None:
    with pytest.raises(SourceUnavailable, match="no database at"):
        opened(path)
    assert not path.exists()


def test_an_empty_file_is_a_database_without_tables_yet(path: Path) -> None:
    path.touch()
    with pytest.raises(SourceUnavailable, match="no tables yet"):
        opened(path)
    assert os.listdir(path.parent) == ["rollouts.db"]


def test_other_tables_only_are_no_rollout_database(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE t (x)")
    db.close()
    with pytest.raises(SourceSchemaError, match="no table job_environments"):
        opened(path)


def test_what_is_no_database_is_said_to_be_none(path: Path) -> None:
    path.write_text("hello, this is a text file" * 100)
    with pytest.raises(SourceSchemaError, match="is no SQLite database"):
        opened(path)


def test_a_folder_is_said_to_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SourceSchemaError, match="is a folder"):
        opened(tmp_path)


def test_a_path_with_signs_that_mean_something_in_a_url_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "a?b#c%20d é.db"
    made(path).register()
    assert opened(path).job == "job-1"


def test_a_locked_database_is_unavailable_and_comes_back_by_itself(
    rollouts: Rollouts, path: Path
) -> None:
    rollouts.register()
    rollouts.db.execute("PRAGMA journal_mode = delete")
    source = opened(path)
    rollouts.db.execute("BEGIN EXCLUSIVE")
    with pytest.raises(SourceUnavailable, match="locked by another process"):
        source.look(NOTHING)
    rollouts.db.execute("COMMIT")
    assert source.changed()
    assert source.look(NOTHING) == Look()


def test_nothing_is_written_to_the_database(rollouts: Rollouts, path: Path) -> None:
    rollouts.complete(*rollouts.register())
    rollouts.db.execute("PRAGMA wal_checkpoint(truncate)")
    before = path.read_bytes(), Path(f"{path}-wal").read_bytes()
    source = opened(path)
    rows_of(source, *ids_of(reconciled(source)))
    source.look(NOTHING)
    source.close()
    assert (path.read_bytes(), Path(f"{path}-wal").read_bytes()) == before


# ---- URLs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("data/x.db", "{cwd}/data/x.db"),
        ("sqlite://data/x.db", "{cwd}/data/x.db"),
        ("sqlite:///data/x.db", "{cwd}/data/x.db"),
        ("sqlite:////data/x.db", "/data/x.db"),
        ("sqlite:///data/x.db?mode=rw", "{cwd}/data/x.db"),
    ],
)
def test_urls_of_both_habits_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, wanted: str
) -> None:
    monkeypatch.chdir(tmp_path)
    source = open_source(url, job=None, ready_when=ReadyWhen.AUTO, samples=Samples.TERMINAL)
    assert source.url == "sqlite:///" + wanted.format(cwd=tmp_path)


def test_three_slashes_are_absolute_where_only_that_file_exists(path: Path) -> None:
    made(path).register()
    source = open_source(
        f"sqlite://{path}", job=None, ready_when=ReadyWhen.AUTO, samples=Samples.TERMINAL
    )
    source.open()
    assert source.url == f"sqlite:///{path}"
    source.close()


@pytest.mark.parametrize(
    "url", ["mysql://me:secret@host/db", "sqlite://", "sqlite:x", "file:x", "", ":memory:"]
)
def test_other_urls_are_refused_without_showing_a_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"sqlite:///relative\.db") as caught:
        open_source(url, job=None, ready_when=ReadyWhen.AUTO, samples=Samples.TERMINAL)
    assert "secret" not in str(caught.value)


# ---- looks --------------------------------------------------------------------------------------


def test_only_a_commit_counts_as_committed_and_any_touch_as_changed(
    rollouts: Rollouts, path: Path
) -> None:
    rollouts.register()
    source = opened(path)
    assert source.committed()
    source.look(NOTHING)
    os.utime(f"{path}-wal", (1, 1))
    assert (source.committed(), source.changed()) == (False, True)
    source.look(NOTHING)
    assert (source.committed(), source.changed()) == (False, False)
    rollouts.register()
    assert (source.committed(), source.changed()) == (True, True)


def test_a_writer_is_seen_at_it_from_its_first_write_to_its_commit(
    rollouts: Rollouts, path: Path
) -> None:
    rollouts.register(1)
    source = opened(path)
    source.look(NOTHING)
    with other_writer(path) as other:
        assert not source.is_writing()
        other.write()
        assert source.is_writing()
        assert not source.committed()
        other.commit()
        assert not source.is_writing()
        assert source.committed()


def test_looking_for_a_writer_takes_nothing_from_it_or_from_its_reader(
    rollouts: Rollouts, path: Path
) -> None:
    rollouts.register(1)
    source = opened(path)
    with other_writer(path) as other, source._transaction() as (connection, _):
        (before,) = connection.execute("SELECT count(*) FROM job_environments").fetchone()
        other.write()
        assert source.is_writing()
        other.commit()
        assert connection.execute("SELECT count(*) FROM job_environments").fetchone() == (before,)
        # It is still known to read: nobody may write over what it reads.
        assert rollouts.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 1
    assert rollouts.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0


def test_without_a_shm_nobody_can_tell_whether_there_is_a_writer(tmp_path: Path) -> None:
    OPEN.append(rollouts := make_rollouts(tmp_path / "old.db", journal="delete"))
    rollouts.complete(*rollouts.register(1))
    source = opened(tmp_path / "old.db")
    assert source.is_writing()
    source.close()
    assert source.is_writing()


def test_the_shm_does_not_stay_open(rollouts: Rollouts, path: Path) -> None:
    def how_often() -> int:
        links = (os.readlink(entry) for entry in os.scandir("/proc/self/fd") if entry.is_symlink())
        return sum(link.endswith("-shm") for link in links)

    rollouts.register(1)
    before = how_often()
    for _ in range(3):
        source = opened(path)
        assert how_often() == before + 1
        source.close()
    assert how_often() == before


def test_a_look_is_one_transaction_however_much_it_finds(rollouts: Rollouts, path: Path) -> None:
    ids = rollouts.register(300)
    source = opened(path)
    reconciled(source)
    with rollouts.together():
        for environment in ids[:200]:
            rollouts.step(environment)
        for environment in ids[200:]:
            rollouts.complete(environment)
    statements: list[str] = []
    assert source._database is not None
    assert source._database._connection is not None
    source._database._connection.set_trace_callback(statements.append)
    assert len(source.look(NOTHING, {ids[0]: rollouts.env_id(ids[0])}, ids[0]).candidates) == 100
    assert statements.count("BEGIN") == 1
    assert sum("SELECT e.id, e.env_id FROM" in statement for statement in statements) == 1


@pytest.fixture
def hundred(rollouts: Rollouts) -> list[int]:
    """A hundred that run, none of them finished."""
    with rollouts.together():
        ids = rollouts.register(100)
        for environment in ids:
            rollouts.end(environment)
    return ids


def looked_at(
    path: Path, rollouts: Rollouts, first: int, clock: Clock | None = None
) -> SqliteSource:
    """A source that has seen all, and to whom `first` is the one with the newest rows."""
    source = opened(path, clock=clock)
    reconciled(source)
    rollouts.step(first)
    assert source.look(NOTHING) == Look()
    return source


def test_whoever_got_the_newest_rows_is_asked_first_and_all_others_in_the_next_look(
    rollouts: Rollouts, path: Path, hundred: list[int]
) -> None:
    ids = hundred
    source = looked_at(path, rollouts, ids[7])
    rollouts.finish(ids[7], ids[3])
    first = source.look(NOTHING)
    assert (ids_of(first), first.more_after) == ([ids[7]], 0.01)
    assert (source.committed(), source.changed()) == (False, True)
    rollouts.complete(ids[8])
    assert source.committed()
    then = source.look(NOTHING)
    assert (ids_of(then), then.more_after) == ([ids[3], ids[8]], None)
    assert (source.committed(), source.changed()) == (False, False)


def test_one_commit_with_rows_is_no_reason_to_ask_all_others(
    rollouts: Rollouts, path: Path, hundred: list[int]
) -> None:
    source = looked_at(path, rollouts, hundred[7])
    with rollouts.together():  # both at once, as no writer does it
        rollouts.step(hundred[7])
        rollouts.finish(hundred[3])
    assert source.look(NOTHING) == Look(more_after=2.0)
    # They are asked when there is nothing else to do.
    assert (source.committed(), source.changed()) == (False, True)
    assert ids_of(source.look(NOTHING)) == [hundred[3]]
    assert not source.changed()


def test_one_commit_that_finishes_who_was_likely_is_no_reason_to_ask_all_others(
    rollouts: Rollouts, path: Path, hundred: list[int]
) -> None:
    source = looked_at(path, rollouts, hundred[7])
    with rollouts.together():
        rollouts.finish(hundred[7], hundred[3])
    look = source.look(NOTHING)
    assert (ids_of(look), look.more_after) == ([hundred[7]], 2.0)
    assert ids_of(source.look(NOTHING)) == [hundred[3]]


def test_a_commit_that_finishes_two_of_the_likely_may_have_finished_others(
    rollouts: Rollouts, path: Path, hundred: list[int]
) -> None:
    source = looked_at(path, rollouts, hundred[7])
    rollouts.step(hundred[8])
    source.look(NOTHING)
    with rollouts.together():
        rollouts.finish(hundred[7], hundred[8], hundred[3])
    assert source.look(NOTHING).more_after == 0.01


def test_a_commit_with_rows_of_one_that_is_finished_by_it_may_have_finished_others(
    rollouts: Rollouts, path: Path, hundred: list[int]
) -> None:
    source = looked_at(path, rollouts, hundred[7])
    with rollouts.together():
        rollouts.complete(hundred[7])
        rollouts.finish(hundred[3])
    assert source.look(NOTHING).more_after == 0.01


def test_with_two_commits_the_rows_may_be_of_one_and_the_end_of_another(
    rollouts: Rollouts, path: Path, hundred: list[int]
) -> None:
    source = looked_at(path, rollouts, hundred[7])
    rollouts.step(hundred[7])
    rollouts.finish(hundred[3])
    assert ids_of(source.look(NOTHING)) == [hundred[3]]


def test_a_commit_without_rows_that_finishes_nobody_likely_is_a_reason_to_ask_all_others(
    rollouts: Rollouts, path: Path, hundred: list[int]
) -> None:
    source = looked_at(path, rollouts, hundred[7])
    rollouts.finish(hundred[3])
    assert ids_of(source.look(NOTHING)) == [hundred[3]]


def test_however_many_commits_explain_themselves_all_others_are_asked_after_two_seconds(
    rollouts: Rollouts, path: Path, hundred: list[int]
) -> None:
    clock = Clock()
    source = looked_at(path, rollouts, hundred[7], clock)
    looks = []
    for turn in range(10):
        with rollouts.together():
            rollouts.step(hundred[7])
            if not turn:
                rollouts.finish(hundred[3])
        looks.append(source.look(NOTHING))
        clock.now += 0.25
    assert [ids_of(look) for look in looks] == [[]] * 8 + [[hundred[3]]] + [[]]
    after = [2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5, 0.25, None, 2.0]
    assert [look.more_after for look in looks] == after


def test_a_reader_that_is_told_of_changes_that_were_none_does_not_believe_it(
    rollouts: Rollouts, path: Path, hundred: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a guest is whose -shm nobody warrants: to it every transaction is a change."""
    source = looked_at(path, rollouts, hundred[7])
    source.look(NOTHING)
    versions = itertools.count(1_000)
    monkeypatch.setattr(Database, "version", lambda _: next(versions))
    source.look(NOTHING)
    assert not source.committed()
    rollouts.finish(hundred[3])
    assert source.committed()


def test_a_commit_that_comes_while_a_look_begins_may_be_any(
    rollouts: Rollouts, path: Path, hundred: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = looked_at(path, rollouts, hundred[7])
    rollouts.step(hundred[7])
    commits = Database.commits

    def then_one_more(database: Database) -> int | None:
        number = commits(database)
        monkeypatch.undo()
        rollouts.finish(hundred[3])
        return number

    monkeypatch.setattr(Database, "commits", then_one_more)
    assert ids_of(source.look(NOTHING)) == [hundred[3]]


@pytest.mark.parametrize("gate", [ReadyWhen.FINISHED, ReadyWhen.TERMINAL])
def test_more_than_one_transaction_may_read_is_read_in_several(
    rollouts: Rollouts, path: Path, gate: ReadyWhen, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = rollouts.register(30)
    source = opened(path, ready_when=gate)
    reconciled(source)
    with rollouts.together():
        for environment in ids[:5]:
            rollouts.step(environment)
        for environment in ids[5:]:
            rollouts.complete(environment)
    monkeypatch.setattr("spoold.sources.sqlite_news.SLICE", 4)
    assert ids_of(source.look(NOTHING)) == ids[5:]
    assert source.look(NOTHING) == Look()
    assert source.running == 5


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What happens once between two transactions of a look, which takes several."""
    acts: list[Callable[[], object]] = []
    monkeypatch.setattr("spoold.sources.sqlite_news.SLICE", 4)
    read_on = News.read_on

    def then_acted(news: News, *wanted: Any) -> bool:
        was_all = read_on(news, *wanted)
        while acts and not was_all:
            acts.pop()()
        return was_all

    monkeypatch.setattr(News, "read_on", then_acted)
    return acts


def nine_of_twelve(rollouts: Rollouts, path: Path) -> SqliteSource:
    """Return a source that has nine environments to find, in several transactions."""
    ids = rollouts.register(12)
    source = opened(path)
    reconciled(source)
    for environment in ids[:9]:
        rollouts.complete(environment)
    return source


def test_a_look_of_several_transactions_is_verified_by_the_last(
    rollouts: Rollouts, path: Path, between: list[Callable[[], object]]
) -> None:
    source = nine_of_twelve(rollouts, path)
    remembered = {1: rollouts.env_id(1)}
    between.append(lambda: rollouts.db.execute("DELETE FROM job_environments WHERE id = 1"))
    look = source.look(NOTHING, remembered, 1)
    assert not between
    assert look.deleted == (1,)


@pytest.mark.parametrize("remembered", [None, {1: ""}])
def test_what_comes_while_a_look_is_under_way_is_found_by_the_next(
    rollouts: Rollouts,
    path: Path,
    between: list[Callable[[], object]],
    remembered: dict[int, str] | None,
) -> None:
    source = nine_of_twelve(rollouts, path)
    if remembered:
        remembered = {1: rollouts.env_id(1)}
    between.append(lambda: rollouts.complete(12))
    assert ids_of(source.look(NOTHING, remembered, 1)) == list(range(1, 10))
    assert not between
    assert ids_of(source.look(NOTHING, remembered, 1)) == [12]


def went_back(rollouts: Rollouts, *, steps: int) -> None:
    """Make it the database that it was when it had so many step rows, and go on otherwise."""
    with rollouts.together():
        rollouts.db.execute(f"DELETE FROM session_steps WHERE id > {steps}")
        rollouts.db.execute(
            f"UPDATE sqlite_sequence SET seq = {steps} WHERE name = 'session_steps'"
        )
        rollouts.db.execute("UPDATE job_environments SET finished = 0")
    rollouts.complete(12)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_database_that_goes_back_while_a_look_is_under_way_is_looked_at_anew(
    rollouts: Rollouts, path: Path, between: list[Callable[[], object]], steps: int
) -> None:
    source = nine_of_twelve(rollouts, path)
    between.append(lambda: went_back(rollouts, steps=steps))
    assert source.look(NOTHING) == Look(went_back=True)
    assert not between
    assert ids_of(reconciled(source)) == [12]


# ---- rows ---------------------------------------------------------------------------------------


def completed(rollouts: Rollouts, number: int) -> list[int]:
    """Register environments, complete them, and return their ids."""
    ids = rollouts.register(number)
    for environment in ids:
        rollouts.complete(environment)
    return ids


def is_open(rollouts: Rollouts) -> bool:
    """Whether a reader holds up a checkpoint of what is committed after it began."""
    rollouts.db.execute("PRAGMA busy_timeout = 0")
    rollouts.register()
    busy, _, _ = rollouts.db.execute("PRAGMA wal_checkpoint(truncate)").fetchone()
    return bool(busy)


def test_a_transaction_is_over_before_the_last_row_and_what_takes_long_are_handed_on(
    rollouts: Rollouts, path: Path
) -> None:
    quick, big, walked, big_walked, quick_too, _last = ids = rollouts.register(6)
    for environment in ids:
        text = "x" * (sqlite_rows._BIG_BYTES if environment in (big, big_walked) else 1)
        rollouts.complete(environment, messages=[{"role": "user", "content": text}])
    for environment in (walked, big_walked):
        rollouts.step(environment, messages=[{"role": "user", "content": "after the end"}])
    held = {one: is_open(rollouts) for one, _ in opened(path).read(ids)}
    assert [one for one in ids if held[one]] == [quick, walked, quick_too]


def test_an_old_transaction_is_over_before_a_row_is_handed_on(
    rollouts: Rollouts, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_rows, "MAX_TRANSACTION_SECONDS", -1.0)
    ids = completed(rollouts, 3)
    assert [is_open(rollouts) for _ in opened(path).read(ids)] == [False] * 3


def test_whoever_wants_no_more_rows_leaves_the_transaction_and_keeps_the_connection(
    rollouts: Rollouts, path: Path
) -> None:
    ids = completed(rollouts, 3)
    source = opened(path)
    connection = source._database
    for _ in range(2):
        rows = source.read(ids)
        assert next(rows)[0] == ids[0]
        assert is_open(rollouts)
        rows.close()
        assert not is_open(rollouts)
    assert connection is not None
    assert connection.is_open
    assert source._database is connection


class NeverRolledBack:
    """A connection whose transaction does not end as it is asked to."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def execute(self, query: str, *values: Any) -> sqlite3.Cursor:
        if query == "ROLLBACK":
            raise sqlite3.OperationalError("disk I/O error")
        return self.connection.execute(query, *values)

    def close(self) -> None:
        self.connection.close()


def test_a_transaction_that_cannot_be_left_is_left_with_its_connection(
    rollouts: Rollouts, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = completed(rollouts, 3)
    source = opened(path)
    database = source._database
    assert database is not None
    assert database._connection is not None
    monkeypatch.setattr(database, "_connection", NeverRolledBack(database._connection))
    rows = source.read(ids)
    assert next(rows)[0] == ids[0]
    rows.close()
    assert not database.is_open
    assert not is_open(rollouts)
    assert [one for one, _ in source.read(ids)] == ids


# ---- identity -----------------------------------------------------------------------------------


def test_another_file_at_the_path_is_seen_and_opened_anew(path: Path, tmp_path: Path) -> None:
    old = made(path)
    old.complete(*old.register())
    source = opened(path)
    assert not source.moved()
    new = made(tmp_path / "new.db")
    new.register(2)
    new.complete(2)
    new.close()
    old.close()
    os.unlink(path)
    assert source.moved()
    os.rename(tmp_path / "new.db", path)
    assert source.moved()
    source.close()
    with pytest.raises(SourceUnavailable, match="still belongs to the old file"):
        source.open()
    for suffix in ("-wal", "-shm"):
        os.unlink(f"{path}{suffix}")
    source.open()
    assert not source.moved()
    assert ids_of(reconciled(source)) == [2]


def inode_of_wal(path: Path) -> int:
    return os.stat(f"{path}-wal").st_ino


def test_a_wal_is_not_taken_for_a_deleted_one_whose_inode_was_free_again(
    path: Path, tmp_path: Path
) -> None:
    old = made(path)
    old.complete(*old.register())
    source = opened(path)
    inode = inode_of_wal(path)
    source.close()
    new = made(tmp_path / "new.db")
    new.register(2)
    new.close()
    old.close()  # and with it its -wal
    path.rename(f"{path}-old")
    os.rename(tmp_path / "new.db", path)
    OPEN.append(new := open_rollouts(path))
    new.complete(2)
    assert inode_of_wal(path) != inode
    assert source.open()
    assert ids_of(reconciled(source)) == [2]


def test_a_database_that_was_away_is_known_again(path: Path) -> None:
    rollouts = made(path)
    (one,) = rollouts.register()
    source = opened(path)
    files = list(path.parent.glob(f"{path.name}*"))
    for file in files:
        file.rename(f"{file}.away")
    assert source.moved()
    source.close()
    with pytest.raises(SourceUnavailable, match="no database"):
        source.open()
    for file in files:
        os.rename(f"{file}.away", file)
    assert not source.open()
    rollouts.complete(one)
    assert ids_of(source.look(NOTHING)) == [one]


def descriptors_of(path: Path) -> list[str]:
    """Return what this process holds of a database, (deleted) or not."""
    held = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            held.append(os.readlink(fd))
    return [name for name in held if name.startswith(str(path))]


def test_no_deleted_database_takes_room_on_the_disk_once_that_was_seen(path: Path) -> None:
    rollouts = made(path)
    rollouts.register()
    source = opened(path)
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    rollouts.close()
    source.close()
    with pytest.raises(SourceUnavailable, match="no database"):
        source.open()
    assert descriptors_of(path) == []


def test_nor_does_a_wal_whose_database_cannot_be_opened(path: Path) -> None:
    rollouts = made(path)
    rollouts.register()
    source = opened(path)
    source.close()
    rollouts.close()
    alone = open_rollouts(path)
    OPEN.append(alone)
    alone.db.execute("PRAGMA locking_mode = exclusive")
    alone.register()
    with pytest.raises(SourceUnavailable, match="locked"):
        source.open()
    assert [name for name in descriptors_of(path) if name.endswith("(deleted)")] == []


def test_whoever_drops_a_source_lets_go_of_its_database(path: Path) -> None:
    rollouts = made(path)
    rollouts.register()
    rollouts.close()
    source = SqliteSource(
        [str(path)], job=None, ready_when=ReadyWhen.AUTO, samples=Samples.TERMINAL
    )
    gc.disable()
    try:
        source.open()
        reconciled(source)
        source.close()
        assert descriptors_of(path) == [f"{path}-wal"]
        del source
        assert descriptors_of(path) == []
    finally:
        gc.enable()


def test_a_database_that_is_replaced_before_it_is_opened_is_no_old_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(path).register()
    source = opened(path)
    source.close()
    made(Path(f"{path}-new")).close()
    os.replace(f"{path}-new", path)
    with monkeypatch.context() as patched:
        patched.setattr(SqliteSource, "moved", lambda self: False)
        with pytest.raises(SourceUnavailable, match="is another file now"):
            source.open()
    with pytest.raises(SourceUnavailable, match="still belongs to the old file"):
        source.open()


@pytest.mark.parametrize("removed", [("-shm",), ("-wal", "-shm")])
def test_when_others_use_a_new_wal_or_shm_their_commits_are_seen(
    path: Path, removed: tuple[str, ...]
) -> None:
    rollouts = made(path)
    rollouts.register(1, group="")
    rollouts.close()
    source = opened(path)
    reconciled(source)
    with other_writer(path) as first:
        for one in (2, 3):
            first.write()
            first.commit()
            assert ids_of(source.look(NOTHING)) == [one]
            for suffix in removed if one == 2 else ():
                os.unlink(f"{path}{suffix}")  # does no harm yet
    with other_writer(path) as second:
        second.write()
        second.commit()
        with pytest.raises(SourceUnavailable, match="there is another one"):
            source.changed()
        assert source.changed()
        look = source.look(NOTHING)
        if "-wal" in removed:
            assert look.went_back, "what was committed is lost"
        else:
            assert ids_of(look) == [4]


# ---- commits ------------------------------------------------------------------------------------


def timeless(path: str) -> sqlite_open.Facts | None:
    """What stat says of a file, without what a write changes."""
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        return None
    return facts.st_dev, facts.st_ino, 0, 0


@pytest.mark.parametrize("mode", ["wal", "delete", "delete, a -shm beside it"])
def test_each_commit_is_noticed_whatever_the_times_of_files_say(
    path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    rollouts = made(path)
    rollouts.register(4)
    if mode != "wal":
        shm = Path(f"{path}-shm").read_bytes()
        rollouts.db.execute("PRAGMA journal_mode = delete")
        if mode != "delete":
            Path(f"{path}-shm").write_bytes(shm)
    monkeypatch.setattr(sqlite_open, "_facts", timeless)
    source = opened(path)
    reconciled(source)
    for one in range(1, 5):
        source.look(NOTHING)
        assert not source.changed()
        assert not source.committed()
        rollouts.complete(one)
        assert source.committed()
        assert source.changed()
        assert ids_of(source.look(NOTHING)) == [one]


def test_a_commit_is_noticed_where_their_number_is_that_of_before(
    path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = rollouts.register()
    source = opened(path)
    reconciled(source)
    source.look(NOTHING)
    monkeypatch.setattr(sqlite_open, "_facts", timeless)
    monkeypatch.setattr(Database, "commits", lambda self: 1)  # it begins anew after a recovery
    source.look(NOTHING)
    assert not source.changed()
    rollouts.complete(one)
    assert source.changed()


# ---- more of identity ---------------------------------------------------------------------------


def test_a_database_that_is_replaced_while_it_is_opened_is_opened_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(path).register()
    new = made(Path(f"{path}-new"))
    new.register(2)
    new.complete(2)
    new.close()
    connect = sqlite3.connect

    def replaced(*args: Any, **options: Any) -> sqlite3.Connection:
        monkeypatch.setattr(sqlite3, "connect", connect)
        connection = connect(*args, **options)
        os.replace(f"{path}-new", path)
        return connection

    monkeypatch.setattr(sqlite3, "connect", replaced)
    with pytest.raises(SourceUnavailable, match="was replaced while it was opened"):
        opened(path)
    for suffix in ("-wal", "-shm"):
        os.unlink(f"{path}{suffix}")
    assert ids_of(reconciled(opened(path))) == [2]


def test_a_copy_opened_for_the_first_time_needs_no_sidecars(path: Path, tmp_path: Path) -> None:
    rollouts = made(path)
    rollouts.complete(*rollouts.register())
    rollouts.close()
    assert os.listdir(tmp_path) == ["rollouts.db"]
    shutil.copy(path, tmp_path / "copy.db")
    assert ids_of(reconciled(opened(tmp_path / "copy.db"))) == [1]


def test_a_link_is_followed_to_where_the_wal_lies(path: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    rollouts = made(tmp_path / "real" / "rollouts.db")
    rollouts.register()
    os.symlink("real/rollouts.db", path)
    source = opened(path)
    source.look(NOTHING)
    assert not source.changed()
    rollouts.complete(1)
    assert source.changed()
    assert ids_of(source.look(NOTHING)) == [1]
    assert sorted(os.listdir(tmp_path)) == ["real", "rollouts.db"]
    assert not source.moved()
    made(tmp_path / "other.db")
    path.unlink()
    os.symlink("other.db", path)
    assert source.moved()


def test_a_database_that_appears_later_is_opened_then(path: Path) -> None:
    source = SqliteSource(
        [str(path)], job=None, ready_when=ReadyWhen.AUTO, samples=Samples.TERMINAL
    )
    with pytest.raises(SourceUnavailable):
        source.open()
    writer = open_rollouts(path)
    with pytest.raises(SourceUnavailable):
        source.open()
    writer.close()
    path.unlink(missing_ok=True)
    made(path).register()
    source.open()
    assert source.job == "job-1"
    source.close()


def test_however_slow_the_disk_each_transaction_gets_on_by_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = made(tmp_path / "rollout.db")
    (one,) = rollouts.register(1)
    rollouts.end(one, completed=False)
    for _ in range(3):
        rollouts.step(one, meta={"event_type": "episode_summary"})
    rollouts.finish(one)
    monkeypatch.setattr(sqlite, "MAX_TRANSACTION_SECONDS", -1.0)
    monkeypatch.setattr(sqlite_rows, "MAX_TRANSACTION_SECONDS", -1.0)
    source = opened(tmp_path / "rollout.db")
    database = source._database
    assert database is not None
    begun: list[str] = []
    database._connection.set_trace_callback(begun.append)  # type: ignore[union-attr]

    def not_for_ever() -> float:
        assert begun.count("BEGIN") < 50, "it does not get on"
        return 0.0

    monkeypatch.setattr(sqlite_rows.time, "monotonic", not_for_ever)
    assert rows_of(source, one) == {one: [1]}
    assert ids_of(reconciled(source)) == [one]
