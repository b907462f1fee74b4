"""Counts and probabilities as the checks take them, and the pooling of cells that expect too few draws."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

# The chi-square law of the statistic is an approximation, and a poor one far out for cells that expect few draws.
MIN_EXPECTED = 20.0


class Cells(NamedTuple):
    """Possible cells after pooling, the largest expectation first."""

    observed: Floats
    expected: Floats
    impossible: int  # draws of probability 0
    rest: tuple[int, float] | None  # draws, and probability, of cells that together still expect too few


def as_counts(name: str, counts: Any) -> Counts:
    """Counts of draws, of any shape."""
    array = np.asarray(counts)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got dtype {array.dtype}")
    if array.size and array.min() < 0:
        raise ValueError(f"{name} must not be negative, got {array.min()}")
    return array.astype(np.int64)


def as_probabilities(name: str, probs: Any) -> Floats:
    """Probabilities that sum to 1 within float32's rounding, of any shape."""
    try:
        array = np.asarray(probs, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be an array of numbers, got {type(probs).__name__}") from None
    if not array.size or not np.isfinite(array).all() or array.min() < 0:
        raise ValueError(f"{name} must be probabilities: finite, not negative, at least one")
    total = float(array.sum())
    if abs(total - 1) > 1e-6:
        raise ValueError(f"{name} must sum to 1, got {total:.9g}")
    return array / total


def pool(counts: Counts, probs: Floats, min_expected: float) -> Cells:
    """Cells that expect at least `min_expected` stay alone, others are put together by size until they do."""
    draws = int(counts.sum())
    order = np.argsort(-probs.ravel(), kind="stable")
    counts, probs = counts.ravel()[order], probs.ravel()[order]
    possible = int(np.count_nonzero(probs))
    impossible = int(counts[possible:].sum())
    expected = probs[:possible] * draws
    alone = int(np.count_nonzero(expected >= min_expected))
    group = (np.cumsum(expected[alone:]) / (2 * min_expected)).astype(np.int64)
    cell = np.append(np.arange(alone), alone + np.unique(group, return_inverse=True)[1])
    expected = np.bincount(cell, expected).astype(np.float64)
    observed = np.bincount(cell, counts[:possible]).astype(np.float64)
    rest = None
    if expected.size > 1 and expected[-1] < min_expected:
        # What is left over joins the cell before. Where that one is large it would hide any number of them, so the
        # rest is also looked at by itself.
        rest = int(observed[-1]), float(expected[-1] / draws)
        expected = np.append(expected[:-2], expected[-2:].sum())
        observed = np.append(observed[:-2], observed[-2:].sum())
    return Cells(observed, expected, impossible, rest)
