"""Colours, widths and progress: as the terminal wants them, and none of it in a file or a pipe."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from spoold.cli import progress as progressing
from spoold.cli import terminal
from spoold.cli.progress import progress
from spoold.spool import ledgerdir
from tests.support.batches import empty_run, put_batch
from tests.support.commands import spoold_process
from tests.support.terminals import Terminal


class Screen(io.StringIO):
    """A stream that a person looks at."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_colours_are_for_terminals_that_have_them_and_people_who_want_them(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], coloured: bool
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Screen())
    assert ("\x1b[31m" in terminal.painted("attention", "red")) == coloured
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert terminal.painted("attention", "red") == "attention"


@pytest.mark.parametrize("columns", [44, 60, 80, 200])
def test_status_fits_the_terminal_and_is_never_wider_than_80_columns(
    tmp_path: Path, columns: int
) -> None:
    run = empty_run(tmp_path / "run")
    shown = Terminal("status", run.root, columns=columns, lines=60, environ={"COLUMNS": ""})
    try:
        shown.until("free")
        assert shown.end() == 0
        lines = [line.rstrip() for line in shown.screen.display]
    finally:
        shown.close()
    assert lines[0].startswith("/")
    # Only a path, which nobody could copy once it is broken, may stick out and go on below.
    prose = [line for line in lines if line and "/" not in line and "run-dir" not in line]
    assert max(map(len, prose)) <= min(columns, 80)
    first = next(line for line in lines if line.startswith("attention"))
    assert first.startswith("attention  daemon-gone: no daemon")


def test_progress_is_shown_of_long_work_on_a_terminal_and_wiped_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen, now = Screen(), [0.0]
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progressing.time, "monotonic", lambda: now[0])
    for _ in progress(range(100_000), total=100_000, what="removing batches"):
        now[0] += 0.001
    said = screen.getvalue().split("\r\x1b[K")
    assert said[1] == "removing batches 500 of 100,000 (0 %)\r"
    assert said[-1] == ""
    assert 500 < len(said) < 1100


def test_progress_of_short_work_and_in_a_file_is_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (Screen(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert list(progress([1, 2, 3], total=3, what="x")) == [1, 2, 3]
        assert stream.getvalue() == ""


def test_progress_is_wiped_away_also_when_the_work_is_broken_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen, now = Screen(), [0.0]
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progressing.time, "monotonic", lambda: now[0])
    work = progress(range(10), total=10, what="x")
    next(work)
    now[0] = 1.0
    next(work)
    work.close()
    assert screen.getvalue().endswith("x 1 of 10 (10 %)\r\r\x1b[K")


def test_what_is_pruned_into_a_pipe_is_paths_alone(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    names = [put_batch(run, seq, [seq]) for seq in (1, 2)]
    acked = [Path(run.acked, name.file_name) for name in names]
    for name, path in zip(names, acked, strict=True):
        Path(run.pending, name.file_name).rename(path)
        Path(run.ledger, name.id).write_text('{"environments": [1], "env_id": "e"}')
    assert ledgerdir.settled(run) == {name.id for name in names}
    ran = spoold_process("prune", run.root)
    assert ran.out.splitlines() == [str(path) for path in acked]
    assert "\x1b" not in ran.err
