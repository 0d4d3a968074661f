"""For operators: the tree, statistics, metrics, and emptying the cache."""

from __future__ import annotations

import dataclasses
from typing import Any

from aiohttp import web

from radixsvc.admission import CALLER, EDGE, read_body, require_admin
from radixsvc.api_openai import answer
from radixsvc.api_prefix import on_engine
from radixsvc.inspection import format_tree
from radixsvc.metrics import CONTENT_TYPE
from radixsvc.namespace import account_name

MAX_NODES = 1000


async def tree(request: web.Request) -> web.Response:
    """GET /v1/tree: the cached prefixes as text; of the caller's namespaces, or for an
    administrator of all."""
    caller = request[CALLER]
    backend = request.app[EDGE].ready_backend()

    def visible(namespace: str) -> bool:
        return caller.admin or account_name(namespace) == caller.name

    text = await on_engine(backend, lambda cache: format_tree(cache.tree, MAX_NODES, visible))
    return answer(request, {"text": text})


async def stats(request: web.Request) -> web.Response:
    """GET /v1/stats"""
    require_admin(request)
    edge = request.app[EDGE]
    backend = edge.ready_backend()
    cache = await on_engine(backend, lambda cache: cache.stats())
    return answer(
        request,
        {
            "model": backend.model_name,
            "in_flight": sum(edge.in_flight.values()),
            "engine": plain(backend.engine.stats()),
            "cache": plain(cache),
        },
    )


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, in Prometheus' text format."""
    require_admin(request)
    edge = request.app[EDGE]
    cache = await on_engine(edge.ready_backend(), lambda cache: cache.stats())
    body = edge.metrics.render(cache)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def flush(request: web.Request) -> web.Response:
    """POST /v1/flush: empty the cache, all namespaces and tiers. The body is an empty map."""
    require_admin(request)
    backend = request.app[EDGE].ready_backend()
    await read_body(request, dict[str, Any])
    await on_engine(backend, lambda cache: cache.flush())
    return answer(request, {"flushed": True})


def plain(value: Any) -> Any:
    """A snapshot as maps and numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    return value


ROUTES = [
    web.get("/v1/tree", tree),
    web.get("/v1/stats", stats),
    web.get("/metrics", metrics),
    web.post("/v1/flush", flush),
]
