"""The house: which module may know which, what an import loads, what lies at the top."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ["sqlite3", "watchdog", "pydantic", "pydantic_settings", "filelock", "pyroaring"]
HEAVY += ["prometheus_client", "click", "orjson", "logging", "asyncio", "starlette", "uvicorn"]
HEAVY += ["psycopg"]


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(ran.stdout.split())


def test_importing_spoold_loads_nothing_heavy() -> None:
    assert loaded_by("import spoold").isdisjoint(HEAVY)


def test_importing_the_consumer_loads_no_settings_no_database_and_no_command_line() -> None:
    loaded = loaded_by("from spoold import Consumer")
    assert "spoold.consumer" in loaded
    assert loaded.isdisjoint({"pydantic", "pydantic_settings", "sqlite3", "click", "pyroaring"})


def test_every_public_name_is_there() -> None:
    ran = loaded_by("import spoold\nfor name in spoold.__all__: getattr(spoold, name)")
    assert "spoold.errors" in ran


def test_the_version_is_the_same_in_both_places() -> None:
    from spoold import __version__

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__


def test_the_layers_hold() -> None:
    pytest.importorskip("importlinter", reason="import-linter is in the dev extra")
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command as c; c()",
            "--no-cache",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_only_the_config_module_reads_the_environment_and_loads_pydantic() -> None:
    for path in (ROOT / "spoold").rglob("*.py"):
        where = path.relative_to(ROOT / "spoold").as_posix()
        text = path.read_text()
        # The terminal's own variables (NO_COLOR, TERM) are no settings.
        if where not in ("config.py", "cli/terminal.py") and not where.startswith("demo/"):
            assert "environ" not in text.replace("environment", ""), where
            assert "getenv" not in text, where
        if where != "config.py":
            assert "import pydantic" not in text, where
            assert "from pydantic" not in text, where


def test_no_module_has_more_than_500_lines() -> None:
    for path in (ROOT / "spoold").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 500, path


def test_the_top_level_holds_six_entries_and_dotfiles() -> None:
    ran = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if ran.returncode:
        pytest.skip("not a git work tree: an unpacked source archive")
    top = {line.partition("/")[0] for line in ran.stdout.splitlines()}
    allowed = {"pyproject.toml", "README.md", "spoold", "tests", "systemd", "examples"}
    assert {name for name in top if not name.startswith(".")} <= allowed


def test_status_and_ls_load_only_what_they_need() -> None:
    # A monitor runs them every few seconds: each module here costs all of them.
    loaded = loaded_by("import spoold.cli.status, spoold.cli.ls")
    assert loaded.isdisjoint({*HEAVY, "shutil", "tempfile", "subprocess"} - {"click"})
