"""Cache policies that `simulate` compares. None needs memory or a model.

A policy is asked to serve a history's requests in order and says where each prompt's tokens came
from. At least the last token of a prompt is always computed. A request's pages must all be on
the device while it runs; one too long for that is computed, and leaves no trace in the cache.

    none      computes everything
    linear    one contiguous buffer a conversation, the least recently used conversation goes
    paged     whole pages found by a hash of all tokens before, as in vLLM: LRU, tails first
    radix     this product's tree and lease on one tier
    tiers     the same with host and disk below the device
    optimum   knows the future: no policy with that many tokens of memory can hit more
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np

from radixsvc.bench.history import Prompt, common_len
from radixsvc.bench.ledgers import InstantMover, LedgerTier
from radixsvc.cache import Lower, PrefixCache
from radixsvc.request import Sources
from radixsvc.residency import TierPolicy
from tiers.mover import Mover

NEVER = np.iinfo(np.int64).max


class Policy(Protocol):
    def serve(self, prompt: Prompt) -> Sources: ...


class NoCache:
    def serve(self, prompt: Prompt) -> Sources:
        return Sources(0, 0, 0, prompt.prompt_len)


class Linear:
    """`num_tokens` tokens of buffers. A buffer holds its conversation's last prompt and reply;
    the next turn reuses what it begins with.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._buffers: OrderedDict[int, Prompt] = OrderedDict()
        self._used = 0

    def serve(self, prompt: Prompt) -> Sources:
        if prompt.total_len > self.num_tokens:
            return Sources(0, 0, 0, prompt.prompt_len)
        before = self._buffers.pop(prompt.session, None)
        hit = 0
        if before is not None:
            self._used -= before.total_len
            hit = common_len(before, prompt)
        while self._used + prompt.total_len > self.num_tokens:
            self._used -= self._buffers.popitem(last=False)[1].total_len
        self._buffers[prompt.session] = prompt
        self._used += prompt.total_len
        return on_device(prompt, hit)


class Paged:
    """`num_pages` pages of `page_size` tokens. A prompt's leading whole pages hit.

    Pages are freed tail first, so that of one request's pages the last are evicted first.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._lru: OrderedDict[int, None] = OrderedDict()

    def serve(self, prompt: Prompt) -> Sources:
        num_pages = -(-prompt.total_len // self.page_size)
        if num_pages > self.num_pages:
            return Sources(0, 0, 0, prompt.prompt_len)
        pages = prompt.pages(self.page_size).tolist()
        lru = self._lru
        most = (prompt.prompt_len - 1) // self.page_size
        hits = next((i for i, page in enumerate(pages[:most]) if page not in lru), most)
        for page in reversed(pages):
            lru[page] = None
            lru.move_to_end(page)
        partly_filled = num_pages - len(pages)  # never found again, but in use until now
        while len(lru) + partly_filled > self.num_pages:
            lru.popitem(last=False)
        return on_device(prompt, hits * self.page_size)


class Radix:
    """This product's cache over `num_pages` pages of `page_size` tokens, `lower` below them."""

    def __init__(self, num_pages: int, page_size: int, lower: Lower | None = None) -> None:
        self.cache = PrefixCache(LedgerTier("device", num_pages), page_size, lower=lower)

    def serve(self, prompt: Prompt) -> Sources:
        cache = self.cache
        if cache.num_pages_for(prompt.total_len) > cache.device.num_pages:
            return Sources(0, 0, 0, prompt.prompt_len)
        cache.poll()
        tokens = prompt.tokens()
        lease = cache.acquire("", tokens[: prompt.prompt_len])
        while not lease.poll():
            cache.poll()
        lease.extend(prompt.total_len)
        lease.append(tokens[prompt.prompt_len :])
        lease.commit(prompt.total_len)
        lease.release()
        return Sources(*lease.sources, prompt.prompt_len - lease.cached_len)


