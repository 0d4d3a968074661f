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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tiers.base import Chain, Mask, MemoryTier, PageView, Tier
from tiers.copy import CopyStream, CpuStream, CudaStream, compute_fence
from tiers.device import DeviceTier
from tiers.disk import DiskTier
from tiers.host import HostTier
from tiers.page import InvariantError, PageIds, PageState
from tiers.store import Job, StoreQueue

Edge = tuple[str, str]  # names of the source and the target tier

NUM_WORKERS = 4
BATCH_BYTES = 2 << 20  # stays in a core's cache between copy and write
MAX_QUEUED_BYTES = 1 << 30
DISK_DEADLINE_S = 10.0
PROBE_DEPTH = 1 << 31
FIRST_GUESS_S_PER_BYTE = 1e-9  # until an edge was used or probed
RATE_MEMORY = 0.8  # weight of the past at each new measurement


@dataclass(eq=False)
class Ticket:
    """Pages on their way. Read it once `Mover.poll` has returned it."""

    source: Tier
    source_pages: PageIds
    target: Tier
    target_pages: PageIds
    ok: Mask = field(init=False)
    bad: Mask = field(init=False)
    cancelled: bool = False
    _settled: bool = False
    _start: Any = None
    _end: Any = None
    _deadline: float = math.inf
    _jobs: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ok = np.zeros(len(self.source_pages), np.bool_)
        self.bad = np.zeros(len(self.source_pages), np.bool_)

    @property
    def edge(self) -> Edge:
        return self.source.name, self.target.name

    @property
    def nbytes(self) -> int:
        return len(self.source_pages) * self.source.page_bytes


class _Lane:
    """What queues up behind one another: a stream's copies, the disk's reads, or its writes."""

    def __init__(self, stream: CopyStream | None) -> None:
        self.stream = stream
        self.tickets: list[Ticket] = []
        self.queued: Counter[Edge] = Counter()  # bytes
        self.last_end = -math.inf


