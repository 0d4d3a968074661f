"""The service in this process, on a loopback port, over a tiny model. Imported by tests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from aiohttp import web

from radixsvc.admission import Edge, KeyRing
from radixsvc.app import create_app, make_runner
from radixsvc.config import load
from radixsvc.metrics import Metrics
from radixsvc.startup import Backend, build_backend


def tiny_config(folder: Path, *sets: str) -> list[str]:
    """Settings for a tiny model in fp32 with a few hundred pages."""
    return [f"model.name={folder}", "model.dtype=float32", "model.device=cpu",
            "tiers.device.size=8MiB", *sets]  # fmt: skip


class RunningBackend:
    """A started backend. `scripted` replaces its model by one that says what it is told to."""

    def __init__(self, folder: Path, *sets: str, scripted: bool = False) -> None:
        self.backend: Backend = build_backend(load(sets=tiny_config(folder, *sets)).config)
        self.script = Script(self.backend)
        if scripted:
            self.backend.engine.runner.model = self.script  # type: ignore[assignment]

    def __enter__(self) -> RunningBackend:
        engine = self.backend.engine
        engine.start()
        while not engine.ready:
            assert engine.failed is None, engine.failed
            time.sleep(0.001)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self.backend.engine.drain(10)
        self.backend.close()
        assert self.backend.engine.failed is None, self.backend.engine.failed

    def say(self, *texts: str) -> None:
        """What the scripted model answers to the next prompts, each before its end token."""
        ids: list[int] = []
        for text in texts:
            ids += self.backend.tokenizer.encode(text, False).tolist()
            ids.append(min(self.backend.info.eos_token_ids))
        self.script.say(ids)

    def check(self) -> None:
        """Ownership of pages holds, and nobody holds any."""
        stats = self.backend.engine.call(lambda cache: (cache.check(), cache.stats())[1]).result(10)
        assert stats.num_leases == 0
        assert stats.pages["device"]["writing"] == 0


class Script:
    """A model that answers each prompt with `replies`, one token a step; one request at a time."""

    def __init__(self, backend: Backend) -> None:
        self.info = backend.info
        self.page_shape = backend.info.page_shape
        self.say([])

    def say(self, replies: Sequence[int]) -> None:
        self.replies = replies
        self._next = 0

    def forward(self, ids: Any, positions: Any, context: Any, rows: Any) -> torch.Tensor:
        logits = torch.zeros(len(rows), self.info.vocab_size)
        if len(rows) and self.replies:
            logits[:, self.replies[min(self._next, len(self.replies) - 1)]] = 50.0
            self._next += 1
        return logits


@asynccontextmanager
async def serving(
    backend: Backend | None, *sets: str, keys: KeyRing | None = None
) -> AsyncIterator[tuple[str, Edge]]:
    """The address of a service around `backend`, and its edge."""
    edge = Edge(load(sets=sets).config, keys or KeyRing({}), Metrics(), backend)
    runner = make_runner(create_app(edge))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}", edge
    finally:
        await runner.cleanup()


def little_endian(ids: Sequence[int]) -> bytes:
    return np.array(ids, "<i4").tobytes()
