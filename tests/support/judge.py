"""What must lie in a run directory, given all that its database ever was. Asks no part of spoold.

`Judge.hear` is told of each commit of the writer, `Judge.look` looks at what each step of the
daemon published and noted, and `Judge.settle` says what must be there once all has come to rest.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.batches import tree
from tests.support.daemons import Running
from tests.support.oracle import Answer, answers
from tests.support.processes import ledger

JOB = "job-1"
MISSING_ROW_SECONDS = 300


@dataclass(frozen=True)
class Note:
    environment: int
    env_id: str
    reason: str


class Judge:
    """Knows what was right at any moment since the daemon last came to rest."""

    def __init__(
        self,
        *,
        group_size: int,
        partial_groups: str,
        max_sample_bytes: int,
        ready_when: str,
        null_reward: str,
        samples: str,
    ) -> None:
        self.group_size = group_size
        self.partial_groups = partial_groups
        self.max_sample_bytes = max_sample_bytes
        self.rules = {
            "gate": ready_when,
            "null_reward": null_reward,
            "samples": samples,
            "max_sample_bytes": max_sample_bytes,
        }
        self.now: dict[int, Answer] = {}
        self.here: dict[int, tuple[str, str]] = {}
        self.given = 0
        self.missing_since: dict[str, float] = {}
        self.right: dict[str, list[Answer]] = {}
        self.registered: list[set[str]] = []
        self.were_closed: set[str] = set()
        self.seen: set[str] = set()
        self.replacements = 0

    # ---- as it goes ----------------------------------------------------------------------------

    def hear(self, database: sqlite3.Connection, at: float) -> None:
        """Take in what the database is after a commit."""
        self.now = answers(database, job=JOB, **self.rules)
        missing = [answer.env_id for answer in self.now.values() if answer.missing]
        self.missing_since = {env_id: self.missing_since.get(env_id, at) for env_id in missing}
        rows = database.execute("SELECT id, env_id, coalesce(group_id, '') FROM job_environments")
        self.here = {one: (env_id, group) for one, env_id, group in rows}
        self.registered.append({env_id for env_id, _ in self.here.values()})
        query = "SELECT seq FROM sqlite_sequence WHERE name = 'job_environments'"
        (self.given,) = database.execute(query).fetchone() or (0,)
        for answer in self.now.values():
            right = self.right.setdefault(answer.env_id, [])
            if answer not in right:
                right.append(answer)

    def rest(self, it: Running) -> None:
        """Take in that the daemon has nothing in its hands: only what is right now counts."""
        self.were_closed = self.closed(it)
        self.right = {answer.env_id: [answer] for answer in self.now.values()}
        del self.registered[:-1]

    def look(self, it: Running) -> None:
        """What came to lie in pending/ and rejected/ was right when it was read."""
        for name in tree(it.run, "pending"):
            if batch_id(name) not in self.seen:
                self.seen.add(batch_id(name))
                self._was_right(samples_in(Path(it.run.root, name)))
        for name in tree(it.run, "rejected"):
            if name.endswith(".json") and name not in self.seen:
                self.seen.add(name)
                self._was_justified(it, note_in(Path(it.run.root, name)))

    def _was_right(self, samples: list[dict[str, Any]]) -> None:
        found: dict[str, list[dict[str, Any]]] = {}
        for sample in samples:
            found.setdefault(sample["extra_info"]["env_id"], []).append(sample)
        together = [here for here in self.registered if found.keys() <= here]
        assert together, "a batch of two databases"
        for env_id, lines in found.items():
            right = [answer.samples for answer in self.right.get(env_id, ())]
            assert lines in right, f"published {lines}\nright was {right}"

    def _was_justified(self, it: Running, note: Note) -> None:
        right = self.right.get(note.env_id, [])
        complete = [answer for answer in right if not answer.missing]
        if note.reason == "missing-row":
            since = self.missing_since.get(note.env_id, 0.0)
            fine = it.clock.now - since >= MISSING_ROW_SECONDS
            fine = fine and any(answer.missing for answer in right)
        elif note.reason == "late":
            closed = self.were_closed | self.closed(it)
            fine = any(answer.group in closed for answer in complete)
        elif note.reason == "partial-group":
            fine = self.partial_groups == "reject" and bool(complete)
        elif note.reason == "too-big" and self.group_size:
            groups = {answer.group for answer in complete}
            sizes = [
                a.size for answers in self.right.values() for a in answers if a.group in groups
            ]
            fine = sum(sizes) > self.max_sample_bytes - 1000 * self.group_size
        else:
            fine = any(note.reason in answer.reasons for answer in complete)
        assert fine, f"{note}, and right was {right}"

    # ---- what lies there -----------------------------------------------------------------------

    def delivered(self, it: Running) -> dict[str, list[tuple[int, str]]]:
        """Id and env_id of the environments of each batch, by its file."""
        return {
            name: list(
                dict.fromkeys(whose(sample) for sample in samples_in(Path(it.run.root, name)))
            )
            for name in tree(it.run)
            if name.endswith(".jsonl")
        }

    def removed_for_good(self, it: Running) -> set[int]:
        """Environments whose batch was acked, and then removed."""
        there = {batch_id(name) for name in tree(it.run)}
        entries = ledger(it.run.root).items()
        return {one for of, ids in entries if of not in there for one in ids}

    def closed(self, it: Running) -> set[str]:
        """Groups of which a member is delivered."""
        ids = {one for batch in self.delivered(it).values() for one, _ in batch}
        ids |= self.removed_for_good(it)
        return {self.here[one][1] for one in ids if one in self.here} - {""}

    # ---- at rest -------------------------------------------------------------------------------

    def settle(self, it: Running) -> None:
        """Everything complete is delivered, once; or it is noted; or its group waits."""
        batches = self.delivered(it)
        counts = Counter(member for batch in batches.values() for member in batch)
        assert set(counts.values()) <= {1}, f"delivered twice: {counts.most_common(3)}"
        notes = [note_in(Path(it.run.root, n)) for n in tree(it.run, "rejected") if is_note(n)]
        retired = Path(it.run.retired)
        assert len(list(retired.iterdir()) if retired.exists() else []) <= self.replacements
        if not self.here:
            return  # "not there yet": nothing can be said
        # Of this database, and nothing of one that was replaced.
        about = [*counts, *((note.environment, note.env_id) for note in notes)]
        assert [m for m in about if self.here.get(m[0], (m[1],))[0] != m[1]] == []
        assert max((one for one, _ in about), default=0) <= self.given
        done = {one for one, _ in counts} | self.removed_for_good(it)
        aside = {note.environment for note in notes if note.reason != "missing-row"}
        assert len(done | aside) == len(done) + len(aside), "delivered and set aside"
        rowless = {note.environment for note in notes if note.reason == "missing-row"}
        assert rowless.isdisjoint(done)
        left = {one: a for one, a in self.now.items() if one not in done | aside and not a.waits}
        assert {one for one, answer in left.items() if answer.missing} <= rowless
        complete = [answer for answer in left.values() if not answer.missing]
        assert [answer for answer in complete if not self._may_wait(answer, complete, it)] == []
        if self.group_size:
            self._no_group_is_split(batches, it)

    def _may_wait(self, answer: Answer, complete: list[Answer], it: Running) -> bool:
        if not (self.group_size and answer.group and self.partial_groups == "wait"):
            return False
        members = [other for other in complete if other.group == answer.group]
        return answer.group not in self.closed(it) and len(members) < self.group_size

    def _no_group_is_split(self, batches: dict[str, list[tuple[int, str]]], it: Running) -> None:
        groups: Counter[str] = Counter()
        for batch in batches.values():
            whose = Counter(self.here[one][1] for one, _ in batch if one in self.here)
            assert groups.keys().isdisjoint(whose.keys() - {""}), "a group in two batches"
            del whose[""]
            groups += whose
        assert groups.keys().isdisjoint(
            self.here[one][1] for one in self.removed_for_good(it) if one in self.here
        )
        sizes = set(groups.values())
        if self.partial_groups == "deliver":
            assert max(sizes, default=0) <= self.group_size
        else:
            assert sizes <= {self.group_size}


def samples_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def whose(sample: dict[str, Any]) -> tuple[int, str]:
    return sample["extra_info"]["environment"], sample["extra_info"]["env_id"]


def batch_id(name: str) -> str:
    return Path(name).name.removesuffix(".jsonl").split(".try")[0]


def is_note(name: str) -> bool:
    return name.endswith(".json")


def note_in(path: Path) -> Note:
    facts = json.loads(path.read_bytes())
    return Note(facts["environment"], facts["env_id"], facts["reason"])
