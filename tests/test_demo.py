"""The demo: its account, its writer, its processes, and the whole of it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from spoold.demo import database
from spoold.demo.account import account
from spoold.demo.children import Child
from spoold.demo.screen import Progress, Screen, Snapshot, snapshot
from spoold.demo.stage import choose
from spoold.demo.writer import Act, Environment, Fate, Writer, acts_of, assign_fates, take_up
from spoold.errors import ConfigError
from spoold.layout import BatchName, State
from tests.support.processes import ENVIRON, until

# The account ------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for state in State:
        (tmp_path / "run" / state).mkdir(parents=True)
    return tmp_path / "run"


def put_batch(run_dir: Path, place: str, seq: int, environments: Sequence[int]) -> Path:
    lines = [
        json.dumps({"uid": f"e{number}:{number * 10}", "extra_info": {"environment": number}})
        for number in environments
    ]
    data = "".join(f"{line}\n" for line in lines).encode()
    digest = hashlib.sha256(data).hexdigest()[:12]
    name = BatchName(seq=seq, samples=len(lines), lo=1, hi=1, digest=digest)
    path = run_dir / place / name.file_name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def put_note(run_dir: Path, environment: int) -> None:
    (run_dir / "rejected" / f"env-{environment}.bad-json.json").write_text("{}")


def test_account_is_clean_when_each_completed_environment_is_in_one_batch_or_note(run_dir: Path):
    put_batch(run_dir, "acked/step-000000001", 1, [1, 2])
    put_batch(run_dir, "pending", 2, [3])
    put_batch(run_dir, "inflight/trainer-0", 3, [4])
    put_note(run_dir, 5)
    result = account(str(run_dir), {1, 2, 3, 4, 5})
    assert result.is_clean
    assert (result.delivered, result.acked, result.set_aside) == ({1, 2, 3, 4}, {1, 2}, {5})
    assert result.batches == 3


def test_account_finds_an_environment_that_is_in_two_batches(run_dir: Path):
    put_batch(run_dir, "acked", 1, [1, 2])
    put_batch(run_dir, "pending", 2, [2, 3])
    result = account(str(run_dir), {1, 2, 3})
    assert result.doubled == {2}
    assert not result.is_clean


def test_account_finds_an_environment_that_is_twice_in_one_batch(run_dir: Path):
    put_batch(run_dir, "acked", 1, [1, 1])
    assert account(str(run_dir), {1}).doubled == {1}


def test_account_finds_a_batch_that_lies_in_two_places(run_dir: Path):
    put_batch(run_dir, "acked", 1, [1])
    put_batch(run_dir, "pending", 1, [1])
    assert account(str(run_dir), {1}).doubled == {1}


def test_account_finds_an_environment_that_is_delivered_and_set_aside(run_dir: Path):
    put_batch(run_dir, "acked", 1, [1])
    put_note(run_dir, 1)
    assert account(str(run_dir), {1}).doubled == {1}


def test_account_finds_a_lost_environment(run_dir: Path):
    put_batch(run_dir, "acked", 1, [1])
    result = account(str(run_dir), {1, 2})
    assert result.lost == {2}
    assert not result.is_clean


def test_account_finds_an_environment_that_was_delivered_before_it_was_completed(run_dir: Path):
    put_batch(run_dir, "acked", 1, [1, 2])
    result = account(str(run_dir), {1})
    assert result.unasked == {2}
    assert not result.is_clean


def test_account_finds_a_damaged_batch_and_counts_its_environments_as_lost(run_dir: Path):
    path = put_batch(run_dir, "acked", 1, [1])
    path.write_bytes(path.read_bytes()[:-9])
    result = account(str(run_dir), {1})
    assert result.damaged == (path.name,)
    assert result.lost == {1}
    assert not result.is_clean


@pytest.mark.parametrize("folder", ["duplicate", "corrupt"])
def test_account_leaves_out_what_counts_for_nothing(run_dir: Path, folder: str):
    put_batch(run_dir, f"rejected/{folder}", 1, [1])
    put_batch(run_dir, "acked", 2, [2])
    assert account(str(run_dir), {2}).is_clean
    assert account(str(run_dir), {1, 2}).lost == {1}


def test_account_finds_samples_that_were_trained_on_twice_never_or_without_an_ack(run_dir: Path):
    put_batch(run_dir, "acked", 1, [1, 2, 3])
    put_batch(run_dir, "pending", 2, [4])
    completed = {1, 2, 3, 4}
    good = account(str(run_dir), completed, trained=["e1:10", "e2:20", "e3:30"])
    assert good.is_clean
    bad = account(str(run_dir), completed, trained=["e1:10", "e1:10", "e2:20", "e4:40"])
    assert bad.mistrained == {"e1:10", "e3:30", "e4:40"}
    assert not bad.is_clean


# The database and its writer --------------------------------------------------------------------


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    path = str(tmp_path / "rollouts.db")
    database.create(path, environments=16, seed=1)
    with closing(database.connect(path)) as db:
        yield db


def environment_of(db: sqlite3.Connection, number: int) -> Environment:
    env_id, group_id = db.execute(
        "SELECT env_id, group_id FROM job_environments WHERE id = ?", (number,)
    ).fetchone()
    return Environment(id=number, env_id=env_id, group_id=group_id)


def live(db: sqlite3.Connection, number: int, fate: Fate, acts: int | None = None) -> Writer:
    """Play an environment's acts (or the first few) on a clock of its own."""
    rng = random.Random(number)
    writer, now = Writer(db, rng), 0.0
    for pause, act in list(acts_of(fate, rng))[:acts]:
        now += pause
        writer.act(environment_of(db, number), act, fate, now)
    return writer


