"""Moving pages between memory tiers, in order, beside the computation.

A copy stream runs what it is given in order, on its own. Events are the edges between it and the
rest: `record` marks what was enqueued so far, `wait` holds later copies back until another
stream's mark is reached, `query` asks. An edge is needed both ways:

    compute writes a page  --fence-->  copy out of it        (stream.wait(compute_fence()))
    copy into a page       --query-->  compute reads it      (published only once query says so)

Pages that are neighbours on both sides are copied in one run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tiers import _kernels
from tiers.base import Bytes2D, Checksums, PageView, Pinning

KERNEL_BLOCKS = 16  # enough to keep a bus busy, and few beside the computation

Int64s = npt.NDArray[np.int64]


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
    _copy_on_cpu(source, target, None)


def checksums(source: PageView, target: PageView | None = None) -> Checksums:
    """CRC32C of each page in host memory, copied to `target` on the way. The GIL is released."""
    crcs = np.empty(len(source.pages), np.uint32)
    _copy_on_cpu(source, target, crcs)
    return crcs


def row_checksums(rows: Bytes2D) -> Checksums:
    """CRC32C of each row of [n, nbytes]; a row's bytes lie together."""
    ids = np.arange(len(rows), dtype=np.int32)
    return checksums(PageView(rows.ctypes.data, rows.strides[0], rows.shape[1], ids))


def _copy_on_cpu(source: PageView, target: PageView | None, crcs: Checksums | None) -> None:
    from_ids = np.ascontiguousarray(source.pages)
    to_ids = from_ids if target is None else np.ascontiguousarray(target.pages)
    _kernels.copy_pages(
        source.base,
        source.stride,
        from_ids.ctypes.data,
        0 if target is None else target.base,
        0 if target is None else target.stride,
        to_ids.ctypes.data,
        len(from_ids),
        source.nbytes,
        0 if crcs is None else crcs.ctypes.data,
    )


def _check_pair(source: PageView, target: PageView) -> None:
    """ValueError for a copy whose result would depend on the order in which pages are copied."""
    if source.nbytes != target.nbytes or len(source.pages) != len(target.pages):
        raise ValueError("source and target differ in page bytes or in number of pages")
    if source.base == target.base and np.isin(source.pages, target.pages).any():
        raise ValueError("a page is both read and written")


class Runs(NamedTuple):
    """Copies of `sizes[i]` bytes from address `sources[i]` to `targets[i]`."""

    sources: Int64s
    targets: Int64s
    sizes: Int64s
    pinned: npt.NDArray[np.bool_]  # both sides can be reached by the copy engine at any time


def merge_runs(source: PageView, target: PageView) -> Runs:
    """The fewest copies that move the pages, none over the border of two registered pieces."""
    first = np.ones(len(source.pages), np.bool_)
    if source.stride == target.stride == source.nbytes:
        first[1:] = (np.diff(source.pages) != 1) | (np.diff(target.pages) != 1)
    pinned = np.ones(len(first), np.bool_)
    for view in (source, target):
        if view.pieces is not None:
            first[1:] |= np.diff(view.pieces) != 0
            pinned &= view.pieces >= 0
    starts = np.flatnonzero(first)
    lengths = np.diff(np.append(starts, len(first)))
    return Runs(
        source.base + source.pages[starts].astype(np.int64) * source.stride,
        target.base + target.pages[starts].astype(np.int64) * target.stride,
        lengths * source.nbytes,
        pinned[starts],
    )


class _Event:
    """Reached once the stream's thread has come to it (and, on CUDA, the device too)."""

    __slots__ = ("cuda", "reached", "time")

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.time = 0.0
        self.cuda: Any = None


