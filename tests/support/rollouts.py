"""Rollout databases of all three generations, made by hand, one statement a fact.

    rollouts = make_rollouts(tmp_path / "rollouts.db", "newest")
    ids = rollouts.register(3, group="g1")
    rollouts.step(ids[0], messages=[{"role": "user", "content": "2+2?"}], response="4")
    rollouts.end(ids[0], reward=1.0)          # the terminal row
    rollouts.finish(ids[0])                   # job_environments.finished = 1
    rollouts.complete(ids[1], reward=0.5)     # both at once

Every call is committed when it returns, except inside `with rollouts.together():`.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GENERATIONS = ("first", "second", "newest")
JOB = "job-1"
CREATED_AT = "2026-11-29 19:42:46.043713+00:00"
MESSAGES = [{"role": "user", "content": "2+2?"}]

_ENVIRONMENTS = """
CREATE TABLE job_environments (
    id INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL,
    job_id VARCHAR(64) NOT NULL,
    env_id VARCHAR(36) NOT NULL UNIQUE,
    env_name VARCHAR(100) NOT NULL,
    env_params JSON NOT NULL,
    image VARCHAR(100),
    group_id VARCHAR(150),
    finished INT NOT NULL DEFAULT 0,
    is_deleted INT NOT NULL DEFAULT 0,
    created_at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
    UNIQUE (job_id, env_id));
"""
_STEPS = """
CREATE TABLE session_steps (
    id INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL,
    {record_id}
    session_id VARCHAR(36) NOT NULL,
    step_id INT NOT NULL,
    env_name VARCHAR(100) NOT NULL,
    llm_model VARCHAR(150) NOT NULL,
    group_id VARCHAR(150),
    job_id VARCHAR(64),
    messages TEXT NOT NULL,
    {request}
    response TEXT NOT NULL,
    step_reward REAL NOT NULL DEFAULT 0,
    reward {reward},
    {meta} TEXT,
    is_terminal INT NOT NULL DEFAULT 0,
    is_truncated INT NOT NULL DEFAULT 0,
    is_session_completed INT NOT NULL DEFAULT 0,
    is_trainable INT NOT NULL DEFAULT {trainable},
    created_at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
    UNIQUE (session_id, step_id, created_at));
