"""report: what the page is made of, and that it is one page that loads nothing."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from spoold import fs, report
from spoold.layout import Place, RunDir, State
from spoold.report.charts import Lines, Series, figure, number, span
from spoold.spool import statusfile
from spoold.spool.statusfile import Reason, Status
from tests.support.batches import PENDING, batch, empty_run, put_batch
from tests.support.commands import spoold

gathering = importlib.import_module("spoold.report.gather")  # its function hides its name
ACKED = Place(State.ACKED, "step-000000003")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return history(tmp_path / "run")


def history(root: Path) -> RunDir:
    """A run directory of ten minutes until just now: 12 published, 6 acked, one refused, notes."""
    run = empty_run(root)
    began = round(time.time()) - 1000
    for seq in range(1, 13):
        place = ACKED if seq <= 6 else Place(State.REJECTED, "oom") if seq == 7 else PENDING
        name, data = batch(seq, [10 * seq, 10 * seq + 1])
        data = data.replace(b"1796000000.0", f"{began}.0".encode())
        name = replace(name, digest=hashlib.sha256(data).hexdigest()[:12])
        path = Path(run.file(place, name.file_name))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        at = began + 5 + 50 * seq
        os.utime(path, (at, at))
    for environment, reason in ((1, "bad-json"), (2, "bad-json"), (3, "late")):
        Path(run.rejected, f"env-{environment}.{reason}.json").write_text("{}")
    return run


class Parts(HTMLParser):
    """Which tags and attributes a page has, and the ids of its figures."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    handle_startendtag = handle_starttag


def test_everything_is_taken_from_names_times_and_lines(run: RunDir) -> None:
    gathered = report.gather(run, now=1796001000.0)
    assert len(gathered.batches) == 12
    first = gathered.batches[0]
    assert first.completed is not None
    assert first.published == first.completed[0] + 55
    assert first.rewards == (0.5, 0.5, 0.5)
    assert len(set(first.completed)) == 1
    assert first.acked is not None
    assert [b.file.seq for b in gathered.batches if b.acked is not None] == [1, 2, 3, 4, 5, 6]
    assert gathered.rejects == {"bad-json": (2, 0), "late": (1, 0), "oom": (0, 1)}
    assert gathered.unread == 0


def test_what_was_pruned_is_known_by_its_ledger_entry(run: RunDir) -> None:
    name, _ = batch(20, [500, 501, 502])
    entry = Path(run.ledger, name.id)
    entry.write_text('{"environments": [500, 501, 502], "env_id": "x"}')
    os.utime(entry, (1796000900.0, 1796000900.0))
    (pruned,) = report.gather(run, now=1796001000.0).pruned
    assert (pruned.samples, pruned.acked) == (3, 1796000900.0)


