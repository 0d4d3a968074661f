"""What the tree is made of: a node, the sorted index of a node's children, an account.

A node is one run of tokens. Per tier it holds page ids, packed int32, one for each page of the
run:

    tokens  [ page 0 | page 1 | page 2 | pa ]      packed int32; only a leaf ends within a page
    device  [   17   |   4    |   9   ]            a prefix of the run's pages
    host    [   -1   |   60   ]                    -1 and what lies beyond the end: not there
    disk    [ ]

Unreferenced nodes stand on one list of victims per tier they lie on and class of priority. The
links of these lists are in the node, so entering and leaving is O(1).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from enum import IntEnum
from operator import attrgetter

TOKEN_BYTES = 4
PAGE_ID_BYTES = 4
ABSENT = b"\xff" * PAGE_ID_BYTES  # page id -1

NUM_CLASSES = 4
PINNED_CLASS = 3  # behind the three classes of priority; only ever demoted, never dropped


class Level(IntEnum):
    """Which tier, counted from the device down."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Priority(IntEnum):
    """Lower classes are evicted first."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


class Node:
    """One run of tokens and its pages. `refs` counts the leases whose path goes through it."""

    __slots__ = (
        "_next",
        "_prev",
        "account",
        "children",
        "device",
        "disk",
        "host",
        "last_use",
        "parent",
        "pins",
        "priority",
        "refs",
        "tokens",
        "uses",
    )

    def __init__(self, tokens: bytes, account: Account) -> None:
        self.tokens = tokens
        self.account = account
        self.parent: Node | None = None
        self.children: Children | None = None
        self.device = b""
        self.host = b""
        self.disk = b""
        self.refs = 0
        self.pins = 0
        self.uses = 0  # acquisitions, for the tiers' write policies
        self.priority = int(Priority.NORMAL)
        self.last_use = 0  # ticks of the tree's clock
        self._prev: list[Node | None] = [None, None, None]
        self._next: list[Node | None] = [None, None, None]

    def link_before(self, anchor: Node, level: int) -> None:
        """Enter `anchor`'s list of this tier, right in front of it."""
        before = anchor._prev[level]
        assert before is not None
        before._next[level] = self
        self._prev[level] = before
        self._next[level] = anchor
        anchor._prev[level] = self

    def unlink(self, level: int) -> None:
        """Leave the list of this tier, if on one."""
        before, after = self._prev[level], self._next[level]
        if before is not None and after is not None:
            before._next[level] = after
            after._prev[level] = before
            self._prev[level] = self._next[level] = None

    def after(self, level: int) -> Node | None:
        """The next node on the list of this tier; None where this one is on none."""
        return self._next[level]


PAGES = ("device", "host", "disk")
_run = attrgetter("tokens")


def _last_run(chunk: list[Node]) -> bytes:
    return chunk[-1].tokens


class Children:
    """A node's children in the order of their runs' bytes, none the prefix of another.

    One sorted index serves both steps of a match: bisecting for the next page of a prompt lands
    on the child that starts with it, or else between the two that share most with it. The runs
    themselves are the keys, so a child costs one reference here. Kept in chunks, so that adding
    and removing does not move more than a chunk.
    """

    __slots__ = ("_chunks",)

    CHUNK = 512

    def __init__(self, child: Node) -> None:
        self._chunks = [[child]]

    def near(self, key: bytes) -> tuple[Node | None, Node | None]:
        """The last child whose run sorts before `key`, and the first one that does not."""
        c = self._chunk_of(key)
        chunk = self._chunks[c]
        i = bisect_left(chunk, key, key=_run)
        at = chunk[i] if i < len(chunk) else None
        if i:
            return chunk[i - 1], at
        return (self._chunks[c - 1][-1] if c else None), at

    def add(self, child: Node) -> None:
        c = self._chunk_of(child.tokens)
        chunk = self._chunks[c]
        chunk.insert(bisect_left(chunk, child.tokens, key=_run), child)
        if len(chunk) > 2 * self.CHUNK:
            self._chunks.insert(c + 1, chunk[self.CHUNK :])
            del chunk[self.CHUNK :]

    def remove(self, child: Node) -> None:
        """Take `child` out. The index must not be left empty: see `only`."""
        c = self._chunk_of(child.tokens)
        chunk = self._chunks[c]
        del chunk[bisect_left(chunk, child.tokens, key=_run)]
        if not chunk:
            del self._chunks[c]

    def replace(self, child: Node, other: Node) -> None:
        """Put `other`, whose run shares its first page with `child`'s, in the place of `child`."""
        chunk = self._chunks[self._chunk_of(child.tokens)]
        chunk[bisect_left(chunk, child.tokens, key=_run)] = other

    @property
    def only(self) -> Node | None:
        """The child, where there is just one."""
        chunk = self._chunks[0]
        return chunk[0] if len(chunk) == 1 and len(self._chunks) == 1 else None

    def __iter__(self) -> Iterator[Node]:
        for chunk in self._chunks:
            yield from chunk

    def __len__(self) -> int:
        return sum(map(len, self._chunks))

    def _chunk_of(self, key: bytes) -> int:
        chunks = self._chunks
        if len(chunks) == 1:
            return 0
        return min(bisect_left(chunks, key, key=_last_run), len(chunks) - 1)


class Account:
    """Pages and victims of the namespaces that share a quota; all without one share one.

    `resident[level]` counts the tree's pages on a tier, `evictable[level][class]` those of nodes
    without references. A list of victims begins after `heads[level][class]` and ends there.
    """

    def __init__(self, name: str, num_tiers: int, detached: bool = False) -> None:
        self.name = name
        self.detached = detached  # flushed: freed at the last release, never matched again
        self.quota: list[int | None] = [None] * num_tiers  # pages
        self.resident = [0] * num_tiers
        self.evictable = [[0] * NUM_CLASSES for _ in range(num_tiers)]
        self.heads = [[self._head(level) for _ in range(NUM_CLASSES)] for level in range(num_tiers)]

    def victim(self, level: int, priority: int) -> Node | None:
        """The least recently used node of that class on that tier."""
        head = self.heads[level][priority]
        node = head.after(level)
        return None if node is head else node

    def victims(self, level: int, priority: int) -> Iterator[Node]:
        """The whole list, in the order of eviction."""
        head = self.heads[level][priority]
        node = head.after(level)
        while node is not None and node is not head:
            yield node
            node = node.after(level)

    def _head(self, level: int) -> Node:
        head = Node(b"", self)
        head._prev[level] = head._next[level] = head
        return head


def resident(pages: bytes) -> int:
    """How many of these packed page ids are not -1."""
    return len(pages) // PAGE_ID_BYTES - pages.count(ABSENT)


def common_prefix(a: bytes, b: bytes) -> int:
    """Bytes that `a` and `b` share from the start, in whole tokens."""
    size = min(len(a), len(b))
    low, step = 0, 64
    while low < size and a[low : low + step] == b[low : low + step]:
        low += step
        step *= 2
    while step > 64:  # the first difference lies within a[low : low + step]
        step //= 2
        if a[low : low + step] == b[low : low + step]:
            low += step
    x = int.from_bytes(a[low : low + step], "little")
    x ^= int.from_bytes(b[low : low + step], "little")
    first = low + ((x & -x).bit_length() - 1) // 8 if x else size
    return min(first, size) // TOKEN_BYTES * TOKEN_BYTES
