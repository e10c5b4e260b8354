"""What a database says of itself: how high its ids are, and which jobs it has."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from spoold.sources.jobs import JOBS_SHOWN
from spoold.sources.sqlite_schema import Schema

__all__ = ["Heights", "group_of", "heights_of", "jobs_of"]


@dataclass(frozen=True, slots=True)
class Heights:
    """The highest ids: ever given, by sqlite_sequence, and among the rows that are there."""

    environments_given: int
    steps_given: int
    environments: int
    steps: int

    def is_below(self, before: Heights) -> bool:
        """Whether ids went backwards. Rows that were deleted from the top don't count."""
        return (
            self.environments_given < before.environments_given
            or self.steps_given < before.steps_given
        )


def heights_of(connection: sqlite3.Connection, schema: Schema) -> Heights:
    """Read the highest ids. In a transaction."""
    query = schema.highest_and_given if schema.has_sequence else schema.highest
    environments, steps, environments_given, steps_given = connection.execute(query).fetchone()
    return Heights(
        environments_given=environments_given or 0,
        steps_given=steps_given or 0,
        environments=environments or 0,
        steps=steps or 0,
    )


def jobs_of(connection: sqlite3.Connection, schema: Schema) -> list[str]:
    """Return the first few jobs, each by one step through an index on job_id."""
    jobs: list[str] = []
    (job,) = connection.execute(schema.first_job).fetchone()
    while job is not None and len(jobs) <= JOBS_SHOWN:
        jobs.append(job.decode("utf-8", "replace"))
        (job,) = connection.execute(schema.next_job, (jobs[-1],)).fetchone()
    return jobs


def group_of(group: object) -> str:
    """Return a group id as it was read, "" where there is none."""
    return group.decode("utf-8", "replace") if isinstance(group, bytes) else ""
