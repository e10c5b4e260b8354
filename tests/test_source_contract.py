"""What every source of completed environments does: the same tests over each kind of database.

SQLite, and PostgreSQL with tables as one ORM makes them and as another does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyroaring import BitMap64

from spoold.errors import ConfigError, SourceReplaced, SourceSchemaError, SourceUnavailable
from spoold.model import Candidate, Look, ReadyWhen, Samples
from spoold.sources import Source
from spoold.sources.watched import Watched
from tests.support.postgres import make_postgres
from tests.support.rollouts import GENERATIONS, Rollouts, make_rollouts
from tests.support.servers import postgres_server

NOTHING = BitMap64()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Home:
    """Where a database is: makes it, and opens sources on it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self._path = str(folder / "rollouts.db")
        self._url = ""
        self._at_end: list[Callable[[], None]] = []

    def made(self, generation: str = "newest") -> Rollouts:
        if self.kind == "sqlite":
            rollouts = make_rollouts(self._path, generation)
            self._at_end.append(rollouts.close)
            return rollouts
        made = make_postgres(postgres_server(), generation, self.kind.removeprefix("postgres-"))
        self._url = made.url
        self._at_end.append(made.drop)
        return made

    def opened(
        self,
        *,
        job: str | None = None,
        ready_when: ReadyWhen = ReadyWhen.AUTO,
        samples: Samples = Samples.TERMINAL,
        clock: Clock | None = None,
    ) -> Source:
        clock = clock or Clock()
        source: Source
        if self.kind == "sqlite":
            from spoold.sources.sqlite import SqliteSource

            source = SqliteSource(
                [self._path], job=job, ready_when=ready_when, samples=samples, clock=clock
            )
        else:
            from spoold.sources.postgres import PostgresSource

            source = PostgresSource(
                self._url, job=job, ready_when=ready_when, samples=samples, clock=clock
            )
        self._at_end.append(source.close)
        source.open()
        return source

    @property
    def module(self) -> str:
        return "spoold.sources.sqlite" if self.kind == "sqlite" else "spoold.sources.postgres"

    def close(self) -> None:
        for act in reversed(self._at_end):
            act()


