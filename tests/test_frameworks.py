"""Two agent frameworks, as they come from PyPI, against the service with SmolLM2-135M-Instruct.

They call tools too; there a scripted model stands in, since so small a one writes no whole call.
What an agent sends grows at its end, turn by turn. The order of its tools is random here, as in
programs that keep them in sets; a timestamp stands at the end of each question, or first of all.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.messages import ModelResponse
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from serving import RunningBackend, serving

from radixsvc.client import AsyncClient
from radixsvc.startup import Backend

set_tracing_disabled(True)  # traces go to OpenAI

GUIDE = " ".join(
    f"Rule {i}: a guest of room {100 + i} is greeted by name, told the hours of the {place}, and "
    f"asked whether anything is amiss before the call is ended."
    for i, place in enumerate(("pool", "garden", "library", "kitchen", "bar"))
)
QUESTIONS = ("Is it warm outside?", "And tomorrow?", "Thank you. What do I owe?")


def weather(city: str) -> str:
    """The weather of a city."""
    return f"21 degrees in {city}"


def bill(room: int, with_tip: bool) -> str:
    """What a room owes, in euros."""
    return f"room {room} owes {120 if with_tip else 100}"


def opening_hours(place: str) -> str:
    """When a place in the hotel is open."""
    return f"{place}: 9 to 17"


TOOLS = (weather, bill, opening_hours)
Ask = Callable[[AsyncOpenAI, str, list[str]], Awaitable[list[tuple[int, int]]]]


async def ask_agents_sdk(openai: AsyncOpenAI, system: str, questions: list[str]) -> Any:
    """openai-agents: (prompt tokens, cached tokens) of each request."""
    spent = []
    history: list[Any] = []
    model = OpenAIChatCompletionsModel("any", openai)
    settings = ModelSettings(temperature=0, max_tokens=8)
    for question in questions:
        tools = [function_tool(tool) for tool in random.sample(TOOLS, len(TOOLS))]
        agent = Agent("porter", instructions=system, tools=tools, model=model,
                      model_settings=settings)  # fmt: skip
        done = await Runner.run(agent, [*history, {"role": "user", "content": question}])
        history = done.to_input_list()
        for answer in done.raw_responses:
            usage = answer.usage
            spent.append((usage.input_tokens, usage.input_tokens_details.cached_tokens))
    return spent


async def ask_pydantic_ai(openai: AsyncOpenAI, system: str, questions: list[str]) -> Any:
    """pydantic-ai: (prompt tokens, cached tokens) of each request."""
    spent = []
    history = None
    model = OpenAIChatModel("any", provider=OpenAIProvider(openai_client=openai))
    for question in questions:
        agent = PydanticAgent(model, system_prompt=system, tools=random.sample(TOOLS, len(TOOLS)),
                              model_settings={"temperature": 0, "max_tokens": 8})  # fmt: skip
        done = await agent.run(question, message_history=history)
        history = done.all_messages()
        for message in done.new_messages():
            if isinstance(message, ModelResponse):
                spent.append((message.usage.input_tokens, message.usage.cache_read_tokens))
    return spent


@pytest.fixture(scope="module")
def running(smollm: Path) -> Iterator[RunningBackend]:
    settings = ("model.dtype=auto", "tiers.device.size=256MiB")
    with RunningBackend(smollm, *settings) as backend:
        yield backend


@asynccontextmanager
async def openai_client(backend: Backend) -> AsyncIterator[tuple[str, AsyncOpenAI, list[Any]]]:
    """The service's address, OpenAI's client for it, and the bodies that client has sent."""
    sent: list[Any] = []

    async def note(request: Any) -> None:
        sent.append(json.loads(request.content))

    async with serving(backend) as (url, _):
        http = DefaultAsyncHttpxClient(event_hooks={"request": [note]})
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", http_client=http) as openai:
            yield url, openai, sent


@pytest.mark.model
@pytest.mark.parametrize("ask", [ask_agents_sdk, ask_pydantic_ai])
async def test_tools_in_any_order_and_time_last_are_cached(
    running: RunningBackend, ask: Ask
) -> None:
    """From the second turn on 90% of the prompt and more comes from the cache."""
    random.seed(3)
    asked = [f"{question} (It is 09:2{i}:41)" for i, question in enumerate(QUESTIONS)]
    async with openai_client(running.backend) as (_, openai, sent):
        spent = await ask(openai, f"{ask.__name__} {GUIDE}", asked)
    orders = {tuple(tool["function"]["name"] for tool in body["tools"]) for body in sent}
    assert len(orders) > 1
    assert len(spent) >= len(QUESTIONS)
    for prompt_tokens, cached_tokens in spent[1:]:
        assert cached_tokens >= 0.9 * prompt_tokens


@pytest.mark.model
@pytest.mark.parametrize("ask", [ask_agents_sdk, ask_pydantic_ai])
async def test_explain_names_the_time_that_stands_first(running: RunningBackend, ask: Ask) -> None:
    """Hardly anything is cached then; it is told which words they are, and what they cost."""
    guide = f"{ask.__name__} speaks. {GUIDE}"
    async with (
        openai_client(running.backend) as (url, openai, sent),
        AsyncClient(url) as client,
    ):
        await ask(openai, f"It is 08:15:07 on Monday. {guide}", [QUESTIONS[0]])
        sent[0]["messages"][0]["content"] = f"It is 19:42:33 on Friday. {guide}"
        found = await client.explain(messages=sent[0]["messages"], tools=sent[0]["tools"])
    assert found.cached_tokens < 0.1 * found.prompt_tokens
    assert found.divergence is not None
    assert found.divergence.text_before.endswith("It is ")
    assert found.divergence.prompt_text.startswith("19:42:33 on Friday")
    assert found.divergence.cached_text.startswith("08:15:07 on Monday")
    assert found.realigned is not None
    assert found.realigned.reusable_tokens >= 0.9 * (found.prompt_tokens - found.cached_tokens)
    assert f"{found.realigned.reusable_tokens} of the tokens behind" in found.summary


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_agents_run_their_tools(tiny_llama: Path, stream: bool) -> None:
    """A call comes out of the model's text, its result goes back in, and the answer follows."""
    with RunningBackend(tiny_llama, scripted=True) as running:
        async with openai_client(running.backend) as (_, openai, sent):
            running.say(CALL, "It is warm in Rome.")
            model = OpenAIChatCompletionsModel("any", openai)
            agent = Agent("porter", tools=[function_tool(weather)], model=model)
            if stream:
                streamed = Runner.run_streamed(agent, QUESTIONS[0])
                assert [event async for event in streamed.stream_events()]
                assert streamed.final_output == "It is warm in Rome."
            else:
                done = await Runner.run(agent, QUESTIONS[0])
                assert done.final_output == "It is warm in Rome."
            running.say(CALL, "It is warm in Rome.")
            chat = OpenAIChatModel("any", provider=OpenAIProvider(openai_client=openai))
            other = PydanticAgent(chat, tools=[weather])
            if stream:
                async with other.run_stream(QUESTIONS[0]) as reply:
                    assert await reply.get_output() == "It is warm in Rome."
            else:
                assert (await other.run(QUESTIONS[0])).output == "It is warm in Rome."
        assert [body["messages"][-1]["role"] for body in sent] == ["user", "tool"] * 2
        assert sent[1]["messages"][-1]["content"] == sent[3]["messages"][-1]["content"]
