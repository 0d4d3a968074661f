"""The prefix endpoints: what of a prompt is cached and why not more; warm, pin, unpin, evict.

All of them look into the caller's namespace alone. The tree is reached through the engine's
inbox, between two steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from radixsvc.admission import Call, Edge
from radixsvc.api_openai import chat_tokens, prompt_tokens, tokenized
from radixsvc.cache import PinLimit, PrefixCache
from radixsvc.codec import Encoding, token_ids
from radixsvc.errors import InvalidRequest, SetupError
from radixsvc.explain import explain, look
from radixsvc.generation import Generation, Plan
from radixsvc.namespace import account_name, namespace_key
from radixsvc.protocol import (
    DetokenizeRequest,
    Explanation,
    Message,
    PrefixMatch,
    PromptRequest,
    TierTokens,
    UsageInfo,
)
from radixsvc.request import SamplingParams, Tokens
from radixsvc.startup import Backend

T = TypeVar("T")
log = logging.getLogger("radixsvc.api")


async def on_engine(backend: Backend, function: Callable[[PrefixCache], T]) -> T:
    """Run `function` on the engine thread and wait for what it returns."""
    return await asyncio.wrap_future(backend.engine.call(function))


async def read_prompt(call: Call, body: PromptRequest) -> Tokens:
    """The token ids of a body's `prompt`, or of its `messages`."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    if body.messages is None:
        return await prompt_tokens(call.backend, body.prompt, body.add_special_tokens)
    canonical = call.edge.config.model.canonical_tools
    return await chat_tokens(call.backend, body.messages, body.tools or [], canonical)


class Asked(NamedTuple):
    """Whose prompt is asked about."""

    namespace: str
    tokens: Tokens
    ttl: float


async def read_scope(call: Call) -> Asked:
    body = await call.read(PromptRequest)
    namespace = call.caller.namespace(body.cache_salt)
    return Asked(namespace, await read_prompt(call, body), body.ttl)


async def on_prompt(call: Call, function: Callable[[PrefixCache, Asked], T]) -> T:
    """`function` on the engine thread, for what the body asks about."""
    asked = await read_scope(call)
    return await on_engine(call.backend, lambda cache: function(cache, asked))


async def match(call: Call) -> PrefixMatch:
    """POST /v1/prefix/match: how much of a prompt is cached, by tier; changes nothing."""
    return await on_prompt(call, _match)


async def explained(call: Call) -> Explanation:
    """POST /v1/prefix/explain: why a prompt is not cached any further."""
    asked, found, seen = await on_prompt(
        call, lambda cache, a: (a, _match(cache, a), look(cache.tree, a.namespace, a.tokens))
    )
    tokenizer = call.backend.tokenizer
    return await asyncio.to_thread(explain, asked.tokens, found.radixsvc, seen, tokenizer)


async def warm(call: Call) -> PrefixMatch:
    """POST /v1/prefix/warm: compute and cache a prompt's keys and values."""
    asked = await read_scope(call)
    usage = await _prefill(call.edge, call.id, asked.namespace, asked.tokens)
    return PrefixMatch(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens,
        radixsvc=usage.radixsvc,
    )


async def pin(call: Call) -> Any:
    """POST /v1/prefix/pin: keep a cached prompt from being dropped, for `ttl` seconds."""
    try:
        pinned, ttl = await on_prompt(
            call, lambda cache, a: (cache.pin(a.namespace, a.tokens, a.ttl), a.ttl)
        )
    except PinLimit as error:
        raise InvalidRequest(str(error), param="prompt") from None
    return {"pinned_tokens": pinned, "ttl": ttl}


async def unpin(call: Call) -> Any:
    """POST /v1/prefix/unpin"""
    return {"unpinned": await on_prompt(call, lambda cache, a: cache.unpin(a.namespace, a.tokens))}


async def evict(call: Call) -> Any:
    """POST /v1/prefix/evict: drop what is cached of a prompt and of nothing else."""
    return {
        "evicted_pages": await on_prompt(call, lambda cache, a: cache.evict(a.namespace, a.tokens))
    }


async def tokenize(call: Call) -> Any:
    """POST /v1/tokenize: token ids, as a bin of little-endian int32 in msgpack."""
    tokens = await read_prompt(call, await call.read(PromptRequest))
    is_packed = call.encoding is Encoding.MSGPACK
    return {
        "count": len(tokens),
        "max_model_len": call.backend.engine.max_request_tokens,
        "tokens": tokens.astype("<i4").tobytes() if is_packed else tokens.tolist(),
    }


async def detokenize(call: Call) -> Any:
    """POST /v1/detokenize"""
    body = await call.read(DetokenizeRequest)
    backend = call.backend
    tokens = token_ids(body.tokens, "tokens", backend.info.vocab_size)
    return {
        "prompt": await tokenized(backend, lambda: backend.tokenizer.decode(tokens), len(tokens))
    }


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
        find = system_tokens if prompt.system else prompt_tokens
        tokens = await find(backend, text)
        namespace = namespace_key(prompt.namespace)
        await _prefill(edge, f"prompt-{name}", namespace, tokens)

        def keep(cache: PrefixCache, ns: str = namespace, ids: Tokens = tokens) -> int:
            return cache.pin(ns, ids, float("inf"))

        try:
            pinned = await on_engine(backend, keep)
        except PinLimit as error:
            raise SetupError(f"prompts.{name}: {error}") from None
        log.info("prompt %s: %d of %d tokens pinned", name, pinned, len(tokens))


async def system_tokens(backend: Backend, text: str) -> Tokens:
    """What chats with this system message have in common, found by templating two of them."""
    system = Message(role="system", content=text)
    first, second = [
        await chat_tokens(backend, [system, Message(role="user", content=word)], [], True)
        for word in ("A", "1")
    ]
    size = min(len(first), len(second))
    differ = np.flatnonzero(first[:size] != second[:size])
    return first[: differ[0] if len(differ) else size]


async def _prefill(edge: Edge, id: str, namespace: str, tokens: Tokens) -> UsageInfo:
    """Compute a prompt. The one token sampled for it is thrown away."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    plan = Plan(f"warm-{id}", account_name(namespace), namespace, [tokens], params)
    with Generation(edge, plan) as generation:
        while not generation.is_done:
            await generation.deltas()
        return generation.usage()


def _match(cache: PrefixCache, asked: Asked) -> PrefixMatch:
    tokens = asked.tokens
    found = cache.match(asked.namespace, tokens)
    computed = len(tokens) - found.length
    return PrefixMatch(
        prompt_tokens=len(tokens),
        cached_tokens=found.length,
        radixsvc=TierTokens(found.device, found.host, found.disk, computed),
    )


ROUTES = {
    ("POST", "/v1/prefix/match"): match,
    ("POST", "/v1/prefix/explain"): explained,
    ("POST", "/v1/prefix/warm"): warm,
    ("POST", "/v1/prefix/pin"): pin,
    ("POST", "/v1/prefix/unpin"): unpin,
    ("POST", "/v1/prefix/evict"): evict,
    ("POST", "/v1/tokenize"): tokenize,
    ("POST", "/v1/detokenize"): detokenize,
}
