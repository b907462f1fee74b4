"""Array libraries for the border's tests: made from NumPy values and read back, one class per library.

`Producer` is a library of one class, written against the DLPack header alone: what NumPy, PyTorch and JAX never hand out
(an offset, NULL strides, the read-only flag, the protocol without versions) is tried with it.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import numpy as np
import pytest

# The structs of dlpack.h, version 1.0.

CPU, CUDA = 1, 2
READ_ONLY = 1
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_BFLOAT16 = 4


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

lent: dict[int, Any] = {}  # exports whose consumer has not given them back, by the struct's address


@_Deleter
def _give_back(address: int) -> None:
    del lent[address]


class Producer:
    """Speaks DLPack and nothing else: no dtype, no shape, no namespace. `bfloat16` values come as uint16 bits."""

    def __init__(
        self, values: np.ndarray, *, bfloat16: bool = False, null_strides: bool = False, read_only: bool = False
    ) -> None:
        assert not (null_strides and not values.flags.c_contiguous)
        self.values, self.bfloat16, self.null_strides, self.read_only = values, bfloat16, null_strides, read_only

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    def __dlpack__(self, *, stream: None = None, max_version: tuple[int, int] | None = None, **_: Any) -> Any:
        if max_version is not None and max_version[0] >= 1:
            managed = _ManagedVersioned(major=1, minor=0, flags=READ_ONLY if self.read_only else 0)
            return self._capsule(managed, b"dltensor_versioned")
        if self.read_only:
            raise BufferError("a read-only array needs a versioned capsule")
        return self._capsule(_Managed(), b"dltensor")

    def _capsule(self, managed: Any, name: bytes) -> Any:
        values, tensor = self.values, managed.tensor
        code = _BFLOAT16 if self.bfloat16 else _CODES[values.dtype.kind]
        tensor.data, tensor.byte_offset = _with_offset(values.ctypes.data)
        tensor.device = _Device(CPU, 0)
        tensor.ndim = values.ndim
        tensor.dtype = _DataType(code, 8 * values.itemsize, 1)
        axes = ctypes.c_int64 * values.ndim
        shape, strides = axes(*values.shape), axes(*(s // values.itemsize for s in values.strides))
        tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
        tensor.strides = None if self.null_strides else ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
        managed.deleter = _give_back
        address = ctypes.addressof(managed)
        lent[address] = (managed, shape, strides, values)
        return _new_capsule(address, name, None)


class OldProducer(Producer):
    """The protocol before 1.0: `__dlpack__` has no `max_version`, capsules no version and no flags."""

    def __dlpack__(self, stream: None = None) -> Any:
        return self._capsule(_Managed(), b"dltensor")


class CudaProducer:
    """Says that it lies on a CUDA device; nothing of it can be read."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("read before its device was looked at")


def _with_offset(address: int) -> tuple[int, int]:
    """(data, byte_offset) of an address: its 256-byte boundary, as DLPack asks for, and the rest."""
    return address - address % 256, address % 256


# One body of test, several libraries.

NUMPY_WRITES_IMPORTS = np.from_dlpack(np.zeros(1)).flags.writeable  # not before NumPy 2.2


class Frontend:
    """A library as the tests need it. `dtypes` are the score dtypes that it has on the CPU."""

    name: str
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    token_dtypes: tuple[str, ...] = ("int32", "int64")
    copies = False  # whether `from_memory` must copy
    writable = True  # whether out= can be of this library

    def array(self, values: np.ndarray, dtype: str | None = None) -> Any:
        """A copy of NumPy values, converted to a dtype by name."""
        raise NotImplementedError

    def from_memory(self, values: np.ndarray) -> Any:
        """An array on the memory of `values`, strides and all, or a copy if the library has no strides."""
        raise NotImplementedError

    def numpy(self, array: Any) -> np.ndarray:
        """The values of an array, or of an answer."""
        return np.from_dlpack(array)

    def pointer(self, array: Any) -> int:
        """Address of the first element."""
        return int(self.numpy(array).ctypes.data)

    def assert_same_kind(self, answer: Any, like: Any) -> None:
        """An answer is of the library, and on the device, of the call's arrays."""
        assert type(answer) is type(like)

    def dtype(self, answer: Any) -> str:
        """Name of an answer's dtype."""
        return str(answer.dtype).rpartition(".")[2]


