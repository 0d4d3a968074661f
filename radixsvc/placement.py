"""On which tiers the tree's pages lie, which of them go next, and which went lately."""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np

from radixsvc.match import num_pages
from radixsvc.node import (
    ABSENT,
    CLASSES,
    DEVICE,
    PAGE_ID_BYTES,
    PAGES,
    Account,
    Node,
    resident,
    stripped,
)
from tiers.page import InvariantError, PageIds


class Ghosts:
    """For each tier the nodes whose last page left it, oldest first: up to `limits[level]` pages.

    They are what the tier would hold beside its pages if it were larger by so many: under LRU the
    larger memory always holds all that the smaller one does (Mattson et al., 1970). So a hit here
    is one that a tier of `limits[level]` pages more had given. Nodes come and go whole, so the
    bound is off by one node at most. A node that lies on no tier stays known while it is here.
    """

    def __init__(self, limits: Sequence[int], page_bytes: int) -> None:
        self.limits = limits
        self.num_pages = [0] * len(limits)
        self.left: list[OrderedDict[Node, float]] = [OrderedDict() for _ in limits]
        self._page_bytes = page_bytes

    def __contains__(self, node: Node) -> bool:
        return True in [node in nodes for nodes in self.left]

    def last(self, node: Node) -> tuple[float, int] | None:
        """When (time.monotonic) and from which level the node's pages went last."""
        times = [(at[node], level) for level, at in enumerate(self.left) if node in at]
        return max(times, default=None)

    def add(self, node: Node, level: int, when: float | None = None) -> None:
        if self.limits[level] and node not in self.left[level]:
            self.left[level][node] = time.monotonic() if when is None else when
            self.num_pages[level] += num_pages(node, self._page_bytes)

    def drop(self, node: Node, level: int) -> float | None:
        """The node is none any more; returns when its pages went, if it was one."""
        when = self.left[level].pop(node, None)
        if when is not None:
            self.num_pages[level] -= num_pages(node, self._page_bytes)
        return when

    def forget(self, node: Node) -> list[float | None]:
        """`drop` from every tier: before a node changes its length, or goes."""
        if not any(self.left):
            return [None] * len(self.left)
        return [self.drop(node, level) for level in range(len(self.left))]

    def surplus(self) -> Iterator[Node]:
        """Drop the oldest of a tier while there are too many pages of it."""
        for level, limit in enumerate(self.limits):
            while self.num_pages[level] > limit:
                node = next(iter(self.left[level]))
                self.drop(node, level)
                yield node


