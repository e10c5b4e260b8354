"""systemd/README.md as typed, in a real systemd, from a bare Debian to a hardened instance."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from spoold.layout import State
from tests.support.machine import ROOT, Machine, why_not
from tests.support.needs import needs
from tests.support.processes import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("mounts")]

SPOOLD, PYTHON = "/opt/spoold/bin/spoold", "/opt/spoold/bin/python"

WRITER = """
import os, sys, time
sys.path.insert(0, "/opt/test")
from rollouts import make_rollouts, open_rollouts

db, stop = sys.argv[1:]
rollouts = (open_rollouts if os.path.exists(db) else make_rollouts)(db)
while not os.path.exists(stop):
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

# The loop hangs while a file says so; another thread of the process lives on.
HANGING = """
import os, sys, threading, time
from spoold.cli import main
from spoold.daemon.loop import Daemon

step = Daemon.step

def hang(self):
    while os.path.exists(sys.argv[2]):
        time.sleep(0.1)
    return step(self)

def live():
    while True:
        time.sleep(0.1)

Daemon.step = hang
threading.Thread(target=live, daemon=True).start()
main(["run", "--config", sys.argv[1]])
"""


CLIENT = """
import http.client, json, sys

port, path, facts = sys.argv[1:]
connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
connection.request("POST", path, facts)
print(connection.getresponse().read().decode())
"""


def commands(number: int = 0) -> list[str]:
    """The commands of a block of systemd/README.md, the first one."""
    readme = (ROOT / "systemd/README.md").read_text()
    return re.findall(r"```bash\n(.*?)```", readme, flags=re.DOTALL)[number].splitlines()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine on which the README's commands were typed, and some users live."""
    needs(not why_not(), why_not())
    with Machine(tmp_path_factory.mktemp("machine")) as booted:
        for command in commands():
            booted.run(command)
        booted.write("/opt/test/rollouts.py", (ROOT / "tests/support/rollouts.py").read_text())
        booted.write("/opt/test/writer.py", WRITER)
        booted.write("/opt/test/trainer.py", TRAINER)
        booted.write("/opt/test/hanging.py", HANGING)
        booted.write("/opt/test/client.py", CLIENT)
        booted.run("for one in rollouts alice bob; do useradd -r $one; done")
        booted.run("usermod -aG spoold alice")
        yield booted


