"""What a look, a reconcile and a read find, and what they don't touch."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroaring import BitMap64

from spoold.errors import ConfigError, SourceReplaced, SourceSchemaError, SourceUnavailable
from spoold.model import Candidate, Look, ReadyWhen, Samples
from spoold.sources import open_source, sqlite, sqlite_rows
from spoold.sources.sqlite import SqliteSource
from tests.support.rollouts import GENERATIONS, Rollouts, make_rollouts, open_rollouts

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


@pytest.mark.parametrize("generation", GENERATIONS)
def test_auto_waits_for_finished_where_reward_is_nullable(path: Path, generation: str) -> None:
    made(path, generation).register()
    wanted = ReadyWhen.TERMINAL if generation == "first" else ReadyWhen.FINISHED
    assert opened(path).ready_when is wanted


def test_a_file_that_is_not_there_yet_is_waited_for(path: Path) -> None:
    with pytest.raises(SourceUnavailable, match="no database at"):
        opened(path)
    assert not path.exists()


def test_an_empty_file_is_a_database_without_tables_yet(path: Path) -> None:
    path.touch()
    with pytest.raises(SourceUnavailable, match="no tables yet"):
        opened(path)
    assert os.listdir(path.parent) == ["rollouts.db"]


def test_a_database_without_environments_has_no_job_yet(rollouts: Rollouts, path: Path) -> None:
    with pytest.raises(SourceUnavailable, match="no job yet"):
        opened(path)


def test_a_named_job_that_is_not_there_is_waited_for_and_the_others_named(
    rollouts: Rollouts, path: Path
) -> None:
    rollouts.register(job="b")
    rollouts.register(job="a")
    with pytest.raises(SourceUnavailable, match="job mine yet, only of a, b"):
        opened(path, job="mine")


def test_several_jobs_without_a_name_are_listed(rollouts: Rollouts, path: Path) -> None:
    rollouts.register(job="b")
    rollouts.register(job="a")
    with pytest.raises(ConfigError, match="several jobs: a, b; name one with --job"):
        opened(path)
    assert opened(path, job="a").job == "a"


def test_a_second_job_does_not_disturb_a_source_that_is_open(
    rollouts: Rollouts, path: Path
) -> None:
    rollouts.register(job="a")
    source = opened(path)
    rollouts.register(job="b")
    source.close()
    source.open()
    assert source.job == "a"


def test_other_tables_only_are_no_rollout_database(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE t (x)")
    db.close()
    with pytest.raises(SourceSchemaError, match="no table job_environments"):
        opened(path)


@pytest.mark.parametrize(
    ("table", "column"),
    [("job_environments", "finished"), ("session_steps", "llm_model"), ("session_steps", "reward")],
)
def test_a_missing_column_is_named(rollouts: Rollouts, path: Path, table: str, column: str) -> None:
    rollouts.db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    with pytest.raises(SourceSchemaError, match=f"table {table} has no column {column}"):
        opened(path)


def test_neither_meta_column_is_named(rollouts: Rollouts, path: Path) -> None:
    rollouts.db.execute("ALTER TABLE session_steps DROP COLUMN meta_json")
    with pytest.raises(SourceSchemaError, match="no column meta_json or env_state"):
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
    "url", ["postgresql://me:secret@host/db", "sqlite://", "sqlite:x", "file:x", "", ":memory:"]
)
def test_other_urls_are_refused_without_showing_a_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"sqlite:///relative\.db") as caught:
        open_source(url, job=None, ready_when=ReadyWhen.AUTO, samples=Samples.TERMINAL)
    assert "secret" not in str(caught.value)


# ---- looks --------------------------------------------------------------------------------------


def test_an_environment_is_offered_when_it_is_finished_and_has_rows(
    rollouts: Rollouts, path: Path
) -> None:
    first, second = rollouts.register(2, group="g7")
    source = opened(path)
    assert source.look(NOTHING) == Look()
    rollouts.end(first)
    rollouts.finish(second)
    assert source.look(NOTHING) == Look()
    assert source.running == 1
    rollouts.finish(first)
    assert source.look(NOTHING) == Look(candidates=(Candidate(first, "g7"),))
    assert source.running == 0


def test_rows_that_come_after_finished_are_found(rollouts: Rollouts, path: Path) -> None:
    (environment,) = rollouts.register()
    rollouts.finish(environment)
    source = opened(path)
    assert reconciled(source) == Look(missing=(environment,))
    pk = rollouts.end(environment)
    assert ids_of(source.look(NOTHING)) == [environment]
    assert rows_of(source, environment) == {environment: [pk]}


def test_a_candidate_is_offered_again_only_for_new_rows_or_by_a_reconcile(
    rollouts: Rollouts, path: Path
) -> None:
    (environment,) = rollouts.register()
    source = opened(path)
    rollouts.complete(environment)
    assert ids_of(source.look(NOTHING)) == [environment]
    assert ids_of(source.look(NOTHING)) == []
    rollouts.step(environment)
    assert ids_of(source.look(NOTHING)) == [environment]
    assert ids_of(reconciled(source)) == [environment]


def test_without_a_usable_row_nothing_is_read_again_until_rows_come(
    rollouts: Rollouts, path: Path
) -> None:
    (environment,) = rollouts.register()
    source = opened(path)
    rollouts.step(environment)
    rollouts.finish(environment)
    assert ids_of(source.look(NOTHING)) == [environment]
    assert rows_of(source, environment) == {environment: []}
    assert source.changed()
    assert source.look(NOTHING) == Look(missing=(environment,))
    assert not source.changed()
    assert reconciled(source) == Look(missing=(environment,))
    assert source.look(NOTHING) == Look()
    pk = rollouts.end(environment)
    assert ids_of(source.look(NOTHING)) == [environment]
    assert rows_of(source, environment) == {environment: [pk]}


def test_flags_that_flip_in_place_are_found_by_a_reconcile(rollouts: Rollouts, path: Path) -> None:
    finished, running = rollouts.register(2)
    pks = [rollouts.step(finished), rollouts.step(running)]
    rollouts.finish(finished)
    source = opened(path)
    assert ids_of(reconciled(source)) == [finished]
    assert rows_of(source, finished) == {finished: []}
    rollouts.update_step(pks[0], is_terminal=1)
    assert ids_of(source.look(NOTHING)) == []
    assert ids_of(reconciled(source)) == [finished]
    assert rows_of(source, finished) == {finished: [pks[0]]}


def test_terminal_offers_what_has_ended_and_reconciles_flags_in_place(
    rollouts: Rollouts, path: Path
) -> None:
    first, second = rollouts.register(2)
    source = opened(path, ready_when=ReadyWhen.TERMINAL)
    pk = rollouts.step(first)
    rollouts.step(second, truncated=True)
    assert ids_of(source.look(NOTHING)) == [second]
    assert source.running == 1
    rollouts.update_step(pk, is_terminal=1)
    assert ids_of(source.look(NOTHING)) == []
    assert ids_of(reconciled(source, BitMap64([second]))) == [first]


def test_new_rows_of_what_is_delivered_are_late_once(rollouts: Rollouts, path: Path) -> None:
    (environment,) = rollouts.register()
    rollouts.complete(environment)
    source = opened(path)
    rollouts.step(environment)
    skip = BitMap64([environment])
    assert source.look(skip) == Look(late=(environment,))
    assert source.look(skip) == Look()


def test_deleted_environments_and_other_jobs_are_not_seen(rollouts: Rollouts, path: Path) -> None:
    mine, deleted = rollouts.register(2)
    (other,) = rollouts.register(job="other")
    source = opened(path, job="job-1")
    rollouts.delete(deleted)
    for environment in (mine, deleted, other):
        rollouts.complete(environment)
    assert ids_of(source.look(NOTHING)) == [mine]
    assert ids_of(reconciled(source)) == [mine]
    assert rows_of(source, mine, deleted, other)[deleted] == []
    assert rows_of(source, other) == {other: []}


def test_a_candidate_that_is_deleted_is_gone_at_the_next_reconcile(
    rollouts: Rollouts, path: Path
) -> None:
    deleted, unfinished, erased = rollouts.register(3)
    for environment in (deleted, unfinished, erased):
        rollouts.complete(environment)
    source = opened(path)
    assert len(reconciled(source).candidates) == 3
    rollouts.delete(deleted)
    rollouts.finish(unfinished, finished=0)
    rollouts.db.execute("DELETE FROM job_environments WHERE id = ?", (erased,))
    assert reconciled(source).gone == (deleted, unfinished, erased)
    assert reconciled(source) == Look()


def test_an_older_environment_that_completes_later_is_found_at_any_distance(
    rollouts: Rollouts, path: Path
) -> None:
    with rollouts.together():
        ids = rollouts.register(3_000)
        for environment in ids:
            rollouts.step(environment)
    source = opened(path)
    assert reconciled(source) == Look()
    assert source.running == 3_000
    for environment in (ids[-1], ids[1_500], ids[0]):
        rollouts.complete(environment)
        assert ids_of(source.look(NOTHING)) == [environment]


def test_changed_is_false_until_somebody_commits(rollouts: Rollouts, path: Path) -> None:
    rollouts.register()
    source = opened(path)
    assert source.changed()
    source.look(NOTHING)
    assert not source.changed()
    rollouts.register()
    assert source.changed()


def test_a_failed_look_keeps_what_it_has_not_seen_to_the_end(
    rollouts: Rollouts, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (environment,) = rollouts.register()
    source = opened(path)
    rollouts.complete(environment)

    def fail(ids: object) -> list[Candidate]:
        raise SourceUnavailable("locked")

    with monkeypatch.context() as patch:
        patch.setattr(source, "_finished_among", fail)
        with pytest.raises(SourceUnavailable):
            source.look(NOTHING)
    assert source.changed()
    assert ids_of(source.look(NOTHING)) == [environment]


def test_quiet_environments_are_left_to_the_reconcile(rollouts: Rollouts, path: Path) -> None:
    quiet, lively = rollouts.register(2)
    clock = Clock()
    source = opened(path, clock=clock)
    rollouts.step(quiet)
    source.look(NOTHING)
    for _ in range(3):
        clock.now += 601
        rollouts.step(lively)
        source.look(NOTHING)
    rollouts.finish(quiet, lively)
    assert ids_of(source.look(NOTHING)) == [lively]
    assert ids_of(reconciled(source)) == [quiet, lively]


def test_a_reconcile_does_not_touch_the_database_where_all_is_delivered(
    rollouts: Rollouts, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rollouts.together():
        ids = rollouts.register(100)
    monkeypatch.setattr("spoold.sources.sqlite.SLICE", 10)
    for environment in ids:
        rollouts.complete(environment)
    source = opened(path)
    skip = BitMap64(set(ids) - {55})
    looks = list(source.reconcile(skip))
    assert len(looks) == 1
    assert ids_of(looks[0]) == [55]


def test_a_reconcile_jumps_over_ids_that_do_not_exist(rollouts: Rollouts, path: Path) -> None:
    rollouts.complete(*rollouts.register())
    rollouts.db.execute("UPDATE sqlite_sequence SET seq = 50000000000")
    far = rollouts.register()[0]
    rollouts.complete(far)
    source = opened(path)
    assert ids_of(reconciled(source)) == [1, far]


# ---- rows ---------------------------------------------------------------------------------------


def test_rows_come_in_the_order_that_was_asked_for(rollouts: Rollouts, path: Path) -> None:
    ids = rollouts.register(5)
    pks = {environment: rollouts.complete(environment) for environment in reversed(ids)}
    source = opened(path)
    wanted = [ids[3], ids[0], ids[4]]
    assert [(one, rows[0].pk) for one, rows in source.read(wanted)] == [
        (one, pks[one]) for one in wanted
    ]


def test_rows_bigger_than_a_transaction_holds_all_come(rollouts: Rollouts, path: Path) -> None:
    ids = rollouts.register(12)
    pks = {}
    for environment in reversed(ids):
        size = (3 << 20) if environment % 2 else 10
        pks[environment] = rollouts.complete(environment, response="x" * size)
    source = opened(path)
    for samples in Samples:
        source = opened(path, samples=samples)
        for _ in range(2):
            assert rows_of(source, *ids) == {one: [pk] for one, pk in pks.items()}


def test_no_transaction_is_open_while_a_row_is_in_the_callers_hands(
    rollouts: Rollouts, path: Path
) -> None:
    ids = rollouts.register(3)
    for environment in ids:
        rollouts.complete(environment)
    source = opened(path)
    for _ in source.read(ids):
        busy, left, moved = rollouts.db.execute("PRAGMA wal_checkpoint(truncate)").fetchone()
        assert (busy, left, moved) == (0, 0, 0)


def test_steps_are_those_of_the_last_run_and_of_one_model(rollouts: Rollouts, path: Path) -> None:
    (environment,) = rollouts.register()
    rollouts.step(environment)
    rollouts.end(environment)
    wanted = [rollouts.step(environment)]
    rollouts.step(environment, model="judge")
    rollouts.step(environment, meta={"synthetic_stop": True})
    wanted.append(rollouts.complete(environment))
    rollouts.step(environment)
    source = opened(path, samples=Samples.STEPS)
    assert rows_of(source, environment) == {environment: wanted}


def test_a_summary_on_top_hides_no_completed_row_below(rollouts: Rollouts, path: Path) -> None:
    (environment,) = rollouts.register()
    pk = rollouts.complete(environment)
    rollouts.step(environment, model="judge", terminal=True)
    rollouts.end(environment, messages=[], response="", meta={"event_type": "evaluation_summary"})
    rollouts.step(environment, job="other", completed=True)
    source = opened(path)
    assert rows_of(source, environment) == {environment: [pk]}


# ---- identity -----------------------------------------------------------------------------------


def test_an_environment_that_is_another_one_now_is_a_replacement(
    rollouts: Rollouts, path: Path
) -> None:
    ids = rollouts.register(3)
    source = opened(path)
    remembered = {environment: rollouts.env_id(environment) for environment in ids}
    source.verify(remembered, 3)
    rollouts.db.execute("DELETE FROM job_environments WHERE id = 1")
    source.verify(remembered, 3)
    with pytest.raises(SourceReplaced, match="environment 2 is another one"):
        source.verify({**remembered, 2: "someone else"}, 3)
    with pytest.raises(SourceReplaced, match="given ids up to 3"):
        source.verify(remembered, 4)


def test_an_emptied_database_is_not_there_yet(rollouts: Rollouts, path: Path) -> None:
    rollouts.register()
    source = opened(path)
    rollouts.db.execute("DELETE FROM job_environments")
    with pytest.raises(SourceUnavailable, match="no environments yet"):
        source.verify({1: "x"}, 1)


def test_ids_that_go_backwards_are_said_and_nothing_is_missed_after(
    rollouts: Rollouts, path: Path
) -> None:
    for environment in rollouts.register(5):
        rollouts.complete(environment)
    source = opened(path)
    assert source.look(NOTHING) == Look()
    with rollouts.together():
        rollouts.db.execute("DELETE FROM session_steps")
        rollouts.db.execute("UPDATE sqlite_sequence SET seq = 0 WHERE name = 'session_steps'")
        rollouts.complete(2)
    assert source.look(NOTHING) == Look(went_back=True)
    assert source.changed()
    assert ids_of(reconciled(source)) == [2]
    rollouts.complete(4)
    assert ids_of(source.look(NOTHING)) == [4]


def test_rows_deleted_from_the_top_are_no_way_back(rollouts: Rollouts, path: Path) -> None:
    first, second = rollouts.register(2)
    rollouts.complete(first)
    rollouts.end(second)
    source = opened(path)
    reconciled(source)
    rollouts.db.execute("DELETE FROM session_steps WHERE id = 2")
    assert not source.look(NOTHING).went_back
    pk = rollouts.complete(second)
    assert pk == 3
    assert ids_of(source.look(NOTHING)) == [second]


def test_a_migration_under_the_source_loses_nothing(path: Path) -> None:
    rollouts = made(path, "second")
    first, second = rollouts.register(2)
    rollouts.complete(first, meta={"weight_version": 4})
    source = opened(path)
    assert ids_of(reconciled(source)) == [first]
    rollouts.rebuild_steps("newest")
    rollouts.complete(second)
    assert ids_of(source.look(NOTHING)) == [second]
    (_, (row,)), (_, (_,)) = source.read([first, second])
    assert row.meta == b'{"weight_version": 4}'


def test_a_table_that_is_away_for_a_moment_is_waited_for(rollouts: Rollouts, path: Path) -> None:
    rollouts.register()
    source = opened(path)
    rollouts.db.execute("ALTER TABLE session_steps RENAME TO elsewhere")
    with pytest.raises(SourceUnavailable, match="no table session_steps"):
        source.look(NOTHING)
    rollouts.db.execute("ALTER TABLE elsewhere RENAME TO session_steps")
    assert source.look(NOTHING) == Look()


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


def test_a_row_that_was_read_before_a_look_came_to_it_is_no_news(tmp_path: Path) -> None:
    rollouts = make_rollouts(tmp_path / "rollout.db")
    one, other = rollouts.register(2)
    rollouts.step(one)
    source = open_source(
        str(tmp_path / "rollout.db"),
        job=None,
        ready_when=ReadyWhen.FINISHED,
        samples=Samples.TERMINAL,
    )
    source.open()
    list(source.reconcile(BitMap64()))
    rollouts.complete(one)
    assert [rows[-1].environment for _, rows in source.read([one]) if rows] == [one]
    skip = BitMap64([one])
    assert source.look(skip).late == ()
    rollouts.end(one)
    assert source.look(skip).late == (one,)
    rollouts.complete(other)
    assert [candidate.id for candidate in source.look(skip).candidates] == [other]
    source.close()
    rollouts.close()


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
