"""The limits: loops that do only what cannot be left out. No JSON, no decisions, no safety."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

COLUMNS = (
    "id, session_id, step_id, messages, response, step_reward, reward, meta_json, is_truncated,"
    " is_session_completed, created_at, group_id, llm_model"
)
_MESSAGES, _RESPONSE = 3, 4


def sync(path: str | Path) -> None:
    """fsync a folder."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def connect(db: Path) -> sqlite3.Connection:
    """Open a database to read raw bytes."""
    connection = sqlite3.connect(f"file:{db}?mode=ro", uri=True, isolation_level=None)
    connection.text_factory = bytes
    return connection


class Publisher:
    """The system calls of a publish: write aside, fsync, rename, fsync of the folder."""

    def __init__(self, run: Path) -> None:
        self._tmp, self._pending = run / "tmp", run / "pending"
        for folder in (self._tmp, self._pending):
            folder.mkdir(parents=True)
        self._pending_fd = os.open(self._pending, os.O_RDONLY)
        self._seq = 0

    def publish(self, data: bytes) -> None:
        self._seq += 1
        name = f"{self._seq:09d}-n1-w3.3-000000000000.jsonl"
        fd = os.open(self._tmp / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640)
        os.write(fd, data)
        os.fsync(fd)
        os.close(fd)
        os.rename(self._tmp / name, self._pending / name)
        os.fsync(self._pending_fd)


def _finished(db: sqlite3.Connection) -> list[tuple[int, bytes]]:
    query = (
        "SELECT id, env_id FROM job_environments WHERE is_deleted = 0 AND finished = 1 ORDER BY id"
    )
    return db.execute(query).fetchall()


def _rows(db: sqlite3.Connection, env_ids: Sequence[bytes]) -> list[tuple[bytes, ...]]:
    marks = ",".join("?" * len(env_ids))
    query = f"SELECT {COLUMNS} FROM session_steps WHERE session_id IN ({marks}) AND is_terminal = 1"
    return db.execute(query, [one.decode() for one in env_ids]).fetchall()


def drain(db_path: Path, run: Path, *, batch_size: int, line_bytes: int) -> float:
    """Read the rows of each batch, write as many bytes as its lines have. Returns seconds."""
    began = time.perf_counter()
    db, publisher = connect(db_path), Publisher(run)
    environments = _finished(db)
    for first in range(0, len(environments), batch_size):
        parts: list[bytes] = []
        for row in _rows(db, [env_id for _, env_id in environments[first : first + batch_size]]):
            body = row[_MESSAGES] + row[_RESPONSE]
            parts += (body, b" " * (line_bytes - len(body) - 1), b"\n")
        publisher.publish(b"".join(parts))
    db.close()
    return time.perf_counter() - began


def complete(db_path: Path, run: Path, complete_next: Callable[[], Iterator[int]]) -> float:
    """Be told of each completion, read its row by key, publish. Returns CPU seconds of one."""
    db, publisher = connect(db_path), Publisher(run)
    cpu, number = 0.0, 0
    for environment in complete_next():
        before = time.process_time()
        query = "SELECT env_id FROM job_environments WHERE id = ? AND finished = 1"
        (env_id,) = db.execute(query, (environment,)).fetchone()
        ((*_, messages, response), *_) = [row[: _RESPONSE + 1] for row in _rows(db, [env_id])]
        publisher.publish(messages + response + b"\n")
        cpu += time.process_time() - before
        number += 1
    db.close()
    return cpu / number


def scan(db_path: Path) -> float:
    """Ask for every finished environment, as who keeps no place would. Returns CPU seconds."""
    db = connect(db_path)
    before = time.process_time()
    _finished(db)
    cpu = time.process_time() - before
    db.close()
    return cpu


def start(db_path: Path, run: Path) -> float:
    """List the folders, read each ledger entry, scan once, publish what is new. Seconds."""
    began = time.perf_counter()
    delivered: set[int] = set()
    for folder in ("pending", "inflight", "acked", "rejected"):
        os.listdir(run / folder)
    ledger = f"{run}/.spoold/ledger"
    for name in os.listdir(ledger):
        fd = os.open(f"{ledger}/{name}", os.O_RDONLY)
        entry = os.read(fd, 1 << 16)
        os.close(fd)
        numbers = entry[entry.index(b"[") + 1 : entry.index(b"]")]
        delivered.update(map(int, numbers.split(b",")))
    db = connect(db_path)
    new = [env_id for one, env_id in _finished(db) if one not in delivered]
    Publisher(run / "floor").publish(b"".join(row[_MESSAGES] for row in _rows(db, new)))
    db.close()
    return time.perf_counter() - began


def claim_and_ack(run: Path, *, digest: bool) -> None:
    """Rename all that is pending twice, and sync both folders after the second."""
    pending, own, acked = run / "pending", run / "inflight/bare", run / "acked"
    own.mkdir(exist_ok=True)
    for name in sorted(os.listdir(pending)):
        os.rename(pending / name, own / name)
        if digest:
            data = (own / name).read_bytes()
            assert hashlib.sha256(data).hexdigest()[:12] in name
        os.rename(own / name, acked / name)
        sync(acked)
        sync(own)


def prune(run: Path) -> float:
    """Read the entry of each batch in acked/ and unlink it. Returns seconds."""
    began = time.perf_counter()
    for name in os.listdir(run / "acked"):
        fd = os.open(f"{run}/.spoold/ledger/{name[:-6]}", os.O_RDONLY)
        os.read(fd, 1 << 16)
        os.close(fd)
        os.unlink(f"{run}/acked/{name}")
    return time.perf_counter() - began
