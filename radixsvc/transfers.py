"""The tiers of a tree, and what is under way between them.

A copy is attached to the tree when it is submitted, LOADING, and is READY once it was verified.
What is under way is known by its ticket and page ids alone, so the tree may split, evict or flush
meanwhile: a page that it lets go of while LOADING is an orphan, freed when its ticket ends. A page
that did not arrive is detached, with whatever lies behind it: a miss, never an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from radixsvc.node import DEVICE, HOST, PAGES
from radixsvc.tree import RadixTree
from tiers.base import Tier
from tiers.device import DeviceTier
from tiers.mover import Mover, Ticket
from tiers.page import PageIds, PageState


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


@dataclass(eq=False)
class Move:
    """One ticket under way to `pages` of a tier. `ok` is set when it is over.

    Pages that come to the device for one lease alone are `private`: WRITING when they are there.
    """

    target: int
    pages: PageIds
    private: bool = False
    ok: bool | None = None


class Transfers:
    """`tiers[level]`, the device first, None where there is none, and the moves between them."""

    def __init__(self, tree: RadixTree, device: DeviceTier, lower: Lower | None) -> None:
        self.tree = tree
        self.device = device
        self.tiers: list[Tier | None] = [device, None, None]
        self.policy = TierPolicy(write="none", promote="never")
        self.counters: Counter[str] = Counter()
        self.orphans: list[set[int]] = [set() for _ in PAGES]
        self._mover: Mover | None = None
        self._moves: dict[Ticket, Move] = {}
        self._loading: dict[int, Move] = {}  # by device page
        if lower is not None:
            self.tiers[HOST:] = lower.host, lower.disk
            self.policy = lower.policy
            self._mover = lower.mover

    @property
    def mover(self) -> Mover:
        """There is one where there are lower tiers."""
        assert self._mover is not None
        return self._mover

    def tier(self, level: int) -> Tier:
        tier = self.tiers[level]
        assert tier is not None
        return tier

    def free_dropped(self) -> None:
        """Free what the tree let go of."""
        for level in range(self.tree.num_tiers):
            pages = self.tree.take_freed(level)
            if pages is not None:
                self._let_go(level, pages)

    def _let_go(self, level: int, pages: PageIds) -> None:
        """Free pages of a tier; those that are still arriving, when they have arrived."""
        arriving = self.tier(level).states[pages] == PageState.LOADING
        self.orphans[level].update(pages[arriving].tolist())
        self.tier(level).free(pages[~arriving])

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
            if move.private:
                self.device.reopen(target[~unwanted & ticket.ok])
            failed = target[~unwanted & ~ticket.ok]
            self.counters["lost"] += len(failed)
            lost[move.target].append(failed)
            source = next(i for i, tier in enumerate(self.tiers) if tier is ticket.source)
            bad = ticket.source_pages[ticket.bad]
            bad = bad[ticket.source.states[bad] == PageState.READY]
            lost[source].append(bad)
            broken.append((ticket.source, bad))
        pages = [np.unique(np.concatenate(ids)) for ids in lost]
        if any(map(len, pages)):
            self.tree.detach(pages)
            for tier, bad in broken:
                tier.free(bad[tier.states[bad] == PageState.READY])
            self.free_dropped()
