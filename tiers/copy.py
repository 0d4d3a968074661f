"""Moving pages between memory tiers, in order, beside the computation.

A copy stream runs what it is given in order, on its own. Events are the edges between it and the
rest: `record` marks what was enqueued so far, `wait` holds later copies back until another
stream's mark is reached, `query` asks. An edge is needed both ways:

    compute writes a page  --fence-->  copy out of it        (stream.wait(compute_fence()))
    copy into a page       --query-->  compute reads it      (published only once query says so)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch

from tiers import _kernels
from tiers.base import Bytes2D, Checksums, PageView


class CopyFailed(RuntimeError):
    """A copy stream broke. What it moved is unknown, so nothing may be served on it."""


class CopyStream(Protocol):
    """Enqueueing never blocks and is allowed from any thread."""

    def copy(self, source: PageView, target: PageView) -> None:
        """Copy page i of `source` onto page i of `target`, after all that was enqueued before."""

    def record(self) -> Any:
        """An event that is reached when everything enqueued so far is done."""

    def wait(self, event: Any) -> None:
        """Hold what is enqueued from now on until `event`, of any stream, is reached."""

    def query(self, event: Any) -> bool:
        """Whether one of this stream's events is reached. Raises CopyFailed on a broken stream."""

    def synchronize(self, event: Any) -> None:
        """Block the calling thread until `query(event)`."""

    def copy_now(self, source: PageView, target: PageView, after: Any) -> Checksums:
        """Copy once the event `after` is reached, and block until it is done: each page's CRC32C.

        Not ordered with what is enqueued. One side is host memory.
        """

    def elapsed(self, start: Any, end: Any) -> float:
        """Seconds between two reached events of this stream."""

    def calibrate(self, source: PageView, target: PageView) -> None:
        """Learn, on pages nobody uses, which way of copying such pages is the quicker one."""

    def close(self) -> None: ...


def copy_pages(source: PageView, target: PageView) -> None:
    """Copy in host memory, on the calling thread. The GIL is released."""
    _copy_on_cpu([source, target], None)


def checksums(source: PageView, target: PageView | None = None) -> Checksums:
    """CRC32C of each page in host memory, copied to `target` on the way. The GIL is released."""
    crcs = np.empty(len(source.pages), np.uint32)
    _copy_on_cpu([source] if target is None else [source, target], crcs)
    return crcs


def row_checksums(rows: Bytes2D) -> Checksums:
    """CRC32C of each row of [n, nbytes]; a row's bytes lie together."""
    ids = np.arange(len(rows), dtype=np.int32)
    return checksums(PageView(rows.ctypes.data, rows.strides[0], rows.shape[1], ids))


def _copy_on_cpu(views: Sequence[PageView], crcs: Checksums | None) -> None:
    ids = [np.ascontiguousarray(view.pages) for view in views]
    ends = [(v.base, v.stride, p.ctypes.data) for v, p in zip(views, ids, strict=True)]
    to = ends[1] if len(ends) > 1 else (0, 0, 0)
    sums = 0 if crcs is None else crcs.ctypes.data
    _kernels.copy_pages(*ends[0], *to, len(ids[0]), views[0].nbytes, sums)


def _check_pair(source: PageView, target: PageView) -> None:
    """ValueError for a copy whose result would depend on the order in which pages are copied."""
    if source.nbytes != target.nbytes or len(source.pages) != len(target.pages):
        raise ValueError("source and target differ in page bytes or in number of pages")
    if source.base == target.base and np.isin(source.pages, target.pages).any():
        raise ValueError("a page is both read and written")


class Event:
    """Reached once the stream's thread has come to it (and, on CUDA, the device too)."""

    __slots__ = ("cuda", "reached", "time")

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.time = 0.0
        self.cuda: Any = None


class CpuStream:
    """Copies on a thread of its own, the GIL released, one run after the other."""

    def __init__(self, name: str = "copy") -> None:
        self._ops: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"radixsvc-{name}", daemon=True)
        self._thread.start()

    def copy(self, source: PageView, target: PageView) -> None:
        _check_pair(source, target)
        self._ops.put(lambda: self._copy(source, target))

    def record(self) -> Event:
        event = Event()
        self._ops.put(lambda: self._reach(event))
        return event

    def wait(self, event: Event) -> None:
        self._ops.put(event.reached.wait)

    def query(self, event: Event) -> bool:
        if self._failure is not None:
            raise CopyFailed(f"the copy stream broke: {self._failure}") from self._failure
        return event.reached.is_set()

    def synchronize(self, event: Event) -> None:
        while not CpuStream.query(self, event):
            event.reached.wait(0.1)

    def copy_now(self, source: PageView, target: PageView, after: Event) -> Checksums:
        _check_pair(source, target)
        after.reached.wait()
        return checksums(source, target)  # the caller's thread is as good as the stream's

    def elapsed(self, start: Event, end: Event) -> float:
        return end.time - start.time

    def calibrate(self, source: PageView, target: PageView) -> None:
        """There is one way."""

    def close(self) -> None:
        self._ops.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (op := self._ops.get()) is not None:
                op()
        except BaseException as failure:
            self._failure = failure

    def _copy(self, source: PageView, target: PageView) -> None:
        copy_pages(source, target)

    def _reach(self, event: Event) -> None:
        event.time = time.perf_counter()
        event.reached.set()


def compute_fence(device: torch.device) -> Callable[[], Any]:
    """A function that marks what the calling thread has enqueued on its current torch stream.

    On a CPU the computation is done when its call returns, so the mark is reached at once.
    """
    if device.type != "cuda":
        reached = Event()
        reached.reached.set()
        return lambda: reached
    from cuda.core import LEGACY_DEFAULT_STREAM, Stream

    def fence() -> Event:
        handle = torch.cuda.current_stream(device).cuda_stream
        stream = Stream.from_handle(handle) if handle else LEGACY_DEFAULT_STREAM
        event = Event()
        event.cuda = stream.record()
        event.reached.set()
        return event

    return fence
