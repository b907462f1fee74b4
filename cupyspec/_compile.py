"""From a specialisation to compiled kernels, and their launch, through CuPy. No other module knows CuPy's compiler.

CuPy is imported at the first use, never with this module.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyspec import _driver
from cupyspec._sources import source

C_NAMES = {  # of dtypes, in kernels/
    "float32": "float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int32": "int",
    "int64": "long long",
}
INSTALL = "pip install 'cupyspec[cuda12]' (CUDA 12) or 'cupyspec[cuda13]' (CUDA 13)"
OLDEST_GPU = (7, 5)  # compute capability: what CUDA 13 still compiles for, and the CI tests

_CUPY_WHEELS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")


@dataclass(frozen=True)
class Specialisation:
    """One module of kernels: a file of ``kernels/`` and the macros it is compiled with."""

    file: str
    macros: tuple[tuple[str, str], ...]
    params: np.dtype[Any] = field(compare=False)  # the struct that every kernel of the file takes, its one argument

    @property
    def options(self) -> tuple[str, ...]:
        """Compiler options."""
        return tuple(f"-D{name}={value}" for name, value in self.macros)


class Launch(NamedTuple):
    """One kernel of a call."""

    specialisation: Specialisation
    name: str
    grid: int  # blocks
    block: int  # threads of a block
    cluster: int = 1  # blocks that run together and may wait for each other
    overlap: bool = False  # may start before the kernel before it has ended, and waits for it by itself

    def check(self, params: np.ndarray[Any, Any]) -> None:
        """TypeError or ValueError for a launch that CUDA would not check, or would answer with a bare error code."""
        if params.dtype != self.specialisation.params or params.shape != ():
            size = self.specialisation.params.itemsize
            raise TypeError(f"{self.name} takes one struct of {size} bytes, got {params!r}")
        if not (
            0 < self.grid < 2**31 and 0 < self.block <= 1024 and 0 < self.cluster and self.grid % self.cluster == 0
        ):
            raise ValueError(
                f"{self.name} cannot run as {self.grid} blocks of {self.block} threads in clusters of {self.cluster}"
            )


@functools.cache  # four look-ups among the installed packages take longer than a call
def require_one_cupy() -> None:
    """ImportError if several CuPy packages are installed: they overwrite each other's files."""
    installed = []
    for wheel in _CUPY_WHEELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed.append(f"{wheel} {importlib.metadata.version(wheel)}")
    if len(installed) > 1:
        raise ImportError(
            f"several CuPy packages are installed and overwrite each other's files: {', '.join(installed)}. "
            f"Uninstall all of them, then {INSTALL}"
        )


def import_cupy() -> Any:
    """CuPy, or an ImportError that says what to install."""
    require_one_cupy()
    if sys.modules.get("cupy") is not None:  # None: its import is forbidden
        return sys.modules["cupy"]
    # CuPy makes its cache folder when imported; one that cannot be made would make the import fail.
    if not _can_make(Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")):
        os.environ["CUPY_CACHE_DIR"] = _temporary_cache()
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"CUDA arrays need CuPy: {INSTALL}. Importing it failed: {error}") from error
    return cupy


def _can_make(folder: Path) -> bool:
    """Whether a folder is there or can be made."""
    while not folder.exists():
        if folder.parent == folder:
            return False
        folder = folder.parent
        if folder.exists():
            return folder.is_dir() and os.access(folder, os.W_OK)
    return folder.is_dir()


def _temporary_cache() -> str:
    """A folder for compiled kernels that belongs to this user alone."""
    user = getattr(os, "getuid", lambda: "user")()
    folder = Path(tempfile.gettempdir()) / f"cupyspec-kernels-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    mine = not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
    if folder.is_symlink() or not mine or not os.access(folder, os.W_OK):
        # Somebody else's: a compiled kernel from there could be anything.
        return tempfile.mkdtemp(prefix="cupyspec-kernels-")
    return str(folder)


class _Module:
    """A specialisation compiled for one device."""

    def __init__(self, specialisation: Specialisation) -> None:
        cupy = import_cupy()
        self._raw = cupy.RawModule(
            code=source(specialisation.file), options=("--std=c++17", *specialisation.options), backend="nvrtc"
        )
        self._kernels: dict[str, tuple[int, Any]] = {}

    def address(self, name: str) -> int:
        """The driver's handle of a kernel; compiles the module at the first call."""
        if name not in self._kernels:
            raw = self._raw.get_function(name)
            # Kept: get_function makes a new object each time, and the handle lives as long as its module.
            self._kernels[name] = int(raw.kernel.ptr), raw
        return self._kernels[name][0]


