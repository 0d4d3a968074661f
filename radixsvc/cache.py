"""A request's hold on the cache: the lease, and the cache it is taken from.

    lease = cache.acquire(namespace, tokens)   match, lock the path, copy a partly shared page
    lease.poll()                               True once what was to be loaded is there, or failed
    lease.extend(n)                            private pages, so that the first n tokens have room
    lease.commit(n)                            the first n tokens have keys and values: share them
    lease.release()                            let go; always, and as often as one likes

What a lease's page table points at, from the left:

    tokens   [ locked in the tree, READY | private, WRITING          ]
             0                           num_locked * page_size      num_pages * page_size

Whole pages are shared by `commit`, the partly filled last one by `release`, since it may be
written until then. READY pages are never written. Whoever computed what the tree got meanwhile
from someone else gives their own pages back and reads the tree's.

Used by one thread. Any exception but `OutOfPages` leaves nothing half done; an `InvariantError`
means that ownership is broken and nothing may be served on it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from radixsvc.inspection import check_tree, format_tree
from radixsvc.node import DEVICE, PAGE_ID_BYTES, TOKEN_BYTES, Account, Node, Priority
from radixsvc.tree import RadixTree
from tiers.page import InvariantError, OutOfPages, PageIds, PageState

Tokens = npt.NDArray[np.int32]


class DevicePages(Protocol):
    """What the cache needs of the device: a ledger of pages, and a copy of one page."""

    num_pages: int
    num_free: int
    states: npt.NDArray[np.uint8]

    def allocate(self, n: int, state: PageState = ...) -> PageIds: ...
    def publish(self, pages: PageIds) -> None: ...
    def free(self, pages: PageIds) -> None: ...
    def count(self) -> dict[str, int]: ...
    def check(self) -> None: ...
    def copy_page(self, source: int, target: int) -> None: ...


class TokensByTier(NamedTuple):
    """How many leading tokens of a prompt lie where; each counted once, the fastest tier first."""

    device: int
    host: int
    disk: int

    @property
    def length(self) -> int:
        return self.device + self.host + self.disk


class PinLimit(Exception):
    """More would be pinned than may be."""


class Pin(NamedTuple):
    node: Node
    expires: float  # time.monotonic


@dataclass(frozen=True)
class CacheStats:
    """A snapshot. Pages by tier and state; counts since the start."""

    pages: dict[str, dict[str, int]]
    evictable: dict[str, int]
    protected: dict[str, int]
    num_nodes: int
    num_leases: int
    num_pins: int
    pinned_pages: int
    ghost_pages: int
    acquired: int
    hit_tokens: TokensByTier
    ghost_tokens: int  # known, but evicted: what more pages would have served
    evicted_pages: int
    duplicate_pages: int
    page_copies: int


def namespace_key(name: str, salt: str = "") -> str:
    """A namespace for a configured key's name and a client's salt; no two pairs share one."""
    return f"{len(name)}:{name}{salt}"


def account_name(namespace: str) -> str:
    """The key's name in a namespace made by `namespace_key`; any other namespace as it is."""
    length, colon, rest = namespace.partition(":")
    return rest[: int(length)] if colon and length.isdecimal() else namespace


