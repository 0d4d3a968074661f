"""Paged attention against float64, and bit for bit against itself, on every back end."""

from __future__ import annotations

import mmap
from dataclasses import replace

import numpy as np
import pytest
import torch
from backends import BACKENDS, Backend, Case, make_case, reference, run, written

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
def test_prefill_continuation_and_decode_in_one_batch(
    backend: Backend, dtype: torch.dtype
) -> None:
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
