"""The device tier: one allocation for all pages, and the ledger of their states."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from tiers.base import LEDGER_BYTES, Footprint, PageView
from tiers.page import PageIds, PageLedger, PageShape


class DeviceTier(PageLedger):
    """`num_pages` pages of `shape` in one tensor, `pool`, of [num_pages, shape.elems]."""

    name = "device"
    on_device = True

    def __init__(self, shape: PageShape, num_pages: int, device: torch.device) -> None:
        super().__init__(num_pages)
        self.shape = shape
        self.page_bytes = shape.nbytes
        self.device = device
        self.pool = _allocate(num_pages, shape, device)

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page onto another, ordered with the computation on the current stream."""
        self.pool[target].copy_(self.pool[source])

    def view(self, pages: PageIds) -> PageView:
        """Where `pages` lie, as a copy stream takes them."""
        return PageView(self.pool.data_ptr(), self.page_bytes, self.page_bytes, pages)

    def poll(self) -> None:
        """Every page is ready from the start."""

    def footprint(self) -> Footprint:
        """The pool's bytes on the device and the ledger's in host memory."""
        return Footprint(self.num_pages * self.page_bytes, self.num_pages * LEDGER_BYTES)

    def close(self) -> None:
        """The pool goes with its last reference."""


def _allocate(num_pages: int, shape: PageShape, device: torch.device) -> torch.Tensor:
    """[num_pages, shape.elems]; in host memory on huge pages, which attention reads faster."""
    dtype = getattr(torch, shape.dtype)
    if device.type != "cpu" or num_pages == 0:
        return torch.empty(num_pages, shape.elems, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_pages * shape.nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(num_pages, shape.elems)
