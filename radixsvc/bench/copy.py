"""Page copies in host memory, beside one memcpy of as many bytes.

Pages go from random places to random places, through the stream that the tiers use, in memory as
the device tier has it: on huge pages a memcpy is quicker too. There is so much of it because
glibc's memcpy writes past the caches, as ours does, only what is large beside the last of them.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from functools import partial

import numpy as np
import torch

from radixsvc.bench.attention import ratio, seconds
from radixsvc.bench.report import Metric
from tiers.base import PageView
from tiers.copy import CpuStream
from tiers.device import DeviceTier
from tiers.page import PageShape

COPIED_BYTES = 1 << 28
MIN_PAGE_BYTES = 64 << 10  # from here on a page should copy at memcpy's rate
PAGE_BYTES = (16 << 10, 64 << 10, 512 << 10, 2 << 20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options: the cases are the figures' names."""


def run(args: argparse.Namespace) -> list[Metric]:
    """All figures."""
    metrics = []
    shape = PageShape.uniform(1, 1, PAGE_BYTES[0] // 8, 1, "float32")
    num_pages = COPIED_BYTES // shape.nbytes
    source, target = (DeviceTier(shape, num_pages, torch.device("cpu")).pool for _ in range(2))
    source.zero_()
    stream = CpuStream("benchmark")
    try:
        for page_bytes in PAGE_BYTES:
            rng, num_pages = np.random.default_rng(0), COPIED_BYTES // page_bytes
            views = [
                PageView(
                    memory.data_ptr(),
                    page_bytes,
                    page_bytes,
                    rng.permutation(num_pages).astype(np.int32),
                )
                for memory in (source, target)
            ]

            def copy_pages(views: list[PageView] = views) -> None:
                stream.copy(views[0], views[1])
                stream.synchronize(stream.record())

            memcpy = partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), COPIED_BYTES)
            ours, theirs = seconds(copy_pages, memcpy, rounds=7)
            name = f"copy of {page_bytes >> 10} KiB pages"
            goal = 90 if page_bytes >= MIN_PAGE_BYTES else None
            metrics += [
                Metric(name, COPIED_BYTES / statistics.median(ours) / 1e9, "GB/s", None, True),
                Metric(f"{name}: of memcpy", 100 * ratio(theirs, ours), "%", goal, True),
            ]
    finally:
        stream.close()
    return metrics
