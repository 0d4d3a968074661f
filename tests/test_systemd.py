"""A datagram socket stands where systemd would listen."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixsvc.systemd import Notifier, watch

UNIT = Path(__file__).resolve().parent.parent / "configs" / "radixsvc.service"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        receiver.settimeout(5)
        yield path, receiver


def test_states_reach_the_manager(manager: tuple[str, socket.socket]) -> None:
    path, receiver = manager
    notifier = Notifier({"NOTIFY_SOCKET": path})
    notifier.loading(60)
    notifier.ready("serving tiny")
    notifier.stopping(75)
    notifier.close()
    assert receiver.recv(1000) == b"STATUS=loading the model\nEXTEND_TIMEOUT_USEC=60000000"
    assert receiver.recv(1000) == b"READY=1\nSTATUS=serving tiny"
    assert receiver.recv(1000) == b"STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=75000000"


def test_abstract_sockets_are_reached() -> None:
    name = f"radixsvc-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name)
        receiver.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": "@" + name})
        notifier.alive()
        notifier.close()
        assert receiver.recv(1000) == b"WATCHDOG=1"


async def test_the_watchdog_is_patted_only_while_alive(
    manager: tuple[str, socket.socket],
) -> None:
    path, receiver = manager
    environ = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier(environ)
    alive = True
    task = asyncio.create_task(watch(notifier, lambda: alive, lambda: "fine"))
    loop = asyncio.get_running_loop()
    first = await loop.run_in_executor(None, receiver.recv, 1000)
    assert first == b"WATCHDOG=1"
    alive = False
    while (await loop.run_in_executor(None, receiver.recv, 1000)) == b"WATCHDOG=1":
        pass
    later = [await loop.run_in_executor(None, receiver.recv, 1000) for _ in range(5)]
    assert b"WATCHDOG=1" not in later[1:]
    task.cancel()
    notifier.close()


def test_another_process_watchdog_is_not_ours() -> None:
    notifier = Notifier({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"})
    assert notifier.watchdog_seconds == 0
    notifier.alive()  # nobody listens: logged, not raised
    notifier.close()
    Notifier({}).ready("no manager at all")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_the_unit_is_valid_and_hardened() -> None:
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", str(UNIT)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    problems = [
        line for line in verified.stderr.splitlines()
        if "radixsvc" in line and "is not executable" not in line
    ]  # fmt: skip
    assert not problems
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(UNIT)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    overall = next(line for line in rated.stdout.splitlines() if "exposure level" in line)
    assert float(overall.split(":")[1].split()[0]) <= 2.0
