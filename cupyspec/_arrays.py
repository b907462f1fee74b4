"""The border to array libraries: recognise, borrow, check, hand back. No other module knows a framework.

NumPy, PyTorch, JAX and CuPy are read by their own quick ways, any other array by DLPack. Libraries are recognised among
the modules already imported, so that none is imported here.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
import threading
from collections.abc import Callable, Sequence
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


def parse_device(name: str, value: Any) -> Device:
    """A device named by a string ("cpu", "cuda", "cuda:1"), or by a library's own object."""
    kind, ordinal = getattr(value, "type", None), getattr(value, "index", None)  # PyTorch's
    if isinstance(value, str):
        kind, _, number = value.partition(":")
        if number and not number.isdecimal():
            kind = ""
        ordinal = int(number) if kind and number else None
    elif type(value).__module__.partition(".")[0] == "cupy" and hasattr(value, "id"):
        kind, ordinal = "cuda", value.id
    elif hasattr(value, "platform"):  # JAX's
        kind, ordinal = ("cuda" if value.platform == "gpu" else value.platform), value.local_hardware_id
    elif not isinstance(kind, str):
        raise TypeError(f'{name} must be "cpu", "cuda", "cuda:N" or a device of a library, got {value!r}')
    if kind not in ("cpu", "cuda") or (kind == "cpu" and ordinal):
        raise ValueError(f'{name} must be "cpu", "cuda" or "cuda:N", got {value!r}')
    if kind == "cpu":
        return Device("cpu", 0)
    import_cupy()
    from cupyspec import _cuda

    count = _cuda.device_count()
    if ordinal is None:
        ordinal = _cuda.current_device() if count else 0
    if ordinal >= count:
        raise ValueError(f"{name} must be a CUDA device that is there ({count} are), got {value!r}")
    return Device("cuda", ordinal)


def parse_dtype(name: str, value: Any, allowed: Sequence[str]) -> str:
    """Name of a dtype given by a string or by a library's own object."""
    if isinstance(value, type) and issubclass(value, np.generic):
        given: Any = np.dtype(value)
    else:
        given = value if isinstance(value, str) else getattr(value, "dtype", value)  # jax.numpy.float32 has one
    dtype = str(getattr(given, "name", given)).rpartition(".")[2]
    if dtype not in allowed:
        raise TypeError(f"{name} must be {' or '.join(allowed)}, got {value!r}")
    return dtype


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

    shares_memory = False  # whether `share_cpu` and `share_cuda` give arrays of one memory, which may be written to

    def share_cpu(self, values: HostArray) -> Any:
        """Memory that NumPy holds, as an array of this library."""
        return values

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

    def share_cuda(self, values: Any) -> Any:
        """Memory that CuPy holds, as an array of this library; nothing is ordered, waited for or copied."""
        return values

    def from_cuda(self, values: Any, like: Any) -> Any:
        """What `empty_cuda` made as an array of this library."""
        if not hasattr(like, "__array_namespace__"):
            return values
        return like.__array_namespace__().from_dlpack(values)


class _NumPy(Library):
    shares_memory = True

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
    shares_memory = True
    frees_in_stream_order = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._dtypes: dict[Any, str] = {}  # names, which NumPy makes anew each time

    def device(self, x: Any) -> Device:
        return Device("cuda", x.device.id)

    def dtype(self, x: Any) -> str:
        dtype = x.dtype
        if dtype not in self._dtypes:
            self._dtypes[dtype] = dtype.name
        return self._dtypes[dtype]

    def borrow_cuda(self, x: Any) -> Array:
        from cupyspec import _cuda

        return _cuda.describe(x, self.dtype(x), x)

    def from_cuda(self, values: Any, like: Any) -> Any:
        return values


