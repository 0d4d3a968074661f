"""OpenAI's endpoints in both encodings, with its SDK and without, over a tiny model."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import msgspec
import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import RunningBackend, little_endian, serving

from radixsvc.client import AsyncClient

JSON = {"Content-Type": "application/json"}
MSGPACK = {"Content-Type": "application/vnd.msgpack", "Accept": "application/vnd.msgpack"}
PROMPT = "Once upon a time there lived an old king who counted every stone of his castle."
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def scripted(tiny_llama: Path) -> Iterator[RunningBackend]:
    with RunningBackend(tiny_llama, scripted=True) as running:
        yield running


def sdk(url: str, retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=retries)


async def test_usage_is_the_same_in_both_encodings_streamed_or_not(tiny: RunningBackend) -> None:
    """cached_tokens is there when 0 too, and the sources sum to the prompt's tokens."""
    seen = []
    async with serving(tiny.backend) as (url, _), sdk(url) as client, AsyncClient(url) as ours:
        for salt in ("json", "sse", "msgpack", "msgpack stream"):
            for _ in range(2):
                common: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
                extra = {"cache_salt": salt, "ignore_eos": True}
                if salt == "json":
                    answer = await client.completions.create(model="m", extra_body=extra, **common)
                    seen.append((answer.choices[0].text, answer.usage.model_dump()))
                elif salt == "sse":
                    text, usage = "", None
                    async for chunk in await client.completions.create(
                        model="m", stream=True, stream_options={"include_usage": True},
                        extra_body=extra, **common,
                    ):  # fmt: skip
                        text += "".join(choice.text for choice in chunk.choices)
                        usage = chunk.usage.model_dump() if chunk.usage else None
                    seen.append((text, usage))
                elif salt == "msgpack":
                    whole = await ours.complete(**common, **extra)
                    seen.append((whole.choices[0].text, msgspec.to_builtins(whole.usage)))
                else:
                    events = [e async for e in ours.stream(**common, **extra)]
                    text = "".join(e.text for e in events[1:-1])
                    seen.append((text, msgspec.to_builtins(events[-1].usage)))
    colds, warms = seen[0::2], seen[1::2]
    assert all(strip(cold) == strip(colds[0]) for cold in colds)
    assert all(strip(warm) == strip(warms[0]) for warm in warms)
    (text, cold), (again, warm) = strip(colds[0]), strip(warms[0])
    assert text == again
    total = cold["prompt_tokens"]
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    assert cold["radixsvc"] == {"device": 0, "host": 0, "disk": 0, "computed": total}
    assert warm["prompt_tokens_details"]["cached_tokens"] == total - 1
    assert sum(warm["radixsvc"].values()) == total


def strip(item: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Without the fields of OpenAI's own that the SDK adds as None."""
    text, usage = item

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: kept(v) for k, v in value.items() if v is not None}
        return value

    return text, kept(usage)


async def test_a_chat_streams_role_text_reason_and_usage(tiny: RunningBackend) -> None:
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    async with serving(tiny.backend) as (url, _), sdk(url) as client:
        whole = await client.chat.completions.create(
            model="m", messages=messages, temperature=0, max_completion_tokens=6
        )
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="m", messages=messages, temperature=0, max_tokens=6, stream=True,
                stream_options={"include_usage": True},
            )
        ]  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:-1])
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6
    assert len({c.id for c in chunks}) == 1
    assert whole.object == "chat.completion"
    assert chunks[0].object == "chat.completion.chunk"


async def test_choices_differ_by_seed_and_repeat_with_it(tiny: RunningBackend) -> None:
    async with serving(tiny.backend) as (url, _), sdk(url) as client:
        ask = {"model": "m", "prompt": PROMPT, "n": 3, "seed": 7, "max_tokens": 8}
        first, second = [await client.completions.create(**ask) for _ in range(2)]
    texts = [choice.text for choice in sorted(first.choices, key=lambda c: c.index)]
    assert texts == [choice.text for choice in sorted(second.choices, key=lambda c: c.index)]
    assert len(set(texts)) == 3
    assert first.usage.completion_tokens <= 24
    assert first.usage.prompt_tokens == second.usage.prompt_tokens


