"""Settings: one name in four places, precedence, and errors that say where a value came from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from spoold import config
from spoold.config import Settings
from spoold.errors import ConfigError
from spoold.model import NullReward, OnReplaced, PartialGroups, ReadyWhen, Samples

REQUIRED = {"db": "rollouts.db", "run_dir": "run"}


def test_the_defaults_are_those_of_the_contract() -> None:
    settings = config.load(None, REQUIRED, {})
    assert settings.model_dump(exclude={"log_level", "log_format"}) == {
        "db": "rollouts.db",
        "run_dir": "run",
        "job": None,
        "shard": "0/1",
        "metrics_dir": None,
        "ready_when": ReadyWhen.AUTO,
        "samples": Samples.TERMINAL,
        "batch_size": 64,
        "batch_bytes": 64 * 1024**2,
        "linger_seconds": 1,
        "max_sample_bytes": 256 * 1024**2,
        "group_size": 0,
        "group_timeout_seconds": 1800,
        "partial_groups": PartialGroups.WAIT,
        "max_pending_batches": 64,
        "max_pending_bytes": 4 * 1024**3,
        "min_free_bytes": 1024**3,
        "scan_seconds": 2,
        "rescan_seconds": 60,
        "missing_row_seconds": 600,
        "requeue_seconds": 60,
        "max_attempts": 0,
        "keep_steps": None,
        "null_reward": NullReward.FALLBACK,
        "on_replaced": OnReplaced.RETIRE,
    }


def test_an_option_beats_the_variable_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "spoold.toml"
    file.write_text(
        'db = "file.db"\nrun_dir = "run"\nbatch_size = 1\nlinger_seconds = 1.5\njob = "f"'
    )
    environ = {"SPOOLD_BATCH_SIZE": "2", "SPOOLD_LINGER_SECONDS": "2.5"}
    settings = config.load(str(file), {"batch_size": "3"}, environ)
    assert (settings.batch_size, settings.linger_seconds, settings.job) == (3, 2.5, "f")
    assert (settings.db, settings.scan_seconds) == ("file.db", 2.0)


def test_an_empty_variable_counts_as_not_set() -> None:
    assert config.load(None, REQUIRED, {"SPOOLD_JOB": "", "SPOOLD_BATCH_SIZE": ""}).batch_size == 64


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("64MiB", 64 << 20), ("1 GiB", 1 << 30), ("1.5GiB", 3 << 29), ("2kB", 2000), ("4096", 4096)],
)
def test_sizes_may_have_units(text: str, size_bytes: int) -> None:
    assert config.load(None, REQUIRED, {"SPOOLD_BATCH_BYTES": text}).batch_bytes == size_bytes


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("batch_size", "0", "an integer, 1 or more"),
        ("batch_size", "many", "an integer, 1 or more"),
        ("batch_size", "9" * 5000, "an integer, 1 or more"),
        ("group_size", "-1", "an integer, 0 or more"),
        ("batch_bytes", "0", "such as 64MiB or 1.5GiB, 1 or more"),
        ("batch_bytes", "64 potatoes", "such as 64MiB"),
        ("min_free_bytes", "-1", "such as 64MiB or 1.5GiB, 0 or more"),
        ("linger_seconds", "nan", "a number of seconds, 0 or more"),
        ("linger_seconds", "-1", "a number of seconds, 0 or more"),
        ("scan_seconds", "0", "a number of seconds, above 0"),
        ("scan_seconds", "inf", "a number of seconds, above 0"),
        ("ready_when", "soon", "one of auto, finished, terminal"),
        ("log_format", "xml", "one of text, json"),
    ],
)
def test_an_impossible_value_names_itself_its_origin_and_what_is_allowed(
    name: str, value: str, allowed: str, tmp_path: Path
) -> None:
    file = tmp_path / "spoold.toml"
    file.write_text(f'{name} = "{value}"')
    variable = config.variable_of(name)
    for origin, given, environ, config_file in [
        ("--" + name.replace("_", "-"), {name: value}, {}, None),
        (variable, {}, {variable: value}, None),
        (str(file), {}, {}, str(file)),
    ]:
        with pytest.raises(ConfigError) as caught:
            config.load(config_file, REQUIRED | given, environ)
        assert caught.value.exit_code == 78
        assert caught.value.message.startswith(f"{name} cannot be '{value[:50]}")
        assert origin in caught.value.message
        assert allowed in caught.value.hint
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", ["true", "[1]", "{a = 1}"])
def test_a_toml_value_of_another_kind_is_refused(value: str, tmp_path: Path) -> None:
    file = tmp_path / "spoold.toml"
    file.write_text(f"batch_size = {value}")
    with pytest.raises(ConfigError, match="batch_size cannot be"):
        config.load(str(file), REQUIRED, {})


def test_an_unknown_key_in_the_file_names_the_nearest_setting(tmp_path: Path) -> None:
    file = tmp_path / "spoold.toml"
    file.write_text("lingerseconds = 1")
    with pytest.raises(ConfigError) as caught:
        config.load(str(file), REQUIRED, {})
    assert str(caught.value) == (
        f"unknown setting 'lingerseconds' in {file}; did you mean linger_seconds?"
    )


def test_a_file_that_cannot_be_used_is_a_config_error_that_says_why(tmp_path: Path) -> None:
    broken, binary = tmp_path / "broken.toml", tmp_path / "binary.toml"
    broken.write_text("batch_size 64")
    binary.write_bytes(b"\xff\xfe")
    for path, why in [
        (tmp_path / "none.toml", "no such file"),
        (tmp_path, "is a directory"),
        (broken, "line 1"),
        (binary, "is no TOML"),
    ]:
        with pytest.raises(ConfigError) as caught:
            config.load(str(path), REQUIRED, {})
        assert str(path) in caught.value.message
        assert why in caught.value.message


def test_a_missing_setting_says_the_three_places_where_it_could_stand() -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(None, {"db": "x"}, {})
    assert caught.value.message == "no run_dir given"
    for place in ("give --run-dir", "set SPOOLD_RUN_DIR", "put run_dir into a file for --config"):
        assert place in caught.value.hint


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config.load(None, REQUIRED, {}).batch_size = 1  # type: ignore[misc]


def test_every_setting_is_an_option_and_seconds_have_a_short_form() -> None:
    forms = {option.name: option.forms for option in config.setting_options()}
    assert list(forms) == list(Settings.model_fields)
    assert forms["linger_seconds"] == ("--linger-seconds", "--linger")
    assert forms["job"] == ("--job",)
    assert forms["batch_size"] == ("--batch-size",)
    every = [form for of_one in forms.values() for form in of_one]
    assert len(every) == len(set(every))


def test_every_setting_is_read_from_its_variable() -> None:
    odd = {
        "shard": "2/5",
        "ready_when": "terminal",
        "samples": "steps",
        "partial_groups": "reject",
        "null_reward": "wait",
        "on_replaced": "refuse",
        "log_level": "debug",
        "log_format": "json",
    }
    values = {name: odd.get(name, "5") for name in Settings.model_fields}
    environ = {f"SPOOLD_{name.upper()}": value for name, value in values.items()}
    settings = config.load(None, {}, environ)
    assert {name: str(value) for name, value in settings.model_dump(mode="json").items()} == {
        name: "5.0" if name.endswith("_seconds") else value for name, value in values.items()
    }


def test_unknown_variables_are_named_with_the_nearest_setting() -> None:
    environ = {"SPOOLD_LINGER": "1", "SPOOLD_JOB": "x", "SPOOLER": "y", "SPOOLD_ZZZZ": "z"}
    assert config.unknown_variables(environ) == {
        "SPOOLD_LINGER": "did you mean SPOOLD_LINGER_SECONDS?",
        "SPOOLD_ZZZZ": "`spoold run --help` lists the settings",
    }


def test_stderr_is_the_journal_only_when_device_and_inode_agree() -> None:
    facts = os.fstat(2)
    here = f"{facts.st_dev}:{facts.st_ino}"
    assert config.stderr_is_journal({"JOURNAL_STREAM": here})
    assert not config.stderr_is_journal({"JOURNAL_STREAM": "8:1"})
    assert not config.stderr_is_journal({})


def test_no_setting_is_idle() -> None:
    package = Path(config.__file__).parent
    files = [path for path in package.rglob("*.py") if path.name != "config.py"]
    text = "".join(path.read_text() for path in files)
    assert [name for name in Settings.model_fields if f"settings.{name}" not in text] == []


def test_settings_read_again_keep_what_only_a_restart_can_change() -> None:
    old = config.load(None, REQUIRED, {})
    new = config.load(None, {"db": "b.db", "run_dir": "c", "batch_size": 5, "null_reward": "wait"})
    outcome = config.reloaded(old, new)
    assert outcome.changed == ("batch_size",)
    assert outcome.needs_restart == ("db", "run_dir", "null_reward")
    assert outcome.settings == old.model_copy(update={"batch_size": 5})
    assert config.reloaded(old, old) == config.Reloaded(settings=old, changed=(), needs_restart=())


def test_a_service_manager_is_where_its_variables_say() -> None:
    assert config.notify_socket({"NOTIFY_SOCKET": "@x"}) == "@x"
    assert config.notify_socket({}) == ""


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({"WATCHDOG_USEC": "1500000"}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
        ({"WATCHDOG_USEC": "-1"}, 0.0),
        ({}, 0.0),
    ],
)
def test_the_watchdog_waits_as_long_as_its_variables_say(
    environ: dict[str, str], seconds: float
) -> None:
    assert config.watchdog_seconds(environ) == seconds


@pytest.mark.parametrize(
    "url", ["postgresql://me:secret@host/db", "postgresql://me@host/db?sslmode=on&password=secret"]
)
def test_a_password_is_refused_where_ps_shows_it_and_taken_from_elsewhere(url: str) -> None:
    with pytest.raises(ConfigError, match="seen by everybody") as caught:
        config.load(None, {**REQUIRED, "db": url}, {})
    assert "secret" not in str(caught.value)
    given = config.load(None, {"run_dir": "run"}, {"SPOOLD_DB": url})
    assert given.db == url


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me@host:5433/db?passfile=/etc/pass&sslkey=/etc/key",
        "postgresql://a:1,b:2/db",
        "postgresql://?service=train",
        "odd:name@x.db",
    ],
)
def test_a_url_without_a_password_may_be_an_option(url: str) -> None:
    assert config.load(None, {**REQUIRED, "db": url}, {}).db == url
