"""A batch's whole life can be grepped by its id in the daemon's log, one line an event."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from spoold.log import TextFormatter
from tests.support.batches import tree
from tests.support.daemons import Running, mv, running
from tests.support.rollouts import make_rollouts

IN_HAND = "inflight/trainer-0"


def life(caplog: pytest.LogCaptureFixture, batch_id: str) -> list[str]:
    """What `grep` finds at the default level, without time and the id."""
    lines = map(TextFormatter().format, (r for r in caplog.records if r.levelno >= logging.INFO))
    return [
        line[20:].replace(f" batch={batch_id}", "") for line in lines if f"batch={batch_id}" in line
    ]


def move(it: Running, target: str) -> None:
    (name,) = [name for name in tree(it.run) if name.endswith(".jsonl")]
    mv(it.run, name, target)
    it.settle()


@pytest.mark.parametrize("trainer_dies", [False, True])
def test_from_publish_to_prune(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trainer_dies: bool
) -> None:
    caplog.set_level(logging.INFO, "spoold")
    rollouts = make_rollouts(tmp_path / "rollout.db")
    for one in rollouts.register(2, group=""):
        rollouts.complete(one)
    with running(tmp_path, requeue_seconds=60) as it:
        it.go()
        (name,) = tree(it.run)
        if trainer_dies:
            move(it, IN_HAND)
            it.go(60.0)
            it.go(60.0)
        move(it, IN_HAND)
        move(it, "acked/step-000000005")
        move(it, "pending")
        move(it, IN_HAND)
        move(it, "acked/step-000000007")
        (last,) = tree(it.run, "acked")
        os.unlink(f"{it.run.root}/{last}")
        it.settle()
    rollouts.close()
    claimed = f"INFO batch moved to={IN_HAND} from=pending"
    died = [
        claimed,
        "WARNING requeued consumer=trainer-0 try=2",
        f"INFO batch moved to=pending from={IN_HAND}",
    ]
    published, *after = life(caplog, os.path.basename(name).removesuffix(".jsonl"))
    assert published.startswith("INFO published environments=2 samples=2 bytes=")
    # Of a batch that is settled no more is kept than that it was acked.
    was = "acked/step-000000005" if trainer_dies else "acked"
    assert after == [
        *(died if trainer_dies else []),
        claimed,
        f"INFO batch moved to=acked/step-000000005 from={IN_HAND}",
        f"INFO batch moved to=pending from={was}",
        claimed,
        f"INFO batch moved to=acked/step-000000007 from={IN_HAND}",
        "INFO acked batch gone",
    ]
