"""Cache policies that `simulate` compares. None needs memory or a model.

A policy is asked to serve a history's requests in order and says where each prompt's tokens came
from. At least the last token of a prompt is always computed. A request's pages must all be on
the device while it runs; one too long for that is computed, and leaves no trace in the cache.

    linear    one contiguous buffer a conversation, the least recently used conversation goes
    paged     whole pages found by a hash of all tokens before, as in vLLM: LRU, tails first
    radix     this product's tree and lease on one tier
    tiers     the same with host and disk below the device
    optimum   knows the future: no policy with that many tokens of memory can hit more
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import cast

import numpy as np

from radixsvc.bench.history import Prompt, common_len
from radixsvc.bench.ledgers import InstantMover, LedgerTier
from radixsvc.cache import Lease, Lower, PrefixCache
from radixsvc.completion import Sources, Tokens
from radixsvc.node import PAGES
from radixsvc.residency import TierPolicy
from tiers.disk import DiskTier
from tiers.mover import Mover

NEVER = np.iinfo(np.int64).max
NAMESPACE = "prompts"


class Policy(ABC):
    """Caches prompts in `num_tokens` tokens of memory."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def serve(self, prompt: Prompt) -> Sources:
        """Where this request's tokens come from; it is cached from then on."""
        fits = prompt.total_len <= self.num_tokens
        return self.run(prompt) if fits else on_device(prompt, 0)

    @abstractmethod
    def run(self, prompt: Prompt) -> Sources: ...


class Linear(Policy):
    """A buffer holds its conversation's last prompt and reply; the next turn reuses what it
    begins with.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self._buffers: OrderedDict[int, Prompt] = OrderedDict()
        self._used = 0

    def run(self, prompt: Prompt) -> Sources:
        before = self._buffers.pop(prompt.session, None)
        self._buffers[prompt.session] = prompt
        self._used += prompt.total_len - (before.total_len if before else 0)
        while self._used > self.num_tokens:
            self._used -= self._buffers.popitem(last=False)[1].total_len
        return on_device(prompt, common_len(before, prompt) if before else 0)


class Paged(Policy):
    """`num_pages` pages of `page_size` tokens. A prompt's leading whole pages hit.

    Pages are freed tail first, so that of one request's pages the last are evicted first.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages * page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self._lru: OrderedDict[int, None] = OrderedDict()

    def run(self, prompt: Prompt) -> Sources:
        pages = prompt.pages(self.page_size).tolist()
        lru = self._lru
        most = (prompt.prompt_len - 1) // self.page_size
        hits = next((i for i, page in enumerate(pages[:most]) if page not in lru), most)
        for page in reversed(pages):
            lru[page] = None
            lru.move_to_end(page)
        # a partly filled page is never found again, but in use until now
        partly_filled = prompt.total_len % self.page_size > 0
        while len(lru) + partly_filled > self.num_pages:
            lru.popitem(last=False)
        return on_device(prompt, hits * self.page_size)


class Radix(Policy):
    """This product's cache over so many `pages` of `page_size` tokens on device, host and disk.

    `seconds` a token: of loading it from host, from disk, and of computing it, by which the
    service decides what to promote.
    """

    def __init__(
        self,
        pages: Sequence[int],
        page_size: int,
        seconds: Sequence[float] = (0.0, 0.0, 1.0),
        policy: TierPolicy | None = None,
    ) -> None:
        super().__init__(pages[0] * page_size)
        device, host, disk = map(LedgerTier, PAGES, pages)
        from_host, from_disk, computed = seconds
        mover = InstantMover({"host": from_host * page_size, "disk": from_disk * page_size})
        lower = Lower(
            cast(Mover, mover),
            host if pages[1] else None,
            cast(DiskTier, disk) if pages[2] else None,
            fingerprint=bytes(32),
            policy=policy or TierPolicy(),
        )
        self.cache = PrefixCache(device, page_size, lower=lower if any(pages[1:]) else None)
        self.cache.residency.seconds_per_token = computed

    def take(self, tokens: Tokens, prompt_len: int) -> Lease:
        """A lease of a prompt and its output, all of it loaded or computed, and committed."""
        cache = self.cache
        cache.poll()
        lease = cache.acquire(NAMESPACE, tokens[:prompt_len])
        while not lease.poll():
            cache.poll()
        lease.extend(len(tokens))
        lease.append(tokens[prompt_len:])
        lease.commit(len(tokens))
        return lease

    def run(self, prompt: Prompt) -> Sources:
        with self.take(prompt.tokens(), prompt.prompt_len) as lease:
            return Sources(*lease.sources, prompt.prompt_len - lease.cached_len)


class Optimum(Policy):
    """Knows the future, token by token.

    Belady's MIN (1966): evict what is used again last, and what never is before all else. Among
    equals the deepest goes, since it is of no use without what stands before it.
    """

    def __init__(self, num_tokens: int, history: Sequence[Prompt]) -> None:
        super().__init__(num_tokens)
        num_blocks = 1 + max((int(p.blocks.max()) for p in history), default=0)
        servable = [p for p in history if p.total_len <= num_tokens]
        self._next_uses = iter(next_uses(servable, num_blocks))
        self._last_user = np.zeros(num_blocks, np.int64)  # number of the request
        self._held = np.zeros(num_blocks, np.int64)  # tokens of each block in memory
        self._used = 0
        self._heap: list[tuple[int, int, int, int]] = []  # -next use, -depth, block, last user
        self._served = 0

    def run(self, prompt: Prompt) -> Sources:
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

    A prompt's last token is computed in any case and so is its output: that is no use, and to
    have kept it until then gained nothing.
    """
    upcoming = np.full(num_blocks, NEVER)
    found = []
    for i in range(len(history) - 1, -1, -1):
        prompt = history[i]
        found.append(upcoming[prompt.blocks])
        num_used = -(-(prompt.prompt_len - 1) // prompt.block_size)
        upcoming[prompt.blocks[:num_used]] = i
        upcoming[prompt.blocks[num_used:]] = NEVER
    found.reverse()
    return found


def on_device(prompt: Prompt, hit: int) -> Sources:
    """Sources of a prompt of which `hit` tokens were found on the device."""
    hit = min(hit, prompt.prompt_len - 1)
    return Sources(hit, 0, 0, prompt.prompt_len - hit)
