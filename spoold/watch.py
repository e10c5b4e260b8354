"""Hints that something changed in a directory. They save waiting; nothing may depend on them.

They get lost, come late, or come from our own moves: whoever waits looks anyway every second or
two, and must be right when no hint ever comes.

This is inotify by watchdog's bindings, read by whoever waits. watchdog's observer would carry each
event through three threads of its own. Measured from a rename to the waiting process: 23 µs like
this, 144 µs through one thread, 290 µs through the observer. There is no thread here that could die
unseen, be lost in a fork, or wake an idle process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import math
import os
import select
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias, cast

if TYPE_CHECKING:
    from watchdog.observers.inotify_c import WatchDescriptor

__all__ = ["Heard", "Hints"]

Heard: TypeAlias = dict[str, set[str] | None]
"""Tag → the paths that changed; None where anything under that tag may have changed."""

_log = logging.getLogger("spoold.watch")

# Flags of inotify(7), as watchdog.observers.inotify_c.InotifyConstants has them too; here so that
# importing this module loads nothing.
_MODIFY: Final = 0x2
_MOVED_FROM: Final = 0x40
_MOVED_TO: Final = 0x80
_CREATE: Final = 0x100
_DELETE: Final = 0x200
_DELETE_SELF: Final = 0x400
_MOVE_SELF: Final = 0x800
_OVERFLOW: Final = 0x4000
_IGNORED: Final = 0x8000
_ONLYDIR: Final = 0x01000000
_DONT_FOLLOW: Final = 0x02000000
_MASK_ADD: Final = 0x20000000
_ISDIR: Final = 0x40000000

_EVENT: Final = struct.Struct("iIII")
_BUFFER_BYTES: Final = 8 * 1024
_LONGEST_EVENT: Final = _EVENT.size + 256
_RECHECK_SECONDS: Final = 4.0
_RETRY_SECONDS: Final = 30.0
_LONGEST_POLL_SECONDS: Final = 1_000_000.0
_MOST_PATHS: Final = 10_000


@dataclass(eq=False, slots=True)
class _Root:
    """A directory that was asked for, and what of it is watched now."""

    path: str
    tag: str
    wanted: int
    recursive: bool
    names: Callable[[str], bool] | None
    identity: tuple[int, int] | None = None
    whole: bool = False
    retry_at: float = -math.inf
    folders: dict[int, str] = field(default_factory=dict)  # watch descriptor → path

    @property
    def mask(self) -> int:
        follow = _CREATE | _MOVED_TO | _MOVED_FROM if self.recursive else 0
        return self.wanted | follow | _DELETE_SELF | _MOVE_SELF | _ONLYDIR | _MASK_ADD


class Hints:
    """Waits for changes in directories, and for `wake`.

    One thread watches and waits; `wake` may be called from any thread and from signal handlers.
    A forked child must not wait: it would take the parent's hints.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pid = os.getpid()
        self._roots: list[_Root] = []
        self._by_wd: dict[int, list[_Root]] = {}
        self._woken: deque[str] = deque()
        self._checked = -math.inf
        self._problem: tuple[str, str] | None = None
        self._inotify = -1
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)

    def watch(
        self,
        path: str,
        *,
        tag: str,
        recursive: bool = False,
        created: bool = True,
        deleted: bool = False,
        modified: bool = False,
        names: Callable[[str], bool] | None = None,
    ) -> bool:
        """Give hints about a directory from now on; list it after this call, not before.

        `created`: a file or folder appears by whatever means; `deleted`: one goes, moved or
        removed; `modified`: a file is written to (reading one gives no hint). `names` picks the
        file names that matter. `recursive` follows folders in it as they come and go.

        False where it cannot be watched, or not wholly: it is tried again while waiting, and a
        warning says so once. A directory that is not there (yet) is not warned about.
        """
        wanted = (
            (_CREATE | _MOVED_TO if created else 0)
            | (_DELETE | _MOVED_FROM if deleted else 0)
            | (_MODIFY if modified else 0)
        )
        root = _Root(path, tag, wanted, recursive, names)
        self._roots.append(root)
        self._arm(root)
        return root.whole

    def wait(self, timeout: float | None) -> Heard:
        """Wait until something happens, and return what; empty when `timeout` seconds passed.

        What happened since the last call counts. Directories that were removed and made again are
        watched anew here, after some seconds at most: then anything in them may have changed.
        """
        give_up = None if timeout is None else self._clock() + timeout
        heard: Heard = {}
        self._recheck(heard)
        while True:
            left = None if give_up is None else give_up - self._clock()
            if left is not None:
                left = 0.0 if heard else min(max(left, 0.0), _LONGEST_POLL_SECONDS)
            if left is not None and 0.0 < left < 0.001:
                # poll counts in whole milliseconds. (Not time.sleep: it sleeps until a point of
                # time, which fails under a clock that libfaketime has moved.)
                select.select([], [], [], left)
                left = 0.0
            ready = self._poll.poll(None if left is None else math.ceil(left * 1000))
            for fd, _ in ready:
                if fd == self._wake:
                    self._hear_wakes(heard)
                else:
                    self._hear_events(heard)
            # Hints that `names` does not want are no reason to return.
            if heard or (left is not None and (left <= 0 or not ready)):
                return heard

    def wake(self, tag: str) -> None:
        """Make `wait` return at once, now or the next time, with `tag` in what it heard."""
        if os.getpid() == self._pid and self._wake >= 0:
            self._woken.append(tag)
            os.eventfd_write(self._wake, 1)

    def healthy(self, tag: str | None = None) -> bool:
        """Whether every directory asked for, or every one of a tag, is watched as a whole now."""
        for root in self._roots:  # at every wake-up: without a generator
            if not root.whole and (tag is None or tag == root.tag):
                return False
        return True

    @property
    def problem(self) -> tuple[str, str] | None:
        """Why the kernel gives no hints of something, and the remedy; None while it gives all.

        A directory that is merely not there is no problem: it is watched when it comes.
        """
        return None if self._problem is None or self.healthy() else self._problem

    def close(self) -> None:
        """Watch nothing any more; fine when called twice."""
        fds, self._wake, self._inotify = (self._wake, self._inotify), -1, -1
        self._roots.clear()
        self._by_wd.clear()
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_poll"):
            self.close()

    # --- what was heard ---------------------------------------------------------------------

    def _hear_wakes(self, heard: Heard) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        # RACE: a wake between the read and here is heard now; its count then makes the next wait
        # go around once for nothing.
        while self._woken:
            heard[self._woken.popleft()] = None

    def _hear_events(self, heard: Heard) -> None:
        while True:
            try:
                data = os.read(self._inotify, _BUFFER_BYTES)
            except BlockingIOError:
                return
            for wd, mask, name in _parse(data):
                if mask & _OVERFLOW:
                    self._hear_overflow(heard)
                for root in list(self._by_wd.get(wd, ())):
                    self._hear_event(heard, root, wd, mask, name)
            if len(data) < _BUFFER_BYTES - _LONGEST_EVENT:
                return

    def _hear_overflow(self, heard: Heard) -> None:
        _log.info("the queue of inotify ran over: looking at everything that is watched")
        for root in self._roots:
            heard[root.tag] = None
            root.whole, root.retry_at = False, -math.inf  # new folders may have been missed, too
        self._checked = -math.inf

    def _hear_event(self, heard: Heard, root: _Root, wd: int, mask: int, name: str) -> None:
        folder = root.folders[wd]
        if mask & (_IGNORED | _DELETE_SELF | _MOVE_SELF):
            if folder == root.path:
                heard[root.tag] = None
                root.identity, root.whole = None, False
                self._checked = -math.inf
            if mask & _IGNORED:
                self._forget(root, wd)
            return
        path = f"{folder}/{name}"
        if mask & _ISDIR and root.recursive:
            if mask & _MOVED_FROM:
                self._leave(root, path)
            elif mask & (_CREATE | _MOVED_TO):
                self._follow(root, path, heard)
        if mask & root.wanted:
            self._note(heard, root, path)

    @staticmethod
    def _note(heard: Heard, root: _Root, path: str) -> None:
        if root.names is not None and not root.names(path.rpartition("/")[2]):
            return
        paths = heard.setdefault(root.tag, set())
        if paths is not None:
            paths.add(path)
            if len(paths) > _MOST_PATHS:
                heard[root.tag] = None

    # --- what is watched ----------------------------------------------------------------------

    def _recheck(self, heard: Heard) -> None:
        now = self._clock()
        if now - self._checked < _RECHECK_SECONDS:
            return
        self._checked = now
        for root in self._roots:
            moved = _identity(root.path) != root.identity
            retry = not root.whole and root.identity is not None and now >= root.retry_at
            if moved or retry:
                self._arm(root)
                if root.identity is not None and (moved or root.whole):
                    heard[root.tag] = None

    def _arm(self, root: _Root) -> None:
        identity = _identity(root.path)
        if identity != root.identity:
            self._leave(root, root.path)
        root.identity, root.whole = identity, False
        if identity is not None and self._open():
            root.whole = True
            self._follow(root, root.path, None)
            if root.path not in root.folders.values():
                root.whole = False
                if _identity(root.path) is None:  # RACE: it went away just now
                    root.identity = None
        # Not at every look: where the limit of inotify is used up it is not given back soon.
        root.retry_at = self._clock() + _RETRY_SECONDS

    def _open(self) -> bool:
        if self._inotify < 0:
            from watchdog.observers.inotify_c import inotify_init

            fd = inotify_init()
            if fd < 0:
                self._warn("start", ctypes.get_errno())
                return False
            os.set_inheritable(fd, False)
            os.set_blocking(fd, False)
            self._inotify = fd
            self._poll.register(fd, select.POLLIN)
        return True

    def _follow(self, root: _Root, path: str, heard: Heard | None) -> None:
        """Watch a folder and, where the root is recursive, those in it.

        What lies in a folder that is new counts as heard: it may have come before the watch.
        """
        from watchdog.observers.inotify_c import inotify_add_watch

        mask = root.mask | (0 if path == root.path else _DONT_FOLLOW)
        wd = int(inotify_add_watch(self._inotify, os.fsencode(path), mask))
        if wd < 0:
            code = ctypes.get_errno()
            if code not in (errno.ENOENT, errno.ENOTDIR):
                root.whole = False
                self._warn(f"watch {path}", code)
            return
        root.folders[wd] = path
        sharers = self._by_wd.setdefault(wd, [])
        if root not in sharers:
            sharers.append(root)
        if not root.recursive:
            return
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        self._follow(root, entry.path, heard)
                    elif heard is not None and root.wanted & _CREATE:
                        self._note(heard, root, entry.path)
        except FileNotFoundError:
            return
        except OSError as error:
            root.whole = False
            self._warn(f"watch {path}", error.errno or 0)

    def _leave(self, root: _Root, path: str) -> None:
        """Forget a folder that is elsewhere now, and those in it."""
        below = f"{path}/"
        for wd, folder in list(root.folders.items()):
            if folder == path or folder.startswith(below):
                self._forget(root, wd)

    def _forget(self, root: _Root, wd: int) -> None:
        from watchdog.observers.inotify_c import inotify_rm_watch

        root.folders.pop(wd, None)
        sharers = self._by_wd.get(wd, [])
        if root in sharers:
            sharers.remove(root)
            if not sharers:
                del self._by_wd[wd]
                # Fails where the kernel has dropped the watch already: fine.
                inotify_rm_watch(self._inotify, cast("WatchDescriptor", wd))

    def _warn(self, act: str, code: int) -> None:
        warned = self._problem is not None
        limit = {
            errno.ENOSPC: "raise fs.inotify.max_user_watches",
            errno.EMFILE: "raise fs.inotify.max_user_instances or the limit of open files",
        }.get(code, "nothing is lost")
        self._problem = f"inotify cannot {act}: {os.strerror(code).lower()}", limit
        if warned:
            return
        _log.warning(
            "inotify cannot %s: %s; going on by timed looks, %s",
            act,
            os.strerror(code).lower(),
            limit,
        )


def _parse(data: bytes) -> Iterator[tuple[int, int, str]]:
    """Take what was read from inotify apart: watch descriptor, mask, name in that folder."""
    at = 0
    while at < len(data):
        wd, mask, _, length = _EVENT.unpack_from(data, at)
        at += _EVENT.size + length
        yield wd, mask, os.fsdecode(data[at - length : at].rstrip(b"\0"))


def _identity(path: str) -> tuple[int, int] | None:
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino
