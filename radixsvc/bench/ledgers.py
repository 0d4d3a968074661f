"""Tiers without memory, and a mover that carries nothing: for simulation and demonstration.

States, readers and tickets are the real ones, so the cache above decides as it does in service.
A transfer is over at the next poll.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiers.base import Chain, StoredPage, Tier
from tiers.page import PageIds
from tiers.ticket import Ticket


class LedgerTier(Tier):
    """Pages of nothing."""

    def __init__(self, name: str, num_pages: int) -> None:
        super().__init__(name, num_pages, page_bytes=0)

    def copy_page(self, source: int, target: int) -> None:
        """A device's copy of one page onto another."""

    def take_recovered(self) -> list[StoredPage]:
        """A disk's pages from before: none."""
        return []

    def flush(self) -> None:
        """Nothing was stored."""


class InstantMover:
    """Stands in for `tiers.mover.Mover`. Its estimates are `seconds_per_page` by the source."""

    def __init__(self, seconds_per_page: Mapping[str, float]) -> None:
        self._seconds_per_page = seconds_per_page
        self._under_way: list[Ticket] = []

    def submit(
        self,
        source: Tier,
        source_pages: PageIds,
        target: Tier,
        target_pages: PageIds,
        chain: Chain | None = None,
    ) -> Ticket | None:
        ticket = Ticket(source, source_pages, target, target_pages)
        ticket.begin()
        self._under_way.append(ticket)
        return ticket

    def poll(self) -> list[Ticket]:
        finished, self._under_way = self._under_way, []
        for ticket in finished:
            ticket.ok[:] = True
            ticket.settle()
        return finished

    def wait(self, timeout_s: float) -> list[Ticket]:
        return self.poll()

    def available(self, source: Tier, target: Tier) -> bool:
        return True

    def seconds(self, source: Tier, target: Tier, num_pages: int) -> float:
        return num_pages * self._seconds_per_page.get(source.name, 0.0)
