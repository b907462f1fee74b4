"""Tests without exact probabilities: independence of two things, and two samples of one law."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import chdtrc

from cupyspec.testing._counts import MIN_EXPECTED, Counts, as_counts
from cupyspec.testing._power import ALPHA, POWER, detectable_distance
from cupyspec.testing._result import CannotDecide, CheckResult


def independence(
    table: npt.ArrayLike, *, alpha: float = ALPHA, power: float = POWER, min_expected: float = MIN_EXPECTED
) -> CheckResult:
    """Chi-square test that the row and the column of a draw are independent.

    For tokens of two positions, rows or steps; for the draft that was rejected and the token that came instead; with
    strata, for two things that are independent only once a third is known.

    Parameters
    ----------
    table : integer array_like [R, C] or [strata, R, C]
        Draws in each cell. Strata are tested together, each against its own margins.
    alpha, power : float
        As in `chi_square`.
    min_expected : float, default 20
        The smallest rows, and columns, are put together until every cell expects as many.

    Returns
    -------
    CheckResult
        ``distance`` and ``detectable`` are between the joint law and that of independent draws with its margins.

    Raises
    ------
    CannotDecide
        No stratum has two rows and two columns left.
    TypeError, ValueError
        A table of another shape, counts that are not integers of at least 0.

    Examples
    --------
    >>> from cupyspec.testing import independence
    >>> independence([[250, 250], [250, 250]]).p_value
    1.0
    >>> independence([[500, 0], [0, 500]]).rejected
    True
    """
    counts = as_counts("table", table)
    if counts.ndim not in (2, 3):
        raise ValueError(f"table must be [R, C] or [strata, R, C], got shape {counts.shape}")
    statistic, degrees, cells, draws, apart = 0.0, 0, 0, 0, 0.0
    for stratum in counts.reshape(-1, *counts.shape[-2:]):
        pooled = _pool_margin(_pool_margin(stratum, min_expected).T, min_expected).T
        if min(pooled.shape) < 2:
            continue
        total = int(pooled.sum())
        expected = np.outer(pooled.sum(axis=1), pooled.sum(axis=0)) / total
        statistic += float(((pooled - expected) ** 2 / expected).sum())
        degrees += (pooled.shape[0] - 1) * (pooled.shape[1] - 1)
        cells += pooled.size
        draws += total
        apart += float(np.abs(pooled - expected).sum())
    if degrees == 0:
        raise CannotDecide(
            f"{int(counts.sum())} draws are too few, or all in one row or column: no two rows and two columns expect "
            f"{min_expected:g} draws in each cell"
        )
    return CheckResult(
        "independence chi-square",
        statistic,
        float(chdtrc(degrees, statistic)),
        cells,
        draws,
        0,
        apart / draws / 2,
        detectable_distance(draws, degrees, alpha=alpha, power=power),
        alpha,
    )


def two_sample(
    counts: npt.ArrayLike,
    others: npt.ArrayLike,
    *,
    alpha: float = ALPHA,
    power: float = POWER,
    min_expected: float = MIN_EXPECTED,
) -> CheckResult:
    """Chi-square test that two samples come from one law, whatever that is.

    Parameters
    ----------
    counts, others : integer array_like
        Draws of the two samples in each cell, in one shape. Their sizes may differ.
    alpha, power, min_expected : float
        As in `chi_square`.

    Returns
    -------
    CheckResult
        ``distance`` and ``detectable`` are between the two laws; ``draws`` is the size of both samples together.

    Raises
    ------
    CannotDecide
        Fewer than two cells are left.
    TypeError, ValueError
        Counts that are not integers of at least 0, different shapes.

    Examples
    --------
    >>> from cupyspec.testing import two_sample
    >>> print(two_sample([100, 200, 700], [210, 390, 1400]))
    two-sample chi-square 0.246 on 3 cells, 3000 draws: p = 0.884, TV seen 0.005; TV found with 99 %: 0.15
    """
    first, second = as_counts("counts", counts), as_counts("others", others)
    if first.shape != second.shape:
        raise ValueError(f"others must have the shape of counts, {first.shape}, got {second.shape}")
    pair = np.stack([first.ravel(), second.ravel()])
    sizes = pair.sum(axis=1)
    if not sizes.all():
        raise CannotDecide(f"no draws: the samples have {sizes[0]} and {sizes[1]}")
    # A column must expect enough in the smaller sample.
    pooled = _pool_margin(pair.T, min_expected, share=float(sizes.min() / sizes.sum())).T
    if pooled.shape[1] < 2:
        raise CannotDecide(f"{sizes.min()} draws are too few, or all in one cell: fewer than two cells are left")
    expected = np.outer(sizes, pooled.sum(axis=0)) / sizes.sum()
    statistic, degrees = float(((pooled - expected) ** 2 / expected).sum()), pooled.shape[1] - 1
    shares = pooled / sizes[:, None]
    return CheckResult(
        "two-sample chi-square",
        statistic,
        float(chdtrc(degrees, statistic)),
        degrees + 1,
        int(sizes.sum()),
        0,
        float(np.abs(shares[0] - shares[1]).sum()) / 2,
        detectable_distance(float(sizes.prod() / sizes.sum()), degrees, alpha=alpha, power=power),
        alpha,
    )


def _pool_margin(table: Counts, min_expected: float, share: float | None = None) -> Counts:
    """The table [R, C] with its smallest rows put together. `share`: of a row in the column that expects fewest."""
    totals = table.sum(axis=1)
    order = np.argsort(-totals, kind="stable")
    table, totals = table[order], totals[order]
    table, totals = table[totals > 0], totals[totals > 0]
    if not totals.size:
        return table
    # Rows and columns of at least sqrt(min_expected draws) make cells that expect min_expected.
    enough = np.sqrt(min_expected * totals.sum()) if share is None else min_expected / share
    kept = int(np.count_nonzero(totals >= enough))
    if kept < totals.size and totals[kept:].sum() < enough:
        kept = max(kept - 1, 0)
    if kept == totals.size:
        return table
    return np.concatenate([table[:kept], table[kept:].sum(axis=0, keepdims=True)])
