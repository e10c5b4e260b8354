"""Charts as SVG that reads well on a phone, in print and in the dark. Pure.

A mark (point or bar) carries its value as a title, which browsers show on hover, and as data-value.
Colours are classes; the page's style sheet has them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

__all__ = ["Bars", "Lines", "Series", "figure", "number", "span"]

WIDTH: Final = 420
HEIGHT: Final = 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 12, 24
_TICKS: Final = 4

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line, by time. `low` and `high`: edges of a band around it."""

    name: str
    points: Sequence[Point]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Lines over time. `show` writes a value; `steps`: a value holds until the next one."""

    id: str
    title: str
    explains: str
    series: Sequence[Series]
    show: Callable[[float], str]
    steps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """A horizontal bar for each label, of one or more kinds side by side."""

    id: str
    title: str
    explains: str
    kinds: Sequence[str]
    bars: Sequence[tuple[str, Sequence[float]]]


def number(value: float) -> str:
    """Return a short number: 0.25, 12, 3.4k, 5.6M."""
    for power, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= power:
            return f"{value / power:.3g}{unit}"
    return f"{value:.3g}"


def span(seconds: float) -> str:
    """Return a short duration: 80 ms, 12 s, 3.5 min, 2 h."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms" if seconds else "0 s"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def figure(chart: Lines | Bars) -> str:
    """Return a figure with its title, a legend, and the same numbers as a table."""
    is_empty = not (chart.bars if isinstance(chart, Bars) else any(s.points for s in chart.series))
    names = chart.kinds if isinstance(chart, Bars) else [each.name for each in chart.series]
    legend = "".join(
        f'<span class="key s{index}">{escape(name)}</span>' for index, name in enumerate(names)
    )
    if is_empty:
        drawn = '<p class="nothing">nothing yet</p>'
    else:
        drawn = _bars(chart) if isinstance(chart, Bars) else _lines(chart)
    return (
        f'<figure id="{chart.id}"><figcaption><h2>{escape(chart.title)}</h2>'
        f"<p>{escape(chart.explains)}</p><p>{legend}</p></figcaption>{drawn}</figure>"
    )


def _svg(height: float, title: str, parts: Iterator[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


# --- lines ---------------------------------------------------------------------------------------


def _lines(chart: Lines) -> str:
    return _svg(HEIGHT, chart.title, _line_parts(chart))


def _line_parts(chart: Lines) -> Iterator[str]:
    times = [at for series in chart.series for at, _ in series.points]
    values = [value for series in chart.series for _, value in series.points]
    values += [edge for series in chart.series for edge in (*series.low, *series.high)]
    first, last = min(times), max(times)
    ticks = _ticks(min(0.0, *values), max(values))
    bottom, top = ticks[0], ticks[-1]

    def x(at: float) -> float:
        share = (at - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - (value - bottom) / (top - bottom) * (HEIGHT - _TOP - _BOTTOM)

    for tick in ticks:
        yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick):.1f}" '
        yield f'y2="{y(tick):.1f}"/><text class="tick" x="{_LEFT - 5}" y="{y(tick) + 3.5:.1f}" '
        yield f'text-anchor="end" data-tick="{tick:g}">{escape(chart.show(tick))}</text>'
    for at, anchor in ((first, "start"), (last, "end")):
        yield f'<text class="tick" x="{x(at):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">'
        yield f"{_moment(at, last - first)}</text>"
    for index, series in enumerate(chart.series):
        yield from _series(chart, index, series, x, y)


def _series(
    chart: Lines,
    index: int,
    series: Series,
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> Iterator[str]:
    points = [(x(at), y(value)) for at, value in series.points]
    if series.low:
        times = [at for at, _ in series.points]
        edge = [(x(at), y(value)) for at, value in zip(times, series.high, strict=True)]
        back = [(x(at), y(value)) for at, value in zip(times, series.low, strict=True)]
        yield f'<path class="band s{index}" d="{_path([*edge, *reversed(back)])}Z"/>'
    if chart.steps:
        points = [p for i, (a, b) in enumerate(points) for p in ((a, points[i - 1][1]), (a, b))][1:]
    yield f'<path class="line s{index}" d="{_path(points)}"/>'
    for at, value in series.points:
        yield f'<circle class="dot s{index}" cx="{x(at):.1f}" cy="{y(value):.1f}" r="2.2" '
        yield f'data-series="{escape(series.name)}" data-value="{value:.6g}">'
        yield f"<title>{_moment(at, 0)}: {escape(chart.show(value))}</title></circle>"


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _moment(at: float, spread: float) -> str:
    try:
        day = time.gmtime(at)
    except (ValueError, OverflowError):
        return "?"  # a file whose time somebody set
    return time.strftime("%b %d %H:%M" if spread >= 86400 else "%b %d %H:%M:%S", day)


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers from at most `low` to at least `high`, a handful."""
    spread = (high - low) or abs(high) or 1.0
    rough = spread / _TICKS
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * tick for tick in range(first, max(last, first + 1) + 1)]


# --- bars ----------------------------------------------------------------------------------------

_BAR: Final = 13
_LABEL: Final = 118


def _bars(chart: Bars) -> str:
    row = _BAR * len(chart.kinds) + 8
    return _svg(row * len(chart.bars) + 6, chart.title, _bar_parts(chart, row))


def _bar_parts(chart: Bars, row: int) -> Iterator[str]:
    most = max((value for _, values in chart.bars for value in values), default=0) or 1
    room = WIDTH - _LABEL - 50
    for place, (label, values) in enumerate(chart.bars):
        top = place * row + 4
        short = label if len(label) <= 18 else label[:17] + "…"
        yield f'<text class="name" x="{_LABEL - 6}" y="{top + row / 2:.1f}" text-anchor="end">'
        yield f"{escape(short)}<title>{escape(label)}</title></text>"
        for index, value in enumerate(values):
            width = room * value / most
            y = top + index * _BAR
            yield f'<rect class="bar s{index}" x="{_LABEL}" y="{y}" width="{width:.2f}" '
            yield f'height="{_BAR - 2}" data-label="{escape(label)}" '
            yield f'data-series="{escape(chart.kinds[index])}" data-value="{value:g}">'
            yield f"<title>{escape(label)}: {value:g} {escape(chart.kinds[index])}</title></rect>"
            if value:
                yield f'<text class="tick" x="{_LABEL + width + 4:.1f}" y="{y + 9}">'
                yield f"{number(value)}</text>"
