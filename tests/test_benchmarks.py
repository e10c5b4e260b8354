"""The benchmarks run, and say what they should; how fast is nobody's test."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import PIECES, main
from tests.benchmarks.table import Figure, table


def test_the_small_mode_runs_every_piece_and_prints_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    main(["--small", "--folder", str(work), "--out", str(tmp_path / "out")])
    said = capsys.readouterr().out
    rows = [line.split("|")[1].strip() for line in said.splitlines() if line.startswith("| ")]
    skipped = {"postgres"} if "postgres: skipped: " in said else set()
    assert set(rows[1:]) == set(PIECES) - skipped
    figures = json.loads((tmp_path / "out/results.json").read_text())
    assert len(figures) == len(rows) - 1
    assert all(figure["value"] >= 0 for figure in figures)
    assert list(work.iterdir()) == []
    assert "curves: " in said or "no plot: " in said


def test_an_unknown_piece_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["drian"])
    assert re.search("no such piece: drian; there are drain,", capsys.readouterr().err)


def test_a_ratio_above_one_is_faster_for_a_speed_and_dearer_for_a_cost() -> None:
    speed = Figure(
        piece="p",
        what="speed",
        value=150,
        unit="MB/s",
        beside=100,
        of="bare loop",
        higher_is_better=True,
    )
    cost = Figure(piece="p", what="cost", value=3, unit="ms", beside=2, of="bare loop")
    alone = Figure(piece="p", what="memory", value=0.0123, unit="MB")
    cells = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in table([speed, cost, alone]).splitlines()
    ]
    assert cells[2:] == [
        ["p", "speed", "150 MB/s", "100, bare loop", "1.50 x its speed"],
        ["p", "cost", "3 ms", "2, bare loop", "1.50 x its cost"],
        ["p", "memory", "0.0123 MB", "", ""],
    ]
