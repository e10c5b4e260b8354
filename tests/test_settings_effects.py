"""Every line of the table of settings: what its default does, and what another value does.

Each test drives the real daemon on a real database, and looks at what lies in the run directory,
or counts the seconds until it lies there, on a clock that only the test moves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spoold import fs
from spoold.config import Settings, load
from spoold.errors import ConfigError, SourceReplaced
from tests.support.batches import tree
from tests.support.commands import spoold_process
from tests.support.daemons import Running, environments, mv, running, start
from tests.support.rollouts import Rollouts, make_rollouts

DEFAULTS = load(None, {"db": "x", "run_dir": "y"}, {})


# Which of two shards groups of job-1 belong to.
SHARD_OF_GROUP = {"g1": 0, "g2": 1, "g3": 0, "g6": 1}


class Table:
    """Which setting has which test. A test gets a folder, and settings: none, or one of its own."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, Any, Any, Any, Callable[..., Any]]] = []

    def row(self, name: str, value: Any, *, by_default: Any, then: Any) -> Callable[..., Any]:
        def add(scenario: Callable[..., Any]) -> Callable[..., Any]:
            self.rows.append((name, value, by_default, then, scenario))
            return scenario

        return add


EFFECTS = Table()
_open: list[Rollouts] = []


@pytest.fixture(autouse=True)
def _close_writers() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


def begin(folder: Path) -> Rollouts:
    rollouts = make_rollouts(folder / "rollout.db")
    _open.append(rollouts)
    return rollouts


def complete(rollouts: Rollouts, count: int, *, group: str = "", **facts: Any) -> list[int]:
    ids = rollouts.register(count, group=group)
    with rollouts.together():
        for one in ids:
            rollouts.complete(one, **facts)
    return ids


def after_one_go(folder: Path, settings: dict[str, Any]) -> list[int]:
    with running(folder, **settings) as it:
        it.go()
        return environments(it.run)


def sizes(folder: Path, settings: dict[str, Any]) -> list[int]:
    with running(folder, **settings) as it:
        it.go()
        return [Path(it.run.root, name).read_bytes().count(b"\n") for name in tree(it.run)]


def seconds_until(it: Running, holds: Callable[[], object], *, at_most: float = 5000.0) -> float:
    """Let the daemon run, without a hint, until something holds; returns how long that took."""
    began = it.clock.now
    while not holds():
        pause = it.daemon.step()
        assert it.clock.now - began <= at_most
        if not holds():
            it.clock.now += max(pause, 0.001)
    return round(it.clock.now - began)


def test_every_setting_has_a_test_of_its_default_and_of_its_effect() -> None:
    assert [name for name, *_ in EFFECTS.rows] == list(Settings.model_fields)


@EFFECTS.row("db", "other.db", by_default="rollout.db", then="other.db")
def _(folder: Path, settings: dict[str, Any]) -> Any:
    for name, count in (("rollout.db", 1), ("other.db", 2)):
        rollouts = make_rollouts(folder / name)
        complete(rollouts, count)
        rollouts.close()
    db = settings.get("db", "rollout.db")
    delivered = after_one_go(folder, {"db": f"{folder}/{db}"})
    return {1: "rollout.db", 2: "other.db"}[len(delivered)]


@EFFECTS.row("run_dir", "elsewhere", by_default="run", then="elsewhere")
def _(folder: Path, settings: dict[str, Any]) -> Any:
    complete(begin(folder), 1)
    run_dir = settings.get("run_dir", "run")
    after_one_go(folder, {"run_dir": f"{folder}/{run_dir}"})
    return next(path.parent.parent.name for path in folder.rglob("pending/*.jsonl"))


@EFFECTS.row("job", "job-2", by_default="job-1, job-2", then=[1])
def _(folder: Path, settings: dict[str, Any]) -> Any:
    rollouts = begin(folder)
    for job in ("job-2", "job-1"):
        for one in rollouts.register(1, job=job):
            rollouts.complete(one)
    try:
        return after_one_go(folder, settings)
    except ConfigError as error:
        return "job-1, job-2" if "job-1" in str(error) and "job-2" in str(error) else str(error)


@EFFECTS.row("shard", "1/2", by_default=[1, 2, 3, 4], then=[2, 4])
def _(folder: Path, settings: dict[str, Any]) -> Any:
    rollouts = begin(folder)
    for group in SHARD_OF_GROUP:
        complete(rollouts, 1, group=group)
    return after_one_go(folder, settings)


@EFFECTS.row("ready_when", "terminal", by_default=[2], then=[1, 2])
def _(folder: Path, settings: dict[str, Any]) -> Any:
    rollouts = begin(folder)
    unfinished, finished = rollouts.register(2)
    rollouts.end(unfinished)
    rollouts.complete(finished)
    return after_one_go(folder, settings)


