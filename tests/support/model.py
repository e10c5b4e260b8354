"""A writer that does anything a writer does, people who move files, a daemon that is killed.

`Machine` drives the real source, spool and daemon in this process, under a clock of its own. What
must come of it is asked of the database itself, by one plain query.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.batches import tree
from tests.support.daemons import Clock, Running, mv, start
from tests.support.processes import ledger
from tests.support.rollouts import MESSAGES, make_rollouts, open_rollouts

# What an environment's sample is made of, as ROLLOUT_DB.md says it, over the whole database.
COMPLETE = """
SELECT e.id, e.env_id, e.group_id FROM job_environments AS e
WHERE e.job_id = 'job-1' AND e.is_deleted = 0 AND (e.finished = 1 OR :gate = 'terminal')
AND (SELECT :null_reward = 'fallback' OR s.reward IS NOT NULL FROM session_steps AS s
     WHERE s.session_id = e.env_id AND s.job_id IN ('job-1', '') AND s.llm_model <> 'summary'
     AND (s.is_session_completed OR s.is_terminal OR s.is_truncated)
     ORDER BY s.is_session_completed DESC, s.id DESC LIMIT 1)
"""
PICK = st.integers(0, 10**6)
PICKS = st.lists(PICK, min_size=1, max_size=6)
SELDOM = st.sampled_from([False] * 7 + [True])


class Machine(RuleBasedStateMachine):
    """One run directory and all that happens to it."""

    group_size = 0

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="spoold-model-"))
        self.database = self.root / "rollout.db"
        self.buffer: list[tuple[int, dict[str, Any]]] = []
        self.ever_complete: set[str] = set()
        self.it: Running | None = None

    @initialize(
        generation=st.sampled_from(["second", "newest"]),
        gate=st.sampled_from(["finished", "finished", "terminal"]),
        null_reward=st.sampled_from(["fallback", "fallback", "wait"]),
        batch_size=st.sampled_from([1, 3]),
        journal=st.sampled_from(["wal", "wal", "delete"]),
    )
    def begin(self, journal: str, generation: str, **settings: Any) -> None:
        settings["group_size"] = self.group_size
        self.journal = journal
        self.writer = make_rollouts(self.database, generation, journal=journal)
        self.facts = settings
        self.clock = Clock()
        self.restart_anew()
        self.register(3, "a", lives=True)
        self.register(3, "", lives=True)

    def restart_anew(self) -> None:
        facts = self.facts
        self.it = start(
            self.root,
            clock=self.clock,
            job="job-1",
            ready_when=facts["gate"],
            null_reward=facts["null_reward"],
            group_size=facts["group_size"],
            batch_size=facts["batch_size"],
            max_pending_batches=4,
            missing_row_seconds=300,
        )

    # ---- the writer ----------------------------------------------------------------------------

    def one(self, pick: int) -> int | None:
        return next(iter(self.some([pick])), None)

    def some(self, picks: list[int]) -> set[int]:
        ids = [row[0] for row in self.writer.db.execute("SELECT id FROM job_environments")]
        return {ids[pick % len(ids)] for pick in picks} if ids else set()

    @rule(
        count=st.integers(2, 6),
        group=st.sampled_from(["a", "b", "c", "", None]),
        lives=st.booleans(),
    )
    def register(self, count: int, group: str | None, lives: bool) -> None:
        ids = self.writer.register(count, group=group)
        if lives:
            self.live(ids[: count - 1])

    @rule(
        picks=PICKS,
        end=st.sampled_from(["", "completed", "completed", "truncated", "sealed", "summary"]),
        at_once=st.booleans(),
    )
    def run(self, picks: list[int], end: str, at_once: bool) -> None:
        """Rows into the writer's buffer, or past it."""
        facts: dict[str, Any] = {
            "model": "summary" if end == "summary" else "m",
            "job": "" if end == "summary" else "job-1",
            "meta": {"event_type": "episode_summary"} if end == "summary" else {},
            "terminal": end in ("completed", "sealed"),
            "truncated": end == "truncated",
            "completed": end in ("completed", "summary"),
            "reward": 1.0 if end == "completed" else None,
        }
        for environment in self.some(picks):
            # No time, but never twice.
            self.buffer.append((environment, facts | {"created_at": str(uuid.uuid4())}))
        if at_once:
            self.flush()

    @rule()
    def flush(self) -> None:
        known = {row[0] for row in self.writer.db.execute("SELECT id FROM job_environments")}
        with self.writer.together():
            for environment, facts in self.buffer:
                if environment in known:
                    self.writer.step(environment, messages=MESSAGES, **facts)
        self.buffer.clear()
        self.note_complete()

    @rule()
    def crash_of_the_writer(self) -> None:
        self.buffer.clear()

    @rule(picks=PICKS)
    def finish(self, picks: list[int]) -> None:
        self.writer.finish(*self.some(picks))
        self.note_complete()

    @rule(picks=PICKS)
    def complete_some(self, picks: list[int]) -> None:
        """The usual way: rows of a whole session at once, then finished."""
        self.live(self.some(picks))

    def live(self, environments: Iterable[int]) -> None:
        environments = list(environments)
        with self.writer.together():
            for environment in environments:
                self.writer.step(environment, created_at=str(uuid.uuid4()))
                self.writer.end(environment, created_at=str(uuid.uuid4()))
        self.writer.finish(*environments)
        self.note_complete()

    @rule(pick=PICK, completed=st.booleans())
    def evaluate(self, pick: int, completed: bool) -> None:
        """The reward commit: the last row that ended is completed in place."""
        if (environment := self.one(pick)) is not None:
            self.writer.db.execute(
                "UPDATE session_steps SET reward = 0.5, step_reward = 0.5, is_terminal = 1,"
                " is_session_completed = ? WHERE id = (SELECT max(id) FROM session_steps"
                " WHERE session_id = ? AND llm_model = 'm')",
                (int(completed), self.writer.env_id(environment)),
            )
            self.note_complete()

    @rule(pick=PICK, unfinished=st.booleans())
    def rerun(self, pick: int, unfinished: bool) -> None:
        """The old rows are deleted; new ones will come."""
        if (environment := self.one(pick)) is not None:
            with self.writer.together():
                self.writer.db.execute(
                    "DELETE FROM session_steps WHERE session_id = ?",
                    (self.writer.env_id(environment),),
                )
                if unfinished:
                    self.writer.finish(environment, finished=0)
            self.note_complete()

    @rule(pick=PICK, really=SELDOM)
    def delete(self, pick: int, really: bool) -> None:
        if really and (environment := self.one(pick)) is not None:
            self.writer.delete(environment)

    @rule(really=SELDOM)
    def job_deleted_to_be_written_anew(self, really: bool) -> None:
        if not really:
            return
        with self.writer.together():
            self.writer.db.execute("DELETE FROM session_steps")
            self.writer.db.execute("DELETE FROM job_environments")

    @rule()
    def migrate(self) -> None:
        self.writer.rebuild_steps("second" if self.writer.generation == "newest" else "newest")

    @rule()
    def checkpoint(self) -> None:
        self.writer.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @rule()
    def writer_leaves_and_comes_back(self) -> None:
        generation = self.writer.generation
        self.writer.close()
        self.writer = open_rollouts(self.database, generation)

    # ---- another database ----------------------------------------------------------------------

    @rule(really=SELDOM)
    def replace(self, really: bool) -> None:
        """A new file: ids start over."""
        if not really:
            return
        generation = self.writer.generation
        self.remove_database()
        self.writer = make_rollouts(self.database, generation, journal=self.journal)

    @rule()
    def back_up(self) -> None:
        copy = self.root / "older.db"
        copy.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(copy)) as target:
            self.writer.db.backup(target)
        self.older_generation = self.writer.generation

    @precondition(lambda self: (self.root / "older.db").exists())
    @rule(really=SELDOM, in_place=st.booleans(), more=st.integers(0, 30))
    def restore(self, really: bool, in_place: bool, more: int) -> None:
        """From the older copy, in place or as another file; then it moves on."""
        if not really:
            return
        copy = self.root / "older.db"
        if in_place:
            with contextlib.closing(sqlite3.connect(copy)) as source:
                source.backup(self.writer.db)
            self.writer.generation = self.older_generation
        else:
            self.remove_database()
            shutil.copy(copy, self.database)
            self.writer = open_rollouts(self.database, self.older_generation)
            self.writer.db.execute(f"PRAGMA journal_mode = {self.journal}")
        self.writer.register(more, group="")
        self.note_complete()

    def remove_database(self) -> None:
        self.buffer.clear()
        self.writer.close()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.database}{suffix}").unlink(missing_ok=True)

    # ---- people, and the daemon ----------------------------------------------------------------

    def batches(self, *folders: str) -> list[str]:
        assert self.it is not None
        return [name for name in tree(self.it.run, *folders) if name.endswith(".jsonl")]

    @rule(pick=PICK, folder=st.sampled_from(["pending", "inflight", "acked", "rejected/odd"]))
    def move_by_hand(self, pick: int, folder: str) -> None:
        assert self.it is not None
        if names := self.batches():
            mv(self.it.run, names[pick % len(names)], folder)

    @rule(pick=PICK)
    def remove_by_hand(self, pick: int) -> None:
        """With a ledger entry it is gone for good; without, its environments come anew."""
        assert self.it is not None
        if names := self.batches():
            Path(self.it.run.root, names[pick % len(names)]).unlink()
            self.it.settle()

    @rule(pick=PICK)
    def remove_a_note(self, pick: int) -> None:
        assert self.it is not None
        if notes := [n for n in tree(self.it.run, "rejected") if n.endswith(".json")]:
            os.unlink(f"{self.it.run.root}/{notes[pick % len(notes)]}")

    @rule(seconds=st.sampled_from([0.0, 0.1, 2.0, 61.0, 301.0]))
    def time_passes(self, seconds: float) -> None:
        assert self.it is not None
        self.it.go(seconds)

    @rule()
    def one_step(self) -> None:
        assert self.it is not None
        self.it.daemon.hint(source=True, spool=True)
        self.it.daemon.step()

    @rule()
    def kill_and_restart(self) -> None:
        assert self.it is not None
        self.it.kill()
        self.restart_anew()

    @rule()
    def stop_and_restart(self) -> None:
        assert self.it is not None
        self.it.daemon.stop()
        self.it.kill()
        self.restart_anew()

    # ---- what must be --------------------------------------------------------------------------

    def complete(self) -> dict[str, tuple[int, str]]:
        """Every environment that is complete now: env_id → id, group."""
        facts = {k: self.facts[k] for k in ("gate", "null_reward")}
        rows = self.writer.db.execute(COMPLETE, facts)
        return {env_id: (environment, group or "") for environment, env_id, group in rows}

    def note_complete(self) -> None:
        self.ever_complete |= self.complete().keys()

    @rule()
    def everything_complete_is_delivered_once(self) -> None:
        assert self.it is not None
        it = self.it
        for _ in range(200):
            it.settle()
            it.go(61.0)
            it.go(61.0)
            if not (full := self.batches("pending")) or len(full) < 4:
                break
            mv(it.run, full[0], "acked")
            it.go(0.1)
        found = [m for name in self.batches() for m in members(Path(it.run.root, name))]
        counts = Counter(env_id for _, env_id, _ in found)
        delivered = set(counts)
        assert set(counts.values()) <= {1}, "delivered twice"
        here = dict(self.writer.db.execute("SELECT id, env_id FROM job_environments"))
        if not here:
            return  # "not there yet": nothing can be said
        # Of this database, and nothing of one that was replaced.
        assert [m for m in found if here.get(m[0], m[1]) != m[1]] == []
        assert delivered <= self.ever_complete
        notes = {name for name in tree(it.run, "rejected") if name.endswith(".json")}
        set_aside = {int(n.split("-")[1].split(".")[0]) for n in notes if "missing-row" not in n}
        gone = self.removed_for_good()
        assert gone.isdisjoint(environment for environment, _, _ in found)
        wanted = {
            env_id: facts
            for env_id, facts in self.complete().items()
            if facts[0] not in set_aside and facts[0] not in gone
        }
        if self.facts["group_size"]:
            wanted = self.whole_groups(wanted, found)
        assert wanted.keys() - delivered == set(), it.daemon.plan.__dict__
        missing = {int(n.split("-")[1].split(".")[0]) for n in notes if "missing-row" in n}
        assert missing.isdisjoint(environment for environment, _, _ in found)

    def removed_for_good(self) -> set[int]:
        """Environments whose batch was acked, and then removed."""
        assert self.it is not None
        there = {os.path.basename(name).split(".jsonl")[0] for name in self.batches("acked")}
        entries = ledger(self.it.run.root).items()
        return {one for batch_id, ids in entries if batch_id not in there for one in ids}

    def whole_groups(
        self, wanted: dict[str, tuple[int, str]], found: list[tuple[int, str, str]]
    ) -> dict[str, tuple[int, str]]:
        """Leave out members of groups that cannot be whole. No group is ever split."""
        size = self.facts["group_size"]
        here = {row[0] for row in self.writer.db.execute("SELECT id FROM job_environments")}
        found = [member for member in found if member[0] in here]
        assert set(Counter(group for _, _, group in found if group).values()) <= {size}
        closed = {group for _, _, group in found} | self.groups_of(self.removed_for_good())
        have = Counter(group for env_id, (_, group) in wanted.items() if group not in closed)
        return {
            env_id: facts
            for env_id, facts in wanted.items()
            if not facts[1] or (facts[1] not in closed and have[facts[1]] >= size)
        }

    def groups_of(self, environments: set[int]) -> set[str]:
        query = "SELECT id, group_id FROM job_environments"
        return {group for one, group in self.writer.db.execute(query) if one in environments}

    def teardown(self) -> None:
        try:
            if self.it is not None:
                self.everything_complete_is_delivered_once()
        finally:
            if self.it is not None:
                self.it.kill()
                self.writer.close()
            shutil.rmtree(self.root, ignore_errors=True)


class GroupMachine(Machine):
    """The same with groups of two."""

    group_size = 2


def run_machine(machine: type[Machine], *, examples: int, steps: int) -> None:
    """Run a machine many times. A failure is told at once, not after minutes of shrinking."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def members(path: Path) -> list[tuple[int, str, str]]:
    """Id, env_id and group of each sample of a batch."""
    rows = [json.loads(line)["extra_info"] for line in path.read_bytes().splitlines()]
    return [(row["environment"], row["env_id"], row["group_id"]) for row in rows]
