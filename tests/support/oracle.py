"""What must come of a rollout database: read whole, by one obvious query, and filtered.

Deliberately naive, and made without any of spoold's code: it is compared with that.
"""

from __future__ import annotations

import json
import math
import sqlite3
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

EVERYTHING = """
SELECT e.*, s.*, s.id AS pk, s.job_id AS step_job, s.created_at AS made_at, e.env_name AS name,
    e.id AS environment, e.job_id AS job, e.group_id AS own_group
FROM job_environments AS e LEFT JOIN session_steps AS s ON s.session_id = e.env_id
WHERE e.job_id = ? AND e.is_deleted = 0 ORDER BY e.id, s.id
"""
SUMMARIES = ("gateway_session_close", "episode_summary", "evaluation_summary")
DEEPEST = 500


@dataclass
class Answer:
    """What one environment is: `samples`; or why it can never be any; or what it waits for.

    Of several reasons to set it aside any one will do. `missing`: finished without a usable row.
    """

    environment: int
    env_id: str
    group: str
    samples: list[dict[str, Any]] = field(default_factory=list)
    reasons: frozenset[str] = frozenset()
    waits: bool = False
    missing: bool = False
    size: int = 0


def answers(
    database: sqlite3.Connection,
    *,
    job: str,
    gate: str,
    null_reward: str = "fallback",
    samples: str = "terminal",
    max_sample_bytes: int = 1 << 28,
) -> dict[int, Answer]:
    """Every environment of a job that is complete, or finished without a usable row, by its id."""
    cursor = database.cursor()
    cursor.row_factory = sqlite3.Row
    before, database.text_factory = database.text_factory, bytes
    sessions: dict[int, list[sqlite3.Row]] = {}
    for row in cursor.execute(EVERYTHING, (job,)):
        sessions.setdefault(row["environment"], []).append(row)
    database.text_factory = before
    found = {}
    for environment, rows in sessions.items():
        head = rows[0]
        answer = Answer(environment, text(head["env_id"]), text(head["own_group"] or b""))
        chosen = usable(rows, job.encode(), all_steps=samples == "steps")
        if not chosen:
            answer.missing = head["finished"] == 1
        elif head["finished"] == 1 or gate == "terminal":
            fill(answer, chosen, null_reward, max_sample_bytes)
        else:
            continue
        if chosen or answer.missing:
            found[environment] = answer
    return found


def usable(rows: list[sqlite3.Row], job: bytes, *, all_steps: bool) -> list[sqlite3.Row]:
    """The rows that become samples, the chosen one last."""
    turns = [row for row in rows if row["pk"] and row["step_job"] in (job, b"", None)]
    turns = [row for row in turns if is_turn(row)]
    completed = [row for row in turns if row["is_session_completed"]]
    ended = completed or [row for row in turns if row["is_terminal"] or row["is_truncated"]]
    if not ended:
        return []
    chosen = ended[-1]
    if not all_steps:
        return [chosen]
    start = max([row["pk"] for row in completed if row["pk"] < chosen["pk"]], default=0)
    steps = [row for row in turns if start < row["pk"] <= chosen["pk"]]
    return [row for row in steps if row["llm_model"] == chosen["llm_model"]]


def is_turn(row: sqlite3.Row) -> bool:
    meta = meta_of(row)
    event = meta.get("event_type")
    if event in SUMMARIES or meta.get("synthetic_stop"):
        return False
    if event == "gateway_inference" and meta.get("status_code", 0) >= 400:
        return False
    return not (b"".join(row["messages"].split()) == b"[]" and not row["response"])


