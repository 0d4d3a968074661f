"""The HTTP service: routes, one middleware, and a process's life from bind to drained.

bind -> load model (healthz 200, readyz 503) -> first forward pass -> READY
SIGTERM -> STOPPING, new requests 503 -> streams finish -> engine stops -> exit 0
"""

from __future__ import annotations

import itertools
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from radixsvc import __version__, api_admin, api_openai, api_prefix
from radixsvc.admission import CALLER, EDGE, REQUEST_ID, Edge
from radixsvc.codec import Encoding, encode
from radixsvc.errors import (
    BodyTooLarge,
    EngineFailed,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    ServiceError,
)

log = logging.getLogger("radixsvc.http")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?", re.IGNORECASE)
OPEN_ROUTES = ("/healthz", "/readyz", "/version")


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


def make_runner(app: web.Application) -> web.AppRunner:
    """The server around `app`: a client that goes away cancels its handler, and so its request;
    compressed bodies stay as they are, and are refused."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=75.0,
        shutdown_timeout=5.0,
    )


async def _healthz(request: web.Request) -> web.Response:
    failure = request.app[EDGE].failure
    return web.Response(text="failed" if failure else "ok", status=500 if failure else 200)


async def _readyz(request: web.Request) -> web.Response:
    ready = request.app[EDGE].ready
    return web.Response(text="ready" if ready else "not ready", status=200 if ready else 503)


async def _version(request: web.Request) -> web.Response:
    return api_openai.answer(request, {"version": __version__})


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = request[REQUEST_ID]


@web.middleware
async def _edge_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Who calls, under which id, and what became of it; every error in OpenAI's shape."""
    edge = request.app[EDGE]
    started = time.monotonic()
    given = request.headers.get("x-request-id")
    is_fit = given is not None and re.fullmatch(r"[\w.-]{1,64}", given, re.ASCII)
    request[REQUEST_ID] = given if given and is_fit else _new_id()
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unknown"
    status = 499  # the client closed the connection, unless something better is known below
    try:
        if route not in OPEN_ROUTES:
            _refuse_rebinding(request, edge)
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
        edge.metrics.count(route, status)
        log.log(
            logging.DEBUG if status < 400 else logging.INFO,
            "%s %s %d %.1f ms %s",
            request.method if route != "unknown" else "-",
            route,
            status,
            (time.monotonic() - started) * 1000,
            request[REQUEST_ID],
        )
    return response


def _refuse_rebinding(request: web.Request, edge: Edge) -> None:
    """Without keys only this machine is served, and not a web page that a name leads here."""
    is_private = not edge.keys and not edge.config.server.public_without_keys
    if is_private and not LOOPBACK.fullmatch(request.host):
        raise PermissionDenied(
            "without API keys only loopback addresses are served: use http://127.0.0.1, or set "
            "server.keys_file or server.public_without_keys"
        )


_PREFIX, _counter = secrets.token_hex(6), itertools.count(1)


def _new_id() -> str:
    """Unique among processes too; nothing that is asked of the system each time."""
    return f"{_PREFIX}{next(_counter):08x}"


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
