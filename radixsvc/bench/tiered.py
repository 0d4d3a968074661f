"""What the tiers below the device are worth, with a model.

- Time to first token of one prompt: cold, and found on the device, the host, the disk.
- Agents in rotation: 40 of them share 10 system prompts, on a device that holds a quarter of what
  they use. The same requests with tiers and without.
- Nothing reused: processor seconds of the same prompts with tiers and without, in pairs.

Prompts are random token ids, the same in every run.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch

from radixsvc.attention import set_num_threads
from radixsvc.bench.harness import Outcome, complete, greedy, running_engine
from radixsvc.bench.report import Metric
from radixsvc.cache import Lower
from radixsvc.engine import Engine
from radixsvc.fetch import fetch
from radixsvc.model import Model, load_model, measure_num_threads
from radixsvc.request import Sources, Tokens
from radixsvc.residency import TierPolicy
from tiers.device import DeviceTier
from tiers.disk import DiskTier
from tiers.host import HostTier
from tiers.mover import open_mover

PAGE_SIZE = 16
BLOB_BYTES = 1024
WARM_UP = 4  # pairs until the device is full


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=None, help="folder, .gguf file or hub id")
    add("--dtype", default=None, help="float32 or bfloat16")
    add("--folder", type=Path, default=None, help="where the disk tier lies")
    add("--rounds", type=int, default=5, help="of each time to first token, and pairs")
    add("--prompt-tokens", type=int, default=2000)
    add("--agents", type=int, default=40)
    add("--systems", type=int, default=10, help="different system prompts")
    add("--system-tokens", type=int, default=1500)
    add("--turns", type=int, default=3)
    add("--clients", type=int, default=2, help="agents that run at the same time")
    add("--only", choices=("first-token", "agents", "overhead"), help="one part alone")


def run(args: argparse.Namespace) -> list[Metric]:
    model = load_model(fetch(args.model), args.dtype, torch.device("cpu"))
    set_num_threads(measure_num_threads(model.info.dtype))
    parts = {
        "first-token": lambda: first_token(model, args.folder, args.prompt_tokens, args.rounds),
        "agents": lambda: rotation(model, args),
        "overhead": lambda: overhead(model, args.folder, args.rounds),
    }
    chosen = [args.only] if args.only else list(parts)
    return [metric for name in chosen for metric in parts[name]()]


@contextmanager
def tiered_engine(
    model: Model, folder: Path | None, device: int, host: int, disk: int
) -> Iterator[Engine]:
    """An engine with tiers for so many tokens each; a tier of 0 is left out."""
    home = Path(mkdtemp(prefix="radixsvc-bench-", dir=folder))
    try:
        build = partial(build_lower, home, bytes.fromhex(model.info.fingerprint), host, disk)
        with running_engine(model, device, PAGE_SIZE, build_lower=build) as engine:
            yield engine
    finally:
        shutil.rmtree(home)


def build_lower(
    folder: Path, fingerprint: bytes, host_tokens: int, disk_tokens: int, device: DeviceTier
) -> Lower | None:
    if not host_tokens and not disk_tokens:
        return None
    nbytes = device.page_bytes
    host = HostTier(nbytes, -(-host_tokens // PAGE_SIZE)) if host_tokens else None
    disk = None
    if disk_tokens:
        slot = nbytes + 2 * 4096
        limit = (disk_tokens // PAGE_SIZE + 2) * slot
        disk = DiskTier(folder, nbytes, limit, fingerprint, BLOB_BYTES)
    mover = open_mover(device, host, disk)
    while host is not None and host.num_free < host.num_pages:
        host.poll()
        time.sleep(1e-3)
    mover.probe()
    return Lower(mover, host, disk, fingerprint, TierPolicy(disk_after=2 if host else 1))


def random_prompt(seed: int, length: int, model: Model) -> Tokens:
    rng = np.random.default_rng(seed)
    return rng.integers(1000, min(40_000, model.info.vocab_size), length).astype(np.int32)


# -- time to first token ----------------------------------------------------------------------


def first_token(model: Model, folder: Path | None, length: int, rounds: int) -> list[Metric]:
    """Each round fills the device with another prompt, then asks again for the first."""
    seconds: dict[str, list[float]] = {"cold": [], "device": [], "host": [], "disk": []}
    room = length + PAGE_SIZE
    prompt, other = (random_prompt(seed, length, model) for seed in (1, 2))
    for tier, host, disk in (("host", 4 * length, 0), ("disk", 0, 4 * length)):
        with tiered_engine(model, folder, room, host, disk) as engine:
            seconds["cold"].append(ask(engine, prompt, "computed"))
            for _ in range(rounds):
                seconds["device"].append(ask(engine, prompt, "device"))
                complete(engine, [other], greedy(1))
                settle(engine)
                seconds[tier].append(ask(engine, prompt, tier))
                settle(engine)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return [
        *(
            Metric(f"first token, {name}", value * 1e3, "ms", None)
            for name, value in median.items()
        ),
        Metric("first token, host / device", median["host"] / median["device"], "x", 1.2),
        Metric("first token, disk / device", median["disk"] / median["device"], "x", 2.0),
    ]


def ask(engine: Engine, prompt: Tokens, source: str) -> float:
    """Seconds to the first token; all but the prompt's end must come from `source`."""
    [outcome] = complete(engine, [prompt], greedy(1))
    sources = outcome.usage.sources
    if getattr(sources, source) < len(prompt) - 2 * PAGE_SIZE:
        raise RuntimeError(f"{source} was to serve a prompt of {len(prompt)} tokens: {sources}")
    return outcome.first_token


