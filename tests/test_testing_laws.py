"""Exact laws by enumeration: exactness of the exact rules as a theorem, and the published numbers of the lossy ones."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

from cupyspec import Sigmoid, Token, expected_tokens
from cupyspec.testing import (
    answer_cells,
    continued_law,
    expected_accepted,
    law_of_cells,
    output_law,
    single_draft_law,
    target_law,
    total_variation,
)
from cupyspec.testing.strategies import logit_pairs, rational_models, rational_rows

RULES_PAGE = Path(__file__).parent.parent / "docs" / "rules.md"

Models = tuple[list[list[Fraction]], list[list[Fraction]], int]


def bias(law: Any, p: Any, K: int) -> Any:
    """Total variation of K + 1 tokens from the target's own."""
    return total_variation(continued_law(law, p, K + 1), target_law(p, K + 1))


# Theorems, in rational arithmetic: the error is 0, not small.


@given(rational_models())
def test_token_rule_is_exact(models: Models) -> None:
    """Catches any error of acceptance, residual or bonus: the law of all tokens together is the target's."""
    p, q, K = models
    law = output_law(Token(), p, q, K)
    assert sum(law.values()) == 1
    assert bias(law, p, K) == 0


@given(rational_models(), st.sampled_from([1.0, 0.4]))
def test_one_hot_drafts_are_exact(models: Models, lenience: float) -> None:
    """Catches a residual that keeps the draft. Lenience does nothing at q = 1 = p / p, but may where p < 1."""
    p, q, K = models
    assert bias(output_law(Token(), p, q, K, one_hot_drafts=True), p, K) == 0
    greedy = output_law(Token(lenience), p, q, K, greedy=True)
    assert bias(greedy, lambda prefix: argmax_row(p[prefix[-1] if prefix else -1]), K) == 0


def argmax_row(row: list[Fraction]) -> list[Fraction]:
    return [Fraction(int(i == row.index(max(row)))) for i in range(len(row))]


@given(rational_models(), st.integers(0, 3))
def test_stopping_early_is_exact(models: Models, last: int) -> None:
    """Catches a residual where a row's drafts end."""
    p, q, K = models
    assert bias(output_law(Token(), p, q, K, ends=lambda prefix: prefix[-1] == last), p, K) == 0


@given(rational_models())
def test_acceptance_is_the_overlap(models: Models) -> None:
    """Catches a rule that accepts less than it may: sum of min(p, q) at each position that is reached."""
    p, q, _ = models
    accepted = expected_accepted(output_law(Token(), p, q, 1))
    assert accepted == sum(min(a, b) for a, b in zip(p[-1], q[-1], strict=True))
    assert accepted == 1 - total_variation(p[-1], q[-1])


@given(st.data(), st.integers(1, 5), st.sampled_from([0.9, 0.5, 0.3, 0.1, 0.01]))
def test_lenience_costs_what_the_docs_say(data: st.DataObject, V: int, lenience: float) -> None:
    """Catches lenience in the residual: TV = sum over q > p of min(q - p, p (1 / l - 1)), at most min(TV(p, q), 1 - l)."""
    p, q = data.draw(rational_rows(V)), data.draw(rational_rows(V))
    least = Fraction(repr(lenience))
    law = continued_law(output_law(Token(lenience), p, q, 1), p, 1)
    cost = sum(min(b - a, a * (1 / least - 1)) for a, b in zip(p, q, strict=True) if b > a)
    assert total_variation(law, target_law(p, 1)) == cost
    assert cost <= min(total_variation(p, q), 1 - least)
    assert all(chance <= p[t] / least for (t,), chance in law.items())


@pytest.mark.parametrize(
    ("wrong", "least"),
    [
        (lambda p, q, x: (min(1, p[x] / q[x]), p), 1e-2),
        (lambda p, q, x: (min(1, p[x] / q[x]), np.where(np.arange(p.size) == x, 0, p)), 1e-2),
        (lambda p, q, x: (min(1, p[x] / q[x]), abs(p - q)), 1e-2),
        (lambda p, q, x: (min(1, q[x] / p[x]), np.maximum(p - q, 0)), 1e-2),
        (lambda p, q, x: (min(1, p[x] / q[x]) * 0.95, np.maximum(p - q, 0)), 5e-3),
    ],
    ids=["not subtracted", "only the rejected removed", "absolute difference", "q / p", "5 % fewer accepted"],
)
def test_wrong_rules_have_a_bias(wrong: Any, least: float) -> None:
    """Shows that the enumeration can find something."""
    p, q = [0.36, 0.28, 0.18, 0.12, 0.06], [0.10, 0.20, 0.40, 0.05, 0.25]
    assert bias(output_law(wrong, p, q, 2), p, 2) > least
    assert bias(output_law(Token(), p, q, 2, bonus=q), p, 2) > least


