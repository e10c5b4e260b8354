"""`spoold top`: a run directory as it changes, on the whole screen, or line by line.

Changes nothing.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections import deque
from types import FrameType
from typing import TYPE_CHECKING, Final

import click

from spoold.cli import terminal
from spoold.cli.lines import all_reason_lines, daemon_lines, wrapped
from spoold.cli.words import age, counted, debug_option, printable, run_dir_argument
from spoold.errors import SpooldError
from spoold.layout import RunDir, State
from spoold.spool import health, overview
from spoold.spool.flow import Event, Flow
from spoold.spool.health import Health
from spoold.spool.overview import Count

if TYPE_CHECKING:
    import curses

__all__ = ["top"]

_MOST_EVENTS: Final = 200
_HEADER_EVERY: Final = 20
_WIDEST: Final = 120
_NARROWEST: Final = 30
_HEADER: Final = (
    "time      pending  inflight   acked  rejected  published/s  claimed/s  acked/s  oldest"
)


@click.command()
@run_dir_argument
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    metavar="SECONDS",
    help="Look this often; seldomer where a look takes long. [default: 1]",
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after N looks.")
@debug_option
def top(run_dir: str, interval: float, count: int | None) -> None:
    """Show what flows through each directory, as it happens. q or Ctrl-C ends it.

    Where standard output is no terminal it prints a line a look instead, and a line that begins
    with # for each event.
    """
    watched = _Watched(overview.open_run_dir(run_dir), interval, count)
    try:
        if terminal.is_terminal(sys.stdout) and terminal.is_terminal(sys.stdin):
            _on_screen(watched)
        else:
            _as_lines(watched)
    except KeyboardInterrupt:
        return  # it is how one ends it


class _Watched:
    """A run directory that is looked at again and again."""

    def __init__(self, run: RunDir, interval: float, count: int | None) -> None:
        self.run = run
        self.interval = interval
        self.left = count
        self.flow = Flow()
        self.events: deque[str] = deque(maxlen=_MOST_EVENTS)
        self.found: Health | None = None
        self.problem = ""
        self.due_at = 0.0
        self._codes: set[str] = set()

    @property
    def is_over(self) -> bool:
        """Whether it was looked at as often as was asked for."""
        return self.left == 0

    def look(self) -> list[str]:
        """Look once. Returns the new events, oldest first."""
        began = time.monotonic()
        at = time.time()
        try:
            found = health.take(self.run, now=at)
        except (SpooldError, OSError) as error:
            self.problem = str(error)
            new = []
        else:
            self.problem = ""
            new = [_words(event) for event in self.flow.update(found.overview, at=at, now=began)]
            new += self._reasons_changed(found, at)
            self.found = found
        self.events.extend(new)
        # Of a directory with very many files a look costs something: at most a tenth of the time.
        took = time.monotonic() - began
        self.due_at = began + max(self.interval, 10 * took)
        if self.left is not None:
            self.left -= 1
        return new

    def _reasons_changed(self, found: Health, at: float) -> list[str]:
        codes = {reason.code for reason in found.reasons}
        began, ended = sorted(codes - self._codes), sorted(self._codes - codes)
        first, self._codes = self.found is None, codes
        if first:
            return []
        clock = _clock(at)
        return [f"{clock}  begins: {code}" for code in began] + [
            f"{clock}  is over: {code}" for code in ended
        ]


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _words(event: Event) -> str:
    seq = event.batch_id.partition("-")[0]
    if not event.was:
        what = f"-> {event.now}"
    elif not event.now:
        what = f"{event.was} -> removed"
    else:
        what = f"{event.was} -> {event.now}"
    return f"{_clock(event.at)}  {seq}  {what}"


# --- lines ---------------------------------------------------------------------------------------


def _as_lines(watched: _Watched) -> None:
    looks = 0
    while True:
        new = watched.look()
        if looks % _HEADER_EVERY == 0:
            click.echo(_HEADER)
        for event in new:
            click.echo(f"# {event}")
        click.echo(_row(watched))
        sys.stdout.flush()
        looks += 1
        if watched.is_over:
            return
        time.sleep(max(0.0, watched.due_at - time.monotonic()))


def _row(watched: _Watched) -> str:
    now, found = time.time(), watched.found
    if watched.problem or found is None:
        return f"{_clock(now)}  {watched.problem}"
    held = [Count.of(found.overview.of(state)).batches for state in State]
    since = found.since[State.PENDING]
    published = watched.flow.rate(State.PENDING).into
    claimed, acked = watched.flow.rate(State.INFLIGHT).into, watched.flow.rate(State.ACKED).into
    return (
        f"{_clock(now)}  {held[0]:>7}  {held[1]:>8}  {held[2]:>6}  {held[3]:>8}"
        f"  {published:>11.1f}  {claimed:>9.1f}  {acked:>7.1f}"
        f"  {'-' if since is None else age(since, now):>6}"
    )


# --- the screen ----------------------------------------------------------------------------------


def _on_screen(watched: _Watched) -> None:
    import curses
    import locale

    locale.setlocale(locale.LC_ALL, "")
    terminal.follow_resizing()
    try:
        curses.setupterm()
    except curses.error:
        _as_lines(watched)  # a terminal that nobody knows
        return
    _end_on_signals()
    try:
        curses.wrapper(_draw_until_quit, watched)
    except curses.error:
        if terminal.is_terminal(sys.stdin):
            raise
        # It went away: there is nothing to put back in order.


_ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _end_on_signals() -> None:
    """Let a signal unwind the stack, once: nothing disturbs putting the terminal in order."""

    def end(_number: int, _frame: FrameType | None) -> None:
        for number in _ENDINGS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in _ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup asked for that
            signal.signal(number, end)


def _draw_until_quit(screen: curses.window, watched: _Watched) -> None:
    import curses

    colours = _colours()
    with contextlib.suppress(curses.error):  # a terminal that cannot hide its cursor
        curses.curs_set(0)
    while True:
        if time.monotonic() >= watched.due_at:
            if watched.is_over:
                return
            watched.look()
        _draw(screen, watched, colours)
        screen.timeout(max(10, int(1000 * (watched.due_at - time.monotonic()))))
        key = screen.getch()
        if key in (ord("q"), ord("Q")):
            return
        if key == curses.ERR and not terminal.is_terminal(sys.stdin):
            return  # it went away, and would give no key at once, for ever
        if key == curses.KEY_RESIZE:
            curses.update_lines_cols()
            screen.clear()  # what a terminal leaves of its lines then, curses does not know


def _colours() -> dict[str, int]:
    """Return attributes by the label of a line."""
    import curses

    if not (terminal.shows_colours(sys.stdout) and curses.has_colors()):
        return {"attention": curses.A_BOLD}
    curses.use_default_colors()
    for number, colour in enumerate((curses.COLOR_RED, curses.COLOR_YELLOW, curses.COLOR_CYAN), 1):
        curses.init_pair(number, colour, -1)
    return {
        "attention": curses.color_pair(1) | curses.A_BOLD,
        "notice": curses.color_pair(2),
        "waits for": curses.color_pair(3),
    }


def _draw(screen: curses.window, watched: _Watched, colours: dict[str, int]) -> None:
    import curses

    height, width = screen.getmaxyx()
    screen.erase()
    lines = screen_lines(
        watched.found, watched, max(_NARROWEST, min(width, _WIDEST)) - 1, time.time()
    )
    for row, line in enumerate(lines[:height]):
        attribute = next((a for label, a in colours.items() if line.startswith(label)), 0)
        # RACE: the terminal may be smaller than when it was measured. The last cell stays free: to
        # write it would scroll the screen.
        with contextlib.suppress(curses.error):
            screen.addnstr(row, 0, line, max(0, width - 1), attribute)
    screen.refresh()


def screen_lines(found: Health | None, watched: _Watched, width: int, now: float) -> list[str]:
    """Return all lines of the screen, most urgent first, recent events last."""
    clock = _clock(now)
    title = printable(watched.run.root)[: max(0, width - len(clock) - 11)]
    lines = [f"{title}  {clock}  q quits"]
    if watched.problem:
        lines += wrapped("attention", watched.problem, width)
    if found is None:
        return lines
    severe, others = all_reason_lines(found, now, width)
    lines += [*severe, *daemon_lines(found, now, width)]
    lines += ["", "             batches    samples    in/s   out/s  oldest"]
    for state in State:
        count, rate = Count.of(found.overview.of(state)), watched.flow.rate(state)
        since = found.since.get(state)
        oldest = "" if since is None else age(since, now)
        lines.append(
            f"{state.value:<11}{count.batches:>9,}{count.samples:>11,}"
            f"{rate.into:>8.1f}{rate.out:>8.1f}  {oldest}"
        )
    if found.running and found.said is not None:
        source = found.said.source
        lag = "" if source.oldest_ready is None else f", oldest {age(source.oldest_ready, now)}"
        lines.append(f"source     {source.running:,} running, {source.ready:,} ready{lag}")
    for each in found.consumers:
        life = "alive" if each.alive else "gone"
        held = "" if each.since is None else f", {age(each.since, now)}"
        lines.append(
            f"  {each.name:<14} {life:<6} holds {counted(each.count.batches, 'batch')}{held}"
        )
    lines += [*others, "", "recent"]
    lines += [f"  {event}" for event in reversed(watched.events)]
    return lines
