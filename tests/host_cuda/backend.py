"""A backend for `cupyspec.rules._launch.run_chain` whose device is the CPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from cupyspec._arrays import aligned_empty
from cupyspec._call import ChainCall
from cupyspec._compile import Launch, Specialisation
from cupyspec._sources import source
from cupyspec.rules._launch import run_chain

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
    "-Wno-unused-parameter",  # some are for clusters alone
    "-U_FORTIFY_SOURCE",
)
_KERNEL = re.compile(r"__global__ void\s[^{]*?(\w+)\([^()]*\)\s*\{")  # its name


def compiler() -> str | None:
    """g++, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def sanitized() -> bool:
    """Whether this process builds the kernels with sanitizers, see test_kernels.py."""
    return bool(os.environ.get("CUPYSPEC_TEST_SANITIZE"))


@cache
def library(
    specialisation: Specialisation, change: Callable[[str], str] | None = None, clusters: bool = True
) -> ctypes.CDLL:
    """The shared library of a specialisation; `change` edits the expanded source on its way to the compiler."""
    text = source(specialisation.file)
    layout = layout_checks("cupyspec::ChainParams", specialisation.params)
    options = (*specialisation.options, f"-DCUPYSPEC_CLUSTERS={clusters:d}")
    return build((text if change is None else change(text)) + layout, options)


def layout_checks(struct: str, dtype: np.dtype) -> str:
    """C++ that compiles only if every member lies where NumPy has it, those of members too."""

    def checks(path: str, base: int, dtype: np.dtype) -> Iterator[str]:
        for name, (member, offset, *_) in (dtype.fields or {}).items():
            at = f"{path}{name}"
            same = f"offsetof({struct}, {at}) == {base + offset} && sizeof((({struct}*)0)->{at}) == {member.itemsize}"
            yield f'static_assert({same}, "NumPy has another {at}");'
            yield from checks(f"{at}.", base + offset, member)

    size = f'static_assert(sizeof({struct}) == {dtype.itemsize}, "NumPy has another size");'
    lines = [size, *checks("", 0, dtype)]
    return '\n#line 1 "layout"\n' + "\n".join(lines) + "\n"


def build(kernels: str, options: tuple[str, ...] = ()) -> ctypes.CDLL:
    """A shared library of kernels, built once per text and flags and kept in the temporary folder."""
    flags = [*_FLAGS, *options]
    if sanitized():
        flags += [SANITIZERS, "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    header = (_HERE / "cuda_on_host.hpp").read_text()
    table = "".join(f'{{"{name}", call<{name}>}}, ' for name in _KERNEL.findall(kernels))
    entries = (
        f"namespace host_cuda {{ const Entry all[] = {{{table}{{nullptr, nullptr}}}};\n"
        "const Entry* entries() { return all; } }"
    )
    text = f'#line 1 "cuda_on_host.hpp"\n{header}\n{kernels}\n#line 1 "entries"\n{entries}\n'.replace(
        "#pragma once", ""
    )
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
        ctypes.c_uint,
        ctypes.c_void_p,
        ctypes.c_uint64,
    ]
    return loaded


class HostCuda:
    """Runs launches at once. `order` permutes blocks and threads, `multiprocessors` shapes the launches.

    `clusters`: whether it is of the kind that has clusters, compute capability 9.0.
    `change` is a compile option: it edits the source before g++ reads it, and so plants a fault (see machines.py).
    """

    def __init__(
        self,
        *,
        order: int = 0,
        multiprocessors: int = 4,
        clusters: bool = True,
        threads: int = 64,
        change: Callable[[str], str] | None = None,
    ) -> None:
        self.order, self.multiprocessors, self.clusters, self.change = order, multiprocessors, clusters, change
        self.threads = threads  # few: every one is a fiber
        self.allocated: list[np.ndarray] = []  # in the order asked for, for tests that look into the scratch
        self.launches: list[tuple[str, int, np.ndarray, int]] = []  # name, grid, parameters, cluster

    @property
    def max_cluster(self) -> int:
        return 8 if self.clusters else 1

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        array = aligned_empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xA5  # whoever reads it before writing is seen
        self.allocated.append(array)
        return array

    def pointer(self, array: np.ndarray) -> int:
        return array.ctypes.data

    def launch(self, launch: Launch, params: np.ndarray) -> None:
        name, grid, cluster = launch.name, launch.grid, launch.cluster
        launch.check(params)
        if cluster > self.max_cluster or (launch.overlap and not self.clusters):
            raise ValueError(f"{name}: this machine knows no such launch: {launch}")
        self.order += 1
        self.launches.append((name, grid, params, cluster))
        message = library(launch.specialisation, self.change, self.clusters).host_cuda_launch(
            name.encode(), grid, launch.block, cluster, params.ctypes.data, self.order * 0x9E3779B97F4A7C15 % 2**64
        )
        if message:
            raise RuntimeError(f"{name}: {message.decode()}")


@contextmanager
def kernels_on_host(backend: HostCuda) -> Iterator[HostCuda]:
    """Within it `verify` and `sample` of CPU arrays run the kernels instead of the NumPy path."""
    with mock.patch("cupyspec._run.run_on_cpu", lambda call, rule: run_chain(call, rule, backend)):
        yield backend


class _CallSeen(Exception):
    pass


def checked_call(function: Any, *args: Any, **kwargs: Any) -> tuple[ChainCall, Any]:
    """What `verify` or `sample` hands to a back end: a call to be changed and run by `run_chain`, and the rule."""
    seen: list[Any] = []

    def see(call: ChainCall, rule: Any) -> None:
        seen.extend((call, rule))
        raise _CallSeen

    with mock.patch("cupyspec._run.run_on_cpu", see):
        try:
            function(*args, **kwargs)
        except _CallSeen:
            pass
    return seen[0], seen[1]
