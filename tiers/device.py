"""The device tier: one allocation for all pages, and the ledger of their states."""

from __future__ import annotations

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
        self.pool = torch.empty(
            num_pages, shape.elems, dtype=getattr(torch, shape.dtype), device=device
        )

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
