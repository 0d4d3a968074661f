"""The CUDA kernels on a GPU: bandwidth and arithmetic of attention, bandwidth of copies.

Times are CUDA events around many launches, after some to warm up; bytes are keys and values read,
operations those of the causal half. The targets are an H200's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch

from radixsvc.attention import RaggedBatch, StepContext, attention_step, build_info, paged_attention
from radixsvc.bench.report import Metric
from radixsvc.errors import SetupError
from tiers.base import PageView
from tiers.copy import CudaStream
from tiers.device import DeviceTier
from tiers.page import PageShape

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2  # keys and values in bfloat16
COPY_BYTES = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options: the cases are the figures' names."""


def run(args: argparse.Namespace) -> list[Metric]:
    """All figures. SetupError where there is no GPU, or the kernels were built without CUDA."""
    if not torch.cuda.is_available() or not build_info()["cuda_archs"]:
        raise SetupError("bench cuda needs a GPU and kernels built for it: see radixsvc doctor")
    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device)
    metrics = [Metric(f"memory of {name}", torch.cuda.mem_get_info(device)[1] / 2**30, "GiB")]
    for batch, kv_len, target in ((32, 4096, 3.8), (1, 65536, 1.8)):
        span = seconds(attend(device, [1] * batch, [kv_len] * batch))
        rate = batch * kv_len * TOKEN_BYTES / span / 1e12
        metrics.append(Metric(f"decode, {batch} x {kv_len}", rate, "TB/s", target, True))
    span = seconds(attend(device, [8192], [8192]))
    operations = 2 * 2 * Q_HEADS * HEAD_DIM * 8192**2 / 2
    metrics.append(Metric("causal prefill of 8192", operations / span / 1e12, "TFLOP/s", 220, True))
    lens = [8192 + 256] * 32
    apart, together = (seconds(attend(device, [1] * 32, lens, n)) for n in (0, 8192))
    metrics.append(Metric("32 x (8192 shared + 256): faster by", apart / together, "x", 8, True))
    stream = CudaStream(device)
    for page_bytes, target in ((2 << 20, 50.0), (16 << 10, 45.0)):
        for to_host in (True, False):
            rate = COPY_BYTES / copy_seconds(stream, page_bytes, to_host) / 1e9
            side = "to" if to_host else "from"
            what = f"pages of {page_bytes >> 10} KiB {side} pinned memory"
            metrics.append(Metric(what, rate, "GB/s", target, True))
    stream.close()
    return metrics


def seconds(work: Callable[[], object], rounds: int = 20) -> float:
    """Of one call, by the device's clock."""
    for _ in range(3):
        work()
    start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(rounds):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / rounds


def attend(
    device: torch.device, q_lens: list[int], kv_lens: list[int], shared_len: int = 0
) -> Callable[[], object]:
    """One layer's attention over pages in random order, in turn over enough layers that keys and
    values come from memory; sequences share their first `shared_len` tokens."""
    num_shared = shared_len // PAGE_SIZE
    own = [n // PAGE_SIZE - num_shared for n in kv_lens]
    ids = np.random.default_rng(0).permutation(sum(own) + num_shared).astype(np.int32)
    first, *rest = np.split(ids, np.cumsum([num_shared, *own])[:-1])
    tables = [np.concatenate([first, pages]) for pages in rest]
    num_layers = max(2, (1 << 29) // (len(ids) * PAGE_SIZE * TOKEN_BYTES))
    shape = PageShape.uniform(num_layers, KV_HEADS, HEAD_DIM, PAGE_SIZE, "bfloat16")
    tier = DeviceTier(shape, len(ids), device)
    tier.pool.normal_()
    batch = RaggedBatch.build(q_lens, kv_lens, tables, PAGE_SIZE, device)
    step = StepContext(tier.pool, shape, batch)
    q = torch.randn(sum(q_lens), Q_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    layer = 0

    def one() -> object:
        nonlocal layer
        layer = (layer + 1) % num_layers
        with attention_step(step):
            return paged_attention(q, None, None, layer, HEAD_DIM**-0.5)

    return one


def copy_seconds(stream: CudaStream, page_bytes: int, to_host: bool) -> float:
    """To copy `COPY_BYTES` in scattered pages, once it is known what copies such pages best."""
    rng, num_pages = np.random.default_rng(0), COPY_BYTES // page_bytes
    on_device = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    on_host = torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device, host = (
        PageView(x.data_ptr(), page_bytes, page_bytes, rng.permutation(num_pages).astype(np.int32))
        for x in (on_device, on_host)
    )
    source, target = (device, host) if to_host else (host, device)
    torch.cuda.synchronize()
    stream.calibrate(source, target)
    start = stream.record()
    for _ in range(5):
        stream.copy(source, target)
    end = stream.record()
    stream.synchronize(end)
    return stream.elapsed(start, end) / 5