@dataclass
class Instance:
    """An instance with a database of its own, which belongs to the user and group rollouts."""

    machine: Machine
    name: str

    @property
    def unit(self) -> str:
        return f"spoold@{self.name}"

    @property
    def run_dir(self) -> str:
        return f"/var/lib/spoold/{self.name}"

    @property
    def db(self) -> str:
        return f"/srv/{self.name}/rollouts.db"

    @property
    def on_disk(self) -> Path:
        """The run directory as this side sees it."""
        return self.machine.root / self.run_dir[1:]

    # --- what is done to it ----------------------------------------------------------------------

    def configure(self, *lines: str) -> None:
        settings = (f'db = "{self.db}"', f'run_dir = "{self.run_dir}"', "min_free_bytes = 0")
        self.machine.write(f"/etc/spoold/{self.name}.toml", "\n".join((*settings, *lines, "")))

    def drop_in(self, name: str, *lines: str) -> None:
        path = f"/etc/systemd/system/{self.unit}.service.d/{name}.conf"
        self.machine.write(path, "\n".join(("[Service]", *lines, "")))
        self.machine.run("systemctl daemon-reload")

    def systemctl(self, *words: str) -> str:
        return self.machine.run(f"systemctl {' '.join(words)} {self.unit}")

    def start_writer(self) -> None:
        self.machine.run(f"rm -f /srv/{self.name}/stop")
        self.machine.start(
            f"writer-{self.name}",
            f"/usr/bin/python3 /opt/test/writer.py {self.db} /srv/{self.name}/stop",
            user="rollouts",
            properties="-p UMask=0027",
        )

    def stop_writer(self) -> None:
        self.machine.run(f"touch /srv/{self.name}/stop")
        writer = f"writer-{self.name}"
        until(lambda: self.machine.attempt(f"systemctl is-active {writer}")[0], "the writer's end")

    # --- how it is -------------------------------------------------------------------------------

    def show(self, *properties: str) -> dict[str, str]:
        return self.machine.unit(self.unit, *properties)

    def is_active(self) -> bool:
        return self.show("ActiveState")["ActiveState"] == "active"

    def restarts(self) -> int:
        return int(self.show("NRestarts")["NRestarts"])

    def said(self) -> str:
        return self.show("StatusText")["StatusText"]

    def journal(self, options: str = "-o cat") -> str:
        return self.machine.run(f"journalctl -u {self.unit} {options}")

    def status(self) -> Any:
        return json.loads(self.machine.run(f"{SPOOLD} status {self.run_dir} --json"))

    def pending(self) -> list[str]:
        return sorted(path.name for path in (self.on_disk / "pending").iterdir())

    def ledger(self) -> list[str]:
        return sorted(path.name for path in (self.on_disk / ".spoold/ledger").iterdir())

    def delivered(self) -> list[int]:
        """Environments in all batches of the four directories, one entry a line."""
        found = []
        for state in State:
            for path in (self.on_disk / state).rglob("*.jsonl"):
                lines = path.read_bytes().splitlines()
                found += [json.loads(line)["extra_info"]["environment"] for line in lines]
        return sorted(found)

    def completed(self) -> list[int]:
        query = "SELECT id FROM job_environments WHERE finished = 1 ORDER BY id"
        ask = (
            f"import sqlite3; print([i for i, in sqlite3.connect('{self.db}').execute('{query}')])"
        )
        ids: list[int] = json.loads(self.machine.run(f'python3 -c "{ask}"', user="rollouts"))
        return ids


_NUMBERS = count(1)


@pytest.fixture
def instance(machine: Machine) -> Iterator[Instance]:
    """An instance that waits for its database; no writer yet."""
    made = Instance(machine, f"run-{next(_NUMBERS)}")
    machine.run(f"install -d -o rollouts -g rollouts -m 750 /srv/{made.name}")
    made.configure()
    made.drop_in("database", "SupplementaryGroups=rollouts")
    made.systemctl("start")
    yield made
    machine.run(f"systemctl stop {made.unit} writer-{made.name} 2>/dev/null || true")


def test_five_commands_lead_from_a_bare_debian_to_a_running_instance(machine: Machine) -> None:
    assert len(commands()) <= 5
    shown = machine.run("systemctl status spoold@exp7")
    assert "active (running)" in shown
    assert 'Status: "the rollout database cannot be read: no database at' in shown
    exposure = machine.run("systemd-analyze security spoold@exp7 --threshold=20")
    assert "Overall exposure level for spoold@exp7.service" in exposure


def test_the_status_text_is_the_first_reason_of_spoold_status(instance: Instance) -> None:
    first = instance.status()["reasons"][0]
    assert instance.said() == f"{first['text']}; {first['remedy']}"


def test_a_database_of_another_user_is_read_while_it_is_written(instance: Instance) -> None:
    instance.start_writer()
    until(lambda: len(instance.pending()) >= 2, "two batches")
    owners = instance.machine.run(f"stat -c '%n %U' /srv/{instance.name}/*").splitlines()
    assert owners == [f"{instance.db}{end} rollouts" for end in ("", "-shm", "-wal")]
    writer = instance.machine.unit(f"writer-{instance.name}", "ActiveState", "NRestarts")
    assert writer == {"ActiveState": "active", "NRestarts": "0"}


def test_a_database_that_it_may_not_read_is_said_in_words(instance: Instance) -> None:
    instance.start_writer()
    instance.drop_in("database")
    instance.systemctl("restart")
    until(lambda: "permission denied" in instance.said(), "the refusal")
    assert instance.is_active()
    instance.drop_in("database", "SupplementaryGroups=rollouts")
    instance.systemctl("restart")
    until(instance.pending, "a batch")


