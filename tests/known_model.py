"""A model with known logits, whose answers come out of the pages it is given.

Its "key" of a token is the token itself, written to the pages by every step and read back
through the page table for all positions. A wrong page, a stale page or a lost token changes the
answer, which `expected` computes from the tokens alone.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from radixsvc.cache import Lower, PrefixCache
from radixsvc.completion import SamplingParams
from radixsvc.engine import Engine, EngineConfig
from radixsvc.request import Request
from radixsvc.stream import Finished, TokenStream
from tiers.device import DeviceTier
from tiers.page import PageShape

VOCAB = 97
EOS = 0
OVERLAP = False  # of engines under test: whether they launch a step before the last one retires


def next_token(tokens: Sequence[int]) -> int:
    """Depends on every token and its place; never EOS."""
    weights = np.arange(1, len(tokens) + 1, dtype=np.int64)
    return 1 + int((np.asarray(tokens, np.int64) * (weights % 1009 + 7)).sum() % (VOCAB - 1))


def expected(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = [int(t) for t in prompt]
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class KnownModel:
    """Stands where `radixsvc.model.Model` stands. `before_step` may wait, raise or look."""

    def __init__(self, max_context: int = 4096) -> None:
        self.info = SimpleNamespace(
            name="known", max_context=max_context, vocab_size=VOCAB, eos_token_ids=frozenset({EOS})
        )
        self.before_step: Callable[[list[list[int]]], None] = lambda sequences: None
        self.num_computed = 0
        self.step_sizes: list[int] = []

    def page_shape(self, page_size: int) -> PageShape:
        return PageShape.uniform(1, 1, 1, page_size, "float32")

    def forward(
        self, input_ids: torch.Tensor, where: torch.Tensor, context: Any, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        ids, positions, rows = input_ids.numpy(), where.numpy(), logit_rows.numpy()
        batch, size = context.batch, context.shape.page_size
        starts = batch.cu_seqlens_q.tolist()
        firsts = batch.page_indptr.tolist()
        kv_lens = batch.kv_lens.tolist()
        pages = batch.pages
        pool = context.pool.numpy()
        self.num_computed += len(ids)
        self.step_sizes.append(len(kv_lens))
        sequences = []
        for i, kv_len in enumerate(kv_lens):
            table = pages[firsts[i] : firsts[i + 1]]
            for row in range(starts[i], starts[i + 1]):
                pool[table[positions[row] // size], positions[row] % size] = ids[row]
            sequences.append(pool[table, :size].reshape(-1)[:kv_len].astype(np.int64).tolist())
        self.before_step(sequences)
        logits = torch.zeros(len(rows), VOCAB)
        last_rows = {starts[i + 1] - 1: i for i in range(len(kv_lens))}
        for out, row in enumerate(rows.tolist()):
            logits[out, next_token(sequences[last_rows[row]])] = 10.0
        return logits


class EngineUnderTest:
    """A started engine over a KnownModel with `num_pages` pages of `page_size` tokens."""

    _ids = itertools.count()

    def __init__(
        self,
        num_pages: int,
        page_size: int = 4,
        config: EngineConfig | None = None,
        build_lower: Callable[[DeviceTier], Lower | None] = lambda device: None,
    ) -> None:
        self.model = KnownModel()
        self.device = DeviceTier(self.model.page_shape(page_size), num_pages, torch.device("cpu"))
        self.lower = build_lower(self.device)
        self.cache = PrefixCache(self.device, page_size, lower=self.lower)
        config = replace(config or EngineConfig(), overlap=OVERLAP)
        self.engine = Engine(self.model, self.device, self.cache, config)  # type: ignore[arg-type]

    def __enter__(self) -> EngineUnderTest:
        self.engine.start()
        while not self.engine.ready:
            assert self.engine.failed is None, self.engine.failed
            time.sleep(0.001)
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.drain(5.0)
        if self.lower is not None:
            self.lower.close()
        assert self.engine.failed is None, self.engine.failed

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        namespace: str = "a",
        capacity: int = 512,
        deadline: float | None = None,
        **params: Any,
    ) -> Request:
        """On the event loop: a submitted greedy request."""
        request = Request(
            id=f"r{next(self._ids)}",
            namespace=namespace,
            tokens=np.asarray(prompt, np.int32),
            params=SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),
            stream=TokenStream(asyncio.get_running_loop(), capacity),
            eos_token_ids=frozenset({EOS}),
            deadline=deadline,
        )
        self.engine.submit(request)
        return request

    async def read(self, request: Request) -> tuple[list[int], Finished]:
        tokens: list[int] = []
        async for chunk in request.stream:
            tokens += chunk.tokens
            if chunk.end is not None:
                return tokens, chunk.end
        raise AssertionError("no end")

    async def ask(self, prompt: Sequence[int], **more: Any) -> tuple[list[int], Finished]:
        return await self.read(self.submit(prompt, **more))

    async def settled(self) -> None:
        """Wait until the engine has nothing left to do."""
        while self.engine.progress()[0]:
            await asyncio.sleep(0.002)

    def check(self) -> None:
        """Ownership, and that every page is free or the tree's."""
        self.engine.call(lambda cache: cache.check()).result(10)
        counts = self.device.count()
        assert counts["writing"] == counts["loading"] == 0, counts


class Gate:
    """Holds the engine at its next steps until opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, sequences: list[list[int]]) -> None:
        self.reached.set()
        assert self._open.wait(20)

    def open(self) -> None:
        self._open.set()
