"""The back ends as tests use them: NumPy arrays in, NumPy arrays out, in segments of 256 ids, with or without a planted fault.

A fault is planted by replacing text, in a copy of the Python modules or of the expanded CUDA source as it is read: shipped
files hold no switches, and a replacement that does not match exactly once is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import cupyspec
from cupyspec import Sample, Verification
from cupyspec._sources import source
from host_cuda.backend import HostCuda, kernels_on_host
from strategies import segments_of

SMALL = 256  # the smallest segment that the kernels know: one granule of 8 ids for each of 32 lanes
# Of the CPU path, each before those that import it.
CPU_MODULES = ("cupyspec._philox", *(f"cupyspec.cpu.{name}" for name in ("rows", "rules", "race", "chain")))


class Patch(NamedTuple):
    """A mistake as a diff."""

    old: str
    new: str


def planted(texts: Mapping[str, str], patches: Sequence[Patch]) -> dict[str, str]:
    """Texts with each patch put in, where its old text stands: in one place of one of them."""
    texts = dict(texts)
    for patch in patches:
        found = {name: text.count(patch.old) for name, text in texts.items() if patch.old in text}
        if sum(found.values()) != 1:
            raise LookupError(f"a planted fault must match in one place, not in {found or 'none'}:\n{patch.old}")
        (name,) = found
        texts[name] = texts[name].replace(patch.old, patch.new)
    return texts


KERNEL_FILES = ("chain_stats.cu", "chain_verify.cu")  # they share headers


def planted_in_kernels(patches: Sequence[Patch]) -> Callable[[str], str]:
    """What puts patches into the expanded text of a kernel file: each is in one place of at least one of them."""
    for patch in patches:
        found = {name: source(name).count(patch.old) for name in KERNEL_FILES}
        if set(found.values()) not in ({0, 1}, {1}):
            raise LookupError(f"a planted fault must match in one place of a file, not in {found}:\n{patch.old}")

    def plant(text: str) -> str:
        for patch in patches:
            text = text.replace(patch.old, patch.new)
        return text

    return plant


class Machine:
    """`verify` and `sample` of one back end; this one is the CPU path."""

    name = "numpy"

    def __init__(self, patches: Sequence[Patch] = ()) -> None:
        self.run = _cpu_path(tuple(patches)) if patches else None

    def verify(
        self, draft_tokens: Any, target: Any, draft: Any = None, *, segment: int = SMALL, **options: Any
    ) -> Verification:
        """`cupyspec.verify`; the answer is the caller's to keep."""
        arrays = [self.array(x) for x in (draft_tokens, target, draft)]
        options |= {name: self.array(x) for name, x in options.items() if name.endswith("log_normalizer")}
        with segments_of(segment), self.at_work():
            answer = cupyspec.verify(*arrays, **options)
        return Verification(*(self.values(x) for x in answer[:3]))

    def sample(self, logits: Any, *, segment: int = SMALL, **options: Any) -> Sample:
        """`cupyspec.sample`."""
        array = self.array(logits)
        with segments_of(segment), self.at_work():
            answer = cupyspec.sample(array, **options)
        return Sample(*(None if x is None else self.values(x) for x in answer))

    def at_work(self) -> AbstractContextManager[Any]:
        """Within it calls run here."""
        return mock.patch("cupyspec._run.run_on_cpu", self.run) if self.run else ExitStack()

    def array(self, values: Any) -> Any:
        """An array where the back end reads it."""
        return values

    def values(self, array: Any) -> np.ndarray:
        """A copy for NumPy."""
        return np.array(array)


@cache
def _cpu_path(patches: tuple[Patch, ...]) -> Callable[..., Any]:
    """`cupyspec.cpu.chain.run` of a copy of the CPU path with patches."""
    files = {name: Path(find_spec(name).origin) for name in CPU_MODULES}  # type: ignore[union-attr, arg-type]
    texts = {name: file.read_text() for name, file in files.items()}
    with mock.patch.dict(sys.modules):
        for name, text in planted(texts, patches).items():
            if name == "cupyspec._philox" and text == texts[name]:
                continue  # the library's own: another Purpose would not be equal to it
            sys.modules[name] = module = ModuleType(name)
            exec(compile(text, f"{files[name]} with a planted fault", "exec"), module.__dict__)
        return sys.modules["cupyspec.cpu.chain"].run


class _OneWarp(HostCuda):
    """Blocks of one warp, which the CPU runs several times faster, and memory as a device's pool hands it out:
    with what the call before left in it."""

    def __init__(self, patches: Sequence[Patch]) -> None:
        super().__init__(threads=32, change=planted_in_kernels(patches))
        self.pool: dict[Any, np.ndarray] = {}
        self.asked = 0  # in this call

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        key = (self.asked, shape, dtype)
        self.asked += 1
        if key not in self.pool:
            self.pool[key] = super().empty(shape, dtype)
            self.allocated.clear()
        return self.pool[key]


class HostMachine(Machine):
    """The CUDA kernels, compiled by g++ and run on the CPU."""

    name = "host_cuda"

    def __init__(self, patches: Sequence[Patch] = ()) -> None:
        self.backend = _OneWarp(patches)

    def at_work(self) -> AbstractContextManager[Any]:
        self.backend.asked = 0
        self.backend.launches.clear()
        return kernels_on_host(self.backend)


class GpuMachine(Machine):
    """The CUDA kernels on a GPU, through PyTorch."""

    name = "gpu"

    def __init__(self) -> None:
        import torch

        self.run, self.torch = None, torch

    def array(self, values: Any) -> Any:
        if values is None:
            return None
        values = np.asarray(values)
        if values.dtype.name == "bfloat16":
            return self.torch.from_numpy(values.view(np.int16).copy()).cuda().view(self.torch.bfloat16)
        return self.torch.from_numpy(np.array(values)).cuda()

    def values(self, array: Any) -> np.ndarray:
        return array.cpu().numpy()


MACHINES = {machine.name: machine for machine in (Machine, HostMachine, GpuMachine)}