async def test_lists_of_prompts_keep_their_order(tiny: RunningBackend) -> None:
    async with serving(tiny.backend) as (url, _), AsyncClient(url) as client:
        ids = await client.tokenize("The quick brown fox")
        both = await client.complete(  # type: ignore[arg-type]
            ["The quick", ids.tolist(), little_endian(ids.tolist())], max_tokens=3, temperature=0
        )
        single = await client.complete(ids, max_tokens=3, temperature=0)
        branches, usage = await client.branches(PROMPT, [" He", " She"], max_tokens=2)
    assert [c.index for c in both.choices] == [0, 1, 2]
    assert both.choices[1].text == both.choices[2].text == single.choices[0].text
    assert len(branches) == 2
    assert usage.prompt_tokens_details.cached_tokens > 0


async def test_logprobs_have_openais_shapes(tiny: RunningBackend) -> None:
    async with serving(tiny.backend) as (url, _), sdk(url) as client:
        chat = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hi"}], logprobs=True,
            top_logprobs=2, max_tokens=3, temperature=0, extra_body={"ignore_eos": True},
        )  # fmt: skip
        plain = await client.completions.create(
            model="m", prompt="Hi", logprobs=2, max_tokens=3, temperature=0
        )
    content = chat.choices[0].logprobs.content
    assert len(content) == 3
    assert all(len(item.top_logprobs) == 2 for item in content)
    assert all(item.logprob == item.top_logprobs[0].logprob <= 0 for item in content)
    logprobs = plain.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    assert logprobs.text_offset[0] == 0


async def test_stop_strings_end_a_stream_without_leaking(scripted: RunningBackend) -> None:
    async with serving(scripted.backend) as (url, _), sdk(url) as client:
        for stream in (False, True):
            scripted.say("One fine day STO the STOP of it")
            answer = await client.completions.create(
                model="m", prompt=PROMPT, stop=["STOP"], max_tokens=40, stream=stream
            )
            if stream:
                parts = [c async for c in answer]
                text = "".join(c.choices[0].text for c in parts)
                reason = parts[-1].choices[0].finish_reason
            else:
                text, reason = answer.choices[0].text, answer.choices[0].finish_reason
            assert (text, reason) == ("One fine day STO the ", "stop")
    scripted.check()


async def test_tool_calls_come_whole_in_streams_and_answers(scripted: RunningBackend) -> None:
    call = 'Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    ask: Any = {"model": "m", "messages": [{"role": "user", "content": "Weather?"}],
                "tools": [WEATHER]}  # fmt: skip
    async with serving(scripted.backend) as (url, _), sdk(url) as client:
        scripted.say(call)
        whole = (await client.chat.completions.create(**ask)).choices[0]
        scripted.say(call)
        deltas = [
            chunk.choices[0]
            async for chunk in await client.chat.completions.create(**ask, stream=True)
        ]
        scripted.say(call)
        unasked = (await client.chat.completions.create(**ask, tool_choice="none")).choices[0]
    assert whole.finish_reason == deltas[-1].finish_reason == "tool_calls"
    assert whole.message.content == "Let me see."
    assert whole.message.tool_calls[0].function.name == "weather"
    assert json.loads(whole.message.tool_calls[0].function.arguments) == {"city": "Rome"}
    calls = [c for d in deltas for c in d.delta.tool_calls or ()]
    assert [(c.index, c.function.name) for c in calls] == [(0, "weather")]
    assert "".join(d.delta.content or "" for d in deltas) == "Let me see."
    assert (unasked.message.content, unasked.message.tool_calls) == (call, None)


NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_demanded_tool_is_called_whatever_the_model_says(
    tiny: RunningBackend, choice: Any
) -> None:
    """The tiny model babbles; its reply is a call of the one tool all the same, cut off."""
    ask: Any = {"model": "m", "messages": [{"role": "user", "content": "Weather?"}], "seed": 3,
                "tools": [WEATHER], "tool_choice": choice, "max_tokens": 8}  # fmt: skip
    async with serving(tiny.backend) as (url, _), sdk(url) as client:
        whole = (await client.chat.completions.create(**ask)).choices[0]
        chunks = [c async for c in await client.chat.completions.create(**ask, stream=True)]
    [call] = whole.message.tool_calls
    assert (call.function.name, whole.message.content) == ("weather", None)
    assert call.function.arguments.startswith("{")
    assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "length"
    [streamed] = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
    assert streamed.function.arguments == call.function.arguments
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == ""


