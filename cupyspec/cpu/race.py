"""The race of segments and the pick inside the winner, for many rows at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupyspec._philox import Purpose, UInt64, coin, draw_words, unit_exponential
from cupyspec.cpu.rows import Indices, Weights


def race(
    weights: Weights,
    seeds: UInt64,
    steps: UInt64,
    purpose: Purpose,
    *,
    position: int | npt.NDArray[Any],
    draw: int | npt.NDArray[Any],
    segment: int,
) -> Indices:
    """One id [R] per row, with probability proportional to its weights."""
    w, masses = weights
    rows, segments = (np.arange(size) for size in masses.shape)
    exponential, pick = draw_words(
        seeds[:, None],
        steps[:, None],
        purpose,
        position=np.asarray(position)[..., None],
        draw=np.asarray(draw)[..., None],
        segment=segments,
    )
    keys = np.where(masses > 0, unit_exponential(exponential) / masses, np.inf)
    winner = keys.argmin(axis=1)
    start = winner * segment
    if segments.size == 1:
        inside = w
    elif rows.size == 1:
        inside = w[:, start[0] : start[0] + segment]
    else:
        ids = start[:, None] + np.arange(segment)
        inside = w[rows[:, None], np.minimum(ids, w.shape[1] - 1)]
        inside[ids >= w.shape[1]] = 0
    running = inside.cumsum(axis=1, dtype=np.float64)
    threshold = coin(pick[rows, winner]) * running[:, -1]
    return start + (running <= threshold[:, None]).sum(axis=1)
