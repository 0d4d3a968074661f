"""The emulated CUDA kernels in the place of the extension's C ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simt.problem import Array
from simt.run import Emulated
from simt.structs import HOST_FIELDS, LAYER_FIELDS, Batch, Layer


class Planned(NamedTuple):
    batch: Batch
    words: Array


class EmulatedKernels:
    """What radixsvc.attention calls of tiers._kernels on a CPU: `batch` and `attention`."""

    def __init__(self, emulated: Emulated) -> None:
        self.emulated = emulated

    def batch(self, *arguments: int) -> Planned:
        batch = Batch(**dict(zip(HOST_FIELDS, arguments, strict=True)))
        words = np.full(self.emulated.plan(batch, None).num_words, -1, np.int32)
        batch.plan = self.emulated.plan(batch, words)
        return Planned(batch, words)

    def attention(self, planned: Planned, *arguments: float) -> None:
        layer = Layer(**dict(zip(LAYER_FIELDS, arguments, strict=True)))
        batch = planned.batch
        floats = int(batch.plan.num_partials) * layer.q_heads * (layer.head_dim + 2)
        workspace = np.full(floats, np.nan, np.float32)
        batch.workspace, batch.workspace_bytes = workspace.ctypes.data, workspace.nbytes
        error = self.emulated.attention(layer, batch)
        if error:
            raise RuntimeError(error)
