"""What the HTTP edge costs: requests a second and latency beside a bare aiohttp handler.

An engine stand-in answers with one token at once, so that the edge alone is measured: parsing,
admission, validation, the stream, detokenising, encoding. The bare handler returns a constant body
of the same size. Both stand in one server process on one core; this process is the load, on
another core: 32 connections over raw sockets with requests made beforehand. Rounds alternate.

How busy the load was says whether it, and not the server, set the bare handler's rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import select
import socket
import statistics
import time
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch
import uvloop
from aiohttp import web

from radixsvc.admission import Edge, KeyRing
from radixsvc.app import create_app, make_runner
from radixsvc.architecture import describe
from radixsvc.bench.report import Metric
from radixsvc.codec import Encoding, decode, token_ids
from radixsvc.completion import FinishReason, Sources, Usage
from radixsvc.config import Config
from radixsvc.fetch import fetch
from radixsvc.metrics import Metrics
from radixsvc.protocol import CompletionRequest
from radixsvc.request import Request
from radixsvc.startup import Backend
from radixsvc.stream import Finished
from radixsvc.tokenizer import Tokenizer

PROMPT_TOKENS = 64
BIN_TOKENS = 32_768
ANSWER_TOKEN = 42
ANSWER = Finished(FinishReason.LENGTH, Usage(PROMPT_TOKENS, 1, Sources(0, 0, 0, PROMPT_TOKENS)))
REQUEST = (
    "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n"
    "Accept: {kind}\r\nContent-Length: {size}\r\n\r\n"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=None, help="whose tokenizer: folder, file or hub id")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.8, help="of each round")


def run(args: argparse.Namespace) -> list[Metric]:
    cores = sorted(os.sched_getaffinity(0))
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=serve, args=(theirs, args.model, cores[-1]), daemon=True)
    server.start()
    theirs.close()
    os.sched_setaffinity(0, {cores[0]})
    metrics = []
    try:
        service_port = ours.recv()
        for encoding in Encoding:
            request = completion_request(encoding)
            with closing(connect(service_port)) as sock:
                answer = exchange(sock, request)
            ours.send((encoding.value, answer.partition(b"\r\n\r\n")[2]))
            metrics += compare(args, encoding.name.lower(), request, service_port, ours.recv())
        return [*metrics, decode_bin()]
    finally:
        os.sched_setaffinity(0, cores)
        server.terminate()
        server.join()


def completion_request(encoding: Encoding) -> bytes:
    """One token for a short prompt; token ids as each encoding's clients send them."""
    ids = np.arange(100, 100 + PROMPT_TOKENS, dtype="<i4")
    body: dict[str, Any] = {"model": "m", "max_tokens": 1, "temperature": 0}
    if encoding is Encoding.JSON:
        packed = json.dumps({**body, "prompt": ids.tolist()}).encode()
    else:
        packed = msgpack.packb({**body, "prompt": ids.tobytes()})
    return REQUEST.format(kind=encoding.value, size=len(packed)).encode() + packed


def compare(
    args: argparse.Namespace, name: str, request: bytes, service_port: int, bare_port: int
) -> list[Metric]:
    """Service and bare handler in turn."""
    rounds: list[tuple[Load, Load]] = []
    for _ in range(args.rounds + 1):  # the first warms up
        ours, bare = (
            load(port, request, args.connections, args.seconds)
            for port in (service_port, bare_port)
        )
        rounds.append((ours, bare))
    median = [
        Load(*map(statistics.median, zip(*loads, strict=True)))
        for loads in zip(*rounds[1:], strict=True)
    ]
    ours, bare = median
    ratio = statistics.median(ours.rate / bare.rate for ours, bare in rounds[1:])
    return [
        Metric(f"{name}, {args.connections} connections", ours.rate, "requests/s"),
        Metric(f"{name}, bare aiohttp handler", bare.rate, "requests/s"),
        Metric(f"{name}, share of the bare rate", 100 * ratio, "%", 35, higher_is_better=True),
        Metric(f"{name}, median added latency", (ours.latency - bare.latency) * 1e6, "us"),
        Metric(f"{name}, how busy the load was at the bare rate", 100 * bare.busy, "%"),
    ]


