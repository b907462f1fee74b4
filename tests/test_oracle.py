"""The float64 oracle against exact enumeration: all drafts, all outcomes, coins integrated out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

from cupyspec import Sigmoid, Token
from cupyspec.reference import chain, token
from cupyspec.reference.race import race
from cupyspec.reference.rows import one_hot
from cupyspec.testing import (
    continued_law,
    expected_accepted,
    output_law,
    single_draft_law,
    target_law,
    total_variation,
)
from cupyspec.testing.strategies import rational_models

TOLERANCE = 1e-12
LARGEST_COIN = 1 - 2.0**-24


Row = np.ndarray


def norm(row: Row) -> Row:
    """Weights as a distribution."""
    return row / row.sum()


def oracle_rule(lenience: float = 1.0) -> Callable[[Row, Row, int], tuple[float, Row]]:
    """Rule Token as the oracle has it."""
    return lambda p, q, x: (min(1.0, token.acceptance(p, q, x, lenience)), token.residual(p, q))


def distance_from_target(p: Any, q: Any, K: int, **options: Any) -> float:
    """Total variation between the joint law of K + 1 tokens under the oracle's rule and the target's own."""
    law = output_law(oracle_rule(), p, q, K, **options)
    return float(total_variation(continued_law(law, p, K + 1), target_law(p, K + 1)))


@st.composite
def models(draw: st.DrawFn) -> tuple[Row, Row, int, int]:
    """Target and draft whose rows depend on the last token, V, K."""
    target, draft, K = draw(rational_models())
    return np.array(target, np.float64), np.array(draft, np.float64), len(target[0]), K


@given(models())
def test_token_rule_is_exact(given_models: tuple[Row, Row, int, int]) -> None:
    """Catches any error of acceptance or residual: the law of all tokens together must be the target's."""
    p, q, _, K = given_models
    assert distance_from_target(p, q, K) < TOLERANCE


@given(models())
def test_one_hot_drafts_are_exact(given_models: tuple[Row, Row, int, int]) -> None:
    """Catches q(x) < 1 or a residual that keeps x where the drafter has no distribution."""
    p, q, _, K = given_models
    assert distance_from_target(p, q, K, one_hot_drafts=True) < TOLERANCE


@given(models(), st.integers(0, 3))
def test_stopping_early_is_exact(given_models: tuple[Row, Row, int, int], last: int) -> None:
    """Catches a residual where a row's drafts end: the next token must come from p itself."""
    p, q, _, K = given_models
    assert distance_from_target(p, q, K, ends=lambda prefix: prefix[-1] == last) < TOLERANCE


@given(models(), st.sampled_from([1.0, 0.5, 1e-3]))
def test_oracle_has_the_kits_rule(given_models: tuple[Row, Row, int, int], lenience: float) -> None:
    """Catches an error that the oracle shares with nobody: the public enumeration has its own Token rule."""
    p, q, _, K = given_models
    ours, theirs = output_law(oracle_rule(lenience), p, q, K), output_law(Token(lenience), p, q, K)
    assert total_variation(ours, theirs) < TOLERANCE


@given(models())
def test_acceptance_is_one_minus_distance(given_models: tuple[Row, Row, int, int]) -> None:
    """Catches an exact rule that accepts less than it could: a = sum min(p, q)."""
    p, q, _, _ = given_models
    rate = expected_accepted(output_law(oracle_rule(), p, q, 1))
    assert rate == pytest.approx(np.minimum(p[-1], q[-1]).sum(), abs=TOLERANCE)


def removes_only_the_rejected(p: Row, q: Row) -> Row:
    """Mutant: the residual of a one-hot draft, whatever q (drafts are rejected where q exceeds p)."""
    return np.where(q > p, 0.0, p)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("residual", removes_only_the_rejected),
        ("residual", lambda p, q: p),
        ("residual", lambda p, q: np.abs(p - q)),
        ("acceptance", lambda p, q, x, lenience: p[x] / q[x] if p[x] < q[x] else 0.9),
        ("acceptance", lambda p, q, x, lenience: min(1.0, q[x] / p[x])),
    ],
)
def test_wrong_rules_are_noticed(name: str, wrong: Callable[..., Any]) -> None:
    """Shows that the enumeration above can fail: each mutant moves the law by a percent or more."""
    p, q = [0.36, 0.28, 0.18, 0.12, 0.06], [0.10, 0.20, 0.40, 0.05, 0.25]
    with mock.patch(f"cupyspec.reference.token.{name}", wrong):
        assert distance_from_target(p, q, 2) > 1e-3


def test_bonus_from_the_draft_is_noticed() -> None:
    """Shows that the joint law includes the token after the last draft."""
    p, q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    assert distance_from_target(p, q, 2, bonus=q) > 1e-2


