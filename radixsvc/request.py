"""A request: its prompt, how to sample, and what has become of it so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from radixsvc.cache import Lease
    from radixsvc.sampler import SamplerState
    from radixsvc.stream import TokenStream

Tokens = npt.NDArray[np.int32]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class State(StrEnum):
    """Where a request stands.

        waiting -> promoting -> prefilling -> decoding -> finished
           ^___________________________|__________|         preempted: back to waiting

    Every state may go to finished: cancel, error, deadline.
    """

    WAITING = "waiting"
    PROMOTING = "promoting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


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


@dataclass(eq=False)
class Request:
    """One sequence to be completed. Written by the engine thread alone once submitted.

    `tokens` is the prompt, packed int32. `output` are the sampled tokens; the last of them has
    no keys and values yet. `num_computed` counts the leading tokens that have theirs, or get them
    in a step that is under way: `in_flight` counts such steps, and `pending` is the row at which
    the latest of them samples the request's next token, which the host does not know yet.
    """

    id: str
    namespace: str
    tokens: Tokens
    params: SamplingParams
    stream: TokenStream
    eos_token_ids: frozenset[int] = frozenset()
    deadline: float | None = None  # time.monotonic() seconds

    state: State = State.WAITING
    lease: Lease | None = None
    sampler: SamplerState | None = None
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    in_flight: int = 0
    pending: int | None = None
    most_computed: int = 0  # the highest `num_computed` before a preemption
    sources: Sources | None = None
    num_recomputed: int = 0
    num_preemptions: int = 0
    rounds_waited: int = 0
    arrived: float = 0.0  # time.monotonic() seconds

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far, a pending token included."""
        return len(self.tokens) + len(self.output) + (self.pending is not None)

    @property
    def can_decode(self) -> bool:
        """One more token is wanted, as far as is known, and the client takes it."""
        return (
            self.state is State.DECODING
            and self.num_tokens < len(self.tokens) + self.params.max_tokens
            and not self.stream.full
        )

    @property
    def next_tokens(self) -> Tokens:
        """Prompt and output in one array; for resuming, where the output is part of the prompt."""
        return np.concatenate([self.tokens, np.array(self.output, np.int32)])

    @property
    def num_uncomputed(self) -> int:
        """Tokens that still need keys and values before the next one can be sampled."""
        return self.num_tokens - self.num_computed

    def launched(self, end: int, row: int | None) -> None:
        """A step is under way that computes up to `end` and samples the next token at `row`."""
        self.num_computed = end
        self.in_flight += 1
        if row is not None:
            self.pending = row
            self.state = State.DECODING

    def retired(self) -> None:
        """The earliest step under way is done, and its token known."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self.pending = None
