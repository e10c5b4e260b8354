"""Completed environments out of the PostgreSQL database that rollout writers fill.

Each look costs one round trip while no transaction has ended anywhere in the server, else a few,
and as much as there are new step rows and running environments. Rows become visible in any order of
ids: `unseen` knows which may still come, so a look passes over none that an open transaction may
still show. What a reconcile finds is that which flips in place on old rows, environments that were
quiet for long, and the rows of ids that were drawn long before they were used (a sequence with
CACHE above 1), so these come up to `rescan_seconds` late.

There are no hints from a server: while rows come in it is looked at a few times a second, else
every `scan_seconds`. A standby will do as the source: it shows what it has replayed. There, each
look asks for everything that may be new.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from pyroaring import BitMap64

from spoold.errors import SourceSchemaError, SourceUnavailable
from spoold.model import Advice, Candidate, Look, Mark, ReadyWhen, Rows, Samples
from spoold.policy import WHOLE, Shard
from spoold.sources.identity import verified
from spoold.sources.jobs import JOBS_SHOWN, pick_job
from spoold.sources.postgres_errors import TimedOut, changed_tables
from spoold.sources.postgres_facts import (
    Facts,
    env_ids_of,
    missing_indexes,
    who_holds,
)
from spoold.sources.postgres_open import Database, Row, array
from spoold.sources.postgres_rows import RowReader
from spoold.sources.postgres_schema import Schema, read_schema
from spoold.sources.postgres_url import facts_of, without_secrets
from spoold.sources.share import Share
from spoold.sources.unseen import Unseen
from spoold.sources.watched import Found, Watched, group_of

__all__ = ["PostgresSource"]

SLICE: Final = 20_000
_FEWEST: Final = 100
_LOOK_BACK: Final = 100_000
_SLOW_SECONDS: Final = 0.5
_HELD_SECONDS: Final = 60.0
_ASK_HOLDERS_SECONDS: Final = 10.0


class PostgresSource:
    """One job of a PostgreSQL database. Implements `spoold.sources.Source`."""

    def __init__(
        self,
        url: str,
        *,
        job: str | None,
        ready_when: ReadyWhen,
        samples: Samples,
        known_job: str | None = None,
        shard: Shard = WHOLE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Note what to connect to. Raises ConfigError for a URL that libpq does not know."""
        self._server = facts_of(url)
        self.url = without_secrets(self._server)
        self._wanted_job = job
        self._known_job = known_job
        self._samples = samples
        self._clock = clock
        self.job = job or ""
        self.ready_when = ready_when
        self._database: Database | None = None
        self._schema: Schema | None = None
        self._reader: RowReader | None = None
        self._facts: Facts | None = None
        self._unseen = Unseen(0)
        self._seen: str | None = None
        self._verified: str | None = None
        self._watched = Watched(clock())
        self._share = Share(shard, job=self.job)
        self._slice = SLICE
        self._is_moving = False
        self._held: tuple[Advice, ...] = ()
        self._ask_holders_at = 0.0

    @property
    def running(self) -> int:
        """How many environments have step rows and are neither delivered nor candidates."""
        return self._watched.running

    @property
    def missing(self) -> BitMap64:
        """The finished environments that have no usable row, as far as was looked and read."""
        return self._watched.missing

    @property
    def peek_seconds(self) -> Sequence[float]:
        """After which pauses to look again: soon while rows come in, at the scan otherwise."""
        return (0.1, 0.2, 0.4) if self._is_moving else ()

    def watched(self) -> Mapping[str, frozenset[str]]:
        """Return no folders: a server gives no hints."""
        return {}

    def advice(self) -> tuple[Advice, ...]:
        """Return which index would help, and which transaction has been open for long."""
        return (*self._held, *(missing_indexes(self._schema) if self._schema is not None else ()))

    # ---- open and close ------------------------------------------------------------------------

    def open(self) -> bool:
        """Connect, check the schema, pick the job. What was found stays known."""
        self.close()
        return self._connect(may_be_new=True)

    def close(self) -> None:
        """Disconnect; what was found stays known."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def _connect(self, *, may_be_new: bool) -> bool:
        database = Database(self._server)
        try:
            schema = self._read_schema(database)
            is_new = self._schema is None or schema.oids != self._schema.oids
            job = self._pick_job(database, schema, keep=not is_new)
            ((facts,),) = database.ask(schema.facts)
            found = Facts.of(facts)
            starts_over = is_new or self._facts is None or found.is_below(self._facts)
            if starts_over:
                self._may_start_over(may_be_new)
                self.job = job
                self._start_over(database, schema, found)
        except BaseException:
            database.close()
            raise
        self.job = job
        if self.ready_when is ReadyWhen.AUTO:
            # Kept even if a migration changes the column: its old rows were not marked finished.
            nullable = schema.reward_is_nullable
            self.ready_when = ReadyWhen.FINISHED if nullable else ReadyWhen.TERMINAL
        self._database, self._schema, self._facts = database, schema, found
        self._reader = RowReader(
            self._ask,
            schema.json,
            job=job,
            needs_finished=self.ready_when is ReadyWhen.FINISHED,
            samples=self._samples,
        )
        self._seen = self._verified = None
        return starts_over

    def _may_start_over(self, may_be_new: bool) -> None:
        if not may_be_new:
            raise self._made_anew()

    def _read_schema(self, database: Database) -> Schema:
        try:
            return read_schema(database)
        except SourceSchemaError as error:
            if self._schema is None:
                raise
            # It was a rollout database: it may be in a migration.
            hint = f"waits out a migration; else {error.hint}"
            raise SourceUnavailable(error.message, hint=hint) from error

    def _start_over(self, database: Database, schema: Schema, facts: Facts) -> None:
        """Forget all; a reconcile follows. What may still turn up below the top is looked for.

        Among the last 100,000 ids: a transaction that is open now and drew a lower one is left to
        the reconcile.
        """
        (rows,) = database.ask(schema.step_ids_below, top=facts.steps, most=_LOOK_BACK)
        ids = [pk for (pk,) in reversed(rows)]
        is_all = len(ids) < _LOOK_BACK
        self._unseen = Unseen(0 if is_all else ids[0] - 1).saw(ids, facts.snapshot.at)
        self._watched = Watched(self._clock())
        self._share = Share(self._share.shard, job=self.job)

    def _pick_job(self, database: Database, schema: Schema, *, keep: bool) -> str:
        wanted = self.job if keep and self.job else self._wanted_job
        if wanted is not None and database.ask(schema.has_job, job=wanted)[0]:
            return wanted
        (found,) = database.ask(schema.jobs, few=JOBS_SHOWN + 1)
        jobs = [str(job, "utf-8", "replace") for (job,) in found]
        return pick_job(jobs, wanted=wanted, known=self._known_job, where=self.url)

    def _ask(self, *queries: str, **values: object) -> list[list[Row]]:
        """Run queries of the schema, by name, in one transaction.

        Over a new connection where the last call failed. Where a migration changed the tables their
        schema is read again, once.
        """
        for _ in range(2):
            if self._database is None or not self._database.is_open:
                self._connect(may_be_new=False)
            assert self._database is not None
            try:
                return self._database.ask(*self._texts(queries), **values)
            except TimedOut:
                self._slice = max(_FEWEST, self._slice // 4)
                raise
            except SourceUnavailable as error:
                if not changed_tables(error.__cause__):
                    raise
                changed = error
        raise changed

    def _texts(self, queries: Sequence[str]) -> list[str]:
        return [getattr(self._schema, name) for name in queries]

    def _ask_with_facts(self, *queries: str, **values: object) -> tuple[Facts, list[list[Row]]]:
        """Run queries after the facts. Raises SourceUnavailable where the tables are new ones."""
        (facts,), *found = self._ask("facts", *queries, **values)
        read = Facts.of(facts)
        if self._schema is None or read.oids != self._schema.oids:
            self.close()
            raise self._made_anew()
        return read, found

    def _made_anew(self) -> SourceUnavailable:
        return SourceUnavailable(
            f"the tables of {self.url} were made anew", hint="spoold looks at them anew"
        )

    # ---- looking -------------------------------------------------------------------------------

    def changed(self) -> bool:
        """Whether there may be anything to see since the last complete look. One round trip."""
        return self._seen is None or self._watched.has_untold or self._read_stamp() != self._seen

    def committed(self) -> bool:
        """Whether there may be anything to see since the last look. One round trip."""
        try:
            return self.changed()
        except SourceUnavailable:
            return True  # the look that follows says why

    def is_writing(self) -> bool:
        """Return True: to ask is as dear as to look."""
        return True

    def moved(self) -> bool:
        """Whether it is another database: what `look` and `open` find out by themselves."""
        return False

    def marks(self) -> tuple[Mark, ...]:
        """Return what tells whether a look would find something. One round trip."""
        return ((PostgresSource.changed, self, False),)

    def _read_stamp(self) -> str | None:
        (((stamp,),),) = self._ask("stamp")
        return None if stamp is None else str(stamp, "ascii")

    def look(
        self, skip: BitMap64, remembered: Mapping[int, str] | None = None, highest: int = 0
    ) -> Look:
        """Look at new step rows, and at the environments that are running; verify."""
        assert self._facts is not None
        touched, late = BitMap64(), BitMap64()
        ended: dict[int, Candidate] = {}
        first: Facts | None = None
        unseen = self._unseen
        ranges, most = unseen.ranges(), self._slice
        while ranges:
            facts, (rows,) = self._ask_with_facts(
                "new_rows",
                lows=array([low for low, _ in ranges]),
                highs=array([high for _, high in ranges]),
                most=most,
                job=self.job,
            )
            if first is None:
                if facts.is_below(self._facts):
                    assert self._database is not None
                    assert self._schema is not None
                    self._start_over(self._database, self._schema, facts)
                    self._facts, self._seen = facts, None
                    return Look(went_back=True)
                # Older than whoever fills the gaps that are found from here on.
                first, unseen = facts, unseen.marked(facts.snapshot)
            self._sort_in(rows, skip, touched, late, ended)
            unseen = unseen.saw([row[0] for row in rows], facts.snapshot.at)
            done = rows[-1][0] if len(rows) == most else None
            ranges = [] if done is None else _above(ranges, done)
        assert first is not None
        now = self._clock()
        self._watched.got_rows(touched, now)
        candidates = (
            self._finished_among(list(self._watched.active(skip)))
            if self.ready_when is ReadyWhen.FINISHED
            else [ended[one] for one in sorted(ended)]
        )
        self._watched.offer(candidate.id for candidate in candidates)
        self._unseen = unseen.settled(first.snapshot)
        self._watched.caught_up(self._unseen.top)
        self._facts, self._seen = first, first.stamp
        self._is_moving = bool(touched or candidates)
        self._find_holders(first)
        # RACE: after all else, so that what was seen is what is verified.
        deleted = () if remembered is None else self.verify(remembered, highest)
        return Look(
            candidates=tuple(candidates),
            late=tuple(late),
            missing=self._watched.tell(),
            deleted=tuple(deleted),
        )

    def _sort_in(
        self,
        rows: Sequence[Row],
        skip: BitMap64,
        touched: BitMap64,
        late: BitMap64,
        ended: dict[int, Candidate],
    ) -> None:
        """Add environments with new step rows, those of them in `skip`, and those that ended."""
        for pk, environment, group, env_id, is_alive, has_ended in rows:
            if environment is None or not self._is_mine(environment, group, env_id):
                continue
            if environment in skip:
                if pk > self._watched.ahead.get(environment, 0):
                    late.add(environment)
            elif is_alive:
                touched.add(environment)
                if has_ended:
                    ended[environment] = Candidate(environment, group_of(group))

    def _is_mine(self, environment: int, group: bytes | None, env_id: bytes) -> bool:
        return self._share.is_whole or self._share.owns(environment, group, env_id)

    def _finished_among(self, ids: list[int]) -> list[Candidate]:
        found: list[Candidate] = []
        for at in range(0, len(ids), SLICE):
            wanted = array(ids[at : at + SLICE])
            (rows,) = self._ask("finished_among", ids=wanted, job=self.job)
            found += [Candidate(environment, group_of(group)) for environment, group in rows]
        return found

    def _find_holders(self, facts: Facts) -> None:
        """Find out who has kept a transaction open for so long that gaps wait for it."""
        gaps, at = self._unseen.gaps, facts.snapshot.at
        if not gaps or at - min(gap.born for gap in gaps) < _HELD_SECONDS:
            self._held = ()
            return
        if self._clock() < self._ask_holders_at:
            return
        self._ask_holders_at = self._clock() + _ASK_HOLDERS_SECONDS
        (found,) = self._ask("holders", xmin=facts.snapshot.xmin)
        who = ["somebody on the primary"] if facts.is_standby else [who_holds(row) for row in found]
        pids = [pid for pid, *_ in found if pid is not None]
        remedy = f"if it was forgotten: SELECT pg_terminate_backend({pids[0]})" if pids else ""
        self._held = (Advice("open-transaction", ", ".join(who), remedy),) if who else ()

    # ---- reconciles ----------------------------------------------------------------------------

    def reconcile(self, skip: BitMap64) -> Iterator[Look]:
        """Look at every environment that is not in `skip`, in slices of up to 20,000 ids."""
        self._share.doubt()
        facts, _ = self._ask_with_facts()
        end, first = facts.environments + 1, 1
        while first < end:
            stop = min(first + self._slice, end)
            others = self._share.with_others(skip)
            if others.contains_range(first, stop):
                first = stop
                continue
            began = time.monotonic()
            look, first = self._reconcile_slice(first, stop, others)
            self._adapt(time.monotonic() - began)
            yield replace(look, reached=first - 1, highest=end - 1)
        facts, _ = self._ask_with_facts()
        end = facts.environments + 1
        gone = self._watched.reconciled(end, max(end, self._watched.highest + 1), Found(), skip)
        if gone:
            yield Look(gone=gone)

    def _adapt(self, seconds: float) -> None:
        """Let the next slice be one that does not hold up the loop."""
        if seconds > _SLOW_SECONDS:
            self._slice = max(_FEWEST, self._slice // 2)
        elif seconds < _SLOW_SECONDS / 4:
            self._slice = min(SLICE, self._slice * 2)

    def _reconcile_slice(self, first: int, end: int, skip: BitMap64) -> tuple[Look, int]:
        """Return what is in a slice, and where the next one begins."""
        left = end - first - skip.range_cardinality(first, end)
        if left * 4 < end - first:
            ids = array(list(BitMap64(range(first, end)) - skip))
            (rows,) = self._ask("among", ids=ids, job=self.job)
            following = end
        else:
            rows, ((after,),) = self._ask(
                "in_range", "next_environment", first=first, end=end, job=self.job
            )
            # Ids may go on far above: other jobs, or what was deleted.
            following = end if rows or after is None else max(end, after)
        own = [
            (one, group, is_finished, has_rows)
            for one, group, env_id, is_finished, has_rows in rows
            if one not in skip and self._is_mine(one, group, env_id)
        ]
        ended: BitMap64 | None = None
        if self.ready_when is not ReadyWhen.FINISHED:
            ended = BitMap64()
            if with_rows := [row[0] for row in own if row[3]]:
                (found_ended,) = self._ask("ended_among", ids=array(with_rows), job=self.job)
                ended.update(one for (one,) in found_ended)
        found = Found.among(own, ended)
        assert self._reader is not None
        if tried := self._watched.tried & found.candidates:
            found.cannot_use(tried - self._reader.usable(list(tried)))
        gone = self._watched.reconciled(first, following, found, skip)
        return found.look(gone=gone), following

    def groups(self, ids: BitMap64) -> Iterator[tuple[Candidate, ...]]:
        """Return the group of each of `ids` that has one and is still there, slice by slice."""
        first = ids.min() if ids else 0
        while first:
            end = first + SLICE
            (rows,) = self._ask("groups", first=first, end=end)
            yield tuple(Candidate(one, group_of(group)) for one, group in rows if one in ids)
            first = next(ids.iter_equal_or_larger(end), 0)

    def members(self, groups: Collection[str]) -> Iterator[tuple[Candidate, ...]]:
        """Return all members of these groups that are registered and not deleted, in slices."""
        wanted = sorted(groups)
        first: int | None = 1
        while first is not None:
            rows, ((following,),) = self._ask(
                "members",
                "next_environment",
                first=first,
                end=first + SLICE,
                job=self.job,
                groups=wanted,
            )
            yield tuple(Candidate(one, group_of(group)) for one, group in rows)
            first = following

    # ---- rows ----------------------------------------------------------------------------------

    def read(self, ids: Sequence[int]) -> Rows:
        """Return the rows that become samples, in the order of `ids`."""
        if self._reader is None:
            raise SourceUnavailable(f"{self.url} is not open", hint="open it first")
        for environment, rows in self._reader.read(ids, self._watched.was_unusable):
            if rows and rows[-1].pk in self._unseen:
                self._watched.ahead[environment] = rows[-1].pk
            yield environment, rows

    # ---- identity ------------------------------------------------------------------------------

    def verify(self, remembered: Mapping[int, str], highest: int) -> BitMap64:
        """Make sure that this is the database that was delivered from; return whose row is gone."""
        facts, (rows,) = self._ask_with_facts("env_ids", ids=array(sorted(remembered)))
        if not facts.environments:
            raise SourceUnavailable(
                f"{self.url} has no environments yet", hint="spoold waits for them"
            )
        given = facts.given[0]
        if facts.is_standby and given is not None and given < highest:
            raise SourceUnavailable(
                f"the standby {self.url} has not replayed environment {highest} yet, which was "
                "delivered from here",
                hint="spoold waits until it has",
            )
        gone = verified(
            self.url, remembered=remembered, found=env_ids_of(rows), highest=highest, given=given
        )
        self._verified = facts.stamp
        return gone

    def env_ids(self, ids: Collection[int]) -> Mapping[int, str]:
        """Return the env_id of each of `ids` that is still there."""
        facts, (rows,) = self._ask_with_facts("env_ids", ids=array(sorted(ids)))
        if self._facts is not None and facts.is_below(self._facts):
            raise self._made_anew()
        return env_ids_of(rows)

    def is_verified(self) -> bool:
        """Whether nothing was committed since the last `verify`. One round trip."""
        return self._verified is not None and self._read_stamp() == self._verified


def _above(ranges: Sequence[tuple[int, int]], done: int) -> list[tuple[int, int]]:
    return [(max(low, done + 1), high) for low, high in ranges if high > done]
