"""cupyspec.testing's tests without exact probabilities: independence and two samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, chi2_contingency

from cupyspec.testing import CannotDecide, independence, two_sample

ROWS, COLUMNS = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.35, 0.15, 0.1])


def test_independent_draws_are_rejected_at_the_stated_rate() -> None:
    """Catches wrong degrees of freedom: (R - 1)(C - 1), not R C - 1."""
    tables = np.random.default_rng(0).multinomial(3000, np.outer(ROWS, COLUMNS).ravel(), 4000).reshape(-1, 3, 4)
    rejected = sum(independence(t, alpha=0.01).rejected for t in tables)
    low, high = binom.interval(1 - 1e-6, 4000, 0.01)
    assert low <= rejected <= high
    theirs = chi2_contingency(tables[0], correction=False)
    assert independence(tables[0]).statistic == pytest.approx(theirs.statistic)
    assert independence(tables[0]).p_value == pytest.approx(theirs.pvalue)


def test_dependence_is_found_with_the_stated_power() -> None:
    """Catches a distance that promises too much, for the shift that is hardest to see."""
    law = np.outer(np.full(4, 0.25), np.full(4, 0.25))
    sign = np.tile([[1, -1], [-1, 1]], (2, 2))
    distance = independence(np.full((4, 4), 500)).detectable
    for factor, low, high in ((1.0, 0.97, 1.0), (0.6, 0.0, 0.75)):
        tables = np.random.default_rng(1).multinomial(8000, (law + factor * distance / 8 * sign).ravel(), 500)
        assert low <= np.mean([independence(t.reshape(4, 4)).rejected for t in tables]) <= high


def test_strata_keep_what_they_share_out() -> None:
    """Catches strata that are thrown together: two things that depend on a third look as if they depend on each other."""
    rng = np.random.default_rng(2)
    laws = [np.outer([0.9, 0.1], [0.9, 0.1]), np.outer([0.1, 0.9], [0.1, 0.9])]
    strata = np.stack([rng.multinomial(5000, law.ravel()).reshape(2, 2) for law in laws])
    assert not independence(strata).rejected
    assert independence(strata.sum(axis=0)).rejected
    assert independence(strata + np.array([[[300, 0], [0, 300]], [[0, 0], [0, 0]]])).rejected


def test_rare_rows_are_pooled() -> None:
    """Catches cells that expect a fraction of a draw: one draw there would reject."""
    table = np.outer([4000, 4000, 3, 1], [1, 1, 0])
    table = np.vstack([table, [[0, 1, 0]]])
    result = independence(table)
    assert result.cells == 4 and not result.rejected


@pytest.mark.parametrize("table", [[[100, 100]], [[100, 0], [100, 0]], [[1, 1], [1, 1]], [[0, 0], [0, 0]]])
def test_too_little_for_independence_is_said(table: Any) -> None:
    """Catches a table that cannot show anything and passes."""
    with pytest.raises(CannotDecide):
        independence(table)


def test_wrong_tables_are_refused() -> None:
    """Catches shares for counts, and a table that lost a dimension."""
    with pytest.raises(ValueError, match="table must be"):
        independence([1, 2, 3])
    with pytest.raises(TypeError, match="table must be integers"):
        independence([[0.25, 0.25], [0.25, 0.25]])
    with pytest.raises(ValueError, match="shape of counts"):
        two_sample([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="must not be negative"):
        two_sample([1, 2], [1, -2])


@pytest.mark.parametrize("sizes", [(3000, 3000), (1000, 20_000)])
def test_two_samples_of_one_law_are_rejected_at_the_stated_rate(sizes: tuple[int, int]) -> None:
    """Catches a statistic for equal sizes alone."""
    rng, law = np.random.default_rng(3), np.array([0.4, 0.3, 0.2, 0.09, 0.01])
    pairs = zip(rng.multinomial(sizes[0], law, 3000), rng.multinomial(sizes[1], law, 3000), strict=True)
    rejected = sum(two_sample(a, b, alpha=0.01).rejected for a, b in pairs)
    low, high = binom.interval(1 - 1e-6, 3000, 0.01)
    assert low * 0.9 <= rejected <= high * 1.1


def test_two_laws_are_told_apart_with_the_stated_power() -> None:
    """Catches a sample size that counts both samples where the smaller one limits."""
    law, sign = np.full(6, 1 / 6), np.tile([1, -1], 3)
    distance = two_sample(np.full(6, 400), np.full(6, 4000)).detectable
    for factor, low, high in ((1.0, 0.97, 1.0), (0.6, 0.0, 0.75)):
        rng = np.random.default_rng(4)
        pairs = zip(
            rng.multinomial(2400, law * (1 + 2 * factor * distance * sign), 500),
            rng.multinomial(24_000, law, 500),
            strict=True,
        )
        assert low <= np.mean([two_sample(a, b).rejected for a, b in pairs]) <= high


def test_too_little_for_two_samples_is_said() -> None:
    """Catches a comparison of one cell, or with nothing."""
    with pytest.raises(CannotDecide, match="no draws"):
        two_sample([0, 0], [5, 5])
    with pytest.raises(CannotDecide, match="too few"):
        two_sample([3, 2], [1000, 1000])
