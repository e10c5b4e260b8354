"""The course of the demo: who starts when, who is killed when, and the account at the end."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from spoold import fs
from spoold.demo import database
from spoold.demo.account import account, batches
from spoold.demo.children import (
    Child,
    daemon_command,
    interruptible,
    trainer_command,
    writer_command,
)
from spoold.demo.screen import Progress, Screen, Snapshot, command, snapshot
from spoold.errors import EX_BAD_SPOOL, ConfigError, SpooldError
from spoold.layout import BatchName, RunDir

__all__ = ["Folder", "choose", "play"]

ENVIRONMENTS: Final = 1_200
BATCH_SIZE: Final = 32
WRITER_SECONDS: Final = 8.5
STEP_SECONDS: Final = 0.2
SEED: Final = 7
TICK_SECONDS: Final = 0.2
PATIENCE_SECONDS: Final = 60.0
INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class Folder:
    """The paths in the demo's folder."""

    root: str

    def path(self, name: str) -> str:
        """Return the path of a file in it."""
        return os.path.join(self.root, name)

    @property
    def database(self) -> str:
        """The rollout database."""
        return self.path("rollouts.db")

    @property
    def run_dir(self) -> str:
        """The run directory."""
        return self.path("run")

    @property
    def checkpoint(self) -> str:
        """What the trainer has learned."""
        return self.path("checkpoint.json")


def choose(folder: str | None) -> Folder:
    """Make the folder of this demo; None: the first free one of spoold-demo, spoold-demo-2, ….

    Raises ConfigError when something lies in the given one: nobody's files are touched.
    """
    if folder is None:
        names = itertools.chain(["spoold-demo"], map("spoold-demo-{}".format, itertools.count(2)))
        folder = next(name for name in names if not os.path.lexists(name))
    elif os.path.lexists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise ConfigError(
            f"{folder} is there already, and the demo removes nothing",
            hint="name a folder that does not exist, or none at all",
        )
    fs.make_dirs(os.path.abspath(folder))
    return Folder(folder)


def play(name: str | None) -> int:
    """Play the demo; its exit code. See `spoold.demo.run`."""
    folder = choose(name)
    screen = Screen()
    with interruptible():
        try:
            with contextlib.ExitStack() as stack:
                return _Play(folder, screen, stack).run()
        except KeyboardInterrupt:
            screen.say(f"Stopped: no process is left, all files are in {folder.root}.")
            return INTERRUPTED
        finally:
            screen.end_line()