def test_a_trainer_under_another_user_of_the_group_claims_and_acks(instance: Instance) -> None:
    machine, run_dir = instance.machine, instance.run_dir
    instance.start_writer()
    code, said = machine.attempt(f"{PYTHON} /opt/test/trainer.py {run_dir} 1", user="bob")
    assert code != 0
    assert "ermission" in said
    machine.run(f"umask 077; {PYTHON} /opt/test/trainer.py {run_dir} 2", user="alice")
    until(instance.pending, "a batch")
    (name, *_) = instance.pending()
    machine.run(f"cd {run_dir} && mv -n pending/{name} inflight/", user="alice")
    machine.run(f"cd {run_dir} && mv -n inflight/{name} acked/", user="alice")
    until(lambda: len(instance.ledger()) == 3, "three acks in the ledger")
    folders = machine.run(f"stat -c '%U:%G %a' {run_dir}/inflight/trainer-0 {run_dir}/acked/step-*")
    assert set(folders.splitlines()) == {"alice:spoold 2770"}


def test_what_is_logged_has_priorities_and_a_batch_is_found_by_its_id(instance: Instance) -> None:
    instance.start_writer()
    until(instance.pending, "a batch")
    (name, *_) = instance.pending()
    instance.machine.run(f"cd {instance.run_dir} && mv -n pending/{name} acked/")
    until(instance.ledger, "the ack in the ledger")
    until(lambda: "to=acked" in instance.journal(), "the move in the log")
    found = instance.journal(f"-o json -g {name.removesuffix('.jsonl')}").splitlines()
    published, moved = map(json.loads, found)
    assert published["MESSAGE"].startswith("published batch=")
    assert moved["MESSAGE"].startswith("batch moved batch=")
    assert (published["PRIORITY"], moved["PRIORITY"]) == ("6", "6")
    assert "waiting reason=source-unavailable" in instance.journal("-p warning -o cat")


def test_kill_9_and_the_restart_lose_and_double_nothing(instance: Instance) -> None:
    instance.start_writer()
    instance.drop_in("soon", "RestartSec=0.1")
    for kill in range(1, 4):
        published = len(instance.pending())
        until(lambda: len(instance.pending()) > published, "a batch")  # noqa: B023
        instance.systemctl("kill", "-s KILL")
        until(lambda: instance.restarts() >= kill, "the restart")  # noqa: B023
        until(instance.is_active, "the service to be active again")
    instance.stop_writer()
    ids = instance.completed()
    until(lambda: len(instance.delivered()) >= len(ids), "all environments")
    assert instance.delivered() == ids


def test_it_is_active_only_after_ready(instance: Instance) -> None:
    machine, lock = instance.machine, f"{instance.run_dir}/.spoold/lock"
    instance.systemctl("stop")
    machine.start("holder", f"/usr/bin/flock {lock} /usr/bin/sleep 1000", user="root")
    until(lambda: machine.attempt(f"flock -n {lock} true")[0], "the lock to be held")
    machine.run(f"systemctl start --no-block {instance.unit}")
    states = set()

    def tried() -> bool:
        shown = instance.show("ActiveState", "SubState", "ExecMainStatus")
        states.add((shown["ActiveState"], shown["SubState"]))
        return shown["ExecMainStatus"] == "75"

    until(tried, "the first try to give up with exit 75")
    assert ("activating", "start") in states
    assert "active" not in {state for state, _ in states}
    machine.run("systemctl stop holder")
    until(instance.is_active, "the service to be active")


def test_it_stops_within_seconds(instance: Instance) -> None:
    instance.start_writer()
    until(instance.pending, "a batch")
    began = time.monotonic()
    instance.systemctl("stop")
    assert time.monotonic() - began < 10.0
    assert instance.show("Result", "ExecMainStatus", "ActiveState") == {
        "Result": "success",
        "ExecMainStatus": "0",
        "ActiveState": "inactive",
    }


