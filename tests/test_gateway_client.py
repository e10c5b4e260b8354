"""Clients as they exist today, in front of a gateway: what they train on, round by round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import Client, needs_http, serving
from tests.support.handmade import ls, make_run_dir, put, sample
from tests.support.slime_client import Post, SlimeClient, post_to


@pytest.fixture(autouse=True)
def gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_http()
    monkeypatch.setattr("spoold.gateway.app.WAIT_SECONDS", 0.02)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run_dir(tmp_path / "run")


def put_groups(run: Path, seq: int, groups: int, *, members: int = 4) -> list[str]:
    """Put a batch of groups with rewards that differ; return its uids."""
    rows = []
    for number in range(groups * members):
        group, member = divmod(number, members)
        row = sample(1000 * seq + number, group=f"g{seq}-{group}")
        rows.append(row | {"reward": float(member)})
    put(run, seq, samples=rows)
    return [str(row["uid"]) for row in rows]


class Trainer(SlimeClient):
    """A client whose sleeps are counted, and may do something."""

    def __init__(self, post: Post, state: Path, **options: Any) -> None:
        self.slept: list[float] = []
        self.while_asleep: list[Any] = []
        super().__init__(post, state, sleep=self._asleep, **options)

    def _asleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if self.while_asleep:
            self.while_asleep.pop(0)()


def test_a_client_that_acks_trains_on_each_sample_once_in_rounds_of_several_batches(
    run: Path, tmp_path: Path
) -> None:
    uids = [uid for seq in range(1, 7) for uid in put_groups(run, seq, 2)]
    with serving(run) as client:
        trainer = Trainer(post_to(client.url), tmp_path / "s", members=4, groups=6, acks=True)
        trainer.start()
        trainer.round()
        trainer.round()
    assert trainer.state.trained == uids
    assert (trainer.state.lost_rounds, trainer.slept) == (0, [])
    assert {path.split("/")[0] for path in ls(run)} == {"acked"}


def test_a_client_that_never_acks_trains_on_each_sample_once_too(run: Path, tmp_path: Path) -> None:
    uids = [uid for seq in range(1, 5) for uid in put_groups(run, seq, 2)]
    with serving(run, ack="on-next-get") as client:
        trainer = Trainer(post_to(client.url), tmp_path / "s", members=4, groups=4, acks=False)
        trainer.round()
        trainer.round()
    assert trainer.state.trained == uids
    assert trainer.state.lost_rounds == 0


def test_a_client_that_never_acks_loses_its_rounds_where_acks_are_waited_for(
    run: Path, tmp_path: Path
) -> None:
    """What the warning "asked again before the ack" is for."""
    put_groups(run, 1, 2)
    with serving(run) as client:
        trainer = Trainer(post_to(client.url), tmp_path / "s", members=4, groups=4, acks=False)
        trainer.round()
    assert trainer.state.lost_rounds == 1


def test_a_client_sleeps_while_nothing_is_there_and_while_nobody_answers(
    run: Path, tmp_path: Path
) -> None:
    state = tmp_path / "s"
    with serving(run) as client:
        trainer = Trainer(post_to(client.url), state, members=4, groups=1, acks=True)
        trainer.while_asleep = [lambda: None, lambda: put_groups(run, 1, 1)]
        trainer.round()
        assert trainer.slept == [3.0, 3.0]
    gone = Client(client.url)
    trainer = Trainer(post_to(gone.url), state, members=4, groups=1, acks=True)
    trainer.while_asleep = [lambda: None, lambda: 1 / 0]
    with pytest.raises(ZeroDivisionError):
        trainer.round()
    assert trainer.slept == [1.0, 1.0]
    assert len(trainer.state.trained) == 4


def test_a_client_that_died_before_its_ack_passes_over_the_batch_that_it_has(
    run: Path, tmp_path: Path
) -> None:
    uids = put_groups(run, 1, 1) + put_groups(run, 2, 1)
    state = tmp_path / "s"
    with serving(run) as client:
        post = post_to(client.url)

        def dying(path: str, facts: dict[str, Any]) -> dict[str, Any]:
            if path == "/ack_rollout_data":
                raise SystemExit
            return post(path, facts)

        with pytest.raises(SystemExit):
            Trainer(dying, state, members=4, groups=2, acks=True).round()
        trainer = Trainer(post, state, members=4, groups=2, acks=True)
        trainer.round()
    assert trainer.state.trained == uids
    assert trainer.state.passed_over == 1


def test_groups_whose_rewards_are_equal_are_dropped_by_the_client_not_by_the_gateway(
    run: Path, tmp_path: Path
) -> None:
    put(run, 1, samples=[sample(number, group="flat") for number in range(4)])
    with serving(run) as client:
        trainer = Trainer(post_to(client.url), tmp_path / "s", members=4, groups=1, acks=True)
        trainer.round()
    assert len(trainer.state.dropped) == 4
    assert [path.split("/")[0] for path in ls(run)] == ["acked"]