class _Torch(Library):
    shares_memory = True
    frees_in_stream_order = True
    keeps_captured_memory = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Names and devices by PyTorch's objects: to ask these costs as much as a whole look-up.
        self._devices: dict[Any, Device] = {}
        self._dtypes: dict[Any, str] = {}

    def device(self, x: Any) -> Device:
        device = x.device
        if device not in self._devices:
            self._devices[device] = Device(device.type, device.index or 0)
        return self._devices[device]

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
        if x.requires_grad:
            x = x.detach()
        return x.resolve_neg() if x.is_neg() else x

    def dtype(self, x: Any) -> str:
        dtype = x.dtype
        if dtype not in self._dtypes:
            self._dtypes[dtype] = str(dtype).removeprefix("torch.")
        return self._dtypes[dtype]

    def from_numpy(self, values: HostArray, like: Any) -> Any:
        return sys.modules["torch"].from_numpy(values)

    def share_cpu(self, values: HostArray) -> Any:
        return sys.modules["torch"].from_numpy(values)

    def check_writable(self, name: str, x: Any) -> None:
        if x.is_neg():
            raise ValueError(f"{name} must be writable, got a torch tensor that stands for the negative of its memory")

    def borrow_cuda(self, x: Any) -> Array:
        x = self._dense(x)
        return Array(x.data_ptr(), tuple(x.shape), x.stride(), self.dtype(x), None, x)

    def stream_handle(self, ordinal: int) -> int | None:
        return _torch_stream()(ordinal)

    def empty_cuda(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> Any:
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=torch.device("cuda", ordinal))

    def pointer_cuda(self, x: Any) -> int:
        return int(x.data_ptr())

    def share_cuda(self, values: Any) -> Any:
        return sys.modules["torch"].utils.dlpack.from_dlpack(values.__dlpack__(stream=-1))

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


@functools.cache
def _torch_stream() -> Callable[[int], int]:
    """PyTorch's current stream of a device, as a handle; the public way takes microseconds."""
    torch = sys.modules["torch"]
    quick: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return quick or (lambda ordinal: int(torch.cuda.current_stream(ordinal).cuda_stream))


