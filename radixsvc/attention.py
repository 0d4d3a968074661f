"""Attention over pages: `torch.ops.radixsvc.paged_attention`, and the step it runs in.

The engine describes a step once, for all layers: a `RaggedBatch` of sequences, some with many new
tokens (prefill, or its continuation over a cached prefix), some with one (decode). In a step's
`with`, each layer's op appends its keys and values to the pages and attends. Only the op's output
is visible to torch as a result; pages change beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tiers import _kernels
from tiers.page import PageIds, PageShape

Int32s = npt.NDArray[np.int32]

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MIN_SHARED_TOKENS = 512  # the length of a split; less is not attended to together


@dataclass(frozen=True)
class SharedGroups:
    """Sequences whose first tokens lie in the same pages, so that one pass reads them for all.

    Group g is `seqs[indptr[g]:indptr[g + 1]]`; its members share `lens[g]` tokens, whole pages.
    """

    indptr: Int32s
    seqs: Int32s
    lens: Int32s

    @classmethod
    def find(
        cls, q_lens: Int32s, kv_lens: Int32s, page_tables: Sequence[PageIds], page_size: int
    ) -> SharedGroups:
        """Groups among the decoding sequences; of each first page the most tokens saved."""
        by_first: dict[int, list[int]] = {}
        for s in np.flatnonzero((q_lens == 1) & (kv_lens > MIN_SHARED_TOKENS)).tolist():
            by_first.setdefault(int(page_tables[s][0]), []).append(s)
        seqs: list[int] = []
        indptr, lens = [0], []
        for members in by_first.values():
            if len(members) < 2:
                continue
            first = page_tables[members[0]][: (int(kv_lens[members[0]]) - 1) // page_size]
            shared = [(len(first), members[0])]
            for s in members[1:]:
                table = page_tables[s][: min(len(first), (int(kv_lens[s]) - 1) // page_size)]
                differs = np.flatnonzero(table != first[: len(table)])
                shared.append((int(differs[0]) if len(differs) else len(table), s))
            shared[1:] = sorted(shared[1:], reverse=True)
            count = max(range(1, len(shared)), key=lambda i: i * shared[i][0])
            num_tokens = shared[count][0] * page_size
            if num_tokens >= MIN_SHARED_TOKENS:
                seqs += [s for _, s in shared[: count + 1]]
                indptr.append(len(seqs))
                lens.append(num_tokens)
        return cls(*(np.array(x, np.int32) for x in (indptr, seqs, lens)))


@dataclass(frozen=True)
class RaggedBatch:
    """One step's sequences, checked. Sequence s has `q_lens[s]` new tokens, rows
    `cu_seqlens_q[s]` to `cu_seqlens_q[s + 1]` of q, k and v; its context is `kv_lens[s]` tokens
    long, the new ones included, in `pages[page_indptr[s]:page_indptr[s + 1]]`.
    """

    page_size: int
    num_tokens: int
    cu_seqlens_q: Int32s
    kv_lens: Int32s
    page_indptr: Int32s
    pages: PageIds
    groups: SharedGroups
    handle: _kernels.Batch
    device: torch.device
    memory: BatchMemory | None = None  # on CUDA, what the handle points to
    num_partials: int = 0  # on CUDA, splits of all decoding sequences

    @classmethod
    def build(
        cls,
        q_lens: Sequence[int] | Int32s,
        kv_lens: Sequence[int] | Int32s,
        page_tables: Sequence[PageIds],
        page_size: int,
        device: torch.device | str = "cpu",
        *,
        num_rows: int = 0,
    ) -> RaggedBatch:
        """ValueError where lengths are negative, disagree, or exceed a sequence's page table.

        `num_rows` beyond the new tokens is padding: rows of q, k and v that are nobody's, for
        which nothing is appended and whose output is undefined. For the CUDA kernels alone.
        """
        queries, contexts = np.array(q_lens, np.int32), np.array(kv_lens, np.int32)
        if not queries.ndim == contexts.ndim == 1 or not (
            len(queries) == len(contexts) == len(page_tables)
        ):
            raise ValueError(
                f"{queries.shape} query lengths, {contexts.shape} context lengths and "
                f"{len(page_tables)} page tables do not describe one batch"
            )
        if (queries < 0).any() or (contexts < queries).any():
            raise ValueError("a sequence has fewer than 0, or more new tokens than its context")
        needed = (contexts + (page_size - 1)) // page_size
        held = np.fromiter(map(len, page_tables), np.int32, len(page_tables))
        if (held < needed).any():
            s = int(np.flatnonzero(held < needed)[0])
            raise ValueError(
                f"sequence {s} is {contexts[s]} tokens long and has {held[s]} pages of {page_size}"
            )
        device = torch.device(device)
        if device.type != "cpu" and not (device.type == "cuda" and hasattr(_kernels, "cuda_plan")):
            raise ValueError(f"no attention kernels for {device} in this build; see `doctor`")
        tables = [table[:n] for table, n in zip(page_tables, needed.tolist(), strict=True)]
        pages = np.concatenate(tables, dtype=np.int32) if tables else np.empty(0, np.int32)
        cu_seqlens_q = np.zeros(len(queries) + 1, np.int32)
        np.cumsum(queries, out=cu_seqlens_q[1:])
        page_indptr = np.zeros(len(queries) + 1, np.int32)
        np.cumsum(needed, out=page_indptr[1:])
        groups = SharedGroups.find(queries, contexts, tables, page_size)
        num_tokens = max(num_rows, int(cu_seqlens_q[-1]))
        lists = (cu_seqlens_q, contexts, page_indptr, pages)
        arguments: tuple[int, ...] = (
            len(queries),
            num_tokens,
            page_size,
            *(x.ctypes.data for x in lists),
            len(groups.lens),
            *(x.ctypes.data for x in (groups.indptr, groups.seqs, groups.lens)),
        )
        handle = _kernels.batch(*arguments)
        batch = cls(page_size, num_tokens, *lists, groups, handle, device)
        if device.type == "cpu":
            return batch
        num_words, *plan = _kernels.cuda_plan(handle, 0)
        sizes = (len(cu_seqlens_q), len(contexts), len(page_indptr), num_words, len(pages))
        memory = BatchMemory(sizes, plan[-1], device)
        memory.write(batch)
        return memory.batch(batch, plan)

    @classmethod
    def largest(
        cls, num_seqs: int, num_tokens: int, page_size: int, device: torch.device
    ) -> RaggedBatch:
        """What a CUDA graph is captured with, to be replayed with other batches in its memory:
        `num_seqs` rows of padding, and room for as many decoding sequences whose contexts are
        `num_tokens` long in all.
        """
        num_splits = num_tokens // _kernels.SPLIT + num_seqs
        num_words = _kernels.PLAN_HEADER + 4 * num_seqs + 2 * num_splits
        num_pages = num_tokens // page_size + num_seqs
        sizes = (num_seqs + 1, num_seqs, num_seqs + 1, num_words, num_pages)
        memory = BatchMemory(sizes, num_splits, device)
        padding = cls.build([], [], [], page_size, num_rows=num_seqs)
        memory.write(padding)
        return memory.batch(padding, [num_seqs, 1, 0, num_splits])


class BatchMemory:
    """A batch and the kernels' work lists on a CUDA device, in one piece of int32:

    cu_seqlens_q | kv_lens | page_indptr | words of cuda/plan.h | pages
    """

    def __init__(self, sizes: Sequence[int], num_partials: int, device: torch.device) -> None:
        self.sizes = sizes
        self.num_partials = num_partials
        self.starts = np.cumsum([0, *sizes])
        self.memory = torch.empty(int(self.starts[-1]), dtype=torch.int32, device=device)

    def write(self, batch: RaggedBatch) -> bool:
        """Queue a copy of a batch on the host into this memory; False where it is too large."""
        num_words, *_, num_partials = _kernels.cuda_plan(batch.handle, 0)
        words = np.empty(num_words, np.int32)
        arrays = (batch.cu_seqlens_q, batch.kv_lens, batch.page_indptr, words, batch.pages)
        if num_partials > self.num_partials or any(
            len(array) > size for array, size in zip(arrays, self.sizes, strict=True)
        ):
            return False
        _kernels.cuda_plan(batch.handle, words.ctypes.data)
        staged = np.zeros(int(self.starts[4]) + len(batch.pages), np.int32)
        for start, array in zip(self.starts.tolist(), arrays, strict=False):
            staged[start : start + len(array)] = array
        self.memory[: len(staged)].copy_(pinned(staged, self.memory.device), non_blocking=True)
        return True

    def batch(self, host: RaggedBatch, plan: Sequence[int]) -> RaggedBatch:
        """The batch that lies here, with the counts that kernels are launched by."""
        *lists, words, pages, _ = (self.memory.data_ptr() + 4 * self.starts).tolist()
        sizes = (len(host.kv_lens), host.num_tokens, host.page_size)
        arguments: tuple[int, ...] = (*sizes, *lists, pages, words, self.sizes[3], *plan)
        handle = _kernels.cuda_batch(*arguments)
        device = self.memory.device
        return replace(host, handle=handle, device=device, memory=self, num_partials=plan[-1])


def pinned(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array as a tensor that `device` copies without the host waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory()


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array on `device`, its copy queued; on a CPU the very same memory."""
    return pinned(array, device).to(device, non_blocking=True)


