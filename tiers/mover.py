"""The mover carries pages between tiers and says when they are there.

It decides nothing: which pages go where is its caller's business. The caller is the engine's
thread, and only that; streams and workers run behind.

    pages = host.allocate(n, PageState.LOADING)
    ticket = mover.submit(device, device_pages, host, pages)     None: refused, free `pages` again
    ...
    for ticket in mover.poll():                                  between two steps
        ticket.ok                                                per page: arrived, and verified

Who owns what:

- Source pages must be READY, target pages LOADING, taken for this ticket. All stay their owner's,
  who may free them at any time; a reader keeps each from being reused until the copy is over.
- When the ticket is polled, target pages that are `ok` are READY. The others are still LOADING, and
  their owner frees them.
- `ticket.bad` marks source records on disk that are not what was stored there: nobody will read
  them again, so their owner frees them, once.
- `cancel` frees every target page, at once or when the copy is over. A cancelled ticket is not
  polled.
- A ticket with the disk that is not done at its deadline is polled as it is then: what arrived
  is `ok`. No page of a memory tier waits for the disk beyond the deadline. While the disk
  holds an operation that is overdue, submits with it are refused.

Numbers for decisions come from here too: `seconds` estimates a transfer from measured rates and
what is queued before it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tiers.base import Chain, MemoryTier, PageView, Pinning, Tier
from tiers.copy import CopyStream, CpuStream, compute_fence
from tiers.cuda_copy import CudaStream
from tiers.device import DeviceTier
from tiers.disk import DiskTier
from tiers.host import HostTier
from tiers.page import InvariantError, PageIds, PageState
from tiers.store import StoreQueue
from tiers.ticket import READ, WRITE, DiskJob, Lane, StreamJob, Ticket

Edge = tuple[str, str]  # names of the source and the target tier

NUM_WORKERS = 4
MAX_QUEUED_BYTES = 1 << 30
DISK_DEADLINE_S = 10.0
PROBE_DEPTH = 1 << 31


class Mover:
    """Transfers between the `memory` tiers, the device first, and between them and `disk`.

    `promote` carries what goes to the device, `demote` all else; `fence` marks what the engine's
    thread has enqueued so far (`tiers.copy.compute_fence`). `pinning` is for the workers' staging
    memory. `max_queued_bytes` bounds each lane; a single ticket may exceed it when it is empty.
    """

    def __init__(
        self,
        memory: Sequence[MemoryTier],
        disk: DiskTier | None,
        promote: CopyStream,
        demote: CopyStream,
        fence: Callable[[], Any],
        *,
        pinning: Pinning | None = None,
        num_workers: int = NUM_WORKERS,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        disk_deadline_s: float = DISK_DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = list(memory)
        self._disk = disk
        self._streams = promote, demote
        self._fence = fence
        self._max_queued_bytes = max_queued_bytes
        self._disk_deadline_s = disk_deadline_s
        self._clock = clock
        self._queue: StoreQueue | None = None
        self._lanes: dict[Edge, Lane] = {}
        for tier in self._memory:
            for other in {*self._memory} - {tier}:
                stream = promote if other is self._memory[0] else demote
                self._lanes[tier.name, other.name] = Lane(clock, stream)
            if disk is not None:
                self._lanes[disk.name, tier.name] = Lane(clock, disk=disk, rank=READ)
                self._lanes[tier.name, disk.name] = Lane(clock, disk=disk, rank=WRITE)
        if disk is not None:
            self._queue = StoreQueue(disk, promote, demote, pinning, clock, num_workers)

    @property
    def num_outstanding(self) -> int:
        """Tickets under way."""
        return sum(not t.settled for lane in self._lanes.values() for t in lane.tickets)

    # Submitting

    def submit(
        self,
        source: Tier,
        source_pages: PageIds,
        target: Tier,
        target_pages: PageIds,
        chain: Chain | None = None,
    ) -> Ticket | None:
        """Begin a transfer; None where it is refused (queue full, disk off or not answering).

        `chain` goes with pages bound for the disk. A refusal changes nothing. Raises InvariantError
        where a page is in the wrong state.
        """
        if len(source_pages) != len(target_pages) or not len(source_pages):
            raise ValueError("as many target pages as source pages, and at least one")
        if target is self._disk and (chain is None or len(chain.blobs) < len(target_pages)):
            raise ValueError("pages bound for the disk need a chain with a blob for each")
        ends = (source, source_pages, PageState.READY), (target, target_pages, PageState.LOADING)
        for tier, pages, state in ends:
            if (tier.states[pages] != state).any():
                raise InvariantError(f"{tier.name} pages {pages} are not all {state.name}")
        ticket = Ticket(source, source_pages, target, target_pages)
        lane = self._lanes[source.name, target.name]
        queued = lane.queued_bytes
        is_full = queued and queued + ticket.nbytes > self._max_queued_bytes
        if is_full or not self.available(source, target):
            return None
        source.add_readers(source_pages)
        target.add_readers(target_pages)
        fence = self._fence()
        if lane.stream is not None:
            views = _view(source, source_pages), _view(target, target_pages)
            ticket.jobs.append(StreamJob(lane.stream, *views, fence))
        else:
            ticket.deadline = self._clock() + self._disk_deadline_s
            self._submit_to_disk(ticket, lane.rank, chain, fence)
        lane.add(ticket)
        return ticket

    def _submit_to_disk(self, ticket: Ticket, rank: int, chain: Chain | None, fence: Any) -> None:
        assert self._queue is not None
        tier, pages, stored = ticket.target, ticket.target_pages, ticket.source_pages
        if rank == WRITE:
            tier, pages, stored = ticket.source, ticket.source_pages, ticket.target_pages
        n, step = len(pages), self._queue.batch_slots
        generation = ticket.generation = self._queue.disk.generation
        for at in (slice(i, i + step) for i in range(0, n, step)):
            records = partial(chain.records, n, at) if chain and rank == WRITE else None
            job = DiskJob(at, _view(tier, pages[at]), stored[at], records, generation, fence)
            ticket.jobs.append(job)
            self._queue.put(rank, job)

    def cancel(self, ticket: Ticket) -> None:
        """Give the target pages back; the ticket is not polled. Nothing if it was polled before."""
        if not ticket.settled:
            ticket.cancelled = True
            self._lanes[ticket.source.name, ticket.target.name].is_over(ticket)

    # Finishing

    def poll(self) -> list[Ticket]:
        """Tickets that ended since the last call. Cheap where there are none."""
        for tier in self._memory:
            tier.poll()
        return [ticket for lane in self._lanes.values() for ticket in lane.poll()]

    def wait(self, timeout_s: float) -> list[Ticket]:
        """`poll` until a ticket ends, nothing is under way, or the time is over."""
        end = time.monotonic() + timeout_s
        while True:
            finished = self.poll()
            if finished or not self.num_outstanding or time.monotonic() >= end:
                return finished
            time.sleep(1e-3)  # each poll holds up the workers

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what is under way, wait for it as long as asked, end workers and streams.

        The tiers may be closed afterwards.
        """
        for lane in self._lanes.values():
            for ticket in lane.tickets:
                self.cancel(ticket)
        end = time.monotonic() + timeout_s
        while self.num_outstanding and time.monotonic() < end:
            self.wait(end - time.monotonic())
        if self._queue is not None:
            self._queue.close(timeout_s)
        for stream in self._streams:
            stream.close()

    # Estimating

    def available(self, source: Tier, target: Tier) -> bool:
        """Whether a transfer can be submitted at all: the disk, if concerned, is on and answers."""
        disk = self._disk
        if disk is None or disk not in (source, target):
            return True
        is_stuck = any(lane.is_stuck for lane in self._lanes.values())
        return not is_stuck and (target is not disk or disk.writable)

    def seconds(self, source: Tier, target: Tier, num_pages: int) -> float:
        """How long `num_pages` pages would take from now, behind what is queued; inf if refused."""
        if not self.available(source, target):
            return math.inf
        lane = self._lanes[source.name, target.name]
        ahead = (a for a in self._lanes.values() if a.stream is lane.stream and a.rank <= lane.rank)
        queued = sum(a.seconds(a.queued_bytes) for a in ahead)
        return queued + lane.seconds(num_pages * source.page_bytes)

    def probe(self, nbytes: int = 16 << 20, timeout_s: float = 5.0) -> None:
        """Measure every lane with `nbytes` on free pages; at start, before any submit."""
        tiers = [*self._memory, *([] if self._disk is None else [self._disk])]
        for _ in range(2):
            for lane in self._lanes.values():
                lane.forget_rate()  # the first round met memory nobody had touched
            for first in self._memory:
                for second in tiers:
                    n = min(-(-nbytes // first.page_bytes), first.num_free // 2, second.num_free)
                    if second is first or n < 1:
                        continue
                    pages = first.allocate(n)
                    first.publish(pages)
                    there = self._carry(first, pages, second, timeout_s)
                    back = self._carry(second, there, first, timeout_s)
                    first.free(np.concatenate([pages, back]))
                    second.free(there)

    def _carry(self, source: Tier, pages: PageIds, target: Tier, timeout_s: float) -> PageIds:
        """Of as many fresh pages of `target`, those where these pages arrived, READY."""
        there = target.allocate(len(pages), PageState.LOADING)
        stream = self._lanes[source.name, target.name].stream
        if stream is not None and len(pages):
            stream.calibrate(_view(source, pages), _view(target, there))
        # No record stands at the depth before this one, so a restart won't take it for a page.
        chain = Chain(bytes(32), PROBE_DEPTH, [bytes(4)] * len(pages))
        ticket = self.submit(source, pages, target, there, chain) if len(pages) else None
        if ticket is None:
            target.free(there)
            return there[:0]
        end = time.monotonic() + timeout_s
        while not ticket.settled and time.monotonic() < end:
            self.wait(end - time.monotonic())
        self.cancel(ticket)
        if ticket.cancelled:
            return there[:0]
        target.free(there[~ticket.ok])
        return there[ticket.ok]


def _view(tier: Tier, pages: PageIds) -> PageView:
    assert isinstance(tier, MemoryTier)
    return tier.view(pages)


def open_mover(
    device: DeviceTier, host: HostTier | None, disk: DiskTier | None, **options: Any
) -> Mover:
    """A mover between the tiers there are, with the copy streams that suit the device.

    `options` are `Mover`'s own. Call `probe` before the first submit.
    """
    is_cuda = device.device.type == "cuda"
    promote, demote = (
        CudaStream(device.device, name) if is_cuda else CpuStream(name)
        for name in ("promote", "demote")
    )
    memory: list[MemoryTier] = [device] if host is None else [device, host]
    return Mover(memory, disk, promote, demote, compute_fence(device.device), **options)