class Quick:
    """CUDA arrays of one type as `cupyspec._packed` looks at them in a call like one before: nothing is described."""

    kind: Any  # the type
    keeps_captured_memory: bool  # see Library
    pointer: Callable[[Any], int]
    stream: Callable[[int], int]  # handle of the library's current stream on a device, which is the current one
    # (dtype, shape, strides, device): all that is asked of an array but where it lies. None: nothing to be quick with,
    # as memory on the CPU.
    look: Callable[[Any], tuple[Any, ...] | None]

    def look_at(self, x: Any, any_rows: bool) -> tuple[Any, ...] | None:
        """`look`, without the number of rows if any will do."""
        look = self.look(x)
        return (look[0], look[1][1:], *look[2:]) if any_rows and look is not None else look

    def guard(self, arrays: Sequence[Any], any_rows: Sequence[bool]) -> Callable[..., bool]:
        """Tells whether other arrays look like these."""
        look, free = (self.look, ()) if True not in any_rows else (self.look_at, (any_rows,))
        looks = [*map(look, arrays, *free)]

        def like(*others: Any) -> bool:
            try:
                return [*map(look, others, *free)] == looks
            except AttributeError:  # something else than an array
                return False

        return like

    def maker(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> Callable[[], Any]:
        """Makes uninitialised arrays on a device, which is the current one."""
        raise NotImplementedError

    def reach(self, x: Any) -> tuple[int, int]:
        """From an array's address to the lowest of its bytes, and behind the highest."""
        raise NotImplementedError


class _QuickCuPy(Quick):
    keeps_captured_memory = False

    def __init__(self, cupy: Any) -> None:
        self._cupy, self.kind = cupy, cupy.ndarray
        self.pointer = operator.attrgetter("data.ptr")
        self.look = operator.attrgetter("dtype", "shape", "strides", "data.device_id")
        current = cupy.cuda.get_current_stream
        self.stream = lambda ordinal: current().ptr

    def maker(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> Callable[[], Any]:
        return functools.partial(self._cupy.empty, shape, np.dtype(dtype))

    def reach(self, x: Any) -> tuple[int, int]:
        return _steps(x.shape, x.strides, 1, x.itemsize)


def _look_at_tensor(x: Any) -> tuple[Any, ...] | None:
    if not x.is_cuda or x.is_neg():
        return None
    return x.dtype, x.shape, x.stride(), x.get_device()


class _QuickTorch(Quick):
    keeps_captured_memory = True

    def __init__(self, torch: Any) -> None:
        self._torch, self.kind, self.look = torch, torch.Tensor, _look_at_tensor
        self.pointer, self.stream = torch.Tensor.data_ptr, _torch_stream()

    def guard(self, arrays: Sequence[Any], any_rows: Sequence[bool]) -> Callable[..., bool]:
        guards = _tensor_guards()
        if guards is None:
            return super().guard(arrays, any_rows)
        sizes = [[None, *x.shape[1:]] if free else [*x.shape] for x, free in zip(arrays, any_rows, strict=True)]
        strides = [list(x.stride()) for x in arrays]
        check: Callable[..., bool] = guards(*arrays, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return check

    def maker(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> Callable[[], Any]:
        torch = self._torch
        kind, device = getattr(torch, dtype), torch.device("cuda", ordinal)
        return functools.partial(torch.empty, shape, dtype=kind, device=device)

    def reach(self, x: Any) -> tuple[int, int]:
        return _steps(x.shape, x.stride(), x.element_size(), x.element_size())


@functools.cache
def _tensor_guards() -> Any:
    """What torch.compile guards its code with: compares type, dtype, device, shape, strides and dispatch of several
    tensors in a fifth of the time that asking them takes. Not public, so None unless it does what is expected of it."""
    torch = sys.modules["torch"]
    try:
        kind = torch._C._dynamo.guards.TensorGuards
        x, y = torch.empty((2, 3), device="cpu"), torch.empty((4,), dtype=torch.int64, device="cpu")

        def check(*others: Any, rows: int | None = 2) -> bool:
            made = kind(x, y, dynamic_dims_sizes=[[rows, 3], [4]], dynamic_dims_strides=[[3, 1], [1]])
            return made.check(*others) is True

        longer = torch.empty((5, 3), device="cpu")
        others = (x.half(), x.T, x[:, :2], x[:1], torch._neg_view(x), x.expand(1, 2, 3), longer, x.to("meta"))
        right = check(x, y) and check(torch.empty_like(x), torch.empty_like(y)) and check(longer, y, rows=None)
        wrong = any(check(other, y) for other in others) or check(x[:, :2], y, rows=None) or check(x, y.int())
        return kind if right and not wrong else None
    except Exception:
        return None


_quick_of_type: dict[type, Quick | None] = {}


def quick_of(kind: type) -> Quick | None:
    """How arrays of exactly this type are looked at, if there is a quick way."""
    if kind not in _quick_of_type:
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        quick: Quick | None = None
        if torch is not None and kind is getattr(torch, "Tensor", None):
            quick = _QuickTorch(torch)
        elif cupy is not None and kind is getattr(cupy, "ndarray", None):
            quick = _QuickCuPy(cupy)
        _quick_of_type[kind] = quick
    return _quick_of_type[kind]


def current_streams(ordinal: int) -> set[int]:
    """Handles of the streams that libraries use on a device, the current one."""
    torch = sys.modules.get("torch")
    streams = {quick.stream(ordinal) for quick in (quick_of(import_cupy().ndarray),) if quick is not None}
    if torch is not None and torch.cuda.is_initialized():
        streams.add(_torch_stream()(ordinal))
    return streams


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
        self._lent: list[tuple[str, Array]] = []  # all that was borrowed, which no output may overlap
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
                self._lent.append((name, array))
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
        if any(_overlap(array, other) for _, other in others):
            raise ValueError(f"{name} must not overlap an input or another output")
        return array

    def refuse_overlap(self, memory: range, what: str) -> None:
        """ValueError for an argument that lies in `memory`, a range of addresses."""
        for name, array in self._lent:
            start, end = _reach(array)
            if start < memory.stop and memory.start < end:
                raise ValueError(f"{name} must not lie in {what}")


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
    itemsize = 2 if array.dtype == "bfloat16" else np.dtype(array.dtype).itemsize
    low, high = _steps(array.shape, array.strides, itemsize, itemsize)
    return array.pointer + low, array.pointer + high


def _steps(shape: tuple[int, ...], strides: tuple[int, ...], unit: int, itemsize: int) -> tuple[int, int]:
    """From an array's address to the lowest of its bytes, and behind the highest; `strides` count `unit` bytes."""
    if 0 in shape:
        return 0, 0
    steps = [unit * stride * (size - 1) for stride, size in zip(strides, shape, strict=True)]
    return sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps) + itemsize


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
