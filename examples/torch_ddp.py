"""Ranks that share each batch of a spool: rank 0 claims, all train on their part, rank 0 acks.

    torchrun --nproc-per-node 2 examples/torch_ddp.py RUN_DIR CHECKPOINT

Every rank gets the same number of samples from `shard`, so that the collectives of DDP match; whole
groups go to one rank. One ack after all ranks have taken the optimizer step, then the checkpoint:
with the rewind at the start each sample is trained on once, whichever rank dies, and when. All
ranks see the run directory; ranks on another host need the samples sent to them instead.

The model learns nothing of use: a reward from the number of messages.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from spoold import Batch, Consumer

IDLE_SECONDS = 3.0


def main(run_dir: str, checkpoint: Path) -> None:
    """Train until no batch comes for three seconds."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        step = saved["step"]
        model.load_state_dict(saved["model"])
    consumer = Consumer(run_dir, name="ddp") if rank == 0 else None
    if consumer is not None:
        consumer.rewind(step=step)
    try:
        while True:
            claimed = consumer.claim(timeout=IDLE_SECONDS) if consumer is not None else None
            told = [claimed.path if claimed is not None else None]
            dist.broadcast_object_list(told, src=0)
            if told[0] is None:
                break
            samples = Batch.open(told[0]).shard(rank, world_size)
            inputs = torch.tensor([[float(len(sample["messages"]))] for sample in samples])
            rewards = torch.tensor([[float(sample["reward"])] for sample in samples])
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), rewards)
            loss.backward()
            optimizer.step()
            step += 1
            dist.barrier()  # all have taken the step
            print(f"step {step} rank {rank}: {len(samples)} samples", flush=True)
            if claimed is not None:
                claimed.ack(step=step)
                _save(checkpoint, {"step": step, "model": model.state_dict()})
    finally:
        if consumer is not None:
            consumer.close()
        dist.destroy_process_group()


def _save(path: Path, state: dict[str, object]) -> None:
    fresh = path.with_suffix(".new")
    torch.save(state, fresh)
    os.replace(fresh, path)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
