"""Names and files at random in every directory: the daemon serves the rest, or says why not."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spoold.errors import SpooldError
from spoold.layout import BatchName, RunDir
from spoold.spool.check import look
from tests.crash import acts, verdict

FOLDERS = ("", "pending", "inflight", "inflight/trainer-0", "acked", "acked/step-000000001")
FOLDERS += ("rejected", "rejected/oom", "retired", ".spoold", ".spoold/ledger")

NEARLY = (
    "000000001-n2-w3.3-0a1b2c3d4e5f.jsonl",
    "000000001-n2-w3.3-0a1b2c3d4e5f",
    "000000002-n1-w0.0-0a1b2c3d4e5f.try02.jsonl",
    "env-3.bad-json.json",
    "seq-000000064",
    "merged-1",
    "step-000000007",
    "source.json",
    "status.json.123",
    ".lock",
)


@st.composite
def nearly(draw: st.DrawFn) -> bytes:
    """A name of the contract with one thing changed, or with none."""
    name = bytearray(draw(st.sampled_from(NEARLY)).encode())
    at = draw(st.integers(0, len(name) - 1))
    how = draw(st.sampled_from(["as it is", "change", "drop", "double", "cut"]))
    if how == "change":
        name[at] = draw(st.integers(1, 255).filter(lambda byte: byte != 0x2F))
    elif how == "drop":
        del name[at]
    elif how == "double":
        name.insert(at, name[at])
    elif how == "cut":
        del name[at + 1 :]
    return bytes(name)


any_bytes = st.binary(min_size=1, max_size=100).filter(lambda b: not set(b) & {0, 0x2F})
names = (nearly() | any_bytes).filter(lambda name: name not in (b"", b".", b".."))
kinds = st.sampled_from(["file", "file", "folder", "link", "pipe"])


def make(path: bytes, kind: str, data: bytes) -> None:
    if kind == "folder":
        os.mkdir(path)
    elif kind == "link":
        os.symlink(b"/etc/passwd", path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        with open(path, "wb") as file:
            file.write(data)


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        acts.BY_NAME["rewind"].prepare(Path(folder))
        for name in FOLDERS:
            (Path(folder) / "run" / name).mkdir(exist_ok=True)
        (Path(folder) / "run/.spoold/ledger/odd").unlink()
        acts.complete_more(Path(folder), 2)
        yield Path(folder)


things = st.lists(st.tuples(st.sampled_from(FOLDERS), names, kinds, st.binary(max_size=40)))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(things=things)
def test_whatever_lies_about_the_daemon_serves_the_rest_or_says_what_stops_it(
    template: Path, things: list[tuple[str, bytes, str, bytes]]
) -> None:
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home, "it")
        shutil.copytree(template, folder)
        before = verdict.look(folder / "run")
        made = []
        for where, name, kind, data in things:
            path = os.path.join(os.fsencode(folder / "run"), os.fsencode(where), name)
            if not os.path.lexists(path):
                make(path, kind, data)
                made.append(path)
        look(RunDir(f"{folder}/run"))
        error = error_of_a_start(folder)
        if error is not None:
            assert error.exit_code in (65, 74, 75, 78)
            assert error.hint, error
            return
        for path in made:
            is_batch = BatchName.parse(os.fsdecode(os.path.basename(path))) is not None
            if not is_batch and b"/.spoold/" not in path:
                assert os.path.lexists(path), path
        now = {path.name for path in (folder / "run").rglob("*.jsonl")}
        assert {os.path.basename(places[0]) for places in before.places.values()} <= now
        # A file that has the name of a note, or lies in the ledger, may say something.
        if not any(b"/rejected/" in path or b"/.spoold/" in path for path in made):
            verdict.assert_each_once(folder, verdict.look(folder / "run", lost=True))


def error_of_a_start(folder: Path) -> SpooldError | None:
    try:
        acts.once(folder)
    except SpooldError as error:
        return error
    return None
