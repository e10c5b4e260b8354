"""Sample lines to the bytes of a batch, and back. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import orjson

from spoold.errors import BatchCorrupt
from spoold.layout import BatchName
from spoold.model import Ref, Sample

__all__ = ["build_batch", "environment_refs", "in_order", "name_batch", "parse_samples"]

_JOIN_BYTES: Final = 8 << 20
_TAIL: Final = b',"extra_info":{'
_REWARD: Final = b',"reward":'
# Every digit to "0": finding a run of digits like this costs a tenth of a regular expression.
_DIGITS: Final = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER: Final = b"0" * 19


def build_batch(
    seq: int, samples: Iterable[Sample]
) -> tuple[BatchName, Sequence[bytes | memoryview]]:
    """Return the name and the bytes of a batch: by environment, then step_pk. Never empty.

    The bytes come in one piece, or, where a second copy of them would be felt, in many.
    """
    ordered = in_order(samples)
    pieces = [piece for sample in ordered for piece in sample.pieces]
    if sum(sample.size_bytes for sample in ordered) <= _JOIN_BYTES:
        pieces = [b"".join(pieces)]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return name_batch(seq, ordered, digest.hexdigest()[:12]), pieces


def in_order(samples: Iterable[Sample]) -> list[Sample]:
    """Return samples as they follow one another in a batch."""
    return sorted(samples, key=lambda sample: (sample.environment, sample.step_pk))


def name_batch(seq: int, samples: Sequence[Sample], digest: str) -> BatchName:
    """Return the name of a batch of these samples."""
    assert samples, "an empty batch is never published"
    versions = [s.weight_version for s in samples if s.weight_version is not None] or [0]
    return BatchName(
        seq=seq, samples=len(samples), lo=min(versions), hi=max(versions), digest=digest
    )


def environment_refs(data: bytes) -> list[Ref]:
    """Return, line by line, which environment each sample of a batch is of.

    Reads the end of each line only. Does not check the messages: the digest in the name does.
    Raises BatchCorrupt where a line is no sample.
    """
    if not data.endswith(b"\n"):
        raise BatchCorrupt("a batch ends with a newline, this one does not")
    refs = []
    start, number = 0, 1
    while start < len(data):
        end = data.index(b"\n", start)
        try:
            refs.append(_ref(data, start, end))
        except (ValueError, KeyError, TypeError) as error:
            raise BatchCorrupt(f"line {number} is no sample") from error
        start, number = end + 1, number + 1
    return refs


def _ref(data: bytes, start: int, end: int) -> Ref:
    # Exact: in a string the quote would be escaped, and what follows must be one object and the
    # line's last brace, so this is the key of the line itself and not of something inside it.
    at = data.rfind(_TAIL, start, end)
    if at >= 0 and data[end - 1] == 0x7D:
        reward_at = data.rfind(_REWARD, start, at)
        try:
            reward = float(data[reward_at + len(_REWARD) : at]) if reward_at >= 0 else None
            facts = orjson.loads(data[at + len(_TAIL) - 1 : end - 1])
        except ValueError:
            facts = reward = None
        if reward is not None:
            return _checked_ref(facts, reward)
    whole = orjson.loads(data[start:end])
    return _checked_ref(whole["extra_info"], whole["reward"])


def _checked_ref(facts: dict[str, Any], reward: float) -> Ref:
    ref = Ref(
        facts["environment"],
        facts["env_id"],
        facts["group_id"],
        facts["job_id"],
        facts["step_pk"],
        facts["weight_version"],
        float(reward),
    )
    if not all(map(isinstance, ref, _REF_TYPES)) or ref.environment < 1:
        raise ValueError("a value of the wrong type")
    return ref


_REF_TYPES: Final = (int, str, str, str, int, int, float)


def parse_samples(data: bytes) -> list[dict[str, Any]]:
    """Return the samples of a batch, integers of any size exact. Raises BatchCorrupt."""
    lines = data.split(b"\n")
    if lines.pop():
        raise BatchCorrupt("a batch ends with a newline, this one does not")
    samples = []
    for number, line in enumerate(lines, 1):
        exact = _LONG_NUMBER in line.translate(_DIGITS)
        try:
            sample = json.loads(line.decode()) if exact else orjson.loads(line)
        except (ValueError, RecursionError) as error:
            raise BatchCorrupt(f"line {number} is no sample: {error}") from error
        if not isinstance(sample, dict):
            raise BatchCorrupt(f"line {number} is no sample: not an object")
        samples.append(sample)
    return samples