def meta_of(row: sqlite3.Row) -> dict[str, Any]:
    meta = row["meta_json"] if "meta_json" in row.keys() else row["env_state"]  # noqa: SIM118
    try:
        found = json.loads((meta or b"{}").decode("utf-8", "replace"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def fill(answer: Answer, rows: list[sqlite3.Row], null_reward: str, max_bytes: int) -> None:
    chosen = rows[-1]
    if chosen["reward"] is None and null_reward != "fallback":
        answer.waits = null_reward == "wait"
        answer.reasons = frozenset() if answer.waits else frozenset({"null-reward"})
        return
    reasons: set[str] = set()
    reward = chosen["step_reward"] if chosen["reward"] is None else chosen["reward"]
    answer.size = sum(len(row["messages"]) + len(row["response"]) for row in rows)
    if answer.size > max_bytes:
        reasons.add("too-big")
    for row in rows:
        reasons |= wrong_with(row, reward)
    answer.reasons = frozenset(reasons)
    if not reasons:
        answer.samples = [as_sample(row, chosen, reward) for row in rows]


def wrong_with(row: sqlite3.Row, reward: Any) -> set[str]:
    reasons = set()
    for number in (reward, row["step_reward"]):
        if not isinstance(number, float) or not math.isfinite(number):
            reasons.add("bad-reward")
    for column in ("env_id", "session_id", "job", "name", "own_group", "llm_model", "response"):
        if not is_text(row[column]):
            reasons.add("bad-json")
    try:
        messages = strict(row["messages"])
    except ValueError:
        reasons.add("bad-json")
    else:
        if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
            reasons.add("bad-messages")
        if depth(messages) > DEEPEST:
            reasons.add("bad-json")
    try:
        if depth(strict(json.dumps(turn_of(row["response"])).encode())) > DEEPEST:
            reasons.add("bad-json")
    except ValueError:
        reasons.add("bad-json")
    return reasons


def is_text(value: bytes | None) -> bool:
    try:
        (value or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def strict(data: bytes) -> Any:
    """JSON that every reader takes: no NaN, no lone surrogate."""

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    found = json.loads(data.decode(), parse_constant=refuse)
    json.dumps(found, ensure_ascii=False).encode()
    return found


def depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        deepest += 1
        level = [c for one in level for c in (one.values() if isinstance(one, dict) else one)]
    return deepest


def turn_of(response: bytes) -> list[Any]:
    if not response:
        return []
    said = response.decode("utf-8", "replace")
    plain = [{"role": "assistant", "content": said}]
    try:
        found = json.loads(said)
    except ValueError:
        return plain
    if not isinstance(found, dict):
        return plain
    try:
        message = found["choices"][0]["message"]
    except (KeyError, IndexError, TypeError):
        message = None
    if isinstance(message, dict):
        return [message]
    return [found] if isinstance(found.get("role"), str) else plain


def as_sample(row: sqlite3.Row, chosen: sqlite3.Row, reward: float) -> dict[str, Any]:
    version = str(meta_of(row).get("weight_version"))
    env_id, group = text(row["env_id"]), text(row["own_group"] or b"")
    return {
        "uid": f"{env_id}:{row['pk']}",
        "instance_id": group or env_id,
        "messages": json.loads(row["messages"]) + turn_of(row["response"]),
        "reward": reward,
        "extra_info": {
            "environment": row["environment"],
            "env_id": env_id,
            "session_id": text(row["session_id"]),
            "group_id": group,
            "job_id": text(row["job"]),
            "env_name": text(row["name"]),
            "llm_model": text(row["llm_model"]),
            "step_pk": row["pk"],
            "steps": row["step_id"],
            "step_reward": row["step_reward"],
            "reward_source": "step_reward" if chosen["reward"] is None else "reward",
            "weight_version": int(version) if version.isdigit() else 0,
            "truncated": bool(row["is_truncated"]),
            "finish_reason": "length" if row["is_truncated"] else "stop",
            "is_session_completed": bool(row["is_session_completed"]),
            "timestamp": when(text(row["made_at"])),
        },
    }


def when(created_at: str) -> float:
    try:
        at = datetime.fromisoformat(created_at)
    except ValueError:
        return 0.0
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
