"""Workloads: what clients ask for, in what order, and what they share.

A workload is a list of sessions. A session is a coroutine that sends calls and builds the next
one from the replies, so the same session runs against a server (`bench serve`) or against
nothing but a cache (`simulate`). All text is drawn from a seed: same arguments, same workload.

    chat         turn k + 1 repeats turn k and its reply; one system prompt per session
    agent        the same with tools and one system prompt that all agents share, or several
    tree         a tree of thought: every node's prompt is the path from the root to it
    samples      n answers to one prompt
    few-shot     one block of examples, many questions
    shared       groups of prompts in random order, one system prompt a group
    documents    single-turn, nothing in common
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

from radixsvc.bench.calls import WORDS, Call, Message, Reply, Send, Session, system, text, user
from radixsvc.bench.traces import replay
from radixsvc.errors import SetupError

# -- chat and agents --------------------------------------------------------------------------


async def chat(args: argparse.Namespace, index: int, send: Send) -> None:
    rng = random.Random(f"{args.seed} chat {index}")
    messages = [system(f"Session {index}. {text(rng, args.system_words)}")]
    for turn in range(args.turns):
        messages.append(user(text(rng, args.turn_words)))
        replies = await send(Call(f"chat {index} {turn}", turn, args.out, list(messages)))
        if not replies:
            return
        messages.append(replies[0].message)


async def agent(args: argparse.Namespace, index: int, send: Send) -> None:
    shared = random.Random(f"{args.seed} agent")
    prompts = [text(shared, args.system_words) for _ in range(args.systems)]
    tools = [tool(shared) for _ in range(args.tools)]
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


async def tree(args: argparse.Namespace, index: int, send: Send) -> None:
    rng = random.Random(f"{args.seed} tree {index}")
    root = [system(text(rng, args.system_words)), user(f"Problem {index}: {text(rng, 60)}")]

    async def expand(messages: list[Message], path: str, depth: int) -> None:
        replies = await send(Call(f"tree {path}", depth, args.out, messages, temperature=0.8))
        if not replies or depth == args.depth:
            return
        so_far = [*messages, replies[0].message]
        steps = [user(f"Step {depth + 1}, way {b + 1}: go on.") for b in range(args.branch)]
        await asyncio.gather(
            *(expand([*so_far, step], f"{path}.{b}", depth + 1) for b, step in enumerate(steps))
        )

    await expand(root, str(index), 0)


async def samples(args: argparse.Namespace, index: int, send: Send) -> None:
    rng = random.Random(f"{args.seed} samples {index}")
    messages = [system(text(rng, args.system_words)), user(text(rng, args.turn_words))]
    times, n = (1, args.samples) if args.native_n else (args.samples, 1)
    await asyncio.gather(
        *(
            send(Call(f"samples {index} {i}", 0, args.out, messages, temperature=0.8, n=n))
            for i in range(times)
        )
    )


# -- single turns -----------------------------------------------------------------------------


async def few_shot(args: argparse.Namespace, index: int, send: Send) -> None:
    rng = random.Random(f"{args.seed} few-shot")
    messages: list[Message] = [system("Answer as the examples do.")]
    for _ in range(args.shots):
        messages.append(user(f"Question: {text(rng, 40)}"))
        messages.append({"role": "assistant", "content": f"Answer: {text(rng, 20)}"})
    rng = random.Random(f"{args.seed} few-shot {index}")
    messages.append(user(f"Question: {text(rng, 40)}"))
    await send(Call(f"few-shot {index}", 0, args.out, messages))


async def shared(args: argparse.Namespace, index: int, send: Send) -> None:
    order = [*range(args.groups)] * args.prompts
    random.Random(f"{args.seed} shared").shuffle(order)
    of_group = random.Random(f"{args.seed} shared group {order[index]}")
    prefix = system(f"Group {order[index]}. {text(of_group, args.system_words)}")
    rng = random.Random(f"{args.seed} shared {index}")
    await send(Call(f"shared {index}", 0, args.out, [prefix, user(text(rng, args.turn_words))]))


async def documents(args: argparse.Namespace, index: int, send: Send) -> None:
    rng = random.Random(f"{args.seed} documents {index}")
    prompt = user(f"{index} {text(rng, args.document_words)} Summarise this.")
    await send(Call(f"documents {index}", 0, args.out, [prompt]))


WORKLOADS = {
    "chat": chat,
    "agent": agent,
    "tree": tree,
    "samples": samples,
    "few-shot": few_shot,
    "shared": shared,
    "documents": documents,
}
NAMES = (*WORKLOADS, "trace")


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    add = group.add_argument
    add(
        "--workload",
        action=_Workload,
        default="chat",
        metavar="NAME|FILE",
        help=f"{', '.join(NAMES)}, or a TOML file that names one and sets other options",
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


class _Workload(argparse.Action):
    """Takes a workload's name, or all options from a file; what follows on the line wins."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, value: Any, option: Any = None
    ) -> None:
        options = {"workload": value}
        if value not in NAMES:
            try:
                options = tomllib.loads(Path(value).read_text())
            except (OSError, ValueError) as error:
                parser.error(f"--workload {value}: {error}; or one of {', '.join(NAMES)}")
        for name, given in options.items():
            if not hasattr(namespace, name) or (name == "workload" and given not in NAMES):
                parser.error(f"--workload {value}: {name} = {given!r} is unknown")
            setattr(namespace, name, given)


def build_workload(args: argparse.Namespace) -> list[Session]:
    if args.workload == "trace":
        if len(args.trace) != 1:
            raise SetupError("--workload trace needs one file: --trace PATH", 2)
        return replay(args)
    session = WORKLOADS[args.workload]
    count = args.groups * args.prompts if args.workload == "shared" else args.sessions
    return [Session(partial(session, args, index)) for index in range(count)]