class NumPy(Frontend):
    name = "numpy"

    def array(self, values: np.ndarray, dtype: str | None = None) -> np.ndarray:
        if dtype == "bfloat16":
            return values.astype(pytest.importorskip("ml_dtypes").bfloat16)
        return np.array(values, dtype=dtype)

    def from_memory(self, values: np.ndarray) -> np.ndarray:
        return values

    def numpy(self, array: np.ndarray) -> np.ndarray:
        return array


class Torch(Frontend):
    name = "torch"

    def __init__(self) -> None:
        self.torch = importlib.import_module("torch")

    def array(self, values: np.ndarray, dtype: str | None = None) -> Any:
        tensor = self.torch.from_numpy(np.array(values))
        return tensor if dtype is None else tensor.to(getattr(self.torch, dtype))

    def from_memory(self, values: np.ndarray) -> Any:
        return self.torch.from_numpy(values)

    def pointer(self, array: Any) -> int:
        return int(array.data_ptr())

    def assert_same_kind(self, answer: Any, like: Any) -> None:
        assert type(answer) is self.torch.Tensor
        assert answer.device == like.device
        assert not answer.requires_grad


class Jax(Frontend):
    name = "jax"
    token_dtypes = ("int32",)  # unless jax_enable_x64 is set
    copies = True
    writable = False

    def __init__(self) -> None:
        self.jax = importlib.import_module("jax")

    def array(self, values: np.ndarray, dtype: str | None = None) -> Any:
        return self.jax.numpy.array(values, dtype=dtype)

    def from_memory(self, values: np.ndarray) -> Any:
        return self.jax.numpy.array(values)

    def numpy(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def pointer(self, array: Any) -> int:
        return int(array.unsafe_buffer_pointer())

    def assert_same_kind(self, answer: Any, like: Any) -> None:
        assert isinstance(answer, self.jax.Array)
        assert answer.devices() == like.devices()


class Strict(Frontend):
    name = "array_api_strict"
    dtypes = ("float32",)  # the standard has no narrower ones
    writable = NUMPY_WRITES_IMPORTS

    def __init__(self) -> None:
        self.xp = importlib.import_module("array_api_strict")

    def array(self, values: np.ndarray, dtype: str | None = None) -> Any:
        return self.xp.asarray(values, dtype=None if dtype is None else getattr(self.xp, dtype), copy=True)

    def from_memory(self, values: np.ndarray) -> Any:
        return self.xp.from_dlpack(values)

    def assert_same_kind(self, answer: Any, like: Any) -> None:
        assert type(answer) is type(like)
        assert answer.device == like.device


class HandMade(Frontend):
    """`Producer`s; answers come as NumPy arrays, since there is no namespace to ask for others."""

    name = "producer"
    dtypes = ("float32", "float16")  # NumPy takes no bfloat16 from a capsule
    writable = NUMPY_WRITES_IMPORTS

    def array(self, values: np.ndarray, dtype: str | None = None) -> Producer:
        values = np.array(values, dtype=dtype)
        return Producer(values, null_strides=True)

    def from_memory(self, values: np.ndarray) -> Producer:
        return Producer(values)

    def numpy(self, array: Any) -> np.ndarray:
        return array.values if isinstance(array, Producer) else array

    def assert_same_kind(self, answer: Any, like: Any) -> None:
        assert type(answer) is np.ndarray


FRONTENDS: dict[str, type[Frontend]] = {kind.name: kind for kind in (NumPy, Torch, Jax, Strict, HandMade)}


@pytest.fixture(params=FRONTENDS)
def lib(request: pytest.FixtureRequest, need_frontend: Any) -> Frontend:
    """Each library in turn; skipped if it is not installed, or failed if --frontends requires it."""
    if request.param in ("torch", "jax"):  # the others come with NumPy or the tests
        need_frontend(request.param)
    return FRONTENDS[request.param]()


def assert_answer(lib: Frontend, like: Any, answer: Any, expected: Any) -> None:
    """An answer has library, device, dtype, shape and values, in this order, of a NumPy call's."""
    for name, value, right in zip(expected._fields, answer, expected, strict=True):
        if right is None:
            assert value is None, name
            continue
        lib.assert_same_kind(value, like)
        assert lib.dtype(value) == right.dtype.name, name
        assert tuple(value.shape) == right.shape, name
        np.testing.assert_array_equal(lib.numpy(value), right, err_msg=name)
