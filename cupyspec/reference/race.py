"""The draw of one token from weights: segments race, then one id is picked inside the winner."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cupyspec._segments import segment_count
from cupyspec.reference.rows import Float64

BAND = 2.0**-17  # relative error that float32 sums of the terms of a weight stay within


class Race(NamedTuple):
    """A drawn token, and how near the draw came to another one."""

    token: int
    in_band: bool  # float32 arithmetic may answer otherwise
    width: float  # bound on the probability of that


def race(
    weights: Float64,
    exponentials: Float64,
    picks: Float64,
    *,
    segment: int,
    terms: Float64 | None = None,
) -> Race:
    """Draw an id with probability proportional to `weights` [V].

    The segment with the smallest exponentials[s] / mass wins, lowest s on ties; inside it the first id whose running
    sum exceeds picks[s] * mass. `terms` [V] is the size of what a weight is the difference of (p + q for [p - q]+):
    float32 knows a mass to within BAND times the terms' sum. None: the weights themselves.
    """
    starts = np.arange(segment_count(weights.size, segment)) * segment
    masses = np.add.reduceat(weights, starts)
    errors = BAND * (masses if terms is None else np.add.reduceat(terms, starts))
    with np.errstate(divide="ignore"):
        keys = np.where(masses > 0, exponentials[: starts.size] / masses, np.inf)
        lowest = exponentials[: starts.size] / (masses + errors)
    winner = int(np.argmin(keys))
    mass, error = masses[winner], errors[winner]
    running = np.cumsum(weights[starts[winner] : starts[winner] + segment])
    threshold = picks[winner] * running[-1]
    token = int(starts[winner]) + int(np.searchsorted(running, threshold, side="right"))

    highest = exponentials[winner] / (mass - error) if error < mass else np.inf
    close_race = bool((np.delete(lowest, winner) <= highest).any() or error >= mass)
    boundaries = running[:-1][np.diff(running) > 0]
    close_pick = bool((np.abs(boundaries - threshold) <= error).any())
    width = 2 * boundaries.size * error / mass + (4 * errors.sum() / masses.sum() if starts.size > 1 else 0.0)
    return Race(token, close_race or close_pick, min(1.0, float(width)))
