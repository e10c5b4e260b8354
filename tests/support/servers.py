"""A PostgreSQL server of the tests' own, one a test process; a folder for each that needs more.

    server = postgres_server()                  # or skips; fails in CI
    url = server.url(schema="t1")               # as the read-only role, in a schema of its own
    with server.connect() as db: …              # as its superuser

It listens on loopback, and in its folder. It does not sync, unless asked to; it is stopped by pid
when the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.needs import needs

READER = "reader"
PASSWORD = "s3cret/@:%"
START_SECONDS = 60.0
_SETTINGS = """
listen_addresses = '127.0.0.1'
max_connections = 60
shared_buffers = '32MB'
max_prepared_transactions = 4
autovacuum = off
lock_timeout = '20s'
log_min_messages = warning
"""
_LOCAL = """
local all all trust
host all postgres 127.0.0.1/32 trust
host replication postgres 127.0.0.1/32 trust
host all all 127.0.0.1/32 scram-sha-256
"""


def _programs() -> Path | None:
    """Where initdb and postgres are: Debian keeps them away from PATH."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    versions = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    newest = max(versions, key=lambda path: int(path.parts[-3]), default=None)
    return newest.parent if newest is not None else None


def _user() -> str | None:
    """Whom to run as: postgres refuses root. None: as we are."""
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("postgres").pw_name
    return "nobody"


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Stop at once when a test process is killed, which cannot stop us."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return int(it.getsockname()[1])


@dataclass
class Server:
    """A server in a folder; `start` and `kill` as often as a test likes."""

    folder: Path
    programs: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def user(self) -> str | None:
        """Whom it runs as; None: as we are."""
        return _user()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def url(self, *, schema: str = "public", user: str = "postgres", database: str = "db") -> str:
        """How to connect over loopback."""
        login = f"{user}:{PASSWORD.translate(_QUOTED)}" if user == READER else user
        return (
            f"postgresql://{login}@127.0.0.1:{self.port}/{database}"
            f"?options=-csearch_path%3D{schema}"
        )

    def connect(self, **facts: Any) -> Any:
        """Connect as the superuser, each statement committed by itself."""
        import psycopg

        wanted = {"host": str(self.folder), "port": self.port, "user": "postgres", "dbname": "db"}
        return psycopg.connect(**(wanted | facts), autocommit=True)

    def run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self.programs / program), *arguments],
            user=_user(),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            cwd="/",
        )
        assert done.returncode == 0, done.stderr

    def make(self, *settings: str, sync: bool = False) -> None:
        """Make its data, with a database `db` and the role that may only read."""
        if (user := _user()) is not None:
            shutil.chown(self.folder, user)
        common = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "-N"]
        self.run("initdb", "-D", str(self.data), *common)
        lines = [_SETTINGS, f"fsync = {'on' if sync else 'off'}", *settings]
        with (self.data / "postgresql.conf").open("a") as file:
            file.write("\n".join(lines) + "\n")
        (self.data / "pg_hba.conf").write_text(_LOCAL)
        self.start()
        with self.connect(dbname="postgres") as db:
            db.execute("CREATE DATABASE db")
            db.execute(f"CREATE ROLE {READER} LOGIN PASSWORD '{PASSWORD}'")
            db.execute(f"ALTER ROLE {READER} SET default_transaction_read_only = on")

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [str(self.programs / "postgres"), "-D", str(self.data), "-p", str(self.port)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "-k", str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=_user(),
                cwd="/",
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.connect(dbname="postgres").close()
            except Exception:
                alive = self.process.poll() is None and time.monotonic() < deadline
                assert alive, (self.folder / "log").read_text()
                time.sleep(0.02)
            else:
                return

    def stop(self, how: int = signal.SIGINT) -> None:
        """End all sessions and stop; SIGQUIT: at once, as after a crash."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(60)
            self.process = None

    def kill(self) -> None:
        """kill -9 of it and of every process that it started."""
        assert self.process is not None
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for one in (pid, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        self.process.wait(60)
        self.process = None


_QUOTED = str.maketrans({"/": "%2F", "@": "%40", ":": "%3A", "%": "%25"})


def new_server(*settings: str, sync: bool = False) -> Server:
    """Make and start a server; skips where there is none to be had. The caller drops it."""
    programs = _programs()
    needs(programs, "no PostgreSQL here: apt-get install postgresql")
    assert programs is not None
    pytest.importorskip("psycopg", reason="pip install 'psycopg[binary]'")
    # The path of a socket has to be short.
    server = Server(Path(tempfile.mkdtemp(prefix="spoold-pg-", dir="/tmp")), programs)
    try:
        server.make(*settings, sync=sync)
    except BaseException:
        drop(server)
        raise
    return server


def drop(server: Server) -> None:
    """Stop a server and remove all it has."""
    server.stop(signal.SIGQUIT)
    shutil.rmtree(server.folder, ignore_errors=True)


@contextlib.contextmanager
def own_server(*settings: str, sync: bool = False) -> Iterator[Server]:
    """A server for one test, that may be killed."""
    server = new_server(*settings, sync=sync)
    try:
        yield server
    finally:
        drop(server)


@functools.cache
def _shared() -> Server | str:
    try:
        server = new_server()
    except pytest.skip.Exception as skipped:
        return str(skipped)
    atexit.register(drop, server)
    return server


def postgres_server() -> Server:
    """The server that the tests of this process share; never stopped or filled up by one."""
    found = _shared()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def processes_of(server: Server) -> Sequence[int]:
    """The backends of a server."""
    with server.connect() as db:
        query = "SELECT pid FROM pg_stat_activity WHERE datname = 'db' AND pid <> pg_backend_pid()"
        return [pid for (pid,) in db.execute(query)]


@contextlib.contextmanager
def pooler(server: Server) -> Iterator[int]:
    """A pgbouncer in transaction mode before a server, with two connections; yields its port."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    needs(program, "no pgbouncer here: apt-get install pgbouncer")
    assert program is not None
    port = free_port()
    folder = Path(tempfile.mkdtemp(prefix="spoold-pool-", dir="/tmp"))
    if (user := _user()) is not None:
        shutil.chown(folder, user)
    (folder / "users").write_text(f'"postgres" ""\n"{READER}" "{PASSWORD}"\n')
    (folder / "ini").write_text(
        f"[databases]\n* = host=127.0.0.1 port={server.port}\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
        f"auth_type = trust\nauth_file = {folder}/users\npool_mode = transaction\n"
        "default_pool_size = 2\nserver_idle_timeout = 1\n"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, str(folder / "ini")],
            user=user,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            cwd="/",
            preexec_fn=_die_with_parent,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with socket.socket() as it:
                if it.connect_ex(("127.0.0.1", port)) == 0:
                    break
            alive = process.poll() is None and time.monotonic() < deadline
            assert alive, (folder / "log").read_text()
            time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def standby(primary: Server, *settings: str) -> Iterator[Server]:
    """A hot standby of a server, made by pg_basebackup, gone at the end of the `with`."""
    folder = Path(tempfile.mkdtemp(prefix="spoold-standby-", dir="/tmp"))
    if (user := _user()) is not None:
        shutil.chown(folder, user)
    server = Server(folder, primary.programs)
    try:
        source = f"host=127.0.0.1 port={primary.port} user=postgres"
        server.run("pg_basebackup", "-d", source, "-D", str(server.data), "-R", "-c", "fast")
        with (server.data / "postgresql.conf").open("a") as file:
            file.write("\n".join(settings) + "\n")
        server.start()
        yield server
    finally:
        drop(server)
