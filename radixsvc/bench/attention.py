"""Attention over pages on the CPU, beside torch's own and this machine's read bandwidth.

Every figure is a median of pairs: both sides are measured in turn, close together, so that what
else runs on the machine weighs on both. Decoding goes round over `ROTATED_BYTES` of keys and
values, so that they come from memory; contiguous keys and values for torch rotate likewise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from radixsvc.attention import (
    RaggedBatch,
    StepContext,
    attention_step,
    build_info,
    paged_attention,
    set_num_threads,
)
from radixsvc.bench.report import Metric
from tiers.device import DeviceTier
from tiers.page import PageShape

ROTATED_BYTES = 1 << 30
ROUND_BYTES = 1 << 26  # read by what is timed at once, at least
PAGE_SIZE = 16
HEADS = ((9, 3, 64), (32, 8, 128))
DTYPES = (torch.float32, torch.bfloat16)

Run = Callable[[], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options: the cases are the figures' names."""


def run(args: argparse.Namespace) -> list[Metric]:
    """All figures."""
    metrics = [
        Metric(f"KV rotated over, CPU {build_info()['cpu_isa']}", ROTATED_BYTES / 2**20, "MiB")
    ]
    for num_threads in sorted({1, min(2, torch.get_num_threads())}):
        with threads(num_threads):
            for heads in HEADS:
                for dtype in DTYPES:
                    for kv_len in (4096, 16384):
                        metrics += decode(heads, kv_len, dtype, num_threads)
                    metrics += decode_batch(heads, dtype, num_threads)
                    metrics += prefill(heads, dtype, num_threads)
    for dtype in DTYPES:
        metrics += shared_prefix(dtype)
    return metrics


@contextmanager
def threads(n: int) -> Iterator[None]:
    """torch's threads and ours."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        set_num_threads(before)


def seconds(*runs: Run, rounds: int = 15) -> list[list[float]]:
    """Times of each run, in turn, `rounds` times after one to warm up."""
    times: list[list[float]] = [[] for _ in runs]
    for i in range(rounds + 1):
        for kept, one in zip(times, runs, strict=True):
            start = time.perf_counter()
            one()
            if i:
                kept.append(time.perf_counter() - start)
    return times


def repeat(one: Run, times: int) -> Run:
    def several() -> None:
        for _ in range(times):
            one()

    return several


def ratio(dividend: list[float], divisor: list[float]) -> float:
    """Median of the ratios within pairs."""
    return statistics.median(a / b for a, b in zip(dividend, divisor, strict=True))


def bandwidth_reader() -> tuple[Run, int]:
    """A read of the next 128 MiB of `ROTATED_BYTES`, and its bytes."""
    parts = torch.ones(ROTATED_BYTES // 4).view(8, -1)
    turn = iter(range(1 << 62))
    return lambda: parts[next(turn) % 8].sum(), parts[0].nbytes


class Paged:
    """Sequences on pages in random order, in as many layers as `ROTATED_BYTES` holds."""

    def __init__(
        self,
        heads: tuple[int, int, int],
        kv_lens: list[int],
        q_len: int,
        dtype: torch.dtype,
        *,
        shared_len: int = 0,
        max_layers: int = 64,
    ) -> None:
        q_heads, kv_heads, head_dim = heads
        num_shared = shared_len // PAGE_SIZE
        own = [n // PAGE_SIZE - num_shared for n in kv_lens]
        ids = np.random.default_rng(0).permutation(sum(own) + num_shared).astype(np.int32)
        cuts = np.cumsum([num_shared, *own])
        self.tables = [
            np.concatenate([ids[:num_shared], ids[a:b]]) for a, b in pairwise(cuts.tolist())
        ]
        page_elems = 2 * kv_heads * PAGE_SIZE * head_dim
        layer_bytes = len(ids) * page_elems * dtype.itemsize
        self.num_layers = max(1, min(max_layers, ROTATED_BYTES // layer_bytes))
        name = str(dtype).removeprefix("torch.")
        shape = PageShape.uniform(self.num_layers, kv_heads, head_dim, PAGE_SIZE, name)
        device = DeviceTier(shape, len(ids), torch.device("cpu"))
        device.pool.normal_()
        self.pool, self.heads, self.kv_lens = device.pool, heads, kv_lens
        self.read_bytes = sum(kv_lens) * 2 * kv_heads * head_dim * dtype.itemsize
        batch = RaggedBatch.build([q_len] * len(kv_lens), kv_lens, self.tables, PAGE_SIZE)
        self.step = StepContext(device.pool, shape, batch)
        tokens = q_len * len(kv_lens)
        self.q = torch.randn(tokens, q_heads, head_dim).to(dtype)
        self.k = torch.randn(tokens, kv_heads, head_dim).to(dtype)
        self.scale = head_dim**-0.5
        self.layer = 0

    def attend(self) -> torch.Tensor:
        self.layer = (self.layer + 1) % self.num_layers
        with attention_step(self.step):
            return paged_attention(self.q, self.k, self.k, self.layer, self.scale)

    def gather(self) -> torch.Tensor:
        """Keys and values of all sequences, equally long: [2, sequences, kv_heads, kv_len, dim]."""
        self.layer = (self.layer + 1) % self.num_layers
        _, kv_heads, head_dim = self.heads
        slots = self.pool.view(-1, self.num_layers, 2, kv_heads, PAGE_SIZE, head_dim)
        pages = torch.from_numpy(np.stack(self.tables)).long()
        return (
            slots[pages, self.layer]
            .permute(2, 0, 3, 1, 4, 5)
            .reshape(2, len(self.tables), kv_heads, self.kv_lens[0], head_dim)
        )

    def gather_and_sdpa(self) -> torch.Tensor:
        kv = self.gather()
        q = self.q.view(len(self.tables), -1, *self.q.shape[1:]).transpose(1, 2)
        return F.scaled_dot_product_attention(q, kv[0], kv[1], enable_gqa=True)


def contiguous_sdpa(
    heads: tuple[int, int, int], kv_len: int, q_len: int, dtype: torch.dtype
) -> Run:
    """torch's attention on keys and values that lie in a row, rotating as the pages do."""
    q_heads, kv_heads, head_dim = heads
    one = 2 * kv_heads * kv_len * head_dim
    count = max(1, ROTATED_BYTES // (one * dtype.itemsize)) if q_len == 1 else 1
    kv = torch.ones(count, 2, 1, kv_heads, kv_len, head_dim, dtype=dtype)
    q = torch.randn(1, q_heads, q_len, head_dim).to(dtype)
    behind = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)
    hidden = torch.zeros(q_len, kv_len, dtype=dtype).masked_fill(behind < 0, float("-inf"))
    mask = None if q_len == 1 else hidden
    turn = iter(range(1 << 62))

    def attend() -> torch.Tensor:
        k, v = kv[next(turn) % count]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return attend