def test_a_hung_loop_is_killed_by_the_watchdog_and_started_again(instance: Instance) -> None:
    flag = f"/srv/{instance.name}/hang"
    hanging = f"{PYTHON} /opt/test/hanging.py /etc/spoold/{instance.name}.toml {flag}"
    quick = ("WatchdogSec=2", "RestartSec=0.1")
    instance.drop_in("hang", *quick, "ExecStart=", f"ExecStart={hanging}")
    instance.systemctl("restart")
    pid = instance.show("MainPID")
    time.sleep(3)  # longer than the watchdog: a loop that goes round is left alone
    assert instance.show("MainPID") == pid
    instance.machine.run(f"touch {flag}")
    until(lambda: instance.restarts() > 0, "the watchdog to kill it")
    assert "watchdog" in instance.journal().lower()
    instance.machine.run(f"rm {flag}")
    until(instance.is_active, "the service to be active again")


def test_a_reload_takes_what_may_change_and_says_what_needs_a_restart(instance: Instance) -> None:
    instance.configure("batch_size = 5", "group_size = 4", 'log_level = "debug"')
    instance.systemctl("reload")
    until(lambda: "settings need a restart settings=group_size" in instance.journal(), "the reload")
    assert 'settings reloaded changed="batch_size log_level"' in instance.journal()
    instance.configure()
    instance.systemctl("reload")
    until(lambda: instance.journal().count("settings reloaded") == 2, "the second reload")
    assert instance.is_active()


def test_a_wrong_configuration_is_not_tried_again(instance: Instance) -> None:
    instance.configure("bach_size = 3")
    code, _ = instance.machine.attempt(f"systemctl restart {instance.unit}")
    assert code != 0
    assert instance.show("ActiveState", "ExecMainStatus", "NRestarts", "Result") == {
        "ActiveState": "failed",
        "ExecMainStatus": "78",
        "NRestarts": "0",
        "Result": "exit-code",
    }
    assert "unknown setting 'bach_size'" in instance.journal()
    assert "did you mean batch_size?" in instance.journal()


def test_a_run_directory_elsewhere_needs_one_path_for_all_of_it(instance: Instance) -> None:
    root, machine = f"/data/{instance.name}", instance.machine
    machine.run(f"install -d -o spoold -g spoold -m 2770 {root}")
    settings = machine.root / f"etc/spoold/{instance.name}.toml"
    settings.write_text(settings.read_text().replace(instance.run_dir, root))
    instance.drop_in("elsewhere", f"ReadWritePaths={root}")
    instance.systemctl("restart")
    instance.start_writer()
    pending = machine.root / root[1:] / "pending"
    until(lambda: list(pending.iterdir()), "a batch")
    every = " ".join(f"{root}/{folder}" for folder in (*State, ".spoold"))
    instance.drop_in("elsewhere", f"ReadWritePaths={every}")
    assert machine.attempt(f"systemctl restart {instance.unit}")[0] != 0
    assert instance.show("ExecMainStatus", "ActiveState") == {
        "ExecMainStatus": "78",
        "ActiveState": "failed",
    }
    assert "one mount" in instance.journal()


def test_a_run_directory_that_moved_goes_on_where_it_was(instance: Instance) -> None:
    machine = instance.machine
    instance.start_writer()
    until(lambda: len(instance.pending()) >= 2, "two batches")
    instance.stop_writer()
    ids = instance.completed()
    until(lambda: len(instance.delivered()) >= len(ids), "all environments")
    (name, *_) = instance.pending()
    machine.run(f"cd {instance.run_dir} && mv -n pending/{name} acked/")
    until(instance.ledger, "the ack in the ledger")
    instance.systemctl("stop")
    there = Instance(machine, f"{instance.name}-there")
    machine.run(f"cp -a {instance.run_dir} {there.run_dir}")
    machine.run(f"cp -a /srv/{instance.name} /srv/{there.name}")
    (there.on_disk / "acked" / name).unlink()
    there.configure()
    there.drop_in("database", "SupplementaryGroups=rollouts")
    there.systemctl("start")
    until(lambda: "source open" in there.journal(), "the database to be read")
    assert "source url changed" in there.journal()
    there.start_writer()
    until(lambda: set(there.delivered()) - set(ids), "new environments")
    there.stop_writer()
    new = there.completed()[len(ids) :]
    before = [one for one in instance.delivered() if one in there.delivered()]
    until(lambda: len(there.delivered()) >= len(before) + len(new), "all environments")
    assert there.delivered() == before + new
    there.systemctl("stop")


