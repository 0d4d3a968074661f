"""The prefix endpoints: what is cached, why not more, and keeping or dropping it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import RunningBackend, serving

from radixsvc.api_prefix import warm_named_prompts
from radixsvc.cache import PrefixCache
from radixsvc.client import ApiError, AsyncClient
from radixsvc.explain import realign

STORY = (
    "Once upon a time there lived an old king who counted every stone of his castle each morning. "
    "The quick brown fox jumps over the lazy dog while the cat sleeps in the warm sun. "
)


async def test_match_changes_nothing_and_warm_makes_it_whole(tiny: RunningBackend) -> None:
    async with serving(tiny.backend) as (url, _), AsyncClient(url) as client:
        for _ in range(2):
            cold = await client.match(prompt=STORY, cache_salt="warm")
            assert (cold.cached_tokens, cold.radixsvc.computed) == (0, cold.prompt_tokens)
        warmed = await client.prefix("warm", prompt=STORY, cache_salt="warm")
        assert warmed["cached_tokens"] == 0
        warm = await client.match(prompt=STORY, cache_salt="warm")
        assert warm.cached_tokens == warm.prompt_tokens - 1
        messages = [{"role": "user", "content": "Hello"}]
        await client.prefix("warm", messages=messages)
        assert (await client.chat(messages, max_tokens=1)).usage.radixsvc.device > 0


async def test_named_prompts_are_computed_and_pinned(tiny: RunningBackend, tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text(STORY)
    sets = [f"prompts.story.file={tmp_path / 'system.txt'}", "prompts.plain.text=" + STORY,
            "prompts.plain.system=false", "prompts.plain.namespace=team"]  # fmt: skip
    async with serving(tiny.backend, *sets) as (url, edge), AsyncClient(url) as client:
        await warm_named_prompts(edge)
        messages = [{"role": "system", "content": STORY}, {"role": "user", "content": "Who?"}]
        match = await client.match(messages=messages)
        assert match.cached_tokens >= len(await client.tokenize(STORY))
        assert (await client.get("/v1/stats"))["cache"]["num_pins"] == 2
        await client.post("/v1/flush", {}, dict)


async def test_pins_outlive_pressure_until_undone(tiny: RunningBackend) -> None:
    async with serving(tiny.backend) as (url, _), AsyncClient(url) as client:
        await client.prefix("warm", prompt=STORY, cache_salt="pin")
        pinned = await client.prefix("pin", prompt=STORY, ttl=60, cache_salt="pin")
        assert pinned["pinned_tokens"] >= 16
        assert (await client.prefix("evict", prompt=STORY, cache_salt="pin"))["evicted_pages"] <= 1
        assert (await client.match(prompt=STORY, cache_salt="pin")).cached_tokens > 0
        assert (await client.prefix("unpin", prompt=STORY, cache_salt="pin"))["unpinned"] is True
        assert (await client.prefix("unpin", prompt=STORY, cache_salt="pin"))["unpinned"] is False
        await client.prefix("evict", prompt=STORY, cache_salt="pin")
        assert (await client.match(prompt=STORY, cache_salt="pin")).cached_tokens == 0
    tiny.check()


async def test_explain_names_the_differing_text_and_what_moving_it_saves(
    tiny: RunningBackend,
) -> None:
    async with serving(tiny.backend) as (url, _), AsyncClient(url) as client:
        await client.complete(f"It is 10:31:07 now. {STORY}", max_tokens=1, cache_salt="why")
        prompt = f"It is 10:58:44 now. {STORY}"
        told = await client.explain(prompt=prompt, cache_salt="why")
        assert told.divergence is not None
        assert told.realigned is not None
        assert told.divergence.text_before.startswith("It is 10:")
        assert told.divergence.prompt_text.startswith("58:44")
        assert told.divergence.cached_text.startswith("31:07")
        assert told.divergence.same_text is False
        assert told.cached_tokens == told.divergence.position
        story = len(await client.tokenize(STORY))
        assert story - 2 <= told.realigned.reusable_tokens <= story + 4
        assert told.realigned.volatile_tokens <= 8
        assert str(told.realigned.reusable_tokens) in told.summary
        whole = await client.explain(prompt=f"It is 10:31:07 now. {STORY}", cache_salt="why")
        assert (whole.divergence, whole.realigned) == (None, None)


async def test_explain_sees_text_that_only_tokenises_otherwise(tiny: RunningBackend) -> None:
    async with serving(tiny.backend) as (url, _), AsyncClient(url) as client:
        text = "the castle of the king"
        ids = (await client.tokenize(text)).tolist()
        split = [t for c in text for t in (await client.tokenize(c)).tolist()]
        assert ids != split
        await client.complete(np.array(split, np.int32), max_tokens=1, cache_salt="cut")
        told = await client.explain(prompt=ids, cache_salt="cut")
    assert told.divergence is not None
    assert told.divergence.same_text is True
    assert "cut into other tokens" in told.summary


async def test_explain_tells_what_was_evicted(tiny: RunningBackend) -> None:
    async with serving(tiny.backend) as (url, _), AsyncClient(url) as client:
        await client.complete(STORY, max_tokens=1, cache_salt="ghost")
        tiny.backend.engine.call(take_all_pages).result(10)
        told = await client.explain(prompt=STORY, cache_salt="ghost")
    assert told.cached_tokens == 0
    assert told.evicted
    assert told.evicted[0].start == 0
    assert told.evicted[0].tier == "device"
    assert "evicted from device memory" in told.summary
    tiny.check()


def take_all_pages(cache: PrefixCache) -> None:
    """What a request that needs the whole device does to everyone else."""
    lease = cache.acquire("large", np.arange(2, dtype=np.int32))
    lease.extend(cache.device.num_pages * cache.page_size)
    lease.release()


async def test_tokens_round_trip(tiny: RunningBackend) -> None:
    async with serving(tiny.backend) as (url, _), AsyncClient(url) as client:
        ids = await client.tokenize("naïve café", add_special_tokens=False)
        assert await client.detokenize(ids) == "naïve café"
        found = await client.post(
            "/v1/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}, dict
        )
        assert found["count"] * 4 == len(found["tokens"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user"}]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"messages": [], "tools": [{"function": {"name": "f"}}]}, "messages"),
    ],
)
async def test_a_prompt_is_needed_once(
    tiny: RunningBackend, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr(tiny.backend.tokenizer, "_template", "{{ messages }}")  # without tools
    async with serving(tiny.backend) as (url, _), AsyncClient(url) as client:
        for path in ("match", "explain", "warm", "pin"):
            with pytest.raises(ApiError) as caught:
                await client.prefix(path, **body)
            assert (caught.value.status, caught.value.param) == (400, param)


async def test_flush_empties_every_namespace(tiny: RunningBackend) -> None:
    async with serving(tiny.backend) as (url, _), AsyncClient(url) as client:
        await client.complete(STORY, max_tokens=1)
        await client.post("/v1/flush", {}, dict)
        assert (await client.match(prompt=STORY)).cached_tokens == 0
        assert (await client.get("/v1/stats"))["cache"]["num_nodes"] == 0
    tiny.check()


class Numbers:
    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


def test_realigning_counts_runs_behind_every_difference() -> None:
    common = np.arange(100, 160, dtype=np.int32)
    branch = np.concatenate([np.array([1, 2, 3], np.int32), common[:30], [4], common[30:]])
    rest = np.concatenate([np.array([7], np.int32), common[:30], [8, 9], common[30:]])
    found = realign(rest.astype(np.int32), branch.astype(np.int32), Numbers())  # type: ignore[arg-type]
    assert found is not None
    assert (found.reusable_tokens, found.volatile_tokens, found.volatile_text) == (60, 3, "7")
    assert realign(common[:20], common[30:], Numbers()) is None  # type: ignore[arg-type]
