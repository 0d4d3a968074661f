"""Which requests run in the next step, and how many tokens of each.

    waiting --admit--> running: promoting -> prefilling -> decoding --finish-->
       ^__________________preempt_____________________|

The scheduler decides and never computes. Every decoding request gets one token a step, so
prefill never starves it; what the step's time leaves goes to prefill, oldest admission first.
A step for one prompt alone may be long, one that others share is short: whoever's prompt is done
first has its token then, not when all have.
Waiting requests are admitted by longest cached prefix. One that others were let in before
`aging_rounds` times goes first, in order of arrival, and nobody overtakes it for want of pages
any more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from radixsvc.cache import PrefixCache
from radixsvc.completion import Sources
from radixsvc.request import Request, State
from tiers.page import OutOfPages


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of what runs at once. Times are seconds, sizes tokens.

    A step may take `step_seconds`, and `prefill_seconds` where it holds one prompt and nothing
    else: each pass reads all weights, so a prompt in few large chunks is done sooner.
    """

    max_running: int = 64
    max_waiting: int = 1024
    step_seconds: float = 0.25
    prefill_seconds: float = 0.8
    min_chunk: int = 32
    max_chunk: int = 8192
    aging_rounds: int = 64
    num_considered: int = 64  # waiting requests looked at in a step, oldest first
    preemptions_a_step: int = 4
    share_running_prefixes: bool = True


class Scheduled(NamedTuple):
    """`num_tokens` more tokens of `request` run in this step, from `request.num_computed` on."""

    request: Request
    num_tokens: int


class Scheduler:
    """Owns the queue of waiting requests and the list of running ones (in admission order)."""

    def __init__(self, cache: PrefixCache, config: SchedulerConfig) -> None:
        self.cache = cache
        self.config = config
        self.waiting: list[Request] = []  # in order of arrival; preempted ones in front
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.waits_for_step = False  # pages are short that a step under way holds
        self._preemptions_left = 0
        self._steps: list[Scheduled] = []  # of the step being scheduled
        self._budget = 0  # tokens of prefill that it has room for
        self._shared = 0  # the same where it holds more than one prompt

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self, alone: int, shared: int) -> list[Scheduled]:
        """The next step's work: all that decodes, and tokens of prefill, at most `alone` of one
        prompt by itself and `shared` beside anything else.

        Pages for it are held when this returns. An empty list means that everything waits for
        copies, for readers, for pages or for the tokens of a step under way.
        """
        self._preemptions_left = self.config.preemptions_a_step
        self.waits_for_step = False
        self._steps = []
        for request in list(self.running):
            if request.state is State.PROMOTING:
                self._start_when_loaded(request)
            if request.can_decode and self._hold(request, 1):
                self._steps.append(Scheduled(request, 1))
        decoding = any(request.state is State.DECODING for request in self.running)
        self._budget, self._shared = shared if decoding else alone, shared
        for request in list(self.running):
            if request.state is State.PREFILLING:
                self._prefill(request)
        self._steps = [s for s in self._steps if s.request.lease is not None]  # not preempted
        if self._budget > 0 and self.waiting:
            self._admit()
        return self._steps

    def remove(self, request: Request) -> None:
        """Take a request out in any state; its pages go when no step under way uses them."""
        (self.waiting if request.state is State.WAITING else self.running).remove(request)
        request.state = State.FINISHED
        if request.in_flight == 0:
            self.release(request)

    def release(self, request: Request) -> None:
        """Let go of a request's pages, if it has any; what is computed stays in the tree."""
        lease = request.lease
        if lease is not None:
            if request.num_computed:
                lease.commit(min(request.num_computed, len(lease.tokens)))
            lease.release()
            request.lease = None

    def preempt(self, request: Request) -> None:
        """Back to the front of the queue. What it computed stays in the tree for its return."""
        self.release(request)
        request.most_computed = max(request.most_computed, request.num_computed)
        request.num_computed = 0
        request.num_preemptions += 1
        request.state = State.WAITING
        self.num_preemptions += 1
        self.running.remove(request)
        self.waiting.insert(0, request)

    def _start_when_loaded(self, request: Request) -> None:
        lease = request.lease
        assert lease is not None
        if not lease.poll():
            return
        request.state = State.PREFILLING
        request.num_computed = lease.cached_len
        if request.sources is None:
            found = lease.sources
            request.sources = Sources(
                found.device, found.host, found.disk, len(request.tokens) - lease.cached_len
            )
        request.num_recomputed += max(0, request.most_computed - lease.cached_len)

    def _prefill(self, request: Request) -> None:
        """Schedule as much of a prompt as there is room for."""
        num_tokens = request.num_uncomputed
        if num_tokens > self._budget:
            # A chunk ends on a page's end, so that what is committed are whole pages.
            end = request.num_computed + self._budget
            num_tokens = self._budget - end % self.cache.page_size
        if num_tokens > 0 and self._hold(request, num_tokens):
            self._steps.append(Scheduled(request, num_tokens))
            self._budget = self._shared = min(self._budget, self._shared) - num_tokens

    def _hold(self, request: Request, num_tokens: int) -> bool:
        """Pages for `num_tokens` more, at the expense of younger requests if there is no other way.

        False where the request has to sit this step out, or was itself the youngest and went.
        """
        while request.lease is not None:
            try:
                request.lease.extend(request.num_computed + num_tokens)
                return True
            except OutOfPages:
                youngest = self.running[-1]
                if self._preemptions_left == 0 or self.running[0] is youngest:
                    return False
                if youngest.in_flight:
                    self.waits_for_step = True
                    return False
            self._preemptions_left -= 1
            self.preempt(youngest)
        return False

    def _admit(self) -> None:
        """Let waiting requests in, while there are places, budget and pages."""
        config = self.config
        ranked = self._ranked()
        num_running = len(self.running)
        for request in ranked:
            if self._budget <= 0 or len(self.running) >= config.max_running:
                break
            if config.share_running_prefixes and self._gains_by_waiting(request):
                continue
            if not self._start(request):
                if request.rounds_waited >= config.aging_rounds or request.num_preemptions:
                    break  # it is next: the pages that come free are for it
                continue
            if request.state is State.PREFILLING:
                self._prefill(request)
        if len(self.running) > num_running:
            for request in ranked:
                request.rounds_waited += request.state is State.WAITING

    def _ranked(self) -> list[Request]:
        """Waiting requests in the order of admission: preempted, aged, longest cached prefix."""
        considered = self.waiting[: self.config.num_considered]
        if len(considered) == 1:
            return considered

        def rank(item: tuple[int, Request]) -> tuple[int, int, int]:
            place, request = item
            if request.num_preemptions:
                return (0, place, 0)
            if request.rounds_waited >= self.config.aging_rounds:
                return (1, place, 0)
            return (2, -self.cache.match(request.namespace, request.tokens).length, place)

        return [request for _, request in sorted(enumerate(considered), key=rank)]

    def _gains_by_waiting(self, request: Request) -> bool:
        """A running request will soon have computed at least a page of this one's prompt."""
        found = self.cache.match(request.namespace, request.tokens).length
        pending = self.cache.pending(request.namespace, request.tokens)
        return pending - found >= min(self.cache.page_size, max(1, len(request.tokens) - 1))

    def _start(self, request: Request) -> bool:
        """Acquire a lease if the request's prompt fits beside what running ones still need."""
        tokens = request.next_tokens if request.output else request.tokens
        cache, num_pages = self.cache, self.cache.num_pages_for(len(tokens) + 1)
        reserved = self._reserved()
        # Locking what is cached makes fewer pages available: what does not fit now never will.
        found = cache.match(request.namespace, tokens).length // cache.page_size
        if num_pages - found > cache.available - reserved and self.running:
            return False
        lease = cache.acquire(request.namespace, tokens)
        if num_pages - len(lease.page_table) > cache.available - reserved and self.running:
            lease.release()
            return False
        request.lease = lease
        request.state = State.PROMOTING
        self.waiting.remove(request)
        self.running.append(request)
        self._start_when_loaded(request)
        return True

    def _reserved(self) -> int:
        """Pages that admitted requests have still to take for their prompts, and one a decode."""
        total = 0
        for request in self.running:
            assert request.lease is not None
            missing = self.cache.num_pages_for(request.num_tokens + 1)
            total += max(0, missing - len(request.lease.page_table))
        return total


