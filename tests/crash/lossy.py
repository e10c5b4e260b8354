"""A disk that loses at a power cut what it may lose: every name and byte that was not synced.

The calls happen on a real folder; beside it this keeps what is durable. At a power cut each
directory keeps its names as of its last fsync, and of the changes after that the first few, any
number of them, independently of all other directories. Two things are granted, as every journal
does: a rename never loses the file (its new name is there wherever the old one is gone), and the
fsync of a new directory makes its own name durable. Bytes that were not synced become NULs.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass, field

from tests.crash.syscalls import Call


@dataclass(eq=False)
class Node:
    """A file or directory: what of it is durable."""

    is_folder: bool
    data: bytes = b""
    names: dict[str, Node] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)


@dataclass(eq=False)
class Change:
    """A name came (node) or went (None) in a directory; `arrival`: where a renamed file came."""

    folder: Node
    name: str
    node: Node | None
    arrival: Change | None = None
    gone: Node | None = None
    is_durable: bool = False

    def apply(self) -> None:
        """Make it durable, and before it the arrival of what it takes away."""
        if self.is_durable:
            return
        self.is_durable = True
        names = self.folder.names
        if self.node is not None:
            names[self.name] = self.node
            return
        if self.arrival is not None:
            self.arrival.apply()
        if names.get(self.name) is self.gone:
            names.pop(self.name, None)


class Disk:
    """What is durable of the folder `root`, which has to be there and empty."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._top = Node(is_folder=True)
        # The picture as the processes see it: path → node.
        self._live: dict[str, Node] = {root: self._top}
        self._is_cutting = False

    def done(self, call: Call) -> None:
        """Take in a call that went well."""
        if self._is_cutting:
            return
        if call.name == "create":
            if call.path not in self._live:
                self._come(call.path, Node(is_folder=False))
        elif call.name == "mkdir":
            self._come(call.path, Node(is_folder=True))
        elif call.name == "unlink":
            self._go(call.path, None)
        elif call.name in ("rename", "renameat2"):
            node = self._live[call.path]
            if call.target in self._live:
                self._go(call.target, None)
            self._go(call.path, self._come(call.target, node))
        elif call.name == "fsync":
            self._sync(call.path)

    def _come(self, path: str, node: Node) -> Change:
        folder, _, name = path.rpartition("/")
        change = Change(self._live[folder], name, node)
        change.folder.changes.append(change)
        self._live[path] = node
        return change

    def _go(self, path: str, arrival: Change | None) -> None:
        folder, _, name = path.rpartition("/")
        into = self._live[folder]
        into.changes.append(Change(into, name, None, arrival, self._live.pop(path)))

    def _sync(self, path: str) -> None:
        node = self._live[path]
        if not node.is_folder:
            with open(path, "rb") as file:
                node.data = file.read()
            return
        for change in node.changes:
            change.apply()
        node.changes.clear()
        folder, _, name = path.rpartition("/")
        if path != self.root and self._live[folder].names.get(name) is not node:
            self._live[folder].names[name] = node

    def cut(self, rng: random.Random) -> None:
        """Lose what may be lost, and put what is left on the real disk."""
        for node in dict.fromkeys([self._top, *self._live.values()]):
            for change in node.changes[: rng.randint(0, len(node.changes))]:
                change.apply()
        self._is_cutting = True
        shutil.rmtree(self.root)
        self._live.clear()
        self._write(self.root, self._top)
        self._is_cutting = False

    def _write(self, path: str, node: Node) -> None:
        self._live[path] = node
        node.changes.clear()
        if node.is_folder:
            os.mkdir(path)
            os.chmod(path, 0o2770)
            for name, below in node.names.items():
                self._write(f"{path}/{name}", below)
        else:
            with open(path, "wb") as file:
                file.write(node.data)
            os.chmod(path, 0o640)
