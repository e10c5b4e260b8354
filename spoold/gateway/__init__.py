"""A spool for trainers that fetch over HTTP, as the clients of SAfactory's buffer server do.

    POST /get_rollout_data   {} or {"max_groups": n}        a batch, the same one until it is acked
    POST /ack_rollout_data   {"batch_id": "…", "step": n}   step may be left out
    POST /rewind             {"step": n}                    after loading the checkpoint of step n
    POST /start_rollout      what such clients send         answered; nothing is started
    GET  /health, /openapi.json

It is one consumer of the spool, in one process, and holds one batch at a time. All that claims,
acks and moves runs in one thread, in the order in which it was asked for; the event loop only talks.

A get waits up to two seconds for a batch; then, and when the spool cannot be used, it is answered
with `"success": false` and the reason: the clients sleep and ask again, while an error would make
them drop what they fetched before. A batch is answered whole, whatever `max_groups` says, because
it is acked whole; its lines are sent as they lie on disk. An ack is right wherever its batch lies
by then in this consumer's folder, in pending/ (the gateway was restarted, the daemon gave it back)
or in acked/; 409 says that somebody else has it, 404 that nobody knows it, and 503 that the same
ack may succeed later.

With `ack = on-next-get`, for clients that never ack, a get acks the batch before it, if that was
sent whole. What is not promised then: a client that dies with a batch that it did not train on yet
has lost that one; a gateway that dies, or is stopped, between two gets answers the last one anew.
"""

from __future__ import annotations

from spoold.gateway.server import serve

__all__ = ["serve"]
