"""What random tests draw: the same each time, unless somebody looks for what nobody has met yet.

SPOOLD_TEST_SEED is a number, or `new`: then hypothesis draws anew, too. What failed says how to
make it fail again.
"""

from __future__ import annotations

import os
import random

NEW = os.environ.get("SPOOLD_TEST_SEED") == "new"


def a_seed() -> int:
    """Return the seed of a random test, and print it."""
    seed = random.randrange(10**6) if NEW else int(os.environ.get("SPOOLD_TEST_SEED") or 0)
    print(f"SPOOLD_TEST_SEED={seed}")
    return seed
