"""The engine with the emulated CUDA kernels in the place of the C ones: the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from simt.build import emulated_library
from simt.kernels import EmulatedKernels
from simt.run import Emulated
from tiny import tiny_model

import radixsvc.attention
from radixsvc.bench.harness import complete, greedy, running_engine
from radixsvc.model import load_model
from radixsvc.request import Tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers, whose head_dim the tensor-core kernels take."""
    path = tmp_path_factory.mktemp("wide-heads")
    return tiny_model(path, head_dim=64, num_key_value_heads=2, num_hidden_layers=2)


@pytest.fixture
def emulated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        kernels = EmulatedKernels(Emulated(emulated_library()))
        patch.setattr(radixsvc.attention, "_kernels", kernels)
        yield


def prompts() -> list[Tokens]:
    """Three that share 40 tokens, of different lengths, and one of its own."""
    rng = np.random.default_rng(0)
    draw = [rng.integers(3, 500, n).astype(np.int32) for n in (40, 3, 30, 11, 25)]
    return [np.concatenate([draw[0], tail]) for tail in draw[1:4]] + [draw[4]]


def answers(folder: Path, dtype: str) -> tuple[list[list[int]], list[list[int]], int]:
    """Cold, then from the cache, and how many tokens came from there."""
    with running_engine(load_model(folder, dtype), 1024) as engine:
        assert engine.failed is None
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
