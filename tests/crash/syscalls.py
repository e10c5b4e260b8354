"""Every system call with which this process changes a folder, seen one by one, in order.

    with watching(folder, on_call):
        ...

`on_call` is asked before each call; it may end the process, or raise the OSError that the call is
to fail with. Calls of all threads are numbered together. What is watched is what `spoold.fs` and
filelock use: functions of `os`, and renameat2 by ctypes. Only the process's own calls are seen, so
tests under strace check that nothing is missing here.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from spoold import fs

CHANGING: Final = frozenset(
    {"create", "write", "pwrite", "ftruncate", "fsync", "rename", "renameat2", "link", "unlink"}
    | {"mkdir", "rmdir", "chmod", "fchmod"}
)


@dataclass(frozen=True)
class Call:
    """One call: its number from 1, its name (`open` does not create, `create` does), its paths."""

    number: int
    name: str
    path: str
    target: str = ""

    @property
    def changes(self) -> bool:
        return self.name in CHANGING


@contextmanager
def watching(
    root: str, on_call: Callable[[Call], None], done: Callable[[Call], None] = lambda _: None
) -> Iterator[list[Call]]:
    """Ask `on_call` before each call on `root` or below, and tell `done` of each that went well.

    Yields the list of all calls as it grows.
    """
    calls: list[Call] = []
    lock = threading.Lock()

    @contextmanager
    def ask(name: str, path: str, target: str = "") -> Iterator[None]:
        if not (path == root or path.startswith(f"{root}/")):
            yield
            return
        with lock:
            call = Call(len(calls) + 1, name, path, target)
            calls.append(call)
        on_call(call)
        yield
        done(call)

    undo = [*_watch_paths(ask), *_watch_descriptors(ask), *_watch_two_paths(ask)]
    try:
        yield calls
    finally:
        for place, name, real in undo:
            setattr(place, name, real)


_Ask = Callable[..., AbstractContextManager[None]]
_Undo = Iterator[tuple[Any, str, Any]]


def _replace(place: Any, name: str, make: Callable[[Any], Any]) -> tuple[Any, str, Any]:
    real = getattr(place, name)
    setattr(place, name, make(real))
    return place, name, real


def _watch_paths(ask: _Ask) -> _Undo:
    def opening(real: Any) -> Any:
        def wrapped(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            with ask("create" if flags & os.O_CREAT else "open", os.fsdecode(path)):
                return real(path, flags, *args, **kwargs)

        return wrapped

    yield _replace(os, "open", opening)
    for name in ("unlink", "mkdir", "rmdir", "chmod"):

        def by_path(real: Any, name: str = name) -> Any:
            def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
                with ask(name, os.fsdecode(path)):
                    return real(path, *args, **kwargs)

            return wrapped

        yield _replace(os, name, by_path)


def _watch_descriptors(ask: _Ask) -> _Undo:
    for name in ("write", "pwrite", "fsync", "ftruncate", "fchmod"):

        def by_descriptor(real: Any, name: str = name) -> Any:
            def wrapped(fd: int, *args: Any) -> Any:
                with ask(name, os.readlink(f"/proc/self/fd/{fd}")):
                    return real(fd, *args)

            return wrapped

        yield _replace(os, name, by_descriptor)


def _watch_two_paths(ask: _Ask) -> _Undo:
    for name in ("rename", "link"):

        def by_paths(real: Any, name: str = name) -> Any:
            def wrapped(old: Any, new: Any, **kwargs: Any) -> Any:
                with ask(name, os.fsdecode(old), os.fsdecode(new)):
                    return real(old, new, **kwargs)

            return wrapped

        yield _replace(os, name, by_paths)

    def renameat2(real: Any) -> Any:
        def wrapped(old_dir: int, old: bytes, new_dir: int, new: bytes, flags: int) -> int:
            def rename() -> None:
                if real(old_dir, old, new_dir, new, flags):
                    raise OSError(ctypes.get_errno(), "renameat2")

            try:
                with ask("renameat2", os.fsdecode(old), os.fsdecode(new)):
                    rename()
            except OSError as error:
                ctypes.set_errno(error.errno or 0)
                return -1
            return 0

        return wrapped

    if fs.renameat2 is not None:
        yield _replace(fs, "renameat2", renameat2)
