"""What one HTTP request asks of the engine, and the engine's answer as typed stream events.

    plan --submit all--> engine --tokens--> TextAssembler --> ToolCallParser --> deltas, usage

All sequences of a request are submitted before anything is answered, so that a full queue or a
prompt that is too long still gets its HTTP status. Leaving the context cancels what still runs.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from radixsvc.protocol import ChatLogprob, Delta, PromptDetails, TierTokens, TopLogprob, UsageInfo
from radixsvc.request import FinishReason, Request, SamplingParams, TokenLogprob, Tokens, Usage
from radixsvc.stream import Finished, TokenStream
from radixsvc.text import Piece, TextAssembler
from radixsvc.tokenizer import IncrementalDetokenizer, Tokenizer
from radixsvc.toolcalls import ToolCallParser

if TYPE_CHECKING:
    from radixsvc.admission import Edge
    from radixsvc.startup import Backend


_numbers = itertools.count(1)  # two requests may come with one id of a client's choice


@dataclass
class Plan:
    """`n` choices for each of `prompts`. Choice i of prompt p has the index p * n + i."""

    id: str
    account: str  # whose place among the requests in flight it takes
    namespace: str
    prompts: list[Tokens]
    params: SamplingParams
    n: int = 1
    stops: tuple[str, ...] = ()
    tool_names: frozenset[str] = frozenset()
    reply_start: str = ""  # what the prompt already holds of the reply
    seconds: float = 0.0  # until it must be done; 0 for no limit


class Generation:
    """A submitted plan; to be used as a context manager."""

    def __init__(self, edge: Edge, plan: Plan) -> None:
        self.edge = edge
        self.backend = edge.ready_backend()
        self.plan = plan
        self.started = time.monotonic()
        self._has_begun = False
        self._ready = asyncio.Event()
        self._choices: list[_Choice] = []

    def __enter__(self) -> Generation:
        """Submit. QueueFull, ContextLengthExceeded and Draining leave nothing behind."""
        plan = self.plan
        self.edge.enter(plan.account)
        deadline = self.started + plan.seconds if plan.seconds else None
        try:
            for index in range(len(plan.prompts) * plan.n):
                params = plan.params
                if params.seed is not None and index % plan.n:
                    seed = (params.seed + index % plan.n) % 2**63
                    params = msgspec.structs.replace(params, seed=seed)
                request = Request(
                    id=f"{plan.id}-{next(_numbers)}",
                    namespace=plan.namespace,
                    tokens=plan.prompts[index // plan.n],
                    params=params,
                    stream=TokenStream(self.edge.loop, ready=self._ready),
                    eos_token_ids=self.backend.info.eos_token_ids,
                    deadline=deadline,
                )
                self.backend.engine.submit(request)
                self._choices.append(_Choice(index, request, plan, self.backend))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for choice in self._choices:
            if choice.usage is None:
                self.backend.engine.cancel(choice.request.id)
        self.edge.leave(self.plan.account)
        self.edge.metrics.duration.observe(time.monotonic() - self.started)

    @property
    def is_done(self) -> bool:
        return None not in [choice.usage for choice in self._choices]

    async def deltas(self) -> list[Delta]:
        """More of any choices, as soon as there is. Raises what ended a request."""
        while True:
            self._ready.clear()  # before looking: what comes later sets it again
            found: list[Delta] = []
            for choice in self._choices:
                choice.take(found)
            if found:
                if not self._has_begun:
                    self._has_begun = True
                    self.edge.metrics.first_token.observe(time.monotonic() - self.started)
                return found
            await self._ready.wait()

    def usage(self) -> UsageInfo:
        """Once all have ended. Of each prompt the first choice counts: others share its pages."""
        prompt = completion = device = host = disk = 0
        for i, choice in enumerate(self._choices):
            usage = choice.usage
            assert usage is not None
            completion += usage.completion_tokens
            if i % self.plan.n == 0:
                prompt += usage.prompt_tokens
                device += usage.sources.device
                host += usage.sources.host
                disk += usage.sources.disk
        cached = device + host + disk
        tiers = TierTokens(device, host, disk, prompt - cached)
        return UsageInfo(prompt, completion, prompt + completion, PromptDetails(cached), tiers)


class _Choice:
    """One sequence on its way from tokens to deltas. `usage` is None until it has ended."""

    def __init__(self, index: int, request: Request, plan: Plan, backend: Backend) -> None:
        self.request = request
        self.usage: Usage | None = None
        self._index = index
        self._backend = backend
        self._text = TextAssembler(IncrementalDetokenizer(backend.tokenizer), plan.stops)
        self._tools = ToolCallParser(plan.tool_names, plan.reply_start) if plan.tool_names else None

    def take(self, deltas: list[Delta]) -> None:
        """Add what has come since, without waiting."""
        while (event := self.request.stream.take()) is not None:
            if isinstance(event, Finished):
                self.usage = event.usage
                deltas.append(self._last(event.reason))
                return
            if not self._text.stopped:
                delta = self._delta(self._text.push(event.tokens, event.logprobs))
                if self._text.stopped:
                    self._backend.engine.cancel(self.request.id)
                if delta.text or delta.tokens or delta.tool_calls:
                    deltas.append(delta)

    def _delta(self, piece: Piece, is_last: bool = False) -> Delta:
        delta = Delta(
            index=self._index,
            text=piece.text,
            tokens=struct.pack(f"<{len(piece.tokens)}i", *piece.tokens),
            logprobs=[_logprob(logprob, self._backend.tokenizer) for logprob in piece.logprobs],
        )
        if self._tools is not None:
            num_known = len(self._tools.calls)
            delta.text = self._tools.push(piece.text)
            if is_last:
                delta.text += self._tools.flush()
            delta.tool_calls = self._tools.calls[num_known:]
        return delta

    def _last(self, reason: FinishReason) -> Delta:
        delta = self._delta(self._text.flush(), is_last=True)
        delta.finish_reason = "stop" if self._text.stopped else reason.value
        if self._tools is not None and self._tools.calls and not self._tools.is_cut:
            delta.finish_reason = "tool_calls"
        return delta


def _logprob(logprob: TokenLogprob, tokenizer: Tokenizer) -> ChatLogprob:
    def named(token: int, value: float) -> tuple[str, float, list[int]]:
        data = tokenizer.token_bytes(token)
        return data.decode(errors="replace"), value, list(data)

    top = [TopLogprob(*named(token, value)) for token, value in logprob.top]
    return ChatLogprob(*named(logprob.token, logprob.logprob), top)
