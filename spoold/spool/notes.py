"""Notes: files in rejected/, each about one environment that is set aside, and why.

A note names its environment by id. If the source is replaced by an older copy of itself that moves
on, that id is another environment's; the env_id in the note tells. All ids above the copy's end are
others then, so that the highest notes tell of all: `NoteMemory` keeps a thousand of them.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from spoold import fs
from spoold.errors import ConfigError, SpoolWriteError
from spoold.layout import NoteName, RunDir
from spoold.spool.setup import read_source

if TYPE_CHECKING:
    from spoold.model import Note

__all__ = ["NoteMemory", "newest_note", "remove_note", "write_note"]

REMEMBERED: Final = 1000
_MAX_ENV_ID: Final = 200


class NoteMemory:
    """The env_ids of the environments that the highest notes are about."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._env_ids: dict[NoteName, str] = {}
        self.highest: dict[int, str] = {}
        """The env_id of the highest environment of which one is known, by its id."""

    def take(self, notes: Iterable[NoteName]) -> None:
        """Take in which notes there are; reads the highest of those that are new."""
        highest = heapq.nlargest(REMEMBERED, notes, key=attrgetter("environment"))
        known = self._env_ids
        job = self._job() if highest else None
        self._env_ids = {
            note: known[note] if note in known else self._read(note, job) for note in highest
        }
        self._find_highest()

    def add(self, note: NoteName, env_id: str) -> None:
        """Take in a note that was just written."""
        self._env_ids[note] = env_id if len(env_id) <= _MAX_ENV_ID else ""
        if note.environment >= max(self.highest, default=0):
            self._find_highest()
        if len(self._env_ids) > 2 * REMEMBERED:
            self.take(list(self._env_ids))

    def drop(self, note: NoteName) -> None:
        """Take in that a note was removed."""
        self._env_ids.pop(note, None)
        self._find_highest()

    def remembered(self) -> dict[int, str]:
        """Return env_id by environment id, as far as the notes say it."""
        return {note.environment: env_id for note, env_id in self._env_ids.items() if env_id}

    def _find_highest(self) -> None:
        remembered = self.remembered()
        highest = max(remembered, default=0)
        self.highest = {highest: remembered[highest]} if highest else {}

    def _job(self) -> str | None:
        """Return the job of the run directory; None where that is not known, or not yet."""
        try:
            tied = read_source(self._run)
        except ConfigError:
            return None  # whoever needs it to deliver says so
        return tied["job"] if tied is not None else None

    def _read(self, note: NoteName, job: str | None) -> str:
        """Return the env_id in a note, "" where it does not say: people write notes, and copy them.

        What a note says of another environment or job than its own says nothing of this source.
        """
        try:
            facts = json.loads(fs.read(f"{self._run.rejected}/{note.file_name}"))
        except (FileNotFoundError, SpoolWriteError, ValueError, RecursionError):
            return ""
        if not isinstance(facts, dict):
            return ""
        if (facts.get("environment"), facts.get("job")) != (note.environment, job):
            return ""
        env_id = facts.get("env_id")
        return env_id if isinstance(env_id, str) and len(env_id) <= _MAX_ENV_ID else ""


def write_note(run: RunDir, note: Note, *, job: str, at: float) -> NoteName:
    """Write a note durably, over an older one of the same name. Returns its name."""
    name = NoteName(environment=note.environment, reason=note.reason)
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
    fs.put(f"{run.rejected}/{name.file_name}", data + b"\n", tmp_dir=run.tmp)
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
