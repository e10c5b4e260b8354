"""The rows of environments, many in one short transaction, and one after the other.

One SELECT reads the top row of every session by primary key. Mostly that is the row: completed,
and a turn of the model. Only where it is not is the session walked down, row by row.

Each row is handed on before the next one is read, so that all work on it finds it in the caches of
the processor; and of rows of any size no more than one session's are held.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any, Final, NamedTuple

from spoold.codec import choose, is_trajectory, samples_of
from spoold.model import Rows, Samples, StepRow
from spoold.sources.sqlite_schema import Schema

__all__ = ["MAX_TRANSACTION_SECONDS", "RowReader"]

MAX_TRANSACTION_SECONDS: Final = 0.25
_AT_ONCE: Final = 256
_BIG_BYTES: Final = 1 << 20

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


_Session = tuple[_Environment | None, tuple[StepRow, ...] | None]
"""What was read of one environment. Its rows are None where the session has to be walked."""


def _size_of(rows: Sequence[StepRow]) -> int:
    return sum(
        len(text)
        for row in rows
        for text in (row.messages, row.response)
        if isinstance(text, bytes)
    )


class RowReader:
    """Reads the rows that become samples.

    `transaction` opens one; `needs_finished` is the gate.
    """

    def __init__(
        self, transaction: Transaction, *, job: str, needs_finished: bool, samples: Samples
    ) -> None:
        self._transaction = transaction
        self._job = job
        self._own_jobs = (None, b"", job.encode())
        self._needs_finished = needs_finished
        self._all_steps = samples is Samples.STEPS

    def read(self, ids: Sequence[int], unusable: Callable[[int, bool], None]) -> Rows:
        """Return the rows of each environment, in the order of `ids`; () where none is usable.

        Calls `unusable(id, is_finished)` for each of the latter. A transaction is open between one
        environment and the next: whoever stops early has to close this.
        """
        at = 0
        while at < len(ids):
            with closing(self._sessions(ids[at : at + _AT_ONCE])) as sessions:
                for environment, rows in sessions:
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

    def _sessions(self, ids: Sequence[int]) -> Generator[_Session, None, None]:
        """Read a beginning of `ids`, at least one, in one transaction.

        The last one comes when the transaction is over. So do those whose work takes long: what is
        big, and what takes more of a walk than one transaction may.
        """
        began = time.monotonic()
        last: _Session = (None, ())
        with self._transaction() as (connection, schema):
            environments = self._environments(connection, schema, ids)
            pks = self._row_ids(connection, schema, environments)
            wanted = str([pk for one in ids for pk in pks.get(one, ())])
            # A cursor that is not at its end keeps the transaction alive.
            with closing(connection.execute(schema.rows, {"ids": wanted})) as cursor:
                found = None
                for one in ids:
                    environment = environments.get(one)
                    own = []
                    size_bytes = 0
                    for pk in pks.get(one, ()):
                        found = found or cursor.fetchone()
                        # They come in the order of `wanted`; one that is gone is left out.
                        if environment is None or found is None or found[1] != pk:
                            continue
                        size_bytes += len(found[5] or b"") + len(found[6] or b"")
                        if self._is_own(found):
                            own.append(StepRow._make(environment[:5] + found[1:]))
                        found = None
                    rows = self._usable(environment, own)
                    if rows is None and environment is not None:
                        until = began + MAX_TRANSACTION_SECONDS
                        rows = self._walk_at_once(connection, schema, environment, until)
                        size_bytes += _size_of(rows or ())
                    is_old = time.monotonic() - began > MAX_TRANSACTION_SECONDS
                    if one == ids[-1] or rows is None or size_bytes > _BIG_BYTES or is_old:
                        last = environment, rows
                        break
                    yield environment, rows
        yield last

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

    def _usable(
        self, environment: _Environment | None, rows: list[StepRow]
    ) -> tuple[StepRow, ...] | None:
        """Return those of the rows read that become samples; None where it takes a walk to tell."""
        if environment is None or environment.top is None:
            return ()
        if self._all_steps:
            return samples_of(rows)
        if rows and rows[0].is_completed:
            return (rows[0],)
        return None

    # ---- the slow way: one session, from its top down ------------------------------------------

    def _walk_at_once(
        self,
        connection: sqlite3.Connection,
        schema: Schema,
        environment: _Environment,
        until: float,
    ) -> tuple[StepRow, ...] | None:
        """Walk a session in the transaction that is open; None where that takes too long."""
        rows: list[StepRow] = []
        for pk in reversed(self._ids_of(connection, schema, environment)):
            if time.monotonic() > until:
                return None
            rows += self._one_row(connection, schema.heads, environment, pk)
            if rows and rows[-1].is_completed:
                break
        chosen = choose(rows)
        if chosen is None:
            return ()
        return tuple(self._one_row(connection, schema.rows, environment, chosen.pk))

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
