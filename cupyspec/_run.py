"""From a checked call to the caller's arrays: the choice of path, `out=` and `check=`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, TypeVar

from cupyspec._arrays import Border, host
from cupyspec._call import Array, ChainCall, ChainResult
from cupyspec._segments import SEG
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
    given: tuple[Any, ...] | None = None,
) -> Answer:
    """Run a call. `outputs` names the fields of the answer that are arrays, with shape and dtype; others are None.

    `given` are the arguments as `repeat` takes them, where a call may be repeated.
    """
    destinations = _destinations(kind, border, outputs, out)
    if border.on_cuda:
        from cupyspec._run_cuda import run as run_on_cuda

        result = run_on_cuda(border, call, rule, destinations, check)
        if given is not None and call.segment == SEG and all(map(is_contiguous, destinations.values())):
            remember(kind, given, call, rule, outputs)
    else:
        result = on_cpu(call, rule)
        for name, array in destinations.items():
            host(array)[...] = getattr(result, name).reshape(array.shape)
        if check:
            raise_for_status(result.status)
    if out is not None:
        return out
    values = [
        border.hand_back(_shaped(getattr(result, name), outputs[name][0])) if name in outputs else None
        for name in kind._fields  # type: ignore[attr-defined]
    ]
    return kind._make(values)  # type: ignore[attr-defined]


def _shaped(array: Any, shape: tuple[int, ...]) -> Any:
    return array if array.shape == shape else array.reshape(shape)


def on_cpu(call: ChainCall, rule: Token | Sigmoid) -> ChainResult:
    """Run a call on CPU arrays."""
    return run_on_cpu(call, rule)


_plans = threading.local()  # of each kind of answer, `cupyspec._packed.Plans`: not there before the first CUDA array


def repeat(kind: type, given: tuple[Any, ...]) -> list[Any] | None:
    """The arrays of the answer to a call that is like one before; None: it must be checked and run by `answer`.

    `given` holds the function's arguments in the order of `cupyspec._packed.Op.names`.
    """
    plans = getattr(_plans, kind.__name__, None)
    return None if plans is None else plans.repeat(given)


def remember(
    kind: type,
    given: tuple[Any, ...],
    call: ChainCall,
    rule: Token | Sigmoid,
    outputs: Mapping[str, tuple[tuple[int, ...], str]],
) -> None:
    """Keep what a call like this one, on CUDA arrays, need not find out again."""
    from cupyspec import _packed

    plans = getattr(_plans, kind.__name__, None)
    if plans is None:
        plans = _packed.Plans(_packed.OPS[kind.__name__])
        setattr(_plans, kind.__name__, plans)
    plans.remember(given, call, rule, outputs)


def is_contiguous(array: Array) -> bool:
    """Whether an array's elements follow each other without gaps."""
    expected = 1
    for size, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


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
