"""How far a prompt is known: the descent through a tree, which only reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from radixsvc.node import PAGE_ID_BYTES, TOKEN_BYTES, Children, Node, common_prefix

GHOSTS_PASSED = 16  # on either side, when looking for the child that shares most of a page


class Match(NamedTuple):
    """How far a prompt is known; holds until the tree changes next.

    `node` is the deepest node reached and `used` the bytes of its run that match in whole pages;
    `length` counts all tokens matched so. `partial` more match within the next page, which is one
    of `end`: of `node` or a child of it.
    """

    node: Node
    used: int
    length: int
    partial: int
    end: Node

    @property
    def num_tokens(self) -> int:
        return self.length + self.partial


def match_below(node: Node, tokens: bytes, page_bytes: int, ghosts: bool = False) -> Match:
    """The longest known prefix of `tokens`, as if they began behind a node's run.

    Goes as far as pages are known on any tier; with `ghosts`, as far as tokens are.
    """
    pos = 0
    used = len(node.tokens)
    while node.children is not None:
        page = tokens[pos : pos + page_bytes]
        _, child = node.children.near(page)
        known = 0
        if child is not None and len(page) == page_bytes and child.tokens.startswith(page):
            known = num_pages(child, page_bytes) if ghosts else num_known(child, page_bytes)
        if known == 0 or child is None:
            partial, end = _best(node.children, page, page_bytes, ghosts)
            return Match(node, used, pos // TOKEN_BYTES, partial, end or node)
        run = child.tokens
        common = len(run) if tokens.startswith(run, pos) else common_prefix(run, tokens, pos)
        common = min(common, known * page_bytes)
        node, used = child, common - common % page_bytes
        pos += used
        if used < len(run):
            partial = (common - used) // TOKEN_BYTES
            return Match(node, used, pos // TOKEN_BYTES, partial, node)
    return Match(node, used, pos // TOKEN_BYTES, 0, node)


def num_pages(node: Node, page_bytes: int) -> int:
    """Pages that a node's run fills, the last one perhaps partly."""
    return -(-len(node.tokens) // page_bytes)


def num_known(node: Node, page_bytes: int) -> int:
    """Leading pages of a node that lie on any tier."""
    known = len(node.device) // PAGE_ID_BYTES
    if (node.host or node.disk) and known < num_pages(node, page_bytes):
        there = np.zeros(num_pages(node, page_bytes) + 1, np.bool_)  # the last one never is
        there[:known] = True
        for pages in (node.host, node.disk):
            there[: len(pages) // PAGE_ID_BYTES] |= np.frombuffer(pages, np.int32) >= 0
        known = int(there.argmin())
    return known


def _best(
    children: Children, page: bytes, page_bytes: int, ghosts: bool
) -> tuple[int, Node | None]:
    """The child that shares most of `page`, and how many tokens.

    What a child shares falls with its distance, so the first on either side is the best,
    unless it is a ghost; a few of them are passed over.
    """
    best, best_node = 0, None
    for side in children.around(page, GHOSTS_PASSED):
        for child in side:
            common = common_prefix(child.tokens, page, 0)
            if common <= best:
                break
            if ghosts or num_known(child, page_bytes):
                best, best_node = common, child
                break
    return best // TOKEN_BYTES, best_node
