"""Read and convert the rows of the environments that are due, and cut them into a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from pyroaring import BitMap64

from spoold import codec
from spoold.config import Settings
from spoold.ledger import Entry
from spoold.model import Note, Sample, StepRow
from spoold.policy import Unit
from spoold.sources import Source
from spoold.spool.inventory import Inventory

__all__ = ["BAD_ROWS", "Collected", "Collector"]

BAD_ROWS: Final = 100

_Converted = tuple[list[Sample], int]


@dataclass(slots=True)
class Collected:
    """The rows of one batch, converted, and what was found on the way."""

    units: list[Unit] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    """As they follow one another in the batch."""
    size_bytes: int = 0
    notes: list[tuple[Note, str]] = field(default_factory=list)
    incomplete: list[int] = field(default_factory=list)
    is_full: bool = False
    """Closed by its bytes: what did not fit has lingered long enough."""
    sound: int = 0
    """Of so many samples, from the first on, it is known that the messages are: `codec.encode`."""
    is_loaded: bool = False
    """Whether they lie before the process that writes, which has not begun to."""
    is_cut_sound: bool = True
    """Whether it is known of what did not fit, too."""
    bad_before: int = 0
    bad_in_a_row: int = 0
    """Rows that nobody could use, with no good one between them: before these, and after."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found out that may be otherwise where messages are looked into."""
        return not self.notes and not self.incomplete and self.is_cut_sound

    def entry(self) -> Entry:
        """Return what the ledger is to say of a batch of these."""
        env_ids = {sample.environment: sample.env_id for sample in self.samples}
        environments = tuple(sorted(env_ids))
        return Entry(environments, env_ids[environments[-1]])

    def check(self, is_enough: Callable[[], bool]) -> bool:
        """See whether the messages are sound, one sample after the other, until it is enough."""
        while self.sound < len(self.samples) and not is_enough():
            if not _are_sound(self.samples[self.sound]):
                return False
            self.sound += 1
        return True


class Collector:
    """Holds what was read and did not fit into the last batch; nothing else from batch to batch."""

    def __init__(self, inventory: Inventory, settings: Settings) -> None:
        self.inventory = inventory
        self.settings = settings
        self.bad_in_a_row = 0
        """Rows that nobody could use, with no good one between them, as far as they have notes."""
        # Complete but for their reward, under `null_reward = wait`.
        self.unrewarded = BitMap64()
        self._carry: tuple[Unit, _Converted] | None = None

    def forget(self) -> None:
        """Forget what was read and not published: the source is not the same any more."""
        self._carry = None

    def collect(self, source: Source, units: Sequence[Unit], *, trusted: bool = False) -> Collected:
        """Return the beginning of `units` that makes one batch, and what was found on the way.

        `trusted`: the messages are not looked into, somebody else will. Raises SourceUnavailable.
        """
        into = Collected(bad_before=self.bad_in_a_row, bad_in_a_row=self.bad_in_a_row)
        carry, self._carry = self._carry, None
        known = {carry[0]: carry[1]} if carry is not None else {}
        if not self.inventory.skip.isdisjoint(BitMap64([one for unit in units for one in unit])):
            units = self._without_delivered(units, into)
        wanted = [one for unit in units if unit not in known for one in unit]
        with closing(source.read(wanted)) as rows:
            for unit in units:
                if into.bad_in_a_row >= BAD_ROWS:
                    break
                converted = known.get(unit) or self._convert(unit, rows, into, trusted)
                if converted is None:
                    continue
                samples, size = converted
                if into.units and into.size_bytes + size > self.settings.batch_bytes:
                    into.is_full = True
                    into.is_cut_sound = not trusted or all(map(_are_sound, samples))
                    if into.is_cut_sound:
                        self._carry = (unit, converted)
                    break
                into.units.append(unit)
                into.samples += samples
                into.size_bytes += size
                if into.size_bytes >= self.settings.batch_bytes:
                    into.is_full = True
                    break
        into.samples = codec.in_order(into.samples)
        if not trusted:
            into.sound = len(into.samples)
        return into

    def _without_delivered(self, units: Sequence[Unit], into: Collected) -> list[Unit]:
        """Leave out what was delivered or set aside by other means since it was offered."""
        skip, left = self.inventory.skip, []
        for unit in units:
            if any(one in skip for one in unit):
                into.incomplete += unit
            else:
                left.append(unit)
        return left

    def _convert(
        self,
        unit: Unit,
        rows: Iterator[tuple[int, tuple[StepRow, ...]]],
        into: Collected,
        trusted: bool,
    ) -> _Converted | None:
        """Return the samples of a unit, and how many bytes they are; None where it is not whole."""
        settings = self.settings
        samples: list[Sample] = []
        member: StepRow | None = None
        size_bytes = 0
        whole = True
        for wanted in unit:
            environment, steps = next(rows)
            assert environment == wanted
            if not steps:
                into.incomplete.append(environment)
                whole = False
                continue
            member = steps[0]
            encoded = codec.encode(
                steps,
                null_reward=settings.null_reward,
                max_sample_bytes=settings.max_sample_bytes,
                trusted=trusted,
            )
            self._count(environment, encoded, into)
            if encoded is None:
                into.incomplete.append(environment)
                whole = False
            elif isinstance(encoded, Note):
                into.notes.append((encoded, _group_of(member)))
                whole = False
            elif whole:
                size_bytes += sum([sample.size_bytes for sample in encoded])
                samples += encoded
                if size_bytes > settings.max_sample_bytes:
                    samples.clear()  # of what is too big no more than this is ever held
        if not whole:
            return None
        if size_bytes > settings.max_sample_bytes:
            group = _group_of(member)
            into.notes += [(note, group) for note in _too_big(unit, group, size_bytes, settings)]
            return None
        return samples, size_bytes

    def _count(
        self, environment: int, encoded: list[Sample] | Note | None, into: Collected
    ) -> None:
        """Count bad rows in a row, and who waits for a reward."""
        if encoded is None:
            self.unrewarded.add(environment)
            return
        self.unrewarded.discard(environment)
        if not isinstance(encoded, Note):
            into.bad_in_a_row = 0
        elif not encoded.policy:
            into.bad_in_a_row += 1


def _are_sound(sample: Sample) -> bool:
    return codec.are_sound(sample.line, (sample.messages,))


def _too_big(unit: Unit, group: str, size_bytes: int, settings: Settings) -> Iterator[Note]:
    """Yield a note for each member of a group that is too big as a whole."""
    bound = f"more than max_sample_bytes = {settings.max_sample_bytes}"
    for environment in unit:
        what = f"its group {group} is {size_bytes} bytes, {bound}"
        yield Note(environment=environment, env_id="", reason="too-big", what=what)


def _group_of(row: StepRow | None) -> str:
    group = row.group_id if row is not None else None
    return group.decode(errors="replace") if isinstance(group, bytes) else ""
