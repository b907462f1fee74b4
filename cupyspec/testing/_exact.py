"""The exact multinomial test, for samples too small for chi-square."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, xlogy

from cupyspec.testing._counts import Floats, as_counts, as_probabilities
from cupyspec.testing._power import ALPHA, POWER
from cupyspec.testing._result import CannotDecide, CheckResult

OUTCOMES_LIMIT = 500_000


def exact_multinomial(
    counts: npt.ArrayLike, probs: npt.ArrayLike, *, alpha: float = ALPHA, power: float = POWER
) -> CheckResult:
    """The exact multinomial test: the probability of all outcomes that are no likelier than the counts.

    Every outcome is enumerated, so it is for small samples. Nothing is pooled.

    Parameters
    ----------
    counts : integer array_like
        Draws in each cell.
    probs : array_like
        Probability of each cell, in the same shape.
    alpha, power : float
        As in `chi_square`.

    Returns
    -------
    CheckResult
        Its statistic is the probability of the counts. ``detectable`` is that of laws in which all probabilities of
        half the mass rise by one factor, those of the other half fall: computed, not approximated, but other laws as far
        away may be harder to see.

    Raises
    ------
    CannotDecide
        No draws.
    ValueError
        More than 500,000 outcomes: use `chi_square`. Otherwise as `chi_square`.

    Examples
    --------
    >>> from cupyspec.testing import exact_multinomial
    >>> round(exact_multinomial([3, 0], [0.5, 0.5]).p_value, 9)  # three of one kind, either kind
    0.25
    """
    observed, law = as_counts("counts", counts).ravel(), as_probabilities("probs", probs)
    if np.shape(counts) != law.shape:
        raise ValueError(f"counts must have the shape of probs, {law.shape}, got {np.shape(counts)}")
    law = law.ravel()
    draws = int(observed.sum())
    if draws == 0:
        raise CannotDecide("no draws: counts are all 0")
    possible = law > 0
    cells = int(possible.sum())
    impossible = int(observed[~possible].sum())
    number = math.comb(draws + cells - 1, cells - 1)
    if number > OUTCOMES_LIMIT:
        raise ValueError(
            f"{draws} draws in {cells} cells have {number} outcomes, above {OUTCOMES_LIMIT}: use chi_square"
        )
    distance = float(np.abs(observed / draws - law).sum()) / 2
    outcomes = _outcomes(draws, cells)
    chances = _chances(outcomes, law[possible])
    # Outcomes as likely as the counts but for rounding count as no likelier.
    order = np.sort(chances)
    tails = np.cumsum(order)
    p_values = tails[np.searchsorted(order, chances * (1 + 1e-9), side="right") - 1]
    detectable = _detectable(outcomes, law[possible], p_values < alpha, power)
    if impossible:
        return CheckResult("exact multinomial", 0.0, 0.0, cells, draws, impossible, distance, detectable, alpha)
    chance = float(_chances(observed[possible][None], law[possible])[0])
    p_value = min(1.0, float(chances[chances <= chance * (1 + 1e-9)].sum()))
    return CheckResult("exact multinomial", chance, p_value, cells, draws, 0, distance, detectable, alpha)


def _outcomes(draws: int, cells: int) -> npt.NDArray[np.int64]:
    """All counts of `draws` draws in so many cells, by where bars stand among stars."""
    bars = np.array(list(combinations(range(draws + cells - 1), cells - 1)), np.int64)
    bars = bars.reshape(-1, cells - 1)
    edges = np.pad(bars, ((0, 0), (1, 1)), constant_values=-1)
    edges[:, -1] = draws + cells - 1
    return np.diff(edges, axis=1) - 1


def _chances(outcomes: npt.NDArray[np.int64], law: Floats) -> Floats:
    """Multinomial probabilities."""
    logs = gammaln(outcomes.sum(axis=1) + 1) - gammaln(outcomes + 1).sum(axis=1) + xlogy(outcomes, law).sum(axis=1)
    return np.asarray(np.exp(logs), np.float64)


def _detectable(outcomes: npt.NDArray[np.int64], law: Floats, rejected: npt.NDArray[np.bool_], power: float) -> float:
    if law.size == 1:
        return float(1 - (1 - power) ** (1 / outcomes[0, 0]))
    order = np.argsort(-law)
    half = np.zeros(law.size, np.bool_)
    half[order[::2]] = True
    worst = 0.0
    for rises in (half, ~half):
        rise, low, high = law * rises / law[rises].sum(), 0.0, float(law[~rises].sum())
        fall = law * ~rises / law[~rises].sum()

        def found(t: float, shift: Floats = rise - fall) -> bool:
            return float(_chances(outcomes[rejected], np.maximum(law + t * shift, 0)).sum()) >= power

        if not found(high):
            return math.inf
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (low, middle) if found(middle) else (middle, high)
        worst = max(worst, high)
    return worst
