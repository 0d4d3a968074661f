"""A load generator for any server that speaks OpenAI's HTTP API with streaming.

Closed loop: `--concurrency` sessions at once, the next starts when one ends. With `--rate` they
start so many a second, a Poisson process, whatever the server does. A trace has its own times.
Times are the client's: from just before the request is written to the arrival of a chunk with
content. Cached tokens are what the server reports in `usage`; beside them stands the most that
could have been reused: the share of each prompt's characters that an earlier prompt of the run,
or its reply, begins with.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import numpy as np

from radixsvc.bench.calls import (
    Call,
    Reply,
    Seen,
    Send,
    Session,
    rendered,
    rendered_message,
    take_turns,
)
from radixsvc.bench.report import Metric, positive
from radixsvc.bench.workloads import add_workload_arguments, build_workload
from radixsvc.errors import SetupError

TIERS = ("device", "host", "disk")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    url = os.environ.get("RADIXSVC_URL", "http://127.0.0.1:8011")
    add("--url", default=url, help="the server's address, without /v1; default: %(default)s")
    add("--model", help="model name to ask for; the server's first one by default")
    add("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    add("--concurrency", type=positive, default=8, help="closed loop: sessions at once")
    add("--rate", type=float, help="Poisson: sessions a second")
    add("--timeout", type=float, default=600.0, help="seconds a request may take")
    add(
        "--body",
        default="{}",
        metavar="JSON",
        help="fields for every request's body, in which ignore_eos is true by default",
    )
    add_workload_arguments(parser)


def run(args: argparse.Namespace) -> list[Metric]:
    try:
        return asyncio.run(drive(args))
    except (ValueError, OSError) as error:
        if isinstance(error, aiohttp.ClientConnectionError):
            raise
        raise SetupError(str(error), 2) from error


@dataclass
class Measured:
    """What one call took; times in seconds."""

    turn: int
    reusable: float  # share of the prompt's characters seen before in this run
    first: float | None = None  # time to first token
    gaps: list[float] = field(default_factory=list)  # between chunks with content
    total: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens") or 0)

    @property
    def output_tokens(self) -> int:
        """As the server counts, or else one a chunk."""
        return int(self.usage.get("completion_tokens") or len(self.gaps) + 1)

    @property
    def cached_tokens(self) -> int | None:
        """None where the server does not tell."""
        cached: int | None = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return cached


async def drive(args: argparse.Namespace) -> list[Metric]:
    """Run the workload against the server and sum up. Raises ValueError on bad arguments."""
    extra = {"ignore_eos": True, **json.loads(args.body)}
    headers = {}
    if args.api_key_env:
        key = os.environ.get(args.api_key_env)
        if not key:
            raise ValueError(f"--api-key-env: {args.api_key_env} is not set")
        headers["Authorization"] = f"Bearer {key}"
    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0, force_close=True),  # some servers drop idle ones
        timeout=aiohttp.ClientTimeout(total=args.timeout),
    ) as http:
        model = args.model or await first_model(http, args.url)
        client = LoadClient(http, args.url.rstrip("/"), model, extra)
        sessions = build_workload(args)
        await start_all(sessions, client.send, args)
        wall = time.perf_counter() - client.started
    return summarise(args.workload, client.measured, wall)


async def first_model(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(f"{url.rstrip('/')}/v1/models") as response:
        if response.status != 200:
            raise ValueError(
                f"{url}/v1/models answers {response.status}; see --api-key-env, --model"
            )
        return str((await response.json())["data"][0]["id"])


async def start_all(sessions: list[Session], send: Send, args: argparse.Namespace) -> None:
    """Run all sessions, each at the time its arrival process says."""
    starts = [0.0 for _ in sessions]
    if args.rate:
        rng = random.Random(f"{args.seed} arrivals")
        starts = list(itertools.accumulate(rng.expovariate(args.rate) for _ in sessions))
    elif args.workload == "trace":
        starts = [session.start for session in sessions]
    closed = not args.rate and args.workload != "trace"
    concurrency = args.concurrency if closed else len(sessions)

    async def one(run: Callable[[Send], Awaitable[None]], start: float) -> None:
        await asyncio.sleep(start)
        await run(send)

    async with asyncio.TaskGroup() as group:
        turns = take_turns(sessions, concurrency, args.rotate)
        for run, start in zip(turns, starts, strict=True):
            group.create_task(one(run, start))


class LoadClient:
    """Sends calls, streams their answers and keeps what each took."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, model: str, extra: dict[str, Any]
    ) -> None:
        self.http = http
        self.url = url
        self.model = model
        self.extra = extra
        self.measured: list[Measured] = []
        self.seen = Seen()
        self.started = time.perf_counter()

    async def send(self, call: Call) -> list[Reply]:
        """Replies of a call, none where it failed."""
        prompt = rendered(call)
        record = Measured(call.turn, self.seen.share(prompt))
        self.seen.add(prompt)
        self.measured.append(record)
        answers = [Answer() for _ in range(call.n)]
        try:
            await self._stream(call, record, answers)
        except (aiohttp.ClientError, TimeoutError, ServerSaidNo, ValueError) as error:
            record.error = f"{type(error).__name__}: {error}"[:300]
            return []
        replies = [answer.reply() for answer in answers]
        for reply in replies:
            self.seen.add(f"{prompt} {rendered_message(reply.message)}")
        return replies

    async def _stream(self, call: Call, record: Measured, answers: list[Answer]) -> None:
        url = f"{self.url}/v1/chat/completions"
        started = last = time.perf_counter()
        async with self.http.post(url, json=self._body(call)) as response:
            if response.status != 200:
                raise ServerSaidNo(f"HTTP {response.status} {(await response.text())[:200]}")
            async for event in events(response.content):
                if event.get("error"):
                    raise ServerSaidNo(json.dumps(event["error"]))
                record.usage = event.get("usage") or record.usage
                content = [answers[c.get("index", 0)].take(c) for c in event.get("choices") or ()]
                if any(content):
                    now = time.perf_counter()
                    if record.first is None:
                        record.first = now - started
                    else:
                        record.gaps.append(now - last)
                    last = now
        record.total = time.perf_counter() - started

    def _body(self, call: Call) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": call.messages,
            "max_tokens": call.max_tokens,
            "temperature": call.temperature,
            "seed": call.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        if call.n > 1:
            body["n"] = call.n
        if call.tools:
            body["tools"] = call.tools
        return body


