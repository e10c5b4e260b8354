"""Every act that changes a run directory, small, with the state that it begins from.

An act is done by a process that can be killed, made to fail or cut off from power at any system
call; `tests.crash.verdict` says afterwards whether anything was lost, doubled or half visible.
What a process was told is durable it writes to a file beside the folder, which no cut reaches.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spoold import Consumer
from spoold.layout import Place, RunDir, State
from spoold.spool import moves, prune
from spoold.spool.inventory import Inventory
from tests.support.daemons import Running, start
from tests.support.rollouts import make_rollouts, open_rollouts

SETTINGS = {"batch_size": 2, "max_pending_batches": 1000}
STRANGERS = ("pending/notes.txt", "acked/mine/README", "rejected/why.txt", ".spoold/ledger/odd")


@dataclass(frozen=True)
class Act:
    """`prepare` makes a folder with a database and a run directory; `do` is the act itself."""

    name: str
    prepare: Callable[[Path], None]
    do: Callable[[Path], None]
    removes: bool = False  # acked batches, for good


def said_file(folder: Path) -> Path:
    """Where it is written down: beside the folder or, where that is a disk by itself, beside it."""
    at = folder
    while os.path.ismount(at.parent):
        at = at.parent
    return at.parent / f"{folder.name}.said"


def say(folder: Path, text: str) -> None:
    """Write down what this process believes to be durable now."""
    with open(said_file(folder), "a") as said:
        said.write(f"{text}\n")


class _Saying(logging.Handler):
    """Writes down which batches the daemon calls published."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "published":
            say(self.folder, f"published {record.fields['batch']}")  # type: ignore[attr-defined]


@contextmanager
def saying(folder: Path) -> Iterator[None]:
    logger, handler = logging.getLogger("spoold.daemon"), _Saying(folder)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# --- what there is before -------------------------------------------------------------------------


def database(folder: Path, complete: int, *, name: str = "rollout.db", bad: bool = False) -> None:
    """A database with so many complete environments, and one that still runs."""
    rollouts = make_rollouts(folder / name, journal="delete")
    with rollouts.together():
        for one in rollouts.register(complete, group=""):
            rollouts.complete(one)
        rollouts.step(rollouts.register(1)[0])
        if bad:
            rollouts.complete(rollouts.register(1)[0], messages="[{broken")
    rollouts.close()


def complete_more(folder: Path, count: int) -> None:
    rollouts = open_rollouts(folder / "rollout.db")
    with rollouts.together():
        for one in rollouts.register(count, group=""):
            rollouts.complete(one)
    rollouts.close()


def daemon(folder: Path, **settings: object) -> Running:
    return start(folder, **(SETTINGS | settings))


def once(folder: Path) -> None:
    """The daemon with --once, from start to stop."""
    with saying(folder):
        it = daemon(folder)
        try:
            it.daemon.once()
            it.daemon.stop()
        finally:
            it.kill()


def stranger(folder: Path, name: str) -> None:
    path = folder / "run" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(name)


def spool(folder: Path, *, environments: int = 6) -> list[moves.Found]:
    """A run directory with batches of two in pending/, and with files that nobody knows."""
    database(folder, environments)
    once(folder)
    said_file(folder).unlink(missing_ok=True)
    for name in STRANGERS:
        stranger(folder, name)
    return moves.find(run_of(folder), State.PENDING)


def run_of(folder: Path) -> RunDir:
    return RunDir(f"{folder}/run")


def shift(folder: Path, found: moves.Found, where: str, name: str = "") -> str:
    """Move a batch by hand."""
    target = folder / "run" / where / (name or found.name.file_name)
    target.parent.mkdir(exist_ok=True)
    os.rename(found.path(run_of(folder)), target)
    return str(target)


def _three_pending(folder: Path) -> None:
    spool(folder)


def _more_to_publish(folder: Path) -> None:
    spool(folder, environments=2)
    complete_more(folder, 7)


def _bad_row(folder: Path) -> None:
    database(folder, 2, bad=True)


def _claimed_by_the_last_process(folder: Path) -> None:
    shift(folder, spool(folder)[0], "inflight/trainer-0")


def _claimed_by_a_dead_consumer(folder: Path) -> None:
    for found in spool(folder)[:2]:
        shift(folder, found, "inflight/dead")


def _acked_with_steps(folder: Path) -> None:
    for step, found in enumerate(spool(folder), 1):
        shift(folder, found, f"acked/step-{step:09d}")


def _acked_and_settled(folder: Path) -> None:
    _acked_with_steps(folder)
    once(folder)


def _moved_back_by_hand(folder: Path) -> None:
    _acked_and_settled(folder)
    for found in moves.find(run_of(folder), State.ACKED)[:2]:
        shift(folder, found, "pending")


def _removed_after_ack(folder: Path) -> None:
    """Two entries without a file, a merged file of an older one, and an acked batch."""
    spool(folder, environments=8)
    run = run_of(folder)
    found = moves.find(run, State.PENDING)
    for one in found:
        shift(folder, one, "acked")
    once(folder)
    os.unlink(run.file(Place(State.ACKED), found[0].name.file_name))
    inventory = Inventory(run)
    inventory.load(now=0.0)
    assert inventory.merge(least=1) == 1
    for one in found[1:3]:
        os.unlink(run.file(Place(State.ACKED), one.name.file_name))


