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
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from radixsvc.completion import SamplingParams, Sources, TokenLogprob, Tokens, Usage
from radixsvc.protocol import ChatLogprob, Delta, PromptDetails, TopLogprob, UsageInfo
from radixsvc.request import Request
from radixsvc.stream import TokenStream
from radixsvc.text import TextAssembler
from radixsvc.tokenizer import Tokenizer
from radixsvc.toolcalls import ToolCallParser

if TYPE_CHECKING:
    from radixsvc.admission import Edge
    from radixsvc.startup import Backend


_numbers = itertools.count(1)  # two requests may come with one id of a client's choice


class Plan(Struct):
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

    def __init__(self, edge: Edge, backend: Backend, plan: Plan) -> None:
        self.edge = edge
        self.backend = backend
        self.plan = plan
        self.started = time.monotonic()
        self._has_begun = False
        self._num_ended = 0
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
                    params = replace(params, seed=(params.seed + index % plan.n) % 2**63)
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
        return self._num_ended == len(self._choices)

    async def deltas(self) -> list[Delta]:
        """More of any choices, as soon as there is. Raises what ended a request."""
        while True:
            self._ready.clear()  # before looking: what comes later sets it again
            deltas = []
            for choice in self._choices:
                if (delta := choice.take()) is not None:
                    deltas.append(delta)
                    self._num_ended += delta.finish_reason is not None
            if deltas:
                break
            await self._ready.wait()
        if not self._has_begun:
            self._has_begun = True
            self.edge.metrics.first_token.observe(time.monotonic() - self.started)
        return deltas

    def usage(self) -> UsageInfo:
        """Once all have ended. Of each prompt the first choice counts: others share its pages."""
        num_completion = 0
        sources = Sources(0, 0, 0, 0)
        for i, choice in enumerate(self._choices):
            assert choice.usage is not None
            num_completion += choice.usage.completion_tokens
            if i % self.plan.n == 0:
                sources += choice.usage.sources
        num_prompt = sources.cached + sources.computed
        return UsageInfo(
            num_prompt,
            num_completion,
            num_prompt + num_completion,
            PromptDetails(sources.cached),
            sources,
        )


class _Choice:
    """One sequence on its way from tokens to deltas. `usage` is None until it has ended."""

    def __init__(self, index: int, request: Request, plan: Plan, backend: Backend) -> None:
        self.request = request
        self.usage: Usage | None = None
        self._index = index
        self._backend = backend
        self._text = TextAssembler(backend.tokenizer, plan.stops)
        self._tools = ToolCallParser(plan.tool_names, plan.reply_start) if plan.tool_names else None

    def take(self) -> Delta | None:
        """What has come since, without waiting; None where there is nothing to tell."""
        chunk = self.request.stream.take()
        if chunk is None:
            return None
        end = chunk.end
        piece = self._text.push(chunk.tokens, chunk.logprobs, end is not None)
        delta = Delta(
            index=self._index,
            text=piece.text,
            tokens=struct.pack(f"<{len(piece.tokens)}i", *piece.tokens),
        )
        if piece.logprobs:
            delta.logprobs = [_logprob(item, self._backend.tokenizer) for item in piece.logprobs]
        if end is not None:
            self.usage = end.usage
            delta.finish_reason = "stop" if self._text.stopped else end.reason.value
        elif self._text.stopped:
            self._backend.engine.cancel(self.request.id)
        if self._tools is not None:
            self._take_calls(self._tools, delta)
        has_more = delta.text or delta.tokens or delta.tool_calls or delta.finish_reason
        return delta if has_more else None

    def _take_calls(self, tools: ToolCallParser, delta: Delta) -> None:
        """Move the calls in a delta's text to where they belong."""
        num_known = len(tools.calls)
        delta.text = tools.push(delta.text)
        if delta.finish_reason:
            delta.text += tools.flush()
            if tools.calls and not tools.is_cut:
                delta.finish_reason = "tool_calls"
        delta.tool_calls = tools.calls[num_known:]


def _logprob(logprob: TokenLogprob, tokenizer: Tokenizer) -> ChatLogprob:
    def named(token: int, value: float) -> tuple[str, float, list[int]]:
        data = tokenizer.token_bytes(token)
        return data.decode(errors="replace"), value, list(data)

    top = [TopLogprob(*named(token, value)) for token, value in logprob.top]
    return ChatLogprob(*named(logprob.token, logprob.logprob), top)
