"""The HTTP service: routes, one middleware, and a process's life from bind to drained.

bind -> load model (healthz 200, readyz 503) -> first forward pass -> READY
SIGTERM -> STOPPING, new requests 503 -> streams finish -> engine stops -> exit 0
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import version

from aiohttp import web

from radixsvc import api_admin, api_openai, api_prefix, systemd
from radixsvc.admission import CALLER, EDGE, REQUEST_ID, Edge, KeyRing
from radixsvc.codec import Encoding, encode
from radixsvc.config import Config
from radixsvc.errors import (
    BodyTooLarge,
    EngineFailed,
    InvalidRequest,
    NotFound,
    ServiceError,
    SetupError,
)
from radixsvc.metrics import Metrics
from radixsvc.startup import Backend, build_backend

log = logging.getLogger("radixsvc.service")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_ROUTES = ("/healthz", "/readyz", "/version")
STALL_SECONDS = 120.0  # without a step, though there is work, the engine counts as stuck


def create_app(edge: Edge) -> web.Application:
    """All routes around `edge`; its backend may come later."""
    limit = edge.config.server.max_body.resolve(0)
    app = web.Application(middlewares=[_edge_middleware], client_max_size=limit)
    app[EDGE] = edge
    app.on_response_prepare.append(_add_request_id)
    app.add_routes(
        [
            web.get("/healthz", _healthz),
            web.get("/readyz", _readyz),
            web.get("/version", _version),
            web.post("/v1/completions", api_openai.completions),
            web.post("/v1/chat/completions", api_openai.chat_completions),
            web.post("/v1/responses", api_openai.responses),
            web.get("/v1/models", api_openai.models),
            web.get("/v1/models/{id:.+}", api_openai.model),
            *api_prefix.ROUTES,
            *api_admin.ROUTES,
        ]
    )
    return app


async def _healthz(request: web.Request) -> web.Response:
    failure = request.app[EDGE].failure
    return web.Response(text="failed" if failure else "ok", status=500 if failure else 200)


async def _readyz(request: web.Request) -> web.Response:
    ready = request.app[EDGE].ready
    return web.Response(text="ready" if ready else "not ready", status=200 if ready else 503)


async def _version(request: web.Request) -> web.Response:
    return api_openai.answer(request, {"version": version("radixsvc")})


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = request[REQUEST_ID]


@web.middleware
async def _edge_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Who calls, under which id, and what became of it; every error in OpenAI's shape."""
    edge = request.app[EDGE]
    started = time.monotonic()
    given = request.headers.get("x-request-id", "")
    request[REQUEST_ID] = given if re.fullmatch(r"[\w.-]{1,64}", given) else secrets.token_hex(12)
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unknown"
    status = 499  # the client closed the connection, unless something better is known below
    try:
        if route not in OPEN_ROUTES:
            request[CALLER] = edge.keys.identify(request.headers.get("Authorization"))
        response = await handler(request)
        status = response.status
    except ServiceError as error:
        response = error_response(request, error)
        status = error.status
    except web.HTTPException as error:
        response = error_response(request, _http_error(error, edge))
        status = response.status
    except ConnectionError:
        response = web.Response(status=status)
    except Exception:
        log.exception("request %s failed", request[REQUEST_ID])
        failure = EngineFailed("an internal error ended this request; it has been logged")
        response = error_response(request, failure)
        status = 500
    finally:
        edge.metrics.requests.labels(route, str(status)).inc()
        log.log(
            logging.DEBUG if route in OPEN_ROUTES else logging.INFO,
            "%s %s %d %.1f ms %s",
            request.method if route != "unknown" else "-",
            route,
            status,
            (time.monotonic() - started) * 1000,
            request[REQUEST_ID],
        )
    return response


def _http_error(error: web.HTTPException, edge: Edge) -> ServiceError:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return BodyTooLarge(f"the body is larger than {edge.config.server.max_body}")
    if error.status == 404:
        return NotFound("there is no such path")
    other = InvalidRequest(error.reason)
    other.status = error.status
    return other


