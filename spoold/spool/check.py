"""Check a run directory: everything in it is read, and all that is not as it should be is found.

`look` changes nothing and may be used while the daemon runs. A finding with `mend` can be put right
by it without losing or doubling anything; only with the daemon's lock held. All others need a
person, and `remedy` says what that person can do.
"""

from __future__ import annotations

import json
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from spoold import fs
from spoold.errors import BatchCorrupt, ConfigError, SpoolWriteError
from spoold.layout import (
    CORRUPT,
    DUPLICATE,
    BatchName,
    Place,
    RunDir,
    State,
    parse_seq,
    precedence,
)
from spoold.ledger import Entry, parse_entry, parse_merged, parse_merged_name
from spoold.spool import ledgerdir, overview, setup
from spoold.spool.contents import entry_of
from spoold.spool.moves import Found, set_aside
from spoold.spool.publish import Numbers

__all__ = ["Finding", "Report", "look"]

_SHOWN: Final = 20
_HOUSE_FILES: Final = ("lock", "source.json", "status.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is not as it should be. `path` is relative to the run directory."""

    code: str
    path: str
    text: str
    remedy: str
    mend: Callable[[], object] | None = None


@dataclass(slots=True)
class Report:
    """All findings, and how much was read."""

    findings: list[Finding] = field(default_factory=list)
    batches: int = 0
    entries: int = 0


def look(run: RunDir) -> Report:
    """Read everything in a run directory. Payload in memory is one batch."""
    return _Check(run).report


class _Check:
    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.report = Report()
        self._delivers: dict[str, Entry] = {}
        # Which batches an environment is in; a set for the few that are in two.
        self._seen: dict[int, str] = {}
        self._twice: dict[tuple[str, ...], list[int]] = defaultdict(list)
        self._folders()
        self._house()
        view = overview.take(run)
        for error in view.unreadable:
            if error.errno is None or not self._is_missing(error):
                self._person("unreadable", ".", error.message, error.hint)
        counting = self._copies(view)
        self._batches(counting)
        self._ledger(counting)
        self._notes(view)
        for ids, environments in self._twice.items():
            self._environments_twice(ids, environments)
        self._numbers(view)
        self._unknown(view)

    # --- how findings are made ----------------------------------------------------------------

    def _person(self, code: str, path: str, text: str, remedy: str) -> None:
        self._found(code, path, text, remedy, None)

    def _found(
        self, code: str, path: str, text: str, remedy: str, mend: Callable[[], object] | None
    ) -> None:
        self.report.findings.append(
            Finding(code=code, path=path, text=text, remedy=remedy, mend=mend)
        )

    def _is_missing(self, error: SpoolWriteError) -> bool:
        return any(
            finding.code == "missing-folder" and f"/{finding.path}:" in error.message
            for finding in self.report.findings
        )

    # --- folders, and the daemon's own files --------------------------------------------------

    def _folders(self) -> None:
        run = self.run
        for path in (*map(run.of, map(Place, State)), run.house, run.tmp, run.ledger):
            where = os.path.relpath(path, run.root)
            if os.path.isdir(path):
                if os.stat(path).st_mode & stat.S_ISVTX:
                    text = "has the sticky bit: trainers under another uid cannot move files"
                    self._person("sticky-folder", where, text, f"chmod -t {path}")
            elif os.path.lexists(path):
                text = "is no directory"
                self._person("no-folder", where, text, "move it away; the next start makes it")
            elif path == run.ledger and os.path.lexists(run.source_json):
                text = "is missing: which acked batches were delivered and removed is not known"
                remedy = (
                    "restore it from a backup, or make it: then environments of acked batches "
                    "whose files are gone are delivered again"
                )
                self._person("missing-ledger", where, text, remedy)
            else:
                text, remedy = "is missing", "make it (the next start of the daemon does)"
                self._found("missing-folder", where, text, remedy, partial(fs.make_dirs, path))

    def _house(self) -> None:
        run = self.run
        for name in _HOUSE_FILES:
            path = f"{run.house}/{name}"
            if os.path.lexists(path) and not _is_file(path):
                self._person(
                    "no-file", f".spoold/{name}", "is no regular file", "move it away, then restart"
                )
        if _is_file(run.source_json):
            try:
                setup.read_source(run)
            except (ConfigError, SpoolWriteError) as error:
                self._person("source", ".spoold/source.json", error.message, error.hint)
        elif not os.path.lexists(run.source_json):
            self._half_retired()

    def _half_retired(self) -> None:
        try:
            names = sorted(fs.scan(self.run.retired).folders, reverse=True)
        except FileNotFoundError:
            return
        for name in names:
            if os.path.lexists(f"{self.run.retired}/{name}/.spoold/source.json"):
                text = f"is missing, as in a retirement into retired/{name} that was cut off"
                remedy = (
                    "the next start moves all batches there; if it was lost in another way, "
                    "write it anew before that"
                )
                self._person("half-retired", ".spoold/source.json", text, remedy)
                return

    # --- batches --------------------------------------------------------------------------------

    def _copies(self, view: overview.Overview) -> dict[str, Found]:
        """Return, by batch id, the file that counts; the others are findings."""
        files: dict[str, list[Found]] = defaultdict(list)
        for file in view.files:
            name = BatchName.parse(file.name)
            if name is not None and file.place.counts:
                files[name.id].append(Found(file.place, name))
        counting = {}
        for batch_id, found in files.items():
            found.sort(key=lambda each: precedence(each.place, each.name.attempt))
            counting[batch_id] = found[-1]
            for copy in found[:-1]:
                text = f"{batch_id} lies in {found[-1].place.path}/, too"
                remedy = f"move this one to rejected/{DUPLICATE}/ (the daemon does)"
                self._aside("duplicate", copy, text, remedy, DUPLICATE)
        return counting

    def _batches(self, counting: dict[str, Found]) -> None:
        for batch_id, found in counting.items():
            try:
                data = fs.read(found.path(self.run))
            except FileNotFoundError:
                continue  # RACE: it was moved while we looked
            except SpoolWriteError as error:
                remedy = error.hint or "make it readable for this user, or move it away"
                self._person("unreadable", _where(found), error.message, remedy)
                continue
            self.report.batches += 1
            try:
                entry = entry_of(found.name, data)
            except BatchCorrupt as error:
                remedy = (
                    f"move it to rejected/{CORRUPT}/ (the daemon does); unless it was acked, its "
                    "environments are delivered anew"
                )
                self._aside("corrupt", found, error.message, remedy, CORRUPT)
                continue
            self._delivers[batch_id] = entry
            self._count(batch_id, entry)

    def _aside(self, code: str, found: Found, text: str, remedy: str, folder: str) -> None:
        self._found(code, _where(found), text, remedy, partial(set_aside, self.run, found, folder))

    def _count(self, batch_id: str, entry: Entry) -> None:
        for one in entry.environments:
            other = self._seen.setdefault(one, batch_id)
            if other != batch_id:
                self._twice[tuple(sorted((other, batch_id)))].append(one)

    def _environments_twice(self, ids: tuple[str, ...], environments: list[int]) -> None:
        few = ", ".join(map(str, environments[:_SHOWN]))
        more = f" and {len(environments) - _SHOWN} more" if len(environments) > _SHOWN else ""
        self._person(
            "delivered-twice",
            ids[0],
            f"environments {few}{more} are in {ids[1]}, too",
            "if one of the two was not trained on, `spoold reject` it; there is nothing to mend "
            "if both were",
        )

    # --- the ledger -------------------------------------------------------------------------------

    def _ledger(self, counting: dict[str, Found]) -> None:
        for name in self._listed(self.run.ledger):
            where, path = f".spoold/ledger/{name}", f"{self.run.ledger}/{name}"
            batch = BatchName.parse(f"{name}.jsonl")
            is_batch = batch is not None and batch.id == name
            if not is_batch and parse_merged_name(name) is None:
                self._person("unknown", where, "is no ledger entry", "move it away")
                continue
            self.report.entries += 1
            try:
                data = fs.read(path)
                entry = parse_entry(data) if is_batch else parse_merged(data)
            except FileNotFoundError:
                continue  # RACE: withdrawn or merged while we looked
            except SpoolWriteError as error:
                self._person("unreadable", where, error.message, error.hint)
            except ValueError as error:
                self._torn(name, str(error), counting)
            else:
                if isinstance(entry, Entry):
                    self._compare(name, entry, counting)

    def _torn(self, name: str, why: str, counting: dict[str, Found]) -> None:
        where, text = f".spoold/ledger/{name}", f"cannot be read: {why}"
        if name in counting and name in self._delivers:
            self._rewrite("torn-entry", name, text, counting[name])
            return
        what = (
            "its environments are"
            if name in counting or parse_merged_name(name) is None
            else ("those of all batches merged in it are")
        )
        remedy = (
            "the daemon does not start like this: restore it from a backup, or remove it; then "
            f"{what} delivered again"
        )
        self._person("torn-entry", where, f"{text}, and its batch is gone", remedy)

    def _compare(self, name: str, entry: Entry, counting: dict[str, Found]) -> None:
        batch = self._delivers.get(name)
        if batch is None:
            if name not in counting:
                self._count(name, entry)
        elif (set(batch.environments), batch.env_id) != (set(entry.environments), entry.env_id):
            self._rewrite("wrong-entry", name, "says something else than its batch", counting[name])

    def _rewrite(self, code: str, name: str, text: str, found: Found) -> None:
        run, entry = self.run, self._delivers[name]
        if found.place.state is State.ACKED:
            remedy = "write it anew from the batch in acked/"
            mend: Callable[[], object] = partial(ledgerdir.write, run, [(name, entry)])
        else:
            remedy = f"remove it: its batch lies in {found.place.path}/"
            mend = partial(ledgerdir.withdraw, run, [name])
        self._found(code, f".spoold/ledger/{name}", text, remedy, mend)

    # --- notes, numbers, all else --------------------------------------------------------------

    def _notes(self, view: overview.Overview) -> None:
        for note in view.notes:
            where = f"rejected/{note.file_name}"
            try:
                json.loads(fs.read(f"{self.run.root}/{where}"))
            except FileNotFoundError:
                continue
            except (ValueError, SpoolWriteError):
                remedy = "remove it: then the environment is tried again"
                self._person("torn-note", where, "cannot be read; its name still counts", remedy)

    def _numbers(self, view: overview.Overview) -> None:
        reserved = [seq for name in self._listed(self.run.house) if (seq := parse_seq(name))]
        ids = [*(file.id for file in view.files), *view.settled]
        highest = max((seq for i in ids if (seq := _seq_of(i)) is not None), default=0)
        if max(reserved, default=0) >= highest:
            return
        text = f"is missing: numbers up to {highest} are in use"
        remedy = "write it anew (the next start of the daemon does)"
        where = f".spoold/seq-{highest:09d}"
        self._found("seq", where, text, remedy, lambda: Numbers(self.run).load(highest))

    def _unknown(self, view: overview.Overview) -> None:
        if os.path.isdir(self.run.pending):
            for name in fs.scan(self.run.pending).folders:
                remedy = "move what is in it up to pending/, or away"
                text = "is a folder: nobody claims what lies in it"
                self._person("unknown", f"pending/{name}/", text, remedy)
        by_folder: dict[str, list[str]] = defaultdict(list)
        for path in view.unknown:
            by_folder[os.path.dirname(path)].append(path)
        remedy = "spoold leaves it alone; move it away if it is not wanted"
        for folder, paths in by_folder.items():
            for path in paths[:_SHOWN]:
                self._person("unknown", path, "is neither batch nor note", remedy)
            if len(paths) > _SHOWN:
                text = f"{len(paths) - _SHOWN} more are neither batch nor note"
                self._person("unknown", f"{folder}/" if folder else ".", text, remedy)

    def _listed(self, path: str) -> Iterator[str]:
        try:
            yield from sorted(fs.scan(path).files)
        except FileNotFoundError:
            return
        except SpoolWriteError as error:
            self._person("unreadable", os.path.relpath(path, self.run.root), str(error), error.hint)


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _where(found: Found) -> str:
    return f"{found.place.path}/{found.name.file_name}"


def _seq_of(batch_id: str) -> int | None:
    name = BatchName.parse(f"{batch_id}.jsonl")
    return name.seq if name is not None else None
