"""The engine under load, cancels and faults, with a model whose answers are known."""

from __future__ import annotations

import asyncio
import random
import time

import known_model
import numpy as np
import pytest
from known_model import EOS, EngineUnderTest, Gate, expected

from radixsvc.completion import FinishReason
from radixsvc.engine import EngineConfig
from radixsvc.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    QueueFull,
    ServiceError,
    SlowReader,
)
from radixsvc.request import State
from radixsvc.scheduler import SchedulerConfig
from tiers.page import InvariantError


@pytest.fixture(autouse=True, params=[False, True], ids=["apart", "overlapped"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_model, "OVERLAP", request.param)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 97, length).tolist()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 50])
async def test_an_answer_is_the_same_cold_and_cached(length: int) -> None:
    """A prompt cached in full still yields its logits: the last token is always computed."""
    prompt = prompt_of(length)
    with EngineUnderTest(64) as t:
        for _ in range(3):
            tokens, end = await t.ask(prompt, max_tokens=6)
            assert tokens == expected(prompt, 6)
            assert end.reason is FinishReason.LENGTH
        assert end.usage.sources.device == length - 1
        assert end.usage.sources.computed == 1
        await t.settled()
        t.check()


async def test_second_turn_reuses_the_first_and_its_reply() -> None:
    with EngineUnderTest(64) as t:
        first = prompt_of(21)
        reply, _ = await t.ask(first, max_tokens=9)
        second = first + reply + prompt_of(5, seed=1)
        tokens, end = await t.ask(second, max_tokens=4)
        assert tokens == expected(second, 4)
        assert end.usage.sources.device == 21 + 9 - 1  # the last sampled token was never run


async def test_many_at_once_are_each_right() -> None:
    with EngineUnderTest(512) as t:
        prompts = [prompt_of(5 + 3 * i, seed=i) for i in range(40)]
        answers = await asyncio.gather(*(t.ask(p, max_tokens=10) for p in prompts))
        for prompt, (tokens, _) in zip(prompts, answers, strict=True):
            assert tokens == expected(prompt, 10)
        assert max(t.model.step_sizes) > 8
        await t.settled()
        t.check()


async def test_eight_equal_prompts_at_once_are_computed_once() -> None:
    with EngineUnderTest(512) as t:
        prompt = prompt_of(400)
        before = t.model.num_computed
        answers = await asyncio.gather(*(t.ask(prompt, max_tokens=1) for _ in range(8)))
        assert t.model.num_computed - before <= 400 + 8
        computed = sum(end.usage.sources.computed for _, end in answers)
        assert computed <= 1.1 * 400


async def test_a_long_prompt_runs_in_chunks_beside_decoding_ones() -> None:
    config = EngineConfig(scheduler=SchedulerConfig(min_chunk=8, max_chunk=16))
    with EngineUnderTest(512, config=config) as t:
        short = t.submit(prompt_of(4), max_tokens=60)
        long = t.submit(prompt_of(300, seed=1), max_tokens=2)
        tokens, _ = await t.read(long)
        assert tokens == expected(prompt_of(300, seed=1), 2)
        assert len(short.output) > 10  # decoding went on between the chunks
        assert (await t.read(short))[0] == expected(prompt_of(4), 60)


async def test_a_pool_too_small_for_all_preempts_and_still_answers_right() -> None:
    with EngineUnderTest(num_pages=12) as t:  # 48 tokens for 6 x (8 + 20)
        prompts = [prompt_of(8, seed=i) for i in range(6)]
        answers = await asyncio.wait_for(
            asyncio.gather(*(t.ask(p, max_tokens=20) for p in prompts)), 30
        )
        for prompt, (tokens, end) in zip(prompts, answers, strict=True):
            assert tokens == expected(prompt, 20)
            sources = end.usage.sources
            assert sources.cached + sources.computed == len(prompt)
        assert t.engine.stats().preemptions > 0
        await t.settled()
        t.check()


async def test_what_can_never_fit_is_refused_at_once() -> None:
    with EngineUnderTest(num_pages=4) as t:
        with pytest.raises(ContextLengthExceeded, match="holds 16"):
            t.submit(prompt_of(10), max_tokens=7)
        with pytest.raises(ContextLengthExceeded, match="empty"):
            t.submit([])
        tokens, _ = await t.ask(prompt_of(10), max_tokens=6)
        assert tokens == expected(prompt_of(10), 6)


