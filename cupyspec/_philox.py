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

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # added to the key after each round
_LOW = 0xFFFFFFFF
_FEW = 400  # counters up to which one Python integer is quicker than an array

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
    lanes = _Lanes(*counter, *key)
    x, y, z, w, k0, k1 = lanes.values
    return lanes.ten_rounds(x, y, z, w, k0, k1, words)


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
    lanes = _Lanes(seed, step, position, draw, segment)
    key, steps, positions, draws, segments = lanes.values
    high_step = (steps >> 32) & (0xFFFFFF * lanes.one)
    return lanes.ten_rounds(
        segments,
        positions | (draws << 16),
        steps & lanes.low,
        high_step | ((int(purpose) << 24) * lanes.one),
        key & lanes.low,
        (key >> 32) & lanes.low,
        words,
    )


class _Lanes:
    """Numbers below 2^64 broadcast to one shape, each in 64 bits of its own: of an array, or of a Python integer.

    The same operators act on both. One integer that holds a few hundred lanes is several times quicker than an array.
    """

    def __init__(self, *values: npt.ArrayLike) -> None:
        arrays = [np.asarray(v, np.uint64) for v in values]
        together = np.broadcast(*arrays)
        self.shape, self.size = together.shape, together.size
        self.packed = self.size <= _FEW
        self.one = int.from_bytes((b"\1" + bytes(7)) * self.size, "little") if self.packed else 1  # 1 in each lane
        self.low = _LOW * self.one
        self.values: list[Any] = [self._pack(v) for v in arrays] if self.packed else arrays

    def _pack(self, values: UInt64) -> int:
        if values.size == 1:
            return int(values.item()) * self.one
        spread = np.empty(self.shape, "<u8")
        spread[...] = values
        return int.from_bytes(spread.tobytes(), "little")

    def ten_rounds(self, x: Any, y: Any, z: Any, w: Any, k0: Any, k1: Any, words: int) -> tuple[UInt32, ...]:
        """The first output words. What stands above 2^32 in y, w and the keys never reaches a product."""
        step0, step1 = _W0 * self.one, _W1 * self.one
        for _ in range(10):
            product0, product1 = _M0 * x, _M1 * z
            x, y = ((product1 >> 32) ^ y ^ k0) & self.low, product1
            z, w = ((product0 >> 32) ^ w ^ k1) & self.low, product0
            k0, k1 = k0 + step0, k1 + step1
        return tuple(self._unpack(v & self.low) for v in (x, y, z, w)[:words])

    def _unpack(self, value: Any) -> UInt32:
        if self.packed:
            value = np.frombuffer(value.to_bytes(8 * self.size, "little"), "<u8").reshape(self.shape)
        words: UInt32 = value.astype(np.uint32)
        return words


def split_seed(seed: int, rows: int) -> UInt64:
    """One 64-bit seed per row from a single one: words 0 and 1 of the counter (row, 0, 0, SPLIT << 24)."""
    low, high = draw_words(seed, 0, Purpose.SPLIT, segment=np.arange(rows))
    return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))


def coin(word: UInt32) -> npt.NDArray[np.float32]:
    """Uniform on [0, 1): word * 2^-32 truncated to 24 significant bits, hence exact in float32.

    Truncated, not rounded: rounding would return 1.0 for the largest words.
    """
    kept = np.asarray(word, np.float64).view(np.uint64) & np.uint64(2**64 - 2**29)  # of a 53-bit significand
    result: npt.NDArray[np.float32] = (kept.view(np.float64) * 2.0**-32).astype(np.float32)
    return result


def unit_exponential(word: UInt32) -> npt.NDArray[np.float64]:
    """Standard exponential of a word: never 0, never infinite, small values resolved."""
    x = (np.asarray(word, np.float64) + 0.5) * 2.0**-32  # exact, as is 1 - x
    result: npt.NDArray[np.float64] = -np.where(x < 0.5, np.log1p(-x), np.log(1 - x))
    return result
