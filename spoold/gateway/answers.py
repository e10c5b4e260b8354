"""The answer that carries a batch: its lines as they lie on disk, and what is said of them. Pure.

    {"success": true, "message": "…", "data": {"data": [line, line, …], "meta_info": {…}}}

A line of a batch is the JSON of a sample, so a list of them is the file with commas for line ends:
no sample is taken apart and put together again, and a number of any size arrives as it was written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import orjson

__all__ = [
    "PIECE_BYTES",
    "Envelope",
    "Summary",
    "envelope",
    "from_file",
    "from_memory",
    "join",
    "nothing",
    "pieces",
    "summarize",
]

# How much is read from the disk, or handed to a connection, at a time.
PIECE_BYTES: Final = 512 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a batch holds. `groups` are the instance ids in the order of the file.

    `group_sizes`: the numbers of samples that groups have, each once, ascending.
    """

    batch_id: str
    size_bytes: int
    samples: int
    groups: tuple[str, ...]
    group_sizes: tuple[int, ...]
    avg_reward: float
    avg_weight_version: float
    max_weight_version: int

    def meta_info(self) -> dict[str, Any]:
        """Return what clients read: finite numbers, texts, and no null."""
        return {
            "total_samples": self.samples,
            "avg_reward": self.avg_reward,
            "finished_groups": self.groups,
            "avg_weight_version": self.avg_weight_version,
            "max_weight_version": self.max_weight_version,
            "batch_id": self.batch_id,
        }


_NOTHING: Final = Summary(
    batch_id="",
    size_bytes=0,
    samples=0,
    groups=(),
    group_sizes=(),
    avg_reward=0.0,
    avg_weight_version=0.0,
    max_weight_version=0,
)


def summarize(batch_id: str, lines: Iterable[bytes]) -> Summary:
    """Return what the lines of a batch hold, one line in memory.

    Raises ValueError for lines that cannot be put into a list, or lack what clients read.
    """
    size_bytes, rewards, versions = 0, [], []
    groups: Counter[str] = Counter()
    for number, line in enumerate(lines, start=1):
        size_bytes += len(line)
        try:
            group, reward, version = _facts(line)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} is no sample") from error
        groups[group] += 1
        rewards.append(reward)
        versions.append(version)
    if not rewards:
        raise ValueError("it is empty")
    number = len(rewards)
    return Summary(
        batch_id=batch_id,
        size_bytes=size_bytes,
        samples=number,
        groups=tuple(groups),
        group_sizes=tuple(sorted(set(groups.values()))),
        # Divided first: the sum of two finite numbers need not be finite.
        avg_reward=math.fsum(reward / number for reward in rewards),
        avg_weight_version=sum(versions) / number,
        max_weight_version=max(versions),
    )


def _facts(line: bytes) -> tuple[str, float, int]:
    """Return instance id, reward and weight version. Raises ValueError, KeyError or TypeError."""
    if not line.endswith(b"}\n"):
        raise ValueError("not one object on a line of its own")
    try:
        outer = _outer(line)
    except ValueError:  # not as spoold writes it: a space, another order
        outer = orjson.loads(line)
    group, reward = outer["instance_id"], outer["reward"]
    version = outer["extra_info"]["weight_version"]
    if type(group) is not str or type(version) is not int or type(reward) not in (int, float):
        raise TypeError(line[:100])
    if not math.isfinite(reward):
        raise ValueError(reward)
    return group, float(reward), version


def _outer(line: bytes) -> dict[str, Any]:
    """Return a sample without its messages, which are nearly all of it, and are not looked at.

    Sure, because a quotation mark inside a text is escaped: these bytes are in no text. In the
    messages there may be a "reward", so it is the last one that counts; what follows that must
    end the sample. Raises ValueError where the keys are not in the order in which spoold writes
    them.
    """
    head = orjson.loads(line[: line.index(b',"messages":')] + b"}")
    tail = orjson.loads(b"{" + line[line.rindex(b',"reward":') + 1 :])
    if "extra_info" not in tail or "instance_id" not in head:
        raise ValueError("not in this order")
    return {**head, **tail}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What stands before and after the lines. `size_bytes` is of the whole answer."""

    head: bytes
    tail: bytes
    size_bytes: int
    lines_bytes: int


def envelope(summary: Summary, message: str) -> Envelope:
    """Return the envelope of a batch."""
    head = b'{"success":true,"message":' + orjson.dumps(message) + b',"data":{"data":['
    tail = b'],"meta_info":' + orjson.dumps(summary.meta_info()) + b"}}"
    lines_bytes = summary.size_bytes - 1  # all but the last line end
    return Envelope(head, tail, len(head) + lines_bytes + len(tail), lines_bytes)


def join(lines: memoryview) -> Iterator[bytes]:
    """Yield each line; by then a comma stands for its end, as between the brackets of a list."""
    text, start = lines.obj, 0
    assert isinstance(text, bytearray)
    while (end := text.find(b"\n", start, len(lines))) >= 0:
        yield bytes(lines[start : end + 1])
        lines[end] = 0x2C
        start = end + 1
    if start < len(lines):
        yield bytes(lines[start:])


def from_memory(lines: memoryview) -> Iterator[memoryview]:
    """Yield joined lines, all but the last comma, a piece at a time."""
    whole = lines[:-1]
    return (whole[at : at + PIECE_BYTES] for at in range(0, len(whole), PIECE_BYTES))


def from_file(around: Envelope, file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, joined, a piece at a time. Ends early where it ends too early."""
    left = around.lines_bytes
    while left > 0 and (piece := file.read(min(PIECE_BYTES, left))):
        left -= len(piece)
        yield piece.replace(b"\n", b",")


def pieces(around: Envelope, lines: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Yield the answer, a piece at a time. Ends early where the lines do."""
    left, before = around.lines_bytes, around.head
    for piece in lines:
        left -= len(piece)
        # Few and large: each one wakes the client.
        yield b"".join((before, piece, b"" if left else around.tail))
        before = b""


def nothing(message: str) -> bytes:
    """Return the answer to a get when there is no batch: the client sleeps and asks again."""
    data = {"data": [], "meta_info": _NOTHING.meta_info()}
    return orjson.dumps({"success": False, "message": message, "data": data})
