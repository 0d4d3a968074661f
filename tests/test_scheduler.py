"""What the scheduler decides, step by step, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import torch

from radixsvc.cache import PrefixCache
from radixsvc.completion import SamplingParams
from radixsvc.request import Request
from radixsvc.scheduler import Scheduled, Scheduler, SchedulerConfig
from radixsvc.stream import TokenStream
from tiers.device import DeviceTier
from tiers.page import PageShape


def scheduler_with(*prompt_lens: int) -> Scheduler:
    """Requests that share nothing wait; pages hold 4 tokens."""
    device = DeviceTier(PageShape.uniform(1, 1, 1, 4, "float32"), 64, torch.device("cpu"))
    scheduler = Scheduler(PrefixCache(device, 4), SchedulerConfig(min_chunk=4))
    for i, length in enumerate(prompt_lens):
        stream = TokenStream(asyncio.get_running_loop())
        tokens = np.arange(length, dtype=np.int32) + 100 * i
        scheduler.add(Request(f"{i}", "a", tokens, SamplingParams(max_tokens=4), stream))
    return scheduler


def run(steps: Sequence[Scheduled]) -> list[int]:
    """The tokens of each request in a step, which is then under way."""
    for request, num_tokens in steps:
        end = request.num_computed + num_tokens
        request.launched(end, 0 if num_tokens == request.num_uncomputed else None)
    return [step.num_tokens for step in steps]


async def test_a_prompt_alone_may_take_a_long_step() -> None:
    scheduler = scheduler_with(70)
    assert run(scheduler.schedule(alone=50, shared=20)) == [48]  # whole pages
    assert run(scheduler.schedule(alone=50, shared=20)) == [22]


async def test_prompts_share_a_short_step_so_that_the_first_is_not_held_up() -> None:
    scheduler = scheduler_with(12, 12, 12)
    assert run(scheduler.schedule(alone=50, shared=20)) == [12, 8]
    assert run(scheduler.schedule(alone=50, shared=20)) == [1, 4, 12]


async def test_a_long_step_takes_nobody_else_along() -> None:
    scheduler = scheduler_with(30, 12)
    assert run(scheduler.schedule(alone=50, shared=20)) == [30]
    assert run(scheduler.schedule(alone=50, shared=20)) == [1, 12]
