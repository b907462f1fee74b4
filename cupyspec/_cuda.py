"""CUDA memory and order through CuPy: wrap device memory, follow a stream, keep inputs alive while kernels read them.

Imported at the first CUDA array, never before.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import deque
from contextlib import ExitStack
from typing import Any

import numpy as np

from cupyspec._call import Array

try:
    import cupy
    from cupy_backends.cuda.api import driver, runtime
except (
    ImportError
):  # tools that import every module (doctest collectors) may do so without CuPy; nothing is called then
    cupy = driver = runtime = None

_NUMPY_NAMES = {"bfloat16": "uint16"}  # CuPy has bfloat16 only where ml_dtypes is: its bits serve as well


class _RawStream:
    """A stream of another library, by its handle."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@functools.cache
def _stream_of(ordinal: int, handle: int) -> Any:
    """CuPy's wrapper of a stream on the current device, `ordinal`: it owns nothing, so it may outlive the stream."""
    return cupy.cuda.Stream.from_external(_RawStream(handle))


class Guard(ExitStack):
    """Makes a device, and a stream of another library on it, CuPy's current ones; restores both."""

    def __init__(self, ordinal: int, stream_handle: int | None) -> None:
        super().__init__()
        self._ordinal, self._stream_handle = ordinal, stream_handle

    def __enter__(self) -> Guard:
        super().__enter__()
        self.enter_context(cupy.cuda.Device(self._ordinal))
        if self._stream_handle is not None:
            try:
                self.enter_context(_stream_of(self._ordinal, self._stream_handle))
            except BaseException:
                self.close()  # a failed enter is followed by no exit
                raise
        return self


def is_capturing() -> bool:
    """Whether CuPy's current stream records a CUDA graph."""
    return bool(cupy.cuda.get_current_stream().is_capturing())


def device_count() -> int:
    """CUDA devices that can be used; 0 without a driver."""
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0


def current_device() -> int:
    """The current device, PyTorch's and CuPy's alike."""
    return int(runtime.getDevice())


def context() -> int:
    """The driver's current context, 0 if there is none. A device has one for all libraries."""
    return driver.ctxGetCurrent()


def stream_is_capturing(handle: int) -> bool:
    """Whether a stream of the current device records a CUDA graph."""
    return bool(runtime.streamIsCapturing(handle))


def own(shape: tuple[int, ...], dtype: str) -> Any:
    """Uninitialised memory on the current device that belongs to no pool: freed when nothing is running."""
    values = np.dtype(dtype)
    size = max(1, math.prod(shape) * values.itemsize)
    return cupy.ndarray(shape, values, cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0))


def describe(values: Any, dtype: str, owner: Any) -> Array:
    """A CuPy array as the call's own description."""
    strides = tuple(stride // values.itemsize for stride in values.strides)
    return Array(values.data.ptr, values.shape, strides, dtype, None, (owner, values))


def wrap(array: Array) -> Any:
    """A described device array as a CuPy array of the same memory (bfloat16 as uint16 bits)."""
    dtype = np.dtype(_NUMPY_NAMES.get(array.dtype, array.dtype))
    reach = 1 + sum(stride * (size - 1) for stride, size in zip(array.strides, array.shape, strict=True) if size)
    memory = cupy.cuda.UnownedMemory(array.pointer, reach * dtype.itemsize, array.owner)
    strides = tuple(stride * dtype.itemsize for stride in array.strides)
    return cupy.ndarray(array.shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def has_unit_stride(array: Array) -> bool:
    """Whether the last axis is contiguous."""
    return not array.shape or array.shape[-1] <= 1 or array.strides[-1] == 1 or 0 in array.shape


def with_unit_stride(name: str, array: Array) -> Array:
    """The array itself if its last axis is contiguous, else a copy: kernels read rows by wide loads."""
    if has_unit_stride(array):
        return array
    if is_capturing():
        raise ValueError(
            f"{name} must have a contiguous last axis in a CUDA graph, got strides {array.strides}: its copy would "
            "be made once, not at every replay's address"
        )
    copy = cupy.ascontiguousarray(wrap(array))
    return describe(copy, array.dtype, array.owner)


def to_host(array: Array) -> Any:
    """A device array's values in NumPy; waits for them."""
    return cupy.asnumpy(wrap(array))


_lock = threading.Lock()
_in_flight: dict[tuple[int, int], deque[tuple[Any, Any]]] = {}  # by device and stream
_captured: list[Any] = []


def keep_until_done(owners: Any) -> None:
    """Hold references until the work enqueued so far on the current stream is done.

    For libraries whose allocator does not know the stream the kernels run on: they may reuse memory once it is dropped.
    What a stream's last call used is let go by its next one.
    """
    stream = cupy.cuda.get_current_stream()
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    with _lock:
        waiting = _in_flight.setdefault((cupy.cuda.Device().id, stream.ptr), deque())
        while waiting and waiting[0][0].done:
            waiting.popleft()
        waiting.append((event, owners))


def keep_for_replays(owners: Any) -> None:
    """Hold references for good: a CUDA graph writes to this memory at every replay, and CuPy's pool would reuse it."""
    with _lock:
        _captured.append(owners)
