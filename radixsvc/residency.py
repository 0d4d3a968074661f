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

import numpy as np
import numpy.typing as npt

from radixsvc.match import match_below
from radixsvc.node import DEVICE, DISK, HOST, PAGE_ID_BYTES, Account, Node, page_at
from radixsvc.restart import Records
from radixsvc.transfers import Levels, Lower, Span, Transfers
from radixsvc.transfers import TierPolicy as TierPolicy
from radixsvc.tree import RadixTree
from tiers.device import DeviceTier
from tiers.page import PageState

NOWHERE = 3  # beyond the last level
DEMOTION_WAIT_S = 0.05  # how long making room may wait for copies out of what was evicted
AHEAD = 8  # the coldest part of the device is copied down before its room is needed: one in 8
AHEAD_NODES = 16  # at most, each time
EVICT_AHEAD = 32  # pages evicted at once, where the device has 64 times as many
FOR_DISK_NODES = 4096  # that wait to be written; older ones wait for their next use
MAX_UNDER_WAY = 8  # copies, when one to disk is begun


class Residency(Transfers):
    """Decides what moves when; recovers at start what the disk tier found."""

    def __init__(self, tree: RadixTree, device: DeviceTier, lower: Lower | None) -> None:
        super().__init__(tree, device, lower)
        self.seconds_per_token = 0.0  # of prefill, to weigh loading against; 0 while not known
        self.writes_to_host = self.policy.write != "none" and self.tiers[HOST].num_pages > 0
        self._for_disk: deque[Node] = deque(maxlen=FOR_DISK_NODES)
        self._ahead_clock = -1
        self._evict_ahead = min(EVICT_AHEAD, device.num_pages // 64)
        self.disk = None if lower is None else lower.disk
        if lower is not None and self.disk is not None:
            self._records = Records(tree, lower.fingerprint)
            unused = self._records.recover(self.disk.take_recovered(), self.policy.disk_after)
            self.disk.free(unused)
            for account in tree.accounts.values():
                self.enforce_quota(account, DISK)

    @property
    def is_moving(self) -> bool:
        """Whether copies are under way or due: `poll` has something to do."""
        return bool(self.under_way or self._for_disk)

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
        if self.writes_to_host:
            most = num_pages if copy else 0
            host = self.tiers[HOST]
            while most and self.mover.seconds(self.device, host, most) > DEMOTION_WAIT_S:
                most //= 2
            tails = self._tails(self.tree.victims(DEVICE, account), num_pages)
            self.counters["dropped_pages"] += self._copy_down(tails, DEVICE, HOST, most)
        # The same pages, but maybe of other nodes: room on the host may have merged some.
        evicted = self.tree.evict(num_pages, account)
        self.free_dropped()
        self.counters["evicted_pages"] += evicted
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
        if policy.write == "through":
            often = [(n, 0) for n in path if n.uses >= policy.through_after]
            self._copy_down(often, DEVICE, HOST)
        if self.disk is not None:
            self._for_disk.extend(n for n in path if n.uses >= policy.disk_after)

    def secure(self, path: Iterable[Node]) -> bool:
        """Whether a path lies whole below the device; what does not is copied there."""
        if self.tree.num_tiers == 1:
            return False
        is_safe = True
        for node in path:
            safe = np.zeros(self.tree.num_pages(node), np.bool_)
            for level in (HOST, DISK):
                ready = self._is_ready(node, level)
                safe[: len(ready)] |= ready
            if not safe.all():
                is_safe = False
                self._copy_down([(node, 0)], DEVICE, HOST if self.writes_to_host else DISK)
        return is_safe

    def _copy_down(
        self, tails: Sequence[tuple[Node, int]], source: int, target: int, most: int | None = None
    ) -> int:
        """Copy those nodes' pages from a place on to a lower tier that lacks them, `most` in all.

        Returns how many stay behind, for want of room or of a mover that takes them. Those are
        the coldest, which come first. To disk goes one node at a time: its records are one chain.
        """
        tier = self.tiers[target]
        spans = self._lacking(tails, source, target)
        wanted = sum(len(places) for _, places in spans)
        count = wanted if most is None else min(wanted, most)
        if not count or not self.mover.available(self.tiers[source], tier):
            return wanted
        if count > tier.num_free:
            self.tree.evict(count - tier.num_free, level=target)
            self.free_dropped()
            spans = self._lacking(tails, source, target)  # some of which may be gone now
        room = min(count, tier.num_free)
        kept: list[Span] = []
        for node, places in reversed(spans):
            if room > 0:
                kept.insert(0, (node, places[:room]))
                room -= len(places)
        if not kept:
            return wanted
        held = np.concatenate([np.frombuffer(n[source], np.int32)[places] for n, places in kept])
        pages = tier.allocate(len(held), PageState.LOADING)
        chain = self._records.chain(*kept[0]) if target == DISK else None
        if not self.submit(source, held, target, pages, chain):
            tier.free(pages)
            return wanted
        self.attach(target, kept, pages)
        for node, _ in kept:  # now that none is to be attached: this may merge them
            self.enforce_quota(node.account, target)
        return wanted - len(pages)

    def _lacking(self, tails: Iterable[tuple[Node, int]], source: int, target: int) -> list[Span]:
        """Of each node's places from one on those that are READY on a tier and not on the other."""
        spans = []
        for node, first in tails:
            if node.parent is None or node.account is self.tree.flushed:
                continue
            wanted = self._is_ready(node, source)
            wanted[:first] = False
            there = np.frombuffer(node[target], np.int32)[: len(wanted)]
            wanted[: len(there)] &= there < 0
            if target == DISK:  # takes no partly filled pages
                wanted[len(node.tokens) // self.tree.page_bytes :] = False
            places = np.flatnonzero(wanted).astype(np.int32)
            if target == DISK:  # as a chain, without gaps
                places = places[places - np.arange(len(places)) == places[:1]]
            if len(places):
                spans.append((node, places))
        return spans

    def _is_ready(self, node: Node, level: int) -> npt.NDArray[np.bool_]:
        """Which of a node's pages are READY on a tier, as far as it has places for them there."""
        pages = np.frombuffer(node[level], np.int32)
        ready: npt.NDArray[np.bool_] = self.tiers[level].states[pages] == PageState.READY
        return ready & (pages >= 0)

    # -- in the background --------------------------------------------------------------------

    def poll(self) -> bool:
        """Take in copies that ended, begin those that are due.

        Whether what was refused may be tried again: copies ended, or none is under way.
        """
        if self.tree.num_tiers == 1:
            return False
        ended = self.mover.poll()
        self.take_in(ended)
        if self.policy.write == "back" and self.writes_to_host:
            self._copy_ahead()
        while self._for_disk and len(self.under_way) < MAX_UNDER_WAY:
            self._write(self._for_disk.popleft())
        return bool(ended) or not self.under_way

    def _write(self, node: Node) -> None:
        for source in (HOST, DEVICE):
            self._copy_down([(node, 0)], source, DISK)

    def _copy_ahead(self) -> None:
        """Copy the coldest device pages to the host before their room is needed."""
        device, host = self.device, self.tiers[HOST]
        if device.num_free * AHEAD > device.num_pages or self.tree.clock == self._ahead_clock:
            return
        if any(ticket.target is host for ticket in self.under_way):
            return
        self._ahead_clock = self.tree.clock
        coldest = itertools.islice(self.tree.victims(DEVICE), AHEAD_NODES)
        self._copy_down(self._tails(coldest, device.num_pages // AHEAD), DEVICE, HOST)

    def save(self, deadline_s: float) -> None:
        """Write what is only in memory to disk, what was used last first, as time allows."""
        end = time.monotonic() + deadline_s
        nodes = sorted(self.tree.nodes(), key=lambda n: -n.last_use) if self.disk else []
        for node in nodes:
            while time.monotonic() < end:
                self._write(node)
                left = any(self._lacking([(node, 0)], source, DISK) for source in (HOST, DEVICE))
                if not left or not self.under_way:
                    break
                self.take_in(self.mover.wait(end - time.monotonic()))  # the queue was full
        while self.under_way and time.monotonic() < end:
            self.take_in(self.mover.wait(end - time.monotonic()))

    def flush(self) -> None:
        """The tree was flushed: free its pages, and let nothing stored be read again."""
        self._for_disk.clear()
        self.free_dropped()
        if self.disk is not None:
            self.disk.flush()

    # -- promotion ----------------------------------------------------------------------------

    def levels(self, path: Iterable[Node], num_pages: int) -> Levels:
        """The fastest tier that has each of the first `num_pages` pages of a path, up to one that
        none has; those on their way to the device count as there."""
        levels = np.full(num_pages + 1, NOWHERE, np.int8)  # the last one stays so
        at = 0
        for node in path:
            of_node = levels[at : min(at + self.tree.num_pages(node), num_pages)]
            for level in (DISK, HOST):
                if node[level]:
                    ready = self._is_ready(node, level)[: len(of_node)]
                    of_node[: len(ready)][ready] = level
            of_node[: len(node.device) // PAGE_ID_BYTES] = DEVICE
            at += self.tree.num_pages(node)
        return levels[: int((levels == NOWHERE).argmax())]

    def choose(self, levels: Levels, num_tokens: int) -> int:
        """How many of those pages, which begin with so many tokens of a prompt, to hold: all on the
        device, and what is worth loading behind.

        The least sum of loading a front and computing the tail, from the mover's measured rates
        and the engine's seconds per token.
        """
        num_here = int((levels == DEVICE).sum())
        if num_here == len(levels) or self.policy.promote == "never":
            return num_here
        if self.policy.promote == "always" or not self.seconds_per_token:
            return len(levels)
        ends = np.flatnonzero(np.diff(levels[num_here:], append=NOWHERE)) + num_here + 1

        def seconds(end: int) -> float:
            total = max(0, num_tokens - end * self.tree.page_size) * self.seconds_per_token
            for level in (HOST, DISK):
                count = int((levels[:end] == level).sum())
                if count:
                    total += self.mover.seconds(self.tiers[level], self.device, count)
            return total

        return min([num_here, *ends.tolist()], key=seconds)

    def promote(self, path: Iterable[Node], levels: Levels) -> None:
        """Begin to load those of a path's first pages that are not on the device yet, the front
        where not all of them can be. All but the last is locked."""
        missing = int((levels != DEVICE).sum())
        if not missing:
            return
        self.make_room(missing)  # which the last page may go for
        spans: list[Span] = []
        sources: list[int] = []
        at = 0
        for node in path:
            first, end = len(node.device) // PAGE_ID_BYTES, self.tree.num_pages(node)
            places = np.arange(first, min(end, len(levels) - at), dtype=np.int32)
            spans.append((node, places))
            for level, i in zip(levels[at + first :].tolist(), places.tolist(), strict=False):
                sources.append(page_at(node[level], i))
            at += end
        count = min([*sources, -1].index(-1), self.device.num_free)
        pages = self.device.allocate(count, PageState.LOADING)
        held = np.array(sources[:count], np.int32)
        from_levels = levels[levels != DEVICE][:count]
        begun = count
        for level in (HOST, DISK):
            mask = from_levels == level
            if mask.any() and not self.submit(level, held[mask], DEVICE, pages[mask]):
                begun = min(begun, int(mask.argmax()))
        self.attach(DEVICE, spans, pages[:begun])
        self.device.free(pages[begun:])  # which have begun to be loaded, when that has ended

    def is_loading(self, node: Node, tokens: bytes) -> bool:
        """Whether pages for these tokens, behind a node, are on their way to the device."""
        if not self.under_way:
            return False
        end = match_below(node, tokens, self.tree.page_bytes).node
        return len(self.arriving(np.frombuffer(self.tree.device_pages(end), np.int32))) > 0
