"""A minimal Debian with a systemd of its own, in a container on this machine.

Debian's packages and the wheels that spoold needs are fetched once, and kept in the system's temp
folder under a hash of what goes in. Each machine is a fresh copy; it has no network.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from tests.support.processes import until

ROOT = Path(__file__).parents[2]
SUITE, PYTHON = "bookworm", "3.11"
# What a host has; python3-venv, so that the first command of systemd/README.md needs no network.
PACKAGES = "dbus,python3,python3-venv,systemd,systemd-sysv"
TOOLS = ("mmdebstrap", "systemd-nspawn", "nsenter")
ENVIRON = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    # Instead of a package registry: the commands stay as typed.
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": "/wheels",
}


def why_not() -> str:
    """Why no machine can run here; "" when one can."""
    if os.geteuid() != 0:
        return "a container needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"a container needs {', '.join(missing)}"
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], check=False).returncode:
        return "a container needs namespaces, which this root may not make"
    return ""


def _cached(name: str, key: str, make: Callable[[Path], None]) -> Path:
    """Return what `make` puts at a path; made once a `key`, in the temp folder, whole or not."""
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"spoold-machines-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid()
    made = folder / f"{name}-{digest}"
    with FileLock(folder / "lock"):
        if made.exists():
            return made
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            make(Path(beside, name))
            os.rename(Path(beside, name), made)
    return made


def _debian() -> Path:
    """A tar of a minimal Debian."""

    def make(path: Path) -> None:
        options = ["--quiet", "--mode=root", "--variant=minbase", f"--include={PACKAGES}"]
        _call("mmdebstrap", *options, "--format=tar", SUITE, path)

    return _cached("debian.tar", f"{SUITE} {PACKAGES} {platform.machine()}", make)


def _wheels() -> Path:
    """A folder of wheels for the machine's Python: what spoold needs, and what builds it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    needed += project["project"]["optional-dependencies"]["http"]

    def make(path: Path) -> None:
        tags = [f"--platform=manylinux{tag}_{platform.machine()}" for tag in ("_2_17", "2014")]
        tags.append(f"--platform=manylinux_2_28_{platform.machine()}")
        target = ["--only-binary=:all:", f"--python-version={PYTHON}", *tags]
        _call(sys.executable, "-m", "pip", "download", "-q", "-d", path, *target, *needed)

    return _cached("wheels", f"{PYTHON} {platform.machine()} {sorted(needed)}", make)


def _call(*command: object) -> None:
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout[-3000:]}"


class Machine:
    """A machine that runs inside the `with`; /src holds spoold's tree, /wheels its wheels."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self._console = folder / "console.log"

    def __enter__(self) -> Machine:
        self.root.mkdir()
        with tarfile.open(_debian()) as tar:
            tar.extractall(self.root, filter="fully_trusted")
        ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, self.root / "src", ignore=ignored)
        shutil.copytree(_wheels(), self.root / "wheels")
        with open(self._console, "wb") as console:
            self._nspawn = subprocess.Popen(
                [
                    "systemd-nspawn",
                    f"--directory={self.root}",
                    "--boot",
                    "--private-network",
                    "--console=read-only",
                    # This machine need not run systemd itself.
                    "--register=no",
                    "--keep-unit",
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            until(self._is_up, "the machine to boot")
        except BaseException:
            self._end()
            print(self._console.read_text(errors="replace")[-3000:])
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        shutil.rmtree(self.root, ignore_errors=True)  # pytest keeps folders; this one is large

    def _is_up(self) -> bool:
        assert self._nspawn.poll() is None, self._console.read_text(errors="replace")[-3000:]
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children").read_text()
        if not children.split():
            return False
        self._leader = int(children.split()[0])
        code, out = self.attempt("systemctl is-system-running --wait")
        return code == 0 or "degraded" in out

    def _end(self) -> None:
        if self._nspawn.poll() is None:
            self._nspawn.send_signal(signal.SIGTERM)
            try:
                self._nspawn.wait(20)
            except subprocess.TimeoutExpired:
                self._nspawn.kill()
                self._nspawn.wait()

    def attempt(self, script: str, *, user: str = "root") -> tuple[int, str]:
        """Run a shell script on the machine, in /src. Returns its exit code and what it printed."""
        enter = ["nsenter", f"--target={self._leader}", "--all", "--wdns=/src"]
        shell = ["/bin/bash", "-euo", "pipefail", "-c", script]
        if user != "root":
            shell = ["/sbin/runuser", "-u", user, "--", *shell]
        done = subprocess.run(
            [*enter, *shell],
            env=ENVIRON,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout

    def run(self, script: str, *, user: str = "root") -> str:
        """Run a shell script that must succeed; returns what it printed."""
        code, out = self.attempt(script, user=user)
        assert code == 0, f"{script}\nexit {code}: {out}"
        return out

    def start(self, unit: str, command: str, *, user: str, properties: str = "") -> None:
        """Start a command in the background, as a unit of the machine's systemd."""
        self.run(f"systemd-run --quiet --unit={unit} --uid={user} {properties} -- {command}")

    def write(self, path: str, text: str) -> None:
        """Write a file of root."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def unit(self, unit: str, *properties: str) -> dict[str, str]:
        """Return properties of a unit, as `systemctl show` prints them."""
        names = ",".join(properties)
        lines = self.run(f"systemctl show {shlex.quote(unit)} -p {names}").splitlines()
        return dict(line.split("=", 1) for line in lines)
