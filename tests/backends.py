"""What attention's tests run over: a case, the reference it must equal, the back ends.

A back end joins every test of tests/test_attention.py by joining `BACKENDS`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pytest
import simt.run
import torch
from simt.build import emulated_library, require_compiler
from simt.kernels import EmulatedKernels

import radixsvc.attention
from radixsvc.attention import RaggedBatch, StepContext, paged_attention
from tiers import _kernels
from tiers.page import PageShape


@dataclass(frozen=True)
class Case:
    """One layer's call. Unwritten slots of `pool` are NaN; `attend` writes k and v to it."""

    shape: PageShape
    pool: torch.Tensor  # [num_pages, shape.elems]
    q_lens: list[int]
    kv_lens: list[int]
    page_tables: list[np.ndarray]
    q: torch.Tensor  # [tokens, q_heads, head_dim], perhaps strided
    k: torch.Tensor
    v: torch.Tensor
    layer: int = 0
    scale: float = 0.3
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    def with_pool_copy(self, **changes: Any) -> Case:
        return replace(self, pool=self.pool.clone(), **changes)


class Backend(Protocol):
    name: str

    def refuses(self, case: Case) -> str | None:
        """Why this back end does not take the case, None where it does."""

    def attend(self, case: Case) -> torch.Tensor:
        """[tokens, q_heads, head_dim] on the CPU; `case.pool` holds k and v afterwards."""


class C:
    """The C kernels, in one instruction set."""

    def __init__(self, isa: str, num_threads: int = 1) -> None:
        self.name = f"{isa}-{num_threads}"
        self.isa = isa
        self.num_threads = num_threads

    def refuses(self, case: Case) -> str | None:
        try:
            _kernels.select_isa(self.isa)
        except RuntimeError as error:
            return str(error)
        return None

    def attend(self, case: Case) -> torch.Tensor:
        _kernels.select_isa(self.isa)
        _kernels.set_num_threads(self.num_threads)
        batch = RaggedBatch.build(
            case.q_lens,
            case.kv_lens,
            case.page_tables,
            case.shape.page_size,
        )
        try:
            with StepContext(case.pool, case.shape, batch):
                return paged_attention(
                    case.q, case.k, case.v, case.layer, case.scale,
                    case.window, case.softcap, case.sinks,
                )  # fmt: skip
        finally:
            _kernels.select_isa("")
            _kernels.set_num_threads(1)


def cuda_refuses(case: Case) -> str | None:
    """What the CUDA kernels say of a layer they do not support."""
    head_dim, size = case.q.shape[2], case.pool.element_size()
    if size == 2 and head_dim not in (64, 96, 128, 256):
        return "the CUDA kernels take head_dim 64, 96, 128 or 256 in bfloat16 and float16"
    if case.pool.data_ptr() % 16:
        return "the CUDA kernels take pages and layers that begin at multiples of 16 bytes"
    return None


class Emulated:
    """The CUDA kernels, thread by thread on the CPU."""

    name = "emulated"

    def refuses(self, case: Case) -> str | None:
        require_compiler()
        return cuda_refuses(case)

    def attend(self, case: Case) -> torch.Tensor:
        emulated = simt.run.Emulated(emulated_library())
        emulated.configure(simt.run.RANDOM)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(radixsvc.attention, "_kernels", EmulatedKernels(emulated))
            return C("").attend(case)


class Cuda:
    """The CUDA kernels on a GPU."""

    name = "cuda"

    def refuses(self, case: Case) -> str | None:
        if not torch.cuda.is_available():
            return "no CUDA device"
        if not _kernels.build_info()["cuda_archs"]:
            return "the extension was built without CUDA"
        return cuda_refuses(case)

    def attend(self, case: Case) -> torch.Tensor:
        batch = RaggedBatch.build(
            case.q_lens,
            case.kv_lens,
            case.page_tables,
            case.shape.page_size,
            "cuda",
        )
        pool, q, k, v = (x.cuda() for x in (case.pool, case.q, case.k, case.v))
        sinks = None if case.sinks is None else case.sinks.cuda()
        with StepContext(pool, case.shape, batch):
            out = paged_attention(q, k, v, case.layer, case.scale, case.window, case.softcap, sinks)
        case.pool.copy_(pool)
        return out.cpu()