def tiered(
    num_pages: tuple[int, int, int],
    page_size: int,
    seconds_per_token: tuple[float, float, float],
    policy: TierPolicy,
) -> Radix:
    """The radix cache with pages on device, host and disk.

    `seconds_per_token` are those of loading from host, from disk, and of computing: what the
    service measures, and decides promotion by.
    """
    device, host, disk = num_pages
    from_host, from_disk, computed = seconds_per_token
    mover = InstantMover(
        {
            ("host", "device"): from_host * page_size,
            ("disk", "device"): from_disk * page_size,
        }
    )
    lower = Lower(
        cast(Mover, mover),
        LedgerTier("host", host) if host else None,
        LedgerTier("disk", disk) if disk else None,
        fingerprint=bytes(32),
        policy=policy,
    )
    radix = Radix(device, page_size, lower)
    radix.cache.residency.seconds_per_token = computed
    return radix


class Optimum:
    """`num_tokens` tokens of memory and knowledge of the future, token by token.

    Belady's MIN (1966): evict what is used again last, and what never is before all else. A
    prefix is used whenever what follows it is, so among equals the deepest goes and what stays
    is closed under prefixes.
    """

    def __init__(self, num_tokens: int, history: Sequence[Prompt]) -> None:
        self.num_tokens = num_tokens
        num_blocks = 1 + max((int(p.blocks.max()) for p in history), default=0)
        servable = [p for p in history if p.total_len <= num_tokens]
        self._next_uses = iter(next_uses(servable, num_blocks))
        self._last_user = np.zeros(num_blocks, np.int64)  # number of the request
        self._held = np.zeros(num_blocks, np.int64)  # tokens of each block in memory
        self._used = 0
        self._heap: list[tuple[int, int, int, int]] = []  # -next use, -depth, block, last user
        self._served = 0

    def serve(self, prompt: Prompt) -> Sources:
        if prompt.total_len > self.num_tokens:
            return Sources(0, 0, 0, prompt.prompt_len)
        self._served += 1
        next_use = next(self._next_uses)
        blocks = prompt.blocks
        lens = prompt.block_lens()
        held = np.minimum(self._held[blocks], lens)
        short = np.flatnonzero(held < lens)
        hit = int(held[: short[0] + 1].sum()) if len(short) else prompt.total_len
        self._used += int((lens - held).sum())
        self._held[blocks] = np.maximum(self._held[blocks], lens)
        self._last_user[blocks] = self._served
        self._evict()
        for depth, (block, use) in enumerate(zip(blocks.tolist(), next_use.tolist(), strict=True)):
            heapq.heappush(self._heap, (-use, -depth, block, self._served))
        return on_device(prompt, hit)

    def _evict(self) -> None:
        """Make room. A block enters the heap anew after every use, its older entries lapse; so
        the running request's own blocks are not on it yet and stay.
        """
        while self._used > self.num_tokens:
            use, depth, block, user = heapq.heappop(self._heap)
            if self._last_user[block] != user:
                continue
            gone = min(int(self._held[block]), self._used - self.num_tokens)
            self._held[block] -= gone
            self._used -= gone
            if self._held[block]:
                heapq.heappush(self._heap, (use, depth, block, user))


def next_uses(history: Sequence[Prompt], num_blocks: int) -> list[np.ndarray]:
    """For each request, the index of the request that uses each of its blocks next, or NEVER.

    A prompt's last token is computed in any case and so is its output: that is no use.
    """
    upcoming = np.full(num_blocks, NEVER)
    found = []
    for i in range(len(history) - 1, -1, -1):
        prompt = history[i]
        found.append(upcoming[prompt.blocks])
        upcoming[prompt.blocks[: -(-(prompt.prompt_len - 1) // prompt.block_size)]] = i
    found.reverse()
    return found


def on_device(prompt: Prompt, hit: int) -> Sources:
    """Sources of a prompt of which `hit` tokens were found on the device."""
    hit = min(hit, prompt.prompt_len - 1)
    return Sources(hit, 0, 0, prompt.prompt_len - hit)