def settle(engine: Engine) -> None:
    """Wait until no copy is under way."""
    while engine.call(lambda cache: cache.is_moving).result():
        time.sleep(1e-3)


# -- agents in rotation -----------------------------------------------------------------------


def rotation(model: Model, args: argparse.Namespace) -> list[Metric]:
    """Every agent's turn k before any agent's turn k + 1; neighbours differ in system prompt."""
    working_set = args.systems * args.system_tokens + args.agents * args.turns * 64
    device = working_set // 4
    took: dict[str, float] = {}
    hit_rate: dict[str, float] = {}
    for name, lower in (("without", 0), ("with", working_set)):
        with tiered_engine(model, args.folder, device, lower, 2 * lower) as engine:
            started = time.perf_counter()
            outcomes = run_agents(engine, args)
            took[name] = time.perf_counter() - started
        sources = [outcome.usage.sources for outcome in outcomes]
        hit_rate[name] = share_cached(sources)
    count = args.agents * args.turns
    return [
        Metric("agents: hit rate with tiers", hit_rate["with"] * 100, "%", 85.0, True),
        Metric("agents: hit rate without", hit_rate["without"] * 100, "%"),
        Metric("agents: requests/s with tiers", count / took["with"], "1/s", None, True),
        Metric("agents: requests/s without", count / took["without"], "1/s", None, True),
        Metric("agents: with tiers / without", took["without"] / took["with"], "x", 2.5, True),
    ]


def share_cached(sources: list[Sources]) -> float:
    total = sum(s.cached + s.computed for s in sources)
    return sum(s.cached for s in sources) / total


def run_agents(engine: Engine, args: argparse.Namespace) -> list[Outcome]:
    """All requests, in order of agent and turn."""
    model = engine.model
    systems = [random_prompt(100 + i, args.system_tokens, model) for i in range(args.systems)]
    histories = [systems[agent % args.systems] for agent in range(args.agents)]
    outcomes: list[Outcome] = []
    for turn in range(args.turns):
        for first in range(0, args.agents, args.clients):
            agents = range(first, min(first + args.clients, args.agents))
            for agent in agents:
                question = random_prompt(1000 * (turn + 1) + agent, 32, model)
                histories[agent] = np.concatenate([histories[agent], question])
            answered = complete(engine, [histories[agent] for agent in agents], greedy(8))
            for agent, outcome in zip(agents, answered, strict=True):
                reply = np.array(outcome.tokens, np.int32)
                histories[agent] = np.concatenate([histories[agent], reply])
            outcomes += answered
    return outcomes


# -- nothing reused ---------------------------------------------------------------------------


def overhead(model: Model, folder: Path | None, rounds: int) -> list[Metric]:
    """Prompts that nobody sends twice, through a full device: everything is demoted in vain."""
    ratios = []
    room = 2048
    with (
        tiered_engine(model, folder, room, 0, 0) as without,
        tiered_engine(model, folder, room, 4 * room, 8 * room) as with_tiers,
    ):
        for pair in range(WARM_UP + 8 * rounds):  # short and many: what else runs here is noise
            order = (without, with_tiers) if pair % 2 else (with_tiers, without)
            spent = {engine: processor_seconds(engine, pair) for engine in order}
            ratios.append(spent[with_tiers] / spent[without])
    ratio = statistics.median(ratios[WARM_UP:])
    return [Metric("nothing reused: processor seconds with / without", ratio, "x", 1.03)]


def processor_seconds(engine: Engine, seed: int) -> float:
    """Of all threads, for one prompt and the copies it causes."""
    prompt = random_prompt(10_000 + seed, 512, engine.model)
    started = time.process_time()
    complete(engine, [prompt], greedy(4))
    settle(engine)
    return time.process_time() - started
