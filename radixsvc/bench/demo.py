"""What the cache does, step by step: on a small tree by hand, then on the running model.

The first part needs no model: its tokens are words, its pages hold four of them. Pictures are
by the tree's own printer. The second part repeats the same moves with real keys and values and
says what each took.
"""

from __future__ import annotations

import argparse
import textwrap

import numpy as np
import torch
from msgspec.structs import astuple

from radixsvc.bench.harness import complete, greedy
from radixsvc.bench.policies import NAMESPACE, Radix
from radixsvc.bench.report import format_rows
from radixsvc.bench.tiered import random_prompt, settle, tiered_engine
from radixsvc.cache import Lease
from radixsvc.completion import Tokens
from radixsvc.engine import Engine
from radixsvc.fetch import fetch
from radixsvc.inspection import format_tree
from radixsvc.model import load_model

PAGE_SIZE = 4
DEVICE_PAGES = 10
HOST_PAGES = 6
MOST_WORDS = 9  # of an edge in a picture

KIND = "you are a kind and patient helper"
TREES = f"{KIND} . what is a radix tree ?"
PAGES = f"{KIND} . what is a page table ?"
LONGER = f"{TREES} in two words"
STRANGERS = (
    "list five rivers of asia and how long each of them is in kilometres and in miles please",
    "which planets have rings and who was the first to see them through a telescope and when",
)
STRANGER = "write a poem about the sea and the wind that carries all our small boats home again now"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-model", action="store_true", help="the small tree only")
    parser.add_argument("--model", help="folder, .gguf file or hub id for the second part")
    parser.add_argument("--prompt-tokens", type=int, default=600, help="of the second part")


def run(args: argparse.Namespace) -> None:
    on_a_small_tree()
    if not args.no_model:
        on_the_model(args.model, args.prompt_tokens)


class SmallTree(Radix):
    """A cache over a handful of pages without memory, whose tokens are words."""

    def __init__(self) -> None:
        super().__init__((DEVICE_PAGES, HOST_PAGES, 0), PAGE_SIZE)
        self._ids: dict[str, int] = {}

    def ids(self, text: str) -> Tokens:
        return np.array([self._ids.setdefault(w, len(self._ids)) for w in text.split()], np.int32)

    def words(self, run: bytes) -> str:
        """An edge's words; of many the first and the last ones."""
        vocabulary = list(self._ids)
        words = [vocabulary[token] for token in np.frombuffer(run, np.int32)]
        if len(words) > MOST_WORDS:
            words[3:-3] = ["..."]
        return " ".join(words)

    def ask(self, text: str) -> Lease:
        """A request that runs until its lease is released."""
        tokens = self.ids(text)
        return self.take(tokens, len(tokens))

    def picture(self) -> None:
        """Draw the tree and the pages of both tiers."""
        while self.cache.is_moving:
            self.cache.poll()
        self.cache.check()
        lines = [format_tree(self.cache.tree, label=self.words)]
        for name, states in self.cache.stats().pages.items():
            lines.append(f"{name}: {', '.join(f'{n} {state}' for state, n in states.items() if n)}")
        print(textwrap.indent("\n".join(lines), "    ") + "\n")


