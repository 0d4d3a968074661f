"""A client of the service, over msgpack: typed results, streams, retries, branches.

    async with AsyncClient() as client:
        async for event in client.stream_chat([{"role": "user", "content": "Hello"}]):
            ...

`Client` is the same without async. Options of a call are the fields of the request in
`protocol.py`: `max_tokens`, `temperature`, `stop`, `seed`, `cache_salt` and so on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import aiohttp
import msgpack
import msgspec
import numpy as np
import numpy.typing as npt

from radixsvc.protocol import (
    Choice,
    Completion,
    Delta,
    End,
    Explanation,
    Failure,
    Header,
    PrefixMatch,
    StreamEvent,
    UsageInfo,
)

T = TypeVar("T")
MEDIA_TYPE = "application/vnd.msgpack"
DEFAULT_URL = "http://127.0.0.1:8011"
RETRIED = (408, 429, 502, 503, 504)
LONGEST_WAIT = 30.0

Prompt = str | Sequence[int] | npt.NDArray[np.int32]
Messages = Sequence[dict[str, Any]]
Event = Header | Delta | End


class ApiError(Exception):
    """The service refused or failed; `status` is 0 where a stream broke after it had begun."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(error.get("message") or f"HTTP {status}")
        self.status = status
        self.code: str | None = error.get("code")
        self.param: str | None = error.get("param")


class AsyncClient:
    """One connection pool to one service. `retries` are of requests that were not begun."""

    def __init__(
        self, url: str | None = None, api_key: str | None = None, *, retries: int = 3,
        timeout: float | None = None,
    ) -> None:  # fmt: skip
        self.url = (url or os.environ.get("RADIXSVC_URL") or DEFAULT_URL).rstrip("/")
        self.retries = retries
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=10)
        self._headers = {"Accept": MEDIA_TYPE, "Content-Type": MEDIA_TYPE}
        if key := api_key or os.environ.get("RADIXSVC_API_KEY"):
            self._headers["Authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def complete(self, /, prompt: Prompt, **options: Any) -> Completion:
        """POST /v1/completions"""
        return await self.post("/v1/completions", {"prompt": prompt, **options}, Completion)

    async def chat(self, /, messages: Messages, **options: Any) -> Completion:
        """POST /v1/chat/completions"""
        body = {"messages": messages, **options}
        return await self.post("/v1/chat/completions", body, Completion)

    def stream(self, /, prompt: Prompt, **options: Any) -> AsyncGenerator[Event, None]:
        """A completion as it comes: a Header, Deltas, an End. ApiError where it breaks."""
        return self._stream("/v1/completions", {"prompt": prompt, **options})

    def stream_chat(self, /, messages: Messages, **options: Any) -> AsyncGenerator[Event, None]:
        """A chat completion as it comes: a Header, Deltas, an End. ApiError where it breaks."""
        return self._stream("/v1/chat/completions", {"messages": messages, **options})

    async def branches(
        self, /, prompt: str, continuations: Sequence[str], **options: Any
    ) -> tuple[list[Choice], UsageInfo]:
        """Complete `prompt` with each of `continuations`. The prompt is computed once, and the
        branches share its pages."""
        prompts = [prompt + continuation for continuation in continuations]
        answer = await self.post("/v1/completions", {"prompt": prompts, **options}, Completion)
        assert answer.usage is not None
        return sorted(answer.choices, key=lambda choice: choice.index), answer.usage

    async def tokenize(self, /, prompt: str, **options: Any) -> npt.NDArray[np.int32]:
        """Token ids of a text."""
        found = await self.post("/v1/tokenize", {"prompt": prompt, **options}, dict[str, Any])
        return np.frombuffer(found["tokens"], "<i4")

    async def detokenize(self, /, tokens: Prompt) -> str:
        found = await self.post("/v1/detokenize", {"tokens": tokens}, dict[str, Any])
        return str(found["prompt"])

    async def match(self, /, **prompt: Any) -> PrefixMatch:
        """How much of `prompt=` or `messages=` is cached, by tier; changes nothing."""
        return await self.post("/v1/prefix/match", prompt, PrefixMatch)

    async def explain(self, /, **prompt: Any) -> Explanation:
        """Why the rest of `prompt=` or `messages=` is not cached."""
        return await self.post("/v1/prefix/explain", prompt, Explanation)

    async def prefix(self, /, action: str, **prompt: Any) -> dict[str, Any]:
        """`action` is warm, pin (with `ttl=` seconds), unpin or evict."""
        return await self.post(f"/v1/prefix/{action}", prompt, dict[str, Any])

    async def get(self, /, path: str) -> dict[str, Any]:
        """GET of /v1/stats, /v1/tree, /v1/models or /version."""
        async with self._request("GET", path, None) as response:
            return msgspec.msgpack.decode(await response.read(), type=dict[str, Any])

    async def post(self, path: str, body: Any, kind: type[T]) -> T:
        async with self._request("POST", path, body) as response:
            return msgspec.msgpack.decode(await response.read(), type=kind)

    async def _stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Event, None]:
        unpacker = msgpack.Unpacker(max_buffer_size=1 << 26)
        async with self._request("POST", path, {**body, "stream": True}) as response:
            with contextlib.suppress(aiohttp.ClientPayloadError):
                async for data in response.content.iter_any():
                    unpacker.feed(data)
                    for item in unpacker:
                        event: StreamEvent = msgspec.convert(item, StreamEvent)
                        if isinstance(event, Failure):
                            raise ApiError(0, event.error)
                        yield event
                        if isinstance(event, End):
                            return
        raise ApiError(0, {"message": "the stream broke before its end", "code": "stream_broken"})

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response with status 200. Waits and asks again while the service is busy."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout, headers=self._headers)
        packed = None if body is None else msgpack.packb(body, default=_int32)
        for attempt in range(self.retries + 1):
            data = None if packed is None else io.BytesIO(packed)
            wait = min(LONGEST_WAIT, 0.25 * 2**attempt) * random.uniform(0.75, 1.25)
            try:
                response = await self._session.request(method, self.url + path, data=data)
            except aiohttp.ClientConnectionError:
                if attempt == self.retries:
                    raise
            else:
                async with response:
                    if response.status == 200:
                        yield response
                        return
                    error = ApiError(response.status, _error(await response.read()))
                if response.status not in RETRIED or attempt == self.retries:
                    raise error
                retry_after = response.headers.get("retry-after", "")
                if retry_after.isdecimal():
                    wait = min(LONGEST_WAIT, max(float(retry_after), wait))
            await asyncio.sleep(wait)


