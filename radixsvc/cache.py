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
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from radixsvc.inspection import check_tree, format_tree
from radixsvc.namespace import account_name
from radixsvc.namespace import namespace_key as namespace_key
from radixsvc.node import (
    DEVICE,
    DISK,
    HOST,
    PAGE_ID_BYTES,
    PAGES,
    TOKEN_BYTES,
    Account,
    Node,
    Priority,
    resident,
)
from radixsvc.residency import Choice, Move, Residency, TierPolicy
from radixsvc.tree import Match, RadixTree, page_at
from tiers.base import Tier
from tiers.mover import Mover
from tiers.page import InvariantError, OutOfPages, PageIds, PageState

Tokens = npt.NDArray[np.int32]


class DevicePages(Protocol):
    """What the cache needs of the device: a ledger of pages, and a copy of one page."""

    num_pages: int
    num_free: int
    states: npt.NDArray[np.uint8]

    @property
    def num_retired(self) -> int: ...
    def allocate(self, n: int, state: PageState = ...) -> PageIds: ...
    def publish(self, pages: PageIds) -> None: ...
    def free(self, pages: PageIds) -> None: ...
    def count(self) -> dict[str, int]: ...
    def check(self) -> None: ...
    def copy_page(self, source: int, target: int) -> None: ...


@dataclass(frozen=True)
class Lower:
    """The tiers below the device, either of which may be missing, and who carries pages there.

    `fingerprint`, 32 bytes, names what a page's bytes depend on beside its tokens.
    """

    mover: Mover
    host: Tier | None
    disk: Tier | None
    fingerprint: bytes
    policy: TierPolicy = field(default_factory=TierPolicy)

    def close(self) -> None:
        """Once the engine has stopped: end copies, close files, let go of memory."""
        self.mover.close()
        for tier in (self.host, self.disk):
            if tier is not None:
                tier.close()


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
    lost_pages: int  # copies that did not arrive
    duplicate_pages: int
    page_copies: int


