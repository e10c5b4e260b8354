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
# As the writer's own gateway records a step.
_RECORDED_META = json.dumps(
    {
        "event_type": "gateway_inference",
        "request_id": "req-10-1",
        "session_id": env_id_of(1),
        "endpoint": "chat/completions",
        "requested_model": "m",
        "status_code": 200,
        "error_type": None,
        "is_stream": False,
        "prompt_tokens": 3210,
        "completion_tokens": 77,
        "finish_reason": "stop",
        "llm_step_index": 4,
        "max_steps": 30,
        "is_truncated": False,
        "is_session_completed": True,
        "synthetic_stop": False,
        "weight_version": 3,
    }
)
_THOUGHT = "<think>The triangle's sides are in the second table; sum them.</think>\n" * 6
_COMPLETION = {
    "id": "chatcmpl-x",
    "object": "chat.completion",
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": _THOUGHT + "\\boxed{42}"},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 3210, "completion_tokens": 77, "total_tokens": 3287},
    "metadata": {"weight_version": 3},
}
_ENVIRONMENT = (
    "INSERT INTO job_environments (job_id, env_id, env_name, env_params, group_id, finished)"
    " VALUES (?, ?, 'math', '{}', ?, ?)"
)
_STEP = (
    "INSERT INTO session_steps (record_id, session_id, step_id, env_name, llm_model, group_id,"
    " job_id, messages, request, response, step_reward, reward, meta_json, is_terminal,"
    " is_session_completed, is_trainable, created_at)"
    " VALUES (?, ?, ?, 'math', 'm', ?, ?, ?, ?, ?, 1.0, ?, ?, ?, ?, ?, ?)"
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
    as_recorded: bool = False,
) -> Path:
    """Make a database: the first ids are finished, the next running, the rest only registered.

    With several steps each, those before the last have the beginning of its messages.
    `as_recorded`: as the writer's newest gateway does, the request repeats the messages, the
    response is a whole completion, and much is said of both.
    """
    texts = [
        [messages(row_bytes * step // steps_each, seed, step * turns_a_step) for seed in range(7)]
        for step in range(1, steps_each + 1)
    ]
    requests = [
        [f'{{"model": "m", "messages": {text}}}' if as_recorded else None for text in step]
        for step in texts
    ]
    response, meta = (json.dumps(_COMPLETION), _RECORDED_META) if as_recorded else ("4", META)

    def environments() -> Iterator[tuple[object, ...]]:
        for one in range(1, registered + 1):
            yield JOB, env_id_of(one), f"group-{one // 8}", int(one <= finished)

    def steps() -> Iterator[tuple[object, ...]]:
        for one in range(1, finished + running + 1):
            for step, (text, request) in enumerate(zip(texts, requests, strict=True), start=1):
                done = int(one <= finished and step == steps_each)
                facts = (f"r{one}.{step}", env_id_of(one), step, f"group-{one // 8}", JOB)
                reward = 1.0 if done else None
                said = (text[one % 7], request[one % 7], response)
                yield (*facts, *said, reward, meta, done, done, done, CREATED_AT)

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
