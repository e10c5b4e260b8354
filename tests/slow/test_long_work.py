"""What takes long at its real size: shown on a terminal, silent in a pipe, and not without end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spoold.layout import RunDir, State
from tests.support.batches import batch, empty_run
from tests.support.commands import spoold_process
from tests.support.processes import ENVIRON
from tests.support.rollouts import make_rollouts
from tests.support.terminals import Terminal

pytestmark = pytest.mark.slow

MILLION, MANY = 1_000_000, 100_000
# Each takes a few seconds on an idle machine.
BOUND_SECONDS = 120.0
# Said from the first item on: a fast machine is done before a person would want to know.
AT_ONCE = (
    "import sys; from spoold.cli import main, progress; progress.FIRST_SECONDS = 0.0;"
    " main(sys.argv[1:])"
)


def shown(*words: object, folder: Path) -> tuple[bytes, str]:
    """Run a command on a terminal, its data going to a file. What was on the screen; the data."""
    out = folder / "out"
    with open(out, "wb") as file:
        terminal = Terminal(*words, columns=120, stdout=file.fileno(), program=("-c", AT_ONCE))
        try:
            began = time.monotonic()
            assert terminal.end(timeout_seconds=BOUND_SECONDS) == 0
            assert time.monotonic() - began < BOUND_SECONDS
            terminal.drain()
        finally:
            terminal.close()
    return terminal.seen, out.read_text()


def steps_of(seen: bytes, what: str) -> list[int]:
    """How far it was said to be, each time."""
    pattern = rf"\r\x1b\[K{what} ([0-9,]+) of [0-9,]+ \([0-9]+ %\)\r"
    return [int(n.replace(",", "")) for n in re.findall(pattern, seen.decode())]


def assert_went_on(steps: list[int]) -> None:
    assert steps
    assert steps == sorted(steps)


@pytest.fixture
def million(home: Path) -> Path:
    """A database with a million environments, a step row of each, none of them complete."""
    rollouts = make_rollouts(home / "rollout.db")
    count = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
    with rollouts.together():
        rollouts.db.execute(
            f"{count} INSERT INTO job_environments (job_id, env_id, env_name, env_params)"
            " SELECT 'job-1', printf('e%08d', i), 'math', '{}' FROM n",
            (MILLION,),
        )
        rollouts.db.execute(
            f"{count} INSERT INTO session_steps (record_id, session_id, step_id, env_name,"
            " llm_model, job_id, messages, response)"
            " SELECT printf('r%d', i), printf('e%08d', i), 1, 'math', 'm', 'job-1', '[]', 'x'"
            " FROM n",
            (MILLION,),
        )
    rollouts.close()
    return home / "rollout.db"


def test_the_first_look_at_a_million_rows(million: Path, home: Path) -> None:
    options = ("run", "--once", "--db", million, "--run-dir", home / "run")
    seen, _ = shown(*options, folder=home)
    assert_went_on(steps_of(seen, "looking at environments"))
    assert b"done running=1000000" in seen
    piped = spoold_process(*options)
    assert piped.code == 0
    assert "looking at" not in piped.err
    assert "\x1b" not in piped.err


def many_batches(root: Path, *, state: State, with_entries: bool) -> RunDir:
    """A hundred thousand batches of two samples, of a day."""
    run = empty_run(root)
    began = 1_796_000_000
    _, data = batch(1, [1, 2], group="g")
    folder = f"{run.root}/{state}"
    for seq in range(1, MANY + 1):
        batch_id = f"{seq:09d}-n2-w{seq // 1000}.{seq // 900}-{seq:012x}"
        path = f"{folder}/{batch_id}.jsonl"
        fd = os.open(path, os.O_CREAT | os.O_WRONLY)
        os.write(fd, data)
        os.close(fd)
        os.utime(path, (began + seq, began + seq))
        if with_entries:
            fd = os.open(f"{run.ledger}/{batch_id}", os.O_CREAT | os.O_WRONLY)
            os.write(fd, json.dumps({"environments": [2 * seq], "env_id": "e"}).encode())
            os.close(fd)
    return run


def test_a_prune_of_a_hundred_thousand_files(home: Path) -> None:
    run = many_batches(home / "run", state=State.ACKED, with_entries=True)
    seen, data = shown("prune", run.root, folder=home)
    assert_went_on(steps_of(seen, "removing batches"))
    assert len(data.splitlines()) == MANY
    assert os.listdir(run.acked) == []
    assert len(os.listdir(run.ledger)) == MANY


def test_a_report_of_a_hundred_thousand_batches(home: Path) -> None:
    run = many_batches(home / "run", state=State.ACKED, with_entries=False)
    page = home / "report.html"
    seen, _ = shown("report", run.root, "-o", page, folder=home)
    assert_went_on(steps_of(seen, "reading batches"))
    assert page.stat().st_size < 500_000
    assert "one in 10 was opened" in page.read_text()
    # Names and times of all of them are held, and one batch.
    # (Not ru_maxrss: a child begins with that of the process that started it.)
    code = "import sys; from spoold.cli import main\ntry: main(sys.argv[1:])\nfinally: "
    code += "print([n.split()[1] for n in open('/proc/self/status') if 'VmHWM' in n][0], "
    code += "file=sys.stderr)"
    ran = subprocess.run(
        [sys.executable, "-c", code, "report", run.root, "-o", page],
        capture_output=True,
        text=True,
        env=ENVIRON,
        timeout=BOUND_SECONDS,
    )
    *words, peak_kib = ran.stderr.splitlines()
    assert words == [f"spoold: {page} shows 100,000 batches"]
    assert int(peak_kib) < 300 << 10
