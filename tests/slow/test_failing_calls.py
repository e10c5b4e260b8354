"""Every system call on the run directory fails, once or from then on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash import acts, faults

pytestmark = pytest.mark.slow

# These meet every error at every call that fails once, the others two of eight in turn; a call that
# fails from then on does so with one of eight in turn.
THOROUGH = ("publish", "claim", "ack", "release", "reject", "ledger merge")


@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("act", acts.ACTS, ids=lambda act: act.name)
def test_a_call_that_fails_leaves_nothing_half_done(
    act: acts.Act, stays: bool, home: Path, record_property: Callable[[str, object], None]
) -> None:
    every = act.name in THOROUGH and not stays

    def errors(number: int) -> tuple[int, ...]:
        some = faults.errors_for(number, all_of_them=every)
        return some[:1] if stays else some

    tried = faults.sweep(act, home, errors=errors, stays=stays)
    record_property("tried", ("failing calls", act.name, tried))
    assert tried > 5
