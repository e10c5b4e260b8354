"""What is new since the last look: step rows, then who of all that run has passed the gate."""

from __future__ import annotations

import sqlite3
import time
from typing import Final

import orjson
from pyroaring import BitMap64

from spoold.model import Candidate
from spoold.sources.sqlite_rows import MAX_TRANSACTION_SECONDS
from spoold.sources.sqlite_schema import Schema
from spoold.sources.watched import Watched, group_of

__all__ = ["SLICE", "News"]

SLICE: Final = 20_000
# So many times more must run than are likely to be finished, for it to pay to ask those first.
_TIMES_MORE: Final = 4


class News:
    """What one look has found so far, among the step rows from `above` up to `upto`.

    `candidates` passed the gate, `late` are environments in `skip` that got new rows. Before all is
    read only `watched` knows more than it did, and nothing wrong. `more` where not all that run
    were asked: a later look has to ask `everyone`.

    `is_one_commit`: that is all that came since the last look. A writer writes rows, or marks one
    environment as finished, and not both at once: where either was found that was it
    (`is_explained`), and to ask all others is no haste.
    """

    def __init__(
        self,
        watched: Watched,
        *,
        above: int,
        upto: int,
        job: str,
        needs_finished: bool,
        everyone: bool,
        is_one_commit: bool,
        skip: BitMap64,
    ) -> None:
        self.candidates: list[Candidate] = []
        self.late = BitMap64()
        self.more = False
        self.is_explained = False
        self._above = above
        self._upto = upto
        self._is_one_commit = is_one_commit
        self._watched = watched
        self._job = job
        self._needs_finished = needs_finished
        self._everyone = everyone
        self._skip = skip
        self._touched = BitMap64()
        self._ended: dict[int, Candidate] = {}
        self._to_ask: list[int] | None = None

    def read_on(self, connection: sqlite3.Connection, schema: Schema, now: float) -> bool:
        """Read as much as one transaction may, step rows first. Returns whether that was all."""
        if self._above < self._upto:
            self._read_rows(connection, schema)
            if self._above < self._upto:
                return False
        if self._to_ask is None:
            self._watched.got_rows(self._touched, now)
            if not self._needs_finished:
                self.candidates = [self._ended[one] for one in sorted(self._ended)]
                return True
            running = self._watched.active(self._skip)
            likely = self._watched.lately - self._skip
            if likely and not self._everyone and len(running) > _TIMES_MORE * len(likely):
                # Their batch need not wait for all others to be asked.
                self._ask(connection, schema, list(likely))
                found = len(self.candidates) + bool(self._touched)
                self.is_explained = self._is_one_commit and found == 1
                if self.candidates or self.is_explained:
                    self.more = True
                    return True
            self._to_ask = list(running)
        ids, self._to_ask = self._to_ask[:SLICE], self._to_ask[SLICE:]
        self._ask(connection, schema, ids)
        return not self._to_ask

    def _ask(self, connection: sqlite3.Connection, schema: Schema, ids: list[int]) -> None:
        # With a thousand running `str(ids)` would be a quarter of the whole look.
        values = {"ids": orjson.dumps(ids).decode(), "job": self._job}
        rows = connection.execute(schema.finished_among, values)
        self.candidates += [Candidate(environment, group_of(group)) for environment, group in rows]

    def _read_rows(self, connection: sqlite3.Connection, schema: Schema) -> None:
        began, upto = time.monotonic(), self._upto
        query = schema.new_rows if self._needs_finished else schema.new_rows_flagged
        values = {"above": self._above, "upto": upto, "job": self._job}
        cursor = connection.execute(schema.mine(query), values)
        for number, (pk, environment, group, is_alive, has_ended) in enumerate(cursor, 1):
            if environment in self._skip:
                if pk > self._watched.ahead.get(environment, 0):
                    self.late.add(environment)
            elif is_alive:
                self._touched.add(environment)
                if has_ended:
                    self._ended[environment] = Candidate(environment, group_of(group))
            if number >= SLICE or time.monotonic() - began > MAX_TRANSACTION_SECONDS:
                upto = pk
                break
        # A cursor that is not at its end keeps the transaction alive.
        cursor.close()
        self._above = upto
