"""The gateway over HTTP: which request does what, and how it is answered."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, Final, ParamSpec, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from spoold.errors import BatchLost, ConfigError, SpooldError, UnknownBatch
from spoold.gateway.answers import envelope, nothing
from spoold.gateway.desk import Answer, Desk, Nothing
from spoold.gateway.requests import (
    MAX_STEP,
    Refused,
    is_allowed,
    read_facts,
    text,
    whole_number,
)
from spoold.gateway.schema import OPENAPI

__all__ = ["Gateway"]

log = logging.getLogger("spoold.gateway")

# A client that hears "nothing" sleeps three seconds: a batch that comes meanwhile waits for that.
WAIT_SECONDS: Final = 2.0
# How long the thread of the disk is taken up by waiting: others, with an ack, wait as long.
LOOK_SECONDS: Final = 0.2
SMALL_BODY_BYTES: Final = 64 << 10
# A client that starts anew sends the ids of all groups that it ever had: some 40 bytes each.
START_BODY_BYTES: Final = 16 << 20

_Facts = dict[str, Any]
_Handler = Callable[[Request, _Facts], Awaitable[Response]]
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Gateway:
    """The application. All calls of the desk run in `thread`, one after the other."""

    def __init__(self, desk: Desk, *, thread: Executor, token: str = "") -> None:
        self._desk = desk
        self._thread = thread
        self._token = token
        self._is_stopping = False
        self._reading_ahead: asyncio.Future[None] | None = None  # nobody waits for it
        # One request waits for a batch; the others wait for their turn, no longer than they would.
        self._turn = asyncio.Lock()
        # The only bodies that are not small, two in memory at a time.
        self._start_turn = asyncio.Semaphore(2)
        post = ["POST"]
        self.app = Starlette(
            routes=[
                Route("/get_rollout_data", self._guarded(self._get), methods=post),
                Route("/ack_rollout_data", self._guarded(self._ack), methods=post),
                Route("/rewind", self._guarded(self._rewind), methods=post),
                Route("/start_rollout", self._start, methods=post),
                Route("/health", self._health, methods=["GET"]),
                Route("/openapi.json", _openapi, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _refused_by_router, Exception: _bug},
        )

    def stop(self) -> None:
        """Answer every get with nothing from now on."""
        self._is_stopping = True

    def call(
        self, act: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
    ) -> asyncio.Future[_R]:
        """Do something in the thread of the disk, after all that was asked for before."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._thread, lambda: act(*args, **kwargs))

    # --- the requests -------------------------------------------------------------------------

    async def _get(self, request: Request, facts: _Facts) -> Response:
        most = whole_number(facts, "max_groups", least=1, most=2**63 - 1)
        outcome = await self._next(request)
        if isinstance(outcome, Nothing):
            if self._is_stopping:
                reason = "the gateway is stopping"
            else:
                reason = outcome.reason or await self.call(self._desk.reason)
            return Response(nothing(reason), media_type="application/json")
        words, groups = outcome.words, len(outcome.held.summary.groups)
        if most is not None and groups > most:
            words += f"; {groups} groups, not {most}: a batch is answered and acked whole"
        return _BatchResponse(outcome, words, then=self._read_ahead)

    def _read_ahead(self) -> None:
        """Have the next batch read, while the client is busy with this one."""
        if not self._is_stopping:
            self._reading_ahead = self.call(self._desk.read_ahead)

    async def _next(self, request: Request) -> Answer | Nothing:
        give_up = time.monotonic() + WAIT_SECONDS
        has_turn = True
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            has_turn = False
        try:
            while not self._is_stopping:
                left = give_up - time.monotonic()
                wait = min(left, LOOK_SECONDS) if has_turn else 0.0
                outcome = await self.call(self._desk.hand_out, max(wait, 0.0))
                if isinstance(outcome, Answer) or outcome.reason or left <= 0 or not has_turn:
                    return outcome
                if await request.is_disconnected():
                    break
            return Nothing()
        finally:
            if has_turn:
                self._turn.release()

    async def _ack(self, _: Request, facts: _Facts) -> Response:
        batch_id = text(facts, "batch_id")
        step = whole_number(facts, "step", least=0, most=MAX_STEP)
        message = await self.call(self._desk.ack, batch_id, step)
        return _json(200, success=True, message=message, batch_id=batch_id)

    async def _rewind(self, _: Request, facts: _Facts) -> Response:
        step = whole_number(facts, "step", least=-1, most=MAX_STEP)
        if step is None:
            raise Refused(400, '"step" is the step of the checkpoint that was loaded; -1 for none')
        rewound = await self.call(self._desk.rewind, step)
        message = f"{len(rewound)} batches acked after step {step} are pending again"
        return _json(200, success=True, message=message, batch_ids=rewound)

    async def _start(self, request: Request) -> Response:
        async with self._start_turn:
            return await self._guarded(self._started, START_BODY_BYTES)(request)

    async def _started(self, _: Request, facts: _Facts) -> Response:
        size = facts.get("num_repeat_per_sample")
        if isinstance(size, str) and size.isdecimal() and len(size) < 10:
            facts["num_repeat_per_sample"] = int(size)
        group_size = whole_number(facts, "num_repeat_per_sample", least=1, most=10**9)
        words = ["the daemon fills the spool; nothing was started and nothing passed over"]
        skipped = facts.get("skip_instance_ids")
        if isinstance(skipped, list) and skipped:
            words.append(f"{len(skipped)} skip_instance_ids are ignored: acks say what is done")
        if facts.get("restart_training") is True:
            words.append("restart_training is ignored: /rewind goes back to a checkpoint")
        difference = await self.call(self._desk.start, group_size)
        if difference:
            words.insert(0, f"WARNING: {difference}")
        log.info("client starts", extra={"fields": {"group_size": group_size or "not told"}})
        return _json(200, success=True, message="; ".join(words))

    async def _health(self, request: Request) -> Response:
        problem = await self.call(self._desk.check)
        facts: _Facts = {"status": "unwell" if problem else "healthy"}
        if is_allowed(request.headers.get("authorization", ""), self._token):
            facts["message"] = problem or self._desk.sentence
        return _json(503 if problem else 200, **facts)

    def _guarded(
        self, handler: _Handler, limit_bytes: int = SMALL_BODY_BYTES
    ) -> Callable[[Request], Awaitable[Response]]:
        """Let in who has the token, read the body, and put every error into words."""

        async def endpoint(request: Request) -> Response:
            if not is_allowed(request.headers.get("authorization", ""), self._token):
                return _refusal(401, "the token is missing or another: Authorization: Bearer …")
            try:
                return await handler(request, await read_facts(request, limit_bytes))
            except Refused as refused:
                return _refusal(refused.status, refused.message)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody hears it
            except SpooldError as error:
                return _failed(error)

        return endpoint


