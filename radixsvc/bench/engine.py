"""The engine against stock transformers on the same weights, threads and tokens, in one run.

Every figure is a ratio of medians: follow-up turns, prefill and decode against transformers with
its own cache; batch 8 against batch 1; a cold turn against a cached one. The step overhead is
what a step takes beside model and attention, measured with a model that answers at once.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from radixsvc.attention import set_num_threads
from radixsvc.bench.harness import Outcome, ask, complete, greedy, running_engine
from radixsvc.bench.report import Metric
from radixsvc.cache import PrefixCache
from radixsvc.completion import Tokens
from radixsvc.engine import Engine, EngineConfig
from radixsvc.fetch import fetch
from radixsvc.model import Model, load_model, measure_num_threads
from radixsvc.request import Request
from radixsvc.sampler import SamplerState, sample
from radixsvc.stream import TokenStream
from tiers.device import DeviceTier


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=None, help="folder, .gguf file or hub id")
    parser.add_argument("--dtype", default=None, help="float32 or bfloat16")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, help="only: so many mixed ones agree")
    parser.add_argument("--agents", type=int, help="only: agents at once, cache on and off")
    parser.add_argument("--turns", type=int, default=10, help="of each agent")


def run(args: argparse.Namespace) -> list[Metric]:
    folder = fetch(args.model)
    dtype = "float32" if args.requests else args.dtype
    model = load_model(folder, dtype, torch.device("cpu"))
    set_num_threads(measure_num_threads(model.info.dtype))
    if args.agents:
        return agents(model, args.agents, args.turns, args.prompt_tokens)
    stock: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, model.info.dtype), local_files_only=True
    )
    if args.requests:
        return mixed_requests(model, stock, args.requests)
    metrics = []
    with torch.inference_mode(), running_engine(model, 40_000) as engine:
        metrics += follow_up(engine, stock, args.prompt_tokens, args.rounds)
        metrics += shared_system_prompt(engine, args.prompt_tokens)
        metrics += decode(engine, stock, args.rounds)
    return metrics + step_overhead(model)


def random_prompt(seed: int, length: int, model: Model) -> Tokens:
    rng = np.random.default_rng(seed)
    return rng.integers(1000, min(40_000, model.info.vocab_size), length).astype(np.int32)


def follow_up(engine: Engine, stock: Any, length: int, rounds: int) -> list[Metric]:
    """A cold turn of `length` tokens, then the reply and 20 new tokens."""
    cold, warm, stock_cold, stock_warm, cached = [], [], [], [], []
    for i in range(rounds):
        prompt = random_prompt(i, length, engine.model)
        [first] = complete(engine, [prompt], greedy(32))
        reply = np.array(first.tokens, np.int32)
        second_prompt = np.concatenate([prompt, reply, random_prompt(10**6 + i, 20, engine.model)])
        [second] = complete(engine, [second_prompt], greedy(1))
        cold.append(first.first_token)
        warm.append(second.first_token)
        cached.append(second.usage.sources.cached / (length + len(reply) - 1))
        stock_cold.append(timed(partial(stock_forward, stock, prompt, DynamicCache())))
        past = DynamicCache()
        stock_forward(stock, second_prompt[: second.usage.sources.cached], past)
        new = second_prompt[second.usage.sources.cached :]
        stock_warm.append(timed(partial(stock_forward, stock, new, past)))
    m = statistics.median
    return [
        Metric("follow-up: cached share of the earlier tokens", m(cached), "", 0.98, True),
        Metric("follow-up TTFT / stock forward over its cache", m(warm) / m(stock_warm), "x", 1.3),
        Metric("follow-up TTFT", m(warm) * 1e3, "ms"),
        Metric("cold TTFT / follow-up TTFT", m(cold) / m(warm), "x", None, True),
        Metric("prefill rate / stock forward", m(stock_cold) / m(cold), "x", 0.95, True),
        Metric("prefill rate", length / m(cold), "tokens/s", None, True),
    ]


def shared_system_prompt(engine: Engine, length: int) -> list[Metric]:
    """Eight requests with one system prompt, sent at once."""
    system = random_prompt(77, length, engine.model)
    prompts = [np.concatenate([system, random_prompt(100 + i, 20, engine.model)]) for i in range(8)]
    outcomes = complete(engine, prompts, greedy(1))
    computed = sum(o.usage.sources.computed for o in outcomes)
    return [Metric("8 at once: tokens computed / least", computed / (length + 8 * 20), "x", 1.1)]


def decode(engine: Engine, stock: Any, rounds: int) -> list[Metric]:
    """Tokens a second after the first, alone and eight at once, against `generate`."""
    new_tokens = 48
    alone, eight, generate = [], [], []
    for i in range(rounds):
        prompts = [random_prompt(200 + 10 * i + j, 64, engine.model) for j in range(8)]
        [one] = complete(engine, prompts[:1], greedy(new_tokens))
        alone.append((new_tokens - 1) / (one.total - one.first_token))
        many = complete(engine, prompts[1:] + prompts[:1], greedy(new_tokens))
        last_first = max(o.first_token for o in many)
        eight.append(8 * (new_tokens - 1) / (max(o.total for o in many) - last_first))
        ids = torch.from_numpy(prompts[0].astype(np.int64))[None]
        spans = {}
        for n in (1, new_tokens):
            spans[n] = timed(
                partial(
                    stock.generate,
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=n,
                    min_new_tokens=n,
                    do_sample=False,
                )
            )
        generate.append((new_tokens - 1) / (spans[new_tokens] - spans[1]))
    m = statistics.median
    return [
        Metric("decode alone / transformers generate", m(alone) / m(generate), "x", 0.9, True),
        Metric("decode at batch 8 / batch 1", m(eight) / m(alone), "x", 4.0, True),
        Metric("decode alone", m(alone), "tokens/s", None, True),
        Metric("decode at batch 8", m(eight), "tokens/s", None, True),
    ]


def agents(model: Model, num_agents: int, turns: int, shared_len: int) -> list[Metric]:
    """Agents at once, each turn its last one, the reply and 200 new tokens; 32 tokens a reply."""
    shared = random_prompt(400, shared_len, model)

    async def agent(engine: Engine, index: int) -> list[Outcome]:
        prompt, outcomes = shared, []
        for turn in range(turns):
            new = random_prompt(1000 * index + turn + 500, 200, model)
            prompt = np.concatenate([prompt, new])
            outcomes.append(await ask(engine, prompt, greedy(32)))
            prompt = np.concatenate([prompt, np.array(outcomes[-1].tokens, np.int32)])
        return outcomes

    async def everyone(engine: Engine) -> list[list[Outcome]]:
        return await asyncio.gather(*(agent(engine, i) for i in range(num_agents)))

    room = shared_len + num_agents * turns * 250
    with running_engine(model, room + num_agents * 16) as engine:
        started = time.perf_counter()
        outcomes = asyncio.run(everyone(engine))
        wall = time.perf_counter() - started
    with running_engine(model, num_agents * (shared_len + turns * 250), cached=False) as engine:
        uncached = timed(lambda: asyncio.run(everyone(engine)))
    usages = [o.usage for of_agent in outcomes for o in of_agent]
    cached = sum(u.sources.cached for u in usages) / sum(u.prompt_tokens for u in usages)
    m = statistics.median
    later = [o.first_token for of_agent in outcomes for o in of_agent[1:]]
    name = f"{num_agents} agents x {turns} turns"
    return [
        Metric(f"{name}: whole run", wall, "s"),
        Metric(f"{name}: cached share of the prompts", cached, "", 0.92, True),
        Metric(f"{name}: cache off / on", uncached / wall, "x", 4.0, True),
        Metric(f"{name}: first token, turn 1", m(o[0].first_token for o in outcomes), "s"),
        Metric(f"{name}: first token, later", m(later) if later else 0.0, "s"),
    ]


def mixed_requests(model: Model, stock: Any, count: int) -> list[Metric]:
    """Requests of mixed lengths, some with a common beginning: all at once over a cache, and
    each alone without one. Greedy answers must agree token for token, near ties apart."""
    rng = np.random.default_rng(500)
    beginnings = [random_prompt(600 + i, 300, model) for i in range(8)]
    prompts = [
        np.concatenate(
            [
                beginnings[i % 8][: int(rng.integers(0, 300))],
                random_prompt(700 + i, int(rng.integers(1, 200)), model),
            ]
        )
        for i in range(count)
    ]
    with running_engine(model, 16 * 1024) as engine:
        together = complete(engine, prompts, greedy(16))
    with running_engine(model, 1024, cached=False) as engine:
        alone = [complete(engine, [prompt], greedy(16))[0] for prompt in prompts]
    differ = wrong = 0
    for prompt, *pair in zip(prompts, together, alone, strict=True):
        if pair[0].tokens != pair[1].tokens:
            differ += 1
            wrong += not all(is_greedy(stock, prompt, o.tokens) for o in pair)
    return [
        Metric(f"{count} mixed requests: answers that differ by batch or cache", differ, ""),
        Metric("of them with more than a near tie", wrong, "", 0),
    ]


def is_greedy(stock: Any, prompt: Tokens, output: list[int], tolerance: float = 1e-4) -> bool:
    """Whether every token is the stock model's best after all before it, as `generate` returns.

    `tolerance` is of logits: where the two best are closer than twice that, either will do.
    """
    ids = torch.tensor([[*prompt.tolist(), *output]])
    with torch.inference_mode():
        logits = stock(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = logits[torch.arange(len(output)), torch.tensor(output)]
    return bool((logits.max(-1).values - chosen <= 2 * tolerance).all())


def step_overhead(model: Model) -> list[Metric]:
    """A decode step of the engine thread with a model that answers at once, sampling apart."""
    metrics = []
    loop = asyncio.new_event_loop()
    for batch, target in ((8, 300.0), (64, 1500.0)):
        instant = InstantModel(model)
        device = DeviceTier(model.page_shape(16), 64 * 24, torch.device("cpu"))
        engine = Engine(instant, device, PrefixCache(device, 16), EngineConfig())  # type: ignore[arg-type]
        for i in range(batch):
            prompt, stream = random_prompt(300 + i, 32, model), TokenStream(loop, 10_000)
            engine.submit(Request(f"{i}", "bench", prompt, greedy(300), stream))
        engine.take_in()
        with torch.inference_mode():
            spans = [timed(engine.step) for _ in range(200)][50:]
        step = statistics.median(spans) - instant.sampling_seconds(batch)
        metrics.append(Metric(f"step overhead at batch {batch}", step * 1e6, "us", target))
    loop.close()
    return metrics


class InstantModel:
    """Constant logits at no cost."""

    def __init__(self, model: Model) -> None:
        self.info = model.info
        self._logits = torch.zeros(64, 32)

    def forward(self, ids: Any, positions: Any, context: Any, rows: Any) -> torch.Tensor:
        return self._logits[: len(rows)]

    def sampling_seconds(self, batch: int) -> float:
        logits = self._logits[:batch]
        params = greedy(1)
        states = [SamplerState(params, np.zeros(1, np.int32)) for _ in range(batch)]
        return statistics.median(timed(lambda: sample(logits, states)) for _ in range(50))


def stock_forward(stock: Any, tokens: Tokens, past: DynamicCache) -> None:
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    stock(ids, past_key_values=past, use_cache=True, logits_to_keep=1)


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