class ChunkSizer:
    """How many prefill tokens fit a step's time, from how long steps took.

    A step is taken to cost a base, which a decode step alone costs too (reading the weights),
    and so much for each token of prefill. Both are medians of recent steps: on a shared machine
    one slow step must not make the next chunks small, and so slower for each of their tokens.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.limit = config.max_chunk
        self.base_seconds = 0.0
        self.seconds_per_token = 0.0  # of prefill beyond the base; 0 until a step was recorded
        self._bases: deque[float] = deque(maxlen=15)
        self._rates: deque[float] = deque(maxlen=15)

    def chunk(self, seconds: float) -> int:
        """Prefill tokens for a step of so many seconds."""
        if self.seconds_per_token == 0.0:
            return min(self.limit, 8 * self.config.min_chunk)
        fits = int((seconds - self.base_seconds) / self.seconds_per_token)
        return max(self.config.min_chunk, min(fits, self.limit))

    def record(self, num_prefill: int, num_decode: int, seconds: float) -> None:
        """A step took `seconds` for so many tokens of prefill beside so many decoding requests."""
        if num_prefill == 0:
            self._bases.append(seconds)
            self.base_seconds = median(self._bases)
        elif num_prefill >= self.config.min_chunk:
            # A step can't cost less a token than a tenth of its time, whatever the base was.
            self._rates.append(max(seconds - self.base_seconds, 0.1 * seconds) / num_prefill)
            self.seconds_per_token = median(self._rates)

    def shrink(self) -> bool:
        """A step ran out of memory: halve the largest chunk. False where it is at the least."""
        if self.limit <= self.config.min_chunk:
            return False
        self.limit = max(self.config.min_chunk, self.limit // 2)
        return True
