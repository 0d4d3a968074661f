"""The channel between the engine thread and a client."""

from __future__ import annotations

import asyncio
import threading

import pytest

from radixsvc.completion import FinishReason, Sources, TokenLogprob, Usage
from radixsvc.errors import EngineFailed
from radixsvc.stream import Finished, TokenChunk, TokenStream, wake_all

END = Finished(FinishReason.LENGTH, Usage(1, 3, Sources(0, 0, 0, 1)))


async def read(stream: TokenStream) -> list[TokenChunk]:
    return [chunk async for chunk in stream]


async def test_tokens_put_by_another_thread_arrive_in_order_and_end_once() -> None:
    stream = TokenStream(asyncio.get_running_loop())

    def produce() -> None:
        for token in range(300):
            stream.put(token, TokenLogprob(token, -1.0, ()))
            if token % 7 == 0:
                wake_all([stream])
        stream.close(END)
        stream.close(EngineFailed("too late to count"))
        wake_all([stream])

    thread = threading.Thread(target=produce)
    thread.start()
    chunks = await asyncio.wait_for(read(stream), 10)
    thread.join()
    assert [token for chunk in chunks for token in chunk.tokens] == list(range(300))
    assert all([lp.token for lp in chunk.logprobs] == chunk.tokens for chunk in chunks)
    assert [chunk.end for chunk in chunks] == [None] * (len(chunks) - 1) + [END]


async def test_an_error_is_raised_after_the_tokens_before_it() -> None:
    stream = TokenStream(asyncio.get_running_loop())
    stream.put(5, None)
    stream.close(EngineFailed("broken"))
    seen = []
    with pytest.raises(EngineFailed, match="broken"):
        async for event in stream:
            seen.append(event)
    assert [e.tokens for e in seen] == [[5]]


async def test_a_stream_that_is_not_read_is_full_and_says_since_when() -> None:
    stream = TokenStream(asyncio.get_running_loop(), capacity=2)
    assert stream.unread_since is None
    stream.put(1, None)
    assert not stream.full
    stream.put(2, None)
    assert stream.full
    assert stream.unread_since is not None
    assert (await anext(aiter(stream))).tokens == [1, 2]
    assert not stream.full
    assert stream.unread_since is None


def test_waking_a_reader_whose_loop_has_closed_is_harmless() -> None:
    loop = asyncio.new_event_loop()
    stream = TokenStream(loop)
    loop.close()
    wake_all([stream])
