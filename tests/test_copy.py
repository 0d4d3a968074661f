"""Copy streams: bytes, order and edges; one body for every kind of stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import google_crc32c
import numpy as np
import pytest
import torch
from simulated_copies import Machine

from tiers import _kernels
from tiers.base import PageView
from tiers.copy import (
    CopyFailed,
    CopyStream,
    CpuStream,
    checksums,
    compute_fence,
    row_checksums,
)
from tiers.cuda_copy import merge_runs
from tiers.page import PageIds

CPU = torch.device("cpu")


def ids(*pages: int) -> PageIds:
    return np.array(pages, np.int32)


def view(memory: np.ndarray, pages: PageIds, nbytes: int | None = None) -> PageView:
    stride = memory.strides[0]
    return PageView(memory.ctypes.data, stride, nbytes or stride, pages)


@pytest.fixture(params=["cpu", "simulated"])
def stream(request: pytest.FixtureRequest) -> Iterator[CopyStream]:
    stream = CpuStream() if request.param == "cpu" else Machine(0).stream()
    yield stream
    stream.close()


def test_pages_go_where_they_were_sent_and_nowhere_else(stream: CopyStream) -> None:
    source = np.arange(8 * 16, dtype=np.uint8).reshape(8, 16)
    target = np.zeros((6, 24), np.uint8)
    stream.copy(view(source, ids(7, 2, 3), 16), view(target[:, 4:], ids(0, 4, 5), 16))
    stream.synchronize(stream.record())
    expected = np.zeros_like(target)
    expected[[0, 4, 5], 4:20] = source[[7, 2, 3]]
    assert (target == expected).all()


@pytest.mark.parametrize("offset", [0, 8, 64])
def test_large_copies_are_right_to_the_last_byte(offset: int) -> None:
    """Pages of 200,000 bytes: groups of blocks, a rest, and bases that are not aligned."""
    stream = CpuStream()
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, (100, 200_000 + offset), np.uint8)
    target = np.zeros((90, 200_000 + offset), np.uint8)
    pages, there = (rng.permutation(90)[:50].astype(np.int32) for _ in range(2))
    stream.copy(view(source, pages, 200_000), view(target[:, offset:], there, 200_000))
    stream.synchronize(stream.record())
    expected = np.zeros_like(target)
    expected[there, offset:] = source[pages, :200_000]
    assert (target == expected).all()
    stream.close()


def test_copies_of_one_stream_run_in_order(stream: CopyStream) -> None:
    memory = np.zeros((64, 8), np.uint8)
    memory[0] = 9
    for page in range(63):
        stream.copy(view(memory, ids(page)), view(memory, ids(page + 1)))
    stream.synchronize(stream.record())
    assert (memory == 9).all()


def test_an_event_is_reached_after_what_was_enqueued_before_it(stream: CopyStream) -> None:
    source, target = np.ones((4, 8), np.uint8), np.zeros((4, 8), np.uint8)
    start = stream.record()
    stream.copy(view(source, ids(0, 1, 2, 3)), view(target, ids(0, 1, 2, 3)))
    end = stream.record()
    stream.synchronize(end)
    assert stream.query(end)
    assert stream.query(start)
    assert (target == 1).all()
    assert stream.elapsed(start, end) > 0


def test_a_stream_waits_for_another_s_event() -> None:
    first, second = CpuStream(), CpuStream()
    gate = threading.Event()
    first._ops.put(gate.wait)
    event = first.record()
    second.wait(event)
    source, target = np.ones((1, 8), np.uint8), np.zeros((1, 8), np.uint8)
    second.copy(view(source, ids(0)), view(target, ids(0)))
    end = second.record()
    assert not second.query(end)
    assert (target == 0).all()
    gate.set()
    second.synchronize(end)
    assert (target == 1).all()
    first.close()
    second.close()


def test_on_a_cpu_the_computation_is_done_when_it_returns() -> None:
    stream = CpuStream()
    assert stream.query(compute_fence(CPU)())
    stream.close()


def test_a_stream_that_broke_says_so_at_every_question() -> None:
    stream = CpuStream()
    end = stream.record()
    stream.synchronize(end)
    stream._ops.put(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    late = stream.record()
    for ask in (stream.synchronize, stream.query):
        with pytest.raises(CopyFailed, match="zero"):
            ask(late)
    stream.close()


def test_copies_that_make_no_sense_are_refused() -> None:
    stream = CpuStream()
    memory = np.zeros((4, 8), np.uint8)
    wrong = [
        (view(memory, ids(0, 1)), view(memory, ids(2))),
        (view(memory, ids(0)), view(memory, ids(2), 4)),
        (view(memory, ids(0, 1)), view(memory, ids(1, 2))),  # page 1 is read and written
    ]
    for source, target in wrong:
        with pytest.raises(ValueError):
            stream.copy(source, target)
        with pytest.raises(ValueError):
            stream.copy_now(source, target, compute_fence(CPU)())
    stream.close()


@pytest.mark.parametrize("isa", ["", "plain"])
def test_checksums_are_crc32c_and_what_was_summed_was_copied(isa: str) -> None:
    rng = np.random.default_rng(0)
    _kernels.select_isa(isa)
    try:
        for nbytes in [*range(1, 60), 4095, 4096, 100_001]:
            pages = rng.integers(0, 256, (3, nbytes), np.uint8)
            expected = [google_crc32c.value(page.tobytes()) for page in pages]
            for gap in (0, 5):  # side by side, and in slots
                copies = np.zeros((3, nbytes + gap), np.uint8)[:, :nbytes]
                crcs = checksums(view(pages, ids(2, 0, 1)), view(copies, ids(0, 1, 2), nbytes))
                assert crcs.tolist() == [expected[i] for i in (2, 0, 1)]
                assert (copies == pages[[2, 0, 1]]).all()
                assert row_checksums(copies).tolist() == crcs.tolist()
    finally:
        _kernels.select_isa("")


def test_neighbours_on_both_sides_are_one_run() -> None:
    source = PageView(1000, 10, 10, ids(0, 1, 2, 5, 6, 9))
    target = PageView(5000, 10, 10, ids(3, 4, 5, 6, 7, 8))
    runs = merge_runs(source, target)
    assert runs.sources.tolist() == [1000, 1050, 1090]
    assert runs.targets.tolist() == [5030, 5060, 5080]
    assert runs.sizes.tolist() == [30, 20, 10]


def test_no_run_crosses_the_border_of_a_registered_piece_or_a_gap_between_slots() -> None:
    device = PageView(0, 10, 10, ids(0, 1, 2, 3, 4, 5))
    host = PageView(0, 10, 10, ids(0, 1, 2, 3, 4, 5), np.array([0, 0, 1, 1, -1, -1]))
    for runs in (merge_runs(device, host), merge_runs(host, device)):
        assert runs.sizes.tolist() == [20, 20, 20]
        assert runs.pinned.tolist() == [True, True, False]
    slots = PageView(0, 16, 10, ids(0, 1, 2, 3, 4, 5))
    assert merge_runs(device, slots).sizes.tolist() == [10] * 6


def test_pages_beyond_2_gib_have_64_bit_addresses() -> None:
    view = PageView(0, 1 << 20, 1 << 20, ids(2048, 2049))
    assert merge_runs(view, view).sources.tolist() == [1 << 31]
