"""The two tables of a rollout database: what they must have, and every query that is made of them.

The planner is held to primary keys and to session_id: CROSS JOIN fixes the order of tables, unary
+ keeps a condition from choosing an index. Left alone it starts at the index on job_id and walks
over all that was ever registered, and after an ANALYZE of a young database it walks over the whole
table for a long `IN (…)`. So ids come in as one JSON array, and rows come out in its order. The
indexes of the UNIQUE constraints are always there, those that the writer adds may not be.

In a row the flags lie behind megabytes of messages, so they are asked for last, and of few rows.
Before them a source of one shard asks whose an environment is, by an SQL function of its own.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spoold.errors import SourceSchemaError, SourceUnavailable

if TYPE_CHECKING:
    from spoold.sources.sqlite_open import Database

__all__ = ["OWNS", "Schema", "first_schema", "in_migration", "read_schema"]

OWNS: Final = "spoold_owns"
"""SQL function of (id, group id, env id): whether an environment belongs to the shard."""

_TRIES: Final = 10
_PAUSE_SECONDS: Final = 0.05
_ENVIRONMENTS: Final = "job_environments"
_STEPS: Final = "session_steps"
_ENVIRONMENT_COLUMNS: Final = (
    "id",
    "job_id",
    "env_id",
    "env_name",
    "group_id",
    "finished",
    "is_deleted",
)
_STEP_COLUMNS: Final = (
    "id",
    "session_id",
    "step_id",
    "llm_model",
    "job_id",
    "messages",
    "response",
    "step_reward",
    "reward",
    "is_terminal",
    "is_truncated",
    "is_session_completed",
    "created_at",
)
_META_COLUMNS: Final = ("meta_json", "env_state")

_OF_SHARD: Final = f"AND {OWNS}(e.id, CAST(e.group_id AS BLOB), CAST(e.env_id AS BLOB))"
_PARTS: Final = {
    "{own}": "(+s.job_id = :job OR +s.job_id IS NULL OR +s.job_id = '')",
    "{ended}": "(s.is_session_completed <> 0 OR s.is_terminal <> 0 OR s.is_truncated <> 0)",
    "{top}": "(SELECT max(+t.id) FROM session_steps AS t WHERE t.session_id = e.env_id)",
    "{wanted}": "json_each(:ids) AS w CROSS JOIN job_environments AS e ON e.id = w.value",
    "{has_rows}": "EXISTS (SELECT 1 FROM session_steps AS s WHERE s.session_id = e.env_id)",
}


def _sql(text: str) -> str:
    """Return a query with the parts that several queries share filled in."""
    for name, part in _PARTS.items():
        text = text.replace(name, part)
    return text


@dataclass(frozen=True, slots=True)
class Schema:
    """What one generation of the writer calls its columns, and the queries for it.

    `version` is PRAGMA schema_version: when it changes the tables may have been rebuilt. Parameters
    are named; `:ids` is a JSON array of integers. Those with `{mine}` go through `mine`.
    """

    version: int
    reward_is_nullable: bool
    meta: str
    has_sequence: bool
    is_whole: bool

    next_job = "SELECT min(e.job_id) FROM job_environments AS e WHERE e.job_id > ?"
    first_job = "SELECT min(e.job_id) FROM job_environments AS e"
    has_job = "SELECT 1 FROM job_environments AS e WHERE e.job_id = ? LIMIT 1"
    heights = """
        SELECT (SELECT q.seq FROM sqlite_sequence AS q WHERE q.name = 'job_environments'),
            (SELECT q.seq FROM sqlite_sequence AS q WHERE q.name = 'session_steps'),
            (SELECT max(e.id) FROM job_environments AS e),
            (SELECT max(s.id) FROM session_steps AS s),
            (SELECT e.env_id FROM job_environments AS e WHERE e.id = :environment),
            (SELECT s.session_id FROM session_steps AS s WHERE s.id = :step)"""
    heights_without_sequence = heights.replace("sqlite_sequence", "(SELECT 0 AS seq, 0 AS name)")
    # Of a step no more than lies before its messages.
    owners = """
        SELECT (SELECT e.env_id FROM job_environments AS e WHERE e.id = :environment),
            (SELECT s.session_id FROM session_steps AS s WHERE s.id = :step)"""
    env_ids = _sql("SELECT e.id, e.env_id FROM {wanted}")

    new_rows = _sql("""
        SELECT s.id, e.id, e.group_id, e.is_deleted = 0, 0
        FROM session_steps AS s CROSS JOIN job_environments AS e ON e.env_id = s.session_id
        WHERE s.id > :above AND s.id <= :upto AND {own} AND +e.job_id = :job {mine}
        ORDER BY s.id""")
    new_rows_flagged = _sql(new_rows.replace("= 0, 0", "= 0, {ended}"))
    finished_among = _sql("""
        SELECT e.id, e.group_id FROM {wanted}
        WHERE e.finished = 1 AND +e.is_deleted = 0 AND +e.job_id = :job""")

    groups = "SELECT e.id, e.group_id FROM job_environments AS e WHERE e.id >= ? AND e.id < ?"
    members = _sql("""
        SELECT e.id, e.group_id FROM job_environments AS e
        WHERE e.id >= :first AND e.id < :end AND +e.is_deleted = 0 AND +e.job_id = :job
        AND +e.group_id IN (SELECT g.value FROM json_each(:groups) AS g)""")
    next_environment = "SELECT min(e.id) FROM job_environments AS e WHERE e.id >= ?"
    in_range = _sql("""
        SELECT e.id, e.group_id, e.finished = 1, {has_rows} FROM job_environments AS e
        WHERE e.id >= :first AND e.id < :end AND +e.is_deleted = 0 AND +e.job_id = :job {mine}
        AND (e.finished = 1 OR {has_rows})""")
    among = _sql("""
        SELECT e.id, e.group_id, e.finished = 1, {has_rows} FROM {wanted}
        WHERE +e.is_deleted = 0 AND +e.job_id = :job {mine}
        AND (e.finished = 1 OR {has_rows})""")
    # The top row first: of a session that has ended it mostly is the end.
    ended_among = _sql("""
        SELECT e.id, CASE
            WHEN (SELECT {ended} AND {own} FROM session_steps AS s WHERE s.id = {top}) THEN 1
            ELSE EXISTS (SELECT 1 FROM session_steps AS s
                         WHERE s.session_id = e.env_id AND {ended} AND {own}) END
        FROM {wanted}""")

    environments = _sql("""
        SELECT e.id, e.env_id, e.group_id, e.job_id, e.env_name, e.finished = 1, {top}
        FROM {wanted} WHERE +e.is_deleted = 0 AND +e.job_id = :job""")
    step_ids = _sql("""
        SELECT e.id, s.id FROM {wanted} CROSS JOIN session_steps AS s ON s.session_id = e.env_id""")

    def mine(self, query: str) -> str:
        """Return a query that finds only what belongs to the shard."""
        return query.replace("{mine}", "" if self.is_whole else _OF_SHARD)

    @property
    def rows(self) -> str:
        """Whole rows: the row's own job_id, then as StepRow from `pk` on."""
        return _ROWS.replace("{meta}", self.meta)

    @property
    def heads(self) -> str:
        """The same, with only the beginning of messages and response."""
        return self.rows.replace(
            "s.messages, s.response",
            "substr(CAST(s.messages AS BLOB), 1, 64), substr(CAST(s.response AS BLOB), 1, 1)",
        )