SIGMOID_TARGET = np.array([4, 3, 2.5, 1, 0, -1, -2, -np.inf])
SIGMOID_DRAFT = np.array([2, 3.5, 1, 2, 0.5, -2, -1, 0])
BOUNDS = (1e1, 1e2, 1e3, 1e4, 1e5)


def sigmoid_output(z_p: Row, z_q: Row, bound: float) -> tuple[float, Row]:
    """Acceptance and law of the first token when drafts come from softmax(z_q), under Sigmoid(-bound, bound)."""
    law = single_draft_law(Sigmoid(-bound, bound), z_p, z_q)
    return float(law[1].sum()), law.sum(axis=0)


@pytest.mark.parametrize(
    ("bound", "acceptance", "distance"),
    list(
        zip(
            BOUNDS,
            (0.973312, 0.980525, 0.981312, 0.981391, 0.981399),
            (0.524633, 0.530021, 0.530618, 0.530678, 0.530684),
            strict=True,
        )
    ),
)
def test_sigmoid_numbers(bound: float, acceptance: float, distance: float) -> None:
    """Catches a plain difference of sigmoids (no digits left at 1e5) and a -inf that counts as alpha."""
    p = softmax(SIGMOID_TARGET)
    assert np.abs(p - softmax(SIGMOID_DRAFT)).sum() / 2 == pytest.approx(0.546673, abs=6e-7)
    rate, output = sigmoid_output(SIGMOID_TARGET, SIGMOID_DRAFT, bound)
    assert rate == pytest.approx(acceptance, abs=6e-7)
    assert np.abs(output - p).sum() / 2 == pytest.approx(distance, abs=6e-7)
    if bound == 1e4:
        published = (0.145706, 0.615938, 0.056763, 0.137433, 0.030666, 0.006653, 0.006842, 0)
        assert output == pytest.approx(published, abs=6e-7)


@pytest.mark.parametrize(
    ("bound", "acceptance", "distance"),
    list(
        zip(
            BOUNDS,
            (0.999938, 0.999053, 0.999900, 0.999990, 0.999999),
            (0.248769, 0.248760, 0.248767, 0.248769, 0.248769),
            strict=True,
        )
    ),
)
def test_sigmoid_numbers_of_a_large_vocabulary(bound: float, acceptance: float, distance: float) -> None:
    """Catches clamping at the wrong side: at 1e1 many logits lie beyond alpha or beta."""
    x = np.arange(32000)
    z_p = 20 - 3 * np.log(1 + x)
    z_q = z_p + 1.5 * np.sin(1.7 * x)
    rate, output = sigmoid_output(z_p, z_q, bound)
    assert rate == pytest.approx(acceptance, abs=1.1e-6)
    assert np.abs(output - softmax(z_p)).sum() / 2 == pytest.approx(distance, abs=1.1e-6)


# The walk itself: what it emits for coins and picks chosen to lead to one outcome.


def tokens_with_their_picks(weights: Row) -> Iterator[tuple[int, float]]:
    """Each id that can be drawn, with a pick in the middle of its share."""
    upper = np.cumsum(weights)
    for t in np.flatnonzero(weights):
        yield int(t), float((upper[t] - weights[t] / 2) / upper[-1])


@given(models(), st.booleans())
def test_walk_follows_the_rule(given_models: tuple[Row, Row, int, int], has_draft: bool) -> None:
    """Catches a wrong row, coin, purpose or length in the walk: every reachable outcome is led to, one by one."""
    p, q, V, K = given_models
    for drafts in itertools.product(range(V), repeat=K):
        target, draft = p[[-1, *drafts]], q[[-1, *drafts][:K]].reshape(K, V)
        steps = [oracle_rule()(target[i], draft[i] if has_draft else one_hot(x, V), x) for i, x in enumerate(drafts)]
        for n in range(K + 1):
            if any(accepted == 0 for accepted, _ in steps[:n]) or (n < K and steps[n][0] == 1):
                continue
            coins = np.array([[a * (1 - 1e-9) if i < n else min(a, LARGEST_COIN) for i, (a, _) in enumerate(steps)]])
            for t, pick in tokens_with_their_picks(target[K] if n == K else steps[n][1]):
                picks = np.full((2, 1, K + 1, 1), np.nan)  # the right one alone is a number
                picks[int(n == K), 0, n] = pick
                got = chain.verify(
                    np.array([drafts], np.int64).reshape(1, K),
                    target[None],
                    draft[None] if has_draft else None,
                    coins=coins.reshape(1, K),
                    exponentials=np.ones((2, 1, K + 1, 1)),
                    picks=picks,
                    target_probs=True,
                    draft_probs=True,
                )
                assert got.tokens[0].tolist() == [*drafts[:n], t, *[-1] * (K - n)]
                assert got.num_accepted[0] == n
                assert got.status[0] == 0


