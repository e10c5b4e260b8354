"""Whatever writers, trainers, people and kills do: all that is complete is delivered, each once."""

from __future__ import annotations

import pytest

from tests.support.model import GroupMachine, Machine, run_machine

MACHINES = pytest.mark.parametrize("machine", [Machine, GroupMachine])


@MACHINES
def test_every_completed_environment_is_delivered_once(machine: type[Machine]) -> None:
    run_machine(machine, seed=0, examples=15, steps=30)


@pytest.mark.slow
@MACHINES
@pytest.mark.parametrize("seed", range(1, 5))
def test_the_same_over_thousands_of_steps(machine: type[Machine], seed: int) -> None:
    run_machine(machine, seed=seed, examples=60, steps=50)
