"""A trainer whose model is the list of what it was trained on, killed at every point of its loop.

    python -m tests.support.toy_trainer RUN_DIR CHECKPOINT [--first K] [--last K]

It keeps the order that DESIGN.md asks for: load checkpoint T, rewind to T, claim; for step N take
the optimizer step, ack with step N, then save N or a later one. For each K a training run begins
anew without a checkpoint, is killed at its K-th point, and in the next two lives at a random
earlier one; a last life finishes. Then the model must have seen each sample once. Stops at the
first K that no life reached, and prints how often it was killed at which point.

Points are the lines of the loop, and each rename, sync and folder made below it. Lives are forked
from here, where there is one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock  # noqa: F401  # what a consumer loads late: not anew in every life
from watchdog.observers import inotify_c  # noqa: F401

from spoold import Consumer, fs

GIVE_UP_SECONDS = 60.0
KILLS = 3


class Model:
    """What a checkpoint holds."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.step, self.seen = 0, []
        if checkpoint.exists():
            self.step, self.seen = json.loads(checkpoint.read_bytes())

    def train(self, uids: list[str]) -> None:
        self.step += 1
        self.seen += uids

    def save(self, point: Callable[[str], None]) -> None:
        fresh = self.checkpoint.with_suffix(".new")
        fresh.write_text("[1, [")
        point("checkpoint half written")
        fresh.write_text(json.dumps([self.step, self.seen]))
        point("checkpoint written")
        fresh.replace(self.checkpoint)
        point("checkpoint saved")


def live(run_dir: str, checkpoint: Path, wanted: int, point: Callable[[str], None]) -> None:
    """Train until the model has seen `wanted` samples."""
    model = Model(checkpoint)
    point("checkpoint loaded")
    with Consumer(run_dir) as consumer:
        point("name locked")
        consumer.rewind(step=model.step)
        point("rewound")
        give_up = time.monotonic() + GIVE_UP_SECONDS
        while len(model.seen) < wanted:
            batch = consumer.claim(timeout=1.0)
            if batch is None:
                if time.monotonic() > give_up:
                    sys.exit(f"{len(model.seen)} of {wanted} samples came: {consumer.reason()}")
                continue
            point("claimed")
            uids = [sample["uid"] for sample in batch.samples()]
            point("samples read")
            model.train(uids)
            point("optimizer step taken")
            batch.ack(step=model.step)
            point("acked")
            if model.step % 2 == 0:
                model.save(point)
    point("name unlocked")
    model.save(point)


def with_points_below(point: Callable[[str], None]) -> None:
    """Make what changes the disk a point before and after it, in this process."""
    for name in ("rename_noreplace", "sync_dir", "make_dirs"):
        setattr(fs, name, _with_points(name, getattr(fs, name), point))


def _with_points(
    name: str, real: Callable[..., Any], point: Callable[[str], None]
) -> Callable[..., Any]:
    def wrapped(*args: Any) -> Any:
        point(f"before {name}")
        answer = real(*args)
        point(f"after {name}")
        return answer

    return wrapped


def life(run_dir: str, checkpoint: Path, wanted: int, kill_at: int) -> str:
    """Live in a forked child, killed at that point (0: never). Returns where it was killed."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        points = 0

        def point(name: str) -> None:
            nonlocal points
            points += 1
            if points == kill_at:
                os.write(write_end, name.encode())
                os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            with_points_below(point)
            live(run_dir, checkpoint, wanted, point)
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(write_end)
    _, status = os.waitpid(child, 0)
    with open(read_end) as pipe:
        where = pipe.read()
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, -signal.SIGKILL):
        sys.exit(f"a life that was to be killed at point {kill_at} ended with {code}")
    return where


def uids_in(run_dir: str) -> list[str]:
    """Return the uid of every sample, wherever its batch lies."""
    uids = []
    for state in ("pending", "inflight", "acked"):
        for path in Path(run_dir, state).rglob("*.jsonl"):
            uids += [json.loads(line)["uid"] for line in path.read_bytes().splitlines()]
    return sorted(uids)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--last", type=int, default=10**6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    expected = uids_in(options.run_dir)
    killed: Counter[str] = Counter()
    for kill_at in range(options.first, options.last + 1):
        options.checkpoint.unlink(missing_ok=True)
        kills = [kill_at, *(rng.randint(1, kill_at) for _ in range(KILLS - 1)), 0]
        where = [
            life(options.run_dir, options.checkpoint, len(expected), number) for number in kills
        ]
        killed.update(filter(None, where))
        seen = sorted(Model(options.checkpoint).seen)
        if seen != expected:
            twice = [uid for uid, times in Counter(seen).items() if times > 1]
            missed = sorted(set(expected) - set(seen))
            sys.exit(f"{kills=} {where=}: {twice=} {missed=}")
        if not where[0]:
            break
    print(json.dumps({"last": kill_at, "killed": killed}))


if __name__ == "__main__":
    main()
