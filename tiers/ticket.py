"""A transfer's ticket, the lane it queues in, and the jobs it waits for.

That is one job on a copy stream, or several of the disk's workers.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tiers.base import Mask, PageView, Record, Tier
from tiers.copy import CopyStream
from tiers.page import PageIds, PageState

CLOSING, READ, WRITE = range(3)  # what the disk's workers do first
FIRST_GUESS_S_PER_BYTE = 1e-9  # until a lane was used
RATE_MEMORY = 0.8  # weight of the past at each new ticket


class StreamJob:
    """All of a ticket's pages, on a copy stream."""

    places = slice(None)
    ok = True
    bad = keeps_slots = False
    finished_at = -math.inf  # its time is the stream's

    def __init__(self, stream: CopyStream, source: PageView, target: PageView, fence: Any) -> None:
        self.stream = stream
        stream.wait(fence)
        self.start = stream.record()
        stream.copy(source, target)
        self.end = stream.record()

    @property
    def done(self) -> bool:
        """Raises CopyFailed where the stream broke."""
        return self.stream.query(self.end)

    def seconds(self, after: float) -> float:
        return self.stream.elapsed(self.start, self.end)

    def abandon(self) -> bool:
        """It can't be stopped."""
        return False


@dataclass(eq=False)
class DiskJob:
    """One batch of a ticket, between `memory` and the disk's pages `stored`.

    Its worker holds the lock whenever it touches memory.
    """

    places: slice  # of the batch in the ticket
    memory: PageView
    stored: PageIds
    records: Callable[[], Sequence[Record]] | None  # None: a read
    generation: int
    fence: Any
    ok: Mask | bool = False  # arrived
    bad: Mask | bool = False  # not what was stored
    started_at: float = math.inf
    finished_at: float = 0.0
    failure: BaseException | None = None
    ended: bool = False
    abandoned: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def done(self) -> bool:
        """Raises what its worker met with."""
        if self.failure is not None:
            raise self.failure
        return self.ended

    @property
    def keeps_slots(self) -> bool:
        """Whether it may reach its slots until it is done, whenever the disk wakes up."""
        return self.records is not None and self.started_at < math.inf

    def seconds(self, after: float) -> float:
        """How long it took, not counting the time before `after`."""
        return self.finished_at - max(self.started_at, after)

    def abandon(self) -> bool:
        """Stop it from touching memory; False while it is doing so (ask again soon)."""
        if self.lock.acquire(blocking=False):
            self.abandoned = True
            self.lock.release()
        return self.abandoned


@dataclass(eq=False)
class Ticket:
    """Pages on their way. Read `ok` and `bad` once `Mover.poll` has returned it."""

    source: Tier
    source_pages: PageIds
    target: Tier
    target_pages: PageIds
    ok: Mask = field(init=False)
    bad: Mask = field(init=False)
    cancelled: bool = False
    settled: bool = False
    deadline: float = math.inf
    jobs: deque[StreamJob | DiskJob] = field(default_factory=deque)  # that are not done

    def __post_init__(self) -> None:
        self.ok = np.zeros(len(self.source_pages), np.bool_)
        self.bad = np.zeros(len(self.source_pages), np.bool_)

    @property
    def nbytes(self) -> int:
        return len(self.source_pages) * self.source.page_bytes

    def begin(self) -> None:
        """Hold the pages. Raises InvariantError where one is in the wrong state."""
        self.source.require(self.source_pages, PageState.READY)
        self.target.require(self.target_pages, PageState.LOADING)
        self.source.add_readers(self.source_pages)
        self.target.add_readers(self.target_pages)

    def settle(self) -> None:
        """Publish what is `ok`, let go of all that no job may touch any more."""
        self.settled = True
        if self.cancelled:
            self.target.free(self.target_pages)
        else:
            self.target.publish(self.target_pages[self.ok])
        self.source.drop_readers(self.source_pages)
        is_over = np.ones(len(self.target_pages), np.bool_)
        for job in self.jobs:
            is_over[job.places] = not job.keeps_slots
        self.target.drop_readers(self.target_pages[is_over])


class Lane:
    """What one tier sends another, on a copy stream or, where there is none, by the disk's workers.

    Lanes of one stream, or of none, queue up behind those of lower `rank` and of their own.
    """

    def __init__(self, stream: CopyStream | None = None, rank: int = READ) -> None:
        self.stream = stream
        self.rank = rank
        self.tickets: list[Ticket] = []
        self.queued_bytes = 0
        self._last_end = -math.inf
        self.forget()

    def poll(self, now: float) -> list[Ticket]:
        """Tickets that ended since the last call."""
        waiting = [ticket for ticket in self.tickets if not ticket.settled]
        self.tickets = [ticket for ticket in self.tickets if not self.is_over(ticket, now)]
        return [ticket for ticket in waiting if ticket.settled and not ticket.cancelled]

    def is_over(self, ticket: Ticket, now: float) -> bool:
        """Bring a ticket up to date; whether nothing of it is under way any more."""
        is_late = ticket.cancelled or now >= ticket.deadline
        jobs = ticket.jobs  # of hundreds, one that is not done is enough for now
        for _ in range(len(jobs)):
            job = jobs.popleft()
            if job.done:
                self._take_in(job, ticket)
            else:
                jobs.append(job)
                if not is_late:
                    break
        if not ticket.settled and (not jobs or (is_late and all(job.abandon() for job in jobs))):
            ticket.settle()  # with what its jobs did; those that are left are abandoned
            self.queued_bytes -= ticket.nbytes
            self._seconds *= RATE_MEMORY
            self._nbytes *= RATE_MEMORY
        return not jobs

    def _take_in(self, job: StreamJob | DiskJob, ticket: Ticket) -> None:
        pages = ticket.target_pages[job.places]
        if ticket.settled:
            if job.keeps_slots:
                ticket.target.drop_readers(pages)
            return
        ticket.ok[job.places], ticket.bad[job.places] = job.ok, job.bad
        if np.all(job.ok):
            self._seconds += max(0.0, job.seconds(self._last_end))
            self._nbytes += len(pages) * ticket.target.page_bytes
        self._last_end = max(self._last_end, job.finished_at)

    def seconds(self, nbytes: int) -> float:
        """What so many bytes take, of what is measured: the last and the largest weigh most."""
        return nbytes * self._seconds / self._nbytes

    def forget(self) -> None:
        """Begin to measure anew."""
        self._nbytes, self._seconds = 1.0, FIRST_GUESS_S_PER_BYTE
