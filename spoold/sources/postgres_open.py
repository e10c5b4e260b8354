"""A connection to a PostgreSQL server that only reads, and keeps nothing open between two calls.

Each call is one round trip: BEGIN, what is set for this transaction alone, SELECTs, COMMIT. So
there is never a transaction left open by a reader who dawdles or dies, nothing of the session is
relied on, nothing is prepared, and a pooler in transaction mode may hand each call to another
server process. Every statement sees what was committed when it began.

The planner is held: nested loops through indexes, in this transaction only. Left alone it hashes a
whole table for a look at a few hundred rows as soon as its statistics are old.
"""

from __future__ import annotations

import select
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from psycopg import ClientCursor, Connection, Error, OperationalError
from psycopg.abc import RV, PQGen
from psycopg.adapt import Loader
from psycopg.waiting import Ready, Wait

from spoold.errors import SourceSchemaError, SourceUnavailable
from spoold.sources.postgres_errors import STATEMENT_SECONDS, unavailable
from spoold.sources.postgres_url import ConnectionFacts, without_secrets

__all__ = ["Database", "Row", "array"]

Row = tuple[Any, ...]

# The first with pg_snapshot and transaction ids of 64 bits.
_OLDEST: Final = 130000
_LOCK_SECONDS: Final = 2
_ANSWER_SECONDS: Final = STATEMENT_SECONDS + 10.0
_BEGIN: Final = f"""
BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY;
SET LOCAL statement_timeout = '{STATEMENT_SECONDS}s';
SET LOCAL lock_timeout = '{_LOCK_SECONDS}s';
SET LOCAL enable_seqscan = off;
SET LOCAL enable_hashjoin = off;
SET LOCAL enable_mergejoin = off;
SET LOCAL max_parallel_workers_per_gather = 0;
SET LOCAL jit = off;
SET LOCAL extra_float_digits = 1;
"""
# Texts as they come: JSON is not parsed, and whether it is UTF-8 is the codec's to judge. 0 is what
# no loader is known for.
_RAW: Final = ("text", "varchar", "bpchar", "name", "json", "jsonb", "uuid", 0)
_ANY_ENCODING: Final = frozenset({"UTF8", "SQL_ASCII"})


class _Raw(Loader):
    load = staticmethod(bytes)  # type: ignore[assignment]


class _Number(Loader):
    load = staticmethod(float)  # type: ignore[assignment]


class _Patient(Connection[Row]):
    """A connection that does not wait for ever for a server that is alive and says nothing."""

    def wait(
        self,
        gen: PQGen[RV],
        interval: float = 0.0,  # noqa: ARG002  # signals wake a poll by themselves
        timeout: float | None = None,
    ) -> RV:
        """Drive a generator of psycopg; OperationalError where no answer comes in time."""
        give_up = time.monotonic() + (timeout or _ANSWER_SECONDS)
        poll = select.poll()
        try:
            wanted = next(gen)
            while True:
                mask = select.POLLIN if wanted & Wait.R else 0
                mask |= select.POLLOUT if wanted & Wait.W else 0
                poll.register(self.pgconn.socket, mask)
                came = poll.poll(max(0.0, give_up - time.monotonic()) * 1000)
                if not came:
                    raise OperationalError(f"no answer in {_ANSWER_SECONDS:.0f} s")
                events = came[0][1]
                # An error counts as both: whoever reads or writes then is told what it is.
                can_read = Ready.R if events & ~select.POLLOUT else 0
                can_write = Ready.W if events & ~select.POLLIN else 0
                wanted = gen.send(Ready(can_read | can_write))
        except StopIteration as end:
            value: RV = end.value
            return value


class Database:
    """An open connection. Closes itself when a call fails. Not for several threads."""

    def __init__(self, facts: ConnectionFacts) -> None:
        """Connect. Raises SourceUnavailable, SourceSchemaError for a server that is too old."""
        self._facts = facts
        self.name = without_secrets(facts)
        self._connection: Connection[Row] | None = None
        try:
            connection = _connect(facts, "SQL_ASCII")
            if connection.info.parameter_status("server_encoding") not in _ANY_ENCODING:
                # Bytes as they lie there would not be UTF-8: let the server convert them.
                connection.close()
                connection = _connect(facts, "UTF8")
        except Error as error:
            raise unavailable(error, facts) from error
        version = connection.info.server_version
        if version < _OLDEST:
            connection.close()
            raise SourceSchemaError(
                f"{self.name} is PostgreSQL {version // 10000}",
                hint=f"spoold needs {_OLDEST // 10000} or newer",
            )
        for name in _RAW:
            connection.adapters.register_loader(name, _Raw)
        connection.adapters.register_loader("numeric", _Number)
        self._connection = connection

    @property
    def is_open(self) -> bool:
        """Whether it can still be used."""
        return self._connection is not None and not self._connection.closed

    def close(self) -> None:
        """Disconnect; fine when that was done."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def ask(self, *queries: str, **values: object) -> list[list[Row]]:
        """Run SELECTs in one transaction; returns the rows of each.

        Parameters are `%(name)s` in the text. Raises SourceUnavailable, and closes the connection
        then.
        """
        if self._connection is None:
            raise SourceUnavailable(f"{self.name} is not open", hint="open it first")
        text = f"{_BEGIN}{';'.join(queries)}; COMMIT"
        try:
            return self._run(text, values)
        except Error as error:
            self.close()
            raise unavailable(error, self._facts) from error
        except BaseException:
            self.close()
            raise

    def _run(self, text: str, values: Mapping[str, object]) -> list[list[Row]]:
        assert self._connection is not None
        found: list[list[Row]] = []
        with self._connection.cursor() as cursor:
            cursor.execute(text.encode(), values)
            while True:
                if cursor.description is not None:
                    found.append(cursor.fetchall())
                if not cursor.nextset():
                    return found


def _connect(facts: ConnectionFacts, encoding: str) -> Connection[Row]:
    return _Patient.connect(
        **(facts | {"client_encoding": encoding}),
        autocommit=True,
        prepare_threshold=None,
        cursor_factory=ClientCursor,
    )


def array(ids: Sequence[int]) -> str:
    """Return ids as the server reads an array of them."""
    return "{" + ",".join(map(str, ids)) + "}"
