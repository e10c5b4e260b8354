"""systemd/README.md as typed, in a real systemd, from a bare Debian to a hardened instance.

One machine, the tests in the order of the file: each leaves the instance running.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.machine import ROOT, Machine, why_not
from tests.support.needs import needs
from tests.support.processes import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("machine")]

UNIT = "spoold@exp7"
RUN = "/var/lib/spoold/exp7"
DB = "/srv/rollouts/rollouts.db"
SPOOLD = "/opt/spoold/bin/spoold"

WRITER = """
import os, sys, time
sys.path.insert(0, "/opt/test")
from rollouts import make_rollouts, open_rollouts

rollouts = (open_rollouts if os.path.exists(sys.argv[1]) else make_rollouts)(sys.argv[1])
while not os.path.exists("/run/writer/stop"):
    for one in rollouts.register(3, group=""):
        rollouts.complete(one, response="x" * 2000)
    time.sleep(0.02)
rollouts.close()
"""

TRAINER = """
import sys
from spoold import Consumer

with Consumer(sys.argv[1], name="trainer-0") as consumer:
    for step in range(1, int(sys.argv[2]) + 1):
        batch = consumer.claim(timeout=30.0)
        assert batch is not None and list(batch.samples())
        batch.ack(step=step)
"""

# The loop hangs while a file says so; a thread of the same process lives on.
HANGING = """
import os, threading, time
from spoold.cli import main
from spoold.daemon.loop import Daemon

step = Daemon.step

def hang(self):
    while os.path.exists("/run/hang"):
        time.sleep(0.1)
    return step(self)

def live():
    while True:
        time.sleep(0.1)

Daemon.step = hang
threading.Thread(target=live, daemon=True).start()
main(["run", "--config", "/etc/spoold/exp7.toml"])
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    needs(not why_not(), why_not())
    folder = tmp_path_factory.mktemp("machine")
    with Machine(folder) as booted:
        booted.write("/opt/test/rollouts.py", (ROOT / "tests/support/rollouts.py").read_text())
        booted.write("/opt/test/writer.py", WRITER)
        booted.write("/opt/test/trainer.py", TRAINER)
        booted.write("/opt/test/hanging.py", HANGING)
        booted.run("useradd -r rollouts && useradd -r alice && useradd -r bob")
        yield booted


def commands() -> list[str]:
    """The commands of the first block of systemd/README.md."""
    readme = (ROOT / "systemd/README.md").read_text()
    block = re.search(r"```bash\n(.*?)```", readme, flags=re.DOTALL)
    assert block is not None
    return block[1].splitlines()


def status(machine: Machine) -> Any:
    return json.loads(machine.run(f"{SPOOLD} status {RUN} --json"))


def pending(machine: Machine) -> list[str]:
    return sorted(path.name for path in (machine.root / RUN[1:] / "pending").iterdir())


def delivered(machine: Machine) -> list[int]:
    """Environments in all batches that lie anywhere, one entry a line."""
    found = []
    for path in (machine.root / RUN[1:]).rglob("*.jsonl"):
        lines = path.read_bytes().splitlines()
        found += [json.loads(line)["extra_info"]["environment"] for line in lines]
    return found


def completed(machine: Machine) -> list[int]:
    query = "SELECT id FROM job_environments WHERE finished = 1 ORDER BY id"
    code = f"import sqlite3; print([i for i, in sqlite3.connect('{DB}').execute('{query}')])"
    ids: list[int] = json.loads(machine.run(f'python3 -c "{code}"', user="rollouts"))
    return ids


def is_active(machine: Machine) -> bool:
    return machine.unit(UNIT, "ActiveState")["ActiveState"] == "active"


def restarts(machine: Machine) -> int:
    return int(machine.unit(UNIT, "NRestarts")["NRestarts"])


def drop_in(machine: Machine, name: str, text: str) -> None:
    machine.write(f"/etc/systemd/system/{UNIT}.service.d/{name}.conf", f"[Service]\n{text}\n")
    machine.run("systemctl daemon-reload")


def start_writer(machine: Machine) -> None:
    machine.run("rm -rf /run/writer")
    machine.start(
        "writer",
        f"/usr/bin/python3 /opt/test/writer.py {DB}",
        user="rollouts",
        properties="-p UMask=0027",
    )


def stop_writer(machine: Machine) -> None:
    machine.run("mkdir -p /run/writer && touch /run/writer/stop")
    until(lambda: machine.attempt("systemctl is-active writer")[0], "the writer's end")


def test_five_commands_lead_from_a_bare_debian_to_a_running_instance(machine: Machine) -> None:
    assert len(commands()) <= 5
    for command in commands():
        machine.run(command)
    shown = machine.run(f"systemctl status {UNIT}")
    assert "active (running)" in shown
    assert f'Status: "no database at {DB} yet' in shown


