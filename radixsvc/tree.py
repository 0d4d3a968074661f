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

import heapq
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from radixsvc.node import (
    ABSENT,
    DEVICE,
    PAGE_ID_BYTES,
    PAGES,
    PINNED_CLASS,
    TOKEN_BYTES,
    Account,
    Children,
    Node,
    common_prefix,
    resident,
)
from tiers.page import InvariantError, PageIds

_NO_PAGES = np.empty(0, np.int32)
GHOSTS_PASSED = 16  # on either side, when looking for the child that shares most of a page


class Match(NamedTuple):
    """How far a prompt is known; holds until the tree changes next.

    `node` is the deepest node reached and `used` the bytes of its run that match in whole pages;
    `length` counts all tokens matched so. `partial` more tokens match within the next page,
    which is page `partial_index` of `partial_node`.
    """

    node: Node
    used: int
    length: int
    partial: int
    partial_node: Node | None
    partial_index: int


class Inserted(NamedTuple):
    """`node` is the locked end of the path, `pages` what the tree holds there, packed."""

    node: Node
    pages: bytes


class Ghost(NamedTuple):
    """Where a node's last page was, and when it went (time.monotonic)."""

    level: int
    time: float


class RadixTree:
    """All namespaces' trees over `num_tiers` tiers, with at most `max_ghost_pages` of ghosts.

    Tokens and page ids go in and out packed, as the bytes of int32 arrays. Page ids are only
    passed through; those the tree let go of are collected by `take_freed`. One thread.
    """

    def __init__(self, page_size: int, num_tiers: int = 1, max_ghost_pages: int = 0) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.num_tiers = num_tiers
        self.max_ghost_pages = max_ghost_pages
        self.roots: dict[str, Node] = {}
        self.namespaces: dict[Node, str] = {}  # by root
        self.detached: list[Node] = []  # roots that were flushed under running leases
        self.shared = Account("", num_tiers)
        self.accounts: dict[str, Account] = {"": self.shared}
        self.ghosts: OrderedDict[Node, Ghost] = OrderedDict()
        self.num_ghost_pages = 0
        self.num_nodes = 0
        self.clock = 0
        self._freed: list[list[bytes]] = [[] for _ in range(num_tiers)]

    def __del__(self) -> None:
        for root in [*self.roots.values(), *self.detached]:
            for node in list(self._below(root)):
                node.parent = None  # a cycle that the collector does not see

    # -- reading ------------------------------------------------------------------------------

    def match(self, namespace: str, tokens: bytes, ghosts: bool = False) -> Match:
        """The longest known prefix of `tokens`. Changes nothing.

        Goes as far as pages are known on any tier; with `ghosts`, as far as tokens are.
        """
        root = self.roots.get(namespace)
        if root is None:
            return Match(Node(b"", self.shared), 0, 0, 0, None, 0)
        return self.match_below(root, tokens, ghosts)

    def match_below(self, node: Node, tokens: bytes, ghosts: bool = False) -> Match:
        """`match` from a node on, as if `tokens` began behind its run."""
        page_bytes = self.page_bytes
        pos = 0
        used = len(node.tokens)
        while node.children is not None:
            page = tokens[pos : pos + page_bytes]
            _, child = node.children.near(page)
            exact = len(page) == page_bytes and child is not None and child.tokens.startswith(page)
            known = 0
            if exact and child is not None:
                known = self.num_pages(child) if ghosts else self.num_known(child)
            if known == 0 or child is None:
                partial, at = self._best(node.children, page, ghosts)
                return Match(node, used, pos // TOKEN_BYTES, partial, at, 0)
            run = child.tokens
            common = len(run) if tokens.startswith(run, pos) else common_prefix(run, tokens, pos)
            common = min(common, known * page_bytes)
            node, used = child, common - common % page_bytes
            pos += used
            if used < len(run):
                partial = (common - used) // TOKEN_BYTES
                at = node if partial else None
                index = used // page_bytes
                return Match(node, used, pos // TOKEN_BYTES, partial, at, index)
        return Match(node, used, pos // TOKEN_BYTES, 0, None, 0)

    def num_known(self, node: Node) -> int:
        """Leading pages of a node that lie on any tier."""
        known = len(node.device) // PAGE_ID_BYTES
        if (node.host or node.disk) and known < self.num_pages(node):
            there = np.zeros(self.num_pages(node) + 1, np.bool_)  # the last one never is
            there[:known] = True
            for pages in (node.host, node.disk):
                there[: len(pages) // PAGE_ID_BYTES] |= np.frombuffer(pages, np.int32) >= 0
            known = int(there.argmin())
        return known

    def path(self, node: Node) -> list[Node]:
        """The nodes from below the root down to this one."""
        nodes = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def device_pages(self, node: Node) -> bytes:
        """The device pages of the path down to a node's end, packed."""
        return b"".join([n.device for n in self.path(node)])

    def _best(self, children: Children, page: bytes, ghosts: bool) -> tuple[int, Node | None]:
        """The child that shares most of `page`, and how many tokens.

        What a child shares falls with its distance, so the first on either side is the best,
        unless it is a ghost; a few of them are passed over.
        """
        best, best_node = 0, None
        for side in children.around(page, 1 if ghosts or not self.ghosts else GHOSTS_PASSED):
            for child in side:
                common = common_prefix(child.tokens, page, 0)
                if common <= best:
                    break
                if ghosts or self.num_known(child):
                    best, best_node = common, child
                    break
        return best // TOKEN_BYTES, best_node

    # -- holding ------------------------------------------------------------------------------

    def root(self, namespace: str, account: str = "") -> Node:
        """The namespace's root, made if need be: of that account if there is one, else shared."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(b"", self.accounts.get(account, self.shared))
            self.namespaces[root] = namespace
        return root

    def _drop_if_bare(self, root: Node) -> None:
        """A root that nothing hangs on or holds goes, so that namespaces can come and go."""
        if root.refs == 0 and root.children is None and root in self.namespaces:
            del self.roots[self.namespaces.pop(root)]

    def lock(self, node: Node, used: int, priority: int = 0) -> Node:
        """Reference the path to the first `used` bytes of a node's run; returns its end.

        Splits the node there. Undone by `unlock`.
        """
        if used < len(node.tokens):
            node = self._split(node, used)
        self.clock += 1
        end = node
        while True:
            node.refs += 1
            if node.refs == 1:
                self._leave(node)
            if node.priority < priority:
                node.priority = priority
            node.last_use = self.clock
            node.uses += 1
            if node.parent is None:
                return end
            node = node.parent

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
                if node.account.detached:
                    self._take_out(node)
                elif node.device or self._is_known(node):
                    self._enter(node)
                    if node.children is not None:
                        self._merge_below(node)
                else:
                    self._bury(node, DEVICE)
            node = parent
        if node.account.detached and node.refs == 0:
            self.detached.remove(node)
        self._drop_if_bare(node)

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
                child = self._split_if(child, common - common % page_bytes)
            child.refs += 1
            if child.refs == 1:
                self._leave(child)
            child.last_use = self.clock
            child.uses += 1
            child.priority = max(child.priority, priority)
            start = pos // page_bytes * PAGE_ID_BYTES
            size = len(child.tokens) // page_bytes * PAGE_ID_BYTES
            if len(child.device) < size:
                self._revive(child)
                more = pages[start + len(child.device) : start + size]
                child.device += more
                child.account.resident[DEVICE] += len(more) // PAGE_ID_BYTES
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
            if len(page) == self.page_bytes or self.num_known(child):
                return child
            self._prune_below(child)
            self._take_out(child)
        return None

    def _grow(self, node: Node, tokens: bytes, pages: bytes, priority: int) -> Node:
        """Lengthen a leaf that only the caller holds, else give it a child. Returns the end."""
        num_pages = len(pages) // PAGE_ID_BYTES
        node.account.resident[DEVICE] += num_pages
        if node.refs == 1 and node.children is None and node.parent is not None and node.pins == 0:
            node.tokens += tokens
            node.device += pages
            return node
        child = Node(tokens, node.account)
        child.device = pages
        child.refs = child.uses = 1
        child.priority = priority
        child.last_use = self.clock
        self._adopt(node, child)
        return child

    # -- eviction -----------------------------------------------------------------------------

    def evictable(self, level: int) -> int:
        """Pages of a tier that no lease and no pin holds."""
        total: int = 0
        for account in self.accounts.values():
            low, normal, high, _ = account.evictable[level]
            total += low + normal + high
        return total

    def resident(self, level: int) -> int:
        """Pages of a tier that the tree holds, flushed ones under leases included."""
        detached: int = sum(r.account.resident[level] for r in self.detached)
        return detached + sum(a.resident[level] for a in self.accounts.values())

    def victim(self, level: int, account: Account | None = None) -> Node | None:
        """The node whose last page on that tier is the next to go; O(accounts)."""
        accounts = self.accounts.values() if account is None else (account,)
        for priority in range(PINNED_CLASS):
            best: Node | None = None
            for one in accounts:
                node = one.victim(level, priority)
                if node is not None and (best is None or node.last_use < best.last_use):
                    best = node
            if best is not None:
                return best
        return None

    def victims(self, level: int) -> Iterator[Node]:
        """All that could go from a tier, in that order. Not to be mixed with changes."""
        for priority in range(PINNED_CLASS):
            lists = [account.victims(level, priority) for account in self.accounts.values()]
            yield from heapq.merge(*lists, key=lambda node: node.last_use)

    def evict(self, num_pages: int, account: Account | None = None, level: int = DEVICE) -> int:
        """Let go of up to that many pages of a tier, least recently used first, tails first.

        Returns how many.
        """
        left = num_pages
        while left > 0:
            node = self.victim(level, account)
            if node is None:
                break
            left -= self.cut(node, level, left)
        return num_pages - left

    def cut(self, node: Node, level: int, num_pages: int) -> int:
        """Let go of up to `num_pages` pages of a tier at an unreferenced node's end."""
        held: bytes = getattr(node, PAGES[level])
        at = max(0, len(held) - num_pages * PAGE_ID_BYTES)
        pages, rest = held[at:], held[:at]
        count = len(pages) // PAGE_ID_BYTES
        if level:
            count = resident(pages)
            while rest.endswith(ABSENT):
                rest = rest[:-PAGE_ID_BYTES]
        account = node.account
        account.resident[level] -= count
        account.evictable[level][_class(node)] -= count
        self._freed[level].append(pages)
        setattr(node, PAGES[level], rest)
        if not rest:
            node.unlink(level)
        if self.num_tiers > 1:
            self._close_gap(node)
        if not (node.device or node.host or node.disk):
            self._bury(node, level)
        return count

    def take_freed(self, level: int) -> PageIds | None:
        """Pages of a tier that the tree let go of since the last call; None where there are none.

        They are the caller's to free.
        """
        freed = self._freed[level]
        if not freed:
            return None
        pages = np.frombuffer(b"".join(freed), np.int32)
        freed.clear()
        return pages[pages >= 0] if level else pages

    # -- tiers --------------------------------------------------------------------------------

    def attach(self, node: Node, level: int, places: PageIds, pages: PageIds) -> None:
        """Pages of a tier for those places of a node, where it had none there."""
        held = np.frombuffer(getattr(node, PAGES[level]), np.int32)
        more = np.full(max(len(held), int(places.max()) + 1), -1, np.int32)
        more[: len(held)] = held
        if (more[places] >= 0).any() or (level == DEVICE and places[0] != len(held)):
            raise InvariantError(f"pages are attached where they can't be ({PAGES[level]})")
        more[places] = pages
        setattr(node, PAGES[level], more.tobytes())
        node.account.resident[level] += len(pages)
        if node.refs == 0:
            priority = _class(node)
            node.account.evictable[level][priority] += len(pages)
            if node.after(level) is None:
                self._stand(node, level, priority)

    def _stand(self, node: Node, level: int, priority: int) -> None:
        """Enter a list of victims right before the nearest ancestor on it, else at the end.

        Whatever of the node's children stands there was put before that ancestor, too.
        """
        above = node.parent
        while above is not None and (above.after(level) is None or _class(above) != priority):
            above = above.parent
        node.link_before(above or node.account.heads[level][priority], level)

    def detach(self, lost: Sequence[PageIds]) -> None:
        """Forget pages that are lost, by level, and let go of those that are of no use then.

        Looks at every node; for failures only.
        """
        touched = []
        for node in list(self.nodes()):
            for level, pages in enumerate(lost):
                held = np.frombuffer(getattr(node, PAGES[level]), np.int32)
                gone = np.isin(held, pages)
                if gone.any():
                    self._set_pages(node, level, np.where(gone, np.int32(-1), held))
                    touched.append(node)
        for node in touched:
            device = np.frombuffer(node.device, np.int32)
            if (device < 0).any():
                self._keep(node, DEVICE, int((device < 0).argmax()))
                for below in self._below(node):
                    self._keep(below, DEVICE, 0)
        for node in touched:
            if node.parent is not None:
                self._close_gap(node)
                for one in (*reversed(list(self._below(node))), node):
                    if one.refs == 0 and one not in self.ghosts and not self._is_known(one):
                        self._bury(one, DEVICE)

    def _keep(self, node: Node, level: int, num_pages: int) -> None:
        """Leave a node only its first pages of a tier; let go of those behind."""
        held = np.frombuffer(getattr(node, PAGES[level]), np.int32)
        gone = held[num_pages:]
        if len(gone):
            self._freed[level].append(gone[gone >= 0].tobytes())
            self._set_pages(node, level, held[:num_pages])

    def _set_pages(self, node: Node, level: int, pages: PageIds) -> None:
        packed = pages.tobytes()
        while level and packed.endswith(ABSENT):
            packed = packed[:-PAGE_ID_BYTES]
        count = resident(getattr(node, PAGES[level])) - resident(packed)
        node.account.resident[level] -= count
        setattr(node, PAGES[level], packed)
        if node.after(level) is not None:
            node.account.evictable[level][_class(node)] -= count
            if not packed:
                node.unlink(level)

    def _close_gap(self, node: Node) -> None:
        """Drop from the tiers what lies behind a page that no tier holds any more."""
        known = self.num_known(node)
        if known == self.num_pages(node):
            return
        for level in range(1, self.num_tiers):
            self._keep(node, level, known)
        for below in reversed(list(self._below(node))):
            self._drop_pages(below)
            if below.refs == 0 and below not in self.ghosts:
                self._bury(below, DEVICE)

    def graft(self, parent: Node, tokens: bytes, level: int, pages: PageIds) -> Node:
        """A new child, unreferenced, whose pages lie on one tier. It is as old as can be."""
        child = Node(tokens, parent.account)
        self._adopt(parent, child)
        self.attach(child, level, np.arange(len(pages), dtype=np.int32), pages)
        return child

    def forget(self) -> None:
        """Drop all ghosts."""
        while self.ghosts:
            self._drop_oldest_ghost()

    # -- pins, quotas, flush ------------------------------------------------------------------

    def pin(self, node: Node, used: int) -> Node:
        """Protect the path to the first `used` bytes of a node's run; returns its end."""
        if used < len(node.tokens):
            node = self._split(node, used)
        end = node
        while node.parent is not None:
            if node.refs == 0:
                self._leave(node)
            node.pins += 1
            if node.refs == 0:
                self._enter(node)
            node = node.parent
        return end

    def unpin(self, node: Node) -> None:
        """Undo `pin`, given its result. The path counts as used now."""
        self.clock += 1
        while node.parent is not None:
            if node.refs == 0:
                self._leave(node)
            node.pins -= 1
            node.last_use = self.clock
            if node.refs == 0:
                self._enter(node)
            node = node.parent

    def prune(self, node: Node) -> None:
        """Drop a node, all below it and the leaves left above it, save held and pinned ones."""
        self._prune_below(node)
        while node.parent is not None:
            parent = node.parent
            self._drop_if_loose(node)
            if parent.children is not None:
                break
            node = parent

    def _prune_below(self, node: Node) -> None:
        for below in reversed(list(self._below(node))):
            self._drop_if_loose(below)

    def _drop_if_loose(self, node: Node) -> None:
        if node.children is None and node.refs == 0 and node.pins == 0:
            self._take_out(node)

    def account(self, name: str) -> Account:
        """The account of that name, with victims and a quota of its own; made if need be."""
        if name not in self.accounts:
            self.accounts[name] = Account(name, self.num_tiers)
        return self.accounts[name]

    def flush(self) -> None:
        """Empty the tree. Paths under leases are cut off now and freed by their last `unlock`."""
        self.forget()
        for root in list(self.roots.values()):
            held = root.refs > 0
            account = Account(root.account.name, self.num_tiers, detached=True)
            for node in reversed(list(self._below(root))):
                if node.refs == 0:
                    self._take_out(node)
                else:
                    for level in range(self.num_tiers):
                        count = resident(getattr(node, PAGES[level]))
                        node.account.resident[level] -= count
                        account.resident[level] += count
                    node.account = account
                    node.pins = 0
            root.account = account
            if held:
                self.detached.append(root)
        self.roots = {}
        self.namespaces = {}

    # -- structure ----------------------------------------------------------------------------

    def _split_if(self, node: Node, used: int) -> Node:
        return self._split(node, used) if used < len(node.tokens) else node

    def _split(self, node: Node, used: int) -> Node:
        """Cut a node's run after `used` bytes, whole pages. Returns the new upper part."""
        parent = node.parent
        if parent is None or parent.children is None or not 0 < used < len(node.tokens):
            raise InvariantError(f"no split at byte {used} of {len(node.tokens)}")
        upper = Node(node.tokens[:used], node.account)
        parent.children.replace(node, upper)
        upper.parent, node.parent = parent, upper
        upper.children = Children(node)
        node.tokens = node.tokens[used:]
        upper.refs, upper.pins, upper.uses = node.refs, node.pins, node.uses
        upper.priority, upper.last_use = node.priority, node.last_use
        self.num_nodes += 1
        ids = used // self.page_bytes * PAGE_ID_BYTES
        for level in range(self.num_tiers):
            name = PAGES[level]
            held: bytes = getattr(node, name)
            if not held:
                continue
            lower_pages = held[ids:]
            if level and resident(lower_pages) == 0:
                lower_pages = b""
            setattr(upper, name, held[:ids])
            setattr(node, name, lower_pages)
            after = node.after(level)
            if after is not None:
                if not level or resident(held[:ids]):
                    upper.link_before(after, level)
                if not lower_pages:
                    node.unlink(level)
        ghost = self.ghosts.get(node)
        if ghost is not None:
            self.ghosts[upper] = ghost
        elif not self._is_known(node) and node.refs == 0:
            self._bury(node, DEVICE)
        return upper

    def _merge_below(self, node: Node) -> None:
        """Merge a node with its only child where both are at rest and were last used together."""
        child = node.children.only if node.children is not None else None
        if (
            child is None
            or node.refs
            or child.refs
            or node.parent is None
            or child.last_use != node.last_use
            or child.pins != node.pins
            or child.priority != node.priority
            or child in self.ghosts
            or node in self.ghosts
        ):
            return
        num_pages = len(node.tokens) // self.page_bytes
        for level in range(self.num_tiers):
            name = PAGES[level]
            upper, lower = getattr(node, name), getattr(child, name)
            if lower:
                upper += ABSENT * (num_pages - len(upper) // PAGE_ID_BYTES) + lower
            setattr(child, name, upper)
            after = node.after(level)
            if after is not None:
                child.unlink(level)
                child.link_before(after, level)
                node.unlink(level)
        parent = node.parent
        assert parent.children is not None
        parent.children.replace(node, child)
        child.tokens = node.tokens + child.tokens
        child.uses = max(child.uses, node.uses)
        child.parent = parent
        node.parent = node.children = None
        node.device = node.host = node.disk = b""
        self.num_nodes -= 1

    def _adopt(self, parent: Node, child: Node) -> None:
        child.parent = parent
        if parent.children is None:
            parent.children = Children(child)
        else:
            parent.children.add(child)
        self.num_nodes += 1

    def _take_out(self, node: Node) -> None:
        """Remove an unreferenced leaf from the tree and let its pages go."""
        parent = node.parent
        if parent is None or node.refs or node.children is not None:
            raise InvariantError("only a leaf without references leaves the tree")
        if node.device or node.host or node.disk:
            self._drop_pages(node)
        if self.ghosts:
            self._revive(node)
        if parent.children.only is node:
            parent.children = None
            if parent.parent is None:
                self._drop_if_bare(parent)
        else:
            parent.children.remove(node)
        node.parent = None
        self.num_nodes -= 1

    def _drop_pages(self, node: Node) -> None:
        for level in range(self.num_tiers):
            pages: bytes = getattr(node, PAGES[level])
            if pages:
                self._freed[level].append(pages)
                self._set_pages(node, level, _NO_PAGES)

    # -- lists of victims ---------------------------------------------------------------------

    def _enter(self, node: Node) -> None:
        """The last reference is gone: most recently used of the victims on each of its tiers."""
        account, priority = node.account, _class(node)
        for level in range(self.num_tiers):
            count = resident(getattr(node, PAGES[level]))
            if count:
                account.evictable[level][priority] += count
                node.link_before(account.heads[level][priority], level)

    def _leave(self, node: Node) -> None:
        """The first reference: no victim any more."""
        account, priority = node.account, _class(node)
        for level in range(self.num_tiers):
            if node.after(level) is not None:
                account.evictable[level][priority] -= resident(getattr(node, PAGES[level]))
                node.unlink(level)

    # -- ghosts -------------------------------------------------------------------------------

    def _is_known(self, node: Node) -> bool:
        return bool(node.device or node.host or node.disk) or node.parent is None

    def _bury(self, node: Node, level: int) -> None:
        """A node's last page is gone. It stays a while without pages, children before parents."""
        if node.parent is None:
            return  # merged meanwhile
        if not self.max_ghost_pages:
            self._remove(node)
            return
        self.ghosts[node] = Ghost(level, time.monotonic())
        self.num_ghost_pages += self.num_pages(node)
        while self.num_ghost_pages > self.max_ghost_pages and self.ghosts:
            self._drop_oldest_ghost()

    def _revive(self, node: Node) -> None:
        if self.ghosts.pop(node, None) is not None:
            self.num_ghost_pages -= self.num_pages(node)

    def _drop_oldest_ghost(self) -> None:
        self._remove(next(iter(self.ghosts)))

    def _remove(self, node: Node) -> None:
        parent = node.parent
        self._take_out(node)
        if parent is not None and parent.refs == 0 and parent.children is not None:
            self._merge_below(parent)

    def num_pages(self, node: Node) -> int:
        """Pages that a node's run fills, the last one perhaps partly."""
        return -(-len(node.tokens) // self.page_bytes)

    # -- inspection ---------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node, roots apart, parents first."""
        for root in [*self.roots.values(), *self.detached]:
            yield from self._below(root)

    def _below(self, root: Node) -> Iterator[Node]:
        stack = [root]
        while stack:
            node = stack.pop()
            if node is not root:
                yield node
            if node.children is not None:
                stack.extend(node.children)


def _class(node: Node) -> int:
    return PINNED_CLASS if node.pins else node.priority


def page_at(pages: bytes, index: int) -> int:
    """Page `index` of packed ids, -1 where it is not there."""
    at = index * PAGE_ID_BYTES
    return int.from_bytes(pages[at : at + PAGE_ID_BYTES] or ABSENT, "little", signed=True)
