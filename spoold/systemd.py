"""What the service manager hears from the daemon: ready, status, watchdog, reloading, stopping.

The protocol of sd_notify(3): a datagram of `NAME=value` lines to a socket, by path or, with "@", in
the abstract namespace. Without an address nothing is sent. Whatever becomes of the socket, the
daemon goes on: to deliver matters more than to tell.

Pings of the watchdog are sent by whoever makes progress, never by a timer: a loop that hangs is
silent, and the manager ends it.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

__all__ = ["Service"]

log = logging.getLogger("spoold.systemd")


class Service:
    """A service as its manager sees it. `address`: of NOTIFY_SOCKET, "" for none.

    `watchdog_seconds`: after this long without a ping the manager kills the service; 0 for never.
    """

    def __init__(
        self,
        address: str = "",
        *,
        watchdog_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._ping_every = watchdog_seconds / 4
        self._clock = clock
        self._pinged_at = float("-inf")
        self._said = ""
        self._is_lost = False

    def shorten(self, pause: float) -> float:
        """Return how long the loop may wait so that its next progress is in time, in seconds."""
        return min(pause, self._ping_every) if self._ping_every else pause

    def ready(self) -> None:
        """Say that the service is up, and begin to be watched."""
        self._send("READY=1")
        self.progress()

    def status(self, sentence: str) -> None:
        """Say what the service does, in one line; said again only when it changes."""
        if sentence != self._said:
            self._said = sentence
            self._send(f"STATUS={' '.join(sentence.split())}")

    def progress(self) -> None:
        """Say that the loop went round. Sent four times in the time of the watchdog at most."""
        now = self._clock()
        if self._ping_every and now >= self._pinged_at + self._ping_every:
            self._pinged_at = now
            self._send("WATCHDOG=1")

    def reloading(self) -> None:
        """Say that settings are being read again; `ready` ends it."""
        microseconds = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(f"RELOADING=1\nMONOTONIC_USEC={microseconds}")

    def stopping(self) -> None:
        """Say that the service is on its way down."""
        self._send("STOPPING=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
                # A manager that does not read must not hold the loop up.
                notify.setblocking(False)
                notify.sendto(message.encode("utf-8", "backslashreplace"), self._address)
        except (OSError, ValueError) as error:
            if not self._is_lost:
                fields = {"address": self._address.replace("\0", "@"), "error": str(error)}
                log.warning("service manager does not hear", extra={"fields": fields})
            self._is_lost = True
        else:
            self._is_lost = False
