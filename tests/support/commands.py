"""The command line, called in this process or in one of its own."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from spoold.cli import main


class Ran(NamedTuple):
    """What a command did: its exit code, its data, its words."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def spoold(capsys: pytest.CaptureFixture[str], *args: object) -> Ran:
    """Call the command in this process; what it did to logging is undone."""
    capsys.readouterr()
    logger = logging.getLogger("spoold")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    try:
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
    assert isinstance(ended.value.code, int)
    return Ran(ended.value.code, *capsys.readouterr())


def spoold_process(*args: object, environ: Mapping[str, str] | None = None) -> Ran:
    """Call the command in a process of its own, without anybody's settings."""
    inherited = {name: value for name, value in os.environ.items() if name[:7] != "SPOOLD_"}
    ran = subprocess.run(
        [sys.executable, "-m", "spoold", *map(str, args)],
        env=inherited | dict(environ or {}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)
