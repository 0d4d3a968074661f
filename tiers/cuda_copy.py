"""Copies to and from a GPU, on a CUDA stream of their own, and the pinning of what they copy.

Pages that are neighbours on both sides are copied in one run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tiers import _kernels
from tiers.base import Checksums, PageView, Pinning
from tiers.copy import CopyFailed, CpuStream, Event, checksums

KERNEL_BLOCKS = 16  # enough to keep a bus busy, and few beside the computation

Int64s = npt.NDArray[np.int64]


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
        self._ops.put(self._device.set_current)  # of the thread

    def wait(self, event: Event) -> None:
        super().wait(event)
        self._ops.put(lambda: self._stream.wait(event.cuda))

    def query(self, event: Event) -> bool:
        return super().query(event) and bool(event.cuda.is_done)

    def synchronize(self, event: Event) -> None:
        super().synchronize(event)
        event.cuda.sync()

    def copy_now(self, source: PageView, target: PageView, after: Event) -> Checksums:
        if not source.on_gpu and not target.on_gpu:  # nothing the device's events would guard
            return super().copy_now(source, target, after)
        self.wait(after)
        self.copy(source, target)
        self.synchronize(self.record())
        return checksums(target if source.on_gpu else source)

    def elapsed(self, start: Event, end: Event) -> float:
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
        ends = [  # base, stride, page ids
            (source.base, source.stride, int(on_device)),
            (target.base, target.stride, int(on_device) + ids.nbytes // 2),
        ]
        size = len(source.pages), source.nbytes
        _kernels.copy_pages_cuda(*ends[0], *ends[1], *size, KERNEL_BLOCKS, self._handle)
        _check(runtime.cudaFreeAsync(on_device, self._handle))

    def _reach(self, event: Event) -> None:
        event.cuda = self._stream.record(options=self._event_options)
        event.reached.set()


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