def test_the_status_text_is_the_first_reason_of_spoold_status(machine: Machine) -> None:
    first = status(machine)["reasons"][0]
    said = machine.unit(UNIT, "StatusText")["StatusText"]
    assert said == f"{first['text']}; {first['remedy']}"


def test_a_database_of_another_user_is_read_while_it_is_written(machine: Machine) -> None:
    machine.run("install -d -o rollouts -g rollouts -m 750 /srv/rollouts")
    start_writer(machine)
    until(
        lambda: "permission denied" in machine.unit(UNIT, "StatusText")["StatusText"],
        "the refusal in words",
    )
    drop_in(machine, "rollouts", "SupplementaryGroups=rollouts")
    machine.run(f"systemctl restart {UNIT}")
    until(lambda: len(pending(machine)) >= 2, "two batches")
    owners = machine.run("stat -c %U /srv/rollouts/*").split()
    assert set(owners) == {"rollouts"}
    assert machine.attempt("systemctl is-active writer")[1] == "active\n"


def test_a_trainer_under_another_user_of_the_group_claims_and_acks(machine: Machine) -> None:
    python = "/opt/spoold/bin/python"
    code, said = machine.attempt(f"{python} /opt/test/trainer.py {RUN} 1", user="bob")
    assert code != 0
    assert "ermission" in said
    machine.run("usermod -aG spoold alice")
    machine.run(f"umask 077; {python} /opt/test/trainer.py {RUN} 2", user="alice")
    until(lambda: pending(machine), "a batch")
    (name, *_) = pending(machine)
    machine.run(f"cd {RUN} && mv -n pending/{name} inflight/", user="alice")
    machine.run(f"cd {RUN} && mv -n inflight/{name} acked/", user="alice")
    until(
        lambda: len(list((machine.root / RUN[1:] / ".spoold/ledger").iterdir())) == 3,
        "three acks in the ledger",
    )
    folders = machine.run(f"stat -c '%U:%G %a' {RUN}/inflight/trainer-0 {RUN}/acked/step-*")
    assert set(folders.splitlines()) == {"alice:spoold 2770"}


def test_what_is_logged_has_priorities_and_a_batch_can_be_found_by_its_id(
    machine: Machine,
) -> None:
    (acked,) = (machine.root / RUN[1:] / "acked").glob("*.jsonl")
    found = machine.run(f"journalctl -u {UNIT} -o json -g {acked.stem}").splitlines()
    events = [json.loads(line) for line in found]
    assert events[0]["MESSAGE"].startswith("published batch=")
    assert "to=acked" in events[-1]["MESSAGE"]
    assert {event["PRIORITY"] for event in events} == {"6"}
    warned = machine.run(f"journalctl -u {UNIT} -p warning -o cat")
    assert "waiting reason=source-unavailable" in warned


def test_kill_9_and_the_restart_lose_and_double_nothing(machine: Machine) -> None:
    before = restarts(machine)
    drop_in(machine, "soon", "RestartSec=0.2")
    for kill in range(1, 4):
        machine.run(f"systemctl kill -s KILL {UNIT}")
        until(lambda: restarts(machine) >= before + kill, "the restart")  # noqa: B023
        until(lambda: is_active(machine), "the service to be active again")
    stop_writer(machine)
    ids = completed(machine)
    until(lambda: len(delivered(machine)) >= len(ids), "all environments")
    assert sorted(delivered(machine)) == ids
    assert machine.run("ls /srv/rollouts") == "rollouts.db\n"


def test_it_is_active_only_after_ready(machine: Machine) -> None:
    machine.run(f"systemctl stop {UNIT}")
    hold = f"/usr/bin/flock {RUN}/.spoold/lock /usr/bin/sleep 1000"
    machine.start("holder", hold, user="root")
    until(lambda: machine.attempt(f"flock -n {RUN}/.spoold/lock true")[0], "the lock to be held")
    machine.run(f"systemctl start --no-block {UNIT}")
    states = set()

    def tried() -> bool:
        shown = machine.unit(UNIT, "ActiveState", "SubState", "ExecMainStatus")
        states.add((shown["ActiveState"], shown["SubState"]))
        return shown["ExecMainStatus"] == "75"

    until(tried, "the first try to give up with exit 75")
    assert ("activating", "start") in states
    assert "active" not in {state for state, _ in states}
    machine.run("systemctl stop holder")
    until(lambda: is_active(machine), "the service to be active")


def test_it_stops_within_seconds(machine: Machine) -> None:
    began = time.monotonic()
    machine.run(f"systemctl stop {UNIT}")
    assert time.monotonic() - began < 5.0
    shown = machine.unit(UNIT, "Result", "ExecMainStatus", "ActiveState")
    assert shown == {"Result": "success", "ExecMainStatus": "0", "ActiveState": "inactive"}
    machine.run(f"systemctl start {UNIT}")


