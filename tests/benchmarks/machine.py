"""The `spoold run` that is measured, as a process: how long, how much CPU, how much memory."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import ENVIRON

# Limits lifted, and no timed reconcile in a measured window by chance.
SETTINGS = {
    "max_pending_batches": "1000000",
    "max_pending_bytes": str(1 << 50),
    "min_free_bytes": "0",
    "rescan_seconds": "3600",
    "log_level": "warning",
}
REST_SECONDS = 0.3
SAMPLE_MILLISECONDS = 10
GIVE_UP_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a process took: seconds from when it made the run directory until it ended."""

    seconds: float
    cpu_seconds: float
    peak_mb: float


def _start(db: Path | str, run: Path, *options: str, **settings: object) -> subprocess.Popen[bytes]:
    chosen = SETTINGS | {name: str(value) for name, value in settings.items()}
    environ = ENVIRON | {f"SPOOLD_{name.upper()}": value for name, value in chosen.items()}
    command = [sys.executable, "-m", "spoold", "run", "--db", str(db), "--run-dir", str(run)]
    return subprocess.Popen([*command, *options], env=environ, stdin=subprocess.DEVNULL)


def once(db: Path | str, run: Path, **settings: object) -> Ran:
    """Run `spoold run --once` to its end; the run directory is not there yet."""
    process = _start(db, run, "--once", **settings)
    while not (run / "pending").is_dir() and process.poll() is None:
        time.sleep(0.0005)
    began = time.perf_counter()
    if process.returncode is not None:
        raise RuntimeError(f"spoold run --once exited {process.returncode} at its start")
    # Not the peak that wait4 tells: that one is of this process, too, where it is the larger one.
    peak_mb = 0.0
    with os.fdopen(os.pidfd_open(process.pid), "rb") as ended:
        end = select.poll()
        end.register(ended, select.POLLIN)
        while not end.poll(SAMPLE_MILLISECONDS):
            peak_mb = max(peak_mb, _peak_mb(process.pid))
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"spoold run --once exited {process.returncode}")
    cpu = usage.ru_utime + usage.ru_stime
    return Ran(seconds=seconds, cpu_seconds=cpu, peak_mb=peak_mb)


def _peak_mb(pid: int) -> float:
    """Return the most memory that a process had resident so far; 0 where it has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


class Serving:
    """A daemon that runs. `began` is when it was started."""

    def __init__(self, process: subprocess.Popen[bytes], run: Path, began: float) -> None:
        self._process = process
        self._run = run
        self.began = began

    def cpu_seconds(self) -> float:
        """CPU time of all its threads so far, exact (what clock_getcpuclockid(3) returns)."""
        return time.clock_gettime((~self._process.pid << 3) | 2)

    def peak_mb(self) -> float:
        """The most memory that it had resident so far."""
        return _peak_mb(self._process.pid)

    def wait_for(self, folder: str, number: int) -> float:
        """Wait until so many files lie in a folder of the run directory; returns when."""
        path = self._run / folder
        give_up = time.perf_counter() + GIVE_UP_SECONDS
        while time.perf_counter() < give_up:
            if self._process.poll() is not None:
                raise RuntimeError(f"the daemon exited {self._process.returncode}")
            if path.is_dir() and len(os.listdir(path)) >= number:
                return time.perf_counter()
            time.sleep(0.001)
        raise RuntimeError(f"fewer than {number} files in {path} after {GIVE_UP_SECONDS:.0f} s")

    def come_to_rest(self) -> None:
        """Wait until a while costs it nearly nothing."""
        give_up = time.perf_counter() + GIVE_UP_SECONDS
        while time.perf_counter() < give_up:
            before = self.cpu_seconds()
            time.sleep(REST_SECONDS)
            if self.cpu_seconds() - before < REST_SECONDS * 0.04:
                return


@contextlib.contextmanager
def serving(db: Path | str, run: Path, **settings: object) -> Iterator[Serving]:
    """Run a daemon until the end of the `with`."""
    began = time.perf_counter()
    process = _start(db, run, **settings)
    try:
        yield Serving(process, run, began)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            process.kill()