def rows_of(db: sqlite3.Connection, number: int) -> list[tuple[object, ...]]:
    return db.execute(
        "SELECT step_id, reward, is_terminal, is_truncated, is_session_completed, messages"
        " FROM session_steps WHERE session_id = ? ORDER BY id",
        (environment_of(db, number).env_id,),
    ).fetchall()


def finished(db: sqlite3.Connection) -> set[int]:
    return {n for (n,) in db.execute("SELECT id FROM job_environments WHERE finished = 1")}


def test_environments_are_registered_up_front_in_groups(db: sqlite3.Connection):
    groups = db.execute(
        "SELECT count(*) FROM job_environments WHERE finished = 0 GROUP BY group_id"
    ).fetchall()
    assert groups == [(database.GROUP_SIZE,)] * 2
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_rows_wait_in_the_buffer_until_it_is_flushed(db: sqlite3.Connection):
    writer = Writer(db, random.Random(1))
    writer.act(environment_of(db, 1), Act.STEP, Fate.EVALUATED, 0.0)
    writer.act(environment_of(db, 2), Act.STEP, Fate.EVALUATED, 0.4)
    assert rows_of(db, 1) == []
    writer.flush_if_due(0.5)
    assert len(rows_of(db, 1)) == len(rows_of(db, 2)) == 1


def test_finished_is_there_before_the_rows_for_some(db: sqlite3.Connection):
    writer = live(db, 1, Fate.EARLY)
    assert finished(db) == {1}
    assert database.completed(db) == set()
    writer.flush()
    assert database.completed(db) == {1}


@pytest.mark.parametrize("fate", [Fate.EVALUATED, Fate.TRUNCATED, Fate.SUMMARISED, Fate.RERUN])
def test_the_reward_comes_long_before_finished_for_most(db: sqlite3.Connection, fate: Fate):
    acts = len(list(acts_of(fate, random.Random(1))))
    live(db, 1, fate, acts - 1)
    assert [row[1] is not None for row in rows_of(db, 1) if row[2] and row[5] != "[]"] == [True]
    assert database.completed(db) == set()
    live(db, 2, fate)
    assert database.completed(db) == {2}


def test_a_truncated_environment_ends_with_both_flags(db: sqlite3.Connection):
    live(db, 1, Fate.TRUNCATED)
    assert rows_of(db, 1)[-1][2:5] == (1, 1, 1)


def test_a_rerun_leaves_the_rows_of_the_second_attempt_only(db: sqlite3.Connection):
    live(db, 1, Fate.RERUN, 2).flush()
    first = rows_of(db, 1)
    live(db, 1, Fate.RERUN)
    second = rows_of(db, 1)
    assert [row[0] for row in first] == [1, 2]
    assert [row[0] for row in second] == list(range(1, len(second) + 1))
    assert not {row[5] for row in first} & {row[5] for row in second}