def test_rows_may_depend_on_what_came_before() -> None:
    """Catches tables whose first row is taken for the start: case B, 0.75 accepted tokens at K = 2."""
    p = [[0.1, 0.5, 0.4], [0.3, 0.1, 0.6], [0.1, 0.2, 0.7], [0.4, 0.3, 0.3]]
    q = [[0.1, 0.8, 0.1], [0.1, 0.5, 0.4], [0.4, 0.5, 0.1], [0.1, 0.1, 0.8]]
    law = output_law(Token(), p, q, 2)
    assert expected_accepted(law) == pytest.approx(0.75, abs=1e-12)
    by_function = output_law(Token(), *(lambda prefix, t=t: t[prefix[-1] if prefix else 3] for t in (p, q)), 2)
    assert total_variation(law, by_function) < 1e-15


@pytest.mark.parametrize(
    ("K", "ends", "accepted"),
    [(3, None, 1.533), (2, None, 1.19), (1, None, 0.7), (3, 0, 1.225)],
    ids=["K=3", "ragged to 2", "ragged to 1", "stop after token 0"],
)
def test_case_c(K: int, ends: int | None, accepted: float) -> None:
    """Catches an acceptance that is not min(1, p/q), on published numbers."""
    p, q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    law = output_law(Token(), p, q, K, ends=lambda prefix: prefix[-1] == ends)
    assert expected_accepted(law) == pytest.approx(accepted, abs=1e-12)


def test_case_a_single_draft() -> None:
    """The overlap of case A."""
    p, q = [0.36, 0.28, 0.18, 0.12, 0.06], [0.10, 0.20, 0.40, 0.05, 0.25]
    assert expected_accepted(output_law(Token(), p, q, 1)) == pytest.approx(0.59, abs=1e-12)


def test_tokens_per_call_follow_the_formula() -> None:
    """Catches a formula that counts drafts and not tokens: 19/9 at a = 2/3, K = 2."""
    p, q = [Fraction(1, 3), Fraction(2, 3)], [Fraction(2, 3), Fraction(1, 3)]
    assert expected_accepted(output_law(Token(), p, q, 2)) + 1 == Fraction(19, 9)
    assert expected_tokens(2 / 3, 2) == pytest.approx(19 / 9, abs=1e-12)


@pytest.mark.parametrize(
    ("lenience", "acceptance", "distance"), [(1.0, 0.6, 0.0), (0.5, 0.8, 0.2), (0.3, 13 / 15, 4 / 15), (0.1, 1.0, 0.4)]
)
def test_lenience_numbers(lenience: float, acceptance: float, distance: float) -> None:
    """Catches lenience squared, or applied to p."""
    p, q = [0.5, 0.3, 0.15, 0.05], [0.2, 0.2, 0.3, 0.3]
    law = output_law(Token(lenience), p, q, 1)
    assert expected_accepted(law) == pytest.approx(acceptance, abs=1e-12)
    assert total_variation(continued_law(law, p, 1), target_law(p, 1)) == pytest.approx(distance, abs=1e-12)


# Sigmoid, and the page that quotes its cost.

TARGET = np.array([4, 3, 2.5, 1, 0, -1, -2, -np.inf])
DRAFT = np.array([2, 3.5, 1, 2, 0.5, -2, -1, 0])


def sigmoid_cost(bound: float) -> tuple[float, float]:
    """Acceptance and TV(output, p)."""
    law = output_law(Sigmoid(-bound, bound), TARGET, DRAFT, 1)
    p = softmax(TARGET)
    return expected_accepted(law), total_variation(continued_law(law, p, 1), target_law(p, 1))


def test_the_page_of_rules_quotes_computed_numbers() -> None:
    """Catches a table in docs/rules.md that no code gives."""
    page = RULES_PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ±1e(\d) \| (\.\d+) \| (\.\d+) \|$", page, re.MULTILINE)
    assert [int(power) for power, *_ in rows] == [1, 2, 3, 4, 5]
    for power, acceptance, distance in rows:
        found = sigmoid_cost(10.0 ** int(power))
        assert [f"{value:.6f}" for value in found] == ["0" + acceptance, "0" + distance]
    overlap = np.minimum(softmax(TARGET), softmax(DRAFT)).sum()
    accepts, distance = re.search(r"exact rule accepts (\.\d+) and TV\(p, q\) is (\.\d+)", page).groups()  # type: ignore[union-attr]
    assert [f"{overlap:.3f}", f"{1 - overlap:.3f}"] == ["0" + accepts, "0" + distance]


