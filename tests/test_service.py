"""A process's life: bind, load, ready, drain, exit; and clients that go away or never read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
from serving import RunningBackend, serving, tiny_config

from radixsvc import api_prefix
from radixsvc.admission import Edge
from radixsvc.cache import PrefixCache
from radixsvc.cli import main
from radixsvc.client import AsyncClient
from radixsvc.config import load
from radixsvc.service import serve
from tiers.page import InvariantError

PROMPT = "Please summarise the following report, list three open questions"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """`radixsvc serve` with a tiny model and a datagram socket as its service manager."""

    def __init__(self, folder: Path, tmp_path: Path, *sets: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(tmp_path / "notify"))
        self.manager.settimeout(30)
        settings = tiny_config(folder, f"server.port={self.url.rsplit(':', 1)[1]}", *sets)
        options = [option for item in settings for option in ("--set", item)]
        environ = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"),
                   "RADIXSVC_LOG__FORMAT": "json", "WATCHDOG_USEC": "2000000"}  # fmt: skip
        environ.pop("WATCHDOG_PID", None)
        self.log = (tmp_path / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "radixsvc.cli", "serve", *options], env=environ,
            stderr=self.log,
        )  # fmt: skip

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.manager.close()
        self.log.close()

    def wait_for(self, word: str) -> list[str]:
        """Messages to the service manager, up to one with `word`."""
        messages = []
        while True:
            messages.append(self.manager.recv(4096).decode())
            if word in messages[-1]:
                return messages

    def logged(self) -> list[dict[str, object]]:
        self.log.flush()
        return [json.loads(line) for line in Path(self.log.name).read_text().splitlines()]


async def test_from_loading_to_drained(tiny_llama: Path, tmp_path: Path) -> None:
    """Ready only after a forward pass; SIGTERM lets three streams finish and exits with 0."""
    with Process(tiny_llama, tmp_path) as service:
        wait = asyncio.to_thread(service.wait_for, "READY=1")
        async with aiohttp.ClientSession() as session:
            early = await first_answers(session, service.url)
            messages = await wait
            async with session.get(service.url + "/readyz") as reply:
                assert reply.status == 200
        assert "EXTEND_TIMEOUT_USEC" in messages[0]
        assert early == (200, 503)
        async with AsyncClient(service.url, retries=0) as client:
            streams = [
                client.stream(f"{i} {PROMPT}", max_tokens=400, ignore_eos=True) for i in range(3)
            ]
            for stream in streams:
                await anext(stream)
            service.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(service.wait_for, "STOPPING=1")
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with aiohttp.ClientSession() as session:
                    body = {"prompt": "new"}
                    async with session.post(service.url + "/v1/completions", json=body) as reply:
                        assert reply.status == 503
                        assert (await reply.json())["error"]["code"] == "draining"
                        assert "retry-after" in reply.headers
            ends = [[event async for event in stream][-1] for stream in streams]
        assert [end.usage.completion_tokens for end in ends] == [400] * 3
        assert await asyncio.to_thread(service.process.wait, 30) == 0
        assert PROMPT not in json.dumps(service.logged())


async def first_answers(session: aiohttp.ClientSession, url: str) -> tuple[int, int]:
    """What healthz and readyz say as soon as anything answers."""
    while True:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with session.get(url + "/healthz") as health, session.get(url + "/readyz") as r:
                return health.status, r.status
        await asyncio.sleep(0.02)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave logging to pytest where `serve` runs in this process."""
    monkeypatch.setattr("radixsvc.log.setup", lambda level, form: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("sets", "status", "words"),
    [
        (["server.host=0.0.0.0"], 78, "public_without_keys"),
        (["model.name=/no/such/model"], 78, "/no/such/model"),
        (["tiers.device.size=1B"], 78, "tiers.device.size"),
        (["no.such=1"], 78, "no such key"),
    ],
)
def test_what_can_not_start_says_why(
    tiny_llama: Path, capfd: pytest.CaptureFixture[str], sets: list[str], status: int, words: str
) -> None:
    options = [
        o for item in tiny_config(tiny_llama, "server.port=0", *sets) for o in ("--set", item)
    ]
    assert main(["serve", *options]) == status
    assert words in capfd.readouterr().err


