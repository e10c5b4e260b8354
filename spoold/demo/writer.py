"""A writer of rollouts: it fills a rollout database the way the worker processes of a job do.

    python -m spoold.demo.writer DATABASE --seconds 10 --seed 1

What a reader has to live with is all here: step rows wait in a buffer and become visible in bulk;
`finished` goes around the buffer, so that it is there before the rows for some and long after them
for most; environments complete in any order; sessions have rows that are no trajectory; some run
twice, some never end, and one loses its rows. Started again on the same database it goes on with
the environments that are not finished, from their first step.
"""

from __future__ import annotations

import argparse
import enum
import heapq
import json
import random
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from spoold.demo.database import JOB, connect

__all__ = [
    "Act",
    "Environment",
    "Fate",
    "Writer",
    "acts_of",
    "assign_fates",
    "fill",
    "main",
    "take_up",
]

FLUSH_ROWS: Final = 100
FLUSH_SECONDS: Final = 0.5

_INSERT: Final = """
INSERT INTO session_steps (
    record_id, session_id, step_id, env_name, llm_model, group_id, job_id, messages, response,
    step_reward, reward, meta_json, is_terminal, is_truncated, is_session_completed, created_at
) VALUES (?, ?, ?, 'arithmetic', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

_WORDS: Final = [
    *("we", "carry", "the", "one", "and", "add", "both", "columns", "again", "because", "a", "sum"),
    *("that", "looks", "right", "may", "still", "be", "off", "by", "ten", "so", "check", "digits"),
    *(
        "naïve",
        "数学",
        '"quoted"',
        r"\boxed{42}",
        "\n",
    ),  # what has to be escaped or takes more bytes
]


class Fate(enum.Enum):
    """What becomes of an environment."""

    EVALUATED = "rows first, then the evaluation's reward, then finished: the usual order"
    EARLY = "finished while the last rows still wait in the buffer"
    TRUNCATED = "cut off at the step limit"
    SUMMARISED = "a row that is no trajectory comes after the last step"
    RERUN = "aborted after two steps; its rows are deleted and it runs again"
    BROKEN = "its last row holds messages that are no JSON"
    ABORTED = "never ends"
    ROWLESS = "finished, but its rows never come"


# Of a hundred environments; all others are EVALUATED.
_RARE: Final = {
    Fate.EARLY: 12,
    Fate.TRUNCATED: 5,
    Fate.SUMMARISED: 5,
    Fate.RERUN: 4,
    Fate.ABORTED: 2,
}


class Act(enum.Enum):
    """One thing that the writer does to one environment."""

    STEP = enum.auto()
    LAST_STEP = enum.auto()
    LAST_STEP_WITH_REWARD = enum.auto()
    SUMMARY = enum.auto()
    DELETE_ROWS = enum.auto()
    EVALUATE = enum.auto()
    FINISH = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A row of job_environments. `env_id` is also the session_id of its steps."""

    id: int
    env_id: str
    group_id: str


