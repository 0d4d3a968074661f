"""Replay traces or workloads against cache policies, with budgets of memory and no model.

Tells which share of prompt tokens each policy would have found where, how much prefill that
saves and what it makes of the time to first token, so that tier sizes can be chosen before
memory is bought. Requests run one after another; copies count in the time estimate only:

    TTFT = computed tokens / prefill rate + bytes from host / its bandwidth + the same for disk

The radix policies are this product's own tree, lease and tiers over pages without memory.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from radixsvc.bench.history import Prompt, trace_history, workload_history
from radixsvc.bench.policies import Linear, Optimum, Paged, Policy, Radix
from radixsvc.bench.report import format_rows, positive
from radixsvc.bench.workloads import WORKLOADS, add_workload_arguments, build_workload
from radixsvc.config import UNITS, Size
from radixsvc.errors import SetupError
from radixsvc.residency import TierPolicy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--policies", default=",".join(POLICIES), help="which to compare")
    add("--device", type=sizes, default="40GiB", help="device memory, or several: 16GiB,64GiB")
    add("--host", type=size, default="200GiB", help="host tier")
    add("--disk", type=size, default="1TiB", help="disk tier")
    add("--every-workload", action="store_true", help="all workloads, in one table")
    add("--bytes-per-token", type=size, default="128KiB", help="keys and values of all layers")
    add("--page-size", type=positive, default=16)
    add("--prefill-rate", type=float, default=10_000.0, help="tokens/s computed on one device")
    add("--host-bandwidth", type=size, default="20GB", help="host to device, a second")
    add("--disk-bandwidth", type=size, default="4GB", help="disk to device, a second")
    tiers = TierPolicy()
    add("--write", choices=("through", "back", "none"), default=tiers.write, help="to the host")
    add("--through-after", type=int, default=tiers.through_after, help="uses until it is written")
    add("--disk-after", type=int, default=tiers.disk_after, help="uses until disk takes it")
    add("--promote", choices=("cost", "always", "never"), default=tiers.promote)
    add("--concurrency", type=positive, default=8, help="sessions of a workload at once")
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


class Setting:
    """What policies are given: pages of memory on each tier, and what a token costs.

    `seconds` a token: of loading it from host, of loading it from disk, of computing it.
    """

    def __init__(self, args: argparse.Namespace, device: int) -> None:
        token: int = args.bytes_per_token
        self.page_size: int = args.page_size
        sizes = (device, args.host, args.disk)
        self.pages: list[int] = [size // (token * self.page_size) for size in sizes]
        bandwidths = (args.host_bandwidth, args.disk_bandwidth)
        self.seconds = [*(token / rate for rate in bandwidths), 1 / args.prefill_rate]
        self.tiers = TierPolicy(args.write, args.through_after, args.disk_after, args.promote)

    @property
    def device_tokens(self) -> int:
        return self.pages[0] * self.page_size

    @property
    def all_tokens(self) -> int:
        return sum(self.pages) * self.page_size


POLICIES: dict[str, Callable[[Setting, Sequence[Prompt]], Policy]] = {
    "none": lambda at, history: Linear(0),
    "linear": lambda at, history: Linear(at.device_tokens),
    "paged": lambda at, history: Paged(at.pages[0], at.page_size),
    "radix": lambda at, history: Radix([at.pages[0], 0, 0], at.page_size),
    "radix + tiers": lambda at, history: Radix(at.pages, at.page_size, at.seconds, at.tiers),
    "optimum": lambda at, history: Optimum(at.device_tokens, history),
    "optimum of all": lambda at, history: Optimum(at.all_tokens, history),
    "no limit": lambda at, history: Optimum(sum(p.total_len for p in history), history),
}


@dataclass(frozen=True)
class Result:
    """What a policy made of a history. Shares are of prompt tokens; times in seconds."""

    case: str
    policy: str
    hit: float
    device: float
    host: float
    disk: float
    later_hit: float  # of turns after a conversation's first
    saved_tokens: int
    too_long: int  # requests that do not fit on the device
    ttft_mean: float
    ttft_p50: float
    ttft_p95: float
    later_ttft_mean: float | None  # None where there are no later turns
    seconds: float  # the simulation took


def replay(case: str, name: str, history: Sequence[Prompt], setting: Setting) -> Result:
    policy = POLICIES[name](setting, history)
    started = time.perf_counter()
    rows = [policy.serve(prompt) for prompt in history]
    seconds = time.perf_counter() - started
    found = np.array([(r.device, r.host, r.disk, r.computed) for r in rows], np.int64)
    later = np.array([prompt.turn > 0 for prompt in history], np.bool_)
    ttft = found @ np.array([0.0, *setting.seconds])
    p50, p95 = np.percentile(ttft, (50, 95)).tolist()
    device, host, disk, computed = (found.sum(axis=0) / found.sum()).tolist()
    return Result(
        case,
        name,
        1 - computed,
        device,
        host,
        disk,
        later_hit=float(found[later, :3].sum() / max(1, found[later].sum())),
        saved_tokens=int(found[:, :3].sum()),
        too_long=sum(prompt.total_len > setting.device_tokens for prompt in history),
        ttft_mean=float(ttft.mean()),
        ttft_p50=p50,
        ttft_p95=p95,
        later_ttft_mean=float(ttft[later].mean()) if later.any() else None,
        seconds=seconds,
    )


def run(args: argparse.Namespace) -> None:
    names = args.policies.split(",")
    if unknown := [name for name in names if name not in POLICIES]:
        raise SetupError(f"--policies: {unknown[0]!r} is none of {', '.join(POLICIES)}", 2)
    several = len(args.device) > 1
    rows = []
    for label, history in histories(args):
        if not history:
            raise SetupError(f"{label}: there are no requests in it", 2)
        if not args.json:
            print(f"{label}: {describe_history(history)}")
        for device in args.device:
            case = f"{label}, {describe(device)}" if several else label
            setting = Setting(args, device)
            rows.append([replay(case, name, history, setting) for name in names])
    if args.json:
        print(json.dumps([asdict(result) for row in rows for result in row], indent=1))
        return
    device = "" if several else f"device {describe(args.device[0])}, "
    print(f"{device}host {describe(args.host)}, disk {describe(args.disk)}, "
          f"{describe(args.bytes_per_token)} a token, pages of {args.page_size}\n")  # fmt: skip
    if len(rows) == 1:
        print(result_table(rows[0]))
        return
    print(f"Prompt tokens found:\n\n{table(rows, lambda r: percent(r.hit))}")
    if args.every_workload:
        print(f"\nEstimated mean TTFT of later turns:\n\n{table(rows, later_ttft)}")


def histories(args: argparse.Namespace) -> Iterator[tuple[str, list[Prompt]]]:
    """Of the traces where some are named, else of the workload, or of all of them."""
    for path in map(Path, args.trace):
        yield path.stem, trace_history(path, args.limit)
    if not args.trace:
        for name in WORKLOADS if args.every_workload else [args.workload]:
            args.workload = name
            sessions = build_workload(args)
            yield name, workload_history(sessions, args.concurrency, args.rotate)


def describe(num_bytes: int) -> str:
    unit = next(u for u in ("TiB", "GiB", "MiB", "KiB", "B") if num_bytes >= UNITS[u.upper()])
    return f"{num_bytes / UNITS[unit.upper()]:.4g} {unit}"


def describe_history(history: Sequence[Prompt]) -> str:
    return (
        f"{len(history):,} requests, {sum(p.prompt_len for p in history):,} prompt tokens, "
        f"{1 + max(p.session for p in history):,} conversations"
    )


def result_table(results: Sequence[Result]) -> str:
    rows: list[tuple[str, ...]] = [
        ("policy", "hit", "device", "host", "disk", "later turns", "tokens saved",
         "TTFT mean", "p50", "p95", "later mean", "too long", "run in")
    ]  # fmt: skip
    for r in results:
        shares = map(percent, (r.hit, r.device, r.host, r.disk, r.later_hit))
        times = [f"{1000 * t:,.0f} ms" for t in (r.ttft_mean, r.ttft_p50, r.ttft_p95)]
        saved, seconds = f"{r.saved_tokens:,}", f"{r.seconds:.1f} s"
        rows.append((r.policy, *shares, saved, *times, later_ttft(r), str(r.too_long), seconds))
    return format_rows(rows)


def table(rows: Sequence[Sequence[Result]], cell: Callable[[Result], str]) -> str:
    """A case a row, a policy a column."""
    head = ("", *(r.policy for r in rows[0]))
    return format_rows([head, *((row[0].case, *map(cell, row)) for row in rows)])


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def later_ttft(result: Result) -> str:
    seconds = result.later_ttft_mean
    return "-" if seconds is None else f"{1000 * seconds:,.0f} ms"
