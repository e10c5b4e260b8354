"""How many bad moments were tried is said at the end of a run, act by act."""

from __future__ import annotations

import signal
from collections import Counter

import pytest
from hypothesis import settings

from tests.support.chance import NEW

settings.register_profile("same draws each time", derandomize=not NEW)
settings.load_profile("same draws each time")


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tried: Counter[tuple[str, str]] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "tried" and report.when == "call":
                    what, act, count = value
                    tried[what, act] += count
    if not tried:
        return
    terminalreporter.section("bad moments tried")
    for what in dict.fromkeys(what for what, _ in tried):
        acts = {act: count for (of, act), count in tried.items() if of == what}
        terminalreporter.write_line(f"{sum(acts.values()):6,} {what}")
        for act, count in acts.items():
            terminalreporter.write_line(f"{count:13,} {act}")


@pytest.fixture(autouse=True, scope="session")
def usual_signals() -> None:
    """Let children hear SIGHUP and Ctrl-C also where whoever runs this ignores them (nohup)."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
