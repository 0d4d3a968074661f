"""Workloads: what clients ask for, in what order, and what they share.

A workload is a list of sessions. A session is a coroutine that sends calls and builds the next
one from the replies, so the same session runs against a server (`bench serve`) or against
nothing but a cache (`simulate`). All text is drawn from a seed: same arguments, same workload.

    chat         turn k + 1 repeats turn k and its reply; one system prompt per session
    agent        the same with tools and one long system prompt that all agents share
    tree         a tree of thought: every node's prompt is the path from the root to it
    samples      n answers to one prompt
    few-shot     one block of examples, many questions
    shared       groups of prompts, one system prompt a group
    documents    single-turn, nothing in common
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from radixsvc.request import Tokens

Message = dict[str, Any]

WORDS = (
    "able above across again ago air almost alone along also always among animal answer area "
    "arm ask away back bad ball bank base bear bed before begin behind best better between big "
    "bird black blood blue board boat body book both box boy bring brother build business buy "
    "call came car care carry case catch cause center change child church city class clear close "
    "cold color come common corner cost could country course cover cross cut dark daughter day "
    "deep did different dinner doctor does dog door down draw dream drive dry each ear early "
    "earth east eat edge else end energy enough even evening ever every example eye face fact "
    "fall family far farm fast father feel feet field figure fill final find fine fire first "
    "fish five floor fly follow food foot force form found four free friend front full game "
    "garden gave general girl give glass gold gone good government great green ground group grow"
).split()

BLOCK_TOKENS = 512  # what one hash id of a trace stands for


@dataclass(frozen=True)
class Call:
    """One request of a session. Either `messages` (chat) or `tokens` (a bare completion).

    `turn` counts from 0; later turns build on earlier replies. `key` names the call within its
    workload and seeds its sampling.
    """

    key: str
    turn: int
    max_tokens: int
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    tokens: Tokens | None = None
    temperature: float = 0.0
    n: int = 1

    @property
    def seed(self) -> int:
        return random.Random(self.key).getrandbits(31)


@dataclass(frozen=True)
class Reply:
    """One answer: its text, and the tools it calls in OpenAI's form."""

    text: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def message(self) -> Message:
        """As the assistant's message of the next turn."""
        if self.tool_calls:
            return {"role": "assistant", "content": self.text, "tool_calls": self.tool_calls}
        return {"role": "assistant", "content": self.text or "ok"}


class Send(Protocol):
    """Carries out a call and returns its `n` replies; none where it failed."""

    def __call__(self, call: Call, /) -> Awaitable[list[Reply]]: ...


@dataclass(frozen=True)
class Session:
    """`start`: seconds after the run's start, or None where the arrival process decides."""

    run: Callable[[Send], Awaitable[None]]
    start: float | None = None


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


# -- chat and agents --------------------------------------------------------------------------


def chat(args: argparse.Namespace) -> list[Session]:
    async def session(index: int, send: Send) -> None:
        rng = random.Random(f"{args.seed} chat {index}")
        messages = [system(f"Session {index}. {text(rng, args.system_words)}")]
        for turn in range(args.turns):
            messages.append(user(text(rng, args.turn_words)))
            replies = await send(Call(f"chat {index} {turn}", turn, args.out, list(messages)))
            if not replies:
                return
            messages.append(replies[0].message)

    return [Session(partial(session, i)) for i in range(args.sessions)]


def agent(args: argparse.Namespace) -> list[Session]:
    shared = random.Random(f"{args.seed} agent")
    prompt = text(shared, args.system_words)
    tools = [tool(shared) for _ in range(args.tools)]

    async def session(index: int, send: Send) -> None:
        rng = random.Random(f"{args.seed} agent {index}")
        messages = [system(prompt), user(f"Agent {index}: {text(rng, args.turn_words)}")]
        for turn in range(args.turns):
            listed = rng.sample(tools, len(tools)) if args.shuffle_tools else tools
            call = Call(f"agent {index} {turn}", turn, args.out, list(messages), listed)
            replies = await send(call)
            if not replies:
                return
            result = f"Result of step {turn}: {text(rng, args.turn_words)}"
            messages += [replies[0].message, *tool_results(replies[0], result)]

    return [Session(partial(session, i)) for i in range(args.sessions)]


def tool(rng: random.Random) -> dict[str, Any]:
    """A function's description as OpenAI's API takes it."""
    name = "_".join(rng.sample(WORDS, 2))
    parameters = {
        "type": "object",
        "properties": {
            word: {"type": "string", "description": text(rng, 8)} for word in rng.sample(WORDS, 3)
        },
    }
    function = {"name": name, "description": text(rng, 12), "parameters": parameters}
    return {"type": "function", "function": function}


