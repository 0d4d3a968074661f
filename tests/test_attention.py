"""Paged attention against float64, and bit for bit against itself, on every back end."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from backends import BACKENDS, Backend, C, Case, make_case, reference, run, written

from radixsvc.attention import (
    RaggedBatch,
    StepContext,
    paged_attention,
    set_num_threads,
)

MAP_NORESERVE = 0x4000
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}

over_backends = pytest.mark.parametrize("backend", BACKENDS)


def check(backend: Backend, case: Case) -> None:
    """Output near the reference, pages exactly as they must be, and nothing else written."""
    pool, expected = written(case), reference(case)
    out = run(backend, case)
    worst = (out.double() - expected).abs().max().item() if out.numel() else 0.0
    assert worst <= TOLERANCE[case.q.dtype], f"off by {worst}"
    assert torch.equal(case.pool.nan_to_num(7), pool.nan_to_num(7))


@over_backends
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_prefill_continuation_and_decode_in_one_batch(backend: Backend, dtype: torch.dtype) -> None:
    check(backend, make_case([5, 33, 1, 70, 1], [5, 90, 40, 70, 600], dtype=dtype))


@over_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 8, 16, 32, 64, 128])
def test_page_sizes(backend: Backend, page_size: int, dtype: torch.dtype) -> None:
    check(backend, make_case([3, 1], [130, 70], page_size=page_size, dtype=dtype))


@over_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(backend: Backend, head_dim: int, dtype: torch.dtype) -> None:
    check(backend, make_case([20, 1], [90, 70], head_dim=head_dim, dtype=dtype, scale=0.1))


@over_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_group_sizes(backend: Backend, group: int, dtype: torch.dtype) -> None:
    check(backend, make_case([9, 1], [80, 70], q_heads=2 * group, dtype=dtype))


@over_backends
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 20},
        {"window": 600},
        {"softcap": 5.0},
        {"sinks": torch.tensor([-3.0, 0.0, 1.0, 2.0, 5.0, 30.0])},
        {"softcap": 30.0, "window": 64, "sinks": torch.linspace(-2, 2, 6)},
    ],
    ids=lambda o: "+".join(o),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_windows_soft_cap_and_sinks(
    backend: Backend, options: dict[str, object], dtype: torch.dtype
) -> None:
    check(backend, make_case([40, 1, 1], [700, 1300, 63], dtype=dtype, **options))


@over_backends
def test_every_number_of_splits(backend: Backend) -> None:
    """Lengths around each boundary of blocks and splits, decoding."""
    lens = [1, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 1537, 2049]
    check(backend, make_case([1] * len(lens), lens, q_heads=2, kv_heads=1))


@over_backends
def test_empty_sequences_and_an_empty_batch(backend: Backend) -> None:
    check(backend, make_case([0, 2, 0, 1, 0], [0, 2, 5, 30, 0]))
    check(backend, make_case([], []))
    check(backend, make_case([0], [0]))


@over_backends
def test_a_row_seen_through_its_window_alone(backend: Backend) -> None:
    """Whole splits before the window are masked for some rows of a tile and not for others."""
    check(backend, make_case([600], [1200], q_heads=2, kv_heads=1, window=3))


@over_backends
def test_strided_queries_and_unaligned_bases(backend: Backend) -> None:
    case = make_case([4, 1], [20, 33])
    q = torch.randn(6, 5, 64 + 3).transpose(0, 1)[:, :, 3:]  # head-major, rows unaligned
    kv = torch.randn(5, 4, 64 + 1)[:, :, 1:]
    base = torch.full((case.pool.numel() + 1,), float("nan"))[1:].view(case.pool.shape)
    pool = base.copy_(case.pool)
    check(backend, replace(case, pool=pool, q=q, k=kv[:, :2], v=kv[:, 2:]))


@over_backends
def test_layers_of_one_page_do_not_touch_each_other(backend: Backend) -> None:
    check(backend, make_case([3, 1], [40, 17], num_layers=3, layer=1))


@over_backends
def test_pages_beyond_2_to_the_31_elements(backend: Backend) -> None:
    """A sparse arena; low pages hold other data, which a 32-bit offset would read."""
    small = make_case([2, 1], [30, 40], head_dim=64, dtype=torch.bfloat16)
    elems = small.shape.elems
    far = (2**31 + 2**20) // elems
    num_pages = far + len(small.pool)
    arena = mmap.mmap(-1, num_pages * elems * 2, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
    pool = torch.frombuffer(arena, dtype=torch.bfloat16).view(num_pages, elems)
    pool[: len(small.pool)] = 1.0
    pool[far:] = small.pool
    tables = [table + np.int32(far) for table in small.page_tables]
    expected = reference(small)
    out = run(backend, replace(small, pool=pool, page_tables=tables))
    assert (out.double() - expected).abs().max() < TOLERANCE[torch.bfloat16]
    assert torch.equal(pool[far:].nan_to_num(7), written(small).nan_to_num(7))


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@over_backends
@DTYPES
def test_bits_do_not_depend_on_batch_or_page_placement(
    backend: Backend, dtype: torch.dtype
) -> None:
    case = make_case([1, 40, 1, 3], [1300, 640, 33, 3], dtype=dtype)
    together = run(backend, case.with_pool_copy())
    moved = np.random.default_rng(1).permutation(len(case.pool)).astype(np.int32)
    pool = torch.empty_like(case.pool)
    pool[torch.from_numpy(moved).long()] = case.pool
    row = 0
    for q_len, kv_len, table in zip(case.q_lens, case.kv_lens, case.page_tables, strict=True):
        rows = slice(row, row + q_len)
        alone = replace(
            case, pool=pool, q_lens=[q_len], kv_lens=[kv_len], page_tables=[moved[table]],
            q=case.q[rows], k=case.k[rows], v=case.v[rows],
        )  # fmt: skip
        assert torch.equal(run(backend, alone), together[rows])
        row += q_len


@over_backends
@DTYPES
@pytest.mark.parametrize(("page_size", "group"), [(16, 3), (1, 3), (32, 12)])
def test_bits_of_shared_prefixes_equal_those_of_each_alone(
    backend: Backend, page_size: int, group: int, dtype: torch.dtype
) -> None:
    """Two groups, of 9 and of 2 members, and one sequence that shares nothing."""
    nine = make_case(
        [1] * 9, [1100 + 7 * i for i in range(9)], shared_len=1056, page_size=page_size,
        q_heads=2 * group, dtype=dtype,
    )  # fmt: skip
    two = make_case(
        [1, 1, 1], [700, 800, 600], shared_len=0, page_size=page_size,
        q_heads=2 * group, dtype=dtype, seed=1,
    )  # fmt: skip
    whole = 640 // page_size
    two.page_tables[1][:whole] = two.page_tables[0][:whole]
    both = replace(
        nine,
        pool=torch.cat([nine.pool, two.pool]),
        q_lens=nine.q_lens + two.q_lens,
        kv_lens=nine.kv_lens + two.kv_lens,
        page_tables=nine.page_tables + [t + np.int32(len(nine.pool)) for t in two.page_tables],
        **{x: torch.cat([getattr(nine, x), getattr(two, x)]) for x in "qkv"},
    )
    batch = RaggedBatch.build(both.q_lens, both.kv_lens, both.page_tables, page_size)
    assert batch.groups.indptr.tolist() == [0, 9, 11]
    grouped = run(backend, both.with_pool_copy())
    for s, (kv_len, table) in enumerate(zip(both.kv_lens, both.page_tables, strict=True)):
        one = slice(s, s + 1)
        alone = both.with_pool_copy(
            q_lens=[1], kv_lens=[kv_len], page_tables=[table],
            q=both.q[one], k=both.k[one], v=both.v[one],
        )  # fmt: skip
        assert torch.equal(run(backend, alone), grouped[one])
    check(backend, both)


def test_groups_save_the_most_tokens() -> None:
    """Four sequences share 32 pages, two of them 40: the four are grouped (3 x 32 > 1 x 40)."""
    tables = [np.arange(100, dtype=np.int32) + 1000 * i for i in range(4)]
    for table in tables[1:]:
        table[:32] = tables[0][:32]
    tables[3][:40] = tables[0][:40]
    groups = RaggedBatch.build([1] * 4, [1600] * 4, tables, 16).groups
    assert groups.lens.tolist() == [32 * 16]
    assert sorted(groups.seqs.tolist()) == [0, 1, 2, 3]


def test_the_page_of_the_new_token_is_never_shared() -> None:
    table = np.arange(40, dtype=np.int32)
    groups = RaggedBatch.build([1, 1], [640, 640], [table, table.copy()], 16).groups
    assert groups.lens.tolist() == [39 * 16]


@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512", "amx"])
@DTYPES
def test_bits_on_the_cpu_do_not_depend_on_chunks_or_threads(isa: str, dtype: torch.dtype) -> None:
    """One prefill, prefill in chunks, and a decode of every 50th token agree in every bit."""
    backend, threads = C(isa), C(isa, 3)
    whole = make_case([700], [700], dtype=dtype, window=0)
    expected = run(backend, whole.with_pool_copy())
    assert torch.equal(run(threads, whole.with_pool_copy()), expected)
    pool = whole.pool.clone()
    cuts = [0, 1, 65, 100, 101, 512, 600, 601, 700]
    for start, end in pairwise(cuts):
        chunk = replace(
            whole, pool=pool, q_lens=[end - start], kv_lens=[end],
            q=whole.q[start:end], k=whole.k[start:end], v=whole.v[start:end],
        )  # fmt: skip
        assert torch.equal(run(threads, chunk), expected[start:end]), (start, end)


@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512", "amx"])
@DTYPES
def test_bits_on_the_cpu_do_not_depend_on_how_heads_are_shared_out(
    isa: str, dtype: torch.dtype
) -> None:
    """Five heads at once on one thread, by twos where the threads need more jobs."""
    case = make_case([1, 1], [1700, 40], q_heads=15, kv_heads=5, dtype=dtype)
    expected = run(C(isa), case.with_pool_copy())
    assert torch.equal(run(C(isa, 3), case.with_pool_copy()), expected)
    check(C(isa), case)


def test_wrong_batches_and_tensors_are_refused() -> None:
    table = [np.arange(2, dtype=np.int32)]
    for q_lens, kv_lens, tables, words in [
        ([1], [33], table, "has 2 pages of 16"),
        ([5], [4], table, "more new tokens"),
        ([-1], [4], table, "fewer than 0"),
        ([1, 1], [4], table, "do not describe one batch"),
    ]:
        with pytest.raises(ValueError, match=words):
            RaggedBatch.build(q_lens, kv_lens, tables, 16)
    case = make_case([2], [20])
    batch = RaggedBatch.build(case.q_lens, case.kv_lens, case.page_tables, 16)
    with pytest.raises(ValueError, match="page ids"):
        StepContext(case.pool[:1], case.shape, batch)
    with pytest.raises(ValueError, match="the pool is"):
        StepContext(case.pool.bfloat16(), case.shape, batch)
    with pytest.raises(RuntimeError, match="with step"):
        paged_attention(case.q, case.k, case.v, 0, 1.0)
    q, k, v = case.q, case.k, case.v
    with StepContext(case.pool, case.shape, batch):
        for args in [
            (q[:1], k, v, 0, 1.0),
            (q.bfloat16(), k, v, 0, 1.0),
            (q, k[:, :1], v, 0, 1.0),
            (q[:, :5], k, v, 0, 1.0),
            (q.transpose(1, 2), k, v, 0, 1.0),
            (q, k, None, 0, 1.0),
            (q, k, v, 0, 1.0, -1),
            (q, k, v, 0, -1.0),
            (q, k, v, 0, 1.0, 0, 0.0, torch.zeros(5)),
        ]:
            with pytest.raises(ValueError):
                paged_attention(*args)


def test_the_torch_op_is_the_function() -> None:
    case = make_case([2, 1], [20, 40])
    batch = RaggedBatch.build(case.q_lens, case.kv_lens, case.page_tables, 16)
    with StepContext(case.pool.clone(), case.shape, batch):
        direct = paged_attention(case.q, case.k, case.v, 0, 0.3)
    with StepContext(case.pool, case.shape, batch):
        op = torch.ops.radixsvc.paged_attention(case.q, case.k, case.v, 0, 0.3)
    assert torch.equal(op, direct)


def test_attention_works_in_a_forked_child() -> None:
    """The pool's threads do not live in a child; it must start its own."""
    case = make_case([300], [600], dtype=torch.float32)
    expected = run(C("", 2), case.with_pool_copy())
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(run(C("", 2), case.with_pool_copy()), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_two_threads_may_attend_at_once() -> None:
    cases = [make_case([1, 64], [900, 300], seed=i) for i in range(2)]
    expected = [run(C(""), case.with_pool_copy()) for case in cases]

    def repeat(i: int) -> bool:
        batch = RaggedBatch.build(cases[i].q_lens, cases[i].kv_lens, cases[i].page_tables, 16)
        with StepContext(cases[i].pool, cases[i].shape, batch):
            return all(
                torch.equal(paged_attention(c.q, c.k, c.v, 0, c.scale), expected[i])
                for c in [cases[i]] * 30
            )

    set_num_threads(2)
    try:
        with ThreadPoolExecutor(2) as executor:
            assert list(executor.map(repeat, range(2))) == [True, True]
    finally:
        set_num_threads(1)