class StepContext:
    """A step: the pool of pages, [num_pages, shape.elems], what a page holds, and the batch.

    `with step:` makes it the one that this thread's attention belongs to.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        shape: PageShape,
        batch: RaggedBatch,
        partials: torch.Tensor | None = None,
    ) -> None:
        """`partials` is memory to share with steps that never run at once: what theirs hold.

        ValueError where the pool is not of that shape, or the batch names pages beyond it."""
        dtype = getattr(torch, shape.dtype)
        if (
            pool.ndim != 2
            or pool.shape[1] < shape.elems
            or pool.dtype != dtype
            or pool.stride(1) != 1
        ):
            raise ValueError(
                f"the pool is {tuple(pool.shape)} of {pool.dtype}, strides {pool.stride()}; its "
                f"pages hold {shape.elems} elements of {dtype}, in a row"
            )
        if batch.page_size != shape.page_size:
            raise ValueError(f"pages of {batch.page_size} tokens, the pool has {shape.page_size}")
        if len(batch.pages) and not (batch.pages.min() >= 0 and batch.pages.max() < pool.shape[0]):
            raise ValueError(f"page ids must lie in [0, {pool.shape[0]})")
        if pool.device.type != batch.device.type:
            raise ValueError(f"the pool is on {pool.device}, the batch on {batch.device}")
        self.pool = pool
        self.shape = shape
        self.batch = batch
        self.dtype = dtype
        self.device = pool.device
        self.on_gpu = pool.device.type == "cuda"
        self.pool_arguments = pool.data_ptr(), pool.stride(0)
        self.partials = partials
        self._out = pool.new_empty(0, 0, 0)

    def __enter__(self) -> None:
        self._outer = _current.step
        _current.step = self

    def __exit__(self, *exc_info: object) -> None:
        _current.step = self._outer

    def output(self, q: torch.Tensor) -> torch.Tensor:
        """Memory for one layer's output, the same for all: a small model's decoding on a CPU takes
        a quarter as long again where torch is asked for some each time.
        """
        if self._out.shape != q.shape:
            self._out = q.new_empty(q.shape)
        return self._out

    def workspace(self, q_heads: int, head_dim: int) -> tuple[int, int, int]:
        """Of a CUDA launch: memory for one layer's partial results, its bytes, the stream."""
        size = self.batch.num_partials * q_heads * (head_dim + 2)
        if self.partials is None or len(self.partials) < size:
            self.partials = torch.empty(size, dtype=torch.float32, device=self.device)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        return self.partials.data_ptr(), self.partials.nbytes, stream


