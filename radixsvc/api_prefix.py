"""The prefix endpoints: what of a prompt is cached and why not more; warm, pin, unpin, evict.

All of them look into the caller's namespace alone. The tree is reached through the engine's
inbox, between two steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from radixsvc.admission import Call, Edge
from radixsvc.api_openai import chat_tokens, prompt_tokens, tokenized
from radixsvc.cache import PinLimit, PrefixCache
from radixsvc.codec import Encoding, token_ids
from radixsvc.completion import SamplingParams, Sources, Tokens
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
    UsageInfo,
)
from radixsvc.startup import Backend

T = TypeVar("T")
log = logging.getLogger("radixsvc.api")


async def on_engine(backend: Backend, function: Callable[[PrefixCache], T]) -> T:
    """Run `function` on the engine thread and wait for what it returns."""
    return await asyncio.wrap_future(backend.engine.call(function))


class Asked(NamedTuple):
    """Whose prompt is asked about."""

    namespace: str
    tokens: Tokens
    ttl: float


async def read_prompt(call: Call) -> Asked:
    """The body's `prompt`, or its `messages`, as token ids, and whose they are."""
    body = await call.read(PromptRequest)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", "prompt")
    if body.messages is None:
        tokens = await prompt_tokens(call.backend, body.prompt, body.add_special_tokens)
    else:
        canonical = call.edge.config.model.canonical_tools
        tokens = await chat_tokens(call.backend, body.messages, body.tools or [], canonical)
    return Asked(call.caller.namespace(body.cache_salt), tokens, body.ttl)


def on_prompt(function: Callable[[PrefixCache, Asked], T]) -> Callable[[Call], Awaitable[T]]:
    """The endpoint that runs `function` on the engine thread, for what the body asks about."""

    async def endpoint(call: Call) -> T:
        asked = await read_prompt(call)
        return await on_engine(call.backend, lambda cache: function(cache, asked))

    return endpoint


def match(cache: PrefixCache, asked: Asked) -> PrefixMatch:
    """How much of a prompt is cached, by tier; changes nothing."""
    num_tokens = len(asked.tokens)
    found = cache.match(asked.namespace, asked.tokens)
    return PrefixMatch(
        prompt_tokens=num_tokens,
        cached_tokens=found.length,
        radixsvc=Sources(found.device, found.host, found.disk, num_tokens - found.length),
    )


async def explained(call: Call) -> Explanation:
    """Why a prompt is not cached any further."""
    asked = await read_prompt(call)
    found, seen = await on_engine(
        call.backend,
        lambda cache: (match(cache, asked), look(cache.tree, asked.namespace, asked.tokens)),
    )
    tokenizer = call.backend.tokenizer
    return await asyncio.to_thread(explain, asked.tokens, found.radixsvc, seen, tokenizer)


async def warm(call: Call) -> PrefixMatch:
    """Compute and cache a prompt's keys and values."""
    asked = await read_prompt(call)
    usage = await prefill(call.edge, call.backend, call.id, asked)
    return PrefixMatch(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens,
        radixsvc=usage.radixsvc,
    )


def pin(cache: PrefixCache, asked: Asked) -> dict[str, Any]:
    """Keep a cached prompt from being dropped, for `ttl` seconds."""
    try:
        pinned = cache.pin(asked.namespace, asked.tokens, asked.ttl)
    except PinLimit as error:
        raise InvalidRequest(str(error), "prompt") from None
    return {"pinned_tokens": pinned, "ttl": asked.ttl}


def unpin(cache: PrefixCache, asked: Asked) -> dict[str, Any]:
    return {"unpinned": cache.unpin(asked.namespace, asked.tokens)}


def evict(cache: PrefixCache, asked: Asked) -> dict[str, Any]:
    """Drop what is cached of a prompt and of nothing else."""
    return {"evicted_pages": cache.evict(asked.namespace, asked.tokens)}


async def tokenize(call: Call) -> Any:
    """POST /v1/tokenize: token ids, as a bin of little-endian int32 in msgpack."""
    tokens = (await read_prompt(call)).tokens
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
        tokens = await (system_tokens if prompt.system else prompt_tokens)(backend, text)
        asked = Asked(namespace_key(prompt.namespace), tokens, float("inf"))
        await prefill(edge, backend, f"prompt-{name}", asked)
        try:
            pinned = await on_engine(backend, partial(pin, asked=asked))
        except InvalidRequest as error:
            raise SetupError(f"prompts.{name}: {error}") from None
        log.info("prompt %s: %d of %d tokens pinned", name, pinned["pinned_tokens"], len(tokens))


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


async def prefill(edge: Edge, backend: Backend, id: str, asked: Asked) -> UsageInfo:
    """Compute a prompt. The one token sampled for it is thrown away."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    account = account_name(asked.namespace)
    plan = Plan(f"warm-{id}", account, asked.namespace, [asked.tokens], params)
    with Generation(edge, backend, plan) as generation:
        while not generation.is_done:
            await generation.deltas()
        return generation.usage()


ROUTES: dict[tuple[str, str], Callable[[Call], Awaitable[Any]]] = {
    ("POST", "/v1/prefix/match"): on_prompt(match),
    ("POST", "/v1/prefix/explain"): explained,
    ("POST", "/v1/prefix/warm"): warm,
    ("POST", "/v1/prefix/pin"): on_prompt(pin),
    ("POST", "/v1/prefix/unpin"): on_prompt(unpin),
    ("POST", "/v1/prefix/evict"): on_prompt(evict),
    ("POST", "/v1/tokenize"): tokenize,
    ("POST", "/v1/detokenize"): detokenize,
}
