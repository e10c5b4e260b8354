"""A process that has everything imported and forks a child for each act: cheap to kill.

`Zygote` starts it and talks to it over a socket (`send` is none of the calls that are counted). Run
as a script, with the socket as its stdin, it answers each line `act<TAB>folder<TAB>cut` with the
child's exit code, negative for a signal. With a cut of n > 0 the child shuts the file system of the
folder down before its n-th call that changes the run directory, and dies.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

from tests.support.processes import ENVIRON

ROOT = Path(__file__).parents[2]


class Zygote:
    """The parent's end."""

    def __enter__(self) -> Zygote:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._process = subprocess.Popen(
            [sys.executable, "-B", "-m", "tests.crash.zygote"],
            stdin=theirs,
            cwd=ROOT,
            env=ENVIRON,
        )
        theirs.close()
        assert self._answer() == 0, "the zygote did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def do(self, act: str, folder: Path, *, cut: int = 0) -> int:
        """Do an act in a child of its own; its exit code, negative for a signal."""
        self._socket.send(f"{act}\t{folder}\t{cut}\n".encode())
        return self._answer()

    def _answer(self) -> int:
        answer = self._socket.recv(100)
        assert answer, "the zygote is gone"
        return int(answer)


def _child(act: str, folder: str, cut: int) -> None:
    from tests.crash import acts, disks, syscalls

    changes = 0

    def on_call(call: syscalls.Call) -> None:
        nonlocal changes
        changes += call.changes
        if call.changes and changes == cut:
            disks.cut_power(folder)
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        if cut:
            with syscalls.watching(f"{folder}/run", on_call):
                acts.BY_NAME[act].do(Path(folder))
        else:
            acts.BY_NAME[act].do(Path(folder))
    except BaseException:
        if cut and changes >= cut:  # the other thread has met the dead disk first
            os.kill(os.getpid(), signal.SIGKILL)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _warm_up() -> None:
    """Do every act once, so that a child imports nothing."""
    import logging
    import tempfile

    from tests.crash import acts

    logging.getLogger("spoold").addHandler(logging.NullHandler())
    logging.getLogger("spoold").propagate = False
    for act in acts.ACTS:
        with tempfile.TemporaryDirectory() as folder:
            act.prepare(Path(folder))
            act.do(Path(folder))


def main() -> None:
    commands = socket.socket(fileno=os.dup(0))
    _warm_up()
    commands.send(b"0")
    while line := commands.recv(4096):
        act, folder, cut = line.decode().rstrip("\n").split("\t")
        pid = os.fork()
        if pid == 0:
            _child(act, folder, int(cut))
        commands.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


if __name__ == "__main__":
    main()
