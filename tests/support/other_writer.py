"""A writer in a process of its own, as the real one is: what it writes shows when it commits.

with other_writer(path) as other:
    other.write()     # an environment is complete, in a transaction that is open
    other.commit()
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.rollouts import open_rollouts


class OtherWriter:
    """The test's end of it. Each call returns when it is done."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def write(self) -> None:
        """Begin a transaction and complete a new environment in it."""
        self._ask("write")

    def commit(self) -> None:
        """End it; everybody can see the environment then."""
        self._ask("commit")

    def _ask(self, what: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(what, file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "done\n"


@contextlib.contextmanager
def other_writer(path: Path) -> Iterator[OtherWriter]:
    """Yield one, of a database of the newest kind; what it has not committed is lost then."""
    command = [sys.executable, "-m", __name__, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield OtherWriter(process)
        assert process.stdin is not None
        process.stdin.close()
    assert process.returncode == 0


def main(path: str) -> None:
    rollouts = open_rollouts(path)
    for line in sys.stdin:
        if line == "write\n":
            rollouts.db.execute("BEGIN IMMEDIATE")
            (one,) = rollouts.register(1, group="")
            rollouts.complete(one)
        else:
            rollouts.db.execute("COMMIT")
        print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
