"""What a PostgreSQL database says of itself, and what of that a person should hear."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from spoold.model import Advice
from spoold.sources.postgres_open import Row
from spoold.sources.postgres_schema import Schema
from spoold.sources.unseen import Snapshot

__all__ = ["Facts", "env_ids_of", "missing_indexes", "who_holds"]

_MANY_ROWS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the database says of itself at the beginning of a transaction.

    `stamp`: equal to that of another look where the same is visible, None on a standby.
    `given`: the highest ids ever given, None where their sequences don't say.
    """

    snapshot: Snapshot
    stamp: str | None
    is_standby: bool
    oids: tuple[int, int]
    environments: int
    steps: int
    given: tuple[int | None, int | None]

    @classmethod
    def of(cls, row: Row) -> Facts:
        """Return what the query `facts` gave."""
        xmin, xmax, at, stamp, is_standby, *oids, environments, steps = row[:9]
        last = row[9:]
        highest = environments or 0, steps or 0
        # A sequence below the rows is not where their ids come from.
        given = [
            a if a is not None and a >= b else None for a, b in zip(last, highest, strict=True)
        ]
        return cls(
            snapshot=Snapshot(xmin, xmax, at),
            stamp=None if stamp is None else str(stamp, "ascii"),
            is_standby=is_standby,
            oids=(oids[0], oids[1]),
            environments=highest[0],
            steps=highest[1],
            given=(given[0], given[1]),
        )

    def is_below(self, before: Facts) -> bool:
        """Whether ids, or transaction ids, went backwards: a backup, or tables emptied for good."""
        pairs = zip(self.given, before.given, strict=True)
        return self.snapshot.xmax < before.snapshot.xmax or any(
            now is not None and then is not None and now < then for now, then in pairs
        )


def who_holds(row: Row) -> str:
    """Return who has a transaction open, as far as our role may know."""
    pid, name, user, age = row
    who = f"pid {pid}" if pid is not None else "a prepared transaction"
    called = f" ({name.decode('utf-8', 'replace')})" if name else ""
    by = f" of {user.decode('utf-8', 'replace')}" if user else ""
    return f"{who}{called}{by}" + (f", open for {age:.0f} s" if age is not None else "")


def missing_indexes(schema: Schema) -> Iterator[Advice]:
    """Say which index is missing, and what each use costs without it."""
    for of, column, cost in (
        (True, "session_id", "each environment that is looked up"),
        (True, "id", "each look"),
        (False, "env_id", "each new step row"),
        (False, "id", "each running environment, at each look"),
        (False, "job_id", "finding the job at each start"),
    ):
        rows, size_bytes = schema.sizes[of]
        if (of, column) not in schema.indexed and rows >= _MANY_ROWS:
            table = "session_steps" if of else "job_environments"
            detail = f"{cost} walks over {rows:,} rows of {table} ({size_bytes >> 20:,} MiB)"
            yield Advice(
                "missing-index", detail, f"CREATE INDEX CONCURRENTLY ON {table} ({column})"
            )


def env_ids_of(rows: Sequence[Row]) -> dict[int, str]:
    """Return env_id by environment id, as the query `env_ids` gives them."""
    return {one: env_id.decode("utf-8", "replace") for one, env_id in rows}
