"""What no gateway can beat: answers prepared beforehand, one connection, bare renames and fsyncs.

    python -m tests.benchmarks.bare_server RUN_DIR      prints its URL

It parses nothing and checks nothing: to a request for a batch it sends the next answer, to an ack
it moves the file and syncs both folders.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

GET, ACK = b"POST /get_rollout_data", b"POST /ack_rollout_data"


def prepared(path: Path) -> bytes:
    """Return the whole answer that carries a batch."""
    lines = path.read_bytes()[:-1].replace(b"\n", b",")
    meta = b'{"batch_id":"' + path.stem.encode() + b'"}'
    return answer(b'{"success":true,"data":{"data":[' + lines + b'],"meta_info":' + meta + b"}}")


def answer(body: bytes) -> bytes:
    """Return a body with the headers that it cannot do without."""
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def serve(run: Path) -> None:
    """Serve one client until it goes."""
    paths = sorted((run / "pending").iterdir())
    answers = [prepared(path) for path in paths]
    folders = [os.open(run / name, os.O_RDONLY) for name in ("acked", "inflight")]
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"serving url=http://127.0.0.1:{listening.getsockname()[1]} ", flush=True)
    connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    heard, sent = b"", 0
    while piece := connection.recv(65536):
        heard += piece
        if not heard.endswith(b"}"):
            continue
        if heard.startswith(GET):
            paths[sent].rename(run / "inflight" / paths[sent].name)
            connection.sendall(answers[sent])
            sent += 1
        else:
            assert heard.startswith(ACK)
            (run / "inflight" / paths[sent - 1].name).rename(run / "acked" / paths[sent - 1].name)
            for folder in folders:
                os.fsync(folder)
            connection.sendall(answer(b"{}"))
        heard = b""


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