class Mover:
    """Transfers between the `memory` tiers, the device first, and between them and `disk`.

    `promote` carries what goes to the device, `demote` all else; `fence` marks what the engine's
    thread has enqueued so far (`tiers.copy.compute_fence`). `max_queued_bytes` bounds each lane; a
    single ticket may exceed it when the lane is empty.
    """

    def __init__(
        self,
        memory: Sequence[MemoryTier],
        disk: DiskTier | None,
        promote: CopyStream,
        demote: CopyStream,
        fence: Callable[[], Any],
        *,
        num_workers: int = NUM_WORKERS,
        batch_bytes: int = BATCH_BYTES,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        disk_deadline_s: float = DISK_DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = list(memory)
        self._disk = disk
        self._fence = fence
        self._max_queued_bytes = max_queued_bytes
        self._disk_deadline_s = disk_deadline_s
        self._clock = clock
        self._finished: list[Ticket] = []
        self._rates: dict[Edge, tuple[float, float]] = {}  # seconds for so many bytes
        self._queue: StoreQueue | None = None
        if disk is not None:
            self._queue = StoreQueue(disk, promote, demote, clock, num_workers, batch_bytes)
        self._reads, self._writes = _Lane(None), _Lane(None)
        self._to_device, self._to_host = _Lane(promote), _Lane(demote)
        self._lanes = [self._to_device, self._to_host, self._reads, self._writes]

    @property
    def num_outstanding(self) -> int:
        """Tickets under way."""
        return sum(not ticket._settled for lane in self._lanes for ticket in lane.tickets)

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
        lane = self._lane(source, target)
        queued = lane.queued.total()
        is_full = queued and queued + ticket.nbytes > self._max_queued_bytes
        if is_full or not self.available(source, target):
            return None
        source.add_readers(source_pages)
        target.add_readers(target_pages)
        if lane.stream is not None:
            lane.stream.wait(self._fence())
            ticket._start = lane.stream.record()
            lane.stream.copy(_view(source, source_pages), _view(target, target_pages))
            ticket._end = lane.stream.record()
        else:
            self._submit_jobs(ticket, chain)
        lane.queued[ticket.edge] += ticket.nbytes
        lane.tickets.append(ticket)
        return ticket

    def _submit_jobs(self, ticket: Ticket, chain: Chain | None) -> None:
        assert self._queue is not None
        disk = self._queue.disk
        tier, pages, stored = ticket.target, ticket.target_pages, ticket.source_pages
        if ticket.target is disk:
            tier, pages, stored = ticket.source, ticket.source_pages, ticket.target_pages
        fence, n = self._fence(), len(pages)
        step = self._queue.job_pages(n)
        ticket._deadline = self._clock() + self._disk_deadline_s
        for at in (slice(i, i + step) for i in range(0, n, step)):
            records = partial(chain.records, n, at) if chain and ticket.target is disk else None
            job = Job(at, _view(tier, pages[at]), stored[at], records, disk.generation, fence)
            ticket._jobs.append(job)
        self._queue.put(ticket._jobs)

    def cancel(self, ticket: Ticket) -> None:
        """Give the target pages back; the ticket is not polled. Nothing if it was polled before."""
        if not ticket._settled:
            ticket.cancelled = True
            if ticket._jobs:
                self._is_over(ticket, self._lane(ticket.source, ticket.target))

    # Finishing

    def poll(self) -> list[Ticket]:
        """Tickets that ended since the last call. Cheap where there are none."""
        for tier in self._memory:
            tier.poll()
        for lane in self._lanes:
            lane.tickets = [ticket for ticket in lane.tickets if not self._is_over(ticket, lane)]
        finished, self._finished = self._finished, []
        return finished

    def wait(self, timeout_s: float) -> list[Ticket]:
        """`poll` until a ticket ends, nothing is under way, or the time is over."""
        end = time.monotonic() + timeout_s
        while True:
            finished = self.poll()
            if finished or not self.num_outstanding or time.monotonic() >= end:
                return finished
            time.sleep(2e-4)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what is under way, wait for it as long as asked, end workers and streams.

        The tiers may be closed afterwards.
        """
        for lane in self._lanes:
            for ticket in lane.tickets:
                self.cancel(ticket)
        end = time.monotonic() + timeout_s
        while self.num_outstanding and time.monotonic() < end:
            self.wait(end - time.monotonic())
        if self._queue is not None:
            self._queue.close(timeout_s)
        for lane in self._lanes:
            if lane.stream is not None:
                lane.stream.close()

    def _is_over(self, ticket: Ticket, lane: _Lane) -> bool:
        """Bring a ticket up to date; whether nothing of it is under way any more."""
        if lane.stream is not None:
            if not lane.stream.query(ticket._end):
                return False
            ticket.ok[:] = True
            self._learn(ticket, lane.stream.elapsed(ticket._start, ticket._end))
            self._settle(ticket, lane)
            return True
        pending = [job for job in ticket._jobs if not job.done]
        for job in ticket._jobs:
            if job.failure is not None:
                raise job.failure
            if job.keeps_slots and job.done:
                ticket.target.drop_readers(ticket.target_pages[job.places])
                job.keeps_slots = False
        is_late = self._clock() >= ticket._deadline
        if not ticket._settled and (
            not pending or ((is_late or ticket.cancelled) and all(job.abandon() for job in pending))
        ):
            self._end_jobs(ticket, lane, pending)
        return ticket._settled and not any(job.started_at is not None for job in pending)

    def _end_jobs(self, ticket: Ticket, lane: _Lane, pending: list[Job]) -> None:
        """Settle with what the jobs did; those in `pending` are abandoned."""
        for job in ticket._jobs:
            if job in pending:
                # A write that began may still reach its slots, whenever the disk wakes up.
                job.keeps_slots = job.records is not None and job.started_at is not None
            else:
                ticket.ok[job.places], ticket.bad[job.places] = job.ok, job.bad
        if ticket.ok.all():
            end = max(job.finished_at for job in ticket._jobs)
            begin = max(min(job.started_at or end for job in ticket._jobs), lane.last_end)
            lane.last_end = max(end, lane.last_end)
            self._learn(ticket, max(0.0, end - begin))
        assert self._disk is not None
        if ticket._jobs[0].generation != self._disk.generation:
            ticket.ok[:] = False  # flushed meanwhile
        self._settle(ticket, lane)

    def _settle(self, ticket: Ticket, lane: _Lane) -> None:
        ticket._settled = True
        lane.queued[ticket.edge] -= ticket.nbytes
        target, pages = ticket.target, ticket.target_pages
        if ticket.cancelled:
            target.free(pages)
        else:
            target.publish(pages[ticket.ok])
            self._finished.append(ticket)
        ticket.source.drop_readers(ticket.source_pages)
        is_over = np.ones(len(pages), np.bool_)
        for job in ticket._jobs:
            is_over[job.places] = not job.keeps_slots
        target.drop_readers(pages[is_over])

    # Estimating

    def available(self, source: Tier, target: Tier) -> bool:
        """Whether a transfer can be submitted at all: the disk, if concerned, is on and answers."""
        disk = self._disk
        if disk is None or disk not in (source, target):
            return True
        stuck = [t for lane in (self._reads, self._writes) for t in lane.tickets if t._settled]
        is_stuck = stuck and self._clock() >= min(ticket._deadline for ticket in stuck)
        return not is_stuck and (target is not disk or disk.writable)

    def seconds(self, source: Tier, target: Tier, num_pages: int) -> float:
        """How long `num_pages` pages would take from now, behind what is queued; inf if refused."""
        if not self.available(source, target):
            return math.inf
        lanes = [self._lane(source, target)]
        if lanes[0] is self._writes:
            lanes.append(self._reads)  # goes first
        queued = sum(n * self._rate(edge) for lane in lanes for edge, n in lane.queued.items())
        return queued + num_pages * source.page_bytes * self._rate((source.name, target.name))

    def probe(self, nbytes: int = 16 << 20, timeout_s: float = 5.0) -> None:
        """Measure every edge with `nbytes` on free pages; at start, before any submit."""
        tiers = [*self._memory, *([] if self._disk is None else [self._disk])]
        for _ in range(2):
            self._rates.clear()  # the first round met memory nobody had touched
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
        stream = self._lane(source, target).stream
        if stream is not None and len(pages):
            stream.calibrate(_view(source, pages), _view(target, there))
        # No record stands at the depth before this one, so a restart won't take it for a page.
        chain = Chain(bytes(32), PROBE_DEPTH, [bytes(4)] * len(pages))
        ticket = self.submit(source, pages, target, there, chain) if len(pages) else None
        if ticket is None:
            target.free(there)
            return there[:0]
        end = time.monotonic() + timeout_s
        while not ticket._settled and time.monotonic() < end:
            self.wait(end - time.monotonic())
        self.cancel(ticket)
        if ticket.cancelled:
            return there[:0]
        target.free(there[~ticket.ok])
        return there[ticket.ok]

    def _lane(self, source: Tier, target: Tier) -> _Lane:
        if source is self._disk:
            return self._reads
        if target is self._disk:
            return self._writes
        return self._to_device if target is self._memory[0] else self._to_host

    def _learn(self, ticket: Ticket, seconds: float) -> None:
        """Recent transfers weigh more, large ones too."""
        before, nbytes = self._rates.get(ticket.edge, (0.0, 0.0))
        self._rates[ticket.edge] = (
            RATE_MEMORY * before + seconds,
            RATE_MEMORY * nbytes + ticket.nbytes,
        )

    def _rate(self, edge: Edge) -> float:
        """Seconds per byte."""
        seconds, nbytes = self._rates.get(edge, (FIRST_GUESS_S_PER_BYTE, 1.0))
        return seconds / nbytes


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