def test_a_summary_row_is_the_last_row_and_looks_completed(db: sqlite3.Connection):
    live(db, 1, Fate.SUMMARISED)
    assert rows_of(db, 1)[-1] == (0, 0.0, 1, 0, 1, "[]")


def test_one_environment_ends_with_messages_that_are_no_json(db: sqlite3.Connection):
    live(db, 1, Fate.BROKEN)
    messages = rows_of(db, 1)[-1][5]
    assert isinstance(messages, str)
    with pytest.raises(json.JSONDecodeError):
        json.loads(messages)
    assert database.completed(db) == {1}


def test_some_environments_never_complete(db: sqlite3.Connection):
    live(db, 1, Fate.ABORTED).flush()
    live(db, 2, Fate.ROWLESS).flush()
    assert len(rows_of(db, 1)) > 0
    assert rows_of(db, 2) == []
    assert finished(db) == {2}
    assert database.completed(db) == set()


def test_each_row_repeats_the_history_and_adds_the_raw_answer(db: sqlite3.Connection):
    live(db, 1, Fate.EVALUATED)
    steps = db.execute("SELECT messages, response FROM session_steps ORDER BY id").fetchall()
    messages, responses = zip(*((json.loads(m), json.loads(r)) for m, r in steps), strict=True)
    for earlier, later, response in zip(messages, messages[1:], responses, strict=False):
        assert later[: len(earlier) + 1] == [*earlier, response["choices"][0]["message"]]


def test_a_writer_that_starts_again_takes_up_what_is_not_finished_from_its_first_step(
    db: sqlite3.Connection,
):
    live(db, 1, Fate.EVALUATED)
    live(db, 2, Fate.ABORTED).flush()
    rows = rows_of(db, 1)
    taken = take_up(db)
    assert [environment.id for environment in taken] == list(range(2, 17))
    assert rows_of(db, 1) == rows
    assert rows_of(db, 2) == []


def test_every_fate_is_dealt_and_most_environments_are_evaluated():
    fates = assign_fates(400, random.Random(1))
    assert len(fates) == 400
    assert set(fates) == set(Fate)
    assert fates.count(Fate.BROKEN) == fates.count(Fate.ROWLESS) == 1
    assert fates.count(Fate.EVALUATED) > 200


# The folder, the screen, the processes ----------------------------------------------------------


def test_a_demo_without_a_folder_takes_the_first_free_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert [choose(None).root for _ in range(3)] == [
        "spoold-demo",
        "spoold-demo-2",
        "spoold-demo-3",
    ]
    assert sorted(os.listdir()) == ["spoold-demo", "spoold-demo-2", "spoold-demo-3"]


