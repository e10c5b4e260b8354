"""A writer that does anything a writer does, people who move files, a daemon that is killed.

`Machine` drives the real source, spool, daemon and consumer in this process, under a clock of its
own, and reads what came of it from the run directory. What must come of it says `Judge`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from spoold import BatchLost, Consumer
from spoold.consumer import Batch
from spoold.sources import sqlite, sqlite_open, sqlite_rows
from tests.support.batches import tree
from tests.support.daemons import Clock, mv, start
from tests.support.judge import MISSING_ROW_SECONDS, Judge, is_note
from tests.support.oddities import ODD_MESSAGES, ODD_RESPONSES, ODD_REWARDS, RESPONSES
from tests.support.rollouts import JOB, MESSAGES, make_rollouts, open_rollouts

PICK = st.integers(0, 10**6)
PICKS = st.lists(PICK, min_size=1, max_size=6)
SELDOM = st.sampled_from([False] * 7 + [True])
MAX_SAMPLE_BYTES = 20_000
# Too long alone; too long only with the rest of a group.
LONG = ["x" * 2 * MAX_SAMPLE_BYTES, "x" * (MAX_SAMPLE_BYTES * 3 // 4)]
STEP_FACTS: list[dict[str, Any]] = [
    *({"response": response} for response in RESPONSES * 6),
    *({"messages": messages} for messages in ODD_MESSAGES),
    *({"response": response} for response in ODD_RESPONSES + LONG),
    *({"reward": reward} for reward in ODD_REWARDS),
    {"step_reward": "many"},
    {"model": b"\xff"},
    {"job": ""},
    {"job": "other"},
]
ODD = st.integers(0, len(STEP_FACTS) - 1)
SUMMARY = {"meta": {"event_type": "episode_summary"}, "job": "", "completed": True}
ENDS: dict[str, dict[str, Any]] = {
    "": {},
    "completed": {"terminal": True, "completed": True, "reward": 1.0},
    "unrewarded": {"terminal": True, "completed": True, "step_reward": 0.25},
    "truncated": {"truncated": True, "step_reward": 0.5},
    "sealed": {"terminal": True},
    "judge": {"model": "judge", "step": 1},
    "judged": {"model": "judge", "terminal": True, "completed": True, "reward": 0.75},
    "summary": SUMMARY,
    "closed": SUMMARY | {"meta": {"event_type": "gateway_session_close"}, "terminal": True},
    "failed": {"meta": {"event_type": "gateway_inference", "status_code": 500}, "terminal": True},
    "empty": {"messages": [], "response": "", "terminal": True},
}
# As a machine under load has it: every transaction is cut short, every slice is small.
HURRIED = [
    (sqlite, "SLICE", 3),
    (sqlite, "_FEW", 1),
    (sqlite, "_SLICE_SECONDS", -1.0),
    (sqlite, "MAX_TRANSACTION_SECONDS", -1.0),
    (sqlite_rows, "MAX_TRANSACTION_SECONDS", -1.0),
    (sqlite_rows, "_AT_ONCE", 2),
]


class Machine(RuleBasedStateMachine):
    """One run directory and all that happens to it."""

    group_sizes = (0,)

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="spoold-model-"))
        self.database = self.root / "rollout.db"
        self.buffer: list[tuple[int, dict[str, Any]]] = []
        self.started = False
        # What happens after each of the daemon's next transactions, the last one first.
        self.meanwhile: list[Callable[[], object]] = []
        self.trainer: Consumer | None = None
        self.held: list[Batch] = []
        self.patches = contextlib.ExitStack()
        self.patches.enter_context(mock.patch.object(sqlite_open, "_BUSY_SECONDS", 0.0))
        transaction = sqlite_open.Database.transaction

        @contextlib.contextmanager
        def interrupted(database: sqlite_open.Database) -> Iterator[sqlite3.Connection]:
            with transaction(database) as connection:
                yield connection
            if self.meanwhile:
                self.meanwhile.pop()()

        self.patches.enter_context(
            mock.patch.object(sqlite_open.Database, "transaction", interrupted)
        )

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        def draw(*choices: Any) -> Any:
            return data.draw(st.sampled_from(choices))

        self.journal = draw("wal", "wal", "delete")
        self.facts = {
            "ready_when": draw("finished", "finished", "terminal"),
            "null_reward": draw("fallback", "wait", "reject"),
            "samples": draw("terminal", "terminal", "steps"),
            "group_size": draw(*self.group_sizes),
            "partial_groups": draw("wait", "deliver", "reject"),
            "max_sample_bytes": MAX_SAMPLE_BYTES,
        }
        self.batch_facts = {
            "batch_size": draw(1, 3),
            "batch_bytes": draw(1500, 1 << 20),
            "max_pending_batches": draw(1, 4),
        }
        if draw(False, True):
            for module, name, value in HURRIED:
                self.patches.enter_context(mock.patch.object(module, name, value))
        self.writer = make_rollouts(
            self.database, draw("first", "second", "newest"), journal=self.journal
        )
        self.judge = Judge(**self.facts)
        self.clock = Clock()
        self.restart_anew()
        self.register(3, "a", job=JOB, lives=True)
        self.register(3, "", job=JOB, lives=True)

    def restart_anew(self) -> None:
        self.it = start(
            self.root,
            clock=self.clock,
            job=JOB,
            missing_row_seconds=MISSING_ROW_SECONDS,
            group_timeout_seconds=100,
            **self.facts,
            **self.batch_facts,
        )
        self.started = True
        step = self.it.daemon.step

        def judged_step() -> float:
            pause = step()
            self.judge.look(self.it)
            return pause

        self.it.daemon.step = judged_step  # type: ignore[method-assign]

    def go(self, seconds: float) -> None:
        self.it.go(seconds)
        self.judge.rest(self.it)

    # ---- the writer ----------------------------------------------------------------------------

    def one(self, pick: int) -> int | None:
        return next(iter(self.some([pick])), None)

    def some(self, picks: list[int]) -> list[int]:
        ids = list(self.judge.here)
        return sorted({ids[pick % len(ids)] for pick in picks}) if ids else []

    def committed(self) -> None:
        self.judge.hear(self.writer.db, self.clock.now)

    @rule(
        count=st.integers(1, 5),
        group=st.sampled_from(["a", "b", "c", "d", "", None]),
        job=st.sampled_from([JOB] * 5 + ["job-2"]),
        lives=st.booleans(),
    )
    def register(self, count: int, group: str | None, job: str, lives: bool) -> None:
        ids = self.writer.register(count, group=group, job=job)
        self.committed()
        if lives:
            self.live(ids[: max(1, count - 1)])

    @rule(
        picks=PICKS,
        ends=st.lists(st.sampled_from(sorted(ENDS)), min_size=1, max_size=3),
        odd=ODD,
        at_once=st.booleans(),
    )
    def run(self, picks: list[int], ends: list[str], odd: int, at_once: bool) -> None:
        """Rows into the writer's buffer, or past it."""
        for environment in self.some(picks):
            for end in ends:
                # No time, but never twice.
                facts = STEP_FACTS[odd] | ENDS[end] | {"created_at": str(uuid.uuid4())}
                self.buffer.append((environment, facts))
        if at_once:
            self.flush()

    @rule()
    def flush(self) -> None:
        with self.writer.together():
            for environment, facts in self.buffer:
                if environment in self.judge.here:
                    self.writer.step(environment, **{"messages": MESSAGES, **facts})
        self.buffer.clear()
        self.committed()

    @rule()
    def crash_of_the_writer(self) -> None:
        self.buffer.clear()

    @rule(picks=PICKS)
    def finish(self, picks: list[int]) -> None:
        self.writer.finish(*self.some(picks))
        self.committed()

    @rule(
        picks=PICKS,
        odd=ODD,
        end=st.sampled_from(["completed"] * 3 + ["unrewarded", "truncated", "sealed"]),
    )
    def complete_some(self, picks: list[int], odd: int, end: str) -> None:
        """The usual way: rows of a whole session at once, then finished."""
        self.live(self.some(picks), odd, end)

    def live(self, environments: Iterable[int], odd: int = 0, end: str = "completed") -> None:
        environments = list(environments)
        with self.writer.together():
            for environment in environments:
                self.writer.step(environment, created_at=str(uuid.uuid4()))
                if environment % 2:
                    self.writer.step(environment, **ENDS["judge"], created_at=str(uuid.uuid4()))
                for _ in range(1 if end == "completed" else 2):
                    facts = {"created_at": str(uuid.uuid4()), **STEP_FACTS[odd]}
                    self.writer.step(environment, **{**ENDS[end], **facts})
                if environment % 3 == 0:
                    self.writer.step(environment, created_at=str(uuid.uuid4()))
        self.committed()
        self.writer.finish(*environments)
        self.committed()

    @rule(
        how=st.sampled_from(["at once", "rows before", "a restart between", "during a look"]),
        after=st.integers(0, 6),
    )
    def something_completes_and_is_delivered_by_the_next_look(self, how: str, after: int) -> None:
        """No reconcile is needed for it, and no commit that comes later.

        `after` so many transactions of a look that is under way, where it has that many.
        """
        while self.comes_to_rest([0.0]):
            pass
        ids = self.writer_registers(2, "")
        self.go(0.0)
        if self.it.daemon.conditions.holds(["source-unavailable"]):
            return  # it is tried again, later
        if how in ("rows before", "a restart between"):
            with self.writer.together():
                for environment in ids:
                    self.writer.end(environment, created_at=str(uuid.uuid4()))
            self.committed()
            if how == "a restart between":
                self.kill_and_restart()
            self.go(0.0)
            self.writer.finish(*ids)
            self.committed()
        elif how == "during a look":
            self.meanwhile = [lambda: self.live(ids), *[lambda: None] * after]
            self.writer.step(ids[0], created_at=str(uuid.uuid4()))
            self.committed()
        else:
            self.live(ids)
        self.go(0.0)
        if self.meanwhile:
            self.meanwhile = []
            return
        delivered = {one for batch in self.judge.delivered(self.it).values() for one, _ in batch}
        assert set(ids) <= delivered or self.comes_to_rest([0.0]), "it was not seen"

    @rule(
        picks=PICKS,
        after=st.integers(0, 6),
        what=st.sampled_from(["completes", "deletes", "unfinishes", "reruns", "restores"]),
        seconds=st.sampled_from([0.0, 61.0]),
    )
    def while_the_daemon_looks(
        self, picks: list[int], after: int, what: str, seconds: float
    ) -> None:
        """The writer commits between two transactions of one look."""
        act: dict[str, Callable[[], object]] = {
            "completes": lambda: self.live(self.some(picks)),
            "deletes": lambda: (self.writer.delete(*fresh), self.committed()),
            "unfinishes": lambda: (self.writer.finish(*fresh, finished=0), self.committed()),
            "reruns": lambda: self.rerun(pick=len(self.judge.here) - 1, unfinished=False),
            "restores": lambda: self.restores(in_place=True, more=picks[0] % 30, lives=True),
        }
        fresh = self.writer_registers(2, "")
        self.live(fresh)
        self.meanwhile = [act[what], *[lambda: None] * after]
        self.go(seconds)
        self.meanwhile = []

    @rule(group=st.sampled_from(["a", "b", "c", "d"]), restarted=st.booleans())
    def a_straggler_completes(self, group: str, restarted: bool) -> None:
        """One more member of a group, when the others were seen."""
        self.go(0.0)
        if restarted:
            self.kill_and_restart()
        members = [one for one, (_, its) in self.judge.here.items() if its == group]
        self.live([one for one in members if one not in self.judge.now][:1])

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
            self.committed()

    @rule(completed=st.booleans(), seen=st.booleans())
    def flags_flip_in_place(self, completed: bool, seen: bool) -> None:
        (environment,) = self.writer_registers(1, "")
        self.writer.step(environment, created_at=str(uuid.uuid4()))
        self.writer.finish(environment)
        self.committed()
        if seen:
            self.go(61.0)
        self.evaluate(pick=list(self.judge.here).index(environment), completed=completed)

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
            self.committed()

    @rule(pick=PICK, really=SELDOM)
    def delete(self, pick: int, really: bool) -> None:
        if really and (environment := self.one(pick)) is not None:
            self.writer.delete(environment)
            self.committed()

    @rule(really=SELDOM, again=st.integers(0, 4))
    def job_is_written_anew(self, really: bool, again: int) -> None:
        if not really:
            return
        with self.writer.together():
            self.writer.db.execute("DELETE FROM session_steps")
            self.writer.db.execute("DELETE FROM job_environments")
        self.committed()
        if again:
            self.register(again, "a", job=JOB, lives=True)

    @rule(generation=st.sampled_from(["second", "newest"]))
    def migrate(self, generation: str) -> None:
        self.writer.rebuild_steps(generation)
        self.committed()

    @rule()
    def checkpoint(self) -> None:
        self.writer.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @rule()
    def writer_leaves_and_comes_back(self) -> None:
        generation = self.writer.generation
        self.writer.close()
        self.writer = open_rollouts(self.database, generation)

    @rule(really=SELDOM, seconds=st.sampled_from([0.0, 61.0, 400.0]))
    def writer_locks_everybody_out(self, really: bool, seconds: float) -> None:
        if not really:
            return
        with self.writer.together():
            self.writer.db.execute("COMMIT")
            self.writer.db.execute("BEGIN EXCLUSIVE")
            self.go(seconds)

    # ---- another database ----------------------------------------------------------------------

    @rule(really=SELDOM, more=st.integers(0, 30), lives=st.booleans())
    def replace(self, really: bool, more: int, lives: bool) -> None:
        """A new file: ids start over."""
        if not really:
            return
        generation = self.writer.generation
        self.remove_database()
        self.writer = make_rollouts(self.database, generation, journal=self.journal)
        self.move_on(more, lives)

    @rule()
    def back_up(self) -> None:
        copy = self.root / "older.db"
        copy.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(copy)) as target:
            self.writer.db.backup(target)
        self.older_generation = self.writer.generation

    @precondition(lambda self: (self.root / "older.db").exists())
    @rule(
        really=st.booleans(),
        in_place=st.booleans(),
        more=st.integers(0, 30),
        lives=st.booleans(),
    )
    def restore(self, really: bool, in_place: bool, more: int, lives: bool) -> None:
        """From the older copy, in place or as another file; then it moves on."""
        if really:
            self.restores(in_place=in_place, more=more, lives=lives)

    def restores(self, *, in_place: bool, more: int, lives: bool) -> None:
        copy = self.root / "older.db"
        if not copy.exists():
            return
        if in_place:
            with contextlib.closing(sqlite3.connect(copy)) as source:
                source.backup(self.writer.db)
            self.writer.generation = self.older_generation
        else:
            self.remove_database()
            shutil.copy(copy, self.database)
            self.writer = open_rollouts(self.database, self.older_generation)
            self.writer.db.execute(f"PRAGMA journal_mode = {self.journal}")
        self.move_on(more, lives)

    @rule(
        odd=ODD,
        group=st.sampled_from(["a", "b", "new", ""]),
        steps=st.integers(0, 5),
        down=st.booleans(),
        in_place=st.booleans(),
        more=st.sampled_from([0, 1, 3, 10, 30]),
        lives=st.booleans(),
    )
    def what_happened_is_undone(
        self,
        odd: int,
        group: str,
        steps: int,
        down: bool,
        in_place: bool,
        more: int,
        lives: bool,
    ) -> None:
        """Something completes, and the daemon is about it; then an older copy is restored."""
        self.go(0.0)
        self.back_up()
        self.live(self.writer_registers(3, group)[:2], odd)
        if steps:
            self.one_step(times=steps)
        else:
            self.go(61.0)
        if down:
            self.it.kill()
        self.restores(in_place=in_place, more=more, lives=lives)
        if down:
            self.judge.look(self.it)
            self.restart_anew()
        if more < 3:
            self.everything_complete_is_delivered_once()

    def writer_registers(self, count: int, group: str) -> list[int]:
        ids = self.writer.register(count, group=group)
        self.committed()
        return ids

    def move_on(self, more: int, lives: bool) -> None:
        self.judge.replacements += 1
        self.buffer.clear()
        self.committed()
        if not more:
            return
        with self.writer.together():
            ids = self.writer.register(more, group="")
            ids += self.writer.register(2, group="b")
        self.committed()
        if lives:
            self.live(ids)

    def remove_database(self) -> None:
        self.writer.close()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.database}{suffix}").unlink(missing_ok=True)

    # ---- people, trainers, and the daemon ------------------------------------------------------

    def batches(self, *folders: str) -> list[str]:
        return [name for name in tree(self.it.run, *folders) if name.endswith(".jsonl")]

    @rule(pick=PICK, folder=st.sampled_from(["pending", "inflight", "acked", "rejected/odd"]))
    def move_by_hand(self, pick: int, folder: str) -> None:
        if names := self.batches():
            mv(self.it.run, names[pick % len(names)], folder)

    @rule(pick=PICK)
    def remove_by_hand(self, pick: int) -> None:
        """With a ledger entry it is gone for good; without, its environments come anew."""
        if names := self.batches():
            Path(self.it.run.root, names[pick % len(names)]).unlink()
            self.it.settle()
            self.judge.rest(self.it)

    @rule(picks=PICKS)
    def remove_notes(self, picks: list[int]) -> None:
        notes = [name for name in tree(self.it.run, "rejected") if is_note(name)]
        for name in {notes[pick % len(notes)] for pick in picks} if notes else ():
            os.unlink(f"{self.it.run.root}/{name}")
            self.judge.seen.discard(name)

    @rule(what=st.sampled_from(["claim", "claim", "ack", "ack step", "release", "reject", "die"]))
    def train(self, what: str) -> None:
        if self.trainer is None:
            self.trainer = Consumer(self.it.run.root, name="t")
        if what == "die":
            self.trainer.close()
            self.trainer = None
            self.held.clear()
        elif what == "claim":
            if (batch := self.trainer.claim(timeout=0.0)) is not None:
                self.held.append(batch)
        elif self.held:
            act: dict[str, Callable[[Batch], object]] = {
                "ack": lambda batch: batch.ack(),
                "ack step": lambda batch: batch.ack(step=len(self.judge.seen)),
                "release": lambda batch: batch.release(),
                "reject": lambda batch: batch.reject("oom"),
            }
            with contextlib.suppress(BatchLost):
                act[what](self.held.pop(0))

    @rule(step=st.integers(-1, 20))
    def rewind(self, step: int) -> None:
        if self.trainer is not None:
            self.trainer.rewind(step=step)

    @rule(seconds=st.sampled_from([0.0, 0.1, 2.0, 61.0, 101.0, 301.0]))
    def time_passes(self, seconds: float) -> None:
        self.go(seconds)

    @rule(times=st.integers(1, 4))
    def one_step(self, times: int) -> None:
        for _ in range(times):
            self.it.daemon.hint(source=True, spool=True)
            self.it.daemon.step()

    @rule()
    def kill_and_restart(self) -> None:
        self.it.kill()
        self.judge.look(self.it)
        self.restart_anew()

    @rule()
    def stop_and_restart(self) -> None:
        self.it.daemon.stop()
        self.it.kill()
        self.judge.look(self.it)
        self.restart_anew()

    # ---- what must be --------------------------------------------------------------------------

    @rule()
    def everything_complete_is_delivered_once(self) -> None:
        while self.comes_to_rest([0.1]) or self.comes_to_rest([61.0] * 3 + [301.0] * 3):
            pass
        self.judge.settle(self.it)

    def comes_to_rest(self, pauses: list[float]) -> bool:
        """Let time pass. Whether there may be more to come: there was no room for it."""
        if self.it.daemon.conditions.holds(["bad-rows"]):
            self.kill_and_restart()
        self.it.settle()
        for seconds in pauses:
            self.go(seconds)
        full = self.batches("pending")
        if len(full) < self.batch_facts["max_pending_batches"]:
            return False
        for name in full:
            mv(self.it.run, name, "acked")
        return True

    def teardown(self) -> None:
        try:
            if self.started:
                self.everything_complete_is_delivered_once()
        finally:
            self.patches.close()
            if self.started:
                self.it.kill()
                self.writer.close()
            if self.trainer is not None:
                self.trainer.close()
            shutil.rmtree(self.root, ignore_errors=True)


class GroupMachine(Machine):
    """The same with groups."""

    group_sizes = (2, 2, 3)


def run_machine(machine: type[Machine], *, seed: int, examples: int, steps: int) -> None:
    """Run a machine many times, the same for the same seed.

    A failure is told at once, with what was done, not after minutes of shrinking.
    """
    run_state_machine_as_test(
        hypothesis.seed(seed)(type(machine.__name__, (machine,), {})),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
