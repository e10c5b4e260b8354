"""top: in a real terminal that is resized and left, and as plain lines."""

from __future__ import annotations

import os
import signal
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from spoold.layout import State
from spoold.spool import overview
from spoold.spool.flow import Flow
from tests.support.batches import empty_run, put_batch
from tests.support.commands import spoold, spoold_process
from tests.support.processes import until
from tests.support.terminals import Terminal


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    made: list[Terminal] = []
    yield made
    for terminal in made:
        terminal.close()


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_it_shows_what_moves_survives_resizing_and_leaves_the_terminal_as_it_was(
    tmp_path: Path, terminals: list[Terminal], key: bytes
) -> None:
    run = empty_run(tmp_path / "run")
    put_batch(run, 1, [1, 2])
    exported = {"COLUMNS": "70", "LINES": "20"}  # which curses would believe for ever
    terminal = Terminal("top", run.root, "--interval", "0.1", environ=exported)
    terminals.append(terminal)
    terminal.until("pending            1          2")
    terminal.until("recent")
    put_batch(run, 2, [3])
    terminal.until("000000002  -> pending")
    for columns, lines, shown in (
        (30, 6, "q quits"),
        (200, 60, "recent"),
        (2, 1, "/"),
        (80, 24, "recent"),
    ):
        terminal.resize(columns, lines)
        terminal.screen.reset()  # a terminal may keep nothing of what it showed
        terminal.until(shown)
    put_batch(run, 3, [4])
    terminal.until("000000003  -> pending")
    terminal.type(key)
    assert terminal.end() == 0
    assert termios.tcgetattr(terminal.slave)[:4] == terminal.before[:4]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_and_leaves_the_terminal_as_it_was(
    tmp_path: Path, terminals: list[Terminal], number: int
) -> None:
    run = empty_run(tmp_path / "run")
    terminal = Terminal("top", run.root, term="xterm")
    terminals.append(terminal)
    terminal.until("recent")
    assert termios.tcgetattr(terminal.slave)[:4] != terminal.before[:4]
    for _ in range(20):  # an impatient person
        terminal.process.send_signal(number)
    assert terminal.end() == 0
    assert termios.tcgetattr(terminal.slave)[:4] == terminal.before[:4]
    assert not terminal.screen.cursor.hidden
    terminal.drain()
    assert terminal.seen.rfind(b"\x1b[?1049l") > terminal.seen.rfind(b"\x1b[?1049h")
    assert b"Traceback" not in terminal.seen


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_goes_away_ends_it(
    tmp_path: Path, terminals: list[Terminal], ignored: bool
) -> None:
    """Also where nobody is told (nohup): it must not go on in circles for nobody."""
    run = empty_run(tmp_path / "run")
    terminal = Terminal("top", run.root, ignores_hangup=ignored)
    terminals.append(terminal)
    terminal.until("recent")
    terminal.hang_up()
    assert terminal.process.wait(30) == 0


def test_it_survives_every_size(tmp_path: Path, terminals: list[Terminal]) -> None:
    run = empty_run(tmp_path / "run")
    terminal = Terminal("top", run.root, "--interval", "0.1", columns=1, lines=1)
    terminals.append(terminal)
    until(lambda: termios.tcgetattr(terminal.slave)[:4] != terminal.before[:4], "its screen")
    for columns, lines in ((1, 1), (2, 1), (1, 2), (3, 3), (1000, 2), (2, 500), (80, 24)):
        terminal.resize(columns, lines)
        terminal.drain()
    terminal.until("recent")
    terminal.type(b"q")
    assert terminal.end() == 0


def test_a_run_directory_that_goes_away_is_said_and_comes_back(
    tmp_path: Path, terminals: list[Terminal]
) -> None:
    run = empty_run(tmp_path / "run")
    terminal = Terminal("top", run.root, "--interval", "0.1")
    terminals.append(terminal)
    terminal.until("recent")
    os.rename(run.root, tmp_path / "away")
    terminal.until("attention  unreadable")
    os.rename(tmp_path / "away", run.root)
    put_batch(run, 7, [7])
    terminal.until("000000007")
    terminal.type(b"q")
    assert terminal.end() == 0


def test_where_it_is_no_terminal_it_prints_a_line_a_look(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    put_batch(run, 1, [1])
    ran = spoold_process("top", run.root, "--interval", "0.1", "--count", "2")
    assert (ran.code, ran.err) == (0, "")
    header, *rows = ran.out.splitlines()
    assert header.split()[:5] == ["time", "pending", "inflight", "acked", "rejected"]
    assert len(rows) == 2
    assert [row.split()[1:8] for row in rows] == [["1", "0", "0", "0", "0.0", "0.0", "0.0"]] * 2
    assert max(map(len, (header, *rows))) <= 90
    assert "\x1b" not in ran.out


def test_an_unknown_terminal_gets_lines_too(tmp_path: Path, terminals: list[Terminal]) -> None:
    run = empty_run(tmp_path / "run")
    terminal = Terminal("top", run.root, "--count", "1", term="nobody-knows-this-one")
    terminals.append(terminal)
    terminal.until("published/s")
    assert terminal.end() == 0


def test_there_must_be_a_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = spoold(capsys, "top", tmp_path / "none")
    assert ran.code == 78
    assert "no run directory at" in ran.err


def test_flow_counts_what_came_and_left_over_the_last_seconds(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    flow = Flow()
    name = put_batch(run, 1, [1])
    assert flow.update(overview.take(run), at=100.0, now=0.0) == []
    put_batch(run, 2, [2])
    put_batch(run, 3, [3])
    (event, _) = flow.update(overview.take(run), at=101.0, now=1.0)
    assert (event.was, event.now, event.batch_id[:9]) == ("", "pending", "000000002")
    os.rename(f"{run.pending}/{name.file_name}", f"{run.inflight}/{name.file_name}")
    (event,) = flow.update(overview.take(run), at=102.0, now=2.0)
    assert (event.was, event.now) == ("pending", "inflight")
    assert flow.rate(State.PENDING) == (1.0, 0.5)
    assert flow.rate(State.INFLIGHT) == (0.5, 0.0)
    os.unlink(f"{run.inflight}/{name.file_name}")
    (event,) = flow.update(overview.take(run), at=103.0, now=3.0)
    assert (event.was, event.now) == ("inflight", "")
    flow.update(overview.take(run), at=120.0, now=20.0)
    flow.update(overview.take(run), at=130.0, now=30.0)
    assert flow.rate(State.PENDING) == (0.0, 0.0)
