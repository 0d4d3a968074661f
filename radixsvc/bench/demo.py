"""What the cache does, step by step: on a small tree by hand, then on the running model.

The first part needs no model: its tokens are words, its pages hold four of them. Pictures are
by the tree's own printer. The second part repeats the same moves with real keys and values and
says what each took.
"""

from __future__ import annotations

import argparse
import tempfile
import textwrap
import time
from functools import partial
from typing import cast

import numpy as np
import torch

from radixsvc.bench.harness import Outcome, complete, greedy, running_engine
from radixsvc.bench.ledgers import InstantMover, LedgerTier
from radixsvc.bench.report import format_rows
from radixsvc.cache import Lease, Lower, PrefixCache
from radixsvc.config import load
from radixsvc.engine import Engine
from radixsvc.fetch import fetch
from radixsvc.inspection import format_tree
from radixsvc.model import load_model
from radixsvc.request import Tokens
from radixsvc.startup import build_lower
from tiers.base import LEDGER_BYTES
from tiers.device import DeviceTier
from tiers.mover import Mover

NAMESPACE = "demo"
PAGE_SIZE = 4
DEVICE_PAGES = 10
HOST_PAGES = 6
DISK_SLOT_BYTES = 8192  # of headers and rounding beside a page, at most

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
        return " ".join(self._vocabulary[token] for token in np.frombuffer(run, np.int32))

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
            f"{HOST_PAGES} on the host\n"
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
            "A stranger needs pages. The least recently used leaf goes to the host, from its "
            "tail, page by page; the part that others share stays.",
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
    print(textwrap.indent(textwrap.fill(text, 90), "   ") + "\n")


# -- on the model -----------------------------------------------------------------------------


def on_the_model(name: str | None, num_tokens: int) -> None:
    """The same moves on a model with three tiers, each with its times."""
    model = load_model(fetch(name), None, torch.device("cpu"))
    print(
        f"The same on {model.info.name}: prompts of {num_tokens} tokens, 8 tokens generated; the "
        f"device holds {2 * num_tokens} tokens, the host as many, the disk twice that\n"
    )
    rng = np.random.default_rng(0)
    rows: list[tuple[str, ...]] = [
        ("", "prompt", "device", "host", "disk", "computed", "first token", "all")
    ]

    def make(length: int) -> Tokens:
        return rng.integers(100, model.info.vocab_size, length).astype(np.int32)

    def ask(title: str, engine: Engine, *prompts: Tokens) -> list[Outcome]:
        outcomes = complete(engine, prompts, greedy(8), NAMESPACE)
        rows.extend(row(title, outcome) for outcome in outcomes)
        settle(engine)
        return outcomes

    first = make(num_tokens)
    with (
        tempfile.TemporaryDirectory() as folder,
        torch.inference_mode(),
        running_engine(
            model, 2 * num_tokens, build_lower=partial(lower_tiers, folder, num_tokens)
        ) as engine,
    ):
        [cold] = ask("cold", engine, first)
        turn = np.concatenate([first, np.array(cold.tokens, np.int32), make(20)])
        ask("follow-up turn", engine, turn)
        branch = np.concatenate([first[: num_tokens * 3 // 4 + 1], make(20)])
        ask("branch in mid-edge", engine, branch)
        ask("two at once", engine, turn, branch)
        print(drawn_tree("The tree after these", engine))
        ask("a stranger, who demotes", engine, make(num_tokens))
        ask("another stranger", engine, make(num_tokens))
        print(drawn_tree("After two strangers", engine))
        ask("the first turn again", engine, turn)
        for _ in range(4):
            ask("more strangers", engine, make(num_tokens))
        print(drawn_tree("After four more", engine))
        ask("the first turn again", engine, turn)
    print(format_rows(rows))


def lower_tiers(folder: str, num_tokens: int, device: DeviceTier) -> Lower | None:
    """A host tier and a disk tier in `folder`. They promote always, whatever it costs here."""
    num_pages = -(-2 * num_tokens // device.shape.page_size)
    loaded = load(
        sets=[
            f"tiers.host.size={num_pages * (device.page_bytes + LEDGER_BYTES)}B",
            f"tiers.disk.size={2 * num_pages * (device.page_bytes + DISK_SLOT_BYTES)}B",
            f"tiers.disk.path={folder}",
            "tiers.promote=always",
        ]
    )
    return build_lower(loaded.config, device, bytes(32))


def settle(engine: Engine) -> None:
    """Wait for copies in the background, so that every run shows the same."""
    while engine.call(lambda cache: cache.is_moving).result():
        time.sleep(0.001)


def row(title: str, outcome: Outcome) -> tuple[str, ...]:
    usage = outcome.usage
    found = usage.sources
    counts = (usage.prompt_tokens, found.device, found.host, found.disk, found.computed)
    times = (outcome.first_token, outcome.total)
    return (title, *(f"{n:,}" for n in counts), *(f"{1000 * t:,.1f} ms" for t in times))


def drawn_tree(title: str, engine: Engine) -> str:
    drawn = engine.call(lambda cache: cache.format_tree()).result()
    return f"{title}:\n{textwrap.indent(drawn, '    ')}\n"
