"""What the gateway is compared to: a server that polls by id, and pops groups as it answers.

    python -m tests.benchmarks.hundred_rows DB GROUP_SIZE      prints its URL

Made as the buffer server that fills trainers today (ROLLOUT_DB.md): FastAPI with a response model,
rows through Tortoise, a hundred a poll, incomplete groups in memory; but no pause between polls. It
remembers nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from tortoise import Tortoise, fields
from tortoise.models import Model

from spoold.gateway.server import listen

ROWS = 100


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

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._last = 0
        self._waiting: dict[str, list[dict[str, Any]]] = defaultdict(list)

    async def pop(self) -> list[dict[str, Any]]:
        """Poll once; return the groups that are whole."""
        rows = SessionStep.filter(is_session_completed=True, id__gt=self._last)
        for row in await rows.order_by("id").limit(ROWS):
            self._last = row.id
            self._waiting[row.group_id or ""].append(_item(row))
        ready = [key for key, items in self._waiting.items() if len(items) >= self._group_size]
        return [item for key in ready for item in self._waiting.pop(key)]


def _item(row: SessionStep) -> dict[str, Any]:
    return {
        "uid": f"{row.session_id}:{row.id}",
        "instance_id": row.group_id,
        "messages": [*json.loads(row.messages), {"role": "assistant", "content": row.response}],
        "reward": float(row.reward or 0.0),
        "extra_info": {
            "timestamp": row.created_at.timestamp(),
            "steps": row.step_id,
            "finish_reason": "length" if row.is_truncated else "stop",
            "session_id": row.session_id,
            "env_id": row.session_id,
            "group_id": row.group_id,
            "weight_version": int(json.loads(row.meta_json or "{}")["weight_version"]),
            "truncated": row.is_truncated,
        },
    }


async def serve(db: str, group_size: int) -> None:
    await Tortoise.init(db_url=f"sqlite://{db}", modules={"models": [__name__]})
    buffer, app = Buffer(group_size), FastAPI()

    @app.post("/get_rollout_data", response_model=Answer)
    async def get_rollout_data() -> Answer:
        items = await buffer.pop()
        meta = {"total_samples": len(items), "finished_groups": [], "batch_id": ""}
        return Answer(success=bool(items), data={"data": items, "meta_info": meta})

    (bound,) = listen("127.0.0.1", 0, is_guarded=False)
    print(f"serving url=http://127.0.0.1:{bound.getsockname()[1]} ", flush=True)
    await uvicorn.Server(uvicorn.Config(app, log_level="warning", http="h11")).serve([bound])


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
