"""A pooler before the server, a standby of it, the daemon on it, and the plans of its queries."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyroaring import BitMap64

from spoold.errors import SourceUnavailable
from spoold.model import ReadyWhen, Samples
from spoold.reasons import say
from tests.support.daemons import environments, running
from tests.support.needs import needs
from tests.support.postgres import PostgresRollouts, make_postgres
from tests.support.processes import ENVIRON, until
from tests.support.rollouts import GENERATIONS
from tests.support.servers import PASSWORD, READER, own_server, pooler, postgres_server, standby

psycopg = pytest.importorskip("psycopg", reason="pip install 'psycopg[binary]'")

from spoold.sources import unseen  # noqa: E402
from spoold.sources.postgres import PostgresSource  # noqa: E402

NOTHING = BitMap64()
DELIVERED = BitMap64(range(1, 19_000))


def opened(url: str, **facts: Any) -> PostgresSource:
    chosen = {"job": None, "ready_when": ReadyWhen.AUTO, "samples": Samples.TERMINAL} | facts
    source = PostgresSource(url, **chosen)
    source.open()
    return source


def offered(source: PostgresSource) -> list[int]:
    return [candidate.id for candidate in source.look(NOTHING).candidates]


@pytest.fixture
def rollouts() -> Iterator[PostgresRollouts]:
    made = make_postgres(postgres_server())
    yield made
    made.drop()


# ---- around the server --------------------------------------------------------------------------


def test_a_pooler_in_transaction_mode_may_stand_between(rollouts: PostgresRollouts) -> None:
    rollouts.db.execute(f"ALTER ROLE {READER} SET search_path = {rollouts.schema}")
    ids = rollouts.register(3)
    with pooler(rollouts.server) as port:
        sources = [opened(f"postgresql://{READER}@127.0.0.1:{port}/db") for _ in range(5)]
        for one in ids:
            rollouts.complete(one)
            assert [offered(source) for source in sources] == [[one]] * 5
        for source in sources:
            assert [rows[0].environment for _, rows in source.read(ids)] == ids
        with rollouts.server.connect() as db:
            query = "SELECT count(*) FROM pg_stat_activity WHERE usename = %s"
            assert db.execute(query, (READER,)).fetchone()[0] <= 2
            db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s",
                (READER,),
            )
        for source in sources:
            with contextlib.suppress(SourceUnavailable):
                source.look(NOTHING)
            assert offered(source) == []
            source.close()
    with pytest.raises(SourceUnavailable, match="nobody listens there"):
        opened(f"postgresql://{READER}@127.0.0.1:{port}/db")
    rollouts.db.execute(f"ALTER ROLE {READER} RESET search_path")


@pytest.mark.slow
def test_a_standby_shows_what_it_has_replayed_and_passes_nothing_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unseen, "GRACE_SECONDS", 0.0)
    with own_server("wal_level = replica") as primary:
        rollouts = make_postgres(primary)
        slow, fast, gone, last = rollouts.register(4)
        held = rollouts.another()
        with standby(primary, "max_standby_streaming_delay = 0") as replica:
            source = opened(replica.url(schema=rollouts.schema, user=READER))

            def replayed() -> bool:
                with primary.connect() as one, replica.connect() as two:
                    ((wanted,),) = one.execute("SELECT pg_current_wal_lsn()").fetchall()
                    query = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
                    return bool(two.execute(query, (wanted,)).fetchone()[0])

            held.db.execute("BEGIN")
            low = held.complete(slow)
            rollouts.complete(fast)
            until(replayed, "the standby to replay")
            assert offered(source) == [fast]
            rollouts.complete(gone)
            until(replayed, "the standby to replay")
            # Its snapshot lists nobody who runs; xmin alone holds the gap open.
            assert offered(source) == [gone]
            assert [(gap.low, gap.high) for gap in source._unseen.gaps] == [(low, low)]
            assert source.changed()
            held.db.execute("COMMIT")
            until(replayed, "the standby to replay")
            assert offered(source) == [slow]
            rollouts.complete(last)
            until(replayed, "the standby to replay")
            assert offered(source) == [last]
            assert source._unseen.gaps == ()
            assert source.verify({fast: rollouts.env_id(fast)}, fast) == NOTHING
            with replica.connect() as watcher:
                _conflict(source, rollouts, watcher)
            with contextlib.suppress(SourceUnavailable):  # the table was changed meanwhile
                source.look(NOTHING)
            until(replayed, "the standby to replay")
            assert offered(source) == []
            source.close()
        held.close()
        rollouts.close()


def _conflict(source: PostgresSource, rollouts: PostgresRollouts, watcher: Any) -> None:
    """Let replay need what a query of the source holds: the server cancels the query."""
    database = source._database
    assert database is not None
    said: list[SourceUnavailable] = []

    def read() -> None:
        try:
            database.ask("SELECT pg_sleep(9)::text FROM session_steps LIMIT 1")
        except SourceUnavailable as error:
            said.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    query = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
    until(lambda: watcher.execute(query).fetchone(), "the query to run")
    rollouts.db.execute("ALTER TABLE session_steps ADD another int")
    thread.join(30)
    assert "in the way of what it replays" in said[0].message
    assert "max_standby_streaming_delay" in said[0].hint


def test_tls_is_checked_as_libpq_is_told(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    needs(openssl, "no openssl here")
    with own_server() as server:
        rollouts = make_postgres(server)
        rollouts.register()
        rollouts.close()
        server.stop()
        files = [str(server.data / name) for name in ("server.key", "server.crt")]
        command = f"{openssl} req -x509 -newkey rsa:2048 -nodes -days 9 -subj /CN=db.example.org"
        subprocess.run(
            [*command.split(), "-keyout", files[0], "-out", files[1]],
            check=True,
            capture_output=True,
            user=server.user,
        )
        with (server.data / "postgresql.conf").open("a") as file:
            file.write("ssl = on\n")
        server.start()
        certificate = tmp_path / "root.crt"
        shutil.copy(files[1], certificate)
        checked = f"{rollouts.url}&sslrootcert={certificate}&sslmode="
        source = opened(f"{checked}verify-ca")
        assert source._database is not None
        query = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
        assert source._database.ask(query) == [[(True,)]]
        source.close()
        with pytest.raises(SourceUnavailable, match="do not agree on TLS"):
            opened(f"{checked}verify-full")


@pytest.mark.slow
def test_transaction_ids_beyond_32_bits_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unseen, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr("spoold.sources.postgres._HELD_SECONDS", 0.0)
    with own_server() as server:
        rollouts = make_postgres(server)
        slow, fast, last = rollouts.register(3)
        rollouts.close()
        server.stop()
        server.run("pg_resetwal", "-D", str(server.data), "--epoch=7")
        server.start()
        rollouts = rollouts.another()
        held = rollouts.another()
        source = opened(rollouts.url)
        held.db.execute("BEGIN")
        low = held.complete(slow)
        rollouts.complete(fast)
        assert offered(source) == [fast]
        rollouts.complete(last)
        assert offered(source) == [last]
        assert [gap.low for gap in source._unseen.gaps] == [low]
        assert source._unseen.gaps[0].mark is not None
        assert source._unseen.gaps[0].mark > 7 << 32
        assert f"pid {held.db.db.info.backend_pid} (writer)" in source.advice()[0].detail
        held.db.execute("COMMIT")
        assert offered(source) == [slow]
        source.close()
        held.close()
        rollouts.close()


# ---- the daemon ---------------------------------------------------------------------------------


def test_the_daemon_delivers_from_a_server_and_never_says_its_password(
    rollouts: PostgresRollouts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "spoold")
    ids = rollouts.register(3)
    for one in ids[:2]:
        rollouts.complete(one)
    with running(tmp_path, db=rollouts.url) as it:
        it.go()
        assert environments(it.run) == ids[:2]
        rollouts.complete(ids[2])
        it.go(2.0)
        assert environments(it.run) == ids
        it.status  # noqa: B018  # written
    written = "".join(
        path.read_text() for path in Path(it.run.house).iterdir() if path.suffix == ".json"
    )
    assert (
        json.loads(Path(it.run.source_json).read_bytes())["url"]
        == f"postgresql://{READER}@127.0.0.1:{rollouts.server.port}/db"
    )
    for text in (written, caplog.text, repr(caplog.records)):
        assert PASSWORD not in text
        assert "s3cret" not in text


def test_a_daemon_at_rest_asks_the_server_at_each_scan(
    rollouts: PostgresRollouts, tmp_path: Path
) -> None:
    first, second = rollouts.register(2)
    rollouts.complete(first)
    with running(tmp_path, db=rollouts.url) as it:
        it.go()
        for folder, _, _ in os.walk(it.run.root):
            os.utime(folder, (1_700_000_000, 1_700_000_000))  # too young a time proves nothing
        for _ in range(4):
            it.go(2.0)
        rollouts.complete(second)
        it.go(2.0)
        assert environments(it.run) == [first, second]


def test_the_daemon_waits_for_a_server_that_is_away_and_says_so(tmp_path: Path) -> None:
    with own_server() as server:
        rollouts = make_postgres(server)
        first, second = rollouts.register(2)
        rollouts.complete(first)
        with running(tmp_path, db=rollouts.url) as it:
            it.go()
            rollouts.complete(second)
            rollouts.close()
            server.stop()
            it.go(2.0)
            text = it.reasons["source-unavailable"]
            assert text.startswith(say("source-unavailable", "cannot read postgresql://reader@"))
            server.start()
            it.go(20.0)
            assert "source-unavailable" not in it.reasons
            assert environments(it.run) == [first, second]


def test_status_names_a_forgotten_transaction_and_forgets_it_when_it_ends(
    rollouts: PostgresRollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spoold.sources.postgres._HELD_SECONDS", 0.0)
    monkeypatch.setattr("spoold.sources.postgres._ASK_HOLDERS_SECONDS", 0.0)
    slow, fast = rollouts.register(2)
    held = rollouts.another()
    held.db.execute("BEGIN")
    held.complete(slow)
    rollouts.complete(fast)
    with running(tmp_path, db=rollouts.url) as it:
        it.go()
        it.go(2.0)
        assert environments(it.run) == [fast]
        assert f"pid {held.db.db.info.backend_pid} (writer)" in it.reasons["open-transaction"]
        held.db.execute("COMMIT")
        held.close()
        it.go(2.0)
        assert "open-transaction" not in it.reasons
        assert environments(it.run) == [fast, slow]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ("", 75, "the password is missing or wrong"),
        ("ALTER TABLE session_steps DROP llm_model", 78, "no column llm_model"),
    ],
)
def test_once_exits_as_for_any_source(
    rollouts: PostgresRollouts, tmp_path: Path, change: str, code: int, said: str
) -> None:
    rollouts.complete(*rollouts.register())
    url = rollouts.url
    if change:
        rollouts.db.execute(change)
    else:
        url = url.replace("s3cret", "other")
    ran = subprocess.run(
        [sys.executable, "-m", "spoold", "run", "--once", "--run-dir", f"{tmp_path}/run"],
        env={**ENVIRON, "SPOOLD_DB": url},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == code
    assert said in ran.stderr
    assert "s3cret" not in ran.stderr + ran.stdout


# ---- plans --------------------------------------------------------------------------------------

_ENOUGH = """
INSERT INTO job_environments (job_id, env_id, env_name, env_params, group_id, finished)
    SELECT 'job-1', 'e' || n, 'm', '{}', 'g', (n <= 3000)::int FROM generate_series(1, 20000) n;
