"""Completed environments out of a rollout database."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from spoold.errors import ConfigError
from spoold.model import Advice, Candidate, Look, Mark, ReadyWhen, Rows, Samples
from spoold.policy import WHOLE, Shard

if TYPE_CHECKING:
    from pyroaring import BitMap64

    from spoold.sources.postgres import PostgresSource

__all__ = ["Source", "open_source"]

_UNDERSTOOD: Final = (
    "a path, sqlite:////absolute.db, sqlite:///relative.db, sqlite://relative.db"
    " or postgresql://user@host/database"
)
# The spellings of SQLAlchemy, of Tortoise and of libpq.
_SERVERS: Final = frozenset({"postgresql", "postgres", "asyncpg", "psycopg"})


class Source(Protocol):
    """A rollout database, of which one shard of one job is read. Used by one thread.

    What belongs to other shards is nowhere in what is found; each environment is asked once whose
    it is, until a reconcile asks again now and then.

    `skip` is the set of environments that are delivered or set aside; its owner may change it
    between two calls. Every call but `close` may raise SourceUnavailable; the next call, or `open`,
    tries again, and nothing that was found before is lost. A reconcile must follow each `open`.
    """

    @property
    def job(self) -> str:
        """The job that is read; "" before the first `open`."""

    @property
    def ready_when(self) -> ReadyWhen:
        """The gate: `auto` before the first `open`, then what it means for this database."""

    @property
    def url(self) -> str:
        """Where the database is, for people; without a password."""

    @property
    def running(self) -> int:
        """How many environments have step rows and are neither delivered nor candidates."""

    @property
    def missing(self) -> BitMap64:
        """The finished environments that have no usable row, as far as was looked and read."""

    @property
    def peek_seconds(self) -> Sequence[float]:
        """After which pauses to see what is new, after a hint, and once a look found a change."""

    def advice(self) -> tuple[Advice, ...]:
        """Return what a person could do about the database, of each kind the most urgent first.

        As of the last look; costs nothing.
        """

    def watched(self) -> Mapping[str, frozenset[str]]:
        """Return the folders, and the names in each, whose changes are hints to look."""

    def open(self) -> bool:
        """Connect, check the schema, pick the job. Opens again when open.

        Returns whether nothing holds any more of what was found before: it is the first time, or
        the database is not the one that it was, or went back to an older state.

        Raises SourceUnavailable when the database, its tables or the job are not there yet,
        SourceSchemaError when it is no rollout database, ConfigError when there are several jobs
        and none was named.
        """

    def close(self) -> None:
        """Disconnect; what was found stays known."""

    def changed(self) -> bool:
        """Whether there may be anything to see since the last complete look. Nearly free.

        Of a server: one round trip.
        """

    def committed(self) -> bool:
        """Whether a commit became visible since the last look. Cheaper, never raises.

        True where that cannot be told. What came by other means than a commit shows in `changed`.
        """

    def is_writing(self) -> bool:
        """Whether somebody is at it: a commit may become visible soon. Nearly free, never raises.

        True where that cannot be told. Where False, what was hinted at before is visible by now.
        """

    def moved(self) -> bool:
        """Whether the database is another file than the one that is open: close and open then."""

    def marks(self) -> tuple[Mark, ...]:
        """Return what tells whether a look, or `moved`, would find something. Costs as `changed`.

        What they ask may raise SourceUnavailable. Good until anything else here is called.
        """

    def look(
        self, skip: BitMap64, remembered: Mapping[int, str] | None = None, highest: int = 0
    ) -> Look:
        """Look at what is new. Costs as much as there are new step rows and running environments.

        A candidate is offered once; again only when new step rows of it come, or by a reconcile.
        Where `more_after` is set it was not complete: one that comes then is.

        With `remembered` it makes sure of what it has seen as `verify` does, and raises the same.
        """

    def reconcile(self, skip: BitMap64) -> Iterator[Look]:
        """Look at everything, slice by slice. Between two slices anything may be called."""

    def groups(self, ids: BitMap64) -> Iterator[tuple[Candidate, ...]]:
        """Return the group of each of `ids` that is still there, slice by slice.

        Tells after a restart which groups are closed, and whose members are lost.
        """

    def members(self, groups: Collection[str]) -> Iterator[tuple[Candidate, ...]]:
        """Return all members of these groups that are registered and not deleted, in slices.

        Goes over every environment: for a few groups, and not often.
        """

    def read(self, ids: Sequence[int]) -> Rows:
        """Return the rows that become samples, the chosen one last, in the order of `ids`.

        () where there is no usable row now, or the environment does not pass the gate any more. A
        transaction may be open while the caller holds an item, a young one: it asks for the next
        one soon, and for nothing else before, or closes this.
        """

    def verify(self, remembered: Mapping[int, str], highest: int) -> BitMap64:
        """Make sure that this is the database that was delivered from.

        `remembered`: env_id by environment id. `highest`: the highest id delivered, 0 for none.
        Raises SourceReplaced where an env_id belongs to another row at its id or ids went
        backwards, SourceUnavailable where there are no environments at all yet, or where the rows
        are not those of the last look any more. A row that is merely gone is fine; those of
        `remembered` are returned.
        """

    def env_ids(self, ids: Collection[int]) -> Mapping[int, str]:
        """Return the env_id of each of `ids` that is still there.

        Raises SourceUnavailable where the rows are not those of the last look any more.
        """

    def is_verified(self) -> bool:
        """Whether nothing was committed since the last `verify`. Of a server: one round trip."""


def open_source(
    url: str,
    *,
    job: str | None,
    ready_when: ReadyWhen,
    samples: Samples,
    known_job: str | None = None,
    shard: Shard = WHOLE,
) -> Source:
    """Return the source that a URL names, not yet open. Raises ConfigError for any other URL.

    `postgresql://…` is a server: `spoold.sources.postgres_url` says what it may be.

    `job`: the one to read; None for the only one that is there, or of several for `known_job`.

    A path is taken as it is. After `sqlite://` there are two habits: `sqlite:///x.db` is relative
    to SQLAlchemy and absolute to Tortoise. The reading whose file exists wins, else SQLAlchemy's;
    `sqlite:////x.db` is absolute and `sqlite://x.db` relative for both. Options after `?` are
    ignored.
    """
    scheme, colon, _ = url.partition("://")
    if colon and scheme.partition("+")[0] in _SERVERS:
        return _postgres(url)(
            url,
            job=job,
            ready_when=ready_when,
            samples=samples,
            known_job=known_job,
            shard=shard,
        )
    from spoold.sources.sqlite import SqliteSource

    return SqliteSource(
        _readings(url),
        job=job,
        ready_when=ready_when,
        samples=samples,
        known_job=known_job,
        shard=shard,
    )


def _postgres(url: str) -> type[PostgresSource]:
    try:
        from spoold.sources.postgres import PostgresSource
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "spoold":
            raise
        raise ConfigError(
            f"{_shown(url)} needs psycopg 3, which is not installed here ({error})",
            hint="pip install 'spoold[postgres]'",
        ) from error
    return PostgresSource


def _readings(url: str) -> tuple[str, ...]:
    """Return the paths that a URL may mean, most likely first."""
    scheme, colon, rest = url.partition("://")
    if not colon:
        if not url or url == ":memory:" or url.startswith(("sqlite:", "file:")):
            raise _not_understood(url)
        return (url,)
    if scheme != "sqlite":
        raise _not_understood(url)
    path = rest.partition("?")[0]
    if not path.strip("/") or path.strip("/") == ":memory:":
        raise _not_understood(url)
    if path.startswith("//"):
        return ("/" + path.lstrip("/"),)
    if path.startswith("/"):
        return (path[1:], path)
    return (path,)


def _not_understood(url: str) -> ConfigError:
    return ConfigError(
        f"no rollout database can be found by {_shown(url)}", hint=f"give {_UNDERSTOOD}"
    )


def _shown(url: str) -> str:
    scheme, colon, _ = url.partition("://")
    # A URL of a server may hold a password.
    return f"{scheme}://…" if colon and scheme != "sqlite" else repr(url)
