"""Every move of a batch, one function a word. Used by consumers, the daemon and the command line.

| word    | from               | to                       | by                          |
|---------|--------------------|--------------------------|-----------------------------|
| claim   | pending/           | inflight/[<consumer>/]   | consumer, script            |
| ack     | inflight/…         | acked/[step-N/]          | consumer, script            |
| release | inflight/…         | pending/                 | its consumer                |
| requeue | inflight/…         | pending/, as next try    | daemon, operator            |
| reject  | anywhere           | rejected/<reason>/       | consumer, daemon, operator  |
| rewind  | acked/step-N/      | pending/                 | after loading a checkpoint  |
| stale   | pending, inflight/ | acked/stale/             | consumer                    |

(publish is in `spoold.spool.publish`, retire in `spoold.spool.retire`.)

A move is one rename on one file system and never replaces a file. All but claim are durable when
the function returns: destination synced, then source. Between listing and rename anybody may move
the file: then the function returns None and nothing has happened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from spoold import fs
from spoold.errors import ConfigError, UnknownBatch
from spoold.layout import (
    CORRUPT,
    DUPLICATE,
    MOVES,
    STALE,
    BatchName,
    Move,
    Place,
    RunDir,
    State,
    batch_id_of,
    is_name,
    precedence,
    step_folder,
)

__all__ = [
    "Found",
    "ack",
    "claim",
    "find",
    "find_retired",
    "folders_of",
    "locate",
    "reject",
    "release",
    "requeue",
    "rewind",
    "set_aside",
    "skip_stale",
]

PENDING: Final = Place(State.PENDING)


@dataclass(frozen=True, slots=True)
class Found:
    """A batch file: where it lies, and its name taken apart."""

    place: Place
    name: BatchName

    def path(self, run: RunDir) -> str:
        """Return the path of the file."""
        return run.file(self.place, self.name.file_name)


def _move(
    run: RunDir, word: Move, found: Found, place: Place, *, next_attempt: bool = False
) -> Found | None:
    """Move a batch durably. None when it is not there any more."""
    sources, target = MOVES[word]
    if found.place.state not in sources or place.state is not target:
        allowed = " or ".join(sorted(state.value for state in sources))
        raise UnknownBatch(
            f"cannot {word.value} {found.name.id}: it lies in {found.place.path}/",
            hint=f"only a batch in {allowed} can be moved like that; by hand, mv -n does any move",
        )
    name = found.name.next_attempt() if next_attempt else found.name
    moved = Found(place, name)
    if moved == found:
        return found  # rejected for this reason before: to itself it would look like a copy
    while True:
        if place.folder:
            fs.make_dirs(run.of(place))
        try:
            fs.move(found.path(run), moved.path(run))
        except FileNotFoundError:
            # RACE: somebody moved the batch first; or it is still there, and somebody removed the
            # empty folder that it goes to (prune does), and another may have made it again.
            if not os.path.lexists(found.path(run)):
                return None
            fs.make_dirs(run.of(place))
            continue
        except FileExistsError:
            # The same batch lies there already (a copy, a restored backup): that one stays.
            return moved if set_aside(run, found, DUPLICATE) is not None else None
        return moved


def claim(run: RunDir, name: BatchName, consumer: str = "") -> Found | None:
    """Move a batch from pending/ into a consumer's folder, or into inflight/ itself.

    None when another consumer won. Nothing is synced: after a power cut the batch is pending again
    or claimed, and both are right.
    """
    found = Found(PENDING, name)
    place = Place(State.INFLIGHT, consumer)
    try:
        fs.rename_noreplace(found.path(run), run.file(place, name.file_name))
    except FileNotFoundError:
        return None
    except FileExistsError:
        set_aside(run, found, DUPLICATE)
        return None
    return Found(place, name)


def ack(run: RunDir, found: Found, step: int | None = None) -> Found | None:
    """Move a claimed batch to acked/, durably; with a step into that step's folder."""
    if step is not None and not 0 <= step < 10**18:
        raise ConfigError(f"a step is an integer from 0 to 10^18 - 1, not {step}")
    folder = "" if step is None else step_folder(step)
    return _move(run, Move.ACK, found, Place(State.ACKED, folder))


def release(run: RunDir, found: Found) -> Found | None:
    """Give a claimed batch back to pending/, under the same name."""
    return _move(run, Move.RELEASE, found, PENDING)


def requeue(run: RunDir, found: Found) -> Found | None:
    """Put a batch whose consumer is gone back into pending/, as its next try."""
    return _move(run, Move.REQUEUE, found, PENDING, next_attempt=True)


