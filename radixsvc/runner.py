"""One step on the device: its inputs, the forward pass, the next tokens. It never decides.

A step is launched and later fetched. In between the host may launch the next one, whose decoding
requests begin with tokens the host does not know yet: they are gathered on the device from those
that the step before samples. Everything is queued on one stream, and copy streams wait for what
was queued there before them: so what a step writes or reads is there when its turn comes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from radixsvc.attention import RaggedBatch, StepContext, to_device
from radixsvc.completion import Tokens
from radixsvc.graphs import DecodeGraphs, Late, cuda_capture
from radixsvc.model import Model
from radixsvc.request import Request, State
from radixsvc.sampler import Sampled, SamplerState, finish, pick
from radixsvc.scheduler import Scheduled
from tiers.device import DeviceTier
from tiers.page import PageIds


class NewTokens(NamedTuple):
    """`tokens` of one sequence from position `start` on, and the pages of all up to them."""

    tokens: Tokens
    start: int
    page_table: PageIds


class Work(NamedTuple):
    """A request's part in a step, after which its first `end` tokens have keys and values."""

    request: Request
    end: int
    prefills: bool
    samples: bool


class Launched(NamedTuple):
    """A step under way. `tokens` are the sampled ones on the device, and `copied` on the host
    once the event `done` has come. `logits` are kept where the host has to look at them."""

    work: list[Work]
    num_prefill: int
    states: list[SamplerState]
    tokens: torch.Tensor
    copied: torch.Tensor
    done: torch.cuda.Event | None
    logits: torch.Tensor | None
    started: float  # time.perf_counter() seconds

    def fetch(self) -> list[Sampled | None]:
        """Wait for the next tokens, in the order of `work`; None where sampling failed."""
        if self.done is not None:
            self.done.synchronize()
        return finish(self.copied.tolist(), self.logits, self.states)


class Runner:
    """Runs steps of `model` over the pages of `tier`."""

    def __init__(self, model: Model, tier: DeviceTier) -> None:
        self.model = model
        self.tier = tier
        self.graphs: DecodeGraphs | None = None

    def capture(self, max_batch: int, max_context: int) -> None:
        """Run decode steps as CUDA graphs from now on."""
        capture = cuda_capture(self.tier.device)
        self.graphs = DecodeGraphs(self.model, self.tier, max_batch, max_context, capture)

    def launch(self, scheduled: Sequence[Scheduled], before: Launched | None) -> Launched:
        """Queue a step, which may come right behind `before`. Any exception changes nothing."""
        started = time.perf_counter()
        new, work, states, ahead = [], [], [], []
        late_rows, late_sources = [], []
        row = num_prefill = 0
        for request, num_tokens in scheduled:
            lease, pending = request.lease, request.pending
            assert lease is not None
            assert request.sampler is not None
            start, end = request.num_computed, request.num_computed + num_tokens
            ids = lease.tokens[start:end]
            if pending is not None:
                ids = np.zeros(1, np.int32)
                late_rows.append(row)
                late_sources.append(pending)
            samples = num_tokens == request.num_uncomputed
            if samples:
                states.append(request.sampler)
                ahead.append(int(pending is not None))
            prefills = request.state is State.PREFILLING
            num_prefill += num_tokens if prefills else 0
            row += num_tokens
            new.append(NewTokens(ids, start, lease.page_table))
            work.append(Work(request, end, prefills, samples))
        late = None
        if before is not None and late_rows:
            late = Late(late_rows, late_sources, before.tokens)
        logits = self.forward(new, [part.samples for part in work], late)
        tokens = copied = pick(logits, states, ahead)
        done = None
        if tokens.is_cuda:
            copied = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            copied.copy_(tokens, non_blocking=True)
            done = torch.cuda.current_stream(tokens.device).record_event()
        on_host = any(state.needs_host(logits.is_cpu) for state in states)
        kept = logits if on_host else None
        sampled = 0
        for request, end, _, samples in work:
            request.launched(end, sampled if samples else None)
            sampled += samples
        return Launched(work, num_prefill, states, tokens, copied, done, kept, started)

    def forward(
        self, new: Sequence[NewTokens], samples: Sequence[bool], late: Late | None = None
    ) -> torch.Tensor:
        """Logits [R, vocab_size] of the last new token of each of the R sequences that sample."""
        device, page_size = self.tier.device, self.tier.shape.page_size
        ids, starts, tables = zip(*new, strict=True)
        q_lens = np.fromiter(map(len, ids), np.int32, len(ids))
        ends = q_lens.cumsum(dtype=np.int32)
        kv_lens = q_lens + np.array(starts, np.int32)
        tokens = np.concatenate(ids)
        where = np.arange(len(tokens), dtype=np.int32) + np.repeat(kv_lens - ends, q_lens)
        if self.graphs is not None and len(tokens) == len(new) and all(samples):
            logits = self.graphs.forward(tokens, where, kv_lens, tables, late)
            if logits is not None:
                return logits
        batch = RaggedBatch.build(q_lens, kv_lens, tables, page_size, device)
        on_device = to_device(tokens, device)
        if late is not None:
            late.write(on_device)
        return self.model.forward(
            on_device,
            to_device(where, device),
            StepContext(self.tier.pool, self.tier.shape, batch),
            to_device((ends - 1)[np.array(samples)].astype(np.int64), device),
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch, numpy or Python ran out of memory."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def is_sticky(error: BaseException) -> bool:
    """Whether the device's context is lost, so that nothing on it can be trusted any more."""
    return isinstance(error, getattr(torch, "AcceleratorError", ())) and not isinstance(
        error, torch.OutOfMemoryError
    )
