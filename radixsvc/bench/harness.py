"""An engine in this process, and what its requests took."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from radixsvc.cache import Lower, PrefixCache
from radixsvc.completion import SamplingParams, Tokens, Usage
from radixsvc.engine import Engine, EngineConfig
from radixsvc.model import Model
from radixsvc.request import Request
from radixsvc.stream import TokenStream
from tiers.device import DeviceTier

_ids = itertools.count()


@dataclass(frozen=True)
class Outcome:
    """One request's output; times in seconds, from submission on."""

    tokens: list[int]
    first_token: float
    total: float
    usage: Usage


@contextmanager
def running_engine(
    model: Model,
    num_tokens: int,
    page_size: int = 16,
    config: EngineConfig | None = None,
    build_lower: Callable[[DeviceTier], Lower | None] = lambda device: None,
    *,
    cached: bool = True,
) -> Iterator[Engine]:
    """A started engine with a device tier for `num_tokens` tokens, drained at the end.

    `build_lower` makes the tiers below it; they are closed at the end. Not `cached`: nothing is
    reused.
    """
    device = DeviceTier(model.page_shape(page_size), -(-num_tokens // page_size), model.device)
    lower = build_lower(device)
    cache = PrefixCache(device, page_size, lower=lower, enabled=cached)
    engine = Engine(model, device, cache, config or EngineConfig())
    engine.start()
    try:
        while not engine.ready and engine.failed is None:
            time.sleep(0.01)
        yield engine
    finally:
        engine.drain(10.0)
        if lower is not None:
            lower.close()


def greedy(max_tokens: int, *, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos)


async def ask(
    engine: Engine, prompt: Tokens, params: SamplingParams, namespace: str = "bench"
) -> Outcome:
    """Submit one prompt and wait for its answer."""
    request = Request(
        id=f"bench-{next(_ids)}",
        namespace=namespace,
        tokens=prompt,
        params=params,
        stream=TokenStream(asyncio.get_running_loop()),
        eos_token_ids=engine.model.info.eos_token_ids,
    )
    started = time.perf_counter()
    engine.submit(request)
    tokens: list[int] = []
    first = 0.0
    async for chunk in request.stream:
        first = first or time.perf_counter() - started
        tokens.extend(chunk.tokens)
        if chunk.end is not None:
            return Outcome(tokens, first, time.perf_counter() - started, chunk.end.usage)
    raise AssertionError("a stream has an end or raises")


def complete(
    engine: Engine, prompts: Sequence[Tokens], params: SamplingParams, namespace: str = "bench"
) -> list[Outcome]:
    """Submit all prompts at once and wait for all of them."""

    async def everything() -> list[Outcome]:
        return list(await asyncio.gather(*(ask(engine, p, params, namespace) for p in prompts)))

    return asyncio.run(everything())
