"""A checked call: what `verify()` and `sample()` hand to a back end once every argument has been looked at.

Scores and ids stay where the caller has them. A parameter is either one host number for all rows, or an `Array` on the
data's own device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from cupyspec._segments import SEG

if TYPE_CHECKING:
    import numpy.typing as npt

    from cupyspec._philox import Purpose


MAX_DRAFTS = 255  # drafts of a row
PROBABILITY_LIMIT = 2.0**64  # given probabilities stay below it, so that float32 sums of any row stay finite


@dataclass(frozen=True, slots=True)
class Array:
    """Memory borrowed from the caller: described, never copied, never written (outputs apart)."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str  # "float32", "float16", "bfloat16", "int32", "bool", ...
    host: npt.NDArray[Any] | None  # the same memory for NumPy when it is on the CPU (bfloat16 as uint16 bits)
    owner: Any  # keeps the memory alive


@dataclass(frozen=True, slots=True)
class Scores:
    """One side's score rows, target or draft.

    Padded rows are [B, rows, V]; flattened ones [rows in all, V].
    """

    array: Array
    probs: bool  # values are probabilities, used as given; else logits
    temperature: float | Array  # [B] or one for all
    log_normalizer: Array | None  # [B, rows], or [rows in all] when flattened


@dataclass(frozen=True, slots=True)
class ChainCall:
    """`verify()`'s call, and `sample()`'s (a chain of no drafts: K = 0, draft_tokens None)."""

    batch_size: int  # B
    num_drafts: int  # K: columns of draft_tokens, or max_draft_tokens when flattened
    vocab_size: int  # ids at or above it do not exist
    draft_tokens: Array | None  # [B, K] or [T], int32 or int64
    target: Scores
    draft: Scores | None  # None: one-hot drafts
    num_draft_tokens: Array | None  # [B], any integer dtype
    cu_num_draft_tokens: Array | None  # [B + 1], any integer dtype; given = flattened layout
    active: Array | None  # [B] bool or uint8
    seed: int | Array  # int in [0, 2^64) or 0-d: split per row; [B] integers: as is; [B, 2] uint32: (high, low)
    step: int | Array  # [B] or one for all
    # sample() alone: where its race stands in counter space.
    position: int | Array
    draw: int | Array
    purpose: Purpose | None  # None: verification's own purposes
    token_dtype: str  # "int32" or "int64"
    segment: int = SEG  # another size draws other tokens: for tests alone

    def outputs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each array of the result."""
        rows = (self.batch_size,)
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "tokens": ((self.batch_size, self.num_drafts + 1), self.token_dtype),
            "num_accepted": (rows, "int32"),
            "status": (rows, "int32"),
        }
        if self.purpose is not None:
            shapes["log_normalizer"] = (rows, "float32")
        return shapes


class ChainResult(NamedTuple):
    """Arrays that a back end fills: NumPy's, or the device arrays it allocates."""

    tokens: Any  # [B, K + 1], token_dtype
    num_accepted: Any  # [B], int32
    status: Any  # [B], int32
    log_normalizer: Any = None  # [B], float32, sample() only
