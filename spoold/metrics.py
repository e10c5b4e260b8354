"""Numbers for Prometheus, as a file for the textfile collector of node_exporter.

Only with the setting `metrics_dir`: one file a run directory, `spoold-<name>-<hash>.prom`, replaced
atomically and readable for all, written every few seconds and once more at the end. Units are base
units, times are epoch seconds (`time() - x` is an age that goes on growing when nobody writes), and
counters count from the start of the daemon. Every series has the label `run_dir`.

prometheus_client is loaded when the first file is written; whoever only counts never loads it.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from spoold import fs
from spoold.errors import ConfigError, SpoolWriteError
from spoold.layout import State
from spoold.reasons import REASONS
from spoold.spool.statusfile import Status
from spoold.spool.tally import Tally

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["Durations", "Facts", "Textfile"]

WRITE_SECONDS: Final = 5.0
BOUNDS_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_WORDS: Final = ("claimed", "acked", "stale", "released", "requeued", "rewound")


class Durations:
    """How often something took how long: a histogram that anybody can count in."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self.sum_seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self.sum_seconds += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, the last one infinite."""
        total, buckets = 0, []
        for bound, count in zip([*BOUNDS_SECONDS, float("inf")], self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(total)))
        return buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that the file tells. `consumers`: name → (alive, batches held).

    `oldest`: since when the oldest batch of a state lies there; `weights`: least and greatest
    weight version of the batch that was published last.
    """

    run_dir: str
    report: Status
    batches: Mapping[State, int]
    oldest: Mapping[State, float]
    pending_bytes: int
    tally: Tally
    notes: Mapping[str, int]
    notes_written: Mapping[str, int]
    consumers: Mapping[str, tuple[bool, int]]
    looks: Durations = field(default_factory=Durations)
    publishes: Durations = field(default_factory=Durations)
    last_look: float | None = None
    weights: tuple[int, int] | None = None
    free_bytes: int | None = None


class Textfile:
    """The file of one run directory in `folder`.

    Where it cannot be written, delivery goes on: that matters more than to tell.
    """

    def __init__(self, folder: str, run_dir: str) -> None:
        self.folder = folder
        root = os.path.abspath(run_dir)
        digest = hashlib.sha256(os.fsencode(root)).hexdigest()[:8]
        name = "".join(c if c.isascii() and c.isalnum() else "-" for c in os.path.basename(root))
        self.path = f"{folder}/spoold-{name[:100]}-{digest}.prom"
        self.due_at = 0.0

    def check(self) -> None:
        """Raise ConfigError where there is no such folder: better said at start than in the log."""
        if not os.path.isdir(self.folder):
            raise ConfigError(
                f"metrics_dir {self.folder} is no directory",
                hint="make it, or leave metrics_dir unset",
            )

    def write(self, facts: Facts, now: float) -> SpoolWriteError | None:
        """Replace the file, whole. Returns why it could not be written, None where it was."""
        self.due_at = now + WRITE_SECONDS
        try:
            fs.put(self.path, render(facts), tmp_dir=self.folder, durable=False, mode=0o644)
        except SpoolWriteError as error:
            return error
        except FileNotFoundError as error:
            return fs.failed("write", self.path, error)
        return None


def render(facts: Facts) -> bytes:
    """Return the text of the file."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.registry import Collector

    class Once(Collector):
        def collect(self) -> Iterator[Metric]:
            return _metrics(facts)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Once())
    return bytes(generate_latest(registry))


def _metrics(facts: Facts) -> Iterator[Metric]:
    yield from _daemon(facts)
    yield from _directories(facts)
    yield from _totals(facts)
    yield from _source(facts)
    yield from _durations(facts)


def _gauge(facts: Facts, name: str, what: str, value: float | None) -> Iterator[Metric]:
    if value is not None:
        yield from _gauges(facts, name, what, "", {"": value})


def _gauges(
    facts: Facts, name: str, what: str, label: str, values: Mapping[str, float]
) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    metric = GaugeMetricFamily(f"spoold_{name}", what, labels=_labels(label))
    for key, value in values.items():
        metric.add_metric(_keys(facts, label, key), value)
    yield metric


def _counters(
    facts: Facts, name: str, what: str, label: str, values: Mapping[str, float]
) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    metric = CounterMetricFamily(f"spoold_{name}", what, labels=_labels(label))
    for key, value in values.items():
        metric.add_metric(_keys(facts, label, key), value)
    yield metric


def _labels(label: str) -> list[str]:
    return ["run_dir", label] if label else ["run_dir"]


def _keys(facts: Facts, label: str, key: str) -> list[str]:
    # A path may hold bytes that are no UTF-8; the file must be.
    run_dir = os.fsencode(facts.run_dir).decode("utf-8", "backslashreplace")
    return [run_dir, key] if label else [run_dir]


