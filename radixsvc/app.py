"""The HTTP service: its routes, those for operators too, and what is done around every request."""

from __future__ import annotations

import functools
import itertools
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import hdrs, web
from multidict import istr

from radixsvc import __version__, api_openai, api_prefix
from radixsvc.admission import ANYONE, EDGE, Call, Edge, as_service_error
from radixsvc.api_prefix import on_engine
from radixsvc.cache import TokensByTier
from radixsvc.codec import Encoding, answer_encoding, encode
from radixsvc.errors import MethodNotAllowed, NotFound, PermissionDenied
from radixsvc.inspection import format_tree
from radixsvc.metrics import CONTENT_TYPE
from radixsvc.namespace import account_name

log = logging.getLogger("radixsvc.http")
Handler = Callable[[Call], Awaitable[Any]]

LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?", re.IGNORECASE)
REQUEST_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)
X_REQUEST_ID = istr("x-request-id")
RESPONSES = (web.Response, web.StreamResponse)
MAX_NODES = 1000  # of the tree that are shown
_PREFIX, _counter = secrets.token_hex(6), itertools.count(1)  # ids are unique among processes too


def create_app(edge: Edge) -> web.Application:
    """All routes around `edge`; its backend may come later."""
    app = web.Application(client_max_size=edge.config.server.max_body.resolve(0))
    app[EDGE] = edge
    for (method, path), handler in ROUTES.items():
        add = app.router.add_get if method == "GET" else app.router.add_post
        add(path, _endpoint(edge, path, handler))
    app.router.add_route("*", "/{path:.*}", _endpoint(edge, "unknown", unknown))
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


async def healthz(call: Call) -> web.Response:
    failure = call.edge.failure
    return web.Response(text="failed" if failure else "ok", status=500 if failure else 200)


async def readyz(call: Call) -> web.Response:
    ready = call.edge.ready
    return web.Response(text="ready" if ready else "not ready", status=200 if ready else 503)


async def version(call: Call) -> Any:
    return {"version": __version__}


async def tree(call: Call) -> Any:
    """The cached prefixes as text; of the caller's namespaces, or for an administrator of all."""
    caller = call.caller

    def is_visible(namespace: str) -> bool:
        return caller.admin or account_name(namespace) == caller.name

    return {
        "text": await on_engine(
            call.backend, lambda cache: format_tree(cache.tree, MAX_NODES, is_visible)
        )
    }


async def stats(call: Call) -> Any:
    call.require_admin()
    cache = vars(await on_engine(call.backend, lambda cache: cache.stats()))
    return {
        "model": call.backend.model_name,
        "in_flight": sum(call.edge.in_flight.values()),
        "engine": call.backend.engine.stats(),
        "cache": {n: v._asdict() if isinstance(v, TokensByTier) else v for n, v in cache.items()},
    }


async def metrics(call: Call) -> web.Response:
    """In Prometheus' text format."""
    call.require_admin()
    cache = await on_engine(call.backend, lambda cache: cache.stats())
    text = call.edge.metrics.render(call.backend.engine.stats(), cache)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})


async def flush(call: Call) -> Any:
    """Empty the cache, all namespaces and tiers. The body is an empty map."""
    call.require_admin()
    await call.read(dict[str, Any])
    await on_engine(call.backend, lambda cache: cache.flush())
    return {"flushed": True}


async def unknown(call: Call) -> web.Response:
    methods: set[str] = set()
    for resource in call.request.app.router.resources():
        methods |= (await resource.resolve(call.request))[1]
    if allowed := sorted(methods - {hdrs.METH_ANY}):
        raise MethodNotAllowed(
            f"this path is for {' and '.join(allowed)}", headers={"Allow": ", ".join(allowed)}
        )
    raise NotFound("there is no such path: OpenAI's are under /v1, as /v1/chat/completions")


OPEN_ROUTES = ("/healthz", "/readyz", "/version")
ROUTES: dict[tuple[str, str], Handler] = {
    ("GET", "/healthz"): healthz,
    ("GET", "/readyz"): readyz,
    ("GET", "/version"): version,
    ("GET", "/v1/tree"): tree,
    ("GET", "/v1/stats"): stats,
    ("GET", "/metrics"): metrics,
    ("POST", "/v1/flush"): flush,
    **api_openai.ROUTES,
    **api_prefix.ROUTES,
}


def _endpoint(
    edge: Edge, route: str, handler: Handler
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """`handler` for aiohttp: who calls, under which id, and what became of it; what it returns in
    the encoding the client accepts, and every error in OpenAI's shape."""
    is_open = route in OPEN_ROUTES
    is_private = not edge.keys and not edge.config.server.public_without_keys
    requests = edge.metrics.requests

    async def handle(request: web.Request) -> web.StreamResponse:
        started = time.monotonic()
        headers = request.headers
        id = headers.get(X_REQUEST_ID)
        if not id or not REQUEST_ID.fullmatch(id):
            id = f"{_PREFIX}{next(_counter):08x}"
        encoding = Encoding.JSON
        status = 499  # the client closed the connection, unless something better is known below
        try:
            encoding = answer_encoding(
                headers.get(hdrs.ACCEPT, ""), headers.get(hdrs.CONTENT_TYPE, "")
            )
            caller = ANYONE
            if not is_open:
                if is_private:
                    _refuse_rebinding(request.host)
                caller = edge.keys.identify(headers.get(hdrs.AUTHORIZATION))
            value = await handler(Call(request, edge, id, caller, encoding))
            response: web.StreamResponse
            if type(value) in RESPONSES:  # isinstance takes a microsecond of an abstract class
                response = value
                if not response.prepared:
                    response.headers[X_REQUEST_ID] = id
            else:
                response = _answer(value, encoding, id)
            status = response.status
        except ConnectionError:
            response = web.Response(status=status)
        except Exception as error:
            known = as_service_error(error, id)
            status = known.status
            response = _answer({"error": known.to_dict()}, encoding, id, status)
            response.headers.update(known.headers)
        finally:
            requests[route, status] += 1
            level = logging.DEBUG if status < 400 else logging.INFO
            if log.isEnabledFor(level):
                method = request.method if handler is not unknown else "-"
                spent = (time.monotonic() - started) * 1000
                log.log(level, "%s %s %d %.1f ms %s", method, route, status, spent, id)
        return response

    return handle


def _answer(value: Any, encoding: Encoding, id: str, status: int = 200) -> web.Response:
    headers = {hdrs.CONTENT_TYPE: encoding.value, X_REQUEST_ID: id}
    return web.Response(body=encode(value, encoding), headers=headers, status=status)


@functools.lru_cache(64)
def _refuse_rebinding(host: str) -> None:
    """Without keys only this machine is served, and not a web page that a name leads here."""
    if not LOOPBACK.fullmatch(host):
        raise PermissionDenied(
            "without API keys only loopback addresses are served: use http://127.0.0.1, or set "
            "server.keys_file or server.public_without_keys"
        )
