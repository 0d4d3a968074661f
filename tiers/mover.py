"""The mover carries pages between tiers and says when they are there.

It decides nothing: which pages go where is its caller's business. The caller is the engine's
thread, and only that; streams and workers run behind.

    pages = host.allocate(n, PageState.LOADING)
    ticket = mover.submit(device, device_pages, host, pages)     None: refused, free `pages` again
    ...
    for ticket in mover.poll():                                  between two steps
        ticket.ok                                                per page: arrived, and verified

Who owns what:

- Source pages must be READY. They stay their owner's, who may free them at any time; a reader keeps
  each from being reused until the copy out of it is over.
- Target pages must be LOADING, taken for this ticket. Until the ticket is polled they are the
  mover's. Then those that are `ok` are READY and their owner's; the others are, or as soon as
  nothing can write to them any more will be, FREE: forget them.
- `ticket.bad` marks source records of a store that are not what was stored there: nobody will read
  them again, so their owner frees them, once.
- `cancel` gives every target page back that way, at once or when the copy is over. A cancelled
  ticket is not polled.
- A ticket with a store that is not done at its deadline is polled as it is then, `late`: what
  arrived is `ok`. No page of a memory tier waits for a store beyond the deadline. While a store
  holds an operation that is overdue, submits with it are refused.

Numbers for decisions come from here too: `seconds` estimates a transfer from measured rates and
what is queued before it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tiers.base import Chain, Mask, MemoryTier, StoreTier, Tier
from tiers.copy import CopyStream, CpuStream, CudaStream, compute_fence
from tiers.device import DeviceTier
from tiers.disk import DiskTier
from tiers.host import HostTier
from tiers.page import InvariantError, PageIds, PageState
from tiers.store import Job, StoreQueue

Edge = tuple[str, str]  # names of the source and the target tier

NUM_WORKERS = 4
BATCH_BYTES = 2 << 20  # stays in a core's cache between copy and checksum
MAX_QUEUED_BYTES = 1 << 30
STORE_DEADLINE_S = 10.0
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
    digests: list[bytes] = field(default_factory=list)  # of pages sent to a store, if any went
    late: bool = False
    cancelled: bool = False
    _settled: bool = False
    _start: Any = None
    _end: Any = None
    _generation: int = 0
    _deadline: float = math.inf
    _chain: Chain | None = None
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
    """What queues up behind one another: a store's reads, or its writes."""

    def __init__(self) -> None:
        self.queued: Counter[Edge] = Counter()  # bytes
        self.last_end = -math.inf


class _StreamLane(_Lane):
    """A copy stream and its tickets, in the order in which they end."""

    def __init__(self, stream: CopyStream) -> None:
        super().__init__()
        self.stream = stream
        self.tickets: deque[Ticket] = deque()