BACKENDS: list[Any] = [
    pytest.param(backend, id=backend.name, marks=pytest.mark.gpu if backend.name == "cuda" else ())
    for backend in (C("plain"), C("avx2"), C("avx512"), C("amx"), C("", 3), Emulated(), Cuda())
]


def run(backend: Backend, case: Case) -> torch.Tensor:
    """`attend`, or a skip that says why."""
    reason = backend.refuses(case)
    if reason:
        pytest.skip(reason)
    return backend.attend(case)


def make_case(
    q_lens: list[int],
    kv_lens: list[int],
    *,
    q_heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    num_layers: int = 1,
    shared_len: int = 0,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Random contexts on pages in random order; sequences share their first `shared_len` tokens."""
    g = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    name = str(dtype).removeprefix("torch.")
    shape = PageShape.uniform(num_layers, kv_heads, head_dim, page_size, name)
    num_shared = shared_len // page_size
    needed = [-(-n // page_size) for n in kv_lens]
    ids = rng.permutation(sum(needed) + num_shared + 3).astype(np.int32)
    pool = torch.full((len(ids), shape.elems), float("nan"), dtype=dtype)
    shared, ids = ids[:num_shared], ids[num_shared:]
    tables = []
    for n in needed:
        tables.append(np.concatenate([shared[:n], ids[: max(0, n - num_shared)]]))
        ids = ids[max(0, n - num_shared) :]
    layer = options.get("layer", 0)
    for q_len, kv_len, table in zip(q_lens, kv_lens, tables, strict=True):
        for i, page in enumerate(table.tolist()):
            n = min(page_size, kv_len - q_len - i * page_size)
            if n > 0:
                slots = _slots(pool, shape, layer, page)[:, :, :n]
                slots.copy_(torch.randn(slots.shape, generator=g).to(dtype))
    tokens = sum(q_lens)
    q, k, v = (
        torch.randn(tokens, heads, head_dim, generator=g).to(dtype)
        for heads in (q_heads, kv_heads, kv_heads)
    )
    return Case(shape, pool, q_lens, kv_lens, tables, q, k, v, **options)


def _slots(pool: torch.Tensor, shape: PageShape, layer: int, page: int) -> torch.Tensor:
    """[2, kv_heads, page_size, head_dim] of one page, a view."""
    spec = shape.layers[layer]
    size = 2 * spec.kv_heads * shape.page_size * spec.head_dim
    flat = pool[page, spec.offset : spec.offset + size]
    return flat.view(2, spec.kv_heads, shape.page_size, spec.head_dim)


def written(case: Case) -> torch.Tensor:
    """The pool as it must be after the call."""
    pool = case.pool.clone()
    row = 0
    for q_len, kv_len, table in zip(case.q_lens, case.kv_lens, case.page_tables, strict=True):
        for p in range(kv_len - q_len, kv_len):
            page, slot = int(table[p // case.shape.page_size]), p % case.shape.page_size
            new = torch.stack([case.k[row], case.v[row]])
            _slots(pool, case.shape, case.layer, page)[:, :, slot] = new
            row += 1
    return pool


def reference(case: Case) -> torch.Tensor:
    """Attention in float64, a sequence at a time, straight from the definition."""
    pool = written(case)
    group = case.q.shape[1] // case.shape.layers[case.layer].kv_heads
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    row = 0
    for q_len, kv_len, table in zip(case.q_lens, case.kv_lens, case.page_tables, strict=True):
        if q_len == 0:
            continue
        pages = [_slots(pool, case.shape, case.layer, int(page)) for page in table]
        kv = torch.cat(pages, dim=2)[:, :, :kv_len].double().nan_to_num()
        kv = kv.repeat_interleave(group, dim=1)
        s = torch.einsum("qhd,htd->hqt", case.q[row : row + q_len].double(), kv[0]) * case.scale
        if case.softcap:
            s = torch.tanh(s / case.softcap) * case.softcap
        behind = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)
        s = s.masked_fill(behind < 0, float("-inf"))
        if case.window:
            s = s.masked_fill(behind >= case.window, float("-inf"))
        if case.sinks is not None:
            s = torch.cat([s, case.sinks.double()[:, None, None].expand(-1, q_len, 1)], dim=2)
        weights = s.softmax(dim=2)[:, :, :kv_len]
        out[row : row + q_len] = torch.einsum("hqt,htd->qhd", weights, kv[1])
        row += q_len
    return out
