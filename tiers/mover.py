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

import itertools
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
from tiers.page import PageIds, PageState
from tiers.store import StoreQueue
from tiers.ticket import READ, WRITE, DiskJob, Lane, StreamJob, Ticket

NUM_WORKERS = 4
MAX_QUEUED_BYTES = 1 << 30  # of a lane; a single ticket may exceed it when the lane is empty
DISK_DEADLINE_S = 10.0
PROBE_DEPTH = 1 << 31


class Mover:
    """Transfers between the `memory` tiers, the device first, and between them and `disk`.

    `promote` carries what goes to the device, `demote` all else; `fence` marks what the engine's
    thread has enqueued so far (`tiers.copy.compute_fence`). `pinning` is for the workers' staging
    memory.
    """

    def __init__(
        self,
        memory: Sequence[MemoryTier],
        disk: DiskTier | None,
        promote: CopyStream,
        demote: CopyStream,
        fence: Callable[[], Any],
        pinning: Pinning | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = list(memory)
        self._disk = disk
        self._streams = promote, demote
        self._fence = fence
        self._clock = clock
        self._lanes: dict[tuple[Tier, Tier], Lane] = {}
        for source, target in itertools.permutations(memory, 2):
            self._lanes[source, target] = Lane(promote if target is memory[0] else demote)
        self._queue: StoreQueue | None = None
        if disk is not None:
            self._queue = StoreQueue(disk, promote, demote, pinning, clock, NUM_WORKERS)
            for tier in memory:
                self._lanes[disk, tier] = Lane(rank=READ)
                self._lanes[tier, disk] = Lane(rank=WRITE)

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
        ticket = Ticket(source, source_pages, target, target_pages)
        lane = self._lanes[source, target]
        queued = lane.queued_bytes
        is_full = queued and queued + ticket.nbytes > MAX_QUEUED_BYTES
        if is_full or not self.available(source, target):
            return None
        ticket.begin()
        fence = self._fence()
        if lane.stream is not None:
            views = _view(source, source_pages), _view(target, target_pages)
            ticket.jobs.append(StreamJob(lane.stream, *views, fence))
        else:
            ticket.deadline = self._clock() + DISK_DEADLINE_S
            self._put(ticket, lane.rank, chain, fence)
        lane.queued_bytes += ticket.nbytes
        lane.tickets.append(ticket)
        return ticket

    def _put(self, ticket: Ticket, rank: int, chain: Chain | None, fence: Any) -> None:
        """Cut a ticket into jobs for the disk's workers."""
        assert self._queue is not None
        tier, pages, stored = ticket.target, ticket.target_pages, ticket.source_pages
        if rank == WRITE:
            tier, pages, stored = ticket.source, ticket.source_pages, ticket.target_pages
        for first in range(0, len(pages), self._queue.batch_slots):
            at = slice(first, first + self._queue.batch_slots)
            records = partial(chain.records, len(pages), at) if chain and rank == WRITE else None
            generation = self._queue.disk.generation
            job = DiskJob(at, _view(tier, pages[at]), stored[at], records, generation, fence)
            ticket.jobs.append(job)
            self._queue.put(rank, job)

    def cancel(self, ticket: Ticket) -> None:
        """Give the target pages back; the ticket is not polled. Nothing if it was polled before."""
        if not ticket.settled:
            ticket.cancelled = True
            self._lanes[ticket.source, ticket.target].is_over(ticket, self._clock())

    # Finishing

    def poll(self) -> list[Ticket]:
        """Tickets that ended since the last call. Cheap where there are none."""
        for tier in self._memory:
            tier.poll()
        now = self._clock()
        return [ticket for lane in self._lanes.values() for ticket in lane.poll(now)]

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
        now = self._clock()
        late = (t for lane in self._lanes.values() for t in lane.tickets if t.deadline <= now)
        return not any(t.settled for t in late) and (target is not disk or disk.writable)

    def seconds(self, source: Tier, target: Tier, num_pages: int) -> float:
        """How long `num_pages` pages would take from now, behind what is queued; inf if refused."""
        if not self.available(source, target):
            return math.inf
        lane = self._lanes[source, target]
        ahead = (a for a in self._lanes.values() if a.stream is lane.stream and a.rank <= lane.rank)
        queued = sum(a.seconds(a.queued_bytes) for a in ahead)
        return queued + lane.seconds(num_pages * source.page_bytes)

    def probe(self, nbytes: int = 16 << 20) -> None:
        """Measure every lane with `nbytes` on free pages; at start, before any submit."""
        for _ in range(2):
            for lane in self._lanes.values():
                lane.forget()  # the first round met memory nobody had touched
            for first, second in self._lanes:
                n = min(-(-nbytes // first.page_bytes), first.num_free // 2, second.num_free)
                if first is self._disk or n < 1:
                    continue
                pages = first.allocate(n)
                first.publish(pages)
                there = self._carry(first, pages, second)
                back = self._carry(second, there, first)
                first.free(np.concatenate([pages, back]))
                second.free(there)

    def _carry(self, source: Tier, pages: PageIds, target: Tier) -> PageIds:
        """Of as many fresh pages of `target`, those where these pages arrived, READY."""
        if not len(pages):
            return pages
        there = target.allocate(len(pages), PageState.LOADING)
        stream = self._lanes[source, target].stream
        if stream is not None:
            stream.calibrate(_view(source, pages), _view(target, there))
        # No record stands at the depth before this one, so a restart won't take it for a page.
        chain = Chain(bytes(32), PROBE_DEPTH, [bytes(4)] * len(pages))
        ticket = self.submit(source, pages, target, there, chain)
        while ticket is not None and not ticket.settled:
            self.wait(1.0)
        arrived = there[:0] if ticket is None else there[ticket.ok]
        target.free(np.setdiff1d(there, arrived))
        return arrived


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
