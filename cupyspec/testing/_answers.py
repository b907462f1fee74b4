"""Answers of `verify` as cells to count: the accepted length and every token together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cupyspec.testing._laws import Law

COUNTABLE = 10_000_000  # cells of a law that is written out


def number_of_cells(vocab_size: int, width: int, limit: int = COUNTABLE) -> int:
    """Cells of answers [B, width]."""
    cells = (vocab_size + 1) ** width
    if cells > limit:
        raise ValueError(
            f"answers of {width} tokens from {vocab_size} ids have {cells} cells, above {limit}: use a smaller "
            "vocabulary or fewer drafts"
        )
    return int(cells)


def answer_cells(tokens: npt.ArrayLike, vocab_size: int) -> npt.NDArray[np.int64]:
    """One number for each row of an answer, the same for equal rows.

    Parameters
    ----------
    tokens : integer array_like [B, K + 1]
        Emitted tokens, -1 behind them.
    vocab_size : int
        V.

    Returns
    -------
    ndarray [B], int64
        In [0, (V + 1)^(K + 1)).

    Examples
    --------
    >>> from cupyspec.testing import answer_cells
    >>> answer_cells([[0, -1], [0, 2], [1, -1]], vocab_size=3)
    array([ 1, 13,  2])
    """
    array = np.asarray(tokens)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise ValueError(f"tokens must be integers [B, K + 1], got {array.dtype} of shape {array.shape}")
    number_of_cells(vocab_size, array.shape[1], 2**62)
    if array.size and not (-1 <= int(array.min()) and int(array.max()) < vocab_size):
        raise ValueError(f"tokens must be in [-1, {vocab_size}), got {array.min()} to {array.max()}")
    powers = (vocab_size + 1) ** np.arange(array.shape[1], dtype=np.int64)
    return np.asarray((array.astype(np.int64) + 1) @ powers)


def law_of_cells(law: Law, vocab_size: int, num_draft_tokens: int) -> npt.NDArray[np.float64]:
    """A law of emitted tokens as probabilities of `answer_cells`.

    Parameters
    ----------
    law : dict
        Of `output_law`.
    vocab_size, num_draft_tokens : int
        V and K.

    Returns
    -------
    ndarray [(V + 1)^(K + 1)]

    Examples
    --------
    >>> from cupyspec.testing import law_of_cells
    >>> law_of_cells({(0,): 0.25, (1, 0): 0.75}, vocab_size=2, num_draft_tokens=1)
    array([0.  , 0.25, 0.  , 0.  , 0.  , 0.75, 0.  , 0.  , 0.  ])
    """
    width = num_draft_tokens + 1
    shares = np.zeros(number_of_cells(vocab_size, width))
    rows = [[*tokens, *[-1] * (width - len(tokens))] for tokens in law]
    if rows:
        np.add.at(shares, answer_cells(rows, vocab_size), [float(chance) for chance in law.values()])
    return shares
