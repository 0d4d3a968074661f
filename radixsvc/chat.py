"""A chat in the terminal, over the msgpack API, that shows what the prefix cache did."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from radixsvc.client import ApiError, Client
from radixsvc.protocol import Delta, End, UsageInfo


def turn(
    client: Client, messages: list[dict[str, Any]], show: Callable[[str], object], **options: Any
) -> tuple[str, float, UsageInfo]:
    """Stream one reply through `show`; returns it, the seconds to its first token, its usage."""
    started = time.perf_counter()
    first = 0.0
    reply = []
    for event in client.stream_chat(messages, **options):
        if isinstance(event, Delta):
            first = first or time.perf_counter() - started
            reply.append(event.text)
            show(event.text)
        elif isinstance(event, End):
            return "".join(reply), first, event.usage
    raise AssertionError("a stream without an End raises")


def chat(client: Client, system: str | None, **options: Any) -> int:
    """Read lines, print replies, until the end of input. Ctrl-C ends a reply, twice the chat."""
    messages: list[dict[str, Any]] = []
    if system:
        messages.append({"role": "system", "content": system})
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            reply, first, usage = turn(
                client, messages, lambda piece: print(piece, end="", flush=True), **options
            )
        except ApiError as error:
            print(f"\n{error}")
            messages.pop()
            continue
        except KeyboardInterrupt:
            print()
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": reply})
        tiers = usage.radixsvc
        print(
            f"\n\x1b[2m{first * 1000:.0f} ms to the first token, {usage.completion_tokens} tokens; "
            f"{usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt tokens "
            f"from the cache (device {tiers.device}, host {tiers.host}, disk {tiers.disk})\x1b[0m"
        )
