"""What a workload is made of: calls, replies, and sessions that turn one into the next."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from radixsvc.request import Tokens

Message = dict[str, Any]

WORDS = (
    "able above across again ago air almost alone along also always among animal answer area "
    "arm ask away back bad ball bank base bear bed before begin behind best better between big "
    "bird black blood blue board boat body book both box boy bring brother build business buy "
    "call came car care carry case catch cause center change child church city class clear close "
    "cold color come common corner cost could country course cover cross cut dark daughter day "
    "deep did different dinner doctor does dog door down draw dream drive dry each ear early "
    "earth east eat edge else end energy enough even evening ever every example eye face fact "
    "fall family far farm fast father feel feet field figure fill final find fine fire first "
    "fish five floor fly follow food foot force form found four free friend front full game "
    "garden gave general girl give glass gold gone good government great green ground group grow"
).split()


@dataclass(frozen=True)
class Call:
    """One request of a session. Either `messages` (chat) or `tokens` (a bare completion).

    `turn` counts from 0; later turns build on earlier replies. `key` names the call within its
    workload and seeds its sampling.
    """

    key: str
    turn: int
    max_tokens: int
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    tokens: Tokens | None = None
    temperature: float = 0.0
    n: int = 1

    @property
    def seed(self) -> int:
        return random.Random(self.key).getrandbits(31)


@dataclass(frozen=True)
class Reply:
    """One answer: its text, and the tools it calls in OpenAI's form."""

    text: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def message(self) -> Message:
        """As the assistant's message of the next turn."""
        if self.tool_calls:
            return {"role": "assistant", "content": self.text, "tool_calls": self.tool_calls}
        return {"role": "assistant", "content": self.text or "ok"}


class Send(Protocol):
    """Carries out a call and returns its `n` replies; none where it failed."""

    def __call__(self, call: Call, /) -> Awaitable[list[Reply]]: ...


@dataclass(frozen=True)
class Session:
    """`start`: seconds after the run's start, or None where the arrival process decides."""

    run: Callable[[Send], Awaitable[None]]
    start: float | None = None


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}
