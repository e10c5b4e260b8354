"""Whatever a writer, people and kills do: everything complete is delivered, each once."""

from __future__ import annotations

import pytest

from tests.support.model import GroupMachine, Machine, run_machine


@pytest.mark.parametrize("machine", [Machine, GroupMachine])
def test_every_completed_environment_is_delivered_once(machine: type[Machine]) -> None:
    run_machine(machine, examples=15, steps=30)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Machine, GroupMachine])
def test_the_same_over_thousands_of_steps(machine: type[Machine]) -> None:
    run_machine(machine, examples=100, steps=50)
