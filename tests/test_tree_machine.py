"""Any sequence of events against a naive model: which token prefixes lie in which READY page.

The model's device writes into a page, for every token, the whole prefix that ends there. So a
page holds the right keys and values if and only if it holds the right prefixes, and what must be
found is the longest prefix of a prompt that stands in some READY page.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixsvc.cache import Lease, PinLimit, PrefixCache, namespace_key
from tiers.page import OutOfPages, PageIds, PageLedger, PageState

T = TypeVar("T")
Integers = Callable[[int, int], int]


class CopyFailed(Exception):
    """What a device's copy raises when told to fail."""


class ModelDevice(PageLedger):
    """Pages of prefixes. The next allocation or copy fails when told to."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages)
        self.content: list[list[object]] = [[None] * page_size for _ in range(num_pages)]
        self.fail_next: type[Exception] | None = None

    def allocate(self, n: int, state: PageState = PageState.WRITING) -> PageIds:
        if n and self.fail_next is OutOfPages:
            self.fail_next = None
            raise OutOfPages("told to fail")
        return super().allocate(n, state)

    def copy_page(self, source: int, target: int) -> None:
        if self.fail_next is CopyFailed:
            self.fail_next = None
            raise CopyFailed
        assert self.states[target] == PageState.WRITING
        self.content[target] = list(self.content[source])


class Machine:
    """A cache on a tiny device, its model, and every event, each drawing what it needs."""

    def __init__(self, page_size: int, draw: Integers) -> None:
        self.page_size = page_size
        self.draw = draw
        self.device = ModelDevice(draw(2, 14), page_size)
        self.namespaces = [namespace_key("a"), namespace_key("b", "salt")]
        self.quota = draw(-6, 6)
        quotas = {"b": [self.quota]} if self.quota >= 0 else {}
        self.cache = PrefixCache(self.device, page_size, quotas=quotas)
        self.leases: list[tuple[Lease, int]] = []
        self.generation = 0
        self.seen: list[list[int]] = [[]]
        self.pinned: dict[tuple[str, tuple[int, ...]], int] = {}

    def step(self) -> None:
        events = (self.acquire, self.request, self.compute, self.compute, self.release, self.pin)
        events += (self.unpin, self.evict, self.press, self.request, self.flush)
        self.pick(events)()
        self.check()

    def pick(self, items: Sequence[T]) -> T:
        return items[self.draw(0, len(items) - 1)]

    def prompt(self) -> list[int]:
        """Often one seen before, cut or changed somewhere and gone on with."""
        seen = self.pick(self.seen)
        keep = len(seen) - self.draw(0, len(seen)) if self.draw(0, 2) else len(seen)
        more = [self.draw(0, 1) for _ in range(self.draw(0, 2))]
        return seen[:keep] + more + [self.draw(0, 2)] * self.draw(0, self.page_size + 1) or [0]

    # -- the model

    def key(self, lease: Lease, generation: int, n: int) -> object:
        return generation, lease.namespace, tuple(lease.tokens[:n].tolist())

    def write(self, lease: Lease, generation: int, start: int, end: int) -> None:
        for i in range(start, end):
            page = lease.page_table[i // self.page_size]
            assert self.device.states[page] == PageState.WRITING
            self.device.content[page][i % self.page_size] = self.key(lease, generation, i + 1)

    def verify(self, lease: Lease, generation: int, n: int) -> None:
        for i in range(n):
            content = self.device.content[lease.page_table[i // self.page_size]]
            assert content[i % self.page_size] == self.key(lease, generation, i + 1), (i, content)

    def longest(self, namespace: str, tokens: list[int]) -> int:
        ready = np.flatnonzero(self.device.states == PageState.READY)
        known = {key for page in ready for key in self.device.content[page]}
        n = 0
        while (self.generation, namespace, tuple(tokens[: n + 1])) in known and n < len(tokens) - 1:
            n += 1
        return n

    # -- events

    def acquire(self) -> None:
        tokens = self.prompt()
        namespace = self.pick(self.namespaces)
        best = self.longest(namespace, tokens)
        assert self.cache.match(namespace, np.array(tokens, np.int32)).length == best
        self.device.fail_next = self.pick([None, None, OutOfPages, CopyFailed])
        writing = self.device.count()["writing"]
        try:
            lease = self.cache.acquire(namespace, np.array(tokens, np.int32))
        except CopyFailed:
            assert self.device.count()["writing"] == writing
            return
        finally:
            self.device.fail_next = None
        assert lease.cached_len in (best, best - best % self.page_size)
        assert len(lease.page_table) == -(-lease.cached_len // self.page_size)
        self.verify(lease, self.generation, lease.cached_len)
        self.leases.append((lease, self.generation))

    def compute(self) -> None:
        """A chunk of prefill, or a sampled token."""
        if not self.leases:
            return
        lease, generation = self.pick(self.leases)
        if lease.num_valid == len(lease.tokens):
            lease.append([self.draw(0, 2)])
        end = self.draw(lease.num_valid + 1, len(lease.tokens))
        table = lease.page_table.tolist()
        self.device.fail_next = self.pick([None, None, None, OutOfPages])
        try:
            lease.extend(end)
        except OutOfPages:
            assert lease.page_table.tolist() == table
            return
        finally:
            self.device.fail_next = None
        self.write(lease, generation, lease.num_valid, end)
        if self.draw(0, 9):
            lease.commit(end)
            self.verify(lease, generation, end)

    def request(self) -> None:
        """One from beginning to end: two chunks of prefill and a token."""
        tokens = np.array(self.prompt(), np.int32)
        lease = self.cache.acquire(self.pick(self.namespaces), tokens)
        try:
            for end in ((lease.cached_len + len(tokens)) // 2, len(tokens), len(tokens) + 1):
                if end > len(lease.tokens):
                    lease.append([self.draw(0, 1)])
                lease.extend(end)
                self.write(lease, self.generation, lease.num_valid, end)
                lease.commit(end)
        except OutOfPages:
            pass
        self.verify(lease, self.generation, lease.num_valid)
        self.finish(lease)

    def release(self) -> None:
        """Done, cancelled or preempted: the cache does not care."""
        if self.leases:
            at = self.draw(0, len(self.leases) - 1)
            self.finish(self.leases.pop(at)[0])

    def finish(self, lease: Lease) -> None:
        for i in range(lease.num_valid, len(lease.page_table) * self.page_size):
            self.device.content[lease.page_table[i // self.page_size]][i % self.page_size] = None
        self.seen = [*self.seen[-12:], lease.tokens.tolist()]
        lease.release()
        lease.release()

    def pin(self) -> None:
        tokens, namespace = self.prompt(), self.pick(self.namespaces)
        try:
            num_tokens = self.cache.pin(namespace, np.array(tokens, np.int32), ttl=1000)
        except PinLimit:
            return
        if num_tokens:
            self.pinned[namespace, tuple(tokens)] = num_tokens

    def unpin(self) -> None:
        if self.pinned:
            namespace, tokens = self.pick(sorted(self.pinned))
            assert self.cache.unpin(namespace, np.array(tokens, np.int32))
            del self.pinned[namespace, tokens]

    def evict(self) -> None:
        if not self.draw(0, 3):
            self.cache.evict(self.pick(self.namespaces), np.array(self.prompt(), np.int32))

    def press(self) -> None:
        """Someone takes pages and gives them back."""
        n, room = self.draw(1, 6), self.cache.available
        try:
            self.device.free(self.cache.allocate(n))
        except OutOfPages:
            assert n > room

    def flush(self) -> None:
        if not self.draw(0, 5):
            self.cache.flush()
            self.generation += 1
            self.pinned.clear()

    # -- what always holds

    def check(self) -> None:
        self.cache.check()
        for (namespace, tokens), n in self.pinned.items():
            prompt = np.array([*tokens, 9], np.int32)
            assert self.cache.match(namespace, prompt).length >= n
        if self.quota >= 0 and not self.leases:
            account = self.cache.tree.accounts["b"]
            evictable = account.evictable[0]
            assert account.resident[0] <= self.quota or evictable == 0

    def end(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        self.cache.check()
        self.cache.flush()
        assert self.device.count()["free"] == self.device.num_pages
        assert not self.cache.tree.roots
        assert not self.cache.tree.namespaces


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_any_events(page_size: int) -> None:
    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        machine = Machine(page_size, lambda low, high: data.draw(st.integers(low, high)))
        for _ in range(data.draw(st.integers(1, 30))):
            machine.step()
        machine.end()

    run()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(8))
def test_many_events(page_size: int, seed: int) -> None:
    machine = Machine(page_size, random.Random(seed).randint)
    for _ in range(500):
        machine.step()
    machine.end()
