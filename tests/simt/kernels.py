"""The emulated CUDA kernels in the place of the extension's C ones."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from simt.problem import Array
from simt.run import Emulated
from simt.structs import DEVICE_FIELDS, HOST_FIELDS, LAYER_FIELDS, Batch, Layer, Plan
from tiers import _kernels


class Planned(NamedTuple):
    batch: Batch
    words: Array | None  # what the batch's plan points to, unless that is someone else's


class EmulatedKernels:
    """What radixsvc.attention takes of tiers._kernels, with the CPU as the device."""

    SPLIT, PLAN_HEADER = _kernels.SPLIT, _kernels.PLAN_HEADER

    def __init__(self, emulated: Emulated) -> None:
        self.emulated = emulated

    def batch(self, *arguments: int) -> Planned:
        batch = Batch(**dict(zip(HOST_FIELDS, arguments, strict=True)))
        words = np.full(self.emulated.plan(batch, None).num_words, -1, np.int32)
        batch.plan = self.emulated.plan(batch, words)
        return Planned(batch, words)

    def cuda_plan(self, planned: Planned, words: int) -> tuple[int, ...]:
        plan = self.emulated.library.rx_plan_cuda(
            ctypes.byref(planned.batch), ctypes.c_void_p(words)
        )
        return tuple(getattr(plan, name) for name, _ in Plan._fields_[1:])

    def cuda_batch(self, *arguments: int) -> Planned:
        batch = Batch(**dict(zip(DEVICE_FIELDS, arguments, strict=False)))
        batch.plan = Plan(*arguments[len(DEVICE_FIELDS) :])
        return Planned(batch, None)

    def attention(self, planned: Planned, *arguments: float) -> None:
        layer = Layer(**dict(zip(LAYER_FIELDS, arguments, strict=False)))
        batch = planned.batch
        floats = int(batch.plan.num_partials) * layer.q_heads * (layer.head_dim + 2)
        workspace = np.full(floats, np.nan, np.float32)
        batch.workspace, batch.workspace_bytes = workspace.ctypes.data, workspace.nbytes
        error = self.emulated.attention(layer, batch)
        if error:
            raise RuntimeError(error)
