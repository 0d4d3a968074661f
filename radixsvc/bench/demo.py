"""What the cache does, step by step: on a small tree by hand, then on the running model.

The first part needs no model: its tokens are words, its pages hold four of them. Pictures are
by the tree's own printer. The second part repeats the same moves with real keys and values and
says what each took.
"""

from __future__ import annotations

import argparse
import textwrap
from typing import cast

import numpy as np
import torch

from radixsvc.bench.harness import complete, greedy
from radixsvc.bench.ledgers import InstantMover, LedgerTier
from radixsvc.bench.report import format_rows
from radixsvc.bench.tiered import random_prompt, settle, tiered_engine
from radixsvc.cache import Lease, Lower, PrefixCache
from radixsvc.engine import Engine
from radixsvc.fetch import fetch
from radixsvc.inspection import format_tree
from radixsvc.model import load_model
from radixsvc.request import Tokens
from tiers.mover import Mover

NAMESPACE = "demo"
PAGE_SIZE = 4
DEVICE_PAGES = 10
HOST_PAGES = 6
MOST_WORDS = 9  # of an edge in a picture

KIND = "you are a kind and patient helper"
TREES = f"{KIND} . what is a radix tree ?"
PAGES = f"{KIND} . what is a page table ?"
STRANGERS = (
    "list five rivers of asia and how long each of them is in kilometres and in miles please",
    "which planets have rings and who was the first to see them through a telescope and when",
)
STRANGER = "write a poem about the sea and the wind that carries all our small boats home again now"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-model", action="store_true", help="the small tree only")
    parser.add_argument("--model", help="folder, .gguf file or hub id for the second part")
    parser.add_argument("--prompt-tokens", type=int, default=600, help="of the second part")


def run(args: argparse.Namespace) -> int:
    SmallTree().show()
    if not args.no_model:
        on_the_model(args.model, args.prompt_tokens)
    return 0


class SmallTree:
    """A cache over a handful of pages without memory, whose tokens are words."""

    def __init__(self) -> None:
        self.host = LedgerTier("host", HOST_PAGES)
        mover = cast(Mover, InstantMover({}))
        lower = Lower(mover, self.host, None, fingerprint=bytes(32))
        self.cache = PrefixCache(LedgerTier("device", DEVICE_PAGES), PAGE_SIZE, lower=lower)
        self._vocabulary: list[str] = []

    def tokens(self, text: str) -> Tokens:
        for word in text.split():
            if word not in self._vocabulary:
                self._vocabulary.append(word)
        return np.array([self._vocabulary.index(word) for word in text.split()], np.int32)

    def words(self, run: bytes) -> str:
        """An edge's words; of many the first and the last ones."""
        words = [self._vocabulary[token] for token in np.frombuffer(run, np.int32)]
        if len(words) > MOST_WORDS:
            words[3:-3] = ["..."]
        return " ".join(words)

    def take(self, text: str) -> Lease:
        """A lease of a prompt, all of it loaded or computed, and committed."""
        tokens = self.tokens(text)
        self.cache.poll()
        lease = self.cache.acquire(NAMESPACE, tokens)
        while not lease.poll():
            self.cache.poll()
        lease.extend(len(tokens))
        lease.commit(len(tokens))
        return lease

    def picture(self) -> None:
        """The tree and the pages of both tiers."""
        while self.cache.is_moving:
            self.cache.poll()
        self.cache.check()
        lines = [format_tree(self.cache.tree, label=self.words)]
        for name, tier in (("device", self.cache.device), ("host", self.host)):
            states = [f"{n} {state}" for state, n in tier.count().items() if n]
            lines.append(f"{name}: {', '.join(states)}")
        print(textwrap.indent("\n".join(lines), "    ") + "\n")

    def show(self) -> None:
        """All steps in order."""
        print(
            f"A tree of words, {PAGE_SIZE} to a page, {DEVICE_PAGES} pages on the device, "
            f"{HOST_PAGES} on the host.\nAn edge tells its pages on each tier, the running "
            "requests that hold it (refs)\nand when it was last used, by the tree's clock.\n"
        )
        self._prefix_match()
        self._edge_split()
        self._reference_counts()
        self._demotion()
        self._promotion()
        self._eviction()

    def _prefix_match(self) -> None:
        step(1, "A prompt nobody has sent before", "All of it is computed; its pages stay.")
        self.take(TREES).release()
        self.picture()
        longer = f"{TREES} in two words"
        found = self.cache.match(NAMESPACE, self.tokens(longer))
        step(2, "Prefix match", f"Of {longer!r} the tree knows {found.length} tokens.")
        lease = self.take(longer)
        print(
            f"    from cache {lease.cached_len}, computed {lease.prompt_len - lease.cached_len}\n"
        )
        lease.release()
        self.picture()

    def _edge_split(self) -> None:
        lease = self.take(PAGES)
        step(
            3,
            "Edge split",
            f"{PAGES!r} leaves the edge within its third page. The edge is cut at the page's "
            f"start, and the words before the difference are copied into a page of its own: "
            f"{lease.cached_len} of {lease.prompt_len} tokens come from the cache, whatever the "
            f"page size.",
        )
        lease.release()
        self.picture()

    def _reference_counts(self) -> None:
        leases = [self.take(TREES), self.take(PAGES)]
        step(
            4,
            "Reference counts",
            "Two requests run. What both stand on counts two; nothing with a count can go.",
        )
        self.picture()
        for lease in leases:
            lease.release()

    def _demotion(self) -> None:
        lease = self.take(STRANGER)
        step(
            5,
            "Demotion",
            "A stranger needs pages. The least recently used leaf goes from the device, its tail "
            "first, page by page; the part that others share stays. The coldest pages are copied "
            "to the host before their room is needed.",
        )
        lease.release()
        self.picture()

    def _promotion(self) -> None:
        longer = f"{TREES} in two words"
        found = self.cache.match(NAMESPACE, self.tokens(longer))
        lease = self.take(longer)
        step(
            6,
            "Promotion",
            f"{longer!r} again: {found.device} tokens lie on the device and {found.host} on the "
            "host. These are copied back, where computing them would take longer.",
        )
        lease.release()
        self.picture()

    def _eviction(self) -> None:
        for stranger in STRANGERS:
            self.take(stranger).release()
        step(
            7,
            "Eviction",
            "More strangers fill both tiers. What leaves the last one is gone; a ghost without "
            "pages stays for a while, to tell what more memory would have kept.",
        )
        self.picture()


def step(number: int, title: str, text: str) -> None:
    print(f"{number}. {title}")
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
        outcomes = complete(engine, prompts, greedy(8), NAMESPACE)
        for outcome in outcomes:
            found = outcome.usage.sources
            counts = (
                outcome.usage.prompt_tokens,
                found.device,
                found.host,
                found.disk,
                found.computed,
            )
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