def label(what: str, heads: tuple[int, int, int], dtype: torch.dtype, num_threads: int) -> str:
    width = "fp32" if dtype == torch.float32 else "bf16"
    return f"{what} {'/'.join(map(str, heads))} {width}, {num_threads} threads"


def decode(
    heads: tuple[int, int, int], kv_len: int, dtype: torch.dtype, num_threads: int
) -> list[Metric]:
    paged = Paged(heads, [kv_len], 1, dtype)
    read, read_bytes = bandwidth_reader()
    times = max(1, ROUND_BYTES // paged.read_bytes)  # as many layers follow each other
    torch_run = contiguous_sdpa(heads, kv_len, 1, dtype)
    ours, reads, torchs = seconds(repeat(paged.attend, times), read, repeat(torch_run, times))
    name = label(f"decode {kv_len}", heads, dtype, num_threads)
    share = ratio(reads, ours) * paged.read_bytes * times / read_bytes
    return [
        Metric(name, statistics.median(ours) / times * 1e3, "ms"),
        Metric(f"{name}: of read bandwidth", 100 * share, "%", 70, True),
        Metric(f"{name}: SDPA, contiguous / ours", ratio(torchs, ours), "x", 1, True),
    ]


def decode_batch(heads: tuple[int, int, int], dtype: torch.dtype, num_threads: int) -> list[Metric]:
    paged = Paged(heads, [4096] * 8, 1, dtype)
    ours, torchs = seconds(paged.attend, paged.gather_and_sdpa, rounds=5)
    name = label("decode 8 x 4096", heads, dtype, num_threads)
    return [Metric(f"{name}: gather + SDPA / ours", ratio(torchs, ours), "x", 3, True)]


def prefill(heads: tuple[int, int, int], dtype: torch.dtype, num_threads: int) -> list[Metric]:
    paged = Paged(heads, [4608], 512, dtype, max_layers=1)
    ours, torchs = seconds(paged.attend, contiguous_sdpa(heads, 4608, 512, dtype), rounds=5)
    name = label("prefill 512 on 4096", heads, dtype, num_threads)
    return [
        Metric(name, statistics.median(ours) * 1e3, "ms"),
        Metric(f"{name}: SDPA, contiguous / ours", ratio(torchs, ours), "x", 0.9, True),
    ]


def shared_prefix(dtype: torch.dtype) -> list[Metric]:
    heads, kv_lens = HEADS[1], [8192 + 256] * 32
    grouped = Paged(heads, kv_lens, 1, dtype, shared_len=8192, max_layers=1)
    copies = Paged(heads, kv_lens, 1, dtype, max_layers=1)
    ours, separate = seconds(grouped.attend, copies.attend, rounds=5)
    name = label("shared prefix 32 x (8192 + 256)", heads, dtype, torch.get_num_threads())
    return [Metric(f"{name}: separate / shared", ratio(separate, ours), "x", 3, True)]
