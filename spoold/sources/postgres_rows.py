"""The rows of environments out of PostgreSQL, a few megabytes a round trip.

One query reads the top row of every session. Mostly that is the row: completed, and a turn of the
model. Of the others, and of all where each step is a sample, the heads are read first (flags, meta,
a few bytes of the texts), which say what rows are wanted; then these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import orjson
from pyroaring import BitMap64

from spoold.codec import choose, is_trajectory, samples_of
from spoold.model import Rows, Samples, StepRow
from spoold.sources.postgres_open import Row, array

__all__ = ["RowReader"]

_MAX_BYTES: Final = 4 << 20
_AT_ONCE: Final = 512
_HEADS_AT_ONCE: Final = 64
_FACTS: Final = 6

Ask = Callable[..., list[list[Row]]]


class _Session(NamedTuple):
    """What is known of one environment: the first five of its StepRows, and the rows wanted.

    `rows` None: they are still to be read, by `pks`.
    """

    facts: Row | None
    is_finished: bool = False
    rows: tuple[StepRow, ...] | None = ()
    pks: tuple[int, ...] = ()
    size_bytes: int = 0


_NOTHING: Final = _Session(None)


class RowReader:
    """Reads the rows that become samples.

    `ask` runs queries of the schema, by name; `json`: whether messages, response and meta are JSON,
    where a string stands for its text; `needs_finished` is the gate. Holds at most two times
    4 MiB of rows and two rows, or all rows of one environment where each step is a sample.
    """

    def __init__(
        self,
        ask: Ask,
        json: tuple[bool, bool, bool],
        *,
        job: str,
        needs_finished: bool,
        samples: Samples,
    ) -> None:
        self._ask = ask
        self._json = json
        self._job = job
        self._own_jobs = (None, b"", job.encode())
        self._needs_finished = needs_finished
        self._all_steps = samples is Samples.STEPS

    def read(self, ids: Sequence[int], unusable: Callable[[int, bool], None]) -> Rows:
        """Return the rows of each environment, in the order of `ids`; () where none is usable.

        Calls `unusable(id, is_finished)` for each of the latter.
        """
        gather = self._gather_steps if self._all_steps else self._gather_tops
        at = 0
        while at < len(ids):
            sessions = self._with_rows(gather(ids[at:]))
            sessions.reverse()
            while sessions:
                session = sessions.pop()
                rows = session.rows or ()
                if not rows:
                    unusable(ids[at], session.is_finished)
                yield ids[at], rows
                at += 1

    def usable(self, ids: Sequence[int]) -> BitMap64:
        """Return which of `ids` have a usable row now."""
        found = BitMap64()
        for at in range(0, len(ids), _HEADS_AT_ONCE):
            sessions = self._heads(ids[at : at + _HEADS_AT_ONCE])
            found.update(one for one, session in sessions.items() if session.pks)
        return found

    # ---- which rows ----------------------------------------------------------------------------

    def _gather_tops(self, ids: Sequence[int]) -> list[_Session]:
        """Return a beginning of `ids`, at least one, with the row where it is the top one."""
        ids = ids[:_AT_ONCE]
        (found,) = self._ask("tops", ids=array(ids), job=self._job, room=_MAX_BYTES)
        by_id = {row[0]: row for row in found}
        sessions: list[_Session] = []
        walk: list[tuple[int, int]] = []
        for one in ids:
            row = by_id.get(one)
            if row is None or not self._passes(row):
                sessions.append(_NOTHING)
                continue
            facts, is_finished, top, step = row[:5], row[5], row[6], row[7:]
            if top is not None and step[1] is None:
                break  # no room was left
            session = _Session(facts, is_finished)
            if top is not None:
                step_row = self._own_row(facts, step)
                if step_row is not None and step_row.is_completed:
                    session = _Session(facts, is_finished, (step_row,))
                else:
                    walk.append((len(sessions), one))
            sessions.append(session)
        for first in range(0, len(walk), _HEADS_AT_ONCE):
            part = walk[first : first + _HEADS_AT_ONCE]
            walked = self._heads([one for _, one in part])
            for at, one in part:
                sessions[at] = walked.get(one, _NOTHING)
        return sessions

    def _gather_steps(self, ids: Sequence[int]) -> list[_Session]:
        ids = ids[:_HEADS_AT_ONCE]
        found = self._heads(ids)
        return [found.get(one, _NOTHING) for one in ids]

    def _heads(self, ids: Sequence[int]) -> dict[int, _Session]:
        """Return the sessions of `ids` that pass the gate, each with the ids of its rows."""
        (found,) = self._ask("heads", ids=array(ids), job=self._job)
        rows: dict[int, list[StepRow]] = {}
        passing: dict[int, Row] = {}
        sizes: dict[int, int] = {}
        for row in found:
            if not self._passes(row):
                continue
            passing[row[0]] = row[:_FACTS]
            step_row = self._own_row(row[:5], row[_FACTS + 1 :])
            if step_row is not None:
                rows.setdefault(row[0], []).append(step_row)
                sizes[step_row.pk] = row[_FACTS]
        sessions: dict[int, _Session] = {}
        for one, facts in passing.items():
            wanted = self._wanted(rows.get(one, []))
            sessions[one] = _Session(
                facts[:5],
                facts[5],
                None if wanted else (),
                tuple(row.pk for row in wanted),
                sum(sizes[row.pk] for row in wanted),
            )
        return sessions

    def _wanted(self, rows: Sequence[StepRow]) -> tuple[StepRow, ...]:
        if self._all_steps:
            return samples_of(rows)
        chosen = choose(rows)
        return () if chosen is None else (chosen,)

    def _passes(self, row: Row) -> bool:
        return bool(row[5]) or not self._needs_finished

    # ---- the rows ------------------------------------------------------------------------------

    def _with_rows(self, sessions: list[_Session]) -> list[_Session]:
        """Return a beginning of `sessions`, at least one, with the rows that were still to come."""
        room, upto = _MAX_BYTES, 0
        for session in sessions:
            if session.rows is None:
                if room <= 0:
                    break
                room -= session.size_bytes
            upto += 1
        sessions = sessions[:upto]
        pks = [pk for session in sessions for pk in session.pks]
        if not pks:
            return sessions
        (found,) = self._ask("rows", pks=array(pks))
        by_pk = {row[1]: row for row in found}
        return [
            session if session.rows is not None else self._read(session, by_pk)
            for session in sessions
        ]

    def _read(self, session: _Session, by_pk: dict[int, Row]) -> _Session:
        facts = session.facts
        assert facts is not None
        rows = [self._own_row(facts, by_pk[pk]) for pk in session.pks if pk in by_pk]
        # RACE: they may have been changed or deleted since their heads were read.
        wanted = self._wanted([row for row in rows if row is not None])
        return _Session(facts, session.is_finished, wanted)

    def _own_row(self, facts: Row, row: Row) -> StepRow | None:
        """Return a row that belongs to the job and is a turn of the model; else None."""
        if row[1] is None or row[0] not in self._own_jobs:
            return None
        json = self._json
        messages, response, meta = row[5], row[6], row[9]
        if any(json):
            messages = _text_of(messages) if json[0] else messages
            response = _text_of(response) if json[1] else response
            meta = _text_of(meta) if json[2] else meta
        if not is_trajectory(meta, messages, response):
            return None
        return StepRow._make((*facts, *row[1:5], messages, response, *row[7:9], meta, *row[10:]))


def _text_of(json: Any) -> Any:
    """Return JSON as it is, but the text of a string, None for null, and what can't be read."""
    if json == b"null":
        return None
    if isinstance(json, bytes) and json.startswith(b'"'):
        try:
            return orjson.loads(json).encode()
        except orjson.JSONDecodeError:
            return json  # only the beginning of one, or a lone surrogate
    return json
