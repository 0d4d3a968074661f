"""The cache that requests take leases from: tree, pages and tiers behind one door.

    lease = cache.acquire(namespace, tokens)   match, lock the path, begin to load what is below
    lease.poll()                               True once what was to be loaded is there, or failed
    lease.extend(n)                            private pages, so that the first n tokens have room
    lease.commit(n)                            the first n tokens have keys and values: share them
    lease.release()                            let go; always, and as often as one likes

Used by one thread. Any exception but `OutOfPages` leaves nothing half done; an `InvariantError`
means that ownership is broken and nothing may be served on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from radixsvc.completion import Tokens
from radixsvc.inspection import check_tree, format_tree
from radixsvc.lease import Lease as Lease
from radixsvc.lease import TokensByTier as TokensByTier
from radixsvc.match import Match, match_below
from radixsvc.namespace import account_name
from radixsvc.namespace import namespace_key as namespace_key
from radixsvc.node import DEVICE, PAGES, TOKEN_BYTES, Account, Node, Priority
from radixsvc.pins import PinLimit as PinLimit
from radixsvc.pins import Pins
from radixsvc.residency import Residency
from radixsvc.transfers import Levels
from radixsvc.transfers import Lower as Lower
from radixsvc.tree import RadixTree
from tiers.base import Tier
from tiers.device import DeviceTier
from tiers.page import InvariantError, OutOfPages, PageIds, PageLedger, PageState


@dataclass(frozen=True)
class CacheStats:
    """A snapshot. Pages by tier and state; counts since the start.

    `hits_at_double` are the hits that each tier alone had given besides, were it twice its size:
    see `placement.Ghosts`. Tokens that came from a slower tier instead are among them.
    """

    pages: dict[str, dict[str, int]]
    evictable: dict[str, int]
    protected: dict[str, int]
    num_nodes: int
    num_leases: int
    num_pins: int
    pinned_pages: int
    ghost_pages: dict[str, int]
    acquired: int
    hit_tokens: TokensByTier
    hits_at_double: TokensByTier
    evicted_pages: int
    dropped_pages: int  # evicted without a copy, since copying would have held up the engine
    lost_pages: int  # copies that did not arrive
    duplicate_pages: int
    page_copies: int


class PrefixCache:
    """Radix tree and pages. Pins may take half of the device.

    `quotas` limit the pages by tier that the tree keeps for all namespaces of a key's name; what
    is leased may exceed them for a time. Not `enabled`: every request computes its whole prompt
    and leaves nothing.
    """

    def __init__(
        self,
        device: PageLedger,
        page_size: int,
        *,
        lower: Lower | None = None,
        quotas: Mapping[str, Sequence[int | None]] | None = None,
        enabled: bool = True,
    ) -> None:
        self.device = cast(DeviceTier, device)
        self.page_size = page_size
        self.enabled = enabled
        tiers = [device] if lower is None else [device, lower.host, lower.disk]
        num_pages = [0 if tier is None else tier.num_pages for tier in tiers]
        self.tree = RadixTree(page_size, ghost_pages=num_pages)  # see `hits_at_double`
        for name, pages in (quotas or {}).items():  # before a restart's pages are taken in
            self.tree.accounts[name] = Account(pages)
        self.residency = Residency(self.tree, self.device, lower)
        self.pins = Pins(self.residency, device.num_pages // 2)
        self.leases: dict[str, dict[Lease, None]] = {}  # by namespace, oldest first
        self.counters = self.residency.counters
        self._hits = np.zeros((2, len(PAGES)), np.int64)  # tokens found, and found at double

    # -- what a scheduler asks ----------------------------------------------------------------

    @property
    def available(self) -> int:
        """Device pages that are free or could be made so now."""
        return self.residency.available

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens of one sequence."""
        return -(-num_tokens // self.page_size)

    def match(self, namespace: str, tokens: Tokens) -> TokensByTier:
        """How many leading tokens of a prompt need no computing. Changes nothing."""
        found = self.tree.match(namespace, _packed(tokens[:-1]))
        return self._by_tier(self._levels(found), found)

    def _levels(self, found: Match) -> Levels:
        """Where the pages of a match lie, the one that is shared in part included."""
        num_pages = self.num_pages_for(found.num_tokens)
        return self.residency.levels(self.tree.path(found.end), num_pages)

    def _by_tier(self, levels: Levels, found: Match) -> TokensByTier:
        """What pages on those levels hold of the match that they begin."""
        counts = np.bincount(levels, minlength=len(PAGES)) * self.page_size
        if len(levels) * self.page_size > found.num_tokens:
            counts[levels[-1]] -= len(levels) * self.page_size - found.num_tokens
        return TokensByTier(*counts.tolist())

    def pending(self, namespace: str, tokens: Tokens) -> int:
        """Leading tokens that a running lease of the namespace holds and is about to commit.

        0 where no lease goes beyond what it committed. Ask again when a lease was released.
        """
        best = 0
        limit = len(tokens) - 1
        for lease in self.leases.get(namespace, ()) if self.enabled else ():
            if lease.num_valid < lease.prompt_len and limit > best:
                n = min(limit, lease.prompt_len)
                differ = lease.tokens[:n] != tokens[:n]
                common = int(differ.argmax()) if differ.any() else n
                best = max(best, common - common % self.page_size)
        return best

    def poll(self) -> None:
        """Take in what finished in the background; cheap."""
        self.pins.expire()
        if self.residency.poll():
            self.pins.secure()

    @property
    def is_moving(self) -> bool:
        """Whether copies between tiers are under way or due: `poll` has something to do."""
        return self.residency.is_moving

    # -- leases -------------------------------------------------------------------------------

    def acquire(
        self, namespace: str, tokens: Tokens, priority: Priority = Priority.NORMAL
    ) -> Lease:
        """Hold what is cached of a prompt of at least one token; never its last token."""
        if len(tokens) == 0:
            raise ValueError("a lease needs at least one token")
        lease = Lease(self, namespace, tokens, priority)
        lease.node = self.tree.lock(self._root(namespace), 0)
        self.leases.setdefault(namespace, {})[lease] = None
        try:
            if self.enabled:
                packed = _packed(tokens[:-1])
                lease.at_double = TokensByTier(*self.tree.hits_at_double(namespace, packed))
                self.hold_cached(lease, load=True)
        except BaseException:
            lease.release()
            raise
        return lease

    def forget(self, lease: Lease) -> None:
        """A lease is released."""
        group = self.leases[lease.namespace]
        del group[lease]
        if not group:
            del self.leases[lease.namespace]

    def count(self, lease: Lease) -> None:
        """Count a lease in the statistics: once it is used, not each time one is tried for."""
        lease.counted = True
        self.counters["acquired"] += 1
        self._hits += [lease.sources, lease.at_double]

    def _root(self, namespace: str) -> Node:
        return self.tree.root(namespace, account_name(namespace))

    def hold_cached(self, lease: Lease, load: bool) -> None:
        """Lock what is cached of a prompt in place of what was locked; `load` begins promotion.

        The page that it shares in part is copied once nothing more is to arrive.
        """
        tree, residency = self.tree, self.residency
        lease.let_go()
        root = self._root(lease.namespace)
        packed = _packed(lease.tokens[: lease.prompt_len - 1])
        found = match_below(root, packed, tree.page_bytes)
        levels = self._levels(found)
        num_here = int((levels == DEVICE).sum())
        levels = levels[: residency.choose(levels, found.num_tokens) if load else num_here]
        if load:
            lease.levels = levels
        num_whole = min(len(levels), found.length // self.page_size)
        node, used = found.node, found.used
        if num_whole * self.page_size < found.length:
            begin = packed[: num_whole * tree.page_bytes]
            node, used = match_below(root, begin, tree.page_bytes)[:2]
        before, lease.node = lease.node, tree.lock(node, used, lease.priority)
        tree.unlock(before)
        residency.free_dropped()
        end = found.end if len(levels) > num_whole else lease.node
        residency.promote(tree.path(end), levels)
        pages = np.frombuffer(tree.device_pages(end), np.int32)[: len(levels)]
        if len(pages) < num_whole:  # no room, refused, or lost while room was made
            self.hold_cached(lease, load=False)
            return
        lease.hold(pages[:num_whole])
        lease.num_locked = num_whole
        lease.awaited = residency.arriving(pages)
        if len(pages) > num_whole and not len(lease.awaited):
            self._copy_partial(lease, int(pages[num_whole]))
        levels = levels[: len(lease.page_table)].copy()
        levels[: len(lease.levels)] = lease.levels[: len(levels)]
        lease.sources = self._by_tier(levels, found)
        lease.num_valid = lease.cached_len

    def _copy_partial(self, lease: Lease, source: int) -> None:
        """Copy a page that is shared in part into a private one, if there is room.

        Making room may evict the source itself. Nothing has written to it when the copy is
        queued, and what is queued later on the stream comes after it.
        """
        try:
            page = self.allocate(1)
        except OutOfPages:
            return
        lease.hold(page)
        if int(page[0]) != source:
            self.device.copy_page(source, int(page[0]))
        self.counters["page_copies"] += 1

    def allocate(self, num_pages: int) -> PageIds:
        """Device pages for writing, at the expense of unused ones. All or nothing: OutOfPages."""
        if num_pages > self.device.num_free:
            self.pins.expire()
            if num_pages > self.available:
                raise OutOfPages(
                    f"{num_pages} pages asked for, {self.available} of {self.device.num_pages} "
                    "are free or evictable"
                )
            self.residency.make_room(num_pages)
        return self.device.allocate(num_pages)

    # -- what a client asks -------------------------------------------------------------------

    def pin(self, namespace: str, tokens: Tokens, ttl: float) -> int:
        """Keep the cached whole pages of a prompt for `ttl` seconds; returns how many tokens.

        Pinning again renews the time, and takes in what has been cached since. PinLimit where
        the cap of all pins would be exceeded.
        """
        return self.pins.add(namespace, _packed(tokens), ttl)

    def unpin(self, namespace: str, tokens: Tokens) -> bool:
        """Undo `pin`; False where nothing was pinned for these tokens."""
        return self.pins.remove(namespace, _packed(tokens))

    def evict(self, namespace: str, tokens: Tokens) -> int:
        """Drop what is cached below a prompt, and of the prompt what no other one shares.

        What is leased or pinned stays. Returns the number of device pages let go.
        """
        found = self.tree.match(namespace, _packed(tokens))
        if found.length == 0:
            return 0
        before = self.tree.resident(DEVICE)
        self.tree.prune(found.node)
        self.residency.free_dropped()
        return before - self.tree.resident(DEVICE)

    def flush(self) -> None:
        """Empty the cache, every tier. What leases hold goes when they are released."""
        self.pins.clear()
        self.tree.flush()
        self.residency.flush()

    def save(self, deadline_s: float) -> None:
        """Write what is only in memory to disk, what was used last first, while there is time."""
        self.residency.save(deadline_s)

    # -- inspection ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError unless every page is in exactly one place and all counts agree."""
        held = check_tree(self.tree)
        leases = [lease for group in self.leases.values() for lease in group]
        writing = [lease.page_table[lease.num_locked :] for lease in leases]
        _require_owned(self.device, [PageState.WRITING], writing, "private")
        for level, pages in enumerate(held):
            tier = self.residency.tiers[level]
            tier.check()
            _require_owned(tier, [PageState.READY, PageState.LOADING], [pages], PAGES[level])
        refs = sum(root.refs for root in self.tree.namespaces)
        if refs != len(leases) + self.pins.num_locked:
            raise InvariantError(f"{refs} references of {len(leases)} leases")

    def format_tree(self, max_nodes: int = 200) -> str:
        return format_tree(self.tree, max_nodes)

    def stats(self) -> CacheStats:
        tree = self.tree
        hits, at_double = (TokensByTier(*row) for row in self._hits.tolist())
        tiers = [(i, PAGES[i], t) for i, t in enumerate(self.residency.tiers) if t.num_pages]
        return CacheStats(
            pages={name: tier.count() for _, name, tier in tiers},
            evictable={name: tree.evictable(i) for i, name, _ in tiers},
            protected={name: tree.resident(i) - tree.evictable(i) for i, name, _ in tiers},
            num_nodes=tree.num_nodes,
            num_leases=sum(map(len, self.leases.values())),
            num_pins=len(self.pins),
            pinned_pages=self.pins.num_pages,
            ghost_pages={name: tree.ghosts.num_pages[i] for i, name, _ in tiers},
            hit_tokens=hits,
            hits_at_double=at_double,
            **self.counters,
        )


def _packed(tokens: Tokens) -> bytes:
    """Token ids as the tree takes them: the bytes of an int32 array."""
    packed = np.asarray(tokens, np.int32).tobytes()
    if len(packed) != len(tokens) * TOKEN_BYTES:
        raise ValueError("token ids are a flat array of int32")
    return packed


def _require_owned(tier: Tier, states: list[PageState], owned: list[PageIds], owner: str) -> None:
    """All pages in those states, but for the retired ones, are owned, each once."""
    pages = np.concatenate([np.empty(0, np.int32), *owned])
    in_state = np.isin(tier.states, states)
    if len(np.unique(pages)) != len(pages) or not in_state[pages].all():
        raise InvariantError(f"{owner} pages are in two places or in another state")
    retired = tier.num_retired if PageState.READY in states else 0
    if len(pages) != int(in_state.sum()) - retired:
        raise InvariantError(f"{owner} pages that nobody holds")
