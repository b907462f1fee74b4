"""Hypothesis strategies for scores, distributions, batches and seeds, with the corners that samplers get wrong.

Needs Hypothesis, and ml_dtypes for bfloat16. Arrays are NumPy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

Array = npt.NDArray[Any]

SCORE_DTYPES = ("float32", "float16", "bfloat16")
VOCABULARIES = (1, 2, 3, 7, 31, 32, 33, 111, 257, 1000)
CORNERS = ("plain", "one-hot", "ties", "masked", "near-uniform", "long tail", "extremes")
RELATIONS = ("identical", "near", "unrelated", "disjoint")
SEED_CORNERS = (0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 2**64 - 1)


def score_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of a score dtype's name."""
    if name not in SCORE_DTYPES:
        raise ValueError(f"dtype must be one of {SCORE_DTYPES}, got {name!r}")
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def corner_row(rng: np.random.Generator, vocab_size: int, corner: str, dtype: str = "float32") -> Array:
    """A row of logits [V] of one kind, one of `CORNERS`, with at least one finite score.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyspec.testing.strategies import corner_row
    >>> int(np.isfinite(corner_row(np.random.default_rng(0), 5, "one-hot")).sum())
    1
    """
    kind = score_dtype(dtype)
    if corner == "one-hot":
        row = np.full(vocab_size, -np.inf)
        row[rng.integers(vocab_size)] = rng.normal()
    elif corner == "ties":
        row = rng.integers(-1, 2, vocab_size).astype(np.float64)
    elif corner == "masked":
        row = rng.normal(0, 2, vocab_size)
        left = rng.integers(vocab_size)
        row[(rng.random(vocab_size) < rng.choice([0.3, 0.9])) & (np.arange(vocab_size) != left)] = -np.inf
    elif corner == "near-uniform":
        row = rng.normal(0, 1e-3, vocab_size)
    elif corner == "long tail":  # down to a probability of 1e-30 and beyond
        row = -rng.random(vocab_size) * 80.0
        row[rng.integers(vocab_size)] = 0.0
    elif corner == "extremes":
        largest = {"float32": 3.4028235e38, "float16": 65504.0, "bfloat16": 3.3895314e38}[dtype]
        smallest = {"float32": 1.2e-38, "float16": 6e-8, "bfloat16": 1.2e-38}[dtype]
        row = rng.choice([largest, -largest, smallest, -smallest, 0.0, -0.0, -np.inf], vocab_size)
        row[rng.integers(vocab_size)] = rng.choice([largest, smallest, -largest])
    elif corner == "plain":
        row = rng.normal(0, rng.choice([0.3, 2.0, 12.0]), vocab_size)
    else:
        raise ValueError(f"corner must be one of {CORNERS}, got {corner!r}")
    return np.asarray(row.astype(kind))


def _generators() -> st.SearchStrategy[np.random.Generator]:
    return st.integers(0, 2**32 - 1).map(np.random.default_rng)


@st.composite
def logit_rows(
    draw: st.DrawFn,
    *,
    vocab_sizes: Sequence[int] = VOCABULARIES,
    dtypes: Sequence[str] = SCORE_DTYPES,
    corners: Sequence[str] = CORNERS,
) -> Array:
    """Rows of logits [V] without NaN or +inf and with at least one finite score.

    Corners: one-hot, ties, -inf masks, near-uniform, tails down to probabilities of 1e-30, the extremes of the dtype.
    """
    vocab_size, dtype = draw(st.sampled_from(vocab_sizes)), draw(st.sampled_from(dtypes))
    return corner_row(draw(_generators()), vocab_size, draw(st.sampled_from(corners)), dtype)


def _softmax(row: Array) -> npt.NDArray[np.float64]:
    row = row.astype(np.float64)
    weights = np.exp(row - row.max())
    return np.asarray(weights / weights.sum())


@st.composite
def probability_rows(
    draw: st.DrawFn,
    *,
    vocab_sizes: Sequence[int] = VOCABULARIES,
    dtypes: Sequence[str] = ("float64", *SCORE_DTYPES),
    corners: Sequence[str] = CORNERS,
) -> Array:
    """Distributions [V]: the softmax of `logit_rows`, so with zeros, ties, tails to 1e-30. They sum to 1 within rounding."""
    row = _softmax(draw(logit_rows(vocab_sizes=vocab_sizes, dtypes=("float32",), corners=corners)))
    dtype = draw(st.sampled_from(dtypes))
    return row if dtype == "float64" else row.astype(score_dtype(dtype))


