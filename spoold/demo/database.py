"""The rollout database of the demo: its tables, its environments, and what is complete in it."""

from __future__ import annotations

import json
import random
import sqlite3
import uuid
from contextlib import closing
from typing import Final

__all__ = ["GROUP_SIZE", "JOB", "completed", "connect", "create", "register"]

JOB: Final = "demo"
GROUP_SIZE: Final = 8

# The newest of the three generations of tables (`reward` may be NULL, `meta_json`), with the
# indexes that its writer makes.
_TABLES: Final = """
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
    UNIQUE (job_id, env_id)
);
CREATE TABLE session_steps (
    id INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL,
    record_id VARCHAR(64) NOT NULL UNIQUE,
    session_id VARCHAR(36) NOT NULL,
    step_id INT NOT NULL,
    env_name VARCHAR(100) NOT NULL,
    llm_model VARCHAR(150) NOT NULL,
    group_id VARCHAR(150),
    job_id VARCHAR(64),
    messages TEXT NOT NULL,
    request TEXT,
    response TEXT NOT NULL,
    step_reward REAL NOT NULL DEFAULT 0,
    reward REAL,
    meta_json TEXT,
    is_terminal INT NOT NULL DEFAULT 0,
    is_truncated INT NOT NULL DEFAULT 0,
    is_session_completed INT NOT NULL DEFAULT 0,
    is_trainable INT NOT NULL DEFAULT 0,
    created_at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
    UNIQUE (session_id, step_id, created_at)
);
CREATE INDEX idx_job_environments_job_deleted_id ON job_environments (job_id, is_deleted, id);
CREATE INDEX idx_session_steps_job_trainable_id ON session_steps (job_id, is_trainable, id);
"""

# The account's own idea of "completed", on purpose the obvious one: finished, and a terminal row
# with messages. It knows nothing of how spoold looks.
_COMPLETED: Final = """
SELECT e.id
FROM job_environments AS e
WHERE e.job_id = ? AND e.finished = 1 AND e.is_deleted = 0
  AND EXISTS (
    SELECT 1
    FROM session_steps AS s
    WHERE s.session_id = e.env_id AND s.messages <> '[]'
      AND (s.is_terminal = 1 OR s.is_truncated = 1 OR s.is_session_completed = 1)
  )
"""


def connect(path: str) -> sqlite3.Connection:
    """Open the database in autocommit mode; a transaction is what stands in BEGIN … COMMIT."""
    return sqlite3.connect(path, isolation_level=None, timeout=30.0)


def create(path: str, *, environments: int, seed: int) -> None:
    """Make a database in WAL mode with a job whose environments are all registered up front."""
    with closing(connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(_TABLES)
        register(db, environments=environments, seed=seed)


def register(db: sqlite3.Connection, *, environments: int, seed: int) -> None:
    """Insert the environments of the job in bulk, long before their first steps.

    GROUP_SIZE in a row try the same task and share a group id, which is the same in every job.
    """
    rng = random.Random(seed)
    rows = []
    for k in range(environments):
        task = k // GROUP_SIZE
        group_id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"arithmetic/{task}"))
        env_id = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        rows.append((JOB, env_id, "arithmetic", json.dumps({"task": task}), group_id))
    db.execute("BEGIN IMMEDIATE")
    db.executemany(
        "INSERT INTO job_environments (job_id, env_id, env_name, env_params, group_id)"
        " VALUES (?, ?, ?, ?, ?)",
        rows,
    )
    db.execute("COMMIT")


def completed(db: sqlite3.Connection) -> frozenset[int]:
    """Return the ids of the environments that are completed now, by a plain query."""
    return frozenset(number for (number,) in db.execute(_COMPLETED, (JOB,)))
