"""Which environments the acknowledged batches have delivered. Pure.

An entry is one JSON object, `{"environments": [1001, 1002], "env_id": "<env_id of the highest>"}`,
in a file named by its batch id. Entries whose batch file is gone may be merged into `merged-{n}`,
`{"roaring64": "<base64 of the portable bitmap>", "remembered": [[id, env_id], …]}`, which keeps the
highest environment of the last thousand entries, and of all of them the highest: a source that was
restored from an older copy and moved on has another one at its id.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import orjson
from pyroaring import BitMap64

__all__ = [
    "REMEMBERED",
    "Entry",
    "Ledger",
    "Merged",
    "merged_name",
    "parse_entry",
    "parse_merged",
    "parse_merged_name",
]

REMEMBERED: Final = 1000
_MERGED = re.compile(r"merged-([0-9]{1,9})")


class Entry(NamedTuple):
    """What one acknowledged batch delivered: ids in order, and the env_id of the highest."""

    environments: tuple[int, ...]
    env_id: str

    def dump(self) -> bytes:
        """Return the bytes of the entry's file."""
        return orjson.dumps({"environments": self.environments, "env_id": self.env_id})

    @property
    def highest(self) -> int:
        """The greatest environment id in the batch."""
        return max(self.environments)


@dataclass(frozen=True, slots=True)
class Merged:
    """What many acknowledged batches, whose files are gone, delivered together."""

    environments: BitMap64
    remembered: tuple[tuple[int, str], ...]

    def dump(self) -> bytes:
        """Return the bytes of the merged file."""
        bitmap = base64.b64encode(self.environments.serialize()).decode()
        return orjson.dumps({"roaring64": bitmap, "remembered": self.remembered})


def parse_entry(data: bytes) -> Entry:
    """Read an entry's bytes back. ValueError: torn, empty, or no entry."""
    entry = orjson.loads(data)
    if not isinstance(entry, dict):
        raise ValueError("not an object")
    environments, env_id = entry.get("environments"), entry.get("env_id")
    if not (
        isinstance(environments, list)
        and environments
        and isinstance(env_id, str)
        and set(map(type, environments)) == {int}
        and min(environments) > 0
    ):
        raise ValueError("not a ledger entry")
    return Entry(tuple(environments), env_id)


def parse_merged(data: bytes) -> Merged:
    """Read a merged file's bytes back. ValueError: torn, empty, or no merged file."""
    merged = orjson.loads(data)
    if not isinstance(merged, dict):
        raise ValueError("not an object")
    bitmap, remembered = merged.get("roaring64"), merged.get("remembered")
    if not (isinstance(bitmap, str) and isinstance(remembered, list)):
        raise ValueError("not a merged ledger")
    try:
        environments = BitMap64.deserialize(base64.b64decode(bitmap, validate=True))
        pairs = tuple((int(number), str(env_id)) for number, env_id in remembered)
    except (binascii.Error, TypeError, RuntimeError, OverflowError, IndexError) as error:
        raise ValueError(f"not a merged ledger: {error}") from error
    return Merged(environments, pairs)


def merged_name(number: int) -> str:
    """Return the file name of a merged file."""
    return f"merged-{number}"


def parse_merged_name(file_name: str) -> int | None:
    """Return the number in a merged file's name, None where it is none."""
    found = _MERGED.fullmatch(file_name)
    return int(found[1]) if found else None


@dataclass(slots=True)
class Ledger:
    """All entries and merged files together, as they are on disk.

    `highest` is the greatest id in `remembered`, 0 for none. `stale` after a withdrawal:
    `environments` may then hold too much, and is exact again after the entries were read anew.
    Nothing relies on it being small before that.
    """

    environments: BitMap64 = field(default_factory=BitMap64)
    batches: set[str] = field(default_factory=set)
    merged: set[int] = field(default_factory=set)
    remembered: dict[int, str] = field(default_factory=dict)
    highest: int = 0
    stale: bool = False

    def add(self, batch_id: str, entry: Entry) -> None:
        """Take in the entry of a batch; of several, in order of their batch ids."""
        self.batches.add(batch_id)
        self.environments.update(entry.environments)
        self.remember(entry.highest, entry.env_id)

    def add_merged(self, number: int, merged: Merged) -> None:
        """Take in a merged file."""
        self.merged.add(number)
        self.environments |= merged.environments
        for environment, env_id in merged.remembered:
            self.remember(environment, env_id)

    def remember(self, environment: int, env_id: str) -> None:
        """Keep an environment's env_id, by which a replaced source is noticed."""
        self.remembered.pop(environment, None)
        self.remembered[environment] = env_id
        self.highest = max(self.highest, environment)
        if len(self.remembered) > 2 * REMEMBERED:
            self.remembered = _latest(self.remembered)

    def withdraw(self, batch_ids: Iterable[str]) -> None:
        """Forget the entries of batches that are not in acked/ any more."""
        self.batches.difference_update(batch_ids)
        self.stale = True

    def merge(self, parts: Iterable[tuple[str, Entry]], merged: Iterable[Merged]) -> Merged:
        """Return one merged file that stands for `parts` (by batch id) and older merged files."""
        environments = BitMap64()
        remembered: dict[int, str] = {}
        for old in merged:
            environments |= old.environments
            remembered.update(old.remembered)
        for _, entry in parts:
            environments.update(entry.environments)
            remembered.pop(entry.highest, None)
            remembered[entry.highest] = entry.env_id
        return Merged(environments, tuple(_latest(remembered).items()))


def _latest(remembered: dict[int, str]) -> dict[int, str]:
    """Return the highest environment, and the thousand that were remembered last."""
    highest = max(remembered, default=0)
    return {
        environment: env_id
        for place, (environment, env_id) in enumerate(remembered.items(), REMEMBERED)
        if place >= len(remembered) or environment == highest
    }
