"""The float64 oracle against exact enumeration: all drafts, all outcomes, coins integrated out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

from cupyspec import Sigmoid, Token, expected_tokens
from cupyspec.reference import chain, sigmoid, token
from cupyspec.reference.race import race
from enumeration import Law, Model, Row, chain_law, joint_law, norm, one_hot, token_rule

TOLERANCE = 1e-12
LARGEST_COIN = 1 - 2.0**-24


def constant(*row: float) -> Model:
    """The same row at every position."""
    return lambda _: np.array(row, np.float64)


def distance_from_target(law: Law, p: Model, length: int) -> float:
    """Largest difference between the joint law of `length` tokens and the target's own."""
    joint, own = joint_law(law, p, length), joint_law({(): 1.0}, p, length)
    return max(abs(joint.get(tokens, 0.0) - own.get(tokens, 0.0)) for tokens in joint.keys() | own.keys())


def accepted_tokens(law: Law) -> float:
    """Expected length of the accepted prefix."""
    return sum(chance * (len(tokens) - 1) for tokens, chance in law.items())


def rows(V: int) -> st.SearchStrategy[list[int]]:
    """Integer weights of a distribution, zeros welcome."""
    return st.lists(st.integers(0, 6), min_size=V, max_size=V).filter(any)


@st.composite
def models(draw: st.DrawFn) -> tuple[Model, Model, int, int]:
    """Target and draft whose rows depend on the last token, V, K."""
    V, K = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    tables = [[norm(np.array(draw(rows(V)), np.float64)) for _ in range(V + 1)] for _ in range(2)]

    def model(table: list[Row]) -> Model:
        return lambda prefix: table[prefix[-1] if prefix else V]

    return model(tables[0]), model(tables[1]), V, K


@given(models())
def test_token_rule_is_exact(given_models: tuple[Model, Model, int, int]) -> None:
    """Catches any error of acceptance or residual: the law of all tokens together must be the target's."""
    p, q, _, K = given_models
    assert distance_from_target(chain_law(p, q, K), p, K + 1) < TOLERANCE


@given(models())
def test_one_hot_drafts_are_exact(given_models: tuple[Model, Model, int, int]) -> None:
    """Catches q(x) < 1 or a residual that keeps x where the drafter has no distribution."""
    p, q, _, K = given_models
    assert distance_from_target(chain_law(p, q, K, one_hot_drafts=True), p, K + 1) < TOLERANCE


@given(models(), st.integers(0, 3))
def test_stopping_early_is_exact(given_models: tuple[Model, Model, int, int], last: int) -> None:
    """Catches a residual where a row's drafts end: the next token must come from p itself."""
    p, q, _, K = given_models
    law = chain_law(p, q, K, ends=lambda prefix: prefix[-1] == last)
    assert distance_from_target(law, p, K + 1) < TOLERANCE


@given(models())
def test_acceptance_is_one_minus_distance(given_models: tuple[Model, Model, int, int]) -> None:
    """Catches an exact rule that accepts less than it could: a = sum min(p, q)."""
    p, q, _, _ = given_models
    assert accepted_tokens(chain_law(p, q, 1)) == pytest.approx(np.minimum(p(()), q(())).sum(), abs=TOLERANCE)


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
    p, q = constant(0.36, 0.28, 0.18, 0.12, 0.06), constant(0.10, 0.20, 0.40, 0.05, 0.25)
    with mock.patch(f"cupyspec.reference.token.{name}", wrong):
        assert distance_from_target(chain_law(p, q, 2), p, 3) > 1e-3


def test_bonus_from_the_draft_is_noticed() -> None:
    """Shows that the joint law includes the token after the last draft."""
    p, q = constant(0.5, 0.3, 0.2), constant(0.2, 0.3, 0.5)
    assert distance_from_target(chain_law(p, q, 2, bonus=q), p, 3) > 1e-2


# Numbers of verification-rules.md, section 7.


