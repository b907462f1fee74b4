"""Wrong samplers and wrong verifiers are noticed by the checks that test_law.py makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from scipy.special import softmax

import cupyspec
from cupyspec import Token
from cupyspec._philox import Purpose
from cupyspec.cpu.chain import accept, race, residual
from cupyspec.cpu.rows import Weights
from cupyspec.testing import assert_samples_from, draws_needed, law_of_cells, output_law
from test_law import DRAWS, REJECTION_LAW, Chain, LargeVocabulary

CHAIN = Chain(K=2, models=1)


def assert_noticed(draw: Callable[[int, int], np.ndarray], law: np.ndarray, draws: int = DRAWS) -> None:
    with pytest.raises(AssertionError, match="do not follow"):
        assert_samples_from(draw, law, draws=draws)


def test_temperature_is_noticed() -> None:
    """A temperature 5 % off is seen at a quarter of the sample that test_law uses, by the exact distance."""
    wrong = dataclasses.replace(CHAIN, temperature=1.05, draft_temperature=1.0)
    law = CHAIN.law()
    assert draws_needed(wrong.law(), law, power=0.999) <= DRAWS / 2
    assert_noticed(wrong.draw, law)


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
        assert_noticed(CHAIN.draw, CHAIN.law())


def test_bonus_from_the_draft_is_noticed() -> None:
    """Catches a check that leaves out the token after the last draft."""
    p, q = (softmax(table.astype(np.float64), axis=1) for table in CHAIN.tables())
    wrong = law_of_cells(output_law(Token(), p, q, 2, bonus=q), CHAIN.V, 2)
    wrong /= wrong.sum()
    assert_noticed(lambda n, seed: np.random.default_rng(seed).choice(wrong.size, n, p=wrong), CHAIN.law())


def test_coin_used_twice_is_noticed() -> None:
    """The coin that rejected also picks the token, by inverse CDF: .111, .444, .444 instead of thirds."""

    def draw(draws: int, fresh: int) -> np.ndarray:
        coins = np.random.default_rng(fresh).uniform(0.25, 1, draws)
        return ((coins - 0.25) * 12).astype(np.int64) * 4 + 1 + (coins * 3).astype(np.int64)

    assert_noticed(draw, REJECTION_LAW, 1000)


def test_dropped_tail_is_noticed() -> None:
    """The last five of 6149 ids never come out."""
    experiment = LargeVocabulary()
    vocab = experiment.target.size - 5

    def draw(draws: int, fresh: int) -> np.ndarray:
        experiment.draft[-5:] = -np.inf  # its own drafts lie below as well
        return experiment.draw(draws, fresh, vocab_size=vocab)

    assert_noticed(draw, LargeVocabulary().law(), 2000)


def test_numbers_shared_by_rows_are_noticed() -> None:
    """All rows in pairs with one seed: each row alone is right, the pair is not."""
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    law = np.outer(np.exp(row), np.exp(row)).ravel()

    def draw(draws: int, fresh: int) -> np.ndarray:
        rows = np.broadcast_to(row.astype(np.float32), (2 * draws, 4))
        tokens = cupyspec.sample(rows, seed=np.repeat(np.arange(draws) + (fresh << 40), 2)).tokens
        return tokens.reshape(draws, 2) @ np.array([4, 1])

    assert_noticed(draw, law, 1000)
