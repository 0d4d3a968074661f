"""A process's life, from bind to drained.

bind -> load model (healthz 200, readyz 503) -> first forward pass -> READY
SIGTERM -> STOPPING, new requests 503 -> streams finish -> engine stops -> exit 0
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial

from aiohttp import web

from radixsvc import api_prefix
from radixsvc.admission import EDGE, Edge, KeyRing
from radixsvc.app import create_app, make_runner
from radixsvc.config import Config
from radixsvc.errors import Draining, SetupError
from radixsvc.metrics import Metrics
from radixsvc.startup import Backend, build_backend
from radixsvc.systemd import extend_timeout, notify, watch

log = logging.getLogger("radixsvc.service")

Build = Callable[[Config], Backend]
STALL_SECONDS = 120.0  # without a step, though there is work, the engine counts as stuck


async def serve(config: Config, build: Build = build_backend) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status. SetupError if it can't start."""
    keys = KeyRing.load(config.server.keys_file)
    refuse_open_door(config, keys)
    edge = Edge(config, keys, Metrics())
    listener = bind(config.server.host, config.server.port)
    app = create_app(edge)
    app.cleanup_ctx.append(partial(_backend_context, build))
    runner = make_runner(app)
    stop = asyncio.Event()
    edge.on_failure = stop.set
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await runner.setup()
    await web.SockSite(runner, listener, backlog=1024).start()
    log.info("listening on %s:%d", *listener.getsockname()[:2])
    await stop.wait()
    for number in (signal.SIGTERM, signal.SIGINT):  # a second one ends the process at once
        loop.add_signal_handler(number, os._exit, 1)
    drain_seconds = config.server.drain_seconds
    notify("STOPPING=1", "STATUS=draining", extend_timeout(drain_seconds + 15))
    edge.draining = True
    if edge.backend is not None:
        await asyncio.to_thread(edge.backend.engine.drain, drain_seconds)
    await runner.cleanup()
    if edge.backend is not None:
        await asyncio.to_thread(edge.backend.close)
    if isinstance(edge.failure, SetupError):
        raise edge.failure
    return 1 if edge.failure else 0


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, taken before anything that lasts is begun. SetupError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise SetupError(
            f"can't listen on {host}:{port}: {reason}. Pick another port with --port, or stop "
            "what uses it.",
            69,
        ) from None


def refuse_open_door(config: Config, keys: KeyRing) -> None:
    """SetupError for a public address without keys, unless the configuration allows it."""
    host = config.server.host
    if host in ("localhost", "::1") or host.startswith("127."):
        return
    if not keys and not config.server.public_without_keys:
        raise SetupError(
            f"{host} can be reached from other machines and there are no API keys: name a keys "
            "file in server.keys_file, or set server.public_without_keys = true"
        )


async def _backend_context(build: Build, app: web.Application) -> AsyncIterator[None]:
    """Load the model beside the running server, and watch the engine for as long as it runs."""
    task = asyncio.create_task(_bring_up(app[EDGE], build))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _bring_up(edge: Edge, build: Build) -> None:
    """Load, run the first forward pass, warm named prompts, then tell and watch for ever."""
    starting = asyncio.create_task(_tell_of_loading())
    try:
        backend = await asyncio.to_thread(build, edge.config)
        engine = backend.engine
        loop = asyncio.get_running_loop()
        engine.on_failure = lambda error: loop.call_soon_threadsafe(edge.fail, error)
        engine.start()
        edge.backend = backend
        while not engine.ready:
            await asyncio.sleep(0.02)
        await api_prefix.warm_named_prompts(edge)
        log.info("ready: %s", backend.model_name)
        starting.cancel()
        notify("READY=1", f"STATUS=serving {backend.model_name}")

        def is_alive() -> bool:
            busy, seconds = engine.progress()
            return not busy or seconds < STALL_SECONDS

        def status() -> str:
            if edge.draining:
                return "draining"
            stats = engine.stats()
            return f"{backend.model_name}: {stats.running} running, {stats.waiting} waiting"

        await watch(is_alive, status)
    except Draining:
        log.info("told to stop before it was ready")
    except Exception as error:
        if not isinstance(error, SetupError):
            log.exception("the service can't start")
        edge.fail(error)
    finally:
        starting.cancel()


async def _tell_of_loading() -> None:
    while True:
        notify("STATUS=loading the model", extend_timeout(60))
        await asyncio.sleep(5)
