"""A trainer, whole: what is between it and the spool is four lines.

    python -m spoold.demo.trainer RUN_DIR CHECKPOINT --seconds-per-step 0.15

Its "model" is the list of the samples that it was trained on, so that anybody can see afterwards
whether each came once. That holds across `kill -9` at any line, because for step N it takes the
optimizer step, then acks with step=N, then saves checkpoint N; and because when it starts it loads
a checkpoint T and rewinds to T before its first claim. It needs no signal handler: whoever wants to
stop it kills it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from spoold import Consumer

__all__ = ["Model", "main", "train_for_ever"]


@dataclass
class Model:
    """What a checkpoint holds."""

    step: int = 0
    trained: list[str] = field(default_factory=list)

    def optimizer_step(self, uids: list[str]) -> None:
        """Learn from the samples of one batch."""
        self.step += 1
        self.trained += uids

    def save(self, path: Path) -> None:
        """Write the checkpoint: the old one or the new one, whatever happens."""
        fresh = path.with_suffix(".new")
        with fresh.open("w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)

    @classmethod
    def load(cls, path: Path) -> Model:
        """Return the model of the last checkpoint, an untrained one where there is none."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()


def train_for_ever(run_dir: str, checkpoint: Path, seconds_per_step: float) -> None:
    """Train on every batch that comes, until somebody kills this process."""
    model = Model.load(checkpoint)
    with Consumer(run_dir, name="trainer-0") as consumer:
        consumer.rewind(step=model.step)
        for batch in consumer:
            model.optimizer_step([sample["uid"] for sample in batch.samples()])
            time.sleep(seconds_per_step)
            batch.ack(step=model.step)
            print(f"step {model.step}: {batch.id}, try {batch.attempt}", flush=True)
            model.save(checkpoint)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(prog="python -m spoold.demo.trainer")
    parser.add_argument("run_dir")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--seconds-per-step", type=float, default=0.15)
    options = parser.parse_args(arguments)
    train_for_ever(options.run_dir, options.checkpoint, options.seconds_per_step)


if __name__ == "__main__":
    main()
