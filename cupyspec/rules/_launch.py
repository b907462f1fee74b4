"""Launch the chain kernels for a checked call: argument struct, scratch, launch shapes.

Written against a small `Backend`, so that the same code drives CuPy (`cupyspec._compile`) and the tests' CPU build of
the kernels.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cupyspec._call import Array, ChainResult
from cupyspec._compile import C_NAMES, Specialisation
from cupyspec._segments import segment_count
from cupyspec.rules.sigmoid import Sigmoid

if TYPE_CHECKING:
    from cupyspec._call import ChainCall, Scores
    from cupyspec.rules.token import Token


class Backend(Protocol):
    """What `run_chain` needs of a machine."""

    @property
    def multiprocessors(self) -> int:
        """How many blocks are worth having at once is a multiple of this."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A new contiguous array whose content does not matter."""

    def pointer(self, array: Any) -> int:
        """Address of an array's first element."""

    def launch(
        self, *, specialisation: Specialisation, name: str, grid: int, block: int, params: np.ndarray[Any, Any]
    ) -> None:
        """Run kernel `name`, in order after what was launched before."""


# Mirrors of the structs in kernels/dtypes.cuh and kernels/chain.cuh.
PER_ROW = np.dtype([("data", "u8"), ("stride", "i8"), ("value", "u8"), ("type", "i4"), ("padding", "i4")], align=True)
SCORES = np.dtype(
    [
        ("data", "u8"),
        ("batch_stride", "i8"),
        ("row_stride", "i8"),
        ("log_normalizer", "u8"),
        ("log_normalizer_batch_stride", "i8"),
        ("log_normalizer_row_stride", "i8"),
        ("temperature", PER_ROW),
        ("log_normalizer_is_double", "i4"),
        ("probs", "i4"),
    ],
    align=True,
)
CHAIN_PARAMS = np.dtype(
    [
        ("target", SCORES),
        ("draft", SCORES),
        ("active", PER_ROW),
        ("seed", PER_ROW),
        ("step", PER_ROW),
        ("position", PER_ROW),
        ("draw", PER_ROW),
        ("num_draft_tokens", PER_ROW),
        ("cu_num_draft_tokens", PER_ROW),
        ("seed_word_stride", "i8"),
        ("draft_tokens", "u8"),
        ("draft_tokens_batch_stride", "i8"),
        ("draft_tokens_stride", "i8"),
        ("tokens", "u8"),
        ("num_accepted", "u8"),
        ("status", "u8"),
        ("log_normalizer", "u8"),
        ("pairs", "u8"),
        ("totals", "u8"),
        ("race", "u8"),
        ("arrived", "u8"),
        ("batch_size", "i8"),
        ("num_drafts", "i8"),
        ("vocab_size", "i8"),
        ("segments", "i8"),
        ("all_drafts", "i8"),
        ("blocks_per_row", "i8"),
        ("segments_per_warp", "i8"),
        ("lenience", "f8"),
        ("alpha", "f8"),
        ("beta", "f8"),
        ("purpose", "i4"),
        ("seed_kind", "i4"),
        ("has_draft", "i4"),
        ("flattened", "i4"),
    ],
    align=True,
)

PER_ROW_TYPES = {  # enum PerRowType
    "int8": 0,
    "int16": 1,
    "int32": 2,
    "int64": 3,
    "uint8": 4,
    "bool": 4,
    "uint16": 5,
    "uint32": 6,
    "uint64": 7,
    "float16": 8,
    "bfloat16": 9,
    "float32": 10,
    "float64": 11,
}
_SEED_SPLIT, _SEED_PER_ROW, _SEED_PAIRS = range(3)

_STATS_WARPS, _DECIDE_WARPS = 4, 8
_PAIRED_BYTES = 2048  # as in chain.cu
_GRID_LIMIT = 2**31 - 1
_TOTALS_ABOVE = 32 * 1024  # bytes of pairs a batch row may have before chain_totals reduces them


