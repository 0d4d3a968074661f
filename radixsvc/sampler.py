"""Picking the next token: greedy or sampled, with penalties, biases and log-probabilities.

Every row is worked on alone and every request has its own random numbers, the n-th of which is a
function of its seed and n: so a seed gives the same text whatever else is in the batch, after a
preemption too, and asking twice for the same token gives the same answer. In order:

    repetition penalty -> presence and frequency penalty -> bias -> temperature
      -> top_k -> top_p -> min_p -> draw

Equal logits count in the order of their ids, lowest first.

`pick` queues on the logits' device what needs no look of the host: all greedy rows, and away from
a CPU the draws of all that ask for no penalties, biases or log-probabilities. `finish` does the
rest on the host. Which of the two a request is drawn by depends on itself and the device alone.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from radixsvc.attention import to_device
from radixsvc.completion import SamplingParams, TokenLogprob, Tokens

log = logging.getLogger("radixsvc.sampler")

Row = npt.NDArray[np.float32]

# What lies within these of the best logit is sorted first; the rest only where it is needed too.
FLOORS = (-8.0, -14.0, -math.inf)
BLOCK = 256
WORD = (1 << 64) - 1


class Sampled(NamedTuple):
    token: int
    logprob: TokenLogprob | None


class SamplerState:
    """What one request's sampling has to remember."""

    def __init__(self, params: SamplingParams, prompt: Tokens) -> None:
        self.params = params
        self.num_sampled = 0
        seed = params.seed
        if seed is None:
            seed = secrets.randbits(64) if params.temperature else 0
        self._stream = _mix(seed & WORD)
        self._counts: dict[int, int] = {}  # of sampled tokens
        penalised = params.presence_penalty or params.frequency_penalty
        self._counting = bool(penalised) or params.repetition_penalty != 1.0
        self._prompt = np.unique(prompt) if params.repetition_penalty != 1.0 else None
        self._bias_ids = np.array([i for i, _ in params.logit_bias], np.int64)
        self._bias = np.array([b for _, b in params.logit_bias], np.float32)
        self.changes_logits = self._counting or bool(params.logit_bias)
        self.filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0

    def needs_host(self, is_cpu: bool) -> bool:
        """Whether `finish` has to see the logits; on a CPU it draws faster than torch does."""
        params = self.params
        drawn = is_cpu and params.temperature != 0
        return drawn or self.changes_logits or params.top_logprobs is not None

    def changed(self, row: Row) -> Row:
        """A copy of one row of logits with penalties and biases."""
        row = row.copy()
        params = self.params
        sampled = np.fromiter(self._counts, np.int64, len(self._counts))
        if self._prompt is not None:  # https://arxiv.org/abs/1909.05858, section 4.1
            ids = np.union1d(self._prompt, sampled)
            values, penalty = row[ids], np.float32(params.repetition_penalty)
            row[ids] = np.where(values > 0, values / penalty, values * penalty)
        if params.presence_penalty or params.frequency_penalty:
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            row[sampled] -= params.presence_penalty + params.frequency_penalty * counts
        row[self._bias_ids] += self._bias
        return row

    def uniform(self, ahead: int = 0) -> float:
        """The random number in [0, 1) of the next token, or the one `ahead` places after it."""
        return (_mix(self._stream + self.num_sampled + ahead) >> 11) * 2.0**-53

    def learn(self, token: int) -> None:
        """The next token is picked."""
        self.num_sampled += 1
        if self._counting:
            self._counts[token] = self._counts.get(token, 0) + 1


def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[Sampled | None]:
    """`pick` and `finish` in one."""
    tokens = pick(logits, states, [0] * len(states))
    return finish(tokens.tolist(), logits, states)


def pick(
    logits: torch.Tensor, states: Sequence[SamplerState], ahead: Sequence[int]
) -> torch.Tensor:
    """Queue the picking of a token from each row of `logits` (fp32 [R, vocab_size]).

    `ahead` says how many tokens each of the R states has still to learn of. Returns int64 [R] on
    the logits' device, -1 where a row holds no finite largest logit.
    """
    best, ids = logits.max(dim=-1)  # of equals the first
    if not logits.is_cpu:
        for filters in (False, True):
            rows = [
                i
                for i, s in enumerate(states)
                if s.params.temperature and s.filters is filters and not s.needs_host(False)
            ]
            if rows:
                at = to_device(np.array(rows), logits.device)
                drawn = draw_rows(logits[at], [states[i] for i in rows], [ahead[i] for i in rows])
                ids.index_copy_(0, at, drawn)
    return torch.where(torch.isfinite(best), ids, -1)


def draw_rows(
    logits: torch.Tensor, states: Sequence[SamplerState], ahead: Sequence[int]
) -> torch.Tensor:
    """Draw from each row on its device: int64 [R]. Filters of all states alike, or of none.

    As `_draw`, in float64: in which order a device adds up changes no token.
    """
    numbers = [
        (max(p.temperature, 1e-6), p.top_k or logits.shape[1], p.top_p, p.min_p, s.uniform(n))
        for s, n in zip(states, ahead, strict=True)
        for p in [s.params]
    ]
    options = to_device(np.array(numbers), logits.device).T[..., None]
    temperature, top_k, top_p, min_p, uniform = options  # [R, 1] each
    weights = ((logits.double() - logits.amax(-1, keepdim=True)) / temperature).exp()
    order = None
    if states[0].filters:
        weights, order = weights.sort(dim=-1, descending=True, stable=True)
        place = torch.arange(weights.shape[1], device=weights.device)
        weights = weights.where(place < top_k, 0)
        before = weights.cumsum(-1) - weights  # the likelier ones' share
        likely = (before < top_p * weights.sum(-1, keepdim=True)) | (place == 0)
        weights = weights.where(likely & (weights >= min_p * weights[:, :1]), 0)
    sums = weights.cumsum(-1)
    drawn = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
    drawn = drawn.clamp_max(weights.shape[1] - 1)
    return (drawn if order is None else order.gather(1, drawn))[:, 0]


