"""What writers put into the columns of a step row: what is usual, and what nobody can use."""

from __future__ import annotations

import json
import math
from typing import Any

from tests.support.rollouts import Rollouts

META = [
    {"weight_version": 7},
    {"weight_version": "12", "event_type": "gateway_inference", "status_code": 200},
    {"weight_version": "default"},
    {"weight_version": None},
    {"event_type": "gateway_session_close"},
    {"event_type": "episode_summary"},
    {"event_type": "evaluation_summary"},
    {"event_type": "gateway_inference", "status_code": 503},
    {"synthetic_stop": True},
    {"synthetic_stop": False, "weight_version": 2},
    "not json {",
    None,
    b'{"weight_version": 5, "loss": NaN, "text": "\xff"}',
]
MESSAGES = [
    [{"role": "user", "content": "q"}],
    [{"role": "user", "content": "数学 \U0001f600"}, {"role": "assistant", "content": "a"}],
    [],
    [{"role": "user", "content": "\0", "id": 2**64, "big": -(10**40)}],
]
ODD_MESSAGES = [
    "",
    " [ ]",
    "no JSON",
    "null",
    "{}",
    '"text"',
    "[1]",
    '[{"role": "user"}, null]',
    '[{"role": "user", "content": "\\ud800"}]',
    '[{"role": "user", "content": "\\ud83d\\ude00"}]',
    '[{"role": "user", "score": NaN}]',
    '[{"role": "user", "score": -Infinity}]',
    '[{"role": "user", "content": "a\0b"}]',
    b'[{"role": "user", "content": "\xff"}]',
    "[" * 600 + "]" * 600,
    "[{" + '"a": {' * 600 + "}" * 600 + "}]",
    '[\n {"role":\r\n "user"}\n]\n',
]
RESPONSES = [
    "",
    "plain",
    "nul \0 in it",
    '{"half": ',
    '{"role": "assistant", "content": "direct"}',
    '{"choices": [{"message": {"role": "assistant", "content": null, "tool_calls": []}}]}',
]
ODD_RESPONSES = [
    b"\xff\xfe",
    '{"no": "role"}',
    '{"choices": []}',
    '{"role": "assistant", "content": "\\ud800"}',
    '{"role": "assistant", "content": "\\udc00\\ud800"}',
    '{"choices": [{"message": {"role": "assistant", "n": Infinity}}]}',
    '{"choices": [{"message": {"role": "assistant"}}], "usage": NaN}',
    json.dumps({"role": "assistant", "n": 2**64 + 1, "m": -(10**40) - 1}),
    '{"role": "assistant", "content": "\\u0000"}',
    '{"role": "assistant", "a": ' + '{"b":' * 600 + "1" + "}" * 601,
    "\ud800".encode("utf-8", "surrogatepass"),
]
REWARDS = [None, 0.0, -1.5, 2.0, 7]
ODD_REWARDS = [math.nan, math.inf, -math.inf, "nan", "0.5x", "", b"\xff", 2.0**63]


def fill(rollouts: Rollouts, environments: list[dict[str, Any]], order: list[int]) -> None:
    """Write environments with their rows, mixed by `order`."""
    ids = [rollouts.register(job=facts["job"], group=facts["group"])[0] for facts in environments]
    turns = [(k, step) for k, facts in enumerate(environments) for step in facts["steps"]]
    turns.sort(key=lambda turn: order[turn[0] % len(order)] if order else 0)
    for k, step in turns:
        rollouts.step(ids[k], **step)
    for environment, facts in zip(ids, environments, strict=True):
        if facts["finished"]:
            rollouts.finish(environment)
        if facts["deleted"]:
            rollouts.delete(environment)