def tool_results(reply: Reply, result: str) -> list[Message]:
    """The messages that carry a result back: to the tools called, or else from the user."""
    calls = reply.tool_calls
    if not calls:
        return [user(result)]
    return [{"role": "tool", "tool_call_id": c.get("id", ""), "content": result} for c in calls]


# -- branches ---------------------------------------------------------------------------------


def tree(args: argparse.Namespace) -> list[Session]:
    async def session(index: int, send: Send) -> None:
        rng = random.Random(f"{args.seed} tree {index}")
        root = [system(text(rng, args.system_words)), user(f"Problem {index}: {text(rng, 60)}")]

        async def expand(messages: list[Message], path: str, depth: int) -> None:
            call = Call(f"tree {path}", depth, args.out, messages, temperature=0.8)
            replies = await send(call)
            if not replies or depth == args.depth:
                return
            so_far = [*messages, replies[0].message]
            steps = [user(f"Step {depth + 1}, way {b + 1}: go on.") for b in range(args.branch)]
            await asyncio.gather(
                *(expand([*so_far, step], f"{path}.{b}", depth + 1) for b, step in enumerate(steps))
            )

        await expand(root, str(index), 0)

    return [Session(partial(session, i)) for i in range(args.sessions)]


def samples(args: argparse.Namespace) -> list[Session]:
    async def session(index: int, send: Send) -> None:
        rng = random.Random(f"{args.seed} samples {index}")
        messages = [system(text(rng, args.system_words)), user(text(rng, args.turn_words))]
        if args.native_n:
            call = Call(f"samples {index}", 0, args.out, messages, temperature=0.8, n=args.samples)
            await send(call)
            return
        calls = [
            Call(f"samples {index} {i}", 0, args.out, messages, temperature=0.8)
            for i in range(args.samples)
        ]
        await asyncio.gather(*(send(call) for call in calls))

    return [Session(partial(session, i)) for i in range(args.sessions)]


# -- single turns -----------------------------------------------------------------------------


def few_shot(args: argparse.Namespace) -> list[Session]:
    rng = random.Random(f"{args.seed} few-shot")
    examples: list[Message] = [system("Answer as the examples do.")]
    for _ in range(args.shots):
        examples.append(user(f"Question: {text(rng, 40)}"))
        examples.append({"role": "assistant", "content": f"Answer: {text(rng, 20)}"})
    questions = [[*examples, user(f"Question: {text(rng, 40)}")] for _ in range(args.sessions)]
    return [single(f"few-shot {i}", m, args.out) for i, m in enumerate(questions)]


def shared(args: argparse.Namespace) -> list[Session]:
    rng = random.Random(f"{args.seed} shared")
    prompts = []
    for group in range(args.groups):
        prefix = system(f"Group {group}. {text(rng, args.system_words)}")
        prompts += [[prefix, user(text(rng, args.turn_words))] for _ in range(args.prompts)]
    rng.shuffle(prompts)
    return [single(f"shared {i}", m, args.out) for i, m in enumerate(prompts)]


def documents(args: argparse.Namespace) -> list[Session]:
    rng = random.Random(f"{args.seed} documents")
    prompts = [
        [user(f"{i} {text(rng, args.document_words)} Summarise this.")]
        for i in range(args.sessions)
    ]
    return [single(f"documents {i}", m, args.out) for i, m in enumerate(prompts)]


def single(key: str, messages: list[Message], max_tokens: int) -> Session:
    async def run(send: Send) -> None:
        await send(Call(key, 0, max_tokens, messages))

    return Session(run)


# -- traces -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TraceLine:
    """One request of a trace: seconds from its start, tokens in and out, ids of its blocks.

    The prompt's blocks are of 512 tokens, the last may be shorter. Equal ids stand for equal
    prefixes up to and including that block.
    """

    time: float
    input_len: int
    output_len: int
    blocks: Tokens


def read_trace(path: Path, limit: int | None = None) -> list[TraceLine]:
    """A trace in the form published with Mooncake (FAST '25), one JSON object a line.

    Raises ValueError with the line's number where it is of another form.
    """
    return list(_lines(path, limit))