def error_response(request: web.Request, error: ServiceError) -> web.Response:
    """OpenAI's error object, in the encoding the client accepts if we have it."""
    try:
        encoding = api_openai.negotiated(request)
    except ServiceError:
        encoding = Encoding.JSON
    response = web.Response(
        body=encode(error.to_dict(), encoding), status=error.status, content_type=encoding.value
    )
    if error.retry_after is not None:
        response.headers["retry-after"] = f"{error.retry_after:.0f}"
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def serve(config: Config, build: Callable[[Config], Backend] = build_backend) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status. SetupError if it can't start."""
    keys = KeyRing.load(config.server.keys_file)
    refuse_open_door(config, keys)
    edge = Edge(config, keys, Metrics())
    notifier = systemd.Notifier()
    app = create_app(edge)
    app.cleanup_ctx.append(_backend_context(build, notifier))
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,
        shutdown_timeout=5.0,
    )
    stop = asyncio.Event()
    edge.on_failure = stop.set
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await runner.setup()
        await web.TCPSite(runner, config.server.host, config.server.port).start()
        log.info("listening on %s:%d", config.server.host, config.server.port)
        await stop.wait()
    except OSError as error:
        raise SetupError(
            f"can't listen on {config.server.host}:{config.server.port}: {error.strerror}. "
            "Pick another with --port, or stop what uses it.",
            69,
        ) from None
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):  # a second one ends the process at once
            loop.remove_signal_handler(number)
        seconds = config.server.drain_seconds
        notifier.stopping(seconds + 15)
        edge.draining = True
        if edge.backend is not None:
            await asyncio.to_thread(edge.backend.engine.drain, seconds)
        await runner.cleanup()
        notifier.close()
    if isinstance(edge.failure, SetupError):
        raise edge.failure
    return 1 if edge.failure else 0


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


def _backend_context(
    build: Callable[[Config], Backend], notifier: systemd.Notifier
) -> Callable[[web.Application], AsyncIterator[None]]:
    """A cleanup context that loads the model beside the running server and watches the engine."""

    async def context(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(_bring_up(app[EDGE], build, notifier))
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    return context


async def _bring_up(
    edge: Edge, build: Callable[[Config], Backend], notifier: systemd.Notifier
) -> None:
    """Load, run the first forward pass, warm named prompts, then tell and watch for ever."""
    try:
        loading = _on_daemon_thread(lambda: build(edge.config))
        while not loading.done():
            notifier.loading(60)
            await asyncio.wait([loading], timeout=5)
        backend = loading.result()
        engine = backend.engine
        loop = asyncio.get_running_loop()
        engine.on_failure = lambda error: loop.call_soon_threadsafe(edge.fail, error)
        edge.metrics.watch(engine.stats)
        engine.start()
        edge.backend = backend
        while not engine.ready:
            notifier.loading(60)
            await asyncio.sleep(0.02)
        await api_prefix.warm_named_prompts(edge)
        log.info("ready: %s on http://%s:%d", backend.model_name, edge.config.server.host,
                 edge.config.server.port)  # fmt: skip
        notifier.ready(f"serving {backend.model_name}")

        def is_alive() -> bool:
            busy, seconds = engine.progress()
            return not busy or seconds < STALL_SECONDS

        def status() -> str:
            stats = engine.stats()
            return f"{backend.model_name}: {stats.running} running, {stats.waiting} waiting"

        await systemd.watch(notifier, is_alive, status)
    except Exception as error:
        if not isinstance(error, SetupError):
            log.exception("the service can't start")
        edge.fail(error)


def _on_daemon_thread(function: Callable[[], Backend]) -> asyncio.Future[Backend]:
    """`function` on a thread that does not keep the process from ending: loading takes minutes."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Backend] = loop.create_future()

    def settle(result: Backend | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        elif result is not None:
            future.set_result(result)

    def run() -> None:
        try:
            result, error = function(), None
        except BaseException as caught:
            result, error = None, caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="loader", daemon=True).start()
    return future
