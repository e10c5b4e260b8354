"""The process that writes beside the daemon, without waiting for a backlog or its start."""

from __future__ import annotations

import pytest

from spoold.daemon import delivery
from spoold.spool import writer
from spoold.spool.writer import Writer


def wait_for(beside: Writer) -> None:
    beside._is_ready = bool(writer._end(beside._process.stdout).readline())
    assert beside.is_ready()


def beside_at_once(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let the second process begin with the second batch; returns how often it was asked."""
    asked: list[bool] = []
    ready, begin = Writer.is_ready, Writer.begin

    def started(self: Writer) -> bool:
        if not self._is_ready:
            wait_for(self)
        return ready(self)

    def counted(self: Writer, *args: object, **facts: object) -> None:
        asked.append(True)
        begin(self, *args, **facts)  # type: ignore[arg-type]

    monkeypatch.setattr(delivery, "BACKLOG_BATCHES", 2)
    monkeypatch.setattr(Writer, "is_ready", started)
    monkeypatch.setattr(Writer, "begin", counted)
    return asked
