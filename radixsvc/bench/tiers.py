"""The disk tier against a plain O_DIRECT program.

Transfers are timed from submit to poll, digests, checksums and headers included, and against
whatever of the plain program's two runs, before and after, was the quicker one.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import torch

from radixsvc.bench.report import Metric
from tiers.base import Chain, Tier
from tiers.device import DeviceTier
from tiers.disk import DiskTier
from tiers.mover import Mover, open_mover
from tiers.page import PageIds, PageShape, PageState

PLAIN_BYTES = 4 << 20  # a call of the plain program
DEADLINE_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page-kib", type=int, nargs="*", default=[64, 360, 2048])
    parser.add_argument("--mib", type=int, default=256, help="data moved at a time")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None, help="where the disk tier lies")


def run(args: argparse.Namespace) -> list[Metric]:
    folder = Path(mkdtemp(prefix="radixsvc-bench-", dir=args.folder))
    try:
        metrics = []
        for kib in args.page_kib:
            shape = PageShape.uniform(1, 1, kib << 7, 1, "float32")  # 8 bytes a dimension
            num_pages = max(2, (args.mib << 20) // shape.nbytes)
            metrics += disk_transfers(shape, num_pages, args.rounds, folder)
        return metrics
    finally:
        shutil.rmtree(folder)


def disk_transfers(shape: PageShape, num_pages: int, rounds: int, folder: Path) -> list[Metric]:
    """Writes and reads of all pages, and what finding them again takes."""
    with opened(shape, num_pages, folder) as (device, disk, mover):
        plain = [plain_rates(folder / "plain", num_pages * shape.nbytes)]
        writes, reads = [], []
        for _ in range(rounds):
            pages = device.allocate(num_pages)
            device.publish(pages)
            stored = disk.allocate(num_pages, PageState.LOADING)
            writes.append(timed(partial(carry, mover, device, pages, disk, stored)))
            device.free(pages)
            pages = device.allocate(num_pages, PageState.LOADING)
            reads.append(timed(partial(carry, mover, disk, stored, device, pages)))
            device.free(pages)
            disk.free(stored)
        plain.append(plain_rates(folder / "plain", num_pages * shape.nbytes))
        disk_bytes, memory_bytes = disk.footprint().disk, disk.footprint().host
    start = time.perf_counter()
    disk = open_disk(shape, num_pages, folder)
    scan = time.perf_counter() - start
    found = len(disk.take_recovered())
    disk.close()
    total, kib = num_pages * shape.nbytes, shape.nbytes >> 10
    metrics = [Metric(f"{kib} KiB pages found after a restart", found, f"of {num_pages}")]
    for name, seconds, rate in (
        ("written", writes, max(run[0] for run in plain)),
        ("read", reads, max(run[1] for run in plain)),
    ):
        own = total / statistics.median(seconds)
        metrics.append(Metric(f"plain program, {name}", rate / 1e9, "GB/s", None, True))
        metrics.append(Metric(f"{kib} KiB pages {name} / plain", own / rate, "x", 0.8, True))
    return [
        *metrics,
        Metric(f"{kib} KiB pages: start", scan * 1e6 / num_pages, "us/page"),
        Metric(f"{kib} KiB pages: disk used / page bytes", disk_bytes / total, "x"),
        Metric(f"{kib} KiB pages: host memory", memory_bytes / 2**20, "MiB"),
    ]


@contextmanager
def opened(
    shape: PageShape, num_pages: int, folder: Path
) -> Iterator[tuple[DeviceTier, DiskTier, Mover]]:
    device = DeviceTier(shape, num_pages, torch.device("cpu"))
    device.pool.zero_()
    disk = open_disk(shape, num_pages, folder)
    mover = open_mover(device, None, disk, max_queued_bytes=1 << 40, disk_deadline_s=DEADLINE_S)
    yield device, disk, mover
    mover.close()
    disk.close()


def open_disk(shape: PageShape, num_pages: int, folder: Path) -> DiskTier:
    limit = 2 * 4096 + num_pages * (4096 + -(-shape.nbytes // 4096) * 4096)
    return DiskTier(folder, shape.nbytes, limit, bytes(32), max_blob_bytes=1024)


def carry(mover: Mover, source: Tier, pages: PageIds, target: Tier, there: PageIds) -> None:
    chain = Chain(bytes(32), 0, [i.to_bytes(64, "little") for i in range(len(pages))])
    mover.submit(source, pages, target, there, chain)
    [ticket] = mover.wait(DEADLINE_S)
    if not ticket.ok.all():
        raise RuntimeError(f"{(~ticket.ok).sum()} of {len(pages)} pages did not arrive")


def plain_rates(path: Path, nbytes: int) -> tuple[float, float]:
    """Bytes a second, written and read, of the simplest program with direct I/O."""
    data = mmap.mmap(-1, PLAIN_BYTES)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(file, 0, nbytes)
        offsets = range(0, nbytes - PLAIN_BYTES + 1, PLAIN_BYTES)
        total = len(offsets) * PLAIN_BYTES
        for _ in range(2):  # the first round writes to blocks never written
            written = timed(lambda: [os.pwrite(file, data, at) for at in offsets])
        read = timed(lambda: [os.preadv(file, [data], at) for at in offsets])
        return total / written, total / read
    finally:
        os.close(file)
        path.unlink()


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
