"""The page: which charts there are, what they show, and the HTML around them. Pure."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from html import escape
from typing import Final

from spoold import __version__
from spoold.layout import STALE, WHOLE, State
from spoold.report.charts import Bars, Lines, Series, figure, number, span
from spoold.report.gather import BatchFacts, Gathered
from spoold.spool.overview import Count

__all__ = ["page"]

BINS: Final = 48
MOST_BARS: Final = 24

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #667080; --grid: #dfe3e8;
  --s0: #1f66b0; --s1: #c2570c; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #14171a; --soft: #98a2b0;
  --grid: #30363d; --s0: #6db1f5; --s1: #f2a25c; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 84rem; background: var(--paper); color: var(--ink);
  font: 16px/1.45 system-ui, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; margin: 0 0 .2rem; } h2 { font-size: 1.05rem; margin: 0; }
p { margin: .15rem 0; color: var(--soft); font-size: .88rem; }
.bad { color: var(--bad); } ul { padding-left: 1.2rem; margin: .4rem 0; }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
td, th { text-align: right; padding: .15rem .7rem .15rem 0; border-bottom: 1px solid var(--grid); }
td:first-child, th:first-child { text-align: left; }
.charts { display: grid; gap: 1.2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 23rem), 1fr)); }
figure { margin: 0; padding: .8rem; border: 1px solid var(--grid); border-radius: .5rem;
  break-inside: avoid; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 11px; } svg .name { fill: var(--ink); }
.grid { stroke: var(--grid); stroke-width: 1; } .line { fill: none; stroke-width: 1.6; }
.band { opacity: .18; stroke: none; }
.line.s0 { stroke: var(--s0); } .line.s1 { stroke: var(--s1); }
.dot.s0, .bar.s0, .band.s0 { fill: var(--s0); } .dot.s1, .bar.s1, .band.s1 { fill: var(--s1); }
.key { margin-right: 1rem; } .key::before { content: "\\25cf  "; }
.key.s0::before { color: var(--s0); } .key.s1::before { color: var(--s1); }
@media print { :root { --ink: #000; --paper: #fff; --soft: #333; --grid: #bbb; --s0: #1f66b0;
  --s1: #c2570c; } body { padding: 0; font-size: 11pt; }
  .charts { grid-template-columns: 1fr 1fr; } }
"""


def page(gathered: Gathered) -> str:
    """Return the whole page. It loads nothing and runs nothing, and says so to the browser."""
    root = _text(os.path.abspath(gathered.health.overview.run.root))
    name = os.path.basename(root) or root
    charts = "".join(figure(chart) for chart in _charts(gathered))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>spoold: {escape(name)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(root)}</h1>{_head(gathered)}"
        f'<div class="charts">{charts}</div></body></html>\n'
    )


def _text(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _head(gathered: Gathered) -> str:
    found = gathered.health
    said = found.said
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(gathered.at))
    job = f", job {escape(said.job)}" if said is not None and said.job else ""
    if said is not None and said.shard != WHOLE:
        job += f", shard {escape(said.shard)}"
    daemon = "the daemon runs" if found.running else '<span class="bad">no daemon runs</span>'
    reasons = "".join(
        f'<li class="{"bad" if reason in found.severe else ""}">{escape(_text(reason.text))}'
        f"{'; ' if reason.remedy else ''}{escape(_text(reason.remedy))}</li>"
        for reason in found.reasons
    )
    unread = ""
    if gathered.unread:
        unread = f'<p class="bad">{gathered.unread:,} batch files could not be read.</p>'
    return (
        f"<p>{at}{job}, {daemon}, spoold {__version__}. Times are UTC.</p>"
        f"<ul>{reasons}</ul>{_table(gathered)}{_some_read(gathered)}{unread}"
    )