def _copies_and_damage(folder: Path) -> None:
    first, second, third = spool(folder)
    path = shift(folder, first, "acked")
    shutil.copy(path, first.path(run_of(folder)))
    shutil.copy(path, folder / "run/inflight" / first.name.file_name)
    Path(second.path(run_of(folder))).write_bytes(b"\0" * 100)
    shift(folder, third, "rejected/oom")


def _replaced(folder: Path) -> None:
    first, second, third = spool(folder)
    shift(folder, first, "acked/step-000000001")
    shift(folder, second, "inflight/trainer-0")
    once(folder)
    shift(folder, third, "rejected/oom")
    (folder / "run/rejected/env-7.bad-json.json").write_text("{}")
    (folder / "rollout.db").unlink()
    database(folder, 3)


def _missing_row_turned_up(folder: Path) -> None:
    spool(folder, environments=2)
    complete_more(folder, 1)
    (folder / "run/rejected/env-4.missing-row.json").write_text("{}")


# --- what is done ---------------------------------------------------------------------------------


def _loop(folder: Path) -> None:
    with saying(folder):
        it = daemon(folder)
        try:
            it.go()
            it.daemon.stop()
        finally:
            it.kill()


def _claim(folder: Path) -> None:
    with Consumer(folder / "run") as consumer:
        assert consumer.claim() is not None


def _ack(folder: Path) -> None:
    with Consumer(folder / "run") as consumer:
        for step in (None, 7):
            batch = consumer.claim()
            assert batch is not None
            batch.ack(step=step)
            say(folder, f"acked {batch.id}")


def _release(folder: Path) -> None:
    with Consumer(folder / "run") as consumer:
        batch = consumer.claim()
        assert batch is not None
        batch.release()
        say(folder, f"released {batch.id}")


def _reject(folder: Path) -> None:
    with Consumer(folder / "run") as consumer:
        batch = consumer.claim()
        assert batch is not None
        batch.reject("oom")
        say(folder, f"rejected {batch.id}")


def _rewind(folder: Path) -> None:
    with Consumer(folder / "run") as consumer:
        for batch_id in consumer.rewind(step=1):
            say(folder, f"rewound {batch_id}")


def _skip_stale(folder: Path) -> None:
    with Consumer(folder / "run") as consumer:
        assert consumer.claim(min_weight_version=99) is None


def _requeue(folder: Path) -> None:
    it = daemon(folder, requeue_seconds=60)
    try:
        it.go()
        it.go(61.0)
        it.daemon.stop()
    finally:
        it.kill()


def _merge(folder: Path) -> None:
    inventory = Inventory(run_of(folder))
    inventory.load(now=0.0)
    assert inventory.merge(least=1) == 2


def _retire_the_rest(folder: Path) -> None:
    """Only the end of a retirement: `prepare` has made the beginning."""
    once(folder)


def _prune(folder: Path) -> None:
    run = run_of(folder)
    ready, _ = prune.prunable(run, 3)
    assert len(ready) == 2
    for found in ready:
        assert prune.remove(run, found) is not None
    prune.remove_empty_steps(run, 3)


def _keep_one_step(folder: Path) -> None:
    """The daemon prunes by itself."""
    it = daemon(folder, keep_steps=1)
    try:
        it.go()
        it.daemon.stop()
    finally:
        it.kill()


def _half_retired(folder: Path) -> None:
    _replaced(folder)
    into = folder / "run/retired/20261129T000000Z-job-1"
    (into / ".spoold").mkdir(parents=True)
    os.rename(folder / "run/.spoold/source.json", into / ".spoold/source.json")
    (into / "pending").mkdir()


ACTS = (
    Act("first start", lambda folder: database(folder, 5), once),
    Act("publish", _more_to_publish, once),
    Act("publish in the loop", _more_to_publish, _loop),
    Act("note", _bad_row, once),
    Act("note removed", _missing_row_turned_up, once),
    Act("claim", _three_pending, _claim),
    Act("next try", _claimed_by_the_last_process, _claim),
    Act("ack", _three_pending, _ack),
    Act("release", _three_pending, _release),
    Act("reject", _three_pending, _reject),
    Act("stale", _three_pending, _skip_stale),
    Act("requeue", _claimed_by_a_dead_consumer, _requeue),
    Act("rewind", _acked_and_settled, _rewind),
    Act("ledger write", _acked_with_steps, once),
    Act("ledger withdraw", _moved_back_by_hand, once),
    Act("ledger merge", _removed_after_ack, _merge),
    Act("prune", _acked_and_settled, _prune, removes=True),
    Act("keep steps", _acked_and_settled, _keep_one_step, removes=True),
    Act("set aside", _copies_and_damage, once),
    Act("retire", _replaced, once),
    Act("end of retire", _half_retired, _retire_the_rest),
)
BY_NAME = {act.name: act for act in ACTS}
