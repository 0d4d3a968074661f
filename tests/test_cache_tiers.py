"""Real pages through device, host, disk and a restart: what a lease reads is what was written."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixsvc.cache import Lease, Lower, PrefixCache, TokensByTier, namespace_key
from radixsvc.residency import TierPolicy
from tiers.copy import CopyStream, CpuStream, compute_fence
from tiers.device import DeviceTier
from tiers.disk import DiskTier
from tiers.host import HostTier
from tiers.mover import Mover
from tiers.page import OutOfPages, PageShape

CPU = torch.device("cpu")
SHAPE = PageShape.uniform(2, 1, 8, 4, "float32")
TEAM = namespace_key("team")
ALWAYS = TierPolicy(write="back", promote="always")
Quotas = dict[str, list[int | None]]


class Rig:
    """A cache over real tiers. A token's keys and values are its position and its id."""

    def __init__(
        self, folder: Path, device: int = 8, host: int = 32, disk: int = 64,
        policy: TierPolicy = ALWAYS, demote: CopyStream | None = None, quotas: Quotas | None = None,
    ) -> None:  # fmt: skip
        self.device = DeviceTier(SHAPE, device, CPU)
        self.host = HostTier(SHAPE.nbytes, host) if host else None
        limit = disk * 8192 + 8192
        self.disk = DiskTier(folder, SHAPE.nbytes, limit, b"w" * 32, 100) if disk else None
        memory = [self.device, self.host] if self.host else [self.device]
        streams = CpuStream(), demote or CpuStream()
        self.mover = Mover(memory, self.disk, *streams, compute_fence(CPU))
        self.lower = Lower(self.mover, self.host, self.disk, b"w" * 32, policy)
        self.cache = PrefixCache(self.device, 4, lower=self.lower, quotas=quotas)

    def settle(self) -> None:
        """Let what is under way in the background end."""
        end = time.monotonic() + 10
        while self.cache.is_moving and time.monotonic() < end:
            self.cache.poll()
            time.sleep(0.001)
        assert not self.cache.is_moving
        self.cache.check()

    def acquire(self, tokens: np.ndarray) -> Lease:
        lease = self.cache.acquire(TEAM, tokens)
        end = time.monotonic() + 10
        while not lease.poll() and time.monotonic() < end:
            self.cache.poll()
        self.cache.check()
        self.verify(lease, lease.cached_len)
        return lease

    def run_unsettled(self, tokens: np.ndarray) -> TokensByTier:
        """A whole request; where its tokens came from."""
        lease = self.acquire(tokens)
        self.compute(lease)
        lease.release()
        return lease.sources

    def compute(self, lease: Lease) -> None:
        tokens = lease.tokens
        lease.extend(len(tokens))
        for i in range(lease.cached_len, len(tokens)):
            row = self.device.pool[lease.page_table[i // 4]].view(-1, 4, 8)
            row[:, i % 4, 0::2] = i
            row[:, i % 4, 1::2] = float(tokens[i])
        lease.commit(len(tokens))
        self.verify(lease, len(tokens))

    def run(self, tokens: np.ndarray) -> TokensByTier:
        sources = self.run_unsettled(tokens)
        self.settle()
        return sources

    def verify(self, lease: Lease, n: int) -> None:
        for i in range(n):
            row = self.device.pool[lease.page_table[i // 4]].view(-1, 4, 8)[:, i % 4]
            assert (row[:, 0::2] == i).all()
            assert (row[:, 1::2] == float(lease.tokens[i])).all()

    def close(self) -> None:
        self.lower.close()


def prompt(seed: int, n: int = 16) -> np.ndarray:
    return (np.arange(n) * 7 + 1000 * seed).astype(np.int32)


def test_demoted_to_the_host_and_promoted_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path, disk=0)
    for seed in range(6):  # 24 pages through a device of 8
        assert rig.run(prompt(seed)) == (0, 0, 0)
    assert rig.cache.match(TEAM, prompt(0)).host == 15
    assert rig.run(prompt(0)) == (0, 15, 0)
    assert rig.run(prompt(0)) == (15, 0, 0)
    rig.close()


def test_what_is_demoted_together_keeps_its_order_of_use(tmp_path: Path) -> None:
    rig = Rig(tmp_path, host=4, disk=0)
    for seed in range(2):
        rig.run(prompt(seed, 8))
    rig.run(prompt(2, 32))  # the whole device: both go to the host
    rig.run(prompt(3, 8))  # two pages more, for which the older one leaves it
    assert [rig.cache.match(TEAM, prompt(seed, 8)).host for seed in range(2)] == [0, 7]
    rig.close()


@pytest.mark.parametrize("n", range(13, 22))
def test_every_length_around_a_page_s_end(tmp_path: Path, n: int) -> None:
    rig = Rig(tmp_path)
    rig.run(prompt(0, n))
    for seed in range(1, 6):
        rig.run(prompt(seed))
    sources = rig.run(np.append(prompt(0, n), [5, 6]).astype(np.int32))
    assert sum(sources) >= n - n % 4
    rig.close()


def test_found_again_after_a_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.run(prompt(0))
    rig.run(prompt(0))  # a second use: it goes to disk
    rig.run(prompt(1))
    rig.cache.save(10.0)
    rig.close()
    again = Rig(tmp_path)
    assert again.run(prompt(0)) == (0, 0, 15)
    assert again.run(prompt(1)) == (0, 0, 15)
    assert again.cache.acquire(namespace_key("other"), prompt(0)).cached_len == 0
    again.close()


def test_a_restart_keeps_what_hangs_together_and_once(tmp_path: Path) -> None:
    """No record whose parent is missing, none found twice, none that the mover's probe wrote."""
    rig = Rig(tmp_path)
    rig.mover.probe()
    rig.run(prompt(0))
    rig.run(prompt(0))
    pages = np.frombuffer(rig.cache.tree.match(TEAM, prompt(0).tobytes()).end.disk, np.int32)
    assert len(pages) == 4
    rig.close()
    with open(tmp_path / "segment-000000.kv", "r+b") as file:
        file.seek(pages[0] * 8192)
        record = file.read(8192)
        file.seek((pages.max() + 1) * 8192)
        file.write(record)
        file.seek(pages[2] * 8192)
        file.write(bytes(8192))
    again = Rig(tmp_path)
    assert again.disk is not None
    assert again.disk.count()["ready"] == 2
    assert again.run(prompt(0)) == (0, 0, 8)
    again.close()


def test_saving_goes_on_when_the_queue_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    monkeypatch.setattr("tiers.mover.MAX_QUEUED_BYTES", 1)  # one ticket at a time
    for seed in range(4):
        rig.run(prompt(seed))
    rig.cache.save(10.0)
    rig.close()
    again = Rig(tmp_path)
    assert [again.cache.match(TEAM, prompt(seed)).disk for seed in range(4)] == [15] * 4
    again.close()


def test_a_quota_holds_for_what_a_restart_finds(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for seed in range(4):
        rig.run(prompt(seed))
    rig.cache.save(10.0)
    rig.close()
    again = Rig(tmp_path, quotas={"team": [8, 8, 6]})
    assert again.cache.tree.accounts["team"].resident == [0, 0, 6]
    again.cache.check()
    again.close()


def test_what_a_quota_puts_off_the_device_goes_to_the_host(tmp_path: Path) -> None:
    rig = Rig(tmp_path, disk=0, quotas={"team": [2, 32, 0]})
    rig.run(prompt(0))
    assert rig.cache.match(TEAM, prompt(0)) == (8, 7, 0)
    assert rig.run(prompt(0)) == (8, 7, 0)
    rig.close()


def test_killed_without_a_word_keeps_what_was_used_twice(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.run(prompt(0))
    rig.run(prompt(0))
    rig.run(prompt(1))
    rig.close()
    again = Rig(tmp_path)
    assert again.run(prompt(0)) == (0, 0, 15)
    assert again.run(prompt(1)) == (0, 0, 0)
    again.close()


def test_a_flipped_bit_is_a_miss_and_gone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, host=0, device=8)
    rig.run(prompt(0))
    rig.run(prompt(0))
    for seed in range(1, 4):
        rig.run(prompt(seed))
    [segment] = [f for f in tmp_path.iterdir() if f.stat().st_size > 100_000]
    data = bytearray(segment.read_bytes())
    for at in range(4096, len(data), 8192):
        data[at + 50] ^= 1
    segment.write_bytes(data)
    assert rig.run(prompt(0)) == (0, 0, 0)
    assert rig.cache.stats().lost_pages == 4
    assert rig.cache.match(TEAM, prompt(0)).device == 15
    rig.close()


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_of_no_or_one_page(tmp_path: Path, host: int) -> None:
    rig = Rig(tmp_path, host=host, disk=0, device=5)
    for seed in [0, 1, 2, 0, 1, 2]:
        rig.run(prompt(seed))
    rig.close()


def test_flush_empties_every_tier_for_good(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for seed in (0, 0, 1, 2):
        rig.run(prompt(seed))
    rig.cache.flush()
    rig.settle()
    assert rig.run(prompt(0)) == (0, 0, 0)
    rig.close()
    again = Rig(tmp_path)
    assert again.cache.match(TEAM, prompt(1)).length == 0
    again.close()


def test_loading_is_not_chosen_where_computing_is_cheaper(tmp_path: Path) -> None:
    rig = Rig(tmp_path, disk=0, policy=TierPolicy(promote="cost"))
    rig.cache.residency.seconds_per_token = 1e-12
    for seed in range(4):
        rig.run(prompt(seed))
    assert rig.run(prompt(0)) == (0, 0, 0)
    rig.cache.residency.seconds_per_token = 1.0
    assert rig.run(prompt(1)) == (0, 15, 0)
    rig.close()


def test_two_requests_wait_for_one_load(tmp_path: Path) -> None:
    rig = Rig(tmp_path, disk=0)
    for seed in range(4):
        rig.run(prompt(seed))
    first = rig.cache.acquire(TEAM, prompt(0))
    second = rig.cache.acquire(TEAM, prompt(0))
    assert second.page_table.tolist() == first.page_table.tolist()
    assert (first.sources.host, second.sources.device) == (12, 12)
    first.release()  # cancelled while it loads
    while not second.poll():
        rig.cache.poll()
    rig.verify(second, second.cached_len)
    second.release()
    rig.settle()
    rig.close()


def test_who_computes_what_another_loads_does_not_share_it_before_it_is_there(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, disk=0, policy=TierPolicy(promote="cost"))
    rig.cache.residency.seconds_per_token = 1e-12
    for seed in range(4):
        rig.run(prompt(seed))
    computing = rig.acquire(prompt(0))
    computing.extend(16)
    rig.cache.residency.seconds_per_token = 1.0
    loading = rig.cache.acquire(TEAM, prompt(0))
    assert len(loading.awaited) == 4
    rig.compute(computing)
    assert computing.num_locked == 0
    rig.cache.check()
    while not loading.poll():
        rig.cache.poll()
    rig.verify(loading, 15)
    computing.release()
    loading.release()
    rig.settle()
    rig.close()


def test_a_shared_page_on_its_way_stays_in_the_tree_when_its_lease_ends(tmp_path: Path) -> None:
    rig = Rig(tmp_path, disk=0)
    for seed in range(4):
        rig.run(prompt(seed, 6))  # a whole page and a stub, both on the host at last
    rig.run(prompt(9, 32))
    lease = rig.cache.acquire(TEAM, np.append(prompt(0, 6), [1, 2]).astype(np.int32))
    assert len(lease.awaited) == 2
    lease.release()
    rig.settle()
    again = rig.acquire(np.append(prompt(0, 6), [1, 2]).astype(np.int32))
    assert again.cached_len == 6
    again.release()
    rig.close()


@pytest.mark.parametrize("host", [0, 32])
def test_a_pin_leaves_the_device_for_a_lower_tier_and_comes_back(tmp_path: Path, host: int) -> None:
    rig = Rig(tmp_path, host=host)
    rig.run(prompt(0))
    assert rig.cache.pin(TEAM, prompt(0), ttl=1000) == 16
    rig.settle()
    for seed in range(1, 12):  # the device whole, and more than a host of 32 pages besides
        rig.run(prompt(seed, 32))
    assert rig.cache.match(TEAM, prompt(0)).device == 0
    found = rig.run(prompt(0))
    assert (found.host, found.disk) == ((15, 0) if host else (0, 15))
    assert rig.cache.unpin(TEAM, prompt(0))
    rig.settle()
    for seed in range(1, 12):
        rig.run(prompt(seed, 32))
    assert rig.cache.match(TEAM, prompt(0)).host == 0
    rig.close()


def test_a_pin_stays_on_the_device_until_its_copy_has_arrived(tmp_path: Path) -> None:
    demote = StuckStream()
    rig = Rig(tmp_path, disk=0, demote=demote)
    rig.run_unsettled(prompt(0))
    assert rig.cache.pin(TEAM, prompt(0), ttl=1000) == 16
    with rig.cache.acquire(TEAM, prompt(1, 32)) as lease, pytest.raises(OutOfPages):
        lease.extend(32)
    demote.stuck = False
    rig.settle()
    assert rig.run(prompt(1, 32)).length == 0
    assert rig.cache.match(TEAM, prompt(0)) == (0, 15, 0)
    rig.close()


def test_a_pin_whose_copy_was_refused_is_copied_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, disk=0)
    rig.run(prompt(0))
    with monkeypatch.context() as patch:
        patch.setattr(rig.mover, "submit", lambda *transfer: None)
        assert rig.cache.pin(TEAM, prompt(0), ttl=1000) == 16
    assert not rig.cache.is_moving
    rig.cache.poll()
    rig.settle()
    assert rig.run(prompt(1, 32)).length == 0
    assert rig.cache.match(TEAM, prompt(0)) == (0, 15, 0)
    rig.close()


def test_where_copies_down_lag_pages_are_dropped_and_requests_go_on(tmp_path: Path) -> None:
    demote = StuckStream()
    rig = Rig(tmp_path, disk=0, demote=demote)
    for seed in range(4):
        rig.run_unsettled(prompt(seed, 12))
    assert rig.cache.stats().dropped_pages > 0
    demote.stuck = False
    rig.settle()
    rig.close()


class StuckStream(CpuStream):
    """Copies, but does not say so while `stuck`."""

    stuck = True

    def query(self, event: Any) -> bool:
        return not self.stuck and super().query(event)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_hits_at_double_are_those_of_a_tier_of_twice_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """To within a page. No page is dropped for want of time, so every run is the same."""
    monkeypatch.setattr("radixsvc.residency.DEMOTION_WAIT_S", math.inf)
    rng = random.Random(3)
    asked = [rng.randrange(24) for _ in range(150)]
    policy = TierPolicy(write="back", promote="always", disk_after=1)

    def hits(size: int) -> tuple[int, int]:
        sizes = {"host": 0, "disk": 0, tier: size}
        rig = Rig(tmp_path / str(size), 3, **sizes, policy=policy)
        for seed in asked:
            rig.run(prompt(seed, 4))
        stats = rig.cache.stats()
        rig.close()
        return stats.hit_tokens.length, getattr(stats.hits_at_double, tier)

    once, less, more = hits(6), hits(11), hits(13)
    assert once[0] < less[0] < sum(once) < more[0]