def _some_read(gathered: Gathered) -> str:
    if gathered.read_every == 1:
        return ""
    return (
        f"<p>Of so many batches one in {gathered.read_every:,} was opened: rewards, groups and ages"
        " from completion are of those. All else is of all batches.</p>"
    )


def _table(gathered: Gathered) -> str:
    rows = "".join(
        f"<tr><td>{state.value}</td><td>{count.batches:,}</td><td>{count.samples:,}</td></tr>"
        for state in State
        for count in [Count.of(gathered.health.overview.of(state))]
    )
    if gathered.pruned:
        samples = sum(each.samples for each in gathered.pruned)
        rows += f"<tr><td>pruned</td><td>{len(gathered.pruned):,}</td><td>{samples:,}</td></tr>"
    rows += f"<tr><td>notes</td><td>{len(gathered.notes):,}</td><td></td></tr>"
    return f"<table><tr><th></th><th>batches</th><th>samples</th></tr>{rows}</table>"


def _charts(gathered: Gathered) -> Iterable[Lines | Bars]:
    batches = gathered.batches
    yield _throughput(gathered)
    yield _depth(batches)
    yield Lines(
        id="to-publish",
        title="From completion to publish",
        explains="Of each batch: median of its samples, and the oldest one. By time of publish.",
        series=[
            _binned(batches, "median", _published, lambda b: _age(b, 1), statistics.median),
            _binned(batches, "oldest", _published, lambda b: _age(b, 0), max),
        ],
        show=span,
    )
    yield Lines(
        id="to-ack",
        title="From publish to ack",
        explains="Of acked batches: median and longest. By time of ack.",
        series=[
            _binned(batches, "median", _acked, _to_ack, statistics.median),
            _binned(batches, "longest", _acked, _to_ack, max),
        ],
        show=span,
    )
    yield _rewards(batches)
    yield _weights(batches)
    yield _groups(gathered.groups)
    yield Bars(
        id="rejects",
        title="Rejected, by reason",
        explains="Environments set aside with a note, and refused batches.",
        kinds=["notes", "batches"],
        bars=_most(gathered.rejects),
    )


def _most(rejects: dict[str, tuple[int, int]]) -> list[tuple[str, tuple[int, int]]]:
    """Return the reasons by name, and what is left of very many as one bar."""
    if len(rejects) <= MOST_BARS:
        return list(rejects.items())
    by_count = sorted(rejects.items(), key=lambda item: -sum(item[1]))
    shown, rest = by_count[: MOST_BARS - 1], by_count[MOST_BARS - 1 :]
    notes, batches = (sum(counts[kind] for _, counts in rest) for kind in (0, 1))
    return [*sorted(shown), (f"{len(rest):,} other reasons", (notes, batches))]


def _published(batch: BatchFacts) -> float:
    return batch.published


def _acked(batch: BatchFacts) -> float | None:
    return batch.acked


def _to_ack(batch: BatchFacts) -> float | None:
    return None if batch.acked is None else max(0.0, batch.acked - batch.published)


def _age(batch: BatchFacts, which: int) -> float | None:
    if batch.completed is None:
        return None
    return max(0.0, batch.published - batch.completed[which])


class _Bins:
    """Equal slices of time that hold all of some moments; a moment's slice is known by its end."""

    def __init__(self, moments: Iterable[float]) -> None:
        known = list(moments)
        self.first = min(known, default=0.0)
        self.seconds = max(1e-3, (max(known, default=0.0) - self.first) / BINS)

    def at(self, moment: float) -> int:
        return min(BINS - 1, int((moment - self.first) / self.seconds))

    def end(self, index: int) -> float:
        return self.first + (index + 1) * self.seconds


