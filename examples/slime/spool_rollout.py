"""A rollout function for Slime that takes whole groups from a spool.

    --rollout-function-path spool_rollout.generate_rollout   (this folder on PYTHONPATH)
    SPOOL=/var/lib/spoold/exp7

`generate_rollout` fills Slime's data buffer one batch at a time until `rollout_batch_size` groups
are in it, and returns that many. A batch is acked, with step = rollout_id, after its samples are in
the buffer: what was not acked comes again after a restart. Run the daemon with `--group-size` equal
to `--n-samples-per-prompt`: Slime trains on groups of that size only, and another one stops here.

Slime calls this with rollout_id 0, 1, 2, …, trains, and saves checkpoints of rollout_id. Started
from checkpoint T it calls first with T + 1: then what was acked with a later step than T goes back
to pending/, so that each sample is trained on once. With one exception: groups that were acked and
then lay in the buffer when the trainer died. Choose the daemon's `--batch-size` so that it divides
`rollout_batch_size`: then none is left over in the buffer between two calls.

`args` may have: `spool` (instead of SPOOL), `spool_consumer` (its name, "slime"), `spool_timeout`
(seconds, 600), `spool_max_staleness` (weight versions behind rollout_id; default: all are fine).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol

from spoold import Batch, Consumer

__all__ = ["generate_rollout", "to_sample"]

log = logging.getLogger(__name__)

Row = dict[str, Any]


class DataBuffer(Protocol):
    """What is needed of Slime's RolloutDataSourceWithBuffer."""

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Put groups at the end."""

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Take so many groups from the beginning."""

    def get_buffer_length(self) -> int:
        """How many groups there are."""


class MaskGenerator(Protocol):
    """What is needed of Slime's MultiTurnLossMaskGenerator."""

    def get_loss_mask(
        self, messages: list[dict[str, Any]], tools: Any = None
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of a conversation, and 1 for those that the model produced."""

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        """Return how many tokens there are from the first one that the model produced."""


# One of each a process: Slime calls `generate_rollout` in one actor, again and again.
_consumer: Consumer | None = None
_mask_generator: MaskGenerator | None = None


def generate_rollout(
    args: Any, rollout_id: int, data_buffer: DataBuffer, evaluation: bool = False
) -> list[list[Any]]:
    """Return `rollout_batch_size` groups, each of `n_samples_per_prompt` samples.

    Raises TimeoutError, saying what is waited for, when not enough came in time; what came is in
    the buffer, and the next call goes on from there.
    """
    if evaluation:
        raise NotImplementedError("a spool has no evaluation data; set another function for that")
    consumer = _consumer_of(args, rollout_id)
    staleness = getattr(args, "spool_max_staleness", None)
    if staleness is not None:
        consumer.min_weight_version = max(0, rollout_id - staleness)
    while data_buffer.get_buffer_length() < args.rollout_batch_size:
        batch = consumer.claim(timeout=float(getattr(args, "spool_timeout", 600.0)))
        if batch is None:
            have = data_buffer.get_buffer_length()
            raise TimeoutError(
                f"{have} of {args.rollout_batch_size} groups came: {consumer.reason()}"
            )
        data_buffer.add_samples(_groups(args, batch))
        batch.ack(step=rollout_id)
        log.info("rollout %d: %d samples of %s", rollout_id, len(batch), batch.id)
    left = data_buffer.get_buffer_length() - args.rollout_batch_size
    if left:
        log.warning(
            "%d groups that are acked stay in the buffer, which dies with this process: "
            "let spoold's --batch-size divide rollout_batch_size",
            left,
        )
    return data_buffer.get_samples(args.rollout_batch_size)


def _consumer_of(args: Any, rollout_id: int) -> Consumer:
    global _consumer
    if _consumer is None:
        spool = getattr(args, "spool", None) or os.environ["SPOOL"]
        consumer = Consumer(spool, name=getattr(args, "spool_consumer", "slime"))
        # The first call after a start: the checkpoint that was loaded is that of the one before.
        consumer.rewind(step=rollout_id - 1)
        _consumer = consumer
    return _consumer


def _groups(args: Any, batch: Batch) -> list[list[Any]]:
    generator = _mask_generator_of(args)
    groups = [[to_sample(row, generator) for row in group] for group in batch.groups()]
    for group in groups:
        if len(group) != args.n_samples_per_prompt:
            batch.reject("group-size")
            raise ValueError(
                f"{batch.id} has a group of {len(group)} samples, not {args.n_samples_per_prompt}: "
                f"run spoold with --group-size {args.n_samples_per_prompt}; it lies in rejected/"
            )
    return groups


def _mask_generator_of(args: Any) -> MaskGenerator:
    global _mask_generator
    if _mask_generator is None:
        from slime.utils.mask_utils import MultiTurnLossMaskGenerator
        from slime.utils.processing_utils import load_tokenizer

        tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        generator: MaskGenerator = MultiTurnLossMaskGenerator(
            tokenizer, tokenizer_type=args.loss_mask_type
        )
        _mask_generator = generator
    return _mask_generator


def to_sample(row: Row, generator: MaskGenerator) -> Any:
    """Return one sample of a batch as Slime's Sample."""
    from slime.utils.types import Sample

    extra = row["extra_info"]
    tokens, mask = generator.get_loss_mask(row["messages"])
    length = generator.get_response_lengths([mask])[0]
    truncated = extra["finish_reason"] == "length"
    return Sample(
        # A number that is the same whenever the sample comes.
        index=extra["step_pk"],
        group_index=None,
        prompt=_before_the_answer(row["messages"]),
        tokens=tokens,
        response_length=length,
        loss_mask=mask[len(mask) - length :],
        reward=row["reward"],
        weight_versions=[str(extra["weight_version"])],
        status=Sample.Status.TRUNCATED if truncated else Sample.Status.COMPLETED,
        metadata={"uid": row["uid"], "instance_id": row["instance_id"], **extra},
    )


def _before_the_answer(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    roles = [message.get("role") for message in messages]
    end = roles.index("assistant") if "assistant" in roles else len(roles)
    return list(messages[:end])
