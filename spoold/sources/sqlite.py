"""Completed environments out of the SQLite database that a rollout writer fills.

Each look costs as much as there are new step rows and running environments, never as much as was
ever registered. In memory are the highest step id seen, and sets of environment ids; both are
advanced only when a look has come to its end. Everything that a look may miss (flags that flip in
place on an old row, environments that were quiet for long, rows that were there at `open`) a
reconcile finds.

Ids that go backwards, or a highest row that is another one now, mean that rows which we have not
seen hide below the highest id: then a look starts over from what is there and says so in
`Look.went_back`. Whether it is the database that was delivered from only `verify` can say.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from pyroaring import BitMap64

from spoold.errors import SourceSchemaError, SourceUnavailable
from spoold.model import Advice, Candidate, Look, Mark, ReadyWhen, Rows, Samples
from spoold.policy import WHOLE, Shard
from spoold.sources.share import Share
from spoold.sources.sqlite_facts import (
    Heights,
    be_the_same,
    deleted_of,
    env_ids_of,
    heights_of,
    job_of,
)
from spoold.sources.sqlite_news import SLICE, News
from spoold.sources.sqlite_open import Database, FileId, Held, Stamp, connect, file_id, real_path
from spoold.sources.sqlite_rows import MAX_TRANSACTION_SECONDS, RowReader
from spoold.sources.sqlite_schema import OWNS, Schema, first_schema, in_migration, read_schema
from spoold.sources.watched import Found, Row, Watched, group_of

__all__ = ["SqliteSource"]


_FEW: Final = 256
_SLICE_SECONDS: Final = 1.0
# Where a look asked only the likely ones, the others are asked so much later, if not by the look
# for the next commit, which mostly comes while the batch is written. Nothing spoke for them: later.
_MORE_SECONDS: Final = 0.01
_UNASKED_SECONDS: Final = 2.0


class SqliteSource:
    """One job of a SQLite database. Implements `spoold.sources.Source`.

    `readings`: the paths that the URL may mean; the first one that exists is it, tried anew at each
    `open` until there is one.
    """

    def __init__(
        self,
        readings: Sequence[str],
        *,
        job: str | None,
        ready_when: ReadyWhen,
        samples: Samples,
        known_job: str | None = None,
        shard: Shard = WHOLE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._readings = tuple(os.path.abspath(path) for path in readings)
        self._path = self._readings[0]
        self._wanted_job = job
        self._known_job = known_job
        self._samples = samples
        self._clock = clock
        self.job = job or ""
        self.ready_when = ready_when
        self._database: Database | None = None
        # Of the last connection.
        self._file: FileId | None = None
        self._wal: Held | None = None
        self._schema: Schema | None = None
        self._reader: RowReader | None = None
        self._heights: Heights | None = None
        self._highest_step = 0
        # Found at a connection of its own accord, and not told yet.
        self._went_back = False
        # Of the last look, and of the last complete one.
        self._looked: Stamp | None = None
        self._seen: Stamp | None = None
        self._commits: int | None = None
        self._asks_everyone = False
        self._unasked_since: float | None = None
        self._verified: Stamp | None = None
        self._watched = Watched(clock())
        self._share = Share(shard, job=self.job)

    @property
    def url(self) -> str:
        """The database, for people: the same for every way to write its path."""
        return f"sqlite:///{self._path}"

    @property
    def running(self) -> int:
        """How many environments have step rows and are neither delivered nor candidates."""
        return self._watched.running

    @property
    def missing(self) -> BitMap64:
        """The finished environments that have no usable row, as far as was looked and read."""
        return self._watched.missing

    # A hint may come before its commit is visible, by as long as the writer syncs: this is after
    # 0.3, 0.6, 1, 1.5, 2, 3, 5, 8, 18, 38, 78, 158 and 258 ms.
    peek_seconds: Sequence[float] = (
        *(0.0003, 0.0003, 0.0004, 0.0005, 0.0005, 0.001, 0.002, 0.003),
        *(0.01, 0.02, 0.04, 0.08, 0.1),
    )

    def advice(self) -> tuple[Advice, ...]:
        """Return nothing: the indexes that are needed are part of the tables."""
        return ()

    def watched(self) -> Mapping[str, frozenset[str]]:
        """Return the folders, and the names in each, whose changes are hints."""
        watched: dict[str, frozenset[str]] = {}
        for path in self._readings:
            folder, name = os.path.split(path)
            watched[folder] = watched.get(folder, frozenset()) | {name, f"{name}-wal"}
        return watched

    # ---- open and close ------------------------------------------------------------------------

    def open(self) -> bool:
        """Connect, check the schema, pick the job. What was found in the same file stays known."""
        self.close()
        self._went_back = False
        if self._schema is None:
            there = (path for path in self._readings if os.path.exists(path))
            self._path = next(there, self._readings[0])
        return self._connect(may_be_new=True)

    def close(self) -> None:
        """Disconnect; what was found stays known."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def _connect(self, *, may_be_new: bool) -> bool:
        moved = self.moved()
        if moved and not may_be_new:
            raise self._another_file()
        if self._wal is not None and not self._wal.is_at(f"{real_path(self._path)}-wal"):
            self._wal = None
        try:
            database = connect(self._path, has_stale_wal=moved and self._wal is not None)
            try:
                starts_over = self._take(database, moved=moved)
            except BaseException:
                database.close()
                raise
        except SourceSchemaError as error:
            if self._schema is None:
                raise
            raise in_migration(error) from error
        self._database = database
        self._file, self._wal = database.id, database.wal
        self._looked = self._seen = self._verified = self._commits = None
        return starts_over

    def _another_file(self) -> SourceUnavailable:
        return SourceUnavailable(f"{self._path} is another file now", hint="spoold opens it anew")

    def _take(self, database: Database, *, moved: bool) -> bool:
        is_new = database.id != self._file
        if is_new and self._file is not None and not moved:
            raise self._another_file()  # RACE: just now, and its -wal may be that of the old one
        if not self._share.is_whole:
            database.define(OWNS, lambda *facts: self._share.owns(*facts))
        schema = first_schema(database, self._path, is_whole=self._share.is_whole)
        wanted = self._wanted_job if is_new else self.job or self._wanted_job
        with database.transaction() as connection:
            job = job_of(connection, schema, self._path, wanted=wanted, known=self._known_job)
            heights = heights_of(connection, schema, self._heights)
        self.job = job
        if self.ready_when is ReadyWhen.AUTO:
            # Kept even if a migration changes the column: its old rows were not marked finished.
            self.ready_when = (
                ReadyWhen.FINISHED if schema.reward_is_nullable else ReadyWhen.TERMINAL
            )
        self._schema = schema
        this = weakref.proxy(self)  # whoever drops this drops the -wal that it holds
        self._reader = RowReader(
            lambda: this._transaction(),
            job=job,
            needs_finished=self.ready_when is ReadyWhen.FINISHED,
            samples=self._samples,
        )
        starts_over = is_new or self._heights is None or heights.went_back(self._heights)
        if starts_over:
            self._start_over(heights)
        return starts_over

    def _start_over(self, heights: Heights) -> None:
        self._heights = heights
        self._highest_step = heights.steps
        self._watched = Watched(self._clock())
        self._share = Share(self._share.shard, job=self.job)

    def _connected(self) -> Database:
        """Return the connection, a new one where the last call failed."""
        if self._database is None or not self._database.is_open:
            self._went_back |= self._connect(may_be_new=False)
        assert self._database is not None
        return self._database

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[tuple[sqlite3.Connection, Schema]]:
        """Read from one state of the database."""
        try:
            with self._connected().transaction() as connection:
                (version,) = connection.execute("PRAGMA schema_version").fetchone()
                assert self._schema is not None
                if version != self._schema.version:
                    # A migration rebuilt a table. Ids are kept, so is all that we know.
                    self._schema = read_schema(
                        connection, self._path, is_whole=self._share.is_whole
                    )
                yield connection, self._schema
        except SourceSchemaError as error:
            raise in_migration(error) from error

    # ---- looking -------------------------------------------------------------------------------

    def changed(self) -> bool:
        """Whether there may be anything to see since the last complete look."""
        if self._seen is None or self._watched.has_untold:
            return True
        database = self._database
        return database is None or not database.is_open or database.stamp() != self._seen

    def committed(self) -> bool:
        """Whether a commit became visible since the last look; True: it may have."""
        database = self._database
        if self._looked is None or database is None or not database.is_open:
            return True
        try:
            if database.immutable:
                return database.stamp() != self._looked
            # Their number first. To ask for the version a reader may have to take the writer's lock
            # for a moment; and to a guest whose -shm nobody warrants it is always another one.
            if self._commits is not None:
                return database.commits() != self._commits
            return database.stamp().content != self._looked.content
        except SourceUnavailable:
            return True  # the look that follows says why

    def is_writing(self) -> bool:
        """Whether a writer is in a transaction; True: perhaps."""
        return self._database is None or self._database.is_writing()

    def moved(self) -> bool:
        """Whether the path names another file than the one that is open, or none."""
        return self._file is not None and file_id(self._path) != self._file

    def marks(self) -> tuple[Mark, ...]:
        """Return what tells whether a look, or `moved`, would find something."""
        seen, database = self._seen, self._database
        if seen is None or self._watched.has_untold or database is None or not database.is_open:
            return ((SqliteSource.changed, self, False),)
        return (file_id, self._path, self._file), *database.marks(seen)

    def look(
        self, skip: BitMap64, remembered: Mapping[int, str] | None = None, highest: int = 0
    ) -> Look:
        """Look at new step rows, and at the environments that are running; verify."""
        # Before anything is read: what is committed from here on makes another look.
        database = self._connected()
        if self._went_back:
            self._went_back = False
            return Look(went_back=True)
        stamp, commits, now = database.stamp(), database.commits(), self._clock()
        assert self._heights is not None
        heights, news = self._heights, None
        deleted = BitMap64()
        while True:  # mostly once; where there is more than one transaction may read, others follow
            with self._transaction() as (connection, schema):
                # RACE: between two of them rows may come, or all go back; rows are read up to the
                # first one's highest, and it is the database of the last one that is verified.
                before, heights = heights, heights_of(connection, schema, heights)
                if went_back := heights.went_back(before):
                    break
                if news is None:
                    if database.commits() != commits:
                        commits = None  # nobody knows how many of them are in what is read
                    news, upto = self._news(commits, skip, heights.steps, now), heights.steps
                if news.read_on(connection, schema, self._clock()):
                    if remembered is not None:
                        state = connection, schema, heights
                        deleted = deleted_of(self._path, *state, remembered, highest)
                    break
        if went_back or news is None:
            self._start_over(heights)
            self._looked = self._seen = None
            return Look(went_back=True)
        if remembered is not None:
            self._verified = stamp
        self._watched.offer(candidate.id for candidate in news.candidates)
        self._heights = heights
        self._highest_step = max(self._highest_step, upto)
        self._watched.caught_up(self._highest_step)
        self._looked, self._commits = stamp, commits
        if not news.more:
            self._seen = stamp
        return Look(
            candidates=tuple(news.candidates),
            late=tuple(news.late),
            missing=self._watched.tell(),
            more_after=self._more_after(news, now),
            deleted=tuple(deleted),
        )

    def _more_after(self, news: News, now: float) -> float | None:
        self._asks_everyone = news.more and not news.is_explained
        if not news.more:
            self._unasked_since = None
            return None
        if self._asks_everyone:
            return _MORE_SECONDS
        if self._unasked_since is None:
            self._unasked_since = now
        return max(0.0, self._unasked_since + _UNASKED_SECONDS - now)

    def _news(self, commits: int | None, skip: BitMap64, upto: int, now: float) -> News:
        number = None if commits is None or self._commits is None else commits - self._commits
        everyone = self._asks_everyone
        if self._unasked_since is not None:
            everyone |= now - self._unasked_since >= _UNASKED_SECONDS
        return News(
            self._watched,
            above=self._highest_step,
            upto=upto,
            job=self.job,
            needs_finished=self.ready_when is ReadyWhen.FINISHED,
            everyone=everyone,
            is_one_commit=number == 1,
            skip=skip,
        )

    def reconcile(self, skip: BitMap64) -> Iterator[Look]:
        """Look at every environment that is not in `skip`, in slices of 20,000 ids.

        Shorter ones where flags lie behind so much that a slice would take a second.
        """
        self._share.doubt()
        with self._transaction() as (connection, schema):
            end = heights_of(connection, schema).environments + 1
        first = 1
        while first < end:
            stop = min(first + SLICE, end)
            others = self._share.with_others(skip)
            if others.contains_range(first, stop):
                first = stop
                continue
            look, first = self._reconcile_slice(first, stop, others)
            yield replace(look, reached=first - 1, highest=end - 1)
        with self._transaction() as (connection, schema):
            end = heights_of(connection, schema).environments + 1
        gone = self._watched.reconciled(end, max(end, self._watched.highest + 1), Found(), skip)
        if gone:
            yield Look(gone=gone)

    def _reconcile_slice(self, first: int, end: int, skip: BitMap64) -> tuple[Look, int]:
        """Return what is in a slice, and where the next one begins."""
        rows, next_first = self._registered(first, end, skip)
        rows = [row for row in rows if row[0] not in skip]
        ended: BitMap64 | None = None
        if self.ready_when is not ReadyWhen.FINISHED:
            ended, upto = self._ended_among([row[0] for row in rows if row[3]])
            if upto is not None:
                rows = [row for row in rows if row[0] <= upto]
                next_first = upto + 1
        found = Found.among(rows, ended)
        assert self._reader is not None
        tried = self._watched.tried & found.candidates
        found.cannot_use(BitMap64([one for one in tried if not self._reader.is_usable(one)]))
        gone = self._watched.reconciled(first, next_first, found, skip)
        return found.look(gone=gone), next_first

    def _registered(self, first: int, end: int, skip: BitMap64) -> tuple[list[Row], int]:
        """Return the environments of a slice that have rows or are finished, and its end."""
        left = end - first - skip.range_cardinality(first, end)
        with self._transaction() as (connection, schema):
            if left <= _FEW:
                ids = list(BitMap64(range(first, end)) - skip)
                values: dict[str, object] = {"ids": str(ids), "job": self.job}
                return connection.execute(schema.mine(schema.among), values).fetchall(), end
            values = {"first": first, "end": end, "job": self.job}
            rows = connection.execute(schema.mine(schema.in_range), values).fetchall()
            if rows:
                return rows, end
            # Ids may go on far above: other jobs, or what was deleted.
            (following,) = connection.execute(schema.next_environment, (end,)).fetchone()
        return rows, end if following is None else max(end, following)

    def _ended_among(self, ids: list[int]) -> tuple[BitMap64, int | None]:
        """Return which of `ids` have a row whose flags say that the session has ended.

        Flags lie behind the messages of a row: this reads all of a session that has not. So it
        stops after a second, and says at which of `ids`; None: it looked at all of them.
        """
        ended = BitMap64()
        at = 0
        give_up = time.monotonic() + _SLICE_SECONDS
        while at < len(ids):
            if at and time.monotonic() > give_up:
                return ended, ids[at - 1]
            began = time.monotonic()
            with self._transaction() as (connection, schema):
                values = {"ids": str(ids[at : at + _FEW]), "job": self.job}
                cursor = connection.execute(schema.ended_among, values)
                for environment, has_ended in cursor:
                    if has_ended:
                        ended.add(environment)
                    if time.monotonic() - began > MAX_TRANSACTION_SECONDS:
                        at = bisect_right(ids, environment)
                        break
                else:
                    at += _FEW
                cursor.close()
        return ended, None

    def groups(self, ids: BitMap64) -> Iterator[tuple[Candidate, ...]]:
        """Return the group of each of `ids` that has one and is still there, slice by slice."""
        first = ids.min() if ids else 0
        while first:
            end = first + SLICE
            with self._transaction() as (connection, schema):
                rows = connection.execute(schema.groups, (first, end)).fetchall()
            yield tuple(Candidate(one, group_of(group)) for one, group in rows if one in ids)
            first = next(ids.iter_equal_or_larger(end), 0)

    def members(self, groups: Collection[str]) -> Iterator[tuple[Candidate, ...]]:
        """Return all members of these groups that are registered and not deleted, in slices."""
        first: int | None = 1
        wanted = json.dumps(sorted(groups))
        while first is not None:
            with self._transaction() as (connection, schema):
                end = first + SLICE
                values = {"first": first, "end": end, "job": self.job, "groups": wanted}
                rows = connection.execute(schema.members, values).fetchall()
                following = connection.execute(schema.next_environment, (end,))
                (first,) = following.fetchone()
            yield tuple(Candidate(one, group_of(group)) for one, group in rows)

    # ---- rows ----------------------------------------------------------------------------------

    def read(self, ids: Sequence[int]) -> Rows:
        """Return the rows that become samples, in the order of `ids`."""
        if self._reader is None:
            raise SourceUnavailable(f"{self._path} is not open", hint="open it first")
        with contextlib.closing(self._reader.read(ids, self._watched.was_unusable)) as found:
            for environment, rows in found:
                if rows and rows[-1].pk > self._highest_step:
                    self._watched.ahead[environment] = rows[-1].pk
                yield environment, rows

    # ---- identity ------------------------------------------------------------------------------

    def verify(self, remembered: Mapping[int, str], highest: int) -> BitMap64:
        """Make sure that this is the database that was delivered from; return whose row is gone."""
        stamp = self._connected().stamp()
        with self._transaction() as (connection, schema):
            heights = heights_of(connection, schema, self._heights)
            gone = deleted_of(self._path, connection, schema, heights, remembered, highest)
        be_the_same(self._path, heights, self._heights)
        self._verified = stamp
        return gone

    def is_verified(self) -> bool:
        """Whether nothing was committed since the last `verify`."""
        database = self._database
        return database is not None and database.is_open and database.stamp() == self._verified

    def env_ids(self, ids: Collection[int]) -> Mapping[int, str]:
        """Return the env_id of each of `ids` that is still there."""
        with self._transaction() as (connection, schema):
            heights = heights_of(connection, schema, self._heights)
            found = env_ids_of(connection, schema, ids)
        be_the_same(self._path, heights, self._heights)
        return found
