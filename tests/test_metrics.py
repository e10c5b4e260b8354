"""Metrics: what the daemon writes for Prometheus, and the example alerts on it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from spoold.errors import ConfigError
from spoold.metrics import BOUNDS_SECONDS, Durations
from spoold.reasons import REASONS
from tests.support.batches import tree
from tests.support.daemons import mv, running, start
from tests.support.needs import needs
from tests.support.rollouts import Rollouts, make_rollouts
from tests.test_house import loaded_by

RULES = Path(__file__).parent.parent / "examples/prometheus-rules.yml"


@pytest.fixture
def rollouts(tmp_path: Path) -> Iterator[Rollouts]:
    made = make_rollouts(tmp_path / "rollout.db")
    (tmp_path / "metrics").mkdir()
    yield made
    made.close()


def values(folder: Path) -> dict[str, float]:
    """Name and labels, without run_dir and sentence, → value."""
    (file,) = folder.iterdir()
    found = {}
    for family in text_string_to_metric_families(file.read_text()):
        assert family.documentation
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("run_dir", "sentence")}
            assert "run_dir" in sample.labels
            shown = ",".join(f"{k}={v}" for k, v in labels.items())
            found[f"{sample.name}{{{shown}}}" if shown else sample.name] = sample.value
    return found


def complete(rollouts: Rollouts, count: int) -> None:
    for one in rollouts.register(count, group=""):
        rollouts.complete(one)


def test_nothing_is_written_and_nothing_loaded_while_it_is_off() -> None:
    loaded = loaded_by("import spoold.daemon, spoold.metrics")
    assert "prometheus_client" not in loaded


def test_a_folder_that_is_not_there_is_refused_at_start(tmp_path: Path, rollouts: Rollouts) -> None:
    with pytest.raises(ConfigError, match="is no directory"):
        start(tmp_path, metrics_dir=tmp_path / "none")


def test_the_file_tells_of_every_directory_total_and_age(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    complete(rollouts, 5)
    folder = tmp_path / "metrics"
    with running(tmp_path, metrics_dir=folder, batch_size=1) as it:
        it.go()
        first, second, third, fourth, _ = tree(it.run, "pending")
        mv(it.run, first, "acked")
        mv(it.run, second, "acked/stale")
        mv(it.run, third, "rejected/oom")
        mv(it.run, fourth, "inflight/trainer-0")
        it.go(10.0)
        it.go(10.0)
        found = values(folder)
        assert {f"spoold_batches{{directory={d}}}": n for d, n in _counts(1, 1, 2, 1).items()} == {
            name: value for name, value in found.items() if name.startswith("spoold_batches{")
        }
        assert found["spoold_running"] == 1
        assert found["spoold_published_batches_total"] == 5
        assert found["spoold_published_samples_total"] == 5
        assert found["spoold_published_bytes_total"] > 1000
        assert found["spoold_acked_batches_total"] == 1
        assert found["spoold_acked_samples_total"] == 1
        assert found["spoold_stale_batches_total"] == 1
        assert found["spoold_rejected_batches_total{reason=oom}"] == 1
        assert found["spoold_claimed_batches_total"] == 1
        assert found["spoold_requeued_batches_total"] == 0
        assert found["spoold_consumer_up{consumer=trainer-0}"] == 0
        assert found["spoold_consumer_batches{consumer=trainer-0}"] == 1
        assert found["spoold_latest_batch_weight_version{bound=greatest}"] == 3
        assert found["spoold_delivered_environments"] == 5
        assert found["spoold_ready_environments"] == 0
        assert "spoold_oldest_ready_timestamp_seconds" not in found
        assert found["spoold_publish_duration_seconds_count"] == 5
        assert found["spoold_look_duration_seconds_count"] >= 1
        assert found["spoold_publish_duration_seconds_bucket{le=+Inf}"] == 5
        assert found["spoold_disk_free_bytes"] > 0
        for name in ("last_publish", "last_look", "updated"):
            assert found[f"spoold_{name}_timestamp_seconds"] <= it.daemon.wall()
        assert found["spoold_oldest_batch_timestamp_seconds{directory=pending}"] > 0
        reasons = [name for name in found if name.startswith("spoold_reason{")]
        assert len(reasons) == len(REASONS)
        it.go(60.0)
        it.go(10.0)
        assert values(folder)["spoold_requeued_batches_total"] == 1
    assert values(folder)["spoold_running"] == 0


def _counts(*numbers: int) -> dict[str, int]:
    return dict(zip(("pending", "inflight", "acked", "rejected"), numbers, strict=True))


def test_the_age_of_what_is_complete_and_unpublished_goes_on_growing(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    complete(rollouts, 2)
    folder = tmp_path / "metrics"
    with running(tmp_path, metrics_dir=folder, linger_seconds=100) as it:
        it.go()
        at = it.daemon.wall()
        complete(rollouts, 1)
        it.go(50.0)
        found = values(folder)
        assert found["spoold_ready_environments"] == 3
        assert found["spoold_oldest_ready_timestamp_seconds"] == pytest.approx(at, abs=1)
        it.go(60.0)
        it.go(10.0)
        assert "spoold_oldest_ready_timestamp_seconds" not in values(folder)


def test_it_is_written_every_few_seconds_whole_and_readable_for_the_exporter(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    folder = tmp_path / "metrics"
    before = os.umask(0o077)
    try:
        with running(tmp_path, metrics_dir=folder) as it:
            it.go()
            (file,) = folder.iterdir()
            assert file.name.startswith("spoold-run-")
            assert stat.S_IMODE(file.stat().st_mode) == 0o644
            inode = file.stat().st_ino
            it.go(1.0)
            assert file.stat().st_ino == inode
            it.go(5.0)
            assert file.stat().st_ino != inode
    finally:
        os.umask(before)
    assert len(list(folder.iterdir())) == 1


def test_a_folder_that_goes_away_is_said_once_and_delivery_goes_on(
    tmp_path: Path, rollouts: Rollouts, caplog: pytest.LogCaptureFixture
) -> None:
    rollouts.register(1)
    caplog.set_level("INFO", "spoold")
    with running(tmp_path, metrics_dir=tmp_path / "metrics") as it:
        it.go()
        shutil.rmtree(tmp_path / "metrics")
        for _ in range(3):
            it.go(6.0)
        complete(rollouts, 1)
        it.go(3.0)
        assert len(tree(it.run, "pending")) == 1
        (reason,) = (r for r in it.daemon.conditions.reasons() if r.code == "metrics-unwritten")
        assert "metrics" in reason.text
        told = [r.fields["reason"] for r in caplog.records if r.message == "waiting"]
        assert told.count("metrics-unwritten") == 1
        (tmp_path / "metrics").mkdir()
        it.go(6.0)
        assert values(tmp_path / "metrics")


def test_durations_fall_into_the_bucket_whose_bound_they_reach() -> None:
    durations = Durations()
    for seconds in (0.0, 0.001, 0.0011, 31.0):
        durations.add(seconds)
    buckets = dict(durations.buckets())
    assert list(buckets) == [*(f"{bound:g}" for bound in BOUNDS_SECONDS), "+Inf"]
    assert (buckets["0.001"], buckets["0.0025"], buckets["30"], buckets["+Inf"]) == (2, 3, 3, 4)


def test_promtool_finds_nothing_to_mend_in_the_file(tmp_path: Path, rollouts: Rollouts) -> None:
    needs(shutil.which("promtool"), "promtool (Debian: prometheus)")
    complete(rollouts, 1)
    with running(tmp_path, metrics_dir=tmp_path / "metrics") as it:
        it.go()
        (file,) = (tmp_path / "metrics").iterdir()
        ran = subprocess.run(
            ["promtool", "check", "metrics"], input=file.read_bytes(), capture_output=True
        )
    assert (ran.returncode, ran.stderr) == (0, b"")


# Each alert: the series that raise it, and for how long.
ALERTS = {
    "SpooldGone": """
      - {series: 'spoold_running{run_dir="/r"}', values: '1x40'}
      - {series: 'spoold_updated_timestamp_seconds{run_dir="/r"}', values: '0x40'}""",
    "SpooldStopped": """
      - {series: 'spoold_running{run_dir="/r"}', values: '0x40'}""",
    "SpooldNeedsAttention": """
      - {series: 'spoold_running{run_dir="/r"}', values: '1x40'}
      - {series: 'spoold_reason{run_dir="/r",reason="disk-space",severity="attention"}',
         values: '1x40'}""",
    "SpooldNotPublishing": """
      - {series: 'spoold_oldest_ready_timestamp_seconds{run_dir="/r"}', values: '0x40'}""",
    "SpooldNotLooking": """
      - {series: 'spoold_running{run_dir="/r"}', values: '1x40'}
      - {series: 'spoold_last_look_timestamp_seconds{run_dir="/r"}', values: '0x40'}""",
    "SpooldDeadConsumerHoldsBatches": """
      - {series: 'spoold_consumer_up{run_dir="/r",consumer="t"}', values: '0x40'}
      - {series: 'spoold_consumer_batches{run_dir="/r",consumer="t"}', values: '2x40'}""",
    "SpooldNobodyClaims": """
      - {series: 'spoold_oldest_batch_timestamp_seconds{run_dir="/r",directory="pending"}',
         values: '-4000x40'}""",
    "SpooldRejecting": """
      - {series: 'spoold_set_aside_environments{run_dir="/r"}', values: '0+2x40'}""",
    "SpooldDiskFilling": """
      - {series: 'spoold_disk_free_bytes{run_dir="/r"}', values: '9000000000-100000000x40'}""",
}
QUIET = """
      - {series: 'spoold_running{run_dir="/r"}', values: '1x40'}
      - {series: 'spoold_updated_timestamp_seconds{run_dir="/r"}', values: '0+60x40'}
      - {series: 'spoold_last_look_timestamp_seconds{run_dir="/r"}', values: '0+60x40'}
      - {series: 'spoold_reason{run_dir="/r",reason="linger",severity="wait"}', values: '1x40'}
      - {series: 'spoold_consumer_up{run_dir="/r",consumer="t"}', values: '1x40'}
      - {series: 'spoold_consumer_batches{run_dir="/r",consumer="t"}', values: '2x40'}
      - {series: 'spoold_set_aside_environments{run_dir="/r"}', values: '3x40'}
      - {series: 'spoold_batches{run_dir="/r",directory="rejected"}', values: '1x40'}
      - {series: 'spoold_disk_free_bytes{run_dir="/r"}', values: '9000000000x40'}"""


def test_every_example_alert_fires_on_its_fault_and_on_nothing_else(tmp_path: Path) -> None:
    needs(shutil.which("promtool"), "promtool (Debian: prometheus)")
    assert set(ALERTS) == {
        line.split()[-1] for line in RULES.read_text().splitlines() if "- alert:" in line
    }
    tests = []
    for wanted, series in {**ALERTS, "": QUIET}.items():
        expressions = [
            f'      - {{expr: \'count(ALERTS{{alertname="{name}",alertstate="firing"}})\', '
            f"eval_time: 30m, exp_samples: [{{labels: '{{}}', value: 1}}]}}"
            if name == wanted
            else f'      - {{expr: \'count(ALERTS{{alertname="{name}",alertstate="firing"}})\', '
            "eval_time: 30m}"
            for name in ALERTS
        ]
        tests.append(
            f"  - interval: 1m\n    input_series:{series}\n    promql_expr_test:\n"
            + "\n".join(expressions)
        )
    path = tmp_path / "alerts.yml"
    path.write_text(f"rule_files: [{RULES}]\ntests:\n" + "\n".join(tests) + "\n")
    checked = subprocess.run(
        ["promtool", "check", "rules", RULES], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    ran = subprocess.run(
        ["promtool", "test", "rules", path], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_rules_ask_only_for_numbers_that_are_written(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    import re

    complete(rollouts, 1)
    with running(tmp_path, metrics_dir=tmp_path / "metrics", linger_seconds=9) as it:
        it.go()
        written = set(values(tmp_path / "metrics"))
        it.go(20.0)
        it.go(20.0)
        written |= set(values(tmp_path / "metrics"))
    (file,) = (tmp_path / "metrics").iterdir()
    families = set(re.findall(r"^# TYPE (\w+)", file.read_text(), re.MULTILINE))
    asked = set(re.findall(r"\bspoold_\w+", RULES.read_text()))
    assert asked <= {name.partition("{")[0] for name in written} | families
