"""The engine with SmolLM2-135M in fp32: greedy answers equal transformers' own, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixsvc.bench.engine import is_greedy, mixed_requests
from radixsvc.bench.harness import Outcome, complete, greedy, running_engine
from radixsvc.completion import Tokens
from radixsvc.engine import Engine
from radixsvc.model import Model, load_model

pytestmark = pytest.mark.model

NEW_TOKENS = 64
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in one sentence why the sky is blue.",
    "List three prime numbers greater than ten.",
    "Translate 'good morning' to Spanish.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "Count from one to twenty in words.",
)


@pytest.fixture(scope="module")
def model(smollm: Path) -> Model:
    return load_model(smollm, "float32")


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[Engine]:
    with running_engine(model, 8192) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(smollm: Path) -> list[Tokens]:
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [
        np.asarray(
            tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False),
            np.int32,
        )
        for c in chats
    ]


@pytest.fixture(scope="module")
def stock(smollm: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32).eval()


def test_cold_hit_and_batched_answers_equal_the_stock_model(
    engine: Engine, prompts: list[Tokens], stock: torch.nn.Module
) -> None:
    params = greedy(NEW_TOKENS)
    batched = complete(engine, prompts, params)
    hit = complete(engine, prompts, params)
    cold: list[Outcome] = []
    for prompt in prompts[:2]:
        engine.call(lambda cache: cache.flush()).result()
        cold += complete(engine, [prompt], params)
    for prompt, *outcomes in zip_longest(prompts, batched, hit, cold):
        first, *others = [outcome.tokens for outcome in outcomes if outcome is not None]
        assert len(first) == NEW_TOKENS
        assert is_greedy(stock, prompt, first)
        for tokens in others:
            assert tokens == first or is_greedy(stock, prompt, tokens)
    assert [o.usage.sources.device for o in hit] == [len(p) - 1 for p in prompts]
    assert [o.usage.sources.computed for o in cold] == [len(p) for p in prompts[:2]]


def test_a_second_turn_takes_the_first_from_the_cache(
    engine: Engine, model: Model, stock: torch.nn.Module
) -> None:
    rng = np.random.default_rng(3)
    first = rng.integers(1000, 40_000, 500).astype(np.int32)
    [one] = complete(engine, [first], greedy(16))
    reply = np.array(one.tokens, np.int32)
    second = np.concatenate([first, reply, rng.integers(1000, 40_000, 20).astype(np.int32)])
    [two] = complete(engine, [second], greedy(16))
    assert two.usage.sources.device >= 0.98 * (len(first) + len(reply))
    assert is_greedy(stock, second, two.tokens)


def test_eight_at_once_with_one_system_prompt_compute_it_once(engine: Engine) -> None:
    rng = np.random.default_rng(4)
    system = rng.integers(1000, 40_000, 608).astype(np.int32)
    prompts = [
        np.concatenate([system, rng.integers(1000, 40_000, 10).astype(np.int32)]) for _ in range(8)
    ]
    outcomes: list[Outcome] = complete(engine, prompts, greedy(2))
    assert sum(o.usage.sources.computed for o in outcomes) <= 608 + 8 * 11


def test_answers_do_not_depend_on_batch_or_cache(model: Model, stock: torch.nn.Module) -> None:
    """The short form of `radixsvc bench engine --requests 200`."""
    differ, wrong = mixed_requests(model, stock, 6)
    assert wrong.value == 0, f"{differ.value} answers differ"
