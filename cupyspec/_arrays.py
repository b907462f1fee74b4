"""The border to array libraries: recognise, borrow, check, hand back. No other module knows a framework.

NumPy, PyTorch, JAX and CuPy are read by their own quick ways, any other array by DLPack. Libraries are recognised among
the modules already imported, so that none is imported here.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyspec._call import Array
from cupyspec._compile import import_cupy

HostArray = npt.NDArray[Any]

SCORE_DTYPES = ("float32", "float16", "bfloat16")
TOKEN_DTYPES = ("int32", "int64")
INTEGER_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
REAL_DTYPES = (*INTEGER_DTYPES, "float16", "bfloat16", "float32", "float64")
ACTIVE_DTYPES = ("bool", "uint8")

_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_HOST, _DLPACK_CUDA_MANAGED = 1, 2, 3, 13
_OVERLAP_WORK: Any = 10_000  # steps of the proof that two strided arrays share nothing
_ALIGNMENT = 64  # at which JAX takes NumPy memory without a copy

# Of all 2^16 values: looking them up takes less than half the time of NumPy's own conversion. No index is out of range.
_FLOAT32_OF_HALF = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


class Device(NamedTuple):
    """Where an array lives."""

    kind: str  # "cpu", "cuda", or the library's own word for what cupyspec cannot read
    ordinal: int

    def __str__(self) -> str:
        return self.kind if self == ("cpu", 0) else f"{self.kind}:{self.ordinal}"


class Library:
    """What the border asks of an array library; this class serves any producer of DLPack."""

    def __init__(self, name: str) -> None:
        self.name = name

    def device(self, x: Any) -> Device:
        """Device of an array."""
        kind, index = (int(v) for v in x.__dlpack_device__())
        if kind in (_DLPACK_CPU, _DLPACK_CUDA_HOST):
            return Device("cpu", 0)
        return Device("cuda" if kind in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED) else f"dlpack-device-{kind}", index)

    def to_numpy(self, x: Any) -> HostArray:
        """A CPU array's memory for NumPy; bfloat16 may come as ml_dtypes' or as uint16 bits (see `dtype`)."""
        values: HostArray = self._from_dlpack(np, x)
        return values

    def _from_dlpack(self, importer: Any, x: Any) -> Any:
        """An array imported by NumPy or CuPy."""
        try:
            return importer.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError, NotImplementedError) as error:
            kind = f"{type(x).__module__}.{type(x).__qualname__}"
            raise TypeError(f"{importer.__name__} cannot import a {kind} by DLPack: {error}") from error

    def dtype(self, x: Any) -> str:
        """Name of an array's dtype, NumPy's where it has one."""
        dtype = getattr(x, "dtype", None)
        if dtype is None:  # said in the capsule alone
            dtype = self._from_dlpack(sys.modules["cupy"] if self.device(x).kind == "cuda" else np, x).dtype
        return str(getattr(dtype, "name", dtype)).rpartition(".")[2]

    def from_numpy(self, values: HostArray, like: Any) -> Any:
        """`values` as an array of this library on the (CPU) device of `like`."""
        if not hasattr(like, "__array_namespace__"):
            return values
        answer = like.__array_namespace__().from_dlpack(values)
        device = getattr(like, "device", None)
        return answer if device is None or answer.device == device else answer.to_device(device)

    def check_answer_dtype(self, name: str, dtype: str) -> None:
        """ValueError if the library has no arrays of a dtype that an answer must have."""

    def check_writable(self, name: str, x: Any) -> None:
        """ValueError if an output cannot be written, as far as the library and not NumPy knows."""

    # CUDA arrays, CuPy being there.

    frees_in_stream_order = False  # whether dropped memory stays untouched until the library's stream has passed
    keeps_captured_memory = False  # whether what is allocated inside a CUDA graph's capture stays the graph's

    def borrow_cuda(self, x: Any) -> Array:
        """A CUDA array described, ready on CuPy's current stream."""
        from cupyspec import _cuda

        return _cuda.describe(self._from_dlpack(sys.modules["cupy"], x), self.dtype(x), x)

    def stream_handle(self, ordinal: int) -> int | None:
        """The library's current stream on a device; None: CuPy's."""
        return None

    def empty_cuda(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> Any:
        """An uninitialised array on the current device, of the library where it orders its memory by stream."""
        return sys.modules["cupy"].empty(shape, dtype)

    def pointer_cuda(self, x: Any) -> int:
        """Address of what `empty_cuda` made."""
        return int(x.data.ptr)

    def from_cuda(self, values: Any, like: Any) -> Any:
        """What `empty_cuda` made as an array of this library."""
        if not hasattr(like, "__array_namespace__"):
            return values
        return like.__array_namespace__().from_dlpack(values)


class _NumPy(Library):
    def device(self, x: Any) -> Device:
        return Device("cpu", 0)

    def to_numpy(self, x: Any) -> HostArray:
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError("masked arrays are not read: fill them first, for example with -inf (x.filled(-np.inf))")
        if not x.dtype.isnative:
            raise TypeError(f"arrays must be in native byte order, got dtype {x.dtype.str}")
        return np.asarray(x)

    def from_numpy(self, values: HostArray, like: Any) -> Any:
        return values


class _CuPy(Library):
    frees_in_stream_order = True

    def device(self, x: Any) -> Device:
        return Device("cuda", x.device.id)

    def borrow_cuda(self, x: Any) -> Array:
        from cupyspec import _cuda

        return _cuda.describe(x, self.dtype(x), x)

    def from_cuda(self, values: Any, like: Any) -> Any:
        return values


class _Torch(Library):
    frees_in_stream_order = True
    keeps_captured_memory = True

    def device(self, x: Any) -> Device:
        return Device(x.device.type, x.device.index or 0)

    def to_numpy(self, x: Any) -> HostArray:
        torch = sys.modules["torch"]
        x = self._dense(x)
        if x.dtype == torch.bfloat16:
            x = x.view(torch.int16)
        values: HostArray = x.numpy()
        return values

    def _dense(self, x: Any) -> Any:
        if x.layout != sys.modules["torch"].strided:
            raise TypeError(f"torch tensors must be dense (torch.strided), got layout {x.layout}")
        return x.detach().resolve_neg()

    def dtype(self, x: Any) -> str:
        return str(x.dtype).removeprefix("torch.")

    def from_numpy(self, values: HostArray, like: Any) -> Any:
        return sys.modules["torch"].from_numpy(values)

    def check_writable(self, name: str, x: Any) -> None:
        if x.is_neg():
            raise ValueError(f"{name} must be writable, got a torch tensor that stands for the negative of its memory")

    def borrow_cuda(self, x: Any) -> Array:
        x = self._dense(x)
        return Array(x.data_ptr(), tuple(x.shape), x.stride(), self.dtype(x), None, x)

    def stream_handle(self, ordinal: int) -> int | None:
        return int(sys.modules["torch"].cuda.current_stream(ordinal).cuda_stream)

    def empty_cuda(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> Any:
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=f"cuda:{ordinal}")

    def pointer_cuda(self, x: Any) -> int:
        return int(x.data_ptr())

    def from_cuda(self, values: Any, like: Any) -> Any:
        return values


class _Jax(Library):
    def device(self, x: Any) -> Device:
        jax = sys.modules["jax"]
        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                "cupyspec reads values, and a JAX tracer has none: call it outside jax.jit, or through "
                "jax.pure_callback"
            )
        devices = x.devices()
        if len(devices) != 1:
            raise ValueError(f"arrays must lie on one device, got a JAX array sharded over {len(devices)}")
        (device,) = devices
        return Device("cuda" if device.platform == "gpu" else device.platform, device.local_hardware_id or 0)

    def to_numpy(self, x: Any) -> HostArray:
        return np.asarray(x)

    def from_numpy(self, values: HostArray, like: Any) -> Any:
        jax = sys.modules["jax"]
        (device,) = like.devices()
        with jax.default_device(device):
            return jax.device_put(values, device)

    def check_answer_dtype(self, name: str, dtype: str) -> None:
        if sys.modules["jax"].dtypes.canonicalize_dtype(dtype) != dtype:
            raise ValueError(f"{name} must be int32 with JAX arrays unless jax_enable_x64 is set, got {dtype}")

    def from_cuda(self, values: Any, like: Any) -> Any:
        return sys.modules["jax"].dlpack.from_dlpack(values)

    def check_writable(self, name: str, x: Any) -> None:
        raise ValueError(f"{name} must be writable, got a JAX array: they are immutable")


