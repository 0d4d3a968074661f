"""The client's retries and errors, against a server that does what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web

from radixsvc import client as client_module
from radixsvc.client import ApiError, AsyncClient, Client
from radixsvc.completion import Sources
from radixsvc.protocol import Delta, End, Failure, Header, PromptDetails, UsageInfo

USAGE = UsageInfo(3, 2, 5, PromptDetails(2), Sources(2, 0, 0, 1))
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def told(handler: Handler) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def packed(value: object, status: int = 200, **headers: str) -> web.Response:
    body = msgspec.msgpack.encode(value)
    return web.Response(body=body, status=status, headers=headers)


def refusal(code: str) -> dict[str, dict[str, str]]:
    return {"error": {"message": f"no: {code}", "code": code, "param": "prompt"}}


async def test_a_busy_service_is_asked_again_after_the_time_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    answers = [packed(refusal("queue_full"), 429, **{"retry-after": "7"}),
               packed(refusal("draining"), 503), packed({"text": "tree"})]  # fmt: skip
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(client_module.asyncio, "sleep", note)

    async def handler(request: web.Request) -> web.Response:
        return answers.pop(0)

    async with told(handler) as url, AsyncClient(url) as client:
        assert await client.get("/v1/tree") == {"text": "tree"}
    assert waits[0] == 7.0
    assert 0.3 < waits[1] < 0.7


async def test_what_is_wrong_is_not_asked_again() -> None:
    asked = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return packed(refusal("context_length_exceeded"), 400)

    async with told(handler) as url, AsyncClient(url) as client:
        with pytest.raises(ApiError, match="no: context") as caught:
            await client.complete("x")
    assert (caught.value.status, caught.value.param, asked) == (400, "prompt", 1)


async def stream_of(request: web.Request, *events: object, cut: int = 5) -> web.StreamResponse:
    """Events in pieces of `cut` bytes, so that they are torn apart."""
    response = web.StreamResponse()
    await response.prepare(request)
    data = b"".join(map(msgspec.msgpack.encode, events))
    for at in range(0, len(data), cut):
        await response.write(data[at : at + cut])
    return response


HEADER = Header(id="a", created=1, model="m", object="o", prompt_tokens=3)


async def test_streams_are_typed_however_they_are_torn() -> None:
    sent = [HEADER, Delta(index=0, text="né", tokens=b"\1\0\0\0"), End(USAGE)]

    async with told(lambda r: stream_of(r, *sent)) as url, AsyncClient(url) as client:
        assert [event async for event in client.stream("x")] == sent


@pytest.mark.parametrize(
    ("last", "code"), [([], "stream_broken"), ([Failure(refusal("x")["error"])], "x")]
)
async def test_a_stream_without_its_end_is_an_error(last: list[object], code: str) -> None:
    async with told(lambda r: stream_of(r, HEADER, *last)) as url, AsyncClient(url) as client:
        with pytest.raises(ApiError) as caught:
            [event async for event in client.stream("x")]
    assert caught.value.code == code


async def test_arrays_travel_as_packed_int32() -> None:
    seen: list[object] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(msgspec.msgpack.decode(await request.read()))
        return packed({"prompt": "text"})

    async with told(handler) as url, AsyncClient(url) as client:
        assert await client.detokenize(np.array([1, 2], np.int64).astype(np.int32)) == "text"
    assert seen == [{"tokens": b"\1\0\0\0\2\0\0\0"}]


async def test_the_blocking_client_does_the_same() -> None:
    sent = [HEADER, Delta(index=0, text="hi"), End(USAGE)]

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return packed({"version": "1"})
        return await stream_of(request, *sent)

    def use(url: str) -> None:
        with Client(url) as client:
            assert client.get("/version") == {"version": "1"}
            assert list(client.stream_chat([{"role": "user", "content": "x"}])) == sent

    async with told(handler) as url:
        await asyncio.to_thread(use, url)


async def test_a_stream_that_is_left_early_ends_at_the_service() -> None:
    gone = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            response = await stream_of(request, HEADER)
            await asyncio.sleep(20)
            return response
        finally:
            gone.set()

    def use(url: str) -> None:
        with Client(url) as client:
            stream = client.stream("x")
            assert next(stream) == HEADER
            stream.close()
            asyncio.run_coroutine_threadsafe(asyncio.wait_for(gone.wait(), 10), loop).result()

    loop = asyncio.get_running_loop()
    async with told(handler) as url:
        await asyncio.to_thread(use, url)


async def test_nobody_there_is_a_connection_error() -> None:
    async with AsyncClient("http://127.0.0.1:9", retries=0) as client:
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get("/version")
