"""The rows of environments, in batches of a few megabytes, each read in one short transaction.

One SELECT reads the top row of every session by primary key. Mostly that is the row: completed,
and a turn of the model. Only where it is not is the session walked down, row by row.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

from spoold.codec import choose, is_trajectory, samples_of
from spoold.model import Samples, StepRow
from spoold.sources.sqlite_schema import Schema

__all__ = ["MAX_TRANSACTION_SECONDS", "RowReader"]

MAX_TRANSACTION_SECONDS: Final = 0.25
_MAX_BYTES: Final = 8 << 20
_AT_ONCE: Final = 256

Transaction = Callable[[], AbstractContextManager[tuple[sqlite3.Connection, Schema]]]


class _Environment(NamedTuple):
    """An environment that passes the gate. The first five as in StepRow."""

    id: int
    env_id: object
    group_id: object
    job_id: object
    env_name: object
    is_finished: bool
    top: int | None


def _is_finished(environment: _Environment | None) -> bool:
    return environment is not None and bool(environment.is_finished)


class _Session(NamedTuple):
    """What was read of one environment. `rows`: None where the session has to be walked."""

    environment: _Environment | None
    rows: tuple[StepRow, ...] | None = ()


class RowReader:
    """Reads the rows that become samples.

    `transaction` opens one; `needs_finished` is the gate. Holds at most 8 MiB of rows and one row.
    """

    def __init__(
        self, transaction: Transaction, *, job: str, needs_finished: bool, samples: Samples
    ) -> None:
        self._transaction = transaction
        self._job = job
        self._own_jobs = (None, b"", job.encode())
        self._needs_finished = needs_finished
        self._all_steps = samples is Samples.STEPS

    def read(
        self, ids: Sequence[int], unusable: Callable[[int, bool], None]
    ) -> Iterator[tuple[int, tuple[StepRow, ...]]]:
        """Return the rows of each environment, in the order of `ids`; () where none is usable.

        Calls `unusable(id, is_finished)` for each of the latter.
        """
        at = 0
        while at < len(ids):
            sessions = self._gather(ids[at : at + 8 * _AT_ONCE])
            sessions.reverse()
            while sessions:
                session = sessions.pop()
                environment, rows = session.environment, session.rows
                if rows is None:
                    assert environment is not None
                    rows = self._walk(environment)
                if not rows:
                    unusable(ids[at], _is_finished(environment))
                yield ids[at], rows
                at += 1

    def is_usable(self, environment: int) -> bool:
        """Whether there is a usable row now."""
        with self._transaction() as (connection, schema):
            found = self._environments(connection, schema, [environment]).get(environment)
        return found is not None and self._choose_by_heads(found) is not None

    # ---- the fast way: many sessions at once ---------------------------------------------------

    def _gather(self, ids: Sequence[int]) -> list[_Session]:
        """Read a beginning of `ids`, at least one, in one transaction."""
        sessions: list[_Session] = []
        room = _MAX_BYTES
        began = time.monotonic()
        with self._transaction() as (connection, schema):
            while len(sessions) < len(ids) and room > 0:
                part = ids[len(sessions) : len(sessions) + _AT_ONCE]
                room = self._read_part(connection, schema, part, room, sessions)
                if time.monotonic() - began > MAX_TRANSACTION_SECONDS:
                    break
        return sessions

    def _read_part(
        self,
        connection: sqlite3.Connection,
        schema: Schema,
        ids: Sequence[int],
        room: int,
        sessions: list[_Session],
    ) -> int:
        """Add as many of `ids` as fit into `room` bytes, at least one; returns what is left."""
        environments = self._environments(connection, schema, ids)
        pks = self._row_ids(connection, schema, environments)
        owners = {pk: one for one in ids for pk in pks.get(one, ())}
        rows: dict[int, list[StepRow]] = {}
        last = 0
        cursor = connection.execute(schema.rows, {"ids": str(list(owners))})
        # Rows come in the order of `owners`; one that is gone is left out.
        for row in cursor:
            one = owners[row[1]]
            if one != last:
                if room <= 0:
                    break
                own = rows[one] = []
                facts = environments[one][:5]
                last = one
            room -= len(row[5] or b"") + len(row[6] or b"")
            if self._is_own(row):
                own.append(StepRow._make(facts + row[1:]))
        # A cursor that is not at its end keeps the transaction alive.
        cursor.close()
        for one in ids:
            sessions.append(self._session(environments.get(one), rows.get(one, [])))
            if one == last and room <= 0:
                break
        return room

    def _environments(
        self, connection: sqlite3.Connection, schema: Schema, ids: Sequence[int]
    ) -> dict[int, _Environment]:
        """Return those of `ids` that pass the gate now."""
        found = {}
        values = {"ids": str(list(ids)), "job": self._job}
        for row in connection.execute(schema.environments, values):
            environment = _Environment(*row)
            if environment.is_finished or not self._needs_finished:
                found[environment.id] = environment
        return found

    def _row_ids(
        self, connection: sqlite3.Connection, schema: Schema, environments: dict[int, _Environment]
    ) -> dict[int, Sequence[int]]:
        """Return the ids of the rows to read, for each environment that has any."""
        if not self._all_steps:
            return {e.id: (e.top,) for e in environments.values() if e.top is not None}
        found: dict[int, list[int]] = {}
        for environment, pk in connection.execute(
            schema.step_ids, {"ids": str(list(environments))}
        ):
            found.setdefault(environment, []).append(pk)
        return {one: sorted(pks) for one, pks in found.items()}

    def _session(self, environment: _Environment | None, rows: list[StepRow]) -> _Session:
        if environment is None or environment.top is None:
            return _Session(environment)
        if self._all_steps:
            return _Session(environment, samples_of(rows))
        if rows and rows[0].is_completed:
            return _Session(environment, (rows[0],))
        return _Session(environment, None)

    # ---- the slow way: one session, from its top down ------------------------------------------

    def _walk(self, environment: _Environment) -> tuple[StepRow, ...]:
        pk = self._choose_by_heads(environment)
        if pk is None:
            return ()
        with self._transaction() as (connection, schema):
            rows = self._one_row(connection, schema.rows, environment, pk)
        # RACE: it may have been changed since its head was read.
        chosen = choose(rows)
        return (chosen,) if chosen is not None else ()

    def _choose_by_heads(self, environment: _Environment) -> int | None:
        """Return the id of the usable row. Reads no more than flags, meta and a few bytes.

        As many transactions as it takes: each row's flags lie behind all of its messages.
        """
        rows: list[StepRow] = []
        left: list[int] | None = None
        while left is None or left:
            began = time.monotonic()
            with self._transaction() as (connection, schema):
                if left is None:
                    left = self._ids_of(connection, schema, environment)
                while left:
                    rows += self._one_row(connection, schema.heads, environment, left.pop())
                    if rows and rows[-1].is_completed:
                        return rows[-1].pk
                    if time.monotonic() - began > MAX_TRANSACTION_SECONDS:
                        break
        chosen = choose(rows)
        return None if chosen is None else chosen.pk

    def _ids_of(
        self, connection: sqlite3.Connection, schema: Schema, environment: _Environment
    ) -> list[int]:
        pairs = connection.execute(schema.step_ids, {"ids": str([environment.id])})
        return sorted(pk for _, pk in pairs)

    def _one_row(
        self, connection: sqlite3.Connection, query: str, environment: _Environment, pk: int
    ) -> list[StepRow]:
        row = connection.execute(query, {"ids": str([pk])}).fetchone()
        if row is None or not self._is_own(row):
            return []
        return [StepRow._make(environment[:5] + row[1:])]

    def _is_own(self, row: tuple[Any, ...]) -> bool:
        """Whether a row belongs to the job and is a turn of the model."""
        return row[0] in self._own_jobs and is_trajectory(row[9], row[5], row[6])
