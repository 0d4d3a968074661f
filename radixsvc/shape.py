"""How an answer looks: stream events as OpenAI's objects, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence

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
    """Turns stream events into OpenAI's objects, of chats or of plain completions."""

    def __init__(
        self, id: str, model: str, is_chat: bool, has_logprobs: bool, openings: list[str]
    ) -> None:
        self.id = id
        self.model = model
        self.object = "chat.completion" if is_chat else "text_completion"
        self.openings = openings  # by choice: the text of the prompt where it is echoed
        self.is_chat = is_chat
        self._has_logprobs = has_logprobs
        self._created = int(time.time())
        self._offsets = [len(text) for text in openings]
        self._opened: set[int] = set()

    def beginning(self, num_prompt_tokens: int, is_sse: bool) -> Sequence[Completion | StreamEvent]:
        """What a stream has before anything is generated: a header, roles, echoed prompts."""
        deltas = [Delta(index=i, text=text) for i, text in enumerate(self.openings)]
        if is_sse:
            return [self._chunk(delta) for delta in deltas if self.is_chat or delta.text]
        header = Header(
            id=self.id, created=self._created, model=self.model, object=self.object,
            prompt_tokens=num_prompt_tokens,
        )  # fmt: skip
        return [header, *(delta for delta in deltas if delta.text)]

    def chunks(self, deltas: list[Delta]) -> list[Completion]:
        """Deltas as OpenAI's chunks; tokens that have no text yet make none."""
        return [
            self._chunk(delta)
            for delta in deltas
            if delta.text or delta.tool_calls or delta.logprobs or delta.finish_reason
        ]

    def _chunk(self, delta: Delta) -> Completion:
        """A choice's first chunk has the role, and a content even if it is empty."""
        choice = self._choice(delta)
        if self.is_chat:
            choice.delta = Reply(content=delta.text or UNSET, tool_calls=delta.tool_calls or UNSET)
            if delta.index not in self._opened:
                self._opened.add(delta.index)
                choice.delta.role, choice.delta.content = "assistant", delta.text
        return self._completion([choice], None, ".chunk" if self.is_chat else "")

    def closing(self, usage: UsageInfo) -> Completion:
        """The chunk that carries the usage, behind all others."""
        return self._completion([], usage, ".chunk" if self.is_chat else "")

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
        return self._completion(choices, usage, "")

    def _completion(
        self, choices: list[Choice], usage: UsageInfo | None, suffix: str
    ) -> Completion:
        return Completion(
            id=self.id, object=self.object + suffix, created=self._created, model=self.model,
            choices=choices, usage=usage,
        )  # fmt: skip

    def _choice(self, delta: Delta) -> Choice:
        choice = Choice(index=delta.index, finish_reason=delta.finish_reason)
        if self.is_chat:
            if delta.logprobs:
                choice.logprobs = ChatLogprobs(delta.logprobs)
            return choice
        choice.text = delta.text
        if self._has_logprobs:
            choice.logprobs = TextLogprobs([], [], [], [])
            for item in delta.logprobs:
                choice.logprobs.tokens.append(item.token)
                choice.logprobs.token_logprobs.append(item.logprob)
                top = {one.token: one.logprob for one in item.top_logprobs}
                choice.logprobs.top_logprobs.append(top)
                choice.logprobs.text_offset.append(self._offsets[delta.index])
                self._offsets[delta.index] += len(item.token)
        return choice
