"""The kernels on a GPU, through the extension, with torch for memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from simt.problem import Array
from simt.structs import (
    COPY_FIELDS,
    DEVICE_FIELDS,
    HOST_FIELDS,
    LAYER_FIELDS,
    Batch,
    Copy,
    Layer,
    Plan,
)
from tiers import _kernels


class Cuda:
    """Arrays keep their strides and their misalignment on the device."""

    def __init__(self, device: int = 0) -> None:
        self.device = torch.device("cuda", device)

    @property
    def stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def upload(self, array: Array) -> torch.Tensor:
        signed = array.view(np.int16) if array.dtype == np.uint16 else array
        strides = [s // array.itemsize for s in array.strides]
        span = 1 + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True))
        skew = array.ctypes.data % 16 // array.itemsize
        host = torch.from_numpy(np.ascontiguousarray(signed))
        memory = torch.zeros(max(span, 1) + skew, dtype=host.dtype, device=self.device)
        target = torch.as_strided(memory, array.shape, strides, skew)
        return target.copy_(host) if array.size else target

    def address(self, handle: torch.Tensor) -> int:
        return handle.data_ptr()

    def download(self, handle: torch.Tensor) -> Array:
        array = handle.cpu().numpy()
        return array.view(np.uint16) if array.dtype == np.int16 else array

    def plan(self, batch: Batch, words: Array | None) -> Plan:
        address = 0 if words is None else words.ctypes.data
        host = _kernels.batch(*(getattr(batch, name) or 0 for name in HOST_FIELDS))
        return Plan(address, *_kernels.cuda_plan(host, address))

    def attention(self, layer: Layer, batch: Batch) -> str | None:
        plan = [getattr(batch.plan, name) or 0 for name, _ in Plan._fields_]
        handle = _kernels.cuda_batch(*(getattr(batch, name) or 0 for name in DEVICE_FIELDS), *plan)
        arguments = [getattr(layer, name) or 0 for name in LAYER_FIELDS]
        workspace = (batch.workspace or 0, batch.workspace_bytes)
        return self.call(_kernels.attention, handle, *arguments, *workspace)

    def copy(self, copy: Copy, max_blocks: int) -> str | None:
        arguments = [getattr(copy, name) or 0 for name in COPY_FIELDS]
        return self.call(_kernels.copy_pages_cuda, *arguments, max_blocks)

    def call(self, function: Any, *arguments: Any) -> str | None:
        try:
            function(*arguments, self.stream)
        except RuntimeError as error:
            return str(error)
        return None


@pytest.fixture(scope="session")
def cuda() -> Cuda:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if not _kernels.build_info()["cuda_archs"]:
        pytest.skip("the extension was built without CUDA")
    return Cuda()
