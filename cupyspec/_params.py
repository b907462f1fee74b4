"""Per-row parameters: seeds, steps, lengths, temperatures. Host values are checked here, device values by the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupyspec._arrays import ACTIVE_DTYPES, INTEGER_DTYPES, REAL_DTYPES, Border, HostArray, host
from cupyspec._call import Array
from cupyspec._philox import POSITION_LIMIT, STEP_LIMIT

_MASK = (1 << 64) - 1
_FLOAT32_LIMIT = 3.4e38


def seeds(border: Border, value: Any, batch_size: int) -> int | Array:
    """One seed for the call (to be split per row) as an int in [0, 2^64), or an array with a seed per row.

    A host array comes back as uint64 [B].
    """
    if type(value) is int:
        return _seed_bits(value)
    values = border.parameter("seed", value)
    shapes = f"a scalar, [{batch_size}], or [{batch_size}, 2] uint32 (high, low)"
    if isinstance(values, Array):
        _check_dtype("seed", values.dtype, INTEGER_DTYPES)
        pair = values.shape == (batch_size, 2) and values.dtype == "uint32"
        if not (pair or values.shape in ((), (batch_size,))):
            raise ValueError(f"seed must be {shapes}, got shape {values.shape} of {values.dtype}")
        return values
    values = _host_integers("seed", values)
    if values.shape == ():
        return _seed_bits(values.item())
    if values.shape == (batch_size, 2) and values.dtype == np.uint32:
        return border.place((values[:, 0].astype(np.uint64) << np.uint64(32)) | values[:, 1])
    if values.shape != (batch_size,):
        kind = "Python integers" if values.dtype == object else values.dtype.name
        raise ValueError(f"seed must be {shapes}, got shape {values.shape} of {kind}")
    if values.dtype == object:
        return border.place(np.array([_seed_bits(v) for v in values], np.uint64))
    return border.place(values.astype(np.int64 if values.dtype.kind == "i" else np.uint64).view(np.uint64))


def _seed_bits(value: int) -> int:
    if not -(1 << 63) <= value <= _MASK:
        raise ValueError(f"seed must be in [-2^63, 2^64), got {value}")
    return value & _MASK


def counter_number(
    border: Border, name: str, value: Any, batch_size: int, limit: int, active: HostArray | None
) -> int | Array:
    """A non-negative integer below `limit` for every row: an int, or an array [B] (uint64 on the host)."""
    if type(value) is int and 0 <= value < limit:
        return value
    values = border.parameter(name, value)
    shape = values.shape
    if shape not in ((), (1,), (batch_size,)):
        raise ValueError(f"{name} must be an integer, [1] or [{batch_size}], got shape {shape}")
    if isinstance(values, Array):
        _check_dtype(name, values.dtype, INTEGER_DTYPES)
        return values
    values = _host_integers(name, values)
    looked_at = values[active] if active is not None and shape == (batch_size,) else values
    for bad in looked_at[(looked_at < 0) | (looked_at >= limit)][:1]:
        raise ValueError(f"{name} must be in [0, {limit}), got {bad}")
    if shape != (batch_size,):
        return int(values.item())
    if active is not None:
        values = np.where(active, values, 0)
    return border.place(values.astype(np.uint64))


def steps(border: Border, value: Any, batch_size: int, active: HostArray | None) -> int | Array:
    """`step`, in [0, 2^56)."""
    return counter_number(border, "step", value, batch_size, STEP_LIMIT, active)


def positions(border: Border, name: str, value: Any, batch_size: int, active: HostArray | None) -> int | Array:
    """`position` or `draw`, in [0, 2^16)."""
    return counter_number(border, name, value, batch_size, POSITION_LIMIT, active)


def temperatures(border: Border, name: str, value: Any, batch_size: int, active: HostArray | None) -> float | Array:
    """Temperatures: a float, or an array [B] (float32 on the host). Wrong host values are a ValueError."""
    if type(value) in (int, float) and 0 <= value < _FLOAT32_LIMIT:
        return float(np.float32(value))
    values = border.parameter(name, value)
    if isinstance(values, Array):
        _check_dtype(name, values.dtype, REAL_DTYPES)
        if values.shape == ():
            return Array(values.pointer, (batch_size,), (0,), values.dtype, None, values.owner)
        _check_per_row(name, values.shape, batch_size)
        return values
    values = _host_reals(name, values)
    if values.shape != ():
        _check_per_row(name, values.shape, batch_size)
    with np.errstate(all="ignore"):
        single = values.astype(np.float32)
    looked_at = active if active is not None and values.shape != () else ...
    checked, checked_single = values[looked_at], single[looked_at]
    for bad in checked[~((checked >= 0) & np.isfinite(checked_single))][:1]:
        raise ValueError(f"{name} must be finite and not negative, got {bad}")
    return float(single) if values.shape == () else border.place(single)


def lengths(border: Border, name: str, value: Any, size: int) -> Array | None:
    """Draft counts [B] or their running sums [B + 1]: any integer dtype. Wrong values get a status, not an error."""
    if value is None:
        return None
    values = border.parameter(name, value)
    if values.shape != (size,):
        raise ValueError(f"{name} must have shape ({size},), got {values.shape}")
    if isinstance(values, Array):
        _check_dtype(name, values.dtype, INTEGER_DTYPES)
        return values
    values = _host_integers(name, values)
    if values.dtype == object:
        # Python integers of any size: what int64 cannot hold is out of range either way.
        values = np.array([min(max(v, -(1 << 63)), (1 << 63) - 1) for v in values], np.int64)
    return border.place(values)


def active_rows(border: Border, value: Any, batch_size: int) -> Array | None:
    """`active` [B], bool or uint8; None: all rows are."""
    if value is None:
        return None
    values = border.parameter("active", value)
    if isinstance(values, np.ndarray) and values.dtype == object:
        for v in values.flat:
            if not isinstance(v, (bool, np.bool_)):
                raise TypeError(f"active must be bools, or an array of bool or uint8, got {v!r}")
        values = values.astype(np.bool_)
    _check_per_row("active", values.shape, batch_size, "have")
    _check_dtype("active", str(values.dtype), ACTIVE_DTYPES)
    return values if isinstance(values, Array) else border.place(values)


def host_bools(array: Array | None) -> npt.NDArray[np.bool_] | None:
    """`active` for the host, where the host has it."""
    return None if array is None or array.host is None else host(array).astype(np.bool_)


def _check_per_row(name: str, shape: tuple[int, ...], batch_size: int, form: str = "be a scalar or have") -> None:
    if shape != (batch_size,):
        raise ValueError(f"{name} must {form} shape ({batch_size},), got {shape}")


def _check_dtype(name: str, dtype: str, allowed: tuple[str, ...]) -> None:
    if dtype not in allowed:
        raise TypeError(f"{name} must have dtype {' or '.join(allowed)}, got {dtype}")


def _host_integers(name: str, values: HostArray) -> HostArray:
    """Host values that must be integers; object arrays hold Python integers."""
    if values.dtype == object:
        for v in values.flat:
            if isinstance(v, (bool, np.bool_)) or not isinstance(v, (int, np.integer)):
                raise TypeError(f"{name} must be integers, got {v!r}")
        return np.array([int(v) for v in values.flat] + [None], dtype=object)[:-1].reshape(values.shape)
    if values.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {values.dtype.name}")
    return values


def _host_reals(name: str, values: HostArray) -> npt.NDArray[np.floating[Any]]:
    """Host values that must be real numbers, in float64."""
    if values.dtype == object:
        for v in values.flat:
            if isinstance(v, (bool, np.bool_)) or not isinstance(v, (int, float, np.integer, np.floating)):
                raise TypeError(f"{name} must be real numbers, got {v!r}")
    elif values.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be real numbers, got {values.dtype.name}")
    try:
        with np.errstate(all="ignore"):  # long doubles out of range become 0 or inf, which is then judged
            return values.astype(np.float64)
    except OverflowError as error:
        raise ValueError(f"{name} must be finite, got an integer too large for a float") from error
