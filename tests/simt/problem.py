"""One attention call as arrays: a pool of scattered pages, NaN wherever nothing was written."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
FAR_AWAY = 1 << 30  # the page id behind a list: whoever reads it and follows it crashes
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
# Against float64, on inputs of unit variance: rounding of inputs is common to both sides, that of
# weights and results is not.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


def encode(values: npt.NDArray[np.floating], dtype: str) -> Array:
    """`values` in `dtype`, bfloat16 as uint16."""
    if dtype == "float16":
        return values.astype(np.float16)
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "float32":
        return values
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def decode(array: Array, dtype: str) -> npt.NDArray[np.float64]:
    """What `encode` made, as float64."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def indptr(lengths: list[int]) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)


@dataclass(frozen=True)
class Problem:
    """A batch and a layer. `groups` holds (sequences, tokens they share), whole pages each."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "bfloat16"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    groups: tuple[tuple[tuple[int, ...], int], ...] = ()
    padding: int = 0  # rows of a captured graph that belong to no sequence
    skew: int = 0  # elements by which rows of q, k and v miss alignment
    layer_offset: int = 0  # elements of other layers in front of ours
    page_stride: int = 0  # elements; more than needed makes the pool a sparse mapping
    ids: tuple[int, ...] = ()  # which numbers each sequence has; its place in the batch by default
    seed: int = 0

    def arrays(self, place: int = 0) -> Arrays:
        """The same numbers for any `place`, which picks the pages they lie in."""
        return build_arrays(self, place)


@dataclass
class Arrays:
    """Host arrays of a problem, and the keys and values of each sequence."""

    problem: Problem
    pool: Array  # [num_pages, page_stride]
    q: Array  # [num_tokens + padding, q_heads, head_dim], rows strided
    k: Array
    v: Array
    sinks: npt.NDArray[np.float32]
    cu_seqlens_q: npt.NDArray[np.int32]
    kv_lens: npt.NDArray[np.int32]
    page_indptr: npt.NDArray[np.int32]
    pages: npt.NDArray[np.int32]
    keys: list[Array] = field(default_factory=list)  # each [kv_len, kv_heads, head_dim]
    values: list[Array] = field(default_factory=list)

    def layer_view(self, page: int) -> Array:
        """[2, kv_heads, page_size, head_dim] of our layer in a page."""
        p = self.problem
        size = 2 * p.kv_heads * p.page_size * p.head_dim
        flat = self.pool[page, p.layer_offset : p.layer_offset + size]
        return flat.reshape(2, p.kv_heads, p.page_size, p.head_dim)


def new_pool(p: Problem, num_pages: int, elems: int) -> Array:
    """[num_pages, page_stride], NaN; a wide stride leaves memory between pages untouched."""
    if not p.page_stride:
        return encode(np.full((num_pages, elems + 8), np.nan), p.dtype)
    item = encode(np.zeros(1), p.dtype).dtype
    memory = mmap.mmap(-1, num_pages * p.page_stride * item.itemsize)
    pool = np.frombuffer(memory, item).reshape(num_pages, p.page_stride)
    pool[:, :elems] = encode(np.full(1, np.nan), p.dtype)
    return pool


def build_arrays(p: Problem, place: int) -> Arrays:
    needed = [-(-n // p.page_size) for n in p.kv_lens]
    # Page 0, where stray reads land, is nobody's and stays NaN.
    shuffled = 1 + np.random.default_rng(place).permutation(sum(needed) + 2).astype(np.int32)
    tables = np.split(shuffled, np.cumsum(needed))[: len(needed)]
    source = {seq: (members[0], n) for members, n in p.groups for seq in members[1:]}
    for seq, (first, length) in source.items():
        tables[seq][: length // p.page_size] = tables[first][: length // p.page_size]
    size = 2 * p.kv_heads * p.page_size * p.head_dim
    pool = new_pool(p, len(shuffled) + 1, p.layer_offset + size)

    def fused(heads: int) -> Array:
        """Rows inside wider ones, as slices of a fused projection are."""
        width = -(-(heads * p.head_dim + p.skew) // 8) * 8 + 8
        rows = encode(np.full((sum(p.q_lens) + p.padding, width), np.nan), p.dtype)
        strides = (rows.strides[0], p.head_dim * rows.itemsize, rows.itemsize)
        return np.lib.stride_tricks.as_strided(
            rows[:, p.skew :], (len(rows), heads, p.head_dim), strides
        )

    a = Arrays(
        p, pool, fused(p.q_heads), fused(p.kv_heads), fused(p.kv_heads),
        np.random.default_rng(p.seed).standard_normal(p.q_heads).astype(np.float32),
        indptr(list(p.q_lens)), np.array(p.kv_lens, np.int32), indptr(needed),
        np.concatenate([*tables, np.full(64, FAR_AWAY, np.int32)]),
    )  # fmt: skip
    for seq, (q_len, kv_len) in enumerate(zip(p.q_lens, p.kv_lens, strict=True)):
        rng = np.random.default_rng([p.seed, p.ids[seq] if p.ids else seq])
        draw = rng.standard_normal((kv_len, p.q_heads + 2 * p.kv_heads, p.head_dim))
        q, k, v = np.split(encode(draw, p.dtype), [p.q_heads, p.q_heads + p.kv_heads], 1)
        first, cached = a.cu_seqlens_q[seq], kv_len - q_len
        owner, shared = source.get(seq, (seq, 0))
        for new, all_rows in ((a.q, q), (a.k, k), (a.v, v)):
            new[first : first + q_len] = all_rows[cached:]
        for kept, all_rows in ((a.keys, k), (a.values, v)):
            borrowed = kept[owner][:shared] if shared else all_rows[:0]
            kept.append(np.concatenate([borrowed, all_rows[shared:]]))
        for i in range(shared, cached):
            page = a.layer_view(int(tables[seq][i // p.page_size]))
            page[0, :, i % p.page_size], page[1, :, i % p.page_size] = k[i], v[i]
    return a


def pool_after(a: Arrays) -> Array:
    """The pool with the new keys and values at their places."""
    p = a.problem
    after = replace(a, pool=a.pool.copy())
    for seq, (q_len, kv_len) in enumerate(zip(p.q_lens, p.kv_lens, strict=True)):
        for i in range(kv_len - q_len, kv_len):
            table = a.pages[a.page_indptr[seq] :]
            page = after.layer_view(int(table[i // p.page_size]))
            page[0, :, i % p.page_size] = a.keys[seq][i]
            page[1, :, i % p.page_size] = a.values[seq][i]
    return after.pool


def expected(a: Arrays) -> npt.NDArray[np.float64]:
    """Attention in float64, [num_tokens, q_heads, head_dim]; rows of padding are NaN."""
    p = a.problem
    out = np.full(a.q.shape, np.nan)
    queries = decode(a.q, p.dtype)
    for seq, (q_len, kv_len) in enumerate(zip(p.q_lens, p.kv_lens, strict=True)):
        rows = slice(a.cu_seqlens_q[seq], a.cu_seqlens_q[seq] + q_len)
        keys = np.repeat(decode(a.keys[seq], p.dtype), p.q_heads // p.kv_heads, 1)
        values = np.repeat(decode(a.values[seq], p.dtype), p.q_heads // p.kv_heads, 1)
        scores = np.einsum("qhd,khd->hqk", queries[rows], keys) * p.head_dim**-0.5
        if p.softcap:
            scores = p.softcap * np.tanh(scores / p.softcap)
        position = np.arange(kv_len - q_len, kv_len)[:, None]
        key = np.arange(kv_len)[None, :]
        seen = key <= position
        if p.window:
            seen &= key > position - p.window
        scores = np.where(seen, scores, -np.inf)
        if p.sinks:
            sinks = np.broadcast_to(a.sinks[:, None, None], (p.q_heads, q_len, 1))
            scores = np.concatenate([scores, sinks], 2)
        if q_len:
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[rows] = np.einsum("hqk,khd->qhd", weights[:, :, :kv_len], values)
    return out
