"""Which job of a rollout database is read. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from spoold.errors import ConfigError, SourceUnavailable

__all__ = ["JOBS_SHOWN", "pick_job"]

JOBS_SHOWN: Final = 20


def pick_job(jobs: Sequence[str], *, wanted: str | None, known: str | None, where: str) -> str:
    """Return the job to read where `wanted`, if any, is not there.

    `jobs`: the first that are there, one more than are shown where there are more; `known`: the one
    that was delivered from. Raises SourceUnavailable where it is still to come, ConfigError where
    there are several.
    """
    if not jobs:
        raise SourceUnavailable(f"{where} has no job yet", hint="spoold waits for its environments")
    shown = ", ".join(jobs[:JOBS_SHOWN]) + (", …" if len(jobs) > JOBS_SHOWN else "")
    if wanted is not None:
        raise SourceUnavailable(
            f"{where} has no environment of job {wanted} yet, only of {shown}",
            hint="spoold waits for it; is --job right?",
        )
    if known is not None and known in jobs:
        return known
    if len(jobs) > 1:
        raise ConfigError(f"{where} has several jobs: {shown}", hint="name one with --job")
    return jobs[0]
