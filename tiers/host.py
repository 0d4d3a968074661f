"""The host tier: one arena of ordinary memory, page-locked piece by piece where a GPU is near.

Locking tens of gigabytes takes seconds, and one registration of all of it may be refused. So a
background thread takes the arena piece by piece: touch it (in parallel, on huge pages where the
system gives them), register it, hand its pages out. The tier is usable from the first piece on.
Where a piece is refused the next tries are smaller, and in the end the rest stays pageable: slower
to copy, not wrong, and said in the log.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from tiers.base import MemoryTier, PageView, Pinning, TierError, huge_memory
from tiers.page import PageIds

log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 20
SMALLEST_PIECE_BYTES = 16 << 20
_TOUCH_THREADS = min(8, os.cpu_count() or 1)


class _Piece(NamedTuple):
    start: int  # pages [start, stop)
    stop: int
    is_pinned: bool


class HostTier(MemoryTier):
    """`num_pages` pages of `page_bytes` in host memory; `pinning` where a GPU copies them.

    Pages of pieces that aren't ready yet count as WRITING, held by the tier itself.
    """

    def __init__(
        self,
        page_bytes: int,
        num_pages: int,
        pinning: Pinning | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        super().__init__("host", num_pages, page_bytes)
        self._pinning = pinning
        try:
            self._arena = huge_memory(num_pages * page_bytes)
        except OSError as error:
            raise TierError(
                f"host tier: {num_pages * page_bytes >> 20} MiB can't be mapped ({error}); make it "
                "less"
            ) from error
        self.base = self._arena.ctypes.data
        self._piece_of_page = np.full(num_pages, -1, np.int64)
        self._pinned: list[_Piece] = []
        self._fresh: deque[_Piece] = deque()
        self._stop = threading.Event()
        self._held = self.allocate(num_pages)
        pieces = self._prepare(piece_bytes)
        self._fresh.extend(itertools.islice(pieces, 1))
        self.poll()
        self._thread = threading.Thread(
            target=self._fresh.extend, args=(pieces,), name="radixsvc-host", daemon=True
        )
        self._thread.start()

    def view(self, pages: PageIds) -> PageView:
        pieces = None if self._pinning is None else self._piece_of_page[pages]
        return super().view(pages)._replace(pieces=pieces)

    def poll(self) -> None:
        """Hand out the pages of pieces that became ready. Engine thread."""
        while self._fresh:
            piece = self._fresh.popleft()
            if piece.is_pinned:
                self._piece_of_page[piece.start : piece.stop] = len(self._pinned)
                self._pinned.append(piece)
            self.free(self._held[piece.start : piece.stop])

    def close(self) -> None:
        """Stop preparing, unpin, unmap. No copy may be under way."""
        self._stop.set()
        self._thread.join()
        self.poll()
        if self._pinning is not None:
            for piece in self._pinned:
                self._pinning.unpin(self.base + piece.start * self.page_bytes)
        del self._arena

    def _prepare(self, piece_bytes: int) -> Iterator[_Piece]:
        """Pieces as they become ready, until the tier is closed."""
        # A registration locks whole pages of the system, so no two pieces may share one.
        granule = mmap.PAGESIZE // math.gcd(self.page_bytes, mmap.PAGESIZE)
        pinning, start = self._pinning, 0
        with ThreadPoolExecutor(_TOUCH_THREADS) as pool:
            while start < self.num_pages and not self._stop.is_set():
                count = max(1, piece_bytes // (self.page_bytes * granule)) * granule
                stop = min(start + count, self.num_pages)
                address, nbytes = (
                    self.base + start * self.page_bytes,
                    (stop - start) * self.page_bytes,
                )
                _touch(pool, address, nbytes)
                if pinning is not None and not pinning.pin(address, nbytes):
                    if piece_bytes >= 2 * SMALLEST_PIECE_BYTES:
                        piece_bytes //= 2
                        continue
                    pinning = None
                    log.warning(
                        "host tier: page-locking refused after %d of %d MiB; the rest is pageable "
                        "and copies of it are slower. Raise the limit on locked memory "
                        "(LimitMEMLOCK, ulimit -l) or make the tier smaller",
                        (address - self.base) >> 20,
                        self._arena.nbytes >> 20,
                    )
                yield _Piece(start, stop, pinning is not None)
                start = stop


def _touch(pool: ThreadPoolExecutor, start: int, nbytes: int) -> None:
    """Make the system back this memory now, not at the first copy."""
    step = -(-nbytes // _TOUCH_THREADS)
    slices = [(start + at, 0, min(step, nbytes - at)) for at in range(0, nbytes, step)]
    for touched in [pool.submit(ctypes.memset, *piece) for piece in slices]:
        touched.result()