class ServerSaidNo(Exception):
    """An HTTP status other than 200, or an error in the stream."""


class Answer:
    """One choice of a streamed answer, put together from its deltas."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}

    def take(self, choice: dict[str, Any]) -> bool:
        """Add a chunk's choice; True where it carries content of any kind."""
        delta = choice.get("delta") or {}
        content = delta.get("content") or ""
        self.parts.append(content)
        for call in delta.get("tool_calls") or ():
            whole = self.calls.setdefault(
                call.get("index", 0),
                {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
            )
            whole["id"] = call.get("id") or whole["id"]
            for name in ("name", "arguments"):
                whole["function"][name] += (call.get("function") or {}).get(name) or ""
        return bool(content or delta.get("tool_calls") or delta.get("reasoning_content"))

    def reply(self) -> Reply:
        return Reply("".join(self.parts), [self.calls[i] for i in sorted(self.calls)])


async def events(lines: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, to its end or `[DONE]`."""
    async for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if isinstance(event, dict):
            yield event


def summarise(name: str, measured: list[Measured], wall: float) -> list[Metric]:
    """The run's figures; errors go to standard error as well."""
    done = [m for m in measured if m.error is None]
    for error, count in Counter(m.error for m in measured if m.error).most_common(5):
        print(f"{count} failed: {error}", file=sys.stderr)
    first = [m for m in done if m.turn == 0]
    later = [m for m in done if m.turn > 0]
    metrics = [
        Metric("requests", len(measured), ""),
        Metric("failed requests", len(measured) - len(done), "", 0),
        Metric("wall time", wall, "s"),
        Metric("request rate", len(done) / wall, "1/s", None, True),
        Metric("prompt rate", sum(m.prompt_tokens for m in done) / wall, "tokens/s", None, True),
        Metric("output rate", sum(m.output_tokens for m in done) / wall, "tokens/s", None, True),
        *quantiles("TTFT, first turns", (m.first for m in first)),
        *quantiles("TTFT, later turns", (m.first for m in later)),
        *quantiles("inter-token latency", (gap for m in done for gap in m.gaps)),
        *quantiles("request latency", (m.total for m in done)),
        *reuse("", done),
        *reuse(", later turns", later),
    ]
    return [replace(metric, name=f"{name}: {metric.name}") for metric in metrics]


def quantiles(name: str, seconds: Iterable[float | None]) -> list[Metric]:
    values = [s * 1000 for s in seconds if s is not None]
    if not values:
        return []
    p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
    return [Metric(f"{name} {q}", v, "ms") for q, v in (("p50", p50), ("p95", p95), ("p99", p99))]


def reuse(name: str, done: list[Measured]) -> list[Metric]:
    """Shares of prompt tokens, where the server reports them."""
    total = sum(m.prompt_tokens for m in done)
    if not total:
        return []
    metrics = []
    cached = [m.cached_tokens for m in done]
    if any(c is not None for c in cached):
        share = 100 * sum(c or 0 for c in cached) / total
        metrics.append(Metric(f"prompt tokens cached{name}", share, "%", None, True))
    for tier in TIERS if any("radixsvc" in m.usage for m in done) else ():
        share = 100 * sum(m.usage.get("radixsvc", {}).get(tier, 0) for m in done) / total
        metrics.append(Metric(f"  of these on {tier}{name}", share, "%", None, True))
    most = 100 * sum(m.reusable * m.prompt_tokens for m in done) / total
    metrics.append(Metric(f"prompt characters seen before{name}", most, "%", None, True))
    return metrics
