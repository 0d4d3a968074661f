"""The disk tier against a plain program that reads and writes in sequence with O_DIRECT.

Both move the same bytes in files of the same folder whose space is taken, in turns. Transfers are
timed from submit to poll: digests, checksums, headers and the pages' ledgers included.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from radixsvc.bench.attention import Run, ratio, seconds
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
    metrics = []
    for kib in args.page_kib:
        shape = PageShape.uniform(1, 1, kib << 7, 1, "float32")  # 8 bytes a dimension
        num_pages = max(2, (args.mib << 20) // shape.nbytes)
        with TemporaryDirectory(prefix="radixsvc-bench-", dir=args.folder) as folder:
            metrics += disk_transfers(shape, num_pages, args.rounds, Path(folder))
    return metrics


def disk_transfers(shape: PageShape, num_pages: int, rounds: int, folder: Path) -> list[Metric]:
    """Writes and reads of all pages, and what finding them again takes."""
    total, kib = num_pages * shape.nbytes, shape.nbytes >> 10
    device = DeviceTier(shape, num_pages, torch.device("cpu"))
    device.pool.zero_()
    disk = open_disk(shape, num_pages, folder / "tier")
    mover = open_mover(device, None, disk)
    stored = disk.allocate(0)

    def write() -> None:
        nonlocal stored
        disk.free(stored)
        stored = disk.allocate(num_pages, PageState.LOADING)
        pages = device.allocate(num_pages)
        device.publish(pages)
        carry(mover, device, pages, disk, stored)
        device.free(pages)

    def read() -> None:
        pages = device.allocate(num_pages, PageState.LOADING)
        carry(mover, disk, stored, device, pages)
        device.free(pages)

    with plain_program(folder / "plain", total) as (plain_write, plain_read):
        times = seconds(plain_write, write, plain_read, read, rounds=rounds)
    mover.close()
    disk.close()
    start = time.perf_counter()
    disk = open_disk(shape, num_pages, folder / "tier")
    scan = time.perf_counter() - start
    found = len(disk.take_recovered())
    disk.close()
    used = sum(path.stat().st_size for path in (folder / "tier").iterdir())
    metrics = [
        Metric(f"{kib} KiB pages found after a restart", found, f"of {num_pages}"),
        Metric(f"{kib} KiB pages: start", scan * 1e6 / num_pages, "us/page"),
        Metric(f"{kib} KiB pages: disk used / page bytes", used / total, "x"),
    ]
    for name, plain, own in zip(("written", "read"), times[::2], times[1::2], strict=True):
        rate = total / statistics.median(plain) / 1e9
        metrics += [
            Metric(f"plain program, {name}", rate, "GB/s", None, True),
            Metric(f"{kib} KiB pages {name} / plain", ratio(plain, own), "x", 0.8, True),
        ]
    return metrics


def open_disk(shape: PageShape, num_pages: int, folder: Path) -> DiskTier:
    limit = 2 * 4096 + num_pages * (4096 + -(-shape.nbytes // 4096) * 4096)
    return DiskTier(folder, shape.nbytes, limit, bytes(32), max_blob_bytes=1024)


def carry(mover: Mover, source: Tier, pages: PageIds, target: Tier, there: PageIds) -> None:
    chain = Chain(bytes(32), 0, [i.to_bytes(64, "little") for i in range(len(pages))])
    mover.submit(source, pages, target, there, chain)
    [ticket] = mover.wait(DEADLINE_S)
    if not ticket.ok.all():
        raise RuntimeError(f"{(~ticket.ok).sum()} of {len(pages)} pages did not arrive")


@contextmanager
def plain_program(path: Path, nbytes: int) -> Iterator[tuple[Run, Run]]:
    """Writes, and reads, that many bytes in the simplest way with direct I/O."""
    data = mmap.mmap(-1, PLAIN_BYTES)
    parts = [  # the last one may be shorter
        (memoryview(data)[: nbytes - at], at) for at in range(0, nbytes, PLAIN_BYTES)
    ]
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(file, 0, nbytes)
        yield (
            lambda: [os.pwrite(file, part, at) for part, at in parts],
            lambda: [os.preadv(file, [part], at) for part, at in parts],
        )
    finally:
        os.close(file)
