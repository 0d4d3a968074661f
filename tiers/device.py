"""The device tier: one allocation for all pages, and the ledger of their states."""

from __future__ import annotations

import torch

from tiers.page import PageLedger, PageShape


class DeviceTier(PageLedger):
    """`num_pages` pages of `shape` in one tensor, `pool`, of [num_pages, shape.elems]."""

    def __init__(self, shape: PageShape, num_pages: int, device: torch.device) -> None:
        super().__init__(num_pages)
        self.shape = shape
        self.device = device
        self.pool = torch.zeros(
            num_pages, shape.elems, dtype=getattr(torch, shape.dtype), device=device
        )

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page onto another, ordered with the computation on the current stream."""
        self.pool[target].copy_(self.pool[source])
