"""What becomes of requests: their tokens go to their streams, and they end, counted, once each.

On the engine thread, `add` and looking at `open` apart.
"""

from __future__ import annotations

from collections import Counter

from radixsvc.completion import FinishReason, Sources, Usage
from radixsvc.errors import DeadlineExceeded, EngineFailed, ServiceError, SlowReader
from radixsvc.request import Request
from radixsvc.sampler import Sampled
from radixsvc.scheduler import Scheduler
from radixsvc.stream import Finished, TokenStream, wake_all


class Outcomes:
    """Of all requests that were submitted, `open` by their id until they end."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.open: dict[str, Request] = {}
        self.finished: Counter[str] = Counter()  # by reason
        self.sources = Sources(0, 0, 0, 0)  # of the prompts whose first prefill ended
        self.num_generated = 0
        self.num_recomputed = 0
        self._touched: dict[TokenStream, None] = {}

    def add(self, request: Request) -> None:
        self.open[request.id] = request

    def emit(self, request: Request, sampled: Sampled) -> None:
        """The next token of a request, which may be its last."""
        if not request.output:
            assert request.sources is not None
            self.sources += request.sources
        token, params = sampled.token, request.params
        request.output.append(token)
        self.num_generated += 1
        if token in params.stop_token_ids or (
            token in request.eos_token_ids and not params.ignore_eos
        ):
            self.finish(request, FinishReason.STOP)
            return
        request.stream.put(token, sampled.logprob)
        self._touched[request.stream] = None
        if len(request.output) >= params.max_tokens:
            self.finish(request, FinishReason.LENGTH)
            return
        assert request.lease is not None
        request.lease.append([token])

    def finish(self, request: Request, reason: FinishReason) -> None:
        usage = Usage(
            prompt_tokens=len(request.tokens),
            completion_tokens=len(request.output),
            sources=request.sources or Sources(0, 0, 0, len(request.tokens)),
            recomputed=request.num_recomputed,
        )
        self._end(request, Finished(reason, usage), reason)

    def fail(self, request: Request, error: ServiceError) -> None:
        request.num_computed = 0  # what was not committed yet is not to be trusted
        self._end(request, error, FinishReason.ERROR)

    def _end(self, request: Request, end: Finished | ServiceError, reason: FinishReason) -> None:
        if self.open.pop(request.id, None) is None:
            return
        self.finished[reason.value] += 1
        self.num_recomputed += request.num_recomputed
        self.scheduler.remove(request)
        request.stream.close(end)
        self._touched[request.stream] = None

    def end_overdue(self, now: float, stream_deadline: float) -> None:
        """Those past their deadline, and those not read for `stream_deadline` seconds."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            stream = request.stream
            if request.deadline is not None and now > request.deadline:
                self.fail(request, DeadlineExceeded("the request's deadline passed"))
            elif stream.full and now - (stream.unread_since or now) > stream_deadline:
                self.fail(request, SlowReader("the stream was not read in time"))

    def end_stalled(self) -> bool:
        """The youngest; False where a reader is what the others wait for."""
        running = self.scheduler.running
        if not running or any(request.stream.full for request in running):
            return False
        self.fail(running[-1], EngineFailed("no pages came free for this request; retry"))
        return True

    def abandon(self, error: ServiceError) -> None:
        """The engine has ended: so do all streams."""
        for request in list(self.open.values()):
            request.stream.close(error)
            self._touched[request.stream] = None
        self.wake_readers()

    def wake_readers(self) -> None:
        """Of all streams that got something."""
        if self._touched:
            wake_all(self._touched)
            self._touched.clear()
