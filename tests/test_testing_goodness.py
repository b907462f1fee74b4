"""cupyspec.testing's tests of counts against exact probabilities: calibrated, as powerful as they say, never silent."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, binomtest, ncx2

from cupyspec.testing import (
    CannotDecide,
    ErrorBudget,
    chi_square,
    detectable_distance,
    draws_needed,
    exact_multinomial,
    g_test,
)

LAW = np.array([0.5, 0.25, 0.125, 0.12, 0.004, 0.001, 0.0])


@pytest.mark.parametrize("test", [chi_square, g_test])
def test_right_draws_are_rejected_at_the_stated_rate(test: Any) -> None:
    """Catches pooling or degrees of freedom that make a test deaf or jumpy: 5000 checks at 1 % reject 1 %."""
    counts = np.random.default_rng(0).multinomial(30_000, LAW, 5000)  # no cell is pooled
    p_values = np.array([test(c, LAW, alpha=0.01).p_value for c in counts])
    assert np.mean(p_values) == pytest.approx(0.5, abs=0.025)  # 6 standard errors
    rejected = np.count_nonzero(p_values < 0.01)
    low, high = binom.interval(1 - 1e-6, 5000, 0.01)
    assert low * 0.9 <= rejected <= high * 1.1  # chi-square is the law of the statistic only approximately


@pytest.mark.parametrize("expected", [20, 25, 60, 200])
@pytest.mark.parametrize("draws", [500, 20_000])
def test_false_alarm_rate_of_the_budget_holds(draws: int, expected: float) -> None:
    """Catches a stated rate that chi-square's tail, too light for skewed counts, exceeds: computed exactly, two cells."""
    law = np.array([1 - expected / draws, expected / draws])
    budget = ErrorBudget()
    rate = 1.0
    for size in (draws, budget.growth * draws):
        counts = np.arange(min(size, 3000) + 1)
        chances = binom.pmf(counts, size, law[1])
        likely = chances > 1e-18
        rate *= sum(
            chance
            for count, chance in zip(counts[likely], chances[likely], strict=True)
            if chi_square([size - count, count], law).rejected
        )
    assert rate <= budget.alpha
    assert budget.false_alarm_rate(1) == pytest.approx(1e-6)


def test_small_cells_are_pooled_by_size() -> None:
    """Catches one pool of everything small, in which a wrong tail of many cells cannot be seen."""
    flat = np.full(4000, 1 / 4000)
    result = chi_square(np.random.default_rng(0).multinomial(8000, flat), flat)
    assert result.cells == pytest.approx(8000 / 40, abs=2)
    steep = np.linspace(0, 2, 4000) / 4000
    assert chi_square(np.random.default_rng(0).multinomial(20_000, steep / steep.sum()), flat).rejected
    assert chi_square([510, 240, 125, 120, 4, 1, 0], LAW).cells == 4


def test_impossible_draws_are_never_pooled_away() -> None:
    """Catches a draw of probability 0 that counts as one of a small cell."""
    counts = np.array([50_000, 25_000, 12_500, 12_000, 400, 99, 1])
    result = chi_square(counts, LAW)
    assert (result.impossible, result.p_value, result.rejected) == (1, 0.0, True)
    assert "1 of them impossible" in str(result)
    assert exact_multinomial([3, 1, 0], [0.5, 0.5, 0]).impossible == 0
    assert exact_multinomial([3, 0, 1], [0.5, 0.5, 0]).p_value == 0


def test_rare_cells_beside_a_certain_one() -> None:
    """Catches rare tokens that disappear in the pool of a near-certain one, where chi-square sees nothing."""
    law = np.array([1 - 1e-5, 6e-6, 4e-6])
    assert chi_square([100_000, 0, 0], law).p_value == 1
    assert not chi_square([99_998, 1, 1], law).rejected
    assert chi_square([99_985, 10, 5], law).rejected
    # The same rest beside two large cells.
    two = np.array([0.6, 0.4 - 1e-5, 1e-5])
    assert not chi_square([60_000, 39_999, 1], two).rejected
    assert chi_square([60_000, 39_985, 15], two).rejected
    # How much more of them is found is what the result says.
    result = chi_square([100_000, 0, 0], law)
    wrong = 1e-5 + result.detectable
    found = sum(binom.pmf(n, 100_000, wrong) for n in range(400) if chi_square([100_000 - n, n, 0], law).rejected)
    assert found == pytest.approx(0.99, abs=0.002)


def test_one_certain_token() -> None:
    """Catches a division by no degrees of freedom for a one-hot law, and a power of nothing."""
    result = chi_square([0, 1000], [0, 1])
    assert (result.p_value, result.cells) == (1.0, 1)
    assert 1 - (1 - result.detectable) ** 1000 == pytest.approx(0.99)
    assert chi_square([1, 999], [0, 1]).rejected


@pytest.mark.parametrize("test", [chi_square, g_test, exact_multinomial])
def test_wrong_arguments_are_refused(test: Any) -> None:
    """Catches counts and laws of different cells, shares for counts, and laws that are none: a test of nonsense passes."""
    for probs in ([0.5, 0.4], [0.7, 0.7, -0.4], [np.nan, 1], [], [0.5, np.inf]):
        with pytest.raises(ValueError, match="probs must"):
            test([1] * len(probs), probs)
    with pytest.raises(ValueError, match=r"shape of probs, \(2,\), got \(3,\)"):
        test([1, 2, 3], [0.5, 0.5])
    with pytest.raises(TypeError, match="counts must be integers"):
        test([0.5, 0.5], [0.5, 0.5])
    with pytest.raises(ValueError, match="must not be negative"):
        test([-1, 2], [0.5, 0.5])
    with pytest.raises(TypeError, match="probs must be an array"):
        test([1, 2], ["a", "b"])
    with pytest.raises(CannotDecide, match="no draws"):
        test([0, 0], [0.5, 0.5])


def test_too_few_draws_are_said() -> None:
    """Catches a test of one pooled cell, which every sampler passes."""
    with pytest.raises(CannotDecide, match="30 draws are too few"):
        chi_square([0, 30], [0.5, 0.5])
    assert exact_multinomial([0, 30], [0.5, 0.5]).rejected


def test_statistics_are_the_text_book_ones() -> None:
    """Catches a factor: Mendel's peas."""
    counts, law = [315, 101, 108, 32], np.array([9, 3, 3, 1]) / 16
    assert chi_square(counts, law).statistic == pytest.approx(0.470, abs=5e-4)
    assert g_test(counts, law).statistic == pytest.approx(0.475, abs=5e-4)
    assert chi_square(np.reshape(counts, (2, 2)), law.reshape(2, 2)) == chi_square(counts, law)


@pytest.mark.parametrize("test", [chi_square, g_test])
@pytest.mark.parametrize("cells", [2, 9, 200])
def test_power_is_as_stated(test: Any, cells: int) -> None:
    """Catches a distance that promises too much, or so much less than is true that it says nothing."""
    rng = np.random.default_rng(cells)
    right = rng.dirichlet(np.full(cells, 5.0))
    draws = 1200 * cells
    order, half = np.argsort(-right), np.zeros(cells, np.bool_)
    half[order[::2]] = True
    result = test(rng.multinomial(draws, right), right)
    assert result.cells == cells
    shift = np.where(half, right / right[half].sum(), -right / right[~half].sum())
    for factor, low, high in ((1.0, 0.975, 1.0), (0.6, 0.0, 0.75)):
        wrong = right + factor * result.detectable * shift
        found = np.mean([test(c, right).rejected for c in rng.multinomial(draws, wrong, 400)])
        assert low <= found <= high
    # A shift of the same size between two cells is easier to see.
    pair = right.copy()
    size = min(result.detectable, 0.9 * right[1])
    pair[0] += size
    pair[1] -= size
    if size == result.detectable:
        assert np.mean([test(c, right).rejected for c in rng.multinomial(draws, pair, 100)]) > 0.95


@pytest.mark.parametrize("degrees", [1, 7, 500])
@pytest.mark.parametrize("alpha", [1e-6, 0.01])
def test_noncentrality_is_scipys(degrees: int, alpha: float) -> None:
    """Catches power and its complement swapped."""
    t = detectable_distance(10_000, degrees, alpha=alpha)
    assert ncx2.sf(ncx2.isf(alpha, degrees, 0), degrees, 4 * t**2 * 10_000) == pytest.approx(0.99, abs=1e-6)
    assert detectable_distance(3, degrees, alpha=alpha) == math.inf