def _daemon(facts: Facts) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    report = facts.report
    info = GaugeMetricFamily(
        "spoold_info",
        "Always 1; the labels tell.",
        labels=["run_dir", "rollout_job", "shard", "version"],
    )
    info.add_metric([*_keys(facts, "", ""), report.job, report.shard, report.version], 1)
    yield info
    running = report.state not in ("stopped", "failed")
    yield from _gauge(
        facts, "running", "1 while the daemon runs; 0 when it stopped in an orderly way.", running
    )
    yield from _gauge(
        facts, "start_time_seconds", "When the daemon started, epoch seconds.", report.started
    )
    yield from _gauge(
        facts,
        "updated_timestamp_seconds",
        "When these numbers were written; a daemon that is gone writes no more.",
        report.updated,
    )
    reason = GaugeMetricFamily(
        "spoold_reason",
        "1 while a reason holds: why something is not delivered, or what a person should know.",
        labels=["run_dir", "reason", "sentence", "severity"],
    )
    # What a daemon waited for that was stopped is history; what ended one is not.
    holding = set() if report.state == "stopped" else {each.code for each in report.reasons}
    for code, kind in REASONS.items():
        keys = [*_keys(facts, "", ""), code, kind.sentence, kind.urgency.name.lower()]
        reason.add_metric(keys, float(code in holding))
    yield reason
    yield from _gauge(
        facts, "disk_free_bytes", "Free for the daemon beside the batches.", facts.free_bytes
    )


def _directories(facts: Facts) -> Iterator[Metric]:
    batches = {state.value: float(facts.batches.get(state, 0)) for state in State}
    yield from _gauges(
        facts, "batches", "Batches that lie in a directory now.", "directory", batches
    )
    yield from _gauge(facts, "pending_bytes", "Bytes in pending/.", facts.pending_bytes)
    yield from _gauges(
        facts,
        "oldest_batch_timestamp_seconds",
        "Since when the oldest batch lies in a directory; no series while it is empty.",
        "directory",
        {state.value: at for state, at in facts.oldest.items()},
    )
    yield from _gauges(
        facts, "notes", "Environments set aside with a note, by reason.", "reason", facts.notes
    )
    yield from _gauge(
        facts,
        "set_aside_environments",
        "Environments set aside with a note, in all.",
        facts.report.rejected.notes,
    )
    yield from _gauges(
        facts,
        "consumer_up",
        "1 while a consumer holds its lock.",
        "consumer",
        {name: float(alive) for name, (alive, _) in facts.consumers.items()},
    )
    yield from _gauges(
        facts,
        "consumer_batches",
        "Batches that a consumer holds.",
        "consumer",
        {name: held for name, (_, held) in facts.consumers.items()},
    )
    if facts.weights is not None:
        lo, hi = facts.weights
        yield from _gauges(
            facts,
            "latest_batch_weight_version",
            "Least and greatest weight version in the batch published last.",
            "bound",
            {"least": lo, "greatest": hi},
        )


def _totals(facts: Facts) -> Iterator[Metric]:
    made = facts.report.published
    for name, what, value in (
        ("published_batches", "Batches published.", made.batches),
        ("published_samples", "Samples published.", made.samples),
        ("published_environments", "Environments published.", made.environments),
        ("published_bytes", "Bytes published.", made.bytes),
    ):
        yield from _counters(facts, name, what, "", {"": value})
    tally = facts.tally
    for word in _WORDS:
        what = {"stale": "passed over as stale"}.get(word, word)
        yield from _counters(
            facts, f"{word}_batches", f"Batches {what}.", "", {"": tally.batches[word]}
        )
        yield from _counters(
            facts, f"{word}_samples", f"Samples {what}.", "", {"": tally.samples[word]}
        )
    yield from _counters(
        facts, "rejected_batches", "Batches rejected, by reason.", "reason", tally.rejected
    )
    yield from _counters(
        facts, "written_notes", "Notes written, by reason.", "reason", facts.notes_written
    )
    yield from _gauge(
        facts,
        "last_publish_timestamp_seconds",
        "When a batch was published last; no series before the first.",
        made.last,
    )


def _source(facts: Facts) -> Iterator[Metric]:
    source = facts.report.source
    for name, what, value in (
        (
            "delivered_environments",
            "Delivered in the life of the run directory.",
            facts.report.delivered,
        ),
        (
            "running_environments",
            "Environments with step rows that are not complete.",
            source.running,
        ),
        ("ready_environments", "Complete, known and not published yet.", source.ready),
        (
            "missing_row_environments",
            "Finished environments without a usable row.",
            source.missing_rows,
        ),
        ("waiting_groups", "Groups that wait for members (20 at most).", len(source.groups)),
    ):
        yield from _gauge(facts, name, what, value)
    yield from _gauge(
        facts,
        "oldest_ready_timestamp_seconds",
        "Since when the oldest complete, unpublished environment is known; no series for none.",
        source.oldest_ready,
    )
    yield from _gauge(
        facts,
        "last_look_timestamp_seconds",
        "When the rollout database was looked at last with success.",
        facts.last_look,
    )


def _durations(facts: Facts) -> Iterator[Metric]:
    from prometheus_client.core import HistogramMetricFamily

    for name, what, durations in (
        ("look_duration_seconds", "How long a look at the database took.", facts.looks),
        (
            "publish_duration_seconds",
            "How long it took to write, sync and rename a batch.",
            facts.publishes,
        ),
    ):
        metric = HistogramMetricFamily(f"spoold_{name}", what, labels=["run_dir"])
        metric.add_metric(_keys(facts, "", ""), durations.buckets(), durations.sum_seconds)
        yield metric
