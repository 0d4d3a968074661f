"""A request's hold on the cache.

What a lease's page table points at, from the left:

    tokens   [ locked in the tree, READY | private, WRITING          ]
             0                           num_locked * page_size      len(page_table) * page_size

Whole pages are shared by `commit`, the partly filled last one by `release`, since it may be
written until then. READY pages are never written. Whoever computed what the tree got meanwhile
from someone else gives their own pages back and reads the tree's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from radixsvc.completion import Tokens
from radixsvc.node import Node, Priority
from radixsvc.transfers import Levels
from tiers.page import InvariantError, PageIds

if TYPE_CHECKING:
    from radixsvc.cache import PrefixCache


class TokensByTier(NamedTuple):
    """How many leading tokens of a prompt lie where; each counted once, the fastest tier first."""

    device: int
    host: int
    disk: int

    @property
    def length(self) -> int:
        return self.device + self.host + self.disk


NONE = TokensByTier(0, 0, 0)


class Lease:
    """One request's hold. Made by `PrefixCache.acquire` alone.

    `cached_len` leading tokens have keys and values once `poll` was True, `sources` says from
    where. `page_table` is the int32 array of the pages of all tokens with room, private ones
    last; a new array after `poll` and `extend`, while `commit` may exchange pages in it.
    """

    node: Node

    def __init__(
        self, cache: PrefixCache, namespace: str, tokens: Tokens, priority: Priority
    ) -> None:
        self._cache = cache
        self.namespace = namespace
        self.priority = priority
        self.prompt_len = len(tokens)
        self.tokens: Tokens = np.array(tokens, np.int32)  # the prompt and what was appended
        self.page_table: PageIds = np.empty(cache.num_pages_for(len(tokens)) + 8, np.int32)[:0]
        self.num_locked = 0  # pages at the front that are the tree's
        self.num_valid = 0  # tokens at the front that have keys and values
        self.sources = self.at_double = NONE
        self.counted = False
        self.levels: Levels = np.empty(0, np.int8)  # where its first pages were found
        self.awaited: PageIds = self.page_table  # on their way to the device
        self.released = False

    @property
    def cached_len(self) -> int:
        return self.sources.length

    def append(self, token_ids: Sequence[int] | Tokens) -> None:
        """The sequence goes on with these tokens."""
        self.tokens = _appended(self.tokens, token_ids)

    def poll(self) -> bool:
        """Whether everything that was to be loaded is there, or failed and was cut short."""
        cache = self._cache
        if len(self.awaited) and not len(cache.residency.arriving(self.awaited)):
            cache.hold_cached(self, load=False)  # what came
        return not len(self.awaited)

    def extend(self, num_tokens: int) -> None:
        """Have pages for the first `num_tokens` tokens. OutOfPages changes nothing."""
        missing = self._cache.num_pages_for(num_tokens) - len(self.page_table)
        if missing > 0:
            self.hold(self._cache.allocate(missing))
        if not self.counted:
            self._cache.count(self)

    def commit(self, num_tokens: int) -> None:
        """The first `num_tokens` tokens have keys and values: share their whole pages.

        What the tree has already is taken from there, and the page table changed to it.
        """
        if not self.num_valid <= num_tokens <= len(self.tokens) or self.released:
            raise InvariantError(f"{num_tokens} tokens committed of {len(self.tokens)}")
        self.num_valid = num_tokens
        self._share(num_tokens - num_tokens % self._cache.page_size)

    def _share(self, num_tokens: int) -> None:
        """Put the private pages of the first `num_tokens` tokens into the tree."""
        cache = self._cache
        start, num_pages = self.num_locked, cache.num_pages_for(num_tokens)
        if num_pages <= start or not cache.enabled:
            return
        tokens = self.tokens[start * cache.page_size : num_tokens].tobytes()
        if cache.residency.is_loading(self.node, tokens):
            return  # someone is loading these pages: at the next commit, or never
        own = self.page_table[start:num_pages]
        if num_pages > len(self.page_table):
            raise InvariantError(f"{num_pages} pages committed of {len(self.page_table)}")
        self.node, packed = cache.tree.insert(self.node, tokens, own.tobytes(), self.priority)
        kept = np.frombuffer(packed, np.int32)
        ours = own[: len(kept)]
        added = kept == ours
        cache.device.publish(ours[added])
        if not added.all():
            cache.device.free(ours[~added])
            cache.counters["duplicate_pages"] += len(ours) - int(added.sum())
            self.page_table[start : start + len(kept)] = kept
        self.num_locked = start + len(kept)
        cache.residency.enforce_quota(self.node.account)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Let go: pages with keys and values stay cached, the others are free. Idempotent."""
        if self.released:
            return
        self.released = True
        cache = self._cache
        cache.forget(self)
        self._share(self.num_valid - self.num_valid % cache.page_size)
        account = self.node.account
        is_flushed = account is cache.tree.flushed
        if self.num_valid // cache.page_size == self.num_locked and not is_flushed:
            self._share(self.num_valid)
        path = cache.tree.path(self.node)
        cache.tree.unlock(self.node)
        cache.residency.enforce_quota(account)
        self.let_go()
        cache.residency.used(path)

    def let_go(self) -> None:
        """Give the private pages back."""
        private = self.page_table[self.num_locked :]
        self.num_locked = 0
        self.page_table = self.page_table[:0]
        self._cache.device.free(private)

    def hold(self, pages: PageIds) -> None:
        """More pages at the end of the page table."""
        self.page_table = _appended(self.page_table, pages)


def _appended(array: Tokens, more: Sequence[int] | Tokens) -> Tokens:
    """`array` and `more` behind it, in the same memory where that has room."""
    room = array if array.base is None else cast(Tokens, array.base)
    end = len(array) + len(more)
    if end > len(room):
        room = np.resize(room, 2 * end)
    room[len(array) : end] = more
    return room[:end]
