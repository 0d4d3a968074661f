"""How an answer looks: stream events as OpenAI's objects, whole or in chunks; and as bytes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import accumulate

from msgspec import UNSET

from radixsvc.codec import Encoding, encode
from radixsvc.errors import ServiceError
from radixsvc.generation import Plan
from radixsvc.protocol import (
    ChatLogprobs,
    Choice,
    Completion,
    Delta,
    End,
    Failure,
    Header,
    Reply,
    TextLogprobs,
    UsageInfo,
)


class Shape:
    """Turns stream events into OpenAI's objects, of chats or of plain completions.

    A stream is of chunks as server-sent events in JSON, of the events themselves in msgpack.
    `openings`: by choice, the text of the prompt where it is echoed.
    """

    def __init__(
        self, plan: Plan, model: str, encoding: Encoding, is_chat: bool, openings: list[str]
    ) -> None:
        self.id = plan.id
        self.model = model
        self.created = int(time.time())
        self.openings = openings
        self.is_chat = is_chat
        self.is_sse = encoding is Encoding.JSON
        self.object = "chat.completion" if is_chat else "text_completion"
        has_logprobs = plan.params.top_logprobs is not None
        self._offsets = [len(text) for text in openings] if has_logprobs else []

    def beginning(self, num_prompt_tokens: int) -> bytes:
        """What a stream has before anything is generated: a header, roles, echoed prompts."""
        if self.is_sse and self.is_chat:
            first = Reply(role="assistant", content="")
            indices = range(len(self.openings))
            return self._pack([self._chunk([Choice(index=i, delta=first)]) for i in indices])
        echoes = [Delta(index=i, text=text) for i, text in enumerate(self.openings) if text]
        if self.is_sse:
            return self.more(echoes)
        header = Header(self.id, self.created, self.model, self.object, num_prompt_tokens)
        return self._pack([header, *echoes])

    def more(self, deltas: list[Delta]) -> bytes:
        """Deltas in a stream; as chunks, tokens that have no text yet make none."""
        if not self.is_sse:
            return self._pack(deltas)
        chunks = []
        for delta in deltas:
            if delta.text or delta.tool_calls or delta.logprobs or delta.finish_reason:
                choice = self._choice(delta)
                if self.is_chat:
                    calls = delta.tool_calls or UNSET
                    choice.delta = Reply(content=delta.text or UNSET, tool_calls=calls)
                chunks.append(self._chunk([choice]))
        return self._pack(chunks)

    def end(self, usage: UsageInfo, include_usage: bool) -> bytes:
        """The end of a stream that went well; chunks tell the usage only if asked to."""
        if not self.is_sse:
            return self._pack([End(usage)])
        return self._pack([self._chunk([], usage)] if include_usage else []) + b"data: [DONE]\n\n"

    def failure(self, error: ServiceError) -> bytes:
        """The end of a stream that broke."""
        told = error.to_dict()
        return self._pack([{"error": told} if self.is_sse else Failure(told)])

    def whole(self, totals: list[Delta], usage: UsageInfo) -> Completion:
        """The answer, from each choice's deltas added up."""
        choices = []
        for total in totals:
            choice = self._choice(total)
            if self.is_chat:
                for call in total.tool_calls:
                    call.index = UNSET
                choice.message = Reply(
                    role="assistant",
                    content=total.text if total.text or not total.tool_calls else None,
                    tool_calls=total.tool_calls or UNSET,
                )
            choices.append(choice)
        return Completion(self.id, self.object, self.created, self.model, choices, usage)

    def _pack(self, events: Iterable[object]) -> bytes:
        if self.is_sse:
            return b"".join([b"data: %b\n\n" % encode(e, Encoding.JSON) for e in events])
        return b"".join([encode(event, Encoding.MSGPACK) for event in events])

    def _chunk(self, choices: list[Choice], usage: UsageInfo | None = None) -> Completion:
        object = "chat.completion.chunk" if self.is_chat else self.object
        return Completion(self.id, object, self.created, self.model, choices, usage)

    def _choice(self, delta: Delta) -> Choice:
        choice = Choice(index=delta.index, finish_reason=delta.finish_reason)
        if not self.is_chat:
            choice.text = delta.text
            if self._offsets:
                choice.logprobs = self._text_logprobs(delta)
        elif delta.logprobs:
            choice.logprobs = ChatLogprobs(delta.logprobs)
        return choice

    def _text_logprobs(self, delta: Delta) -> TextLogprobs:
        items, offset = delta.logprobs, self._offsets[delta.index]
        *offsets, end = accumulate((len(item.token) for item in items), initial=offset)
        self._offsets[delta.index] = end
        return TextLogprobs(
            tokens=[item.token for item in items],
            token_logprobs=[item.logprob for item in items],
            top_logprobs=[{o.token: o.logprob for o in item.top_logprobs} for item in items],
            text_offset=offsets,
        )