_library_of_type: dict[type, Library | None] = {}


def _recognise(kind: type) -> Library | None:
    modules = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if issubclass(kind, np.ndarray):
        return _NumPy("numpy")
    if "torch" in modules and issubclass(kind, sys.modules["torch"].Tensor):
        return _Torch("torch")
    if "cupy" in modules and issubclass(kind, sys.modules["cupy"].ndarray):
        return _CuPy("cupy")
    if modules & {"jax", "jaxlib"}:
        jax = sys.modules.get("jax")
        if jax is not None and issubclass(kind, (jax.Array, jax.core.Tracer)):
            return _Jax("jax")
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return Library(kind.__module__.partition(".")[0])
    return None


def library_of(name: str, x: Any, wanted: str = "an array") -> Library:
    """The library of an array argument; TypeError if it is not an array."""
    kind = type(x)
    if kind not in _library_of_type:
        _library_of_type[kind] = _recognise(kind)
    library = _library_of_type[kind]
    if library is None:
        raise TypeError(
            f"{name} must be {wanted} of NumPy, PyTorch, JAX, CuPy or any library with __dlpack__, "
            f"got {'None' if x is None else f'{type(x).__module__}.{type(x).__qualname__}'}"
        )
    return library


def _device(name: str, library: Library, x: Any) -> Device:
    try:
        return library.device(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _named(name, error) from error


def _named(name: str, error: Exception) -> Exception:
    """What a library says of an argument that cannot be read, with the argument's name."""
    return (TypeError if isinstance(error, TypeError) else ValueError)(f"{name}: {error}")


class Border:
    """The library and the device that the arrays of a call have in common, and the way in and out of them."""

    def __init__(self, name: str, x: Any) -> None:
        self._first_name, self._first = name, x
        self.library = library_of(name, x)
        self.device = _device(name, self.library, x)
        self._lent: list[Array] = []  # all that was borrowed, which no output may overlap
        self.on_cuda = self.device.kind == "cuda"
        if self.on_cuda:
            import_cupy()
        elif self.device.kind != "cpu":
            raise ValueError(f"{name} must be on the CPU or a CUDA device, got device {self.device}")

    def __enter__(self) -> Border:
        """Make the arrays' device, and their library's stream on it, current."""
        self._guard: AbstractContextManager[Any] = nullcontext()
        if self.on_cuda:
            from cupyspec import _cuda

            self._guard = _cuda.Guard(self.device.ordinal, self.library.stream_handle(self.device.ordinal))
        self._guard.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Restore device and stream."""
        self._guard.__exit__(*error)

    def borrow(self, name: str, x: Any, dtypes: Sequence[str]) -> Array:
        """An array argument, which must be of the call's library and device, described without a copy."""
        library = library_of(name, x)
        if library.name != self.library.name:
            raise TypeError(
                f"{name} is a {library.name} array but {self._first_name} is a {self.library.name} array: "
                "all arrays of a call must be of one library"
            )
        device = _device(name, library, x)
        if device != self.device:
            raise ValueError(
                f"{name} is on {device} but {self._first_name} is on {self.device}: "
                "all arrays of a call must be on one device"
            )
        return self._read(name, library, x, device, dtypes)

    def _read(self, name: str, library: Library, x: Any, device: Device, dtypes: Sequence[str] | None = None) -> Array:
        try:
            dtype = library.dtype(x)
            if dtypes is None or dtype in dtypes:
                array = library.borrow_cuda(x) if device.kind == "cuda" else _describe(library.to_numpy(x), dtype, x)
                self._lent.append(array)
                return array
        except (TypeError, ValueError, RuntimeError) as error:
            raise _named(name, error) from error
        raise TypeError(f"{name} must have dtype {' or '.join(dtypes)}, got {dtype}")

    def parameter(self, name: str, x: Any) -> HostArray | Array:
        """A per-row parameter: its values where the host has them, else the device array that holds them.

        Host values may be Python numbers and sequences, NumPy arrays, or CPU arrays of any library.
        """
        if isinstance(x, (list, tuple)):
            # As objects: integers of every size stay what they are until the parameter's own check.
            try:
                values = np.array(x, dtype=object)
            except Exception as error:  # whatever its elements raise when NumPy looks at them
                raise TypeError(f"{name} must be a list of numbers, got one that NumPy cannot read: {error}") from error
            return (
                np.array(x) if values.size and all(isinstance(v, (float, np.floating)) for v in values.flat) else values
            )
        if isinstance(x, (bool, int, float)):
            return np.asarray(x)
        if isinstance(x, np.generic):
            x = np.asarray(x)
        library = library_of(name, x, "a number or an array")
        device = _device(name, library, x)
        if device.kind == "cpu":
            array = self._read(name, library, x, device)
            return as_float32(array) if array.dtype == "bfloat16" else host(array)
        return self.borrow(name, x, (*REAL_DTYPES, "bool"))

    def place(self, values: HostArray) -> Array:
        """Host values of a parameter where the call's arrays are."""
        if not self.on_cuda:
            return _describe(np.ascontiguousarray(values), values.dtype.name, values)
        from cupyspec import _cuda

        self.refuse_in_capture("an array of host values")
        return _cuda.describe(sys.modules["cupy"].asarray(values), values.dtype.name, None)

    def refuse_in_capture(self, what: str) -> None:
        """ValueError while a CUDA graph is recorded: every replay would repeat what the host knows now."""
        if self.on_cuda:
            from cupyspec import _cuda

            if _cuda.is_capturing():
                raise ValueError(f"{what} cannot be part of a CUDA graph: hand in an array on {self.device}")

    def hand_back(self, values: Any) -> Any:
        """A result as an array of the caller's library on the caller's device."""
        if self.on_cuda:
            return self.library.from_cuda(values, self._first)
        return self.library.from_numpy(values, self._first)

    def borrow_output(self, name: str, x: Any, shape: tuple[int, ...], dtype: str) -> Array:
        """An array of `out=`: right shape and dtype, writable in place, apart from all that was borrowed before."""
        others = list(self._lent)
        array = self.borrow(name, x, (dtype,))
        library_of(name, x).check_writable(name, x)
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
        if _repeats(array):
            raise ValueError(f"{name} must not repeat memory, got shape {array.shape} with strides {array.strides}")
        if array.host is not None and not array.host.flags.writeable:
            raise ValueError(f"{name} must be writable, got a read-only array")
        if any(_overlap(array, other) for other in others):
            raise ValueError(f"{name} must not overlap an input or another output")
        return array


def _describe(values: HostArray, dtype: str, owner: Any) -> Array:
    if dtype == "bfloat16":
        values = values.view(np.uint16)
    strides = tuple(stride // values.itemsize for stride in values.strides)
    return Array(values.ctypes.data, values.shape, strides, dtype, values, owner)


def _repeats(array: Array) -> bool:
    """Whether two elements may share memory: strides that do not step over what smaller ones reach."""
    reach = 0
    for stride, size in sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _overlap(a: Array, b: Array) -> bool:
    if a.host is None:
        (a_start, a_end), (b_start, b_end) = _reach(a), _reach(b)
        return a_start < b_end and b_start < a_end
    try:
        return np.shares_memory(host(a), host(b), max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True  # their ranges cross, and no cheap proof says that no element is shared


def _reach(array: Array) -> tuple[int, int]:
    """First address of an array and the one behind its last."""
    if 0 in array.shape:
        return array.pointer, array.pointer
    steps = [stride * (size - 1) for stride, size in zip(array.strides, array.shape, strict=True)]
    itemsize = 2 if array.dtype == "bfloat16" else np.dtype(array.dtype).itemsize
    start = array.pointer + itemsize * sum(min(step, 0) for step in steps)
    return start, array.pointer + itemsize * (1 + sum(max(step, 0) for step in steps))


def host(array: Array) -> HostArray:
    """The memory of a CPU array; bfloat16 as uint16 bits."""
    if array.host is None:
        raise TypeError("a device array has no host memory")
    return array.host


def as_float32(array: Array, index: Any = ...) -> npt.NDArray[np.float32]:
    """Scores of a CPU array at a NumPy index, in float32: a view where they are stored so, else a copy."""
    values = host(array)[index]
    if array.dtype == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if array.dtype == "float16":
        return _FLOAT32_OF_HALF.take(values.view(np.uint16), mode="wrap")
    return np.asarray(values, np.float32)


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> HostArray:
    """An uninitialised C-ordered array on a boundary at which every library takes it without a copy."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    values: HostArray = buffer[start : start + size].view(dtype).reshape(shape)
    return values


_pytrees: set[type] = set()
_pytrees_lock = threading.Lock()


def register_jax_pytree(kind: type, names: Sequence[str]) -> None:
    """Make a frozen dataclass a JAX pytree of the named fields, once, if JAX is there."""
    jax = sys.modules.get("jax")
    if jax is None or not hasattr(jax, "tree_util") or kind in _pytrees:
        return
    with _pytrees_lock:
        if kind not in _pytrees:
            _register(jax, kind, names)


def _register(jax: Any, kind: type, names: Sequence[str]) -> None:

    def flatten(instance: Any) -> tuple[list[Any], None]:
        return [getattr(instance, name) for name in names], None

    def unflatten(_: None, leaves: Any) -> Any:
        instance: Any = object.__new__(kind)  # leaves may be tracers or placeholders: not checked here
        for name, leaf in zip(names, leaves, strict=True):
            object.__setattr__(instance, name, leaf)
        return instance

    jax.tree_util.register_pytree_node(kind, flatten, unflatten)
    _pytrees.add(kind)