def test_draws_needed() -> None:
    """Catches a sample size at which the fault is not found, by drawing it."""
    right, rng = np.full(8, 0.125), np.random.default_rng(1)
    for shift in (0.1, 0.3):
        wrong = right * (1 + shift * np.tile([1, -1], 4))
        size = draws_needed(wrong, right)
        assert np.mean([chi_square(c, right).rejected for c in rng.multinomial(size, wrong, 1000)]) >= 0.98
        assert np.mean([chi_square(c, right).rejected for c in rng.multinomial(size // 2, wrong, 1000)]) < 0.9
    assert draws_needed([0.5, 0.4, 0.1], [0.5, 0.5, 0]) == pytest.approx(44, abs=1)
    assert draws_needed([0, 1], [1, 0]) == 1
    with pytest.raises(ValueError, match="two equal laws"):
        draws_needed([1, 0], [1, 0])
    with pytest.raises(ValueError, match="one shape"):
        draws_needed([1, 0], [1, 0, 0])


def test_exact_multinomial_is_the_sum_over_outcomes() -> None:
    """Catches outcomes left out or counted twice, against a plain enumeration of ordered draws."""
    law = np.array([0.5, 0.3, 0.2])
    chances: dict[tuple[int, ...], float] = {}
    for ordered in itertools.product(range(3), repeat=5):
        counts = tuple(np.bincount(ordered, minlength=3).tolist())
        chances[counts] = chances.get(counts, 0.0) + float(law[list(ordered)].prod())
    for counts, chance in chances.items():
        want = sum(other for other in chances.values() if other <= chance * (1 + 1e-9))
        assert exact_multinomial(counts, law).p_value == pytest.approx(want)
        assert exact_multinomial(counts, law).statistic == pytest.approx(chance)
    assert exact_multinomial([7, 33], [0.3, 0.7]).p_value == pytest.approx(binomtest(7, 40, 0.3).pvalue)


def test_exact_multinomial_has_the_power_it_states() -> None:
    """Catches the power of another alternative than the one that is stated."""
    law = np.array([0.5, 0.3, 0.2])

    @functools.cache
    def rejected(*counts: int) -> bool:
        return exact_multinomial(counts, law, alpha=0.01).rejected

    distance = exact_multinomial([45, 27, 18], law, alpha=0.01).detectable
    shift = np.array([0.5, 0, 0.2]) / 0.7 - np.array([0, 1.0, 0])
    rates = []
    for sign in (1, -1):
        counts = np.random.default_rng(0).multinomial(90, law + sign * distance * shift, 300)
        rates.append(np.mean([rejected(*c) for c in counts.tolist()]))
    assert 0.97 <= min(rates) <= 0.998  # one of the two directions is the harder one
    assert exact_multinomial([2, 1], [0.5, 0.5]).detectable == math.inf
    with pytest.raises(ValueError, match="use chi_square"):
        exact_multinomial(np.ones(30, np.int64), np.full(30, 1 / 30))


def test_budget() -> None:
    """Catches a rate that is not the union of the checks', and settings that mean nothing."""
    assert ErrorBudget(alpha=1e-3).false_alarm_rate(100) == pytest.approx(0.0952, abs=1e-4)
    for wrong in ({"alpha": 0}, {"alpha": 1.0}, {"alpha": "x"}, {"confirmations": -1}, {"growth": 0}):
        with pytest.raises(ValueError):
            ErrorBudget(**wrong)
    with pytest.raises(TypeError):
        ErrorBudget(growth=1.5)  # type: ignore[arg-type]


def test_a_rejection_is_confirmed_on_a_larger_sample() -> None:
    """Catches one unlucky sample that fails a right sampler, and a confirmation that is asked for without need."""
    law = np.array([0.5, 0.5])
    good, bad = [500, 500], [900, 100]
    for stages, failed, sizes in (
        ([good], False, [1000]),
        ([bad, good], False, [1000, 4000]),
        ([bad, bad], True, [1000, 4000]),
    ):
        asked = []

        def check(draws: int, stage: int, stages: Any = stages, asked: Any = asked) -> Any:
            asked.append(draws)
            return chi_square(stages[stage], law)

        assert ErrorBudget().judge(check, 1000)[1] is failed
        assert asked == sizes
    impossible = ErrorBudget().judge(lambda draws, stage: chi_square([1, 99], [0, 1]), 100)
    assert impossible[1] and impossible[0].draws == 100
