"""The sampler: filters by hand-made rows, seeds, batches, ties, penalties, log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixsvc.completion import SamplingParams
from radixsvc.sampler import Sampled, SamplerState, draw_rows, sample

NO_PROMPT = np.zeros(0, np.int32)


def state(prompt: np.ndarray = NO_PROMPT, **params: Any) -> SamplerState:
    return SamplerState(SamplingParams(max_tokens=100, **params), prompt)


def of_probabilities(*values: float) -> torch.Tensor:
    return torch.tensor([values]).log()


def tokens_of(logits: torch.Tensor, n: int = 400, **params: Any) -> dict[int, float]:
    """Shares of the tokens drawn in n draws."""
    sampler = state(seed=7, **params)
    drawn = [sample(logits, [sampler])[0].token for _ in range(n)]
    return {token: drawn.count(token) / n for token in sorted(set(drawn))}


def test_greedy_takes_the_lowest_id_of_equals_in_every_path() -> None:
    logits = torch.zeros(2, 1000)
    logits[:, [400, 70, 900]] = 5.0
    plain, told = state(temperature=0), state(temperature=0, top_logprobs=2)
    first, second = sample(logits, [plain, told])
    assert first.token == second.token == 70
    assert second.logprob is not None
    assert [token for token, _ in second.logprob.top] == [70, 400]
    biased = state(temperature=0, logit_bias=((900, 1.0),))
    assert sample(logits[:1], [biased])[0].token == 900


def test_draws_follow_the_probabilities() -> None:
    shares = tokens_of(of_probabilities(0.1, 0.6, 0.3), n=2000)
    assert shares == pytest.approx({0: 0.1, 1: 0.6, 2: 0.3}, abs=0.04)


@pytest.mark.parametrize(
    ("params", "left"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {1}),
        ({"top_p": 0.6}, {1, 2}),
        ({"top_p": 0.85}, {0, 1, 2}),
        ({"min_p": 0.5}, {1, 2}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 2, "top_p": 0.6}, {1}),  # 0.5 of the 0.8 that top_k leaves is 0.625
        ({"top_p": 0.0}, {1}),
        ({"temperature": 1e-9}, {1}),
    ],
)
def test_filters_leave_what_they_should(params: dict[str, Any], left: set[int]) -> None:
    assert set(tokens_of(of_probabilities(0.15, 0.5, 0.3, 0.05), **params)) == left


def test_top_k_cuts_equals_by_their_ids() -> None:
    assert set(tokens_of(of_probabilities(0.25, 0.25, 0.25, 0.25), top_k=2)) == {0, 1}


@given(
    seed=st.integers(0, 2**31),
    top_k=st.sampled_from([0, 1, 5, 300]),
    top_p=st.sampled_from([1.0, 0.9, 0.2]),
    min_p=st.sampled_from([0.0, 1e-12, 0.05]),
    spread=st.sampled_from([0.1, 3.0, 40.0]),
)
@settings(max_examples=60, deadline=None)
def test_filters_equal_a_plain_definition(
    seed: int, top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    row = torch.randn(1, 200, generator=torch.Generator().manual_seed(seed)) * spread
    order = torch.argsort(row[0], descending=True, stable=True).tolist()
    p = row[0].double().softmax(-1).tolist()
    allowed = order[: top_k or 200]
    total, before, kept = sum(p[i] for i in allowed), 0.0, []
    for i in allowed:
        if (not kept or before < top_p * total) and p[i] >= min_p * p[order[0]]:
            kept.append(i)
        before += p[i]
    drawn = tokens_of(row, 50, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(drawn) <= set(kept)


def test_the_same_seed_gives_the_same_text_whatever_the_batch() -> None:
    rows = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    alone = state(seed=11, top_p=0.95, presence_penalty=0.5)
    text = [sample(row[None], [alone])[0].token for row in rows]
    among = state(seed=11, top_p=0.95, presence_penalty=0.5)
    others = [state(seed=1), state(temperature=0), state(seed=3, top_k=4, top_logprobs=1)]
    batched = []
    for i, row in enumerate(rows):
        states = [*others[: i % 3], among, *others[i % 3 :]]
        logits = torch.stack([row if s is among else rows[-i] for s in states])
        batched.append(sample(logits, states)[i % 3].token)
    assert batched == text
    assert [sample(row[None], [state(seed=12)])[0].token for row in rows] != text


def test_without_a_seed_texts_differ() -> None:
    rows = torch.zeros(2, 1 << 20)
    first, second = sample(rows, [state(), state()])
    assert first.token != second.token


def test_penalties_and_biases() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, 0.0]])
    prompt = np.array([0, 2], np.int32)
    assert sample(logits, [state(prompt, temperature=0, repetition_penalty=1.1)])[0].token == 1
    sampler = state(temperature=0, frequency_penalty=0.15)
    assert [sample(logits, [sampler])[0].token for _ in range(4)] == [0, 1, 0, 1]
    sampler = state(prompt, temperature=0, presence_penalty=1.0)  # of what was sampled alone
    assert [sample(logits, [sampler])[0].token for _ in range(3)] == [0, 1, 0]
    sampler = state(temperature=0, logit_bias=((0, -100.0), (3, 1.95)))
    assert sample(logits, [sampler])[0].token == 3


def test_log_probabilities_are_the_model_s_own() -> None:
    logits = of_probabilities(0.2, 0.5, 0.3) + 4
    sampler = state(temperature=0, logit_bias=((0, 100.0),), top_logprobs=2)
    (sampled,) = sample(logits, [sampler])
    assert sampled.token == 0
    assert sampled.logprob is not None
    assert sampled.logprob.logprob == pytest.approx(math.log(0.2), abs=1e-6)
    assert [token for token, _ in sampled.logprob.top] == [1, 2]
    assert sampled.logprob.top[1][1] == pytest.approx(math.log(0.3), abs=1e-6)
    (sampled,) = sample(logits, [state(temperature=0, top_logprobs=0)])
    assert sampled.logprob is not None
    assert sampled.logprob.top == ()


@given(
    seed=st.integers(0, 2**31),
    top_k=st.sampled_from([0, 1, 5, 300]),
    top_p=st.sampled_from([1.0, 0.9, 0.2, 0.0]),
    min_p=st.sampled_from([0.0, 1e-12, 0.05]),
    spread=st.sampled_from([0.1, 3.0, 40.0]),
)
@settings(max_examples=60, deadline=None)
def test_a_device_draws_what_the_host_would(
    seed: int, top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    """With other rows beside it, and before the host has learnt of two earlier tokens."""
    rows = torch.randn(3, 200, generator=torch.Generator().manual_seed(seed)) * spread
    rows[2, 100:] = rows[2, :100]  # equals
    params = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": 0.8}
    states = [state(seed=seed + i, **params) for i in range(3)]
    drawn = draw_rows(rows, states, [2, 2, 2]).tolist()
    for row, sampler, token in zip(rows, states, drawn, strict=True):
        sampler.num_sampled = 2
        assert sample(row[None], [sampler]) == [Sampled(token, None)]


def test_logits_that_are_no_numbers_give_no_token_and_change_nothing() -> None:
    rows = torch.randn(2, 50)
    broken = rows.clone()
    broken[1, 3] = math.nan
    good, bad = state(seed=1), state(seed=2)
    assert sample(broken, [good, bad])[1] is None
    again = sample(rows[1:], [bad])
    assert again == sample(rows[1:], [state(seed=2)])


def test_a_row_that_cannot_be_sampled_leaves_the_others_alone() -> None:
    rows = torch.randn(2, 50)
    beyond = state(logit_bias=((50, 1.0),))
    fine, failed = sample(rows, [state(temperature=0), beyond])
    assert fine == Sampled(int(rows[0].argmax()), None)
    assert failed is None
