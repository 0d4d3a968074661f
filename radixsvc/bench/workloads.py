"""Workloads: what clients ask for, in what order, and what they share.

A workload is a list of sessions. A session is a coroutine that sends calls and builds the next
one from the replies, so the same session runs against a server (`bench serve`) or against
nothing but a cache (`simulate`). All text is drawn from a seed: same arguments, same workload.

    chat         turn k + 1 repeats turn k and its reply; one system prompt per session
    agent        the same with tools and one system prompt that all agents share, or several
    tree         a tree of thought: every node's prompt is the path from the root to it
    samples      n answers to one prompt
    few-shot     one block of examples, many questions
    shared       groups of prompts, one system prompt a group
    documents    single-turn, nothing in common
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from radixsvc.bench.calls import WORDS, Call, Message, Reply, Send, Session, system, text, user
from radixsvc.bench.traces import replay

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
    prompts = [text(shared, args.system_words) for _ in range(args.systems)]
    tools = [tool(shared) for _ in range(args.tools)]

    async def session(index: int, send: Send) -> None:
        rng = random.Random(f"{args.seed} agent {index}")
        prompt = system(prompts[index % args.systems])
        messages = [prompt, user(f"Agent {index}: {text(rng, args.turn_words)}")]
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
    add(
        "--workload",
        action=_Workload,
        default="chat",
        metavar="NAME|FILE",
        help=f"{', '.join(WORKLOADS)}, or a TOML file that names one and sets other options",
    )
    add("--seed", type=int, default=0)
    add("--sessions", type=int, default=8, help="conversations, agents, trees or prompts")
    add("--turns", type=int, default=4, help="turns of a chat or steps of an agent")
    add("--system-words", type=int, default=400, help="words of a system prompt")
    add("--turn-words", type=int, default=60, help="words of a user's turn or a tool's result")
    add("--out", type=int, default=32, help="tokens to generate, at most")
    add("--systems", type=int, default=1, help="different system prompts among agents")
    add("--rotate", action="store_true", help="requests take turns at the server, not sessions")
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
    add("--trace", nargs="+", default=[], help="trace file to replay, with --workload trace")
    add("--limit", type=int, help="requests of the trace to read")
    add("--speed", type=float, default=1.0, help="run the trace's clock this many times faster")
    add("--scale", type=float, default=1.0, help="shrink the trace's prompts and outputs")
    add("--prompt-as", choices=("text", "tokens"), default="text", help="a trace's prompts")
    add("--vocab", type=int, default=32_000, help="vocabulary for --prompt-as tokens")


class _Workload(argparse.Action):
    """Takes a workload's name, or all options from a file; what follows on the line wins."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, value: Any, option: Any = None
    ) -> None:
        options = {"workload": value}
        if value not in WORKLOADS:
            try:
                options = tomllib.loads(Path(value).read_text())
            except (OSError, ValueError) as error:
                parser.error(f"--workload {value}: {error}; or one of {', '.join(WORKLOADS)}")
        for name, given in options.items():
            if not hasattr(namespace, name) or (name == "workload" and given not in WORKLOADS):
                parser.error(f"--workload {value}: {name} = {given!r} is unknown")
            setattr(namespace, name, given)


def build_workload(args: argparse.Namespace) -> list[Session]:
    if args.workload == "trace" and len(args.trace) != 1:
        raise ValueError("--workload trace needs one file: --trace PATH")
    return WORKLOADS[args.workload](args)
