"""What reading and copying memory takes by itself, in the same run: a plain sum, a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bench import harness
from bench.harness import Call, Sweep

SUM, COPY = "a plain sum", "a plain copy"
LARGE = {"cpu": 256 << 20, "cuda": 2 << 30}  # bytes, far more than any cache


class Bandwidth(NamedTuple):
    """GB/s on a large array."""

    read: float  # of a plain sum
    copy: float  # of a plain copy, read and written bytes together

    def floor(self, size: float) -> float:
        """Microseconds that reading `size` bytes takes at best."""
        return size / self.read / 1e3

    def columns(self, size: float) -> dict[str, float]:
        """Of a row of results about `size` bytes."""
        return {"read_gbps": self.read, "copy_gbps": self.copy, "floor_us": self.floor(size)}


def sum_calls(flat: Sequence[Any]) -> list[Call]:
    """A plain sum of each array."""
    if isinstance(flat[0], np.ndarray):
        return [lambda x=x: x.sum(dtype=np.float32) for x in flat]
    import torch

    return [lambda x=x: x.sum(dtype=torch.float32) for x in flat]


def copy_calls(flat: Sequence[Any]) -> list[Call]:
    """A copy of each array to other memory, the same for the same array."""
    if isinstance(flat[0], np.ndarray):
        empty_like: Callable[[Any], Any] = np.empty_like
        copy: Callable[[Any, Any], Any] = np.copyto
    else:
        import torch

        empty_like, copy = torch.empty_like, torch.Tensor.copy_
    others = {id(x): empty_like(x) for x in flat}
    return [partial(copy, others[id(x)], x) for x in flat]


def sweeps(flat: Sequence[Any]) -> dict[str, Sweep]:
    """Both, to be timed beside providers."""
    return {SUM: Sweep(sum_calls(flat), host=False), COPY: Sweep(copy_calls(flat), host=False)}


def bandwidth(device: str, budget: float = 0.2) -> Bandwidth:
    """Measure both on one large array of 2-byte numbers on a GPU, float32 on the CPU; not of zeros."""
    size = LARGE[device]
    try:
        import torch
    except ImportError:
        flat: Any = np.random.default_rng(0).random(size // 4, np.float32)
    else:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        flat = torch.empty(size // dtype.itemsize, dtype=dtype, device=harness.torch_device(device)).uniform_()
    found = harness.measure(device, sweeps([flat]), budget)
    return Bandwidth(*(factor * size / found[name].time.median / 1e3 for name, factor in ((SUM, 1), (COPY, 2))))
