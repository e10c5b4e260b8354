"""The two tables of a rollout database in PostgreSQL, and every query that is made of them.

An ORM makes them with whatever types it likes: ids of any width, flags as booleans or integers,
times with or without a zone or as text, messages as text, json or jsonb. The queries level that.
JSON comes as the text that the server has of it, never as numbers that a driver read.

`postgres_open` holds the planner to indexes; the rest is said here: LATERAL with LIMIT or an
aggregate is run once a row, `id + 0` keeps max(id) from walking down the primary key. In a row the
flags lie before the long texts, which PostgreSQL keeps elsewhere: reading flags is cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from spoold.errors import SourceSchemaError, SourceUnavailable
from spoold.sources.postgres_open import Database

__all__ = ["Schema", "read_schema"]

ENVIRONMENTS: Final = "job_environments"
STEPS: Final = "session_steps"
_ENVIRONMENT_COLUMNS: Final = (
    "id", "job_id", "env_id", "env_name", "group_id", "finished", "is_deleted",
)  # fmt: skip
_STEP_COLUMNS: Final = (
    "id", "session_id", "step_id", "llm_model", "job_id", "messages", "response", "step_reward",
    "reward", "is_terminal", "is_truncated", "is_session_completed", "created_at",
)  # fmt: skip
_META_COLUMNS: Final = ("meta_json", "env_state")
_INTEGERS: Final = frozenset({"int2", "int4", "int8", "numeric"})
_JSON: Final = frozenset({"json", "jsonb"})
_TIMES: Final = frozenset({"timestamptz", "timestamp", "date"})

_COLUMNS: Final = f"""
SELECT c.oid = to_regclass('{STEPS}'), a.attname, t.typname, a.attnotnull
FROM pg_class AS c
JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
JOIN pg_type AS given ON given.oid = a.atttypid
JOIN pg_type AS t ON t.oid = CASE given.typtype WHEN 'd' THEN given.typbasetype ELSE given.oid END
WHERE c.oid IN (to_regclass('{ENVIRONMENTS}'), to_regclass('{STEPS}'))"""
_TABLES: Final = f"""
SELECT to_regclass('{ENVIRONMENTS}')::oid::bigint, to_regclass('{STEPS}')::oid::bigint,
    array_to_string(current_schemas(false), ', ')"""
# What an index begins with; those with a condition serve nobody else.
_INDEXES: Final = f"""
SELECT i.indrelid = to_regclass('{STEPS}'), a.attname
FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
WHERE i.indrelid IN (to_regclass('{ENVIRONMENTS}'), to_regclass('{STEPS}'))
    AND i.indisvalid AND i.indpred IS NULL"""
_SIZES: Final = f"""
SELECT c.oid = to_regclass('{STEPS}'), greatest(c.reltuples, 0)::bigint,
    c.relpages * current_setting('block_size')::bigint