def reject(run: RunDir, found: Found, reason: str) -> Found | None:
    """Move a batch to rejected/<reason>/: it will not be handed out again.

    Raises ConfigError where the reason cannot name a folder, or is one that the daemon keeps for
    files that count for nothing.
    """
    if not is_name(reason) or reason in (DUPLICATE, CORRUPT):
        raise ConfigError(
            f"{reason!r} cannot be the reason of a reject",
            hint="a reason is 1 to 48 letters, digits, - and _, and neither duplicate nor corrupt",
        )
    return _move(run, Move.REJECT, found, Place(State.REJECTED, reason))


def rewind(run: RunDir, step: int) -> Iterator[Found]:
    """Put every batch acknowledged with a later step back into pending/, name and bytes unchanged.

    Yields each where it lies now, oldest first; what was not yielded yet may still be in acked/.
    Batches acknowledged without a step, or passed over as stale, stay. Raises ConfigError for what
    is no step.
    """
    if isinstance(step, bool) or not isinstance(step, int):
        raise ConfigError(
            f"cannot rewind to step {step!r}",
            hint="give the step of the checkpoint, an integer; -1 where there is none",
        )
    try:
        acked = find(run, State.ACKED)
    except FileNotFoundError:
        return
    later = [f for f in acked if f.place.step is not None and f.place.step > step]
    for found in sorted(later, key=lambda found: found.name.seq):
        back = _move(run, Move.REWIND, found, PENDING)
        if back is not None:
            yield back


def skip_stale(run: RunDir, found: Found) -> Found | None:
    """Move a batch that is too old to train on to acked/stale/."""
    return _move(run, Move.SKIP_STALE, found, Place(State.ACKED, STALE))


def set_aside(run: RunDir, found: Found, folder: str) -> Found | None:
    """Move a file that counts for nothing to rejected/duplicate/ or rejected/corrupt/, durably.

    A file of that name which already lies there is replaced. None when it is not there any more.
    """
    assert folder in (DUPLICATE, CORRUPT)
    place = Place(State.REJECTED, folder)
    fs.make_dirs(run.of(place))
    moved = Found(place, found.name)
    try:
        fs.rename_over(found.path(run), moved.path(run))
    except FileNotFoundError:
        return None
    return moved


def folders_of(run: RunDir, state: State) -> list[Place]:
    """Return the places of a state: its directory, then the folders in it by name."""
    names = sorted(fs.scan(f"{run.root}/{state.value}").folders)
    return [Place(state), *(Place(state, name) for name in names)]


def find(run: RunDir, state: State) -> list[Found]:
    """Return the batches that lie in a state now, by name. Reads names only."""
    found: list[Found] = []
    for place in folders_of(run, state):
        try:
            names = fs.scan(run.of(place)).files
        except FileNotFoundError:
            continue
        parsed = map(BatchName.parse, names)
        found += [Found(place, name) for name in parsed if name is not None]
    return sorted(found, key=lambda f: f.name.file_name)


def locate(run: RunDir, text: str) -> Found:
    """Return the one batch that a batch id, a unique beginning of one, or a path names.

    Of several files with one id, the one that counts. Raises UnknownBatch when there is none, or
    when the beginning fits several batches.
    """
    wanted = os.path.basename(text)
    wanted = batch_id_of(wanted) or wanted.removesuffix(".jsonl")
    best: dict[str, Found] = {}
    for _ in range(2):  # RACE: a batch may move to a folder that was listed already
        for state in State:
            for found in find(run, state):
                if wanted and found.name.id.startswith(wanted):
                    known = best.get(found.name.id)
                    if known is None or _rank(found) > _rank(known):
                        best[found.name.id] = found
        if best:
            break
    if wanted in best:
        return best[wanted]
    if len(best) == 1:
        return next(iter(best.values()))
    if not best:
        raise UnknownBatch(
            f"no batch {text!r} in {run.root}", hint=f"`spoold ls {run.root}` lists the batches"
        )
    few = ", ".join([*sorted(best)[:3], *(["…"] if len(best) > 3 else [])])
    raise UnknownBatch(
        f"{len(best)} batches in {run.root} begin with {text!r}: {few}",
        hint="give more of the name",
    )


def find_retired(run: RunDir, batch_id: str) -> str | None:
    """Return the path of a batch below retired/, None where it is not there."""
    for folder, _, names in os.walk(run.retired):
        for name in names:
            if batch_id_of(name) == batch_id:
                return f"{folder}/{name}"
    return None


def _rank(found: Found) -> tuple[bool, tuple[int, int]]:
    return found.place.counts, precedence(found.place, found.name.attempt)
