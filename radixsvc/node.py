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

from collections import deque
from collections.abc import Iterator, Sequence
from enum import IntEnum

from tiers._kernels import Node as Node
from tiers._kernels import common_prefix as common_prefix
from tiers._kernels import locate, untrack

TOKEN_BYTES = 4
PAGE_ID_BYTES = 4
ABSENT = b"\xff" * PAGE_ID_BYTES  # page id -1

DEVICE, HOST, DISK = range(3)  # levels, from the fastest tier down; `node[level]` are its pages
PAGES = ("device", "host", "disk")  # and what they are called


class Priority(IntEnum):
    """Lower classes are evicted first."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


CLASSES = range(len(Priority))
MAX_STUBS = 1024  # that are remembered; older ones go with their nodes


class Children:
    """A node's children in the order of their runs' bytes, none the prefix of another.

    One sorted index serves both steps of a match: bisecting for the next page of a prompt lands
    on the child that starts with it, or else between the two that share most with it. The runs
    themselves are the keys, so a child costs one reference here. Kept in chunks, so that adding
    and removing does not move more than a chunk. Like the nodes, not seen by the collector.
    """

    __slots__ = ("_chunks",)

    CHUNK = 512

    def __init__(self, child: Node) -> None:
        self._chunks = untrack([untrack([child])])
        untrack(self)

    def near(self, key: bytes) -> tuple[Node | None, Node | None]:
        """The last child whose run sorts before `key`, and the first one that does not."""
        c, i = locate(self._chunks, key)
        chunk = self._chunks[c]
        at = chunk[i] if i < len(chunk) else None
        if i:
            return chunk[i - 1], at
        return (self._chunks[c - 1][-1] if c else None), at

    def around(self, key: bytes, n: int) -> tuple[list[Node], list[Node]]:
        """Up to `n` children before where `key` sorts, the nearest first, and as many behind."""
        c, i = locate(self._chunks, key)
        chunk = self._chunks[c]
        before = chunk[max(0, i - n) : i]
        if not before and c:
            before = self._chunks[c - 1][-n:]
        return before[::-1], chunk[i : i + n]

    def add(self, child: Node) -> None:
        c, i = locate(self._chunks, child.tokens)
        chunk = self._chunks[c]
        chunk.insert(i, child)
        if len(chunk) > 2 * self.CHUNK:
            self._chunks.insert(c + 1, untrack(chunk[self.CHUNK :]))
            del chunk[self.CHUNK :]

    def remove(self, child: Node) -> bool:
        """Take `child` out; whether others are left. If not, the index is of no use any more."""
        c, i = locate(self._chunks, child.tokens)
        chunk = self._chunks[c]
        del chunk[i]
        if not chunk:
            del self._chunks[c]
        return bool(self._chunks)

    def replace(self, child: Node, other: Node) -> None:
        """Put `other`, whose run shares its first page with `child`'s, in the place of `child`."""
        c, i = locate(self._chunks, child.tokens)
        self._chunks[c][i] = other

    @property
    def only(self) -> Node | None:
        """The child, where there is just one."""
        chunk = self._chunks[0]
        return chunk[0] if len(chunk) == 1 and len(self._chunks) == 1 else None

    def __iter__(self) -> Iterator[Node]:
        for chunk in self._chunks:
            yield from chunk


class Account:
    """Pages and victims of the namespaces that share a quota; all without one share one.

    `resident[level]` counts the tree's pages on a tier, `evictable[level]` those of victims. A
    list of victims begins and ends at `heads[level][class]`, a node that is in no tree. Where
    nothing lies below the device, `stubs[class]` are the nodes that became victims with a partly
    filled page, oldest first; some may have lost it since.
    """

    def __init__(self, quota: Sequence[int | None]) -> None:
        num_tiers = len(quota)
        self.quota = quota  # pages by tier
        self.resident = [0] * num_tiers
        self.evictable = [0] * num_tiers
        self.heads = [[Node(b"", None) for _ in CLASSES] for _ in range(num_tiers)]
        self.stubs: list[deque[Node]] = [deque(maxlen=MAX_STUBS) for _ in CLASSES]

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


def resident(pages: bytes) -> int:
    """How many of these packed page ids are not -1."""
    return len(pages) // PAGE_ID_BYTES - pages.count(ABSENT)


def stripped(pages: bytes) -> bytes:
    """These packed page ids without the -1 at their end."""
    while pages.endswith(ABSENT):
        pages = pages[:-PAGE_ID_BYTES]
    return pages


def page_at(pages: bytes, index: int) -> int:
    """Page `index` of packed ids, -1 where it is not there."""
    at = index * PAGE_ID_BYTES
    return int.from_bytes(pages[at : at + PAGE_ID_BYTES] or ABSENT, "little", signed=True)
