"""The device tier: one allocation for all pages, and the ledger of their states."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from tiers.base import LEDGER_BYTES, Footprint, MemoryTier
from tiers.page import PageShape


class DeviceTier(MemoryTier):
    """`num_pages` pages of `shape` in one tensor, `pool`, of [num_pages, shape.elems]."""

    def __init__(self, shape: PageShape, num_pages: int, device: torch.device) -> None:
        super().__init__("device", num_pages, shape.nbytes)
        self.shape = shape
        self.device = device
        self.pool = _allocate(num_pages, shape, device)
        self.base = self.pool.data_ptr()
        self.on_gpu = device.type == "cuda"

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page onto another, ordered with the computation on the current stream."""
        self.pool[target].copy_(self.pool[source])

    def footprint(self) -> Footprint:
        """The pool's bytes on the device and the ledger's in host memory."""
        return Footprint(self.num_pages * self.page_bytes, self.num_pages * LEDGER_BYTES)


def _allocate(num_pages: int, shape: PageShape, device: torch.device) -> torch.Tensor:
    """[num_pages, shape.elems]; in host memory on huge pages, which attention reads faster."""
    dtype = getattr(torch, shape.dtype)
    if device.type != "cpu" or num_pages == 0:
        return torch.empty(num_pages, shape.elems, dtype=dtype, device=device)
    # Private: shared memory, mmap's default, has no huge pages where the system's shmem_enabled is
    # "never", and attention read it at two thirds the speed.
    memory = mmap.mmap(-1, num_pages * shape.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(num_pages, shape.elems)