class PrefixCache:
    """Radix tree and pages. `max_pinned` is the part of the device that pins may take."""

    def __init__(
        self,
        device: DevicePages,
        page_size: int,
        *,
        max_ghosts: float = 1.0,
        max_pinned: float = 0.5,
        lower: Lower | None = None,
    ) -> None:
        self.device = device
        self.page_size = page_size
        num_tiers = 1 if lower is None else len(PAGES)
        self.tree = RadixTree(page_size, num_tiers, int(max_ghosts * device.num_pages))
        self.residency: Residency | None = None
        self._tiers: list[DevicePages | Tier | None] = [device]
        if lower is not None:
            tiers = [cast(Tier, device), lower.host, lower.disk]
            self._tiers = list(tiers)
            self.residency = Residency(
                self.tree, tiers, lower.mover, lower.policy, lower.fingerprint
            )
            self.residency.recover()
        self.leases: dict[str, dict[Lease, None]] = {}  # by namespace, oldest first
        self._pins: dict[tuple[str, bytes], Pin] = {}
        self._max_pinned_pages = int(max_pinned * device.num_pages)
        self._pinned_pages = 0
        self._evict_ahead = min(32, device.num_pages // 64)
        self._acquired = self._ghost_tokens = self._evicted = 0
        self._duplicates = self._copies = 0
        self._hits = [0, 0, 0]

    # -- what a scheduler asks ----------------------------------------------------------------

    @property
    def available(self) -> int:
        """Device pages that are free or could be made so now."""
        return self.device.num_free + self.device.num_retired + self.tree.evictable(DEVICE)

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens of one sequence."""
        return -(-num_tokens // self.page_size)

    def match(self, namespace: str, tokens: Tokens) -> TokensByTier:
        """How many leading tokens of a prompt need no computing. Changes nothing."""
        found = self.tree.match(namespace, _packed(tokens[:-1]))
        path = self.tree.path(found.node)
        counts = [0, 0, 0]
        left = found.length // self.page_size
        for node in path:
            count = min(left, self.tree.num_pages(node))
            left -= count
            on_device = min(count, len(node.device) // PAGE_ID_BYTES)
            counts[DEVICE] += on_device
            if on_device < count:
                in_host = resident(node.host[on_device * PAGE_ID_BYTES : count * PAGE_ID_BYTES])
                counts[HOST] += in_host
                counts[DISK] += count - on_device - in_host
        device, host, disk = (count * self.page_size for count in counts)
        return TokensByTier(device + self._num_partial(found), host, disk)

    def _num_partial(self, found: Match) -> int:
        """Tokens of the next page that can be had by copying it on the device."""
        return found.partial if self._partial_page(found) >= 0 else 0

    def _partial_page(self, found: Match) -> int:
        if found.partial_node is None:
            return -1
        page = page_at(found.partial_node.device, found.partial_index)
        return page if page >= 0 and self.device.states[page] == PageState.READY else -1

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
        if self.residency is not None:
            self.residency.poll()

    @property
    def is_moving(self) -> bool:
        """Whether copies between tiers are under way or due: `poll` has something to do."""
        return self.residency is not None and self.residency.is_moving

    @property
    def seconds_per_token(self) -> float:
        """What computing a prompt's token takes, to weigh loading against; 0 while not known."""
        return 0.0 if self.residency is None else self.residency.seconds_per_token

    @seconds_per_token.setter
    def seconds_per_token(self, seconds: float) -> None:
        if self.residency is not None:
            self.residency.seconds_per_token = seconds

    # -- leases -------------------------------------------------------------------------------

    def acquire(
        self, namespace: str, tokens: Tokens, priority: Priority = Priority.NORMAL
    ) -> Lease:
        """Hold what is cached of a prompt of at least one token; never its last token."""
        if len(tokens) == 0:
            raise ValueError("a lease needs at least one token")
        lease = Lease(self, namespace, tokens, priority)
        lease.node = self.tree.lock(self.tree.root(namespace, account_name(namespace)), 0)
        self.leases.setdefault(namespace, {})[lease] = None
        try:
            self._hold_cached(lease, load=True)
        except BaseException:
            lease.release()
            raise
        return lease

    def count(self, lease: Lease) -> None:
        """Count a lease in the statistics: once it is used, not each time one is tried for."""
        lease.counted = True
        self._acquired += 1
        self._hits = [a + b for a, b in zip(self._hits, lease.sources, strict=True)]
        self._ghost_tokens += lease.num_ghost_tokens

    def _hold_cached(self, lease: Lease, load: bool) -> None:
        """Lock what is cached of a prompt in place of what was locked; `load` begins promotion."""
        tree, residency = self.tree, self.residency
        root = tree.root(lease.namespace, account_name(lease.namespace))
        self._lock_instead(lease, root, 0)
        packed = lease.tokens[: lease.prompt_len - 1].tobytes()
        found = tree.match_below(root, packed)
        source = self._partial_page(found)  # before locking, which may split that node
        path = tree.path(found.node)
        num_pages = found.length // self.page_size
        choice = Choice(num_pages, [])
        if residency is not None:
            choice = residency.choose(path, num_pages, load)
        self._relock(lease, path, choice.num_ready + len(choice.levels))
        if residency is not None and choice.levels:
            try:
                moves = residency.promote(tree.path(lease.node), choice)
            except OutOfPages:
                moves = None
            if moves is None or any(move.ok is False for move in moves):
                self._hold_cached(lease, load=False)
                return
        lease._hold(np.frombuffer(tree.device_pages(lease.node), np.int32))
        lease.num_locked = lease.num_pages
        if residency is not None:
            lease.moves = residency.arriving(lease.page_table)
        partial = 0
        if source >= 0 and lease.num_pages == num_pages:
            partial = self._copy_partial(lease, source, found.partial)
        if tree.ghosts:
            known = tree.match_below(root, packed, ghosts=True).length
            lease.num_ghost_tokens = max(0, known - found.length - found.partial)
        size = self.page_size
        host, disk = choice.levels.count(HOST) * size, choice.levels.count(DISK) * size
        lease.sources = TokensByTier(choice.num_ready * size + partial, host, disk)
        lease.cached_len = lease.num_valid = lease.sources.length

    def _relock(self, lease: Lease, path: Sequence[Node], num_pages: int) -> None:
        """Lock the first `num_pages` pages of a path in place of what was locked."""
        for node in path:
            count = self.tree.num_pages(node)
            if 0 < num_pages <= count:
                self._lock_instead(lease, node, num_pages * self.tree.page_bytes)
            num_pages -= count

    def _lock_instead(self, lease: Lease, node: Node, used: int) -> None:
        if node is not lease.node:
            before, lease.node = lease.node, self.tree.lock(node, used, lease.priority)
            self.tree.unlock(before)

    def _hold_what_came(self, lease: Lease) -> None:
        """A promotion failed: let the lease go back to what is on the device."""
        self._free_private(lease)
        self._hold_cached(lease, load=False)
        self._free_dropped()

    def _free_private(self, lease: Lease) -> None:
        private = lease.page_table[lease.num_locked :].copy()
        lease.num_pages = lease.num_locked = 0
        lease.page_table = lease.page_table[:0]
        if len(private):
            self.device.free(private)

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
        if num_pages > self.device.num_free:
            self._expire_pins()
            if num_pages > self.available:
                raise OutOfPages(
                    f"{num_pages} pages asked for, {self.available} of {self.device.num_pages} "
                    "are free or evictable"
                )
            missing = num_pages - self.device.num_free
            if self.residency is not None:
                self.residency.make_room(num_pages)
            else:
                self._evicted += self.tree.evict(max(missing, self._evict_ahead))
                self._free_dropped()
        return self.device.allocate(num_pages)

    def _free_dropped(self) -> None:
        if self.residency is not None:
            self.residency.free_dropped()
            return
        pages = self.tree.take_freed(DEVICE)
        if pages is not None:
            self.device.free(pages)

    def _enforce_quota(self, account: Account) -> None:
        quota = account.quota[DEVICE]
        if quota is not None and account.resident[DEVICE] > quota:
            self._evicted += self.tree.evict(account.resident[DEVICE] - quota, account)
        self._free_dropped()

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

    def set_quota(self, name: str, num_pages: int, level: int = DEVICE) -> None:
        """Limit the pages of a tier that the tree keeps for all namespaces of a key's name.

        To be set before the first of them is used. Pages under leases may exceed it for a time.
        """
        self.tree.account(name).quota[level] = num_pages

    def flush(self) -> None:
        """Empty the cache, every tier. What leases hold goes when they are released."""
        self._pins.clear()
        self._pinned_pages = 0
        self.tree.flush()
        self._free_dropped()
        if self.residency is not None:
            self.residency.flush()

    def save(self, deadline_s: float) -> None:
        """Write what is only in memory to disk, what was used last first, while there is time."""
        if self.residency is not None:
            self.residency.save(deadline_s)

    # -- inspection ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError unless every page is in exactly one place and all counts agree."""
        held = check_tree(self.tree)
        leases = [lease for group in self.leases.values() for lease in group]
        private = [lease.page_table[lease.num_locked :] for lease in leases]
        writing = np.concatenate(private) if private else np.empty(0, np.int32)
        states = self.device.states
        if len(np.unique(writing)) != len(writing) or (states[writing] != PageState.WRITING).any():
            raise InvariantError("private pages are shared or in another state")
        if len(writing) != int((states == PageState.WRITING).sum()):
            raise InvariantError("WRITING pages that no lease holds")
        for level, tier in enumerate(self._tiers):
            if tier is None:
                continue
            tier.check()
            pages = held[level]
            if self.residency is not None:
                orphans = list(self.residency.orphans[level])
                pages = np.concatenate([pages, np.array(orphans, np.int32)])
            owned = (PageState.READY, PageState.LOADING)
            if len(np.unique(pages)) != len(pages) or not np.isin(tier.states[pages], owned).all():
                raise InvariantError(f"{PAGES[level]} pages of the tree are in another state")
            if len(pages) != int(np.isin(tier.states, owned).sum()) - tier.num_retired:
                raise InvariantError(f"{PAGES[level]} pages that nobody holds")
        refs = sum(n.refs for n in [*self.tree.roots.values(), *self.tree.detached])
        if refs != len(leases):
            raise InvariantError(f"{refs} references of {len(leases)} leases")

    def format_tree(self, max_nodes: int = 200) -> str:
        return format_tree(self.tree, max_nodes)

    def stats(self) -> CacheStats:
        tree = self.tree
        levels = [level for level, tier in enumerate(self._tiers) if tier is not None]
        evictable = {PAGES[level]: tree.evictable(level) for level in levels}
        counters = self.residency.counters if self.residency is not None else {}
        return CacheStats(
            pages={PAGES[i]: t.count() for i, t in enumerate(self._tiers) if t is not None},
            evictable=evictable,
            protected={PAGES[i]: tree.resident(i) - evictable[PAGES[i]] for i in levels},
            num_nodes=self.tree.num_nodes,
            num_leases=sum(map(len, self.leases.values())),
            num_pins=len(self._pins),
            pinned_pages=self._pinned_pages,
            ghost_pages=self.tree.num_ghost_pages,
            acquired=self._acquired,
            hit_tokens=TokensByTier(*self._hits),
            ghost_tokens=self._ghost_tokens,
            evicted_pages=self._evicted + counters.get("evicted", 0),
            lost_pages=counters.get("lost", 0),
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
        "counted",
        "moves",
        "namespace",
        "node",
        "num_ghost_tokens",
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
        self.num_ghost_tokens = 0  # known, but evicted
        self.counted = False
        self.sources = TokensByTier(0, 0, 0)
        self.moves: list[Move] = []  # that have to end before the lease is usable
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
        if any(move.ok is None for move in self.moves):
            return False
        failed = any(move.ok is False for move in self.moves)
        self.moves = []
        if failed:
            self._cache._hold_what_came(self)
        return not self.moves

    def extend(self, num_tokens: int) -> None:
        """Have pages for the first `num_tokens` tokens. OutOfPages changes nothing."""
        missing = -(-num_tokens // self._cache.page_size) - self.num_pages
        if missing > 0:
            self._hold(self._cache.allocate(missing))
        if not self.counted:
            self._cache.count(self)

    def commit(self, num_tokens: int) -> None:
        """The first `num_tokens` tokens have keys and values: share their whole pages.

        What the tree has already is taken from there, and the page table changed to it.
        """
        if not self.num_valid <= num_tokens <= self._num_tokens or self.released:
            raise InvariantError(f"{num_tokens} tokens committed of {self._num_tokens}")
        self.num_valid = num_tokens
        num_pages = num_tokens // self._cache.page_size
        if num_pages > self.num_locked:
            self._share_whole(num_pages)

    def _share_whole(self, num_pages: int) -> None:
        self._share(num_pages, num_pages * self._cache.page_size)

    def _share(self, num_pages: int, num_tokens: int) -> None:
        """Put private pages up to `num_pages` into the tree; `num_tokens` of them are valid."""
        cache = self._cache
        start = self.num_locked
        tokens = self._tokens[start * cache.page_size : num_tokens].tobytes()
        if cache.residency is not None and cache.residency.is_loading(self.node, tokens):
            return  # someone is loading these pages: at the next commit, or never
        own = self._table[start:num_pages]
        if len(own) != num_pages - start or num_pages > self.num_pages:
            raise InvariantError(f"{num_pages} pages committed of {self.num_pages}")
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

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

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
        if self.num_valid // cache.page_size > self.num_locked:
            self._share_whole(self.num_valid // cache.page_size)
        in_tail = self.num_valid - self.num_locked * cache.page_size
        if 0 < in_tail < cache.page_size and not self.node.account.detached:
            self._share(self.num_locked + 1, self.num_valid)
        account = self.node.account
        path = cache.tree.path(self.node) if cache.residency is not None else []
        cache.tree.unlock(self.node)
        cache._enforce_quota(account)
        cache._free_private(self)
        if cache.residency is not None:
            cache.residency.used(path)

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