async def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    config = EngineConfig(scheduler=SchedulerConfig(max_running=1, max_waiting=1))
    with EngineUnderTest(64, config=config) as t:
        gate = t.model.before_step = Gate()
        held = [t.submit(prompt_of(4)) for _ in range(2)]
        with pytest.raises(QueueFull) as refused:
            t.submit(prompt_of(4))
        assert refused.value.headers["retry-after"]
        gate.open()
        for request in held:
            await t.read(request)


async def test_cancel_frees_pages_in_every_state() -> None:
    config = EngineConfig(scheduler=SchedulerConfig(max_running=2, min_chunk=8, max_chunk=8))
    with EngineUnderTest(256, config=config) as t:
        decoding = t.submit(prompt_of(4), max_tokens=400)
        await anext(aiter(decoding.stream))
        prefilling = t.submit(prompt_of(500, seed=1))
        waiting = t.submit(prompt_of(8, seed=2))
        for request in (waiting, prefilling, decoding):
            t.engine.cancel(request.id)
            t.engine.cancel(request.id)
            _, end = await t.read(request)
            assert end.reason is FinishReason.CANCELLED
        t.engine.cancel("never heard of")
        await t.settled()
        t.check()


async def test_a_thousand_requests_with_random_ends_conserve_pages_and_statistics() -> None:
    """Cancels at any moment, stop tokens, log-probabilities beside greedy ones, too few pages."""
    rng = random.Random(5)
    prompt_tokens = generated = 0
    with EngineUnderTest(num_pages=60) as t:

        async def one(i: int) -> None:
            nonlocal prompt_tokens, generated
            prompt = prompt_of(rng.randrange(1, 40), seed=i % 9)
            stops = frozenset(rng.choices(range(1, 97), k=rng.choice([0, 4])))
            request = t.submit(
                prompt,
                max_tokens=rng.randrange(1, 30),
                stop_token_ids=stops,
                top_logprobs=0 if i % 7 == 0 else None,
            )
            if rng.random() < 0.4:
                await asyncio.sleep(rng.random() * 0.02)
                t.engine.cancel(request.id)
            tokens, end = await t.read(request)
            assert tokens == expected(prompt, len(tokens))
            assert not stops & set(tokens)
            assert end.usage.completion_tokens == len(request.output)
            if request.output:
                assert end.usage.sources.cached + end.usage.sources.computed == len(prompt)
                prompt_tokens += len(prompt)
                generated += len(request.output)

        for start in range(0, 1000, 50):
            await asyncio.gather(*(one(i) for i in range(start, start + 50)))
        await t.settled()
        t.check()
        stats = t.engine.stats()
        assert sum(stats.finished.values()) == 1000
        assert stats.generated_tokens == generated
        assert stats.sources.cached + stats.sources.computed == prompt_tokens


async def test_totals_conserve_the_prompt_tokens_they_count() -> None:
    with EngineUnderTest(num_pages=40) as t:
        prompts = [prompt_of(5 + i % 30, seed=i % 4) for i in range(60)]
        await asyncio.gather(*(t.ask(p, max_tokens=5) for p in prompts))
        await t.settled()
        stats = t.engine.stats()
        assert stats.sources.cached + stats.sources.computed == sum(map(len, prompts))
        # Leases that were only tried for, while there was no room, are not counted as used.
        used = t.engine.call(lambda cache: cache.stats().acquired).result(10)
        assert used - stats.preemptions - 1 == 60  # one was the warm-up's


@pytest.mark.parametrize("ending", ["stop", "cancel"])
async def test_pages_are_held_until_the_step_that_uses_them_retires(ending: str) -> None:
    """What ended while a step with it was under way keeps its lease until that step's turn."""
    prompt = prompt_of(7)
    answer = expected(prompt, 5)
    t = EngineUnderTest(64)  # not started: its steps are taken here
    stops = frozenset({answer[2]} if ending == "stop" else ())
    request = t.submit(prompt, max_tokens=9, stop_token_ids=stops)
    t.engine.take_in()
    for _ in range(4):
        t.engine.step()
    if ending == "cancel":
        t.engine.cancel(request.id)
        t.engine.take_in()
    overlapped = known_model.OVERLAP
    assert request.output == answer[: 3 if overlapped or ending == "stop" else 4]
    assert request.state is State.FINISHED
    assert (request.lease is not None) is overlapped
    assert not t.engine.step()
    assert request.lease is None
    t.cache.check()
    assert t.device.count()["writing"] == 0
    assert t.cache.match("a", np.array([*prompt, *answer], np.int32)).length == 7 + len(
        request.output
    ) - (ending == "stop" or not overlapped)
    assert (await t.read(request))[1].usage.completion_tokens == len(request.output)