_ROWS: Final = """
    SELECT s.job_id, s.id, s.session_id, s.step_id, s.llm_model, s.messages, s.response,
        s.step_reward, s.reward, {meta}, s.is_terminal <> 0, s.is_truncated <> 0,
        s.is_session_completed <> 0, s.created_at
    FROM json_each(:ids) AS w CROSS JOIN session_steps AS s ON s.id = w.value"""


def read_schema(connection: sqlite3.Connection, path: str, *, is_whole: bool) -> Schema:
    """Find out what the tables are like. In a transaction.

    Unless all there is `is_whole`, the connection must know the function OWNS. Raises
    SourceUnavailable for a database without any table, SourceSchemaError naming what else is
    missing.
    """
    (version,) = connection.execute("PRAGMA schema_version").fetchone()
    environments = _columns(connection, _ENVIRONMENTS)
    steps = _columns(connection, _STEPS)
    if not environments and not steps and not _has_tables(connection):
        raise SourceUnavailable(
            f"{path} has no tables yet", hint="spoold waits for the writer to make them"
        )
    for table, found, wanted in (
        (_ENVIRONMENTS, environments, _ENVIRONMENT_COLUMNS),
        (_STEPS, steps, _STEP_COLUMNS),
    ):
        if not found:
            raise SourceSchemaError(
                f"{path} has no table {table}", hint="is it a rollout database of SAfactory?"
            )
        missing = [column for column in wanted if column not in found]
        if missing:
            raise _lacks(path, table, ", ".join(missing))
    meta = [f"s.{column}" for column in _META_COLUMNS if column in steps]
    if not meta:
        raise _lacks(path, _STEPS, " or ".join(_META_COLUMNS))
    return Schema(
        version=version,
        reward_is_nullable=not steps["reward"],
        meta=meta[0] if len(meta) == 1 else f"coalesce({', '.join(meta)})",
        has_sequence=bool(_columns(connection, "sqlite_sequence")),
        is_whole=is_whole,
    )


def first_schema(database: Database, path: str, *, is_whole: bool) -> Schema:
    """Read the schema, giving a writer that makes its tables one by one a moment."""
    tries = 0
    while True:
        tries += 1
        with database.transaction() as connection:
            try:
                return read_schema(connection, path, is_whole=is_whole)
            except SourceSchemaError:
                if tries == _TRIES:
                    raise
        time.sleep(_PAUSE_SECONDS)


def in_migration(error: SourceSchemaError) -> SourceUnavailable:
    """Return the error to raise of a database that was one: it may be migrated, or be copied."""
    return SourceUnavailable(error.message, hint=f"waits out a migration; else {error.hint}")


def _lacks(path: str, table: str, missing: str) -> SourceSchemaError:
    return SourceSchemaError(
        f"{path}: table {table} has no column {missing}",
        hint="its writer is older or newer than those that spoold knows",
    )


def _columns(connection: sqlite3.Connection, table: str) -> dict[str, bool]:
    """Return the columns of a table, each with whether it is NOT NULL; none: no such table."""
    rows = connection.execute(f"PRAGMA table_info({table})")
    return {row[1].decode("utf-8", "replace"): bool(row[3]) for row in rows}


def _has_tables(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None
