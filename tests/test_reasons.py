"""What went wrong, induced on the real daemon one after the other: the same sentence everywhere."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spoold import fs
from spoold.daemon.conditions import Conditions
from spoold.daemon.outage import Outage
from spoold.errors import SourceSchemaError, SpoolLocked
from spoold.layout import RunDir
from spoold.reasons import REASONS, SEVERE, Urgency, say
from spoold.spool import health, setup, shelves
from tests.support.batches import tree
from tests.support.commands import spoold
from tests.support.daemons import Clock, Running, mv, running, start
from tests.support.rollouts import Rollouts, make_rollouts

ROOT = Path(__file__).parent.parent


@pytest.fixture
def rollouts(tmp_path: Path) -> Iterator[Rollouts]:
    made = make_rollouts(tmp_path / "rollout.db")
    yield made
    made.close()


class Stage:
    """A daemon whose wall clock begins an hour ago, and what is said of it everywhere."""

    def __init__(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        caplog: pytest.LogCaptureFixture,
        **settings: object,
    ) -> None:
        self.capsys, self.caplog = capsys, caplog
        caplog.set_level(logging.DEBUG, "spoold")
        self.clock = Clock()
        self.jump = 0.0
        began = time.time() - 3600
        (tmp_path / "metrics").mkdir()
        self.it: Running = start(
            tmp_path,
            self.clock,
            wall=lambda: began + self.clock.now + self.jump,
            metrics_dir=tmp_path / "metrics",
            batch_size=1,
            **settings,
        )
        self.metrics = tmp_path / "metrics"
        # Within the two minutes after which a silent daemon is noticed.
        self.clock.now += 3600 - 1000

    def status(self) -> str:
        """What a person sees, in one line."""
        ran = spoold(self.capsys, "status", self.it.run.root)
        assert all(len(line) <= 80 or " " not in line[11:] for line in ran.out.splitlines()[1:])
        return " ".join(ran.out.split())

    def severe(self) -> bool:
        return spoold(self.capsys, "status", self.it.run.root, "--check").code == 75

    def gauge(self, code: str) -> float:
        (file,) = self.metrics.glob("*.prom")
        found = re.search(
            rf'^spoold_reason{{.*reason="{code}",.*}} (.*)$', file.read_text(), re.MULTILINE
        )
        assert found is not None
        assert f'sentence="{REASONS[code].sentence}"' in found[0]
        return float(found[1])

    def sees(self, code: str, detail: str, remedy: str = "") -> None:
        """Assert that a reason is said in the same words by status, log and metrics."""
        self.it.go(3.0)
        self.it.go(3.0)
        shown = self.status()
        sentence = say(code)
        label = ("attention", "notice", "waits for")[REASONS[code].urgency]
        assert re.search(rf"{label} {code}: {re.escape(sentence)}", shown), shown
        assert detail in shown
        assert (remedy or REASONS[code].remedy) in shown
        assert self.severe() == (code in SEVERE)
        assert self.gauge(code) == 1
        first, *others = self.it.daemon.conditions.reasons()
        told, _, also = self.it.daemon.report.sentence.partition("; also: ")
        assert told == first.words
        assert also == "; ".join(REASONS[each.code].sentence for each in others)
        assert code in {first.code} | {each.code for each in others}
        if code in SEVERE:
            assert first.code == code
        fields = [record.fields for record in self.caplog.records if record.message == "waiting"]
        said = [each for each in fields if each["reason"] == code]
        assert all(each["what"].startswith(sentence) for each in said)
        assert any(each["what"] in shown and each["remedy"] in shown for each in said)

    def sees_no_more(self, code: str) -> None:
        self.it.go(30.0)
        self.it.go(6.0)
        assert f" {code}: " not in self.status()
        assert self.gauge(code) == 0


@pytest.fixture
def stage(
    tmp_path: Path,
    rollouts: Rollouts,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Stage]:
    rollouts.register(1)  # a job, with nothing to deliver yet
    made = Stage(tmp_path, capsys, caplog, requeue_seconds=100)
    yield made
    made.it.kill()


def complete(rollouts: Rollouts, count: int = 1) -> None:
    for one in rollouts.register(count, group=""):
        rollouts.complete(one)


def test_a_database_that_is_gone(stage: Stage, tmp_path: Path, rollouts: Rollouts) -> None:
    complete(rollouts)
    stage.it.go()
    rollouts.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    os.rename(tmp_path / "rollout.db", tmp_path / "away.db")
    stage.sees("source-unavailable", "rollout.db", "spoold")
    os.rename(tmp_path / "away.db", tmp_path / "rollout.db")
    stage.sees_no_more("source-unavailable")


def test_a_database_that_is_locked(stage: Stage, tmp_path: Path, rollouts: Rollouts) -> None:
    complete(rollouts)
    rollouts.db.execute("PRAGMA journal_mode = delete")
    rollouts.db.execute("BEGIN EXCLUSIVE")
    stage.sees("source-unavailable", "locked")
    rollouts.db.execute("ROLLBACK")
    stage.sees_no_more("source-unavailable")


def test_a_database_of_a_wrong_schema_ends_the_daemon_and_status_still_says_why(
    stage: Stage, tmp_path: Path, rollouts: Rollouts
) -> None:
    rollouts.db.execute("ALTER TABLE session_steps RENAME COLUMN reward TO prize")
    with pytest.raises(SourceSchemaError) as caught:
        stage.it.go()
    stage.it.daemon.failed(caught.value)
    stage.it.daemon.stop()
    stage.it.kill()
    shown = stage.status()
    assert f"attention source-schema: {say('source-schema')}: " in shown
    assert "table session_steps has no column reward" in shown
    assert "attention daemon-gone: no daemon delivers here: it ended by an error" in shown
    assert stage.severe()
    assert stage.gauge("source-schema") == 1


def test_a_full_disk(stage: Stage, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.it.go()
    complete(rollouts)

    def full(path: str, _: object) -> None:
        raise fs.failed("write", path, OSError(errno.ENOSPC, "full"))

    with monkeypatch.context() as patch:
        patch.setattr(fs, "write_new", full)
        stage.sees("disk-space", "no space left on device", "free some space")
    stage.sees_no_more("disk-space")


def test_a_disk_below_its_mark(
    tmp_path: Path,
    rollouts: Rollouts,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(tmp_path, capsys, caplog, min_free_bytes=1 << 40)
    monkeypatch.setattr(fs, "free_bytes", lambda _: 1 << 30)
    complete(rollouts)
    stage.sees("disk-space", "fewer than")
    monkeypatch.setattr(fs, "free_bytes", lambda _: 1 << 41)
    stage.sees_no_more("disk-space")
    stage.it.kill()


def test_a_disk_so_full_that_the_daemon_cannot_say_so(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.it.go()
    monkeypatch.setattr(fs, "free_bytes", lambda _: 4096)
    assert f"attention disk-space: {say('disk-space')}: 4096 bytes" in stage.status()
    assert stage.severe()


def test_a_run_directory_that_became_read_only(
    stage: Stage, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.it.go()
    monkeypatch.setattr(fs, "is_read_only", lambda _: True)
    shown = stage.status()
    assert f"attention read-only: {say('read-only')}: {stage.it.run.root}" in shown
    assert REASONS["read-only"].remedy in shown
    assert stage.severe()


def test_a_trainer_that_died_with_batches_in_flight(stage: Stage, rollouts: Rollouts) -> None:
    complete(rollouts, 2)
    stage.it.go()
    for name in tree(stage.it.run, "pending"):
        mv(stage.it.run, name, "inflight/trainer-0")
    stage.sees("consumer-gone", "trainer-0 holds 2 batches")
    assert "trainer-0 gone 2 batches, 2 samples" in stage.status()
    stage.it.go(100.0)
    stage.sees_no_more("consumer-gone")
    assert len(tree(stage.it.run, "pending")) == 2


def test_a_second_daemon_is_told_who_runs_and_status_shows_the_same(stage: Stage) -> None:
    stage.it.go()
    assert setup.lock_run(stage.it.run) is None
    error = setup.locked_by(stage.it.run)
    assert isinstance(error, SpoolLocked)
    who = f"pid {os.getpid()} on {os.uname().nodename}"
    assert f"{stage.it.run.root} is locked: {who} runs a daemon on it" in str(error)
    assert f"daemon running, {who}" in stage.status()
    setup.leave_visit(stage.it.run)
    stage.sees("second-daemon", f"{who} was turned away")
    stage.it.go(550.0)
    stage.it.go(60.0)
    stage.sees_no_more("second-daemon")
    setup.leave_visit(stage.it.run)
    stage.sees("second-daemon", f"{who} was turned away")
    assert "visit.json" not in stage.status()
    stage.it.kill()
    stage.it = start(
        Path(stage.it.run.root).parent,
        stage.clock,
        wall=stage.it.daemon.wall,
        metrics_dir=stage.metrics,
    )
    stage.sees_no_more("second-daemon")


def test_a_group_with_a_straggler(
    tmp_path: Path,
    rollouts: Rollouts,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage(tmp_path, capsys, caplog, group_size=3)
    ids = rollouts.register(3, group="g-7")
    for one in ids[:2]:
        rollouts.complete(one)
    stage.it.go(1.0)
    stage.sees("groups-incomplete", f"g-7 has 2 of 3, waits for {ids[2]}")
    rollouts.complete(ids[2])
    stage.sees_no_more("groups-incomplete")
    stage.it.kill()


def test_everything_stale(stage: Stage, rollouts: Rollouts) -> None:
    complete(rollouts, 4)
    stage.it.go()
    first, *others = tree(stage.it.run, "pending")
    for name in others:
        mv(stage.it.run, name, "acked/stale")
    stage.sees("all-stale", "the last 3 batches")
    mv(stage.it.run, first, "acked")
    stage.sees_no_more("all-stale")


def test_inotify_used_up(stage: Stage) -> None:
    stage.it.daemon.hear(("inotify cannot start: too many open files", "raise the limits"))
    stage.sees("hints-off", "too many open files", "raise the limits")
    stage.it.daemon.hear(None)
    stage.sees_no_more("hints-off")


@pytest.mark.parametrize(
    ("jump", "words"), [(7200.0, "forward by 7200 s"), (-90.0, "back by 90 s")]
)
def test_a_clock_that_was_set(stage: Stage, jump: float, words: str) -> None:
    stage.it.go()
    stage.jump = jump
    stage.sees("clock-jump", words)
    stage.it.go(700.0)
    stage.sees_no_more("clock-jump")


def test_a_corrupt_batch(stage: Stage, rollouts: Rollouts) -> None:
    complete(rollouts)
    stage.it.go()
    (name,) = tree(stage.it.run, "pending")
    stage.it.kill()
    path = Path(stage.it.run.root, name)
    path.write_bytes(path.read_bytes().replace(b"4", b"5", 1))
    stage.it = start(
        Path(stage.it.run.root).parent,
        stage.clock,
        wall=stage.it.daemon.wall,
        metrics_dir=stage.metrics,
    )
    stage.sees("corrupt-batch", "1 batch in rejected/corrupt/")
    shutil.rmtree(f"{stage.it.run.rejected}/corrupt")
    stage.sees_no_more("corrupt-batch")


def test_files_moved_and_copied_by_hand(stage: Stage, rollouts: Rollouts) -> None:
    complete(rollouts, 2)
    stage.it.go()
    first, second = tree(stage.it.run, "pending")
    mv(stage.it.run, first, "inflight")
    stage.sees("claimed-by-hand", "1 batch in inflight/")
    Path(stage.it.run.pending, "notes.txt").touch()
    stage.sees("unknown-files", "1, such as pending/notes.txt")
    shutil.copy(f"{stage.it.run.root}/{second}", f"{stage.it.run.inflight}/")
    stage.sees("duplicates", "1 batch in rejected/duplicate/")
    for name in tree(stage.it.run, "inflight"):
        mv(stage.it.run, name, "acked")
    Path(stage.it.run.pending, "notes.txt").unlink()
    shutil.rmtree(f"{stage.it.run.rejected}/duplicate")
    for code in ("claimed-by-hand", "unknown-files", "duplicates"):
        stage.sees_no_more(code)


def test_a_daemon_that_says_nothing_any_more(stage: Stage) -> None:
    stage.it.go(2.0)
    at = stage.it.daemon.wall() + health.SILENT_SECONDS
    quiet = health.take(stage.it.run, now=at - 3)
    assert not quiet.severe
    silent = health.take(stage.it.run, now=at + 3)
    assert [reason.code for reason in silent.severe] == ["daemon-silent"]


def test_an_idle_daemon_says_twice_a_minute_that_it_lives(stage: Stage) -> None:
    stage.it.go(2.0)
    before = stage.it.daemon.wall()
    for _ in range(40):
        stage.it.go(2.0)
    status = stage.it.status
    assert status.updated >= before + 60


def test_the_first_look_at_a_large_database_shows_how_far_it_is(
    stage: Stage, rollouts: Rollouts
) -> None:
    with rollouts.together():
        rollouts.db.executemany(
            "INSERT INTO job_environments (job_id, env_id, env_name, env_params)"
            " VALUES ('job-1', ?, 'math', '{}')",
            ((f"e{number}",) for number in range(50_000)),
        )
    stage.it.daemon.step()
    stage.it.daemon.step()
    stage.clock.now += 1.1
    stage.it.daemon.step()
    shown = stage.status()
    assert re.search(r"first-look: .*: [246]0,000 of 50,001 environments", shown), shown
    stage.sees_no_more("first-look")


def test_batches_that_move_while_the_daemon_starts_are_waited_for(
    tmp_path: Path,
    rollouts: Rollouts,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    complete(rollouts)
    with running(tmp_path) as before:
        before.go()
    complete(rollouts)
    # Each pass finds that a folder changed while it went through them.
    monkeypatch.setattr(shelves, "_is_unchanged", lambda _: False)
    stage = Stage(tmp_path, capsys, caplog)
    stage.it.daemon.step()
    stage.clock.now += 1.1
    stage.it.daemon.step()
    assert f"waits for batches-move: {say('batches-move')}" in stage.status()
    assert len(tree(before.run)) == 1
    stage.sees_no_more("batches-move")
    assert len(tree(before.run)) == 2
    stage.it.kill()


def test_a_daemon_that_lost_its_lock_says_why_and_leaves_the_report_to_the_next(
    stage: Stage, rollouts: Rollouts
) -> None:
    stage.it.go()
    before = Path(stage.it.run.status_json).read_bytes()
    os.unlink(stage.it.run.lock)
    complete(rollouts)
    with pytest.raises(SpoolLocked) as caught:
        stage.it.go(3.0)
    stage.it.daemon.failed(caught.value)
    stage.it.daemon.stop()
    said = [r.fields for r in stage.caplog.records if r.message == "waiting"]
    assert said[-1]["what"].startswith(say("lock-lost"))
    assert Path(stage.it.run.status_json).read_bytes() == before
    assert "attention daemon-gone: no daemon delivers here: it was killed" in stage.status()


def test_the_most_urgent_comes_first_and_then_the_oldest() -> None:
    conditions = Conditions(iter(range(10)).__next__)
    codes = ("linger", "source-empty", "hints-off", "clock-jump", "disk-space", "bug")
    for code in codes:
        conditions.begin(code, now=0.0)
    urgent_first = (*codes[4:], *codes[2:4], *codes[:2])
    assert tuple(reason.code for reason in conditions.reasons()) == urgent_first


def test_of_writes_that_fail_for_one_cause_after_the_other_the_last_one_is_shown() -> None:
    conditions = Conditions(lambda: 0.0)
    outage = Outage(conditions)

    def codes() -> list[str]:
        return [reason.code for reason in conditions.reasons()]

    def fail(code: int) -> None:
        outage.failed(fs.failed("write", "x", OSError(code, "")), batches=0, now=0.0)

    for code, wanted in (
        (errno.ENOSPC, "disk-space"),
        (errno.EIO, "write-failed"),
        (errno.EROFS, "read-only"),
        (errno.EDQUOT, "disk-space"),
    ):
        fail(code)
        assert codes() == [wanted]
    # The mark of free bytes holds the same reason, and ends it.
    outage.hand_over("disk-space")
    outage.over(1.0)
    assert codes() == ["disk-space"]


@pytest.mark.parametrize(
    ("code", "at_first", "later"),
    [
        ("source-unavailable", "WARNING", "WARNING"),
        ("hints-off", "INFO", "WARNING"),
        ("waiting-for-environments", "DEBUG", "INFO"),
    ],
)
def test_what_lasts_for_a_minute_is_logged_again_and_louder(
    caplog: pytest.LogCaptureFixture, code: str, at_first: str, later: str
) -> None:
    caplog.set_level(logging.DEBUG, "spoold")
    conditions = Conditions(lambda: 0.0)
    for now in range(0, 601, 5):
        conditions.begin(code, f"{now}", now=float(now))
    conditions.end(code, now=605.0)
    said = [(r.levelname, r.message, r.fields["for"]) for r in caplog.records]
    assert said == [
        (at_first, "waiting", 0),
        *((later, "waiting", after) for after in (60, 120, 240, 480)),
        ("INFO", "waiting over", 605),
    ]


def test_every_code_that_is_used_is_in_the_table_and_every_sentence_is_one() -> None:
    used = set()
    for path in (ROOT / "spoold").rglob("*.py"):
        text = path.read_text()
        used |= set(re.findall(r'(?:begin|Reason\.of)\(\s*"([a-z-]+)"', text))
    assert used
    assert used <= set(REASONS)
    sentences = [kind.sentence for kind in REASONS.values()]
    assert len(set(sentences)) == len(sentences)
    for code, kind in REASONS.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code)
        assert not kind.sentence.endswith(".")
        assert kind.remedy or kind.urgency is Urgency.WAIT


def test_a_dead_daemon_leaves_it_to_status_to_say_who_else_is_dead(
    stage: Stage, rollouts: Rollouts
) -> None:
    complete(rollouts)
    stage.it.go()
    (name,) = tree(stage.it.run, "pending")
    mv(stage.it.run, name, "inflight/trainer-0")
    stage.it.kill()
    found = health.take(RunDir(stage.it.run.root), now=stage.it.daemon.wall())
    assert [reason.code for reason in found.reasons] == ["daemon-gone", "consumer-gone"]
    assert "trainer-0 holds 1 batch" in found.reasons[1].text


# What operators grep for and alert on: changed on purpose only.
SENTENCES = {
    "daemon-gone": "no daemon delivers here",
    "daemon-silent": "the daemon holds its lock and has said nothing for minutes",
    "source-unavailable": "the rollout database cannot be read",
    "source-schema": "the database is no rollout database that spoold knows",
    "source-replaced": "the rollout database is not the one that was delivered from",
    "settings": "the settings do not fit the run directory or the database",
    "lock-lost": "the daemon stopped because its lock file is not its own any more",
    "bug": "the daemon ended by a bug",
    "disk-space": "too little disk space is left",
    "read-only": "the run directory is on a file system that is mounted read-only",
    "write-failed": "a write to the run directory failed",
    "requeue-failed": "the batches of a dead consumer cannot be requeued",
    "unreadable": "something in the run directory cannot be read",
    "bad-rows": "reading stopped: too many rows in a row were of no use",
    "corrupt-batch": "batches did not fit their digest and were set aside",
    "all-stale": "trainers pass everything over as stale",
    "status-unusable": "what the daemon said of itself cannot be used",
    "held": "the daemon holds delivery back",
    "consumer-gone": "a consumer is dead and holds batches",
    "backpressure": "trainers are slower than rollouts: pending/ is full",
    "batches-move": "batches are moved while the daemon looks for what was delivered",
    "first-look": "the first look at the whole database is under way",
    "waiting-for-environments": "rollouts are under way and not complete yet",
    "groups-incomplete": "groups are not whole yet",
    "missing-rows": "environments are marked as finished and have no usable row",
    "null-rewards": "environments are complete but for their reward",
    "linger": "complete environments are about to be published",
    "source-empty": "no environment is running, and all that completed is delivered or set aside",
    "claimed-by-hand": "batches lie in inflight/ itself, claimed by hand or by a script",
    "duplicates": "second files of batches were set aside",
    "unknown-files": "files that spoold does not know are left alone",
    "many-notes": "unusually many environments were set aside",
    "hints-off": "the kernel gives no hints of changes: they are found by timed looks",
    "open-transaction": (
        "a transaction in the database has been open for long: what it wrote cannot be seen yet"
    ),
    "missing-index": "the database lacks an index that would help",
    "clock-jump": "the system clock was set",
    "second-daemon": "a second daemon was started on this run directory",
    "metrics-unwritten": "the numbers for Prometheus cannot be written",
}


def test_the_sentences_are_these_to_the_letter() -> None:
    assert {code: kind.sentence for code, kind in REASONS.items()} == SENTENCES
