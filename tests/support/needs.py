"""What a test needs of the machine: a reason to skip on a laptop, a failure in CI."""

from __future__ import annotations

import os

import pytest


def needs(condition: object, reason: str) -> None:
    """Skip the test unless `condition` holds; where the variable CI is set, fail it."""
    if condition:
        return
    if os.environ.get("CI"):
        pytest.fail(f"CI must be able to run this: {reason}")
    pytest.skip(reason)