def _lines(path: Path, limit: int | None) -> Iterator[TraceLine]:
    with path.open() as file:
        for number, line in enumerate(file, 1):
            if limit is not None and number > limit:
                return
            try:
                entry = json.loads(line)
                blocks = np.array(entry["hash_ids"], np.int32)
                input_len = int(entry["input_length"])
                time = float(entry["timestamp"]) / 1000
                output_len = int(entry["output_length"])
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise ValueError(f"{path}, line {number}: not a trace's line ({error!r})") from None
            if input_len < 1 or len(blocks) != -(-input_len // BLOCK_TOKENS):
                raise ValueError(
                    f"{path}, line {number}: {len(blocks)} blocks of {BLOCK_TOKENS} tokens can't "
                    f"hold a prompt of {input_len}"
                )
            yield TraceLine(time, input_len, output_len, blocks)


def replay(args: argparse.Namespace) -> list[Session]:
    """A trace's requests at their own times; text or token ids drawn from the blocks' ids.

    `scale` shrinks every block and output, so that a small machine can follow.
    """
    sessions = []
    for i, line in enumerate(read_trace(Path(args.trace), args.limit)):
        out = max(1, round(min(line.output_len, args.out or line.output_len) * args.scale))
        call = partial(Call, f"replay {i}", 0, out)
        if args.prompt_as == "tokens":
            call = partial(call, tokens=block_tokens(line, args.scale, args.vocab))
        else:
            call = partial(call, messages=[user(block_text(line, args.scale))])
        sessions.append(Session(partial(_send_one, call), line.time / args.speed))
    return sessions


async def _send_one(call: Callable[[], Call], send: Send) -> None:
    await send(call())


def block_sizes(line: TraceLine, scale: float) -> list[int]:
    """Tokens of each block; all but the last are whole, and never less than one."""
    whole = max(1, round(BLOCK_TOKENS * scale))
    last = line.input_len - BLOCK_TOKENS * (len(line.blocks) - 1)
    return [whole] * (len(line.blocks) - 1) + [max(1, round(last * scale))]


def block_text(line: TraceLine, scale: float) -> str:
    """A word for a token: the words are common, so most are one token to most tokenizers."""
    parts = zip(line.blocks, block_sizes(line, scale), strict=True)
    return " ".join(text(random.Random(f"block {block}"), size) for block, size in parts)


def block_tokens(line: TraceLine, scale: float, vocab_size: int) -> Tokens:
    """Token ids in the vocabulary's upper half, clear of special tokens."""
    parts = [
        np.random.default_rng(int(block)).integers(vocab_size // 2, vocab_size, size)
        for block, size in zip(line.blocks, block_sizes(line, scale), strict=True)
    ]
    return np.concatenate(parts).astype(np.int32)


WORKLOADS: dict[str, Callable[[argparse.Namespace], list[Session]]] = {
    "chat": chat,
    "agent": agent,
    "tree": tree,
    "samples": samples,
    "few-shot": few_shot,
    "shared": shared,
    "documents": documents,
    "trace": replay,
}


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    add = group.add_argument
    add("--workload", choices=WORKLOADS, default="chat")
    add("--seed", type=int, default=0)
    add("--sessions", type=int, default=8, help="conversations, agents, trees or prompts")
    add("--turns", type=int, default=4, help="turns of a chat or steps of an agent")
    add("--system-words", type=int, default=400, help="words of a system prompt")
    add("--turn-words", type=int, default=60, help="words of a user's turn or a tool's result")
    add("--out", type=int, default=32, help="tokens to generate, at most")
    add("--tools", type=int, default=6, help="tools that agents list")
    add("--shuffle-tools", action="store_true", help="list them in another order every time")
    add("--branch", type=int, default=3, help="branching factor of a tree of thought")
    add("--depth", type=int, default=2, help="depth of a tree of thought")
    add("--samples", type=int, default=8, help="answers to one prompt")
    add("--native-n", action="store_true", help="ask for them in one request with n")
    add("--shots", type=int, default=16, help="examples of the few-shot prompt")
    add("--groups", type=int, default=4, help="system prompts shared")
    add("--prompts", type=int, default=8, help="prompts in each of those groups")
    add("--document-words", type=int, default=800)
    add("--trace", help="trace file to replay, with --workload trace")
    add("--limit", type=int, help="requests of the trace to read")
    add("--speed", type=float, default=1.0, help="run the trace's clock this many times faster")
    add("--scale", type=float, default=1.0, help="shrink the trace's prompts and outputs")
    add("--prompt-as", choices=("text", "tokens"), default="text", help="a trace's prompts")
    add("--vocab", type=int, default=32_000, help="vocabulary for --prompt-as tokens")


def build_workload(args: argparse.Namespace) -> list[Session]:
    if args.workload == "trace" and not args.trace:
        raise ValueError("--workload trace needs a file: --trace PATH")
    return WORKLOADS[args.workload](args)
