"""`spoold serve` as a process: how it starts, ends, is killed, and what it tells whom."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from spoold import Consumer
from tests.support.commands import Ran, spoold, spoold_process
from tests.support.gateways import Client, ask, needs_http, serve_command, url_of
from tests.support.handmade import ls, make_run_dir, put
from tests.support.manager import Manager
from tests.support.processes import Players, until


@pytest.fixture(autouse=True)
def gateway() -> None:
    needs_http()


@pytest.fixture
def players(tmp_path: Path) -> Iterator[Players]:
    with Players(tmp_path) as started:
        yield started


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run_dir(tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_well_and_gives_back_what_is_held(
    run: Path, players: Players, number: int
) -> None:
    name = put(run, 1)
    child = players.start("gateway", serve_command(run))
    client = Client(url_of(players))
    assert client.get().batch_id == name.id
    os.kill(child.pid, number)
    assert child.wait(30) == 0
    assert ls(run) == [f"pending/{name.file_name}"]
    log = players.log("gateway").read_text().splitlines()
    events = [line.split(maxsplit=3)[2:] for line in log]
    assert [event[1].split()[0] for event in events] == [
        "serving",
        "claimed",
        "stopping",
        "released",
    ]
    assert {level for level, _ in events} == {"INFO"}


def test_killed_with_a_batch_in_hand_it_answers_it_again_in_its_next_life(
    run: Path, players: Players
) -> None:
    name = put(run, 1)
    players.start("gateway", serve_command(run))
    first = Client(url_of(players)).get()
    players.kill("gateway")
    assert ls(run) == [f"inflight/gateway/{name.file_name}"]
    players.start("gateway")
    second = Client(url_of(players, life=2)).get()
    assert second.json["data"] == first.json["data"]
    assert ls(run) == [f"inflight/gateway/{name.next_attempt().file_name}"]


def test_its_service_manager_hears_when_it_serves_and_what_it_holds(
    run: Path, players: Players, tmp_path: Path
) -> None:
    name = put(run, 1)
    with Manager(f"{tmp_path}/notify") as manager:
        environ = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "400000"}
        child = players.start("gateway", serve_command(run), environ=environ)
        manager.wait_for(lambda said: said == "READY=1")
        Client(url_of(players)).get()
        manager.wait_for(lambda said: f"holds {name.id}, not acked (answers: 1)" in said)
        manager.wait_for(lambda said: said == "WATCHDOG=1")
        os.kill(child.pid, signal.SIGTERM)
        manager.wait_for(lambda said: said == "STOPPING=1")
        assert child.wait(30) == 0


def serve(*args: object, environ: dict[str, str] | None = None) -> Ran:
    return spoold_process("serve", *args, "--port=0", environ=environ)


def test_what_only_a_person_can_mend_is_78(run: Path, tmp_path: Path) -> None:
    ran = serve(tmp_path / "nowhere")
    assert ran.code == 78
    assert "nowhere is no run directory: it has no pending/; `spoold run --run-dir" in ran.err
    ran = serve(run, "--host=0.0.0.0")
    assert ran.code == 78
    assert "others can reach 0.0.0.0, and no token is set; give --token-file" in ran.err
    assert serve(run, "--name=a/b").code == 78
    assert not (run / "inflight/a").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such file or directory"), ("", "is no word"), ("two words", "is no word"),
     ("schlüssel", "is no word")],
)  # fmt: skip
def test_a_token_that_cannot_be_one_is_78(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    words: str,
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    ran = spoold(capsys, "serve", run, "--token-file", path)
    assert (ran.code, words in ran.err) == (78, True)


def test_without_the_extra_it_says_what_to_install(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spoold.cli.serve.find_spec", lambda name: None)
    ran = spoold(capsys, "serve", run)
    assert (ran.code, "pip install 'spoold[http]'" in ran.err) == (78, True)


def test_a_log_format_that_is_none_is_78(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = spoold(capsys, "serve", run, "--log-format=xml")
    assert (ran.code, "log_format cannot be 'xml'" in ran.err) == (78, True)


def test_its_name_in_use_is_75_and_names_the_holder(run: Path) -> None:
    with Consumer(run, name="gateway"):
        ran = serve(run)
    assert ran.code == 75
    assert f"another process is consumer gateway of {run} (" in ran.err


def test_its_port_in_use_is_75(run: Path, players: Players) -> None:
    players.start("gateway", serve_command(run))
    port = url_of(players).rpartition(":")[2]
    ran = spoold_process("serve", run, "--name=other", "--port", port)
    assert ran.code == 75
    assert "address already in use; choose another --port" in ran.err


def test_the_token_comes_from_a_variable_or_a_file_and_is_shown_nowhere(
    run: Path, players: Players, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("from-the-file\n")
    commands = {
        "from-the-variable": serve_command(run),
        "from-the-file": serve_command(run, f"--token-file={tmp_path}/token", "--name=b"),
    }
    for token, command in commands.items():
        players.start(token, command, environ={"SPOOLD_TOKEN": "from-the-variable"})
        url = url_of(players, token)
        assert ask(url, "/get_rollout_data").status == 401
        headers = {"authorization": f"Bearer {token}"}
        assert ask(url, "/get_rollout_data", headers=headers).status == 200
        until(lambda name=token: "serving" in players.log(name).read_text(), "the log")
        assert token not in players.log(token).read_text()
