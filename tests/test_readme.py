"""The README says what is true: commands, settings, exit codes, paths."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from spoold import cli, config, errors
from spoold.layout import BatchName
from tests.support.commands import spoold

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def table(heading: str) -> list[list[str]]:
    """Return the rows of the first table under a heading."""
    section = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_settings_table_is_that_of_the_code() -> None:
    cells = {name: default for name, default, _ in table("Settings")}
    marked = {name.split("`")[1] for name in cells if name.endswith("↻")}
    assert marked == config.NEEDS_RESTART
    rows = {name.split("`")[1]: default for name, default in cells.items()}
    assert list(rows) == list(config.Settings.model_fields)
    required = {"db": "x", "run_dir": "y"}
    assert {name for name, default in rows.items() if default == "required"} == set(required)
    assert rows["job"] == "the only one"
    assert rows["keep_steps"] == "keep all"
    unset = ("required", "the only one", "keep all", "none")
    said = {k: v for k, v in rows.items() if v not in unset}
    assert config.load(None, required | said, {}) == config.load(None, required, {})


def test_the_exit_codes_are_those_of_the_code() -> None:
    codes = {int(code) for code, _ in table("Exit codes")}
    assert codes == {0, *(getattr(errors, name) for name in dir(errors) if name.startswith("EX_"))}


def test_every_command_in_the_readme_exists_with_its_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    used = [*re.findall(r"`spoold (\w+) [^`]*`", README), "run", "demo"]
    assert set(used) == set(cli.COMMANDS)
    for row in table("The trainer"):
        command = row[0].strip("`").split()
        for option in re.findall(r"--[a-z]+", row[0]):
            assert option in spoold(capsys, command[1], "--help").out


def test_the_two_commands_are_single_lines_that_do_all_of_their_set_up() -> None:
    lines = [line for block in blocks("bash") for line in block.splitlines() if "venv" in line]
    assert lines == [
        "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/spoold demo",
        "python3 -m venv .venv && .venv/bin/pip install '.[test]' && .venv/bin/pytest",
    ]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(need.startswith("pytest") for need in extras["optional-dependencies"]["test"])


def test_the_trainers_loop_is_python() -> None:
    loops = blocks("python")
    assert loops
    for block in loops:
        compile(block, "README.md", "exec")


def test_batch_names_in_the_readme_are_names() -> None:
    names = re.findall(r"[\w.-]+\.jsonl", README)
    whole = [name for name in names if name.startswith("0")]
    assert len(whole) >= 5
    assert all(BatchName.parse(name) for name in whole)


def test_every_path_in_the_readme_is_there() -> None:
    paths = re.findall(r"`((?:spoold|systemd|examples|tests|\.ci)/[\w./]*)`", README)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