def _int32(ids: npt.NDArray[np.int32]) -> bytes:
    """Arrays travel as little-endian int32, the form the service reads fastest."""
    return ids.astype("<i4").tobytes()


def _error(body: bytes) -> dict[str, Any]:
    try:
        return dict(msgspec.msgpack.decode(body)["error"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return {}  # something else than the service answered


P = ParamSpec("P")


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._runner.run(method(self._client, *args, **kwargs))

    return functools.update_wrapper(call, method)


def _iterating(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Client, P], Generator[T, None, None]]:
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        events = method(self._client, *args, **kwargs)

        async def step() -> T | None:
            return await anext(events, None)

        try:
            while (event := self._runner.run(step())) is not None:
                yield event
        finally:  # a stream that is left early ends at the service too
            self._runner.run(events.aclose())

    return functools.update_wrapper(call, method)


class Client:
    """`AsyncClient` for programs without an event loop of their own; close it, or use `with`."""

    def __init__(self, url: str | None = None, api_key: str | None = None, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(url, api_key, **options)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    complete = _blocking(AsyncClient.complete)
    chat = _blocking(AsyncClient.chat)
    branches = _blocking(AsyncClient.branches)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)
    match = _blocking(AsyncClient.match)
    explain = _blocking(AsyncClient.explain)
    prefix = _blocking(AsyncClient.prefix)
    get = _blocking(AsyncClient.get)
    stream = _iterating(AsyncClient.stream)
    stream_chat = _iterating(AsyncClient.stream_chat)
