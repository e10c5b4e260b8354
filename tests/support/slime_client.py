"""A trainer that fetches over HTTP, made from what is known of Slime's generator clients.

    python -m tests.support.slime_client URL STATE MEMBERS GROUPS [--acks] [--pause SECONDS]

It tells its number of samples a prompt once, asks for batches until it has enough for a round of
GROUPS groups, sleeping where there is none and where nobody answers, and takes a round apart by
instance_id: a group of other than MEMBERS samples loses the whole round, one whose rewards are all
equal is dropped. With `--acks` it acks each batch once its samples are in its buffer.

What it has is in STATE, saved after each batch, so that it may be killed. With `--acks` it passes
over a batch that it saved before; without, as those clients do, it notices nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.gateways import ask

Post = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Sends a request and returns the JSON of the answer; raises OSError for anything but a 200."""


@dataclass
class State:
    """What a checkpoint holds: samples as [uid, instance_id, reward]."""

    batch: str = ""
    buffer: list[list[Any]] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    rounds: int = 0
    lost_rounds: int = 0
    passed_over: int = 0

    @classmethod
    def load(cls, path: Path) -> State:
        return cls(**json.loads(path.read_bytes())) if path.exists() else cls()

    def save(self, path: Path) -> None:
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self)))
        os.replace(fresh, path)

    @property
    def seen(self) -> list[str]:
        """The uids of all samples that ever came."""
        return [*self.trained, *self.dropped, *(uid for uid, _, _ in self.buffer)]


class SlimeClient:
    """`sleep` takes seconds: three where there is nothing, one where nobody answers.

    `dwell` is how long it takes to do something with what came: before it is saved, and after.
    """

    def __init__(
        self,
        post: Post,
        state: Path,
        *,
        members: int,
        groups: int,
        acks: bool,
        sleep: Callable[[float], None],
        dwell: Callable[[], None] = lambda: None,
    ) -> None:
        self._post = post
        self._path = state
        self._members = members
        self._groups = groups
        self._acks = acks
        self._sleep = sleep
        self._dwell = dwell
        self.state = State.load(state)

    def start(self) -> dict[str, Any]:
        facts = {"num_repeat_per_sample": self._members, "restart_training": True}
        return self._insist("/start_rollout", facts)

    def round(self) -> None:
        """Fetch what a round needs, and train on it."""
        state = self.state
        while len(state.buffer) < self._members * self._groups:
            self._fetch()
        groups: dict[str, list[list[Any]]] = {}
        for row in state.buffer:
            groups.setdefault(row[1], []).append(row)
        if any(len(group) != self._members for group in groups.values()):
            state.lost_rounds += 1
        for group in groups.values():
            uids = [uid for uid, _, _ in group]
            is_flat = len({reward for _, _, reward in group}) == 1
            (state.dropped if is_flat else state.trained).extend(uids)
        state.rounds += 1
        state.buffer = []
        state.save(self._path)

    def _fetch(self) -> None:
        while not (reply := self._insist("/get_rollout_data", {}))["success"]:
            self._sleep(3.0)
        state, batch = self.state, reply["data"]["meta_info"]["batch_id"]
        if self._acks and batch == state.batch:
            state.passed_over += 1
        else:
            for item in reply["data"]["data"]:
                assert {"uid", "instance_id", "messages", "reward", "extra_info"} <= item.keys()
                state.buffer.append([item["uid"], item["instance_id"], item["reward"]])
            state.batch = batch
        self._dwell()
        state.save(self._path)
        self._dwell()
        if self._acks:
            self._insist("/ack_rollout_data", {"batch_id": batch})

    def _insist(self, path: str, facts: dict[str, Any]) -> dict[str, Any]:
        while True:
            try:
                return self._post(path, facts)
            except (OSError, http.client.HTTPException):
                self._sleep(1.0)


def post_to(url: str) -> Post:
    """Return how to talk to a gateway."""

    def post(path: str, facts: dict[str, Any]) -> dict[str, Any]:
        reply = ask(url, path, facts)
        if reply.status != 200:
            raise OSError(f"{reply.status}: {reply.body[:300]!r}")
        answer: dict[str, Any] = reply.json
        return answer

    return post


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("state", type=Path)
    parser.add_argument("members", type=int)
    parser.add_argument("groups", type=int)
    parser.add_argument("--acks", action="store_true")
    parser.add_argument("--pause", type=float, default=0.01)
    parser.add_argument("--dwell", type=float, default=0.0, help="at most, in seconds")
    given = parser.parse_args()
    client = SlimeClient(
        post_to(given.url),
        given.state,
        members=given.members,
        groups=given.groups,
        acks=given.acks,
        sleep=lambda _seconds: time.sleep(given.pause),
        dwell=lambda: time.sleep(random.uniform(0.0, given.dwell)),
    )
    client.start()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            client.round()


if __name__ == "__main__":
    main()
