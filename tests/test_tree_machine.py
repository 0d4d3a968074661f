"""Any sequence of events against a naive model: which token prefixes lie in which READY page.

The model's device writes into a page, for every token, the whole prefix that ends there. So a
page holds the right keys and values if and only if it holds the right prefixes, and what must be
found is the longest prefix of a prompt that stands in some READY page.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from radixsvc.cache import Lease, PinLimit, PrefixCache, namespace_key
from tiers.page import OutOfPages, PageIds, PageLedger, PageState


class ModelDevice(PageLedger):
    """Pages of prefixes. Allocations and copies fail when told to."""

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
        if self.fail_next is RuntimeError:
            self.fail_next = None
            raise RuntimeError("told to fail")
        assert self.states[target] == PageState.WRITING
        self.content[target] = list(self.content[source])


class CacheMachine(RuleBasedStateMachine):
    page_size = 4

    @initialize(num_pages=st.integers(2, 14), quota=st.none() | st.integers(0, 6))
    def start(self, num_pages: int, quota: int | None) -> None:
        self.device = ModelDevice(num_pages, self.page_size)
        self.cache = PrefixCache(self.device, self.page_size, max_ghosts=0.5, max_pinned=0.5)
        self.namespaces = [namespace_key("a"), namespace_key("b", "salt")]
        self.quota = quota
        if quota is not None:
            self.cache.set_quota("b", quota)
        self.leases: list[tuple[Lease, int]] = []
        self.generation = 0
        self.seen: list[list[int]] = [[]]
        self.pinned: dict[tuple[str, tuple[int, ...]], int] = {}

    def key(self, lease: Lease, generation: int, n: int) -> object:
        return generation, lease.namespace, tuple(lease.tokens[:n].tolist())

    def write(self, lease: Lease, generation: int, start: int, end: int) -> None:
        for i in range(start, end):
            page = lease.page_table[i // self.page_size]
            assert self.device.states[page] == PageState.WRITING
            self.device.content[page][i % self.page_size] = self.key(lease, generation, i + 1)

    def longest(self, namespace: str, tokens: list[int]) -> int:
        known = {
            key
            for page in np.flatnonzero(self.device.states == PageState.READY)
            for key in self.device.content[page]
        }
        n = 0
        while n < len(tokens) - 1 and (
            (self.generation, namespace, tuple(tokens[: n + 1])) in known
        ):
            n += 1
        return n

    def prompt(self, data: st.DataObject) -> list[int]:
        seen = data.draw(st.sampled_from(self.seen))
        keep = data.draw(st.integers(0, len(seen)))
        more = data.draw(st.lists(st.integers(0, 1), max_size=2))
        repeat = data.draw(st.integers(0, self.page_size + 1))
        tokens = seen[:keep] + more + [data.draw(st.integers(0, 2))] * repeat
        return tokens or [0]

    @rule(
        data=st.data(),
        ns=st.integers(0, 1),
        fail=st.sampled_from([None, None, OutOfPages, RuntimeError]),
    )
    def acquire(self, data: st.DataObject, ns: int, fail: type[Exception] | None) -> None:
        tokens = self.prompt(data)
        namespace = self.namespaces[ns]
        best = self.longest(namespace, tokens)
        assert self.cache.match(namespace, np.array(tokens, np.int32)).length == best
        self.device.fail_next = fail
        before = self.device.count()
        try:
            lease = self.cache.acquire(namespace, np.array(tokens, np.int32))
        except RuntimeError:
            assert self.device.count()["writing"] == before["writing"]
            return
        finally:
            self.device.fail_next = None
        whole = best - best % self.page_size
        assert lease.cached_len == best or lease.cached_len == whole
        assert lease.cached_len <= len(tokens) - 1
        assert len(lease.page_table) == -(-lease.cached_len // self.page_size)
        self.verify(lease, self.generation, lease.cached_len)
        self.leases.append((lease, self.generation))

    def verify(self, lease: Lease, generation: int, n: int) -> None:
        for i in range(n):
            content = self.device.content[lease.page_table[i // self.page_size]]
            assert content[i % self.page_size] == self.key(lease, generation, i + 1)

    def pick(self, data: st.DataObject) -> tuple[Lease, int]:
        assume(self.leases)
        return data.draw(st.sampled_from(self.leases))

    @rule(data=st.data(), fail=st.sampled_from([None, None, None, OutOfPages]))
    def compute(self, data: st.DataObject, fail: type[Exception] | None) -> None:
        """A chunk of prefill, or a sampled token."""
        lease, generation = self.pick(data)
        if lease.num_valid == len(lease.tokens):
            lease.append([data.draw(st.integers(0, 2))])
        end = data.draw(st.integers(lease.num_valid + 1, len(lease.tokens)))
        table = lease.page_table.tolist()
        self.device.fail_next = fail
        try:
            lease.extend(end)
        except OutOfPages:
            assert lease.page_table.tolist() == table
            return
        finally:
            self.device.fail_next = None
        start = lease.num_valid
        self.write(lease, generation, start, end)
        if data.draw(st.integers(0, 9)):
            lease.commit(end)
            self.verify(lease, generation, end)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, generation = self.pick(data)
        for i in range(lease.num_valid, len(lease.page_table) * self.page_size):
            page = lease.page_table[i // self.page_size]
            self.device.content[page][i % self.page_size] = None
        self.seen = [*self.seen[-12:], lease.tokens.tolist()]
        lease.release()
        lease.release()
        self.leases.remove((lease, generation))

    @rule(data=st.data(), ns=st.integers(0, 1))
    def pin(self, data: st.DataObject, ns: int) -> None:
        tokens = np.array(self.prompt(data), np.int32)
        try:
            num_tokens = self.cache.pin(self.namespaces[ns], tokens, ttl=1000)
        except PinLimit:
            return
        if num_tokens:
            self.pinned[self.namespaces[ns], tuple(tokens.tolist())] = num_tokens

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        assume(self.pinned)
        namespace, tokens = data.draw(st.sampled_from(sorted(self.pinned)))
        assert self.cache.unpin(namespace, np.array(tokens, np.int32))
        del self.pinned[namespace, tokens]

    @rule(data=st.data(), ns=st.integers(0, 1))
    def evict(self, data: st.DataObject, ns: int) -> None:
        self.cache.evict(self.namespaces[ns], np.array(self.prompt(data), np.int32))

    @rule(n=st.integers(1, 6))
    def press(self, n: int) -> None:
        """Someone takes pages and gives them back."""
        room = self.cache.available
        try:
            self.device.free(self.cache.allocate(n))
        except OutOfPages:
            assert n > room

    @rule(sure=st.integers(0, 3))
    def flush(self, sure: int) -> None:
        assume(sure == 0)
        self.cache.flush()
        self.generation += 1
        self.pinned.clear()

    @invariant()
    def sound(self) -> None:
        self.cache.check()

    @invariant()
    def pins_hold(self) -> None:
        for (namespace, tokens), n in self.pinned.items():
            prompt = np.array([*tokens, 9], np.int32)
            assert self.cache.match(namespace, prompt).length >= n

    @invariant()
    def quota_holds(self) -> None:
        if self.quota is not None:
            account = self.cache.tree.accounts["b"]
            evictable = sum(account.evictable[0][:3])
            assert account.resident[0] <= self.quota or evictable == 0 or self.leases

    def teardown(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        self.cache.check()
        self.cache.flush()
        assert self.device.count()["free"] == self.device.num_pages
        assert not self.cache.tree.roots
        assert not self.cache.tree.detached


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_any_sequence_of_events_keeps_the_cache_right(page_size: int) -> None:
    machine = type("Machine", (CacheMachine,), {"page_size": page_size})
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
