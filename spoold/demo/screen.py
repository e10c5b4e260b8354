"""What the demo prints: sentences, one table of progress, the account. Within 80 columns, ASCII."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from spoold.demo.account import Account
from spoold.layout import NoteName, RunDir, State
from spoold.spool import moves

__all__ = ["Progress", "Screen", "Snapshot", "command", "snapshot"]

WIDTH: Final = 80
_HEAD: Final = (
    "   time  completed  pending  inflight  acked  rejected  acked/s  oldest pending\n"
    "             envs  batches   batches  batches    notes     envs       (seconds)"
)
_LINE: Final = "{:>6.1f}s  {:>9}  {:>7}  {:>8}  {:>5}  {:>8}  {:>7.0f}  {:>14.1f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What lies where now, by names. `acked_samples` is the sum over their names."""

    pending: int = 0
    inflight: int = 0
    acked: int = 0
    notes: int = 0
    acked_samples: int = 0
    oldest_pending_seconds: float = 0.0

    @property
    def batches(self) -> int:
        """How many batches there are."""
        return self.pending + self.inflight + self.acked


def snapshot(run_dir: str) -> Snapshot:
    """List the directories. Files that move meanwhile may be counted twice or not at all."""
    run = RunDir(run_dir)
    try:
        found = {state: moves.find(run, state) for state in State}
        notes = sum(NoteName.parse(name) is not None for name in os.listdir(run.rejected))
    except FileNotFoundError:
        return Snapshot()  # the daemon has not made them yet
    oldest = 0.0
    if found[State.PENDING]:
        try:
            written = os.stat(found[State.PENDING][0].path(run)).st_mtime
            oldest = max(0.0, time.time() - written)
        except FileNotFoundError:
            pass  # claimed since it was listed
    return Snapshot(
        pending=len(found[State.PENDING]),
        inflight=len(found[State.INFLIGHT]),
        acked=len(found[State.ACKED]),
        notes=notes,
        acked_samples=sum(batch.name.samples for batch in found[State.ACKED]),
        oldest_pending_seconds=oldest,
    )


class Progress:
    """Turns snapshots into lines: remembers two seconds of them for the throughput."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque([(0.0, 0)])

    def line(self, seconds: float, completed: int, now: Snapshot) -> str:
        """Return the table's line for a snapshot that was taken at `seconds`."""
        while len(self._seen) > 1 and self._seen[1][0] <= seconds - 2.0:
            self._seen.popleft()
        then, samples = self._seen[0]
        rate = max(0, now.acked_samples - samples) / max(seconds - then, 0.1)
        self._seen.append((seconds, now.acked_samples))
        return _LINE.format(
            seconds,
            completed,
            now.pending,
            now.inflight,
            now.acked,
            now.notes,
            rate,
            now.oldest_pending_seconds,
        )


class Screen:
    """Standard output. On a terminal the last line of the table is written over and over."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._is_line_open = False
        self._last_line_at = float("-inf")

    def say(self, text: str, *, mark: str = "") -> None:
        """Print a paragraph, filled to the width of a terminal, its lines set off by `mark`."""
        hang = " " * len(mark)
        self._print(textwrap.fill(mark + text, WIDTH - 1, subsequent_indent=hang))

    def show(self, *lines: str) -> None:
        """Print lines as they are."""
        self._print("\n".join(lines))

    def head(self) -> None:
        """Print the table's head."""
        self._print(_HEAD)

    def progress(self, seconds: float, line: str) -> None:
        """Print a line of the table: over the last one on a terminal, else one a second."""
        if self._is_terminal:
            sys.stdout.write(f"\r{line}\x1b[K")
            self._is_line_open = True
        elif seconds >= self._last_line_at + 1.0:
            self._last_line_at = seconds
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def end_line(self) -> None:
        """End the line that is written over and over, if there is one."""
        if self._is_line_open:
            sys.stdout.write("\n")
            self._is_line_open = False

    def account(self, result: Account, trained: int) -> None:
        """Print the account."""
        rows = [
            ("completed, by a plain SQL query", len(result.completed), ""),
            ("delivered, by the batch files", len(result.delivered), f"{result.batches} batches"),
            ("set aside with a note in rejected/", len(result.set_aside), _few(result.set_aside)),
            ("acked, by the batch files", len(result.acked), ""),
            ("trained on, by the checkpoint", trained, ""),
            ("doubled", len(result.doubled), _few(result.doubled)),
            ("lost", len(result.lost), _few(result.lost)),
        ]
        if result.unasked:
            rows.append(("delivered but not completed", len(result.unasked), _few(result.unasked)))
        if result.mistrained:
            rows.append(("trained on twice, or never", len(result.mistrained), ""))
        if result.damaged:
            rows.append(("files that fail their digest", len(result.damaged), ""))
        self.show(*(f"  {what:<36}{count:>6,}   {more}".rstrip() for what, count, more in rows))

    def _print(self, text: str) -> None:
        self.end_line()
        print(text, flush=True)


def _few(environments: frozenset[int]) -> str:
    if not environments:
        return ""
    few = [str(number) for number in sorted(environments)[:3]]
    return f"ids {', '.join(few)}{', ...' if len(environments) > 3 else ''}"


def command() -> str:
    """Return how the reader can call spoold, as they just did."""
    called = sys.argv[0]
    if os.path.basename(called) != "spoold":
        return f"{os.path.basename(sys.executable)} -m spoold"
    return "spoold" if shutil.which("spoold") == called else shlex.quote(called)
