"""Rollout databases of any size, written fast."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from tests.support.batches import env_id_of
from tests.support.rollouts import CREATED_AT, JOB, ddl

META = '{"weight_version": 3}'
_ENVIRONMENT = (
    "INSERT INTO job_environments (job_id, env_id, env_name, env_params, group_id, finished)"
    " VALUES (?, ?, 'math', '{}', ?, ?)"
)
_STEP = (
    "INSERT INTO session_steps (record_id, session_id, step_id, env_name, llm_model, group_id,"
    " job_id, messages, response, step_reward, reward, meta_json, is_terminal,"
    " is_session_completed, created_at)"
    " VALUES (?, ?, ?, 'math', 'm', ?, ?, ?, ?, 1.0, ?, ?, ?, ?, ?)"
)


def messages(row_bytes: int, seed: int, turns: int = 1) -> str:
    """Return messages as JSON of about so many bytes in all: words, line ends, quotes."""
    chance = random.Random(seed)
    line = '{:x} said "{:x}"\n'.format
    text = "".join(line(chance.getrandbits(240), chance.getrandbits(40)) for _ in range(200))
    text = text * (row_bytes // len(text) + 1)
    each = max(1, (row_bytes - 900) // turns)
    roles = ("user", "assistant")
    return json.dumps(
        [
            {"role": roles[turn % 2], "content": text[turn * each : (turn + 1) * each]}
            for turn in range(turns)
        ]
    )


def build(
    path: Path,
    *,
    registered: int,
    finished: int = 0,
    running: int = 0,
    row_bytes: int = 2000,
    steps_each: int = 1,
    turns_a_step: int = 1,
) -> Path:
    """Make a database: the first ids are finished, the next running, the rest only registered.

    With several steps each, those before the last have the beginning of its messages.
    """
    texts = [
        [messages(row_bytes * step // steps_each, seed, step * turns_a_step) for seed in range(7)]
        for step in range(1, steps_each + 1)
    ]

    def environments() -> Iterator[tuple[object, ...]]:
        for one in range(1, registered + 1):
            yield JOB, env_id_of(one), f"group-{one // 8}", int(one <= finished)

    def steps() -> Iterator[tuple[object, ...]]:
        for one in range(1, finished + running + 1):
            for step, text in enumerate(texts, start=1):
                done = int(one <= finished and step == steps_each)
                facts = (f"r{one}.{step}", env_id_of(one), step, f"group-{one // 8}", JOB)
                reward = 1.0 if done else None
                yield (*facts, text[one % 7], "4", reward, META, done, done, CREATED_AT)

    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = wal")
    db.execute("PRAGMA synchronous = off")
    db.executescript(ddl("newest"))
    db.execute("BEGIN")
    db.executemany(_ENVIRONMENT, environments())
    db.executemany(_STEP, steps())
    db.execute("COMMIT")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    return path