class _Play:
    """One demo under way. Every process is on `stack` from the moment it starts."""

    def __init__(self, folder: Folder, screen: Screen, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._screen = screen
        self._stack = stack
        self._running: list[Child] = []
        self._progress = Progress()
        # A setting that is meant for another daemon must not steer this one.
        self._environ = {k: v for k, v in os.environ.items() if not k.startswith("SPOOLD_")}

    def run(self) -> int:
        """Play all scenes."""
        self._set_up()
        self._kill_and_restart_daemon()
        in_order = self._kill_and_restart_trainer()
        self._drain()
        return self._settle_accounts(in_order)

    def _set_up(self) -> None:
        folder, say = self._folder, self._screen.say
        say(
            "Rollouts go from a database through a spool to a trainer, each once, whoever gets"
            f" killed. This takes 15 seconds, and all of it lies in {folder.root}:"
        )
        database.create(folder.database, environments=ENVIRONMENTS, seed=SEED)
        self._db = self._stack.enter_context(contextlib.closing(database.connect(folder.database)))
        say(
            f"rollouts.db: a rollout database. {ENVIRONMENTS:,} environments are registered,"
            " none has run yet.",
            mark="  1. ",
        )
        self._writer = self._start(
            "writer",
            writer_command(folder.database, f"--seconds={WRITER_SECONDS}", f"--seed={SEED}"),
        )
        say(
            f"the writer (pid {self._writer.pid}) runs them. Rows come in bulk, environments end"
            " in any order; some run twice, some never end, one writes broken JSON.",
            mark="  2. ",
        )
        self._daemon = self._start_daemon()
        say(
            f"spoold run (pid {self._daemon.pid}) writes what is completed to run/pending/, in"
            f" batches of {BATCH_SIZE}.",
            mark="  3. ",
        )
        self._trainer = self._start_trainer()
        say(
            f"the trainer (pid {self._trainer.pid}) moves a batch to run/inflight/trainer-0/,"
            " trains on it, and moves it to run/acked/.",
            mark="  4. ",
        )
        self._screen.show("")
        self._screen.head()
        self._began = time.monotonic()

    def _kill_and_restart_daemon(self) -> None:
        self._until("the first batches to be acked", lambda now: now.acked >= 5, after=4.0)
        self._gone(self._daemon)
        self._screen.say(
            f"kill -9 {self._daemon.pid}: the daemon is gone. The trainer goes on with what lies"
            " in pending/.",
            mark="> ",
        )
        self._until("a second and a half", lambda _: True, after=1.5)
        self._daemon = self._start_daemon()
        self._screen.say(
            f"the daemon starts again (pid {self._daemon.pid}). It has no checkpoint file: it looks"
            " where the batches lie, and goes on with a number that was never used.",
            mark="> ",
        )

    def _kill_and_restart_trainer(self) -> bool:
        """Return whether the trainer got its own batch back before any other."""
        seen = self._look()[1].batches
        self._until("the daemon to go on", lambda now: now.batches >= seen + 4, after=2.5)
        self._gone(self._trainer)
        in_hand = self._in_hand()
        self._screen.say(
            f"kill -9 {self._trainer.pid}: the trainer is gone."
            + (f" It had batch {in_hand.seq:09d} in hand." if in_hand else ""),
            mark="> ",
        )
        self._until("a second", lambda _: True, after=1.0)
        step, _ = self._read_checkpoint()
        self._trainer = self._start_trainer()
        self._screen.say(
            f"the trainer starts again (pid {self._trainer.pid}), from its checkpoint of step"
            f" {step}." + (" It gets its own batch first, renamed to .try02." if in_hand else ""),
            mark="> ",
        )
        self._until("the trainer to go on", lambda _: self._read_checkpoint()[0] > step, after=0.5)
        if in_hand is None:
            return True
        return any(
            batch.name.id == in_hand.id
            and batch.name.attempt == in_hand.attempt + 1
            and batch.place == f"acked/step-{step + 1:09d}"
            for batch in batches(self._folder.run_dir)
        )

    def _drain(self) -> None:
        def is_over(now: Snapshot) -> bool:
            if self._running_writer() or now.pending or now.inflight:
                return False
            completed = len(database.completed(self._db))
            trained = len(self._read_checkpoint()[1])
            return now.acked_samples + now.notes >= completed and trained >= now.acked_samples

        self._until("the last batches to be acked", is_over)
        self._running.clear()
        self._trainer.stop()
        code = self._daemon.stop()
        if code != 0:
            raise self._unexpected(self._daemon, code)
        self._screen.say(
            "the writer is done. The trainer was stopped; the daemon got SIGTERM and"
            " ended with exit code 0.",
            mark="> ",
        )

    def _settle_accounts(self, in_order: bool) -> int:
        _, trained = self._read_checkpoint()
        completed = database.completed(self._db)
        result = account(self._folder.run_dir, completed, trained=trained)
        self._screen.show("", "The account, by environments:")
        self._screen.account(result, len(trained))
        is_clean = result.is_clean and in_order and result.acked == result.delivered
        if not in_order:
            self._screen.say("After its restart the trainer did not get its own batch first.")
        self._screen.show(
            "",
            "It is clean: nothing lost, nothing doubled."
            if is_clean
            else "IT IS NOT CLEAN. Please keep the folder and report it.",
        )
        self._show_around()
        return 0 if is_clean else EX_BAD_SPOOL

    def _show_around(self) -> None:
        name, run = command(), shlex.quote(self._folder.run_dir)
        first = batches(self._folder.run_dir)[:1]
        self._screen.show(
            "",
            "Look around:",
            f"  ls {run}/*",
            f"  {name} status {run}",
            f"  {name} ls {run}",
            *(f"  {name} show {run} {batch.name.seq:09d}" for batch in first),
            f"  less {shlex.quote(self._folder.path('daemon.log'))}",
            f"Done with it? rm -r {shlex.quote(self._folder.root)}",
        )

    def _until(
        self, what: str, condition: Callable[[Snapshot], bool], *, after: float = 0.0
    ) -> None:
        """Show progress until `condition` holds, for at least `after` seconds.

        Raises SpooldError when a process ends that should not, or when it takes too long.
        """
        start = time.monotonic()
        while True:
            completed, now = self._look()
            seconds = time.monotonic() - self._began
            self._screen.progress(seconds, self._progress.line(seconds, completed, now))
            waited = time.monotonic() - start
            if waited >= after and condition(now):
                return
            self._check_children()
            if waited > after + PATIENCE_SECONDS:
                raise SpooldError(
                    f"waited {PATIENCE_SECONDS:.0f} s for {what}",
                    hint=f"see `{command()} status {shlex.quote(self._folder.run_dir)}` and the"
                    f" logs in {self._folder.root}",
                )
            time.sleep(TICK_SECONDS)

    def _look(self) -> tuple[int, Snapshot]:
        return len(database.completed(self._db)), snapshot(self._folder.run_dir)

    def _check_children(self) -> None:
        for child in self._running:
            code = child.exit_code()
            if code is not None and not (child is self._writer and code == 0):
                raise self._unexpected(child, code)

    def _unexpected(self, child: Child, code: int) -> SpooldError:
        return SpooldError(
            f"the {child.name} ended with exit code {code}; its last words:\n{child.last_words()}",
            hint=f"all of them are in {child.log}",
        )

    def _running_writer(self) -> bool:
        return self._writer.exit_code() is None

    def _start(self, name: str, argv: list[str]) -> Child:
        log = self._folder.path(f"{name}.log")
        child = Child(name, argv, log=log, environ=self._environ)
        self._stack.callback(child.stop)
        self._running.append(child)
        return child

    def _start_daemon(self) -> Child:
        options = (f"--batch-size={BATCH_SIZE}", "--linger=0.3", "--min-free-bytes=64MiB")
        argv = daemon_command(self._folder.database, self._folder.run_dir, *options)
        return self._start("daemon", argv)

    def _start_trainer(self) -> Child:
        pace = f"--seconds-per-step={STEP_SECONDS}"
        argv = trainer_command(self._folder.run_dir, self._folder.checkpoint, pace)
        return self._start("trainer", argv)

    def _gone(self, child: Child) -> None:
        self._running.remove(child)
        child.kill()

    def _in_hand(self) -> BatchName | None:
        folder = f"{RunDir(self._folder.run_dir).inflight}/trainer-0"
        names = map(BatchName.parse, sorted(os.listdir(folder)))
        return next((name for name in names if name is not None), None)

    def _read_checkpoint(self) -> tuple[int, list[str]]:
        try:
            with open(self._folder.checkpoint, encoding="utf-8") as file:
                saved = json.load(file)
        except FileNotFoundError:
            return 0, []
        return saved["step"], saved["trained"]