def on_a_small_tree() -> None:
    """All moves in order, each with its picture."""
    print(
        f"A tree of words, {PAGE_SIZE} to a page, {DEVICE_PAGES} pages on the device, "
        f"{HOST_PAGES} on the host.\nAn edge tells its pages on each tier, the running "
        "requests that hold it (refs)\nand when it was last used, by the tree's clock.\n"
    )
    tree = SmallTree()
    step("1. A prompt nobody has sent before", "All of it is computed; its pages stay.")
    tree.ask(TREES).release()
    tree.picture()

    found = tree.cache.match(NAMESPACE, tree.ids(LONGER))
    step("2. Prefix match", f"Of {LONGER!r} the tree knows {found.length} tokens.")
    lease = tree.ask(LONGER)
    print(f"    from cache {lease.cached_len}, computed {lease.prompt_len - lease.cached_len}\n")
    lease.release()
    tree.picture()

    with tree.ask(PAGES) as lease:
        step(
            "3. Edge split",
            f"{PAGES!r} leaves the edge within its third page. The edge is cut at the page's "
            "start, and the words before the difference are copied into a page of its own: "
            f"{lease.cached_len} of {lease.prompt_len} tokens come from the cache, whatever the "
            "page size.",
        )
    tree.picture()

    step(
        "4. Reference counts",
        "Two requests run. What both stand on counts two; nothing with a count can go.",
    )
    with tree.ask(TREES), tree.ask(PAGES):
        tree.picture()

    step(
        "5. Demotion",
        "A stranger needs pages. The least recently used leaf goes from the device, its tail "
        "first, page by page; the part that others share stays. The coldest pages are copied to "
        "the host before their room is needed.",
    )
    tree.ask(STRANGER).release()
    tree.picture()

    found = tree.cache.match(NAMESPACE, tree.ids(LONGER))
    step(
        "6. Promotion",
        f"{LONGER!r} again: {found.device} tokens lie on the device and {found.host} on the "
        "host. These are copied back, where computing them would take longer.",
    )
    tree.ask(LONGER).release()
    tree.picture()

    step(
        "7. Eviction",
        "More strangers fill both tiers. What leaves the last one is gone; a ghost without pages "
        "stays for a while, to tell what more memory would have kept.",
    )
    for stranger in STRANGERS:
        tree.ask(stranger).release()
    tree.picture()


def step(title: str, text: str) -> None:
    print(title)
    print(textwrap.indent(textwrap.fill(text, 76), "   ") + "\n")


# -- on the model -----------------------------------------------------------------------------


def on_the_model(name: str | None, num_tokens: int) -> None:
    """The same moves on a model with three tiers, which promote always, each with its times."""
    model = load_model(fetch(name), None, torch.device("cpu"))
    print(
        f"The same on {model.info.name}: prompts of {num_tokens} tokens, 8 generated;\n"
        f"device and host hold {2 * num_tokens} tokens each, the disk twice that\n"
    )
    rows: list[tuple[str, ...]] = [
        ("", "prompt", "device", "host", "disk", "computed", "first token")
    ]

    def ask(title: str, engine: Engine, *prompts: Tokens) -> list[int]:
        outcomes = complete(engine, prompts, greedy(8))
        for outcome in outcomes:
            counts = (outcome.usage.prompt_tokens, *astuple(outcome.usage.sources))
            first = f"{1000 * outcome.first_token:,.1f} ms"
            rows.append((title, *(f"{n:,}" for n in counts), first))
        settle(engine)
        return outcomes[0].tokens

    def draw(title: str, engine: Engine) -> None:
        drawn = engine.call(lambda cache: cache.format_tree()).result()
        print(f"{title}:\n{textwrap.indent(drawn, '    ')}\n")

    first, end = random_prompt(0, num_tokens, model), random_prompt(1, 20, model)
    strangers = (random_prompt(seed, num_tokens, model) for seed in range(2, 8))
    size = 2 * num_tokens
    with (
        torch.inference_mode(),
        tiered_engine(model, None, size, size, 2 * size, "always") as engine,
    ):
        reply = ask("cold", engine, first)
        turn = np.concatenate([first, np.array(reply, np.int32), end])
        ask("follow-up turn", engine, turn)
        branch = np.concatenate([first[: num_tokens * 3 // 4 + 1], end])
        ask("branch in mid-edge", engine, branch)
        ask("two at once", engine, turn, branch)
        draw("The tree after these", engine)
        for _ in range(2):
            ask("stranger", engine, next(strangers))
        draw("After two strangers", engine)
        ask("follow-up again", engine, turn)
        for stranger in strangers:
            ask("stranger", engine, stranger)
        draw("After four more", engine)
        ask("follow-up again", engine, turn)
    print(format_rows(rows))