def _binned(
    batches: Iterable[BatchFacts],
    name: str,
    when: Callable[[BatchFacts], float | None],
    value: Callable[[BatchFacts], float | None],
    reduce: Callable[[list[float]], float],
) -> Series:
    """Return a series with a point for each slice of time in which there is a value."""
    pairs = [
        (at, v) for b in batches if (at := when(b)) is not None and (v := value(b)) is not None
    ]
    bins = _Bins(at for at, _ in pairs)
    values: dict[int, list[float]] = {}
    for at, v in pairs:
        values.setdefault(bins.at(at), []).append(v)
    return Series(
        name=name, points=[(bins.end(i), float(reduce(v))) for i, v in sorted(values.items())]
    )


def _throughput(gathered: Gathered) -> Lines:
    published = [(b.published, b.file.samples) for b in gathered.batches]
    acked = [(b.acked, b.file.samples) for b in gathered.batches if b.acked is not None]
    acked += [(each.acked, each.samples) for each in gathered.pruned]
    bins = _Bins(at for at, _ in (*published, *acked))
    series = []
    for name, moments in (("published", published), ("acked", acked)):
        sums: Counter[int] = Counter()
        for at, samples in moments:
            sums[bins.at(at)] += samples
        points = [(bins.end(i), sums[i] / bins.seconds) for i in range(BINS)] if moments else []
        series.append(Series(name=name, points=points))
    return Lines(
        id="throughput",
        title="Throughput",
        explains="Samples a second.",
        series=series,
        show=number,
    )


def _depth(batches: list[BatchFacts]) -> Lines:
    """Return how many batches were published and neither acked nor passed over, by time."""
    changes: list[tuple[float, int]] = []
    for batch in batches:
        place = batch.file.place
        if place.state is State.REJECTED or place.folder == STALE:
            continue  # when it left the queue nobody knows
        changes.append((batch.published, 1))
        if batch.acked is not None:
            changes.append((max(batch.acked, batch.published), -1))
    bins = _Bins(at for at, _ in changes)
    net: Counter[int] = Counter()
    for at, change in changes:
        net[bins.at(at)] += change
    depth, points = 0, []
    for index in range(BINS) if changes else ():
        depth += net[index]
        points.append((bins.end(index), float(depth)))
    return Lines(
        id="depth",
        title="Queue depth",
        explains="Batches published and not yet acked.",
        series=[Series(name="batches", points=points)],
        show=number,
        steps=True,
    )


def _rewards(batches: list[BatchFacts]) -> Lines:
    known = [batch for batch in batches if batch.rewards is not None]

    def edge(which: int) -> Series:
        return _binned(
            known,
            "mean",
            _published,
            lambda b: None if b.rewards is None else b.rewards[which],
            statistics.fmean,
        )

    mean = edge(1)
    return Lines(
        id="rewards",
        title="Rewards",
        explains="Mean, and the band from the 10th to the 90th percentile. By time of publish.",
        series=[
            Series(
                name="mean",
                points=mean.points,
                low=[value for _, value in edge(0).points],
                high=[value for _, value in edge(2).points],
            )
        ],
        show=number,
    )


def _weights(batches: list[BatchFacts]) -> Lines:
    return Lines(
        id="weights",
        title="Weight versions",
        explains="Least and greatest in the batches, by time of publish.",
        series=[
            _binned(batches, "greatest", _published, lambda b: float(b.file.weights[1]), max),
            _binned(batches, "least", _published, lambda b: float(b.file.weights[0]), min),
        ],
        show=number,
    )


def _groups(groups: Counter[str]) -> Bars:
    sizes = sorted(Counter(groups.values()).items())
    bars = [
        (f"{size} sample{'' if size == 1 else 's'}", (count,)) for size, count in sizes[:MOST_BARS]
    ]
    if rest := sizes[MOST_BARS:]:
        bars[-1:] = [
            (f"{sizes[MOST_BARS - 1][0]} or more", (bars[-1][1][0] + sum(n for _, n in rest),))
        ]
    return Bars(
        id="groups",
        title="Groups",
        explains="How many delivered groups have how many samples.",
        kinds=["groups"],
        bars=bars,
    )
