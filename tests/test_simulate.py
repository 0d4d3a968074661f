"""Cache policies on small histories whose hits can be counted by hand."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixsvc.bench import simulate, workloads
from radixsvc.bench.history import Prompt, trace_history, workload_history
from radixsvc.bench.policies import Linear, Optimum, Paged, Policy, Radix
from radixsvc.cli import main
from radixsvc.residency import TierPolicy


def prompts(*paths: str) -> list[Prompt]:
    """Requests spelled as letters, a token each; equal up to a place where the letters are.

    The first letter names the conversation.
    """
    ids: dict[str, int] = {}
    history = []
    for path in paths:
        chain = [ids.setdefault(path[: i + 1], len(ids)) for i in range(len(path))]
        blocks = np.array(chain, np.int32)
        history.append(Prompt(ord(path[0]), 0, blocks, 1, len(path), len(path)))
    return history


def hits(policy: Policy, history: Sequence[Prompt]) -> list[int]:
    found = [policy.serve(prompt) for prompt in history]
    for sources, prompt in zip(found, history, strict=True):
        assert sources.cached + sources.computed == prompt.prompt_len
        assert sources.computed >= 1
    return [sources.cached for sources in found]


def test_linear_reuses_within_a_conversation_only() -> None:
    history = prompts("abcd", "abcdef", "xbcd", "abxx", "abcdef")
    assert hits(Linear(0), history) == [0] * 5
    assert hits(Linear(100), history) == [0, 4, 0, 2, 2]


def test_linear_drops_whole_buffers() -> None:
    history = prompts("aaaa", "bbbb", "aaaaa", "cccc", "bbbbb")
    assert hits(Linear(9), history) == [0, 0, 4, 0, 0]


def test_paged_hits_whole_pages_of_any_conversation() -> None:
    history = prompts("abcdefg", "abcdefg", "abcdxyz", "abxx")
    assert hits(Paged(100, 2), history) == [0, 6, 4, 2]
    assert hits(Paged(100, 4), history) == [0, 4, 4, 0]


def test_paged_evicts_tails_first() -> None:
    """3 pages of 2: "xy" takes the room of the tail "cd", "ab" stays."""
    history = prompts("abcd", "xyz", "abcd")
    assert hits(Paged(3, 2), history) == [0, 0, 2]


@pytest.mark.parametrize("policy", [Linear(4), Paged(2, 2), Optimum(4, prompts("abcdef"))])
def test_a_prompt_too_long_for_the_device_leaves_no_trace(policy: Policy) -> None:
    assert hits(policy, prompts("abcdef", "abcdef")) == [0, 0]


def test_the_last_token_is_always_computed() -> None:
    history = prompts("abcd", "abcd")
    assert hits(Linear(100), history) == [0, 3]
    assert hits(Paged(100, 2), history) == [0, 2]
    assert hits(Optimum(100, history), history) == [0, 3]


def best_by_trying_everything(history: Sequence[Prompt], num_tokens: int) -> int:
    """The most prefix tokens that can hit, over all choices of what to keep at each request."""
    states = {frozenset[int](): 0}
    for prompt in history:
        blocks = prompt.blocks.tolist()
        after: dict[frozenset[int], int] = {}
        for kept, score in states.items():
            hit = next((i for i, b in enumerate(blocks) if b not in kept), len(blocks))
            score += min(hit, prompt.prompt_len - 1)
            others = kept - set(blocks)
            for choice in combinations(others, min(len(others), num_tokens - len(blocks))):
                key = frozenset(choice) | set(blocks)
                after[key] = max(after.get(key, 0), score)
        states = after
    return max(states.values())


paths = st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(paths, st.integers(3, 5))
def test_the_optimum_is_what_trying_everything_finds(spelled: list[str], num_tokens: int) -> None:
    history = prompts(*spelled)
    best = sum(hits(Optimum(num_tokens, history), history))
    assert best == best_by_trying_everything(history, num_tokens)


spelled_out = st.lists(st.text("abc", min_size=1, max_size=8), min_size=1, max_size=30)
WRITES = [TierPolicy(write=write, disk_after=1) for write in ("back", "through")]


@pytest.mark.parametrize(
    ("make", "num_tokens"),
    [
        (lambda: Linear(12), 12),
        (lambda: Paged(12, 1), 12),
        (lambda: Paged(6, 2), 12),
        (lambda: Radix((6, 0, 0), 2), 12),
        (lambda: Radix((6, 4, 6), 2, (0.0, 0.0, 1.0), WRITES[0]), 32),
        (lambda: Radix((6, 4, 6), 2, (0.0, 0.0, 1.0), WRITES[1]), 32),
    ],
)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(spelled=spelled_out)
def test_no_policy_beats_the_optimum(
    make: Callable[[], Policy], num_tokens: int, spelled: list[str]
) -> None:
    history = prompts(*spelled)
    policy = make()
    assert sum(hits(policy, history)) <= sum(hits(Optimum(num_tokens, history), history))
    if isinstance(policy, Radix):
        policy.cache.check()


def write_trace(path: Path, *requests: tuple[int, list[int]]) -> Path:
    lines = [
        {"timestamp": 1000 * i, "input_length": n, "output_length": 5, "hash_ids": ids}
        for i, (n, ids) in enumerate(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trace_becomes_conversations(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "t.jsonl",
        (1000, [0, 1]),
        (1100, [0, 2, 3]),  # begins with the block [0], and so goes on from the first
        (1600, [0, 2, 4, 5]),
        (700, [6, 7]),
    )
    history = trace_history(path)
    assert [p.session for p in history] == [0, 0, 0, 1]
    assert [p.turn for p in history] == [0, 1, 2, 0]
    assert history[0].tokens().tolist() == list(range(1000))
    assert hits(Linear(10_000), history) == [0, 512, 1024, 0]
    assert hits(Paged(1000, 16), history) == [0, 512, 1024, 0]


def test_a_workload_becomes_a_history() -> None:
    parser = argparse.ArgumentParser()
    workloads.add_workload_arguments(parser)
    args = parser.parse_args(["--sessions", "2", "--turns", "3", "--out", "5"])
    history = workload_history(workloads.build_workload(args), concurrency=2)
    assert [(p.session, p.turn) for p in history] == [(i, t) for t in range(3) for i in range(2)]
    later = history[2]
    found = hits(Linear(100_000), history)
    assert found[2] == history[0].total_len < later.prompt_len  # with the reply of the turn before
    both_begin_alike = len(["<system>", "Session"])
    assert sum(hits(Optimum(100_000, history), history)) == sum(found) + both_begin_alike


@pytest.mark.parametrize("page_size", [1, 2, 4])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(spelled=spelled_out)
def test_radix_finds_every_token_where_all_fits(page_size: int, spelled: list[str]) -> None:
    history = prompts(*spelled)
    radix = Radix((400 // page_size, 0, 0), page_size)
    assert hits(radix, history) == hits(Optimum(400, history), history)
    radix.cache.check()


def test_tiers_bring_back_what_the_device_evicted() -> None:
    """Three prompts of 4 pages in turn, 6 pages on the device: only a lower tier can hit."""
    history = prompts(*["aaaaaaaa", "bbbbbbbb", "cccccccc"] * 3)
    assert sum(hits(Radix((6, 0, 0), 2), history)) < sum(hits(Optimum(12, history), history))
    cheap, dear = (0.1, 0.1, 1.0), (2.0, 2.0, 1.0)
    host = Radix((6, 20, 0), 2, cheap, TierPolicy())
    found = [host.serve(prompt) for prompt in history]
    assert [(f.device + f.host, f.disk) for f in found[3:]] == [(7, 0)] * 6
    disk = Radix((6, 0, 20), 2, cheap, TierPolicy(disk_after=1))
    assert any(disk.serve(prompt).disk for prompt in history)
    slow = Radix((6, 20, 0), 2, dear, TierPolicy())
    assert hits(slow, history) == hits(Radix((6, 0, 0), 2), history)


def test_a_host_smaller_than_what_is_demoted_takes_the_front_of_it() -> None:
    """4 pages leave the device for a host of 2: the two nearest to the root are kept."""
    history = prompts("aaaaaaaa", "bbbbbbbbbbbb", "aaaaaaaa")
    small = Radix((6, 2, 0), 2, (0.1, 0.1, 1.0), TierPolicy())
    assert hits(small, history) == [0, 0, 4]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """The options that name a trace of twelve requests, in which three take turns."""
    requests = [(1500, [0, 10 + i % 3, 20 + i % 3]) for i in range(12)]
    return f"--trace={write_trace(tmp_path / 't.jsonl', *requests)}"


def test_the_simulation_prints_every_policy(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", trace]) == 0
    printed = capsys.readouterr().out
    assert "12 requests, 18,000 prompt tokens" in printed
    cells = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines()]
    hit = {row[1]: row[2] for row in cells if len(row) > 2}
    assert set(simulate.POLICIES) <= set(hit)
    assert hit["none"] == "0.0%"
    assert hit["radix"] == hit["optimum"] == hit["no limit"] != "0.0%"


def test_a_curve_rises_with_memory(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "2MiB,200MiB,2GiB", "--json", "--policies", "radix"]
    assert main(["simulate", trace, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [r["case"] for r in found] == ["t, 2 MiB", "t, 200 MiB", "t, 2 GiB"]
    curve = [r["hit"] for r in found]
    assert curve[0] == 0 < curve[2]
    assert curve == sorted(curve)
    assert found[0]["ttft_mean"] == pytest.approx(0.15)  # 1,500 at 10,000 a second


def test_every_workload_has_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--every-workload", "--sessions", "2", "--groups", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[1] for line in lines if re.match(r"\| [a-z]", line)]
    assert rows == [*workloads.WORKLOADS] * 2