class Load(NamedTuple):
    rate: float  # answers a second
    latency: float  # median seconds from a request's send to its answer
    busy: float  # the share of the time that the load itself computed


def load(port: int, request: bytes, num_connections: int, seconds: float) -> Load:
    """Keep `num_connections` busy with one request each, for `seconds`."""
    socks = [connect(port) for _ in range(num_connections)]
    by_number = {sock.fileno(): sock for sock in socks}
    answer_len = len(exchange(socks[0], request))
    spans = []
    with select.epoll() as epoll:
        for number in by_number:
            epoll.register(number, select.EPOLLIN)
        computed = time.process_time()
        now = started = time.perf_counter()
        sent = dict.fromkeys(by_number, started)
        for sock in socks:
            sock.send(request)
        while now - started < seconds:
            for number, _ in epoll.poll():
                sock = by_number[number]
                received = len(sock.recv(65_536))
                while received < answer_len - 1:  # a request's id may grow by a digit, not shrink
                    received += len(sock.recv(65_536))
                now = time.perf_counter()
                spans.append(now - sent[number])
                sent[number] = now
                sock.send(request)
        computed = time.process_time() - computed
    for sock in socks:
        sock.close()
    wall = now - started
    return Load(len(spans) / wall, statistics.median(spans), computed / wall)


def connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def exchange(sock: socket.socket, request: bytes) -> bytes:
    """One whole answer with its head."""
    sock.send(request)
    answer = sock.recv(65_536)
    assert b" 200 OK" in answer, answer
    length = re.search(rb"content-length: (\d+)", answer, re.IGNORECASE)
    assert length is not None, answer
    while len(answer.partition(b"\r\n\r\n")[2]) < int(length[1]):
        answer += sock.recv(65_536)
    return answer


def decode_bin() -> Metric:
    """A whole msgpack body with 32,768 token ids as a bin, to an array of ids."""
    ids = np.arange(BIN_TOKENS, dtype="<i4")
    body = msgpack.packb({"prompt": ids.tobytes(), "max_tokens": 1})
    spans = []
    for _ in range(1000):
        started = time.perf_counter()
        request = decode(body, Encoding.MSGPACK, CompletionRequest)
        token_ids(request.prompt, "prompt", BIN_TOKENS)
        spans.append(time.perf_counter() - started)
    return Metric(
        f"decode {BIN_TOKENS:,} token ids as bin", statistics.median(spans) * 1e6, "us", 50
    )


# -- the server's process -----------------------------------------------------------------------


class InstantEngine:
    """Stands in for the engine: every request is answered with one token before it is queued."""

    ready = True
    max_request_tokens = 8192

    def submit(self, request: Request) -> None:
        request.stream.put(ANSWER_TOKEN, None)
        request.stream.close(ANSWER)

    def cancel(self, request_id: str) -> None:
        """Nothing runs on."""


def serve(pipe: Connection, model: str | None, core: int) -> None:
    """Both servers on one core, until the parent goes. Sends the service's port; then for each
    (media type, body) it gets, the port of a bare handler with that answer."""
    os.sched_setaffinity(0, {core})
    folder = fetch(model)
    info = describe(folder, None, torch.device("cpu"))
    engine: Any = InstantEngine()
    backend = Backend(info.name, engine, Tokenizer(folder), info, int(time.time()))

    async def main() -> None:
        edge = Edge(Config(), KeyRing({}), Metrics(), backend)
        pipe.send(await listen(create_app(edge)))
        while True:
            content_type, body = await asyncio.to_thread(pipe.recv)
            pipe.send(await listen(bare_app(content_type, body)))

    uvloop.run(main())


def bare_app(content_type: str, body: bytes) -> web.Application:
    async def constant(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type)

    app = web.Application()
    app.add_routes([web.post("/v1/completions", constant)])
    return app


async def listen(app: web.Application) -> int:
    """A port of its own for `app`, served as the service is."""
    runner = make_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return int(runner.addresses[0][1])
