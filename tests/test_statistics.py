"""The checks of law_checks.py themselves: right samplers pass at the stated rate, wrong ones do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import binom

import cupyspec
from cupyspec._philox import Purpose
from cupyspec.cpu.chain import accept, race, residual
from cupyspec.cpu.rows import Weights
from enumeration import chain_law, law_of_cells
from law_checks import ALPHA, POWER, distance, draws_for, follows, judge
from test_law import DRAWS, REJECTION_LAW, Chain, LargeVocabulary

LAW = np.array([0.5, 0.25, 0.125, 0.12, 0.004, 0.001, 0.0])


def test_right_sampler_is_rejected_at_the_stated_rate() -> None:
    """Catches pooling or degrees of freedom that make the check deaf or jumpy: 20,000 checks at 1 % reject 1 %."""
    counts = np.random.default_rng(0).multinomial(2000, LAW, 20_000)
    rejected = sum(judge(c, LAW).p_value < 0.01 for c in counts)
    low, high = binom.interval(1 - 1e-6, 20_000, 0.01)
    assert low * 0.9 <= rejected <= high * 1.1  # chi-square is the law of counts only approximately


def test_small_cells_are_pooled_and_impossible_ones_counted() -> None:
    """Catches a draw of probability 0 that is pooled away."""
    verdict = judge(np.array([500, 250, 125, 120, 4, 1, 0]), LAW)
    assert verdict.cells == 4 + 1 - 1  # the pool of 4 and 1 takes in the next cell to expect enough
    assert not verdict.rejected
    assert judge(np.array([500, 250, 125, 119, 4, 1, 1]), LAW).impossible == 1
    assert judge(np.array([500, 250, 125, 119, 4, 1, 1]), LAW).rejected


def test_laws_that_do_not_sum_to_one_are_refused() -> None:
    """Catches an expectation that is wrong in the test."""
    with pytest.raises(ValueError, match="sum to 1"):
        judge(np.array([1, 1]), np.array([0.5, 0.4]))


@pytest.mark.parametrize("shift", [0.02, 0.05])
def test_power_is_as_stated(shift: float) -> None:
    """Catches a formula for the sample size that promises too much."""
    right = np.full(8, 0.125)
    wrong = right + shift * np.tile([1, -1], 4) / 8
    size = draws_for(distance(wrong, right), 8)
    counts = np.random.default_rng(1).multinomial(size, wrong, 2000)
    missed = sum(not judge(c, right).rejected for c in counts)
    assert missed <= binom.isf(1e-6, 2000, 1 - POWER)
    assert ALPHA == 1e-6


CHAIN = Chain(K=2, models=1)


def test_temperature_is_noticed() -> None:
    """A temperature 5 % off is seen at a quarter of the sample that test_law uses, by the exact distance."""
    wrong = dataclasses.replace(CHAIN, temperature=1.05, draft_temperature=1.0)
    law = CHAIN.law()
    assert draws_for(distance(wrong.law(), law), int((law > 0).sum())) <= DRAWS / 2
    assert not follows(law, wrong.draw, DRAWS)


def wrong_race(change: Callable[[np.ndarray, int], np.ndarray], purpose: Purpose) -> Any:
    """A mutant: the token of one kind of race is changed."""

    def mutant(weights: Weights, seeds: Any, steps: Any, what: Purpose, **where: Any) -> np.ndarray:
        tokens = race(weights, seeds, steps, what, **where)
        return change(tokens, weights.w.shape[1]) if what == purpose else tokens

    return mutant


def only_the_rejected_removed(rule: Any, proposal: Any) -> Any:
    """A mutant: the residual of a one-hot draft whatever the draft's law."""
    return residual(rule, dataclasses.replace(proposal, draft=None))


def nothing_removed(rule: Any, proposal: Any) -> Any:
    """A mutant: after a rejection the token comes from the target."""
    return proposal.target.weights, np.zeros(proposal.x.size, np.int32)


def accepts_more(rule: Any, proposal: Any, coins: np.ndarray) -> Any:
    """A mutant: coins that are 10 % too small."""
    return accept(rule, proposal, coins * np.float32(0.9))


MUTANTS = {
    "residual of a one-hot draft": ("residual", only_the_rejected_removed),
    "no residual": ("residual", nothing_removed),
    "small coins": ("accept", accepts_more),
    "off by one after a rejection": ("race", wrong_race(lambda t, V: np.minimum(t + 1, V - 1), Purpose.RESIDUAL)),
    "off by one in the bonus": ("race", wrong_race(lambda t, V: np.maximum(t - 1, 0), Purpose.BONUS)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_samplers_are_noticed(name: str) -> None:
    """A check that never failed proves nothing: each of these passes every test of shapes and ranges."""
    what, mutant = MUTANTS[name]
    with mock.patch(f"cupyspec.cpu.chain.{what}", mutant):
        assert not follows(CHAIN.law(), CHAIN.draw, DRAWS)


def test_bonus_from_the_draft_is_noticed() -> None:
    """Catches a check that leaves out the token after the last draft."""
    target, draft = (t.astype(np.float64) for t in CHAIN.tables())

    def model(table: np.ndarray) -> Any:
        return lambda prefix: softmax(table[prefix[-1] if prefix else CHAIN.V])

    wrong = law_of_cells(chain_law(model(target), model(draft), 2, bonus=model(draft)), CHAIN.V, 2)
    rng = np.random.default_rng(0)
    assert not follows(CHAIN.law(), lambda n, _: rng.choice(wrong.size, n, p=wrong), DRAWS)


def test_coin_used_twice_is_noticed() -> None:
    """The coin that rejected also picks the token, by inverse CDF: .111, .444, .444 instead of thirds."""

    def draw(draws: int, fresh: int) -> np.ndarray:
        coins = np.random.default_rng(fresh).random(draws)
        coins = coins[coins >= 0.25]
        return ((coins - 0.25) * 12).astype(np.int64) * 4 + 1 + (coins * 3).astype(np.int64)

    assert not follows(REJECTION_LAW, draw, 1000)


def test_dropped_tail_is_noticed() -> None:
    """The last five of 6149 ids never come out."""
    experiment = LargeVocabulary()
    vocab = experiment.target.size - 5

    def draw(draws: int, fresh: int) -> np.ndarray:
        experiment.draft[-5:] = -np.inf  # its own drafts lie below as well
        return experiment.draw(draws, fresh, vocab_size=vocab)

    assert not follows(LargeVocabulary().law(), draw, 2000)


def test_numbers_shared_by_rows_are_noticed() -> None:
    """All rows in pairs with one seed: each row alone is right, the pair is not."""
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    law = np.outer(np.exp(row), np.exp(row)).ravel()

    def draw(draws: int, fresh: int) -> np.ndarray:
        rows = np.broadcast_to(row.astype(np.float32), (2 * draws, 4))
        tokens = cupyspec.sample(rows, seed=np.repeat(np.arange(draws) + (fresh << 40), 2)).tokens
        return tokens.reshape(draws, 2) @ np.array([4, 1])

    assert not follows(law, draw, 1000)
