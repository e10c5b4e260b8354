"""What HTTP costs: samples a second through the gateway, read from the files, and as before it.

All end as Python objects, by the same json. One limit reads the batch files themselves, the other
gets the same batches over HTTP from a server that has nothing to do (`bare_server.py`): most of the
time is the client's. The peer is a loop that polls a hundred rows of the same database
(`hundred_rows.py`), at full speed. All deliver whole groups; a batch holds as many of them as
Slime's examples want at a time (`--rollout-batch-size 32 --n-samples-per-prompt 8`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.benchmarks import machine
from tests.benchmarks.databases import build
from tests.benchmarks.table import Figure, Report
from tests.support.gateways import serve_command, url_of
from tests.support.processes import Players
from tests.support.rollouts import JOB

NUMBER = 4_096
ROUNDS = 5
ROW_BYTES = 20_000
STEPS = 4
TURNS_A_STEP = 2
GROUP_SIZE = 8
GROUPS_A_BATCH = 32

PEER = "a hundred rows a poll"

Post = Callable[[str, dict[str, Any]], dict[str, Any]]


def run(folder: Path, *, small: bool) -> Report:
    """Compare samples a second; rounds of all take turns, the best of each counts."""
    number, rounds = (64, 1) if small else (NUMBER, ROUNDS)
    db = build(
        folder / "rows.db",
        registered=number,
        finished=number,
        row_bytes=ROW_BYTES,
        steps_each=STEPS,
        turns_a_step=TURNS_A_STEP,
        as_recorded=True,
    )
    spool = folder / "spool"
    machine.once(db, spool, group_size=GROUP_SIZE, batch_size=GROUPS_A_BATCH)
    number = (number + 1) // GROUP_SIZE * GROUP_SIZE - GROUP_SIZE  # ids begin at 1, groups at 0
    acts: dict[str, Callable[[Path], float]] = {
        "gateway": lambda place: over_http(serve_command(place / "run"), spool, place, number),
        "bare server": lambda place: over_http(
            [sys.executable, "-m", "tests.benchmarks.bare_server", str(place / "run")],
            *(spool, place, number),
        ),
        "the files, read and parsed": lambda _: from_the_files(spool, number),
    }
    if all(map(find_spec, ("fastapi", "tortoise"))):
        acts[PEER] = lambda place: a_hundred_rows_a_poll(db, place, number)
    else:
        print("  gateway: no fastapi, no tortoise-orm: pip install '.[bench]'", flush=True)
    speeds: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(rounds):
        for name, act in acts.items():
            place = folder / "place"
            place.mkdir()
            speeds[name].append(act(place))
            shutil.rmtree(place)
    best = {name: max(all_) for name, all_ in speeds.items()}
    return Report(
        figures=tuple(
            Figure(
                piece="gateway",
                what=f"{STEPS} steps, {ROW_BYTES // 1000} KB at last: get + ack",
                value=best["gateway"],
                unit="samples/s",
                beside=best[name],
                of=name,
                higher_is_better=True,
            )
            for name in acts
            if name != "gateway"
        )
    )


def from_the_files(spool: Path, number: int) -> float:
    """Read and parse each batch file. Samples a second."""
    began = time.perf_counter()
    came = 0
    for path in sorted((spool / "pending").iterdir()):
        with path.open("rb") as file:
            came += len([json.loads(line) for line in file])
    assert came == number
    return number / (time.perf_counter() - began)


def over_http(command: Sequence[str], spool: Path, place: Path, number: int) -> float:
    """Get and ack every batch of a copy of the spool. Samples a second."""
    shutil.copytree(spool, place / "run")
    with Players(place) as players:
        players.start("gateway", command)
        with talking_to(url_of(players)) as post:
            began = time.perf_counter()
            came = 0
            while came < number:
                data = post("/get_rollout_data", {})["data"]
                came += len(data["data"])
                post("/ack_rollout_data", {"batch_id": data["meta_info"]["batch_id"]})
            seconds = time.perf_counter() - began
    assert came == number
    return number / seconds


def a_hundred_rows_a_poll(db: Path, place: Path, number: int) -> float:
    """Get every whole group of the database. Samples a second."""
    facts = str(db), JOB, str(GROUP_SIZE), str(place / "buffer_server.log")
    command = [sys.executable, "-m", "tests.benchmarks.hundred_rows", *facts]
    with Players(place) as players:
        players.start("buffer", command)
        with talking_to(url_of(players, "buffer")) as post:
            began = time.perf_counter()
            came = 0
            while came < number:
                came += len(post("/get_rollout_data", {})["data"]["data"])
            seconds = time.perf_counter() - began
    assert came == number
    return number / seconds


@contextlib.contextmanager
def talking_to(url: str) -> Any:
    """Yield a way to post on one connection that stays."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)

    def post(path: str, facts: dict[str, Any]) -> dict[str, Any]:
        connection.request("POST", path, json.dumps(facts))
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer

    with contextlib.closing(connection):
        yield post
