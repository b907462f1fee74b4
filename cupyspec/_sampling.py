"""`Sampling`: how logits become a distribution."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from cupyspec._arrays import register_jax_pytree


@dataclass(frozen=True, eq=False)
class Sampling:
    """Sampling parameters of the rows of a batch.

    Parameters
    ----------
    temperature : float or array [B], default 1.0
        Any integer or float dtype, in [0, inf). 0, and anything below 2^-126, is greedy: the argmax, lowest id on
        ties. Greedy and sampled rows mix freely.
    top_k, top_p, min_p : default 0, 1.0, 0.0
        Off. Other values are not supported by this version: `verify` and `sample` raise ValueError.

    Raises
    ------
    ValueError
        A scalar is negative, NaN or infinite. Arrays are checked by the call that uses them.
    TypeError
        A scalar is not a real number.

    Notes
    -----
    Instances compare by identity, since array fields have no truth value. They are JAX pytrees once JAX is imported.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyspec import Sampling
    >>> Sampling(temperature=0.7).temperature
    0.7
    >>> rows = Sampling(temperature=np.array([0.0, 1.0]))  # row 0 greedy, row 1 sampled
    """

    temperature: Any = 1.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0

    _filters_are_off = False  # known to be so, by the look at a new instance

    def __post_init__(self) -> None:
        register_jax_pytree(Sampling, [field.name for field in fields(self)])
        if isinstance(self.temperature, bool) or self.temperature is None or isinstance(self.temperature, str):
            raise TypeError(f"temperature must be a real number or an array [B], got {self.temperature!r}")
        if isinstance(self.temperature, numbers.Real):
            try:
                number = float(self.temperature)
            except OverflowError:  # an integer beyond every float
                number = math.inf
            if not 0 <= number < math.inf:
                raise ValueError(f"temperature must be finite and not negative, got {self.temperature!r}")
        if all(_equals(getattr(self, field.name), field.default) for field in fields(self)[1:]):
            object.__setattr__(self, "_filters_are_off", True)

    def is_default(self) -> bool:
        """Whether nothing is asked for: scores are used at temperature 1, unfiltered."""
        return all(_equals(getattr(self, field.name), field.default) for field in fields(self))


def is_plain(sampling: Any, other: Any = None) -> bool:
    """Whether nothing but a temperature is asked for, by one Sampling, or by two."""
    return (
        type(sampling) is Sampling
        and sampling._filters_are_off
        and (other is None or (type(other) is Sampling and other._filters_are_off))
    )


def require_no_filters(name: str, sampling: Sampling) -> None:
    """ValueError for a parameter that this version does not apply: none is ever ignored."""
    if sampling._filters_are_off:
        return
    for field in fields(sampling)[1:]:
        value = getattr(sampling, field.name)
        if not _equals(value, field.default):
            raise ValueError(
                f"{name}.{field.name} must be {field.default} (off): filters are not supported by this version, "
                f"got {value!r}"
            )


def _equals(value: Any, default: Any) -> bool:
    """Whether a parameter is a host scalar of its default value; an array is never taken for a default."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        return False
    return bool(value == default)
