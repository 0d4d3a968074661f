"""Talks to systemd: sd_notify(3) over its datagram socket, and the watchdog."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping

log = logging.getLogger("radixsvc.systemd")


class Notifier:
    """Sends states to the service manager. Does nothing where there is none."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
        watchdog_pid = environ.get("WATCHDOG_PID", str(os.getpid()))
        mine = self._socket is not None and watchdog_pid == str(os.getpid())
        self.watchdog_seconds = int(environ.get("WATCHDOG_USEC", "0")) / 1e6 if mine else 0.0

    def ready(self, status: str) -> None:
        self._send("READY=1", f"STATUS={status}")

    def status(self, text: str) -> None:
        self._send(f"STATUS={text}")

    def stopping(self, seconds: float) -> None:
        """Leaving; it may take this long."""
        self._send("STOPPING=1", "STATUS=draining", _extend(seconds))

    def loading(self, seconds: float) -> None:
        """Still starting; give up only after this long without another word."""
        self._send("STATUS=loading the model", _extend(seconds))

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            log.warning("systemd can't be notified: %s", error)


def _extend(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}"


async def watch(
    notifier: Notifier, is_alive: Callable[[], bool], status: Callable[[], str]
) -> None:
    """Pat the watchdog at twice its rate while `is_alive`, and keep the status line fresh."""
    period = notifier.watchdog_seconds / 2 or 5.0
    while True:
        if is_alive():
            notifier.alive()
        else:
            log.error("the engine makes no progress: the watchdog is left to act")
        notifier.status(status())
        await asyncio.sleep(period)
