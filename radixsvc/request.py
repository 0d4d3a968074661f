"""A request: its prompt, how to sample, and what has become of it so far."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from msgspec import Struct

from radixsvc.cache import Lease
from radixsvc.completion import SamplingParams, Sources, Tokens
from radixsvc.sampler import SamplerState
from radixsvc.stream import TokenStream


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


class Request(Struct, eq=False):
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
    output: list[int] = []
    num_computed: int = 0
    in_flight: int = 0
    pending: int | None = None
    most_computed: int = 0  # the highest `num_computed` before a preemption
    sources: Sources | None = None
    num_recomputed: int = 0
    num_preemptions: int = 0
    rounds_waited: int = 0

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
