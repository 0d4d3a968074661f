"""The CUDA kernels, thread by thread on the CPU, against float64; the same bodies run on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simt import conformance
from simt.build import emulated_library
from simt.cases import COVERING, DECODE, WHOLE_MATRIX, whole_matrix
from simt.gpu import cuda  # noqa: F401
from simt.problem import TOLERANCE, Problem, decode, encode, expected, pool_after
from simt.run import FORWARD, RANDOM, REVERSE, Emulated, attend, host_batch, prepare
from simt.structs import Copy

PROBLEMS = COVERING | (whole_matrix() if WHOLE_MATRIX else {})


@pytest.fixture(scope="module")
def emulated():
    return Emulated(emulated_library())


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    """The kernels, emulated and on a GPU."""
    if request.param == "cuda":
        return request.getfixturevalue("cuda")
    emulated = request.getfixturevalue("emulated")
    emulated.configure(RANDOM)
    return emulated


def assert_close(got, arrays):
    """Within tolerance of float64, and rows of padding untouched."""
    num_tokens = sum(arrays.problem.q_lens)
    error = np.abs(got[:num_tokens] - expected(arrays)[:num_tokens])
    assert not np.isnan(error).any()
    assert error.max(initial=0) < TOLERANCE[arrays.problem.dtype]
    assert np.isnan(got[num_tokens:]).all()


@pytest.mark.parametrize("name", PROBLEMS)
def test_attention_matches_float64(backend, name):
    arrays = PROBLEMS[name].arrays()
    assert_close(attend(backend, arrays), arrays)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches_match_float64(backend, seed):
    rng = np.random.default_rng(seed)
    num_seqs = int(rng.integers(1, 6))
    q_lens = rng.choice([0, 1, 1, 1, 2, 17, 65], num_seqs)
    arrays = Problem(
        tuple(q_lens.tolist()),
        tuple((q_lens + rng.choice([0, 3, 60, 255, 256, 257, 530], num_seqs)).tolist()),
        q_heads=int(rng.integers(1, 17)),
        kv_heads=1,
        page_size=int(rng.choice([1, 8, 16, 32, 64, 128])),
        dtype=str(rng.choice(["bfloat16", "float16"])),
        window=int(rng.choice([0, 1, 2, 63, 64, 65, 257])),
        softcap=float(rng.choice([0, 20])),
        sinks=bool(rng.integers(2)),
        padding=int(rng.integers(3)),
        seed=seed,
    ).arrays()
    assert_close(attend(backend, arrays), arrays)


@pytest.mark.parametrize("name", ["bf16-64", "f16-96", "decode", "shared-64", "f32-80"])
@pytest.mark.parametrize(("order", "late"), [(FORWARD, True), (REVERSE, True), (RANDOM, False)])
def test_the_order_of_threads_and_copies_changes_no_bit(emulated, name, order, late):
    emulated.configure(RANDOM)
    usual = attend(emulated, COVERING[name].arrays())
    emulated.configure(order, late_copies=late, num_sms=1)
    np.testing.assert_array_equal(attend(emulated, COVERING[name].arrays()), usual)


@pytest.mark.parametrize("name", ["bf16-64", "f16-256", "f32-64", "unaligned"])
def test_append_writes_new_rows_and_nothing_else(backend, name):
    arrays = replace(PROBLEMS[name], padding=2).arrays()
    wanted = pool_after(arrays)
    call = prepare(backend, arrays)
    assert backend.attention(call.layer, call.batch) is None
    np.testing.assert_array_equal(backend.download(call.pool).view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_neighbours_and_pages_change_no_bit(backend, dtype):
    """Each sequence of a batch, alone and in other pages, gives the very same rows."""
    batch = Problem((1, 40, 1, 9), (290, 75, 33, 9), dtype=dtype, window=64, ids=(3, 1, 2, 0))
    together = attend(backend, batch.arrays())
    first = 0
    for i, q_len in enumerate(batch.q_lens):
        only = replace(batch, q_lens=(q_len,), kv_lens=(batch.kv_lens[i],), ids=(batch.ids[i],))
        alone = attend(backend, only.arrays(place=5))
        np.testing.assert_array_equal(alone, together[first : first + q_len])
        first += q_len


@pytest.mark.parametrize("cached", [1, 15, 16, 63, 64, 100, 128])
def test_what_was_cached_changes_no_bit(backend, cached):
    whole = Problem((131,), (131,), q_heads=6, window=90)
    cold = attend(backend, whole.arrays())
    warm = attend(backend, replace(whole, q_lens=(131 - cached,)).arrays())
    np.testing.assert_array_equal(warm, cold[cached:])


@pytest.mark.parametrize("name", ["shared-64", "shared-96", "shared-128", "shared-256"])
def test_grouped_equals_ungrouped(backend, name):
    arrays = COVERING[name].arrays()
    grouped = attend(backend, arrays)
    np.testing.assert_array_equal(grouped, attend(backend, COVERING[name].arrays(), groups=False))


def test_the_work_lists_of_a_small_batch(emulated):
    """Three decoding sequences, two of which share a split, a prefilling one, a padded row."""
    p = Problem((1, 70, 1, 1), (300, 330, 260, 513), groups=(((0, 1, 2), 256),), padding=1)
    batch, kept = host_batch(p.arrays(), groups=True)
    words = np.full(emulated.plan(batch, None).num_words, -9, np.int32)
    plan = emulated.plan(batch, words)
    num_singles, num_shared, num_decode = words[:3]
    singles, shared, members, decode, partials, prefill, tokens = words[3:10].tolist()
    assert (plan.num_decode, plan.num_shared, plan.num_prefill) == (3, 1, 2)
    assert (plan.num_partials, num_decode, num_shared, num_singles) == (2 + 2 + 3, 3, 1, 5)
    assert words[singles : singles + 10].reshape(5, 2).tolist() == [
        [0, 1], [2, 1], [3, 0], [3, 1], [3, 2],
    ]  # fmt: skip
    assert words[shared : shared + 3].tolist() == [0, 2, 0]  # both members, split 0
    assert words[members : members + 2].tolist() == [0, 2]
    assert words[decode : decode + 3].tolist() == [0, 2, 3]
    assert words[partials : partials + 4].tolist() == [0, -1, 2, 4]
    assert words[prefill : prefill + 4].reshape(2, 2).tolist() == [[1, 1], [1, 0]]
    assert words[tokens:].tolist() == [0] + [1] * 70 + [2, 3, -1]
    assert len(kept) == 7


def test_more_sharers_than_one_item_takes(backend):
    shared = Problem(
        (1,) * 70, (257,) * 70, q_heads=2, kv_heads=2, groups=((tuple(range(70)), 256),)
    )
    arrays = shared.arrays()
    assert_close(attend(backend, arrays), arrays)


def test_a_plan_of_fewer_sequences_in_the_same_memory(backend):
    """What a captured graph does: launched for 4 rows, replayed with 1 to 4 of them."""
    full = Problem((1, 1, 1, 1), (300, 5, 260, 17), seed=1).arrays()
    for live in (4, 3, 1):
        p = replace(
            full.problem, q_lens=(1,) * live, kv_lens=full.problem.kv_lens[:live], padding=4 - live
        )
        arrays = p.arrays()
        call = prepare(backend, arrays)
        call.batch.plan.num_decode, call.batch.num_seqs = 4, 4
        assert backend.attention(call.layer, call.batch) is None
        assert_close(call.result(backend), arrays)


@pytest.mark.parametrize("q_lens", [(), (0,), (0, 0, 2)])
def test_nothing_to_do(backend, q_lens):
    arrays = Problem(q_lens, tuple(n + 3 for n in q_lens)).arrays()
    assert_close(attend(backend, arrays), arrays)


def test_more_rows_than_a_grid_has_in_y(backend):
    num = 65_537
    dtype = "float32" if isinstance(backend, Emulated) else "bfloat16"  # the quick one
    one = Problem((1,), (1,), q_heads=1, kv_heads=1, page_size=1, dtype=dtype)
    rows = encode(np.random.default_rng(0).standard_normal((num, 1, 64)), one.dtype)
    arrays = replace(
        one.arrays(),
        problem=replace(one, q_lens=(1,) * num, kv_lens=(1,) * num),
        pool=np.zeros((num, 128), rows.dtype),
        q=rows,
        k=rows,
        v=rows,
        cu_seqlens_q=np.arange(num + 1, dtype=np.int32),
        kv_lens=np.ones(num, np.int32),
        page_indptr=np.arange(num + 1, dtype=np.int32),
        pages=np.arange(num, dtype=np.int32),
    )
    np.testing.assert_array_equal(attend(backend, arrays), decode(rows, one.dtype))


def test_tiles_are_read_without_bank_conflicts(emulated):
    for name in ("bf16-64", "bf16-96", "bf16-128", "bf16-256", "shared-128"):
        emulated.take_stats()
        attend(emulated, COVERING[name].arrays())
        stats = emulated.take_stats()
        assert stats["ldmatrix"] > 0
        assert stats["bank_conflicts"] == 0


REFUSALS = {
    "page_size": {"page_size": 24},
    "query heads": {"q_heads": 17, "kv_heads": 1},
    "head_dim 64": {"head_dim": 80},
    "float32": {"head_dim": 320, "dtype": "float32"},
    "multiples of 16 bytes": {"layer_offset": 4},
}


@pytest.mark.parametrize("words", REFUSALS)
def test_what_is_not_supported_is_refused_by_name(backend, words):
    arrays = Problem((2,), (2,), **REFUSALS[words]).arrays()
    with pytest.raises(RuntimeError, match=words):
        attend(backend, arrays)


def test_a_small_workspace_is_refused(backend):
    call = prepare(backend, Problem(**DECODE).arrays())
    call.batch.workspace_bytes -= 4
    assert "workspace" in backend.attention(call.layer, call.batch)


def test_pages_beyond_two_to_the_31_elements(backend):
    arrays = Problem((1, 40), (70, 90), layer_offset=64, page_stride=1 << 28).arrays()
    assert arrays.pages[: arrays.page_indptr[-1]].max() > 8  # page 8 begins at 2^31 elements
    assert_close(attend(backend, arrays), arrays)


def copied(backend, src, dst, src_ids, dst_ids, first, num, max_blocks=4):
    """`dst` after bytes [first, first + num) of its pages `dst_ids` came from pages of `src`."""
    handles = [backend.upload(x) for x in (src, dst, src_ids, dst_ids)]
    source, target, source_ids, target_ids = (backend.address(h) for h in handles)
    copy = Copy(
        src=source + first, dst=target + first, src_stride=src.shape[1],
        dst_stride=dst.shape[1], nbytes=num, src_ids=source_ids, dst_ids=target_ids,
        num_pages=len(src_ids),
    )  # fmt: skip
    error = backend.copy(copy, max_blocks)
    if error:
        raise RuntimeError(error)
    return backend.download(handles[1])


@pytest.mark.parametrize(("first", "num"), [(0, 2048), (512, 1040), (2032, 16)])
@pytest.mark.parametrize("num_pages", [1, 7, 150])
def test_pages_are_gathered_and_scattered(backend, first, num, num_pages):
    rng = np.random.default_rng(num_pages)
    src = rng.integers(0, 256, (200, 2048), np.uint8)
    dst = rng.integers(0, 256, (180, 4096), np.uint8)
    src_ids = rng.permutation(200)[:num_pages].astype(np.int32)
    dst_ids = rng.permutation(180)[:num_pages].astype(np.int32)
    wanted = dst.copy()
    wanted[dst_ids, first : first + num] = src[src_ids, first : first + num]
    got = copied(backend, src, dst, src_ids, dst_ids, first, num)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(("num", "blocks", "words"), [(24, 4, "16 bytes"), (32, 0, "max_blocks")])
def test_copies_that_are_not_supported_are_refused(backend, num, blocks, words):
    pages, ids = np.zeros((2, 64), np.uint8), np.zeros(1, np.int32)
    with pytest.raises(RuntimeError, match=words):
        copied(backend, pages, pages.copy(), ids, ids, 0, num, blocks)


@pytest.mark.parametrize("name", conformance.OPS)
def test_emulated_words_are_what_they_are_defined_as(emulated, name):
    words = conformance.inputs(name)
    out = np.zeros((*words.shape[:2], conformance.OPS[name].num_out), np.uint32)
    conformance.run(emulated.library, name, words.ctypes.data, out.ctypes.data, 0)
    if name in conformance.EXACT:
        np.testing.assert_array_equal(out, conformance.defined(name))
    else:
        np.testing.assert_allclose(out.view(np.float32), conformance.defined(name), 2e-5, 2e-6)
