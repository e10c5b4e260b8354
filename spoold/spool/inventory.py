"""The daemon's picture of a run directory: where each batch lies, and what is delivered.

Everything here comes from the folders and the ledger, at start and again at every pass; nothing is
remembered that could not be read again. Holds ids and names, never samples.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Set
from dataclasses import dataclass
from itertools import islice
from typing import Final

from pyroaring import BitMap64

from spoold import fs
from spoold.errors import BatchCorrupt, SpoolWriteError
from spoold.layout import (
    CORRUPT,
    DUPLICATE,
    BatchName,
    NoteName,
    Place,
    RunDir,
    State,
    batch_id_of,
    plain_name,
    precedence,
)
from spoold.ledger import Entry, Ledger
from spoold.policy import Absence
from spoold.spool import ledgerdir
from spoold.spool.contents import entry_of
from spoold.spool.moves import Found, set_aside
from spoold.spool.notes import NoteMemory
from spoold.spool.shelves import Pass, Shelves
from spoold.spool.strangers import Strangers
from spoold.spool.tally import Tally

__all__ = ["MISSING_ROW", "Inventory"]

log = logging.getLogger("spoold.spool")

MISSING_ROW: Final = "missing-row"
MERGE_AT: Final = 1000
MERGE_MOST: Final = 2000
LATEST: Final = 8
# Stands for every batch that no pass has seen yet.
_UNSEEN: Final = ""


@dataclass(slots=True)
class Held:
    """One batch: where it lies. `entry` is None where the ledger has its environments."""

    place: Place
    file_name: str
    size: int
    entry: Entry | None


class Inventory:
    """Where each batch lies, which environments are delivered, and which are set aside.

    `skip` holds the environments that are delivered or set aside, `set_aside` only those with a
    note. `undelivered` becomes True when environments came out of it again (a batch or a note was
    removed), or came into it by a batch that this daemon did not publish: then the source has to be
    reconciled, and what was decided about groups be learnt anew; whoever acts on it sets it back.
    For `relist_seconds` see `shelves`.
    """

    def __init__(self, run: RunDir, *, relist_seconds: float = 0.0) -> None:
        self.run = run
        self.shelves = Shelves(run, relist_seconds=relist_seconds)
        self.ledger = Ledger()
        self.skip = BitMap64()
        self.set_aside = BitMap64()
        self.missing_row_notes: dict[int, str] = {}
        self.unreadable: list[SpoolWriteError] = []
        self.undelivered = False
        self.pending_batches = 0
        self.pending_bytes = 0
        self.tally = Tally()
        self._noted: set[str] = set()
        self._note_memory = NoteMemory(run)
        self._held: dict[str, Held] = {}
        self._todo: dict[str, list[tuple[Place, str]]] = {}
        # Known by what was read of them, or by their name alone, and in no folder now.
        self._absent: set[str] = set()
        self._is_doubtful = False
        self._on_their_way: set[str] = set()
        self._absence = Absence()
        self._strangers = Strangers(run)

    # --- what others ask -------------------------------------------------------------------------

    @property
    def unsettled(self) -> bool:
        """Whether something waits for another pass: a batch that moved, or seems to be missing."""
        return bool(self._todo or self._absent or self._is_doubtful)

    @property
    def is_whole(self) -> bool:
        """Whether it is known what every batch delivers. Until then nothing may be published.

        Consumers move batches while a daemon starts: one that goes back to pending/ in the middle
        of a pass may be in none of its listings, one that goes on cannot be read where it was seen.
        """
        if not self.unsettled:
            return True
        unread = (self._todo.keys() | self._absent) - self._held.keys() - self.ledger.batches
        return not (unread or self._is_doubtful)

    @property
    def unknown(self) -> Set[str]:
        """The paths, relative to the run directory, that are neither batch nor note."""
        return self._strangers.told

    @property
    def delivered(self) -> int:
        """How many environments are delivered."""
        return len(self.skip) - len(self.set_aside)

    @property
    def note_count(self) -> int:
        """How many notes lie in rejected/."""
        return len(self._noted)

    @property
    def highest_seq(self) -> int:
        """The greatest number that any batch file or ledger entry bears."""
        names = [self.ledger.batches, *(shelf.names for shelf in self.shelves.by_place.values())]
        numbers = (name.partition("-")[0] for some in names for name in some)
        return max((int(number) for number in numbers if number.isdecimal()), default=0)

    @property
    def highest_environment(self) -> int:
        """The greatest id of an environment that is delivered or set aside, 0 for none."""
        return self.skip.max() if self.skip else 0

    def remembered(self) -> dict[int, str]:
        """Return ids of what is delivered or set aside with the env_id that each had then."""
        return self._note_memory.remembered() | self.ledger.remembered

    def latest(self) -> dict[int, str]:
        """Return the highest of them and the last few, for a check that costs next to nothing."""
        remembered = self.ledger.remembered
        latest = dict(islice(reversed(remembered.items()), LATEST))
        # A copy that is older than the highest one does not know it, or knows it as another; so
        # with the highest note.
        highest = self.ledger.highest
        latest |= {highest: remembered[highest]} if highest else {}
        return self._note_memory.highest | latest

    # --- what changes it -------------------------------------------------------------------------

    def load(self, *, now: float) -> None:
        """Read the ledger and every batch that it does not cover. Folders are synced first."""
        self.shelves.sync()
        self.ledger = ledgerdir.load(self.run)
        self._is_doubtful = True
        self.refresh(now=now, everything=True)
        self._count_skip()
        self.undelivered = False

    def refresh(
        self, *, now: float, everything: bool = False, moved: Set[str] | None = None
    ) -> None:
        """Go through the folders and act on what moved.

        Afterwards every batch in acked/ has its ledger entry, no other has one, of two files with
        one batch id one is left, and what fails its digest lies in rejected/corrupt/. A batch that
        two passes miss is missing: without an entry its environments are to come again. `moved`:
        where hints tell that something came or went since the last pass; None where nobody tells.
        """
        absent = set(self._absent)
        this = self.shelves.go_through(
            now=now,
            everything=everything or self._is_doubtful or not absent <= self._on_their_way,
            moved=moved,
            settled=self.ledger.batches,
        )
        self.unreadable = list(this.unreadable)
        for batch_id in this.vanished:
            self._todo.setdefault(batch_id, [])
        for batch_id, where in this.appeared.items():
            self._todo.setdefault(batch_id, []).extend(where)
        try:
            self._place()
        finally:
            if this.notes_changed:
                self._take_notes()
        # RACE: it left a folder during this pass, and the hint where it went is for the next.
        self._on_their_way = self._absent - absent if this.by_hints else set()
        self._find_missing(this, now)
        self._strangers.tell(self.shelves)

    def published(self, name: BatchName, entry: Entry, size: int) -> None:
        """Take in a batch that this daemon has just published."""
        place = Place(State.PENDING)
        self.shelves.add(place, name.file_name)
        self._held[name.id] = Held(place, name.file_name, size, entry)
        self.pending_batches += 1
        self.pending_bytes += size
        self._deliver(entry)

    def noted(self, note: NoteName, env_id: str) -> None:
        """Take in a note that this daemon has just written."""
        self.shelves.add(Place(State.REJECTED), note.file_name)
        self._noted.add(note.file_name)
        self._note_memory.add(note, env_id)
        if note.reason == MISSING_ROW:
            self.missing_row_notes[note.environment] = note.file_name
        else:
            self.set_aside.add(note.environment)
            self.skip.add(note.environment)

    def unnoted(self, file_name: str, environment: int) -> None:
        """Take in that this daemon removed a missing-row note: its row turned up."""
        self._noted.discard(file_name)
        self._note_memory.drop(NoteName(environment=environment, reason=MISSING_ROW))
        self._unlist(Place(State.REJECTED), file_name)
        self.missing_row_notes.pop(environment, None)

    def settled_in(self, place: Place) -> Iterator[BatchName]:
        """Yield the batches that lie in a place and nowhere else, and that the ledger has.

        In no order, and read as they are asked for: nothing may be pruned meanwhile.
        """
        for file_name in self.shelves.by_place[place].names:
            name = BatchName.parse(file_name)
            if name is None or name.id not in self.ledger.batches or name.id in self._todo:
                continue
            held = self._held.get(name.id)
            if held is None or (held.place, held.file_name, held.entry) == (place, file_name, None):
                yield name

    def pruned(self, found: Found) -> None:
        """Take in that this daemon removed a settled batch: the ledger goes on having it."""
        self.shelves.drop(found.place, found.name.file_name)
        self._held.pop(found.name.id, None)

    def merge(self, *, least: int = MERGE_AT) -> int:
        """Merge the ledger entries whose batch file is gone. Returns how many were merged.

        Nothing happens below `least` of them, so that the folder is not written anew for a few; the
        oldest go first, and not more than a few thousand at once, so that nobody waits for long.
        """
        if self._absent or self._todo or self.unreadable:
            return 0
        if len(self.ledger.batches) - self.shelves.settled_count() < least:
            return 0
        gone = self.ledger.batches - self._held.keys()
        gone = {one for one in gone if not self.shelves.is_settled(plain_name(one))}
        gone.difference_update(filter(None, map(batch_id_of, self.shelves.unsettled())))
        if len(gone) < least:
            return 0
        now = sorted(gone)[:MERGE_MOST]
        ledgerdir.merge(self.run, self.ledger, now)
        log.info("ledger merged", extra={"fields": {"entries": len(now)}})
        if self.ledger.stale:
            self._recount()  # an entry was removed by hand, or withdrawn before
        return len(now)

    # --- one batch at a time ---------------------------------------------------------------------

    def _place(self) -> None:
        entries: list[tuple[str, Entry]] = []
        withdrawn: list[str] = []
        done: list[str] = []
        for batch_id, where in list(self._todo.items()):
            held = self._held.get(batch_id)
            positions = dict.fromkeys(w for w in where if self.shelves.has(*w))
            if held is not None and self.shelves.has(held.place, held.file_name):
                positions.setdefault((held.place, held.file_name))
            elif batch_id in self.ledger.batches:
                name = plain_name(batch_id)
                positions |= {(p, name): None for p in self.shelves.acked_places(name)}
            place = self._only_one(batch_id, list(positions))
            if place is None:
                if batch_id in self._held or batch_id not in self.ledger.batches:
                    self._absent.add(batch_id)
                else:
                    # RACE: it may be on its way back to pending/; then the next pass says so.
                    log.info("acked batch gone", extra={"fields": {"batch": batch_id}})
                done.append(batch_id)
                continue
            self._absent.discard(batch_id)
            if self._take_in(batch_id, *place, entries=entries, withdrawn=withdrawn):
                done.append(batch_id)
        if entries:
            ledgerdir.write(self.run, entries)
            for batch_id, entry in sorted(entries):
                self.ledger.add(batch_id, entry)
                self._settle(batch_id)
        if withdrawn:
            ledgerdir.withdraw(self.run, withdrawn)
            self.ledger.withdraw(withdrawn)
        for batch_id in done:
            del self._todo[batch_id]

    def _only_one(
        self, batch_id: str, positions: list[tuple[Place, str]]
    ) -> tuple[Place, str] | None:
        """Return where a batch lies; of several files with its id all but one are set aside."""
        if len(positions) > 1:
            # RACE: a batch that moved during the pass is in two listings, but in one place.
            there = [p for p in positions if os.path.lexists(self.run.file(*p))]
            for position in positions if there else ():
                if position not in there:
                    # Where it comes back to that folder, its name has to be new there.
                    self.shelves.drop(*position)
            positions = there
        if not positions:
            return None

        def rank(position: tuple[Place, str]) -> tuple[int, int]:
            name = BatchName.parse(position[1])
            return precedence(position[0], name.attempt if name else 0)

        positions.sort(key=rank)
        for place, file_name in positions[:-1]:
            name = BatchName.parse(file_name)
            assert name is not None
            if set_aside(self.run, Found(place, name), DUPLICATE) is not None:
                fields = {"batch": batch_id, "from": place.path, "kept": positions[-1][0].path}
                log.warning("duplicate set aside", extra={"fields": fields})
            self._unlist(place, file_name)
        return positions[-1]

    def _take_in(
        self,
        batch_id: str,
        place: Place,
        file_name: str,
        *,
        entries: list[tuple[str, Entry]],
        withdrawn: list[str],
    ) -> bool:
        """Note where a batch lies now. False when it has to be looked at again."""
        held = self._held.get(batch_id)
        in_ledger = batch_id in self.ledger.batches
        settled = in_ledger and place.state is State.ACKED
        entry, size = (held.entry, held.size) if held is not None else (None, 0)
        if not settled and entry is None:
            read = self._read(batch_id, place, file_name)
            if read is None:
                return False
            if isinstance(read, BatchCorrupt):
                return True
            entry, size = read
            if not self.skip.issuperset(BitMap64(entry.environments)):
                self.undelivered = True
            self._deliver(entry)
        if held is None or held.place != place:
            fields = {"batch": batch_id, "to": place.path}
            if held is not None or (in_ledger and place.state is not State.ACKED):
                # Of a batch whose ack is in the ledger no more is kept than that.
                was = held.place if held is not None else Place(State.ACKED)
                log.info("batch moved", extra={"fields": fields | {"from": was.path}})
            else:
                log.debug("batch found", extra={"fields": fields})
        if held is not None:
            self.tally.moved(held.place, place, held.file_name, file_name)
        elif in_ledger:
            self.tally.moved(Place(State.ACKED), place, plain_name(batch_id), file_name)
        self._count_pending(held, place, size)
        self._held[batch_id] = Held(place, file_name, size, entry)
        if settled or entry is None:
            self._settle(batch_id)
            return True
        if place.state is State.ACKED:
            entries.append((batch_id, entry))
        elif in_ledger:
            withdrawn.append(batch_id)
        return True

    def _settle(self, batch_id: str) -> None:
        """Keep no more of a batch in acked/ than its name in the listing and in the ledger."""
        if self._held[batch_id].file_name == plain_name(batch_id):
            self.shelves.settle(plain_name(batch_id))
            del self._held[batch_id]
        else:
            self._held[batch_id].entry = None

    def _count_pending(self, held: Held | None, place: Place, size: int) -> None:
        if held is not None and held.place.state is State.PENDING:
            self.pending_batches -= 1
            self.pending_bytes -= held.size
        if place.state is State.PENDING:
            self.pending_batches += 1
            self.pending_bytes += size

    def _read(
        self, batch_id: str, place: Place, file_name: str
    ) -> tuple[Entry, int] | BatchCorrupt | None:
        """Return what a batch delivers and its size; None when it went away or cannot be read."""
        name = BatchName.parse(file_name)
        assert name is not None
        path = self.run.file(place, file_name)
        try:
            data = fs.read(path)
        except FileNotFoundError:
            self._unlist(place, file_name)
            self.shelves.by_place[place].racy = True
            return None
        except SpoolWriteError as error:
            self.unreadable.append(error)
            return None
        try:
            return entry_of(name, data), len(data)
        except BatchCorrupt as error:
            self._set_corrupt_aside(batch_id, Found(place, name), error)
            return error

    def _set_corrupt_aside(self, batch_id: str, found: Found, error: BatchCorrupt) -> None:
        if set_aside(self.run, found, CORRUPT) is not None:
            fields = {"batch": batch_id, "from": found.place.path, "why": error.message}
            log.warning("corrupt batch set aside", extra={"fields": fields})
        self._unlist(found.place, found.name.file_name)
        held = self._held.pop(batch_id, None)
        self._count_pending(held, Place(State.REJECTED, CORRUPT), 0)
        if held is not None and batch_id not in self.ledger.batches:
            self._recount()

    def _deliver(self, entry: Entry) -> None:
        self.skip.update(entry.environments)
        self.ledger.remember(entry.highest, entry.env_id)

    def _unlist(self, place: Place, file_name: str) -> None:
        shelf = self.shelves.by_place.get(place)
        if shelf is not None:
            shelf.names.discard(file_name)

    # --- what is gone ----------------------------------------------------------------------------

    def _find_missing(self, this: Pass, now: float) -> None:
        if self.unreadable:
            return  # what is not found may lie where nobody could look
        recount = False
        self._is_doubtful &= not this.is_whole
        absent = self._absent | {_UNSEEN} if self._is_doubtful else self._absent
        for batch_id in self._absence.passed(absent, at=now, still=this.still):
            if batch_id == _UNSEEN:
                self._is_doubtful = False
                continue
            self._absent.discard(batch_id)
            held = self._held.pop(batch_id, None)
            if held is None:
                fields = {"batch": batch_id}
                log.warning("batch went away before it was read", extra={"fields": fields})
                continue
            self._count_pending(held, Place(State.REJECTED), 0)
            if batch_id in self.ledger.batches:
                log.info("acked batch gone", extra={"fields": {"batch": batch_id}})
            else:
                recount = True
                fields = {"batch": batch_id, "from": held.place.path}
                log.warning("batch missing, its environments come anew", extra={"fields": fields})
        if recount:
            # Nobody synced what a person removed. Delivered anew before that is durable, its
            # environments would be there twice after a power cut.
            self.shelves.sync()
            self._recount()

    def _recount(self) -> None:
        """Count what is delivered anew, after something was lost: rare, so it reads everything."""
        if self.ledger.stale:
            self.ledger = ledgerdir.load(self.run)
        self._count_skip()
        self.undelivered = True

    def _count_skip(self) -> None:
        self.skip.clear()
        self.skip |= self.ledger.environments
        for held in self._held.values():
            if held.entry is not None:
                self._deliver(held.entry)
        self._take_notes(recount=False)

    def _take_notes(self, *, recount: bool = True) -> None:
        notes = self.shelves.notes()
        names = {note.file_name for note in notes}
        removed = self._noted - names
        self._noted = names
        self._note_memory.take(notes)
        self.missing_row_notes = {
            note.environment: note.file_name for note in notes if note.reason == MISSING_ROW
        }
        if recount and removed:
            log.info("notes removed", extra={"fields": {"notes": len(removed)}})
            fs.sync_dir(self.run.rejected)
            self._recount()
            return
        self.set_aside = BitMap64([n.environment for n in notes if n.reason != MISSING_ROW])
        self.skip |= self.set_aside
