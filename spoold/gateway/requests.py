"""What clients ask for: bodies of bounded size in bounded time, the facts in them, the token."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from typing import Any, Final

import orjson
from starlette.requests import Request

__all__ = ["Refused", "is_allowed", "read_facts", "text", "whole_number"]

BODY_SECONDS: Final = 30.0
MAX_STEP: Final = 10**18 - 1


class Refused(Exception):
    """A request that is answered with an error: its status, and words for whoever sent it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def is_allowed(authorization: str, token: str) -> bool:
    """Whether an Authorization header carries the token; always, where there is none.

    As `Bearer TOKEN`, or as the password of Basic: what HTTP libraries make of a URL like
    http://spoold:TOKEN@host:8889, so that a client needs no change but its URL.
    """
    if not token:
        return True
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return False
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode(), token.encode())


async def read_facts(request: Request, limit_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a body; an empty body is an empty one.

    Raises Refused for one that is too large, too slow, or anything else.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > limit_bytes:
                    # No name for it here: with one, it and its traceback would hold each other,
                    # and the body, until the collector comes by.
                    raise _too_large(limit_bytes)
    except TimeoutError:
        raise Refused(408, f"the body did not come within {BODY_SECONDS:.0f} s") from None
    if not body.strip():
        return {}
    try:
        facts = orjson.loads(body)
    except ValueError as error:
        raise Refused(400, f"the body is no JSON: {error}") from None
    if not isinstance(facts, dict):
        raise Refused(400, "the body is no JSON object")
    return facts


def _too_large(limit_bytes: int) -> Refused:
    return Refused(413, f"the body is larger than {limit_bytes} bytes")


def whole_number(facts: dict[str, Any], name: str, *, least: int, most: int) -> int | None:
    """Return an integer that may be left out or null. Raises Refused for all else."""
    value = facts.get(name)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= most:
        raise Refused(400, f'"{name}" is an integer from {least} to {most}, or left out')
    return value


def text(facts: dict[str, Any], name: str) -> str:
    """Return a text that must be there. Raises Refused for all else."""
    value = facts.get(name)
    if not isinstance(value, str):
        raise Refused(400, f'"{name}" is missing, or no text')
    return value
