"""PyTorch and CuPy with a CUDA device that is not there: arrays lie in host memory, kernels run by `host_cuda`.

The CUDA border, the packed calls and `Verifier` run as they are, down to the driver's launch; what would touch a device is
replaced. A device has two neighbours: an array says where it is by its attribute `on`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from cupyspec import _arrays, _compile, _cuda, _driver, _run
from cupyspec._compile import Launch
from host_cuda.backend import HostCuda

POISON = 0xA5  # whoever reads memory before writing to it is seen


class FakeGpu:
    """What the stand-ins share: the device's state, and all that was asked of it."""

    def __init__(self, host: HostCuda) -> None:
        self.host = host
        self.device, self.stream, self.capturing = 0, 0, False
        self.kernels: list[tuple[Any, str]] = []  # by handle - 1
        self.launches: list[tuple[str, int, int]] = []  # kernel, stream, the current device
        self.allocations = 0

    def handle(self, specialisation: Any, name: str, device: int) -> int:
        """A kernel's handle."""
        if (specialisation, name) not in self.kernels:
            if self.capturing:
                _compile._refuse_in_capture()
            self.kernels.append((specialisation, name))
        return self.kernels.index((specialisation, name)) + 1

    def launch_ex(self, shape: Any, kernel: Any, arguments: Any, extra: Any) -> int:
        """cuLaunchKernelEx."""
        config = getattr(shape, "_obj", None) or _driver.Config.from_address(shape)
        attributes = {config.attributes[i].id: config.attributes[i].value[0] for i in range(config.attribute_count)}
        self._launch(
            getattr(kernel, "value", kernel),
            config.grid[0],
            config.block[0],
            attributes.get(_driver._CLUSTER_DIMENSION, 1),
            bool(attributes.get(_driver._PROGRAMMATIC_STREAM_SERIALIZATION, 0)),
            config.stream or 0,
            getattr(arguments, "_obj", None) or (ctypes.c_void_p * 1).from_address(arguments),
        )
        return 0

    def launch_kernel(self, kernel: int, grid: int, *rest: Any) -> None:
        """CuPy's cuLaunchKernel."""
        arguments = (ctypes.c_void_p * 1).from_address(rest[7])
        self._launch(kernel, grid, rest[2], 1, False, rest[6], arguments)

    def _launch(
        self, kernel: int, grid: int, block: int, cluster: int, overlap: bool, stream: int, argument: Any
    ) -> None:
        specialisation, name = self.kernels[kernel - 1]
        raw = (ctypes.c_char * specialisation.params.itemsize).from_address(argument[0])
        params = np.frombuffer(bytearray(raw), specialisation.params).reshape(())
        self.launches.append((name, stream, self.device))
        self.host.launch(Launch(specialisation, name, grid, block, cluster, overlap), params)

    def memory(self, size: int) -> np.ndarray:
        """Bytes of the device."""
        self.allocations += 1
        buffer = np.full(size + 256, POISON, np.uint8)
        start = -buffer.ctypes.data % 256
        return buffer[start : start + size]


def numpy_of(x: Any) -> np.ndarray:
    """The memory of a CuPy stand-in or a tensor, for NumPy."""
    if hasattr(x, "numpy"):
        import torch

        return x.detach().view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.detach().numpy()
    if not x.size:
        return np.empty(x.shape, x.dtype)
    reach = x.itemsize + sum(stride * (size - 1) for stride, size in zip(x.strides, x.shape, strict=True))
    return np.ndarray(x.shape, x.dtype, (ctypes.c_char * reach).from_address(x.data.ptr), 0, x.strides)


class _Patches(ExitStack):
    def set(self, holder: Any, name: str, value: Any) -> None:
        self.enter_context(mock.patch.object(holder, name, value, create=True))


@contextmanager
def fake_gpu(host: HostCuda | None = None, *, guards: bool = True, multiprocessors: int = 4) -> Iterator[FakeGpu]:
    """Within it every tensor, and every array of `cupy_array`, is on CUDA device 0. `guards`: PyTorch's own."""
    gpu = FakeGpu(host or HostCuda())
    with _Patches() as patches:
        _fake_cupy(gpu, patches)
        _fake_torch(gpu, patches)
        patches.set(_compile, "_compiled", gpu.handle)
        patches.set(_compile, "_facts", lambda device: (multiprocessors, gpu.host.max_cluster))
        patches.set(_compile.CupyBackend, "threads", property(lambda self: gpu.host.threads, lambda self, value: None))
        library = {"cuLaunchKernelEx": gpu.launch_ex}
        patches.set(_driver, "_library", lambda: _Library(library))
        patches.set(_arrays, "_quick_of_type", {})
        patches.set(_arrays, "_library_of_type", {})
        patches.set(_run, "_plans", SimpleNamespace())
        patches.set(_cuda, "_captured", [])
        if not guards:
            patches.set(_arrays, "_tensor_guards", lambda: None)
        yield gpu


