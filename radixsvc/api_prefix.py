"""The prefix endpoints: what of a prompt is cached and why not more; warm, pin, unpin, evict.

All of them look into the caller's namespace alone. The tree is reached through the engine's
inbox, between two steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from aiohttp import web

from radixsvc.admission import CALLER, EDGE, REQUEST_ID, Edge, read_body
from radixsvc.api_openai import answer, chat_tokens, check_model, prompt_tokens, tokenized
from radixsvc.cache import PinLimit, PrefixCache, TokensByTier
from radixsvc.codec import MSGPACK_TYPES, token_ids
from radixsvc.errors import InvalidRequest, SetupError
from radixsvc.explain import explain, look
from radixsvc.generation import Generation, Plan
from radixsvc.namespace import namespace_key
from radixsvc.protocol import (
    DetokenizeRequest,
    End,
    Message,
    PrefixMatch,
    PromptRequest,
    TierTokens,
    TokenizeRequest,
    UsageInfo,
)
from radixsvc.request import SamplingParams, Tokens
from radixsvc.startup import Backend

T = TypeVar("T")
log = logging.getLogger("radixsvc.api")
PIN_SECONDS = 3600.0


async def on_engine(backend: Backend, function: Callable[[PrefixCache], T]) -> T:
    """Run `function` on the engine thread and wait for what it returns."""
    return await asyncio.wrap_future(backend.engine.call(function))


async def read_prompt(request: web.Request, body: PromptRequest, special: bool = True) -> Tokens:
    """The token ids of a body's `prompt`, or of its `messages`."""
    edge = request.app[EDGE]
    backend = edge.ready_backend()
    check_model(edge, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    if body.messages is not None:
        return await chat_tokens(edge, backend, body.messages, body.tools or [])
    return await prompt_tokens(backend, body.prompt, special)


async def _scope(request: web.Request) -> tuple[Backend, PromptRequest, str, Tokens]:
    """What every endpoint here works on: backend, body, namespace and token ids."""
    backend = request.app[EDGE].ready_backend()
    body = await read_body(request, PromptRequest)
    tokens = await read_prompt(request, body)
    return backend, body, request[CALLER].namespace(body.cache_salt), tokens


async def match(request: web.Request) -> web.Response:
    """POST /v1/prefix/match: how much of a prompt is cached, by tier; changes nothing."""
    backend, _, namespace, tokens = await _scope(request)
    found = await on_engine(backend, lambda c: c.match(namespace, tokens))
    return answer(request, _as_match(_tiers(tokens, found)))


async def explained(request: web.Request) -> web.Response:
    """POST /v1/prefix/explain: why a prompt is not cached any further."""
    backend, _, namespace, tokens = await _scope(request)
    found, seen = await on_engine(
        backend, lambda c: (c.match(namespace, tokens), look(c.tree, namespace, tokens))
    )
    tiers = _tiers(tokens, found)
    return answer(request, await asyncio.to_thread(explain, tokens, tiers, seen, backend.tokenizer))


async def warm(request: web.Request) -> web.Response:
    """POST /v1/prefix/warm: compute and cache a prompt's keys and values."""
    backend, _, namespace, tokens = await _scope(request)
    edge = request.app[EDGE]
    with edge.place(request[CALLER]):
        usage = await _prefill(edge, backend, request[REQUEST_ID], namespace, tokens)
    return answer(request, _as_match(usage.radixsvc))


async def pin(request: web.Request) -> web.Response:
    """POST /v1/prefix/pin: keep a cached prompt from being dropped, for `ttl` seconds."""
    backend, body, namespace, tokens = await _scope(request)
    ttl = body.ttl or PIN_SECONDS
    try:
        pinned = await on_engine(backend, lambda cache: cache.pin(namespace, tokens, ttl))
    except PinLimit as error:
        raise InvalidRequest(str(error), param="prompt") from None
    return answer(request, {"pinned_tokens": pinned, "ttl": ttl})


async def unpin(request: web.Request) -> web.Response:
    """POST /v1/prefix/unpin"""
    backend, _, namespace, tokens = await _scope(request)
    found = await on_engine(backend, lambda cache: cache.unpin(namespace, tokens))
    return answer(request, {"unpinned": found})


async def evict(request: web.Request) -> web.Response:
    """POST /v1/prefix/evict: drop what is cached of a prompt and of nothing else."""
    backend, _, namespace, tokens = await _scope(request)
    pages = await on_engine(backend, lambda cache: cache.evict(namespace, tokens))
    return answer(request, {"evicted_pages": pages})


async def tokenize(request: web.Request) -> web.Response:
    """POST /v1/tokenize: token ids, as a bin of little-endian int32 in msgpack."""
    backend = request.app[EDGE].ready_backend()
    body = await read_body(request, TokenizeRequest)
    tokens = await read_prompt(request, body, body.add_special_tokens)
    response = answer(request, {})
    packed = response.content_type in MSGPACK_TYPES
    return answer(request, {
        "count": len(tokens),
        "max_model_len": backend.engine.max_request_tokens,
        "tokens": tokens.astype("<i4").tobytes() if packed else tokens.tolist(),
    })  # fmt: skip


async def detokenize(request: web.Request) -> web.Response:
    """POST /v1/detokenize"""
    backend = request.app[EDGE].ready_backend()
    body = await read_body(request, DetokenizeRequest)
    tokens = token_ids(body.tokens, "tokens", backend.info.vocab_size)
    text = await tokenized(backend, lambda: backend.tokenizer.decode(tokens), len(tokens))
    return answer(request, {"prompt": text})


async def warm_named_prompts(edge: Edge) -> None:
    """Compute and pin the configuration's prompts, before the service says that it is ready."""
    backend = edge.ready_backend()
    for name, prompt in edge.config.prompts.items():
        text = prompt.text
        if prompt.file:
            try:
                text = await asyncio.to_thread(Path(prompt.file).read_text)
            except (OSError, UnicodeDecodeError) as error:
                raise SetupError(f"prompts.{name}.file: {error}") from None
        if prompt.system:
            tokens = await system_tokens(edge, backend, text)
        else:
            tokens = await prompt_tokens(backend, text)
        namespace = namespace_key(prompt.namespace)
        await _prefill(edge, backend, f"prompt-{name}", namespace, tokens)

        def keep(cache: PrefixCache, ns: str = namespace, ids: Tokens = tokens) -> int:
            return cache.pin(ns, ids, float("inf"))

        try:
            pinned = await on_engine(backend, keep)
        except PinLimit as error:
            raise SetupError(f"prompts.{name}: {error}") from None
        log.info("prompt %s: %d of %d tokens pinned", name, pinned, len(tokens))


async def system_tokens(edge: Edge, backend: Backend, text: str) -> Tokens:
    """What chats with this system message have in common, found by templating two of them."""
    system = Message(role="system", content=text)
    first, second = [
        await chat_tokens(edge, backend, [system, Message(role="user", content=word)], [])
        for word in ("A", "1")
    ]
    size = min(len(first), len(second))
    differ = np.flatnonzero(first[:size] != second[:size])
    return first[: differ[0] if len(differ) else size]


async def _prefill(
    edge: Edge, backend: Backend, id: str, namespace: str, tokens: Tokens
) -> UsageInfo:
    """Compute a prompt. The one token sampled for it is thrown away."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    plan = Plan(id=f"warm-{id}", namespace=namespace, prompts=[tokens], params=params)
    with Generation(backend, plan, edge.metrics) as generation:
        async for event in generation.events():
            if isinstance(event, End):
                return event.usage
    raise AssertionError("a generation ends with End or raises")


def _as_match(tiers: TierTokens) -> PrefixMatch:
    cached = tiers.device + tiers.host + tiers.disk
    return PrefixMatch(prompt_tokens=cached + tiers.computed, cached_tokens=cached, radixsvc=tiers)


def _tiers(tokens: Tokens, found: TokensByTier) -> TierTokens:
    return TierTokens(found.device, found.host, found.disk, len(tokens) - found.length)


ROUTES = [
    web.post("/v1/prefix/match", match),
    web.post("/v1/prefix/explain", explained),
    web.post("/v1/prefix/warm", warm),
    web.post("/v1/prefix/pin", pin),
    web.post("/v1/prefix/unpin", unpin),
    web.post("/v1/prefix/evict", evict),
    web.post("/v1/tokenize", tokenize),
    web.post("/v1/detokenize", detokenize),
]
