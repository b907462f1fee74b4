"""`row_seeds`: one seed per row from a single one."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyspec._arrays import Border
from cupyspec._checks import host_integer
from cupyspec._params import seeds
from cupyspec._philox import UInt64, split_seed


def row_seeds(seed: Any, B: int) -> UInt64:
    """Seeds that a call with a scalar `seed` uses for its B rows.

    ``verify(..., seed=row_seeds(s, B))`` gives the tokens of ``verify(..., seed=s)``, and slices of the result
    reproduce single rows.

    Parameters
    ----------
    seed : int or 0-d integer array
        In [-2^63, 2^64); negative numbers stand for their two's complement.
    B : int
        Number of rows.

    Returns
    -------
    ndarray [B], uint64
        Words 0 (low) and 1 (high) of Philox4x32-10 at key `seed` and counter (row, 0, 0, SPLIT << 24).

    Raises
    ------
    TypeError, ValueError
        `seed` or `B` is not an integer in its range.

    Examples
    --------
    >>> from cupyspec import row_seeds
    >>> bool((row_seeds(7, 100)[:3] == row_seeds(7, 3)).all())
    True
    """
    rows = host_integer("B", B, 0, (1 << 31) - 1)
    single = seeds(Border("seed", np.empty(0)), seed, 0)
    if not isinstance(single, int):
        raise ValueError(f"seed must be a scalar, got shape {single.shape}")
    return split_seed(single, rows)
