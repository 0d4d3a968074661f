"""The load generator against a scripted server, and the workloads it sends."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from serving import RunningBackend, serving
from test_simulate import write_trace

from radixsvc.bench import serve, workloads
from radixsvc.bench.calls import Call, Reply, Seen, Session, rendered
from radixsvc.bench.report import Metric, table
from radixsvc.bench.traces import read_trace
from radixsvc.errors import SetupError


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(["--model", "m", *given])


@asynccontextmanager
async def server(answer: Callable[[dict[str, Any]], list[Any] | int]) -> AsyncIterator[str]:
    """A server that streams `answer(body)` as SSE events; an int in place of a list is a status."""

    async def handle(request: web.Request) -> web.StreamResponse:
        events = answer(await request.json())
        if isinstance(events, int):
            return web.Response(status=events)
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return web.Response(text=body, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def say(*words: str, prompt: int = 10, cached: int = 4, **usage: Any) -> list[Any]:
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": {"role": "assistant"}}]}]
    chunks += [{"choices": [{"index": 0, "delta": {"content": w}}]} for w in words]
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": len(words)}
    chunks.append({"choices": [], "usage": {**counts, "prompt_tokens_details": details, **usage}})
    return chunks


def value(metrics: list[Metric], name: str) -> float:
    return next(m.value for m in metrics if m.name == name)


async def collect(sessions: list[Session], reply: str = "fine") -> list[Call]:
    """The calls of sessions run one after another, each answered with the same words."""
    calls: list[Call] = []

    async def send(call: Call) -> list[Reply]:
        calls.append(call)
        return [Reply(reply)] * call.n

    for session in sessions:
        await session.run(send)
    return calls


async def test_a_chat_is_measured_turn_by_turn() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> list[Any]:
        bodies.append(body)
        cached = 0 if len(body["messages"]) == 2 else 8
        tiers = {"device": cached // 2, "host": cached // 2, "disk": 0, "computed": 10 - cached}
        return say("a", "b", "c", cached=cached, radixsvc=tiers)

    async with server(answer) as url:
        metrics = await serve.drive(arguments("--url", url, "--sessions", "2", "--turns", "3"))
    assert len(bodies) == 6
    assert all(b["stream"] and b["stream_options"]["include_usage"] for b in bodies)
    assert value(metrics, "chat: prompt tokens cached") == pytest.approx(100 * 32 / 60)
    assert value(metrics, "chat: prompt tokens cached, later turns") == pytest.approx(80)
    assert value(metrics, "chat:   of these on host, later turns") == pytest.approx(40)
    assert value(metrics, "chat: failed requests") == 0
    seen = value(metrics, "chat: prompt characters seen before, later turns")
    assert 80 < seen < 100


async def test_failures_are_counted_and_end_their_session(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with server(lambda body: 429) as url:
        metrics = await serve.drive(arguments("--url", url, "--sessions", "3", "--turns", "5"))
    assert value(metrics, "chat: failed requests") == 3
    assert "HTTP 429" in capsys.readouterr().err


async def test_an_error_in_the_stream_is_a_failure() -> None:
    async with server(lambda body: [*say("a"), {"error": {"message": "broke"}}]) as url:
        metrics = await serve.drive(arguments("--url", url, "--sessions", "1"))
    assert value(metrics, "chat: failed requests") == 1


async def test_servers_that_report_no_usage_can_be_measured() -> None:
    async with server(lambda body: say("a", "b")[:-1]) as url:
        metrics = await serve.drive(arguments("--url", url, "--sessions", "2", "--turns", "1"))
    assert value(metrics, "chat: output rate") > 0
    assert not any("cached" in m.name for m in metrics)


async def test_tool_calls_are_put_together_and_answered() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> list[Any]:
        bodies.append(body)
        name = {"index": 0, "id": "call-1", "function": {"name": "look", "arguments": ""}}
        parts = [{"index": 0, "function": {"arguments": a}} for a in ('{"a": ', "1}")]
        return [{"choices": [{"index": 0, "delta": {"tool_calls": [c]}}]} for c in (name, *parts)]

    async with server(answer) as url:
        await serve.drive(
            arguments("--url", url, "--workload", "agent", "--sessions", "1", "--turns", "2")
        )
    assistant, result = bodies[1]["messages"][-2:]
    assert assistant["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"a": 1}'}
    assert (result["role"], result["tool_call_id"]) == ("tool", "call-1")
    assert bodies[0]["tools"] == bodies[1]["tools"]


async def test_a_closed_loop_keeps_its_number_of_sessions() -> None:
    running = most = 0

    async def session(send: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    args = arguments("--concurrency", "3")
    await serve.start_all([Session(session)] * 10, lambda call: asyncio.sleep(0, []), args)
    assert most == 3


async def test_calls_in_rotation_take_turns() -> None:
    order: list[str] = []

    async def session(name: str, send: Any) -> None:
        for turn in "12":
            await send(Call(name + turn, 0, 1, []))

    async def send(call: Call) -> list[Reply]:
        order.append(call.key)
        await asyncio.sleep(0)
        return []

    sessions = [Session(partial(session, name)) for name in "abc"]
    await serve.start_all(sessions, send, arguments("--concurrency", "2", "--rotate"))
    assert order == ["a1", "b1", "c1", "a2", "b2", "c2"]


async def test_poisson_arrivals_follow_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []

    async def no_sleep(delay: float) -> None:
        delays.append(delay)

    async def session(send: Any) -> None:
        pass

    monkeypatch.setattr(serve.asyncio, "sleep", no_sleep)
    args = arguments("--rate", "50", "--seed", "3")
    for _ in range(2):
        await serve.start_all([Session(session)] * 200, lambda call: asyncio.sleep(0), args)
    assert delays[:200] == delays[200:] == sorted(delays[:200])
    assert delays[199] == pytest.approx(200 / 50, rel=0.3)


@pytest.mark.parametrize(
    ("name", "calls"),
    [("chat", 12), ("agent", 12), ("tree", 3 * 13), ("samples", 24), ("few-shot", 3),
     ("shared", 32), ("documents", 3)],
)  # fmt: skip
async def test_workloads_are_the_same_every_time(name: str, calls: int) -> None:
    args = arguments("--workload", name, "--sessions", "3")
    once, again = [await collect(workloads.build_workload(args)) for _ in range(2)]
    assert once == again
    assert len(once) == calls
    args.seed = 1
    assert await collect(workloads.build_workload(args)) != once


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("chat", 0.6, 0.9), ("agent", 0.8, 1.0), ("tree", 0.8, 1.0), ("samples", 0.8, 0.9),
     ("few-shot", 0.8, 1.0), ("shared", 0.7, 0.9), ("documents", 0.0, 0.01)],
)  # fmt: skip
async def test_workloads_share_what_they_claim(name: str, least: float, most: float) -> None:
    calls = await collect(workloads.build_workload(arguments("--workload", name)))
    seen = Seen()
    shares = []
    for call in calls:
        prompt = rendered(call)
        shares.append((len(prompt), len(prompt) * seen.share(prompt)))
        seen.add(prompt)
    total, shared = (sum(column) for column in zip(*shares, strict=True))
    assert least <= shared / total <= most


async def test_a_trace_is_replayed_with_its_shared_blocks(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", (600, [0, 1]), (1100, [0, 2, 3]))
    args = arguments("--workload", "trace", "--trace", str(path))
    args.speed, args.scale = 10.0, 0.5
    sessions = workloads.build_workload(args)
    assert [s.start for s in sessions] == [0.0, 0.1]
    calls = await collect(sessions)
    one, two = (call.messages[0]["content"].split() for call in calls)
    assert (len(one), len(two)) == (300, 550)
    assert one[:256] == two[:256]
    assert one[256:] != two[256:300]


def test_a_file_sets_a_workload_s_options(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text('workload = "agent"\nsessions = 7\nturns = 3\n')
    args = arguments("--workload", str(path), "--turns", "2")
    assert (args.workload, args.sessions, args.turns) == ("agent", 7, 2)


@pytest.mark.parametrize("text", ["sesions = 7", 'workload = "magic"', "=", None])
def test_a_bad_workload_file_is_told_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    path = tmp_path / "w.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit):
        arguments("--workload", str(path))
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
        (["--workload", "trace"], "--trace"),
        (["--workload", "trace", "--trace", "nowhere"], "nowhere"),
        (["--body", "{"], "Expecting"),
    ],
)
def test_bad_options_are_told_in_words(given: list[str], told: str) -> None:
    with pytest.raises(SetupError, match=told):
        serve.run(arguments(*given))


def test_a_bad_trace_names_its_line(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", (600, [0, 1]), (600, [0]))
    with pytest.raises(SetupError, match="line 2"):
        read_trace(path)


def test_targets_are_judged_in_the_table() -> None:
    metrics = [Metric("fast", 3.0, "ms", 4.0), Metric("rate", 3.0, "1/s", 4.0, True)]
    rows = [line.strip("| ").split() for line in table(metrics).splitlines()]
    assert rows[2] == "fast | 3 | ms | <= 4 | met".split()
    assert rows[3] == "rate | 3 | 1/s | >= 4 | MISSED".split()


SMALL = """--sessions 2 --turns 2 --system-words 30 --turn-words 8 --out 4 --tools 1 --branch 2
    --depth 1 --samples 2 --shots 2 --groups 2 --prompts 2 --document-words 40 --native-n""".split()


async def test_this_service_reuses_what_the_workloads_share(
    tiny_llama: Path, tmp_path: Path
) -> None:
    path = write_trace(tmp_path / "t.jsonl", (600, [0, 1]), (1100, [0, 2, 3]))
    trace = ["--trace", str(path), "--scale", "0.1"]
    with RunningBackend(tiny_llama) as running:
        async with serving(running.backend) as (url, _):
            for name in workloads.NAMES:
                args = arguments("--url", url, "--workload", name, *SMALL, *trace)
                figures = {m.name: m.value for m in await serve.drive(args)}
                assert figures[f"{name}: failed requests"] == 0
                cached = figures[f"{name}: prompt tokens cached"]
                assert cached == pytest.approx(figures[f"{name}:   of these on device"])
                later = f"{name}: prompt tokens cached, later turns"
                assert figures.get(later, 100) > 50
        running.check()