@pytest.mark.usefixtures("quiet")
def test_a_taken_port_is_named(tiny_llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        assert main(["serve", "--model", str(tiny_llama), "--port", port]) == 69
    assert f"127.0.0.1:{port}" in capfd.readouterr().err


async def settled(running: RunningBackend, seconds: float = 1.0) -> None:
    """All pages are let go within the time in which they have to be."""
    end = time.monotonic() + seconds
    while running.backend.engine.progress()[0]:
        assert time.monotonic() < end, "requests of clients that left still run"
        await asyncio.sleep(0.01)
    running.check()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_pages(tiny: RunningBackend, stream: bool) -> None:
    async with serving(tiny.backend) as (url, edge):
        async with aiohttp.ClientSession() as session:
            body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": stream}
            tasks = [asyncio.create_task(post(session, url, body)) for _ in range(20)]
            while tiny.backend.engine.stats().running < 5:
                await asyncio.sleep(0.005)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await settled(tiny)
        assert edge.in_flight[""] == 0


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> int:
    async with session.post(url + "/v1/completions", json=body) as reply:
        await reply.read()
        return reply.status


async def mute_clients(url: str, count: int, **body: object) -> list[socket.socket]:
    """Clients with small buffers that send a request and never read."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps({"prompt": PROMPT, "stream": True, "ignore_eos": True, **body})
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode()
    mute = []
    for _ in range(count):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        sock.send(request)
        mute.append(sock)
    return mute


async def test_clients_that_never_read_hold_nothing_up(tiny: RunningBackend) -> None:
    """200 of them; one that reads is served meanwhile, and in the end all pages are back."""
    async with serving(tiny.backend) as (url, edge):
        mute = await mute_clients(url, 200, max_tokens=3)
        async with AsyncClient(url) as client:
            answer = await client.complete("hello", max_tokens=3)
            assert answer.choices[0].finish_reason
        await settled(tiny, 30)
        for sock in mute:
            sock.close()
        assert edge.in_flight[""] == 0


async def test_a_client_whose_buffers_are_full_is_cut_off(
    tiny: RunningBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """Two with long answers: their requests end with the deadline for writing, pages and all."""
    async with serving(tiny.backend, "server.write_seconds=0.2") as (url, edge):
        [endless, other] = await mute_clients(
            url, 2, max_tokens=800, logprobs=20, n=8, temperature=0.5
        )
        while edge.in_flight[""] < 2:
            await asyncio.sleep(0.01)
        while edge.in_flight[""]:
            await asyncio.sleep(0.01)
        await settled(tiny)
        endless.close()
        other.close()
    assert caplog.text.count("did not read for 0.2 s") == 2
    assert tiny.backend.engine.stats().finished["cancelled"] >= 16


async def test_a_body_that_never_comes_is_given_up(tiny: RunningBackend) -> None:
    async with serving(tiny.backend, "server.read_seconds=0.2") as (url, _):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\n"
            b'Content-Length: 1000\r\n\r\n{"prompt"'
        )
        answer = await asyncio.wait_for(reader.readline(), 10)
        assert b" 408 " in answer
        writer.close()


async def test_a_failing_step_is_an_error_event_not_a_silent_end(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunningBackend(tiny_llama, scripted=True) as running:
        running.say("a b c d e f g h i j k l m n o p")
        real = running.script.forward
        calls = 0

        def forward(*args: object) -> object:
            nonlocal calls
            calls += 1
            if calls > 4:
                raise RuntimeError("broken on purpose")
            return real(*args)

        running.script.forward = forward  # type: ignore[assignment]
        async with serving(running.backend) as (url, _), aiohttp.ClientSession() as session:
            body = {"prompt": PROMPT, "stream": True, "max_tokens": 20}
            async with session.post(url + "/v1/completions", json=body) as reply:
                text = (await reply.read()).decode()
        assert '"code":"engine_failed"' in text
        assert "[DONE]" not in text
        assert PROMPT not in caplog.text
        running.check()


async def test_broken_ownership_ends_the_process(tiny_llama: Path) -> None:
    backend = RunningBackend(tiny_llama).backend
    service = asyncio.create_task(serve(load(sets=["server.port=0"]).config, lambda _: backend))
    while not backend.engine.ready:
        await asyncio.sleep(0.005)

    def broken(cache: PrefixCache) -> None:
        raise InvariantError("on purpose")

    with pytest.raises(InvariantError):
        await asyncio.wrap_future(backend.engine.call(broken))
    assert await asyncio.wait_for(service, 10) == 1


TERMINATED = """
import os, signal, sys
from radixsvc.cli import main

class Importing:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Importing())
main(["serve"])
"""


def test_sigterm_before_anything_is_loaded_ends_with_0() -> None:
    """The first process of a container would not even notice it without a handler."""
    assert subprocess.run([sys.executable, "-c", TERMINATED], timeout=60).returncode == 0


async def test_sigterm_while_loading_ends_with_0(tiny_llama: Path, tmp_path: Path) -> None:
    with Process(tiny_llama, tmp_path) as service:
        await asyncio.to_thread(service.wait_for, "loading")
        service.process.send_signal(signal.SIGTERM)
        assert "READY=1" not in await asyncio.to_thread(service.wait_for, "STOPPING=1")
        assert await asyncio.to_thread(service.process.wait, 30) == 0


async def test_sigterm_before_the_named_prompts_are_warm_is_no_failure(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draining refuses their requests, which is not a reason to exit with 1."""
    backend = RunningBackend(tiny_llama).backend
    warm = api_prefix.warm_named_prompts

    async def warm_late(edge: Edge) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        edge.draining = True
        await warm(edge)

    monkeypatch.setattr(api_prefix, "warm_named_prompts", warm_late)
    config = load(sets=["server.port=0", "prompts.greeting.text=Hello"]).config
    assert await asyncio.wait_for(serve(config, lambda _: backend), 30) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_the_process_at_once(
    tiny_llama: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with Process(tiny_llama, tmp_path) as service:
        await asyncio.to_thread(service.wait_for, "READY=1")
        async with AsyncClient(service.url, retries=0) as client:
            stream = client.stream(PROMPT, max_tokens=900, ignore_eos=True, n=100)
            await anext(stream)
            service.process.send_signal(number)
            await asyncio.to_thread(service.wait_for, "STOPPING=1")
            service.process.send_signal(number)
            assert await asyncio.to_thread(service.process.wait, 30) == 1
        assert not any("499" in str(entry["message"]) for entry in service.logged())


async def test_metrics_count_tokens_by_source_and_hold_no_text(tiny: RunningBackend) -> None:
    async with serving(tiny.backend) as (url, _), aiohttp.ClientSession() as session:
        await post(session, url, {"prompt": PROMPT, "max_tokens": 2})
        async with session.get(url + "/secret-path-words") as reply:
            assert reply.status == 404
        async with session.get(url + "/metrics") as reply:
            assert reply.headers["Content-Type"].startswith("text/plain; version=")
            text = await reply.text()
    assert re.search(r'radixsvc_prompt_tokens_total\{source="computed"\} [1-9]', text)
    assert 'radixsvc_requests_total{route="/v1/completions",status="200"} 1.0' in text
    assert 'radixsvc_request_seconds_bucket{le="+Inf"} 1.0' in text
    assert "radixsvc_time_to_first_token_seconds_count 1.0" in text
    assert 'radixsvc_pages{state="free",tier="device"}' in text
    assert "secret" not in text
    assert PROMPT.split()[1] not in text


async def test_health_is_fast_while_a_long_prompt_is_computed(tiny: RunningBackend) -> None:
    async with serving(tiny.backend) as (url, _), aiohttp.ClientSession() as session:
        busy = [
            asyncio.create_task(
                post(session, url, {"prompt": [i + 3] * 900, "max_tokens": 50, "ignore_eos": True})
            )
            for i in range(8)
        ]
        spans = []
        while not all(task.done() for task in busy):
            started = time.perf_counter()
            async with session.get(url + "/healthz") as reply:
                assert reply.status == 200
            spans.append(time.perf_counter() - started)
        assert spans
        assert {task.result() for task in busy} == {200}


def test_edge_refuses_while_not_ready() -> None:
    async def run() -> None:
        async with serving(None) as (url, _), aiohttp.ClientSession() as session:
            async with session.get(url + "/readyz") as reply:
                assert reply.status == 503
            async with session.post(url + "/v1/completions", json={"prompt": "x"}) as reply:
                assert reply.status == 503
                assert (await reply.json())["error"]["code"] == "not_ready"

    asyncio.run(run())
