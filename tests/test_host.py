"""The host tier: ready piece by piece, pinned as far as the system lets it, honest in bytes."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np
import pytest

from tiers.base import Pinning, TierError, pages_within
from tiers.host import SMALLEST_PIECE_BYTES, HostTier
from tiers.page import OutOfPages, PageLedger

PAGE = 4096


class Pins:
    """A system that pins up to `limit` bytes, and no more than `at_once` in one call."""

    def __init__(self, limit: int, at_once: int = 1 << 62) -> None:
        self.limit, self.at_once = limit, at_once
        self.pinned: dict[int, int] = {}
        self.num_calls = 0
        self.may_go = threading.Event()
        self.may_go.set()

    def pin(self, address: int, nbytes: int) -> bool:
        if self.num_calls:
            self.may_go.wait()  # all but the first piece are pinned in the background
        self.num_calls += 1
        if nbytes > self.at_once or sum(self.pinned.values()) + nbytes > self.limit:
            return False
        self.pinned[address] = nbytes
        return True

    def pinning(self) -> Pinning:
        return Pinning(self.pin, lambda address: self.pinned.pop(address) and None)


def num_pinned(tier: HostTier) -> int:
    pieces = tier.view(np.arange(tier.num_pages, dtype=np.int32)).pieces
    assert pieces is not None
    return int((pieces >= 0).sum())


def all_ready(tier: HostTier) -> None:
    while tier.num_free < tier.num_pages:
        tier.poll()
        tier.check()
        time.sleep(1e-3)


def test_pages_are_separate_writable_memory() -> None:
    tier = HostTier(PAGE, 4)
    view = tier.view(tier.allocate(4))
    assert (view.base % 4096, view.stride, view.pages.tolist()) == (0, PAGE, [0, 1, 2, 3])
    tier.close()


@pytest.mark.parametrize("num_pages", [0, 1])
def test_a_tier_of_hardly_any_pages_refuses_in_the_ordinary_way(num_pages: int) -> None:
    tier = HostTier(PAGE, num_pages)
    with pytest.raises(OutOfPages):
        tier.allocate(num_pages + 1)
    assert tier.num_free == num_pages
    tier.check()
    tier.close()


def test_usable_from_the_first_pinned_piece_on_and_conserved_while_it_grows() -> None:
    pins = Pins(1 << 40)
    pins.may_go.clear()
    tier = HostTier(PAGE, 64, pins.pinning(), piece_bytes=16 * PAGE)
    assert (tier.num_free, num_pinned(tier)) == (16, 16)
    tier.check()
    taken = tier.allocate(16)
    with pytest.raises(OutOfPages):
        tier.allocate(1)
    pins.may_go.set()
    tier.free(taken)
    all_ready(tier)
    assert num_pinned(tier) == 64
    assert list(pins.pinned.values()) == [16 * PAGE] * 4
    tier.close()
    assert not pins.pinned


def test_pages_of_odd_size_never_share_a_page_of_the_system_between_two_pieces() -> None:
    pins = Pins(1 << 40)
    tier = HostTier(1536, 64, pins.pinning(), piece_bytes=10 * 1536)
    all_ready(tier)
    assert all(address % 4096 == 0 for address in pins.pinned)
    pieces = tier.view(np.arange(64, dtype=np.int32)).pieces
    assert pieces is not None
    assert pieces.tolist() == [page // 8 for page in range(64)]
    tier.close()


def test_one_registration_too_large_is_tried_in_smaller_pieces() -> None:
    pins = Pins(1 << 40, at_once=SMALLEST_PIECE_BYTES)
    tier = HostTier(1 << 20, 64, pins.pinning(), piece_bytes=64 << 20)
    all_ready(tier)
    assert list(pins.pinned.values()) == [SMALLEST_PIECE_BYTES] * 4
    tier.close()


def test_memory_that_can_not_be_pinned_is_used_pageable_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pins = Pins(SMALLEST_PIECE_BYTES)
    with caplog.at_level(logging.WARNING):
        tier = HostTier(1 << 20, 64, pins.pinning(), piece_bytes=SMALLEST_PIECE_BYTES)
        all_ready(tier)
    assert (tier.num_free, num_pinned(tier)) == (64, 16)
    assert [r.message for r in caplog.records if "page-locking refused" in r.message]
    assert len(caplog.records) == 1
    pieces = tier.view(np.array([15, 16], np.int32)).pieces
    assert pieces is not None
    assert (pieces >= 0).tolist() == [True, False]
    tier.close()


@pytest.mark.parametrize("limit", [0, PAGE, PAGE + 10, 1 << 20, 10_000_000])
def test_a_limit_counts_the_ledger_beside_the_pages(limit: int) -> None:
    num_pages = pages_within(limit, PAGE)
    ledger = PageLedger(num_pages)
    arrays = [a for a in vars(ledger).values() if isinstance(a, np.ndarray)]
    assert num_pages * PAGE + sum(array.nbytes for array in arrays) <= limit
    assert pages_within(limit + PAGE + 10, PAGE) == num_pages + 1


def test_more_than_can_be_mapped_is_refused_in_words() -> None:
    with pytest.raises(TierError, match="make it less"):
        HostTier(1 << 40, 1 << 20)
