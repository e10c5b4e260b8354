"""What a database says of itself: how high its ids are, whose they are, and which jobs it has."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pyroaring import BitMap64

from spoold.errors import SourceUnavailable
from spoold.sources.identity import verified
from spoold.sources.jobs import JOBS_SHOWN, pick_job
from spoold.sources.sqlite_schema import Schema

__all__ = ["Heights", "be_the_same", "deleted_of", "env_ids_of", "heights_of", "job_of"]


@dataclass(frozen=True, slots=True)
class Heights:
    """The highest ids: ever given, by sqlite_sequence, and among the rows that are there.

    `top`: whose the highest environment and the highest step are; `there`: whose those are now that
    were the highest before. By them a database is told that went back and grew past its old height.
    """

    environments_given: int
    steps_given: int
    environments: int
    steps: int
    top: tuple[object, object]
    there: tuple[object, object]

    def went_back(self, before: Heights) -> bool:
        """Whether these are not the rows of before. Rows that are merely gone say nothing."""
        return (
            self.environments_given < before.environments_given
            or self.steps_given < before.steps_given
            or (self.there[0] is not None and self.there[0] != before.top[0])
            or (self.there[1] is not None and self.there[1] != before.top[1])
        )


def heights_of(
    connection: sqlite3.Connection, schema: Schema, before: Heights | None = None
) -> Heights:
    """Read the highest ids. In a transaction."""
    known = (before.environments, before.steps) if before is not None else (0, 0)
    query = schema.heights if schema.has_sequence else schema.heights_without_sequence
    row = connection.execute(query, {"environment": known[0], "step": known[1]}).fetchone()
    environments, steps, there = row[2] or 0, row[3] or 0, row[4:]
    top = there
    if (environments, steps) != known:
        values = {"environment": environments, "step": steps}
        top = connection.execute(schema.owners, values).fetchone()
    return Heights(row[0] or 0, row[1] or 0, environments, steps, top, there)


def be_the_same(path: str, heights: Heights, before: Heights | None) -> None:
    """Raise SourceUnavailable where the rows are not those of before."""
    if before is not None and heights.went_back(before):
        raise SourceUnavailable(f"{path} went back to an older state", hint="spoold opens it anew")


def deleted_of(
    path: str,
    connection: sqlite3.Connection,
    schema: Schema,
    heights: Heights,
    remembered: Mapping[int, str],
    highest: int,
) -> BitMap64:
    """Return whose row of `remembered` is gone; raises as `Source.verify`. In a transaction."""
    if not heights.environments:
        raise SourceUnavailable(f"{path} has no environments yet", hint="spoold waits for them")
    found = env_ids_of(connection, schema, remembered)
    given = heights.environments_given if schema.has_sequence else None
    return verified(path, remembered=remembered, found=found, highest=highest, given=given)


def env_ids_of(
    connection: sqlite3.Connection, schema: Schema, ids: Iterable[int]
) -> dict[int, str]:
    """Return the env_id of each of `ids` that is there. In a transaction."""
    rows = connection.execute(schema.env_ids, {"ids": str(sorted(ids))})
    return {one: env_id.decode("utf-8", "replace") for one, env_id in rows}


def job_of(
    connection: sqlite3.Connection,
    schema: Schema,
    path: str,
    *,
    wanted: str | None,
    known: str | None,
) -> str:
    """Return the job to read. Raises as `pick_job`."""
    if wanted is not None and connection.execute(schema.has_job, (wanted,)).fetchone():
        return wanted
    return pick_job(_jobs_of(connection, schema), wanted=wanted, known=known, where=path)


def _jobs_of(connection: sqlite3.Connection, schema: Schema) -> list[str]:
    """Return the first few jobs, each by one step through an index on job_id."""
    jobs: list[str] = []
    (job,) = connection.execute(schema.first_job).fetchone()
    while job is not None and len(jobs) <= JOBS_SHOWN:
        jobs.append(job.decode("utf-8", "replace"))
        (job,) = connection.execute(schema.next_job, (jobs[-1],)).fetchone()
    return jobs
