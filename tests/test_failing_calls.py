"""A system call on the run directory fails: what is there, what status says, how it goes on.

`tests/slow/test_failing_calls.py` tries every call of every act; these are the short version, and
what is about a daemon that goes on running.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from spoold import fs
from spoold.errors import SpoolWriteError
from spoold.reasons import SEVERE
from tests.crash import acts, faults, verdict
from tests.crash.syscalls import Call, watching
from tests.support.daemons import Running


@pytest.mark.parametrize("name", ["claim", "ack"])
def test_a_call_that_fails_leaves_nothing_half_done(name: str, tmp_path: Path) -> None:
    def one_error(number: int) -> tuple[int, ...]:
        return (faults.ERRORS[number % len(faults.ERRORS)],)

    assert faults.sweep(acts.BY_NAME[name], tmp_path, errors=one_error) > 10


class Outage:
    """From its n-th call on, all calls that write a batch fail, until it is over."""

    def __init__(self, code: int, *, after: int) -> None:
        self.code, self.after, self.over, self.hit = code, after, False, 0
        self.syncs = faults.Syncs()

    def __call__(self, call: Call) -> None:
        on = not self.over and call.number > self.after and "status.json" not in call.path
        fails = on and call.name in ("create", "write", "fsync")
        self.syncs.look(call, fails=fails)
        if fails:
            self.hit += 1
            raise OSError(self.code, os.strerror(self.code), call.path)


def go_through(it: Running, outage: Outage) -> SpoolWriteError | None:
    """Deliver until the outage, look at status, end the outage, and deliver the rest."""
    try:
        it.go()
        if outage.hit:
            held = {reason.code: reason for reason in it.daemon.conditions.reasons()}
            code = "disk-space" if outage.code == errno.ENOSPC else "write-failed"
            assert os.strerror(outage.code).lower() in held[code].text
            assert held[code].remedy
            assert it.status.state == "held"
        outage.over = True
        it.go(20.0)
    except SpoolWriteError as error:
        return error
    return None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_09_15_a_daemon_says_why_it_cannot_write_and_goes_on_by_itself_when_it_can(
    tmp_path: Path, code: int
) -> None:
    """A full disk, and a disk that fails to sync. Every other error is tried by the slow tests."""
    template = tmp_path / "template"
    template.mkdir()
    acts.BY_NAME["publish in the loop"].prepare(template)
    gone_on = 0
    for after in range(100):
        folder = tmp_path / str(after)
        shutil.copytree(template, folder)
        before = verdict.look(folder / "run")
        it = acts.daemon(folder)
        outage = Outage(code, after=after)
        with watching(f"{folder}/run", outage):
            error = go_through(it, outage)
        if error is None:
            assert not {reason.code for reason in it.daemon.conditions.reasons()} & SEVERE
            verdict.assert_each_once(folder, verdict.look(folder / "run"))
            gone_on += outage.hit > 0
        else:
            assert error.state_unknown, error
        assert not outage.syncs.again
        outage.syncs.close()
        it.kill()
        verdict.after_restart(folder, verdict.at_rest(folder, before))
        if not outage.hit:
            break
    assert not outage.hit
    assert gone_on > 5


def test_a_number_that_cannot_be_reserved_loses_no_environment(tmp_path: Path) -> None:
    """Its environments were out of the plan by then, and nobody put them back."""
    acts.database(tmp_path, 2)
    it = acts.daemon(tmp_path, batch_size=1)
    fails = [True]

    def on_call(call: Call) -> None:
        if fails[0] and call.name == "rename" and "/seq-" in call.path:
            raise OSError(errno.EROFS, "read-only", call.path)

    with watching(f"{tmp_path}/run", on_call):
        it.go()
        assert "read-only" in {reason.code for reason in it.daemon.conditions.reasons()}
        fails[0] = False
        it.go(1.0)
    assert len(os.listdir(it.run.pending)) == 2
    it.daemon.stop()
    it.kill()


def test_15_a_requeue_whose_sync_failed_ends_the_daemon(tmp_path: Path) -> None:
    acts.BY_NAME["requeue"].prepare(tmp_path)
    it = acts.daemon(tmp_path, requeue_seconds=60)
    it.go()

    def on_call(call: Call) -> None:
        if call.name == "fsync" and call.path.endswith("/pending"):
            raise OSError(errno.EIO, "broken", call.path)

    with watching(f"{tmp_path}/run", on_call), pytest.raises(SpoolWriteError) as caught:
        it.go(61.0)
    assert caught.value.state_unknown
    it.kill()


def test_09_on_a_full_disk_status_is_written_over_in_its_place(tmp_path: Path) -> None:
    path, tmp = tmp_path / "status.json", tmp_path / "tmp"
    tmp.mkdir()
    for text in (
        b'{"state": "delivering"}',
        b'{"state": "held"}',
        b'{"state": "delivering again"}',
    ):
        full = path.exists()

        def on_call(call: Call, full: bool = full) -> None:
            if full and call.name == "create":
                raise OSError(errno.ENOSPC, "full", call.path)

        with watching(str(tmp_path), on_call):
            fs.put(str(path), text, tmp_dir=str(tmp), durable=False)
        assert json.loads(path.read_bytes()) == json.loads(text)
        assert os.listdir(tmp) == []
