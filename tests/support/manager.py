"""A service manager: listens on a socket for what a service tells."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable


class Manager:
    """Listens at `address`, a path or an abstract name that begins with "@", inside the `with`."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __enter__(self) -> Manager:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        name = self.address
        self._socket.bind("\0" + name[1:] if name.startswith("@") else name)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        if not self.address.startswith("@"):
            os.unlink(self.address)

    def heard(self) -> list[str]:
        """Return what was said since the last call, without waiting."""
        messages: list[str] = []
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.append(self._socket.recv(65536).decode())
        return messages

    def wait_for(
        self, wanted: Callable[[str], bool], *, timeout_seconds: float = 60.0
    ) -> list[str]:
        """Wait until something wanted is said. Returns all that was said until then, it the last.

        Raises TimeoutError when it is not said.
        """
        messages: list[str] = []
        self._socket.settimeout(timeout_seconds)
        while not messages or not wanted(messages[-1]):
            messages.append(self._socket.recv(65536).decode())
        return messages