class Placement:
    """The pages of nodes by tier: counts, lists of victims, and what was let go of.

    Every unreferenced node stands on the list of victims of each tier that it lies on, a child
    before its parent. A pinned one only on the device's: from below it does not go.
    """

    def __init__(self, ghost_pages: Sequence[int], page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.num_tiers = len(ghost_pages)
        self.ghosts = Ghosts(ghost_pages, page_bytes)
        no_quota = [None] * self.num_tiers
        self.shared = Account(no_quota)
        self.accounts = {"": self.shared}
        self.flushed = Account(no_quota)  # of nodes under leases: freed at the last release
        self._freed: list[list[bytes]] = [[] for _ in ghost_pages]

    def evictable(self, level: int) -> int:
        """Pages of a tier that no lease and no pin holds."""
        return sum(account.evictable[level] for account in self.accounts.values())

    def resident(self, level: int) -> int:
        """Pages of a tier that the tree holds, flushed ones under leases included."""
        return sum(one.resident[level] for one in (*self.accounts.values(), self.flushed))

    def victim(self, level: int, account: Account | None = None) -> Node | None:
        """The node whose last page on that tier is the next to go; O(accounts)."""
        accounts = self.accounts.values() if account is None else (account,)
        for priority in CLASSES:
            best: Node | None = None
            for one in accounts:
                node = one.victim(level, priority)
                if node is not None and (best is None or node.last_use < best.last_use):
                    best = node
            if best is not None:
                return best
        return None

    def stub_before(self, victim: Node) -> Node | None:
        """The oldest node whose partly filled page goes before that victim's pages, if any.

        Such a page holds fewer tokens than any other in as much memory. To be let go of at once:
        it is not found again.
        """
        account: Account = victim.account
        stubs = account.stubs[victim.priority]
        while stubs:
            node = stubs.popleft()
            if len(node.device) // PAGE_ID_BYTES * self.page_bytes > len(node.tokens):
                return node
        return None

    def victims(self, level: int, account: Account | None = None) -> Iterator[Node]:
        """All that could go from a tier, in that order. Not to be mixed with changes."""
        accounts = self.accounts.values() if account is None else (account,)
        for priority in CLASSES:
            lists = [one.victims(level, priority) for one in accounts]
            yield from heapq.merge(*lists, key=attrgetter("last_use"))

    def take_freed(self, level: int) -> PageIds | None:
        """Pages of a tier that were let go of since the last call; None where there are none.

        They are the caller's to free.
        """
        freed = self._freed[level]
        if not freed:
            return None
        pages = np.frombuffer(b"".join(freed), np.int32)
        freed.clear()
        return pages[pages >= 0] if level else pages

    def num_pages(self, node: Node) -> int:
        """Pages that a node's run fills, the last one perhaps partly."""
        return num_pages(node, self.page_bytes)

    def keep(self, node: Node, level: int, count: int) -> int:
        """Let go of a node's pages of a tier but for the first `count`; returns how many."""
        held = node[level]
        at = count * PAGE_ID_BYTES
        if len(held) <= at:
            return 0
        self._freed[level].append(held[at:])
        gone = self._place(node, level, held[:at])
        if not node[level]:
            self.ghosts.add(node, level)
        return gone

    def attach(self, node: Node, level: int, places: PageIds, pages: PageIds) -> None:
        """Pages of a tier for those places of a node, where it had none there."""
        held = np.frombuffer(node[level], np.int32)
        more = np.full(max(len(held), int(places.max()) + 1), -1, np.int32)
        more[: len(held)] = held
        if (more[places] >= 0).any() or (level == DEVICE and places[0] != len(held)):
            raise InvariantError(f"pages are attached where they can't be ({PAGES[level]})")
        more[places] = pages
        self._place(node, level, more.tobytes())

    def _place(self, node: Node, level: int, pages: bytes) -> int:
        """All of a node's pages on a tier are these from now on; how many less than before."""
        if pages.endswith(ABSENT):
            pages = stripped(pages)
        before = node[level]
        gone = (len(before) - len(pages)) // PAGE_ID_BYTES
        if level:  # on the device there are no gaps
            gone -= before.count(ABSENT) - pages.count(ABSENT)
        node[level] = pages
        account = node.account
        account.resident[level] -= gone
        if node.after(level) is not None:
            account.evictable[level] -= gone
            if not pages:
                node.unlink(level)
        elif pages and not before:
            self.ghosts.drop(node, level)
            if node.refs == 0 and _may_go(node, level):
                account.evictable[level] -= gone
                self._stand(node, level)
        return gone

    def _stand(self, node: Node, level: int) -> None:
        """Enter a list of victims right before the nearest ancestor on it, else at the end.

        Whatever of the node's children stands there was put before that ancestor, too.
        """
        above = node.parent
        while above is not None and (above.after(level) is None or above.priority != node.priority):
            above = above.parent
        node.link_before(above or node.account.heads[level][node.priority], level)

    def _enter(self, node: Node) -> None:
        """The last reference is gone: most recently used of the victims on each of its tiers."""
        account, priority = node.account, node.priority
        for level in range(self.num_tiers):
            count = resident(node[level])
            if count and _may_go(node, level):
                account.evictable[level] += count
                node.link_before(account.heads[level][priority], level)
        if self.num_tiers == 1 and len(node.tokens) % self.page_bytes:
            account.stubs[priority].append(node)

    def _leave(self, node: Node) -> None:
        """The first reference: no victim any more."""
        for level in range(self.num_tiers):
            if node.after(level) is not None:
                node.account.evictable[level] -= resident(node[level])
                node.unlink(level)


def _may_go(node: Node, level: int) -> bool:
    return level == DEVICE or not node.pins
