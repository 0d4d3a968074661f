"""What the CUDA kernels are tried on: a covering choice of problems, or the whole matrix."""

from __future__ import annotations

import itertools
import os

from simt.problem import Problem

WHOLE_MATRIX = os.environ.get("RADIXSVC_WHOLE_MATRIX") == "1"
HEAD_DIMS = (64, 96, 128, 256)

MIXED = {"q_lens": (1, 37, 1, 0, 70), "kv_lens": (1, 37, 300, 20, 133)}
DECODE = {"q_lens": (1, 1, 1, 1), "kv_lens": (255, 256, 257, 600)}
SHARED = {"q_lens": (1, 1, 1, 6), "kv_lens": (513, 700, 520, 530)}
GROUP = (((0, 1, 2, 3), 512),)

# Every template with every dtype and head_dim, and between them every page and group size.
COVERING = {
    "bf16-64": Problem(**MIXED, page_size=1),
    "bf16-96": Problem(**MIXED, q_heads=6, head_dim=96, page_size=8),
    "bf16-128": Problem(**MIXED, q_heads=5, kv_heads=1, head_dim=128, page_size=32),
    "bf16-256": Problem(**MIXED, q_heads=8, kv_heads=1, head_dim=256, page_size=64),
    "f16-64": Problem(**MIXED, q_heads=16, kv_heads=1, page_size=128, dtype="float16"),
    "f16-96": Problem(**MIXED, q_heads=2, head_dim=96, dtype="float16"),
    "f16-128": Problem(**MIXED, q_heads=7, kv_heads=1, head_dim=128, page_size=8, dtype="float16"),
    "f16-256": Problem(**MIXED, q_heads=6, kv_heads=1, head_dim=256, dtype="float16"),
    "f32-64": Problem(**MIXED, dtype="float32", page_size=1),
    "f32-80": Problem(**MIXED, head_dim=80, dtype="float32", window=19, softcap=8.0, sinks=True),
    "decode": Problem(**DECODE, q_heads=6, head_dim=128),
    "window": Problem(**DECODE, window=40),
    "window-prefill": Problem(**MIXED, window=21),
    "softcap": Problem(**MIXED, softcap=3.0),
    "sinks": Problem(**MIXED, sinks=True, window=100),
    "unaligned": Problem(**MIXED, skew=3, layer_offset=64),
    "shared-64": Problem(**SHARED, groups=GROUP, page_size=32),
    "shared-96": Problem(**SHARED, groups=GROUP, head_dim=96, dtype="float16"),
    "shared-128": Problem(**SHARED, groups=GROUP, head_dim=128, q_heads=16, kv_heads=1),
    "shared-256": Problem(**SHARED, groups=GROUP, head_dim=256, window=300),
}


def whole_matrix() -> dict[str, Problem]:
    axes = itertools.product(
        ("bfloat16", "float16"), HEAD_DIMS, (*range(1, 9), 16), (1, 8, 16, 32, 64, 128)
    )
    return {
        f"{dtype}-{dim}-group{group}-page{page}": Problem(
            **MIXED, q_heads=group, kv_heads=1, head_dim=dim, page_size=page, dtype=dtype
        )
        for dtype, dim, group, page in axes
    }
