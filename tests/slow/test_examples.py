"""The examples for frameworks that are heavy to install: torch and datasets."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spoold import Consumer
from tests.support.handmade import ls, make_run_dir, put, sample
from tests.support.needs import needs
from tests.support.processes import ENVIRON
from tests.support.shared import spool_of

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
JOBS = [("safactory-main", "job-main-0001"), ("safactory-newest", "job-newest-0001")]


def is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


# datasets -----------------------------------------------------------------------------------------


@pytest.fixture
def hf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    needs(is_there("datasets"), "the package datasets (extra: examples)")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    spec = importlib.util.spec_from_file_location("hf_datasets", EXAMPLES / "hf_datasets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "hf_datasets", module)
    spec.loader.exec_module(module)
    return module


def rows_of(run: Path) -> list[dict[str, Any]]:
    paths = sorted(run.rglob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize(("name", "job"), JOBS)
def test_any_set_of_batches_loads_with_the_features_that_the_example_declares(
    hf: Any, tmp_path: Path, name: str, job: str
) -> None:
    run, wanted = spool_of(tmp_path, name, job, "--batch-size=3")
    paths = sorted(map(str, run.rglob("*.jsonl")))
    cache = str(tmp_path / "cache")
    loaded = hf.load(paths, cache_dir=cache)
    assert loaded.features == hf.FEATURES
    assert list(loaded) == rows_of(run)
    assert len(loaded) == len(wanted)
    # In any order, and each alone.
    assert sorted(row["uid"] for row in hf.load(paths[::-1], cache_dir=cache)) == sorted(
        row["uid"] for row in loaded
    )
    for path in paths:
        assert len(hf.load([path], cache_dir=cache)) == int(Path(path).name.split("-")[1][1:])


def test_messages_may_hold_anything_in_any_order(hf: Any, tmp_path: Path) -> None:
    run = make_run_dir(tmp_path / "run")
    contents: list[object] = [
        None,
        "text",
        [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:"}}],
        {"nested": [1, None, "a"]},
    ]
    for seq, content in enumerate(contents, 1):
        row = sample(seq)
        row["messages"] = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": "", "tool_calls": [{"id": str(seq)}]},
        ]
        put(run, seq, samples=[row])
    paths = sorted(map(str, (run / "pending").iterdir()))
    for order in (paths, paths[::-1]):
        loaded = hf.load(order, cache_dir=str(tmp_path / "cache"))
        assert sorted(loaded, key=lambda row: row["uid"]) == rows_of(run)


def test_the_stream_acks_a_batch_when_the_next_sample_is_asked_for(hf: Any, tmp_path: Path) -> None:
    run = make_run_dir(tmp_path / "run")
    names = [put(run, seq, samples=[sample(10 * seq), sample(10 * seq + 1)]) for seq in (1, 2)]
    step = 0
    samples = iter(hf.stream(str(run), timeout=0.1, step=lambda: step))
    seen = []
    for step, each in enumerate(samples, 1):
        seen.append(each)
        if step == 2:
            assert ls(run)[0] == f"inflight/trainer-0/{names[0].file_name}"
    assert seen == rows_of(run)
    assert ls(run) == [
        f"acked/step-000000002/{names[0].file_name}",
        f"acked/step-000000004/{names[1].file_name}",
    ]


# torch --------------------------------------------------------------------------------------------


def torchrun(run: Path, checkpoint: Path) -> subprocess.CompletedProcess[str]:
    needs(is_there("torch"), "the package torch (extra: examples)")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node=2", EXAMPLES / "torch_ddp.py", run, checkpoint],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=ENVIRON | {"OMP_NUM_THREADS": "1"},
    )


def test_two_ranks_share_each_batch_in_equal_parts_and_one_acks(tmp_path: Path) -> None:
    run, wanted = spool_of(tmp_path, "safactory-main", "job-main-0001", "--batch-size=5")
    published = sorted(path.name for path in (run / "pending").iterdir())
    assert len(published) >= 3
    # An earlier life of the trainer acked one with a step that no checkpoint has.
    with Consumer(run, name="ddp") as consumer:
        batch = consumer.claim()
        assert batch is not None
        batch.ack(step=1)
    ran = torchrun(run, tmp_path / "checkpoint")
    assert ran.returncode == 0, ran.stderr
    acked = sorted(path for path in ls(run) if path.startswith("acked"))
    assert acked == [
        f"acked/step-{step:09d}/{name}" for step, name in enumerate(published, start=1)
    ]
    for step, name in enumerate(published, start=1):
        counts = re.findall(rf"step {step} rank [01]: (\d+) samples", ran.stdout)
        samples = int(name.split("-")[1][1:])
        assert len(counts) == 2
        assert len(set(counts)) == 1
        assert int(counts[0]) * 2 >= samples
    assert (tmp_path / "checkpoint").exists()
    assert len(wanted) == len(rows_of(run))
