"""Figures, each with what it is compared to, and how they are printed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number. `ratio` is value / beside: of the limit's speed, or of its cost."""

    piece: str
    what: str
    value: float
    unit: str
    beside: float | None = None
    of: str = ""
    higher_is_better: bool = False

    @property
    def ratio(self) -> float | None:
        return self.value / self.beside if self.beside else None

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"ratio": self.ratio}


@dataclass(frozen=True)
class Panel:
    """One picture of the plot: its title, and what its axes are."""

    title: str
    x: str
    y: str


MEMORY = Panel("memory", "environments, or files in acked/", "MB")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a picture: y over x. `limit`: it is what spoold is compared to."""

    panel: Panel
    name: str
    points: tuple[tuple[float, float], ...]
    limit: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a piece found."""

    figures: tuple[Figure, ...]
    lines: tuple[Line, ...] = ()


def table(figures: Iterable[Figure]) -> str:
    """Return the figures as a table: a row each, ready for a README."""
    head = ("piece", "what", "spoold", "beside it", "ratio")
    rows = [head, *map(_row, figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _row(figure: Figure) -> tuple[str, ...]:
    value = f"{number(figure.value)} {figure.unit}"
    if figure.ratio is None:
        return figure.piece, figure.what, value, "", ""
    times = "x its speed" if figure.higher_is_better else "x its cost"
    beside = f"{number(figure.beside or 0)}, {figure.of}"
    return figure.piece, figure.what, value, beside, f"{figure.ratio:.2f} {times}"


def number(value: float) -> str:
    """Return a number with three significant digits, and no exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