def _integer(value: int | Array | None, default: int = 0) -> tuple[int, int, int, int, int]:
    """PER_ROW of an integer parameter: an array with one element serves all rows."""
    if isinstance(value, Array):
        return value.pointer, _row_stride(value), 0, PER_ROW_TYPES[value.dtype], 0
    return 0, 0, (default if value is None else value) & (2**64 - 1), PER_ROW_TYPES["int64"], 0


def _real(value: float | Array) -> tuple[int, int, int, int, int]:
    """PER_ROW of a real parameter: a host number travels as the bits of a double."""
    if isinstance(value, Array):
        return value.pointer, _row_stride(value), 0, PER_ROW_TYPES[value.dtype], 0
    return 0, 0, struct.unpack("=Q", struct.pack("=d", value))[0], PER_ROW_TYPES["float64"], 0


def _row_stride(array: Array) -> int:
    return array.strides[0] if array.shape and array.shape[0] != 1 else 0


def _outer_strides(array: Array, flattened: bool, columns: int) -> tuple[int, int]:
    """(batch, row) strides of an array whose last `columns` axes are not rows."""
    outer = array.strides[: len(array.strides) - columns]
    if flattened:
        return 0, outer[0]
    return outer[0], outer[1] if len(outer) > 1 else 0


def _scores(scores: Scores | None, flattened: bool) -> tuple[Any, ...]:
    if scores is None:
        return 0, 0, 0, 0, 0, 0, _real(1.0), 0, 0
    batch_stride, row_stride = _outer_strides(scores.array, flattened, 1)
    lse = scores.log_normalizer
    lse_pointer, lse_strides, is_double = 0, (0, 0), False
    if lse is not None:
        lse_pointer, lse_strides, is_double = lse.pointer, _outer_strides(lse, flattened, 0), lse.dtype == "float64"
    return (
        scores.array.pointer,
        batch_stride,
        row_stride,
        lse_pointer,
        *lse_strides,
        _real(scores.temperature),
        is_double,
        scores.probs,
    )


def _seed(seed: int | Array) -> tuple[tuple[int, int, int, int, int], int, int]:
    """PER_ROW, stride between the words of a pair, kind."""
    if isinstance(seed, Array):
        if len(seed.shape) == 2:
            return (seed.pointer, seed.strides[0], 0, PER_ROW_TYPES["uint32"], 0), seed.strides[1], _SEED_PAIRS
        if len(seed.shape) == 1:
            return (seed.pointer, seed.strides[0], 0, PER_ROW_TYPES[seed.dtype], 0), 0, _SEED_PER_ROW
    return _integer(seed), 0, _SEED_SPLIT


@cache
def chain_specialisation(
    target_dtype: str, draft_dtype: str, token_dtype: str, sigmoid: bool, segment: int
) -> Specialisation:
    """The module for these dtypes and rule. One-hot drafts use that of equal dtypes."""
    return Specialisation(
        file="chain.cu",
        macros=(
            ("TARGET_TYPE", C_NAMES[target_dtype]),
            ("DRAFT_TYPE", C_NAMES[draft_dtype]),
            ("TOKEN_TYPE", C_NAMES[token_dtype]),
            ("CHAIN_RULE", "RULE_SIGMOID" if sigmoid else "RULE_TOKEN"),
            ("SEGMENT", str(segment)),
        ),
        params=CHAIN_PARAMS,
    )


