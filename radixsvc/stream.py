"""The bounded channel that carries one request's tokens from the engine thread to its client.

The engine thread calls `put` and `close`, never blocks and never touches the event loop; at the
end of a step it wakes all streams that got something with one call into the loop. The client
side iterates or takes. `full` tells the engine when to stop producing for a client that reads
slowly, `unread_since` when to give up on it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from radixsvc.completion import FinishReason, TokenLogprob, Usage
from radixsvc.errors import ServiceError


@dataclass(frozen=True)
class Finished:
    """How a stream ended that ended well."""

    reason: FinishReason
    usage: Usage


class TokenChunk(NamedTuple):
    """Sampled tokens in order; `logprobs` is as long as `tokens`, or empty where not asked for.

    `end` comes with the last chunk alone, which may have no tokens.
    """

    tokens: list[int]
    logprobs: list[TokenLogprob]
    end: Finished | None


class TokenStream:
    """One request's channel. `capacity` is in tokens; `full` asks the engine to hold off.

    `ready` is set when there may be something to take; several streams can share one. One thread
    appends and one takes from the front, each by what a list does at once, so there is no lock.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        capacity: int = 512,
        ready: asyncio.Event | None = None,
    ) -> None:
        self.loop = loop
        self.capacity = capacity
        self.unread_since: float | None = None  # monotonic seconds of the oldest unread token
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._end: Finished | ServiceError | None = None
        self._ready = ready or asyncio.Event()
        self._told_end = False

    @property
    def full(self) -> bool:
        return len(self._tokens) >= self.capacity

    def put(self, token: int, logprob: TokenLogprob | None) -> None:
        """Engine thread: one more token."""
        if self.unread_since is None:
            self.unread_since = time.monotonic()
        if logprob is not None:  # first, so that a token that is seen has its own
            self._logprobs.append(logprob)
        self._tokens.append(token)

    def close(self, end: Finished | ServiceError) -> None:
        """Engine thread: nothing follows. The first end counts, later ones are ignored."""
        if self._end is None:
            self._end = end

    def wake(self) -> None:
        """Event loop: let the reader look."""
        self._ready.set()

    def take(self) -> TokenChunk | None:
        """What has come since; None where nothing has. Once its tokens are taken, raises the
        ServiceError that ended the request."""
        end = self._end  # before the tokens: all that were put until then are there
        tokens = self._tokens.copy()
        logprobs = self._logprobs[: len(tokens)]
        del self._tokens[: len(tokens)], self._logprobs[: len(tokens)]
        self.unread_since = None
        if self._tokens:  # put meanwhile
            self.unread_since = time.monotonic()
        if isinstance(end, ServiceError):
            if not tokens:
                raise end
            end = None
        if self._told_end or not (tokens or end):
            return None
        self._told_end = end is not None
        return TokenChunk(tokens, logprobs, end)

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenChunk:
        """The next chunk, up to the one with the end; raises as `take`."""
        while not self._told_end:
            self._ready.clear()  # before looking: what comes later sets it again
            if (chunk := self.take()) is not None:
                return chunk
            await self._ready.wait()
        raise StopAsyncIteration


def wake_all(streams: Iterable[TokenStream]) -> None:
    """Wake the readers of these streams, one call into each event loop they belong to."""
    by_loop: dict[asyncio.AbstractEventLoop, list[TokenStream]] = {}
    for stream in streams:
        by_loop.setdefault(stream.loop, []).append(stream)
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake_group, group)
        except RuntimeError:  # that loop is closed: its readers are gone
            continue


def _wake_group(streams: list[TokenStream]) -> None:
    for stream in streams:
        stream.wake()
