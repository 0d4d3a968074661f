"""The engine with the emulated CUDA kernels in the place of the C ones: the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from backends import Emulated, make_case
from simt.build import emulated_library
from simt.kernels import EmulatedKernels
from simt.run import Emulated as EmulatedLibrary
from tiny import tiny_model

import radixsvc.attention
from radixsvc.attention import RaggedBatch, StepContext, paged_attention
from radixsvc.bench.harness import complete, greedy, running_engine
from radixsvc.completion import Tokens
from radixsvc.engine import EngineConfig
from radixsvc.graphs import DecodeGraphs
from radixsvc.model import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers, whose head_dim the tensor-core kernels take."""
    path = tmp_path_factory.mktemp("wide-heads")
    return tiny_model(path, head_dim=64, num_key_value_heads=2, num_hidden_layers=2)


@pytest.fixture
def emulated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        kernels = EmulatedKernels(EmulatedLibrary(emulated_library()))
        patch.setattr(radixsvc.attention, "_kernels", kernels)
        yield


def prompts() -> list[Tokens]:
    """Three that share 40 tokens, of different lengths, and one of its own."""
    rng = np.random.default_rng(0)
    draw = [rng.integers(3, 500, n).astype(np.int32) for n in (40, 3, 30, 11, 25)]
    return [np.concatenate([draw[0], tail]) for tail in draw[1:4]] + [draw[4]]


def answers(
    folder: Path, dtype: str, graphs: int = 0
) -> tuple[list[list[int]], list[list[int]], int]:
    """Cold, then from the cache, and how many tokens came from there.

    With `graphs`, decode steps of up to so many run as a captured graph would, and overlap.
    """
    config = EngineConfig(overlap=graphs > 0)
    with running_engine(load_model(folder, dtype), 1024, config=config) as engine:
        assert engine.failed is None
        if graphs:
            engine.runner.graphs = DecodeGraphs(
                engine.model, engine.device, graphs, 1024, lambda run: run
            )
        cold = complete(engine, prompts(), greedy(6))
        hit = complete(engine, prompts(), greedy(6))
    cached = sum(outcome.usage.sources.device for outcome in hit)
    return [o.tokens for o in cold], [o.tokens for o in hit], cached


def test_the_same_tokens_as_with_the_c_kernels(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    wanted = answers(folder, "float32")
    request.getfixturevalue("emulated")
    assert answers(folder, "float32") == wanted


def test_tensor_core_kernels_answer_alike_cold_and_cached(folder: Path, emulated: None) -> None:
    cold, hit, cached = answers(folder, "bfloat16")
    assert cached == sum(len(p) - 1 for p in prompts())
    assert [tokens[0] for tokens in cold] == [tokens[0] for tokens in hit]


@pytest.mark.parametrize("graphs", [2, 4])
def test_graphs_and_overlap_change_no_token(folder: Path, emulated: None, graphs: int) -> None:
    """Batches of 1 to 4, padded up; with graphs for two, those of three and four go without."""
    assert answers(folder, "float32", graphs) == answers(folder, "float32")


def test_a_graph_s_memory_takes_any_smaller_batch(emulated: None) -> None:
    """Captured for 4 sequences and 1,600 tokens; every result equals the step without it."""
    make = partial(make_case, q_heads=4, page_size=16, dtype=torch.bfloat16)
    cpu = torch.device("cpu")
    largest = RaggedBatch.largest(4, 1600, 16, cpu)
    memory = largest.memory
    assert memory is not None
    for kv_lens, shared in [([300, 5, 260, 17], 0), ([530, 520], 512), ([9], 0), ([1600], 0)]:
        case = make([1] * len(kv_lens), kv_lens, shared_len=shared)
        pool = case.pool.clone()
        live = len(kv_lens)
        batch = RaggedBatch.build([1] * live, kv_lens, case.page_tables, 16, cpu, num_rows=4)
        assert len(batch.groups.lens) == (shared > 0)
        assert memory.write(batch)
        padded = [torch.cat([x, x[:1].repeat(4 - live, 1, 1)]) for x in (case.q, case.k, case.v)]
        with StepContext(pool, case.shape, largest):
            out = paged_attention(*padded, 0, case.scale)
        assert torch.equal(out[:live], Emulated().attend(case))
        assert torch.equal(pool.view(torch.int16), case.pool.view(torch.int16))
    too_long = make([1], [1 << 12])
    batch = RaggedBatch.build([1], [1 << 12], too_long.page_tables, 16, cpu, num_rows=4)
    assert not memory.write(batch)


@pytest.mark.parametrize("device", ["CPU", "CUDA", "Meta"])
def test_the_op_is_there_for_tensors_of_each_device(device: str) -> None:
    name = "radixsvc::paged_attention"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, device)
