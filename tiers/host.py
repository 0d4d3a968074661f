"""The host tier: one arena of ordinary memory, page-locked piece by piece where a GPU is near.

Locking tens of gigabytes takes seconds, and one registration of all of it may be refused. So a
background thread takes the arena piece by piece: touch it (in parallel, on huge pages where the
system gives them), register it, hand its pages out. The tier is usable from the first piece on.
Where a piece is refused the next tries are smaller, and in the end the rest stays pageable: slower
to copy, not wrong, and said in the log.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from tiers.base import (
    LEDGER_BYTES,
    Footprint,
    MemoryTier,
    PageView,
    Pinning,
    TierError,
    huge_memory,
)
from tiers.page import PageIds

log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 20
SMALLEST_PIECE_BYTES = 16 << 20
_TOUCH_THREADS = min(8, os.cpu_count() or 1)


class _Piece(NamedTuple):
    start: int  # pages [start, stop)
    stop: int
    pinned: bool


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
        self.num_pinned = 0
        self._pinning = pinning
        # A registration locks whole pages of the system, so no two pieces may share one.
        self._granule = mmap.PAGESIZE // math.gcd(page_bytes, mmap.PAGESIZE)
        self._arena_bytes = max(mmap.PAGESIZE, num_pages * page_bytes)
        try:
            self._arena = huge_memory(self._arena_bytes)
        except OSError as error:
            raise TierError(
                f"host tier: {self._arena_bytes >> 20} MiB can't be mapped ({error}); make it less"
            ) from error
        self.base = self._arena.ctypes.data
        self._piece_of_page = np.full(num_pages, -1, np.int64)
        self._pinned_pieces: list[_Piece] = []
        self._fresh: deque[_Piece] = deque()
        self._prepared = 0
        self._refused = False
        self._stop = threading.Event()
        self._held = self.allocate(num_pages)
        self._piece_bytes = piece_bytes
        self._prepare(max_pieces=1)
        self.poll()
        self._thread = threading.Thread(target=self._prepare, name="radixsvc-host", daemon=True)
        self._thread.start()

    def view(self, pages: PageIds) -> PageView:
        pieces = None if self._pinning is None else self._piece_of_page[pages]
        return super().view(pages)._replace(pieces=pieces)

    def poll(self) -> None:
        """Hand out the pages of pieces that became ready. Engine thread."""
        while self._fresh:
            piece = self._fresh.popleft()
            if piece.pinned:
                self._piece_of_page[piece.start : piece.stop] = len(self._pinned_pieces)
                self._pinned_pieces.append(piece)
                self.num_pinned += piece.stop - piece.start
            self.free(self._held[piece.start : piece.stop])

    def footprint(self) -> Footprint:
        """The arena and the ledger."""
        return Footprint(host=self._arena_bytes + self.num_pages * LEDGER_BYTES)

    def close(self) -> None:
        """Stop preparing, unpin, unmap. No copy may be under way."""
        self._stop.set()
        self._thread.join()
        self.poll()
        if self._pinning is not None:
            for piece in self._pinned_pieces:
                self._pinning.unpin(self.base + piece.start * self.page_bytes)
        del self._arena

    def _prepare(self, max_pieces: int | None = None) -> None:
        """Make pieces ready from where the last call ended."""
        with ThreadPoolExecutor(_TOUCH_THREADS) as pool:
            while self._prepared < self.num_pages and not self._stop.is_set():
                if max_pieces is not None and (max_pieces := max_pieces - 1) < 0:
                    return
                self._prepare_piece(pool)

    def _prepare_piece(self, pool: ThreadPoolExecutor) -> None:
        start = self._prepared
        address = self.base + start * self.page_bytes
        stop = self._piece_end(start)
        _touch(pool, address, self.base + stop * self.page_bytes)
        pinned = False
        while self._pinning is not None and not self._refused and not pinned:
            pinned = self._pinning.pin(address, (stop - start) * self.page_bytes)
            if not pinned and self._piece_bytes >= 2 * SMALLEST_PIECE_BYTES:
                self._piece_bytes //= 2
                stop = self._piece_end(start)
            elif not pinned:
                self._refused = True
                log.warning(
                    "host tier: page-locking refused after %d of %d MiB; the rest is pageable and "
                    "copies of it are slower. Raise the limit on locked memory (LimitMEMLOCK, "
                    "ulimit -l) or make the tier smaller",
                    (address - self.base) >> 20,
                    self._arena_bytes >> 20,
                )
        self._prepared = stop
        self._fresh.append(_Piece(start, stop, pinned))

    def _piece_end(self, start: int) -> int:
        granules = max(1, self._piece_bytes // (self.page_bytes * self._granule))
        return min(start + granules * self._granule, self.num_pages)


def _touch(pool: ThreadPoolExecutor, start: int, stop: int) -> None:
    """Make the system back [start, stop) with memory now, not at the first copy."""
    step = -(-(stop - start) // _TOUCH_THREADS)
    slices = [(at, 0, min(step, stop - at)) for at in range(start, stop, step)]
    for touched in [pool.submit(ctypes.memset, *piece) for piece in slices]:
        touched.result()
