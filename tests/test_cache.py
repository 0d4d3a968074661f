"""Leases: what a request reuses, what it leaves behind, and who owns a page at every point."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest

from radixsvc.cache import Lease, PinLimit, PrefixCache, namespace_key
from tiers.page import InvariantError, OutOfPages, PageIds, PageLedger

A = namespace_key("a")


class Ledger(PageLedger):
    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.copies: list[tuple[int, int]] = []

    def copy_page(self, source: int, target: int) -> None:
        self.copies.append((source, target))


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def prompt(n: int, seed: int = 0) -> np.ndarray:
    return np.arange(n, dtype=np.int32) + 1000 * seed


def make(num_pages: int = 64, page_size: int = 4, **options: Any) -> PrefixCache:
    return PrefixCache(Ledger(num_pages), page_size, **options)


def complete(cache: PrefixCache, tokens: np.ndarray, reply: tuple[int, ...] = ()) -> int:
    """A request from beginning to end; how many tokens were cached."""
    lease = cache.acquire(A, tokens)
    lease.extend(len(tokens))
    lease.commit(len(tokens))
    for token in reply:
        lease.append([token])
        lease.extend(len(lease.tokens))
    lease.commit(len(lease.tokens))
    lease.release()
    cache.check()
    return lease.cached_len


def running(cache: PrefixCache, tokens: np.ndarray, namespace: str = A) -> Lease:
    lease = cache.acquire(namespace, tokens)
    lease.extend(len(tokens))
    return lease


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 50])
def test_a_prompt_cached_in_full_still_computes_its_last_token(page_size: int, n: int) -> None:
    cache = make(page_size=page_size)
    assert complete(cache, prompt(n)) == 0
    assert complete(cache, prompt(n)) == n - 1
    assert complete(cache, prompt(n + 1)) == n


def test_a_system_prompt_is_shared_by_all() -> None:
    cache = make()
    for seed in range(1, 5):
        tokens = np.concatenate([prompt(10), prompt(6, seed)])
        assert complete(cache, tokens) == (0 if seed == 1 else 10)


def test_a_chat_of_200_turns_ends_as_one_node_without_stubs() -> None:
    cache = make(2048)
    tokens = ids()
    for turn in range(200):
        tokens = np.append(tokens, prompt(7, turn + 1)).astype(np.int32)
        reply = (turn, turn + 1, turn + 2)
        assert complete(cache, tokens, reply) == max(0, 10 * turn)
        tokens = np.append(tokens, reply).astype(np.int32)
    stats = cache.stats()
    assert stats.num_nodes == 1
    assert stats.pages["device"]["ready"] == 2000 // 4


def test_a_page_is_shared_as_soon_as_it_is_committed() -> None:
    cache = make()
    lease = running(cache, prompt(12))
    lease.commit(8)
    assert cache.match(A, prompt(12)).device == 8
    assert cache.pending(A, prompt(30)) == 12
    assert cache.pending(A, prompt(11)) == 8
    lease.release()
    assert cache.pending(A, prompt(30)) == 0


def test_of_pages_computed_twice_one_set_is_kept() -> None:
    cache = make()
    first, second = running(cache, prompt(8)), running(cache, prompt(8))
    first.commit(8)
    second.commit(8)
    assert second.page_table.tolist() == first.page_table.tolist()
    assert cache.device.num_free == 62
    cache.check()
    first.release()
    second.release()
    assert cache.stats().duplicate_pages == 2


def test_extend_takes_all_or_nothing() -> None:
    cache = make(4)
    holder, lease = running(cache, prompt(8)), running(cache, prompt(4, 1))
    table = lease.page_table.tolist()
    with pytest.raises(OutOfPages):
        lease.extend(12)
    assert lease.page_table.tolist() == table
    lease.extend(8)
    for one in (holder, lease):
        one.release()
    cache.check()
    assert cache.device.num_free == 4


def test_what_was_matched_is_not_evicted_before_it_is_used() -> None:
    cache = make(4)
    complete(cache, prompt(8))
    lease = cache.acquire(A, prompt(9))
    with pytest.raises(OutOfPages):
        cache.allocate(3)
    assert lease.cached_len == 8
    cache.check()
    lease.release()


def test_pages_committed_but_not_computed_are_refused() -> None:
    cache = make()
    lease = running(cache, prompt(8))
    with pytest.raises(InvariantError):
        lease.commit(9)
    lease.release()


def test_release_twice_and_in_both_orders_with_the_last_commit() -> None:
    cache = make()
    lease = running(cache, prompt(6))
    lease.release()
    lease.release()
    with pytest.raises(InvariantError):
        lease.commit(6)
    cache.check()
    assert cache.device.num_free == 64


def test_flush_under_leases_frees_at_their_release() -> None:
    cache = make()
    lease = running(cache, prompt(12))
    lease.commit(8)
    cache.flush()
    assert cache.match(A, prompt(12)).length == 0
    lease.commit(12)
    assert cache.match(A, prompt(12)).length == 0
    cache.check()
    lease.release()
    assert cache.device.num_free == 64
    cache.check()


def test_namespaces_see_nothing_of_one_another() -> None:
    cache = make(6)
    for name, salt in (("a", "bc"), ("ab", "c"), ("abc", "")):
        lease = running(cache, prompt(8), namespace_key(name, salt))
        assert lease.cached_len == 0
        lease.commit(8)
        lease.release()
    assert len(cache.tree.roots) == 3
    cache.check()


def test_a_quota_bounds_what_is_kept_not_what_runs() -> None:
    cache = make(quotas={"b": [2]})
    lease = running(cache, prompt(20), namespace_key("b", "salt"))
    lease.commit(20)
    assert cache.match(namespace_key("b", "salt"), prompt(20)).length > 8
    lease.release()
    assert cache.match(namespace_key("b", "salt"), prompt(20)).length == 8
    complete(cache, prompt(40))
    assert cache.match(namespace_key("b", "salt"), prompt(20)).length == 8


def test_a_pin_outlives_pressure_until_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(8)
    now = [100.0]
    monkeypatch.setattr("radixsvc.pins.time.monotonic", lambda: now[0])
    complete(cache, prompt(8))
    assert cache.pin(A, prompt(8), ttl=10) == 8
    for seed in range(1, 4):
        complete(cache, prompt(16, seed))
    assert cache.match(A, prompt(9)).length == 8
    with pytest.raises(PinLimit):
        cache.pin(A, prompt(16, 3), ttl=10)
    now[0] = 111.0
    complete(cache, prompt(32, 9))
    assert cache.match(A, prompt(9)).length == 0
    assert cache.stats().pinned_pages == 0


def test_evict_drops_a_prompt_but_not_what_it_shares() -> None:
    cache = make()
    complete(cache, np.append(prompt(8), prompt(8, 1)).astype(np.int32))
    complete(cache, np.append(prompt(8), prompt(8, 2)).astype(np.int32))
    assert cache.evict(A, np.append(prompt(8), prompt(8, 1)).astype(np.int32)) == 2
    assert cache.match(A, np.append(prompt(8), prompt(9, 2)).astype(np.int32)).length == 16
    assert cache.evict(A, prompt(4)) == 4
    cache.check()


def test_eight_equal_prompts_at_once_compute_one() -> None:
    """The scheduler's rule, in small: who would gain by waiting, waits."""
    cache = make()
    computed = 0
    waiting = deque(range(8))
    leases: list[Lease] = []
    while waiting or leases:
        for _ in range(len(waiting)):
            who = waiting.popleft()
            if cache.pending(A, prompt(17)) > cache.match(A, prompt(17)).length:
                waiting.append(who)
                continue
            lease = running(cache, prompt(17))
            computed += 17 - lease.cached_len
            leases.append(lease)
        for lease in leases:
            lease.commit(17)
            lease.release()
        leases.clear()
    assert computed == 17 + 7


