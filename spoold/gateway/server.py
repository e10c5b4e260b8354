"""The process around the gateway: where it listens, how it starts and ends, and who is told."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from spoold import log as logs
from spoold.consumer import Consumer
from spoold.errors import AddressInUse, ConfigError
from spoold.gateway.app import Gateway
from spoold.gateway.desk import Desk
from spoold.layout import RunDir
from spoold.model import AckWhen
from spoold.systemd import Service

__all__ = ["listen", "serve"]

log = logging.getLogger("spoold.gateway")

MAX_CONNECTIONS: Final = 256
# Twice this long without a whole request: the connection is ended.
IDLE_SECONDS: Final = 15.0
# A batch that was not fetched by then will not be.
ANSWER_SECONDS: Final = 600.0
# At a stop, answers under way have this long.
GRACE_SECONDS: Final = 10.0
BEAT_SECONDS: Final = 2.0


def serve(
    run_dir: str,
    *,
    name: str = "gateway",
    host: str = "127.0.0.1",
    port: int = 8889,
    ack: AckWhen = AckWhen.EXPLICIT,
    token: str = "",
    service: Service | None = None,
) -> None:
    """Serve a run directory until SIGTERM or SIGINT; then give back what is held, and return.

    Raises ConfigError where there is no such run directory, the address is none of this host's, or
    others can reach it and there is no token; AddressInUse; ConsumerBusy where another process has
    this consumer's name; SpoolWriteError where what was held could not be given back.
    """
    run = RunDir(os.path.abspath(run_dir))
    if not os.path.isdir(run.pending):
        raise ConfigError(
            f"{run.root} is no run directory: it has no pending/",
            hint=f"`spoold run --run-dir {run.root} …` makes one",
        )
    service = service or Service()
    logs.lend_to("uvicorn", "asyncio")
    sockets = listen(host, port, is_guarded=bool(token))
    thread = ThreadPoolExecutor(1, thread_name_prefix="disk")
    consumer = Consumer(run.root, name=name)
    try:
        thread.submit(consumer.__enter__).result()
        urls = " ".join(_url(each) for each in sockets)
        fields = {"url": urls, "run_dir": run.root, "consumer": name, "ack": ack.value}
        desk = Desk(consumer, ack=ack)
        asyncio.run(_serve(desk, consumer, thread, sockets, token, service, fields))
    finally:
        for each in sockets:
            each.close()
        thread.submit(consumer.close).result()
        thread.shutdown()


async def _serve(
    desk: Desk,
    consumer: Consumer,
    thread: ThreadPoolExecutor,
    sockets: list[socket.socket],
    token: str,
    service: Service,
    fields: Mapping[str, object],
) -> None:
    gateway = Gateway(desk, thread=thread, token=token)

    def ready() -> None:
        log.info("serving", extra={"fields": fields})
        service.status("serving")
        service.ready()

    server = Server(gateway, ready)
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        log.info("stopping", extra={"fields": {"signal": signal.Signals(number).name}})
        service.stopping()
        gateway.stop()
        consumer.stop()
        server.stop()

    with _signals(loop, stop):
        serving = asyncio.create_task(server.serve(sockets))
        while not serving.done():
            await asyncio.wait({serving}, timeout=service.shorten(BEAT_SECONDS))
            # Progress is that of the thread of the disk, too.
            await gateway.call(service.progress)
            service.status(f"serving {fields['url']}; {desk.sentence}")
        await serving
        await gateway.call(desk.release)


class Server(uvicorn.Server):
    """The HTTP server of a gateway. It leaves signals to others; `ready` is called when it listens.

    At a stop it takes no more connections, and ends those that are there after GRACE_SECONDS.
    """

    def __init__(self, gateway: Gateway, ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                gateway.app,
                http=_Connection,
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                limit_concurrency=MAX_CONNECTIONS,
            )
        )
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them."""
        yield

    def stop(self) -> None:
        """End, soon. Called from the loop."""
        self.should_exit = True
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._abort)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class _Connection(H11Protocol):
    """A connection that does not last for ever without a request, or with one answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to watch it."""
        super().connection_made(transport)
        self._watched: Any = None
        self._watched_since = self.loop.time()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Watch it no more: a timer that is set keeps it, and all that it received."""
        self._watching.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        now, cycle = self.loop.time(), self.cycle
        if cycle is not self._watched:
            self._watched, self._watched_since = cycle, now
        is_idle = cycle is None or cycle.response_complete
        if now - self._watched_since >= (2 * IDLE_SECONDS if is_idle else ANSWER_SECONDS):
            self.transport.abort()
        else:
            self._watching = self.loop.call_later(IDLE_SECONDS, self._watch)


def listen(host: str, port: int, *, is_guarded: bool) -> list[socket.socket]:
    """Return sockets bound to all addresses of a host name; without a token only to loopback.

    Raises ConfigError, or AddressInUse.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}: {error.strerror}", hint="--host is an address of this host"
        ) from error
    if not is_guarded and not all(_is_loopback(str(each[4][0])) for each in found):
        raise ConfigError(
            f"others can reach {host}, and no token is set",
            hint="give --token-file or set SPOOLD_TOKEN, or listen on 127.0.0.1",
        )
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, kind, protocol, _, address in found if port else found[:1]:
            bound = socket.socket(family, kind, protocol)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                bound.bind(address)
                bound.listen(MAX_CONNECTIONS)
            except OSError as error:
                bound.close()
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                missing = error  # localhost has an address that this host has not (::1)
            else:
                sockets.append(bound)
        if not sockets and missing is not None:
            raise missing
    except OSError as error:
        for each in sockets:
            each.close()
        what = f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0).lower()}"
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                what, hint="choose another --port, or stop what listens there"
            ) from error
        raise ConfigError(what, hint="--host is an address of this host") from error
    return sockets


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, stop: Callable[[int], None]) -> Iterator[None]:
    """Call `stop` at SIGTERM, SIGINT, and a SIGHUP that is not ignored (`nohup`)."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
