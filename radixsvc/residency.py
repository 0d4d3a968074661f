"""Where the tree's pages lie below the device, and how they get there and back.

    device --- room is needed, or used often enough ---> host --- used a second time ---> disk
       ^                                                  |                                |
       +----------------- a prompt needs them, and loading is cheaper than computing ------+

A copy is attached to the tree when it is submitted, LOADING, and is READY once it was verified.
What is under way is known by its ticket and page ids alone, so the tree may split, evict or flush
meanwhile: a page that it lets go of while LOADING is an orphan, freed when its ticket ends. A page
that did not arrive is detached, with whatever lies behind it: a miss, never an answer.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import numpy as np

from radixsvc.namespace import account_name
from radixsvc.node import DEVICE, DISK, HOST, PAGE_ID_BYTES, PAGES, Node
from radixsvc.tree import RadixTree, page_at
from tiers.base import Chain, Tier
from tiers.disk import DiskTier
from tiers.mover import Mover, Ticket
from tiers.page import OutOfPages, PageIds, PageState

DEMOTION_WAIT_S = 1.0  # how long making room waits for copies out of what was evicted
AHEAD = 8  # the coldest part of the device is copied down before its room is needed: one in 8
FOR_DISK_NODES = 4096  # that wait to be written; older ones wait for their next use
AHEAD_NODES = 16  # at most, each time


@dataclass(frozen=True)
class TierPolicy:
    """When pages are copied down, and whether they are loaded.

    `write` to the host: "through" at `through_after` uses, "back" when the device needs room,
    "none" never. Disk takes what was used `disk_after` times. `promote` "cost" loads what is
    cheaper to load than to compute.
    """

    write: Literal["through", "back", "none"] = "back"
    through_after: int = 2
    disk_after: int = 2
    promote: Literal["cost", "always", "never"] = "cost"


class Choice(NamedTuple):
    """Of the pages along a path, the first `num_ready` lie on the device, or are on their way.

    `levels` says from where each page behind them is to be loaded.
    """

    num_ready: int
    levels: Sequence[int]


@dataclass(eq=False)
class Move:
    """One ticket under way. `ok` is set when it is over."""

    source: int
    target: int
    ok: bool | None = None


class Residency:
    """The tiers of a tree: `tiers[level]`, the device first, None where there is none."""

    def __init__(
        self,
        tree: RadixTree,
        tiers: Sequence[Tier | None],
        mover: Mover,
        policy: TierPolicy,
        fingerprint: bytes,
    ) -> None:
        self.tree = tree
        self.mover = mover
        self.policy = policy
        self.seconds_per_token = 0.0  # of prefill; 0 while not known
        self.counters: Counter[str] = Counter()
        self.orphans: list[set[int]] = [set() for _ in PAGES]
        self._tiers = [*tiers, *[None] * (len(PAGES) - len(tiers))]
        self._fingerprint = fingerprint
        self._moves: dict[Ticket, Move] = {}
        self._loading: dict[int, Move] = {}  # by device page
        self._for_disk: deque[Node] = deque(maxlen=FOR_DISK_NODES)
        self._ahead_clock = -1

    @property
    def is_moving(self) -> bool:
        return bool(self._moves or self._for_disk)

    def tier(self, level: int) -> Tier:
        tier = self._tiers[level]
        if tier is None:
            raise LookupError(f"there is no {PAGES[level]} tier")
        return tier

    # -- room ---------------------------------------------------------------------------------

    def make_room(self, num_pages: int) -> None:
        """Have so many device pages free, if what is evictable allows it; demotes what goes."""
        device = self.tier(DEVICE)
        end = time.monotonic() + DEMOTION_WAIT_S
        while device.num_free < num_pages:
            missing = num_pages - device.num_free - device.num_retired
            if missing > 0 and not self._demote(missing):
                break
            if device.num_free >= num_pages:
                break
            if not device.num_retired or time.monotonic() > end:
                break
            self.take_in(self.mover.wait(0.01))

    def _demote(self, num_pages: int) -> int:
        """Evict that many device pages, copying down first what lies nowhere else."""
        tails = self._tails(self.tree.victims(DEVICE), num_pages)
        if self._tiers[HOST] is not None and self.policy.write != "none":
            self._copy_down(tails, DEVICE, HOST)
        # The same pages, but maybe of other nodes: room on the host may have merged some.
        evicted = self.tree.evict(num_pages)
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

    def free_dropped(self) -> None:
        """Free what the tree let go of; what is still arriving, when it has arrived."""
        for level, tier in enumerate(self._tiers):
            pages = self.tree.take_freed(level) if level < self.tree.num_tiers else None
            if pages is None or tier is None:
                continue
            arriving = tier.states[pages] == PageState.LOADING
            self.orphans[level].update(pages[arriving].tolist())
            tier.free(pages[~arriving])

    # -- copies down --------------------------------------------------------------------------

    def used(self, path: Iterable[Node]) -> None:
        """A lease on this path ended: copy down what has been used often enough."""
        policy = self.policy
        if self._tiers[HOST] is not None and policy.write == "through":
            often = [(n, 0) for n in path if n.uses >= policy.through_after and n.device]
            self._copy_down(often, DEVICE, HOST)
        if self._tiers[DISK] is not None:
            whole = self.tree.page_bytes
            self._for_disk.extend(
                n
                for n in path
                if n.uses >= policy.disk_after
                and len(n.disk) < len(n.tokens) // whole * PAGE_ID_BYTES
            )

    def _copy_down(self, tails: Sequence[tuple[Node, int]], source: int, target: int) -> int:
        """Copy those nodes' pages from a place on to a lower tier that lacks them; how many."""
        wanted = sum(len(self._lacking(*tail, source, target)) for tail in tails)
        if not wanted or not self.mover.available(self.tier(source), self.tier(target)):
            return 0
        pages = self._take(target, wanted)
        used = 0
        # Taking pages may have evicted, so what is lacking is looked up again.
        spans = [(node, self._lacking(node, first, source, target)) for node, first in tails]
        groups = [[s] for s in spans if len(s[1])] if target == DISK else [spans]
        for group in groups:
            excess = sum(len(places) for _, places in group) - len(pages) + used
            for i, (node, places) in enumerate(group):  # coldest first, and of these the tails
                if excess > 0:
                    group[i] = node, places[: max(0, len(places) - excess)]
                    excess -= len(places)
            total = sum(len(places) for _, places in group)
            if not self._submit_down(group, pages[used : used + total], source, target):
                break
            used += total
        self.tier(target).free(pages[used:])
        return used

    def _submit_down(
        self, spans: Sequence[tuple[Node, PageIds]], pages: PageIds, source: int, target: int
    ) -> bool:
        held = [np.frombuffer(getattr(n, PAGES[source]), np.int32)[at] for n, at in spans]
        if not len(pages):
            return False
        chain = self._chain(*spans[0]) if target == DISK else None
        ticket = self.mover.submit(
            self.tier(source), np.concatenate(held), self.tier(target), pages, chain
        )
        if ticket is None:
            return False
        self._moves[ticket] = Move(source, target)
        for node, places in spans:
            if len(places):
                self.tree.attach(node, target, places, pages[: len(places)])
                pages = pages[len(places) :]
                self.enforce_quota(node, target)
        return True

    def enforce_quota(self, node: Node, level: int) -> None:
        """Evict what an account's namespaces keep on a tier beyond their quota."""
        account = node.account
        quota = account.quota[level]
        if quota is not None and account.resident[level] > quota:
            self.tree.evict(account.resident[level] - quota, account, level)
            self.free_dropped()

    def _lacking(self, node: Node, first: int, source: int, target: int) -> PageIds:
        """Places of a node from `first` on that are READY on one tier and not on the other."""
        held = np.frombuffer(getattr(node, PAGES[source]), np.int32)
        if node.parent is None or node.account.detached or not len(held):
            return np.empty(0, np.int32)
        wanted = (held >= 0) & (self.tier(source).states[held] == PageState.READY)
        wanted[:first] = False
        there = np.frombuffer(getattr(node, PAGES[target]), np.int32)[: len(held)]
        wanted[: len(there)] &= there < 0
        if target == DISK:  # takes no partly filled pages
            wanted[len(node.tokens) // self.tree.page_bytes :] = False
        places = np.flatnonzero(wanted).astype(np.int32)
        if target == DISK and len(places):  # as a chain, without gaps
            places = places[: 1 + int((np.diff(places, append=-1) != 1).argmax())]
        return places

    def _take(self, level: int, num_pages: int) -> PageIds:
        """Pages of a lower tier to be filled, at the expense of its coldest; maybe fewer."""
        tier = self.tier(level)
        missing = num_pages - tier.num_free
        if missing > 0:
            self.tree.evict(missing, level=level)
            self.free_dropped()
        return tier.allocate(min(num_pages, tier.num_free), PageState.LOADING)

    def _chain(self, node: Node, places: PageIds) -> Chain:
        """Records from the first page of the namespace to the last of these; see `recover`."""
        path = self.tree.path(node)
        root = path[0].parent
        assert root is not None
        name = self.tree.namespaces.get(root, "")
        run = b"".join(n.tokens for n in path[:-1])
        size = self.tree.page_bytes
        run += node.tokens[: (int(places[-1]) + 1) * size]
        blobs = [run[i : i + size] for i in range(0, len(run), size)]
        blobs[0] = name.encode() + blobs[0]
        return Chain(self._root_digest(name), 0, blobs)

    def _root_digest(self, namespace: str) -> bytes:
        return hashlib.sha256(self._fingerprint + namespace.encode()).digest()

    # -- in the background --------------------------------------------------------------------

    def poll(self) -> None:
        """Take in copies that ended, begin those that are due."""
        self.take_in(self.mover.poll())
        if self.policy.write == "back" and self._tiers[HOST] is not None:
            self._copy_ahead()
        while self._for_disk and len(self._moves) < 8:
            node = self._for_disk.popleft()
            for source in (HOST, DEVICE):
                if self._tiers[source] is not None:
                    self._copy_down([(node, 0)], source, DISK)

    def _copy_ahead(self) -> None:
        """Copy the coldest device pages to the host before their room is needed."""
        device = self.tier(DEVICE)
        if device.num_free * AHEAD > device.num_pages or self.tree.clock == self._ahead_clock:
            return
        if any(move.target == HOST for move in self._moves.values()):
            return
        self._ahead_clock = self.tree.clock
        coldest = itertools.islice(self.tree.victims(DEVICE), AHEAD_NODES)
        self._copy_down(self._tails(coldest, device.num_pages // AHEAD), DEVICE, HOST)

    def take_in(self, tickets: Sequence[Ticket]) -> None:
        """Copies ended: drop what did not arrive, and what nobody wants any more."""
        lost: list[list[PageIds]] = [[np.empty(0, np.int32)] for _ in PAGES]
        broken: list[tuple[Tier, PageIds]] = []
        for ticket in tickets:
            move = self._moves.pop(ticket)
            move.ok = bool(ticket.ok.all())
            target = ticket.target_pages
            if move.target == DEVICE:
                for page in target.tolist():
                    self._loading.pop(page, None)
            orphans = self.orphans[move.target]
            unwanted = np.isin(target, list(orphans)) if orphans else np.zeros(len(target), bool)
            orphans.difference_update(target[unwanted].tolist())
            ticket.target.free(target[unwanted & ticket.ok])
            lost[move.target].append(target[~unwanted & ~ticket.ok])
            bad = ticket.source_pages[ticket.bad]
            bad = bad[ticket.source.states[bad] == PageState.READY]
            lost[move.source].append(bad)
            broken.append((ticket.source, bad))
        pages = [np.unique(np.concatenate(ids)) for ids in lost]
        if any(map(len, pages)):
            self.counters["lost"] += sum(map(len, pages))
            self.tree.detach(pages)
            for tier, bad in broken:
                tier.free(bad[tier.states[bad] == PageState.READY])
            self.free_dropped()

    # -- promotion ----------------------------------------------------------------------------

    def choose(self, path: Sequence[Node], num_pages: int, load: bool = True) -> Choice:
        """What of the first `num_pages` pages of a path is worth loading: the front of it.

        The least sum of loading a front and computing the tail, from the mover's measured rates
        and the engine's seconds per token.
        """
        num_ready = so_far = 0
        levels: list[int] = []
        for node in path:
            count = min(self.tree.num_pages(node), num_pages)
            num_pages -= count
            on_device = min(len(node.device) // PAGE_ID_BYTES, count)
            num_ready += on_device
            if on_device < count and load:
                levels += self._levels(node, on_device, count)
            if num_ready + len(levels) < so_far + count:
                break
            so_far += count
        return self._cheapest(num_ready, levels)

    def _levels(self, node: Node, first: int, last: int) -> list[int]:
        """The fastest tier where each of those pages is READY, up to one that is on none."""
        levels = np.zeros(last - first, np.int8)
        for level in (DISK, HOST):
            pages = np.frombuffer(getattr(node, PAGES[level]), np.int32)[first:last]
            tier = self._tiers[level]
            if tier is not None and len(pages):
                ready = (pages >= 0) & (tier.states[pages] == PageState.READY)
                levels[: len(pages)][ready] = level
        missing = np.flatnonzero(levels == 0)
        found: list[int] = (levels[: missing[0]] if len(missing) else levels).tolist()
        return found

    def _cheapest(self, num_ready: int, levels: list[int]) -> Choice:
        if not levels or self.policy.promote == "never":
            return Choice(num_ready, [])
        if self.policy.promote == "always" or not self.seconds_per_token:
            return Choice(num_ready, levels)
        per_page = self.seconds_per_token * self.tree.page_size
        best, best_seconds = 0, len(levels) * per_page
        ends = [i for i in range(1, len(levels)) if levels[i] != levels[i - 1]]
        for end in [*ends, len(levels)]:
            seconds = (len(levels) - end) * per_page
            for level in (HOST, DISK):
                count = levels[:end].count(level)
                if count:
                    seconds += self.mover.seconds(self.tier(level), self.tier(DEVICE), count)
            if seconds < best_seconds:
                best, best_seconds = end, seconds
        self.counters["not_worth_loading"] += len(levels) - best
        return Choice(num_ready, levels[:best])

    def promote(self, path: Sequence[Node], choice: Choice) -> list[Move]:
        """Begin to load what was chosen onto the end of a locked path. OutOfPages: nothing begun.

        What is refused is detached at once, with what lies behind it.
        """
        device = self.tier(DEVICE)
        self.make_room(len(choice.levels))
        spans = []
        sources: list[int] = []
        for node in path:
            places = range(len(node.device) // PAGE_ID_BYTES, self.tree.num_pages(node))
            spans.append((node, np.array(places, np.int32)))
            for level, i in zip(choice.levels[len(sources) :], places, strict=False):
                sources.append(page_at(getattr(node, PAGES[level]), i))
        if sum(len(places) for _, places in spans) != len(choice.levels) or -1 in sources:
            raise OutOfPages("pages were lost while room was made for them")
        pages = device.allocate(len(choice.levels), PageState.LOADING)
        left = pages
        for node, lacking in spans:
            if len(lacking):
                self.tree.attach(node, DEVICE, lacking, left[: len(lacking)])
                left = left[len(lacking) :]
        moves = []
        levels = np.array(choice.levels)
        refused = np.zeros(len(levels), np.bool_)
        for level in (HOST, DISK):
            mask = levels == level
            if not mask.any():
                continue
            move = Move(level, DEVICE)
            held = np.array(sources, np.int32)[mask]
            ticket = self.mover.submit(self.tier(level), held, device, pages[mask])
            moves.append(move)
            if ticket is None:
                move.ok = False
                refused |= mask
                continue
            self._moves[ticket] = move
            for page in pages[mask].tolist():
                self._loading[page] = move
        if refused.any():
            self.tree.detach([pages[refused]])
            device.free(pages[refused])
            self.free_dropped()
        return moves

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
        below = self.tree.match_below(node, tokens).node
        while below is not node:
            if self.arriving(np.frombuffer(below.device, np.int32)):
                return True
            assert below.parent is not None
            below = below.parent
        return False

    # -- restart ------------------------------------------------------------------------------

    def recover(self) -> int:
        """Take in the pages that the disk tier found at start; returns how many are of use.

        A page's blob is its tokens, the namespace before them where it is the first of one.
        """
        disk = cast("DiskTier | None", self._tiers[DISK])
        if disk is None:
            return 0
        below: dict[bytes, list[tuple[bytes, int, bytes]]] = {}
        names: dict[bytes, str] = {}
        unused: set[int] = set()
        for page, record in disk.take_recovered():
            unused.add(page)
            tokens = record.blob[-self.tree.page_bytes :]
            if record.depth == 0:
                names[record.parent] = record.blob[: -self.tree.page_bytes].decode()
            below.setdefault(record.parent, []).append((record.digest, page, tokens))
        for parent, name in names.items():
            if self._root_digest(name) == parent:
                self._regrow(self.tree.root(name, account_name(name)), parent, below, unused)
        disk.free(np.array(sorted(unused), np.int32))
        return self.tree.resident(DISK)

    def _regrow(
        self,
        root: Node,
        digest: bytes,
        below: dict[bytes, list[tuple[bytes, int, bytes]]],
        unused: set[int],
    ) -> None:
        """Hang what was stored below a digest under a node, one node a run without branches."""
        stack = [(root, digest)]
        while stack:
            parent, at = stack.pop()
            for child, page, tokens in {c[2]: c for c in below.get(at, ())}.values():
                pages, runs = [page], [tokens]
                while len(after := {c[2]: c for c in below.get(child, ())}) == 1:
                    child, page, tokens = next(iter(after.values()))
                    pages.append(page)
                    runs.append(tokens)
                unused.difference_update(pages)
                ids = np.array(pages, np.int32)
                node = self.tree.graft(parent, b"".join(runs), DISK, ids)
                node.uses = self.policy.disk_after
                stack.append((node, child))

    def save(self, deadline_s: float) -> None:
        """Write what is only in memory to disk, what was used last first, as time allows."""
        end = time.monotonic() + deadline_s
        if self._tiers[DISK] is None:
            return
        for node in sorted(self.tree.nodes(), key=lambda n: -n.last_use):
            for source in (HOST, DEVICE):
                if self._tiers[source] is not None and time.monotonic() < end:
                    self._copy_down([(node, 0)], source, DISK)
        while self._moves and time.monotonic() < end:
            self.take_in(self.mover.wait(max(0.0, end - time.monotonic())))

    def flush(self) -> None:
        """The tree was flushed: free its pages, and let nothing stored be read again."""
        self._for_disk.clear()
        self.free_dropped()
        disk = cast("DiskTier | None", self._tiers[DISK])
        if disk is not None:
            disk.flush()