def test_a_batch_that_moves_while_it_reads_and_lines_that_are_no_samples_stop_nothing(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = next(Path(run.pending).iterdir())
    path.write_bytes(b'nonsense\n{"reward": "x"}\n[]\n\xff\n')

    def move_first(files, total):  # type: ignore[no-untyped-def]
        files = list(files)
        os.unlink(run.file(files[0].place, files[0].name))
        yield from files

    gathered = report.gather(run, now=0.0, watch=move_first)
    assert gathered.unread == 1
    assert [b.rewards for b in gathered.batches].count(None) == 1


def test_the_page_is_one_file_that_loads_and_runs_nothing(run: RunDir) -> None:
    page = report.page(report.gather(run, now=1796001000.0))
    parts = Parts(page)
    assert {tag for tag, _ in parts.tags}.isdisjoint({"script", "link", "img", "iframe", "object"})
    for _, attributes in parts.tags:
        assert not {"src", "href", "onload", "onclick"} & set(attributes)
    assert "http://" not in page
    assert "https://" not in page
    assert "@import" not in page
    assert "url(" not in page
    figures = [attributes["id"] for tag, attributes in parts.tags if tag == "figure"]
    assert figures == [
        *("throughput", "depth", "to-publish", "to-ack"),
        *("rewards", "weights", "groups", "rejects"),
    ]
    assert 'name="viewport"' in page
    assert "@media print" in page


def test_of_a_very_large_run_some_batches_are_opened_and_the_page_says_so(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "MOST_READ_FILES", 4)
    opened: list[str] = []
    read = fs.read
    monkeypatch.setattr(gathering.fs, "read", lambda path: opened.append(path) or read(path))
    gathered = report.gather(run, now=1796001000.0)
    assert [b.file.seq for b in gathered.batches if b.rewards is not None] == [1, 4, 7, 10]
    assert len(gathered.batches) == 12
    assert len([path for path in opened if path.endswith(".jsonl")]) == 4
    page = report.page(gathered)
    assert "one in 3 was opened" in page
    published = [float(v) for v in values_of(page, "depth", "batches")]
    assert published[-1] == 5
    monkeypatch.setattr(gathering, "MOST_READ_FILES", 12)
    monkeypatch.setattr(gathering, "MOST_READ_BYTES", 1)
    assert report.gather(run, now=0.0).read_every > 100
    monkeypatch.undo()
    assert "was opened" not in report.page(report.gather(run, now=0.0))


def test_very_many_reasons_and_group_sizes_stay_a_page_and_none_is_left_out(
    tmp_path: Path,
) -> None:
    run = empty_run(tmp_path / "run")
    for one in range(500):
        Path(run.rejected, f"env-{one + 1}.reason-{one}.json").write_text("{}")
    gathered = report.gather(run, now=0.0)
    gathered.groups.update({f"g{size}": size for size in range(1, 200)})
    page = report.page(gathered)
    assert len(page) < 60_000
    for chart, series, total in (("rejects", "notes", 500), ("groups", "groups", 199)):
        assert sum(map(float, values_of(page, chart, series))) == total


@pytest.mark.parametrize("reward", [1e308, -1e308])
def test_numbers_at_the_edge_and_times_that_somebody_set_have_a_page(
    tmp_path: Path, reward: float
) -> None:
    run = empty_run(tmp_path / "run")
    for seq in (1, 2):
        name, data = batch(seq, [10 * seq, 10 * seq + 1])
        data = data.replace(b'"reward":0.5', b'"reward":%r' % (reward if seq == 1 else -reward))
        data = data.replace(b"1796000000.0", b"-1e308" if seq == 1 else b"1e308")
        path = Path(run.pending, name.file_name)
        path.write_bytes(data)
        os.utime(path, (seq * 2**32, seq * 2**32))
    page = report.page(report.gather(run, now=0.0))
    for word in ("nan", "inf"):
        assert not re.search(rf'["> ]-?{word}\b', page)


def test_a_run_of_notes_alone_or_without_any_ack_has_a_page(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    Path(run.rejected, "env-7.bad-json.json").write_text("{}")
    page = report.page(report.gather(run, now=0.0))
    assert page.count("nothing yet") == 7
    put_batch(run, 1, [1])
    page = report.page(report.gather(run, now=0.0))
    assert values_of(page, "to-ack", "median") == []
    assert values_of(page, "depth", "batches")


def test_hostile_words_of_a_job_stay_text(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    evil = '"><img src=x onerror=alert(1)>&'
    reason = Reason.of("unknown-files", evil, evil, since=0.0)
    for state in State:
        Path(run.root, state, evil.replace("/", "")).touch()
    said = Status(
        version=evil,
        pid=1,
        host=evil,
        started=0.0,
        updated=0.0,
        job=evil,
        url=evil,
        ready_when=evil,
        state="failed",
        reasons=(replace(reason, code="bug"),),
    )
    statusfile.write(run, said)
    (run_reason := Path(run.rejected, 'a"><b>c')).mkdir()
    name, data = batch(1, [1], group=evil)
    Path(run_reason, name.file_name).write_bytes(data)
    page = report.page(report.gather(run, now=1.0))
    tags = {tag for tag, _ in Parts(page).tags}
    assert "img" not in tags
    assert not {tag for tag in tags if tag in ("b", "script")}
    assert "&lt;img" in page


def test_an_empty_run_directory_has_a_page_too(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    page = report.page(report.gather(run, now=1796001000.0))
    assert page.count("nothing yet") == 8


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    root = tmp_path / "<script>alert(1)</script>&"
    root.parent.mkdir(exist_ok=True)
    os.makedirs(root)
    run = empty_run(root / "run")
    Path(run.pending, "<b>odd").touch()
    page = report.page(report.gather(run, now=1796001000.0))
    assert "<script" not in page
    assert "<b>" not in page


def test_the_command_writes_it_whole_and_says_what_is_in_it(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.html"
    ran = spoold(capsys, "report", run.root, "-o", target)
    assert (ran.code, ran.out) == (0, "")
    assert ran.err == f"spoold: {target} shows 12 batches\n"
    page = target.read_text()
    assert page.startswith("<!doctype html>")
    assert spoold(capsys, "report", run.root, "-o", "-").out.startswith("<!doctype html>")
    assert sorted(os.listdir(tmp_path)) == ["out.html", "run"]
    ran = spoold(capsys, "report", run.root, "-o", tmp_path / "none/out.html")
    assert ran.code != 0
    assert "none" in ran.err


def test_queue_depth_and_throughput_add_up(run: RunDir) -> None:
    page = report.page(report.gather(run, now=1796001000.0))
    depth = [float(v) for v in values_of(page, "depth", "batches")]
    assert max(depth) == 11  # the refused one left the queue nobody knows when
    assert depth[-1] == 5
    published = [float(v) for v in values_of(page, "throughput", "published")]
    times = report.gather(run, now=0.0).batches
    acked = max(b.acked for b in times if b.acked is not None)
    seconds = (acked - times[0].published) / 48
    assert sum(published) * seconds == pytest.approx(24, rel=0.01)


def values_of(page: str, chart: str, series: str) -> list[str]:
    drawn = page.partition(f'<figure id="{chart}">')[2].partition("</figure>")[0]
    return re.findall(rf'data-series="{series}" data-value="([^"]+)"', drawn)


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (0.25, "0.25"), (12, "12"), (3400, "3.4k"), (5.6e6, "5.6M")]
)
def test_numbers_are_short(value: float, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (0.08, "80 ms"), (12, "12 s"), (210, "3.5 min"), (7200, "2 h")],
)
def test_spans_are_short(seconds: float, shown: str) -> None:
    assert span(seconds) == shown


def test_a_time_that_no_calendar_has_is_shown_as_such() -> None:
    series = [Series(name="s", points=[(0.0, 1.0), (1e300, 2.0)])]
    assert ">?<" in figure(Lines(id="x", title="t", explains="", series=series, show=number))


@pytest.mark.parametrize("values", [[0.0], [-3.0, -3.0], [1e-9, 2e-9], [1e12], [-1.0, 1.0]])
def test_any_values_fit_between_the_ticks(values: list[float]) -> None:
    points = [(float(at), value) for at, value in enumerate(values)]
    drawn = figure(
        Lines(
            id="x",
            title="t",
            explains="",
            series=[Series(name="s", points=points)],
            show=number,
        )
    )
    ticks = [float(v) for v in re.findall(r'data-tick="([^"]+)"', drawn)]
    assert min(ticks) <= min(values)
    assert max(values) <= max(ticks)
    assert 2 <= len(ticks) <= 8


def test_reading_a_group_of_samples_counts_its_members(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    for seq, group in ((1, "g1"), (2, "g1"), (3, "g2")):
        name, data = batch(seq, [seq], group=group)
        Path(run.pending, name.file_name).write_bytes(data)
    assert report.gather(run, now=0.0).groups == {"g1": 2, "g2": 1}
    assert json.loads(data)["extra_info"]["group_id"] == "g2"