_modules: dict[tuple[Specialisation, int], _Module] = {}
_lock = threading.Lock()


def _refuse_in_capture() -> None:
    if import_cupy().cuda.get_current_stream().is_capturing():
        raise ValueError(
            "this call's kernels are not compiled yet, which cannot be done while a CUDA graph is recorded: call "
            "cupyspec.warm_up(...), or make the same call once before"
        )


def _compiled(specialisation: Specialisation, name: str, device: int) -> int:
    """The driver's handle of a kernel on the current device, which must be `device`."""
    module = _modules.get((specialisation, device))
    if module is not None and name in module._kernels:
        return module.address(name)
    with _lock:  # two threads would compile the same text twice
        module = _modules.get((specialisation, device))
        _refuse_in_capture()
        if module is None:
            _check_device(device)
            module = _Module(specialisation)
        try:
            address = _address(module, name)
        except OSError as error:
            # CuPy could not write its cache: a read-only or foreign folder. Compile into one of our own.
            _use_temporary_cache(error)
            module = _Module(specialisation)
            address = _address(module, name)
        _modules[specialisation, device] = module
        return address


def _address(module: _Module, name: str) -> int:
    cupy = import_cupy()
    try:
        return module.address(name)
    except cupy.cuda.compiler.CompileException as error:
        raise RuntimeError(f"cupyspec's kernels do not compile with this NVRTC: {error}") from error
    except (ImportError, RuntimeError) as error:
        if "nvrtc" in str(error).lower():
            raise ImportError(f"CuPy finds no usable NVRTC, CUDA's runtime compiler: {INSTALL}. {error}") from error
        raise


def _use_temporary_cache(reason: OSError) -> None:
    """Move CuPy's kernel cache to a folder that can be written, or raise the reason where this CuPy cannot be moved."""
    try:
        from cupy.cuda import compiler
        from cupy.cuda._compiler_cache import DiskKernelCacheBackend
    except ImportError:
        raise reason from None
    compiler._set_kernel_cache_backend(DiskKernelCacheBackend(_temporary_cache()))


def _check_device(device: int) -> None:
    cupy = import_cupy()
    capability = cupy.cuda.Device(device).compute_capability  # "90", "100"
    major, minor = int(capability[:-1]), int(capability[-1])
    if (major, minor) < OLDEST_GPU:
        raise RuntimeError(
            f"CUDA device {device} has compute capability {major}.{minor}; cupyspec's kernels need at least "
            f"{OLDEST_GPU[0]}.{OLDEST_GPU[1]} (Turing)"
        )


class CupyBackend:
    """Launches on CuPy's current device and stream: what `cupyspec.rules._launch.run_chain` needs beside memory."""

    def __init__(self) -> None:
        self._cupy = import_cupy()
        from cupy_backends.cuda.api import driver, runtime

        self._driver, self._runtime = driver, runtime
        self.device = int(runtime.getDevice())
        self.multiprocessors, self.max_cluster = _facts(self.device)
        self.threads = 0

    def compile(self, specialisation: Specialisation, name: str) -> None:
        """Compile and load a kernel, or take it from CuPy's cache."""
        _compiled(specialisation, name, self.device)

    def address(self, specialisation: Specialisation, name: str) -> int:
        """The driver's handle of a kernel, compiled if need be."""
        return _compiled(specialisation, name, self.device)

    def launch(self, launch: Launch, params: np.ndarray[Any, Any]) -> None:
        """Launch on the current stream."""
        launch.check(params)
        if not self._driver.ctxGetCurrent():  # a new thread has none until it uses the runtime
            self._runtime.setDevice(self.device)
            self._runtime.free(0)
        kernel = _compiled(launch.specialisation, launch.name, self.device)
        # The driver copies the argument during the call. CuPy's own launch takes no structs and costs twice the time.
        arguments = np.array([params.ctypes.data], np.uintp)
        stream = self._cupy.cuda.get_current_stream().ptr
        if launch.cluster == 1 and not launch.overlap:
            self._driver.launchKernel(
                kernel, launch.grid, 1, 1, launch.block, 1, 1, 0, stream, arguments.ctypes.data, 0
            )
        else:
            shape = _driver.config(launch.grid, launch.block, launch.cluster, launch.overlap)
            shape.stream = stream
            _driver.launch(kernel, shape, arguments.ctypes.data)


@functools.cache
def _facts(device: int) -> tuple[int, int]:
    """(multiprocessors, blocks that a cluster may have) of a device."""
    properties = import_cupy().cuda.Device(device)
    return int(properties.attributes["MultiProcessorCount"]), 8 if int(properties.compute_capability) >= 90 else 1
