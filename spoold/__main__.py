"""`python -m spoold`."""

from __future__ import annotations

from spoold.cli import main

if __name__ == "__main__":
    main()
