"""Checks that the rules' dataclasses share."""

from __future__ import annotations

import math
import numbers


def finite_number(name: str, value: object) -> float:
    """`value` as a float; TypeError unless it is a real number, ValueError unless finite."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return number