def verify_one(p: Row, q: Row | None, x: int, coin: float, pick: float = 0.5, **options: Any) -> chain.OracleAnswer:
    """K = 1 on probabilities; the bonus row is one-hot on id 0."""
    V = p.size
    return chain.verify(
        np.array([[x]]),
        np.stack([p, one_hot(0, V)])[None],
        None if q is None else q[None, None],
        coins=np.array([[coin]]),
        exponentials=np.ones((2, 1, 2, 1)),
        picks=np.full((2, 1, 2, 1), pick),
        target_probs=True,
        draft_probs=True,
        **options,
    )


def assert_impossible_token_stays_out() -> None:
    got = verify_one(np.array([0.0, 1.0, 0.0]), np.array([1.0, 0.0, 0.0]), 0, 0.0)
    assert got.tokens[0].tolist() == [1, -1]


def test_coin_of_zero_accepts_nothing_impossible() -> None:
    """Catches an inclusive comparison: u = 0 must not accept a token of probability 0."""
    assert_impossible_token_stays_out()
    inclusive = np.nextafter(0, 1)  # u <= p/q at u = 0 is u < the next number
    with mock.patch("cupyspec.reference.token.acceptance", lambda p, q, x, lenience: p[x] / q[x] or inclusive):
        with pytest.raises(AssertionError):
            assert_impossible_token_stays_out()


@pytest.mark.parametrize("lenience", [1.0, 0.5])
def test_comparison_is_strict(lenience: float) -> None:
    """Catches u l q <= p: at equality the draft is rejected."""
    p, q = np.array([0.25, 0.75]), np.array([0.5 / lenience, 1 - 0.5 / lenience])
    limit = 0.5  # p / (l q)
    rule = Token(lenience=lenience)
    assert verify_one(p, q, 0, limit, rule=rule).num_accepted[0] == 0
    assert verify_one(p, q, 0, np.nextafter(limit, 0), rule=rule).num_accepted[0] == 1


def test_zero_residual_falls_back_to_the_target() -> None:
    """Catches a division by the residual's sum of 0."""
    p, q = np.array([0.5 - 2.0**-12, 0.5, 0.0, 0.0]), np.array([0.5, 0.5, 0.0, 0.0])
    assert verify_one(p, q, 0, LARGEST_COIN, pick=0.25).tokens[0].tolist() == [0, -1]
    assert verify_one(p, q, 0, LARGEST_COIN, pick=0.75).tokens[0].tolist() == [1, -1]


def test_sigmoid_bonus_comes_from_the_softmax() -> None:
    """Catches the released code's bonus from raw logits or from p^."""
    z = np.array([[[0.0, 0.0], [np.log(3.0), 0.0]]])
    for pick, want in ((0.74, 0), (0.76, 1)):
        got = chain.verify(
            np.array([[0]]),
            z,
            z[:, :1],
            coins=np.array([[0.5]]),
            exponentials=np.ones((2, 1, 2, 1)),
            picks=np.full((2, 1, 2, 1), pick),
            rule=Sigmoid(),
        )
        assert got.tokens[0].tolist() == [0, want]


# The race.


def test_race_takes_the_smallest_key_and_the_lowest_segment_on_ties() -> None:
    """Catches a race that ignores masses, keys of empty segments, and ties that go to the last."""
    weights = np.array([0.0, 0.0, 1.0, 1.0, 2.0, 2.0])  # masses 0, 2, 4
    half = np.full(3, 0.5)
    assert race(weights, np.array([1e-9, 1.0, 2.5]), half, segment=2).token == 3
    assert race(weights, np.array([1e-9, 1.0, 1.5]), half, segment=2).token == 5
    tie = race(weights, np.array([1e-9, 1.0, 2.0]), half, segment=2)
    assert tie.token == 3
    assert tie.in_band


@pytest.mark.parametrize(("pick", "want"), [(0.0, 1), (0.2499, 1), (0.25, 3), (0.9999, 3), (LARGEST_COIN, 3)])
def test_pick_takes_the_first_sum_above(pick: float, want: int) -> None:
    """Catches ids of weight 0 at either end and an inclusive comparison at a boundary."""
    assert race(np.array([0.0, 1.0, 0.0, 3.0, 0.0]), np.ones(1), np.array([pick]), segment=8).token == want


def test_band_is_reported_where_float32_may_differ() -> None:
    """Catches an oracle that excuses everything, or nothing."""
    p, q = np.array([0.3, 0.7]), np.array([0.6, 0.4])
    assert verify_one(p, q, 0, 0.5 * (1 - 2.0**-18)).in_band[0]
    assert not verify_one(p, q, 0, 0.5 * (1 - 2.0**-16)).in_band[0]
    weights = np.array([1.0, 1.0])
    assert race(weights, np.ones(1), np.array([0.5 + 2.0**-18]), segment=2).in_band
    assert not race(weights, np.ones(1), np.array([0.5 + 2.0**-15]), segment=2).in_band
    assert 0 < race(weights, np.ones(1), np.array([0.1]), segment=2).width < 2.0**-14
