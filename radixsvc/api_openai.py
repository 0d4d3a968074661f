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

from radixsvc.admission import CALLER, EDGE, REQUEST_ID, Edge, read_body
from radixsvc.codec import Encoding, answer_encoding, encode, token_ids
from radixsvc.errors import (
    ContextLengthExceeded,
    EngineFailed,
    InvalidRequest,
    NotFound,
    ServiceError,
)
from radixsvc.generation import Generation, Plan
from radixsvc.protocol import (
    ChatRequest,
    CompletionRequest,
    Delta,
    End,
    Failure,
    Message,
    Sampling,
    Tool,
)
from radixsvc.request import SamplingParams, Tokens
from radixsvc.shape import Shape
from radixsvc.startup import Backend
from radixsvc.toolcalls import describe_tools, forced_start, template_messages, template_tools

T = TypeVar("T")
log = logging.getLogger("radixsvc.api")
OFF_LOOP_CHARS = 8_192  # longer texts are tokenised on a thread, so that others are served
MESSAGE_CHARS = 64  # what a message costs a template beside its text, about
MAX_CHARS_A_TOKEN = 32  # of a text that is worth tokenising at all; English has 4 or 5
_threads = ThreadPoolExecutor(2, "tokenize")  # few, since a long text takes much memory


def negotiated(request: web.Request) -> Encoding:
    """The encoding the answer will have. NotAcceptable."""
    sent = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    return answer_encoding(request.headers.get("Accept", ""), sent)


def answer(request: web.Request, value: Any) -> web.Response:
    """A whole answer in the encoding the client accepts."""
    encoding = negotiated(request)
    return web.Response(body=encode(value, encoding), content_type=encoding.value)


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


def check_model(edge: Edge, name: str | None) -> None:
    """NotFound for a model that is not the one served, unless the configuration takes any name."""
    served = edge.ready_backend().model_name
    if name and name != served and not edge.config.model.any_name:
        raise NotFound(f"this service has the model {served!r} alone", param="model")


async def prompt_tokens(backend: Backend, prompt: Any, special: bool = True) -> Tokens:
    """Text, an array of ids or a bin of ids as int32 token ids."""
    if isinstance(prompt, str):
        tokenizer = backend.tokenizer
        ids = await tokenized(backend, lambda: tokenizer.encode(prompt, special), len(prompt))
        if len(ids) == 0:
            raise InvalidRequest("prompt is empty: at least one token is needed", param="prompt")
        return ids
    return token_ids(prompt, "prompt", backend.info.vocab_size)


async def chat_tokens(
    edge: Edge, backend: Backend, messages: list[Message], tools: list[Tool], start: str = ""
) -> Tokens:
    """Messages and tools through the model's chat template, ready for the assistant's reply."""
    tokenizer = backend.tokenizer
    plain = template_messages(messages)
    described = template_tools(tools, edge.config.model.canonical_tools) or None
    num_chars = len(json.dumps(described)) + len(json.dumps(plain)) + MESSAGE_CHARS * len(plain)
    if described and not tokenizer.template_has_tools:
        plain, described = describe_tools(plain, described), None
    ids = await tokenized(
        backend,
        lambda: tokenizer.apply_chat_template(plain, described, add_generation_prompt=True),
        num_chars,
    )
    return np.concatenate([ids, tokenizer.encode(start, False)]) if start else ids


def sampling_params(
    body: Sampling, backend: Backend, max_tokens: int, top_logprobs: int | None
) -> SamplingParams:
    bias = []
    for key, value in (body.logit_bias or {}).items():
        if not key.isdecimal() or int(key) >= backend.info.vocab_size:
            raise InvalidRequest("logit_bias: keys are token ids", param="logit_bias")
        bias.append((int(key), value))

    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
             "repetition_penalty")  # fmt: skip
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    return SamplingParams(
        max_tokens=max_tokens,
        top_k=max(0, body.top_k or 0),
        logit_bias=tuple(bias),
        seed=None if body.seed is None else body.seed % 2**63,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        top_logprobs=top_logprobs,
        **given,
    )


def stop_strings(body: Sampling) -> tuple[str, ...]:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stops) or any(len(stop) > 1024 for stop in stops):
        raise InvalidRequest("stop: strings of 1 to 1024 characters", param="stop")
    return tuple(stops)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions"""
    edge = request.app[EDGE]
    backend = edge.ready_backend()
    body = await read_body(request, CompletionRequest)
    check_model(edge, body.model)
    if body.suffix:
        raise InvalidRequest("suffix is not supported by this model", param="suffix")
    if body.echo and body.logprobs is not None:
        raise InvalidRequest(
            "echo with logprobs would need the whole prompt computed; ask for one of them",
            param="echo",
        )
    n = body.n or 1
    if body.best_of not in (None, n):
        raise InvalidRequest("best_of has to equal n", param="best_of")
    given = body.prompt
    if not isinstance(given, list) or (given and isinstance(given[0], int)):
        given = [given]
    check_count(edge, len(given), n)
    prompts = [await prompt_tokens(backend, prompt) for prompt in given]
    openings = [""] * (len(prompts) * n)
    if body.echo:
        for i, ids in enumerate(prompts):
            text = given[i] if isinstance(given[i], str) else backend.tokenizer.decode(ids)
            openings[i * n : (i + 1) * n] = [text] * n
    id = f"cmpl-{request[REQUEST_ID]}"
    plan = Plan(
        id=id,
        namespace=request[CALLER].namespace(body.cache_salt),
        prompts=prompts,
        params=sampling_params(body, backend, body.max_tokens or 16, body.logprobs),
        n=n,
        stops=stop_strings(body),
        seconds=edge.config.server.request_seconds,
    )
    shape = Shape(id, backend.model_name, False, body.logprobs is not None, openings)
    return await respond(request, backend, plan, body, shape)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions"""
    edge = request.app[EDGE]
    backend = edge.ready_backend()
    body = await read_body(request, ChatRequest)
    check_model(edge, body.model)
    if body.response_format and body.response_format.type != "text":
        raise InvalidRequest(
            "response_format: the output can't be constrained; ask for JSON in the prompt, or use "
            "tools",
            param="response_format",
        )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    n = body.n or 1
    check_count(edge, 1, n)
    start = forced_start(body, backend.tokenizer.tool_style)
    prompt = await chat_tokens(edge, backend, body.messages, body.tools or [], start)
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is None:
        max_tokens = max(1, backend.engine.max_request_tokens - len(prompt))
    names = frozenset(tool.function.name for tool in body.tools or ())
    id = f"chatcmpl-{request[REQUEST_ID]}"
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    plan = Plan(
        id=id,
        namespace=request[CALLER].namespace(body.cache_salt),
        prompts=[prompt],
        params=sampling_params(body, backend, max_tokens, top_logprobs),
        n=n,
        stops=stop_strings(body),
        tool_names=names if body.tool_choice != "none" else frozenset(),
        reply_start=start,
        seconds=edge.config.server.request_seconds,
    )
    shape = Shape(id, backend.model_name, True, bool(body.logprobs), [""] * n)
    return await respond(request, backend, plan, body, shape)