def test_a_hung_loop_is_killed_by_the_watchdog_and_started_again(machine: Machine) -> None:
    command = "ExecStart=\nExecStart=/opt/spoold/bin/python /opt/test/hanging.py"
    drop_in(machine, "hang", f"{command}\nWatchdogSec=2\n")
    machine.run(f"systemctl restart {UNIT}")
    pid = machine.unit(UNIT, "MainPID")["MainPID"]
    time.sleep(3)  # longer than the watchdog: a loop that goes round is left alone
    assert machine.unit(UNIT, "MainPID")["MainPID"] == pid
    before = restarts(machine)
    machine.run("touch /run/hang")
    until(lambda: restarts(machine) > before, "the watchdog to kill it")
    assert "watchdog" in machine.run(f"journalctl -u {UNIT} -o cat -g [Ww]atchdog")
    machine.run("rm /run/hang")
    (machine.root / f"etc/systemd/system/{UNIT}.service.d/hang.conf").unlink()
    machine.run(f"systemctl daemon-reload && systemctl restart {UNIT}")
    assert is_active(machine)


def test_a_reload_takes_what_may_change_and_says_what_needs_a_restart(machine: Machine) -> None:
    settings = machine.root / "etc/spoold/exp7.toml"
    before = settings.read_text()
    settings.write_text(before + 'batch_size = 5\ngroup_size = 4\nlog_level = "debug"\n')
    machine.run(f"systemctl reload {UNIT}")

    def journal() -> str:
        return machine.run(f"journalctl -u {UNIT} -o cat")

    until(lambda: "settings need a restart settings=group_size" in journal(), "the reload")
    assert 'settings reloaded changed="batch_size log_level"' in journal()
    settings.write_text(before)
    machine.run(f"systemctl reload {UNIT}")
    until(lambda: is_active(machine), "the service to be active")


def test_a_wrong_configuration_is_not_tried_again(machine: Machine) -> None:
    machine.write("/etc/spoold/wrong.toml", f'db = "{DB}"\nrun_dir = "{RUN}"\nbach_size = 3\n')
    machine.attempt("systemctl start spoold@wrong")
    shown = machine.unit("spoold@wrong", "ActiveState", "ExecMainStatus", "NRestarts", "Result")
    assert shown == {
        "ActiveState": "failed",
        "ExecMainStatus": "78",
        "NRestarts": "0",
        "Result": "exit-code",
    }
    said = machine.run("journalctl -u spoold@wrong -o cat")
    assert "unknown setting 'bach_size'" in said
    assert "did you mean batch_size?" in said


def test_a_run_directory_that_moved_goes_on_where_it_was(machine: Machine) -> None:
    before = sorted(delivered(machine))
    machine.run(f"systemctl stop {UNIT}")
    machine.run(f"cp -a {RUN} /var/lib/spoold/exp8")
    machine.write("/etc/spoold/exp8.toml", f'db = "{DB}"\nrun_dir = "/var/lib/spoold/exp8"\n')
    machine.run(
        f"cp -r /etc/systemd/system/{UNIT}.service.d /etc/systemd/system/spoold@exp8.service.d"
    )
    machine.run("systemctl daemon-reload && systemctl start spoold@exp8")
    there = json.loads(machine.run(f"{SPOOLD} status /var/lib/spoold/exp8 --json"))
    assert there["running"]
    machine.run("systemctl stop spoold@exp8 && rm -rf /var/lib/spoold/exp7")
    machine.run(f"mv /var/lib/spoold/exp8 /var/lib/spoold/exp7 && systemctl start {UNIT}")
    assert sorted(delivered(machine)) == before


def test_acked_batches_that_age_away_are_not_delivered_again(machine: Machine) -> None:
    """With the line of tmpfiles.d as shipped, but for its age."""
    snippet = (ROOT / "systemd/tmpfiles.d/spoold.conf").read_text()
    (line,) = re.findall(r"#(e .*/acked .*)30d", snippet)
    acked = machine.root / RUN[1:] / "acked"
    kept = pending(machine)
    machine.write("/etc/tmpfiles.d/ageing.conf", f"{line}1s\n")
    time.sleep(1.1)  # all is older than its age now
    machine.run("systemd-tmpfiles --clean ageing.conf")
    assert list(acked.rglob("*.jsonl")) == []
    assert acked.exists()
    assert pending(machine) == kept
    machine.run(f"systemctl restart {UNIT}")
    ids = completed(machine)
    start_writer(machine)
    until(lambda: len(pending(machine)) > len(kept), "new batches")
    stop_writer(machine)
    new = [one for one in delivered(machine) if one not in ids]
    assert new
    assert len(delivered(machine)) == len(set(delivered(machine)))