def finish(
    tokens: Sequence[int], logits: torch.Tensor | None, states: Sequence[SamplerState]
) -> list[Sampled | None]:
    """What `pick` picked, with the rows for the host done: None where a row cannot be sampled.

    `logits` may be missing where no state needs the host.
    """
    picked = [Sampled(token, None) if token >= 0 else None for token in tokens]
    if logits is not None:
        special = [i for i, s in enumerate(states) if picked[i] and s.needs_host(logits.is_cpu)]
        # on a CPU rows are looked at in place; from elsewhere only these come over, in one go
        rows = [logits[i] for i in special] if logits.is_cpu else logits[special].cpu().unbind()
        for i, row in zip(special, rows, strict=True):
            try:
                picked[i] = _sample_row(row.numpy(), states[i], tokens[i])
            except Exception:  # one request's fault is that request's
                log.exception("sampling failed")
                picked[i] = None
    for state, sampled in zip(states, picked, strict=True):
        if sampled is not None:
            state.learn(sampled.token)
    return picked


def _sample_row(row: Row, state: SamplerState, best: int) -> Sampled:
    params = state.params
    changed = state.changed(row) if state.changes_logits else row
    if params.temperature == 0:
        token = int(changed.argmax()) if state.changes_logits else best
    else:
        token = _draw(changed, params, state.filters, state.uniform())
    if params.top_logprobs is None:
        return Sampled(token, None)
    return Sampled(token, logprob(row, token, params.top_logprobs))


def _draw(row: Row, params: SamplingParams, filters: bool, uniform: float) -> int:
    """The token at which the cumulated probability of what the filters leave passes `uniform`."""
    heights = (row - row.max()) / max(params.temperature, 1e-6)  # at most 0: no overflow
    if not filters:
        return _pick(np.exp(heights), uniform)
    chances = np.exp(heights)
    total = float(chances.sum(dtype=np.float64))
    for floor in FLOORS:
        near = np.flatnonzero(heights > floor)
        if params.top_k > 0:
            enough = len(near) >= params.top_k
        else:
            share = float(chances[near].sum(dtype=np.float64))
            enough = share >= params.top_p * total or params.min_p >= math.exp(floor)
        if enough:
            break
    ids = _heaviest_first(heights, near)
    weights = chances[ids].astype(np.float64)
    if 0 < params.top_k < len(ids):
        ids, weights = ids[: params.top_k], weights[: params.top_k]
    if params.top_k > 0:
        total = float(weights.sum())
    if params.top_p < 1:
        before = np.cumsum(weights) - weights  # the likelier ones' share
        num = max(1, int(np.searchsorted(before, params.top_p * total)))
        ids, weights = ids[:num], weights[:num]
    if params.min_p > 0:
        num = int((weights >= params.min_p * weights[0]).sum())
        ids, weights = ids[:num], weights[:num]
    return int(ids[_pick(weights, uniform)])


def _pick(weights: npt.NDArray[np.floating[Any]], uniform: float) -> int:
    """The index at which the cumulated weights pass `uniform` of their sum; block by block."""
    starts = np.arange(0, len(weights), BLOCK)
    sums = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = uniform * sums[-1]
    block = min(int(np.searchsorted(sums, target, side="right")), len(starts) - 1)
    rest = target - (sums[block - 1] if block else 0.0)
    within = np.cumsum(weights[starts[block] : starts[block] + BLOCK], dtype=np.float64)
    return int(starts[block]) + min(
        int(np.searchsorted(within, rest, side="right")), len(within) - 1
    )


def _heaviest_first(heights: Row, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`ids` by falling height, equals by id. A height is at most 0, so the bits of its magnitude
    rise as it falls: with the id below them, one sort of plain integers does it."""
    keys = np.abs(heights[ids]).view(np.uint32).astype(np.uint64) << np.uint64(32)
    keys |= ids.astype(np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def logprob(row: Row, token: int, num_top: int) -> TokenLogprob:
    """Natural log-probabilities of `token` and of the `num_top` likeliest, by the model's own
    logits: before penalties, biases and temperature."""
    peak = row.max()
    norm = float(peak) + math.log(float(np.exp(row - peak).sum(dtype=np.float64)))
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        num_top = min(num_top, len(row))
        least = np.partition(row, len(row) - num_top)[len(row) - num_top]
        ids = _heaviest_first(row - peak, np.flatnonzero(row >= least))[:num_top]
        top = tuple((int(i), float(row[i]) - norm) for i in ids)
    return TokenLogprob(token, float(row[token]) - norm, top)


def _mix(value: int) -> int:
    """64 well mixed bits of a counter: SplitMix64, https://doi.org/10.1145/2714064.2660195."""
    value = (value + 1) * 0x9E3779B97F4A7C15 & WORD
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & WORD
    return value ^ value >> 31