FROM pg_class AS c WHERE c.oid IN (to_regclass('{ENVIRONMENTS}'), to_regclass('{STEPS}'))"""
_SEQUENCE: Final = """
SELECT s.seqrelid::bigint
FROM pg_depend AS d JOIN pg_sequence AS s ON s.seqrelid = d.objid
JOIN pg_attribute AS a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass
    AND d.refobjid = to_regclass('{table}') AND a.attname = 'id' AND d.deptype IN ('a', 'i')"""

# Equal as long as no transaction that wrote has ended: what is visible is the same. On a standby
# the snapshot does not list who runs, so it may stay equal while more becomes visible.
_STAMP: Final = "CASE WHEN NOT pg_is_in_recovery() THEN now::text END"
# OFFSET 0 is a fence: which index serves is decided by what is inside, the primary key. Otherwise
# an index that begins with job_id looks good too, to a planner that believes the job is small.
_WANTED: Final = """unnest(%(ids)s::bigint[]) WITH ORDINALITY AS w(id, n) CROSS JOIN LATERAL (
    SELECT * FROM job_environments AS o WHERE o.id = w.id OFFSET 0) AS e"""
_SLICE: Final = """(
    SELECT * FROM job_environments AS o WHERE o.id >= %(first)s AND o.id < %(end)s OFFSET 0) AS e"""


class Size(NamedTuple):
    """What the server's statistics say of a table."""

    rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """What the tables are like, and the queries for them. Parameters are named.

    `oids`: of both tables; others mean that they were made anew. `sequences`: oids of those that
    the ids come from, 0 where that is not known. `indexed`: (is steps, column) that an index begins
    with. `e_…` and `s_…` are conditions and expressions on a row of either table.
    """

    oids: tuple[int, int]
    sequences: tuple[int, int]
    indexed: frozenset[tuple[bool, str]]
    sizes: tuple[Size, Size]
    reward_is_nullable: bool
    e_finished: str
    e_alive: str
    s_ended: str
    s_flags: str
    s_created: str
    meta: str
    messages_size: str
    response_size: str
    json: tuple[bool, bool, bool]
    """Whether messages, response and meta are JSON: a string in them stands for its text."""

    def _fill(self, text: str) -> str:
        parts = {
            "{wanted}": _WANTED,
            "{slice}": _SLICE,
            "{finished}": self.e_finished,
            "{alive}": f"{self.e_alive} AND e.job_id = %(job)s",
            "{ended}": self.s_ended,
            "{own}": "coalesce(s.job_id::text, '') IN (%(job)s, '')",
            "{size}": f"coalesce({self.messages_size}, 0) + coalesce({self.response_size}, 0)",
            "{facts}": "e.id, e.env_id, e.group_id, e.job_id, e.env_name, "
            f"coalesce({self.e_finished}, false)",
            "{before}": "s.job_id, s.id, s.session_id, s.step_id, s.llm_model",
            "{after}": f"s.step_reward, s.reward, {self.meta}, {self.s_flags}, {self.s_created}",
        }
        for name, part in parts.items():
            text = text.replace(name, part)
        return text

    # --- what the database says of itself --------------------------------------------------------

    @property
    def facts(self) -> str:
        """Snapshot, clock, whether it is a standby, oids of the tables, highest ids.

        A sequence says more than the rows that are there, and is asked after the snapshot is taken,
        so never below them; but it may have any value where ids come from elsewhere.
        """
        last = [
            f"CASE WHEN has_sequence_privilege({oid}::oid, 'SELECT, USAGE')"
            f" THEN pg_sequence_last_value({oid}::oid) END"
            if oid
            else "NULL"
            for oid in self.sequences
        ]
        return f"""
            SELECT pg_snapshot_xmin(now)::text::bigint, pg_snapshot_xmax(now)::text::bigint,
                extract(epoch FROM CASE WHEN pg_is_in_recovery()
                    THEN coalesce(pg_last_xact_replay_timestamp(), clock_timestamp())
                    ELSE clock_timestamp() END)::float8,
                {_STAMP}, pg_is_in_recovery(),
                to_regclass('{ENVIRONMENTS}')::oid::bigint, to_regclass('{STEPS}')::oid::bigint,
                (SELECT max(e.id) FROM job_environments AS e),
                (SELECT max(s.id) FROM session_steps AS s), {last[0]}, {last[1]}
            FROM pg_current_snapshot() AS now"""

    stamp = f"SELECT {_STAMP} FROM pg_current_snapshot() AS now"

    # Where an open transaction may be the one that a gap waits for; without the right to see others
    # their age is NULL.
    holders = """
        SELECT a.pid, a.application_name, a.usename::text,
            extract(epoch FROM clock_timestamp() - a.xact_start)::float8
        FROM pg_stat_activity AS a WHERE a.backend_xid IS NOT NULL AND a.pid <> pg_backend_pid()
            AND a.backend_xid::text::bigint = (%(xmin)s & 4294967295)
        UNION ALL
        SELECT NULL, p.gid, p.owner::text,
            extract(epoch FROM clock_timestamp() - p.prepared)::float8
        FROM pg_prepared_xacts AS p
        WHERE p.transaction::text::bigint = (%(xmin)s & 4294967295)"""

    has_job = "SELECT 1 FROM job_environments AS e WHERE e.job_id = %(job)s LIMIT 1"

    @property
    def jobs(self) -> str:
        """The first few jobs: step by step through an index, or in one walk where there is none."""
        if (False, "job_id") not in self.indexed:
            return "SELECT DISTINCT e.job_id FROM job_environments AS e ORDER BY 1 LIMIT %(few)s"
        return """
            WITH RECURSIVE jobs(job, number) AS (
                SELECT (SELECT min(e.job_id) FROM job_environments AS e), 1
                UNION ALL
                SELECT (SELECT min(e.job_id) FROM job_environments AS e WHERE e.job_id > jobs.job),
                    jobs.number + 1
                FROM jobs WHERE jobs.job IS NOT NULL AND jobs.number < %(few)s)
            SELECT job FROM jobs WHERE job IS NOT NULL"""

    # --- looks -----------------------------------------------------------------------------------

    # All rows, those of other jobs too: an id that is there is no gap.
    @property
    def new_rows(self) -> str:
        """Rows in ranges: id, environment of this job or NULL, its group, env_id, alive, ended."""
        return self._fill(
            """
            SELECT s.id, e.id, e.group_id, e.env_id, e.alive, s.ended
            FROM unnest(%(lows)s::bigint[], %(highs)s::bigint[]) AS w(low, high)
            CROSS JOIN LATERAL (
                SELECT s.id, s.session_id, {own} AS own, {ended} AS ended FROM session_steps AS s
                WHERE s.id BETWEEN w.low AND w.high ORDER BY s.id LIMIT %(most)s) AS s
            LEFT JOIN LATERAL (
                SELECT e.id, e.group_id, e.env_id, {is_alive} AS alive FROM job_environments AS e
                WHERE s.own AND e.env_id = s.session_id AND e.job_id = %(job)s LIMIT 1) AS e ON true
            ORDER BY s.id LIMIT %(most)s""".replace("{is_alive}", self.e_alive)
        )

    # The ids alone, of what a reconcile sees: only what is missing between them counts.
    step_ids_below = """
        SELECT s.id FROM session_steps AS s
        WHERE s.id <= %(top)s ORDER BY s.id DESC LIMIT %(most)s"""

    @property
    def finished_among(self) -> str:
        """Which of `ids` are finished: id, group."""
        return self._fill("""
            SELECT e.id, e.group_id FROM {wanted} WHERE {finished} AND {alive} ORDER BY e.id""")

    # --- reconciles ------------------------------------------------------------------------------

    @property
    def in_range(self) -> str:
        """Environments from `first` up to `end` that are finished or have rows."""
        return self._registered("{slice}")

    @property
    def among(self) -> str:
        """The same of `ids`."""
        return self._registered("{wanted}")

    def _registered(self, which: str) -> str:
        return self._fill(f"""
            SELECT e.id, e.group_id, e.env_id, coalesce({{finished}}, false),
                r.id IS NOT NULL
            FROM {which} LEFT JOIN LATERAL (
                SELECT s.id FROM session_steps AS s WHERE s.session_id = e.env_id LIMIT 1
            ) AS r ON true
            WHERE {{alive}} AND ({{finished}} OR r.id IS NOT NULL) ORDER BY e.id""")

    next_environment = "SELECT min(e.id) FROM job_environments AS e WHERE e.id >= %(end)s"

    @property
    def ended_among(self) -> str:
        """Which of `ids` have a row of the job whose flags say that the session has ended."""
        return self._fill("""
            SELECT e.id FROM {wanted}
            CROSS JOIN LATERAL (SELECT 1 FROM session_steps AS s
                WHERE s.session_id = e.env_id AND {ended} AND {own} LIMIT 1) AS s ORDER BY e.id""")

    groups = """
        SELECT e.id, e.group_id FROM job_environments AS e
        WHERE e.id >= %(first)s AND e.id < %(end)s ORDER BY e.id"""

    @property
    def members(self) -> str:
        """Members of `groups` from `first` up to `end`: id, group."""
        return self._fill("""
            SELECT e.id, e.group_id FROM {slice}
            WHERE {alive} AND e.group_id::text = ANY(%(groups)s::text[]) ORDER BY e.id""")

    env_ids = f"SELECT e.id, e.env_id FROM {_WANTED}"

    # --- rows ------------------------------------------------------------------------------------

    @property
    def tops(self) -> str:
        """Environments with the top row of each: the facts, its id and size, and the row itself.

        The row is left out where those before it have `room` bytes already.
        """
        return self._fill("""
            WITH tops AS MATERIALIZED (
                SELECT w.n, {facts} AS is_finished, s.id AS top,
                    coalesce(sum({size}) OVER (ORDER BY w.n), 0) - coalesce({size}, 0) AS before
                FROM {wanted}
                LEFT JOIN LATERAL (SELECT max(t.id + 0) AS id FROM session_steps AS t
                    WHERE t.session_id = e.env_id) AS t ON true
                LEFT JOIN session_steps AS s ON s.id = t.id
                WHERE {alive})
            SELECT e.id, e.env_id, e.group_id, e.job_id, e.env_name, e.is_finished, e.top,
                {before}, s.messages, s.response, {after}
            FROM tops AS e
            LEFT JOIN session_steps AS s ON s.id = e.top AND e.before < %(room)s
            ORDER BY e.n""")

    @property
    def heads(self) -> str:
        """All rows of sessions, with the beginning of both texts: the facts, a size, the row."""
        return self._fill("""
            SELECT {facts}, {size}, {before}, left(s.messages::text, 64), left(s.response::text, 4),
                {after}
            FROM {wanted}
            LEFT JOIN LATERAL (SELECT * FROM session_steps AS s WHERE s.session_id = e.env_id
                OFFSET 0) AS s ON true
            WHERE {alive} ORDER BY e.id, s.id""")

    @property
    def rows(self) -> str:
        """Whole rows by id."""
        return self._fill("""
            SELECT {before}, s.messages, s.response, {after}
            FROM unnest(%(pks)s::bigint[]) AS w(id) JOIN session_steps AS s ON s.id = w.id""")


