"""The page of `spoold report` in a real Chromium: what is drawn there is what the disk says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from spoold import report
from tests.support.needs import needs
from tests.test_report import history

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("mounts")]

# Asks the browser where everything came to lie, and leaves the answer in the page.
MEASURE = """
<pre id="measured"></pre><script>
const box = e => { const b = e.getBoundingClientRect();
                   return {x: b.x, y: b.y, w: b.width, h: b.height}; };
const out = {width: document.documentElement.scrollWidth, window: innerWidth, figures: {}};
for (const figure of document.querySelectorAll("figure")) {
  out.figures[figure.id] = {
    box: box(figure),
    marks: [...figure.querySelectorAll(".dot, .bar")].map(
      e => ({...box(e), series: e.dataset.series, label: e.dataset.label, value: +e.dataset.value,
             fill: getComputedStyle(e).fill})),
    ticks: [...figure.querySelectorAll("[data-tick]")].map(
      e => ({...box(e), value: +e.dataset.tick}))
  };
}
document.getElementById("measured").textContent = JSON.stringify(out);
</script></body>"""


def measured(page: str, folder: Path, *, width: int) -> Any:
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    html = policy.sub("", page).replace("</body>", MEASURE)
    file = folder / "page.html"
    file.write_text(html)
    ran = subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
            *("--disable-sync", f"--user-data-dir={folder}/profile", f"--window-size={width},1000"),
            *("--dump-dom", file.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r'<pre id="measured">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert found is not None, ran.stderr[-2000:]
    return json.loads(unescape(found[1]))


@pytest.mark.parametrize("width", [1200, 500])
def test_the_figures_that_are_drawn_are_those_on_disk(tmp_path: Path, width: int) -> None:
    needs(shutil.which("chromium"), "chromium")
    run = history(tmp_path / "run")
    page = report.page(report.gather(run, now=1796001000.0))
    found = measured(page, tmp_path, width=width)
    figures = found["figures"]
    assert found["width"] <= found["window"], "nothing sticks out at the side"
    if width == 500:
        assert len({round(each["box"]["x"]) for each in figures.values()}) == 1, "one column"

    bars = {(b["label"], b["series"]): b for b in figures["rejects"]["marks"]}
    counts = {key: bar["value"] for key, bar in bars.items() if bar["value"]}
    assert counts == {("bad-json", "notes"): 2, ("late", "notes"): 1, ("oom", "batches"): 1}
    longest = bars["bad-json", "notes"]["w"]
    assert longest > 50
    for key, value in counts.items():
        assert bars[key]["w"] == pytest.approx(longest * value / 2, rel=0.01)
    assert bars["late", "notes"]["fill"] != bars["oom", "batches"]["fill"]

    for name in ("throughput", "depth", "to-publish", "to-ack", "rewards", "weights"):
        figure = figures[name]
        assert figure["marks"], name
        low, high = figure["ticks"][0], figure["ticks"][-1]
        middle = [tick["y"] + tick["h"] / 2 for tick in (low, high)]
        scale = (high["value"] - low["value"]) / (middle[0] - middle[1])
        for mark in figure["marks"]:
            # Read back from where the point lies between the ticks, as a person does.
            drawn = low["value"] + (middle[0] - (mark["y"] + mark["h"] / 2)) * scale
            assert drawn == pytest.approx(mark["value"], abs=3 * scale), (name, mark)
    assert {m["value"] for m in figures["weights"]["marks"]} == {7}
    assert {m["value"] for m in figures["rewards"]["marks"]} == {0.5}
    assert figures["depth"]["marks"][-1]["value"] == 5
    ages = [m["value"] for m in figures["to-publish"]["marks"] if m["series"] == "median"]
    assert (min(ages), max(ages)) == (55, 605)
