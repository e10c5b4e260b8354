"""Metrics: what the daemon writes for Prometheus, and the example alerts on it."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from spoold import __version__
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


def test_every_number_of_a_run_that_is_known(tmp_path: Path, rollouts: Rollouts) -> None:
    """All of them, one by one: a number that nobody checks here does not exist."""
    for weight in (5, 6, 7, 8, 9, 10):
        for one in rollouts.register(2, group=""):
            rollouts.complete(one, meta={"weight_version": weight})
    bad, running_one = rollouts.register(2, group="")
    rollouts.complete(bad, messages="[{broken")
    rollouts.step(running_one)
    rollouts.finish(rollouts.register(1)[0])  # and no row
    folder = tmp_path / "metrics"
    with running(tmp_path, metrics_dir=folder, batch_size=2) as it:
        it.go()
        names = tree(it.run, "pending")
        assert len(names) == 6
        size = sum(Path(it.run.root, name).stat().st_size for name in names)
        to_ack, to_pass, to_refuse, to_lose, to_release, to_rewind = names
        mv(it.run, to_ack, "acked")
        mv(it.run, to_pass, "acked/stale")
        mv(it.run, to_refuse, "rejected/oom")
        mv(it.run, to_lose, "inflight/trainer-0")
        mv(it.run, to_release, "inflight")
        mv(it.run, to_rewind, "acked/step-000000004")
        it.go(6.0)
        mv(it.run, to_release.replace("pending", "inflight"), "pending")
        mv(it.run, to_rewind.replace("pending", "acked/step-000000004"), "pending")
        it.go(6.0)
        it.go(61.0)
        it.go(6.0)
        rejected = Path(it.run.rejected)
        assert sorted(p.name for p in rejected.glob("*.json")) == [f"env-{bad}.bad-json.json"]
        pending = [Path(it.run.root, name) for name in tree(it.run, "pending")]
        found = values(folder)
        now, began = it.daemon.wall(), it.daemon.wall() - (it.clock.now - 1000.0)
        oldest = min(pending, key=lambda path: path.name).stat().st_ctime
        moments = {name: found.pop(name) for name in list(found) if "timestamp" in name}
        durations = {name: found.pop(name) for name in list(found) if "_duration_" in name}
        reasons = {name: found.pop(name) for name in list(found) if name.startswith("spoold_reas")}
        assert found.pop("spoold_disk_free_bytes") > 0
        assert found == {
            f"spoold_info{{rollout_job=job-1,shard=0/1,version={__version__}}}": 1,
            "spoold_running": 1,
            "spoold_start_time_seconds": began,
            **{f"spoold_batches{{directory={d}}}": n for d, n in _counts(3, 0, 2, 1).items()},
            "spoold_pending_bytes": sum(path.stat().st_size for path in pending),
            "spoold_notes{reason=bad-json}": 1,
            "spoold_set_aside_environments": 1,
            "spoold_consumer_up{consumer=trainer-0}": 0,
            "spoold_consumer_batches{consumer=trainer-0}": 0,
            "spoold_latest_batch_weight_version{bound=least}": 10,
            "spoold_latest_batch_weight_version{bound=greatest}": 10,
            "spoold_published_batches_total": 6,
            "spoold_published_samples_total": 12,
            "spoold_published_environments_total": 12,
            "spoold_published_bytes_total": size,
            "spoold_claimed_batches_total": 2,
            "spoold_claimed_samples_total": 4,
            "spoold_acked_batches_total": 2,
            "spoold_acked_samples_total": 4,
            "spoold_stale_batches_total": 1,
            "spoold_stale_samples_total": 2,
            "spoold_released_batches_total": 1,
            "spoold_released_samples_total": 2,
            "spoold_requeued_batches_total": 1,
            "spoold_requeued_samples_total": 2,
            "spoold_rewound_batches_total": 1,
            "spoold_rewound_samples_total": 2,
            "spoold_rejected_batches_total{reason=oom}": 1,
            "spoold_written_notes_total{reason=bad-json}": 1,
            "spoold_delivered_environments": 12,
            "spoold_running_environments": 1,
            "spoold_ready_environments": 0,
            "spoold_missing_row_environments": 1,
            "spoold_waiting_groups": 0,
        }
        assert moments == {
            "spoold_updated_timestamp_seconds": pytest.approx(now, abs=6),
            "spoold_oldest_batch_timestamp_seconds{directory=pending}": oldest,
            "spoold_last_publish_timestamp_seconds": pytest.approx(began, abs=1),
            "spoold_last_look_timestamp_seconds": pytest.approx(now, abs=6),
        }
        for what, least in (("publish", 6), ("look", 1)):
            counts = [v for k, v in durations.items() if k.startswith(f"spoold_{what}_dur")]
            assert durations[f"spoold_{what}_duration_seconds_count"] >= least
            assert durations[f"spoold_{what}_duration_seconds_sum"] > 0
            assert len(counts) == len(BOUNDS_SECONDS) + 3
        assert durations["spoold_publish_duration_seconds_count"] == 6
        assert {name for name, value in reasons.items() if value} == {
            "spoold_reason{reason=waiting-for-environments,severity=wait}",
            "spoold_reason{reason=missing-rows,severity=wait}",
        }


def test_two_runs_of_one_name_write_two_files_that_are_read_together(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    needs(shutil.which("promtool"), "promtool (Debian: prometheus)")
    folder = tmp_path / "metrics"
    complete(rollouts, 1)
    for host in ("a", "b"):
        run = tmp_path / host / "exp7"
        run.parent.mkdir()
        with running(tmp_path, run_dir=run, metrics_dir=folder) as it:
            it.go()
    assert len(list(folder.glob("spoold-exp7-*.prom"))) == 2
    # As node_exporter does it: the families of all files, once each.
    families: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.prom")):
        for line in file.read_text().splitlines():
            name = line.split()[2] if line.startswith("#") else line.partition("{")[0]
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            families.setdefault(base, []).append(line)
    lines = [line for family in families.values() for line in dict.fromkeys(family)]
    ran = subprocess.run(
        ["promtool", "check", "metrics"],
        input="\n".join([*lines, ""]).encode(),
        capture_output=True,
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    dirs = {line.partition('run_dir="')[2].partition('"')[0] for line in lines if line[0] != "#"}
    assert dirs == {f"{tmp_path}/a/exp7", f"{tmp_path}/b/exp7"}


def test_what_a_stopped_daemon_waited_for_is_over_and_what_ended_one_is_not(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    folder = tmp_path / "metrics"
    gone = "spoold_reason{reason=source-unavailable,severity=attention}"
    bug = "spoold_reason{reason=bug,severity=attention}"
    with running(tmp_path, db=tmp_path / "none.db", metrics_dir=folder) as it:
        it.go()
        assert values(folder)[gone] == 1
    assert (values(folder)["spoold_running"], values(folder)[gone]) == (0, 0)
    it = start(tmp_path, db=tmp_path / "none.db", metrics_dir=folder)
    it.daemon.failed(ZeroDivisionError("x"))
    it.daemon.stop()
    it.kill()
    assert (values(folder)["spoold_running"], values(folder)[bug]) == (0, 1)


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
      - {series: 'spoold_running{run_dir="/r"}', values: '1x100'}
      - {series: 'spoold_updated_timestamp_seconds{run_dir="/r"}', values: '0x100'}""",
    "SpooldStopped": """
      - {series: 'spoold_running{run_dir="/r"}', values: '0x100'}""",
    "SpooldNeedsAttention": """
      - {series: 'spoold_running{run_dir="/r"}', values: '1x100'}
      - {series: 'spoold_reason{run_dir="/r",reason="disk-space",severity="attention"}',
         values: '1x100'}""",
    "SpooldUnseen": """
      - {series: 'spoold_running{run_dir="/r"}', values: '1x40'}""",
    "SpooldNotPublishing": """
      - {series: 'spoold_oldest_ready_timestamp_seconds{run_dir="/r"}', values: '0x100'}""",
    "SpooldNotLooking": """
      - {series: 'spoold_running{run_dir="/r"}', values: '1x100'}
      - {series: 'spoold_last_look_timestamp_seconds{run_dir="/r"}', values: '0x100'}""",
    "SpooldDeadConsumerHoldsBatches": """
      - {series: 'spoold_consumer_up{run_dir="/r",consumer="t"}', values: '0x100'}
      - {series: 'spoold_consumer_batches{run_dir="/r",consumer="t"}', values: '2x100'}""",
    "SpooldNobodyClaims": """
      - {series: 'spoold_oldest_batch_timestamp_seconds{run_dir="/r",directory="pending"}',
         values: '-4000x100'}""",
    "SpooldRejecting": """
      - {series: 'spoold_set_aside_environments{run_dir="/r"}', values: '0+2x100'}""",
    "SpooldDiskFilling": """
      - {series: 'spoold_disk_free_bytes{run_dir="/r"}', values: '9000000000-100000000x100'}""",
}
QUIET = """
      - {series: 'spoold_running{run_dir="/r"}', values: '1x100'}
      - {series: 'spoold_updated_timestamp_seconds{run_dir="/r"}', values: '0+60x100'}
      - {series: 'spoold_last_look_timestamp_seconds{run_dir="/r"}', values: '0+60x100'}
      - {series: 'spoold_reason{run_dir="/r",reason="linger",severity="wait"}', values: '1x100'}
      - {series: 'spoold_consumer_up{run_dir="/r",consumer="t"}', values: '1x100'}
      - {series: 'spoold_consumer_batches{run_dir="/r",consumer="t"}', values: '2x100'}
      - {series: 'spoold_set_aside_environments{run_dir="/r"}', values: '3x100'}
      - {series: 'spoold_batches{run_dir="/r",directory="rejected"}', values: '1x100'}
      - {series: 'spoold_disk_free_bytes{run_dir="/r"}', values: '9000000000x100'}"""


def test_every_example_alert_fires_on_its_fault_and_on_nothing_else(tmp_path: Path) -> None:
    needs(shutil.which("promtool"), "promtool (Debian: prometheus)")
    assert set(ALERTS) == {
        line.split()[-1] for line in RULES.read_text().splitlines() if "- alert:" in line
    }
    tests = []
    for wanted, series in {**ALERTS, "": QUIET}.items():
        expressions = [
            f'      - {{expr: \'count(ALERTS{{alertname="{name}",alertstate="firing"}})\', '
            f"eval_time: 90m, exp_samples: [{{labels: '{{}}', value: 1}}]}}"
            if name == wanted
            else f'      - {{expr: \'count(ALERTS{{alertname="{name}",alertstate="firing"}})\', '
            "eval_time: 90m}"
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
