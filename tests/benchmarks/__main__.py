"""The command: `python -m tests.benchmarks [PIECE …] [--small] [--folder DIR]`."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks import (
    acked,
    consumer,
    delivered,
    drain,
    gateway,
    hops,
    plot,
    postgres,
    registered,
)
from tests.benchmarks.table import Figure, Line, table

PIECES = {
    "drain": drain,
    "registered": registered,
    "delivered": delivered,
    "acked": acked,
    "consumer": consumer,
    "hops": hops,
    "gateway": gateway,
    "postgres": postgres,
}
OUT = Path(__file__).parent / "out"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run pieces, each in a folder of its own that goes when it ends; then print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("piece", nargs="*", help=f"one of {', '.join(PIECES)}; none: all")
    parser.add_argument("--small", action="store_true", help="a few seconds; figures mean nothing")
    parser.add_argument("--folder", type=Path, help="make databases and run directories in here")
    parser.add_argument("--out", type=Path, default=OUT, help="where the results go")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.piece) - PIECES.keys():
        parser.error(f"no such piece: {', '.join(sorted(unknown))}; there are {', '.join(PIECES)}")
    if chosen.folder is not None:
        chosen.folder.mkdir(parents=True, exist_ok=True)
    figures: list[Figure] = []
    lines: list[Line] = []
    for name in chosen.piece or PIECES:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="spoold-bench-") as folder:
            report = PIECES[name].run(Path(folder), small=chosen.small)
        print(f"  {name}: {time.perf_counter() - began:.0f} s", flush=True)
        figures += report.figures
        lines += report.lines
    chosen.out.mkdir(parents=True, exist_ok=True)
    results = [figure.as_json() for figure in figures]
    (chosen.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print("", table(figures), "", sep="\n")
    if lines:
        print(plot.draw(lines, chosen.out / "curves.png"))


if __name__ == "__main__":
    main()
