"""A checked call on CUDA arrays: memory of the caller's library, kernels through `cupyspec._compile`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cupyspec import _cuda
from cupyspec._arrays import Border
from cupyspec._call import Array, ChainCall, ChainResult
from cupyspec._compile import CupyBackend
from cupyspec._packed import require_compiled
from cupyspec._run import is_contiguous
from cupyspec._status import raise_for_status
from cupyspec.rules import Sigmoid, Token
from cupyspec.rules._launch import run_chain


class _Backend(CupyBackend):
    """Kernels on the border's device and stream, memory of the caller's library."""

    def __init__(self, border: Border) -> None:
        super().__init__()
        self._border = border
        self.allocated: list[Any] = []

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        array = self._border.library.empty_cuda(shape, dtype, self._border.device.ordinal)
        self.allocated.append(array)
        return array

    def pointer(self, array: Any) -> int:
        return array.pointer if isinstance(array, Array) else self._border.library.pointer_cuda(array)


def run(
    border: Border, call: ChainCall, rule: Token | Sigmoid, destinations: Mapping[str, Array], check: bool
) -> ChainResult:
    """Enqueue a call; nothing is waited for unless `check`. Results are in the library that `empty_cuda` uses."""
    capturing = _cuda.is_capturing()
    call = with_unit_strides(call)
    if capturing:
        refuse_host_values(border, call, check)
        require_compiled(call, rule)
    backend = _Backend(border)
    fields = call.outputs()
    direct = {name: array for name, array in destinations.items() if is_contiguous(array)}
    result = ChainResult(**{name: direct.get(name) or backend.empty(*spec) for name, spec in fields.items()})
    run_chain(call, rule, backend, out=result)
    for name, array in destinations.items():
        if name not in direct:
            filled = _result_array(backend, getattr(result, name), fields[name][1], array.shape)
            _cuda.wrap(array)[...] = _cuda.wrap(filled)
    if capturing and not border.library.keeps_captured_memory:
        _cuda.keep_for_replays(backend.allocated)
    elif not border.library.frees_in_stream_order:
        _cuda.keep_until_done((call, backend.allocated))
    if check:
        raise_for_status(_cuda.to_host(_result_array(backend, result.status, "int32", (call.batch_size,))))
    return result


def refuse_host_values(border: Border, call: ChainCall, check: bool) -> None:
    """ValueError, while a CUDA graph is recorded, for what every replay would repeat, or wait for."""
    if isinstance(call.seed, int) or isinstance(call.step, int):
        border.refuse_in_capture("a host seed or step")
    if check:
        border.refuse_in_capture("check=True")


def with_unit_strides(call: ChainCall) -> ChainCall:
    """The call with score rows that kernels can read; itself where they are so."""
    changed = {}
    for name in ("target", "draft"):
        scores = getattr(call, name)
        if scores is not None:
            array = _cuda.with_unit_stride(f"{name}_logits", scores.array)
            if array is not scores.array:
                changed[name] = replace(scores, array=array)
    return replace(call, **changed) if changed else call


def _result_array(backend: _Backend, array: Any, dtype: str, shape: tuple[int, ...]) -> Array:
    strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    return Array(backend.pointer(array), shape, strides, dtype, None, array)
