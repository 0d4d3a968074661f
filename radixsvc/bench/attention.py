"""Attention over pages on the CPU, beside torch's own and this machine's read bandwidth.

Every figure is a median of ratios: all sides are measured in turn, close together, so that what
else runs on the machine weighs on each. Decoding goes round over `ROTATED_BYTES` of keys and
values, so that they come from memory; contiguous keys and values for torch lie in the same
memory and rotate likewise. The bandwidth is that of `READER`, a plain loop of wide loads over the
same pages in the same order, page after page, by as many threads; it is compiled with `cc`.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from radixsvc.attention import (
    RaggedBatch,
    StepContext,
    build_info,
    paged_attention,
    set_num_threads,
)
from radixsvc.bench.report import Metric
from tiers.device import DeviceTier
from tiers.page import PageIds, PageShape

ROTATED_BYTES = 1 << 30
ROUND_BYTES = 1 << 27  # read by what is timed at once, at least
SHARED_LENS, SHARED_LEN = [8192 + 256] * 32, 8192
PAGE_SIZE = 16
HEADS = ((9, 3, 64), (32, 8, 128))
DTYPES = (torch.float32, torch.bfloat16)

READER = """
#include <stdint.h>
typedef uint64_t vec __attribute__((vector_size(64), aligned(64)));
/* Of each page, `bytes` of each of `count` of the `num` layers, in turn from the first on. */
uint64_t read_pages(const char *pool, const int32_t *pages, int64_t num_pages, int64_t stride,
                    int64_t bytes, int64_t first, int64_t count, int64_t num) {
    vec a = {0}, b = a, c = a, d = a;
    for (int64_t layer = first; layer < first + count; layer++)
        for (int64_t i = 0; i < num_pages; i++) {
            const vec *p = (const vec *)(pool + pages[i] * stride + layer % num * bytes);
            for (const vec *end = p + bytes / 64; p < end; p += 4)
                a |= p[0], b |= p[1], c |= p[2], d |= p[3];
        }
    a |= b | c | d;
    return a[0] | a[1] | a[2] | a[3] | a[4] | a[5] | a[6] | a[7];
}
"""

Run = Callable[[], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options: the cases are the figures' names."""


def run(args: argparse.Namespace) -> list[Metric]:
    """All figures."""
    metrics = [
        Metric(f"KV rotated over, CPU {build_info()['cpu_isa']}", ROTATED_BYTES / 2**20, "MiB")
    ]
    for dtype in DTYPES:
        memory = arena(dtype, torch.device("cpu"))
        for num_threads in sorted({1, min(2, torch.get_num_threads())}):
            with threads(num_threads):
                for heads in HEADS:
                    for kv_len in (4096, 16384):
                        metrics += decode(memory, heads, kv_len, num_threads)
                    metrics += decode_batch(memory, heads, num_threads)
                    metrics += prefill(memory, heads, num_threads)
        metrics += shared_prefix(memory)
    return metrics


def arena(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory as the device tier has it, for the largest case, of random numbers."""
    _, kv_heads, head_dim = HEADS[1]
    shape = PageShape.uniform(1, kv_heads, head_dim, 1, name_of(dtype))
    memory = DeviceTier(shape, sum(SHARED_LENS), device).pool.view(-1)
    some = torch.randn(1 << 20).to(dtype)
    for part in torch.split(memory, len(some)):
        part.copy_(some[: len(part)])
    return memory


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def reader() -> Callable[..., int]:
    """`READER`, compiled."""
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/reader.so"
        command = ["cc", "-x", "c", "-O3", "-march=native", "-shared", "-fPIC", "-", "-o", library]
        subprocess.run(command, input=READER.encode(), check=True)
        function = ctypes.CDLL(library).read_pages
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 6]
    function.restype = ctypes.c_uint64
    return function


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


def ratio(dividend: list[float], divisor: list[float]) -> float:
    """Median of the ratios within pairs."""
    return statistics.median(a / b for a, b in zip(dividend, divisor, strict=True))


class Paged:
    """Sequences on pages in random order, in as many layers as `ROTATED_BYTES` holds."""

    def __init__(
        self,
        memory: torch.Tensor,
        heads: tuple[int, int, int],
        kv_lens: list[int],
        q_len: int,
        *,
        shared_len: int = 0,
        max_layers: int = 1024,
    ) -> None:
        q_heads, kv_heads, head_dim = heads
        num_shared = shared_len // PAGE_SIZE
        own = [n // PAGE_SIZE - num_shared for n in kv_lens]
        ids = np.random.default_rng(0).permutation(sum(own) + num_shared).astype(np.int32)
        cuts = np.cumsum([num_shared, *own])
        self.tables = [
            np.concatenate([ids[:num_shared], ids[a:b]]) for a, b in pairwise(cuts.tolist())
        ]
        dtype, device = memory.dtype, memory.device
        self.bytes_in_page = 2 * kv_heads * PAGE_SIZE * head_dim * dtype.itemsize
        self.num_layers = max(1, min(max_layers, ROTATED_BYTES // (len(ids) * self.bytes_in_page)))
        shape = PageShape.uniform(self.num_layers, kv_heads, head_dim, PAGE_SIZE, name_of(dtype))
        self.pool = memory[: len(ids) * shape.elems].view(len(ids), shape.elems)
        self.heads, self.kv_lens = heads, kv_lens
        self.read_bytes = sum(kv_lens) * 2 * kv_heads * head_dim * dtype.itemsize
        batch = RaggedBatch.build([q_len] * len(kv_lens), kv_lens, self.tables, PAGE_SIZE, device)
        self.step = StepContext(self.pool, shape, batch)
        tokens = q_len * len(kv_lens)
        self.q = torch.randn(tokens, q_heads, head_dim, device=device).to(dtype)
        k = torch.randn(tokens, kv_heads, head_dim, device=device).to(dtype)
        self.k: torch.Tensor | None = k  # and the values; None: nothing is appended
        self.scale = head_dim**-0.5
        self.layer = 0

    def read(self, table: PageIds, layers: int) -> None:
        """One thread's share of reading all that `attend` reads in a step's next layers."""
        reader()(
            self.pool.data_ptr(), table.ctypes.data, len(table), self.pool[0].nbytes,
            self.bytes_in_page, self.layer + 1, layers, self.num_layers,
        )  # fmt: skip

    def attend(self, layers: int = 1) -> None:
        """A step's next layers."""
        with self.step:
            for _ in range(layers):
                self.layer = (self.layer + 1) % self.num_layers
                paged_attention(self.q, self.k, self.k, self.layer, self.scale)

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
    memory: torch.Tensor, heads: tuple[int, int, int], kv_len: int, q_len: int
) -> Callable[..., None]:
    """torch's attention on keys and values that lie in a row, rotating as the pages do."""
    q_heads, kv_heads, head_dim = heads
    dtype = memory.dtype
    one = 2 * kv_heads * kv_len * head_dim
    count = max(1, ROTATED_BYTES // (one * dtype.itemsize)) if q_len == 1 else 1
    kv = memory[: count * one].view(count, 2, 1, kv_heads, kv_len, head_dim)
    q = torch.randn(1, q_heads, q_len, head_dim).to(dtype)
    behind = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)
    hidden = torch.zeros(q_len, kv_len, dtype=dtype).masked_fill(behind < 0, float("-inf"))
    mask = None if q_len == 1 else hidden
    turn = iter(range(1 << 62))

    def attend(layers: int = 1) -> None:
        for _ in range(layers):
            k, v = kv[next(turn) % count]
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return attend


