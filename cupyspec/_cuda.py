"""CUDA memory and order through CuPy: wrap device memory, follow a stream, keep inputs alive while kernels read them.

Imported at the first CUDA array, never before.
"""

from __future__ import annotations

import functools
from collections import deque
from types import TracebackType
from typing import Any

import numpy as np

from cupyspec._call import Array

try:
    import cupy
except ImportError:  # the border has said what to install before anything here is called
    cupy = None

_NUMPY_NAMES = {"bfloat16": "uint16"}  # CuPy has bfloat16 only where ml_dtypes is: its bits serve as well


class _RawStream:
    """A stream of another library, by its handle."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@functools.cache
def stream_of(handle: int) -> Any:
    """CuPy's wrapper of a stream: it owns nothing, so it may outlive the stream."""
    return cupy.cuda.Stream.from_external(_RawStream(handle))


class Guard:
    """Makes a device, and a stream of another library on it, CuPy's current ones; restores both."""

    def __init__(self, ordinal: int, stream_handle: int | None) -> None:
        self._device = cupy.cuda.Device(ordinal)
        self._stream = None if stream_handle is None else stream_of(stream_handle)

    def __enter__(self) -> None:
        self._device.__enter__()
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.__exit__(kind, error, trace)
        self._device.__exit__(kind, error, trace)


def is_capturing() -> bool:
    """Whether CuPy's current stream records a CUDA graph."""
    return bool(cupy.cuda.get_current_stream().is_capturing())


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


def with_unit_stride(array: Array) -> Array:
    """The array itself if its last axis is contiguous, else a copy: kernels read rows by wide loads."""
    if not array.shape or array.shape[-1] <= 1 or array.strides[-1] == 1 or 0 in array.shape:
        return array
    copy = cupy.ascontiguousarray(wrap(array))
    return describe(copy, array.dtype, array.owner)


def to_host(array: Array) -> Any:
    """A device array's values in NumPy; waits for them."""
    return cupy.asnumpy(wrap(array))


_in_flight: deque[tuple[Any, Any]] = deque()


def keep_until_done(owners: Any) -> None:
    """Hold references until the work enqueued so far on the current stream is done.

    For libraries whose allocator does not know the stream the kernels run on: they may reuse memory once it is dropped.
    """
    while _in_flight and _in_flight[0][0].done:
        _in_flight.popleft()
    event = cupy.cuda.Event(disable_timing=True)
    event.record()
    _in_flight.append((event, owners))
