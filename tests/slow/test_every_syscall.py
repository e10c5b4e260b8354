"""kill -9 at every system call that changes the run directory, one after the other.

Each act is traced once: that tells how often it makes which call, thread by thread. Then, for every
one of those calls, the act begins anew from the same files and is killed by strace as it enters the
call. What lies there then must be whole, and a normal start must find each environment once.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.crash import acts, verdict
from tests.crash.zygote import Zygote
from tests.support.needs import needs

pytestmark = pytest.mark.slow

CALLS = ("open", "openat", "write", "pwrite64", "fsync", "fdatasync", "ftruncate", "flock")
CALLS += ("rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat")
CALLS += ("mkdir", "mkdirat", "rmdir", "chmod", "fchmod", "fchmodat")
_LINE = re.compile(r"(\d+)\s+(\w+)\((.*)")


def strace_works() -> bool:
    """Whether one process may trace another here."""
    command = ["strace", "-o", "/dev/null", "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except OSError:
        return False


@contextmanager
def traced(zygote: Zygote, log: Path, *options: str) -> Iterator[None]:
    """Have strace follow what the zygote forks."""
    command = ["strace", "-f", "-qq", "-y", "-o", str(log), *options, "-p", str(zygote.pid)]
    strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    status = Path(f"/proc/{zygote.pid}/status")
    try:
        wait_for(lambda: f"TracerPid:\t{strace.pid}" in status.read_text(), "strace to attach")
        yield
    finally:
        strace.send_signal(signal.SIGINT)
        assert strace.stderr is not None
        strace.stderr.close()
        strace.wait()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.0005)


def moments(log: Path, folder: Path) -> set[tuple[str, int]]:
    """The calls of a traced act that change its run directory: (call, how many-th of its thread).

    A call that reads is counted as strace counts it, and not returned.
    """
    counts: dict[tuple[str, str], int] = defaultdict(int)
    found = set()
    for line in log.read_text(errors="replace").splitlines():
        match = _LINE.match(line)
        if match is None:
            continue  # "<... resumed>", exits and signals
        thread, call, arguments = match.groups()
        counts[thread, call] += 1
        if call in ("open", "openat") and "O_CREAT" not in arguments:
            continue
        if f"{folder}/run" in arguments:
            found.add((call, counts[thread, call]))
    return found


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    needs(strace_works(), "strace cannot trace a process here")
    with Zygote() as it:
        yield it


def test_a_kill_at_any_system_call_loses_and_doubles_nothing(
    zygote: Zygote, home: Path, record_property: Callable[[str, object], None]
) -> None:
    before: dict[str, verdict.Seen] = {}
    todo: dict[tuple[str, int], list[str]] = defaultdict(list)
    trace = "trace=" + ",".join(CALLS)
    for act in acts.ACTS:
        template = home / "template" / act.name
        template.mkdir(parents=True)
        act.prepare(template)
        before[act.name] = verdict.look(template / "run")
        before[act.name].may_go = act.removes
        folder = home / "traced"
        shutil.copytree(template, folder)
        with traced(zygote, home / "log", "-e", trace):
            assert zygote.do(act.name, folder) == 0
        verdict.after_restart(folder, before[act.name])
        for moment in moments(home / "log", folder):
            todo[moment].append(act.name)
        shutil.rmtree(folder)

    tried: dict[str, int] = defaultdict(int)
    for (call, number), names in sorted(todo.items()):
        kill = f"inject={call}:signal=KILL:when={number}"
        killed = []
        with traced(zygote, home / "log", "-e", f"trace={call}", "-e", kill):
            for name in names:
                folder = home / "killed" / name
                shutil.copytree(home / "template" / name, folder)
                code = zygote.do(name, folder)
                assert code in (0, -signal.SIGKILL), f"{name}, {call} {number}: exit code {code}"
                killed.append((name, folder, code))
        for name, folder, code in killed:
            try:
                now = verdict.at_rest(folder, before[name])
                verdict.assert_kept(folder, now)
                verdict.after_restart(folder, now)
            except BaseException as error:
                error.add_note(f"{name}, killed at {call} {number}")
                raise
            tried[name] += code != 0
            shutil.rmtree(folder)
            acts.said_file(folder).unlink(missing_ok=True)
    for name, count in tried.items():
        record_property("tried", ("kills, one at each system call", name, count))
    assert set(tried) == {act.name for act in acts.ACTS}
