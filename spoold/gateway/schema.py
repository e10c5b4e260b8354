"""The gateway's own description, as OpenAPI: what /openapi.json answers. Pure."""

from __future__ import annotations

from typing import Any, Final

from spoold import __version__

__all__ = ["OPENAPI"]

_Schema = dict[str, Any]


def _object(properties: _Schema, *required: str) -> _Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _integer(least: int, most: int, *, nullable: bool = False) -> _Schema:
    schema: _Schema = {"type": "integer", "minimum": least, "maximum": most}
    return schema | {"nullable": True} if nullable else schema


def _answers(good: _Schema, *statuses: str) -> _Schema:
    refusal = {"content": {"application/json": {"schema": _REFUSAL}}}
    answers = {status: {"description": _MEANS[status], **refusal} for status in statuses}
    return {"200": {"description": "done", "content": {"application/json": {"schema": good}}}} | (
        answers
    )


def _post(summary: str, body: _Schema, good: _Schema, *statuses: str, required: bool) -> _Schema:
    content = {"application/json": {"schema": body}}
    return {
        "post": {
            "summary": summary,
            "security": [{}, {"bearer": []}, {"basic": []}],
            "requestBody": {"required": required, "content": content},
            "responses": _answers(good, "400", "401", "408", "413", *statuses),
        }
    }


_MEANS: Final = {
    "400": "the body is not what it should be",
    "401": "the token is missing or another one",
    "404": "no batch has this id",
    "408": "the body came too slowly",
    "409": "the batch is in somebody else's hands",
    "413": "the body is too large",
    "503": "the disk refuses; the same request may succeed later",
}
_TEXT: Final = {"type": "string"}
_STEP: Final = _integer(0, 10**18 - 1, nullable=True)
_REFUSAL: Final = _object(
    {"success": {"enum": [False]}, "message": _TEXT, "retryable": {"type": "boolean"}},
    *("success", "message", "retryable"),
)
_DONE: Final = {"success": {"enum": [True]}, "message": _TEXT}
_SAMPLE: Final = _object(
    {
        "uid": _TEXT,
        "instance_id": _TEXT,
        "messages": {"type": "array"},
        "reward": {"type": "number"},
        "extra_info": {"type": "object"},
    },
    *("uid", "instance_id", "messages", "reward", "extra_info"),
)
_META_INFO: Final = _object(
    {
        "total_samples": {"type": "integer"},
        "avg_reward": {"type": "number"},
        "finished_groups": {"type": "array", "items": _TEXT},
        "avg_weight_version": {"type": "number"},
        "max_weight_version": {"type": "number"},
        "batch_id": _TEXT,
    },
    *("total_samples", "avg_reward", "finished_groups"),
    *("avg_weight_version", "max_weight_version", "batch_id"),
)
_DATA: Final = _object(
    {"data": {"type": "array", "items": _SAMPLE}, "meta_info": _META_INFO}, "data", "meta_info"
)
_BATCH: Final = _object(
    {"success": {"type": "boolean"}, "message": _TEXT, "data": _DATA}, "success", "message", "data"
)
_HEALTH: Final = _object({"status": {"enum": ["healthy", "unwell"]}, "message": _TEXT}, "status")

OPENAPI: Final[_Schema] = {
    "openapi": "3.0.3",
    "info": {"title": "spoold serve", "version": __version__},
    "components": {
        "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer"},
            "basic": {"type": "http", "scheme": "basic"},
        }
    },
    "paths": {
        "/get_rollout_data": _post(
            "A batch, the same one until it is acked; success is false where there is none.",
            _object({"max_groups": _integer(1, 2**63 - 1, nullable=True)}),
            _BATCH,
            required=False,
        ),
        "/ack_rollout_data": _post(
            "Ack a batch, durably. Safe to repeat.",
            _object({"batch_id": _TEXT, "step": _STEP}, "batch_id"),
            _object(_DONE | {"batch_id": _TEXT}, "success", "message", "batch_id"),
            *("404", "409", "503"),
            required=True,
        ),
        "/rewind": _post(
            "Put back what was acked with a later step; -1 for all that was acked with one.",
            _object({"step": _integer(-1, 10**18 - 1)}, "step"),
            _object(
                _DONE | {"batch_ids": {"type": "array", "items": _TEXT}},
                *("success", "message", "batch_ids"),
            ),
            "503",
            required=True,
        ),
        "/start_rollout": _post(
            "Answered; nothing is started, and nothing passed over. Other keys are ignored.",
            _object(
                {
                    "num_repeat_per_sample": {
                        "oneOf": [
                            _integer(1, 10**9, nullable=True),
                            {"type": "string", "pattern": "^[1-9][0-9]{0,8}$"},
                        ]
                    },
                    "restart_training": {},
                    "skip_instance_ids": {},
                }
            ),
            _object(_DONE, "success", "message"),
            required=False,
        ),
        "/health": {
            "get": {
                "summary": "Whether the run directory can be used. Needs no token.",
                "responses": {
                    status: {
                        "description": words,
                        "content": {"application/json": {"schema": _HEALTH}},
                    }
                    for status, words in (("200", "it can"), ("503", "it cannot"))
                },
            }
        },
        "/openapi.json": {
            "get": {
                "summary": "This.",
                "responses": {
                    "200": {
                        "description": "this",
                        "content": {"application/json": {"schema": {"type": "object"}}},
                    }
                },
            }
        },
    },
}
