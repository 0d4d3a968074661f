"""Pages: what one holds, the states it goes through, and who may take it.

A page holds `page_size` tokens of one sequence for all layers, keys and values, contiguous:

    page   = [layer 0][layer 1] ... [layer L-1]
    layer  = [2: keys, values][kv_head][page_size][head_dim]

Layers may differ in heads and width; a layer that shares another's keys and values points at its
offset. `PageLedger` keeps the states of one tier's pages. It owns no memory, so the tree, the
simulator and the tests run on it alone.

              allocate                publish
    FREE ----------------> WRITING ------------> READY
      |    allocate(LOADING)           publish     ^
      +------------------> LOADING ---------------+
      ^                        |                   |
      +------------------------+---- free ---------+      (waits for readers to leave)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

PageIds = npt.NDArray[np.int32]

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


class InvariantError(RuntimeError):
    """Ownership of pages is broken. Nothing may be served on it: the process must end."""


class OutOfPages(Exception):
    """A tier has fewer free pages than were asked for; nothing was taken."""


class PageState(IntEnum):
    FREE = 0
    WRITING = 1  # owned by one request
    READY = 2  # owned by the tree, never written again
    LOADING = 3  # owned by the tree, read by nobody until its copy is done


@dataclass(frozen=True)
class LayerSpec:
    """One layer's keys and values inside a page.

    `offset` counts elements from the page's start; `window` is the layer's sliding window in
    tokens, None where it attends to everything.
    """

    kv_heads: int
    head_dim: int
    offset: int
    window: int | None = None


@dataclass(frozen=True)
class PageShape:
    """What one page holds. `dtype` is a torch dtype's name: float32, bfloat16 or float16."""

    layers: tuple[LayerSpec, ...]
    page_size: int
    dtype: str

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {self.page_size}")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"dtype must be one of {', '.join(ITEMSIZE)}, not {self.dtype!r}")

    @classmethod
    def uniform(
        cls, num_layers: int, kv_heads: int, head_dim: int, page_size: int, dtype: str
    ) -> PageShape:
        """The shape of a model whose layers are all alike."""
        size = 2 * kv_heads * page_size * head_dim
        layers = tuple(LayerSpec(kv_heads, head_dim, i * size) for i in range(num_layers))
        return cls(layers, page_size, dtype)

    @property
    def elems(self) -> int:
        """Elements in one page."""
        return max(s.offset + 2 * s.kv_heads * self.page_size * s.head_dim for s in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes in one page."""
        return self.elems * ITEMSIZE[self.dtype]


class PageLedger:
    """States, free list and reader counts of one tier's `num_pages` pages.

    Page ids are int32 arrays without repeats. Free pages are handed out in ascending order at
    first, so that neighbours in a sequence tend to be neighbours in memory.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"num_pages must not be negative, not {num_pages}")
        self.num_pages = num_pages
        self.states = np.zeros(num_pages, np.uint8)
        self.readers = np.zeros(num_pages, np.int32)
        self._retired = np.zeros(num_pages, np.bool_)  # let go by the owner, copies go on
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.num_free = num_pages

    def allocate(self, n: int, state: PageState = PageState.WRITING) -> PageIds:
        """Take `n` FREE pages; they become WRITING (or LOADING). All or nothing: OutOfPages."""
        if n > self.num_free:
            raise OutOfPages(f"{n} pages asked for, {self.num_free} of {self.num_pages} free")
        top = self.num_free
        pages = self._stack[top - n : top][::-1].copy()
        self.require(pages, PageState.FREE)
        self.states[pages] = state
        self.num_free = top - n
        return pages

    def publish(self, pages: PageIds) -> None:
        """WRITING or LOADING pages have their keys and values: they become READY."""
        self.require(pages, PageState.WRITING, PageState.LOADING)
        self.states[pages] = PageState.READY

    def free(self, pages: PageIds) -> None:
        """Give pages back. One that is still being read stays as it is until its readers leave."""
        self.require(pages, PageState.WRITING, PageState.READY, PageState.LOADING)
        if self._retired[pages].any():
            raise InvariantError(f"pages freed twice: {pages[self._retired[pages]]}")
        busy = self.readers[pages] > 0
        if busy.any():
            self._retired[pages[busy]] = True
            pages = pages[~busy]
        self._push(pages)

    def add_readers(self, pages: PageIds) -> None:
        """A copy out of these READY pages, or into these LOADING ones, is under way."""
        self.require(pages, PageState.READY, PageState.LOADING)
        self.readers[pages] += 1

    def drop_readers(self, pages: PageIds) -> None:
        """That copy is done; pages whose owner let go meanwhile become FREE."""
        if (self.readers[pages] < 1).any():
            raise InvariantError(f"readers dropped twice: {pages[self.readers[pages] < 1]}")
        self.readers[pages] -= 1
        gone = pages[self._retired[pages] & (self.readers[pages] == 0)]
        self._retired[gone] = False
        self._push(gone)

    def count(self) -> dict[str, int]:
        """Pages by state, as {"free": n, "writing": n, "ready": n, "loading": n}."""
        numbers = np.bincount(self.states, minlength=len(PageState))
        return {s.name.lower(): int(numbers[s]) for s in PageState}

    def check(self) -> None:
        """free + writing + ready + loading == total, no page twice on the free list."""
        free = self._stack[: self.num_free]
        counts = self.count()
        if sum(counts.values()) != self.num_pages or counts["free"] != self.num_free:
            raise InvariantError(f"{counts} and {self.num_free} on the list of {self.num_pages}")
        if len(np.unique(free)) != self.num_free or (self.states[free] != PageState.FREE).any():
            raise InvariantError("the free list holds a page twice or one that is in use")
        if (self.readers < 0).any() or (self.readers[free] != 0).any():
            raise InvariantError("a free page has readers")

    @property
    def num_retired(self) -> int:
        """Pages nobody owns any more that wait for a copy to end."""
        return int(self._retired.sum())

    def require(self, pages: PageIds, *allowed: PageState) -> None:
        """Raises InvariantError where a page is in none of these states."""
        states = self.states[pages]
        bad = states != allowed[0]
        for state in allowed[1:]:
            bad &= states != state
        if bad.any():
            wanted = " or ".join(s.name for s in allowed)
            raise InvariantError(f"pages {pages[bad]} are {states[bad]}, not {wanted}")

    def _push(self, pages: PageIds) -> None:
        self.states[pages] = PageState.FREE
        self._stack[self.num_free : self.num_free + len(pages)] = pages[::-1]
        self.num_free += len(pages)
