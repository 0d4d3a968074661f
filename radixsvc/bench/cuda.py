"""The CUDA kernels on a GPU: bandwidth and arithmetic of attention, bandwidth of copies.

Times are CUDA events around many launches, after some to warm up; bytes are keys and values read,
operations those of the causal half. The targets are an H200's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch

from radixsvc.attention import build_info
from radixsvc.bench.attention import HEADS, SHARED_LEN, SHARED_LENS, Paged, arena
from radixsvc.bench.report import Metric
from radixsvc.errors import SetupError
from tiers.base import PageView
from tiers.cuda_copy import CudaStream

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
    memory = arena(torch.bfloat16, device)
    for batch, kv_len, target in ((32, 4096, 3.8), (1, 65536, 1.8)):
        paged = on_pages(memory, [kv_len] * batch)
        rate = paged.read_bytes / seconds(paged.attend) / 1e12
        metrics.append(Metric(f"decode, {batch} x {kv_len}", rate, "TB/s", target, True))
    span = seconds(on_pages(memory, [8192], 8192).attend)
    q_heads, _, head_dim = HEADS[1]
    operations = 2 * 2 * q_heads * head_dim * 8192**2 / 2
    metrics.append(Metric("causal prefill of 8192", operations / span / 1e12, "TFLOP/s", 220, True))
    apart, together = (
        seconds(on_pages(memory, SHARED_LENS, shared_len=n).attend) for n in (0, SHARED_LEN)
    )
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


def on_pages(
    memory: torch.Tensor, kv_lens: list[int], q_len: int = 1, shared_len: int = 0
) -> Paged:
    """Sequences for attention alone: nothing is appended."""
    paged = Paged(memory, HEADS[1], kv_lens, q_len, shared_len=shared_len)
    paged.k = None
    return paged


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
