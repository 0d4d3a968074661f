"""What a workload is made of: calls, replies, and sessions that turn one into the next."""

from __future__ import annotations

import asyncio
import bisect
import json
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

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
    """One request of a session.

    `turn` counts from 0; later turns build on earlier replies. `key` names the call within its
    workload and seeds its sampling.
    """

    key: str
    turn: int
    max_tokens: int
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
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


def rendered(call: Call) -> str:
    """A prompt as one string in which a shared prefix is a shared prefix; a word for a token."""
    tools = sorted(json.dumps(tool, sort_keys=True) for tool in call.tools)
    return " ".join([*tools, *map(rendered_message, call.messages)])


def rendered_message(message: Message) -> str:
    calls = message.get("tool_calls")
    tail = f" {json.dumps(calls)}" if calls else ""
    return f"<{message['role']}> {message['content']}{tail} <end>"


class Seen:
    """All prompts and replies of a run, to tell how much of a new prompt came before: the most
    that a cache could have reused.
    """

    def __init__(self) -> None:
        self._sorted: list[str] = []

    def share(self, prompt: str) -> float:
        """The share of a prompt's characters that something seen begins with."""
        at = bisect.bisect_left(self._sorted, prompt)
        neighbours = self._sorted[max(0, at - 1) : at + 1]
        longest = max((_common_len(prompt, other) for other in neighbours), default=0)
        return longest / len(prompt)

    def add(self, prompt: str) -> None:
        bisect.insort(self._sorted, prompt)


def _common_len(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    return bisect.bisect_left(range(1, min(len(a), len(b)) + 1), True, key=lambda n: a[:n] != b[:n])


class Send(Protocol):
    """Carries out a call and returns its `n` replies; none where it failed."""

    def __call__(self, call: Call, /) -> Awaitable[list[Reply]]: ...


@dataclass(frozen=True)
class Session:
    """`start`: seconds after the run's start, where the workload decides that."""

    run: Callable[[Send], Awaitable[None]]
    start: float = 0.0


def take_turns(
    sessions: Sequence[Session], concurrency: int, rotate: bool
) -> list[Callable[[Send], Coroutine[Any, Any, None]]]:
    """The sessions of a closed loop, so many of them at once, the next when one ends.

    With `rotate` all run, and so many of their calls: every session's turn k comes before any
    session's turn k + 1.
    """
    slots = asyncio.Semaphore(concurrency)

    async def whole(session: Session, send: Send) -> None:
        async with slots:
            await session.run(send)

    async def by_call(session: Session, send: Send) -> None:
        async def wait_and_send(call: Call) -> list[Reply]:
            async with slots:
                return await send(call)

        await session.run(wait_and_send)

    return [partial(by_call if rotate else whole, session) for session in sessions]


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}
