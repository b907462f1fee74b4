"""Checks of arguments that `verify` and `sample` share: a clear error before anything runs."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from cupyspec._call import Array
from cupyspec._sampling import Sampling, require_no_filters


def reject_unsupported(**arguments: Any) -> None:
    """ValueError for the first argument that is not None: what is not applied is never ignored."""
    for name, value in arguments.items():
        if value is not None:
            off = "()" if name == "diagnostics" else "None"
            raise ValueError(f"{name} must be {off}: it is not supported by this version, got {_brief(value)}")


def check_flags(**arguments: Any) -> None:
    """TypeError for the first argument that is not a bool: anything else would be true by accident."""
    for name, value in arguments.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name} must be True or False, got {_brief(value)}")


def _brief(value: Any) -> str:
    """A value for a message; an array by its type, since its values may be many, or on a device."""
    return f"an array ({type(value).__qualname__})" if hasattr(value, "__dlpack__") else repr(value)


def are_probs(name: str, value: str) -> bool:
    """Whether scores are declared to be probabilities."""
    if not isinstance(value, str) or value not in ("logits", "probs"):
        raise ValueError(f'{name} must be "logits" or "probs", got {value!r}')
    return value == "probs"


def host_integer(name: str, value: Any, low: int, high: int) -> int:
    """A Python or NumPy integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    number = int(value)
    if not low <= number <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {number}")
    return number


def vocabulary(vocab_size: Any, target_name: str, target: Array, draft: Array | None = None) -> int:
    """The number of token ids that exist."""
    widths = [(target_name, target.shape[-1])]
    if draft is not None:
        widths.append(("draft_logits", draft.shape[-1]))
    narrowest = min(width for _, width in widths)
    for name, width in widths:
        if width < 1:
            raise ValueError(f"{name} must have at least one column, got {width}")
    if vocab_size is not None:
        return host_integer("vocab_size", vocab_size, 1, narrowest)
    if widths[0][1] != widths[-1][1]:
        raise ValueError(
            f"target_logits has {widths[0][1]} columns and draft_logits {widths[1][1]}: they must be equal unless "
            "vocab_size is given"
        )
    return narrowest


def check_sampling(name: str, sampling: Any, probs: bool) -> Sampling:
    """A Sampling that this version applies to scores of this kind."""
    if not isinstance(sampling, Sampling):
        raise TypeError(f"{name} must be a Sampling, got {sampling!r}")
    require_no_filters(name, sampling)
    if probs and not sampling.is_default():
        raise ValueError(f'{name} must be Sampling() with "probs": they are used as given, got {sampling!r}')
    return sampling
