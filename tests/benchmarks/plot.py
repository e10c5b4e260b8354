"""The scaling curves as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.table import Line, number

COLUMNS = 3
OURS = ("#1f5fa8", "#c2571a", "#3a7d44")
LIMITS = ("#8a8a8a", "#b9b9b9")


def draw(lines: Sequence[Line], path: Path) -> str:
    """Draw each panel over a logarithmic x. Returns what happened, in words."""
    try:
        import matplotlib as mpl
    except ImportError:
        return "no plot: matplotlib is not installed: pip install '.[bench]'"
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    panels = list(dict.fromkeys(line.panel for line in lines))
    rows = -(-len(panels) // COLUMNS)
    figure, axes = plt.subplots(
        rows, COLUMNS, figsize=(4.6 * COLUMNS, 3.6 * rows), squeeze=False, layout="constrained"
    )
    short = FuncFormatter(lambda value, _: _short(value))
    for ax, panel in zip(axes.flat, panels, strict=False):
        ours = [line for line in lines if line.panel == panel and not line.limit]
        limits = [line for line in lines if line.panel == panel and line.limit]
        colours = [*zip(limits, LIMITS, strict=False), *zip(ours, OURS, strict=False)]
        for line, colour in colours:
            x, y = zip(*line.points, strict=True)
            style = "--" if line.limit else "-"
            ax.plot(x, y, style, marker="o", markersize=4, color=colour, label=line.name)
        for place, line in enumerate(ours):
            # Of several lines only the ends: elsewhere the numbers would lie on each other.
            for x_at, y_at in line.points[-1:] if len(ours) > 1 else line.points:
                above = -14 if len(ours) > 1 and place % 2 == 0 else 6
                ax.annotate(
                    number(y_at),
                    (x_at, y_at),
                    textcoords="offset points",
                    xytext=(0, above),
                    ha="center",
                    fontsize=8,
                )
        ys = [y for line in [*ours, *limits] for _, y in line.points]
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(short)
        ax.margins(x=0.12)
        if min(ys) > 0 and max(ys) > 30 * min(ys):
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(short)
            ax.margins(y=0.15)
        else:
            ax.set_ylim(0, max(ys) * 1.25 or 1)
        ax.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        ax.grid(visible=True, alpha=0.25)
        ax.legend(fontsize=8, frameon=False)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return f"curves: {path}"


def _short(value: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
