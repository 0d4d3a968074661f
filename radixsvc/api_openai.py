"""OpenAI's endpoints: completions, chat completions, models; and the writing of answers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from aiohttp import web

from radixsvc.admission import Call, as_service_error
from radixsvc.codec import token_ids
from radixsvc.completion import SamplingParams, Tokens
from radixsvc.errors import ContextLengthExceeded, InvalidRequest, NotFound
from radixsvc.generation import Generation, Plan
from radixsvc.protocol import (
    ChatRequest,
    CompletionRequest,
    Delta,
    Message,
    Sampling,
    Tool,
)
from radixsvc.shape import Shape
from radixsvc.startup import Backend
from radixsvc.toolcalls import describe_tools, forced_start, template_messages, template_tools

T = TypeVar("T")
log = logging.getLogger("radixsvc.api")
OFF_LOOP_CHARS = 8_192  # longer texts are tokenised on a thread, so that others are served
MESSAGE_CHARS = 64  # what a message costs a template beside its text, about
MAX_CHARS_A_TOKEN = 32  # of a text that is worth tokenising at all; English has 4 or 5
AS_GIVEN = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "ignore_eos", "stop_token_ids")  # fmt: skip
_threads = ThreadPoolExecutor(2, "tokenize")  # few, since a long text takes much memory


async def tokenized(backend: Backend, function: Callable[[], T], num_chars: int) -> T:
    """Run a tokenizer's work here, or on a thread where it takes long.

    ContextLengthExceeded at once for a text that can't fit whatever its tokens are.
    """
    if num_chars > MAX_CHARS_A_TOKEN * backend.engine.max_request_tokens:
        raise ContextLengthExceeded(
            f"{num_chars} characters are too many: {backend.engine.max_request_tokens} tokens fit"
        )
    if num_chars <= OFF_LOOP_CHARS:
        return function()
    return await asyncio.get_running_loop().run_in_executor(_threads, function)


async def prompt_tokens(backend: Backend, prompt: Any, special: bool = True) -> Tokens:
    """Text, an array of ids or a bin of ids as int32 token ids."""
    if isinstance(prompt, str):
        tokenizer = backend.tokenizer
        ids = await tokenized(backend, lambda: tokenizer.encode(prompt, special), len(prompt))
        if len(ids) == 0:
            raise InvalidRequest("prompt is empty: at least one token is needed", "prompt")
        return ids
    return token_ids(prompt, "prompt", backend.info.vocab_size)


async def chat_tokens(
    backend: Backend, messages: list[Message], tools: list[Tool], canonical: bool, start: str = ""
) -> Tokens:
    """Messages and tools through the model's chat template, and the `start` of the reply."""
    tokenizer = backend.tokenizer
    plain = template_messages(messages)
    described = template_tools(tools, canonical) or None
    num_chars = len(json.dumps(described)) + len(json.dumps(plain)) + MESSAGE_CHARS * len(plain)
    if described and not tokenizer.template_has_tools:
        plain, described = describe_tools(plain, described), None
    ids = await tokenized(
        backend,
        lambda: tokenizer.apply_chat_template(plain, described, add_generation_prompt=True),
        num_chars,
    )
    return np.concatenate([ids, tokenizer.encode(start, False)]) if start else ids


def make_plan(
    call: Call,
    body: Sampling,
    id: str,
    prompts: list[Tokens],
    max_tokens: int,
    top_logprobs: int | None,
) -> Plan:
    """What a body asks for, with its defaults filled in. InvalidRequest."""
    stops = (body.stop,) if isinstance(body.stop, str) else body.stop or ()
    given = {name: value for name in AS_GIVEN if (value := getattr(body, name)) is not None}
    if bias := body.logit_bias:
        vocab_size = call.backend.info.vocab_size
        if not all(len(k) < 10 and k.isdecimal() and int(k) < vocab_size for k in bias):
            raise InvalidRequest("logit_bias: keys are token ids", "logit_bias")
        given["logit_bias"] = tuple((int(key), value) for key, value in bias.items())
    params = SamplingParams(
        max_tokens=max_tokens,
        top_k=max(0, body.top_k or 0),
        seed=None if body.seed is None else body.seed % 2**63,
        top_logprobs=top_logprobs,
        **given,
    )
    return Plan(
        id=f"{id}-{call.id}",
        account=call.caller.name,
        namespace=call.caller.namespace(body.cache_salt),
        prompts=prompts,
        params=params,
        n=body.n or 1,
        stops=tuple(stops),
        seconds=call.edge.config.server.request_seconds,
    )


