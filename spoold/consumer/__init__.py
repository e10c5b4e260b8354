"""The trainer's side: claim batches, read them, acknowledge them.

    with Consumer("/var/lib/spoold/exp7", name="trainer-0") as consumer:
        consumer.rewind(step=checkpoint_step)
        for batch in consumer:
            train(batch.samples())
            batch.ack(step=step)

What is where after a trainer ends, however it ends (return, exception, Ctrl-C, SIGTERM, SIGKILL,
`os._exit`, power cut): a batch whose ack() returned lies in acked/; one that was handed out and not
acked lies in inflight/<name>/, and the next process of that name gets it first, as its next try.
If none comes, the daemon gives it back to pending/ after `requeue_seconds`.
"""

from __future__ import annotations

from spoold.consumer.batch import Batch
from spoold.consumer.claims import Consumer

__all__ = ["Batch", "Consumer"]
