"""Notes: files in rejected/, each about one environment that is set aside, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from spoold import fs
from spoold.layout import NoteName, RunDir

if TYPE_CHECKING:
    from spoold.model import Note

__all__ = ["newest_note", "remove_note", "write_note"]


def write_note(run: RunDir, note: Note, *, job: str, at: float) -> str:
    """Write a note durably, over an older one of the same name. Returns its file name."""
    name = NoteName(environment=note.environment, reason=note.reason).file_name
    facts = {
        "environment": note.environment,
        "env_id": note.env_id,
        "job": job,
        "reason": note.reason,
        "what": note.what,
        "rows": list(note.rows),
        "excerpt": note.excerpt,
        "at": round(at, 3),
    }
    data = json.dumps(facts, ensure_ascii=False, indent=1).encode("utf-8", "backslashreplace")
    fs.put(f"{run.rejected}/{name}", data + b"\n", tmp_dir=run.tmp)
    return name


def newest_note(run: RunDir, notes: Iterable[NoteName]) -> NoteName | None:
    """Return the note that was written last, by its mtime; None where there is none."""

    def written(note: NoteName) -> int:
        try:
            return os.stat(f"{run.rejected}/{note.file_name}").st_mtime_ns
        except OSError:
            return -1  # RACE: it may have been removed; a note is what matters least then

    return max(notes, key=written, default=None)


def remove_note(run: RunDir, file_name: str) -> None:
    """Remove a note durably; fine when it is gone already."""
    fs.remove(f"{run.rejected}/{file_name}")
    fs.sync_dir(run.rejected)
