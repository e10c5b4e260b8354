"""Gateways, in a thread of this process or as `spoold serve`, and plain HTTP to talk to them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spoold.consumer import Consumer
from spoold.model import AckWhen
from tests.support.needs import needs
from tests.support.processes import Players, until

with contextlib.suppress(ImportError):
    from spoold.gateway.app import Gateway
    from spoold.gateway.desk import Desk
    from spoold.gateway.server import Server, listen


def needs_http() -> None:
    """Skip where starlette and uvicorn are not installed."""
    needs("Gateway" in globals(), "spoold serve needs pip install '.[http]'")


@dataclass(frozen=True)
class Reply:
    """What came back: status, headers (lower case) and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def batch_id(self) -> str:
        """The batch in an answer to a get, "" for none."""
        return self.json["data"]["meta_info"]["batch_id"]

    @property
    def uids(self) -> list[str]:
        return [item["uid"] for item in self.json["data"]["data"]]


def ask(
    url: str,
    path: str,
    facts: object = None,
    *,
    method: str = "POST",
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
    timeout_seconds: float = 30.0,
) -> Reply:
    """Ask once, on a connection of its own. Raises OSError or HTTPException where none answers."""
    if body is None and facts is not None:
        body = json.dumps(facts).encode()
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout_seconds)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers or {})
        reply = connection.getresponse()
        names = {name.lower(): value for name, value in reply.getheaders()}
        return Reply(reply.status, names, reply.read())


class Client:
    """The requests of a gateway's clients, by name."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, **facts: object) -> Reply:
        return ask(self.url, "/get_rollout_data", facts)

    def ack(self, batch_id: str, **facts: object) -> Reply:
        return ask(self.url, "/ack_rollout_data", {"batch_id": batch_id, **facts})

    def start(self, **facts: object) -> Reply:
        return ask(self.url, "/start_rollout", facts)

    def rewind(self, **facts: object) -> Reply:
        return ask(self.url, "/rewind", facts)

    def health(self, **options: Any) -> Reply:
        return ask(self.url, "/health", method="GET", **options)


@contextlib.contextmanager
def serving(
    run_dir: Path | str,
    *,
    ack: str = "explicit",
    name: str = "gateway",
    token: str = "",
    releases: bool = True,
) -> Iterator[Client]:
    """Serve with the real server, in a thread of this process.

    Without `releases` it ends as a killed one does: what it held stays where it is.
    """
    needs_http()
    sockets = listen("127.0.0.1", 0, is_guarded=False)
    disk = ThreadPoolExecutor(1)
    consumer = Consumer(run_dir, name=name)
    disk.submit(consumer.__enter__).result()
    desk = Desk(consumer, ack=AckWhen(ack))
    is_up, loops = threading.Event(), []

    async def serve() -> None:
        gateway = Gateway(desk, thread=disk, token=token)
        server = Server(gateway, is_up.set)
        loops.append((asyncio.get_running_loop(), gateway, server))
        await server.serve(sockets)

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            is_up.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert is_up.wait(30)
        yield Client(f"http://127.0.0.1:{sockets[0].getsockname()[1]}")
    finally:
        ((loop, gateway, server),) = loops
        gateway.stop()
        consumer.stop()
        with contextlib.suppress(RuntimeError):  # it has ended already
            loop.call_soon_threadsafe(server.stop)
        thread.join(60)
        assert not thread.is_alive()
        if releases:
            disk.submit(desk.release).result()
        disk.submit(consumer.close).result()
        disk.shutdown()


def serve_command(run_dir: Path | str, *options: str) -> list[str]:
    """Return the command line of a gateway on a port that is free."""
    return [sys.executable, "-m", "spoold", "serve", str(run_dir), "--port=0", *options]


def url_of(players: Players, name: str = "gateway", *, life: int = 1) -> str:
    """Wait until a gateway serves for the nth time; return where."""
    found: list[str] = []

    def is_serving() -> bool:
        players.check(name)
        found[:] = re.findall(r"serving url=\"?(http://\S+?)[\s\"]", players.log(name).read_text())
        return len(found) >= life

    until(is_serving, f"{name} to serve")
    return found[life - 1]
