"""What the tiers below the device are worth, with a model.

- Time to first token of one prompt: cold, and found on the device, the host, the disk.
- Agents in rotation, from a workload's file, on a device that holds a quarter of what they use:
  the same requests with tiers and without.
- Nothing reused: processor seconds of the same prompts with tiers and without, in pairs.

Prompts are random token ids, the same in every run; a workload's words count as tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch

from radixsvc.attention import set_num_threads
from radixsvc.bench.harness import Outcome, complete, greedy, running_engine
from radixsvc.bench.report import Metric
from radixsvc.cache import Lower
from radixsvc.completion import Tokens
from radixsvc.config import Config, DiskSection, HostSection, Size, Tiers
from radixsvc.engine import Engine
from radixsvc.errors import SetupError
from radixsvc.fetch import fetch
from radixsvc.model import Model, load_model, measure_num_threads
from radixsvc.startup import build_lower
from tiers.base import LEDGER_BYTES
from tiers.device import DeviceTier

PAGE_SIZE = 16
DISK_SLOT_BYTES = 8192  # of header and rounding beside a page, at most
Promote = Literal["cost", "always", "never"]
WORKLOAD = Path(__file__).parents[2] / "configs" / "workload-agents.toml"
WARM_UP = 4  # pairs until the device is full


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=None, help="folder, .gguf file or hub id")
    add("--dtype", default=None, help="float32 or bfloat16")
    add("--folder", type=Path, default=None, help="where the disk tier lies")
    add("--rounds", type=int, default=5, help="of each time to first token, and pairs")
    add("--prompt-tokens", type=int, default=2000)
    add("--workload", type=Path, default=WORKLOAD, help="the agents; default: %(default)s")
    add("--only", choices=("first-token", "agents", "overhead"), help="one part alone")


def run(args: argparse.Namespace) -> list[Metric]:
    try:
        agents = SimpleNamespace(**tomllib.loads(args.workload.read_text()))
    except (OSError, ValueError) as error:
        remedy = "name a file like configs/workload-agents.toml among the sources"
        raise SetupError(f"--workload: {error}: {remedy}", 2) from None
    model = load_model(fetch(args.model), args.dtype, torch.device("cpu"))
    set_num_threads(measure_num_threads(model.info.dtype))
    parts = {
        "first-token": lambda: first_token(model, args.folder, args.prompt_tokens, args.rounds),
        "agents": lambda: rotation(model, args.folder, agents),
        "overhead": lambda: overhead(model, args.folder, args.rounds),
    }
    chosen = [args.only] if args.only else list(parts)
    return [metric for name in chosen for metric in parts[name]()]


@contextmanager
def tiered_engine(
    model: Model, folder: Path | None, device: int, host: int, disk: int, promote: Promote = "cost"
) -> Iterator[Engine]:
    """An engine with tiers for so many tokens each; a tier of 0 is left out."""
    with TemporaryDirectory(prefix="radixsvc-bench-", dir=folder) as home:
        build = partial(_lower, home, bytes.fromhex(model.info.fingerprint), host, disk, promote)
        with running_engine(model, device, PAGE_SIZE, build_lower=build) as engine:
            yield engine


def _lower(
    folder: str, fingerprint: bytes, host: int, disk: int, promote: Promote, device: DeviceTier
) -> Lower | None:
    def room(num_tokens: int, overhead: int) -> Size:
        return Size(f"{-(-num_tokens // PAGE_SIZE) * (device.page_bytes + overhead)}B")

    tiers = Tiers(
        host=HostSection(size=room(host, LEDGER_BYTES)),
        disk=DiskSection(
            size=room(disk, DISK_SLOT_BYTES), path=folder, after_uses=2 if host else 1
        ),
        promote=promote,
    )
    lower = build_lower(Config(tiers=tiers), device, fingerprint)
    if lower is not None and lower.host is not None:
        while lower.host.num_free < lower.host.num_pages:
            lower.host.poll()
            time.sleep(1e-3)
    return lower


def random_prompt(seed: int, length: int, model: Model) -> Tokens:
    rng = np.random.default_rng(seed)
    low = min(1000, model.info.vocab_size // 2)
    return rng.integers(low, min(40_000, model.info.vocab_size), length).astype(np.int32)


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


def rotation(model: Model, folder: Path | None, agents: SimpleNamespace) -> list[Metric]:
    """Every agent's turn k before any agent's turn k + 1; neighbours differ in system prompt."""
    turn_tokens = agents.turn_words + agents.out
    working_set = agents.systems * agents.system_words
    working_set += agents.sessions * agents.turns * turn_tokens
    rate: dict[str, float] = {}
    hits: dict[str, float] = {}
    for name, lower in (("without", 0), ("with", working_set)):
        with tiered_engine(model, folder, working_set // 4, lower, 2 * lower) as engine:
            started = time.perf_counter()
            usages = []
            for outcome in run_agents(engine, agents):
                usages.append(outcome.usage)
                if len(usages) % agents.systems == 0:
                    of = f"{len(usages)} of {agents.turns * agents.sessions}"
                    print(f"agents {name} tiers: {of} requests", file=sys.stderr)
            rate[name] = len(usages) / (time.perf_counter() - started)
        cached = sum(usage.sources.cached for usage in usages)
        hits[name] = cached / sum(usage.prompt_tokens for usage in usages)
    return [
        Metric("agents: hit rate with tiers", hits["with"] * 100, "%", 85.0, True),
        Metric("agents: hit rate without", hits["without"] * 100, "%"),
        Metric("agents: requests/s with tiers", rate["with"], "1/s", None, True),
        Metric("agents: requests/s without", rate["without"], "1/s", None, True),
        Metric("agents: with tiers / without", rate["with"] / rate["without"], "x", 2.5, True),
    ]


def run_agents(engine: Engine, agents: SimpleNamespace) -> Iterator[Outcome]:
    """All requests, in order of turn and agent, `concurrency` of them at once."""
    model = engine.model
    systems = [random_prompt(100 + i, agents.system_words, model) for i in range(agents.systems)]
    histories = [systems[agent % agents.systems] for agent in range(agents.sessions)]
    for turn in range(agents.turns):
        for first in range(0, agents.sessions, agents.concurrency):
            group = range(first, min(first + agents.concurrency, agents.sessions))
            for agent in group:
                question = random_prompt(1000 * (turn + 1) + agent, agents.turn_words, model)
                histories[agent] = np.concatenate([histories[agent], question])
            answered = complete(engine, [histories[agent] for agent in group], greedy(agents.out))
            for agent, outcome in zip(group, answered, strict=True):
                reply = np.array(outcome.tokens, np.int32)
                histories[agent] = np.concatenate([histories[agent], reply])
            yield from answered


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
