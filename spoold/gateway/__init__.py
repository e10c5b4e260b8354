"""A spool for trainers that fetch over HTTP, as the clients of SAfactory's buffer server do.

    POST /get_rollout_data   {} or {"max_groups": n}        a batch, the same one until it is acked
    POST /ack_rollout_data   {"batch_id": "…", "step": n}   step may be left out
    POST /rewind             {"step": n}                    after loading the checkpoint of step n
    POST /start_rollout      what such clients send         answered; nothing is started
    GET  /health, /openapi.json

It is one consumer of the spool, in one process, and holds one batch at a time. Whatever claims,
acks or moves runs in one thread, in the order in which it was asked for; the event loop talks.
When a batch has been sent, that thread reads and checks the next one, which stays in pending/ for
all: a get that finds it still there claims it and sends it without reading it again. An ack waits
for that at most once. Up to 8 MiB of one batch are kept in memory, whatever clients do.

A get waits up to two seconds for a batch; then, and when the spool cannot be used, it is answered
with `"success": false` and the reason: the clients sleep and ask again, while an error would make
them drop what they fetched before. A batch is answered whole, whatever `max_groups` says, because
it is acked whole; its lines are sent as they lie on disk. An ack is right wherever its batch lies
by then in this consumer's folder, in pending/ (the gateway was restarted, the daemon gave it back)
or in acked/; 409 says that somebody else has it, 404 that nobody knows it, and 503 that the same
ack may succeed later.

With `ack = on-next-get`, for clients that never ack, a get acks the batch before it, if that was
sent whole and no client has started since. What is not promised then: the last batch may come twice
where the client or the gateway dies, or is stopped; and it is lost where a client dies with it and
the next one does not say /start_rollout.
"""

from __future__ import annotations

from spoold.gateway.server import serve

__all__ = ["serve"]