def label(what: str, heads: tuple[int, int, int], dtype: torch.dtype, num_threads: int) -> str:
    width = "fp32" if dtype == torch.float32 else "bf16"
    return f"{what} {'/'.join(map(str, heads))} {width}, {num_threads} threads"


def decode(
    memory: torch.Tensor, heads: tuple[int, int, int], kv_len: int, num_threads: int
) -> list[Metric]:
    paged = Paged(memory, heads, [kv_len], 1)
    times = max(1, ROUND_BYTES // paged.read_bytes)  # as many layers follow each other
    shares = np.array_split(paged.tables[0], num_threads)
    torch_run = contiguous_sdpa(memory, heads, kv_len, 1)
    with ThreadPoolExecutor(num_threads) as executor:

        def read() -> None:
            list(executor.map(lambda share: paged.read(share, times), shares))

        ours, reads, torchs = seconds(
            lambda: paged.attend(times), read, lambda: torch_run(times), rounds=9
        )
    name = label(f"decode {kv_len}", heads, memory.dtype, num_threads)
    bandwidth = paged.read_bytes * times / statistics.median(reads) / 1e9
    return [
        Metric(name, statistics.median(ours) / times * 1e3, "ms"),
        Metric(
            f"{name}: {bandwidth:.1f} GB/s read; of it", 100 * ratio(reads, ours), "%", 70, True
        ),
        Metric(f"{name}: SDPA, contiguous / ours", ratio(torchs, ours), "x", 1, True),
    ]


def decode_batch(
    memory: torch.Tensor, heads: tuple[int, int, int], num_threads: int
) -> list[Metric]:
    paged = Paged(memory, heads, [4096] * 8, 1)
    ours, torchs = seconds(paged.attend, paged.gather_and_sdpa, rounds=3)
    name = label("decode 8 x 4096", heads, memory.dtype, num_threads)
    return [Metric(f"{name}: gather + SDPA / ours", ratio(torchs, ours), "x", 3, True)]


def prefill(memory: torch.Tensor, heads: tuple[int, int, int], num_threads: int) -> list[Metric]:
    paged = Paged(memory, heads, [4608], 512, max_layers=1)
    ours, torchs = seconds(paged.attend, contiguous_sdpa(memory, heads, 4608, 512), rounds=3)
    name = label("prefill 512 on 4096", heads, memory.dtype, num_threads)
    return [
        Metric(name, statistics.median(ours) * 1e3, "ms"),
        Metric(f"{name}: SDPA, contiguous / ours", ratio(torchs, ours), "x", 0.9, True),
    ]


def shared_prefix(memory: torch.Tensor) -> list[Metric]:
    heads = HEADS[1]
    grouped = Paged(memory, heads, SHARED_LENS, 1, shared_len=SHARED_LEN, max_layers=1)
    copies = Paged(memory, heads, SHARED_LENS, 1, max_layers=1)
    ours, separate = seconds(grouped.attend, copies.attend, rounds=5)
    name = label("shared prefix 32 x (8192 + 256)", heads, memory.dtype, torch.get_num_threads())
    return [Metric(f"{name}: separate / shared", ratio(separate, ours), "x", 3, True)]
