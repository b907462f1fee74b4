"""A backend for `cupyspec.rules._launch.run_chain` whose device is the CPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from cupyspec._arrays import aligned_empty
from cupyspec._compile import Specialisation
from cupyspec._sources import source

_HERE = Path(__file__).resolve().parent
SANITIZERS = "-fsanitize=address,undefined"
# -O1: the optimiser's further passes cost more of CI's time than they save.
_FLAGS = (
    "-std=c++17",
    "-O1",
    "-g1",
    "-shared",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",  # #pragma unroll
    "-U_FORTIFY_SOURCE",
)


def compiler() -> str | None:
    """g++, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def sanitized() -> bool:
    """Whether this process builds the kernels with sanitizers, see test_kernels.py."""
    return bool(os.environ.get("CUPYSPEC_TEST_SANITIZE"))


def _text() -> str:
    parts = [(_HERE / "cuda_on_host.hpp").read_text(), source("chain.cu"), (_HERE / "chain_entry.hpp").read_text()]
    return "\n".join(f'#line 1 "part{n}"\n{part}' for n, part in enumerate(parts)).replace("#pragma once", "")


@cache
def library(specialisation: Specialisation) -> ctypes.CDLL:
    """The shared library of a specialisation, built once per text and flags and kept in the temporary folder."""
    flags = [*_FLAGS, *specialisation.defines]
    if sanitized():
        flags += [SANITIZERS, "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    text = _text()
    key = hashlib.sha256("\0".join([text, *flags]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"cupyspec-host-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    built = folder / f"{key}.so"
    if not built.exists():
        # Several test processes may build the same library: each its own file, moved into place at once.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unit, output = Path(scratch) / "chain.cpp", Path(scratch) / "chain.so"
            unit.write_text(text)
            run = subprocess.run(
                [compiler() or "g++", *flags, str(unit), "-o", str(output)], capture_output=True, text=True
            )
            if run.returncode:
                raise RuntimeError(f"g++ failed on the kernels:\n{run.stderr[:8000]}")
            output.replace(built)
    loaded = ctypes.CDLL(str(built))
    loaded.host_cuda_launch.restype = ctypes.c_char_p
    loaded.host_cuda_launch.argtypes = [
        ctypes.c_char_p,
        ctypes.c_uint,
        ctypes.c_uint,
        ctypes.c_void_p,
        ctypes.c_uint64,
    ]
    loaded.host_cuda_layout.restype = ctypes.POINTER(ctypes.c_longlong)
    return loaded


class HostCuda:
    """Runs launches at once. `order` permutes blocks and threads, `multiprocessors` shapes the launches."""

    def __init__(self, *, order: int = 0, multiprocessors: int = 4) -> None:
        self.order, self.multiprocessors = order, multiprocessors
        self.allocated: list[np.ndarray] = []  # in the order asked for, for tests that look into the scratch
        self.launches: list[tuple[str, int, np.ndarray]] = []

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        array = aligned_empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xA5  # whoever reads it before writing is seen
        self.allocated.append(array)
        return array

    def pointer(self, array: np.ndarray) -> int:
        return array.ctypes.data

    def launch(self, *, specialisation: Specialisation, name: str, grid: int, block: int, params: np.ndarray) -> None:
        self.order += 1
        self.launches.append((name, grid, params))
        message = library(specialisation).host_cuda_launch(
            name.encode(), grid, block, params.ctypes.data, self.order * 0x9E3779B97F4A7C15 % 2**64
        )
        if message:
            raise RuntimeError(f"{name}: {message.decode()}")