@EFFECTS.row("samples", "steps", by_default=[1], then=[3])
def _(folder: Path, settings: dict[str, Any]) -> Any:
    rollouts = begin(folder)
    (one,) = rollouts.register(1)
    rollouts.step(one)
    rollouts.step(one)
    rollouts.complete(one)
    return sizes(folder, settings)


@EFFECTS.row("batch_size", 30, by_default=[64, 6], then=[30, 30, 10])
def _(folder: Path, settings: dict[str, Any]) -> Any:
    complete(begin(folder), 70)
    return sizes(folder, settings)


@EFFECTS.row("batch_bytes", 3000, by_default=[6], then=[3, 3])
def _(folder: Path, settings: dict[str, Any]) -> Any:
    complete(begin(folder), 6, response="x" * 400)
    return sizes(folder, settings)


@EFFECTS.row("linger_seconds", 7, by_default=1, then=7)
def _(folder: Path, settings: dict[str, Any]) -> Any:
    complete(begin(folder), 1)
    lingering = {"linger_seconds": DEFAULTS.linger_seconds} | settings
    with running(folder, **lingering) as it:
        return seconds_until(it, lambda: tree(it.run))


@EFFECTS.row("max_sample_bytes", 1000, by_default="a batch", then="too-big")
def _(folder: Path, settings: dict[str, Any]) -> Any:
    complete(begin(folder), 1, response="x" * 1000)
    with running(folder, **settings) as it:
        it.go()
        (name,) = tree(it.run)
        return "a batch" if name.startswith("pending/") else name.split(".")[1]


@EFFECTS.row("group_size", 2, by_default=[1, 3, 4], then=[3, 4])
def _(folder: Path, settings: dict[str, Any]) -> Any:
    rollouts = begin(folder)
    half = rollouts.register(2, group="a")
    rollouts.complete(half[0])
    complete(rollouts, 2, group="b")
    return after_one_go(folder, settings)


@EFFECTS.row("group_timeout_seconds", 10, by_default=1800, then=10)
def _(folder: Path, settings: dict[str, Any]) -> Any:
    rollouts = begin(folder)
    rollouts.complete(rollouts.register(2, group="a")[0])
    with running(folder, group_size=2, partial_groups="deliver", **settings) as it:
        return seconds_until(it, lambda: tree(it.run))


@EFFECTS.row("partial_groups", "reject", by_default=[], then=["rejected/env-1.partial-group.json"])
def _(folder: Path, settings: dict[str, Any]) -> Any:
    rollouts = begin(folder)
    rollouts.complete(rollouts.register(2, group="a")[0])
    with running(folder, group_size=2, **settings) as it:
        it.go()
        it.go(DEFAULTS.group_timeout_seconds)
        return tree(it.run)


@EFFECTS.row("max_pending_batches", 3, by_default=64, then=3)
def _(folder: Path, settings: dict[str, Any]) -> Any:
    complete(begin(folder), 70)
    return len(sizes(folder, {"batch_size": 1} | settings))


@EFFECTS.row("max_pending_bytes", 1, by_default=5, then=1)
def _(folder: Path, settings: dict[str, Any]) -> Any:
    assert DEFAULTS.max_pending_bytes == 4 << 30
    complete(begin(folder), 5)
    return len(sizes(folder, {"batch_size": 1} | settings))


@EFFECTS.row("min_free_bytes", "512MiB", by_default=[], then=[1])
def _(folder: Path, settings: dict[str, Any]) -> Any:
    complete(begin(folder), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fs, "free_bytes", lambda _path: (1 << 30) - 1)
        return after_one_go(folder, {"min_free_bytes": DEFAULTS.min_free_bytes} | settings)


@EFFECTS.row("scan_seconds", 11, by_default=2, then=11)
def _(folder: Path, settings: dict[str, Any]) -> Any:
    rollouts = begin(folder)
    complete(rollouts, 1)
    with running(folder, **settings) as it:
        seconds_until(it, lambda: len(tree(it.run)) == 1)
        # It peeks a few times more at once, then pauses.
        looking = it.daemon.looking
        seconds_until(it, lambda: min(looking.due_at(), looking.peek_at()) > it.clock.now + 0.2)
        looked_at = it.clock.now
        complete(rollouts, 1)
        seconds_until(it, lambda: len(tree(it.run)) == 2)
        return round(it.clock.now - looked_at)


