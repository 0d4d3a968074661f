"""Runs a problem on the kernels: emulated on the CPU, or on a GPU."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from simt.problem import DTYPES, Array, Arrays, decode, encode
from simt.structs import Batch, Copy, Layer, Plan

FORWARD, REVERSE, RANDOM = range(3)


class Backend(Protocol):
    """Where kernels run and their arrays lie."""

    def upload(self, array: Array) -> Any: ...
    def address(self, handle: Any) -> int: ...
    def download(self, handle: Any) -> Array: ...
    def plan(self, batch: Batch, words: Array | None) -> Plan: ...
    def attention(self, layer: Layer, batch: Batch) -> str | None: ...
    def copy(self, copy: Copy, max_blocks: int) -> str | None: ...


class Emulated:
    """The kernels as compiled by tests/simt/build.py."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.rx_plan_cuda.restype = Plan
        for function in (library.rx_attention_cuda, library.rx_copy_cuda):
            function.restype = ctypes.c_char_p

    def configure(self, order: int, late_copies: bool = True, num_sms: int = 3) -> None:
        """The order of threads, and whether cp.async lands when waited for or at once."""
        self.library.simt_configure(order, 7, int(late_copies), num_sms)

    def take_stats(self) -> dict[str, int]:
        """What was counted since the last call."""
        numbers = (ctypes.c_long * 4)()
        self.library.simt_take_stats(numbers)
        names = ("switches", "blocks", "ldmatrix", "bank_conflicts")
        return dict(zip(names, numbers, strict=True))

    def upload(self, array: Array) -> Array:
        return array

    def address(self, handle: Array) -> int:
        return handle.ctypes.data

    def download(self, handle: Array) -> Array:
        return handle

    def plan(self, batch: Batch, words: Array | None) -> Plan:
        pointer = None if words is None else words.ctypes.data_as(ctypes.c_void_p)
        return self.library.rx_plan_cuda(ctypes.byref(batch), pointer)

    def attention(self, layer: Layer, batch: Batch) -> str | None:
        error = self.library.rx_attention_cuda(ctypes.byref(layer), ctypes.byref(batch), None)
        return error.decode() if error else None

    def copy(self, copy: Copy, max_blocks: int) -> str | None:
        error = self.library.rx_copy_cuda(ctypes.byref(copy), max_blocks, None)
        return error.decode() if error else None


class Call(NamedTuple):
    """A problem laid out for a back end. `handles` keeps its arrays alive."""

    dtype: str
    layer: Layer
    batch: Batch
    out: Any
    pool: Any
    handles: list[Any]

    def result(self, backend: Backend) -> npt.NDArray[np.float64]:
        """[num_tokens, q_heads, head_dim]"""
        return decode(backend.download(self.out), self.dtype)


def host_batch(a: Arrays, groups: bool) -> tuple[Batch, list[Array]]:
    """The batch with its arrays in host memory, and those arrays."""
    p = a.problem
    chosen = p.groups if groups else ()
    lists = [
        np.array([0, *np.cumsum([len(m) for m, _ in chosen])], np.int32),
        np.array([s for m, _ in chosen for s in m], np.int32),
        np.array([n for _, n in chosen], np.int32),
    ]
    batch = Batch(
        num_seqs=len(p.q_lens),
        num_tokens=len(a.q),
        page_size=p.page_size,
        num_groups=len(chosen),
    )
    arrays = [a.cu_seqlens_q, a.kv_lens, a.page_indptr, a.pages, *lists]
    point_at(batch, [x.ctypes.data for x in arrays])
    return batch, arrays


def point_at(batch: Batch, addresses: list[int]) -> None:
    names = ["cu_seqlens_q", "kv_lens", "page_indptr", "pages"]
    names += ["group_indptr", "group_seqs", "group_lens"]
    for name, at in zip(names, addresses, strict=True):
        setattr(batch, name, at)


def prepare(backend: Backend, a: Arrays, *, groups: bool = True) -> Call:
    """Plan on the host, upload everything, fill in the structs."""
    p = a.problem
    batch, arrays = host_batch(a, groups)
    words = np.full(backend.plan(batch, None).num_words, -1, np.int32)
    batch.plan = backend.plan(batch, words)
    floats = int(batch.plan.num_partials) * p.q_heads * (p.head_dim + 2)
    handles = [backend.upload(x) for x in arrays]
    point_at(batch, [backend.address(h) for h in handles])
    plan, workspace = backend.upload(words), backend.upload(np.full(floats, np.nan, np.float32))
    batch.plan.words = backend.address(plan)
    batch.workspace, batch.workspace_bytes = backend.address(workspace), floats * 4
    out = backend.upload(encode(np.full(a.q.shape, np.nan), p.dtype))
    pool, q, k, v, sinks = (backend.upload(x) for x in (a.pool, a.q, a.k, a.v, a.sinks))
    size = a.pool.itemsize
    strides = {
        f"{name}{kind}stride": array.strides[axis] // size
        for name, array in (("q", a.q), ("k", a.k), ("v", a.v))
        for axis, kind in ((0, "_"), (1, "_head_"))
    }
    layer = Layer(
        dtype=DTYPES[p.dtype], q_heads=p.q_heads, kv_heads=p.kv_heads, head_dim=p.head_dim,
        pool=backend.address(pool), page_stride=a.pool.shape[1], layer_offset=p.layer_offset,
        q=backend.address(q), k=backend.address(k), v=backend.address(v),
        out=backend.address(out), **strides,
        out_stride=p.q_heads * p.head_dim, out_head_stride=p.head_dim,
        scale=p.head_dim**-0.5, softcap=p.softcap, window=p.window,
        sinks=backend.address(sinks) if p.sinks else None,
    )  # fmt: skip
    return Call(p.dtype, layer, batch, out, pool, [*handles, plan, workspace, q, k, v, sinks])


def attend(backend: Backend, a: Arrays, *, groups: bool = True) -> npt.NDArray[np.float64]:
    """[num_tokens, q_heads, head_dim] by the kernels; raises RuntimeError with their refusal."""
    call = prepare(backend, a, groups=groups)
    error = backend.attention(call.layer, call.batch)
    if error:
        raise RuntimeError(error)
    return call.result(backend)