async def test_a_demanded_tool_gets_the_arguments_the_model_gives(
    scripted: RunningBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"type": "function", "function": {"name": "clock"}}
    ask: Any = {"model": "m", "messages": [{"role": "user", "content": "Weather?"}],
                "tools": [clock, WEATHER]}  # fmt: skip
    async with serving(scripted.backend) as (url, _), sdk(url) as client:
        for choice, reply in (
            (NAMED, '"city": "Rome"}}</tool_call>'),
            ("required", 'weather", "arguments": {"city": "Rome"}} Well, that was it.'),
        ):
            scripted.say(reply)
            answer = await client.chat.completions.create(**ask, tool_choice=choice)
            [call] = answer.choices[0].message.tool_calls
            assert call.function.name == "weather"
            assert json.loads(call.function.arguments) == {"city": "Rome"}
            assert answer.choices[0].finish_reason == "tool_calls"
        unlisted = {"type": "function", "function": {"name": "unlisted"}}
        with pytest.raises(openai.BadRequestError, match="unlisted"):
            await client.chat.completions.create(**ask, tool_choice=unlisted)
        with pytest.raises(openai.BadRequestError, match="no tools"):
            await client.chat.completions.create(**{**ask, "tools": []}, tool_choice="required")
        monkeypatch.setattr(scripted.backend.tokenizer, "_template", "{{ tools }} [TOOL_CALLS]")
        with pytest.raises(openai.BadRequestError, match="how this model's chat template begins"):
            await client.chat.completions.create(**ask, tool_choice="required")


REWRITING = (  # as Qwen3's: what was thought in earlier turns is left out of the history
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{{ message.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


async def test_a_template_that_rewrites_history_costs_no_more_than_what_it_changes(
    tiny: RunningBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next turn finds all of this turn's prompt, is told where it differs, and is right."""
    monkeypatch.setattr(tiny.backend.tokenizer._hf, "chat_template", REWRITING)
    thought, said = "<think>\nItaly has a capital.\n</think>\n\n", "The capital is Rome."
    turn: Any = [{"role": "system", "content": "You are a helpful assistant. " * 10},
                 {"role": "user", "content": "What is the capital of Italy?"}]  # fmt: skip
    then: Any = [*turn, {"role": "assistant", "content": thought + said},
                 {"role": "user", "content": "And of France?"}]  # fmt: skip
    async with serving(tiny.backend) as (url, _), AsyncClient(url) as client:
        prompt = await client.post("/v1/tokenize", {"messages": turn}, dict)
        reply = await client.tokenize(thought + said, add_special_tokens=False)
        ids = np.frombuffer(prompt["tokens"] + reply.tobytes(), np.int32)
        await client.complete(ids, max_tokens=1, cache_salt="rewritten")
        told = await client.explain(messages=then, cache_salt="rewritten")
        options: Any = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        warm = await client.chat(then, cache_salt="rewritten", **options)
        cold = await client.chat(then, cache_salt="from nothing", **options)
    assert told.divergence is not None
    assert told.divergence.prompt_text.startswith("The capital is Rome.")
    assert told.divergence.cached_text.startswith("<think>")
    assert warm.usage.prompt_tokens_details.cached_tokens == prompt["count"]
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.choices[0].message.content == cold.choices[0].message.content


async def test_the_order_of_tools_does_not_split_the_tree(tiny: RunningBackend) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"b": 1, "a": [2]}}}
        for name in ("zebra", "ape", "mole")
    ]
    swapped = [{"function": dict(reversed(t["function"].items()))} for t in reversed(tools)]
    async with serving(tiny.backend) as (url, _), AsyncClient(url) as client:
        ask: Any = {"messages": [{"role": "user", "content": "Go"}], "max_tokens": 1,
                    "cache_salt": "tool order"}  # fmt: skip
        await client.chat(tools=tools, **ask)
        again = await client.chat(tools=swapped, **ask)
    usage = again.usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"temperature": 5}, "temperature"),
        ({"n": 1000}, "n"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"stop": [""]}, "stop[0]"),
        ({"suffix": "s"}, "suffix"),
        ({"best_of": 5}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
    ],
)
async def test_impossible_requests_are_refused_with_their_field(
    tiny: RunningBackend, change: dict[str, Any], param: str
) -> None:
    async with serving(tiny.backend) as (url, _), aiohttp.ClientSession() as session:
        body = {"prompt": "x", **change}
        for headers, data in ((JSON, json.dumps(body)), (MSGPACK, msgpack.packb(body))):
            async with session.post(url + "/v1/completions", headers=headers, data=data) as reply:
                raw = await reply.read()
                assert reply.status == 400
                assert reply.headers["x-request-id"]
                error = (json.loads if headers is JSON else msgpack.unpackb)(raw)["error"]
                assert error["type"] == "invalid_request_error"
                assert error["param"] == param


