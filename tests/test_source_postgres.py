"""What only a server does: commits out of order, faults, poolers, standbys, roles, URLs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
from pyroaring import BitMap64

from spoold.codec import encode
from spoold.errors import ConfigError, SourceReplaced, SourceSchemaError, SourceUnavailable
from spoold.model import Look, NullReward, ReadyWhen, Samples
from spoold.sources import open_source
from tests.support.postgres import STYLES, PostgresRollouts, make_postgres, tables
from tests.support.servers import (
    PASSWORD,
    READER,
    Server,
    own_server,
    postgres_server,
    processes_of,
)

psycopg = pytest.importorskip("psycopg", reason="pip install 'psycopg[binary]'")

from spoold.sources import unseen  # noqa: E402
from spoold.sources.postgres import PostgresSource  # noqa: E402
from spoold.sources.postgres_facts import Facts  # noqa: E402

NOTHING = BitMap64()


@pytest.fixture
def server() -> Server:
    return postgres_server()


@pytest.fixture
def at_end() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def rollouts(server: Server, at_end: contextlib.ExitStack) -> PostgresRollouts:
    made = make_postgres(server)
    at_end.callback(made.drop)
    return made


Opener = Callable[..., PostgresSource]


@pytest.fixture
def opened(rollouts: PostgresRollouts, at_end: contextlib.ExitStack) -> Opener:
    def opened(url: str | None = None, **facts: Any) -> PostgresSource:
        chosen = {"job": None, "ready_when": ReadyWhen.AUTO, "samples": Samples.TERMINAL} | facts
        source = PostgresSource(url or rollouts.url, **chosen)
        at_end.callback(source.close)
        source.open()
        return source

    return opened


@pytest.fixture
def another(rollouts: PostgresRollouts, at_end: contextlib.ExitStack) -> Callable[[], Any]:
    def another() -> PostgresRollouts:
        writer = rollouts.another()
        at_end.callback(writer.close)
        return writer

    return another


def ids_of(look: Look) -> list[int]:
    return [candidate.id for candidate in look.candidates]


def reconciled(source: PostgresSource, skip: BitMap64 = NOTHING) -> list[int]:
    return [one for look in source.reconcile(skip) for one in ids_of(look)]


def gaps_of(source: PostgresSource) -> list[tuple[int, int]]:
    return [(gap.low, gap.high) for gap in source._unseen.gaps]


# ---- commits out of order -----------------------------------------------------------------------


def test_a_low_id_that_is_committed_after_a_high_one_is_found_by_the_next_look(
    rollouts: PostgresRollouts, opened: Opener, another: Callable[[], PostgresRollouts]
) -> None:
    slow, fast = rollouts.register(2)
    source = opened()
    held = another()
    held.db.execute("BEGIN")
    low = held.complete(slow)
    high = rollouts.complete(fast)
    assert low < high
    assert ids_of(source.look(NOTHING)) == [fast]
    assert gaps_of(source) == [(low, low)]
    assert not source.changed()
    held.db.execute("COMMIT")
    assert source.changed()
    assert ids_of(source.look(NOTHING)) == [slow]
    assert gaps_of(source) == []


def test_terminal_finds_a_row_that_a_held_transaction_shows_later(
    rollouts: PostgresRollouts, opened: Opener, another: Callable[[], PostgresRollouts]
) -> None:
    slow, fast = rollouts.register(2)
    source = opened(ready_when=ReadyWhen.TERMINAL)
    held = another()
    held.db.execute("BEGIN")
    held.end(slow)
    rollouts.end(fast)
    assert ids_of(source.look(NOTHING)) == [fast]
    held.db.execute("COMMIT")
    assert ids_of(source.look(NOTHING)) == [slow]


def test_a_transaction_open_since_before_the_source_was_is_not_passed_over(
    rollouts: PostgresRollouts, opened: Opener, another: Callable[[], PostgresRollouts]
) -> None:
    slow, fast = rollouts.register(2)
    held = another()
    held.db.execute("BEGIN")
    held.complete(slow)
    rollouts.complete(fast)
    source = opened()
    assert reconciled(source) == [fast]
    held.db.execute("COMMIT")
    assert ids_of(source.look(NOTHING)) == [slow]


def test_an_id_that_is_rolled_back_is_given_up_once_nobody_could_still_show_it(
    rollouts: PostgresRollouts,
    opened: Opener,
    another: Callable[[], PostgresRollouts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unseen, "GRACE_SECONDS", 0.0)
    ids = rollouts.register(4)
    source = opened()
    stranger, writer = another(), another()
    writer.db.execute("BEGIN")
    gone = writer.step(ids[0])
    stranger.db.execute("BEGIN")
    stranger.register()  # it has an id of its own: it could hold anything
    writer.db.execute("ROLLBACK")
    rollouts.complete(ids[1])
    assert ids_of(source.look(NOTHING)) == [ids[1]]
    assert gaps_of(source) == [(gone, gone)]
    rollouts.complete(ids[2])
    assert ids_of(source.look(NOTHING)) == [ids[2]]  # what is visible is never held back
    assert gaps_of(source) == [(gone, gone)]
    stranger.db.execute("ROLLBACK")
    rollouts.complete(ids[3])
    assert ids_of(source.look(NOTHING)) == [ids[3]]
    assert gaps_of(source) == []


def test_ids_drawn_long_before_they_are_used_are_left_to_the_reconcile(
    rollouts: PostgresRollouts, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unseen, "GRACE_SECONDS", 0.0)
    cached, other = rollouts.register(2)
    source = opened()
    rollouts.db.execute("SELECT nextval(pg_get_serial_sequence('session_steps', 'id'))")
    rollouts.complete(other)
    for _ in range(2):
        rollouts.register()
        source.look(NOTHING)
    assert gaps_of(source) == []
    pk = rollouts.complete(cached)
    rollouts.db.execute("UPDATE session_steps SET id = 1 WHERE id = ?", (pk,))
    source.look(NOTHING)
    assert reconciled(source, BitMap64([other])) == [cached]


def test_a_sequence_that_jumps_is_no_matter(rollouts: PostgresRollouts, opened: Opener) -> None:
    first, second = rollouts.register(2)
    source = opened()
    rollouts.restart_ids("session_steps", after=10**15)
    rollouts.complete(first)
    assert ids_of(source.look(NOTHING)) == [first]
    rollouts.complete(second)
    assert ids_of(source.look(NOTHING)) == [second]


def test_rows_of_other_jobs_and_of_nobody_leave_no_gaps(
    rollouts: PostgresRollouts, opened: Opener
) -> None:
    (mine,) = rollouts.register()
    (other,) = rollouts.register(job="other")
    source = opened(job="job-1")
    rollouts.step(other)
    rollouts.step(mine, session="nobody")
    rollouts.complete(mine)
    assert ids_of(source.look(NOTHING)) == [mine]
    assert gaps_of(source) == []


def test_more_new_rows_than_one_query_gives_all_come(
    rollouts: PostgresRollouts, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spoold.sources.postgres.SLICE", 7)
    ids = rollouts.register(30)
    source = opened()
    with rollouts.together():
        for environment in ids:
            rollouts.complete(environment)
    assert ids_of(source.look(NOTHING)) == ids


def test_who_keeps_a_transaction_open_is_named(
    rollouts: PostgresRollouts,
    opened: Opener,
    another: Callable[[], PostgresRollouts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spoold.sources.postgres._HELD_SECONDS", 0.0)
    monkeypatch.setattr("spoold.sources.postgres._ASK_HOLDERS_SECONDS", 0.0)
    slow, fast, last = rollouts.register(3)
    source = opened()
    held = another()
    held.db.execute("BEGIN")
    held.complete(slow)
    rollouts.complete(fast)
    source.look(NOTHING)
    (advice,) = source.advice()
    pid = held.db.db.info.backend_pid
    assert advice.code == "open-transaction"
    # A reader without pg_read_all_stats: who, and not since when.
    assert advice.detail == f"pid {pid} (writer) of postgres"
    assert advice.remedy == f"if it was forgotten: SELECT pg_terminate_backend({pid})"
    held.db.execute("PREPARE TRANSACTION 'forgotten'")
    rollouts.complete(last)
    source.look(NOTHING)
    (advice,) = source.advice()
    assert advice.detail.startswith("a prepared transaction (forgotten) of postgres, open for ")
    rollouts.db.execute("COMMIT PREPARED 'forgotten'")
    assert ids_of(source.look(NOTHING)) == [slow]
    assert source.advice() == ()


# ---- tables as they are made there --------------------------------------------------------------


def test_the_same_rows_give_the_same_lines_whatever_the_columns_are(
    server: Server, at_end: contextlib.ExitStack
) -> None:
    big = {"role": "user", "content": "n", "seed": 123456789012345678901234567890, "x": 1e-7}
    lines = {}
    for style in STYLES:
        made = make_postgres(server, style=style)
        at_end.callback(made.drop)
        ids = made.register(3, env_id=None)
        made.db.execute(
            "UPDATE job_environments SET env_id = ('00000000-0000-4000-8000-00000000000' || id)"
            + ("::uuid" if style == "typed" else "")
        )
        made.complete(ids[0], messages=[big], response='say "hi" \u2028', reward=0.1)
        made.complete(ids[1], response="", meta=None)
        turn = {"choices": [{"message": {"role": "assistant", "number": 2**70}}]}
        made.complete(ids[2], response=turn, truncated=True)
        source = open_source(
            made.url, job=None, ready_when=ReadyWhen.FINISHED, samples=Samples.TERMINAL
        )
        at_end.callback(source.close)
        source.open()
        lines[style] = []
        for _, rows in source.read(ids):
            found = encode(rows, null_reward=NullReward.FALLBACK, max_sample_bytes=1 << 20)
            assert isinstance(found, list)
            lines[style] += [sample.line for sample in found]
    assert lines["plain"] == lines["typed"]
    assert b'"seed": 123456789012345678901234567890' in lines["plain"][0]
    assert b"1180591620717411303424" in lines["plain"][2]


def test_settings_of_the_role_change_no_byte(
    rollouts: PostgresRollouts, server: Server, opened: Opener
) -> None:
    (environment,) = rollouts.register()
    rollouts.complete(environment)
    ((_, (before,)),) = opened().read([environment])
    with server.connect() as db:
        try:
            for setting in ("datestyle = 'SQL, DMY'", "timezone = 'Asia/Tokyo'",
                            "extra_float_digits = -3", "bytea_output = 'escape'"):  # fmt: skip
                db.execute(f"ALTER ROLE {READER} SET {setting}")
            ((_, (after,)),) = opened().read([environment])
        finally:
            db.execute(f"ALTER ROLE {READER} RESET ALL")
            db.execute(f"ALTER ROLE {READER} SET default_transaction_read_only = on")
    assert after == before


@pytest.mark.parametrize(("encoding", "text"), [("LATIN1", "né"), ("SQL_ASCII", "né")])
def test_a_database_in_another_encoding_reads_as_utf8(
    server: Server, at_end: contextlib.ExitStack, encoding: str, text: str
) -> None:
    name = f"in_{encoding.lower()}"
    with server.connect() as db:
        db.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    at_end.callback(_drop_database, server, name)
    with server.connect(dbname=name, client_encoding="UTF8") as db:
        db.execute(tables())
        db.execute(
            "INSERT INTO job_environments (job_id, env_id, env_name, env_params, finished)"
            f" VALUES ('jöb', 'e1', '{text}', '{{}}', 1)"
        )
        db.execute(
            "INSERT INTO session_steps (record_id, session_id, step_id, env_name, llm_model,"
            " messages, response, is_session_completed)"
            f" VALUES ('r', 'e1', 1, 'm', 'm', '[]', '{text}', 1)"
        )
    source = PostgresSource(
        server.url(database=name), job="jöb", ready_when=ReadyWhen.AUTO, samples=Samples.TERMINAL
    )
    at_end.callback(source.close)
    source.open()
    ((_, (row,)),) = source.read([1])
    assert (row.env_name, row.response) == (text.encode(), text.encode())


def _drop_database(server: Server, name: str) -> None:
    with server.connect() as db:
        db.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_nothing_is_written_and_no_transaction_is_left_open(
    rollouts: PostgresRollouts, server: Server, opened: Opener
) -> None:
    (environment,) = rollouts.register()
    rollouts.complete(environment)
    source = opened()
    reconciled(source)
    for _ in source.read([environment]):
        with server.connect() as db:
            states = db.execute(
                "SELECT state, backend_xid FROM pg_stat_activity WHERE application_name = 'spoold'"
            ).fetchall()
        assert states == [("idle", None)]
    as_superuser = opened(server.url(schema=rollouts.schema))
    assert as_superuser._database is not None
    with pytest.raises(SourceUnavailable, match="read-only transaction"):
        as_superuser._database.ask("SELECT nextval('session_steps_id_seq')")


def test_tables_that_are_not_there_yet_are_waited_for(server: Server) -> None:
    made = make_postgres(server, empty=True)
    source = PostgresSource(made.url, job=None, ready_when=ReadyWhen.AUTO, samples=Samples.TERMINAL)
    with pytest.raises(SourceUnavailable, match=f"no table job_environments yet in {made.schema}"):
        source.open()
    made.db.execute(tables())
    with pytest.raises(SourceUnavailable, match="may not read it") as caught:
        source.open()
    assert "GRANT SELECT" in caught.value.hint
    made.db.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {made.schema} TO {READER}")
    with pytest.raises(SourceUnavailable, match="no job yet"):
        source.open()
    made.register()
    source.open()
    source.close()
    made.drop()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("ALTER TABLE session_steps ALTER is_terminal TYPE text", "is_terminal is text"),
        ("ALTER TABLE job_environments ALTER id TYPE text", "id is text"),
        (
            "ALTER TABLE job_environments ALTER env_id TYPE uuid USING env_id::uuid",
            "env_id is uuid and session_id varchar",
        ),
    ],
)
def test_columns_that_cannot_serve_are_named(
    rollouts: PostgresRollouts, opened: Opener, change: str, said: str
) -> None:
    rollouts.register()
    rollouts.db.execute("ALTER TABLE session_steps ALTER is_terminal DROP DEFAULT")
    rollouts.db.execute("ALTER TABLE job_environments ALTER id DROP DEFAULT")
    rollouts.db.execute(change)
    with pytest.raises(SourceSchemaError, match=said):
        opened()


def test_a_server_that_is_too_old_is_said_to_be(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spoold.sources.postgres_open._OLDEST", 990000)
    with pytest.raises(SourceSchemaError, match="is PostgreSQL 1") as caught:
        opened()
    assert caught.value.hint == "spoold needs 99 or newer"


def test_an_index_that_would_help_is_named_with_what_it_saves(
    rollouts: PostgresRollouts, opened: Opener
) -> None:
    (environment,) = rollouts.register()
    rollouts.complete(environment)
    rollouts.db.execute(
        "INSERT INTO session_steps (record_id, session_id, step_id, env_name, llm_model, messages,"
        " response) SELECT n, n, 1, 'm', 'm', repeat('x', 500), '' FROM generate_series(1, 12000) n"
    )
    rollouts.db.execute("ANALYZE session_steps")
    assert opened().advice() == ()
    rollouts.db.execute(
        "ALTER TABLE session_steps DROP CONSTRAINT session_steps_session_id_step_id_created_at_key"
    )
    (advice,) = opened().advice()
    assert advice.code == "missing-index"
    assert "each environment that is looked up walks over 12,001 rows" in advice.detail
    assert advice.remedy == "CREATE INDEX CONCURRENTLY ON session_steps (session_id)"


# ---- identity -----------------------------------------------------------------------------------


def test_tables_made_anew_are_looked_at_anew_and_verified(
    rollouts: PostgresRollouts, opened: Opener
) -> None:
    ids = rollouts.register(3)
    for environment in ids:
        rollouts.complete(environment)
    source = opened()
    assert reconciled(source) == ids
    remembered = {ids[-1]: rollouts.env_id(ids[-1])}
    rollouts.db.execute("DROP TABLE job_environments, session_steps")
    rollouts.db.execute(tables())
    rollouts.db.execute(f"GRANT SELECT ON job_environments, session_steps TO {READER}")
    rollouts.db.execute(f"GRANT SELECT ON ALL SEQUENCES IN SCHEMA {rollouts.schema} TO {READER}")
    rollouts.complete(rollouts.register()[0])
    with pytest.raises(SourceUnavailable, match="made anew"):
        source.look(NOTHING)
    source.open()
    with pytest.raises(SourceReplaced, match="given ids up to 1, and environment 3"):
        source.verify(remembered, 3)


def test_a_truncated_table_that_starts_over_is_a_replacement(
    rollouts: PostgresRollouts, opened: Opener
) -> None:
    ids = rollouts.register(5)
    source = opened()
    remembered = {5: rollouts.env_id(ids[-1])}
    assert not source.verify(remembered, 5)
    rollouts.db.execute("TRUNCATE job_environments, session_steps RESTART IDENTITY")
    with pytest.raises(SourceUnavailable, match="no environments yet"):
        source.verify(remembered, 5)
    rollouts.complete(rollouts.register()[0])
    assert source.look(NOTHING).went_back
    with pytest.raises(SourceReplaced, match="given ids up to 1"):
        source.verify(remembered, 5)


@pytest.mark.parametrize("why", ["ids come from elsewhere", "no right to see the sequence"])
def test_a_sequence_that_does_not_tell_is_not_believed(
    rollouts: PostgresRollouts, opened: Opener, why: str
) -> None:
    ids = rollouts.register(3)
    if why == "ids come from elsewhere":
        rollouts.restart_ids("job_environments", after=1)
    else:
        rollouts.restart_ids("job_environments", after=1)
        rollouts.db.execute(f"REVOKE ALL ON SEQUENCE job_environments_id_seq FROM {READER}")
    source = opened()
    remembered = {3: rollouts.env_id(ids[2])}
    assert not source.verify(remembered, 3)
    rollouts.db.execute("DELETE FROM job_environments WHERE id = 3")
    assert source.verify(remembered, 3 if why != "ids come from elsewhere" else 2) == BitMap64([3])


def test_a_standby_behind_what_was_delivered_is_waited_for(
    rollouts: PostgresRollouts, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts.register(3)
    source = opened()

    def of_a_standby(row: tuple[Any, ...]) -> Facts:
        return real((*row[:4], True, *row[5:]))

    real = Facts.of
    monkeypatch.setattr(Facts, "of", staticmethod(of_a_standby))
    with pytest.raises(SourceUnavailable, match="has not replayed environment 9 yet"):
        source.verify({}, 9)


# ---- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said", "hint"),
    [
        ("reader:wrong@127.0.0.1:{port}/db", "the password is missing or wrong", "PGPASSFILE"),
        ("reader@127.0.0.1:{port}/db", "the password is missing or wrong", "SPOOLD_DB"),
        ("postgres@127.0.0.1:{port}/nowhere", "no such database", "spoold waits for it"),
        ("postgres@%2Fnowhere:{port}/db", "nobody listens there", "does the server run"),
        ("postgres@127.0.0.1:1/db", "nobody listens there", "host and port right"),
        ("postgres@host.invalid/db", "the name of its host is not known", "is it right"),
        ("postgres@127.0.0.1:{port}/db?sslmode=require", "do not agree on TLS", "sslrootcert"),
        ("postgres@/db?service=nowhere", "the service is not defined", "pg_service.conf"),
    ],
)
def test_what_keeps_us_out_is_named_with_a_way_in(
    server: Server, url: str, said: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    monkeypatch.setenv("PGPASSFILE", "/nowhere")
    monkeypatch.setenv("PGSERVICEFILE", "/nowhere")
    source = open_source(
        f"postgresql://{url.format(port=server.port)}",
        job=None,
        ready_when=ReadyWhen.AUTO,
        samples=Samples.TERMINAL,
    )
    with pytest.raises(SourceUnavailable, match=said) as caught:
        source.open()
    assert hint in caught.value.hint


def test_too_many_connections_are_named(
    server: Server, rollouts: PostgresRollouts, opened: Opener
) -> None:
    rollouts.register()
    with server.connect() as db:
        db.execute(f"ALTER ROLE {READER} CONNECTION LIMIT 1")
        try:
            opened()
            with pytest.raises(SourceUnavailable, match="too many connections") as caught:
                opened()
        finally:
            db.execute(f"ALTER ROLE {READER} CONNECTION LIMIT -1")
    assert "max_connections" in caught.value.hint


def test_a_session_that_is_ended_is_followed_by_another_and_nothing_is_lost(
    server: Server, rollouts: PostgresRollouts, opened: Opener
) -> None:
    first, second = rollouts.register(2)
    source = opened()
    rollouts.complete(first)
    assert ids_of(source.look(NOTHING)) == [first]
    rollouts.complete(second)
    rollouts.db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'spoold'"
    )
    with pytest.raises(SourceUnavailable, match=r"administrator ended this session|broke"):
        source.look(NOTHING)
    assert ids_of(source.look(NOTHING)) == [second]


def test_a_table_that_a_migration_holds_is_waited_for(
    rollouts: PostgresRollouts, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spoold.sources.postgres_open._BEGIN", _begin(lock_timeout="50ms"))
    (environment,) = rollouts.register()
    source = opened()
    rollouts.db.execute("BEGIN")
    rollouts.db.execute("LOCK session_steps")
    with pytest.raises(SourceUnavailable, match="locked by another session"):
        source.look(NOTHING)
    rollouts.db.execute("COMMIT")
    rollouts.complete(environment)
    assert ids_of(source.look(NOTHING)) == [environment]


def _begin(**changed: str) -> str:
    from spoold.sources import postgres_open

    text = postgres_open._BEGIN
    for name, value in changed.items():
        lines = [f"SET LOCAL {name} = '{value}';" if name in x else x for x in text.split("\n")]
        text = "\n".join(lines)
    return text


def test_a_query_that_takes_too_long_is_cut_short_and_less_is_asked_for(
    rollouts: PostgresRollouts, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts.complete(*rollouts.register())
    source = opened()
    before = source._slice
    with monkeypatch.context() as patch:
        patch.setattr("spoold.sources.postgres_open._BEGIN", _begin(statement_timeout="30ms"))
        patch.setattr(
            "spoold.sources.postgres_schema.Schema.next_environment", "SELECT pg_sleep(9)::text"
        )
        with pytest.raises(SourceUnavailable, match="a query took longer than"):
            list(source.reconcile(NOTHING))
    assert source._slice < before
    assert reconciled(source) == [1]


def test_a_server_that_is_alive_and_says_nothing_does_not_hold_the_loop_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spoold.sources.postgres_open._ANSWER_SECONDS", 0.3)
    with own_server() as server:
        rollouts = make_postgres(server)
        rollouts.register()
        source = PostgresSource(
            rollouts.url, job=None, ready_when=ReadyWhen.AUTO, samples=Samples.TERMINAL
        )
        source.open()
        (pid,) = [p for p in processes_of(server) if p != rollouts.db.db.info.backend_pid]
        import os

        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(SourceUnavailable, match="it does not answer"):
                source.look(NOTHING)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert source.look(NOTHING) == Look()
        source.close()
        rollouts.close()


def test_a_server_that_is_stopped_killed_and_started_again_is_read_on(
    at_end: contextlib.ExitStack,
) -> None:
    server = at_end.enter_context(own_server(sync=True))
    rollouts = make_postgres(server)
    ids = rollouts.register(3)
    source = PostgresSource(
        rollouts.url, job=None, ready_when=ReadyWhen.AUTO, samples=Samples.TERMINAL
    )
    at_end.callback(source.close)
    source.open()
    rollouts.complete(ids[0])
    assert ids_of(source.look(NOTHING)) == [ids[0]]
    for one, how in zip(ids[1:], (server.stop, server.kill), strict=True):
        rollouts.complete(one)
        rollouts.close()
        how()
        with pytest.raises(SourceUnavailable):
            source.look(NOTHING)
        with pytest.raises(SourceUnavailable, match=r"nobody listens there|starting up"):
            source.open()
        server.start()
        rollouts = rollouts.another()
        assert ids_of(source.look(NOTHING)) == [one]
    rollouts.close()


# ---- URLs and passwords -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:p%40ss@db.example:5433/x?sslmode=require", "postgresql://me@db.example:5433/x"),
        ("postgres://me@h/x?password=p%40ss", "postgresql://me@h/x"),
        ("postgresql+psycopg://me:p%40ss@h/x", "postgresql://me@h/x"),
        ("asyncpg://me:p%40ss@h/x", "postgresql://me@h/x"),
        ("postgresql://?service=train", "postgresql://?service=train"),
        ("postgresql://a:1,b:2/x?target_session_attrs=any", "postgresql://a:1,b:2/x"),
        ("postgresql://me:p%40ss@[::1]/x", "postgresql://me@[::1]/x"),
    ],
)  # fmt: skip
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    source = open_source(url, job=None, ready_when=ReadyWhen.AUTO, samples=Samples.TERMINAL)
    assert source.url == shown


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://me:pa%ss@h/x", "cannot be understood"),
        ("postgresql://me:pass@h/x?minsize=3", "there is no option minsize"),
    ],
)
def test_a_url_that_is_not_understood_is_not_repeated(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        open_source(url, job=None, ready_when=ReadyWhen.AUTO, samples=Samples.TERMINAL)
    assert "pa" not in str(caught.value).replace("part", "")
    assert caught.value.__cause__ is None


def test_no_error_says_the_password(server: Server) -> None:
    with pytest.raises(SourceUnavailable) as caught:
        PostgresSource(
            server.url(user=READER, database=quote(PASSWORD, safe="")),
            job=None,
            ready_when=ReadyWhen.AUTO,
            samples=Samples.TERMINAL,
        ).open()  # fmt: skip
    assert "***" in str(caught.value)


def test_password_and_service_files_are_those_of_psql(
    rollouts: PostgresRollouts,
    server: Server,
    opened: Opener,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollouts.register()
    escaped = PASSWORD.replace(":", r"\:")
    (tmp_path / "pass").write_text(f"127.0.0.1:{server.port}:*:{READER}:{escaped}\n")
    (tmp_path / "pass").chmod(0o600)
    (tmp_path / "services").write_text(
        f"[train]\nhost=127.0.0.1\nport={server.port}\nuser={READER}\ndbname=db\n"
        f"options=-csearch_path={rollouts.schema}\n"
    )
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "pass"))
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    source = opened("postgresql://?service=train")
    assert source.job == "job-1"
    assert source.url == "postgresql://?service=train"


def test_without_psycopg_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("spoold.sources.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match="needs psycopg 3") as caught:
        open_source(
            "postgresql://h/x", job=None, ready_when=ReadyWhen.AUTO, samples=Samples.TERMINAL
        )
    assert caught.value.hint == "pip install 'spoold[postgres]'"