def read_schema(database: Database) -> Schema:
    """Find out what the tables are like.

    Raises SourceUnavailable where they are not there yet, SourceSchemaError naming what does not
    fit.
    """
    name = database.name
    (tables,), columns, indexes, sizes, environment_ids, step_ids = database.ask(
        _TABLES,
        _COLUMNS,
        _INDEXES,
        _SIZES,
        _SEQUENCE.replace("{table}", ENVIRONMENTS),
        _SEQUENCE.replace("{table}", STEPS),
    )
    oids = tables[0], tables[1]
    schemas = tables[2].decode()
    for table, oid in zip((ENVIRONMENTS, STEPS), oids, strict=True):
        if oid is None:
            raise SourceUnavailable(
                f"{name} has no table {table} yet" + (f" in {schemas}" if schemas else ""),
                hint="spoold waits for the writer to make it; it is looked for in the search_path"
                " of the role, which ALTER ROLE … SET search_path changes",
            )
    types = {(of, column.decode()): (kind.decode(), bound) for of, column, kind, bound in columns}
    environments = {column: kind for (of, column), (kind, _) in types.items() if not of}
    steps = {column: kind for (of, column), (kind, _) in types.items() if of}
    _check(name, ENVIRONMENTS, environments, _ENVIRONMENT_COLUMNS)
    _check(name, STEPS, steps, _STEP_COLUMNS)
    meta = [column for column in _META_COLUMNS if column in steps]
    if not meta:
        raise _lacks(name, STEPS, " or ".join(_META_COLUMNS))
    if ("uuid" in (environments["env_id"], steps["session_id"])) and (
        environments["env_id"] != steps["session_id"]
    ):
        raise SourceSchemaError(
            f"{name}: env_id is {environments['env_id']} and session_id {steps['session_id']}",
            hint="give both the same type: no index serves to find one by the other",
        )
    flags = {
        column: _flag(name, STEPS, steps, column)
        for column in ("is_terminal", "is_truncated", "is_session_completed")
    }
    by_table = {of: Size(rows, size_bytes) for of, rows, size_bytes in sizes}
    created = "s.created_at"
    if steps["created_at"] in _TIMES:
        # As a number: how a time is written depends on settings of the session.
        created = "extract(epoch FROM s.created_at)::float8"
    return Schema(
        oids=oids,
        sequences=(
            environment_ids[0][0] if environment_ids else 0,
            step_ids[0][0] if step_ids else 0,
        ),
        indexed=frozenset((of, column.decode()) for of, column in indexes),
        sizes=(by_table[False], by_table[True]),
        reward_is_nullable=not types[True, "reward"][1],
        e_finished=_flag(name, ENVIRONMENTS, environments, "finished", exactly_one=True),
        e_alive=f"NOT {_flag(name, ENVIRONMENTS, environments, 'is_deleted')}",
        s_ended=f"coalesce({' OR '.join(flags.values())}, false)",
        s_flags=", ".join(f"{flag}::int" for flag in flags.values()),
        s_created=created,
        meta=_meta(meta, steps),
        messages_size=_size("messages", steps),
        response_size=_size("response", steps),
        json=(
            steps["messages"] in _JSON,
            steps["response"] in _JSON,
            any(steps[column] in _JSON for column in meta),
        ),
    )


