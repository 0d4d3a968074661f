"""The radix tree: which tokens have keys and values, and in which pages. Metadata only.

Below each namespace hangs a tree of nodes (`node.py`). Inner nodes are whole pages long; a leaf
may end in a partly filled page, its stub. With pages of 4 tokens:

    "team a" --- [the cat sat on|the mat . It] -+- [was red and blue]
                                                +- [was old]               a stub
    "team b" --- [the cat sat on|a hat]

What always holds (`check` states it):

    1. A node's run begins with a whole page that no sibling begins with, or is a stub that no
       sibling begins with; so a child is found by the next page of a prompt alone.
    2. Pages on the device are a prefix of every path, and so is the union of all tiers.
    3. Referenced nodes are whole pages long. A node has at least its children's references,
       last use, priority and pins.
    4. On a list of victims a child stands before its parent, so its head is always a leaf of
       what lies on that tier.

A split is metadata; no page is copied or changed, and the object that was there stays the lower
part, so whoever holds it still holds the same path:

    locking 2 of 3 pages            inserting [a|b|x] where             a prompt that goes on
    of an edge                      [a|b|c] is                          after a stub

    [a|b|c]      [a|b] <- locked    [a|b|c]      [a|b] -+- [c]          [a|b|c-]     [a|b|c+|d]
             =>    |                         =>         +- [x]                   =>
                  [c]  <- same                                          [a|b] is locked, [c-] gives
                          object                                        way to [c+|d], and as a leaf
                                                                        that nobody else holds [a|b]
                                                                        is lengthened

A stub whose tokens the next page repeats and goes beyond is dropped for it. A node left with one
child, both unreferenced and last used together, is merged with it:

    [a|b] -+- [c]      [a|b] --- [c]      [a|b|c]
           +- [x]  =>                 =>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from radixsvc.match import Match, match_below, num_known
from radixsvc.node import (
    DEVICE,
    DISK,
    PAGE_ID_BYTES,
    PAGES,
    TOKEN_BYTES,
    Account,
    Children,
    Node,
    common_prefix,
    resident,
)
from radixsvc.structure import Structure
from tiers.page import InvariantError, PageIds


class Inserted(NamedTuple):
    """`node` is the locked end of the path, `pages` what the tree holds there, packed."""

    node: Node
    pages: bytes


class RadixTree(Structure):
    """All namespaces' trees; `ghost_pages` says for each tier how many pages of ghosts are kept.

    Tokens and page ids go in and out packed, as the bytes of int32 arrays. Page ids are only
    passed through; those the tree let go of are collected by `take_freed`. One thread.
    """

    def __init__(self, page_size: int, ghost_pages: Sequence[int] = (0,)) -> None:
        super().__init__(ghost_pages, page_size * TOKEN_BYTES)
        self.page_size = page_size
        self.clock = 0

    # -- reading ------------------------------------------------------------------------------

    def match(self, namespace: str, tokens: bytes, ghosts: bool = False) -> Match:
        """The longest known prefix of `tokens`, see `match_below`. Changes nothing."""
        root = self.roots.get(namespace) or Node(b"", self.shared)
        return match_below(root, tokens, self.page_bytes, ghosts)

    def hits_at_double(self, namespace: str, tokens: bytes) -> list[int]:
        """For each tier, how many leading tokens neither it nor a faster one holds, though it
        would if it were larger by its ghosts.

        That is the estimate of `Ghosts` for nodes that left the tier whole; what is missing of one
        that still lies there in part has only just gone.
        """
        counts = [0] * len(PAGES)
        found = self.match(namespace, tokens, ghosts=True)
        left = found.num_tokens
        for node in self.path(found.end):
            # Tokens in each page of the node, and whether a tier has it
            sizes = np.arange(min(left, len(node.tokens) // TOKEN_BYTES), 0, -self.page_size)
            missing = np.minimum(sizes, self.page_size)
            left -= int(missing.sum())
            for level in range(self.num_tiers):
                ids = np.frombuffer(node[level], np.int32)[: len(missing)]
                missing[: len(ids)][ids >= 0] = 0
                if level == DISK:  # takes no partly filled pages
                    missing[len(node.tokens) // self.page_bytes :] = 0
                if node[level] or node in self.ghosts.left[level]:
                    counts[level] += int(missing.sum())
        return counts

    # -- holding ------------------------------------------------------------------------------

    def root(self, namespace: str, account: str = "") -> Node:
        """The namespace's root, made if need be: of that account if there is one, else shared."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(b"", self.accounts.get(account, self.shared))
            self.namespaces[root] = namespace
        return root

    def lock(self, node: Node, used: int, priority: int = 0) -> Node:
        """Reference the path to the first `used` bytes of a node's run; returns its end.

        Splits the node there. Undone by `unlock`.
        """
        end = node = self._upper(node, used)
        self.clock += 1
        while True:
            self._touch(node, priority)
            if node.parent is None:
                return end
            node = node.parent

    def _touch(self, node: Node, priority: int) -> None:
        node.refs += 1
        if node.refs == 1:
            self._leave(node)
        if node.priority < priority:
            node.priority = priority
        node.last_use = self.clock
        node.uses += 1

    def unlock(self, node: Node) -> None:
        """Let a path go. Flushed nodes that nobody else holds are freed."""
        self.clock += 1
        while True:
            parent = node.parent
            node.refs -= 1
            node.last_use = self.clock
            if node.refs < 0:
                raise InvariantError("a path was unlocked more often than locked")
            if parent is None:
                break
            if node.refs == 0:
                if node.account is self.flushed:
                    self._take_out(node)
                else:
                    self._enter(node)
                    self._merge_below(node)
                    self._drop_if_bare(node)
            node = parent
        self._drop_root_if_bare(node)

    def insert(self, node: Node, tokens: bytes, pages: bytes, priority: int = 0) -> Inserted:
        """Add device `pages` for `tokens` behind a node that the caller has locked to its end.

        Where the tree has pages for the same tokens already, it keeps its own: the caller's are
        wherever `Inserted.pages` differs, and stay the caller's. Nodes passed and made are
        locked for the caller. A last page that is partly filled is not kept (and not in
        `Inserted.pages`) where the tree knows more of its tokens.
        """
        page_bytes = self.page_bytes
        pos = 0
        kept: list[bytes] = []
        while pos < len(tokens):
            page = tokens[pos : pos + page_bytes]
            child = self._child_for(node, page)
            if child is None:
                rest = pages[pos // page_bytes * PAGE_ID_BYTES :]
                kept.append(rest)
                node = self._grow(node, tokens[pos:], rest, priority)
                break
            if len(page) < page_bytes:
                break
            run = child.tokens
            if not tokens.startswith(run, pos) or len(run) % page_bytes:
                common = common_prefix(run, tokens, pos)
                child = self._upper(child, common - common % page_bytes)
            self._touch(child, priority)
            start = pos // page_bytes * PAGE_ID_BYTES
            size = len(child.tokens) // page_bytes * PAGE_ID_BYTES
            if len(child.device) < size:
                more = pages[start + len(child.device) : start + size]
                self._place(child, DEVICE, child.device + more)
            kept.append(child.device)
            pos += len(child.tokens)
            node = child
        return Inserted(node, b"".join(kept))

    def _child_for(self, node: Node, page: bytes) -> Node | None:
        """The child that begins with `page`; if there is none, makes room for one that will.

        A stub that the page goes beyond gives way to it, ghosts that go beyond a stub to that.
        """
        while node.children is not None:
            children: Children = node.children
            before, child = children.near(page)
            if child is None or not child.tokens.startswith(page):
                if before is not None and page.startswith(before.tokens):
                    self._take_out(before)
                return None
            if len(page) == self.page_bytes or num_known(child, self.page_bytes):
                return child
            if child.refs or child.pins:
                return child  # what lay there was lost, and is yet to be let go of
            self._drop_loose(self._upwards(child))
        return None

    def _grow(self, node: Node, tokens: bytes, pages: bytes, priority: int) -> Node:
        """Lengthen a leaf that only the caller holds, else give it a child. Returns the end."""
        if node.refs == 1 and node.children is None and node.parent is not None and node.pins == 0:
            self.ghosts.forget(node)
            node.tokens += tokens
            self._place(node, DEVICE, node.device + pages)
            return node
        child = self._adopt(node, tokens)
        child.last_use = self.clock
        child.refs = child.uses = 1
        child.priority = priority
        self._place(child, DEVICE, pages)
        return child

    def graft(self, parent: Node, tokens: bytes, level: int, pages: PageIds) -> Node:
        """A new child, unreferenced, whose pages lie on one tier. It is as old as can be."""
        child = self._adopt(parent, tokens)
        self._place(child, level, pages.tobytes())
        return child

    # -- letting go ---------------------------------------------------------------------------

    def evict(self, num_pages: int, account: Account | None = None, level: int = DEVICE) -> int:
        """Let go of up to that many pages of a tier, least recently used first, tails first.

        Where nothing lies below the device, partly filled pages go before whole ones. Returns how
        many.
        """
        left = num_pages
        while left > 0:
            node = self.victim(level, account)
            if node is None:
                break
            stub = self.stub_before(node)
            if stub is not None:
                node = stub
                left -= self.keep(node, level, len(node.tokens) // self.page_bytes)
            else:
                left -= self.keep(node, level, max(0, len(node[level]) // PAGE_ID_BYTES - left))
            if self.num_tiers > 1:
                self._close_gap(node)
            elif not node.device:
                self._drop_if_bare(node)
        for node in self.ghosts.surplus():
            self._drop_if_bare(node)
        return num_pages - left

    def _close_gap(self, node: Node) -> None:
        """Let go of what lies behind a page that no tier holds any more."""
        known = num_known(node, self.page_bytes)
        behind = self._upwards(node) if known < self.num_pages(node) else [node]
        for one in behind:
            for level in range(self.num_tiers):
                self.keep(one, level, known if one is node else 0)
        for one in behind:
            self._drop_if_bare(one)

    def detach(self, lost: Sequence[PageIds]) -> None:
        """Let go of pages that are lost, by level, and of those that are of no use then.

        Looks at every node; for failures only.
        """
        touched: list[Node] = []
        for node in list(self.nodes()):
            for level, pages in enumerate(lost):
                held = np.frombuffer(node[level], np.int32)
                gone = np.isin(held, pages)
                if not gone.any():
                    continue
                touched.append(node)
                if level == DEVICE:
                    self.keep(node, DEVICE, int(gone.argmax()))
                    for below in self._below(node):
                        self.keep(below, DEVICE, 0)
                else:
                    self._freed[level].append(held[gone].tobytes())
                    self._place(node, level, np.where(gone, np.int32(-1), held).tobytes())
        for node in touched:
            if node.parent is not None:
                self._close_gap(node)

    def prune(self, node: Node) -> None:
        """Drop a node, all below it and the leaves left above it, save held and pinned ones."""
        self._drop_loose([*self._upwards(node), *self.path(node)[-2::-1]])

    def flush(self) -> None:
        """Empty the tree. Paths under leases are cut off now and freed by their last `unlock`."""
        for root in list(self.roots.values()):
            for node in self._upwards(root)[:-1]:
                if node.refs == 0:
                    self._take_out(node)
                    continue
                self.ghosts.forget(node)
                for level in range(self.num_tiers):
                    count = resident(node[level])
                    node.account.resident[level] -= count
                    self.flushed.resident[level] += count
                node.account = self.flushed
            root.account = self.flushed
        self.roots = {}
