"""What the gateway is compared to: a server that polls by id, and pops groups as it answers.

    python -m tests.benchmarks.hundred_rows DB JOB GROUP_SIZE LOG_FILE      prints its URL

Does what SAfactory's buffer server does for a get, of the same kind and in the same order: FastAPI
with a response model and a middleware, rows with all their columns through Tortoise by the writer's
index, a hundred a poll, each made a dictionary and then an item, incomplete groups in memory, whole
ones sorted, their sessions' last rewards on all items, counts of what waits in a log file and on
the console. But it never pauses between polls, and begins with the first row.

Its libraries matter. With Tortoise 0.25.1, which SAfactory pins, it has 0.95 of the speed that it
has with 1.1.9; with FastAPI before 0.130, which made JSON in Python, 0.78 of that again (0.128
beside 0.165; SAfactory pins none, so the newest counts).
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from datetime import datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from tortoise import Tortoise, fields
from tortoise.models import Model

from spoold.gateway.server import listen

ROWS = 100

log = logging.getLogger("buffer")


class SessionStep(Model):
    """A row, with the columns that the writer's newest tables have."""

    id = fields.IntField(primary_key=True)
    record_id = fields.CharField(max_length=64)
    session_id = fields.CharField(max_length=36)
    step_id = fields.IntField()
    env_name = fields.CharField(max_length=100)
    llm_model = fields.CharField(max_length=150)
    group_id = fields.CharField(max_length=150, null=True)
    job_id = fields.CharField(max_length=64, null=True)
    messages = fields.TextField()
    request = fields.TextField(null=True)
    response = fields.TextField()
    step_reward = fields.FloatField()
    reward = fields.FloatField(null=True)
    meta_json = fields.TextField(null=True)
    is_terminal = fields.BooleanField()
    is_truncated = fields.BooleanField()
    is_session_completed = fields.BooleanField()
    is_trainable = fields.BooleanField()
    created_at = fields.DatetimeField()

    class Meta:
        table = "session_steps"


class Answer(BaseModel):
    """What a get is answered with."""

    success: bool
    message: str = ""
    data: dict[str, Any] | None = None


class Buffer:
    """Rows from the last id on, grouped in memory."""

    def __init__(self, job: str, group_size: int) -> None:
        self._job = job
        self._group_size = group_size
        self._last = 0
        self._waiting: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._completed: dict[str, set[str]] = defaultdict(set)

    async def answer(self) -> Answer:
        """Poll once, and answer with the groups that are whole."""
        new = [_item(row) for row in await self._poll()]
        groups = self._whole(new)
        waiting = {
            key: {"items": len(items), "completed": len(self._completed[key])}
            for key, items in self._waiting.items()
        }
        log.info("new=%d, whole groups=%d, waiting=%s", len(new), len(groups), waiting)
        items = [item for group in groups.values() for item in group]
        versions = [int(item["extra_info"]["weight_version"]) for item in items]
        number = len(items)
        meta = {
            "total_samples": number,
            "avg_reward": sum(float(item["reward"]) for item in items) / max(number, 1),
            "finished_groups": sorted(groups),
            "avg_weight_version": sum(versions) / max(number, 1),
            "max_weight_version": max(versions, default=0),
        }
        if items:
            log.info("answers %d items", number)
        data = {"data": items, "meta_info": meta}
        return Answer(success=bool(items), message=f"{number} items", data=data)

    async def _poll(self) -> list[dict[str, Any]]:
        rows = SessionStep.filter(job_id=self._job, is_trainable=True, id__gt=self._last)
        found = [
            {
                "step_pk": row.id,
                "step_id": row.step_id,
                "env_name": row.env_name,
                "env_id": row.session_id,
                "env_state": row.meta_json,
                "prompt": row.messages,
                "request": row.request,
                "response": row.response,
                "reward": row.step_reward,
                "total_reward": row.reward,
                "session_id": row.session_id,
                "session_end_time": row.created_at.isoformat(),
                "group_id": row.group_id,
                "truncated": row.is_truncated,
                "is_session_completed": row.is_session_completed,
            }
            for row in await rows.order_by("id").limit(ROWS)
        ]
        if found:
            self._last = found[-1]["step_pk"]
        return found

    def _whole(self, new: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        for item in new:
            key, facts = item["instance_id"], item["extra_info"]
            self._waiting[key].append(item)
            if facts["is_session_completed"]:
                self._completed[key].add(facts["session_id"])
        keys = [key for key in self._waiting if len(self._completed[key]) >= self._group_size]
        groups = {}
        for key in keys:
            groups[key] = _with_last_rewards(sorted(self._waiting.pop(key), key=_place))
            del self._completed[key]
        return groups


def _item(row: dict[str, Any]) -> dict[str, Any]:
    said = {"role": "assistant", "content": row["response"]}
    return {
        "uid": str(uuid.uuid4()),
        "instance_id": str(row["group_id"]),
        "messages": [*json.loads(row["prompt"]), said],
        "reward": float(row["reward"]),
        "extra_info": {
            "timestamp": datetime.fromisoformat(row["session_end_time"]).timestamp(),
            "steps": row["step_id"],
            "finish_reason": "length" if row["truncated"] else "stop",
            "session_id": row["session_id"],
            "env_id": row["env_id"],
            "group_id": row["group_id"],
            "weight_version": int(json.loads(row["env_state"])["weight_version"]),
            "truncated": row["truncated"],
            "step_pk": row["step_pk"],
            "is_session_completed": bool(row["is_session_completed"]),
        },
    }


def _place(item: dict[str, Any]) -> tuple[str, int, int]:
    facts = item["extra_info"]
    return str(facts["session_id"]), int(facts["steps"]), int(facts["step_pk"])


def _with_last_rewards(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    last = {
        item["extra_info"]["session_id"]: float(item["reward"])
        for item in group
        if item["extra_info"]["is_session_completed"]
    }
    for item in group:
        facts = item["extra_info"]
        if facts["session_id"] in last:
            facts["step_reward"] = float(item["reward"])
            facts["terminal_reward"] = item["reward"] = last[facts["session_id"]]
    return group


def _log_to(path: Path) -> None:
    log.setLevel(logging.DEBUG)
    log.addHandler(RotatingFileHandler(path, maxBytes=50 << 20, backupCount=5, encoding="utf-8"))
    log.addHandler(logging.StreamHandler())


async def serve(db: str, job: str, group_size: int) -> None:
    await Tortoise.init(db_url=f"sqlite://{db}", modules={"models": [__name__]})
    buffer, app = Buffer(job, group_size), FastAPI(debug=True)

    @app.middleware("http")
    async def pass_on(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        return await call_next(request)

    @app.post("/get_rollout_data", response_model=Answer)
    async def get_rollout_data(request: Request) -> Answer:
        await request.json()
        return await buffer.answer()

    (bound,) = listen("127.0.0.1", 0, is_guarded=False)
    print(f"serving url=http://127.0.0.1:{bound.getsockname()[1]} ", flush=True)
    await uvicorn.Server(uvicorn.Config(app, limit_concurrency=1000)).serve([bound])


if __name__ == "__main__":
    _log_to(Path(sys.argv[4]))
    asyncio.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
