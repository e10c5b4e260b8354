"""Daemon, writers and trainers as processes, and waiting for what they do."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spoold.demo.children import Child
from spoold.layout import BatchName, State

# What a test's process must not inherit: settings of somebody's daemon.
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("SPOOLD_")}

# A trainer of its own folder that shares a spool with others; says what it acked.
SHARING_TRAINER = """
import sys
from spoold import BatchLost, Consumer

with Consumer(sys.argv[1], name=sys.argv[2]) as consumer:
    for batch in consumer:
        assert list(batch.samples())
        try:
            batch.ack()
        except BatchLost:  # somebody moved it by hand
            continue
        print("acked", batch.id, flush=True)
"""

# Somebody who moves batches by hand: any batch, to any of the four directories.
HAND = """
import glob, random, subprocess, sys, time

run, moves, rng = glob.escape(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
while moves:
    files = glob.glob(f"{run}/*/*.jsonl") + glob.glob(f"{run}/inflight/*/*.jsonl")
    if files:
        target = rng.choice(("pending", "inflight", "acked", "rejected"))
        moved = ["mv", "-n", "--", rng.choice(sorted(files)), f"{sys.argv[1]}/{target}/"]
        subprocess.run(moved, stderr=subprocess.DEVNULL)  # it may have been moved already
        print(*moved, flush=True)
        moves -= 1
    time.sleep(0.004)
"""


def until(condition: Callable[[], object], what: str, *, timeout_seconds: float = 60.0) -> None:
    """Return as soon as `condition` holds; fail when that takes too long."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_seconds:.0f} s for {what}"
        time.sleep(0.002)


class Players:
    """Named processes that can be killed and started again. None outlives the `with`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._commands: dict[str, Sequence[str]] = {}
        self._environ: dict[str, Mapping[str, str]] = {}
        self._running: dict[str, Child] = {}

    def __enter__(self) -> Players:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._running.values():
            child.kill()

    def start(
        self,
        name: str,
        command: Sequence[str] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a process; without a command, the one that went by that name before."""
        if command is not None:
            self._commands[name] = command
            self._environ[name] = {**ENVIRON, **(environ or {})}
        child = Child(
            name, self._commands[name], log=str(self.log(name)), environ=self._environ[name]
        )
        self._running[name] = child
        return child

    def log(self, name: str) -> Path:
        """Where the output of a process goes, over all its lives."""
        return self._folder / f"{name}.log"

    def kill(self, name: str) -> None:
        self._running.pop(name).kill()

    def stop(self, name: str) -> int:
        """Stop it with SIGTERM; its exit code."""
        return self._running.pop(name).stop()

    def has_ended(self, name: str) -> bool:
        """Whether it ended by itself, well. Fails when it ended otherwise."""
        code = self._running[name].exit_code()
        assert code in (None, 0), self._say(self._running[name])
        return code == 0

    def check(self, *names: str) -> None:
        """Fail when one of these is not alive."""
        for name in names:
            if name in self._running and self._running[name].exit_code() is not None:
                raise AssertionError(self._say(self._running[name]))

    @staticmethod
    def _say(child: Child) -> str:
        return f"{child.name} ended with {child.exit_code()}:\n{child.last_words(30)}"


def run_once(command: Sequence[str], *, timeout_seconds: float = 60.0) -> str:
    """Run a command to its end, which must be a good one. Returns its stdout."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=ENVIRON,
        timeout=timeout_seconds,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def batch_names(run_dir: str | Path, state: State) -> list[BatchName]:
    """Return the batches that lie in a state, at any depth, by name. May miss one that moves."""
    found = []
    for _, _, files in os.walk(Path(run_dir, state)):
        found += [name for file in files if (name := BatchName.parse(file)) is not None]
    return sorted(found, key=lambda name: name.file_name)


def ledger(run_dir: str | Path) -> dict[str, frozenset[int]]:
    """Return the entries of the ledger: the environments by batch id."""
    entries = {}
    for path in Path(run_dir, ".spoold", "ledger").iterdir():
        entries[path.name] = frozenset(json.loads(path.read_bytes())["environments"])
    return entries
