"""Launches that CuPy's own interface has no words for: clusters of blocks, and a kernel that starts before the one before
it has ended. The driver's cuLaunchKernelEx, through ctypes."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import NoReturn

_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute; the union's other members are not used."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


def config(grid: int, block: int, cluster: int, overlap: bool) -> Config:
    """A launch's shape; its `stream` may be set before each use."""
    attributes = (_Attribute * 2)()
    count = 0
    if cluster > 1:
        attributes[count].id = _CLUSTER_DIMENSION
        attributes[count].value[0:3] = [cluster, 1, 1]
        count += 1
    if overlap:
        attributes[count].id = _PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[count].value[0] = 1
        count += 1
    made = Config((grid, 1, 1), (block, 1, 1), 0, None, attributes, count)
    made._kept = attributes  # ctypes keeps no reference to what a pointer points to
    return made


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    library.cuLaunchKernelEx.restype = ctypes.c_int
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def launcher() -> Callable[..., int]:
    """cuLaunchKernelEx that converts nothing: it takes references and ctypes objects, and returns the driver's code."""
    function: Callable[..., int] = _library()["cuLaunchKernelEx"]
    return function


def fail(code: int) -> NoReturn:
    """RuntimeError with the driver's words."""
    words = ctypes.c_char_p()
    _library().cuGetErrorString(code, ctypes.byref(words))
    raise RuntimeError(f"CUDA cannot launch the kernel: {(words.value or b'').decode()} (error {code})")


def launch(kernel: int, shape: Config, arguments: int) -> None:
    """Run a kernel. `arguments` is the address of an array of addresses, one for each argument.

    Raises
    ------
    RuntimeError
        With the driver's words.
    """
    code = _library().cuLaunchKernelEx(ctypes.addressof(shape), kernel, arguments, None)
    if code:
        fail(code)
