"""What every tier is: a ledger of pages with a name and an honest account of its bytes.

A *memory* tier (device, host) has addresses, so a copy stream moves its pages. The disk is asked to
read and write whole records through staging memory; nothing it returns is trusted before it was
verified. Ledgers belong to one thread, the engine's. Workers see page ids only.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiers.page import PageIds, PageLedger

Mask = npt.NDArray[np.bool_]
Bytes2D = npt.NDArray[np.uint8]
Checksums = npt.NDArray[np.uint32]  # CRC32C

HUGE_PAGE = 2 << 20
LEDGER_BYTES = 1 + 4 + 1 + 4  # a page's state, readers, retired flag and place on the free list


class TierError(Exception):
    """A tier can't be set up as asked; the message names the cause and the remedy."""


class PageView(NamedTuple):
    """Pages in memory: page `pages[i]` is the `nbytes` bytes at `base + pages[i] * stride`.

    `pieces` numbers the registered piece of memory each page lies in, -1 where it is pageable; a
    single copy must not run over two of them. None: all is device memory, or one pinned piece.
    """

    base: int
    stride: int
    nbytes: int
    pages: PageIds
    pieces: npt.NDArray[np.int64] | None = None
    on_gpu: bool = False


class Pinning(NamedTuple):
    """How memory is page-locked: `pin(address, nbytes)` says whether, `unpin(address)` undoes."""

    pin: Callable[[int, int], bool]
    unpin: Callable[[int], None]


class Tier(PageLedger):
    """`num_pages` pages of `page_bytes` each."""

    def __init__(self, name: str, num_pages: int, page_bytes: int) -> None:
        super().__init__(num_pages)
        self.name = name
        self.page_bytes = page_bytes

    def poll(self) -> None:
        """Take in what background work has made ready. Cheap; the engine thread calls it."""

    def close(self) -> None:
        """Stop background work and give everything back. No copy may be under way."""


class MemoryTier(Tier):
    """A tier whose pages lie one after the other from the address `base` on."""

    base: int
    on_gpu = False

    def view(self, pages: PageIds) -> PageView:
        """Where `pages` lie, as a copy stream takes them."""
        return PageView(self.base, self.page_bytes, self.page_bytes, pages, None, self.on_gpu)


class Record(NamedTuple):
    """What the disk keeps beside a page's bytes.

    `digest` is SHA-256(parent + blob), whole; `parent` that of the page before, and for the first
    page (`depth` 0) a root its owner derives from all that the bytes depend on.
    """

    digest: bytes
    parent: bytes
    depth: int
    blob: bytes


class StoredPage(NamedTuple):
    """A page found on disk at start."""

    page: int
    record: Record


class Chain:
    """The records of consecutive pages; digests are computed at first use, by a mover's worker.

    `blobs` may begin before the pages that are stored, where the digest of the page just before
    them is not known: the last `n` blobs belong to the `n` pages, the ones ahead only carry the
    chain from `parent`, the digest before `blobs[0]`, which sits at `depth`.
    """

    def __init__(self, parent: bytes, depth: int, blobs: Sequence[bytes]) -> None:
        self.parent = parent
        self.depth = depth
        self.blobs = blobs
        self._records: list[Record] = []
        self._lock = threading.Lock()

    def records(self, n: int, places: slice = slice(None)) -> list[Record]:
        """Of the last `n` pages' records those at `places`; about 1 us a blob, once."""
        begin, end, _ = places.indices(n)
        first = len(self.blobs) - n
        with self._lock:
            for blob in self.blobs[len(self._records) : first + end]:
                parent = self._records[-1].digest if self._records else self.parent
                digest = hashlib.sha256(parent + blob).digest()
                depth = self.depth + len(self._records)
                self._records.append(Record(digest, parent, depth, blob))
            return self._records[first + begin : first + end]


def huge_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed host memory, on huge pages where the system has them. Raises OSError.

    Attention reads these faster, and direct I/O has fewer pieces to ask the disk for. Private:
    shared memory, mmap's default, has no huge pages where the system's shmem_enabled is "never".
    """
    whole = max(1, -(-nbytes // HUGE_PAGE)) * HUGE_PAGE  # so that the last one is huge too
    memory = mmap.mmap(-1, whole, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:nbytes]


def pages_within(limit_bytes: int, page_bytes: int) -> int:
    """How many pages a limit holds, their ledger included."""
    return limit_bytes // (page_bytes + LEDGER_BYTES)
