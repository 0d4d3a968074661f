"""What is asked of a completion, and what comes of it: values that every layer passes on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is picked and when to stop. `temperature` 0 is greedy.

    `top_k` 0 and `top_p` 1.0 switch those filters off. `top_logprobs` None asks for none; a
    number asks for the chosen token's log-probability and that many of the best beside it.
    Stop strings are the edge's matter: text is not known here.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    top_logprobs: int | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one sampled token, with the most likely tokens at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), best first


class Sources(msgspec.Struct, frozen=True):
    """Where the keys and values of a prompt's tokens came from; the four sum to its length."""

    device: int
    host: int
    disk: int
    computed: int

    @property
    def cached(self) -> int:
        return self.device + self.host + self.disk

    def __add__(self, other: Sources) -> Sources:
        return Sources(
            self.device + other.device,
            self.host + other.host,
            self.disk + other.disk,
            self.computed + other.computed,
        )


class Usage(msgspec.Struct, frozen=True):
    """What a request took. `recomputed` counts tokens computed again after a preemption."""

    prompt_tokens: int
    completion_tokens: int
    sources: Sources
    recomputed: int = 0