INSERT INTO session_steps (RECORDsession_id, step_id, env_name, llm_model, job_id, messages,
        response, is_session_completed, META)
    SELECT VALUE'e' || n, 1, 'm', 'm', 'job-1', '[{"role": "user"}]', repeat('x', 300),
        (n <= 3000)::int, '{}' FROM generate_series(1, 4000) n;
INSERT INTO session_steps (RECORDsession_id, step_id, env_name, llm_model, job_id, messages,
        response, META)
    SELECT VALUE2'e' || n, 2, 'm', 'm', 'job-1', '[{"role": "user"}]', '',
        '{}' FROM generate_series(1, 100) n;
"""


def enough(rollouts: PostgresRollouts) -> None:
    """Rows enough for a planner that wants to be clever."""
    has_record = rollouts.generation == "newest"
    text = _ENOUGH.replace("RECORD", "record_id, " if has_record else "")
    text = text.replace("VALUE2", "'s' || n, " if has_record else "")
    text = text.replace("VALUE", "'r' || n, " if has_record else "").replace(
        "META", rollouts.meta_column
    )
    rollouts.db.db.execute(text)


@pytest.mark.parametrize("analyzed", [True, False], ids=["analyzed", "not analyzed"])
@pytest.mark.parametrize("indexes", [True, False], ids=["indexes", "bare"])
@pytest.mark.parametrize("gate", [ReadyWhen.FINISHED, ReadyWhen.TERMINAL])
def test_no_query_walks_over_a_table(
    gate: ReadyWhen, indexes: bool, analyzed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = postgres_server()
    rollouts = make_postgres(server, GENERATIONS[2], indexes=indexes)
    enough(rollouts)
    if analyzed:
        rollouts.db.execute("ANALYZE")
    asked: list[tuple[str, str, dict[str, object]]] = []
    real_ask = PostgresSource._ask

    def ask(self: PostgresSource, *queries: str, **values: object) -> list[list[Any]]:
        asked.extend((name, getattr(self._schema, name), values) for name in queries)
        return real_ask(self, *queries, **values)

    monkeypatch.setattr(PostgresSource, "_ask", ask)
    source = opened(rollouts.url, ready_when=gate)
    skip = BitMap64(range(1, 2500))
    found = [c.id for look in source.reconcile(skip) for c in look.candidates]
    found = [c.id for look in source.reconcile(skip) for c in look.candidates]
    with rollouts.together():
        for one in (10, 3500, 5000):
            rollouts.complete(one)
    source.look(skip)
    list(source.reconcile(BitMap64(range(1, 19_990))))
    assert len(list(source.read([*found, 1, 2]))) == len(found) + 2
    each = opened(rollouts.url, ready_when=gate, samples=Samples.STEPS)
    list(each.read(found[:50]))
    each.close()
    list(source.members(["g"]))
    list(source.groups(skip))
    source.verify({1: "e1"}, 1)
    names = {name for name, _, _ in asked}
    assert {"facts", "new_rows", "in_range", "among", "tops", "heads", "rows", "members"} <= names
    by_query = {(name, text): values for name, text, values in asked}
    nodes = [
        (name, node)
        for (name, text), values in by_query.items()
        for node in _nodes(rollouts, text, values)
    ]
    walks = {one for one in nodes if re.search("Seq Scan|Hash|Merge Join", one[1])}
    # What is unique in a job may be found by both.
    by_job = {
        one for one in nodes if "_job_id_" in one[1] and one[0] not in ("new_rows", "has_job")
    }
    source.close()
    rollouts.drop()
    assert walks == set()
    assert by_job == set()


def _nodes(rollouts: PostgresRollouts, text: str, values: dict[str, object]) -> list[str]:
    """The nodes of the plan that this very query had, with the index or table of each."""
    from spoold.sources.postgres_open import _BEGIN

    cursor = psycopg.ClientCursor(rollouts.db.db)
    cursor.execute(_BEGIN)
    ((plan,),) = cursor.execute(f"EXPLAIN (FORMAT JSON) {text}", values).fetchall()
    cursor.execute("ROLLBACK")

    found: list[str] = []

    def walk(node: dict[str, Any]) -> None:
        of = node.get("Index Name") or node.get("Relation Name") or ""
        if not of.startswith("pg_"):
            found.append(f"{node['Node Type']} {of}")
        for child in node.get("Plans", ()):
            walk(child)

    walk((json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"])
    return found


def test_a_look_costs_the_same_however_many_are_registered(rollouts: PostgresRollouts) -> None:
    """By blocks that the server touched, not by time."""
    enough(rollouts)
    source = opened(rollouts.url)
    list(source.reconcile(DELIVERED))
    small = _blocks_of_a_look(rollouts, source, 19_990)
    rollouts.db.execute(
        "INSERT INTO job_environments (job_id, env_id, env_name, env_params)"
        " SELECT 'job-1', 'more' || n, 'm', '{}' FROM generate_series(1, 60000) n"
    )
    large = _blocks_of_a_look(rollouts, source, 19_991)
    source.close()
    assert large < small + 50


def _blocks_of_a_look(rollouts: PostgresRollouts, source: PostgresSource, one: int) -> int:
    def touched() -> int:
        with rollouts.server.connect() as db:
            db.execute("SELECT pg_stat_force_next_flush()")
            query = (
                "SELECT sum(heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read)"
                " FROM pg_statio_user_tables WHERE schemaname = %s"
            )
            return int(db.execute(query, (rollouts.schema,)).fetchone()[0])

    def settled() -> int:
        assert source._database is not None
        source._database.ask("SELECT pg_stat_force_next_flush()::text")
        rollouts.db.execute("SELECT pg_stat_force_next_flush()")
        source._database.ask("SELECT 1")
        return touched()

    rollouts.complete(one)
    before = settled()
    assert [candidate.id for candidate in source.look(DELIVERED).candidates] == [one]
    return settled() - before