class CpuStream:
    """Copies on a thread of its own, the GIL released, one run after the other."""

    def __init__(self, name: str = "copy") -> None:
        self._ops: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"radixsvc-{name}", daemon=True)
        self._thread.start()

    def copy(self, source: PageView, target: PageView) -> None:
        _check_pair(source, target)
        self._ops.put(lambda: self._copy(source, target))

    def record(self) -> _Event:
        event = _Event()
        self._ops.put(lambda: self._reach(event))
        return event

    def wait(self, event: _Event) -> None:
        self._ops.put(lambda: self._hold(event))

    def query(self, event: _Event) -> bool:
        return self._came_to(event)

    def synchronize(self, event: _Event) -> None:
        while not self._came_to(event):
            event.reached.wait(0.1)

    def copy_now(self, source: PageView, target: PageView, after: _Event) -> Checksums:
        _check_pair(source, target)
        after.reached.wait()
        return checksums(source, target)  # the caller's thread is as good as the stream's

    def elapsed(self, start: _Event, end: _Event) -> float:
        return end.time - start.time

    def calibrate(self, source: PageView, target: PageView) -> None:
        """There is one way."""

    def close(self) -> None:
        self._ops.put(None)
        self._thread.join()

    def _came_to(self, event: _Event) -> bool:
        if self._failure is not None:
            raise CopyFailed(f"the copy stream broke: {self._failure}") from self._failure
        return event.reached.is_set()

    def _run(self) -> None:
        try:
            self._enter()
            while (op := self._ops.get()) is not None:
                op()
        except BaseException as failure:
            self._failure = failure

    def _enter(self) -> None:
        """Make the thread ready."""

    def _copy(self, source: PageView, target: PageView) -> None:
        copy_pages(source, target)

    def _reach(self, event: _Event) -> None:
        event.time = time.perf_counter()
        event.reached.set()

    def _hold(self, event: _Event) -> None:
        event.reached.wait()


class CudaStream(CpuStream):
    """Copies on a CUDA stream of its own; the thread only issues them.

    Issuing apart from the engine's thread matters where pinning failed: a copy out of pageable
    memory blocks the thread that asks for it. Scattered pages below a size that `calibrate`
    measures go through a gather/scatter kernel, all else through the copy engine.
    """

    def __init__(self, device: torch.device, name: str = "copy") -> None:
        from cuda.core import Device, EventOptions

        self._device = Device(device.index or 0)
        self._event_options = EventOptions(timing_enabled=True, blocking_sync=True)
        self._device.set_current()
        self._stream = self._device.create_stream()
        self._handle = int(self._stream.handle)
        self._kernel_bytes = 0  # pages of at most so many bytes go through the kernel
        super().__init__(name)

    def query(self, event: _Event) -> bool:
        return self._came_to(event) and bool(event.cuda.is_done)

    def synchronize(self, event: _Event) -> None:
        super().synchronize(event)
        event.cuda.sync()

    def copy_now(self, source: PageView, target: PageView, after: _Event) -> Checksums:
        if not source.on_gpu and not target.on_gpu:  # nothing the device's events would guard
            return super().copy_now(source, target, after)
        self.wait(after)
        self.copy(source, target)
        self.synchronize(self.record())
        return checksums(target if source.on_gpu else source)

    def elapsed(self, start: _Event, end: _Event) -> float:
        return float(end.cuda - start.cuda) / 1e3

    def calibrate(self, source: PageView, target: PageView) -> None:
        """Time scattered pages both ways."""
        if not hasattr(_kernels, "copy_pages_cuda") or source.nbytes % 16:
            return
        source, target = (
            v._replace(pages=v.pages[::2], pieces=None if v.pieces is None else v.pieces[::2])
            for v in (source, target)
        )
        seconds = {}
        for kernel_bytes in (0, source.nbytes) * 2:  # the second round counts
            self._kernel_bytes = kernel_bytes
            start = self.record()
            self.copy(source, target)
            end = self.record()
            self.synchronize(end)
            seconds[kernel_bytes] = self.elapsed(start, end)
        self._kernel_bytes = min(seconds, key=lambda kernel_bytes: seconds[kernel_bytes])

    def close(self) -> None:
        super().close()
        self._stream.sync()
        self._stream.close()

    def _enter(self) -> None:
        self._device.set_current()

    def _copy(self, source: PageView, target: PageView) -> None:
        from cuda.bindings import runtime

        runs = merge_runs(source, target)
        is_scattered = 2 * len(runs.sizes) > len(source.pages)
        if source.nbytes <= self._kernel_bytes and is_scattered and runs.pinned.all():
            self._copy_by_kernel(source, target)
            return
        batch = runs.pinned & (len(runs.sizes) > 1)
        if batch.any():
            attributes = runtime.cudaMemcpyAttributes()
            # The default reads the source at any time, before the fence even: pages half written.
            attributes.srcAccessOrder = (
                runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
            )
            sources, targets, sizes = (a[batch].tolist() for a in runs[:3])
            _check(
                runtime.cudaMemcpyBatchAsync(
                    targets, sources, sizes, len(sizes), [attributes], [0], 1, self._handle
                )
            )
        sources, targets, sizes = (a[~batch].tolist() for a in runs[:3])
        for run in zip(targets, sources, sizes, strict=True):
            kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
            _check(runtime.cudaMemcpyAsync(*run, kind, self._handle))

    def _copy_by_kernel(self, source: PageView, target: PageView) -> None:
        from cuda.bindings import runtime

        ids = np.concatenate([source.pages, target.pages])
        error, on_device = runtime.cudaMallocAsync(ids.nbytes, self._handle)
        _check((error,))
        kind = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        _check(runtime.cudaMemcpyAsync(on_device, ids.ctypes.data, ids.nbytes, kind, self._handle))
        _kernels.copy_pages_cuda(
            source.base,
            source.stride,
            0,
            int(on_device),
            target.base,
            target.stride,
            0,
            int(on_device) + ids.nbytes // 2,
            len(source.pages),
            source.nbytes,
            KERNEL_BLOCKS,
            self._handle,
        )
        _check(runtime.cudaFreeAsync(on_device, self._handle))

    def _reach(self, event: _Event) -> None:
        event.cuda = self._stream.record(options=self._event_options)
        event.reached.set()

    def _hold(self, event: _Event) -> None:
        event.reached.wait()
        self._stream.wait(event.cuda)


