"""Philox4x32-10 in NumPy, bit for bit the generator of ``kernels/philox.cuh``.

Counter-based: a number is a pure function of (seed, step, purpose, position, draw, segment), so a token never depends on
batch-mates, launch shapes or the device. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_ROUND = np.arange(10, dtype=np.uint64)
_W0, _W1 = _ROUND * np.uint64(0x9E3779B9), _ROUND * np.uint64(0xBB67AE85)  # what round i adds to the key
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)

STEP_LIMIT = 1 << 56  # steps fill counter word z and 24 bits of w
POSITION_LIMIT = 1 << 16  # positions and draws share counter word y


class Purpose(IntEnum):
    """What a random number is for: the top byte of counter word w, so that no two uses share a number."""

    DRAFT = 1
    TARGET = 2
    ACCEPT = 3
    RESIDUAL = 4
    BONUS = 5
    TREE = 6
    SPLIT = 255


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any], words: int = 4) -> tuple[UInt32, ...]:
    """The first `words` output words of ten rounds, over broadcast counters and keys (integers below 2^32)."""
    # 32-bit values in uint64 arrays: NumPy's 64-bit product then is the exact 32 x 32 one.
    x, y, z, w = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = (np.asarray(k, np.uint64) for k in key)
    round_keys = [(k + added.reshape(-1, *(1,) * k.ndim)) & _LOW for k, added in ((k0, _W0), (k1, _W1))]
    for k0, k1 in zip(*round_keys, strict=True):
        product0, product1 = _M0 * x, _M1 * z
        x, y = (product1 >> _SHIFT) ^ y ^ k0, product1 & _LOW
        z, w = (product0 >> _SHIFT) ^ w ^ k1, product0 & _LOW
    shape = np.broadcast_shapes(x.shape, y.shape, z.shape, w.shape)
    return tuple(np.broadcast_to(v, shape).astype(np.uint32) for v in (x, y, z, w)[:words])


def draw_words(
    seed: npt.ArrayLike,
    step: npt.ArrayLike,
    purpose: Purpose,
    *,
    position: npt.ArrayLike = 0,
    draw: npt.ArrayLike = 0,
    segment: npt.ArrayLike = 0,
    words: int = 2,
) -> tuple[UInt32, ...]:
    """Random words of 64-bit row seeds at a (step, purpose, position, draw, segment); arguments broadcast."""
    seed, step = np.asarray(seed, np.uint64), np.asarray(step, np.uint64)
    position, draw = np.asarray(position, np.uint64), np.asarray(draw, np.uint64)
    counter = (
        segment,
        position | (draw << np.uint64(16)),
        step & _LOW,
        ((step >> _SHIFT) & np.uint64(0xFFFFFF)) | np.uint64(int(purpose) << 24),
    )
    return philox4x32(counter, (seed & _LOW, seed >> _SHIFT), words)


def split_seed(seed: int, rows: int) -> UInt64:
    """One 64-bit seed per row from a single one: words 0 and 1 of the counter (row, 0, 0, SPLIT << 24)."""
    low, high = draw_words(seed, 0, Purpose.SPLIT, segment=np.arange(rows, dtype=np.uint64))
    return low.astype(np.uint64) | (high.astype(np.uint64) << _SHIFT)


def coin(word: UInt32) -> npt.NDArray[np.float32]:
    """Uniform on [0, 1): word * 2^-32 truncated to 24 significant bits, hence exact in float32.

    Truncated, not rounded: rounding would return 1.0 for the largest words.
    """
    word = np.asarray(word, np.uint32)
    excess = np.maximum(np.frexp(word.astype(np.float64))[1] - 24, 0).astype(np.uint32)
    kept = (word >> excess) << excess
    result: npt.NDArray[np.float32] = (kept.astype(np.float64) * 2.0**-32).astype(np.float32)
    return result


def unit_exponential(word: UInt32) -> npt.NDArray[np.float64]:
    """Standard exponential of a word: never 0, never infinite, small values resolved."""
    r = np.asarray(word, np.float64)
    small = -np.log1p(-(np.minimum(r, 2.0**31) + 0.5) * 2.0**-32)
    large = -np.log((2.0**32 - r - 0.5) * 2.0**-32)
    result: npt.NDArray[np.float64] = np.where(r < 2.0**31, small, large)
    return result
