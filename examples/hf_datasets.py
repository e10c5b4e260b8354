"""Batches of a spool as Hugging Face datasets.

    hf_datasets.py FILE…           how many samples are in these batches, wherever they lie
    hf_datasets.py --run-dir DIR   take batch after batch, and ack each

Two ways. `load` reads files that stay where they are: those in acked/, for a look back or a second
epoch. `stream` is a consumer: it acks a batch when the sample after its last one is asked for. So
whoever prefetches (a DataLoader with workers, `.shuffle`) has up to that many samples acked that it
has not trained on; a trainer that must not lose one in a crash uses spoold.Consumer itself.

The features are declared and not found out: in the first file a column may be null throughout. The
messages may hold anything (texts, lists of parts, tool calls), so they are of type Json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from datasets import Dataset, Features, IterableDataset, Json, List, Value, load_dataset

from spoold import Consumer

__all__ = ["FEATURES", "load", "stream"]

FEATURES = Features(
    {
        "uid": Value("string"),
        "instance_id": Value("string"),
        "messages": List(Json()),
        "reward": Value("float64"),
        "extra_info": {
            "environment": Value("int64"),
            "env_id": Value("string"),
            "session_id": Value("string"),
            "group_id": Value("string"),
            "job_id": Value("string"),
            "env_name": Value("string"),
            "llm_model": Value("string"),
            "step_pk": Value("int64"),
            "steps": Value("int64"),
            "step_reward": Value("float64"),
            "reward_source": Value("string"),
            "weight_version": Value("int64"),
            "truncated": Value("bool"),
            "finish_reason": Value("string"),
            "is_session_completed": Value("bool"),
            "timestamp": Value("float64"),
        },
    }
)


def load(paths: Sequence[str], **options: Any) -> Dataset:
    """Return the samples of batch files as one dataset; options as for load_dataset."""
    return load_dataset("json", data_files=list(paths), features=FEATURES, split="train", **options)


def stream(
    run_dir: str,
    name: str = "trainer-0",
    *,
    timeout: float | None = None,
    step: Callable[[], int] | None = None,
) -> IterableDataset:
    """Return the samples that come, for ever, or until none came for `timeout` seconds.

    `step` tells the trainer's step at the time of an ack; without it acks are final.
    """
    options = {"run_dir": run_dir, "name": name, "timeout": timeout, "step": step}
    return IterableDataset.from_generator(_samples, gen_kwargs=options)


def _samples(
    run_dir: str, name: str, timeout: float | None, step: Callable[[], int] | None
) -> Iterator[dict[str, Any]]:
    with Consumer(run_dir, name=name) as consumer:
        while (batch := consumer.claim(timeout=timeout)) is not None:
            yield from batch.samples()
            batch.ack(step=step() if step is not None else None)


def main(arguments: list[str]) -> None:
    """Count samples, or take them."""
    if arguments[:1] == ["--run-dir"]:
        for sample in stream(arguments[1], timeout=5.0):
            print(sample["uid"], sample["reward"])
    else:
        print(load(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
