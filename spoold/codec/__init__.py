"""Rows to sample lines, lines to batches, and back. Pure."""

from __future__ import annotations

from spoold.codec.batch import build_batch, environment_refs, parse_samples
from spoold.codec.lines import encode
from spoold.codec.rows import choose, is_trajectory, samples_of

__all__ = [
    "build_batch",
    "choose",
    "encode",
    "environment_refs",
    "is_trajectory",
    "parse_samples",
    "samples_of",
]
