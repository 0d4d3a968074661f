"""Decode steps as CUDA graphs: one launch in the place of the hundreds a forward pass takes.

A graph is captured for each batch of 1, 2, 4, ... sequences and replays what it recorded on the
same memory: a step writes its inputs there, one copy each, and pads the batch up to the graph's.
Rows of padding belong to no sequence: nothing is appended for them, and what they compute is cut
off. What does not fit a graph, or cannot be captured, runs as it does without graphs.

Rules of capture (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs): warm up on the
stream that captures, so that libraries allocate before; touch no memory that is not the graph's
pool or kept for its lifetime; never wait for the device. Other threads copy pages meanwhile, so
what they do is no error (`thread_local`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from radixsvc.attention import Int32s, RaggedBatch, StepContext, pinned, to_device
from radixsvc.completion import Tokens
from radixsvc.model import Model
from tiers.device import DeviceTier
from tiers.page import PageIds

log = logging.getLogger("radixsvc.graphs")

MAX_TOKENS = 1 << 19  # of all contexts of a captured step: bounds the memory kept for it

Run = Callable[[], torch.Tensor]


class Late(NamedTuple):
    """Inputs that are known on the device alone: token `sources[i]` belongs at `rows[i]`."""

    rows: list[int]
    sources: list[int]
    tokens: torch.Tensor

    def write(self, ids: torch.Tensor) -> None:
        """Put them in; a failed sample's -1 becomes a token, whose request ends anyway."""
        rows, sources = to_device(np.array([self.rows, self.sources]), ids.device)
        ids.index_copy_(0, rows, self.tokens[sources].clamp_min(0).to(ids.dtype))


class Captured:
    """A decode step of `size` sequences and the memory it reads."""

    def __init__(
        self,
        model: Model,
        tier: DeviceTier,
        size: int,
        num_tokens: int,
        partials: torch.Tensor | None,
        capture: Callable[[Run], Run],
    ) -> None:
        self.size = size
        self.ids, self.positions = torch.zeros(2, size, dtype=torch.int32, device=tier.device)
        rows = torch.arange(size, device=tier.device)
        batch = RaggedBatch.largest(size, num_tokens, tier.shape.page_size, tier.device)
        assert batch.memory is not None
        self.memory = batch.memory
        self.context = StepContext(tier.pool, tier.shape, batch, partials)
        self.replay = capture(lambda: model.forward(self.ids, self.positions, self.context, rows))


class DecodeGraphs:
    """Graphs for up to `max_batch` sequences, captured by `capture`, the largest first."""

    def __init__(
        self,
        model: Model,
        tier: DeviceTier,
        max_batch: int,
        max_context: int,
        capture: Callable[[Run], Run],
    ) -> None:
        self._page_size = tier.shape.page_size
        self.steps: list[Captured] = []  # by size, the smallest first
        partials: torch.Tensor | None = None
        size = 1 << (max_batch - 1).bit_length()
        try:
            while size:
                num_tokens = min(size * max_context, MAX_TOKENS)
                step = Captured(model, tier, size, num_tokens, partials, capture)
                partials = step.context.partials
                self.steps.insert(0, step)
                size //= 2
        except Exception as error:
            log.warning("decode steps of %d run without a CUDA graph: %s", size, error)

    def forward(
        self,
        tokens: Tokens,
        positions: Tokens,
        kv_lens: Int32s,
        page_tables: Sequence[PageIds],
        late: Late | None,
    ) -> torch.Tensor | None:
        """Logits [len(tokens), vocab_size] of one new token a sequence, good until the next call.

        None where no graph takes so many sequences, or such long ones.
        """
        num = len(tokens)
        step = next((s for s in self.steps if s.size >= num), None)
        if step is None:
            return None
        batch = RaggedBatch.build(
            [1] * num, kv_lens, page_tables, self._page_size, num_rows=step.size
        )
        if not step.memory.write(batch):
            return None
        for target, source in ((step.ids, tokens), (step.positions, positions)):
            target[:num].copy_(pinned(source, target.device), non_blocking=True)
        if late is not None:
            late.write(step.ids)
        return step.replay()[:num]


def cuda_capture(device: torch.device) -> Callable[[Run], Run]:
    """What makes a graph of a function: calling the result replays it, to the same output."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Run) -> Run:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            out = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    return capture
