"""What PostgreSQL, libpq or a pooler says went wrong: in our words, with a way out.

Waiting may help against each of them: a server comes back, a password gets corrected, a role is
granted what it lacks. So each is a SourceUnavailable, tried again with growing pauses.
"""

from __future__ import annotations

import re
from typing import Final

from psycopg import Error
from psycopg import errors as pg

from spoold.errors import SourceUnavailable
from spoold.sources.postgres_url import ConnectionFacts, hide, without_secrets

__all__ = ["STATEMENT_SECONDS", "TimedOut", "changed_tables", "unavailable"]

STATEMENT_SECONDS: Final = 10
"""No statement may run for longer."""

_TRIES_AGAIN: Final = "spoold tries again by itself"
_SHOWN: Final = 300


class TimedOut(SourceUnavailable):
    """A statement took too long: ask for less at once."""


# While there is a connection the server gives a code (appendix A of its manual): the code itself,
# or its class.
_BY_CODE: Final = {
    "40001": (
        "the standby cancelled a query that stood in the way of what it replays",
        "set hot_standby_feedback = on there, or raise max_standby_streaming_delay",
    ),
    "40P01": (
        "the standby cancelled a query that stood in the way of what it replays",
        "set hot_standby_feedback = on there, or raise max_standby_streaming_delay",
    ),
    "55P03": (
        "a table is locked by another session",
        "it goes on when that one ends: a migration, a VACUUM FULL",
    ),
    "57P01": ("the server is being stopped, or an administrator ended this session", _TRIES_AGAIN),
    "57P02": ("the server ended all sessions, as one of its processes crashed", _TRIES_AGAIN),
    "57P03": ("the server is starting up or shutting down", _TRIES_AGAIN),
    "57P05": ("the server ended the session, as it was idle", _TRIES_AGAIN),
    "53300": (
        "the server has too many connections",
        "raise max_connections, or give this role a few of its own; spoold needs one",
    ),
    "53": ("the server is out of resources", "see its log; spoold tries again by itself"),
    "42501": (
        "the role may not read it",
        "GRANT SELECT ON job_environments, session_steps, and USAGE on their schema",
    ),
    "42": ("the tables are not what they were", "spoold looks at them anew"),
    "58": ("the server cannot read its files", "see its log"),
    "XX": (
        "the server found its data damaged, or has a bug",
        "see its log; amcheck and pg_dump tell more",
    ),
}

# Before that there are only words, in English where the server's lc_messages is.
_BY_WORDS: Final = (
    (
        r"password authentication failed|no password supplied|SCRAM|empty password",
        "the password is missing or wrong",
        "put it into ~/.pgpass (PGPASSFILE) or a service file, or into SPOOLD_DB",
    ),
    (
        r"no pg_hba\.conf entry|pg_hba\.conf rejects|authentication failed",
        "the server does not let this user in from here",
        "see pg_hba.conf of the server",
    ),
    (
        r'database "?[^"]*"? does not exist|no such database',
        "there is no such database",
        "is its name right? spoold waits for it",
    ),
    (
        r'role "[^"]*" does not exist|no such user',
        "there is no such role",
        "create it, or name another; spoold waits for it",
    ),
    (
        r"too many (?:clients|connections)|connection slots are reserved|no more connections",
        *_BY_CODE["53300"],
    ),
    (
        r"is starting up|is shutting down|recovery mode|not yet accepting|not accepting",
        *_BY_CODE["57P03"],
    ),
    (
        r"Connection refused|No such file or directory|No route to host|unreachable",
        "nobody listens there",
        "does the server run, and are host and port right? spoold tries again by itself",
    ),
    (
        r"could not translate host name|Name or service not known|resolve|name resolution",
        "the name of its host is not known",
        "is it right? spoold tries again by itself",
    ),
    (
        r"timeout expired|timed out|no answer",
        "it does not answer",
        "is it reachable from here? spoold tries again by itself",
    ),
    (
        r"service file|definition of service",
        "the service is not defined",
        "put it into ~/.pg_service.conf, or set PGSERVICEFILE",
    ),
    (
        r"certificate|SSL|TLS|sslmode",
        "the two sides do not agree on TLS",
        "see sslmode, sslrootcert, sslcert and sslkey of libpq",
    ),
    (
        r"session_read_only|read-only|standby mode|target_session_attrs|primary",
        "no server of the kind that target_session_attrs asks for",
        _TRIES_AGAIN,
    ),
)
_LOST: Final = ("the connection broke", _TRIES_AGAIN)


def unavailable(error: Error, facts: ConnectionFacts) -> SourceUnavailable:
    """Return the error to raise instead. No password that we know is in its text."""
    where = without_secrets(facts)
    code = error.sqlstate or ""
    said = hide(" ".join(str(error).split()), facts)[:_SHOWN]
    if isinstance(error, pg.QueryCanceled):
        if "statement timeout" in said:
            return TimedOut(
                f"cannot read {where}: a query took longer than {STATEMENT_SECONDS} s",
                hint="is the server busy, or an index missing? spoold asks for less the next time",
            )
        return SourceUnavailable(
            f"cannot read {where}: a query was cancelled ({said})", hint=_TRIES_AGAIN
        )
    what = _BY_CODE.get(code) or _BY_CODE.get(code[:2])
    if what is None and (not code or code.startswith(("08", "28", "3D"))):
        found = (words[1:] for words in _BY_WORDS if re.search(words[0], said, re.IGNORECASE))
        what = next(found, _LOST)
    text, hint = what or ("the server refused a query", _TRIES_AGAIN)
    return SourceUnavailable(f"cannot read {where}: {text} ({said})", hint=hint)


def changed_tables(error: BaseException | None) -> bool:
    """Whether an error says that a table, a column or its type is not what it was."""
    code = getattr(error, "sqlstate", None) or ""
    return code.startswith("42") and code != "42501"