def assign_fates(count: int, rng: random.Random) -> list[Fate]:
    """Deal a fate to each of `count` environments: one BROKEN, one ROWLESS, the rest by share."""
    fates = [fate for fate, percent in _RARE.items() for _ in range(count * percent // 100)]
    fates += [Fate.BROKEN, Fate.ROWLESS][:count]
    fates += [Fate.EVALUATED] * (count - len(fates))
    rng.shuffle(fates)
    return fates


def acts_of(fate: Fate, rng: random.Random) -> Iterator[tuple[float, Act]]:
    """Yield (seconds since the one before, act) of an environment, in order."""
    if fate is Fate.ROWLESS:
        yield 0.0, Act.FINISH
        return
    if fate is Fate.RERUN:
        yield from ((0.0, Act.STEP), (rng.uniform(0.1, 0.3), Act.STEP))
        yield rng.uniform(0.1, 0.7), Act.DELETE_ROWS
    for _ in range(rng.randint(1, 4)):
        yield rng.uniform(0.05, 0.4), Act.STEP
    if fate is Fate.ABORTED:
        return
    if fate is Fate.EARLY:
        yield rng.uniform(0.05, 0.4), Act.LAST_STEP_WITH_REWARD
        yield 0.001, Act.FINISH
        return
    yield rng.uniform(0.05, 0.4), Act.LAST_STEP
    if fate is Fate.SUMMARISED:
        yield 0.01, Act.SUMMARY
    yield rng.uniform(0.6, 1.2), Act.EVALUATE
    yield 0.005, Act.FINISH


class Writer:
    """The write buffer of a job, and what is known of its sessions."""

    def __init__(self, db: sqlite3.Connection, rng: random.Random) -> None:
        self._db = db
        self._rng = rng
        self._rows: list[tuple[object, ...]] = []
        self._flush_due = 0.0
        self._talks: dict[int, list[dict[str, str]]] = {}
        self.weight_version = 1

    def act(self, environment: Environment, act: Act, fate: Fate, now: float) -> None:
        """Do one act. `now` is any clock in seconds; it decides when the buffer is flushed."""
        match act:
            case Act.FINISH:
                # Goes around the buffer: the rows may still be in it.
                self._db.execute(
                    "UPDATE job_environments SET finished = 1 WHERE id = ?", (environment.id,)
                )
            case Act.EVALUATE:
                self.flush()
                self._db.execute(
                    "UPDATE session_steps SET reward = ?, step_reward = ?, is_session_completed = 1"
                    " WHERE session_id = ? AND is_terminal = 1 AND messages <> '[]'",
                    (reward := round(self._rng.random(), 3), reward, environment.env_id),
                )
            case Act.DELETE_ROWS:
                self.flush()
                self._forget(environment)
            case Act.SUMMARY:
                self._buffer(self._summary_row(environment), now)
            case Act.STEP | Act.LAST_STEP | Act.LAST_STEP_WITH_REWARD:
                self._buffer(self._step_row(environment, act, fate), now)
        self.flush_if_due(now)

    def flush_if_due(self, now: float) -> None:
        """Flush when the oldest row has waited long enough or there are many."""
        if self._rows and (len(self._rows) >= FLUSH_ROWS or now >= self._flush_due):
            self.flush()

    def flush(self) -> None:
        """Insert the rows of the buffer in one transaction; created_at is this moment."""
        if not self._rows:
            return
        created_at = datetime.now(UTC).isoformat(sep=" ", timespec="microseconds")
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(_INSERT, [(*row, created_at) for row in self._rows])
        self._db.execute("COMMIT")
        self._rows.clear()

    def _buffer(self, row: tuple[object, ...], now: float) -> None:
        if not self._rows:
            self._flush_due = now + FLUSH_SECONDS
        self._rows.append(row)

    def _forget(self, environment: Environment) -> None:
        self._talks.pop(environment.id, None)
        self._db.execute("DELETE FROM session_steps WHERE session_id = ?", (environment.env_id,))

    def _step_row(self, environment: Environment, act: Act, fate: Fate) -> tuple[object, ...]:
        talk = self._talks.setdefault(
            environment.id,
            [
                {"role": "system", "content": "You are a careful agent."},
                {"role": "user", "content": self._text(60)},
            ],
        )
        # Every row repeats the whole history: the messages so far, and the model's answer raw.
        messages = json.dumps(talk, ensure_ascii=False)
        answer = {"role": "assistant", "content": self._text(150)}
        response = {"object": "chat.completion", "choices": [{"index": 0, "message": answer}]}
        talk += [answer, {"role": "user", "content": self._text(40)}]
        if act is not Act.STEP and fate is Fate.BROKEN:
            messages = messages[:-20]
        reward = round(self._rng.random(), 3) if act is Act.LAST_STEP_WITH_REWARD else None
        return (
            *self._keys(environment, (len(talk) - 2) // 2, "policy"),
            messages,
            json.dumps(response, ensure_ascii=False),
            reward or 0.0,
            reward,
            self._meta("gateway_inference"),
            int(act is not Act.STEP),
            int(act is not Act.STEP and fate is Fate.TRUNCATED),
            int(act is Act.LAST_STEP_WITH_REWARD),
        )

    def _summary_row(self, environment: Environment) -> tuple[object, ...]:
        keys = self._keys(environment, 0, "")
        return (*keys, "[]", "", 0.0, 0.0, self._meta("evaluation_summary"), 1, 0, 1)

    def _keys(self, environment: Environment, step: int, model: str) -> tuple[object, ...]:
        return (str(uuid.uuid4()), environment.env_id, step, model, environment.group_id, JOB)

    def _meta(self, event_type: str) -> str:
        return json.dumps({"event_type": event_type, "weight_version": self.weight_version})

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choices(_WORDS, k=words))


def main(arguments: list[str] | None = None) -> None:
    """Fill the database over about `--seconds`, then end."""
    parser = argparse.ArgumentParser(prog="python -m spoold.demo.writer")
    parser.add_argument("database")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    rng = random.Random(options.seed)
    with closing(connect(options.database)) as db:
        fill(db, rng, seconds=options.seconds)


def fill(db: sqlite3.Connection, rng: random.Random, *, seconds: float) -> None:
    """Run all environments that are not finished, each from a random moment on."""
    environments = take_up(db)
    fates = assign_fates(len(environments), rng)
    writer = Writer(db, rng)
    # What comes next of each environment, the soonest first: (when, number, its further acts).
    acts = [acts_of(fate, rng) for fate in fates]
    due = [(rng.uniform(0.0, seconds), k) for k in range(len(environments))]
    next_act = {k: next(acts[k]) for k in range(len(environments))}
    heapq.heapify(due)
    start = time.monotonic()
    while due:
        when, k = heapq.heappop(due)
        _sleep_until(start + when, writer, start)
        _, act = next_act[k]
        writer.weight_version = 1 + int(when / 2.0)
        writer.act(environments[k], act, fates[k], when)
        following = next(acts[k], None)
        if following is not None:
            next_act[k] = following
            heapq.heappush(due, (when + following[0], k))
    writer.flush()


def take_up(db: sqlite3.Connection) -> list[Environment]:
    """Return the environments that are not finished, without rows of an earlier attempt."""
    found = [
        Environment(id=number, env_id=env_id, group_id=group_id)
        for number, env_id, group_id in db.execute(
            "SELECT id, env_id, group_id FROM job_environments"
            " WHERE job_id = ? AND finished = 0 ORDER BY id",
            (JOB,),
        )
    ]
    db.executemany(
        "DELETE FROM session_steps WHERE session_id = ?", [(each.env_id,) for each in found]
    )
    return found


def _sleep_until(moment: float, writer: Writer, start: float) -> None:
    while (left := moment - time.monotonic()) > 0:
        time.sleep(min(left, FLUSH_SECONDS / 4))
        writer.flush_if_due(time.monotonic() - start)


if __name__ == "__main__":
    main()
