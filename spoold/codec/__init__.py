"""Rows to sample lines, lines to batches, and back. Pure."""

from __future__ import annotations

from spoold.codec.batch import build_batch, environment_refs, in_order, name_batch, parse_samples
from spoold.codec.lines import are_sound, encode
from spoold.codec.rows import choose, is_trajectory, samples_of

__all__ = [
    "are_sound",
    "build_batch",
    "choose",
    "encode",
    "environment_refs",
    "in_order",
    "is_trajectory",
    "name_batch",
    "parse_samples",
    "samples_of",
]
