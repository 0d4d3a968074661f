"""What one HTTP request asks of the engine, and the engine's answer as typed stream events.

    plan --submit all--> engine --tokens--> TextAssembler --> ToolCallParser --> Delta..., End

All sequences of a request are submitted before anything is answered, so that a full queue or a
prompt that is too long still gets its HTTP status. Leaving the context cancels what still runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from radixsvc.metrics import Metrics
from radixsvc.protocol import (
    ChatLogprob,
    Delta,
    End,
    PromptDetails,
    TierTokens,
    TopLogprob,
    UsageInfo,
)
from radixsvc.request import (
    FinishReason,
    Request,
    SamplingParams,
    TokenLogprob,
    Tokens,
    Usage,
)
from radixsvc.stream import Finished, TokenStream
from radixsvc.text import Piece, TextAssembler
from radixsvc.tokenizer import IncrementalDetokenizer, Tokenizer
from radixsvc.toolcalls import ToolCallParser

if TYPE_CHECKING:
    from radixsvc.startup import Backend


@dataclass(frozen=True)
class Plan:
    """`n` choices for each of `prompts`. Choice i of prompt p has the index p * n + i."""

    id: str
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

    def __init__(self, backend: Backend, plan: Plan, metrics: Metrics) -> None:
        self.backend = backend
        self.plan = plan
        self.metrics = metrics
        self.started = time.monotonic()
        self._requests: list[Request] = []
        self._usages: dict[int, Usage] = {}

    def __enter__(self) -> Generation:
        """Submit. QueueFull, ContextLengthExceeded and Draining leave nothing behind."""
        try:
            for i in range(len(self.plan.prompts) * self.plan.n):
                request = self._request(i)
                self.backend.engine.submit(request)
                self._requests.append(request)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for index, request in enumerate(self._requests):
            if index not in self._usages:
                self.backend.engine.cancel(request.id)
        self.metrics.duration.observe(time.monotonic() - self.started)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.plan.prompts))

    async def events(self) -> AsyncIterator[Delta | End]:
        """Deltas of all choices as they come, and the usage. Raises what ended a request."""
        choices = [self._choice(i, request) for i, request in enumerate(self._requests)]
        merged = choices[0] if len(choices) == 1 else _merge(choices)
        first = True
        async for delta in merged:
            if first:
                self.metrics.first_token.observe(time.monotonic() - self.started)
                first = False
            yield delta
        yield End(self._usage())

    def _request(self, index: int) -> Request:
        plan = self.plan
        params = plan.params
        if params.seed is not None and index % plan.n:
            params = replace(params, seed=(params.seed + index % plan.n) % 2**63)
        return Request(
            id=f"{plan.id}-{index}",
            namespace=plan.namespace,
            tokens=plan.prompts[index // plan.n],
            params=params,
            stream=TokenStream(asyncio.get_running_loop()),
            eos_token_ids=self.backend.info.eos_token_ids,
            deadline=time.monotonic() + plan.seconds if plan.seconds else None,
        )

    async def _choice(self, index: int, request: Request) -> AsyncIterator[Delta]:
        tokenizer = self.backend.tokenizer
        assembler = TextAssembler(IncrementalDetokenizer(tokenizer), self.plan.stops)
        parser = None
        if self.plan.tool_names:
            parser = ToolCallParser(self.plan.tool_names, self.plan.reply_start)
        reason = FinishReason.STOP
        async for event in request.stream:
            if isinstance(event, Finished):
                self._usages[index] = event.usage
                reason = event.reason
            elif not assembler.stopped:
                piece = assembler.push(event.tokens, event.logprobs)
                if assembler.stopped:
                    self.backend.engine.cancel(request.id)
                delta = _delta(index, piece, parser, tokenizer)
                if delta.text or delta.tokens or delta.tool_calls:
                    yield delta
        last = _delta(index, assembler.flush(), parser, tokenizer)
        num_calls = len(parser.calls) if parser else 0
        if parser:
            last.text += parser.flush()
            last.tool_calls += parser.calls[num_calls:]
        if parser and parser.calls:
            last.finish_reason = "tool_calls"
        elif assembler.stopped:
            last.finish_reason = "stop"
        else:
            last.finish_reason = reason.value
        yield last

    def _usage(self) -> UsageInfo:
        """Of each prompt the first choice counts: the others share its pages."""
        firsts = [self._usages[p * self.plan.n] for p in range(len(self.plan.prompts))]
        prompt = sum(usage.prompt_tokens for usage in firsts)
        completion = sum(usage.completion_tokens for usage in self._usages.values())
        device, host, disk, computed = (
            sum(getattr(usage.sources, name) for usage in firsts)
            for name in ("device", "host", "disk", "computed")
        )
        return UsageInfo(
            prompt,
            completion,
            prompt + completion,
            PromptDetails(device + host + disk),
            TierTokens(device, host, disk, computed),
        )


def _delta(index: int, piece: Piece, parser: ToolCallParser | None, tokenizer: Tokenizer) -> Delta:
    text, calls = piece.text, []
    if parser is not None and text:
        num_calls = len(parser.calls)
        text = parser.push(text)
        calls = parser.calls[num_calls:]
    return Delta(
        index=index,
        text=text,
        tokens=np.array(piece.tokens, "<i4").tobytes(),
        tool_calls=calls,
        logprobs=[_logprob(logprob, tokenizer) for logprob in piece.logprobs],
    )


def _logprob(logprob: TokenLogprob, tokenizer: Tokenizer) -> ChatLogprob:
    def named(token: int, value: float) -> tuple[str, float, list[int]]:
        data = tokenizer.token_bytes(token)
        return data.decode(errors="replace"), value, list(data)

    top = [TopLogprob(*named(token, value)) for token, value in logprob.top]
    return ChatLogprob(*named(logprob.token, logprob.logprob), top)


async def _merge(iterators: list[AsyncIterator[Delta]]) -> AsyncIterator[Delta]:
    """Items of all iterators as they come, each pulled only when its last one was taken."""
    pending = {asyncio.ensure_future(_next(it)): it for it in iterators}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                iterator = pending.pop(task)
                item = task.result()
                if item is not None:
                    pending[asyncio.ensure_future(_next(iterator))] = iterator
                    yield item
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _next(iterator: AsyncIterator[Delta]) -> Delta | None:
    return await anext(iterator, None)