async def test_too_long_a_prompt_is_refused_at_once(tiny: RunningBackend) -> None:
    async with serving(tiny.backend) as (url, _), sdk(url) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="m", prompt=[5] * 1020, max_tokens=10)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "word " * 2000}]
            )
        with pytest.raises(openai.BadRequestError, match="characters are too many"):
            await client.completions.create(model="m", prompt="a" * 100_000)
    tiny.check()


async def test_wrong_paths_methods_and_types_have_openais_errors(tiny: RunningBackend) -> None:
    post = "/v1/completions"
    body = b'{"prompt": "x"}'
    cases: list[tuple[str, str, dict[str, str], bytes, int]] = [
        ("GET", "/v1/nothing", {}, b"", 404),
        ("POST", "/v1/responses", JSON, b"{}", 404),
        ("GET", "/v1/models/gpt-none", {}, b"", 404),
        ("GET", post, {}, b"", 405),
        ("DELETE", "/v1/models/gpt-none", {}, b"", 405),
        ("POST", post, {"Content-Type": "text/plain"}, body, 415),
        ("POST", post, {**JSON, "Content-Encoding": "gzip"}, body, 415),
        ("POST", post, {**JSON, "Accept": "image/png"}, body, 406),
        ("POST", post, JSON, b"x" * (5 << 20), 413),
        ("POST", post, JSON, b"{", 400),
    ]
    async with serving(tiny.backend) as (url, _), aiohttp.ClientSession() as session:
        for method, path, headers, data, status in cases:
            async with session.request(
                method, url + path, headers=headers, data=io.BytesIO(data)
            ) as reply:
                assert reply.status == status, (method, path)
                error = (await reply.json())["error"]
                assert set(error) == {"message", "type", "param", "code"}
                if status == 405:
                    allowed = "POST" if path == post else "GET, HEAD"
                    assert reply.headers["Allow"] == allowed
    tiny.check()


async def test_requests_with_the_same_id_both_get_their_answer(tiny: RunningBackend) -> None:
    async with serving(tiny.backend) as (url, _), sdk(url) as client:
        lengths = (5, 60)
        answers = await asyncio.gather(*[
            client.completions.create(
                model="m", prompt=PROMPT, max_tokens=length, timeout=30,
                extra_headers={"x-request-id": "same"}, extra_body={"ignore_eos": True},
            ) for length in lengths
        ])  # fmt: skip
    assert tuple(answer.usage.completion_tokens for answer in answers) == lengths
    tiny.check()


async def test_models_are_listed_and_found_by_name(tiny: RunningBackend) -> None:
    async with serving(tiny.backend, "model.any_name=false") as (url, _), sdk(url) as client:
        [model] = [m async for m in client.models.list()]
        assert (await client.models.retrieve(model.id)).id == model.id
        await client.completions.create(model=model.id, prompt="x", max_tokens=1)
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="another", prompt="x")


