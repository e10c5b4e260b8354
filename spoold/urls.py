"""What a URL keeps secret: not shown, and not taken where others see it. Pure."""

from __future__ import annotations

import re
from typing import Final

from spoold.errors import ConfigError

__all__ = ["masked", "refused_as_option"]

_PASSWORD: Final = re.compile(r"(?i)://[^/?#@:]*:[^?#@]+@|[?&](?:ssl)?password=[^&#]")


def refused_as_option(url: str) -> list[ConfigError]:
    """Return why a URL must not be an option of a command: there everybody on the host sees it."""
    if not _PASSWORD.search(url):
        return []
    what = "a password in --db can be seen by everybody on this host, with ps"
    hint = "use SPOOLD_DB, a file for --config, ~/.pgpass (PGPASSFILE), or postgresql://?service=…"
    return [ConfigError(what, hint=hint)]


def masked(url: str) -> str:
    """Hide what a URL keeps secret: its password, before the host or as an option."""
    url = re.sub(r"(://[^/?#@:]*:)[^?#]*@", r"\1***@", url)
    return re.sub(
        r"([?&][^=&]*(?:pass|secret|token|key)[^=&]*=)[^&#]*", r"\1***", url, flags=re.IGNORECASE
    )
