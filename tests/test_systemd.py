"""What a service manager hears, on a socket that listens as the manager does."""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from spoold.systemd import Service
from tests.support.daemons import Clock
from tests.support.manager import Manager


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = f"{tmp_path}/notify" if request.param == "path" else f"@spoold-{uuid.uuid4()}"
    with Manager(address) as listening:
        yield listening


def test_both_kinds_of_socket_hear_ready_status_and_stopping(manager: Manager) -> None:
    service = Service(manager.address)
    service.ready()
    service.status("2 batches are pending")
    service.stopping()
    assert manager.heard() == ["READY=1", "STATUS=2 batches are pending", "STOPPING=1"]


def test_a_status_is_one_line_and_said_once(manager: Manager) -> None:
    service = Service(manager.address)
    for sentence in ("a\nREADY=1", "a\nREADY=1", "b\udcff"):
        service.status(sentence)
    assert manager.heard() == ["STATUS=a READY=1", "STATUS=b\\udcff"]


def test_reloading_tells_when_it_began_and_ready_ends_it(manager: Manager) -> None:
    service = Service(manager.address)
    service.reloading()
    service.ready()
    began, ended = manager.heard()
    assert began.startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert int(began.rpartition("=")[2]) > 0
    assert ended == "READY=1"


def test_progress_pings_the_watchdog_four_times_in_its_time_at_most(manager: Manager) -> None:
    clock = Clock()
    service = Service(manager.address, watchdog_seconds=8.0, clock=clock)
    service.ready()
    for _ in range(10):
        clock.now += 0.5
        service.progress()
    assert manager.heard() == ["READY=1", *["WATCHDOG=1"] * 3]
    assert service.shorten(60.0) == 2.0
    assert service.shorten(0.5) == 0.5


def test_without_a_watchdog_nothing_pings_and_the_loop_waits_as_long_as_it_likes(
    manager: Manager,
) -> None:
    service = Service(manager.address)
    service.progress()
    assert manager.heard() == []
    assert service.shorten(3600.0) == 3600.0


def test_without_an_address_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    service = Service("")
    service.ready()
    service.status("x")
    service.stopping()
    assert caplog.records == []


def test_a_socket_that_vanished_is_warned_of_once_and_heard_again_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"{tmp_path}/notify"
    service = Service(address, watchdog_seconds=1.0, clock=Clock())
    with Manager(address):
        service.ready()
    for number in range(3):
        service.status(f"{number}")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    with Manager(address) as back:
        service.status("3")
        assert back.heard() == ["STATUS=3"]
    service.status("4")
    assert len(caplog.records) == 2


@pytest.mark.parametrize("address", ["relative", "/" + "x" * 200, "@", "vsock:2:1234"])
def test_an_address_that_is_none_is_survived(address: str) -> None:
    Service(address).ready()


def test_a_manager_that_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    address = f"{tmp_path}/notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(address)
        service = Service(address)
        for number in range(5000):
            service.status(f"{number}")
