"""Log lines: one line an event, for people, for machines, for journald."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from spoold import log

LOGGER = logging.getLogger("spoold.test")


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    root = logging.getLogger("spoold")
    before = (root.handlers[:], root.level, root.propagate)
    yield
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def record(message: str, level: int = logging.INFO, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("spoold.test", level, "", 0, message, None, None)
    made.fields = fields
    made.created, made.msecs = 1796000000.25, 250.0
    return made


def test_text_is_time_level_event_and_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    line = log.TextFormatter().format(record("published", batch="000000042-n64", samples=64))
    assert line[20:] == "INFO published batch=000000042-n64 samples=64"
    assert line[4] + line[7] + line[10] + line[13] + line[16] == "-- ::"


def test_a_field_that_is_not_plain_is_quoted_and_stays_in_its_line() -> None:
    line = log.TextFormatter().format(
        record("x", spaces="a b", empty="", newline="a\nb\x1b", bytes="\udcff", number=0.1234567891)
    )
    assert line.endswith(
        r'x spaces="a b" empty="" newline="a\nb\u001b" bytes="\udcff" number=0.123457'
    )
    assert "\n" not in line


def test_json_is_one_ascii_object_whose_fields_hide_nothing() -> None:
    line = log.JsonFormatter().format(record("published", event="fake", why="a\nü", seconds=1.5))
    assert line.isascii()
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2026-11-30T00:53:20.250Z",
        "level": "info",
        "event": "published",
        "why": "a\nü",
        "seconds": 1.5,
    }


@pytest.mark.parametrize(
    ("level", "priority"),
    [(logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3)],
)
def test_journald_gets_a_priority_and_no_time(level: int, priority: int) -> None:
    line = log.JournalFormatter().format(record("published", level, samples=64))
    assert line == f"<{priority}>published samples=64"


def test_a_traceback_follows_in_text_carries_the_priority_and_is_a_field_in_json() -> None:
    made = record("failed", logging.ERROR)
    try:
        int("why")
    except ValueError as error:
        made.exc_info = (type(error), error, error.__traceback__)
    assert log.TextFormatter().format(made).splitlines()[-1].startswith("ValueError: invalid")
    journal = log.JournalFormatter().format(made).splitlines()
    assert len(journal) > 2
    assert all(line.startswith("<3>") for line in journal)
    assert json.loads(log.JsonFormatter().format(made))["traceback"].endswith("'why'")


def test_setup_writes_own_events_of_the_level_to_stderr_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.setup("debug", "text")
    log.setup("warning", "json")
    LOGGER.info("too low")
    LOGGER.warning("seen", extra={"fields": {"n": 1}})
    logging.getLogger("other").info("not ours")
    out, err = capsys.readouterr()
    assert out == ""
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["seen"]


def test_json_wins_over_the_journal(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("info", "json", journal=True)
    LOGGER.info("x")
    assert json.loads(capsys.readouterr().err)["event"] == "x"


def test_a_condition_is_logged_when_it_begins_at_growing_intervals_and_when_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from spoold.daemon.conditions import Conditions

    conditions = Conditions(wall=lambda: 0.0)
    with caplog.at_level(logging.INFO, "spoold"):
        for now in range(1000):
            conditions.begin("disk-space", f"{now} bytes are free", now=float(now))
        conditions.end("disk-space", now=1000.0)
        conditions.end("disk-space", now=1001.0)
    said = [(r.levelname, r.message, r.fields["for"]) for r in caplog.records]  # type: ignore[attr-defined]
    begun = [("WARNING", "waiting", seconds) for seconds in (0, 60, 120, 240, 480, 960)]
    assert said == [*begun, ("INFO", "waiting over", 1000)]
