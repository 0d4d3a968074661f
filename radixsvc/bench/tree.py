"""The radix tree alone: single operations, stalls, metadata, and traces replayed with no model.

One thread, collector on, tokens packed beforehand. "flat" is one inner node of 256 tokens with
leaves of 128 tokens each. Operations are what a request does: a match collects the page ids, an
insert locks, adds and unlocks, an eviction lets a leaf's pages go. Each figure is given as the
minimum, against the target, and as the median.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt

from radixsvc.bench.history import trace_history
from radixsvc.bench.policies import Radix
from radixsvc.bench.report import Metric, positive
from radixsvc.bench.traces import BLOCK_TOKENS
from radixsvc.node import DEVICE
from radixsvc.tree import RadixTree

NAMESPACE = "bench"
LEAF_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page-size", type=positive, nargs="*", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--mixed", type=int, default=1_000_000, help="operations for stalls")
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="request traces, JSONL")
    parser.add_argument("--trace-pages", type=int, default=1000 * BLOCK_TOKENS // 16)


def run(args: argparse.Namespace) -> list[Metric]:
    metrics: list[Metric] = []
    for page_size in args.page_size:
        metrics += operations(page_size, args.rounds)
        if args.mixed:
            metrics.append(slowest(page_size, args.mixed))
    metrics.append(metadata(16))
    for path in args.trace:
        metrics += replay(path, args.trace_pages)
    return metrics


def operations(page_size: int, rounds: int) -> list[Metric]:
    """Every case of the table at one page size."""
    metrics: list[Metric] = []

    def add(name: str, seconds: list[float], target_us: float) -> None:
        name = f"page {page_size}: {name}"
        metrics.append(Metric(name, min(seconds) * 1e6, "us", target_us))
        metrics.append(Metric(f"{name}, median", statistics.median(seconds) * 1e6, "us"))

    stem = random_tokens(0, 32_768)
    tokens = bytes(bytearray(stem))  # a prompt is never the very memory that the tree holds
    find = partial(Forest.find, tokens=tokens)
    tree = Forest(page_size)
    tree.put(stem)
    add("match 32,768 tokens, 1 node", timed(partial(find, tree), rounds), 25)
    tree = Forest(page_size)
    for i in range(1, 17):  # a branch off every 2,048 tokens
        tree.put(stem[: i * 8192] + random_tokens(i, page_size))
    add("match 32,768 tokens, 16 nodes", timed(partial(find, tree), rounds), 40)
    add("last of 200 turns of 100 tokens", chat(page_size, rounds), 30)
    add("insert 4,096 tokens, 2,048 shared", inserts(page_size, rounds), 25)
    for gone, leaves, times, target in (
        (1, 10_000, rounds, 5), (1, 100_000, rounds, 6), (1000, 10_000, 5, 3000)
    ):  # fmt: skip
        drop = partial(Forest.flat(page_size, leaves).drop, gone * LEAF_TOKENS // page_size)
        add(f"evict {gone:,} of {leaves:,} leaves", timed(drop, times), target)
    return metrics


class Forest(RadixTree):
    """A tree that hands out page ids by counting, so that nothing but the tree is measured."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self._ids = count()

    @classmethod
    def flat(cls, page_size: int, leaves: int) -> Forest:
        tree = cls(page_size)
        stem = random_tokens(1, 256)
        for i in range(leaves):
            tree.put(stem + random_tokens(i + 2, LEAF_TOKENS))
        return tree

    def put(self, tokens: bytes, pages: bytes | None = None) -> None:
        node = self.lock(self.root(NAMESPACE), 0)
        self.unlock(self.insert(node, tokens, pages or self.pages(tokens)).node)

    def pages(self, tokens: bytes) -> bytes:
        n = -(-len(tokens) // self.page_bytes)
        first = next(self._ids)
        return np.arange(first * n, first * n + n, dtype=np.int32).tobytes()

    def find(self, tokens: bytes) -> bytes:
        return self.device_pages(self.match(NAMESPACE, tokens).node)

    def drop(self, num_pages: int) -> None:
        self.evict(num_pages)
        self.take_freed(DEVICE)


def chat(page_size: int, rounds: int) -> list[float]:
    """The match of the last turn, after 200 turns in which the conversation grew."""
    tree = Forest(page_size)
    tokens = b""
    for turn in range(200):
        tokens += random_tokens(turn, 100)
        found = tree.match(NAMESPACE, tokens)
        node = tree.lock(found.node if found.length else tree.root(NAMESPACE), found.used)
        rest = tokens[found.length * 4 :]
        tree.unlock(tree.insert(node, rest, tree.pages(rest)).node)
    if tree.num_nodes != 1:
        raise RuntimeError(f"a conversation became {tree.num_nodes} nodes")
    return timed(partial(tree.find, bytes(bytearray(tokens))), rounds)


def inserts(page_size: int, rounds: int) -> list[float]:
    """Prompts that part from the same 4,096 tokens in the middle, each in a fresh tree."""
    first, second = random_tokens(0, 4096), random_tokens(1, 2048)
    prompt = first[:8192] + second
    seconds = []
    for _ in range(rounds):
        tree = Forest(page_size)
        tree.put(first)
        pages = tree.pages(prompt)
        seconds += timed(partial(tree.put, prompt, pages), 1)
    return seconds


def slowest(page_size: int, operations: int) -> Metric:
    """The slowest of many operations on 50,000 leaves, in CPU time of the thread.

    The same operations run twice on equal trees and each counts with its faster run, so that a
    stall of the machine is not taken for one of the tree.
    """
    worst = np.minimum(mixed(page_size, operations), mixed(page_size, operations)).max()
    name = f"page {page_size}: slowest of {operations:,} operations, CPU time"
    return Metric(name, float(worst) / 1e6, "ms", 2)


def mixed(page_size: int, operations: int) -> npt.NDArray[np.int64]:
    """Nanoseconds of each of many operations: half matches, a quarter locks, a quarter inserts."""
    tree = Forest.flat(page_size, 50_000)
    rng = random.Random(0)
    stem = random_tokens(1, 256)
    recent = [stem + random_tokens(i + 2, LEAF_TOKENS) for i in range(40_000, 50_000)]
    spans = np.zeros(operations, np.int64)
    clock = time.thread_time_ns
    for i in range(operations):
        kind = rng.random()
        at = rng.randrange(len(recent))
        if kind < 0.5:
            started = clock()
            tree.find(recent[at])
        elif kind < 0.75:
            started = clock()
            found = tree.match(NAMESPACE, recent[at])
            tree.unlock(tree.lock(found.node, found.used))
        else:
            recent[at] = recent[at][: rng.randrange(1024, 1536, 64)] + rng.randbytes(512)
            ids = tree.pages(recent[at])
            started = clock()
            tree.put(recent[at], ids)
            if tree.num_nodes > 50_000:
                tree.drop(LEAF_TOKENS // page_size)
        spans[i] = clock() - started
    return spans


def metadata(page_size: int) -> Metric:
    """Bytes allocated for 10,000 flat leaves, tokens and page ids included."""
    Forest.flat(page_size, 1)  # what is imported or cached at first use
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tree = Forest.flat(page_size, 10_000)
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    cached = tree.resident(DEVICE) * page_size
    return Metric(f"page {page_size}: metadata a cached token", size / cached, "bytes", 6)


def replay(path: Path, num_pages: int, page_size: int = 16) -> list[Metric]:
    """Leases for every request of a trace, as fast as they go."""
    radix = Radix((num_pages, 0, 0), page_size)
    history = trace_history(path)
    started = time.perf_counter()
    computed = sum(radix.serve(prompt).computed for prompt in history)
    seconds = time.perf_counter() - started
    share = 1 - computed / sum(prompt.prompt_len for prompt in history)
    name = f"{path.stem}, {num_pages:,} pages of {page_size}"
    return [
        Metric(f"{name}: requests", len(history) / seconds, "/s", None, True),
        Metric(f"{name}: tokens from the cache", 100 * share, "%", None, True),
    ]


def random_tokens(seed: int, n: int) -> bytes:
    """`n` token ids, packed."""
    return np.random.default_rng(seed).integers(0, 128_000, n, dtype=np.int32).tobytes()


def timed(operation: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each of `rounds` calls."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        operation()
        seconds.append(time.perf_counter() - started)
    return seconds
