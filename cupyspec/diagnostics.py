"""What a drafting method is worth: figures to read beside the tokens that `verify()` returns."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
import numpy.typing as npt

__all__ = ["expected_tokens"]


@overload
def expected_tokens(rate: float, K: int) -> float: ...
@overload
def expected_tokens(rate: npt.ArrayLike, K: npt.ArrayLike) -> float | npt.NDArray[np.float64]: ...
def expected_tokens(rate: npt.ArrayLike, K: npt.ArrayLike) -> float | npt.NDArray[np.float64]:
    """Tokens per target call to expect from `K` drafts that are accepted at `rate`, the extra token included.

    Parameters
    ----------
    rate : float or array_like
        Chance a that a draft is accepted, in [0, 1]: ``sum(min(p, q))`` for the exact token rule.
    K : int or array_like of integers
        Draft tokens per target call, at least 0. Broadcasts against `rate`.

    Returns
    -------
    float, or ndarray of float64
        Tokens per target call, between 1 and ``K + 1``; a float when both arguments are scalars.

    Raises
    ------
    ValueError
        `rate` outside [0, 1] or NaN; `K` below 0; shapes that do not broadcast; ragged lists.
    TypeError
        `rate` is not real, or `K` not an integer.

    Notes
    -----
    ``1 + a + ... + a^K = (1 - a^(K+1)) / (1 - a)``, and ``K + 1`` at a = 1. It takes every draft to be accepted with the
    same chance whatever came before it. Where easy and hard places alternate, as in text, a call yields other than that.

    References
    ----------
    .. [1] Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192.

    Examples
    --------
    >>> from cupyspec.diagnostics import expected_tokens
    >>> expected_tokens(0.5, 2)
    1.75
    >>> expected_tokens([0.0, 0.5, 1.0], 3)
    array([1.   , 1.875, 4.   ])
    """
    a, drafts = _numbers("rate", rate), _numbers("K", K)
    if a.dtype.kind not in "iuf":
        raise TypeError(f"rate must be real numbers, got {rate!r}")
    if drafts.dtype.kind not in "iu":
        raise TypeError(f"K must be integers, got {K!r}")
    if not np.all((a >= 0) & (a <= 1)):  # NaN fails both
        raise ValueError(f"rate must be in [0, 1], got {rate!r}")
    if np.any(drafts < 0):
        raise ValueError(f"K must be at least 0, got {K!r}")
    try:
        np.broadcast_shapes(a.shape, drafts.shape)
    except ValueError:
        raise ValueError(f"rate and K must broadcast, got shapes {a.shape} and {drafts.shape}") from None
    a, terms = a.astype(np.float64), drafts.astype(np.float64) + 1
    with np.errstate(divide="ignore", invalid="ignore"):  # log(0) = -inf is right here; 0 / 0 is replaced below
        # expm1, because 1 - a^(K+1) loses its digits as a nears 1.
        tokens = np.where(a == 1, terms, -np.expm1(terms * np.log(a)) / (1 - a))
    return float(tokens) if tokens.ndim == 0 else tokens


def _numbers(name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} must be a number or an array, got a ragged list") from None
