"""Do draws follow a law? A chi-square test of counts against exact probabilities, with its error budget.

Budget: one check rejects a right sampler with probability ALPHA = 1e-6, and it must then reject again on a fresh sample
four times as large before a test fails (1e-12 for a right sampler; a wrong one that was noticed once is noticed again).
Seeds are fixed, so a run that passed once passes for ever: the budget is for the seeds that nobody has tried.

Power: a wrong law with chi-square distance d = sum (wrong - right)^2 / right is rejected with probability at least 0.999
at ``draws_for(d, cells)`` draws; test_statistics.py feeds wrong laws in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import chdtrc
from scipy.stats import chi2, ncx2

ALPHA = 1e-6
POWER = 0.999
MIN_EXPECTED = 10.0  # cells that expect fewer draws are pooled: chi-square's tail at 1e-6 is off for small ones

Draw = Callable[[int, int], np.ndarray]  # (draws, round) -> cell of each draw; another round is fresh


@dataclass(frozen=True)
class Verdict:
    """Counts against a law."""

    impossible: int  # draws in cells of probability 0
    cells: int  # after pooling
    statistic: float
    p_value: float

    @property
    def rejected(self) -> bool:
        return self.impossible > 0 or self.p_value < ALPHA


def judge(counts: np.ndarray, law: np.ndarray) -> Verdict:
    """Pearson's chi-square of counts [cells] against probabilities [cells] that sum to 1; small cells are pooled."""
    if abs(law.sum() - 1) > 1e-9:
        raise ValueError(f"the law must sum to 1, got {law.sum()}")
    expected = law * counts.sum()
    possible = law > 0
    order = np.argsort(expected[possible])
    observed, expected = counts[possible][order].astype(np.float64), expected[possible][order]
    # The fewest of the smallest cells that together expect MIN_EXPECTED become one.
    pooled = 0
    if expected[0] < MIN_EXPECTED:
        pooled = int(np.searchsorted(np.cumsum(expected), MIN_EXPECTED)) + 1
        pooled = max(pooled, int((expected < MIN_EXPECTED).sum()))
    if pooled:
        observed = np.append(observed[pooled:], observed[:pooled].sum())
        expected = np.append(expected[pooled:], expected[:pooled].sum())
    statistic = float(((observed - expected) ** 2 / expected).sum())
    p_value = float(chdtrc(observed.size - 1, statistic)) if observed.size > 1 else 1.0
    return Verdict(int(counts[~possible].sum()), observed.size, statistic, p_value)


def follows(law: np.ndarray, draw: Draw, draws: int) -> bool:
    """Whether draws follow a law [cells]; a rejection is confirmed on a fresh sample four times as large."""
    for size, fresh in ((draws, 0), (4 * draws, 1)):
        counts = np.bincount(draw(size, fresh), minlength=law.size)
        if counts.size > law.size:
            raise ValueError(f"a draw lies in cell {counts.size - 1} of {law.size}")
        verdict = judge(counts, law)
        if verdict.impossible:
            return False
        if not verdict.rejected:
            return True
    return False


def draws_for(distance: float, cells: int) -> int:
    """Draws at which a law at chi-square distance `distance` from the right one is rejected with probability POWER."""
    limit, draws = chi2.isf(ALPHA, cells - 1), 64
    while ncx2.sf(limit, cells - 1, draws * distance) < POWER:
        draws *= 2
    return draws


def distance(wrong: np.ndarray, right: np.ndarray) -> float:
    """Chi-square distance of a wrong law from the right one, infinite where it draws what is impossible."""
    if (wrong[right == 0] > 0).any():
        return np.inf
    possible = right > 0
    return float(((wrong - right)[possible] ** 2 / right[possible]).sum())
