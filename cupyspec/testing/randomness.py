"""`draws`: the random numbers of a call. `seed_with`: a seed whose coin is known."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyspec._arrays import Border, host
from cupyspec._checks import host_integer
from cupyspec._draws import Draws, chain_draws
from cupyspec._params import seeds, steps
from cupyspec._philox import POSITION_LIMIT, STEP_LIMIT, Purpose, coin, draw_words, split_seed
from cupyspec._segments import SEG

_BATCH = 1 << 18

# One coin in 2^32 is 0: too many to search at every use. By position, the first such seeds at step 0.
_SEEDS_OF_COIN_ZERO = {
    0: 3499139407,
    1: 2656928601,
    2: 12204763051,
    3: 7689368416,
    4: 3698898116,
    5: 15578707090,
    6: 253663861,
    7: 5432786442,
}


def draws(
    seed: Any, step: Any = 0, *, batch_size: int, num_draft_tokens: int, vocab_size: int, segment: int = SEG
) -> Draws:
    """Every random number that ``verify(..., seed=seed, step=step)`` uses.

    Parameters
    ----------
    seed, step
        As `verify` takes them.
    batch_size, num_draft_tokens, vocab_size : int
        B, K and V of the call.
    segment : int
        Ids per segment; the library's own unless a test says otherwise.

    Returns
    -------
    Draws
        coins [B, K], exponentials [2, B, K + 1, S], picks [2, B, K + 1, S]; S = ceil(V / segment).

    Examples
    --------
    >>> from cupyspec.testing import draws
    >>> d = draws(seed=3, batch_size=2, num_draft_tokens=4, vocab_size=100)
    >>> d.coins.shape, d.exponentials.shape
    ((2, 4), (2, 2, 5, 1))
    """
    batch_size = host_integer("batch_size", batch_size, 0, 1 << 31)
    num_draft_tokens = host_integer("num_draft_tokens", num_draft_tokens, 0, POSITION_LIMIT - 1)
    vocab_size = host_integer("vocab_size", vocab_size, 1, 1 << 31)
    segment = host_integer("segment", segment, 1, 1 << 31)
    border = Border("seed", np.empty(0))
    seed, step = seeds(border, seed, batch_size), steps(border, step, batch_size, None)
    row_seeds = split_seed(seed, batch_size) if isinstance(seed, int) else host(seed)
    row_steps = np.broadcast_to(np.uint64(step) if isinstance(step, int) else host(step), (batch_size,))
    return chain_draws(row_seeds, row_steps, num_draft_tokens, vocab_size, segment)


def seed_with(coin_range: tuple[float, float], position: int = 0, *, step: int = 0, start: int = 0) -> int:
    """A row seed whose acceptance coin at a position lies in a closed range.

    Pass it as ``seed=numpy.array([s], numpy.uint64)``: a scalar seed would be split.

    Parameters
    ----------
    coin_range : (float, float)
        Lowest and highest coin wanted, in [0, 1).
    position : int
        Chain position, 0-based.
    step : int
        The step of the call.
    start : int
        First seed tried; seeds are tried in ascending order.

    Returns
    -------
    int
        The first such seed; for a range of the single coin 0 at step 0 a known one.

    Raises
    ------
    ValueError
        The range holds no coin, or an argument is out of its range.
    RuntimeError
        2^28 seeds have been tried: the range is too narrow to search.

    Examples
    --------
    >>> from cupyspec.testing import draws, seed_with
    >>> s = seed_with((0.25, 0.26), position=1)
    >>> coins = draws([s], batch_size=1, num_draft_tokens=2, vocab_size=1).coins
    >>> bool(0.25 <= coins[0, 1] <= 0.26)
    True
    """
    try:
        low, high = (float(v) for v in coin_range)
    except (TypeError, ValueError) as error:
        raise TypeError(f"coin_range must be two numbers, got {coin_range!r}") from error
    step = host_integer("step", step, 0, STEP_LIMIT - 1)
    start = host_integer("start", start, 0, (1 << 64) - (1 << 28))
    if not 0 <= low <= high or low >= 1:
        raise ValueError(f"coin_range must be 0 <= low <= high with low < 1, got {coin_range!r}")
    position = host_integer("position", position, 0, POSITION_LIMIT - 1)
    if low > 0 and coin(np.asarray(min(np.floor(high * 2.0**32), 2.0**32 - 1), np.uint32)) < low:
        raise ValueError(f"coin_range must hold a coin, got {coin_range!r}: near 0 they are multiples of 2^-32")
    if high < 2.0**-32 and step == start == 0 and position in _SEEDS_OF_COIN_ZERO:
        return _SEEDS_OF_COIN_ZERO[position]
    for first in range(start, start + (1 << 28), _BATCH):
        tried = np.arange(first, first + _BATCH, dtype=np.uint64)
        (word,) = draw_words(tried, step, Purpose.ACCEPT, position=position, words=1)
        coins = coin(word)
        found = np.flatnonzero((coins >= low) & (coins <= high))
        if found.size:
            return int(tried[found[0]])
    raise RuntimeError(f"no seed in 2^28 has a coin in {coin_range!r} at position {position}")
