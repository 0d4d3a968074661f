"""The C extension. Pointers are addresses as integers; nothing is checked here.

Structs, layouts and units are described in cuda/kernels.h.
"""

from typing import Any, TypeVar

_T = TypeVar("_T")

SPLIT: int  # tokens of a context that one partial result covers (cuda/plan.h)
PLAN_HEADER: int  # words

class Batch:
    """One step's ragged batch. Its arrays must outlive it: it keeps addresses only."""

def batch(
    num_seqs: int,
    num_tokens: int,
    page_size: int,
    cu_seqlens_q: int,
    kv_lens: int,
    page_indptr: int,
    pages: int,
    num_groups: int,
    group_indptr: int,
    group_seqs: int,
    group_lens: int,
    /,
) -> Batch: ...
def attention(
    batch: Batch,
    dtype: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    pool: int,
    page_stride: int,
    layer_offset: int,
    q: int,
    q_stride: int,
    q_head_stride: int,
    k: int,
    k_stride: int,
    k_head_stride: int,
    v: int,
    v_stride: int,
    v_head_stride: int,
    out: int,
    out_stride: int,
    out_head_stride: int,
    scale: float,
    softcap: float,
    window: int,
    sinks: int,
    workspace: int,
    workspace_bytes: int,
    stream: int,
    /,
) -> None:
    """Append keys and values (k = 0: none), then attend. The GIL is released.

    A batch of `cuda_batch` is queued on `stream`, on the pool's device; the workspace there holds
    num_partials * q_heads * (head_dim + 2) floats. On the CPU the last three are 0. RuntimeError
    for what the CUDA kernels don't support, naming it, for errors of CUDA, and when there is no
    memory for partial results.
    """

def rms_norm(
    dtype: int,
    num_tokens: int,
    num_heads: int,
    dim: int,
    x: int,
    x_stride: int,
    out: int,
    out_stride: int,
    weight: int,
    eps: float,
    /,
) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight for each head of each token, on the CPU.

    All of `dtype`, 0 for fp32 or 1 for bf16. Strides are a token's, in elements; a token's heads
    lie one after another. `out` may be `x`.
    """

def rotate(
    dtype: int,
    num_tokens: int,
    num_heads: int,
    dim: int,
    x: int,
    x_stride: int,
    out: int,
    out_stride: int,
    cos: int,
    sin: int,
    rotary_dim: int,
    /,
) -> None:
    """Rotary embedding of the first `rotary_dim` elements of each head, rows as of `rms_norm`.

    cos and sin are [num_tokens][rotary_dim], their second halves as their first.
    """

def gate(
    dtype: int,
    num_tokens: int,
    num_heads: int,
    dim: int,
    x: int,
    x_stride: int,
    out: int,
    out_stride: int,
    /,
) -> None:
    """out = silu(x[:dim]) * x[dim:2 * dim] for each token, rows as of `rms_norm`; one head."""

def copy_pages(
    src: int,
    src_stride: int,
    src_ids: int,
    dst: int,
    dst_stride: int,
    dst_ids: int,
    num_pages: int,
    nbytes: int,
    crcs: int,
    /,
) -> None:
    """Copy the first `nbytes` of host page `src_ids[i]` onto page `dst_ids[i]`, for all i.

    Strides in bytes; ids are addresses of int32 arrays. The pages' CRC32C go to the uint32 array at
    `crcs`, unless that is 0; then `dst` may be 0: nothing is copied. The GIL is released.
    """

# Where `build_info()["cuda_archs"]` is not empty:

def cuda_plan(batch: Batch, words: int, /) -> tuple[int, int, int, int, int]:
    """The work lists of a batch in host memory (cuda/plan.h), as int32 at `words`; 0: only count.

    Returns num_words, num_decode, num_shared, num_prefill, num_partials.
    """

def cuda_batch(
    num_seqs: int,
    num_tokens: int,
    page_size: int,
    cu_seqlens_q: int,
    kv_lens: int,
    page_indptr: int,
    pages: int,
    words: int,
    num_words: int,
    num_decode: int,
    num_shared: int,
    num_prefill: int,
    num_partials: int,
    /,
) -> Batch:
    """A batch and its plan in device memory. What a captured graph replays is read from there;
    the counts are then the most a replay may need.
    """

def copy_pages_cuda(
    src: int,
    src_stride: int,
    src_ids: int,
    dst: int,
    dst_stride: int,
    dst_ids: int,
    num_pages: int,
    nbytes: int,
    max_blocks: int,
    stream: int,
    /,
) -> None:
    """Copy the first `nbytes` of page `src_ids[i]` onto page `dst_ids[i]`, for all i, by a kernel.

    Device memory or registered host memory; all in multiples of 16 bytes; the ids lie where the
    device can read them. RuntimeError names what is wrong.
    """

def set_num_threads(num_threads: int, /) -> None:
    """Threads that take part in `attention`, the caller's included. 1 at first."""

def select_isa(name: str, /) -> None:
    """Use "plain", "avx2", "avx512", "amx", or "" for the best there is; RuntimeError if absent."""

def build_info() -> dict[str, str]:
    """`compiler`; `cpu_isa` in use; `cuda_archs` built for, "" where CUDA was left out."""

class Node:
    """One run of tokens, with the page ids that hold them on each tier, packed int32.

    `refs` counts the leases whose path goes through it. It can stand on one intrusive list per
    tier, which does not keep it alive: a node that dies leaves it. Not seen by the cyclic
    collector: whoever drops a tree must take its nodes apart.
    """

    tokens: bytes
    account: Any
    parent: Node | None
    children: Any
    device: bytes
    host: bytes
    disk: bytes
    refs: int
    pins: int
    uses: int
    priority: int
    last_use: int

    def __init__(self, tokens: bytes, account: object, /) -> None: ...
    def __getitem__(self, level: int, /) -> bytes:
        """`device`, `host` or `disk` by the tier's level; likewise set."""

    def __setitem__(self, level: int, pages: bytes, /) -> None: ...
    def link_before(self, anchor: Node, level: int, /) -> None:
        """Enter the list that `anchor` is on, or begins, right in front of it."""

    def unlink(self, level: int, /) -> None:
        """Leave the list of this tier; nothing if on none."""

    def after(self, level: int, /) -> Node | None:
        """The next on the list of this tier, None where this node is on none."""

def locate(chunks: list[list[Node]], key: bytes, /) -> tuple[int, int]:
    """Where `key` sorts among runs in order: the chunk, and how many of its runs are less.

    `chunks` are not empty, but the only one may be. The last chunk, if `key` is beyond all.
    """

def untrack(object: _T, /) -> _T:
    """Hide a container from the cyclic collector; whoever does breaks its cycles."""

def common_prefix(run: bytes, tokens: bytes, offset: int, /) -> int:
    """Bytes that `run` and `tokens[offset:]` share from the start, in whole int32 tokens."""
