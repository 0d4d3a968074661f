"""The device tier: one allocation for all pages, and the ledger of their states."""

from __future__ import annotations

import torch

from tiers.base import MemoryTier, huge_memory
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


def _allocate(num_pages: int, shape: PageShape, device: torch.device) -> torch.Tensor:
    """[num_pages, shape.elems]."""
    dtype = getattr(torch, shape.dtype)
    if device.type != "cpu" or num_pages == 0:
        return torch.empty(num_pages, shape.elems, dtype=dtype, device=device)
    memory = torch.from_numpy(huge_memory(num_pages * shape.nbytes))
    return memory.view(dtype).view(num_pages, shape.elems)
