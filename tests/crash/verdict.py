"""What must hold in a run directory at any moment, and after the next start.

Trusts nothing that spoold remembers: everything is read from the files with json and hashlib.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sqlite3
import stat
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from pyroaring import BitMap64

from spoold.layout import BatchName, NoteName, State
from tests.crash import acts

_NOTHING = ("rejected/duplicate", "rejected/corrupt")


@dataclass
class Seen:
    """What was there before an act, or is there now: the batches that are whole, by id.

    `places` are the paths of each, `digests` what its bytes are, `numbers` what each number names.
    """

    places: dict[str, list[str]] = field(default_factory=dict)
    bytes: dict[str, str] = field(default_factory=dict)
    environments: dict[str, tuple[int, ...]] = field(default_factory=dict)
    strangers: dict[str, bytes] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    may_go: bool = False

    @property
    def numbers(self) -> dict[int, str]:
        return {int(i.partition("-")[0]): i for i in self.places}


def look(run: Path, *, lost: bool = False) -> Seen:
    """Read every file under the run directory.

    Fails where one is half there; unless `lost`, for where a copy made by hand was not synced: then
    it is one that counts for nothing.
    """
    seen = Seen()
    for path in sorted(run.rglob("*")):
        where = path.relative_to(run).as_posix()
        if path.is_dir():
            seen.folders.add(where)
        if path.is_symlink() or not path.is_file() or where.startswith(".spoold/tmp/"):
            continue
        name = BatchName.parse(path.name)
        if name is not None and os.path.dirname(where) not in _NOTHING:
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            if not digest.startswith(name.digest):
                # b"\0" * 100: damage by an act itself
                assert lost or data == b"\0" * 100, f"{where} is half there"
                continue
            assert stat.S_IMODE(path.stat().st_mode) == 0o640, where
            seen.places.setdefault(name.id, []).append(where)
            seen.bytes[name.id] = digest
            lines = [json.loads(line) for line in data.splitlines()]
            seen.environments[name.id] = tuple(s["extra_info"]["environment"] for s in lines)
        elif where in acts.STRANGERS:
            seen.strangers[where] = path.read_bytes()
        elif _is_json(where):
            json.loads(path.read_bytes())
    return seen


def _is_json(where: str) -> bool:
    folder, name = os.path.split(where)
    is_note = folder == State.REJECTED and NoteName.parse(name) is not None
    return is_note or folder == ".spoold/ledger" or where == ".spoold/source.json"


def at_rest(folder: Path, before: Seen) -> Seen:
    """Check a run directory just after a crash, before anybody touched it."""
    run = folder / "run"
    now = look(run)
    assert before.strangers == now.strangers, "an unknown file changed"
    for batch_id, digest in before.bytes.items():
        if before.may_go and (run / ".spoold/ledger" / batch_id).exists():
            continue  # settled, and removed for good
        assert now.bytes.get(batch_id) == digest, f"{batch_id} is gone or changed"
    _same_numbers(before, now)
    return now


def _same_numbers(before: Seen, now: Seen) -> None:
    for number, batch_id in now.numbers.items():
        assert before.numbers.get(number, batch_id) == batch_id, f"number {number} was used again"
    assert len(now.numbers) == len(now.places), "one number for two batches"


def after_restart(folder: Path, before: Seen) -> Seen:
    """Start the daemon once, normally, and check that each environment is there once."""
    acts.once(folder)
    now = at_rest(folder, before)
    run = folder / "run"
    assert os.listdir(run / ".spoold/tmp") == []
    assert_each_once(folder, now)
    for folder_made in now.folders - before.folders:
        mode = stat.S_IMODE((run / folder_made).stat().st_mode)
        assert mode == 0o2770, f"{folder_made}/ has mode {mode:o}"
    (seq,) = [name for name in os.listdir(run / ".spoold") if name.startswith("seq-")]
    assert int(seq[4:]) >= max(now.numbers, default=0)
    return now


def assert_each_once(folder: Path, now: Seen) -> None:
    """Each complete environment is in one batch, one note, or in the ledger alone."""
    run = folder / "run"
    times: Counter[int] = Counter()
    here: set[str] = set()
    for batch_id, places in now.places.items():
        for place in places:
            if place.partition("/")[0] in set(State):
                times.update(now.environments[batch_id])
                here.add(batch_id)
    for path in (run / "rejected").iterdir():
        note = NoteName.parse(path.name)
        times.update([note.environment] if note else [])
    for path in (run / ".spoold/ledger").iterdir():
        if path.name.startswith("merged-"):
            bitmap = json.loads(path.read_bytes())["roaring64"]
            for one in BitMap64.deserialize(base64.b64decode(bitmap)):
                times[one] = max(times[one], 1)
        elif path.name != "odd":
            if path.name not in here:
                for one in json.loads(path.read_bytes())["environments"]:
                    times[one] = max(times[one], 1)
            else:
                assert now.places[path.name][0].startswith("acked/"), f"entry of {path.name}"
    wanted = complete(folder)
    doubled = {one for one, count in times.items() if count > 1}
    assert not doubled, f"environments there twice: {doubled}"
    assert set(times) == wanted, f"lost {wanted - set(times)}, unasked {set(times) - wanted}"


def complete(folder: Path) -> set[int]:
    """The environments that the database calls complete, by an obvious query."""
    query = (
        "SELECT id FROM job_environments AS e WHERE finished = 1 AND is_deleted = 0 AND EXISTS"
        " (SELECT 1 FROM session_steps AS s WHERE s.session_id = e.env_id AND is_terminal = 1)"
    )
    with closing(sqlite3.connect(f"file:{folder}/rollout.db?mode=ro", uri=True)) as db:
        return {one for (one,) in db.execute(query)}


def said(folder: Path) -> list[tuple[str, str]]:
    """What the process said is durable: (word, batch id), in order."""
    try:
        lines = acts.said_file(folder).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(word, batch_id) for word, _, batch_id in (line.partition(" ") for line in lines)]


_WHERE = {
    "published": ("pending/", "acked/", "inflight/"),
    "acked": ("acked/",),
    "released": ("pending/",),
    "rejected": ("rejected/",),
    "rewound": ("pending/",),
}


def assert_kept(folder: Path, now: Seen) -> int:
    """What was said to be durable is there. Returns how many such promises there were."""
    last = {batch_id: word for word, batch_id in said(folder)}
    for batch_id, word in last.items():
        assert batch_id in now.places, f"{word} {batch_id}, and it is gone"
        assert now.places[batch_id][0].startswith(_WHERE[word]), (word, now.places[batch_id])
    return len(last)
