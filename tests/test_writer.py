"""The process that writes batches beside the daemon: the same files, the same errors, one lock."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spoold import fs
from spoold.codec import build_batch, name_batch
from spoold.daemon import delivery
from spoold.daemon.collecting import Collected
from spoold.errors import LockLost, SpoolWriteError
from spoold.layout import RunDir
from spoold.model import Sample
from spoold.spool import health, setup, writer
from spoold.spool.publish import Numbers
from spoold.spool.writer import MAX_BYTES, Writer
from tests.support.batches import sample_line, tree
from tests.support.beside import beside_at_once, wait_for
from tests.support.daemons import Running, environments, mv, running, start
from tests.support.rollouts import Rollouts, make_rollouts

BAD = [
    b"[" + b" " * 80 + b"]x",
    b'[{"role": "user", "content": "' + b"x" * 80 + b'"},]',
    b'[{"role": "user", "content": "' + b"x" * 80 + b"\xff" + b'"}]',
    b'[{"role": "user"}], [{"content": "' + b"x" * 80 + b'"}]',
    b'[{"role": "user"}], "reward": 9, "x": [{"content": "' + b"x" * 80 + b'"}]',
    b'["' + b"x" * 80 + b'"]',
    b'{"role": "user", "content": "' + b"x" * 80 + b'"}',
]


def sample_of(environment: int, messages: bytes = b'[{"role":"user"}]') -> Sample:
    before, key, after = sample_line(environment).partition(b'"messages":')
    at = len(before + key)
    line = before + key + messages + after[after.index(b"]") + 1 :]
    return sample_with(line, environment, (at, at + len(messages)))


def sample_with(line: bytes, environment: int = 1, messages: tuple[int, int] = (0, 0)) -> Sample:
    return Sample(environment, f"env-{environment}", 96, 7, (line,), len(line), messages)


@pytest.fixture
def rollouts(tmp_path: Path) -> Iterator[Rollouts]:
    made = make_rollouts(tmp_path / "rollout.db")
    yield made
    made.close()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return setup.make_run(str(tmp_path / "run"))


@pytest.fixture
def lock(run: RunDir) -> Iterator[fs.Lock]:
    lock = fs.Lock(run.lock)
    assert lock.acquire()
    yield lock
    lock.release()


@contextmanager
def ready(run: RunDir, lock: fs.Lock) -> Iterator[Writer]:
    beside = Writer(run, lock)
    try:
        wait_for(beside)
        yield beside
    finally:
        beside.close()


def pid_of(beside: Writer) -> int:
    return beside._process.pid


def kill(beside: Writer, number: int) -> None:
    os.kill(pid_of(beside), number)


def fits(beside: Writer, samples: list[Sample]) -> bool:
    return beside.fits(len(samples), sum(one.size_bytes for one in samples))


def begin(beside: Writer, seq: int, *samples: Sample, sound: int = 99) -> None:
    beside.load(samples)
    beside.begin(name_batch(seq, samples, ""), sound=sound)


def write(beside: Writer, seq: int, *samples: Sample, sound: int = 99) -> str | None:
    begin(beside, seq, *samples, sound=sound)
    written = beside.finish()
    return None if written is None else written.name.file_name


class TestOneBatch:
    def test_it_is_the_file_that_the_daemon_would_write(self, run: RunDir, lock: fs.Lock) -> None:
        with ready(run, lock) as beside:
            for seq, samples in enumerate(([sample_of(1), sample_of(2)], [sample_of(3)]), 1):
                name, pieces = build_batch(seq, samples)
                assert write(beside, seq, *samples) == name.file_name
                assert Path(run.pending, name.file_name).read_bytes() == b"".join(pieces)
        assert os.stat(run.pending + "/" + name.file_name).st_mode & 0o7777 == 0o640
        assert tree(run, ".spoold/tmp") == []

    @pytest.mark.parametrize("messages", BAD)
    def test_messages_that_nobody_can_read_keep_all_of_it_back(
        self, run: RunDir, lock: fs.Lock, messages: bytes
    ) -> None:
        good = b'[{"role": "user", "content": "q"}]'
        with ready(run, lock) as beside:
            samples = [sample_of(1, good), sample_of(2, messages)]
            assert write(beside, 1, *samples, sound=0) is None
            assert tree(run) == []
            assert write(beside, 1, sample_of(1, good), sound=0) is not None

    def test_while_it_is_written_the_next_one_is_laid_beside_it(
        self, run: RunDir, lock: fs.Lock
    ) -> None:
        with ready(run, lock) as beside:
            for seq in range(1, 4):
                expected, pieces = build_batch(seq, [sample_of(seq)])
                kill(beside, signal.SIGSTOP)
                begin(beside, seq, sample_of(seq))
                for other in (7, 8):  # the last one counts
                    beside.load([sample_of(other), sample_of(9)])
                kill(beside, signal.SIGCONT)
                written = beside.finish()
                assert written is not None
                assert written.name == expected
                assert Path(run.pending, expected.file_name).read_bytes() == b"".join(pieces)
            both = [sample_of(8), sample_of(9)]
            beside.begin(name_batch(4, both, ""), sound=0)
            written = beside.finish()
            assert written is not None
            assert written.name == build_batch(4, both)[0]

    def test_it_fits_up_to_sixteen_mebibytes(self, run: RunDir, lock: fs.Lock) -> None:
        size = MAX_BYTES - sample_of(1).size_bytes
        full = [sample_with(b"x" * size), sample_of(2)]
        with ready(run, lock) as beside:
            assert fits(beside, full)
            assert not fits(beside, [*full, sample_with(b"\n", 3)])
            name = write(beside, 1, *full)
            assert name is not None
            assert os.stat(f"{run.pending}/{name}").st_size == MAX_BYTES

    def test_many_small_samples_fit_with_all_their_places(self, run: RunDir, lock: fs.Lock) -> None:
        line = b'{"messages":[{}]}\n'
        samples = [sample_with(line, 1, (12, 16))] * writer._MAX_SAMPLES
        with ready(run, lock) as beside:
            assert fits(beside, samples)
            assert not fits(beside, [*samples, samples[0]])
            name = write(beside, 1, *samples, sound=0)
            assert name is not None
            assert os.stat(f"{run.pending}/{name}").st_size == len(line) * len(samples)


@pytest.mark.parametrize("bad", range(5))
def test_what_is_looked_into_here_is_looked_into_sample_by_sample(bad: int) -> None:
    messages = b'[{"role": "user", "content": "q"}]'
    samples = [sample_of(n, BAD[1] if n == bad else messages) for n in range(5)]
    assert not Collected(samples=samples).check(lambda: False)
    turns = iter([False] * bad + [True])
    part = Collected(samples=samples)
    assert part.check(lambda: next(turns))
    assert part.sound == bad


class TestFailures:
    def test_a_write_that_fails_is_told_with_its_errno_and_remedy(
        self, run: RunDir, lock: fs.Lock
    ) -> None:
        with ready(run, lock) as beside:
            os.rmdir(run.pending)
            with pytest.raises(SpoolWriteError, match="cannot publish 000000001") as caught:
                write(beside, 1, sample_of(1))
            assert caught.value.hint
            assert not caught.value.state_unknown
            assert tree(run, ".spoold/tmp") == []
            os.mkdir(run.pending)
            assert write(beside, 1, sample_of(1)) is not None

    def test_a_lock_file_that_was_replaced_stops_it(self, run: RunDir, lock: fs.Lock) -> None:
        with ready(run, lock) as beside:
            os.unlink(run.lock)
            Path(run.lock).touch()
            with pytest.raises(LockLost):
                write(beside, 1, sample_of(1))
            assert tree(run) == []

    def test_of_one_that_was_killed_nobody_knows_how_far_it_came(
        self, run: RunDir, lock: fs.Lock
    ) -> None:
        with ready(run, lock) as beside:
            kill(beside, signal.SIGSTOP)
            begin(beside, 1, sample_of(1))
            kill(beside, signal.SIGKILL)
            with pytest.raises(SpoolWriteError, match="ended \\(exit code -9\\)") as caught:
                beside.finish()
            assert caught.value.state_unknown
            assert not beside.is_ready()


class TestItsLife:
    def test_what_stops_a_daemon_does_not_stop_it_in_the_middle(
        self, run: RunDir, lock: fs.Lock
    ) -> None:
        with ready(run, lock) as beside:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                kill(beside, number)
            assert write(beside, 1, sample_of(1)) is not None
            pid = pid_of(beside)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    def test_closing_waits_for_the_batch_that_is_being_written(
        self, run: RunDir, lock: fs.Lock
    ) -> None:
        with ready(run, lock) as beside:
            begin(beside, 1, sample_of(1))
        assert len(tree(run)) == 1

    def test_after_a_kill_of_the_daemon_the_lock_is_held_until_the_batch_is_whole(
        self, run: RunDir
    ) -> None:
        script = """if True:
            import os, signal, sys
            from spoold import fs
            from spoold.codec import name_batch
            from spoold.layout import RunDir
            from spoold.spool.writer import Writer
            from tests.support.beside import wait_for
            from tests.test_writer import begin, pid_of, sample_of
            run = RunDir(sys.argv[1])
            lock = fs.Lock(run.lock)
            assert lock.acquire()
            beside = Writer(run, lock)
            wait_for(beside)
            os.kill(pid_of(beside), signal.SIGSTOP)
            begin(beside, 1, sample_of(1))
            print(pid_of(beside), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """
        daemon = subprocess.Popen(
            [sys.executable, "-c", script, run.root], stdout=subprocess.PIPE, text=True
        )
        assert daemon.stdout is not None
        pid = int(daemon.stdout.readline())
        daemon.wait()
        daemon.stdout.close()
        assert fs.lock_is_held(run.lock)
        assert tree(run) == []
        left = f"a process that pid {daemon.pid} on {os.uname().nodename} left behind"
        said = str(setup.locked_by(run))
        assert said.startswith(f"{run.root} is locked: {left} holds its lock; it ends when")
        assert said.endswith(f"`fuser {run.lock}` finds it")
        assert health.take(run, now=0.0).holder == left
        ends = os.pidfd_open(pid)
        os.kill(pid, signal.SIGCONT)
        signal_ended(ends)
        assert len(tree(run)) == 1
        assert not fs.lock_is_held(run.lock)


class TestItsStart:
    def test_it_finds_its_modules_where_the_daemon_does_and_no_others(
        self, tmp_path: Path, run: RunDir
    ) -> None:
        stray = tmp_path / "stray"
        stray.mkdir()
        for name in ("json", "spoold", "mmap"):
            (stray / f"{name}.py").write_text("raise SystemExit('a stray module')\n")
        script = """if True:
            import sys
            sys.path.insert(0, sys.argv[2])  # known to nobody else
            from spoold import fs
            from spoold.layout import RunDir
            from spoold.spool.writer import Writer
            from tests.support.beside import wait_for
            from tests.test_writer import sample_of, write
            run = RunDir(sys.argv[1])
            lock = fs.Lock(run.lock)
            assert lock.acquire()
            beside = Writer(run, lock)
            wait_for(beside)
            print(write(beside, 1, sample_of(1)))
            beside.close()
        """
        ran = subprocess.run(
            [sys.executable, "-P", "-c", script, run.root, str(Path(__file__).parent.parent)],
            cwd=stray,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (ran.stderr, tree(run)) == ("", [f"pending/{ran.stdout.strip()}"])

    def test_what_comes_before_it_is_deaf_leaves_no_traceback_and_does_not_end_it(
        self, run: RunDir, lock: fs.Lock, capfd: pytest.CaptureFixture[str]
    ) -> None:
        beside = Writer(run, lock)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            kill(beside, number)
        wait_for(beside)
        assert write(beside, 1, sample_of(1)) is not None
        beside.close()
        assert capfd.readouterr() == ("", "")
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()

    def test_one_that_has_not_started_up_is_not_waited_for(
        self, run: RunDir, lock: fs.Lock
    ) -> None:
        beside = Writer(run, lock)
        kill(beside, signal.SIGSTOP)
        beside.close()
        assert beside.exit_code() == -signal.SIGKILL

    def test_it_needs_no_more_of_python_than_the_oldest_builds_have(
        self, run: RunDir, lock: fs.Lock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Those of uv and conda, made for a C library of before 2018.
        monkeypatch.delattr(os, "memfd_create", raising=False)
        with ready(run, lock) as beside:
            assert write(beside, 1, sample_of(1)) is not None

    @pytest.mark.parametrize("missing", ["_memory_file", "os.eventfd", "subprocess.Popen"])
    def test_where_it_cannot_be_had_nothing_stays_open(
        self, run: RunDir, lock: fs.Lock, monkeypatch: pytest.MonkeyPatch, missing: str
    ) -> None:
        def none_left(*_: object, **__: object) -> None:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(f"spoold.spool.writer.{missing}", none_left)
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            with pytest.raises(OSError, match="Too many"):
                Writer(run, lock)
        assert os.listdir("/proc/self/fd") == before

    def test_it_comes_and_goes_without_a_trace(self, run: RunDir, lock: fs.Lock) -> None:
        before = os.listdir("/proc/self/fd")
        for seq in range(1, 4):
            with ready(run, lock) as beside:
                write(beside, seq, sample_of(seq))
                pid = pid_of(beside)
            assert not os.path.exists(f"/proc/{pid}")
        assert os.listdir("/proc/self/fd") == before

    def test_it_works_where_a_thousand_descriptors_are_open(
        self, run: RunDir, lock: fs.Lock
    ) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY and hard < 2048:
            pytest.skip("no more than a thousand descriptors may be open here")
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
        opened: list[int] = []
        try:
            while not opened or opened[-1] < 1100:
                opened.append(os.open(os.devnull, os.O_RDONLY))
            with ready(run, lock) as beside:
                assert not beside.has_answered()
                assert write(beside, 1, sample_of(1)) is not None
        finally:
            for fd in opened:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def signal_ended(pidfd: int) -> None:
    """Wait until a process that is nobody's child here has ended."""
    import select

    assert select.select([pidfd], [], [], 60)[0]
    os.close(pidfd)


def register(rollouts: Rollouts, count: int, bad: dict[int, bytes]) -> list[int]:
    ids = rollouts.register(count)
    with rollouts.together():
        for one in ids:
            if one in bad:
                rollouts.complete(one, messages=bad[one])
            else:
                rollouts.complete(one)
    return ids


def files(it: Running) -> dict[str, bytes]:
    return {name: Path(it.run.root, name).read_bytes() for name in tree(it.run)}


def notes(it: Running) -> list[str]:
    return sorted(name for name in os.listdir(it.run.rejected) if name.startswith("env-"))


class TestABacklog:
    @pytest.mark.parametrize("bad", [{}, {3: BAD[1]}, {7: BAD[0], 8: BAD[4], 20: BAD[2]}])
    @pytest.mark.parametrize("is_busy", [False, True])
    def test_two_processes_make_the_files_and_notes_that_one_makes(
        self,
        tmp_path: Path,
        rollouts: Rollouts,
        monkeypatch: pytest.MonkeyPatch,
        bad: dict[int, bytes],
        is_busy: bool,
    ) -> None:
        ids = register(rollouts, 24, bad)
        monkeypatch.setattr(delivery, "BACKLOG_BATCHES", 10_000)
        with running(tmp_path, batch_size=2, run_dir=tmp_path / "alone") as it:
            it.go()
            alone = files(it), notes(it)
            assert environments(it.run) == [one for one in ids if one not in bad]
        asked = beside_at_once(monkeypatch)
        if is_busy:
            monkeypatch.setattr(Writer, "has_answered", lambda self: False)
        with running(tmp_path, batch_size=2, run_dir=tmp_path / "beside") as it:
            it.go()
            assert (files(it), notes(it)) == alone
        assert len(asked) > (8 if not bad else 2)

    def test_a_batch_that_the_other_process_cannot_write_is_tried_again(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ids = register(rollouts, 12, {})
        beside_at_once(monkeypatch)
        it = start(tmp_path, batch_size=2)
        finish = Writer.finish
        failures = [SpoolWriteError("no room", errno=28)]

        def full(self: Writer) -> object:
            if failures:
                assert finish(self) is not None
                for name in tree(it.run):
                    os.unlink(f"{it.run.root}/{name}")
                raise failures.pop()
            return finish(self)

        monkeypatch.setattr(Writer, "finish", full)
        it.go()
        it.go(60.0)
        assert sorted(set(environments(it.run))) == ids[-len(environments(it.run)) :]
        it.daemon.stop()
        it.kill()

    def test_a_batch_counts_though_the_next_one_cannot_begin(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ids = register(rollouts, 12, {})
        beside_at_once(monkeypatch)
        numbers = iter([1, 2, 3])
        next_number = Numbers.next

        def three(self: Numbers) -> int:
            if next(numbers, None) is None:
                raise SpoolWriteError("no room", errno=28)
            return next_number(self)

        with running(tmp_path, batch_size=2) as it:
            monkeypatch.setattr(Numbers, "next", three)
            it.go()
            assert environments(it.run) == ids[:6]
            assert it.daemon.inventory.delivered == 6
            monkeypatch.setattr(Numbers, "next", next_number)
            it.go(60.0)
            assert environments(it.run) == ids

    def test_a_batch_for_each_that_is_taken_is_no_backlog(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ids = register(rollouts, 30, {})
        asked = beside_at_once(monkeypatch)
        monkeypatch.setattr(delivery, "BACKLOG_BATCHES", 3)
        with running(tmp_path, batch_size=1, max_pending_batches=2) as it:
            it.go()
            for _ in range(8):
                for name in tree(it.run, "pending")[:2]:
                    mv(it.run, name, "acked")
                it.go()
            assert environments(it.run) == ids[:18]
            assert not asked

    def test_without_a_second_process_it_goes_on_alone(
        self,
        tmp_path: Path,
        rollouts: Rollouts,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def none_left(*_: object, **__: object) -> None:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        ids = register(rollouts, 12, {})
        monkeypatch.setattr(writer.subprocess, "Popen", none_left)
        with running(tmp_path, batch_size=1) as it:
            it.go()
            assert environments(it.run) == ids
        said = [r for r in caplog.records if r.message.startswith("no process to write batches")]
        assert len(said) == 1

    def test_where_the_second_process_ends_before_its_first_batch_it_goes_on_alone(
        self,
        tmp_path: Path,
        rollouts: Rollouts,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def kill_at_once(self: Writer) -> bool:
            if self.exit_code() is None:
                kill(self, signal.SIGKILL)
                self._process.wait()
            return False

        ids = register(rollouts, 12, {})
        monkeypatch.setattr(Writer, "is_ready", kill_at_once)
        with running(tmp_path, batch_size=1) as it:
            it.go()
            assert environments(it.run) == ids
        said = [r for r in caplog.records if r.message.startswith("no process to write batches")]
        assert [r.fields for r in said] == [{"error": "it ended (exit code -9)"}]  # type: ignore[attr-defined]

    def test_the_process_is_there_only_while_there_is_a_backlog(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = beside_at_once(monkeypatch)
        register(rollouts, 12, {})
        with running(tmp_path, batch_size=2) as it:
            it.go()
            assert asked
            assert it.daemon.delivery._writer is None
            asked.clear()
            # One at a time is no backlog.
            for _ in range(3):
                register(rollouts, 2, {})
                it.go()
            assert not asked

    def test_a_kill_of_the_process_ends_the_daemon_and_the_next_one_goes_on(
        self, tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ids = register(rollouts, 12, {})
        asked = beside_at_once(monkeypatch)
        it = start(tmp_path, batch_size=2)
        begin = Writer.begin

        def and_kill(self: Writer, *args: object, **facts: object) -> None:
            begin(self, *args, **facts)  # type: ignore[arg-type]
            if len(asked) == 3:
                kill(self, signal.SIGKILL)

        monkeypatch.setattr(Writer, "begin", and_kill)
        with pytest.raises(SpoolWriteError) as caught:
            it.go()
        assert caught.value.exit_code == 74
        it.daemon.stop()
        it.kill()
        monkeypatch.setattr(Writer, "begin", begin)
        with running(tmp_path, batch_size=2) as it:
            it.go()
            assert environments(it.run) == ids
