"""The files in systemd/: hardened as promised, and at one with the code."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from spoold import errors
from spoold.cli import COMMANDS
from spoold.config import Settings
from tests.support.needs import needs

FOLDER = Path(__file__).parent.parent / "systemd"
README = (FOLDER / "README.md").read_text()


UNITS = ("spoold@.service", "spoold-gateway@.service")


def section(unit_name: str) -> configparser.SectionProxy:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(FOLDER / unit_name)
    return unit["Service"]


@pytest.fixture
def service() -> configparser.SectionProxy:
    return section("spoold@.service")


@pytest.mark.parametrize("unit", UNITS)
def test_the_unit_exposes_at_most_2_0_of_10(unit: str) -> None:
    needs(shutil.which("systemd-analyze"), "systemd-analyze is in Debian's package systemd")
    command = ["systemd-analyze", "security", "--offline=yes", "--json=short", "--threshold=20"]
    ran = subprocess.run([*command, FOLDER / unit], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lacking = {each["json_field"] for each in json.loads(ran.stdout) if not each["set"]}
    assert "CapabilityBoundingSet_CAP_SYS_ADMIN" not in lacking


@pytest.mark.parametrize("unit", UNITS)
def test_what_would_break_delivery_is_not_set(unit: str) -> None:
    service = section(unit)
    # Folders are made with the set-group-ID bit; owners of other users' files have to be seen.
    for broken_by in ("RestrictSUIDSGID", "PrivateUsers", "DynamicUser", "ReadWritePaths"):
        assert broken_by not in service
    assert service["StateDirectoryMode"] == "2770"


def test_what_no_restart_mends_is_not_tried_again(service: configparser.SectionProxy) -> None:
    codes = set(map(int, service["RestartPreventExitStatus"].split()))
    assert codes == {errors.EX_USAGE, errors.EX_BAD_SPOOL, errors.EX_CONFIG}


def test_the_gateway_is_as_hardened_as_the_daemon_but_for_its_network(
    service: configparser.SectionProxy,
) -> None:
    gateway = section("spoold-gateway@.service")
    network = {"PrivateNetwork", "RestrictAddressFamilies"}
    told = {"ExecStart", "ExecReload", "RestartPreventExitStatus", "TimeoutStartSec"}
    for name in set(service) - network - told - {"ProtectHome"}:
        assert gateway[name] == service[name], name
    assert gateway["IPAddressAllow"] == "localhost"
    codes = set(map(int, gateway["RestartPreventExitStatus"].split()))
    assert codes == {errors.EX_USAGE, errors.EX_CONFIG}


@pytest.mark.parametrize("unit", UNITS)
def test_every_line_of_hardening_is_explained(unit: str) -> None:
    """A comment stands above each setting, or above the block that it is part of."""
    text = (FOLDER / unit).read_text()
    for block in text.partition("[Service]\n")[2].partition("[Install]")[0].split("\n\n"):
        lines = [line for line in block.splitlines() if line]
        assert not lines or lines[0].startswith("#"), block


def test_the_readme_names_settings_commands_and_files_that_are_there() -> None:
    for name in re.findall(r"`(\w+_\w+)`", README):
        assert name in Settings.model_fields
    for command in re.findall(r"bin/spoold (\w+)|`spoold (\w+)", README):
        assert (command[0] or command[1]) in COMMANDS
    for path in re.findall(r"systemd/[\w@./-]+", README):
        if not path.startswith("systemd/system"):
            assert (FOLDER.parent / path.rstrip(".")).exists(), path