@EFFECTS.row("rescan_seconds", 11, by_default=60, then=11)
def _(folder: Path, settings: dict[str, Any]) -> Any:
    """Nothing but a reconcile finds an environment that is finished and has no row."""
    rollouts = begin(folder)
    complete(rollouts, 1)
    with running(folder, missing_row_seconds=0, scan_seconds=1, **settings) as it:
        it.daemon.step()
        rollouts.finish(*rollouts.register(1))
        return seconds_until(it, lambda: tree(it.run, "rejected"))


@EFFECTS.row("missing_row_seconds", 5, by_default=600, then=5)
def _(folder: Path, settings: dict[str, Any]) -> Any:
    rollouts = begin(folder)
    rollouts.finish(*rollouts.register(1))
    with running(folder, **settings) as it:
        return seconds_until(it, lambda: tree(it.run))


def _claimed_by_somebody_who_died(folder: Path, it: Running) -> None:
    complete(begin(folder), 1)
    it.go()
    (name,) = tree(it.run)
    mv(it.run, name, "inflight/trainer-0")
    it.go()


@EFFECTS.row("requeue_seconds", 9, by_default=60, then=9)
def _(folder: Path, settings: dict[str, Any]) -> Any:
    with running(folder, scan_seconds=1, **settings) as it:
        _claimed_by_somebody_who_died(folder, it)
        return seconds_until(it, lambda: tree(it.run, "pending"))


@EFFECTS.row("max_attempts", 1, by_default="pending", then="rejected/attempts")
def _(folder: Path, settings: dict[str, Any]) -> Any:
    with running(folder, **settings) as it:
        _claimed_by_somebody_who_died(folder, it)
        seconds_until(it, lambda: tree(it.run, "pending", "rejected"))
        return os.path.dirname(tree(it.run, "pending", "rejected")[0])


@EFFECTS.row("keep_steps", 1, by_default=[1, 2, 3], then=[2, 3])
def _(folder: Path, settings: dict[str, Any]) -> Any:
    complete(begin(folder), 3)
    with running(folder, batch_size=1, **settings) as it:
        it.go()
        for step, name in enumerate(tree(it.run, "pending"), 1):
            mv(it.run, name, f"acked/step-{step:09d}")
        it.settle()
        it.go(10.0)
        return [int(name.split("/")[1][5:]) for name in tree(it.run, "acked")]


@EFFECTS.row("null_reward", "reject", by_default=[1], then=[])
def _(folder: Path, settings: dict[str, Any]) -> Any:
    complete(begin(folder), 1, reward=None)
    return after_one_go(folder, settings)


@EFFECTS.row("on_replaced", "refuse", by_default="retired", then="refused")
def _(folder: Path, settings: dict[str, Any]) -> Any:
    rollouts = begin(folder)
    complete(rollouts, 2)
    after_one_go(folder, {})
    _open.pop().close()
    os.unlink(folder / "rollout.db")
    complete(begin(folder), 2)
    it = start(folder, **settings)
    try:
        it.go()
    except SourceReplaced:
        return "refused"
    finally:
        it.kill()
    return "retired" if os.listdir(it.run.retired) else "neither"


@EFFECTS.row("metrics_dir", "metrics", by_default=[], then=["spoold-run"])
def _(folder: Path, settings: dict[str, Any]) -> Any:
    complete(begin(folder), 1)
    (folder / "metrics").mkdir()
    after_one_go(folder, {name: folder / value for name, value in settings.items()})
    return [file.name.rpartition("-")[0] for file in (folder / "metrics").iterdir()]


def _stderr_of_once(folder: Path, settings: dict[str, Any]) -> str:
    complete(begin(folder), 1)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    where = ["--db", folder / "rollout.db", "--run-dir", folder / "run", "--min-free-bytes", "0"]
    ran = spoold_process("run", *where, "--once", *options)
    assert ran.code == 0
    return ran.err


@EFFECTS.row("log_level", "warning", by_default=True, then=False)
def _(folder: Path, settings: dict[str, Any]) -> Any:
    return " INFO published batch=" in _stderr_of_once(folder, settings)


@EFFECTS.row("log_format", "json", by_default="text", then="json")
def _(folder: Path, settings: dict[str, Any]) -> Any:
    lines = _stderr_of_once(folder, settings).splitlines()
    if lines[0].startswith("{"):
        return "json" if all(json.loads(line)["event"] for line in lines) else "neither"
    return "text"


@pytest.mark.parametrize("which", ["by_default", "then"])
@pytest.mark.parametrize("row", EFFECTS.rows, ids=[row[0] for row in EFFECTS.rows])
def test_a_setting_does_what_the_table_says(
    row: tuple[str, Any, Any, Any, Callable[..., Any]], which: str, tmp_path: Path
) -> None:
    name, value, by_default, then, scenario = row
    if which == "by_default":
        assert scenario(tmp_path, {}) == by_default
    else:
        assert scenario(tmp_path, {name: value}) == then