def _check(result: tuple[Any, ...]) -> None:
    from cuda.bindings import runtime

    error = result[0]
    if error != runtime.cudaError_t.cudaSuccess:
        runtime.cudaGetLastError()  # a refused call must not be reported by the next one
        raise CopyFailed(f"CUDA: {error.name}")


def pinning_for(device: torch.device) -> Pinning | None:
    """How host memory is page-locked for the copies of `device`; None where there is no GPU."""
    if device.type != "cuda":
        return None
    from cuda.bindings import runtime

    def pin(address: int, nbytes: int) -> bool:
        torch.cuda.set_device(device)  # of this thread
        (error,) = runtime.cudaHostRegister(address, nbytes, runtime.cudaHostRegisterPortable)
        if error != runtime.cudaError_t.cudaSuccess:
            runtime.cudaGetLastError()  # or the next call is told of it
        return bool(error == runtime.cudaError_t.cudaSuccess)

    return Pinning(pin, lambda address: _check(runtime.cudaHostUnregister(address)))


def compute_fence(device: torch.device) -> Callable[[], Any]:
    """A function that marks what the calling thread has enqueued on its current torch stream.

    On a CPU the computation is done when its call returns, so the mark is reached at once.
    """
    if device.type != "cuda":
        reached = _Event()
        reached.reached.set()
        return lambda: reached
    from cuda.core import LEGACY_DEFAULT_STREAM, Stream

    def fence() -> _Event:
        handle = torch.cuda.current_stream(device).cuda_stream
        stream = Stream.from_handle(handle) if handle else LEGACY_DEFAULT_STREAM
        event = _Event()
        event.cuda = stream.record()
        event.reached.set()
        return event

    return fence
