"""For operators: the tree, statistics, metrics, and emptying the cache."""

from __future__ import annotations

import dataclasses
from typing import Any

from aiohttp import web

from radixsvc.admission import Call
from radixsvc.api_prefix import on_engine
from radixsvc.inspection import format_tree
from radixsvc.metrics import CONTENT_TYPE
from radixsvc.namespace import account_name

MAX_NODES = 1000


async def tree(call: Call) -> Any:
    """GET /v1/tree: the cached prefixes as text; of the caller's namespaces, or for an
    administrator of all."""
    caller = call.caller

    def visible(namespace: str) -> bool:
        return caller.admin or account_name(namespace) == caller.name

    return {
        "text": await on_engine(
            call.backend, lambda cache: format_tree(cache.tree, MAX_NODES, visible)
        )
    }


async def stats(call: Call) -> Any:
    """GET /v1/stats"""
    call.require_admin()
    return {
        "model": call.backend.model_name,
        "in_flight": sum(call.edge.in_flight.values()),
        "engine": plain(call.backend.engine.stats()),
        "cache": plain(await on_engine(call.backend, lambda cache: cache.stats())),
    }


async def metrics(call: Call) -> web.Response:
    """GET /metrics, in Prometheus' text format."""
    call.require_admin()
    cache = await on_engine(call.backend, lambda cache: cache.stats())
    return web.Response(
        body=call.edge.metrics.render(call.backend.engine.stats(), cache),
        headers={"Content-Type": CONTENT_TYPE},
    )


async def flush(call: Call) -> Any:
    """POST /v1/flush: empty the cache, all namespaces and tiers. The body is an empty map."""
    call.require_admin()
    await call.read(dict[str, Any])
    await on_engine(call.backend, lambda cache: cache.flush())
    return {"flushed": True}


def plain(value: Any) -> Any:
    """A snapshot as maps and numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    return value


ROUTES = {
    ("GET", "/v1/tree"): tree,
    ("GET", "/v1/stats"): stats,
    ("GET", "/metrics"): metrics,
    ("POST", "/v1/flush"): flush,
}