@st.composite
def rational_rows(draw: st.DrawFn, vocab_size: int, *, largest: int = 6) -> list[Fraction]:
    """Distributions of `vocab_size` Fractions, zeros welcome, for laws without rounding."""
    weights = draw(st.lists(st.integers(0, largest), min_size=vocab_size, max_size=vocab_size).filter(any))
    return [Fraction(weight, sum(weights)) for weight in weights]


@st.composite
def rational_models(
    draw: st.DrawFn, *, max_vocab_size: int = 4, max_draft_tokens: int = 3
) -> tuple[list[list[Fraction]], list[list[Fraction]], int]:
    """Target and draft as tables [V + 1, V] of Fractions, and a K: what `output_law` takes."""
    vocab_size = draw(st.integers(1, max_vocab_size))
    table = st.lists(rational_rows(vocab_size), min_size=vocab_size + 1, max_size=vocab_size + 1)
    target, draft = draw(table), draw(table)
    return target, draw(st.sampled_from([draft, draft, target])), draw(st.integers(0, max_draft_tokens))


@st.composite
def logit_pairs(
    draw: st.DrawFn,
    *,
    vocab_sizes: Sequence[int] = VOCABULARIES,
    dtypes: Sequence[str] = SCORE_DTYPES,
    corners: Sequence[str] = CORNERS,
    relations: Sequence[str] = RELATIONS,
) -> tuple[Array, Array]:
    """Logits [V] of target and draft: identical, near, unrelated, or with disjoint supports (where V > 1)."""
    vocab_size = draw(st.sampled_from(vocab_sizes))
    dtype, draft_dtype = draw(st.sampled_from(dtypes)), draw(st.sampled_from(dtypes))
    relation, rng = draw(st.sampled_from(relations)), draw(_generators())
    target = corner_row(rng, vocab_size, draw(st.sampled_from(corners)), dtype)
    if relation == "identical":
        return target, target.copy()
    if relation == "near":
        with np.errstate(over="ignore", invalid="ignore"):
            moved = target.astype(np.float64) + rng.normal(0, 0.3, vocab_size)
            draft = moved.astype(score_dtype(draft_dtype))
        overflow = ~np.isfinite(draft.astype(np.float64)) & (moved > -np.inf)
        draft[overflow] = 0
        return target, draft
    draft = corner_row(rng, vocab_size, draw(st.sampled_from(corners)), draft_dtype)
    if relation == "disjoint" and vocab_size > 1:
        shared = rng.integers(1, vocab_size)
        order = rng.permutation(vocab_size)
        for row, without in ((target, order[shared:]), (draft, order[:shared])):
            row[without] = -np.inf
            if not np.isfinite(row.astype(np.float64)).any():
                row[np.setdiff1d(order, without)[0]] = 0
    return target, draft


@st.composite
def ragged_lengths(
    draw: st.DrawFn, *, max_batch: int = 6, max_draft_tokens: int = 5
) -> tuple[list[int], list[int], int]:
    """Drafts of each row, their running sums with a leading 0, and K: ``num_draft_tokens`` or ``cu_num_draft_tokens``."""
    width = draw(st.integers(0, max_draft_tokens))
    lengths = draw(st.lists(st.integers(0, width), max_size=max_batch))
    return lengths, [sum(lengths[:b]) for b in range(len(lengths) + 1)], width


def seeds() -> st.SearchStrategy[int]:
    """Scalar seeds in [-2^63, 2^64), their corners on purpose."""
    return st.one_of(st.sampled_from(SEED_CORNERS), st.integers(-(2**63), 2**64 - 1))


def row_seeds(batch_size: int) -> st.SearchStrategy[Array]:
    """One 64-bit seed per row [B], some of them equal, some that differ only above bit 32."""
    word = st.one_of(st.sampled_from([0, 1, 2**32, 2**33, 2**64 - 1]), st.integers(0, 2**64 - 1))
    rows = st.lists(word, min_size=batch_size, max_size=batch_size)
    return rows.map(lambda values: np.array(values, np.uint64))
