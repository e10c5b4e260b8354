"""examples/slime: whole groups from the spool into Slime's data buffer, across restarts.

Slime itself is not needed: minimal stand-ins for its Sample, its data source and its mask generator
are here, with the fields, methods and checks that Slime's have.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.handmade import ls, make_run_dir, put, sample
from tests.support.shared import spool_of

EXAMPLE = Path(__file__).parent.parent / "examples/slime/spool_rollout.py"


class Status(enum.Enum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"


@dataclasses.dataclass
class Sample:
    Status = Status
    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = dataclasses.field(default_factory=list)
    status: Status = Status.COMPLETED
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


class MaskGenerator:
    """A token a message; the model produced those of the assistant."""

    def __init__(self, tokenizer: object, tokenizer_type: str) -> None:
        assert (tokenizer, tokenizer_type) == ("tokenizer of hf", "qwen")

    def get_loss_mask(self, messages: list[dict[str, Any]], tools: object = None) -> Any:
        return list(range(len(messages))), [int(m.get("role") == "assistant") for m in messages]

    def get_response_lengths(self, masks: list[list[int]]) -> list[int]:
        return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in masks]


class DataBuffer:
    """As RolloutDataSourceWithBuffer, without a data set behind it."""

    def __init__(self, args: SimpleNamespace) -> None:
        self.args = args
        self.buffer: list[list[Sample]] = []

    def add_samples(self, samples: list[list[Sample]]) -> None:
        for group in samples:
            assert len(group) == self.args.n_samples_per_prompt
            self.buffer.append(group)

    def get_samples(self, number: int) -> list[list[Sample]]:
        taken, self.buffer = self.buffer[:number], self.buffer[number:]
        assert len(taken) == number
        return taken

    def get_buffer_length(self) -> int:
        return len(self.buffer)


@pytest.fixture
def slime(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "slime": ModuleType("slime"),
        "slime.utils": ModuleType("slime.utils"),
        "slime.utils.types": SimpleNamespace(Sample=Sample),
        "slime.utils.mask_utils": SimpleNamespace(MultiTurnLossMaskGenerator=MaskGenerator),
        "slime.utils.processing_utils": SimpleNamespace(
            load_tokenizer=lambda name, trust_remote_code: f"tokenizer of {name}"
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


class Actor:
    """Slime's rollout process: it imports the function, and calls it with rollout ids."""

    def __init__(self, run: Path, first: int = 0, **options: object) -> None:
        spec = importlib.util.spec_from_file_location("spool_rollout", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        facts = {"rollout_batch_size": 2, "n_samples_per_prompt": 4, "hf_checkpoint": "hf"}
        self.args = SimpleNamespace(
            spool=str(run), spool_timeout=0.2, loss_mask_type="qwen", **(facts | options)
        )
        self.buffer = DataBuffer(self.args)
        self.next = first

    def rollout(self) -> list[list[Sample]]:
        groups: list[list[Sample]] = self.module.generate_rollout(self.args, self.next, self.buffer)
        self.next += 1
        return groups

    def die(self) -> None:
        self.module._consumer.close()


def uids(groups: list[list[Sample]]) -> list[str]:
    return [sample.metadata["uid"] for group in groups for sample in group]


@pytest.fixture
def run(tmp_path: Path, slime: None) -> Path:
    return make_run_dir(tmp_path / "run")


def put_groups(run: Path, seq: int, *groups: str, size: int = 4, weight: int = 7) -> None:
    rows = [
        sample(100 * seq + 10 * number + member, group=group, weight_version=weight)
        for number, group in enumerate(groups)
        for member in range(size)
    ]
    put(run, seq, samples=rows, weights=(weight, weight))


@pytest.fixture
def actors() -> Iterator[list[Actor]]:
    made: list[Actor] = []
    yield made
    for actor in made:
        if actor.module._consumer is not None:
            actor.die()


def test_whole_groups_of_a_real_database_reach_the_trainer_each_once(
    tmp_path: Path, slime: None, actors: list[Actor]
) -> None:
    options = ("--group-size=4", "--batch-size=1")
    run, wanted = spool_of(tmp_path, "safactory-main", "job-main-0001", *options)
    by_uid = {f"{e['env_id']}:{e['terminal_pk']}": e for e in wanted}
    published = len(list((run / "pending").iterdir()))
    assert published >= 4
    actor = Actor(run)
    actors.append(actor)
    rollouts = [actor.rollout() for _ in range(published // 2)]
    seen = [one for groups in rollouts for one in uids(groups)]
    assert len(seen) == len(set(seen)) == published // 2 * 8
    for group in (group for groups in rollouts for group in groups):
        assert len({one.metadata["group_id"] for one in group}) == 1
        for one in group:
            right = by_uid[one.metadata["uid"]]
            assert one.reward == right["reward"]
            assert one.weight_versions == [str(right["weight_version"] or 0)]
            assert (one.status is Status.TRUNCATED) == right["truncated"]
            assert one.index == right["terminal_pk"]
            assert len(one.tokens) == right["n_messages"]
            assert one.loss_mask is not None
            assert len(one.loss_mask) == one.response_length
    steps = {path.split("/")[1] for path in ls(run) if path.startswith("acked")}
    assert steps == {f"step-{number:09d}" for number in range(published // 2)}


def test_a_batch_is_acked_only_after_its_samples_are_in_the_buffer(
    run: Path, actors: list[Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_groups(run, 1, "a", "b")
    actor = Actor(run)
    actors.append(actor)
    monkeypatch.setattr(actor.buffer, "add_samples", lambda samples: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        actor.rollout()
    assert [path.split("/")[0] for path in ls(run)] == ["inflight"]


def test_a_restart_from_an_older_checkpoint_gets_what_came_after_it_again(
    run: Path, actors: list[Actor]
) -> None:
    for seq in range(1, 5):
        put_groups(run, seq, f"a{seq}", f"b{seq}")
    first = Actor(run)
    actors.append(first)
    trained = [uids(first.rollout()) for _ in range(3)]  # dies; the last checkpoint is that of 0
    first.die()
    again = Actor(run, first=1)
    actors.append(again)
    assert [uids(again.rollout()) for _ in range(2)] == trained[1:]
    rest = uids(again.rollout())
    assert not set(rest) & {uid for one in trained for uid in one}
    with pytest.raises(TimeoutError, match="0 of 2 groups came: no daemon runs on"):
        again.rollout()


def test_stale_batches_are_passed_over(run: Path, actors: list[Actor]) -> None:
    put_groups(run, 1, "old", "older", weight=6)
    put_groups(run, 2, "new", "newer", weight=8)
    actor = Actor(run, first=10, spool_max_staleness=2)
    actors.append(actor)
    groups = [one.metadata["group_id"] for group in actor.rollout() for one in group]
    assert set(groups) == {"new", "newer"}
    assert {path.split("/")[1] for path in ls(run)} == {"stale", "step-000000010"}


def test_groups_of_another_size_stop_it_with_what_to_do(run: Path, actors: list[Actor]) -> None:
    put_groups(run, 1, "a", size=3)
    actor = Actor(run)
    actors.append(actor)
    with pytest.raises(ValueError, match="run spoold with --group-size 4"):
        actor.rollout()
    assert ls(run)[0].startswith("rejected/group-size/")


def test_it_has_no_evaluation_data(run: Path) -> None:
    actor = Actor(run)
    with pytest.raises(NotImplementedError):
        actor.module.generate_rollout(actor.args, 0, actor.buffer, evaluation=True)


def test_the_prompt_is_what_comes_before_the_first_answer(run: Path, actors: list[Actor]) -> None:
    put_groups(run, 1, "a", "b")
    actor = Actor(run)
    actors.append(actor)
    one = actor.rollout()[0][0]
    assert one.prompt == [{"role": "user", "content": "2 + 2?"}]
    assert (one.tokens, one.loss_mask, one.response_length) == ([0, 1], [1], 1)
    assert json.dumps(one.metadata)
