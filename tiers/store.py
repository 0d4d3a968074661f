"""Batches between memory tiers and a store: the workers, their staging memory, their order.

    write:  pages --copy--> staging --store.write-->  records      (digests computed here)
    read:   records --store.read, verified--> staging --copy--> pages

A page's memory is touched only during the copy, never while the store is asked. So a store that
stops answering holds no page of another tier: its job is abandoned and the pages go back.
Reads go before writes; someone waits for them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tiers.base import Bytes2D, Chain, Mask, PageView, StoreTier
from tiers.copy import CopyStream
from tiers.page import PageIds

SMALLEST_BATCH_BYTES = 1 << 20


@dataclass(eq=False)
class Job:
    """One batch of a ticket: pages [lo, hi) of it. `owner` is for whoever put it in."""

    owner: Any
    lo: int
    hi: int
    memory: PageView
    stored: PageIds
    chain: Chain | None  # None: a read
    num_pages: int  # of the whole ticket
    generation: int
    fence: Any
    ok: Mask = field(init=False)  # arrived
    bad: Mask = field(init=False)  # not what was stored
    started_at: float | None = None
    finished_at: float = 0.0
    failure: BaseException | None = None
    done: bool = False
    overdue: bool = False
    kept: bool = False  # its slots aren't given back before it is done
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _touching: bool = False
    _abandoned: bool = False

    def __post_init__(self) -> None:
        self.ok = np.zeros(self.hi - self.lo, np.bool_)
        self.bad = np.zeros(self.hi - self.lo, np.bool_)

    def begin(self, now: float) -> bool:
        """A worker starts on it; False where it was abandoned before."""
        with self._lock:
            if not self._abandoned:
                self.started_at = now
            return not self._abandoned

    def enter(self) -> bool:
        """The worker is about to touch pages of a memory tier; False where it no longer may."""
        with self._lock:
            self._touching = not self._abandoned
            return self._touching

    def leave(self) -> None:
        with self._lock:
            self._touching = False

    def abandon(self) -> bool:
        """Stop it from touching memory; False while it is doing so (ask again soon)."""
        with self._lock:
            self._abandoned = True
            return not self._touching


class StoreQueue:
    """`num_workers` threads between `store` and memory; `on_done` is called on a worker."""

    def __init__(
        self,
        store: StoreTier,
        promote: CopyStream,
        demote: CopyStream,
        on_done: Callable[[Job], None],
        clock: Callable[[], float],
        num_workers: int,
        batch_bytes: int,
    ) -> None:
        self.store = store
        self.num_overdue = 0
        self._promote = promote
        self._demote = demote
        self._on_done = on_done
        self._clock = clock
        self._batch_slots = max(1, batch_bytes // store.slot_bytes)
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"radixsvc-{store.name}-{i}", daemon=True)
            for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def job_pages(self, n: int) -> int:
        """Pages a job: enough jobs for all workers, none too small to be worth a call."""
        even = -(-n // len(self._threads))
        worth = -(-SMALLEST_BATCH_BYTES // self.store.slot_bytes)
        return min(max(even, worth), self._batch_slots)

    def put(self, jobs: list[Job]) -> None:
        with self._changed:
            for job in jobs:
                (self._reads if job.chain is None else self._writes).append(job)
            self._changed.notify(len(jobs))

    def close(self, timeout_s: float = 5.0) -> None:
        """End the workers; one that hangs in the store is left to the end of the process."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        staging = self.store.staging(self._batch_slots)
        while (job := self._next()) is not None:
            if job.begin(self._clock()):
                try:
                    (self._read if job.chain is None else self._write)(job, staging)
                except BaseException as failure:
                    job.failure = failure
            job.finished_at = self._clock()
            self._on_done(job)

    def _next(self) -> Job | None:
        with self._changed:
            while not self._reads and not self._writes and not self._closing:
                self._changed.wait()
            if self._closing:
                return None
            return (self._reads or self._writes).popleft()

    def _write(self, job: Job, staging: Bytes2D) -> None:
        assert job.chain is not None
        batch = staging[: job.hi - job.lo]
        records = job.chain.records(job.num_pages)[job.lo : job.hi]
        slots = self._slots(batch, np.arange(len(batch), dtype=np.int32), job.memory.nbytes)
        if self._move(job, self._demote, job.memory, slots):
            job.ok[:] = self.store.write(job.stored, records, batch, job.generation)

    def _read(self, job: Job, staging: Bytes2D) -> None:
        batch = staging[: job.hi - job.lo]
        good = self.store.read(job.stored, batch)
        job.bad[:] = ~good
        if not good.any():
            return
        arrived = np.flatnonzero(good).astype(np.int32)
        slots = self._slots(batch, arrived, job.memory.nbytes)
        pieces = job.memory.pieces
        target = job.memory._replace(
            pages=job.memory.pages[arrived], pieces=None if pieces is None else pieces[arrived]
        )
        if self._move(job, self._promote, slots, target):
            job.ok[:] = good

    def _slots(self, batch: Bytes2D, slots: PageIds, nbytes: int) -> PageView:
        base = batch.ctypes.data + self.store.payload_offset
        pieces = None if self.store.staging_is_pinned else np.full(len(slots), -1)
        return PageView(base, self.store.slot_bytes, nbytes, slots, pieces)

    def _move(self, job: Job, stream: CopyStream, source: PageView, target: PageView) -> bool:
        if not job.enter():
            return False
        try:
            stream.copy_now(source, target, after=job.fence)
        finally:
            job.leave()
        return True
