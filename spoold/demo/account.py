"""Whether each completed environment arrived once: counted from the files, with json and hashlib.

The account trusts nothing that spoold remembers. It reads every batch file and every note of a run
directory, whoever put them there, and compares with a set of ids that somebody else asked the
database for. Meant for a run directory that has come to rest: files that move while it is read may
be counted twice or not at all. A batch has one line an environment here (`samples = terminal`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spoold.layout import BatchName, NoteName, State

__all__ = ["Account", "Held", "account", "batches"]

_COUNT_FOR_NOTHING: Final = ("rejected/duplicate", "rejected/corrupt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A batch file: where it lies (`acked/step-000000012`), its name, and what is in it.

    `environments` and `uids` are those of its lines, in order; empty where the bytes do not fit the
    name.
    """

    place: str
    name: BatchName
    environments: tuple[int, ...]
    uids: tuple[str, ...]
    is_whole: bool

    @property
    def state(self) -> State:
        """Which of the four directories it is in."""
        return State(self.place.partition("/")[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What came of the environments of a job, by their ids.

    `doubled` are in two places, be it two files or two lines; `lost` are completed, and neither
    delivered nor set aside; `unasked` are delivered, though the database does not call them
    completed. `damaged` are the names of files whose bytes do not fit their name, `mistrained` the
    uids of samples that were acked and not trained on once, or trained on and not acked.
    """

    completed: frozenset[int]
    delivered: frozenset[int]
    acked: frozenset[int]
    set_aside: frozenset[int]
    doubled: frozenset[int]
    batches: int
    damaged: tuple[str, ...] = ()
    mistrained: frozenset[str] = frozenset()

    @property
    def lost(self) -> frozenset[int]:
        """Completed, and nowhere to be found."""
        return self.completed - self.delivered - self.set_aside

    @property
    def unasked(self) -> frozenset[int]:
        """Delivered without being completed."""
        return self.delivered - self.completed

    @property
    def is_clean(self) -> bool:
        """Whether each completed environment is in one place, and nothing else is anywhere."""
        return not (self.lost or self.doubled or self.unasked or self.damaged or self.mistrained)


def account(run_dir: str, completed: Set[int], *, trained: Sequence[str] | None = None) -> Account:
    """Read all files of a run directory and set them against the completed environments.

    `trained` are the uids that a trainer says it was trained on, one an optimizer step.
    """
    held = batches(run_dir)
    times = Counter(number for batch in held for number in batch.environments)
    notes = frozenset(
        note.environment
        for path in Path(run_dir, State.REJECTED).iterdir()
        if (note := NoteName.parse(path.name)) is not None
    )
    return Account(
        completed=frozenset(completed),
        delivered=frozenset(times),
        acked=frozenset(n for b in held if b.state is State.ACKED for n in b.environments),
        set_aside=notes,
        doubled=frozenset(n for n, count in times.items() if count + (n in notes) > 1),
        batches=len(held),
        damaged=tuple(sorted(b.name.file_name for b in held if not b.is_whole)),
        mistrained=frozenset() if trained is None else _mistrained(held, trained),
    )


def _mistrained(held: list[Held], trained: Sequence[str]) -> frozenset[str]:
    times = Counter(trained)
    acked = {uid for batch in held if batch.state is State.ACKED for uid in batch.uids}
    return frozenset(uid for uid in acked | times.keys() if times[uid] != (uid in acked))


def batches(run_dir: str) -> list[Held]:
    """Read every batch file under the four directories, at any depth, by name."""
    held = []
    for state in State:
        for path in Path(run_dir, state).rglob("*.jsonl"):
            place = str(path.parent.relative_to(run_dir))
            name = BatchName.parse(path.name)
            if name is not None and place not in _COUNT_FOR_NOTHING:
                held.append(_read(path, place, name))
    return sorted(held, key=lambda batch: batch.name.file_name)


def _read(path: Path, place: str, name: BatchName) -> Held:
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()[:12]
    samples = [json.loads(line) for line in data.splitlines()] if digest == name.digest else []
    return Held(
        place=place,
        name=name,
        environments=tuple(sample["extra_info"]["environment"] for sample in samples),
        uids=tuple(sample["uid"] for sample in samples),
        is_whole=digest == name.digest and len(samples) == name.samples,
    )
