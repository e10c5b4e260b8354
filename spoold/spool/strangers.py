"""Files in a run directory that are neither batch nor note: left alone, and named once."""

from __future__ import annotations

import logging
import os
from typing import Final

from spoold.layout import RunDir
from spoold.spool.shelves import Shelves

__all__ = ["Strangers"]

log = logging.getLogger("spoold.spool")

REPORTED_FILES: Final = 20


class Strangers:
    """`told`: their paths, relative to the run directory, as of the last time."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.told: set[str] = set()

    def tell(self, shelves: Shelves) -> None:
        """Log those that are new, a few by name, where a listing found others than before."""
        if not shelves.unknown_changed:
            return
        shelves.unknown_changed = False
        unknown = shelves.unknown()
        new = [path for path in unknown if path not in self.told]
        for path in new[:REPORTED_FILES]:
            shown = os.fsencode(path).decode("utf-8", "backslashreplace")
            fields = {"file": shown, "is": "no batch, left alone"}
            log.warning("unknown file", extra={"fields": fields})
        if len(new) > REPORTED_FILES:
            more: dict[str, object] = {
                "files": len(new) - REPORTED_FILES,
                "see": f"spoold check {self.run.root}",
            }
            log.warning("more unknown files", extra={"fields": more})
        self.told = set(unknown)
