"""examples/trainer.sh: three mv in bash."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.handmade import ls, make_run_dir, put
from tests.support.processes import until

SCRIPT = Path(__file__).parent.parent / "examples" / "trainer.sh"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run_dir(tmp_path / "run [1] *")


@contextmanager
def running(*arguments: str | Path, path: str | None = None) -> Iterator[subprocess.Popen[str]]:
    environ = os.environ | ({"PATH": path} if path else {})
    with subprocess.Popen(
        ["bash", SCRIPT, *arguments], stderr=subprocess.PIPE, text=True, env=environ
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_it_trains_on_the_oldest_first_and_acks(run: Path, tmp_path: Path) -> None:
    names = [put(run, seq) for seq in (2, 1, 3)]
    left_over = put(run, 9, where="inflight")
    log = tmp_path / "log"
    with running(run, "bash", "-c", 'echo "$1" >>"$0"', log):
        until(lambda: len(os.listdir(run / "acked")) == 4, "all four acked")
        names.sort(key=lambda name: name.seq)
        assert log.read_text().splitlines() == [
            f"{run}/inflight/{name.file_name}" for name in [left_over, *names]
        ]
        late = put(run, 4)
        until(lambda: (run / "acked" / late.file_name).exists(), "the late one acked")
    assert ls(run) == sorted(f"acked/{name.file_name}" for name in [*names, left_over, late])


def test_a_batch_whose_command_failed_comes_first_the_next_time(run: Path, tmp_path: Path) -> None:
    first, second = put(run, 1), put(run, 2)
    with running(run, "bash", "-c", "exit 7") as process:
        assert process.wait(10) == 7
    assert ls(run) == [f"inflight/{first.file_name}", f"pending/{second.file_name}"]
    with running(run, "true"):
        until(lambda: len(os.listdir(run / "acked")) == 2, "both acked")


def test_it_takes_the_next_when_another_consumer_won(run: Path, tmp_path: Path) -> None:
    first, second = put(run, 1), put(run, 2)
    # An mv that lets another consumer win the first batch.
    (run / "inflight/other").mkdir()
    wrapper = tmp_path / "bin" / "mv"
    wrapper.parent.mkdir()
    wrapper.write_text(
        "#!/bin/bash\n"
        f'[[ $3 == */pending/{first.file_name} ]] && /bin/mv "$3" "{run}/inflight/other/"\n'
        'exec /bin/mv "$@"\n'
    )
    wrapper.chmod(0o755)
    with running(run, "true", path=f"{wrapper.parent}:{os.environ['PATH']}"):
        until(lambda: len(os.listdir(run / "acked")) == 1, "the second acked")
    assert ls(run) == [f"acked/{second.file_name}", f"inflight/other/{first.file_name}"]


def test_it_never_moves_over_a_file(run: Path) -> None:
    name, other = put(run, 1), put(run, 2)
    (run / "acked" / name.file_name).write_text("an older copy\n")
    with running(run, "true") as process:
        until(lambda: (run / "acked" / other.file_name).exists(), "the other acked")
        process.kill()
        assert process.stderr is not None
        assert process.stderr.read() == f"lost: {run}/inflight/{name.file_name}\n"
    assert (run / "acked" / name.file_name).read_text() == "an older copy\n"


def test_it_says_how_it_is_used() -> None:
    result = subprocess.run(["bash", SCRIPT], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("usage: trainer.sh RUN_DIR COMMAND")
