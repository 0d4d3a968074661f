"""Batches between memory tiers and the disk: the workers, their staging memory, their order.

    write:  pages --copy--> staging --disk.write-->  records      (digests computed here)
    read:   records --disk.read--> staging --copy, verified--> pages

A page's memory is touched only during the copy, never while the disk is asked. So a disk that
stops answering holds no page of another tier: its job is abandoned and the pages go back. Bytes are
summed as they are copied. Reads go before writes; someone waits for them.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from queue import PriorityQueue

import numpy as np

from tiers.base import Bytes2D, PageView, Pinning, Record, huge_memory
from tiers.copy import CopyStream
from tiers.disk import DiskTier
from tiers.ticket import CLOSING, DiskJob

log = logging.getLogger(__name__)

BATCH_BYTES = 2 << 20  # stays in a core's cache between copy and write


class StoreQueue:
    """`num_workers` threads between `disk` and memory."""

    def __init__(
        self,
        disk: DiskTier,
        promote: CopyStream,
        demote: CopyStream,
        pinning: Pinning | None,
        clock: Callable[[], float],
        num_workers: int,
    ) -> None:
        self.disk = disk
        self.batch_slots = max(1, BATCH_BYTES // disk.slot_bytes)
        self._promote = promote
        self._demote = demote
        self._pinning = pinning
        self._clock = clock
        self._jobs: PriorityQueue[tuple[int, int, DiskJob | None]] = PriorityQueue()
        self._order = itertools.count()
        self._threads = [
            threading.Thread(target=self._run, name=f"radixsvc-disk-{i}", daemon=True)
            for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, rank: int, job: DiskJob) -> None:
        """Jobs of lower rank go first, then those that were put first."""
        self._jobs.put((rank, next(self._order), job))

    def close(self, timeout_s: float = 5.0) -> None:
        """End the workers; one that hangs at the disk is left to the end of the process."""
        for _ in self._threads:
            self._jobs.put((CLOSING, next(self._order), None))
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        memory = huge_memory(self.batch_slots * self.disk.slot_bytes)
        address, pinning = memory.ctypes.data, self._pinning
        is_fast = pinning is None or pinning.pin(address, memory.nbytes)
        if not is_fast:
            log.warning("disk tier: page-locking its staging memory was refused; copies are slower")
        pieces = np.full(self.batch_slots, 0 if is_fast else -1)
        staging = memory.reshape(self.batch_slots, self.disk.slot_bytes)
        while (job := self._jobs.get()[2]) is not None:
            n = len(job.stored)
            slots = PageView(
                address + self.disk.payload_offset,
                self.disk.slot_bytes,
                job.memory.nbytes,
                np.arange(n, dtype=np.int32),
                pieces[:n],
            )
            try:
                if job.records is None:
                    self._read(job, staging[:n], slots)
                else:
                    self._write(job, staging[:n], slots, job.records())
            except BaseException as failure:
                job.failure = failure
            job.finished_at = self._clock()
            job.ended = True
        if pinning is not None and is_fast:
            pinning.unpin(address)

    def _write(
        self, job: DiskJob, batch: Bytes2D, slots: PageView, records: Sequence[Record]
    ) -> None:
        with job.lock:
            if job.abandoned:
                return
            job.started_at = self._clock()
            crcs = self._demote.copy_now(job.memory, slots, after=job.fence)
        job.ok = self.disk.write(job.stored, records, batch, crcs, job.generation)

    def _read(self, job: DiskJob, batch: Bytes2D, slots: PageView) -> None:
        with job.lock:
            if job.abandoned:
                return
            job.started_at = self._clock()
        wanted = self.disk.read(job.stored, batch)
        with job.lock:
            if job.abandoned:
                return
            ok = wanted == self._promote.copy_now(slots, job.memory, after=job.fence)
        job.ok, job.bad = ok, ~ok