async def completions(call: Call) -> Any:
    """POST /v1/completions"""
    body = await call.read(CompletionRequest)
    backend = call.backend
    if body.suffix:
        raise InvalidRequest("suffix is not supported by this model", "suffix")
    if body.echo and body.logprobs is not None:
        raise InvalidRequest(
            "echo and logprobs: ask for one, both would compute the whole prompt", "echo"
        )
    if body.best_of not in (None, body.n or 1):
        raise InvalidRequest("best_of has to equal n", "best_of")
    given = body.prompt
    if not isinstance(given, list) or (given and isinstance(given[0], int)):
        given = [given]
    check_count(call, body, len(given))
    prompts = []
    for prompt in given:
        prompts.append(await prompt_tokens(backend, prompt))
    openings = [""] * len(prompts)
    if body.echo:
        openings = [
            prompt if isinstance(prompt, str) else backend.tokenizer.decode(ids)
            for prompt, ids in zip(given, prompts, strict=True)
        ]
    plan = make_plan(call, body, "cmpl", prompts, body.max_tokens or 16, body.logprobs)
    return await respond(call, body, plan, openings)


async def chat_completions(call: Call) -> Any:
    """POST /v1/chat/completions"""
    body = await call.read(ChatRequest)
    backend = call.backend
    if body.response_format and body.response_format.type != "text":
        words = "the output can't be constrained; ask for JSON in the prompt, or use tools"
        raise InvalidRequest(f"response_format: {words}", "response_format")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
    check_count(call, body, 1)
    tools = body.tools or []
    start = forced_start(body.tool_choice, tools, backend.tokenizer.tool_style)
    canonical = call.edge.config.model.canonical_tools
    prompt = await chat_tokens(backend, body.messages, tools, canonical, start)
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is None:
        max_tokens = max(1, backend.engine.max_request_tokens - len(prompt))
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    plan = make_plan(call, body, "chatcmpl", [prompt], max_tokens, top_logprobs)
    if body.tool_choice != "none":
        plan.tool_names = frozenset(tool.function.name for tool in tools)
        plan.reply_start = start
    return await respond(call, body, plan, [""])


def check_count(call: Call, body: Sampling, num_prompts: int) -> None:
    limit = call.edge.config.server.max_prompts
    if num_prompts == 0:
        raise InvalidRequest("prompt is empty: at least one token is needed", "prompt")
    if num_prompts * (body.n or 1) > limit:
        raise InvalidRequest(f"prompts times n: at most {limit} a request", "n")


async def respond(call: Call, body: Sampling, plan: Plan, openings: list[str]) -> Any:
    """Generate, and answer whole or as a stream. `openings`: each prompt's text if it is echoed."""
    backend = call.backend
    texts = [text for text in openings for _ in range(plan.n)]
    is_chat = isinstance(body, ChatRequest)
    shape = Shape(plan, backend.model_name, call.encoding, is_chat, texts)
    with Generation(call.edge, backend, plan) as generation:
        if body.stream:
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            return await stream(call, generation, shape, include_usage)
        totals = [Delta(index=i, text=text) for i, text in enumerate(texts)]
        while not generation.is_done:
            for delta in await generation.deltas():
                totals[delta.index].add(delta)
        return shape.whole(totals, generation.usage())


async def stream(
    call: Call, generation: Generation, shape: Shape, include_usage: bool
) -> web.StreamResponse:
    """Events as they come. A client that stops reading is cut off after `write_seconds`."""
    seconds = call.edge.config.server.write_seconds
    kind = "text/event-stream" if shape.is_sse else call.encoding.value
    headers = {"Content-Type": kind, "Cache-Control": "no-store", "x-request-id": call.id}
    response = web.StreamResponse(headers=headers)

    async def send(data: bytes) -> None:
        if data:
            async with asyncio.timeout(seconds):
                await response.write(data)

    try:
        await response.prepare(call.request)
        await send(shape.beginning(sum(map(len, generation.plan.prompts))))
        try:
            while not generation.is_done:
                await send(shape.more(await generation.deltas()))
            end = shape.end(generation.usage(), include_usage)
        except (TimeoutError, ConnectionError):
            raise
        except Exception as error:
            end = shape.failure(as_service_error(error, call.id))
        async with asyncio.timeout(seconds):
            await response.write_eof(end)
    except TimeoutError:
        log.warning("request %s: the client did not read for %g s", call.id, seconds)
        if call.request.transport is not None:
            call.request.transport.abort()
    except ConnectionError:
        log.info("request %s: the client went away", call.id)
    return response


async def models(call: Call) -> Any:
    """GET /v1/models"""
    return {"object": "list", "data": [describe_model(call.backend)]}


async def model(call: Call) -> Any:
    """GET /v1/models/{id}"""
    call.check_model(call.request.match_info["id"])
    return describe_model(call.backend)


def describe_model(backend: Backend) -> dict[str, Any]:
    return {
        "id": backend.model_name,
        "object": "model",
        "created": backend.created,
        "owned_by": "radixsvc",
        "max_model_len": backend.engine.max_request_tokens,
    }


async def responses(call: Call) -> Any:
    """POST /v1/responses: declined, since it would keep conversations on the server."""
    raise NotFound("this service has no /v1/responses: use /v1/chat/completions")


ROUTES = {
    ("POST", "/v1/completions"): completions,
    ("POST", "/v1/chat/completions"): chat_completions,
    ("POST", "/v1/responses"): responses,
    ("GET", "/v1/models"): models,
    ("GET", "/v1/models/{id:.+}"): model,
}
