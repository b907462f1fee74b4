"""cupyspec.testing.strategies: rows are what they say, every corner is reached, and the library takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import find, given
from hypothesis import strategies as st

import cupyspec
from cupyspec.testing.strategies import (
    CORNERS,
    SCORE_DTYPES,
    corner_row,
    logit_pairs,
    logit_rows,
    probability_rows,
    ragged_lengths,
    rational_models,
    row_seeds,
    score_dtype,
    seeds,
)


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64) - row.astype(np.float64).max())
    return weights / weights.sum()


@given(logit_rows(), seeds())
def test_logits_are_valid(row: np.ndarray, seed: int) -> None:
    """Catches rows that a sampler may refuse: they would hide what it does with the others."""
    z = row.astype(np.float64)
    assert not np.isnan(z).any() and not (z == np.inf).any() and np.isfinite(z).any()
    got = cupyspec.sample(row[None], seed=seed)
    assert got.status[0] == 0 and z[got.tokens[0]] > -np.inf


@given(probability_rows())
def test_probabilities_are_valid(row: np.ndarray) -> None:
    """Catches rows that are no distributions in their own dtype."""
    p = row.astype(np.float64)
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 3e-2, "bfloat16": 3e-2}[row.dtype.name]
    assert (p >= 0).all() and p.sum() == pytest.approx(1, abs=tolerance)


@pytest.mark.parametrize(
    ("what", "seen"),
    [
        ("one possible id", lambda p: p.size > 1 and np.count_nonzero(p) == 1),
        ("masked ids", lambda p: 1 < np.count_nonzero(p) < p.size),
        ("ties", lambda p: p.size > 2 and np.count_nonzero(p == p.max()) > 1 and len(set(p)) > 1),
        ("nearly uniform", lambda p: p.size > 2 and 0 < p.max() / p.min() - 1 < 0.1 if p.min() > 0 else False),
        ("1e-30", lambda p: bool(((p > 0) & (p < 1e-30)).any())),
    ],
)
def test_corners_are_reached(what: str, seen: Any) -> None:
    """Catches a corner that is named and never drawn."""
    find(probability_rows(dtypes=("float64",)), lambda p: bool(seen(p)))


@pytest.mark.parametrize("dtype", SCORE_DTYPES)
def test_extremes_are_the_dtypes_own(dtype: str) -> None:
    """Catches extremes of float32 that overflow in half precision, or are rounded away."""
    rng = np.random.default_rng(0)
    rows = np.concatenate([corner_row(rng, 33, "extremes", dtype) for _ in range(20)]).astype(np.float64)
    finite = np.abs(rows[np.isfinite(rows)])
    largest = {"float32": np.finfo(np.float32).max, "float16": 65504.0, "bfloat16": 3.3895314e38}[dtype]
    assert finite.max() == pytest.approx(largest, rel=1e-6) and 0 < finite[finite > 0].min() < 1e-6
    assert np.signbit(rows[rows == 0]).any()


@given(st.data(), st.sampled_from(["identical", "near", "unrelated", "disjoint"]))
def test_pairs_are_related_as_they_say(data: st.DataObject, relation: str) -> None:
    """Catches pairs that are all alike: disjoint supports must accept nothing, equal rows everything."""
    sizes = (2, 3, 7, 33)
    target, draft = data.draw(logit_pairs(vocab_sizes=sizes, relations=(relation,)))
    p, q = softmax(target), softmax(draft)
    overlap = np.minimum(p, q).sum()
    if relation == "identical":
        assert overlap == pytest.approx(1) and target.dtype == draft.dtype
    if relation == "disjoint":
        assert overlap == 0
    x = cupyspec.sample(draft[None], seed=1).tokens
    same = np.stack([target, target])[None]
    answer = cupyspec.verify(x[:, None], same, draft[None, None], seed=1)
    assert answer.status[0] == 0
    if relation in ("identical", "disjoint"):
        assert answer.num_accepted[0] == (relation == "identical")


@given(rational_models(), ragged_lengths(), seeds(), row_seeds(3))
def test_the_rest_is_in_its_domain(models: Any, ragged: Any, seed: int, rows: np.ndarray) -> None:
    """Catches tables of the wrong form, lengths above K, sums without their leading 0, seeds that are refused."""
    target, draft, width = models
    assert len(target) == len(draft) == len(target[0]) + 1 and 0 <= width <= 3
    assert all(sum(row) == 1 for row in (*target, *draft))
    lengths, bounds, limit = ragged
    assert all(0 <= n <= limit for n in lengths) and bounds[0] == 0 and np.diff(bounds).tolist() == lengths
    assert cupyspec.row_seeds(seed, 2).shape == (2,)
    assert rows.dtype == np.uint64 and rows.shape == (3,)


def test_wrong_names_are_refused() -> None:
    """Catches a corner or dtype that is misspelt and quietly something else."""
    with pytest.raises(ValueError, match="corner must be one of"):
        corner_row(np.random.default_rng(0), 3, "onehot")
    with pytest.raises(ValueError, match="dtype must be one of"):
        score_dtype("float64")
    assert set(CORNERS) >= {"one-hot", "ties", "masked", "near-uniform", "long tail", "extremes"}