def test_a_folder_with_something_in_it_is_refused_and_left_as_it_is(tmp_path: Path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ConfigError, match="is there already"):
        choose(str(tmp_path))
    with pytest.raises(ConfigError, match="is there already"):
        choose(str(tmp_path / "mine"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_empty_folder_is_used(tmp_path: Path):
    assert choose(str(tmp_path)).run_dir == f"{tmp_path}/run"


def test_snapshot_counts_what_lies_where(run_dir: Path):
    old = put_batch(run_dir, "pending", 2, [3])
    os.utime(old, (1.0, 1.0))
    put_batch(run_dir, "pending", 3, [4])
    put_batch(run_dir, "inflight/trainer-0", 4, [5])
    put_batch(run_dir, "acked/step-000000001", 1, [1, 2])
    put_note(run_dir, 6)
    now = snapshot(str(run_dir))
    assert (now.pending, now.inflight, now.acked, now.notes) == (2, 1, 1, 1)
    assert (now.batches, now.acked_samples) == (4, 2)
    assert now.oldest_pending_seconds > 1e6


def test_snapshot_of_a_run_directory_that_is_not_there_yet_is_empty(tmp_path: Path):
    assert snapshot(str(tmp_path / "run")) == Snapshot()


def test_progress_shows_the_throughput_of_the_last_two_seconds():
    progress = Progress()
    progress.line(1.0, 0, Snapshot())
    progress.line(2.0, 0, Snapshot(acked_samples=100))
    progress.line(3.0, 0, Snapshot(acked_samples=200))
    line = progress.line(4.0, 900, Snapshot(acked_samples=300, pending=12))
    assert line.split() == ["4.0s", "900", "12", "0", "0", "0", "100", "0.0"]
    assert len(line) < 80


def test_everything_that_is_printed_fits_in_80_columns(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    many = range(100_000, 100_900)
    put_batch(run_dir, "acked", 1, [*many, *many])
    screen = Screen()
    screen.head()
    screen.progress(1234.5, Progress().line(1234.5, 99_999, Snapshot(acked_samples=99_999)))
    screen.account(account(str(run_dir), {*range(200_000, 200_009)}, trained=["x"]), 1)
    printed = capsys.readouterr().out
    assert "\r" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert "lost                                     9" in printed


def test_on_a_terminal_the_line_of_progress_is_written_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    screen = Screen()
    screen.progress(0.1, "first")
    screen.progress(0.2, "second")
    screen.say("something happened", mark="> ")
    assert capsys.readouterr().out == "\rfirst\x1b[K\rsecond\x1b[K\n> something happened\n"


def test_elsewhere_a_line_of_progress_is_printed_once_a_second(capsys: pytest.CaptureFixture[str]):
    screen = Screen()
    for tenths in range(25):
        screen.progress(tenths / 10, f"line {tenths}")
    assert capsys.readouterr().out == "line 0\nline 10\nline 20\n"


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path):
    code = (
        "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    )
    child = Child("stubborn", [sys.executable, "-c", code], log=str(tmp_path / "log"))
    until(lambda: child.last_words() == "up", "the child to start")
    assert child.stop(timeout_seconds=0.1) == -signal.SIGKILL


def test_a_child_does_not_outlive_a_parent_that_is_killed(tmp_path: Path):
    pid_file = tmp_path / "pid"
    parent = (
        "import sys, time; from pathlib import Path; from spoold.demo.children import Child\n"
        f"child = Child('c', ['sleep', '600'], log={str(tmp_path / 'log')!r})\n"
        f"Path({str(pid_file)!r}).write_text(str(child.pid))\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", parent], env=ENVIRON, check=False)
    assert done.returncode == -signal.SIGKILL
    until(lambda: not is_alive(int(pid_file.read_text())), "the child to end")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # nobody reaps orphans in some containers


# The whole --------------------------------------------------------------------------------------


def children_in(folder: Path) -> list[int]:
    """The processes that have this folder on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(folder) in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return [pid for pid in found if is_alive(pid)]


@pytest.mark.slow
def test_the_demo_ends_with_a_clean_account_and_leaves_its_folder(tmp_path: Path):
    folder = tmp_path / "a path with spaces"
    done = subprocess.run(
        [sys.executable, "-m", "spoold", "demo", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRON | {"SPOOLD_GROUP_SIZE": "4", "SPOOLD_BATCH_SIZE": "1"},
        umask=0o077,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "It is clean: nothing lost, nothing doubled." in done.stdout
    assert done.stdout.count("kill -9") == 2
    # A path may be as long as it likes; all else keeps to the width of a terminal.
    assert max(len(line.replace(str(tmp_path), "")) for line in done.stdout.splitlines()) <= 80
    assert sorted(os.listdir(folder / "run" / "pending")) == []
    assert len(list(folder.glob("run/acked/step-*/*.jsonl"))) > 20
    assert len(list(folder.glob("run/rejected/env-*.json"))) == 1
    assert children_in(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_interrupted_stops_its_children(tmp_path: Path, number: int):
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "spoold", "demo", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRON) as demo:
        try:
            until(lambda: list(folder.glob("run/acked/*/*.jsonl")), "the first ack")
            assert len(children_in(folder)) == 4
            demo.send_signal(number)
            output, _ = demo.communicate(timeout=30)
        finally:
            demo.kill()
    assert demo.returncode == 130
    assert "Stopped: no process is left" in output
    assert children_in(folder) == []
