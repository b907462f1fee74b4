"""Score rows in float64: what is wrong with a row, and its probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupyspec._call import PROBABILITY_LIMIT

Floats = npt.NDArray[np.floating[Any]]
Float64 = npt.NDArray[np.float64]

SMALLEST = 2.0**-126  # float32's smallest normal: temperatures below it are greedy, probabilities below it are 0


def is_greedy(temperature: float) -> bool:
    """Whether a temperature means argmax."""
    return float(np.float32(temperature)) < SMALLEST


def not_finite(row: Floats, probs: bool) -> bool:
    """Whether a row holds a value that no score may have."""
    row = row.astype(np.float64)
    wrong = np.isnan(row) | (row == np.inf) | (probs & ((row < 0) | (row >= PROBABILITY_LIMIT)))
    return bool(wrong.any())


def is_empty(row: Floats, probs: bool) -> bool:
    """Whether a row gives no token a chance."""
    return not bool((row >= SMALLEST).any() if probs else (row > -np.inf).any())


def probabilities(row: Floats, *, probs: bool, temperature: float, log_normalizer: float | None = None) -> Float64:
    """The distribution of a row [V]: softmax after temperature; one-hot argmax if greedy; probabilities as given."""
    row = row.astype(np.float64)
    if probs:
        return np.where(row >= SMALLEST, row, 0.0)
    if is_greedy(temperature):
        return one_hot(int(np.argmax(row)), row.size)
    temperature = float(np.float32(temperature))
    if log_normalizer is not None:
        return np.exp((row - log_normalizer * temperature) / temperature)
    weights = np.exp((row - row.max()) / temperature)
    return np.asarray(weights / weights.sum())


def one_hot(token: int, vocab_size: int) -> Float64:
    """All mass on one id."""
    row = np.zeros(vocab_size)
    row[token] = 1.0
    return row
