"""Looking at a tree: the statement of what always holds, and a printer."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from radixsvc.match import num_known
from radixsvc.node import ABSENT, CLASSES, DEVICE, PAGE_ID_BYTES, PAGES, Account, Node, resident
from radixsvc.tree import RadixTree
from tiers.page import InvariantError, PageIds


def check_tree(tree: RadixTree) -> list[PageIds]:
    """Raise InvariantError unless the tree is sound; returns the page ids it holds, by tier."""
    nodes = list(tree.nodes())
    _require(len(nodes) == tree.num_nodes, f"{len(nodes)} nodes, {tree.num_nodes} counted")
    for node in nodes:
        _check_node(tree, node)
    for node in [*tree.namespaces, *nodes]:
        _check_children(tree, node)
    for level, left in enumerate(tree.ghosts.left):
        num_pages = sum(map(tree.num_pages, left))
        _require(num_pages == tree.ghosts.num_pages[level], "pages of ghosts are miscounted")
        for node in left:
            _require(not node[level], "a node that left a tier lies on it")
            _require(node.parent is not None, "a ghost is not in the tree")
    for account in {node.account for node in nodes} | {*tree.accounts.values(), tree.flushed}:
        of_account = [node for node in nodes if node.account is account]
        for level in range(tree.num_tiers):
            _check_account(account, of_account, level)
    held = []
    for level in range(tree.num_tiers):
        ids = np.frombuffer(b"".join([node[level] for node in nodes]), np.int32)
        ids = ids[ids >= 0]
        _require(len(np.unique(ids)) == len(ids), f"a page is in two places of {PAGES[level]}")
        held.append(ids)
    return held


def _check_account(account: Account, nodes: list[Node], level: int) -> None:
    """Its counts, and that a child goes before its parent."""
    count = sum(resident(node[level]) for node in nodes)
    _require(count == account.resident[level], "resident is miscounted")
    count = 0
    for priority in CLASSES:
        place = {node: i for i, node in enumerate(account.victims(level, priority))}
        for node, i in place.items():
            count += resident(node[level])
            _require(node.parent is not None, "a victim is not in the tree")
            assert node.parent is not None
            _require(place.get(node.parent, i + 1) > i, "a parent goes before its child")
    _require(count == account.evictable[level], "evictable is miscounted")


def _check_node(tree: RadixTree, node: Node) -> None:
    parent = node.parent
    assert parent is not None
    known = num_known(node, tree.page_bytes)
    is_held = node.refs > 0 or node.pins > 0
    whole = len(node.tokens) % tree.page_bytes == 0
    _require(len(node.tokens) > 0, "a run is empty")
    _require(whole or (node.children is None and node.refs == 0), "a held node ends in a stub")
    _require(node.refs <= parent.refs, "a parent has fewer references than its child")
    _require(known > 0 or is_held or node in tree.ghosts, "a node without pages is no ghost")
    for level in range(tree.num_tiers):
        pages = node[level]
        may_go = node.refs == 0 and len(pages) > 0 and (level == DEVICE or node.pins == 0)
        _require(may_go == (node.after(level) is not None), "on a wrong list of victims")
        _require(not pages.endswith(ABSENT), "places beyond the last page")
        _require(len(pages) <= known * PAGE_ID_BYTES, "a page behind a gap")
    _require(resident(node.device) * PAGE_ID_BYTES == len(node.device), "a gap on the device")
    if parent.parent is not None:
        full = tree.num_pages(parent)
        on_device = len(parent.device) == full * PAGE_ID_BYTES
        _require(not node.device or on_device, "device pages behind a gap")
        _require(not known or num_known(parent, tree.page_bytes) == full, "pages behind a gap")
        _require(node.pins <= parent.pins, "a parent has fewer pins")
        _require(node.account is parent.account, "accounts differ on a path")
        if parent.refs == 0:
            _require(parent.last_use >= node.last_use, "a parent was used before its child")
            _require(parent.priority >= node.priority, "a parent has less priority")


def _check_children(tree: RadixTree, node: Node) -> None:
    children = list(node.children or ())
    _require(bool(children) == (node.children is not None), "an index without children")
    _require(all(child.parent is node for child in children), "a child has another parent")
    for child, after in itertools.pairwise(children):
        _require(child.tokens < after.tokens, "children are out of order")
        begins_alike = after.tokens.startswith(child.tokens[: tree.page_bytes])
        _require(not begins_alike, "siblings begin alike")


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
    for root, name in tree.namespaces.items():
        is_flushed = root.account is tree.flushed
        if visible is not None and (is_flushed or not visible(name)):
            continue
        lines.append("(flushed)" if is_flushed else repr(name))
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
