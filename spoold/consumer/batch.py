"""A batch in a trainer's hands: its samples, and what becomes of it."""

from __future__ import annotations

import enum
import hashlib
import io
import json
import logging
import os
from typing import Any, Protocol, TypeAlias

from spoold import fs
from spoold.errors import BatchCorrupt, BatchLost, ConfigError, ConsumerError, UnknownBatch
from spoold.layout import BatchName, RunDir
from spoold.spool import moves

__all__ = ["Batch", "Holder", "Sample", "fits"]

_log = logging.getLogger("spoold.consumer")

Sample: TypeAlias = dict[str, Any]
"""One line of a batch: uid, instance_id, messages, reward, extra_info."""


class Holder(Protocol):
    """Who claimed a batch: the consumer, as a batch sees it."""

    @property
    def run(self) -> RunDir:
        """The run directory."""

    def check_usable(self, act: str) -> None:
        """Raise ConsumerError where this process does not hold the consumer's lock (any more)."""

    def let_go(self, batch_id: str, *, acked: bool) -> None:
        """Take note that a batch is held no more."""


class _Fate(enum.Enum):
    HELD = "held"
    ACKED = "acked"
    RELEASED = "released"
    REJECTED = "rejected"


class Batch:
    """A batch that a consumer handed out, or that a rank opened for reading.

    Nothing of the file is kept in memory: each call that returns samples reads it. A batch may be
    acked, released or rejected from another thread than the one that claims.
    """

    __slots__ = ("_checked", "_fate", "_found", "_holder", "_id", "_name", "_path")

    def __init__(
        self,
        name: BatchName,
        *,
        path: str = "",
        found: moves.Found | None = None,
        holder: Holder | None = None,
    ) -> None:
        self._name = name
        self._id = name.id
        self._path = path
        self._found = found
        self._holder = holder
        self._fate = _Fate.HELD
        # A consumer has compared the digest when it claimed.
        self._checked = holder is not None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Batch:
        """Return the batch at `path`, for a rank that only reads; it cannot be acked from here.

        Nothing is read yet; the first call that returns samples compares the digest. Raises
        UnknownBatch where no file with the name of a batch is there.
        """
        path = os.path.abspath(path)
        name = BatchName.parse(os.path.basename(path))
        if name is None or not os.path.isfile(path):
            raise UnknownBatch(
                f"no batch at {path}",
                hint="give the path of the rank that claimed it, as batch.path tells it",
            )
        return cls(name, path=path)

    @property
    def id(self) -> str:
        """The batch id: the same for every try."""
        return self._id

    @property
    def path(self) -> str:
        """The absolute path of the file, as far as this process moved it."""
        if self._found is not None and self._holder is not None:
            return self._found.path(self._holder.run)
        return self._path

    @property
    def attempt(self) -> int:
        """1 for a batch handed out for the first time, 2 and up for one that came back."""
        return self._name.attempt

    @property
    def weight_versions(self) -> tuple[int, int]:
        """The least and the greatest weight version of its samples; (0, 0) if none is usable."""
        return self._name.lo, self._name.hi

    def __len__(self) -> int:
        """Return the number of samples. Opens nothing."""
        return self._name.samples

    def __repr__(self) -> str:
        return f"<Batch {self._name.file_name} {self._fate.value}>"

    def samples(self) -> list[Sample]:
        """Return all samples, in the order of the file. Integers of any size are exact.

        Raises BatchLost where the file was moved away, BatchCorrupt where a batch that was opened
        by path fails its digest.
        """
        try:
            return [json.loads(line) for line in io.BytesIO(self._read())]
        except ValueError as error:
            # The digest fits: whoever wrote the file wrote this.
            raise BatchCorrupt(f"{self.path} holds a line that is no JSON: {error}") from error

    def file(self) -> io.BufferedReader:
        """Return the file, open for reading, at its beginning.

        To pass a batch on without taking it apart. What is moved or removed meanwhile does not
        matter to it. Raises BatchLost where the file was moved away before. The digest of a batch
        that was opened by path is not compared.
        """
        try:
            return fs.open_file(self.path)
        except FileNotFoundError as error:
            raise self._lost("read") from error

    def groups(self) -> list[list[Sample]]:
        """Return the samples by `instance_id`, groups and members in the order of the file.

        Where an environment has no group it is one by itself.
        """
        by_instance: dict[str, list[Sample]] = {}
        for sample in self.samples():
            by_instance.setdefault(sample["instance_id"], []).append(sample)
        return list(by_instance.values())

    def shard(self, rank: int, world_size: int) -> list[Sample]:
        """Return this rank's part: whole groups, and the same number of samples on every rank.

        The rule: each group in turn goes to the rank with the fewest samples so far, the lowest of
        those. So no sample is left out and, before filling up, none is on two ranks. A rank that
        has fewer samples than the fullest is then filled up by repeating its own from the
        beginning; one that has none (fewer groups than ranks) repeats group `rank % groups`. Only
        repeats follow the samples of a rank, so that a trainer can find and mask them by uid.

        The answer is a function of the bytes: ranks need not talk to each other.
        """
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"there is no rank {rank} of {world_size}",
                hint="ranks count from 0 to world_size - 1",
            )
        groups = self.groups()
        ranks: list[list[Sample]] = [[] for _ in range(world_size)]
        for group in groups:
            min(ranks, key=len).extend(group)
        own = ranks[rank]
        most = max(map(len, ranks))
        repeats = own or groups[rank % len(groups)]
        times = -(-most // len(repeats))
        return [*own, *(repeats * times)][:most]

    def ack(self, step: int | None = None) -> None:
        """Move the batch to acked/, durably; with a step under that step, so that rewind finds it.

        Safe to call twice. Does not prove that the trainer saved its weights: take the optimizer
        step, ack with that step, then save. Without a step the ack is final.

        Raises BatchLost where the file was moved away, saying where it lies; a batch whose source
        was replaced is acked with a warning. ConsumerError after release or reject.
        """
        if self._fate is _Fate.ACKED:
            return
        holder, found = self._held("ack")
        moved = moves.ack(holder.run, found, step)
        if moved is None:
            self._path = self._retired_path(holder.run)
        self._settle(holder, _Fate.ACKED, moved)

    def release(self) -> None:
        """Give the batch back to pending/, durably; any consumer may claim it, this one too."""
        holder, found = self._held("release")
        moved = moves.release(holder.run, found)
        if moved is None:
            raise self._lost("release")
        self._settle(holder, _Fate.RELEASED, moved)

    def reject(self, reason: str) -> None:
        """Move the batch to rejected/<reason>/, durably: nobody gets it again.

        Raises ConfigError where `reason` cannot name a folder.
        """
        holder, found = self._held("reject")
        moved = moves.reject(holder.run, found, reason)
        if moved is None:
            raise self._lost("reject")
        self._settle(holder, _Fate.REJECTED, moved)

    def _held(self, act: str) -> tuple[Holder, moves.Found]:
        if self._holder is None or self._found is None:
            raise ConsumerError(
                f"cannot {act} {self.id}: it was opened for reading",
                hint="the rank that claimed it does that, once, when all ranks are done",
            )
        if self._fate is not _Fate.HELD:
            raise ConsumerError(
                f"cannot {act} {self.id}: it was {self._fate.value} before",
                hint="a batch can be used until it is acked, released or rejected",
            )
        self._holder.check_usable(act)
        return self._holder, self._found

    def _settle(self, holder: Holder, fate: _Fate, found: moves.Found | None) -> None:
        self._fate = fate
        self._found = found
        holder.let_go(self._id, acked=fate is _Fate.ACKED)

    def _retired_path(self, run: RunDir) -> str:
        """Return where the batch lies if its source was replaced; otherwise it is lost."""
        path = None if _place_words(run, self.id) else moves.find_retired(run, self.id)
        if path is None:
            raise self._lost("ack")
        _log.warning(
            "batch %s is of a source that was replaced: it lies at %s and counts as acked",
            self.id,
            path,
        )
        return path

    def _lost(self, act: str) -> BatchLost:
        words = ""
        if self._holder is not None:
            self._holder.let_go(self.id, acked=False)
            words = _place_words(self._holder.run, self.id)
        return BatchLost(
            f"cannot {act} {self.id}: it is not at {self.path} any more",
            hint=words or "it is in none of the four directories; somebody removed it",
        )

    def _read(self) -> bytes:
        try:
            data = fs.read(self.path)
        except FileNotFoundError as error:
            raise self._lost("read") from error
        if not self._checked:
            if not fits(data, self._name):
                raise BatchCorrupt(
                    f"{self.path} fails the digest in its name",
                    hint="`sha256sum` shows it; the daemon sets such a file aside",
                )
            self._checked = True
        return data


def fits(data: bytes | memoryview, name: BatchName) -> bool:
    """Whether the bytes are those that the name was given for."""
    return hashlib.sha256(data).hexdigest().startswith(name.digest)


def _place_words(run: RunDir, batch_id: str) -> str:
    """Say where a batch lies now, "" where it is in none of the four directories."""
    try:
        return f"it lies in {moves.locate(run, batch_id).place.path}/ now"
    except (UnknownBatch, FileNotFoundError):
        return ""
