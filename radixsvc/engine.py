"""The engine: one thread that owns device, cache and scheduler.

    submit, cancel, call --inbox--> | take in -> poll copies -> schedule -> launch -> retire |
                                      one step, again and again, on the engine thread

To retire a step is to wait for the tokens it sampled, publish what it computed, emit. With
`overlap` step k + 1 is launched before step k retires, so the device has work while the host
does its own. What is decided then may turn out too much: a request whose step k samples its last
token has one in step k + 1 for nothing. Its pages are let go when that step retires.

Everything else reaches the device and the tree through the inbox. A request's own fault ends
that request; broken ownership of pages ends the engine (`failed`), and nothing is served on it.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from radixsvc.cache import PrefixCache
from radixsvc.completion import FinishReason, Sources
from radixsvc.errors import ContextLengthExceeded, Draining, EngineFailed, QueueFull
from radixsvc.model import Model
from radixsvc.outcome import Outcomes
from radixsvc.request import Request, State
from radixsvc.runner import Launched, NewTokens, Runner, is_out_of_memory, is_sticky
from radixsvc.sampler import SamplerState
from radixsvc.scheduler import ChunkSizer, Scheduled, Scheduler, SchedulerConfig
from tiers.device import DeviceTier
from tiers.page import InvariantError

T = TypeVar("T")
log = logging.getLogger("radixsvc.engine")

WARM_UP_NAMESPACE = "\x00warm-up"


@dataclass(frozen=True)
class EngineConfig:
    """`stream_deadline` is how long a client may leave its stream full, `stall_deadline` how long
    requests may wait for pages that nobody gives back; seconds."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    overlap: bool | None = None  # None: where the device works beside the host
    cuda_graphs: bool = True
    stream_deadline: float = 30.0
    stall_deadline: float = 30.0
    idle_check_seconds: float = 5.0


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Token counts are of prompts admitted since the start, by their source."""

    waiting: int
    running: int
    steps: int
    sources: Sources
    recomputed_tokens: int
    generated_tokens: int
    preemptions: int
    finished: dict[str, int]  # requests by reason
    step_seconds: float  # of the last step
    seconds_per_token: float  # of prefill, running mean
    pages: dict[str, int]  # of the device, by state


class Engine:
    """Runs requests on `model`, whose keys and values live in `device` under `cache`."""

    def __init__(
        self, model: Model, device: DeviceTier, cache: PrefixCache, config: EngineConfig
    ) -> None:
        self.model = model
        self.device = device
        self.cache = cache
        self.config = config
        self.scheduler = Scheduler(cache, config.scheduler)
        self.outcomes = Outcomes(self.scheduler)
        self.sizer = ChunkSizer(config.scheduler)
        self.runner = Runner(model, device)
        self.overlap = device.device.type == "cuda" if config.overlap is None else config.overlap
        self.ready = False
        self.failed: BaseException | None = None
        self.on_failure: Callable[[BaseException], object] = lambda error: None
        room = device.num_pages * cache.page_size
        self.max_request_tokens = min(model.info.max_context, room)
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._inbox: deque[Callable[[], None]] = deque()
        self._wakeup = threading.Event()
        self._draining = False
        self._stopping = False
        self._save_until = 0.0
        self._last_progress = time.monotonic()
        self._in_flight: Launched | None = None
        self._retired_at = 0.0
        self._steps = 0
        self._checked_at = -1
        self._step_seconds = 0.0

    # -- any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises Draining, QueueFull or ContextLengthExceeded at once."""
        if self._draining:
            raise Draining("the service is shutting down; send the request to another instance")
        if self.failed is not None:
            raise EngineFailed("the engine has failed and the service is ending")
        limit = self.config.scheduler.max_waiting
        if len(self.outcomes.open) >= limit + self.config.scheduler.max_running:
            raise QueueFull(f"{limit} requests are waiting already")
        if len(request.tokens) == 0:
            raise ContextLengthExceeded("the prompt is empty: at least one token is needed")
        total = len(request.tokens) + request.params.max_tokens
        if total > self.max_request_tokens:
            raise ContextLengthExceeded(
                f"{len(request.tokens)} prompt tokens and max_tokens {request.params.max_tokens} "
                f"make {total}; this service holds {self.max_request_tokens}. Shorten the prompt "
                "or lower max_tokens."
            )
        request.sampler = SamplerState(request.params, request.tokens)
        self.outcomes.add(request)
        self._post(lambda: self.scheduler.add(request))

    def cancel(self, request_id: str) -> None:
        """End a request early; its pages are let go within a step. Unknown ids are ignored."""

        def cancel() -> None:
            request = self.outcomes.open.get(request_id)
            if request is not None:
                self.outcomes.finish(request, FinishReason.CANCELLED)

        self._post(cancel)

    def call(self, fn: Callable[[PrefixCache], T]) -> Future[T]:
        """Run `fn(cache)` on the engine thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(self.cache))
            except BaseException as error:
                future.set_exception(error)
                if isinstance(error, InvariantError):
                    raise

        self._post(run)
        return future

    def drain(self, deadline: float) -> None:
        """Take nothing new, let what runs finish within `deadline` seconds, then stop. Blocks."""
        self._draining = True
        end = time.monotonic() + deadline
        while self.outcomes.open and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.02)
        self._save_until = end
        self._stopping = True
        self._wakeup.set()
        self._thread.join()

    def progress(self) -> tuple[bool, float]:
        """Whether there is anything to do, and the seconds since the last step ended."""
        busy = bool(self.outcomes.open or self._inbox or self._in_flight) or not self.ready
        return busy, time.monotonic() - self._last_progress

    def stats(self) -> EngineStats:
        outcomes = self.outcomes
        return EngineStats(
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            steps=self._steps,
            sources=outcomes.sources,
            recomputed_tokens=outcomes.num_recomputed,
            generated_tokens=outcomes.num_generated,
            preemptions=self.scheduler.num_preemptions,
            finished=dict(outcomes.finished),
            step_seconds=self._step_seconds,
            seconds_per_token=self.sizer.seconds_per_token,
            pages=self.device.count(),
        )

    # -- the engine thread --------------------------------------------------------------------

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._wakeup.set()

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                if self.device.device.type == "cuda":
                    torch.cuda.set_device(self.device.device)
                self._warm_up()
                while not self._stopping:
                    self.take_in()
                    if self.scheduler.has_work or self._in_flight:
                        if not self.step():
                            self._wait(0.001)
                    else:
                        self._idle()
                self._retire()
                self.cache.save(self._save_until - time.monotonic())
        except BaseException as error:
            self.failed = error
            self._draining = True
            log.critical("engine failed: %s", error, exc_info=not isinstance(error, MemoryError))
            if isinstance(error, InvariantError):
                log.critical("the tree at that moment:\n%s", self.cache.format_tree())
            self.on_failure(error)
        reason = EngineFailed if self.failed else Draining
        self.outcomes.abandon(reason("the service ended before this request was finished"))

    def step(self) -> bool:
        """One round: schedule, launch, retire. False where nothing could run."""
        self.cache.poll()
        now = time.monotonic()
        self.outcomes.end_overdue(now, self.config.stream_deadline)
        stalled = now - self._last_progress > self.config.stall_deadline
        if stalled and self.outcomes.end_stalled():
            self._last_progress = now
        scheduled = self._schedule()
        if self._in_flight and (self.scheduler.waits_for_step or not scheduled):
            self._retire()
            scheduled = self._schedule()
        if scheduled:
            self._run(scheduled)
        self.outcomes.wake_readers()
        return bool(scheduled)

    def _schedule(self) -> list[Scheduled]:
        config = self.config.scheduler
        alone, shared = map(self.sizer.chunk, (config.prefill_seconds, config.step_seconds))
        return self.scheduler.schedule(alone, shared)

    def take_in(self) -> None:
        """Do what other threads asked for since the last step."""
        while self._inbox:
            self._inbox.popleft()()

    def _wait(self, seconds: float) -> bool:
        """Sleep until there is something in the inbox; False where the time passed instead."""
        woken = self._wakeup.wait(seconds)
        self._wakeup.clear()
        return woken

    def _idle(self) -> None:
        """Nothing to do. After a while of that, check ownership and tidy up for the collector.

        Not at once: it takes longer than a short request, and the next one may be on its way.
        """
        self.outcomes.wake_readers()
        self._last_progress = time.monotonic()
        self.cache.poll()
        if self._inbox or self._stopping:
            return
        if self.cache.is_moving:
            self._wait(0.005)
        elif not self._wait(self.config.idle_check_seconds) and self._checked_at != self._steps:
            self.cache.check()
            gc.collect()
            gc.freeze()
            self._checked_at = self._steps

    def _warm_up(self) -> None:
        """Real forward passes, for readiness and for a first estimate of the speed."""
        num_tokens = min(128, self.max_request_tokens - 1)
        tokens = (np.arange(num_tokens) % self.model.info.vocab_size).astype(np.int32)
        with self.cache.acquire(WARM_UP_NAMESPACE, tokens) as lease:
            lease.extend(num_tokens)
            for n in (1, 1, 1, num_tokens, num_tokens, num_tokens):
                started = time.perf_counter()
                new = [NewTokens(tokens[:n], 0, lease.page_table)]
                self.runner.forward(new, [True]).argmax().item()  # waits for it
                self.sizer.record(n if n > 1 else 0, 1, time.perf_counter() - started)
        if self.config.cuda_graphs and self.device.device.type == "cuda":
            self.runner.capture(self.config.scheduler.max_running, self.max_request_tokens)
        self.cache.residency.seconds_per_token = self.sizer.seconds_per_token
        self._last_progress = time.monotonic()
        self.ready = True

    def _run(self, scheduled: list[Scheduled]) -> None:
        """Launch a step, then retire the one before it; or this one, if nothing may overlap."""
        try:
            launched = self.runner.launch(scheduled, self._in_flight)
        except InvariantError:
            raise
        except Exception as error:
            self._retire()
            self._run_apart(scheduled, error)
            return
        self._retire()
        self._in_flight = launched
        if not self.overlap or launched.logits is not None:
            self._retire()

    def _run_apart(self, scheduled: list[Scheduled], error: Exception) -> None:
        """A step failed: find whose fault it was by running its requests one by one.

        Running again is safe: it writes the same keys and values to the same private pages.
        Out of memory first asks for smaller chunks.
        """
        if is_sticky(error):
            raise error
        log.warning("a step of %d requests failed: %s", len(scheduled), type(error).__name__)
        if is_out_of_memory(error) and self.sizer.shrink():
            return
        if len(scheduled) > 1:
            for one in scheduled:
                if one.request.state is not State.FINISHED:
                    self._run([one])
            return
        log.error("request %s failed", scheduled[0].request.id, exc_info=error)
        self.outcomes.fail(
            scheduled[0].request,
            EngineFailed(
                "out of memory while computing this request; shorten it or retry later"
                if is_out_of_memory(error)
                else f"computing this request failed ({type(error).__name__}); it was ended"
            ),
        )

    def _retire(self) -> None:
        """Take the tokens of the step in flight: publish what it computed, emit, let go."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        sampled = iter(step.fetch())
        for request, end, prefills, samples in step.work:
            token = next(sampled) if samples else None
            request.retired()
            if request.state is State.FINISHED:
                if request.in_flight == 0:
                    self.scheduler.release(request)
                continue
            assert request.lease is not None
            if prefills:
                request.lease.commit(end)
            if token is not None:
                self.outcomes.emit(request, token)
            elif samples:
                self.outcomes.fail(request, EngineFailed("sampling failed; the request was ended"))
        now = time.perf_counter()
        self._step_seconds = now - max(step.started, self._retired_at)
        self._retired_at = now
        num_decode = sum(not work.prefills for work in step.work)
        self.sizer.record(step.num_prefill, num_decode, self._step_seconds)
        self.cache.residency.seconds_per_token = self.sizer.seconds_per_token
        self._steps += 1
        self._last_progress = time.monotonic()