@pytest.mark.parametrize(
    ("bound", "acceptance", "distance"),
    [
        (1e1, 0.973312, 0.524633),
        (1e2, 0.980525, 0.530021),
        (1e3, 0.981312, 0.530618),
        (1e4, 0.981391, 0.530678),
        (1e5, 0.981399, 0.530684),
    ],
)
def test_sigmoid_numbers(bound: float, acceptance: float, distance: float) -> None:
    """Catches a plain difference of sigmoids (no digits left at 1e5) and a -inf that counts as alpha."""
    assert sigmoid_cost(bound) == pytest.approx((acceptance, distance), abs=6e-7)


@given(
    logit_pairs(vocab_sizes=(1, 2, 3, 5), dtypes=("float32",), corners=("plain", "ties", "masked", "one-hot")),
    st.data(),
)
def test_one_draft_at_any_vocabulary(pair: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    """Catches a vectorised law, used for large vocabularies, that is not the enumerated one."""
    sigmoid = data.draw(st.sampled_from([Sigmoid(), Sigmoid(-1, 2), Sigmoid(-10, 10)]))
    token = data.draw(st.sampled_from([Token(), Token(0.5), Token(1e-3)]))
    z, y = (row.astype(np.float64) for row in pair)
    for rule, p, q in ((sigmoid, z, y), (token, softmax(z), softmax(y))):
        law = single_draft_law(rule, p, q)
        assert law.sum() == pytest.approx(1, abs=1e-12)
        enumerated = np.zeros_like(law)
        for tokens, chance in output_law(rule, p, q, 1).items():
            enumerated[len(tokens) - 1, tokens[0]] += chance
        np.testing.assert_allclose(law, enumerated, atol=1e-12)


def test_sigmoid_one_hot_and_greedy() -> None:
    """Catches a one-hot draft whose sigmoid is not 1, and a temperature of 0 that stays lossy."""
    values = 1 / (1 + np.exp(-(TARGET + 10) / 20))
    values[-1] = 0
    law = output_law(Sigmoid(-10, 10), TARGET, DRAFT, 1, one_hot_drafts=True)
    assert expected_accepted(law) == pytest.approx(float((softmax(DRAFT) * values).sum()))
    assert output_law(Sigmoid(), TARGET, DRAFT, 2, greedy=True).keys() == {(0, 0, 0), (0, 0), (0,)}


@pytest.mark.parametrize(
    ("p", "error", "says"),
    [
        ([0.5, 0.4], ValueError, "p must be probabilities that sum to 1"),
        ([1.5, -0.5], ValueError, "p must be probabilities"),
        ([[0.5, 0.5], [0.5, 0.5]], ValueError, r"table \[V \+ 1, V\]"),
        ([Fraction(1, 3), Fraction(1, 3)], ValueError, "sum 2/3"),
        (["a", "b"], TypeError, "real numbers"),
        ([np.nan, 1.0], ValueError, "p must be"),
        (lambda prefix: [[1.0]], ValueError, "must return rows"),
        ([], ValueError, "p must be"),
    ],
)
def test_wrong_rows_are_refused(p: Any, error: type[Exception], says: str) -> None:
    """Catches a law of rows that are no distributions."""
    with pytest.raises(error, match=says):
        output_law(Token(), p, [0.5, 0.5], 1)


def test_wrong_calls_are_refused() -> None:
    """Catches logits of Fractions, NaN logits, laws of different kinds."""
    with pytest.raises(TypeError, match="Fractions"):
        output_law(Sigmoid(), [Fraction(1), Fraction(2)], [0.0, 1.0], 1)
    with pytest.raises(ValueError, match="q must be logits"):
        output_law(Sigmoid(), [0.0, 1.0], [np.nan, 1.0], 1)
    with pytest.raises(ValueError, match="num_draft_tokens"):
        output_law(Token(), [1.0], [1.0], -1)
    with pytest.raises(TypeError, match="both"):
        total_variation({(): 1.0}, [1.0])
    with pytest.raises(ValueError, match="one shape"):
        total_variation([1.0], [0.5, 0.5])
    with pytest.raises(ValueError, match="use a smaller vocabulary"):
        law_of_cells({}, 100_000, 4)
    with pytest.raises(ValueError, match=r"in \[-1, 3\)"):
        answer_cells([[3, 0]], 3)
    with pytest.raises(ValueError, match=r"\[B, K \+ 1\]"):
        answer_cells([3, 0], 3)


def test_p_and_q_of_different_lengths_are_refused() -> None:
    """Catches NumPy's own error, or a law over the shorter vocabulary."""
    with pytest.raises(ValueError, match="p and q must have equal rows"):
        output_law(Token(), [0.5, 0.5], [0.5, 0.25, 0.25], 1)
