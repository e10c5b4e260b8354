"""The power is cut before every call that changes the run directory, on real ext4 and xfs.

A file system in an image is shut down without flushing its log, taken off and mounted again. What
was logged as published must be there and whole, what ack() returned for must be acked, and a normal
start must find each environment once: in a brand-new run directory, too.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash import acts, disks, verdict
from tests.crash.zygote import Zygote
from tests.support.needs import needs

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("mounts")]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as it:
        yield it


@pytest.fixture(scope="module", params=["ext4", "xfs"])
def disk(request: pytest.FixtureRequest) -> Iterator[disks.Disk]:
    kind = request.param
    needs(not disks.why_not(kind), f"no {kind} can be mounted here: {disks.why_not(kind)}")
    shm = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder,
        disks.disk(kind, Path(folder)) as it,
    ):
        yield it


@pytest.mark.parametrize("act", acts.ACTS, ids=lambda act: act.name)
def test_13_a_power_cut_at_any_call_loses_and_doubles_nothing_that_was_said_to_be_durable(
    act: acts.Act,
    disk: disks.Disk,
    zygote: Zygote,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    template = tmp_path / "template"
    template.mkdir()
    act.prepare(template)
    before = verdict.look(template / "run")
    before.may_go = act.removes
    folder, said, kept = disk.at / "act", acts.said_file(disk.at / "act"), 0
    for cut in range(1, 1000):
        try:
            shutil.copytree(template, folder)
            disks.sync(folder)
            said.unlink(missing_ok=True)
            code = zygote.do(act.name, folder, cut=cut)
            assert code in (0, -signal.SIGKILL), f"exit code {code}"
            if code == 0:
                disks.cut_power(folder)
            disk.power_up_again()
            now = verdict.at_rest(folder, before)
            kept += verdict.assert_kept(folder, now)
            verdict.after_restart(folder, now)
        except BaseException as error:
            error.add_note(f"{act.name}, power cut before call {cut}, on {disk.kind}")
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if code == 0:
            break
    said.unlink(missing_ok=True)
    record_property("tried", (f"power cuts on {disk.kind}", act.name, cut))
    record_property("tried", (f"promises kept over a power cut on {disk.kind}", act.name, kept))
    assert cut > 3
