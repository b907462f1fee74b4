"""Every random number that a call uses, as arrays: for the oracle, for tests, for people who look inside."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cupyspec._philox import Purpose, UInt64, coin, draw_words, unit_exponential
from cupyspec._segments import SEG, segment_count


class Draws(NamedTuple):
    """The random numbers of one `verify` call.

    Attributes
    ----------
    coins : ndarray [B, K]
        Acceptance coins, uniform on [0, 1).
    exponentials : ndarray [2, B, K + 1, S]
        Standard exponentials of the segments' race at each position: index 0 after a rejection there (RESIDUAL), 1 for
        a draw from the target (BONUS). S is the number of segments.
    picks : ndarray [2, B, K + 1, S]
        The uniform that picks an id inside a segment, should it win.
    """

    coins: npt.NDArray[np.float32]
    exponentials: npt.NDArray[np.float64]
    picks: npt.NDArray[np.float32]


def chain_draws(seeds: UInt64, steps: UInt64, num_draft_tokens: int, vocab_size: int, segment: int = SEG) -> Draws:
    """Draws of rows with the given 64-bit seeds [B] and steps [B]."""
    rows, positions = len(seeds), np.arange(num_draft_tokens + 1)
    segments = np.arange(segment_count(vocab_size, segment))
    (word,) = draw_words(seeds[:, None], steps[:, None], Purpose.ACCEPT, position=positions[None, :-1], words=1)
    shape = (2, rows, positions.size, segments.size)
    exponentials, picks = np.empty(shape), np.empty(shape, np.float32)
    for index, purpose in enumerate((Purpose.RESIDUAL, Purpose.BONUS)):
        race, pick = draw_words(
            seeds[:, None, None],
            steps[:, None, None],
            purpose,
            position=positions[None, :, None],
            segment=segments[None, None, :],
        )
        exponentials[index], picks[index] = unit_exponential(race), coin(pick)
    return Draws(coin(word), exponentials, picks)