def test_acked_batches_that_age_away_are_not_delivered_again(instance: Instance) -> None:
    """With the line of tmpfiles.d as shipped, but for its age."""
    snippet = (ROOT / "systemd/tmpfiles.d/spoold.conf").read_text()
    (line,) = re.findall(r"#(e .*/acked .*)30d", snippet)
    line = line.replace("*", instance.name)
    machine = instance.machine
    instance.start_writer()
    machine.run(f"{PYTHON} /opt/test/trainer.py {instance.run_dir} 2", user="alice")
    instance.stop_writer()
    ids = instance.completed()
    until(lambda: len(instance.delivered()) >= len(ids), "all environments")
    until(lambda: len(instance.ledger()) == 2, "two acks in the ledger")
    kept = instance.pending()
    machine.write("/etc/tmpfiles.d/ageing.conf", f"{line}1s\n")
    time.sleep(1.1)  # all is older than its age now
    machine.run("systemd-tmpfiles --clean ageing.conf")
    assert list((instance.on_disk / "acked").rglob("*.jsonl")) == []
    assert (instance.on_disk / "acked").exists()
    assert instance.pending() == kept
    left = instance.delivered()
    instance.systemctl("restart")
    instance.start_writer()
    until(lambda: set(instance.delivered()) - set(ids), "new environments")
    instance.stop_writer()
    new = instance.completed()[len(ids) :]
    until(lambda: len(instance.delivered()) >= len(left) + len(new), "all environments")
    assert instance.delivered() == left + new


def test_a_gateway_beside_the_daemon_serves_gives_back_and_comes_back(instance: Instance) -> None:
    machine, unit = instance.machine, f"spoold-gateway@{instance.name}"
    machine.run("/opt/spoold/bin/pip install -q '.[http]'")
    for command in commands(1):
        machine.run(command.replace("exp7", instance.name))

    def ask(path: str, **facts: object) -> Any:
        client = f"{PYTHON} /opt/test/client.py 8890 {path} '{json.dumps(facts)}'"
        return json.loads(machine.run(client, user="bob"))

    try:
        assert ask("/get_rollout_data")["success"] is False
        instance.start_writer()
        until(instance.pending, "a batch")
        first = ask("/get_rollout_data")["data"]
        batch_id = first["meta_info"]["batch_id"]
        assert f"holds {batch_id}, not acked" in wait_for_status(machine, unit, batch_id)

        machine.run(f"systemctl kill -s KILL {unit}")
        until(lambda: machine.unit(unit, "NRestarts")["NRestarts"] == "1", "its next life")
        until(lambda: machine.attempt(f"systemctl is-active {unit}")[0] == 0, "it to serve")
        assert ask("/get_rollout_data")["data"] == first
        assert ask("/ack_rollout_data", batch_id=batch_id, step=7)["success"] is True
        (acked,) = (instance.on_disk / "acked/step-000000007").iterdir()
        assert acked.name == f"{batch_id}.try02.jsonl"

        until(instance.pending, "another batch")
        held = ask("/get_rollout_data")["data"]["meta_info"]["batch_id"]
        machine.run(f"systemctl stop {unit}")
        assert f"{held}.jsonl" in instance.pending()
        stopped = machine.unit(unit, "Result", "ExecMainStatus")
        assert stopped == {"Result": "success", "ExecMainStatus": "0"}
        exposure = machine.run(f"systemd-analyze security {unit} --threshold=20")
        assert f"Overall exposure level for {unit}.service" in exposure
    finally:
        machine.run(f"systemctl disable --now {unit}")


def wait_for_status(machine: Machine, unit: str, words: str) -> str:
    def said() -> str:
        return machine.unit(unit, "StatusText")["StatusText"]

    until(lambda: words in said(), f"{words} in the status")
    return said()
