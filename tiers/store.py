"""Batches between memory tiers and the disk: the workers, their staging memory, their order.

    write:  pages --copy--> staging --disk.write-->  records      (digests computed here)
    read:   records --disk.read--> staging --copy, verified--> pages

A page's memory is touched only during the copy, never while the disk is asked. So a disk that
stops answering holds no page of another tier: its job is abandoned and the pages go back. Bytes are
summed as they are copied. Reads go before writes; someone waits for them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import PriorityQueue
from typing import Any

import numpy as np

from tiers.base import Bytes2D, Mask, PageView, Record
from tiers.copy import CopyStream
from tiers.disk import DiskTier
from tiers.page import PageIds

SMALLEST_BATCH_BYTES = 1 << 20
CLOSING, READ, WRITE = range(3)  # what comes first


@dataclass(eq=False)
class Job:
    """One batch of a ticket, between `memory` and the disk's pages `stored`.

    Its worker holds the lock whenever it touches memory.
    """

    places: slice  # of the batch in the ticket
    memory: PageView
    stored: PageIds
    records: Callable[[], Sequence[Record]] | None  # None: a read
    generation: int
    fence: Any
    ok: Mask = field(init=False)  # arrived
    bad: Mask = field(init=False)  # not what was stored
    started_at: float | None = None
    finished_at: float = 0.0
    failure: BaseException | None = None
    done: bool = False
    keeps_slots: bool = False  # its pages on disk aren't given back before it is done
    abandoned: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.ok = np.zeros(len(self.stored), np.bool_)
        self.bad = np.zeros(len(self.stored), np.bool_)

    def abandon(self) -> bool:
        """Stop it from touching memory; False while it is doing so (ask again soon)."""
        if self.lock.acquire(blocking=False):
            self.abandoned = True
            self.lock.release()
        return self.abandoned


class StoreQueue:
    """`num_workers` threads between `disk` and memory."""

    def __init__(
        self,
        disk: DiskTier,
        promote: CopyStream,
        demote: CopyStream,
        clock: Callable[[], float],
        num_workers: int,
        batch_bytes: int,
    ) -> None:
        self.disk = disk
        self._promote = promote
        self._demote = demote
        self._clock = clock
        self._batch_slots = max(1, batch_bytes // disk.slot_bytes)
        self._jobs: PriorityQueue[tuple[int, int, Job | None]] = PriorityQueue()
        self._order = itertools.count()
        self._threads = [
            threading.Thread(target=self._run, name=f"radixsvc-disk-{i}", daemon=True)
            for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def job_pages(self, n: int) -> int:
        """Pages a job: enough jobs for all workers, none too small to be worth a call."""
        even = -(-n // len(self._threads))
        worth = -(-SMALLEST_BATCH_BYTES // self.disk.slot_bytes)
        return min(max(even, worth), self._batch_slots)

    def put(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            kind = READ if job.records is None else WRITE
            self._jobs.put((kind, next(self._order), job))

    def close(self, timeout_s: float = 5.0) -> None:
        """End the workers; one that hangs at the disk is left to the end of the process."""
        for _ in self._threads:
            self._jobs.put((CLOSING, next(self._order), None))
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        staging = self.disk.staging(self._batch_slots)
        while (job := self._jobs.get()[2]) is not None:
            batch = staging[: len(job.stored)]
            try:
                if job.records is None:
                    self._read(job, batch)
                else:
                    self._write(job, batch, job.records())
            except BaseException as failure:
                job.failure = failure
            job.finished_at = self._clock()
            job.done = True

    def _write(self, job: Job, batch: Bytes2D, records: Sequence[Record]) -> None:
        with job.lock:
            if job.abandoned:
                return
            job.started_at = self._clock()
            slots = self._slots(batch, job.memory.nbytes)
            crcs = self._demote.copy_now(job.memory, slots, after=job.fence)
        job.ok[:] = self.disk.write(job.stored, records, batch, crcs, job.generation)

    def _read(self, job: Job, batch: Bytes2D) -> None:
        with job.lock:
            if job.abandoned:
                return
            job.started_at = self._clock()
        wanted = self.disk.read(job.stored, batch)
        with job.lock:
            if job.abandoned:
                return
            slots = self._slots(batch, job.memory.nbytes)
            job.ok[:] = wanted == self._promote.copy_now(slots, job.memory, after=job.fence)
        job.bad[:] = ~job.ok

    def _slots(self, batch: Bytes2D, nbytes: int) -> PageView:
        ids = np.arange(len(batch), dtype=np.int32)
        base = batch.ctypes.data + self.disk.payload_offset
        pieces = None if self.disk.staging_is_pinned else np.full(len(batch), -1)
        return PageView(base, self.disk.slot_bytes, nbytes, ids, pieces)
