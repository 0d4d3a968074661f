"""Looking at a tree: the statement of what always holds, and a printer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from radixsvc.match import num_known
from radixsvc.node import ABSENT, DEVICE, PAGE_ID_BYTES, PAGES, Node, resident
from radixsvc.tree import RadixTree
from tiers.page import InvariantError, PageIds


def check_tree(tree: RadixTree) -> list[PageIds]:
    """Raise InvariantError unless the tree is sound; returns the page ids it holds, by tier."""
    held: list[list[bytes]] = [[] for _ in range(tree.num_tiers)]
    residents: dict[tuple[int, int], int] = {}
    evictable: dict[tuple[int, int, int], int] = {}
    num_nodes = 0
    for node in tree.nodes():
        num_nodes += 1
        _check_node(tree, node)
        for level in range(tree.num_tiers):
            pages = node[level]
            held[level].append(pages)
            key = (id(node.account), level)
            residents[key] = residents.get(key, 0) + resident(pages)
            if node.after(level) is not None:
                group = (*key, node.priority)
                evictable[group] = evictable.get(group, 0) + resident(pages)
    _require(num_nodes == tree.num_nodes, f"{num_nodes} nodes, {tree.num_nodes} counted")
    for level, nodes in enumerate(tree.ghosts.left):
        num_pages = sum(map(tree.num_pages, nodes))
        _require(num_pages == tree.ghosts.num_pages[level], "pages of ghosts are miscounted")
        for node in nodes:
            _require(not node[level], "a node that left a tier lies on it")
            _require(node.parent is not None, "a ghost is not in the tree")
    detached = [root.account for root in tree.detached]
    for account in [*tree.accounts.values(), *detached]:
        for level in range(tree.num_tiers):
            key = (id(account), level)
            _require(residents.get(key, 0) == account.resident[level], "resident is miscounted")
            for priority, count in enumerate(account.evictable[level]):
                _require(evictable.get((*key, priority), 0) == count, "evictable is miscounted")
                _check_victims(list(account.victims(level, priority)), level)
    out = []
    for level in range(tree.num_tiers):
        ids = np.frombuffer(b"".join(held[level]), np.int32)
        ids = ids[ids >= 0]
        _require(len(np.unique(ids)) == len(ids), f"a page is in two places of {PAGES[level]}")
        out.append(ids)
    return out


def _check_node(tree: RadixTree, node: Node) -> None:
    parent = node.parent
    assert parent is not None
    whole = len(node.tokens) % tree.page_bytes == 0
    _require(len(node.tokens) > 0, "a run is empty")
    _require(whole or (node.children is None and node.refs == 0), "a held node ends in a stub")
    _require(node.refs <= parent.refs, "a parent has fewer references than its child")
    _require(node.pins <= parent.pins or parent.parent is None, "a parent has fewer pins")
    _require(node.account is parent.account or parent.parent is None, "accounts differ on a path")
    num_pages = tree.num_pages(node)
    for level in range(tree.num_tiers):
        pages = node[level]
        _require(len(pages) <= num_pages * PAGE_ID_BYTES, "more pages than tokens")
        may_go = node.refs == 0 and len(pages) > 0 and (level == DEVICE or node.pins == 0)
        _require(may_go == (node.after(level) is not None), "on a wrong list of victims")
        _require(not pages.endswith(ABSENT), "places beyond the last page")
    _require(ABSENT not in _split_ids(node.device), "a gap in the device's pages")
    if parent.parent is not None:
        if node.device:
            full = tree.num_pages(parent) * PAGE_ID_BYTES
            _require(len(parent.device) == full, "device pages behind a gap")
        if num_known(node, tree.page_bytes):
            _require(
                num_known(parent, tree.page_bytes) == tree.num_pages(parent), "pages behind a gap"
            )
        if node.refs == 0 and parent.refs == 0:
            _require(parent.last_use >= node.last_use, "a parent was used before its child")
            _require(parent.priority >= node.priority, "a parent has less priority")
    known = num_known(node, tree.page_bytes)
    for level in range(1, tree.num_tiers):
        _require(len(node[level]) <= known * PAGE_ID_BYTES, "a page behind a gap")
    held = node.refs > 0 or node.pins > 0
    _require(known > 0 or held or node in tree.ghosts, "a node without pages is no ghost")
    if node.children is not None:
        _check_children(tree, node)


def _check_children(tree: RadixTree, node: Node) -> None:
    assert node.children is not None
    runs = [child.tokens for child in node.children]
    _require(runs == sorted(runs) and len(runs) > 0, "children are out of order")
    for child, run, after in zip(node.children, runs, [*runs[1:], b""], strict=True):
        _require(child.parent is node, "a child has another parent")
        first = run[: tree.page_bytes]
        _require(not after.startswith(first), "siblings begin alike")


def _check_victims(nodes: list[Node], level: int) -> None:
    place = {node: i for i, node in enumerate(nodes)}
    for node, i in place.items():
        parent = node.parent
        _require(parent is not None, "a victim is not in the tree")
        assert parent is not None
        _require(place.get(parent, i + 1) > i, f"a parent goes before its child ({PAGES[level]})")


def _split_ids(pages: bytes) -> list[bytes]:
    return [pages[i : i + PAGE_ID_BYTES] for i in range(0, len(pages), PAGE_ID_BYTES)]


def _require(claim: bool, otherwise: str) -> None:
    if not claim:
        raise InvariantError(otherwise)


def format_tree(
    tree: RadixTree,
    max_nodes: int = 200,
    visible: Callable[[str], bool] | None = None,
    label: Callable[[bytes], str] | None = None,
) -> str:
    """The tree as text: tokens, pages by tier, references, last use; no token ids.

    `visible` picks namespaces; without it all are shown, flushed ones too. `label` spells a
    node's tokens.

    "6:team a" 34 tokens
      16 tokens  device 1  refs 1  used 5
        18 tokens  device 2  host 1  used 4
    """
    lines: list[str] = []
    shown = (n for n in tree.roots if visible is None or visible(n))
    named = [(repr(name), tree.roots[name]) for name in shown]
    if visible is None:
        named += [("(flushed)", root) for root in tree.detached]
    for name, root in named:
        lines.append(name)
        stack = [(child, 1) for child in root.children or ()]
        while stack and len(lines) < max_nodes:
            node, depth = stack.pop()
            spelled = "" if label is None else f"[{label(node.tokens)}]  "
            lines.append("  " * depth + spelled + _describe(tree, node))
            stack += [(child, depth + 1) for child in node.children or ()]
    if tree.num_nodes > max_nodes:
        lines.append(f"... of {tree.num_nodes} nodes")
    return "\n".join(lines)


def _describe(tree: RadixTree, node: Node) -> str:
    parts = [f"{len(node.tokens) // 4} tokens"]
    for level in range(tree.num_tiers):
        pages = resident(node[level])
        if pages:
            parts.append(f"{PAGES[level]} {pages}")
    if len(parts) == 1 and (went := tree.ghosts.last(node)) is not None:
        parts.append(f"ghost, last on {PAGES[went[1]]}")
    for name in ("refs", "pins"):
        if getattr(node, name):
            parts.append(f"{name} {getattr(node, name)}")
    return "  ".join([*parts, f"used {node.last_use}"])