"""
_INDEXES = """
CREATE INDEX idx_job_environments_job_deleted_id ON job_environments (job_id, is_deleted, id);
CREATE INDEX idx_session_steps_job_trainable_id ON session_steps (job_id, is_trainable, id);
"""
_BY_GENERATION = {
    "first": {
        "record_id": "",
        "request": "",
        "reward": "REAL NOT NULL DEFAULT 0",
        "meta": "env_state",
        "trainable": "1",
    },
    "second": {
        "record_id": "",
        "request": "request TEXT,",
        "reward": "REAL",
        "meta": "env_state",
        "trainable": "0",
    },
    "newest": {
        "record_id": "record_id VARCHAR(64) NOT NULL UNIQUE,",
        "request": "request TEXT,",
        "reward": "REAL",
        "meta": "meta_json",
        "trainable": "0",
    },
}
_UNSET: Any = object()


def ddl(generation: str = "newest", *, indexes: bool = True) -> str:
    """Both tables as a writer of that generation makes them."""
    steps = _STEPS.format(**_BY_GENERATION[generation])
    return _ENVIRONMENTS + steps + (_INDEXES if indexes else "")


def make_rollouts(
    path: Path | str,
    generation: str = "newest",
    *,
    job: str = JOB,
    indexes: bool = True,
    journal: str = "wal",
) -> Rollouts:
    """Make an empty database and connect to it as its writer."""
    rollouts = open_rollouts(path, generation, job=job)
    rollouts.db.execute(f"PRAGMA journal_mode = {journal}")
    rollouts.db.execute("PRAGMA synchronous = off")
    rollouts.db.executescript(ddl(generation, indexes=indexes))
    return rollouts


def open_rollouts(path: Path | str, generation: str = "newest", *, job: str = JOB) -> Rollouts:
    """Connect as the writer of a database that is there, or will be made by other means."""
    return Rollouts(sqlite3.connect(path, isolation_level=None, timeout=10), generation, job)


@dataclass(slots=True)
class Rollouts:
    """A writer's connection. `db` is there for what no method does."""

    db: sqlite3.Connection
    generation: str
    job: str

    @property
    def meta_column(self) -> str:
        """env_state or meta_json."""
        return _BY_GENERATION[self.generation]["meta"]

    def close(self) -> None:
        """Disconnect; the last one out removes -wal and -shm."""
        self.db.close()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Commit all that happens inside at once, as the writer's buffer does."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")

    def _text(self, value: Any) -> Any:
        return json.dumps(value) if isinstance(value, list | dict) else value

    def _flag(self, value: Any) -> Any:
        return value

    def register(
        self,
        count: int = 1,
        *,
        group: str | None = "g1",
        job: str | None = None,
        env_id: str | None = None,
        name: str = "math",
    ) -> list[int]:
        """Add environments; returns their ids."""
        ids = []
        for _ in range(count):
            cursor = self.db.execute(
                "INSERT INTO job_environments (job_id, env_id, env_name, env_params, group_id)"
                " VALUES (?, ?, ?, '{}', ?) RETURNING id",
                (job or self.job, env_id or str(uuid.uuid4()), name, group),
            )
            ids.append(int(cursor.fetchone()[0]))
        return ids

    def env_id(self, environment: int) -> str:
        """Return the env_id of an environment, which is its session_id."""
        query = "SELECT env_id FROM job_environments WHERE id = ?"
        return str(self.db.execute(query, (environment,)).fetchone()[0])

    def step(
        self,
        environment: int,
        *,
        step: int | None = None,
        messages: Any = _UNSET,
        response: Any = "4",
        reward: Any = None,
        step_reward: Any = 0.0,
        meta: Any = _UNSET,
        terminal: bool = False,
        truncated: bool = False,
        completed: bool = False,
        model: Any = "m",
        job: Any = _UNSET,
        session: str | None = None,
        created_at: str = CREATED_AT,
    ) -> int:
        """Add a step row; returns its id.

        Lists and objects are written as JSON, text as it is; bytes become text whatever they are.
        """
        query = "SELECT env_id, group_id, job_id FROM job_environments WHERE id = ?"
        env_id, group, own_job = self.db.execute(query, (environment,)).fetchone()
        session = session or env_id
        if step is None:
            query = "SELECT coalesce(max(step_id), 0) + 1 FROM session_steps WHERE session_id = ?"
            (step,) = self.db.execute(query, (session,)).fetchone()
        if self.generation == "first" and (reward is None or reward != reward):
            reward = 0.0  # NOT NULL; a NaN is NULL for SQLite
        values: dict[str, Any] = {
            "session_id": session,
            "step_id": step,
            "env_name": "math",
            "llm_model": model,
            "group_id": group,
            "job_id": own_job if job is _UNSET else job,
            "messages": self._text(MESSAGES if messages is _UNSET else messages),
            "response": self._text(response),
            "step_reward": step_reward,
            "reward": reward,
            self.meta_column: self._text({"weight_version": 3} if meta is _UNSET else meta),
            "is_terminal": self._flag(int(terminal)),
            "is_truncated": self._flag(int(truncated)),
            "is_session_completed": self._flag(int(completed)),
            "created_at": created_at,
        }
        if self.generation == "newest":
            values["record_id"] = str(uuid.uuid4())
        texts = [isinstance(value, bytes) for value in values.values()]
        marks = ", ".join("CAST(? AS TEXT)" if is_text else "?" for is_text in texts)
        cursor = self.db.execute(
            f"INSERT INTO session_steps ({', '.join(values)}) VALUES ({marks}) RETURNING id",
            tuple(values.values()),
        )
        return int(cursor.fetchone()[0])

    def end(self, environment: int, *, reward: float | None = 1.0, **facts: Any) -> int:
        """Add a terminal row that completes the session; facts as for `step`."""
        flags = {"terminal": True, "completed": True, "step_reward": reward or 0.0}
        return self.step(environment, reward=reward, **{**flags, **facts})

    def finish(self, *environments: int, finished: int = 1) -> None:
        """Set finished."""
        for environment in environments:
            query = "UPDATE job_environments SET finished = ? WHERE id = ?"
            self.db.execute(query, (self._flag(finished), environment))

    def complete(self, environment: int, *, reward: float | None = 1.0, **facts: Any) -> int:
        """Add the terminal row and set finished; returns the row's id."""
        pk = self.end(environment, reward=reward, **facts)
        self.finish(environment)
        return pk

    def delete(self, *environments: int) -> None:
        """Mark as deleted, as the writer does."""
        for environment in environments:
            query = "UPDATE job_environments SET is_deleted = 1 WHERE id = ?"
            self.db.execute(query, (environment,))

    def update_step(self, pk: int, **columns: Any) -> None:
        """Change a step row in place."""
        changes = ", ".join(f"{column} = ?" for column in columns)
        query = f"UPDATE session_steps SET {changes} WHERE id = ?"
        self.db.execute(query, (*columns.values(), pk))

    def restart_ids(self, table: str, *, after: int) -> None:
        """Let the next id of a table be the one after this one."""
        self.db.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = ?", (after, table))

    def rebuild_steps(self, generation: str) -> None:
        """Migrate session_steps to another generation in place, ids kept."""
        old = self.meta_column
        new = _BY_GENERATION[generation]["meta"]
        plain = (
            "id, session_id, step_id, env_name, llm_model, group_id, job_id, messages, response, "
            "step_reward, reward, is_terminal, is_truncated, is_session_completed, is_trainable, "
            "created_at"
        )
        record = (", record_id", ", 'r' || id") if generation == "newest" else ("", "")
        with self.together():
            self.db.execute("ALTER TABLE session_steps RENAME TO old_steps")
            self.db.execute(_STEPS.format(**_BY_GENERATION[generation]))
            self.db.execute(
                f"INSERT INTO session_steps ({plain}, {new}{record[0]}) "
                f"SELECT {plain}, {old}{record[1]} FROM old_steps"
            )
            self.db.execute("DROP TABLE old_steps")
        self.generation = generation
