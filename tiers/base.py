"""What every tier is: a ledger of pages, an honest account of its bytes, and a way to reach them.

There are two kinds. A *memory* tier (device, host) has addresses, so a copy stream moves its pages.
A *store* tier (disk) is asked to read and write whole records through staging memory; nothing it
returns is trusted before it was verified.

Ledgers belong to one thread, the engine's. Workers see page ids only.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tiers.page import PageIds, PageState

Mask = npt.NDArray[np.bool_]
Bytes2D = npt.NDArray[np.uint8]

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


class Pinning(NamedTuple):
    """How memory is page-locked: `pin(address, nbytes)` says whether, `unpin(address)` undoes."""

    pin: Callable[[int, int], bool]
    unpin: Callable[[int], None]


class Footprint(NamedTuple):
    """Bytes a tier holds, metadata and staging included."""

    device: int = 0
    host: int = 0
    disk: int = 0


class Record(NamedTuple):
    """What a store keeps beside a page's bytes.

    `digest` is SHA-256(parent + blob), whole; `parent` that of the page before, and for the first
    page (`depth` 0) a root its owner derives from all that the bytes depend on.
    """

    digest: bytes
    parent: bytes
    depth: int
    blob: bytes


class StoredPage(NamedTuple):
    """A page found in a store at start."""

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

    def records(self, n: int) -> list[Record]:
        """The last `n` pages' records; about 1 us a blob, once."""
        with self._lock:
            parent = self.parent
            for depth, blob in enumerate(() if self._records else self.blobs, self.depth):
                digest = hashlib.sha256(parent + blob).digest()
                self._records.append(Record(digest, parent, depth, blob))
                parent = digest
            return self._records[len(self._records) - n :]


class Tier(Protocol):
    """A `PageLedger` (which see) with a name and an account."""

    name: str
    page_bytes: int
    num_pages: int
    num_free: int
    states: npt.NDArray[np.uint8]
    readers: npt.NDArray[np.int32]

    @property
    def num_retired(self) -> int: ...
    def allocate(self, n: int, state: PageState = ...) -> PageIds: ...
    def publish(self, pages: PageIds) -> None: ...
    def free(self, pages: PageIds) -> None: ...
    def add_readers(self, pages: PageIds) -> None: ...
    def drop_readers(self, pages: PageIds) -> None: ...
    def count(self) -> dict[str, int]: ...
    def check(self) -> None: ...

    def poll(self) -> None:
        """Take in what background work has made ready. Cheap; the engine thread calls it."""

    def footprint(self) -> Footprint: ...

    def close(self) -> None:
        """Stop background work and give everything back. No copy may be under way."""


class MemoryTier(Tier, Protocol):
    """A tier whose pages have addresses."""

    on_device: bool

    def view(self, pages: PageIds) -> PageView: ...


class StoreTier(Tier, Protocol):
    """A tier that keeps records. `read`, `write` and `staging` are for the mover's workers.

    A batch is `n` slots in staging memory, [n, slot_bytes] uint8, each with its page's bytes at
    `payload_offset`.
    """

    slot_bytes: int
    payload_offset: int
    staging_is_pinned: bool  # true also where there is no GPU to pin it for
    generation: int
    counters: Counter[str]
    off_reason: str | None

    @property
    def writable(self) -> bool:
        """False once the tier has switched itself off, for the reason in `off_reason`."""

    def staging(self, n: int) -> Bytes2D:
        """Memory for a batch of `n` slots, aligned as the store needs it."""

    def write(
        self, pages: PageIds, records: Sequence[Record], batch: Bytes2D, generation: int
    ) -> Mask:
        """Write records and bytes; which pages are wholly written. Never raises OSError."""

    def read(self, pages: PageIds, batch: Bytes2D) -> Mask:
        """Read and verify; which pages are what was stored. Never raises OSError."""

    def flush(self) -> None:
        """Begin a new generation: nothing stored so far is ever read again."""


def pages_within(limit_bytes: int, page_bytes: int, reserved_bytes: int = 0) -> int:
    """How many pages a limit holds, their ledger and `reserved_bytes` of staging included."""
    return max(0, (limit_bytes - reserved_bytes) // (page_bytes + LEDGER_BYTES))