async def test_stop_tokens_end_a_request_and_are_not_sent() -> None:
    prompt = prompt_of(7)
    answer = expected(prompt, 5)
    with EngineUnderTest(64) as t:
        tokens, end = await t.ask(prompt, max_tokens=5, stop_token_ids=frozenset({answer[2]}))
        assert tokens == answer[: answer.index(answer[2])]
        assert end.reason is FinishReason.STOP
        assert EOS not in tokens


async def test_a_fault_of_one_request_ends_that_request_alone() -> None:
    bad, good = prompt_of(6, seed=1), prompt_of(6, seed=2)
    with EngineUnderTest(64) as t:

        def fail(sequences: list[list[int]]) -> None:
            if any(s[:6] == bad for s in sequences):
                raise ValueError("this prompt breaks the model")

        t.model.before_step = fail
        broken, fine = t.submit(bad), t.submit(good)
        with pytest.raises(EngineFailed, match="ValueError"):
            await t.read(broken)
        assert (await t.read(fine))[0] == expected(good, 8)
        await t.settled()
        t.check()


async def test_out_of_memory_shrinks_the_batch_and_goes_on() -> None:
    prompt = prompt_of(200)
    config = EngineConfig(scheduler=SchedulerConfig(min_chunk=4, max_chunk=256))
    with EngineUnderTest(128, config=config) as t:
        forward = t.model.forward

        def small_memory(ids: object, *rest: object) -> object:
            if len(ids) > 20:  # type: ignore[arg-type]
                raise MemoryError
            return forward(ids, *rest)

        t.model.forward = small_memory  # type: ignore[method-assign,assignment]
        assert (await t.ask(prompt))[0] == expected(prompt, 8)


async def test_broken_ownership_ends_the_engine_and_everything_it_holds() -> None:
    t = EngineUnderTest(64)
    ended: list[BaseException] = []
    t.engine.on_failure = ended.append
    t.engine.start()
    while not t.engine.ready:
        await asyncio.sleep(0.001)

    def corrupt(sequences: list[list[int]]) -> None:
        raise InvariantError("a page has two owners")

    t.model.before_step = corrupt
    with pytest.raises(EngineFailed):
        await t.ask(prompt_of(5))
    assert isinstance(t.engine.failed, InvariantError)
    assert ended == [t.engine.failed]
    with pytest.raises(ServiceError):
        t.submit(prompt_of(5))


async def test_a_slow_reader_is_dropped_and_does_not_hold_the_others() -> None:
    config = EngineConfig(stream_deadline=0.2)
    with EngineUnderTest(64, config=config) as t:
        slow = t.submit(prompt_of(4), max_tokens=100, capacity=4)
        assert (await t.ask(prompt_of(6, seed=1)))[0] == expected(prompt_of(6, seed=1), 8)
        await t.settled()
        with pytest.raises(SlowReader):
            await t.read(slow)
        t.check()


async def test_a_deadline_ends_a_request() -> None:
    with EngineUnderTest(64) as t:
        late = t.submit(prompt_of(4), max_tokens=100, deadline=time.monotonic() - 1)
        with pytest.raises(DeadlineExceeded):
            await t.read(late)


async def test_draining_finishes_what_runs_and_refuses_the_new() -> None:
    with EngineUnderTest(64) as t:
        running = t.submit(prompt_of(4), max_tokens=40)
        drained = asyncio.create_task(asyncio.to_thread(t.engine.drain, 10.0))
        await asyncio.sleep(0.01)
        with pytest.raises(Draining):
            t.submit(prompt_of(4))
        assert (await t.read(running))[0] == expected(prompt_of(4), 40)
        await drained


async def test_nobody_waits_longer_than_the_bound_under_hot_traffic() -> None:
    """A cold request among ones with a long cached prefix, twice what can run at once."""
    rounds = 10
    config = EngineConfig(scheduler=SchedulerConfig(max_running=2, aging_rounds=rounds))
    hot = prompt_of(60)
    with EngineUnderTest(256, config=config) as t:
        await t.ask(hot)
        gate = t.model.before_step = Gate()
        requests = [t.submit([*hot, 1 + i], max_tokens=3) for i in range(4)]
        cold = t.submit(prompt_of(20, seed=9), max_tokens=1)
        requests += [t.submit([*hot, 5, 1 + i], max_tokens=3) for i in range(90)]
        gate.open()
        await t.read(cold)
        assert sum(r.state is not State.FINISHED for r in requests) > 40  # it did not come last
        assert cold.rounds_waited == rounds
        await asyncio.gather(*(t.read(r) for r in requests))
