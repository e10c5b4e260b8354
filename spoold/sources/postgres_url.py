"""URLs of PostgreSQL servers: what libpq is told, and what people may be shown.

`postgresql://user@host:port/database?option=value`, as libpq reads it: TLS (`sslmode`,
`sslrootcert`, …), several hosts, `?service=name`, PGPASSFILE and the other variables of libpq work
as in psql. The other spellings of the ecosystem mean the same: `postgres://`, SQLAlchemy's
`postgresql+psycopg://`, Tortoise's `asyncpg://` and `psycopg://`.
"""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import quote

from psycopg import Error
from psycopg.conninfo import conninfo_to_dict

from spoold.errors import ConfigError

__all__ = ["ConnectionFacts", "facts_of", "hide", "without_secrets"]

ConnectionFacts = dict[str, Any]

_DEFAULTS: Final[ConnectionFacts] = {
    "fallback_application_name": "spoold",
    "connect_timeout": "10",
    # A server that is gone without a word: what was sent and what is waited for both end.
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
}
_SECRET: Final = ("password", "sslpassword")


def facts_of(url: str) -> ConnectionFacts:
    """Return what libpq is to be told. Raises ConfigError for what it would not understand.

    Never repeats the URL: a password may be in it.
    """
    rest = url.partition("://")[2]
    try:
        facts = conninfo_to_dict(f"postgresql://{rest}")
    except Error as error:
        raise ConfigError(
            f"the postgresql:// URL cannot be understood{_which_option(str(error))}",
            hint="it is postgresql://user@host:port/database?option=value; signs such as @ / : %"
            " within a part are written as %40 %2F %3A %25",
        ) from None  # what libpq says of it may have the password in it
    return _DEFAULTS | facts


def _which_option(said: str) -> str:
    found = re.search(r'invalid (?:URI query parameter|connection option)[^"]*"(\w+)"', said)
    return f": there is no option {found[1]}" if found else ""


def without_secrets(facts: ConnectionFacts) -> str:
    """Return the URL that names the database: user, host, port, database or service, no more."""

    def part(name: str) -> str:
        return quote(str(facts.get(name) or ""), safe="")

    user = f"{part('user')}@" if part("user") else ""
    hosts = str(facts.get("host") or facts.get("hostaddr") or "").split(",")
    ports = str(facts.get("port") or "").split(",")
    ports *= len(hosts) if len(ports) == 1 else 1
    where = ",".join(
        _host(host) + (f":{port}" if port else "") for host, port in zip(hosts, ports, strict=False)
    )
    database = f"/{part('dbname')}" if part("dbname") else ""
    service = f"?service={part('service')}" if part("service") else ""
    return f"postgresql://{user}{where}{database}{service}"


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else quote(host, safe="")


def hide(text: str, facts: ConnectionFacts) -> str:
    """Return a text of libpq or the server without the passwords that we know."""
    for name in _SECRET:
        secret = str(facts.get(name) or "")
        if secret:
            text = text.replace(secret, "***")
    return text