def _check(name: str, table: str, found: Mapping[str, str], wanted: tuple[str, ...]) -> None:
    missing = [column for column in wanted if column not in found]
    if missing:
        raise _lacks(name, table, ", ".join(missing))
    if found["id"] not in _INTEGERS:
        raise SourceSchemaError(
            f"{name}: {table}.id is {found['id']}", hint="spoold needs ids that are integers"
        )


def _lacks(name: str, table: str, missing: str) -> SourceSchemaError:
    return SourceSchemaError(
        f"{name}: table {table} has no column {missing}",
        hint="its writer is older or newer than those that spoold knows",
    )


def _flag(
    name: str, table: str, found: Mapping[str, str], column: str, *, exactly_one: bool = False
) -> str:
    """Return a flag as a condition, whichever way it is kept."""
    alias = "e" if table == ENVIRONMENTS else "s"
    kind = found[column]
    if kind == "bool":
        return f"{alias}.{column}"
    if kind in _INTEGERS:
        return f"({alias}.{column} {'= 1' if exactly_one else '<> 0'})"
    raise SourceSchemaError(
        f"{name}: {table}.{column} is {kind}", hint="spoold knows flags as booleans and integers"
    )


def _size(column: str, steps: Mapping[str, str]) -> str:
    # The length of a text is known without reading it; that of JSON only when it is written out.
    text = f"s.{column}::text" if steps[column] in _JSON else f"s.{column}"
    return f"octet_length({text})"


def _meta(columns: list[str], steps: Mapping[str, str]) -> str:
    texts = [f"s.{one}::text" if steps[one] in _JSON else f"s.{one}" for one in columns]
    return texts[0] if len(texts) == 1 else f"coalesce({', '.join(texts)})"
