"""`spoold config`: what is wrong, what is what, and where each value comes from."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from spoold.config import Settings, load
from tests.support.commands import spoold

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _nobodys_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SPOOLD_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    written = tmp_path / "exp7.toml"
    written.write_text('db = "rollouts.db"\nrun_dir = "run"\nbatch_size = 32\n')
    return written


def test_show_says_where_each_value_comes_from(
    capsys: Capsys, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOOLD_BATCH_BYTES", "32MiB")
    ran = spoold(capsys, "config", "show", "--config", file, "--linger", "2.5")
    assert (ran.code, ran.err) == (0, "")
    lines = {line.split(" = ")[0]: line.split() for line in ran.out.splitlines()}
    assert lines["batch_size"] == ["batch_size", "=", "32", "#", str(file)]
    assert lines["batch_bytes"][2:] == ['"32MiB"', "#", "SPOOLD_BATCH_BYTES"]
    assert lines["linger_seconds"][2:] == ["2.5", "#", "--linger-seconds"]
    assert lines["scan_seconds"][2:] == ["2", "#", "default"]
    assert "# job is not set" in ran.out.splitlines()


def test_what_show_prints_is_a_settings_file_that_means_the_same(
    capsys: Capsys, file: Path, tmp_path: Path
) -> None:
    odd = ["--job", 'a "b"\\\x7f\u00fc', "--scan", "0.1", "--batch-bytes", "1000001"]
    ran = spoold(capsys, "config", "show", "--config", file, *odd)
    (tmp_path / "shown.toml").write_text(ran.out)
    chosen = {"job": odd[1], "scan_seconds": "0.1", "batch_bytes": "1000001"}
    assert load(str(tmp_path / "shown.toml"), {}, {}) == load(str(file), chosen, {})
    assert set(tomllib.loads(ran.out)) == set(Settings.model_fields) - {"keep_steps", "metrics_dir"}
    assert "# keep_steps is not set" in ran.out.splitlines()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:geheim@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:ge/h@im@host/db?x=1", "postgresql://me:***@host/db?x=1"),
        ("redis://:geheim@host", "redis://:***@host"),
        ("postgresql://me@host/db?password=geheim&x=1", "postgresql://me@host/db?password=***&x=1"),
        ("postgresql://host/db?sslPassword=geheim", "postgresql://host/db?sslPassword=***"),
        ("sqlite:////srv/a@b:c.db", "sqlite:////srv/a@b:c.db"),
        ("rollouts.db", "rollouts.db"),
    ],
)
def test_show_masks_passwords_in_urls(
    capsys: Capsys, url: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOOLD_DB", url)
    ran = spoold(capsys, "config", "show", "--run-dir", "run")
    assert "geheim" not in ran.out
    assert ran.out.startswith(f'db = "{shown}" ')


def test_check_says_all_that_is_wrong_and_exits_78(
    capsys: Capsys, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    possible = "a number of seconds, above 0, up to 10^9"
    file.write_text('bach_size = 3\nscan_seconds = 0\njob = true\nrun_dir = "run"')
    monkeypatch.setenv("SPOOLD_LINGER", "1")
    ran = spoold(capsys, "config", "check", "--config", file)
    assert (ran.code, ran.out) == (78, "")
    assert ran.err.splitlines() == [
        f"spoold: unknown setting 'bach_size' in {file}; did you mean batch_size?",
        f"spoold: job cannot be True (given in {file}); it is a text that is not empty",
        "spoold: no db given; give --db, set SPOOLD_DB, or put db into a file for --config",
        f"spoold: scan_seconds cannot be 0 (given in {file}); it is {possible}",
        "spoold: SPOOLD_LINGER is no setting; did you mean SPOOLD_LINGER_SECONDS?",
    ]


def test_check_of_good_settings_exits_0_and_changes_nothing(
    capsys: Capsys, file: Path, tmp_path: Path
) -> None:
    ran = spoold(capsys, "config", "check", "--config", file)
    assert ran == (0, "", "spoold: good: 3 settings given, the others have their defaults\n")
    assert os.listdir(tmp_path) == [file.name]


def test_show_of_bad_settings_is_the_error_of_run(capsys: Capsys, file: Path) -> None:
    wrong = ["--config", file, "--batch-size", "0"]
    shown, ran = spoold(capsys, "config", "show", *wrong), spoold(capsys, "run", *wrong)
    assert (shown.code, shown.err) == (ran.code, ran.err) == (78, shown.err)
    assert shown.out == ""