class _BatchResponse(Response):
    """A batch, sent piece by piece, as fast as the client reads. `then` is called at its end."""

    def __init__(self, answer: Answer, words: str, then: Callable[[], None]) -> None:
        self._answer = answer
        self._then = then
        self._envelope = envelope(answer.held.summary, words)
        length = str(self._envelope.size_bytes)
        super().__init__(media_type="application/json", headers={"content-length": length})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all; the batch counts as answered only if the client was there to the end."""
        del scope
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await self._send(send, gone)
        finally:
            gone.cancel()
            self._answer.close()
            self._then()

    async def _send(self, send: Send, gone: asyncio.Task[None]) -> None:
        held = self._answer.held

        async def body(piece: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": piece, "more_body": more})

        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        remaining = self._answer.pieces(self._envelope)
        following = functools.partial(next, remaining, b"")
        is_in_memory = self._answer.is_in_memory
        left = self._envelope.size_bytes
        while left and not gone.done():
            problem = "its file is shorter than it was"
            try:
                piece = following() if is_in_memory else await asyncio.to_thread(following)
            except OSError as error:
                piece, problem = b"", str(error)
            if not piece:
                fields = {"batch": held.batch.id, "problem": problem}
                log.warning("batch cannot be read", extra={"fields": fields})
                return  # the server ends the connection
            left -= len(piece)
            await body(piece)
        await body(b"")  # waits until the server has little left to send
        # An end of the connection that was noticed by now is known after one turn of the loop. The
        # next get of a client that has it all comes later than that.
        await asyncio.sleep(0)
        if not gone.done():
            held.answered += 1
            await body(b"", more=False)


async def _disconnected(receive: Receive) -> None:
    with suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass


async def _openapi(_: Request) -> Response:
    return _json(200, **OPENAPI)


async def _refused_by_router(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refusal = _refusal(error.status_code, f"{error.detail.lower()}: see /openapi.json")
    refusal.headers.update(error.headers or {})
    return refusal


async def _bug(_: Request, error: Exception) -> Response:
    # The server logs it, with the traceback.
    return _refusal(500, f"bug: {type(error).__name__}; the gateway's log has more")


def _failed(error: SpooldError) -> Response:
    if isinstance(error, UnknownBatch):
        return _refusal(404, str(error))
    if isinstance(error, BatchLost):
        return _refusal(409, str(error))
    if isinstance(error, ConfigError):
        return _refusal(400, str(error))
    log.warning("refused", extra={"fields": {"error": str(error)}})
    return _refusal(503, str(error))


def _refusal(status: int, message: str) -> Response:
    # What is left of a body that was not read to its end must not be taken for the next request.
    closing = status in (401, 408, 413)
    refusal = _json(status, success=False, message=message, retryable=status in (408, 503))
    if status == 401:
        refusal.headers["www-authenticate"] = 'Basic realm="spoold"'
    if closing:
        refusal.headers["connection"] = "close"
    return refusal


def _json(status: int, /, **facts: Any) -> Response:
    return Response(orjson.dumps(facts), status_code=status, media_type="application/json")
