"""Where the tree's pages lie below the device, and how they get there and back.

device --- room is needed, or used often enough ---> host --- used a second time ---> disk
   ^                                                  |                                |
   +----------------- a prompt needs them, and loading is cheaper than computing ------+
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from radixsvc.match import match_below
from radixsvc.node import (
    DEVICE,
    DISK,
    HOST,
    PAGE_ID_BYTES,
    TOKEN_BYTES,
    Account,
    Node,
    page_at,
)
from radixsvc.restart import Records
from radixsvc.transfers import Lower, Move, Transfers
from radixsvc.transfers import TierPolicy as TierPolicy
from radixsvc.tree import RadixTree
from tiers.device import DeviceTier
from tiers.disk import DiskTier
from tiers.page import PageIds, PageState

Levels = npt.NDArray[np.int8]  # of pages along a path

NOWHERE = 3  # beyond the last level
DEMOTION_WAIT_S = 0.05  # how long making room may wait for copies out of what was evicted
AHEAD = 8  # the coldest part of the device is copied down before its room is needed: one in 8
AHEAD_NODES = 16  # at most, each time
EVICT_AHEAD = 32  # pages evicted at once, where the device has 64 times as many
FOR_DISK_NODES = 4096  # that wait to be written; older ones wait for their next use


class Residency(Transfers):
    """Decides what moves when; recovers at start what the disk tier found."""

    def __init__(self, tree: RadixTree, device: DeviceTier, lower: Lower | None) -> None:
        super().__init__(tree, device, lower)
        self.seconds_per_token = 0.0  # of prefill, to weigh loading against; 0 while not known
        self._for_disk: deque[Node] = deque(maxlen=FOR_DISK_NODES)
        self._ahead_clock = -1
        self._evict_ahead = min(EVICT_AHEAD, device.num_pages // 64)
        if lower is not None:
            self._records = Records(tree, lower.fingerprint)
            if lower.disk is not None:
                stored = cast(DiskTier, lower.disk).take_recovered()
                lower.disk.free(self._records.recover(list(stored), lower.policy.disk_after))
                for account in tree.accounts.values():
                    self.enforce_quota(account, DISK)

    @property
    def is_moving(self) -> bool:
        """Whether copies are under way or due: `poll` has something to do."""
        return bool(self._moves or self._for_disk)

    # -- room ---------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Device pages that are free or could be made so now."""
        return self.device.num_free + self.device.num_retired + self.tree.evictable(DEVICE)

    def make_room(self, num_pages: int) -> None:
        """Have so many device pages free; nothing is evicted where so many are not `available`.

        What lies nowhere else is copied down first, as far as that is done within
        DEMOTION_WAIT_S, since everything that decodes waits; the rest is dropped.
        """
        device = self.device
        if num_pages > self.available:
            return
        end = time.monotonic() + DEMOTION_WAIT_S
        while device.num_free < num_pages:
            in_time = time.monotonic() < end
            coming = device.num_retired if in_time else 0
            missing = num_pages - device.num_free - coming
            if missing > 0 and self._evict(max(missing, self._evict_ahead), copy=in_time):
                continue
            if not coming:
                break
            self.take_in(self.mover.wait(0.005))

    def _evict(self, num_pages: int, copy: bool, account: Account | None = None) -> int:
        """Evict that many device pages, of one account or all; `copy` what lies nowhere else."""
        if self.policy.write != "none" and self.tiers[HOST] is not None:
            device, host = self.device, self.tier(HOST)
            tails = self._tails(self.tree.victims(DEVICE, account), num_pages)
            wanted = sum(len(self._lacking(*tail, DEVICE, HOST)) for tail in tails)
            most = wanted if copy else 0
            while most and self.mover.seconds(device, host, most) > DEMOTION_WAIT_S:
                most //= 2
            self.counters["dropped"] += wanted - self._copy_down(tails, DEVICE, HOST, most)
        # The same pages, but maybe of other nodes: room on the host may have merged some.
        evicted = self.tree.evict(num_pages, account)
        self.free_dropped()
        self.counters["evicted"] += evicted
        return evicted

    def _tails(self, victims: Iterable[Node], num_pages: int) -> list[tuple[Node, int]]:
        """Which of these nodes' device pages go where so many are wanted: from a page on."""
        tails = []
        for node in victims:
            count = len(node.device) // PAGE_ID_BYTES
            tails.append((node, max(0, count - num_pages)))
            num_pages -= count
            if num_pages <= 0:
                break
        return tails

    def enforce_quota(self, account: Account, level: int = DEVICE) -> None:
        """Evict what an account's namespaces keep on a tier beyond their quota."""
        quota = account.quota[level]
        excess = 0 if quota is None else account.resident[level] - quota
        if excess > 0 and level == DEVICE:
            self._evict(excess, copy=True, account=account)
        elif excess > 0:
            self.tree.evict(excess, account, level)
        self.free_dropped()

    # -- copies down --------------------------------------------------------------------------

    def used(self, path: Iterable[Node]) -> None:
        """A lease on this path ended: copy down what has been used often enough."""
        policy = self.policy
        if self.tiers[HOST] is not None and policy.write == "through":
            often = [(n, 0) for n in path if n.uses >= policy.through_after and n.device]
            self._copy_down(often, DEVICE, HOST)
        if self.tiers[DISK] is not None:
            whole = self.tree.page_bytes
            self._for_disk.extend(
                n
                for n in path
                if n.uses >= policy.disk_after
                and len(n.disk) < len(n.tokens) // whole * PAGE_ID_BYTES
            )

    def secure(self, path: Iterable[Node]) -> bool:
        """Whether a path lies whole below the device; what does not is copied there."""
        target = HOST if self.tiers[HOST] is not None and self.policy.write != "none" else DISK
        if self.tiers[target] is None:
            return False
        is_safe = True
        for node in path:
            safe = np.zeros(self.tree.num_pages(node), np.bool_)
            for level in (HOST, DISK):
                ready = self._is_ready(node, level)
                safe[: len(ready)] |= ready
            if not safe.all():
                is_safe = False
                self._copy_down([(node, 0)], DEVICE, target)
        return is_safe

    def _copy_down(
        self, tails: Sequence[tuple[Node, int]], source: int, target: int, most: int | None = None
    ) -> int:
        """Copy those nodes' pages from a place on to a lower tier that lacks them, `most` in all.

        Returns how many. For want of room the coldest stay behind, which come first. To disk
        goes one node at a time: its records are one chain.
        """
        wanted = sum(len(self._lacking(*tail, source, target)) for tail in tails)
        wanted = wanted if most is None else min(wanted, most)
        if not wanted or not self.mover.available(self.tier(source), self.tier(target)):
            return 0
        pages = self._take(target, wanted)
        # Taking pages may have evicted, so what is lacking is looked up again.
        spans = [(node, self._lacking(node, first, source, target)) for node, first in tails]
        excess = sum(len(places) for _, places in spans) - len(pages)
        kept = []
        for node, places in spans:
            count = len(places) - max(0, excess)
            excess -= len(places)
            if count > 0:
                kept.append((node, places[:count]))
        count = sum(len(places) for _, places in kept)
        if not count or not self._submit_down(kept, pages[:count], source, target):
            count = 0
        self.tier(target).free(pages[count:])
        return count

    def _submit_down(
        self, spans: Sequence[tuple[Node, PageIds]], pages: PageIds, source: int, target: int
    ) -> bool:
        held = [np.frombuffer(n[source], np.int32)[at] for n, at in spans]
        chain = self._records.chain(*spans[0]) if target == DISK else None
        ticket = self.mover.submit(
            self.tier(source), np.concatenate(held), self.tier(target), pages, chain
        )
        if ticket is None:
            return False
        self._moves[ticket] = Move(target, pages)
        for node, places in spans:
            self.tree.attach(node, target, places, pages[: len(places)])
            pages = pages[len(places) :]
        for node, _ in spans:  # now that none is to be attached: this may merge them
            self.enforce_quota(node.account, target)
        return True

    def _lacking(self, node: Node, first: int, source: int, target: int) -> PageIds:
        """Places of a node from `first` on that are READY on one tier and not on the other."""
        wanted = self._is_ready(node, source)
        if node.parent is None or node.account.detached or not len(wanted):
            return np.empty(0, np.int32)
        wanted[:first] = False
        there = np.frombuffer(node[target], np.int32)[: len(wanted)]
        wanted[: len(there)] &= there < 0
        if target == DISK:  # takes no partly filled pages
            wanted[len(node.tokens) // self.tree.page_bytes :] = False
        places = np.flatnonzero(wanted).astype(np.int32)
        if target == DISK and len(places):  # as a chain, without gaps
            places = places[: 1 + int((np.diff(places, append=-1) != 1).argmax())]
        return places

    def _is_ready(self, node: Node, level: int) -> npt.NDArray[np.bool_]:
        """Which of a node's pages are READY on a tier, as far as it has places for them there."""
        pages = np.frombuffer(node[level], np.int32)
        if not len(pages):
            return np.empty(0, np.bool_)
        ready: npt.NDArray[np.bool_] = self.tier(level).states[pages] == PageState.READY
        return ready & (pages >= 0)

    def _take(self, level: int, num_pages: int) -> PageIds:
        """Pages of a lower tier to be filled, at the expense of its coldest; maybe fewer."""
        tier = self.tier(level)
        missing = num_pages - tier.num_free
        if missing > 0:
            self.tree.evict(missing, level=level)
            self.free_dropped()
        return tier.allocate(min(num_pages, tier.num_free), PageState.LOADING)

    # -- in the background --------------------------------------------------------------------

    def poll(self) -> bool:
        """Take in copies that ended, begin those that are due.

        Whether what was refused may be tried again: copies ended, or none is under way.
        """
        if self._mover is None:
            return False
        ended = self._mover.poll()
        self.take_in(ended)
        if self.policy.write == "back" and self.tiers[HOST] is not None:
            self._copy_ahead()
        while self._for_disk and len(self._moves) < 8:
            self._write(self._for_disk.popleft())
        return bool(ended) or not self._moves

    def _write(self, node: Node) -> None:
        for source in (HOST, DEVICE):
            self._copy_down([(node, 0)], source, DISK)

    def _is_unwritten(self, node: Node) -> bool:
        """Whether `_write` has something to write, or the mover refused it."""
        return any(len(self._lacking(node, 0, source, DISK)) for source in (HOST, DEVICE))

    def _copy_ahead(self) -> None:
        """Copy the coldest device pages to the host before their room is needed."""
        device = self.device
        if device.num_free * AHEAD > device.num_pages or self.tree.clock == self._ahead_clock:
            return
        if any(move.target == HOST for move in self._moves.values()):
            return
        self._ahead_clock = self.tree.clock
        coldest = itertools.islice(self.tree.victims(DEVICE), AHEAD_NODES)
        self._copy_down(self._tails(coldest, device.num_pages // AHEAD), DEVICE, HOST)

    def save(self, deadline_s: float) -> None:
        """Write what is only in memory to disk, what was used last first, as time allows."""
        end = time.monotonic() + deadline_s
        if self.tiers[DISK] is None:
            return
        for node in sorted(self.tree.nodes(), key=lambda n: -n.last_use):
            if time.monotonic() < end:
                self._write(node)
            while self._moves and self._is_unwritten(node) and time.monotonic() < end:
                self.take_in(self.mover.wait(end - time.monotonic()))  # the queue was full
                self._write(node)
        while self._moves and time.monotonic() < end:
            self.take_in(self.mover.wait(end - time.monotonic()))

    def flush(self) -> None:
        """The tree was flushed: free its pages, and let nothing stored be read again."""
        self._for_disk.clear()
        self.free_dropped()
        if self.tiers[DISK] is not None:
            cast(DiskTier, self.tiers[DISK]).flush()

    # -- promotion ----------------------------------------------------------------------------

    def levels(self, path: Iterable[Node], num_pages: int) -> Levels:
        """The fastest tier that has each of the first `num_pages` pages of a path, up to one that
        none has; those on their way to the device count as there."""
        levels = np.full(num_pages, NOWHERE, np.int8)
        at = 0
        for node in path:
            end = min(at + self.tree.num_pages(node), num_pages)
            here = at + len(node.device) // PAGE_ID_BYTES
            if here < end:
                for level in (DISK, HOST):
                    ready = self._is_ready(node, level)[: end - at]
                    levels[at : at + len(ready)][ready] = level
            levels[at : min(here, end)] = DEVICE
            at = end
        return levels[: int((np.append(levels, NOWHERE) == NOWHERE).argmax())]

    def choose(self, levels: Levels) -> int:
        """How many of those pages to hold: all on the device, and what is worth loading behind.

        The least sum of loading a front and computing the tail, from the mover's measured rates
        and the engine's seconds per token.
        """
        num_here = int((levels == DEVICE).sum())
        rest = levels[num_here:].tolist()
        if not rest or self.policy.promote == "never":
            return num_here
        if self.policy.promote == "always" or not self.seconds_per_token:
            return len(levels)
        per_page = self.seconds_per_token * self.tree.page_bytes / TOKEN_BYTES
        best, best_seconds = 0, len(rest) * per_page
        ends = [i for i in range(1, len(rest)) if rest[i] != rest[i - 1]]
        for end in [*ends, len(rest)]:
            seconds = (len(rest) - end) * per_page
            for level in (HOST, DISK):
                count = rest[:end].count(level)
                if count:
                    seconds += self.mover.seconds(self.tier(level), self.device, count)
            if seconds < best_seconds:
                best, best_seconds = end, seconds
        return num_here + best

    def promote(self, path: Sequence[Node], levels: Levels) -> bool:
        """Begin to load those pages of a locked path that are not on the device yet.

        False where there is no room, or a lower tier refuses: then nothing more is to come.
        """
        device = self.device
        levels = levels[levels != DEVICE]
        if not len(levels):
            return True
        self.make_room(len(levels))
        spans = []
        sources: list[int] = []
        for node in path:
            first = len(node.device) // PAGE_ID_BYTES
            places = np.arange(first, self.tree.num_pages(node), dtype=np.int32)
            spans.append((node, places))
            for level, i in zip(levels[len(sources) :].tolist(), places.tolist(), strict=False):
                sources.append(page_at(node[level], i))
        num_places = sum(len(places) for _, places in spans)
        if device.num_free < len(levels) or num_places != len(levels) or -1 in sources:
            return False  # the last two: pages were lost while room was made for them
        pages = device.allocate(len(levels), PageState.LOADING)
        left = pages
        for node, places in spans:
            if len(places):
                self.tree.attach(node, DEVICE, places, left[: len(places)])
                left = left[len(places) :]
        begun = True
        for level in (HOST, DISK):
            mask = levels == level
            if not mask.any():
                continue
            held = np.array(sources, np.int32)[mask]
            move = self._load(level, held, pages[mask])
            if move is None:
                begun = False
                self.tree.detach([pages[mask]])
                device.free(pages[mask])
                self.free_dropped()
            else:
                self._loading.update(dict.fromkeys(pages[mask].tolist(), move))
        return begun

    def load_private(self, host_page: int, num_tokens: int) -> Move | None:
        """Begin to load a page of which `num_tokens` match, for one lease alone; None: compute."""
        device, host = self.device, self.tier(HOST)
        seconds = self.mover.seconds(host, device, 1)
        cheaper = not self.seconds_per_token or seconds < num_tokens * self.seconds_per_token
        if self.policy.promote == "never" or (self.policy.promote == "cost" and not cheaper):
            return None
        source = np.array([host_page], np.int32)
        host.add_readers(source)  # so that making room can't give it to another
        try:
            self.make_room(1)
            if not device.num_free:
                return None
            page = device.allocate(1, PageState.LOADING)
            move = self._load(HOST, source, page, private=True)
            if move is None:
                device.free(page)
            return move
        finally:
            host.drop_readers(source)

    def _load(
        self, level: int, sources: PageIds, pages: PageIds, private: bool = False
    ) -> Move | None:
        ticket = self.mover.submit(self.tier(level), sources, self.device, pages)
        if ticket is None:
            return None
        move = self._moves[ticket] = Move(DEVICE, pages, private)
        return move

    def abandon(self, move: Move) -> None:
        """Nobody wants the pages of a private move any more."""
        if move.ok is not False:
            self._let_go(DEVICE, move.pages)

    def arriving(self, pages: PageIds) -> list[Move]:
        """The moves that carry some of these device pages here, each once."""
        if not self._loading:
            return []
        moves = [self._loading[p] for p in pages.tolist() if p in self._loading]
        return list(dict.fromkeys(moves))

    def is_loading(self, node: Node, tokens: bytes) -> bool:
        """Whether pages for these tokens, behind a node, are on their way to the device."""
        if not self._loading:
            return False
        below = match_below(node, tokens, self.tree.page_bytes).node
        while below is not node:
            if self.arriving(np.frombuffer(below.device, np.int32)):
                return True
            assert below.parent is not None
            below = below.parent
        return False
