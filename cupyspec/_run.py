"""From a checked call to the caller's arrays: the choice of path, `out=` and `check=`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from cupyspec._arrays import Border, host
from cupyspec._call import Array, ChainCall
from cupyspec._status import raise_for_status
from cupyspec.cpu.chain import run as run_on_cpu
from cupyspec.rules import Sigmoid, Token

Answer = TypeVar("Answer", bound=tuple[Any, ...])


def answer(
    kind: type[Answer],
    border: Border,
    call: ChainCall,
    rule: Token | Sigmoid,
    outputs: Mapping[str, tuple[tuple[int, ...], str]],
    out: Any,
    check: bool,
) -> Answer:
    """Run a call. `outputs` names the fields of the answer that are arrays, with shape and dtype; others are None."""
    destinations = _destinations(kind, border, outputs, out)
    if border.on_cuda:
        from cupyspec._run_cuda import run as run_on_cuda

        result = run_on_cuda(border, call, rule, destinations, check)
    else:
        result = run_on_cpu(call, rule)
        for name, array in destinations.items():
            host(array)[...] = getattr(result, name).reshape(array.shape)
        if check:
            raise_for_status(result.status)
    if out is not None:
        return out
    values = [
        border.hand_back(getattr(result, name).reshape(outputs[name][0])) if name in outputs else None
        for name in kind._fields  # type: ignore[attr-defined]
    ]
    return kind._make(values)  # type: ignore[attr-defined]


def _destinations(
    kind: type[Answer],
    border: Border,
    outputs: Mapping[str, tuple[tuple[int, ...], str]],
    out: Any,
) -> dict[str, Array]:
    """The arrays of `out`, checked before anything runs."""
    if out is None:
        return {}
    if not isinstance(out, kind):
        raise TypeError(f"out must be a {kind.__name__}, got {type(out).__name__}")
    destinations: dict[str, Array] = {}
    for name in kind._fields:  # type: ignore[attr-defined]
        given = getattr(out, name)
        if name in outputs:
            destinations[name] = border.borrow_output(f"out.{name}", given, *outputs[name])
        elif given is not None:
            raise ValueError(f"out.{name} must be None in this call, got {type(given).__name__}")
    return destinations
