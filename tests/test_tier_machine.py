"""The machine of `test_tree_machine` grown by tiers, whose copies end late, in any order, or fail.

The mover is a model: it follows the contract of `tiers.mover`, moves prefixes in place of bytes,
and draws what becomes of every page. Whatever it draws, a lease that says it is ready must see in
its page table the right prefixes, and every page of every tier must have one owner.
"""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
from test_tree_machine import CopyFailed, Integers, Machine, ModelDevice

from radixsvc.cache import Lease, Lower, PrefixCache
from radixsvc.residency import TierPolicy
from tiers.base import Chain, Record, StoredPage
from tiers.page import OutOfPages, PageIds, PageState
from tiers.ticket import Ticket

FINGERPRINT = b"f" * 32


class ModelTier(ModelDevice):
    def __init__(self, name: str, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.name = name
        self.page_bytes = 1
        self.records: dict[int, Record] = {}
        self.generation = 0

    def flush(self) -> None:
        self.records.clear()
        self.generation += 1

    def take_recovered(self) -> list[StoredPage]:
        """What a restart finds, as the disk tier hands it out."""
        return [StoredPage(page, record) for page, record in self.records.items()]


class ModelMover:
    def __init__(self, draw: Integers, faulty: bool) -> None:
        self.draw = draw
        self.faulty = faulty
        self.under_way: list[tuple[Ticket, list[Record], int]] = []
        self.arrived: dict[str, int] = {}

    def submit(
        self, source: ModelTier, source_pages: PageIds, target: ModelTier, target_pages: PageIds,
        chain: Chain | None = None,
    ) -> Ticket | None:  # fmt: skip
        assert len(source_pages) == len(target_pages) > 0
        if self.faulty and not self.draw(0, 7):
            return None
        ticket = Ticket(source, source_pages, target, target_pages)
        ticket.begin()
        records = chain.records(len(target_pages)) if chain else []
        self.under_way.append((ticket, records, target.generation))
        return ticket

    def poll(self) -> list[Ticket]:
        return [self.end() for _ in range(self.draw(0, len(self.under_way)))]

    def wait(self, timeout_s: float) -> list[Ticket]:
        return [self.end()] if self.under_way else []

    def end(self) -> Ticket:
        ticket, records, generation = self.under_way.pop(self.draw(0, len(self.under_way) - 1))
        source, target = ticket.source, ticket.target
        assert isinstance(source, ModelTier)
        assert isinstance(target, ModelTier)
        fails = self.faulty and not self.draw(0, 3)
        for i, (a, b) in enumerate(zip(ticket.source_pages, ticket.target_pages, strict=True)):
            ticket.ok[i] = not fails or bool(self.draw(0, 1))
            ticket.ok[i] &= source.name != "disk" or int(a) in source.records
            ticket.bad[i] = not ticket.ok[i] and source.name == "disk" and bool(self.draw(0, 1))
            if ticket.ok[i]:
                target.content[b] = list(source.content[a])
                if records and generation == target.generation:  # else what it wrote is void
                    target.records[int(b)] = records[i]
        ticket.settle()
        self.arrived[target.name] = self.arrived.get(target.name, 0) + int(ticket.ok.sum())
        return ticket

    def available(self, source: ModelTier, target: ModelTier) -> bool:
        return not self.faulty or bool(self.draw(0, 9))

    def seconds(self, source: ModelTier, target: ModelTier, num_pages: int) -> float:
        return num_pages * self.draw(0, 3)


class TierMachine(Machine):
    def __init__(self, page_size: int, draw: Integers, faulty: bool) -> None:
        super().__init__(page_size, draw)
        self.device = ModelTier("device", draw(2, 10), page_size)
        self.host = ModelTier("host", draw(0, 8), page_size) if draw(0, 5) else None
        self.disk = ModelTier("disk", draw(0, 12), page_size) if draw(0, 5) else None
        self.mover = ModelMover(draw, faulty)
        policy = TierPolicy(
            write=self.pick(["through", "back", "back", "none"]),
            through_after=draw(1, 2),
            disk_after=draw(1, 2),
            promote=self.pick(["always", "cost", "never"]),
        )
        self.lower = Lower(self.mover, self.host, self.disk, FINGERPRINT, policy)  # type: ignore
        self.loaded = 0
        self.start()

    def start(self) -> None:
        quotas = {"b": [self.quota, self.quota + 1, self.quota + 2]} if self.quota >= 0 else {}
        self.cache = PrefixCache(
            self.device, self.page_size, lower=self.lower,
            quotas=quotas,
        )  # fmt: skip
        self.cache.residency.seconds_per_token = 1.0

    def step(self) -> None:
        if not self.draw(0, 2):
            self.cache.poll()
            self.check()
        super().step()
        if not self.draw(0, 60):
            self.restart()

    def acquire(self) -> None:
        self.device.fail_next = self.pick([None, None, CopyFailed])
        try:
            lease = self.begin()
        except CopyFailed:
            return
        finally:
            self.device.fail_next = None
        self.leases.append((lease, self.generation))
        self.see(lease, self.generation)

    def begin(self) -> Lease:
        tokens = np.array(self.prompt(), np.int32)
        lease = self.cache.acquire(self.pick(self.namespaces), tokens)
        assert sum(lease.sources) == lease.cached_len <= len(tokens) - 1
        return lease

    def see(self, lease: Lease, generation: int) -> bool:
        """Whether the lease is ready; if so, it holds what it says."""
        if not lease.poll():
            return False
        self.loaded += lease.sources.host + lease.sources.disk
        self.verify(lease, generation, lease.num_valid)
        assert (self.device.states[lease.page_table] != PageState.LOADING).all()
        return True

    def compute(self) -> None:
        if not self.leases:
            return
        at = self.draw(0, len(self.leases) - 1)
        lease, generation = self.leases[at]
        awaited = lease.awaited
        lease.poll()
        if lease.awaited is not awaited:
            generation = self.generation  # it is matched again, perhaps after a flush
        self.leases[at] = lease, generation
        if self.see(lease, generation):
            self.compute_for(lease, generation)

    def compute_for(self, lease: Lease, generation: int) -> None:
        if lease.num_valid == len(lease.tokens):
            lease.append([self.draw(0, 2)])
        end = self.draw(lease.num_valid + 1, len(lease.tokens))
        try:
            lease.extend(end)
        except OutOfPages:
            return
        self.write(lease, generation, lease.num_valid, end)
        lease.commit(end)
        self.verify(lease, generation, end)

    def request(self) -> None:
        lease = self.begin()
        for _ in range(20):
            if self.see(lease, self.generation):
                break
            self.cache.poll()
            self.check()
        if not len(lease.awaited):
            self.compute_for(lease, self.generation)
            self.finish(lease)
        else:
            lease.release()

    def finish(self, lease: Lease) -> None:
        if len(lease.awaited):
            lease.release()
        else:
            super().finish(lease)

    def press(self) -> None:
        with contextlib.suppress(OutOfPages):
            self.device.free(self.cache.allocate(self.draw(1, 6)))

    def check(self) -> None:
        self.cache.check()

    def restart(self) -> None:
        """A process ends with all it had in memory; the disk and its records are found again."""
        if self.disk is None or self.leases:
            return
        self.cache.save(0.0)
        while self.mover.under_way:
            self.mover.end()
        for tier in (self.device, self.host):
            if tier is not None:
                tier.__init__(tier.name, tier.num_pages, self.page_size)  # type: ignore[misc]
        readable = {p: r for p, r in self.disk.records.items() if self.disk.states[p] == 2}
        content = self.disk.content
        self.disk.__init__("disk", self.disk.num_pages, self.page_size)  # type: ignore[misc]
        taken = self.disk.allocate(self.disk.num_pages)
        self.disk.publish(taken)
        self.disk.free(np.array([p for p in taken.tolist() if p not in readable], np.int32))
        self.disk.content, self.disk.records = content, readable
        self.pinned.clear()
        self.start()
        self.check()

    def end(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        while self.mover.under_way:
            self.cache.poll()
            self.check()
        self.cache.flush()
        self.cache.check()
        for tier in (self.device, self.host, self.disk):
            assert tier is None or tier.count()["free"] == tier.num_pages


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("faulty", [False, True])
def test_many_events_with_tiers(page_size: int, faulty: bool) -> None:
    loaded = 0
    arrived: dict[str, int] = {}
    for seed in range(12):
        machine = TierMachine(page_size, random.Random(seed).randint, faulty)
        for _ in range(200):
            machine.step()
        machine.end()
        loaded += machine.loaded
        for name, count in machine.mover.arrived.items():
            arrived[name] = arrived.get(name, 0) + count
    assert loaded > 0
    assert set(arrived) == {"device", "host", "disk"}
