"""The tiers of a tree, and what is under way between them.

A copy is attached to the tree when it is submitted, LOADING, and is READY once it was verified.
What is under way is known by its ticket and page ids alone, so the tree may split, evict or flush
meanwhile: a page that it lets go of while LOADING is free when its ticket ends. A page that did not
arrive is detached, with whatever lies behind it: a miss, never an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from radixsvc.node import DISK, HOST, Node
from radixsvc.tree import RadixTree
from tiers.base import Chain, Tier
from tiers.device import DeviceTier
from tiers.disk import DiskTier
from tiers.mover import Mover
from tiers.page import PageIds, PageState
from tiers.ticket import Ticket

Levels = npt.NDArray[np.int8]  # of pages along a path
COUNTERS = (
    "acquired", "evicted_pages", "dropped_pages", "lost_pages", "duplicate_pages", "page_copies",
)  # fmt: skip
Span = tuple[Node, PageIds]  # a node and places of pages in it


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
    disk: DiskTier | None
    fingerprint: bytes
    policy: TierPolicy = field(default_factory=TierPolicy)

    def close(self) -> None:
        """Once the engine has stopped: end copies, close files, let go of memory."""
        self.mover.close()
        for tier in (self.host, self.disk):
            if tier is not None:
                tier.close()


class Transfers:
    """`tiers[level]`, the device first, without pages where there is none, and the copies under way
    between them. There is a `mover` where there are lower tiers."""

    mover: Mover

    def __init__(self, tree: RadixTree, device: DeviceTier, lower: Lower | None) -> None:
        self.tree = tree
        self.device = device
        self.tiers: list[Tier] = [device, Tier("host", 0, 0), Tier("disk", 0, 0)]
        self.policy = TierPolicy(write="none", promote="never")
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.under_way: set[Ticket] = set()
        if lower is not None:
            for level, tier in ((HOST, lower.host), (DISK, lower.disk)):
                self.tiers[level] = tier or self.tiers[level]
            self.policy = lower.policy
            self.mover = lower.mover

    def submit(
        self, source: int, held: PageIds, target: int, pages: PageIds, chain: Chain | None = None
    ) -> bool:
        """Begin to copy pages held on one tier to LOADING pages of another; False if refused."""
        ticket = self.mover.submit(self.tiers[source], held, self.tiers[target], pages, chain)
        if ticket is not None:
            self.under_way.add(ticket)
        return ticket is not None

    def attach(self, level: int, spans: Sequence[Span], pages: PageIds) -> None:
        """These pages of a tier lie in those places from now on, as far as there are pages."""
        for node, places in spans:
            part, pages = pages[: len(places)], pages[len(places) :]
            if len(part):
                self.tree.attach(node, level, places[: len(part)], part)

    def arriving(self, pages: PageIds) -> PageIds:
        """Those of these device pages that are on their way there."""
        loading: npt.NDArray[np.bool_] = self.device.states[pages] == PageState.LOADING
        return pages[loading]

    def free_dropped(self) -> None:
        """Free what the tree let go of."""
        for level in range(self.tree.num_tiers):
            pages = self.tree.take_freed(level)
            if pages is not None:
                self.tiers[level].free(pages)

    def take_in(self, tickets: Sequence[Ticket]) -> None:
        """Copies ended: drop what did not arrive, and what was found to be bad."""
        lost: list[list[PageIds]] = [[np.empty(0, np.int32)] for _ in self.tiers]
        for ticket in tickets:
            self.under_way.remove(ticket)
            failed = ticket.target_pages[~ticket.ok]
            self.counters["lost_pages"] += len(failed)
            lost[self.tiers.index(ticket.target)].append(failed)
            lost[self.tiers.index(ticket.source)].append(ticket.source_pages[ticket.bad])
        pages = [np.concatenate(ids) for ids in lost]
        if any(map(len, pages)):
            self.tree.detach(pages)
            self.free_dropped()
