"""How an answer looks: stream events as OpenAI's objects, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate

from msgspec import UNSET

from radixsvc.protocol import (
    ChatLogprobs,
    Choice,
    Completion,
    Delta,
    Header,
    Reply,
    StreamEvent,
    TextLogprobs,
    UsageInfo,
)


class Shape:
    """Turns stream events into OpenAI's objects, of chats or of plain completions.

    `openings`: by choice, the text of the prompt where it is echoed.
    """

    def __init__(
        self, id: str, model: str, is_chat: bool, has_logprobs: bool, openings: list[str]
    ) -> None:
        self.id = id
        self.model = model
        self.is_chat = is_chat
        self.object = "chat.completion" if is_chat else "text_completion"
        self.chunk_object = "chat.completion.chunk" if is_chat else self.object
        self.openings = openings
        self.created = int(time.time())
        self._offsets = [len(text) for text in openings] if has_logprobs else []

    def beginning(self, num_prompt_tokens: int, is_sse: bool) -> Sequence[Completion | StreamEvent]:
        """What a stream has before anything is generated: a header, roles, echoed prompts."""
        deltas = [Delta(index=i, text=text) for i, text in enumerate(self.openings)]
        if not is_sse:
            header = Header(
                id=self.id, created=self.created, model=self.model, object=self.object,
                prompt_tokens=num_prompt_tokens,
            )  # fmt: skip
            return [header, *(delta for delta in deltas if delta.text)]
        if not self.is_chat:
            return self.chunks(deltas)
        first = Reply(role="assistant", content="")
        return [self._chunk([Choice(index=delta.index, delta=first)]) for delta in deltas]

    def chunks(self, deltas: list[Delta]) -> list[Completion]:
        """Deltas as OpenAI's chunks; tokens that have no text yet make none."""
        chunks = []
        for delta in deltas:
            if delta.text or delta.tool_calls or delta.logprobs or delta.finish_reason:
                choice = self._choice(delta)
                if self.is_chat:
                    calls = delta.tool_calls or UNSET
                    choice.delta = Reply(content=delta.text or UNSET, tool_calls=calls)
                chunks.append(self._chunk([choice]))
        return chunks

    def closing(self, usage: UsageInfo) -> Completion:
        """The chunk that carries the usage, behind all others."""
        return self._chunk([], usage)

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

    def _chunk(self, choices: list[Choice], usage: UsageInfo | None = None) -> Completion:
        return Completion(self.id, self.chunk_object, self.created, self.model, choices, usage)

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
