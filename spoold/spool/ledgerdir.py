"""The ledger on disk: one small file for each acknowledged batch, merged when they are many.

Every file is written beside, synced, renamed and its folder synced; parts are unlinked only after
the merged file that stands for them is durable.
"""

from __future__ import annotations

from collections.abc import Iterable

from spoold import fs
from spoold.errors import SpoolError
from spoold.layout import RunDir, State, is_batch_id
from spoold.ledger import (
    Entry,
    Ledger,
    merged_name,
    parse_entry,
    parse_merged,
    parse_merged_name,
)
from spoold.spool.moves import find

__all__ = ["has_entry", "load", "merge", "settled", "withdraw", "write"]


def load(run: RunDir) -> Ledger:
    """Read all entries and merged files.

    An entry that cannot be read but whose batch still lies in acked/ is left out: it is written
    anew from the batch. Any other that cannot be read raises SpoolError, because to pass over it
    would deliver its environments twice.
    """
    fs.sync_dir(run.ledger)
    ledger = Ledger()
    names = sorted(fs.scan(run.ledger).files)
    merged = {name: number for name in names if (number := parse_merged_name(name)) is not None}
    for name, data in fs.read_each(run.ledger, merged):
        try:
            ledger.add_merged(merged[name], parse_merged(data))
        except ValueError as error:
            raise _unreadable(run, [name]) from error
    torn: list[str] = []
    for name, data in fs.read_each(run.ledger, filter(is_batch_id, names)):
        try:
            ledger.add(name, parse_entry(data))
        except ValueError:
            torn.append(name)
    if torn:
        _drop_torn(run, torn)
    return ledger


def _drop_torn(run: RunDir, torn: list[str]) -> None:
    there = {found.name.id for state in State for found in find(run, state) if found.place.counts}
    if lost := [name for name in torn if name not in there]:
        raise _unreadable(run, lost)
    for name in torn:
        fs.remove(f"{run.ledger}/{name}")


def _unreadable(run: RunDir, names: list[str]) -> SpoolError:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return SpoolError(
        f"ledger entry {run.ledger}/{names[0]}{more} cannot be read, and its batch is gone",
        hint="restore it from a backup, or remove it: then its environments are delivered again; "
        f"`spoold check {run.root}` lists all",
    )


def settled(run: RunDir) -> set[str]:
    """Return the batch ids that have an entry of their own; the folder is synced first."""
    fs.sync_dir(run.ledger)
    return set(filter(is_batch_id, fs.scan(run.ledger).files))


def has_entry(run: RunDir, batch_id: str) -> bool:
    """Whether a batch has an entry now, and one that can be read."""
    try:
        parse_entry(fs.read(f"{run.ledger}/{batch_id}"))
    except (FileNotFoundError, ValueError):
        return False
    return True


def write(run: RunDir, entries: Iterable[tuple[str, Entry]]) -> None:
    """Write the entries of batches, each under its batch id, durably."""
    files = [(batch_id, entry.dump()) for batch_id, entry in entries]
    fs.put_many(files, folder=run.ledger, tmp_dir=run.tmp)


def withdraw(run: RunDir, batch_ids: Iterable[str]) -> None:
    """Unlink the entries of batches that are not in acked/ any more."""
    for batch_id in batch_ids:
        fs.remove(f"{run.ledger}/{batch_id}")
    fs.sync_dir(run.ledger)


def merge(run: RunDir, ledger: Ledger, gone: Iterable[str]) -> None:
    """Write one merged file for the entries of `gone` and all older merged files; unlink those.

    An entry that somebody removed is withdrawn: that is how an operator has environments delivered
    again. Raises SpoolError where one cannot be read.
    """
    parts: list[tuple[str, Entry]] = []
    for name in sorted(gone):
        try:
            parts.append((name, parse_entry(fs.read(f"{run.ledger}/{name}"))))
        except FileNotFoundError:
            ledger.withdraw([name])
        except ValueError as error:
            raise _unreadable(run, [name]) from error
    merged = [f"{run.ledger}/{merged_name(number)}" for number in sorted(ledger.merged)]
    older = [parse_merged(fs.read(path)) for path in merged]
    number = max(ledger.merged, default=0) + 1
    data = ledger.merge(parts, older).dump()
    fs.put(f"{run.ledger}/{merged_name(number)}", data, tmp_dir=run.tmp)
    for batch_id, _ in parts:
        fs.remove(f"{run.ledger}/{batch_id}")
    for path in merged:
        fs.remove(path)
    fs.sync_dir(run.ledger)
    ledger.merged = {number}
    ledger.batches.difference_update(batch_id for batch_id, _ in parts)