async def test_the_sdk_comes_back_when_told_that_it_is_busy(tiny: RunningBackend) -> None:
    async with (
        serving(tiny.backend, "server.max_concurrent=1") as (url, edge),
        sdk(url, retries=0) as hasty,
        sdk(url, retries=4) as patient,
    ):
        ask = {"model": "m", "prompt": PROMPT, "max_tokens": 300,
               "extra_body": {"ignore_eos": True}}  # fmt: skip
        first = asyncio.create_task(hasty.completions.create(**ask))
        while not edge.in_flight[""]:
            await asyncio.sleep(0.001)
        with pytest.raises(openai.RateLimitError) as caught:
            await hasty.completions.create(model="m", prompt="x")
        assert caught.value.response.headers["retry-after"] == "1"
        second = await patient.completions.create(model="m", prompt="x", max_tokens=2)
        assert second.usage.completion_tokens <= 2
        assert (await first).usage.completion_tokens == 300


async def test_echo_repeats_the_prompt(tiny: RunningBackend) -> None:
    async with serving(tiny.backend) as (url, _), sdk(url) as client:
        answer = await client.completions.create(
            model="m", prompt="The sun", echo=True, max_tokens=2
        )
    assert answer.choices[0].text.startswith("The sun")


async def test_the_sync_sdk_works_and_gives_a_request_id(tiny: RunningBackend) -> None:
    def ask(url: str) -> str:
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            reply = client.chat.completions.with_raw_response.create(
                model="m", messages=[{"role": "user", "content": "Hello"}], max_tokens=2,
                extra_headers={"x-request-id": "mine-1"},
            )  # fmt: skip
            assert reply.headers["x-request-id"] == "mine-1"
            return reply.parse().id

    async with serving(tiny.backend) as (url, _):
        assert await asyncio.to_thread(ask, url) == "chatcmpl-mine-1"


async def test_generated_text_sent_back_is_reused_up_to_the_true_difference(
    tiny: RunningBackend,
) -> None:
    async with serving(tiny.backend) as (url, _), AsyncClient(url) as client:
        first = await client.complete(
            PROMPT, max_tokens=24, temperature=0, cache_salt="back", ignore_eos=True
        )
        text = PROMPT + first.choices[0].text
        match = await client.match(prompt=text, cache_salt="back")
        ids = await client.tokenize(text)
        events = [e async for e in client.stream(
            PROMPT, max_tokens=24, temperature=0, cache_salt="back", ignore_eos=True
        )]  # fmt: skip
        generated = b"".join(e.tokens for e in events[1:-1])
        known = [*(await client.tokenize(PROMPT)).tolist(), *_ints(generated)][:-1]
    same = next((i for i, (a, b) in enumerate(zip(ids, known, strict=False)) if a != b), len(known))
    assert match.cached_tokens == min(same, len(ids) - 1)


def _ints(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]


PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/tokenize", "/v1/detokenize",
         "/v1/prefix/match", "/v1/prefix/explain", "/v1/prefix/pin", "/v1/prefix/evict",
         "/v1/flush"]  # fmt: skip
values = st.recursive(
    st.sampled_from([None, True, -1, 0, 3, 2**63, 0.5, float("nan"), "", "x", "\x00é", b"x" * 4]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "name", "function"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
bodies = st.dictionaries(
    st.sampled_from(["prompt", "messages", "tools", "max_tokens", "n", "stop", "stream", "seed",
                     "tokens", "logprobs", "cache_salt", "tool_choice", "ttl", "logit_bias"]),
    values, max_size=5,
)  # fmt: skip


def test_hostile_bodies_never_break_the_service(tiny: RunningBackend) -> None:
    """Nothing but 2xx for what happens to be right and 4xx for the rest; no page is lost."""
    with asyncio.Runner() as runner:
        context = serving(tiny.backend)
        url, _ = runner.run(context.__aenter__())
        session = runner.run(_session())

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from(PATHS), bodies)
        def attack(path: str, body: dict[str, Any]) -> None:
            if "max_tokens" not in body and path.endswith("completions"):
                body["max_tokens"] = 1
            data = msgpack.packb(body, use_bin_type=True)
            assert runner.run(_status(session, url + path, data)) < 500

        attack()
        runner.run(session.close())
        runner.run(context.__aexit__(None, None, None))
    tiny.check()


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers=MSGPACK)


async def _status(session: aiohttp.ClientSession, url: str, data: bytes) -> int:
    async with session.post(url, data=data) as reply:
        await reply.read()
        return reply.status
