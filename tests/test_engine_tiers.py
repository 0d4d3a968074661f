"""The engine over device, host and disk: the same tokens from every tier, sources told truly."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from known_model import EngineUnderTest, expected
from serving import RunningBackend

from radixsvc.bench.harness import complete, greedy, running_engine
from radixsvc.cache import Lease, Lower
from radixsvc.completion import FinishReason, Sources, Tokens
from radixsvc.engine import Engine
from radixsvc.model import Model, load_model
from radixsvc.request import State
from radixsvc.residency import TierPolicy
from tiers.device import DeviceTier
from tiers.disk import DiskTier
from tiers.host import HostTier
from tiers.mover import open_mover

PAGES = 16  # of the device, 4 tokens each
BASE = 24  # tokens of a prompt that others share a part of
OFFSETS = range(11, 18)  # where they part from it, around the ends of its pages
NEW_TOKENS = 8
WEIGHTS = b"w" * 32


def tiers(
    folder: Path | None,
    host_pages: int,
    device: DeviceTier,
    *,
    promote: str = "always",
    disk_pages: int = 600,
) -> Lower:
    """Disk takes pages at their first use, so that a tier's hits need no second one."""
    nbytes = device.page_bytes
    host = HostTier(nbytes, host_pages) if host_pages else None
    disk = None
    if folder is not None:
        slot = 4096 + -(-nbytes // 4096) * 4096
        disk = DiskTier(folder, nbytes, (disk_pages + 1) * slot, WEIGHTS, 512)
    policy = TierPolicy(disk_after=1, promote=promote)  # type: ignore[arg-type]
    return Lower(open_mover(device, host, disk), host, disk, WEIGHTS, policy)


def prompt_of(length: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(3, 97, length).astype(np.int32)


def parting(base: Tokens, offset: int) -> Tokens:
    """`base` up to `offset`, then other tokens."""
    tail = prompt_of(9, seed=1000 + offset)
    tail[0] = 3 if base[offset] != 3 else 4
    return np.concatenate([base[:offset], tail])


def settle(engine: Engine) -> None:
    """Until the background copies are done, and every page has one owner."""
    end = time.monotonic() + 10
    while engine.call(lambda cache: cache.is_moving).result(10):
        engine.call(lambda cache: cache.poll()).result(10)
        assert time.monotonic() < end
        time.sleep(1e-3)
    engine.call(lambda cache: cache.check()).result(10)


Ask = Callable[[str, Tokens], tuple[list[int], Sources]]


def asker(engine: Engine) -> Ask:
    def ask(namespace: str, prompt: Tokens) -> tuple[list[int], Sources]:
        [outcome] = complete(engine, [prompt], greedy(NEW_TOKENS), namespace)
        settle(engine)
        return outcome.tokens, outcome.usage.sources

    return ask


def fill(ask: Ask) -> None:
    """Take every page of the device, so that all else lies below it."""
    ask("filler", prompt_of(4 * PAGES - NEW_TOKENS, seed=1))


Open = Callable[[Path | None, int], AbstractContextManager[Engine]]


@contextmanager
def known(folder: Path | None, host_pages: int) -> Iterator[Engine]:
    with EngineUnderTest(PAGES, build_lower=partial(tiers, folder, host_pages)) as t:
        yield t.engine


def every_tier(
    open_engine: Open, folder: Path, base: Tokens, prompt: Tokens
) -> dict[str, tuple[list[int], Sources]]:
    """What `prompt` gives cold, and where `base` lies on the device, host, disk, or of old."""
    found = {}
    with open_engine(None, 200) as engine:
        ask = asker(engine)
        found["cold"] = ask("cold", prompt)
        ask("device", base)
        found["device"] = ask("device", prompt)
        ask("host", base)
        fill(ask)
        found["host"] = ask("host", prompt)
    with open_engine(folder, 0) as engine:
        ask = asker(engine)
        ask("disk", base)
        fill(ask)
        found["disk"] = ask("disk", prompt)
        ask("restart", base)
    with open_engine(folder, 0) as engine:
        found["restart"] = asker(engine)("restart", prompt)
    return found


def sources_at(offset: int, total: int) -> dict[str, Sources]:
    """From every tier reuse is exact to the token."""
    return {
        "cold": Sources(0, 0, 0, total),
        "device": Sources(offset, 0, 0, total - offset),
        "host": Sources(0, offset, 0, total - offset),
        "disk": Sources(0, 0, offset, total - offset),
        "restart": Sources(0, 0, offset, total - offset),
    }


@pytest.mark.parametrize("offset", OFFSETS)
def test_right_tokens_from_every_tier(tmp_path: Path, offset: int) -> None:
    base = prompt_of(BASE, seed=2)
    prompt = parting(base, offset)
    found = every_tier(known, tmp_path, base, prompt)
    assert {name: sources for name, (_, sources) in found.items()} == sources_at(
        offset, len(prompt)
    )
    for tokens, _ in found.values():
        assert tokens == expected(prompt.tolist(), NEW_TOKENS)


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> Model:
    return load_model(tiny_llama, "float32")


@pytest.mark.parametrize("offset", OFFSETS)
def test_a_real_model_says_the_same_from_every_tier(
    llama: Model, tmp_path: Path, offset: int
) -> None:
    def open_engine(folder: Path | None, host: int) -> AbstractContextManager[Engine]:
        return running_engine(
            llama, PAGES * 4, page_size=4, build_lower=partial(tiers, folder, host)
        )

    base = prompt_of(BASE, seed=2)
    prompt = parting(base, offset)
    found = every_tier(open_engine, tmp_path, base, prompt)
    assert {name: sources for name, (_, sources) in found.items()} == sources_at(
        offset, len(prompt)
    )
    cold, *others = (tokens for tokens, _ in found.values())
    assert all(tokens == cold for tokens in others)


@pytest.mark.parametrize(
    ("promote", "seconds", "loads"),
    [
        ("always", 1e9, True),
        ("never", 0.0, False),
        ("cost", 0.0, True),
        ("cost", 1e9, False),
    ],
)
def test_loads_only_where_it_is_to(promote: str, seconds: float, loads: bool) -> None:
    base = prompt_of(BASE, seed=2)
    with EngineUnderTest(PAGES, build_lower=partial(tiers, None, 200, promote=promote)) as t:
        assert t.lower is not None
        t.lower.mover.seconds = (  # type: ignore[method-assign]
            lambda source, target, num_pages: seconds if target is t.device else 0.0
        )
        ask = asker(t.engine)
        ask("a", base)
        fill(ask)
        tokens, sources = ask("a", base)
        assert tokens == expected(base.tolist(), NEW_TOKENS)
        assert sources == (Sources(0, 23, 0, 1) if loads else Sources(0, 0, 0, 24))


def test_cancel_while_promoting_gives_all_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that does not come: its request ends at once, its pages stay with the tree."""
    base = prompt_of(BASE, seed=2)
    with EngineUnderTest(PAGES, build_lower=partial(tiers, None, 200)) as t:
        ask = asker(t.engine)
        ask("a", base)
        fill(ask)
        with monkeypatch.context() as patch:
            patch.setattr(Lease, "poll", lambda lease: False)

            async def cancelled() -> State:
                request = t.submit(base.tolist())
                while request.state is State.WAITING:
                    await asyncio.sleep(1e-3)
                state = request.state
                t.engine.cancel(request.id)
                assert (await t.read(request))[1].reason is FinishReason.CANCELLED
                return state

            assert asyncio.run(cancelled()) is State.PROMOTING
        settle(t.engine)
        assert t.device.count()["writing"] == 0
        assert ask("a", base)[0] == expected(base.tolist(), NEW_TOKENS)


def test_with_the_cache_off_the_tokens_are_the_same_and_none_is_cached() -> None:
    prompt = prompt_of(BASE, seed=2)
    with EngineUnderTest(64) as t:
        t.cache.enabled = False
        for _ in range(2):
            for outcome in complete(t.engine, [prompt, prompt], greedy(NEW_TOKENS)):
                assert outcome.tokens == expected(prompt.tolist(), NEW_TOKENS)
                assert outcome.usage.sources == Sources(0, 0, 0, BASE)
        settle(t.engine)
        assert t.device.num_free == 64


def test_a_configured_quota_is_the_cache_s(tiny_llama: Path) -> None:
    sets = ("quotas.batch.device=25%", "quotas.batch.host=50%", "tiers.host.size=4MiB")
    with RunningBackend(tiny_llama, *sets) as running:
        cache = running.backend.engine.cache
        device, host, _ = (tier.num_pages for tier in cache.residency.tiers)
        assert cache.tree.accounts["batch"].quota == [device // 4, host // 2, 0]


def test_branches_copy_the_partly_filled_page_alone() -> None:
    """Four continuations of one prompt: whole pages by reference, a copy of the last for each."""
    prompt = prompt_of(4 * 5 + 2, seed=3)
    with EngineUnderTest(64) as t:
        complete(t.engine, [prompt], greedy(1))
        before = t.engine.call(lambda cache: cache.stats()).result(10)
        free = t.device.num_free
        branches = [np.append(prompt, np.int32(90 + i)) for i in range(4)]
        outcomes = complete(t.engine, branches, greedy(1))
        after = t.engine.call(lambda cache: cache.stats()).result(10)
        assert [o.usage.sources for o in outcomes] == [Sources(22, 0, 0, 1)] * 4
        assert after.page_copies - before.page_copies == 4
        assert free - t.device.num_free <= 4


def serve_until_killed(folder: Path, base: Tokens, ready: Connection) -> None:
    with known(folder, 8) as engine:
        ask = asker(engine)
        ask("a", base)
        ready.send(None)
        for seed in range(10_000):  # killed while it writes
            ask("a", prompt_of(40, seed))


def test_after_kill_9_the_disk_is_found_again(tmp_path: Path) -> None:
    base = prompt_of(BASE, seed=2)
    spawn = multiprocessing.get_context("spawn")
    ready, theirs = spawn.Pipe()
    process = spawn.Process(target=serve_until_killed, args=(tmp_path, base, theirs))
    process.start()
    theirs.close()
    ready.recv()
    time.sleep(0.3)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with known(tmp_path, 8) as engine:
        settle(engine)
        found = asker(engine)("a", base)
        assert found == (expected(base.tolist(), NEW_TOKENS), Sources(0, 0, 23, 1))
        stored = engine.call(lambda cache: cache.stats().pages["disk"]["ready"]).result(10)
        assert stored > 6
    ready.close()