def run_chain(
    call: ChainCall, rule: Token | Sigmoid, backend: Backend, *, out: ChainResult | None = None
) -> ChainResult:
    """Verify a chain, or draw one token (a chain of no drafts), on `backend`.

    Parameters
    ----------
    call : ChainCall
        Checked: arrays are the backend's own and have a contiguous last axis, at most 255 drafts.
    rule : Token or Sigmoid
    backend : Backend
    out : ChainResult, optional
        Contiguous arrays to fill instead of new ones.

    Returns
    -------
    ChainResult
        Its arrays are ready in the order of the backend's launches; nothing waits for them.

    Notes
    -----
    Scratch: 8 bytes per (score row, segment), 12 per batch row, and 8 per score row where a batch row has more than
    32 KiB of pairs. Launches: two, or three in that last case; none without rows.
    """
    result = out or ChainResult(**{name: backend.empty(*spec) for name, spec in call.outputs().items()})
    batch, drafts = call.batch_size, call.num_drafts
    if batch == 0:
        return result
    draft = call.draft if drafts else None
    flattened = call.cu_num_draft_tokens is not None
    segments = segment_count(call.vocab_size, call.segment)
    slots = 2 * drafts + 1
    all_drafts = call.draft_tokens.shape[0] if flattened and call.draft_tokens is not None else 0

    score_rows = batch * slots
    with_totals = slots * segments * 8 > _TOTALS_ABOVE
    sizes = (8 * batch, 8 * score_rows * segments, 8 * score_rows * with_totals, 4 * batch)
    scratch = backend.empty((sum(sizes),), "uint8")
    race = backend.pointer(scratch)
    pairs, totals, arrived = race + sizes[0], race + sum(sizes[:2]), race + sum(sizes[:3])

    # A residual is summed by one warp a segment: spread a row over blocks until the device is full.
    blocks_per_row = 1
    if drafts:
        blocks_per_row = max(1, min(-(-segments // _DECIDE_WARPS), 4 * backend.multiprocessors // batch))

    # Two segments a warp keep more bytes in flight, once single ones fill the device many times over.
    many = batch * slots * segments > 64 * backend.multiprocessors
    halves = "float32" not in (call.target.array.dtype, draft.array.dtype if draft else None)
    segments_per_warp = 2 if many and halves and 2 * call.segment <= _PAIRED_BYTES else 1

    seed, seed_word_stride, seed_kind = _seed(call.seed)
    token_strides = (0, 0)
    if call.draft_tokens is not None:
        token_strides = _outer_strides(call.draft_tokens, flattened, 0)
    alpha, beta = (rule.alpha, rule.beta) if isinstance(rule, Sigmoid) else (0.0, 1.0)
    params = np.array(
        (
            _scores(call.target, flattened),
            _scores(draft, flattened),
            _integer(call.active, 1),
            seed,
            _integer(call.step),
            _integer(call.position),
            _integer(call.draw),
            _integer(call.num_draft_tokens, drafts),
            _integer(call.cu_num_draft_tokens),
            seed_word_stride,
            0 if call.draft_tokens is None else call.draft_tokens.pointer,
            *token_strides,
            backend.pointer(result.tokens),
            backend.pointer(result.num_accepted),
            backend.pointer(result.status),
            0 if result.log_normalizer is None else backend.pointer(result.log_normalizer),
            pairs,
            totals if with_totals else 0,
            race,
            arrived,
            batch,
            drafts,
            call.vocab_size,
            segments,
            all_drafts,
            blocks_per_row,
            segments_per_warp,
            1.0 if isinstance(rule, Sigmoid) else rule.lenience,
            alpha,
            beta,
            0 if call.purpose is None else int(call.purpose),
            seed_kind,
            draft is not None,
            flattened,
        ),
        CHAIN_PARAMS,
    )
    specialisation = chain_specialisation(
        call.target.array.dtype,
        call.target.array.dtype if draft is None else draft.array.dtype,
        call.token_dtype,
        isinstance(rule, Sigmoid),
        call.segment,
    )

    def launch(name: str, blocks: int, warps: int) -> None:
        backend.launch(
            specialisation=specialisation, name=name, grid=min(blocks, _GRID_LIMIT), block=32 * warps, params=params
        )

    items = batch * slots * -(-segments // segments_per_warp)
    launch("chain_stats", -(-items // _STATS_WARPS), _STATS_WARPS)
    if with_totals:
        launch("chain_totals", -(-batch * slots // _STATS_WARPS), _STATS_WARPS)
    launch("chain_decide", batch * blocks_per_row, _DECIDE_WARPS)
    return result