class _Library(dict):
    def __getattr__(self, name: str) -> Any:
        return self[name]


def cupy_array(values: np.ndarray) -> Any:
    """A CuPy array of a copy of NumPy's memory, with its strides."""
    import cupy

    values = values.copy(order="K")
    memory = cupy.cuda.UnownedMemory(values.ctypes.data or 64, max(values.nbytes, 1), values, 0)
    return cupy.ndarray(values.shape, values.dtype, cupy.cuda.MemoryPointer(memory, 0), values.strides)


def _fake_cupy(gpu: FakeGpu, patches: _Patches) -> None:
    import cupy
    from cupy_backends.cuda.api import driver, runtime

    class Device:
        def __init__(self, ordinal: int | None = None) -> None:
            self.id = gpu.device if ordinal is None else ordinal

        def __enter__(self) -> None:
            self._before, gpu.device = gpu.device, self.id

        def __exit__(self, *error: Any) -> None:
            gpu.device = self._before

    class Stream:
        def __init__(self, handle: int) -> None:
            self.ptr = handle

        @staticmethod
        def from_external(stream: Any) -> Stream:
            return Stream(stream.__cuda_stream__()[1])

        def __enter__(self) -> None:
            self._before, gpu.stream = gpu.stream, self.ptr

        def __exit__(self, *error: Any) -> None:
            gpu.stream = self._before

        def is_capturing(self) -> bool:
            return gpu.capturing

    def memory(size: int) -> Any:
        values = gpu.memory(size)
        return cupy.cuda.UnownedMemory(values.ctypes.data, size, values, gpu.device)

    def empty(shape: Any, dtype: Any = float) -> Any:
        dtype = np.dtype(dtype)
        size = max(1, int(np.prod(shape)) * dtype.itemsize)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory(size), 0))

    unowned = cupy.cuda.UnownedMemory
    patches.set(
        cupy.cuda, "UnownedMemory", lambda address, size, owner, device=0: unowned(address, size, owner, device)
    )
    patches.set(cupy.cuda, "Device", Device)
    patches.set(cupy.cuda, "Stream", Stream)
    patches.set(cupy.cuda, "Memory", memory)
    patches.set(cupy.cuda, "get_current_stream", lambda: Stream(gpu.stream))
    patches.set(cupy, "empty", empty)
    patches.set(cupy, "asarray", cupy_array)
    patches.set(cupy, "ascontiguousarray", lambda x: cupy_array(np.ascontiguousarray(numpy_of(x))))
    patches.set(cupy, "asnumpy", lambda x: numpy_of(x).copy())
    patches.set(runtime, "getDevice", lambda: gpu.device)
    patches.set(runtime, "getDeviceCount", lambda: 2)
    patches.set(runtime, "streamIsCapturing", lambda stream: gpu.capturing)
    patches.set(driver, "ctxGetCurrent", lambda: gpu.device + 100)
    patches.set(driver, "launchKernel", gpu.launch_kernel)
    _cuda._stream_of.cache_clear()
    patches.callback(_cuda._stream_of.cache_clear)


def _fake_torch(gpu: FakeGpu, patches: _Patches) -> None:
    try:
        import torch
    except ImportError:
        return
    real_empty = torch.empty

    def where(x: Any) -> str:
        return getattr(x, "on", "cuda:0")

    def empty(shape: Any, *, dtype: Any = None, device: Any = None) -> Any:
        if str(device) != "cpu":
            gpu.allocations += 1
        made = real_empty(shape, dtype=dtype)
        return made.view(torch.uint8).fill_(POISON).view(dtype) if made.dim() and made.numel() else made

    tensor = torch.Tensor
    patches.set(tensor, "device", property(lambda x: torch.device(where(x))))
    patches.set(tensor, "is_cuda", property(lambda x: where(x).startswith("cuda")))
    patches.set(tensor, "get_device", lambda x: -1 if where(x) == "cpu" else int(where(x)[-1]))
    patches.set(torch, "empty", empty)
    patches.set(torch.cuda, "is_initialized", lambda: True)
    patches.set(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: gpu.stream)
    patches.set(_arrays._Torch, "share_cuda", lambda self, values: torch.from_numpy(numpy_of(values)))
    _arrays._torch_stream.cache_clear()
    patches.callback(_arrays._torch_stream.cache_clear)