class _Rate:
    """Seconds per byte of one edge; recent transfers weigh more, large ones too."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._bytes = 0.0

    def learn(self, seconds: float, nbytes: int) -> None:
        self._seconds = RATE_MEMORY * self._seconds + seconds
        self._bytes = RATE_MEMORY * self._bytes + nbytes

    @property
    def value(self) -> float:
        return self._seconds / self._bytes if self._bytes else FIRST_GUESS_S_PER_BYTE


class Mover:
    """Transfers between `memory` tiers, and between them and `stores`.

    `promote` carries what goes to the device, `demote` all else; `fence` marks what the engine's
    thread has enqueued so far (`tiers.copy.compute_fence`). `max_queued_bytes` bounds each lane; a
    single ticket may exceed it when the lane is empty.
    """

    def __init__(
        self,
        memory: Sequence[MemoryTier],
        stores: Sequence[StoreTier],
        promote: CopyStream,
        demote: CopyStream,
        fence: Callable[[], Any],
        *,
        num_workers: int = NUM_WORKERS,
        batch_bytes: int = BATCH_BYTES,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        store_deadline_s: float = STORE_DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.moved_bytes: Counter[Edge] = Counter()
        self.num_outstanding = 0
        self._tiers: list[Tier] = [*memory, *stores]
        self._memory = {tier.name: tier for tier in memory}
        self._streams = _StreamLane(promote), _StreamLane(demote)
        self._fence = fence
        self._max_queued_bytes = max_queued_bytes
        self._store_deadline_s = store_deadline_s
        self._clock = clock
        self._done: deque[Job] = deque()
        self._finished: list[Ticket] = []
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._order = itertools.count()
        self._rates: dict[Edge, _Rate] = {}
        self._queues = {
            store.name: StoreQueue(
                store, promote, demote, self._done.append, clock, num_workers, batch_bytes
            )
            for store in stores
        }
        self._reads = {name: _Lane() for name in self._queues}
        self._writes = {name: _Lane() for name in self._queues}

    # Submitting

    def submit(
        self,
        source: Tier,
        source_pages: PageIds,
        target: Tier,
        target_pages: PageIds,
        chain: Chain | None = None,
        deadline_s: float | None = None,
    ) -> Ticket | None:
        """Begin a transfer; None where it is refused (queue full, store off or not answering).

        `chain` goes with pages bound for a store. `deadline_s` counts from now, for stores only.
        A refusal changes nothing. Raises InvariantError where a page is in the wrong state.
        """
        if len(source_pages) != len(target_pages) or not len(source_pages):
            raise ValueError("as many target pages as source pages, and at least one")
        if target.name in self._queues and (chain is None or len(chain.blobs) < len(target_pages)):
            raise ValueError("pages bound for a store need a chain with a blob for each")
        if (target.states[target_pages] != PageState.LOADING).any():
            raise InvariantError(f"{target.name} pages {target_pages} are not all LOADING")
        ticket = Ticket(source, source_pages, target, target_pages)
        lane = self._lane(source, target)
        queued = lane.queued.total()
        if queued and queued + ticket.nbytes > self._max_queued_bytes:
            self.counters["refused"] += 1
            return None
        if not self.available(source, target):
            self.counters["refused"] += 1
            return None
        source.add_readers(source_pages)
        lane.queued[ticket.edge] += ticket.nbytes
        self.num_outstanding += 1
        if isinstance(lane, _StreamLane):
            self._submit_copy(ticket, lane)
        else:
            self._submit_jobs(ticket, chain)
            ticket._deadline = self._clock() + (deadline_s or self._store_deadline_s)
            heapq.heappush(self._deadlines, (ticket._deadline, next(self._order), ticket))
        return ticket

    def _submit_copy(self, ticket: Ticket, lane: _StreamLane) -> None:
        source, target = self._memory[ticket.source.name], self._memory[ticket.target.name]
        stream = lane.stream
        stream.wait(self._fence())
        ticket._start = stream.record()
        stream.copy(source.view(ticket.source_pages), target.view(ticket.target_pages))
        ticket._end = stream.record()
        lane.tickets.append(ticket)

    def _submit_jobs(self, ticket: Ticket, chain: Chain | None) -> None:
        queue = self._queue_of(ticket)
        n = len(ticket.source_pages)
        is_write = queue.store is ticket.target
        memory = self._memory[ticket.source.name if is_write else ticket.target.name]
        pages, stored = ticket.source_pages, ticket.target_pages
        if is_write:
            ticket._chain = chain
        else:
            pages, stored = stored, pages
        ticket._generation = queue.store.generation
        fence = self._fence()
        step = queue.job_pages(n)
        ticket._jobs = [
            Job(
                ticket,
                lo,
                min(lo + step, n),
                memory.view(pages[lo : lo + step]),
                stored[lo : lo + step],
                ticket._chain,
                n,
                ticket._generation,
                fence,
            )
            for lo in range(0, n, step)
        ]
        queue.put(ticket._jobs)

    def cancel(self, ticket: Ticket) -> None:
        """Give the target pages back; the ticket is not polled. Nothing if it was polled before."""
        if ticket._settled or ticket.cancelled:
            return
        ticket.cancelled = True
        if ticket._jobs and not self._give_back(ticket):
            heapq.heappush(self._deadlines, (-math.inf, next(self._order), ticket))

    # Finishing

    def poll(self) -> list[Ticket]:
        """Tickets that ended since the last call. Cheap where there are none."""
        for tier in self._tiers:
            tier.poll()
        for lane in self._streams:
            stream = lane.stream
            while lane.tickets and stream.query(lane.tickets[0]._end):
                ticket = lane.tickets.popleft()
                self._learn(ticket.edge, stream.elapsed(ticket._start, ticket._end), ticket.nbytes)
                ticket.ok[:] = True
                self._settle(ticket)
        while self._done:
            self._end_job(self._done.popleft())
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            self._expire(heapq.heappop(self._deadlines)[2])
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
        copies = [ticket for lane in self._streams for ticket in lane.tickets]
        for ticket in copies + [ticket for _, _, ticket in self._deadlines]:
            self.cancel(ticket)
        end = time.monotonic() + timeout_s
        while self.num_outstanding and time.monotonic() < end:
            self.wait(end - time.monotonic())
        for queue in self._queues.values():
            queue.close(timeout_s)
        for lane in self._streams:
            lane.stream.close()

    def _end_job(self, job: Job) -> None:
        if job.failure is not None:
            raise job.failure
        job.done = True
        ticket: Ticket = job.owner
        queue = self._queue_of(ticket)
        queue.num_overdue -= job.overdue
        if ticket._settled:
            if job.kept:
                ticket.target.free(ticket.target_pages[job.lo : job.hi])
            return
        ticket.ok[job.lo : job.hi] = job.ok
        ticket.bad[job.lo : job.hi] = job.bad
        if not all(other.done for other in ticket._jobs):
            return
        if ticket.ok.all():
            lane = self._lane(ticket.source, ticket.target)
            end = max(j.finished_at for j in ticket._jobs)
            begin = max(min(j.started_at or end for j in ticket._jobs), lane.last_end)
            lane.last_end = max(end, lane.last_end)
            self._learn(ticket.edge, max(0.0, end - begin), ticket.nbytes)
        self._settle(ticket)

    def _give_back(self, ticket: Ticket) -> bool:
        """Settle before all jobs are done; False while one of them touches memory."""
        jobs = [job for job in ticket._jobs if not job.done]
        if [job for job in jobs if not job.abandon()]:
            return False
        for job in jobs:
            # A write that began may still reach its slots, whenever the store wakes up.
            job.kept = job.chain is not None and job.started_at is not None
        self._settle(ticket)
        return True

    def _expire(self, ticket: Ticket) -> None:
        now = self._clock()
        if now >= ticket._deadline:
            queue = self._queue_of(ticket)
            for job in ticket._jobs:
                if not job.done and job.started_at is not None and not job.overdue:
                    job.overdue = True
                    queue.num_overdue += 1
            if not ticket._settled:
                ticket.late = True
                self.counters["late"] += not ticket.cancelled
        if not ticket._settled and not self._give_back(ticket):
            heapq.heappush(self._deadlines, (now + 1e-3, next(self._order), ticket))

    def _settle(self, ticket: Ticket) -> None:
        ticket._settled = True
        self.num_outstanding -= 1
        self._lane(ticket.source, ticket.target).queued[ticket.edge] -= ticket.nbytes
        if ticket._jobs and ticket._generation != self._queue_of(ticket).store.generation:
            ticket.ok[:] = False  # flushed meanwhile
        ticket.source.drop_readers(ticket.source_pages)
        arrived = ticket.ok & (not ticket.cancelled)
        kept = np.zeros(len(arrived), np.bool_)
        for job in ticket._jobs:
            kept[job.lo : job.hi] = job.kept
        ticket.target.publish(ticket.target_pages[arrived])
        ticket.target.free(ticket.target_pages[~arrived & ~kept])
        if ticket.cancelled:
            self.counters["cancelled"] += 1
            return
        self.moved_bytes[ticket.edge] += int(arrived.sum()) * ticket.source.page_bytes
        self.counters["failed_pages"] += int((~arrived).sum())
        if ticket._chain is not None and arrived.any():
            ticket.digests = [record.digest for record in ticket._chain.records(len(arrived))]
        self._finished.append(ticket)

    # Estimating

    def available(self, source: Tier, target: Tier) -> bool:
        """Whether a transfer can be submitted at all: the stores concerned are on and answer."""
        reads, writes = self._queues.get(source.name), self._queues.get(target.name)
        return (reads is None or not reads.num_overdue) and (
            writes is None or (not writes.num_overdue and writes.store.writable)
        )

    def seconds(self, source: Tier, target: Tier, num_pages: int) -> float:
        """How long `num_pages` pages would take from now, behind what is queued; inf if refused."""
        if not self.available(source, target):
            return math.inf
        lanes = [self._lane(source, target)]
        if target.name in self._queues:
            lanes.append(self._reads[target.name])  # goes first
        queued = sum(n * self._rate(edge) for lane in lanes for edge, n in lane.queued.items())
        return queued + num_pages * source.page_bytes * self._rate((source.name, target.name))

    def probe(self, nbytes: int = 16 << 20, timeout_s: float = 5.0) -> None:
        """Measure every edge with `nbytes` on free pages; at start, before any submit."""
        for _ in range(2):
            self._rates.clear()  # the first round met memory nobody had touched
            for first in self._memory.values():
                for second in self._tiers:
                    n = min(-(-nbytes // first.page_bytes), first.num_free // 2, second.num_free)
                    if second is first or n < 1:
                        continue
                    pages = first.allocate(n)
                    first.publish(pages)
                    there = self._carry(first, pages, second, timeout_s)
                    back = None if there is None else self._carry(second, there, first, timeout_s)
                    for tier, taken in ((first, pages), (second, there), (first, back)):
                        if taken is not None:
                            tier.free(taken)

    def _carry(
        self, source: Tier, pages: PageIds, target: Tier, timeout_s: float
    ) -> PageIds | None:
        there = target.allocate(len(pages), PageState.LOADING)
        lane = self._lane(source, target)
        if isinstance(lane, _StreamLane):
            views = self._memory[source.name].view(pages), self._memory[target.name].view(there)
            lane.stream.calibrate(*views)
        # No record stands at the depth before this one, so a restart won't take it for a page.
        chain = Chain(bytes(32), PROBE_DEPTH, [bytes(4)] * len(pages))
        ticket = self.submit(source, pages, target, there, chain)
        if ticket is None:
            target.free(there)
            return None
        end = time.monotonic() + timeout_s
        while not ticket._settled and time.monotonic() < end:
            self.wait(end - time.monotonic())
        self.cancel(ticket)
        if ticket.ok.all() and not ticket.cancelled:
            return there
        if not ticket.cancelled:
            target.free(there[ticket.ok])
        return None

    def _lane(self, source: Tier, target: Tier) -> _Lane:
        if source.name in self._queues:
            return self._reads[source.name]
        if target.name in self._queues:
            return self._writes[target.name]
        return self._streams[0 if self._memory[target.name].on_device else 1]

    def _queue_of(self, ticket: Ticket) -> StoreQueue:
        return self._queues.get(ticket.source.name) or self._queues[ticket.target.name]

    def _learn(self, edge: Edge, seconds: float, nbytes: int) -> None:
        self._rates.setdefault(edge, _Rate()).learn(seconds, nbytes)

    def _rate(self, edge: Edge) -> float:
        rate = self._rates.get(edge)
        return rate.value if rate else FIRST_GUESS_S_PER_BYTE


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
    stores = [] if disk is None else [disk]
    return Mover(memory, stores, promote, demote, compute_fence(device.device), **options)