class PrefixCache:
    """Radix tree and pages. `max_pinned` is the part of the device that pins may take."""

    def __init__(
        self,
        device: DevicePages,
        page_size: int,
        *,
        max_ghosts: float = 1.0,
        max_pinned: float = 0.5,
    ) -> None:
        self.device = device
        self.page_size = page_size
        self.tree = RadixTree(page_size, 1, int(max_ghosts * device.num_pages))
        self.leases: dict[str, dict[Lease, None]] = {}  # by namespace, oldest first
        self._pins: dict[tuple[str, bytes], Pin] = {}
        self._max_pinned_pages = int(max_pinned * device.num_pages)
        self._pinned_pages = 0
        self._evict_ahead = min(32, device.num_pages // 64)
        self._acquired = self._ghost_tokens = self._evicted = 0
        self._duplicates = self._copies = self._device_tokens = 0

    # -- what a scheduler asks ----------------------------------------------------------------

    @property
    def available(self) -> int:
        """Device pages that are free or could be made so now."""
        return self.device.num_free + self.tree.evictable(DEVICE)

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens of one sequence."""
        return -(-num_tokens // self.page_size)

    def match(self, namespace: str, tokens: Tokens) -> TokensByTier:
        """How many leading tokens of a prompt need no computing. Changes nothing."""
        found = self.tree.match(namespace, _packed(tokens[:-1]))
        return TokensByTier(found.length + found.partial, 0, 0)

    def pending(self, namespace: str, tokens: Tokens) -> int:
        """Leading tokens that a running lease of the namespace holds and is about to commit.

        0 where no lease goes beyond what it committed. Ask again when a lease was released.
        """
        best = 0
        limit = len(tokens) - 1
        for lease in self.leases.get(namespace, ()):
            if lease.num_valid < lease.prompt_len and limit > best:
                n = min(limit, lease.prompt_len)
                differ = lease.tokens[:n] != tokens[:n]
                common = int(differ.argmax()) if differ.any() else n
                best = max(best, common - common % self.page_size)
        return best

    def poll(self) -> None:
        """Take in what finished in the background; cheap."""
        self._expire_pins()

    # -- leases -------------------------------------------------------------------------------

    def acquire(
        self, namespace: str, tokens: Tokens, priority: Priority = Priority.NORMAL
    ) -> Lease:
        """Hold what is cached of a prompt of at least one token; never its last token."""
        if len(tokens) == 0:
            raise ValueError("a lease needs at least one token")
        tree = self.tree
        packed = _packed(tokens[:-1])
        found = tree.match_below(tree.root(namespace, account_name(namespace)), packed)
        source = -1
        if found.partial_node is not None:  # read before locking, which may split that node
            at = found.partial_index * PAGE_ID_BYTES
            source = int.from_bytes(found.partial_node.device[at : at + PAGE_ID_BYTES], "little")
        lease = Lease(self, namespace, tokens, priority)
        lease.node = tree.lock(found.node, found.used, priority)
        lease._hold(np.frombuffer(tree.device_pages(lease.node), np.int32))
        lease.num_locked = lease.num_pages
        self.leases.setdefault(namespace, {})[lease] = None
        cached = found.length
        try:
            if source >= 0:
                cached += self._copy_partial(lease, source, found.partial)
            self._count(namespace, packed, cached)
        except BaseException:
            lease.release()
            raise
        lease.cached_len = lease.num_valid = cached
        lease.sources = TokensByTier(cached, 0, 0)
        return lease

    def _copy_partial(self, lease: Lease, source: int, num_tokens: int) -> int:
        """Copy a page of which `num_tokens` match into a private one; 0 if there is no room.

        Making room may evict the source itself. Nothing has written to it when the copy is
        queued, and what is queued later on the stream comes after it.
        """
        try:
            page = self.allocate(1)
        except OutOfPages:
            return 0
        lease._hold(page)
        if int(page[0]) != source:
            self.device.copy_page(source, int(page[0]))
        self._copies += 1
        return num_tokens

    def allocate(self, num_pages: int) -> PageIds:
        """Device pages for writing, at the expense of unused ones. All or nothing: OutOfPages."""
        missing = num_pages - self.device.num_free
        if missing > 0:
            self._expire_pins()
            evictable = self.tree.evictable(DEVICE)
            if missing > evictable:
                raise OutOfPages(
                    f"{num_pages} pages asked for, {self.device.num_free} free and {evictable} "
                    f"evictable of {self.device.num_pages}"
                )
            self._evicted += self.tree.evict(max(missing, self._evict_ahead))
            self._free_dropped()
        return self.device.allocate(num_pages)

    def _free_dropped(self) -> None:
        pages = self.tree.take_freed(DEVICE)
        if pages is not None:
            self.device.free(pages)

    def _enforce_quota(self, account: Account) -> None:
        quota = account.quota[DEVICE]
        if quota is not None and account.resident[DEVICE] > quota:
            self._evicted += self.tree.evict(account.resident[DEVICE] - quota, account)
        self._free_dropped()

    def _count(self, namespace: str, packed: bytes, cached: int) -> None:
        self._acquired += 1
        self._device_tokens += cached
        if self.tree.ghosts:
            known = self.tree.match(namespace, packed, ghosts=True).length
            self._ghost_tokens += max(0, known - cached)

    # -- what a client asks -------------------------------------------------------------------

    def pin(self, namespace: str, tokens: Tokens, ttl: float) -> int:
        """Keep the cached whole pages of a prompt for `ttl` seconds; returns how many tokens.

        Pinning again renews the time, and takes in what has been cached since. PinLimit where
        the cap of all pins would be exceeded.
        """
        packed = _packed(tokens)
        found = self.tree.match(namespace, packed)
        if found.length == 0:
            return 0
        new = sum(self.tree.num_pages(n) for n in self.tree.path(found.node) if not n.pins)
        if not found.node.pins:
            new -= self.tree.num_pages(found.node) - found.used // self.tree.page_bytes
        if self._pinned_pages + new > self._max_pinned_pages:
            raise PinLimit(
                f"{new} pages more would be pinned beside {self._pinned_pages}; "
                f"{self._max_pinned_pages} may be. Unpin something or raise the limit."
            )
        node = self.tree.pin(found.node, found.used)
        self._pinned_pages += new
        self.unpin(namespace, tokens)
        self._pins[namespace, packed] = Pin(node, time.monotonic() + ttl)
        return found.length

    def unpin(self, namespace: str, tokens: Tokens) -> bool:
        """Undo `pin`; False where nothing was pinned for these tokens."""
        pin = self._pins.pop((namespace, _packed(tokens)), None)
        if pin is None:
            return False
        self._unpin(pin)
        return True

    def _unpin(self, pin: Pin) -> None:
        last = [n for n in self.tree.path(pin.node) if n.pins == 1]
        self._pinned_pages -= sum(map(self.tree.num_pages, last))
        account = pin.node.account
        self.tree.unpin(pin.node)
        self._enforce_quota(account)

    def _expire_pins(self) -> None:
        if self._pins:
            now = time.monotonic()
            for key in [k for k, pin in self._pins.items() if pin.expires <= now]:
                self._unpin(self._pins.pop(key))

    def evict(self, namespace: str, tokens: Tokens) -> int:
        """Drop what is cached below a prompt, and of the prompt what no other one shares.

        What is leased or pinned stays. Returns the number of device pages let go.
        """
        found = self.tree.match(namespace, _packed(tokens))
        if found.length == 0:
            return 0
        before = self.tree.resident(DEVICE)
        self.tree.prune(found.node)
        self._free_dropped()
        return before - self.tree.resident(DEVICE)

    def set_quota(self, name: str, num_pages: int) -> None:
        """Limit the device pages that the tree keeps for all namespaces of a key's name.

        To be set before the first of them is used. Pages under leases may exceed it for a time.
        """
        self.tree.account(name).quota[DEVICE] = num_pages

    def flush(self) -> None:
        """Empty the cache. What leases hold goes when they are released."""
        self._pins.clear()
        self._pinned_pages = 0
        self.tree.flush()
        self._free_dropped()

    # -- inspection ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError unless every page is in exactly one place and all counts agree."""
        self.device.check()
        ready = check_tree(self.tree)[DEVICE]
        leases = [lease for group in self.leases.values() for lease in group]
        private = [lease.page_table[lease.num_locked :] for lease in leases]
        writing = np.concatenate(private) if private else np.empty(0, np.int32)
        states = self.device.states
        for pages, state in ((ready, PageState.READY), (writing, PageState.WRITING)):
            if len(np.unique(pages)) != len(pages) or (states[pages] != state).any():
                raise InvariantError(f"{state.name} pages are shared or in another state")
            if len(pages) != int((states == state).sum()):
                raise InvariantError(f"{state.name} pages that nobody holds")
        refs = sum(n.refs for n in [*self.tree.roots.values(), *self.tree.detached])
        if refs != len(leases):
            raise InvariantError(f"{refs} references of {len(leases)} leases")

    def format_tree(self, max_nodes: int = 200) -> str:
        return format_tree(self.tree, max_nodes)

    def stats(self) -> CacheStats:
        evictable = self.tree.evictable(DEVICE)
        return CacheStats(
            pages={"device": self.device.count()},
            evictable={"device": evictable},
            protected={"device": self.tree.resident(DEVICE) - evictable},
            num_nodes=self.tree.num_nodes,
            num_leases=sum(map(len, self.leases.values())),
            num_pins=len(self._pins),
            pinned_pages=self._pinned_pages,
            ghost_pages=self.tree.num_ghost_pages,
            acquired=self._acquired,
            hit_tokens=TokensByTier(self._device_tokens, 0, 0),
            ghost_tokens=self._ghost_tokens,
            evicted_pages=self._evicted,
            duplicate_pages=self._duplicates,
            page_copies=self._copies,
        )


class Lease:
    """One request's hold. Made by `PrefixCache.acquire` alone.

    `cached_len` leading tokens had keys and values when it was made, `sources` says where.
    `page_table` is the int32 array of the pages of all tokens with room, private ones last; a
    new array after `extend`, while `commit` may exchange pages in it.
    """

    __slots__ = (
        "_cache",
        "_num_tokens",
        "_table",
        "_tokens",
        "cached_len",
        "namespace",
        "node",
        "num_locked",
        "num_pages",
        "num_valid",
        "page_table",
        "priority",
        "prompt_len",
        "released",
        "sources",
    )

    node: Node

    def __init__(
        self, cache: PrefixCache, namespace: str, tokens: Tokens, priority: Priority
    ) -> None:
        self._cache = cache
        self.namespace = namespace
        self.priority = priority
        self.prompt_len = self._num_tokens = len(tokens)
        self._tokens: Tokens = np.array(tokens, np.int32)
        self._table: PageIds = np.empty(cache.num_pages_for(len(tokens)) + 8, np.int32)
        self.page_table: PageIds = self._table[:0]
        self.num_pages = 0
        self.num_locked = 0  # pages at the front that are the tree's
        self.num_valid = 0  # tokens at the front that have keys and values
        self.cached_len = 0
        self.sources = TokensByTier(0, 0, 0)
        self.released = False

    @property
    def tokens(self) -> Tokens:
        """The prompt and what was appended."""
        return self._tokens[: self._num_tokens]

    def append(self, token_ids: Sequence[int] | Tokens) -> None:
        """The sequence goes on with these tokens."""
        end = self._num_tokens + len(token_ids)
        if end > len(self._tokens):
            self._tokens = np.resize(self._tokens, max(end, 2 * len(self._tokens), 64))
        self._tokens[self._num_tokens : end] = token_ids
        self._num_tokens = end

    def poll(self) -> bool:
        """Whether everything that was to be loaded is there, or failed and was cut short."""
        return True

    def extend(self, num_tokens: int) -> None:
        """Have pages for the first `num_tokens` tokens. OutOfPages changes nothing."""
        missing = -(-num_tokens // self._cache.page_size) - self.num_pages
        if missing > 0:
            self._hold(self._cache.allocate(missing))

    def commit(self, num_tokens: int) -> None:
        """The first `num_tokens` tokens have keys and values: share their whole pages.

        What the tree has already is taken from there, and the page table changed to it.
        """
        if not self.num_valid <= num_tokens <= self._num_tokens or self.released:
            raise InvariantError(f"{num_tokens} tokens committed of {self._num_tokens}")
        self.num_valid = num_tokens
        num_pages = num_tokens // self._cache.page_size
        if num_pages > self.num_locked:
            self._share(num_pages, num_pages * self._cache.page_size)

    def _share(self, num_pages: int, num_tokens: int) -> None:
        """Put private pages up to `num_pages` into the tree; `num_tokens` of them are valid."""
        cache = self._cache
        start = self.num_locked
        own = self._table[start:num_pages]
        if len(own) != num_pages - start or num_pages > self.num_pages:
            raise InvariantError(f"{num_pages} pages committed of {self.num_pages}")
        tokens = self._tokens[start * cache.page_size : num_tokens].tobytes()
        self.node, packed = cache.tree.insert(self.node, tokens, own.tobytes(), self.priority)
        kept = np.frombuffer(packed, np.int32)
        ours = own[: len(kept)]
        added = kept == ours
        if added.all():
            cache.device.publish(ours)
        else:
            cache.device.publish(ours[added])
            cache.device.free(ours[~added])
            cache._duplicates += len(ours) - int(added.sum())
            self._table[start : start + len(kept)] = kept
        self.num_locked = start + len(kept)
        cache._enforce_quota(self.node.account)

    def release(self) -> None:
        """Let go: pages with keys and values stay cached, the others are free. Idempotent."""
        if self.released:
            return
        self.released = True
        cache = self._cache
        group = cache.leases[self.namespace]
        del group[self]
        if not group:
            del cache.leases[self.namespace]
        in_tail = self.num_valid - self.num_locked * cache.page_size
        if 0 < in_tail < cache.page_size and not self.node.account.detached:
            self._share(self.num_locked + 1, self.num_valid)
        account = self.node.account
        cache.tree.unlock(self.node)
        cache._enforce_quota(account)
        if self.num_pages > self.num_locked:
            cache.device.free(self._table[self.num_locked : self.num_pages].copy())
        self.num_pages = self.num_locked = 0
        self.page_table = self._table[:0]

    def _hold(self, pages: PageIds) -> None:
        """More pages at the end of the page table."""
        end = self.num_pages + len(pages)
        if end > len(self._table):
            self._table = np.resize(self._table, max(end, 2 * len(self._table)))
        self._table[self.num_pages : end] = pages
        self.num_pages = end
        self.page_table = self._table[:end]


def _packed(tokens: Tokens) -> bytes:
    """Token ids as the tree takes them: the bytes of an int32 array."""
    packed = np.asarray(tokens, np.int32).tobytes()
    if len(packed) != len(tokens) * TOKEN_BYTES:
        raise ValueError("token ids are a flat array of int32")
    return packed
