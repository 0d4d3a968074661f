"""A chat in the terminal, over the msgpack API, that shows what the prefix cache did."""

from __future__ import annotations

import sys
import time
from typing import Any

from radixsvc.client import ApiError, Client
from radixsvc.protocol import Delta, End


def chat(client: Client, system: str | None, **options: Any) -> None:
    """Read lines, print replies, until the end of input. Ctrl-C ends a reply, twice the chat."""
    dim = "\x1b[2m{}\x1b[0m" if sys.stdout.isatty() else "{}"
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            reply, told = _turn(client, messages, options)
        except (ApiError, KeyboardInterrupt) as error:
            print(f"\n{error}")
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": reply})
            print("\n" + dim.format(told))


def _turn(
    client: Client, messages: list[dict[str, Any]], options: dict[str, Any]
) -> tuple[str, str]:
    """Print a reply as it comes. Returns it, and what it cost in words."""
    started = time.perf_counter()
    first = 0.0
    reply = ""
    for event in client.stream_chat(messages, **options):
        if isinstance(event, Delta):
            first = first or time.perf_counter() - started
            reply += event.text
            print(event.text, end="", flush=True)
        elif isinstance(event, End):
            usage, tiers = event.usage, event.usage.radixsvc
            return reply, (
                f"{first * 1000:.0f} ms to the first token, {usage.completion_tokens} tokens; "
                f"{usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt "
                f"tokens from the cache (device {tiers.device}, host {tiers.host}, "
                f"disk {tiers.disk})"
            )
    raise AssertionError("a stream without an End raises")
