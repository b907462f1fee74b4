"""Counts against exact probabilities: Pearson's chi-square and the G-test."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import bdtrc, chdtrc, xlogy

from cupyspec.testing._counts import MIN_EXPECTED, Cells, as_counts, as_probabilities, pool
from cupyspec.testing._power import ALPHA, POWER, detectable_distance
from cupyspec.testing._result import CannotDecide, CheckResult


def chi_square(
    counts: npt.ArrayLike,
    probs: npt.ArrayLike,
    *,
    alpha: float = ALPHA,
    power: float = POWER,
    min_expected: float = MIN_EXPECTED,
) -> CheckResult:
    """Pearson's chi-square test of counts against exact probabilities.

    Parameters
    ----------
    counts : integer array_like
        Draws in each cell. A joint law may have any shape.
    probs : array_like
        Probability of each cell, in the same shape.
    alpha : float, default 1e-6
        The p-value below which the result counts as rejected.
    power : float, default 0.99
        The chance of a rejection that ``detectable`` is stated for.
    min_expected : float, default 20
        Cells that expect fewer draws are put together, by size, until they expect as many.

    Returns
    -------
    CheckResult

    Raises
    ------
    CannotDecide
        No draws, or too few for two cells.
    TypeError, ValueError
        Counts that are not integers of at least 0, probabilities that do not sum to 1, different shapes.

    Notes
    -----
    A draw of probability 0 makes the p-value 0. Cells that even together expect fewer than `min_expected` draws, as
    beside one near-certain token, are tested by a binomial tail: the p-value is then twice the smaller of the two.

    Examples
    --------
    >>> from cupyspec.testing import chi_square
    >>> print(chi_square([507, 245, 248, 0], [0.5, 0.25, 0.25, 0]))
    chi-square 0.214 on 3 cells, 1000 draws: p = 0.899, TV seen 0.007; TV found with 99 %: 0.12
    >>> chi_square([500, 250, 249, 1], [0.5, 0.25, 0.25, 0]).p_value
    0.0
    """
    return _test("chi-square", counts, probs, alpha, power, min_expected)


def g_test(
    counts: npt.ArrayLike,
    probs: npt.ArrayLike,
    *,
    alpha: float = ALPHA,
    power: float = POWER,
    min_expected: float = MIN_EXPECTED,
) -> CheckResult:
    """The G-test (log-likelihood ratio) of counts against exact probabilities.

    Parameters, result and errors are those of `chi_square`. For draws that follow the law both statistics have the
    same chi-square law; this one weighs a cell that is emptier than expected more.

    Examples
    --------
    >>> from cupyspec.testing import g_test
    >>> g_test([507, 245, 248], [0.5, 0.25, 0.25]).statistic.__round__(3)
    0.214
    """
    return _test("G", counts, probs, alpha, power, min_expected)


def _test(
    name: str, counts: npt.ArrayLike, probs: npt.ArrayLike, alpha: float, power: float, min_expected: float
) -> CheckResult:
    observed, law = as_counts("counts", counts), as_probabilities("probs", probs)
    if observed.shape != law.shape:
        raise ValueError(f"counts must have the shape of probs, {law.shape}, got {observed.shape}")
    draws = int(observed.sum())
    if draws == 0:
        raise CannotDecide("no draws: counts are all 0")
    cells = pool(observed, law, min_expected)
    share = cells.expected / draws
    distance = (float(np.abs(cells.observed / draws - share).sum()) + cells.impossible / draws) / 2
    size, several = cells.expected.size, np.count_nonzero(law) > 1
    if size == 1 and cells.rest is None and several and not cells.impossible:
        raise CannotDecide(
            f"{draws} draws are too few: all {np.count_nonzero(law)} cells together expect fewer than "
            f"{2 * min_expected:g}; give more draws or use exact_multinomial"
        )
    level = alpha / 2 if cells.rest is not None and size > 1 else alpha
    p_value, statistic, detectable = 1.0, 0.0, 0.0
    if size > 1:
        statistic = _statistic(name, cells)
        p_value = float(chdtrc(size - 1, statistic))
        detectable = detectable_distance(draws, size - 1, alpha=level, power=power)
    elif cells.rest is None:  # one certain token: only an impossible one can be wrong
        detectable = 1 - (1 - power) ** (1 / draws)
    if cells.rest is not None:
        came, chance = cells.rest
        tail = float(bdtrc(came - 1, draws, chance)) if came else 1.0
        p_value = min(1.0, 2 * min(p_value, tail)) if size > 1 else tail
        if size == 1:
            distance = max(distance, abs(came / draws - chance))
            detectable = _detectable_rest(draws, chance, alpha, power)
    if cells.impossible:
        p_value = 0.0
    return CheckResult(name, statistic, p_value, size, draws, cells.impossible, distance, detectable, alpha)


def _statistic(name: str, cells: Cells) -> float:
    if name == "G":
        return 2 * float(xlogy(cells.observed, cells.observed / cells.expected).sum())
    return float(((cells.observed - cells.expected) ** 2 / cells.expected).sum())


def _detectable_rest(draws: int, chance: float, alpha: float, power: float) -> float:
    """How much more often rare cells must come, together, for their binomial tail test to reject."""
    limit = 0
    while limit <= draws and float(bdtrc(limit - 1, draws, chance) if limit else 1.0) >= alpha:
        limit += 1
    if limit > draws:
        return np.inf
    low, high = chance, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if bdtrc(limit - 1, draws, middle) < power else (low, middle)
    return high - chance
