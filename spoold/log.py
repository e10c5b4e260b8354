"""Formats of log lines: for people, for machines, for journald.

A record is an event: a constant message, facts as fields.

    logger.info("published", extra={"fields": {"batch": …, "samples": 64}})

    2026-11-29 20:00:00 INFO published batch=000000042-n64-w7.7-5f3c9a1b2c3d samples=64
    {"time": "2026-11-29T20:00:00.123Z", "level": "info", "event": "published", "batch": …}

Lower layers log with the standard library alone; only the command line calls `setup`. An event is
one line whatever its fields hold; a traceback follows on lines of its own, or as a field in JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Final

__all__ = ["JournalFormatter", "JsonFormatter", "TextFormatter", "lend_to", "setup"]

_PRIORITIES: Final = (
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
)


class TextFormatter(logging.Formatter):
    """`2026-11-29 20:00:00 INFO published batch=… samples=64`, in local time."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the event in one line, then the traceback if there is one."""
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        return "\n".join([f"{at} {record.levelname} {_event(record)}", *_traceback(record)])


class JournalFormatter(logging.Formatter):
    """`<6>published batch=… samples=64`: journald knows the time and reads the priority."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the event in one line; each line of a traceback carries the priority too."""
        priority = next((number for level, number in _PRIORITIES if record.levelno >= level), 7)
        return "\n".join(f"<{priority}>{line}" for line in [_event(record), *_traceback(record)])


class JsonFormatter(logging.Formatter):
    """A JSON object a line: time (UTC), level, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the event as one line of ASCII JSON; a field never hides time, level or event."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        facts: dict[str, object] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        for key, value in _fields(record).items():
            facts.setdefault(key, value)
        if traceback := _traceback(record):
            facts.setdefault("traceback", "\n".join(traceback))
        return json.dumps(facts, default=str)


def setup(level: str, log_format: str, *, journal: bool = False) -> None:
    """Send spoold's own events of at least `level` to standard error; calling again replaces it.

    With `journal`, text lines are written for journald. Other libraries' loggers stay as they are.
    """
    formatter: logging.Formatter = JournalFormatter() if journal else TextFormatter()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else formatter)
    logger = logging.getLogger("spoold")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())


def lend_to(*names: str) -> None:
    """Let the errors of other libraries' loggers, and no more, come out as spoold's events do."""
    for name in names:
        logger = logging.getLogger(name)
        logger.handlers[:] = logging.getLogger("spoold").handlers
        logger.propagate = False
        logger.setLevel(logging.ERROR)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _event(record: logging.LogRecord) -> str:
    words = [record.getMessage(), *(f"{k}={_value(v)}" for k, v in _fields(record).items())]
    return " ".join(words).replace("\n", "\\n")


def _value(value: object) -> str:
    """Show a field so that it stays one word: quoted, escaped, wherever it is not plain."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    quoted = not text or " " in text or '"' in text or "=" in text or not text.isprintable()
    return json.dumps(text, ensure_ascii=not text.isprintable()) if quoted else text


def _traceback(record: logging.LogRecord) -> list[str]:
    if not record.exc_info or record.exc_info[0] is None:
        return []
    return logging.Formatter().formatException(record.exc_info).splitlines()