@pytest.mark.parametrize(
    ("K", "ends", "accepted"),
    [(3, None, 1.533), (2, None, 1.19), (1, None, 0.7), (3, 0, 1.225)],
    ids=["K=3", "ragged to 2", "ragged to 1", "stop after token 0"],
)
def test_case_c(K: int, ends: int | None, accepted: float) -> None:
    """Catches an acceptance that is not min(1, p/q), on published numbers."""
    p, q = constant(0.5, 0.3, 0.2), constant(0.2, 0.3, 0.5)
    law = chain_law(p, q, K, ends=lambda prefix: prefix[-1] == ends)
    assert accepted_tokens(law) == pytest.approx(accepted, abs=1e-12)
    assert distance_from_target(law, p, K + 1) < TOLERANCE


@pytest.mark.parametrize(
    ("lenience", "acceptance", "distance"), [(1.0, 0.6, 0.0), (0.5, 0.8, 0.2), (0.3, 13 / 15, 4 / 15), (0.1, 1.0, 0.4)]
)
def test_lenience(lenience: float, acceptance: float, distance: float) -> None:
    """Catches lenience in the residual, where it would cost more accuracy."""
    p, q = constant(0.5, 0.3, 0.15, 0.05), constant(0.2, 0.2, 0.3, 0.3)
    law = chain_law(p, q, 1, lenience=lenience)
    assert accepted_tokens(law) == pytest.approx(acceptance, abs=1e-12)
    first = joint_law(law, p, 1)
    tv = sum(abs(first.get((t,), 0.0) - share) for t, share in enumerate(p(()))) / 2
    assert tv == pytest.approx(distance, abs=1e-12)
    assert all(first.get((t,), 0.0) <= share / lenience + 1e-12 for t, share in enumerate(p(())))


def test_tokens_per_call_follow_the_formula() -> None:
    """Catches a formula that counts drafts and not tokens: 19/9 at a = 2/3, K = 2."""
    p, q = constant(1 / 3, 2 / 3), constant(2 / 3, 1 / 3)
    law = chain_law(p, q, 2)
    assert accepted_tokens(law) == pytest.approx(10 / 9, abs=1e-12)
    assert accepted_tokens(law) + 1 == pytest.approx(float(Fraction(19, 9)), abs=1e-12)
    assert expected_tokens(2 / 3, 2) == pytest.approx(19 / 9, abs=1e-12)


SIGMOID_TARGET = np.array([4, 3, 2.5, 1, 0, -1, -2, -np.inf])
SIGMOID_DRAFT = np.array([2, 3.5, 1, 2, 0.5, -2, -1, 0])
BOUNDS = (1e1, 1e2, 1e3, 1e4, 1e5)


def sigmoid_output(z_p: Row, z_q: Row, bound: float) -> tuple[float, Row]:
    """Acceptance and law of the first token when drafts come from softmax(z_q), under Sigmoid(-bound, bound)."""
    p_hat, q_hat = sigmoid.values(z_p, -bound, bound), sigmoid.values(z_q, -bound, bound)
    drawn = softmax(z_q)
    accepted = np.array([min(1.0, token.acceptance(p_hat, q_hat, x)) for x in range(z_p.size)])
    left = sigmoid.residual(z_p, z_q, -bound, bound)
    rejected = float((drawn * (1 - accepted)).sum())
    return 1 - rejected, drawn * accepted + rejected * norm(left)


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
def test_walk_follows_the_rule(given_models: tuple[Model, Model, int, int], has_draft: bool) -> None:
    """Catches a wrong row, coin, purpose or length in the walk: every reachable outcome is led to, one by one."""
    p, q, V, K = given_models
    for drafts in itertools.product(range(V), repeat=K):
        target = np.array([p(drafts[:i]) for i in range(K + 1)])
        draft = np.array([q(drafts[:i]) for i in range(K)]).reshape(K, V)
        steps = [token_rule(target[i], draft[i] if has_draft else one_hot(x, V), x) for i, x in enumerate(drafts)]
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
