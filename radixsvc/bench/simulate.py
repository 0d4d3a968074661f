"""Replay a trace or a workload against cache policies, with budgets of memory and no model.

Tells which share of prompt tokens each policy would have found where, how much prefill that
saves and what it makes of the time to first token, so that tier sizes can be chosen before
memory is bought. Requests run one after another; copies count in the time estimate only:

    TTFT = computed tokens / prefill rate + bytes from host / its bandwidth + the same for disk

The radix policies are this product's own tree, lease and tiers over pages without memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from radixsvc.bench.history import Prompt, trace_history, workload_history
from radixsvc.bench.policies import Linear, NoCache, Optimum, Paged, Policy, Radix, tiered
from radixsvc.bench.report import Metric, format_rows
from radixsvc.bench.workloads import WORKLOADS, add_workload_arguments, build_workload
from radixsvc.config import Size
from radixsvc.errors import SetupError
from radixsvc.residency import TierPolicy

TTFT_COLUMNS = ("mean", "p50", "p95")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--policies", default=",".join(POLICIES), help="which to compare")
    add("--device", type=size, default="40GiB", help="device memory for keys and values")
    add("--host", type=size, default="200GiB", help="host tier")
    add("--disk", type=size, default="1TiB", help="disk tier")
    add("--every-workload", action="store_true", help="hit rates of all workloads, in one table")
    add("--curve", metavar="SIZES", type=sizes, default=[], help="device sizes, e.g. 20GiB,40GiB")
    add("--bytes-per-token", type=size, default="128KiB", help="keys and values of all layers")
    add("--page-size", type=int, default=16)
    add("--prefill-rate", type=float, default=10_000.0, help="tokens/s computed on one device")
    add("--host-bandwidth", type=size, default="20GB", help="host to device, a second")
    add("--disk-bandwidth", type=size, default="4GB", help="disk to device, a second")
    tiers = TierPolicy()
    add("--write", choices=("through", "back", "none"), default=tiers.write, help="to the host")
    add("--through-after", type=int, default=tiers.through_after, help="uses until it is written")
    add("--disk-after", type=int, default=tiers.disk_after, help="uses until disk takes it")
    add("--promote", choices=("cost", "always", "never"), default=tiers.promote)
    add("--concurrency", type=int, default=8, help="sessions of a workload at once")
    add("--json", action="store_true", help="for programs")
    add_workload_arguments(parser)


def size(text: str) -> int:
    """Bytes of "24GiB"."""
    try:
        if "%" in text:
            raise ValueError("a share of what? write 24GiB or 500MB")
        return Size(text).resolve(0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def sizes(text: str) -> list[int]:
    return [size(part) for part in text.split(",")]


@dataclass(frozen=True)
class Setting:
    """What policies are given: pages of memory on each tier, and what a token costs.

    `seconds` a token: of loading it from host, of loading it from disk, of computing it.
    """

    pages: tuple[int, int, int]
    page_size: int
    seconds: tuple[float, float, float]
    tiers: TierPolicy

    @property
    def device_tokens(self) -> int:
        return self.pages[0] * self.page_size

    @property
    def all_tokens(self) -> int:
        return sum(self.pages) * self.page_size


POLICIES: dict[str, Callable[[Setting, Sequence[Prompt]], Policy]] = {
    "none": lambda at, history: NoCache(),
    "linear": lambda at, history: Linear(at.device_tokens),
    "paged": lambda at, history: Paged(at.pages[0], at.page_size),
    "radix": lambda at, history: Radix(at.pages[0], at.page_size),
    "tiers": lambda at, history: tiered(at.pages, at.page_size, at.seconds, at.tiers),
    "optimum": lambda at, history: Optimum(at.device_tokens, history),
    "optimum of all": lambda at, history: Optimum(at.all_tokens, history),
}


@dataclass(frozen=True)
class Result:
    """What a policy made of a history. Shares are of prompt tokens; times in seconds."""

    policy: str
    hit: float
    device: float
    host: float
    disk: float
    later_hit: float  # of turns after a conversation's first
    saved_tokens: int
    too_long: int  # requests that do not fit on the device
    ttft: dict[str, float]
    later_ttft: dict[str, float]
    seconds: float  # the simulation took


def replay(name: str, history: Sequence[Prompt], setting: Setting) -> Result:
    policy = POLICIES[name](setting, history)
    started = time.perf_counter()
    found = np.array([_as_row(policy, prompt) for prompt in history], np.int64).reshape(-1, 4)
    seconds = time.perf_counter() - started
    later = np.array([prompt.turn > 0 for prompt in history], np.bool_)
    ttft = found @ np.array([0.0, *setting.seconds])
    total = max(1, int(found.sum()))
    device, host, disk, computed = (int(n) for n in found.sum(axis=0))
    return Result(
        policy=name,
        hit=1 - computed / total,
        device=device / total,
        host=host / total,
        disk=disk / total,
        later_hit=float(found[later, :3].sum() / max(1, found[later].sum())),
        saved_tokens=total - computed,
        too_long=sum(prompt.total_len > setting.device_tokens for prompt in history),
        ttft=_quantiles(ttft),
        later_ttft=_quantiles(ttft[later]),
        seconds=seconds,
    )


def _as_row(policy: Policy, prompt: Prompt) -> tuple[int, int, int, int]:
    found = policy.serve(prompt)
    return found.device, found.host, found.disk, found.computed


def _quantiles(seconds: np.ndarray) -> dict[str, float]:
    if not len(seconds):
        return dict.fromkeys(TTFT_COLUMNS, 0.0)
    p50, p95 = np.percentile(seconds, (50, 95))
    return {"mean": float(seconds.mean()), "p50": float(p50), "p95": float(p95)}


class Case(NamedTuple):
    """One row of a table: a history on a device of so many bytes."""

    label: str
    history: Sequence[Prompt]
    device: int


def run(args: argparse.Namespace) -> int:
    names = args.policies.split(",")
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise SetupError(f"--policies: {unknown[0]!r} is none of {', '.join(POLICIES)}", 2)
    cases = build_cases(args)
    rows = [(case, [simulate(name, case, args) for name in names]) for case in cases]
    if args.json:
        json.dump([asdict(m) for m in metrics(rows)], sys.stdout, indent=1)
        print()
    else:
        print(heading(args, cases))
        print(result_table(rows[0][1]) if len(rows) == 1 else hit_table(rows))
    return 0


def build_cases(args: argparse.Namespace) -> list[Case]:
    devices = args.curve or [args.device]
    if not args.every_workload:
        history = load_history(args)
        return [Case(describe(device), history, device) for device in devices]
    cases = []
    for name in WORKLOADS:
        if name != "trace":
            args.workload, args.trace = name, None
            cases.append(Case(name, load_history(args), args.device))
    return cases


def simulate(name: str, case: Case, args: argparse.Namespace) -> Result:
    page_bytes = args.page_size * args.bytes_per_token
    if not args.json and sys.stderr.isatty():
        print(f"{case.label}: {name} ...", end="\x1b[K\r", file=sys.stderr, flush=True)
    setting = Setting(
        (case.device // page_bytes, args.host // page_bytes, args.disk // page_bytes),
        args.page_size,
        (
            args.bytes_per_token / args.host_bandwidth,
            args.bytes_per_token / args.disk_bandwidth,
            1 / args.prefill_rate,
        ),
        TierPolicy(args.write, args.through_after, args.disk_after, args.promote),
    )
    return replay(name, case.history, setting)


def load_history(args: argparse.Namespace) -> list[Prompt]:
    """Of the trace where one is named, else of the workload."""
    try:
        if args.trace:
            return trace_history(Path(args.trace), args.limit)
        return workload_history(build_workload(args), args.concurrency)
    except (OSError, ValueError) as error:
        raise SetupError(str(error), 2) from error


def describe(num_bytes: int) -> str:
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes} B"


def heading(args: argparse.Namespace, cases: Sequence[Case]) -> str:
    lines = []
    if not args.every_workload:
        history = cases[0].history
        total = sum(prompt.prompt_len for prompt in history)
        lines.append(
            f"{args.trace or args.workload}: {len(history):,} requests, {total:,} prompt tokens, "
            f"{1 + max((p.session for p in history), default=-1):,} conversations"
        )
    memory = "" if args.curve else f"device {describe(args.device)}, "
    lines.append(
        f"{memory}host {describe(args.host)}, disk {describe(args.disk)}, "
        f"{describe(args.bytes_per_token)} a token, pages of {args.page_size}\n"
    )
    return "\n".join(lines)


def result_table(results: Sequence[Result]) -> str:
    rows: list[tuple[str, ...]] = [
        ("policy", "hit", "device", "host", "disk", "later turns", "tokens saved",
         "TTFT mean", "p50", "p95", "later mean", "too long", "run in")
    ]  # fmt: skip
    for r in results:
        shares = [f"{100 * s:.1f}%" for s in (r.hit, r.device, r.host, r.disk, r.later_hit)]
        times = [f"{1000 * r.ttft[name]:,.0f} ms" for name in TTFT_COLUMNS]
        times.append(f"{1000 * r.later_ttft['mean']:,.0f} ms")
        saved, seconds = f"{r.saved_tokens:,}", f"{r.seconds:.1f} s"
        rows.append((r.policy, *shares, saved, *times, str(r.too_long), seconds))
    return format_rows(rows)


Rows = Sequence[tuple[Case, Sequence[Result]]]


def hit_table(rows: Rows) -> str:
    """Hit rates, a case a row."""
    cells: list[tuple[str, ...]] = [("", *(r.policy for r in rows[0][1]))]
    cells += [(c.label, *(f"{100 * r.hit:.2f}%" for r in results)) for c, results in rows]
    return format_rows(cells)


def metrics(rows: Rows) -> list[Metric]:
    found = []
    for case, results in rows:
        for r in results:
            name = f"{case.label}: {r.policy}: "
            found += [
                Metric(name + "hit rate", 100 * r.hit, "%", None, True),
                Metric(name + "hit rate, later turns", 100 * r.later_hit, "%", None, True),
                *(
                    Metric(name + f"found on {tier}", 100 * getattr(r, tier), "%", None, True)
                    for tier in ("device", "host", "disk")
                ),
                Metric(name + "prefill tokens saved", r.saved_tokens, "tokens", None, True),
                *(Metric(f"{name}TTFT {q}", 1000 * t, "ms") for q, t in r.ttft.items()),
                *(
                    Metric(f"{name}TTFT {q}, later turns", 1000 * t, "ms")
                    for q, t in r.later_ttft.items()
                ),
                Metric(name + "simulated in", r.seconds, "s"),
            ]
    return found