class _Current(threading.local):
    step: StepContext | None = None


_current = _Current()


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    layer: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Append k and v to the current step's pages, then attend. Returns [tokens, q_heads, head_dim],
    in memory that the step's next layer uses again.

    q is [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim], in the pool's dtype,
    the last dimension contiguous; without k and v nothing is appended. `window` 0 and `softcap` 0
    mean none; sinks is [q_heads]. ValueError for anything else; RuntimeError outside a step,
    and on CUDA for what its kernels don't support.
    """
    step = _current.step
    if step is None:
        raise RuntimeError("paged_attention runs inside `with step:` only")
    spec = step.shape.layers[layer]
    q_heads, kv_heads, head_dim = q.shape[1], spec.kv_heads, spec.head_dim
    if q_heads % kv_heads or (k is None) != (v is None):
        raise ValueError(f"{q_heads} query heads of {kv_heads} of keys and values, both or none")
    if scale <= 0 or window < 0 or softcap < 0:
        raise ValueError(
            f"scale {scale} must be positive, window {window} and softcap {softcap} not negative"
        )
    if sinks is not None:
        if sinks.shape != (q_heads,):
            raise ValueError(f"sinks are {tuple(sinks.shape)}, not one for each of {q_heads} heads")
        sinks = sinks.to(torch.float32).contiguous()
    out = step.output(q)
    arguments: tuple[Any, ...] = (
        step.batch.handle,
        DTYPE_CODES[step.dtype],
        q_heads,
        kv_heads,
        head_dim,
        *step.pool_arguments,
        spec.offset,
        *_rows(q, q_heads, step, head_dim),
        *_rows(k, kv_heads, step, head_dim),
        *_rows(v, kv_heads, step, head_dim),
        out.data_ptr(),
        q_heads * head_dim,
        head_dim,
        scale,
        softcap,
        window,
        0 if sinks is None else sinks.data_ptr(),
        *(step.workspace(q_heads, head_dim) if step.on_gpu else (0, 0, 0)),
    )
    _kernels.attention(*arguments)
    return out


def _rows(
    x: torch.Tensor | None, heads: int, step: StepContext, head_dim: int
) -> tuple[int, int, int]:
    """Where rows of [tokens, heads, head_dim] begin; strides from token to token and head."""
    if x is None:
        return 0, 0, 0
    shape, strides = (step.batch.num_tokens, heads, head_dim), x.stride()
    if x.shape != shape or strides[2] != 1 or x.dtype != step.dtype or x.device != step.device:
        raise ValueError(
            f"queries, keys or values are {tuple(x.shape)} of {x.dtype} on {x.device}, strides "
            f"{strides}; the layer takes {shape} in {step.dtype} on {step.device}"
        )
    return x.data_ptr(), strides[0], strides[1]


def _shape_of(q: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


_library: Any = torch.library.Library("radixsvc", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "paged_attention(Tensor q, Tensor? k, Tensor? v, int layer, float scale, int window=0, "
    "float softcap=0.0, Tensor? sinks=None) -> Tensor"
)
for _backend in ("CPU", "CUDA"):
    _library.impl("paged_attention", paged_attention, _backend)
_library.impl("paged_attention", _shape_of, "Meta")


def set_num_threads(num_threads: int) -> None:
    """Threads that attention on the CPU uses, the calling one included."""
    _kernels.set_num_threads(num_threads)


def build_info() -> dict[str, str]:
    """The extension's compiler, the CPU instructions in use, and the CUDA architectures built."""
    return _kernels.build_info()