@pytest.mark.parametrize("most_pages", [1, 2, 3])
def test_hits_at_double_are_those_of_a_device_of_twice_the_size(most_pages: int) -> None:
    """A larger LRU memory holds all that a smaller one does, so what the tier and its ghosts hold
    together is what one of twice the size holds, less the prompt that is being served."""
    rng = random.Random(1)
    num_pages = [rng.randint(1, most_pages) for _ in range(24)]
    asked = [rng.randrange(24) for _ in range(400)]

    def served(size: int) -> tuple[int, int]:
        cache = make(size)
        for seed in asked:
            n = 4 * num_pages[seed]
            with cache.acquire(A, prompt(n + 1, seed)) as lease:
                lease.extend(n + 1)
                lease.commit(n)
            cache.check()
        return cache.stats().hit_tokens.device, cache.stats().hits_at_double.device

    once, less, twice = served(12), served(24 - most_pages), served(24)
    assert 0 < once[0] < less[0] <= sum(once) <= twice[0]


def test_a_cache_that_is_off_computes_everything_and_keeps_nothing() -> None:
    cache = make(16, enabled=False)
    first = running(cache, prompt(12))
    first.commit(12)
    second = running(cache, prompt(12))
    assert cache.pending(A, prompt(20)) == second.cached_len == 0
    second.commit(12)
    first.release()
    second.release()
    cache.check()
    assert cache.device.num_free == 16
    assert cache.match(A, prompt(12)).length == 0


def test_a_broken_page_table_is_found() -> None:
    cache = make()
    complete(cache, prompt(8))
    stolen: PageIds = ids(0)
    cache.device.free(stolen)
    with pytest.raises(InvariantError):
        cache.check()
