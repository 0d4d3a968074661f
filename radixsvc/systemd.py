"""Talks to systemd: sd_notify(3) over its datagram socket, and the watchdog."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable

log = logging.getLogger("radixsvc.systemd")


def notify(*states: str) -> None:
    """Tell the service manager, as in `notify("READY=1")`; nothing happens where there is none."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.setblocking(False)
            manager.sendto("\n".join(states).encode(), address)
    except OSError as error:
        log.warning("systemd can't be notified: %s", error)


def extend_timeout(seconds: float) -> str:
    """The state that lets starting or stopping take this long from now."""
    return f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}"


def watchdog_seconds() -> float:
    """How often this process has to be heard of; 0 where nobody watches it."""
    is_ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6 if is_ours else 0.0


async def watch(is_alive: Callable[[], bool], status: Callable[[], str]) -> None:
    """Pat the watchdog at twice its rate while `is_alive`, and keep the status line fresh."""
    period = watchdog_seconds() / 2 or 5.0
    while True:
        if is_alive():
            notify("WATCHDOG=1", f"STATUS={status()}")
        else:
            log.error("the engine makes no progress: the watchdog is left to act")
        await asyncio.sleep(period)
