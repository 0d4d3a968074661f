"""How much of a prompt came before, by its characters: the most that a cache could have reused."""

from __future__ import annotations

import bisect
import json
from typing import Any

from radixsvc.bench.calls import Call


class Seen:
    """All prompts and replies of a run, to tell how much of a new prompt came before."""

    def __init__(self) -> None:
        self._sorted: list[str] = []

    def share(self, prompt: str) -> float:
        at = bisect.bisect_left(self._sorted, prompt)
        neighbours = self._sorted[max(0, at - 1) : at + 1]
        return max((common_len(prompt, other) for other in neighbours), default=0) / len(prompt)

    def add(self, prompt: str) -> None:
        bisect.insort(self._sorted, prompt)


def common_len(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def rendered(call: Call) -> str:
    """A prompt as one string in which a shared prefix is a shared prefix."""
    if call.tokens is not None:
        return "".join(map(chr, call.tokens.tolist()))
    tools = sorted(json.dumps(tool, sort_keys=True) for tool in call.tools)
    return "".join(tools) + "".join(map(rendered_message, call.messages))


def rendered_message(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    tail = json.dumps(calls) if calls else ""
    return f"\x01{message['role']}\x02{message['content']}{tail}"