@pytest.fixture(params=["sqlite", "postgres-plain", "postgres-typed"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    home = Home(request.param, tmp_path)
    yield home
    home.close()


@pytest.fixture
def rollouts(home: Home) -> Rollouts:
    return home.made()


def reconciled(source: Source, skip: BitMap64 = NOTHING) -> Look:
    looks = list(source.reconcile(skip))
    return Look(
        candidates=tuple(c for look in looks for c in look.candidates),
        missing=tuple(one for look in looks for one in look.missing),
        gone=tuple(one for look in looks for one in look.gone),
    )


def ids_of(look: Look) -> list[int]:
    return [candidate.id for candidate in look.candidates]


def rows_of(source: Source, *ids: int) -> dict[int, list[int]]:
    return {environment: [row.pk for row in rows] for environment, rows in source.read(ids)}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_auto_waits_for_finished_where_reward_is_nullable(home: Home, generation: str) -> None:
    home.made(generation).register()
    wanted = ReadyWhen.TERMINAL if generation == "first" else ReadyWhen.FINISHED
    assert home.opened().ready_when is wanted


def test_a_database_without_environments_has_no_job_yet(rollouts: Rollouts, home: Home) -> None:
    with pytest.raises(SourceUnavailable, match="no job yet"):
        home.opened()


def test_a_named_job_that_is_not_there_is_waited_for_and_the_others_named(
    rollouts: Rollouts, home: Home
) -> None:
    rollouts.register(job="b")
    rollouts.register(job="a")
    with pytest.raises(SourceUnavailable, match="job mine yet, only of a, b"):
        home.opened(job="mine")


def test_several_jobs_without_a_name_are_listed(rollouts: Rollouts, home: Home) -> None:
    rollouts.register(job="b")
    rollouts.register(job="a")
    with pytest.raises(ConfigError, match="several jobs: a, b; name one with --job"):
        home.opened()
    assert home.opened(job="a").job == "a"


def test_a_second_job_does_not_disturb_a_source_that_is_open(
    rollouts: Rollouts, home: Home
) -> None:
    rollouts.register(job="a")
    source = home.opened()
    rollouts.register(job="b")
    source.close()
    source.open()
    assert source.job == "a"


@pytest.mark.parametrize(
    ("table", "column"),
    [("job_environments", "finished"), ("session_steps", "llm_model"), ("session_steps", "reward")],
)
def test_a_missing_column_is_named(rollouts: Rollouts, home: Home, table: str, column: str) -> None:
    rollouts.db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    with pytest.raises(SourceSchemaError, match=f"table {table} has no column {column}"):
        home.opened()


def test_neither_meta_column_is_named(rollouts: Rollouts, home: Home) -> None:
    rollouts.db.execute("ALTER TABLE session_steps DROP COLUMN meta_json")
    with pytest.raises(SourceSchemaError, match="no column meta_json or env_state"):
        home.opened()


def test_an_environment_is_offered_when_it_is_finished_and_has_rows(
    rollouts: Rollouts, home: Home
) -> None:
    first, second = rollouts.register(2, group="g7")
    source = home.opened()
    assert source.look(NOTHING) == Look()
    rollouts.end(first)
    rollouts.finish(second)
    assert source.look(NOTHING) == Look()
    assert source.running == 1
    rollouts.finish(first)
    assert source.look(NOTHING) == Look(candidates=(Candidate(first, "g7"),))
    assert source.running == 0


def test_rows_that_come_after_finished_are_found(rollouts: Rollouts, home: Home) -> None:
    (environment,) = rollouts.register()
    rollouts.finish(environment)
    source = home.opened()
    assert reconciled(source) == Look(missing=(environment,))
    pk = rollouts.end(environment)
    assert ids_of(source.look(NOTHING)) == [environment]
    assert rows_of(source, environment) == {environment: [pk]}


def test_a_candidate_is_offered_again_only_for_new_rows_or_by_a_reconcile(
    rollouts: Rollouts, home: Home
) -> None:
    (environment,) = rollouts.register()
    source = home.opened()
    rollouts.complete(environment)
    assert ids_of(source.look(NOTHING)) == [environment]
    assert ids_of(source.look(NOTHING)) == []
    rollouts.step(environment)
    assert ids_of(source.look(NOTHING)) == [environment]
    assert ids_of(reconciled(source)) == [environment]


def test_without_a_usable_row_nothing_is_read_again_until_rows_come(
    rollouts: Rollouts, home: Home
) -> None:
    (environment,) = rollouts.register()
    source = home.opened()
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


def test_flags_that_flip_in_place_are_found_by_a_reconcile(rollouts: Rollouts, home: Home) -> None:
    finished, running = rollouts.register(2)
    pks = [rollouts.step(finished), rollouts.step(running)]
    rollouts.finish(finished)
    source = home.opened()
    assert ids_of(reconciled(source)) == [finished]
    assert rows_of(source, finished) == {finished: []}
    rollouts.update_step(pks[0], is_terminal=1)
    assert ids_of(source.look(NOTHING)) == []
    assert ids_of(reconciled(source)) == [finished]
    assert rows_of(source, finished) == {finished: [pks[0]]}


def test_terminal_offers_what_has_ended_and_reconciles_flags_in_place(
    rollouts: Rollouts, home: Home
) -> None:
    first, second = rollouts.register(2)
    source = home.opened(ready_when=ReadyWhen.TERMINAL)
    pk = rollouts.step(first)
    rollouts.step(second, truncated=True)
    assert ids_of(source.look(NOTHING)) == [second]
    assert source.running == 1
    rollouts.update_step(pk, is_terminal=1)
    assert ids_of(source.look(NOTHING)) == []
    assert ids_of(reconciled(source, BitMap64([second]))) == [first]


def test_new_rows_of_what_is_delivered_are_late_once(rollouts: Rollouts, home: Home) -> None:
    (environment,) = rollouts.register()
    rollouts.complete(environment)
    source = home.opened()
    rollouts.step(environment)
    skip = BitMap64([environment])
    assert source.look(skip) == Look(late=(environment,))
    assert source.look(skip) == Look()


def test_deleted_environments_and_other_jobs_are_not_seen(rollouts: Rollouts, home: Home) -> None:
    mine, deleted = rollouts.register(2)
    (other,) = rollouts.register(job="other")
    source = home.opened(job="job-1")
    rollouts.delete(deleted)
    for environment in (mine, deleted, other):
        rollouts.complete(environment)
    assert ids_of(source.look(NOTHING)) == [mine]
    assert ids_of(reconciled(source)) == [mine]
    assert rows_of(source, mine, deleted, other)[deleted] == []
    assert rows_of(source, other) == {other: []}


def test_a_candidate_that_is_deleted_is_gone_at_the_next_reconcile(
    rollouts: Rollouts, home: Home
) -> None:
    deleted, unfinished, erased = rollouts.register(3)
    for environment in (deleted, unfinished, erased):
        rollouts.complete(environment)
    source = home.opened()
    assert len(reconciled(source).candidates) == 3
    rollouts.delete(deleted)
    rollouts.finish(unfinished, finished=0)
    rollouts.db.execute("DELETE FROM job_environments WHERE id = ?", (erased,))
    assert reconciled(source).gone == (deleted, unfinished, erased)
    assert reconciled(source) == Look()


def test_an_older_environment_that_completes_later_is_found_at_any_distance(
    rollouts: Rollouts, home: Home
) -> None:
    with rollouts.together():
        ids = rollouts.register(3_000)
        for environment in ids:
            rollouts.step(environment)
    source = home.opened()
    assert reconciled(source) == Look()
    assert source.running == 3_000
    for environment in (ids[-1], ids[1_500], ids[0]):
        rollouts.complete(environment)
        assert ids_of(source.look(NOTHING)) == [environment]


def test_changed_is_false_until_somebody_commits(rollouts: Rollouts, home: Home) -> None:
    rollouts.register()
    source = home.opened()
    assert source.changed()
    source.look(NOTHING)
    assert not source.changed()
    rollouts.register()
    assert source.changed()


def test_a_failed_look_keeps_what_it_has_not_seen_to_the_end(
    rollouts: Rollouts, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    (environment,) = rollouts.register()
    source = home.opened()
    rollouts.complete(environment)

    def fail(*_: object) -> None:
        raise SourceUnavailable("locked")

    with monkeypatch.context() as patch:
        patch.setattr(Watched, "active", fail)
        with pytest.raises(SourceUnavailable):
            source.look(NOTHING)
    assert source.changed()
    assert ids_of(source.look(NOTHING)) == [environment]


def test_quiet_environments_are_left_to_the_reconcile(rollouts: Rollouts, home: Home) -> None:
    quiet, lively = rollouts.register(2)
    clock = Clock()
    source = home.opened(clock=clock)
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
    rollouts: Rollouts, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rollouts.together():
        ids = rollouts.register(100)
    monkeypatch.setattr(f"{home.module}.SLICE", 10)
    for environment in ids:
        rollouts.complete(environment)
    source = home.opened()
    skip = BitMap64(set(ids) - {55})
    looks = list(source.reconcile(skip))
    assert len(looks) == 1
    assert ids_of(looks[0]) == [55]


def test_a_reconcile_jumps_over_ids_that_do_not_exist(rollouts: Rollouts, home: Home) -> None:
    rollouts.complete(*rollouts.register())
    rollouts.restart_ids("job_environments", after=1_500_000_000)
    far = rollouts.register()[0]
    rollouts.complete(far)
    source = home.opened()
    assert ids_of(reconciled(source)) == [1, far]


def test_rows_come_in_the_order_that_was_asked_for(rollouts: Rollouts, home: Home) -> None:
    ids = rollouts.register(5)
    pks = {environment: rollouts.complete(environment) for environment in reversed(ids)}
    source = home.opened()
    wanted = [ids[3], ids[0], ids[4]]
    assert [(one, rows[0].pk) for one, rows in source.read(wanted)] == [
        (one, pks[one]) for one in wanted
    ]


def test_rows_bigger_than_a_transaction_holds_all_come(rollouts: Rollouts, home: Home) -> None:
    ids = rollouts.register(12)
    pks = {}
    for environment in reversed(ids):
        size = (3 << 20) if environment % 2 else 10
        pks[environment] = rollouts.complete(environment, response="x" * size)
    source = home.opened()
    for samples in Samples:
        source = home.opened(samples=samples)
        for _ in range(2):
            assert rows_of(source, *ids) == {one: [pk] for one, pk in pks.items()}


def test_steps_are_those_of_the_last_run_and_of_one_model(rollouts: Rollouts, home: Home) -> None:
    (environment,) = rollouts.register()
    rollouts.step(environment)
    rollouts.end(environment)
    wanted = [rollouts.step(environment)]
    rollouts.step(environment, model="judge")
    rollouts.step(environment, meta={"synthetic_stop": True})
    wanted.append(rollouts.complete(environment))
    rollouts.step(environment)
    source = home.opened(samples=Samples.STEPS)
    assert rows_of(source, environment) == {environment: wanted}


def test_a_summary_on_top_hides_no_completed_row_below(rollouts: Rollouts, home: Home) -> None:
    (environment,) = rollouts.register()
    pk = rollouts.complete(environment)
    rollouts.step(environment, model="judge", terminal=True)
    rollouts.end(environment, messages=[], response="", meta={"event_type": "evaluation_summary"})
    rollouts.step(environment, job="other", completed=True)
    source = home.opened()
    assert rows_of(source, environment) == {environment: [pk]}


def test_an_environment_that_is_another_one_now_is_a_replacement(
    rollouts: Rollouts, home: Home
) -> None:
    ids = rollouts.register(3)
    source = home.opened()
    remembered = {environment: rollouts.env_id(environment) for environment in ids}
    source.verify(remembered, 3)
    rollouts.db.execute("DELETE FROM job_environments WHERE id = 1")
    source.verify(remembered, 3)
    with pytest.raises(SourceReplaced, match="environment 2 is another one"):
        source.verify({**remembered, 2: "someone else"}, 3)
    with pytest.raises(SourceReplaced, match="given ids up to 3"):
        source.verify(remembered, 4)


def test_a_look_makes_sure_of_what_it_has_seen(rollouts: Rollouts, home: Home) -> None:
    ids = rollouts.register(3)
    source = home.opened()
    remembered = {environment: rollouts.env_id(environment) for environment in ids[:2]}
    assert source.look(NOTHING, remembered, 3).deleted == ()
    assert source.is_verified()
    rollouts.complete(3)
    assert not source.is_verified()
    rollouts.db.execute("DELETE FROM job_environments WHERE id = 1")
    look = source.look(NOTHING, remembered, 3)
    assert (ids_of(look), look.deleted) == ([3], (1,))
    assert source.is_verified()
    with pytest.raises(SourceReplaced, match="environment 2 is another one"):
        source.look(NOTHING, {2: "someone else"}, 3)
    with pytest.raises(SourceReplaced, match="given ids up to 3"):
        source.look(NOTHING, remembered, 4)


def test_what_a_look_found_that_did_not_hold_is_found_again(rollouts: Rollouts, home: Home) -> None:
    (environment,) = rollouts.register()
    source = home.opened()
    reconciled(source)
    rollouts.complete(environment)
    with pytest.raises(SourceReplaced):
        source.look(NOTHING, {environment: "someone else"}, environment)
    source.open()
    assert ids_of(reconciled(source)) == [environment]


def test_an_emptied_database_is_not_there_yet(rollouts: Rollouts, home: Home) -> None:
    rollouts.register()
    source = home.opened()
    rollouts.db.execute("DELETE FROM job_environments")
    with pytest.raises(SourceUnavailable, match="no environments yet"):
        source.verify({1: "x"}, 1)


def test_a_database_that_was_emptied_makes_sure_of_no_look(rollouts: Rollouts, home: Home) -> None:
    rollouts.register()
    source = home.opened()
    rollouts.db.execute("DELETE FROM job_environments")
    with pytest.raises(SourceUnavailable, match="no environments yet"):
        source.look(NOTHING, {1: "x"}, 1)


def test_ids_that_go_backwards_are_said_and_nothing_is_missed_after(
    rollouts: Rollouts, home: Home
) -> None:
    for environment in rollouts.register(5):
        rollouts.complete(environment)
    source = home.opened()
    assert source.look(NOTHING) == Look()
    with rollouts.together():
        rollouts.db.execute("DELETE FROM session_steps")
        rollouts.restart_ids("session_steps", after=0)
        rollouts.complete(2)
    assert source.look(NOTHING) == Look(went_back=True)
    assert source.changed()
    assert ids_of(reconciled(source)) == [2]
    rollouts.complete(4)
    assert ids_of(source.look(NOTHING)) == [4]


def test_rows_deleted_from_the_top_are_no_way_back(rollouts: Rollouts, home: Home) -> None:
    first, second = rollouts.register(2)
    rollouts.complete(first)
    rollouts.end(second)
    source = home.opened()
    reconciled(source)
    rollouts.db.execute("DELETE FROM session_steps WHERE id = 2")
    assert not source.look(NOTHING).went_back
    pk = rollouts.complete(second)
    assert pk == 3
    assert ids_of(source.look(NOTHING)) == [second]


def test_a_migration_under_the_source_loses_nothing(home: Home) -> None:
    rollouts = home.made("second")
    first, second = rollouts.register(2)
    rollouts.complete(first, meta={"weight_version": 4})
    source = home.opened()
    assert ids_of(reconciled(source)) == [first]
    rollouts.rebuild_steps("newest")
    rollouts.complete(second)
    assert ids_of(source.look(NOTHING)) == [second]
    (_, (row,)), (_, (_,)) = source.read([first, second])
    assert row.meta == b'{"weight_version": 4}'


def test_a_table_that_is_away_for_a_moment_is_waited_for(rollouts: Rollouts, home: Home) -> None:
    rollouts.register()
    source = home.opened()
    rollouts.db.execute("ALTER TABLE session_steps RENAME TO elsewhere")
    with pytest.raises(SourceUnavailable, match="no table session_steps"):
        source.look(NOTHING)
    rollouts.db.execute("ALTER TABLE elsewhere RENAME TO session_steps")
    assert source.look(NOTHING) == Look()


def test_a_row_that_was_read_before_a_look_came_to_it_is_no_news(
    rollouts: Rollouts, home: Home
) -> None:
    one, other = rollouts.register(2)
    rollouts.step(one)
    source = home.opened()
    list(source.reconcile(BitMap64()))
    rollouts.complete(one)
    assert [rows[-1].environment for _, rows in source.read([one]) if rows] == [one]
    skip = BitMap64([one])
    assert source.look(skip).late == ()
    rollouts.end(one)
    assert source.look(skip).late == (one,)
    rollouts.complete(other)
    assert [candidate.id for candidate in source.look(skip).candidates] == [other]
