"""A spool between a rollout database and a trainer.

    from spoold import Consumer

    with Consumer("/var/lib/spoold/exp7", name="trainer-0") as consumer:
        for batch in consumer:
            train(batch.samples())
            batch.ack(step=step)

Importing this package loads nothing but itself; each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from spoold.consumer import Batch, Consumer
    from spoold.errors import (
        BatchCorrupt,
        BatchLost,
        ConfigError,
        ConsumerBusy,
        ConsumerError,
        SourceError,
        SourceReplaced,
        SourceSchemaError,
        SourceUnavailable,
        SpooldError,
        SpoolError,
        SpoolLocked,
        SpoolWriteError,
    )

__version__: Final = "0.1.0"

__all__ = [
    "Batch",
    "BatchCorrupt",
    "BatchLost",
    "ConfigError",
    "Consumer",
    "ConsumerBusy",
    "ConsumerError",
    "SourceError",
    "SourceReplaced",
    "SourceSchemaError",
    "SourceUnavailable",
    "SpoolError",
    "SpoolLocked",
    "SpoolWriteError",
    "SpooldError",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "spoold.consumer" if name in ("Batch", "Consumer") else "spoold.errors"
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