def check_count(edge: Edge, num_prompts: int, n: int) -> None:
    limit = edge.config.server.max_prompts
    if num_prompts == 0:
        raise InvalidRequest("prompt is empty: at least one token is needed", param="prompt")
    if num_prompts * n > limit:
        raise InvalidRequest(f"at most {limit} sequences a request", param="n")


async def respond(
    request: web.Request,
    backend: Backend,
    plan: Plan,
    body: Sampling,
    shape: Shape,
) -> web.StreamResponse:
    """Generate, and answer whole or as a stream."""
    edge = request.app[EDGE]
    encoding = negotiated(request)
    with (
        edge.place(request[CALLER]),
        Generation(backend, plan, edge.metrics) as generation,
    ):
        if body.stream:
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            return await _stream(request, generation, encoding, shape, include_usage)
        totals = [Delta(index=i, text=text) for i, text in enumerate(shape.openings)]
        async for event in generation.events():
            if isinstance(event, End):
                return answer(request, shape.whole(totals, event.usage))
            total = totals[event.index]
            total.text += event.text
            total.tool_calls += event.tool_calls
            total.logprobs += event.logprobs
            total.finish_reason = event.finish_reason
    raise AssertionError("a generation ends with End or raises")


async def _stream(
    request: web.Request,
    generation: Generation,
    encoding: Encoding,
    shape: Shape,
    include_usage: bool,
) -> web.StreamResponse:
    """Events as they come. A client that stops reading is cut off after `write_seconds`."""
    response = web.StreamResponse(headers={"Cache-Control": "no-store"})
    is_sse = encoding is Encoding.JSON
    response.content_type = "text/event-stream" if is_sse else encoding.value
    seconds = request.app[EDGE].config.server.write_seconds

    async def send(value: Any) -> None:
        data = encode(value, encoding)
        async with asyncio.timeout(seconds):
            await response.write(b"data: %b\n\n" % data if is_sse else data)

    try:
        await response.prepare(request)
        if not is_sse:
            await send(shape.header(generation.num_prompt_tokens))
        for i, text in enumerate(shape.openings):
            opening = Delta(index=i, text=text)
            if is_sse and (text or shape.is_chat):
                await send(shape.chunk(opening))
            elif text:
                await send(opening)
        try:
            async for event in generation.events():
                if not is_sse:
                    await send(event)
                elif isinstance(event, End):
                    if include_usage:
                        await send(shape.closing(event.usage))
                elif event.text or event.tool_calls or event.logprobs or event.finish_reason:
                    await send(shape.chunk(event))
            if is_sse:
                await response.write(b"data: [DONE]\n\n")
        except (TimeoutError, ConnectionError):
            raise
        except Exception as error:
            if not isinstance(error, ServiceError):
                log.exception("request %s failed", request[REQUEST_ID])
                error = EngineFailed("an internal error ended this stream; it has been logged")
            await send(error.to_dict() if is_sse else Failure(error.to_dict()["error"]))
        async with asyncio.timeout(seconds):
            await response.write_eof()
    except TimeoutError:
        log.warning("request %s: the client did not read for %g s", request[REQUEST_ID], seconds)
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        log.info("request %s: the client went away", request[REQUEST_ID])
    return response


async def models(request: web.Request) -> web.Response:
    """GET /v1/models"""
    return answer(request, {"object": "list", "data": [_model(request.app[EDGE])]})


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}"""
    edge = request.app[EDGE]
    served = _model(edge)
    if request.match_info["id"] != served["id"]:
        raise NotFound(f"this service has the model {served['id']!r} alone", param="model")
    return answer(request, served)


def _model(edge: Edge) -> dict[str, Any]:
    backend = edge.ready_backend()
    return {
        "id": backend.model_name,
        "object": "model",
        "created": backend.created,
        "owned_by": "radixsvc",
        "max_model_len": backend.engine.max_request_tokens,
    }


async def responses(request: web.Request) -> web.Response:
    """POST /v1/responses: declined, since it would keep conversations on the server."""
    raise NotFound("this service has no /v1/responses: use /v1/chat/completions")
