"""The command line as a whole: errors in one line, exit codes, what is loaded, pipes, Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from spoold import __version__, config
from spoold.errors import SourceUnavailable
from tests.support import batches
from tests.support.commands import spoold, spoold_process
from tests.support.processes import until
from tests.support.rollouts import make_rollouts
from tests.support.spools import make_run_dir, put_batch

Capsys = pytest.CaptureFixture[str]
COMMANDS = [
    "run",
    "demo",
    "serve",
    "config",
    "status",
    "top",
    "report",
    "ls",
    "show",
    "claim",
    "ack",
    "release",
    "reject",
    "requeue",
    "rewind",
    "prune",
    "check",
]


@pytest.fixture(autouse=True)
def _nobodys_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SPOOLD_")]:
        monkeypatch.delenv(name)


def test_version_and_help_are_data(capsys: Capsys) -> None:
    assert spoold(capsys, "--version") == (0, f"spoold {__version__}\n", "")
    ran = spoold(capsys, "--help")
    assert (ran.code, ran.err) == (0, "")
    listed = [line.split()[0] for line in ran.out.partition("Commands:")[2].splitlines() if line]
    assert listed == COMMANDS


def test_every_command_has_help(capsys: Capsys) -> None:
    for command in COMMANDS:
        ran = spoold(capsys, command, "--help")
        assert ran.code == 0
        assert f"Usage: spoold {command}" in ran.out


def test_without_a_command_the_help_is_words_and_the_exit_code_is_2(capsys: Capsys) -> None:
    ran = spoold(capsys)
    assert (ran.code, ran.out) == (2, "")
    assert "Usage: spoold" in ran.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["satus"], "no such command 'satus'"),
        (["status"], "missing argument 'RUN_DIR'"),
        (["run", "--lingr", "1"], "--linger"),
        (["ls", "x", "pendin"], "'pendin' is not one of"),
        (["ack", "x", "1", "--step", "-1"], "-1 is not in the range"),
        (["claim", "x", "--timeout", "soon"], "'soon' is not a valid float"),
    ],
)
def test_a_usage_error_is_one_line_and_exits_2(capsys: Capsys, args: list[str], words: str) -> None:
    ran = spoold(capsys, *args)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("spoold: ")
    assert words in ran.err
    assert ran.err.rstrip().endswith("--help`")
    assert ran.err.count("\n") == 1


def test_a_setting_that_is_not_possible_exits_78_in_one_line(capsys: Capsys) -> None:
    ran = spoold(capsys, "run", "--db", "x", "--run-dir", "y", "--batch-size", "0")
    assert ran == (
        78,
        "",
        "spoold: batch_size cannot be '0' (given by --batch-size); it is an integer, 1 or more\n",
    )


def test_run_hands_the_merged_settings_to_the_daemon(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from spoold import daemon

    seen: list[tuple[config.Settings, bool]] = []

    def run(settings: config.Settings, *, once: bool, **_: object) -> None:
        seen.append((settings, once))

    monkeypatch.setattr(daemon, "run", run)
    monkeypatch.setenv("SPOOLD_BATCH_SIZE", "8")
    monkeypatch.setenv("SPOOLD_LINGERING", "8")
    file = tmp_path / "spoold.toml"
    file.write_text('db = "a.db"\nbatch_size = 4\nrun_dir = "r"')
    ran = spoold(capsys, "run", "--config", file, "--linger", "0.5", "--once")
    settings, once = seen[0]
    assert (ran.code, once) == (0, True)
    assert (settings.db, settings.batch_size, settings.linger_seconds) == ("a.db", 8, 0.5)
    assert "WARNING unknown variables" in ran.err
    assert "SPOOLD_LINGERING" in ran.err


def test_an_error_of_the_daemon_is_one_line_with_its_exit_code(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spoold import daemon

    def run(settings: config.Settings, **_: object) -> None:
        raise SourceUnavailable("no database at\nx", hint="start the writer")

    monkeypatch.setattr(daemon, "run", run)
    ran = spoold(capsys, "run", "--db", "x", "--run-dir", "y")
    assert ran == (75, "", "spoold: no database at x; start the writer\n")


@pytest.mark.parametrize("where", ["before", "after"])
def test_debug_shows_the_traceback_before_the_line(capsys: Capsys, where: str) -> None:
    args = ["--debug", "ls", "none"] if where == "before" else ["ls", "none", "--debug"]
    ran = spoold(capsys, *args)
    assert ran.code == 78
    assert "Traceback (most recent call last)" in ran.err
    assert ran.err.splitlines()[-1].startswith("spoold: no run directory at none")
    assert "Traceback" not in spoold(capsys, "ls", "none").err


def test_a_bug_is_one_line_and_exits_70(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from spoold.spool import overview

    def broken(path: str) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(overview, "open_run_dir", broken)
    ran = spoold(capsys, "status", "x")
    assert (ran.code, ran.out) == (70, "")
    assert ran.err == (
        "spoold: bug: RuntimeError: two lines; run it again with --debug and report that\n"
    )


def test_ctrl_c_exits_130_without_a_traceback(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spoold.spool import overview

    def interrupted(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(overview, "open_run_dir", interrupted)
    ran = spoold(capsys, "status", "x")
    assert (ran.code, ran.out, ran.err.strip()) == (130, "", "")


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    make_run_dir(tmp_path / "run")
    put_batch(tmp_path / "run", 1)
    read_end, write_end = os.pipe()
    os.close(read_end)
    ran = subprocess.run(
        [sys.executable, "-m", "spoold", "ls", str(tmp_path / "run")],
        stdout=write_end,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(write_end)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_data_that_cannot_be_written_exits_74(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    make_run_dir(tmp_path / "run")
    put_batch(tmp_path / "run", 1)
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "spoold", "ls", str(tmp_path / "run")],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (ran.returncode, ran.stderr) == (
        74,
        "spoold: cannot use standard output or another file: no space left on device\n",
    )


def test_a_path_that_is_no_utf8_is_named_escaped(capsys: Capsys) -> None:
    ran = spoold(capsys, "ls", os.fsdecode(b"no\xff"))
    assert (ran.code, ran.out) == (78, "")
    assert "no run directory at no\\xff" in ran.err


def test_words_never_go_where_data_goes(tmp_path: Path) -> None:
    make_run_dir(tmp_path / "run")
    name = put_batch(tmp_path / "run", 1)
    ran = spoold_process("claim", tmp_path / "run")
    assert ran == (0, f"{tmp_path}/run/inflight/{name.file_name}\n", "")


@pytest.mark.parametrize("args", [["status"], ["ls"], ["status", "--json"], ["ls", "--json"]])
def test_status_and_ls_load_nothing_heavy(tmp_path: Path, args: list[str]) -> None:
    make_run_dir(tmp_path / "run")
    put_batch(tmp_path / "run", 1)
    code = (
        "import sys\n"
        "from spoold.cli import main\n"
        "try:\n main()\n"
        "except SystemExit as ended:\n assert not ended.code\n"
        "heavy = 'pydantic pydantic_settings watchdog filelock sqlite3 orjson pyroaring logging"
        " hashlib asyncio'.split()\n"
        "sys.stderr.write(' '.join(name for name in heavy if name in sys.modules))"
    )
    command = [sys.executable, "-c", code, args[0], str(tmp_path / "run"), *args[1:]]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.stderr == ""
    assert ran.returncode == 0


def test_the_debug_flag_does_not_leak_into_the_next_call(capsys: Capsys) -> None:
    spoold(capsys, "--debug", "ls", "none")
    assert "Traceback" not in spoold(capsys, "ls", "none").err


@pytest.mark.parametrize(
    ("shell", "words", "index", "offered"),
    [
        ("bash", "spoold sta", 1, "status"),
        ("bash", "spoold run --sca", 2, "--scan"),
        ("zsh", "spoold config ", 2, "check"),
        ("fish", "spoold sta", 1, "status"),
    ],
)
def test_shells_complete_commands_and_options(
    shell: str, words: str, index: int, offered: str
) -> None:
    script = spoold_process(environ={"_SPOOLD_COMPLETE": f"{shell}_source"})
    assert script.code == 0
    assert "_SPOOLD_COMPLETE" in script.out
    environ = {"_SPOOLD_COMPLETE": f"{shell}_complete", "COMP_WORDS": words}
    environ["COMP_CWORD"] = words.split(" ")[-1] if shell == "fish" else str(index)
    ran = spoold_process(environ=environ)
    assert (ran.code, ran.err) == (0, "")
    assert offered in ran.out.replace(",", " ").split()


def test_when_standard_error_is_a_log_the_last_error_is_an_event_of_it(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    wrong = ["run", "--db", "x", "--run-dir", tmp_path / "run"]
    ran = spoold_process(*wrong, "--log-format", "json")
    event = json.loads(ran.err)
    assert (event["level"], event["event"], event["exit"], ran.code) == ("error", "ended", 78, 78)
    assert spoold_process(*wrong).err.startswith("spoold: ")


@pytest.mark.parametrize("command", ["run", "claim", "requeue"])
def test_a_run_directory_of_a_newer_spoold_is_refused_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    run = batches.empty_run(tmp_path / "run")
    name = batches.put_batch(run, 1, [1])
    Path(run.source_json).write_text('{"format": 3, "job": "job-1", "url": "x"}')
    make_rollouts(tmp_path / "rollout.db").close()
    before = sorted(tmp_path.rglob("*"))
    args = {
        "run": ["run", "--db", tmp_path / "rollout.db", "--run-dir", run.root],
        "claim": ["claim", run.root],
        "requeue": ["requeue", run.root, name.id],
    }
    ran = spoold(capsys, *args[command])
    assert (ran.code, ran.out) == (78, "")
    assert "newer spoold: format 3" in ran.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("what", ["no database", "a folder", "no such table", "two jobs"])
def test_a_source_that_is_wrong_for_good_ends_run_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    path = tmp_path / "rollout.db"
    if what == "no database":
        path.write_text("not a database, but long enough to be taken for one" * 100)
    elif what == "a folder":
        path.mkdir()
    elif what == "no such table":
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("CREATE TABLE other (id INTEGER)")
    else:
        rollouts = make_rollouts(path, journal="delete")
        rollouts.register(1, job="job-1")
        rollouts.register(1, job="job-2")
        rollouts.close()
    before = sorted(tmp_path.rglob("*"))
    ran = spoold(capsys, "run", "--once", "--db", path, "--run-dir", tmp_path / "run")
    assert ran.code == 78
    assert len(ran.err.splitlines()) == 1
    assert "rollout.db" in ran.err
    assert sorted(tmp_path.rglob("*")) == before


def test_no_file_of_ours_takes_the_place_of_a_standard_stream_that_was_closed(
    tmp_path: Path,
) -> None:
    make_rollouts(tmp_path / "rollouts.db").close()
    command = [sys.executable, "-m", "spoold", "run", "--db", "rollouts.db", "--run-dir", "run"]
    process = subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], cwd=tmp_path)
    try:
        until((tmp_path / "run/.spoold/status.json").exists, "the daemon to start")
        streams = [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in range(3)]
    finally:
        process.terminate()
        assert process.wait(60) == 0
    assert streams == [os.devnull] * 3
