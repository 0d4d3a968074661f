"""A datagram socket stands where systemd would listen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixsvc.systemd import extend_timeout, notify, watch, watchdog_seconds

UNIT = Path(__file__).resolve().parent.parent / "configs" / "radixsvc.service"


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(5)
        yield receiver


def test_states_reach_the_manager(manager: socket.socket) -> None:
    notify("STATUS=loading the model", extend_timeout(60))
    notify("READY=1")
    assert manager.recv(1000) == b"STATUS=loading the model\nEXTEND_TIMEOUT_USEC=60000000"
    assert manager.recv(1000) == b"READY=1"


def test_abstract_sockets_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"radixsvc-test-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name)
        receiver.settimeout(5)
        notify("WATCHDOG=1")
        assert receiver.recv(1000) == b"WATCHDOG=1"


async def test_the_watchdog_is_patted_only_while_alive(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    alive = True
    asked = asyncio.Semaphore(0)

    def is_alive() -> bool:
        asked.release()
        return alive

    task = asyncio.create_task(watch(is_alive, lambda: "fine"))
    assert await asyncio.to_thread(manager.recv, 1000) == b"WATCHDOG=1\nSTATUS=fine"
    alive = False
    manager.setblocking(False)
    for _ in range(5):
        await asked.acquire()
    with contextlib.suppress(BlockingIOError):
        while True:
            manager.recv(1000)
    for _ in range(5):
        await asked.acquire()
    with pytest.raises(BlockingIOError):
        manager.recv(1000)
    task.cancel()


def test_another_process_watchdog_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "9000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_seconds() == 0
    monkeypatch.delenv("WATCHDOG_PID")
    assert watchdog_seconds() == 9


@pytest.mark.parametrize("address", [None, "/nowhere"])
def test_no_manager_is_no_error(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify("READY=1")


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
