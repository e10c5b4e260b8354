"""The daemon beside a writer at full speed: the writer never notices, and nothing is missed.

Each statement of the writer is timed, in a run with the daemon and in the same run without. What is
asserted holds on a slow machine too: no statement fails, none waits for us, the WAL is truncated
again and again, everything is delivered once. `SPOOLD_SOAK_SECONDS` sets the length (60), a quarter
of it for the run without.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spoold.layout import RunDir, State
from tests.support.daemons import environments
from tests.support.processes import ENVIRON, Players, until
from tests.support.rollouts import make_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.alone]

SECONDS = float(os.environ.get("SPOOLD_SOAK_SECONDS", "60"))
ALONE_SECONDS = SECONDS / 4
# No reader may make a writer in WAL mode wait at all. Scheduling and disks may: a bound for those.
LONGEST_SECONDS = 2.0

# Writes as the project does, 64 environments a transaction, without a pause; says how it went.
WRITER = """
import json, sys, time
from tests.support.rollouts import open_rollouts

database, seconds = sys.argv[1], float(sys.argv[2])
rollouts = open_rollouts(database)
rollouts.db.execute("PRAGMA busy_timeout = 0")  # whoever makes it wait makes it fail
rollouts.db.execute("PRAGMA synchronous = normal")
rollouts.db.execute("PRAGMA wal_autocheckpoint = 0")
took, truncated, checkpoints, ids = [], 0, 0, []
end = time.monotonic() + seconds


def timed(act):
    began = time.perf_counter()
    result = act()
    took.append(time.perf_counter() - began)
    return result


while time.monotonic() < end:
    def register():
        with rollouts.together():
            return rollouts.register(64, group="")

    def flush():
        with rollouts.together():
            for one in batch:
                rollouts.step(one, response="x" * 1000)
                rollouts.end(one, response="x" * 2000)

    batch = timed(register)
    timed(flush)
    for one in batch[::8]:
        timed(lambda one=one: rollouts.finish(one))
    timed(lambda: rollouts.db.execute(
        "UPDATE job_environments SET finished = 1 WHERE id BETWEEN ? AND ?", (batch[0], batch[-1])))
    ids += batch
    if len(ids) % 1024 == 0:
        # A reader in the middle of its transaction holds this up for that long, and no longer.
        began = time.monotonic()
        while time.monotonic() - began < 2.0:
            checkpoints += 1
            busy, _, _ = rollouts.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if not busy:
                truncated += 1
                break
            time.sleep(0.001)
        else:
            raise SystemExit("the WAL could not be truncated for two seconds")
took.sort()
print(json.dumps({
    "statements": len(took), "environments": len(ids), "truncated": truncated,
    "median": took[len(took) // 2], "p99": took[len(took) * 99 // 100], "longest": took[-1]}))
"""

TRAINER = """
import sys
from spoold import Consumer
with Consumer(sys.argv[1], name="trainer") as consumer:
    for batch in consumer:
        batch.ack()
"""


def write(database: Path, seconds: float) -> dict[str, float]:
    """Write for a while; what the writer says of its statements."""
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(database), str(seconds)],
        env={**ENVIRON, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=seconds * 3 + 60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    return found


def test_no_statement_of_the_writer_waits_or_fails_and_nothing_is_missed(tmp_path: Path) -> None:
    found = {}
    for name, seconds in (("without", ALONE_SECONDS), ("with", SECONDS)):
        folder = tmp_path / name
        folder.mkdir()
        make_rollouts(folder / "rollout.db").close()
        with Players(folder) as players:
            run_dir = str(folder / "run")
            if name == "with":
                command = [sys.executable, "-m", "spoold", "run", "--db", f"{folder}/rollout.db"]
                command += ["--run-dir", run_dir, "--min-free-bytes", "0"]
                players.start("daemon", command)
                players.start("trainer", [sys.executable, "-c", TRAINER, run_dir])
            found[name] = write(folder / "rollout.db", seconds)
            if name == "with":
                wanted = int(found[name]["environments"])

                def all_acked(run_dir: str = run_dir, wanted: int = wanted) -> bool:
                    names = os.listdir(f"{run_dir}/{State.ACKED}")
                    return sum(int(n.split("-")[1][1:]) for n in names if n[0] != ".") >= wanted

                until(all_acked, "all to be acked", timeout_seconds=120)
                players.check("daemon", "trainer")
                assert players.stop("daemon") == 0
    print(json.dumps(found, indent=1))
    with_us, alone = found["with"], found["without"]
    assert with_us["truncated"] > 0
    assert with_us["longest"] < max(LONGEST_SECONDS, 2 * alone["longest"])
    ids = environments(RunDir(str(tmp_path / "with/run")))
    for name in found:
        shutil.rmtree(tmp_path / name)  # a gigabyte and more
    assert sorted(ids) == list(range(1, int(with_us["environments"]) + 1))
