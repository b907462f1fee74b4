"""Launch the chain kernels for a checked call: argument struct, scratch, launch shapes.

Written against a small `Backend`, so that the same code drives CuPy (`cupyspec._compile`) and the tests' CPU build of
the kernels.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from cupyspec._call import Array, ChainResult
from cupyspec._compile import C_NAMES, Launch, Specialisation
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

    @property
    def threads(self) -> int:
        """Of a block of chain_verify; 0 for what suits the dtypes."""

    @property
    def max_cluster(self) -> int:
        """Blocks that may wait for each other; 1 where there are no clusters."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A new contiguous array whose content does not matter."""

    def pointer(self, array: Any) -> int:
        """Address of an array's first element."""

    def launch(self, launch: Launch, params: np.ndarray[Any, Any]) -> None:
        """Run a kernel, in order after what was launched before."""


# Mirrors of the structs in kernels/dtypes.cuh and kernels/chain.cuh.
PER_ROW = np.dtype([("data", "u8"), ("stride", "i8"), ("value", "u8"), ("type", "i4"), ("size", "i4")], align=True)
SCORES = np.dtype(
    [
        ("data", "u8"),
        ("batch_stride", "i8"),
        ("row_stride", "i8"),
        ("log_normalizer", "u8"),
        ("log_normalizer_batch_stride", "i8"),
        ("log_normalizer_row_stride", "i8"),
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
        ("seed_low", PER_ROW),
        ("step", PER_ROW),
        ("position", PER_ROW),
        ("draw", PER_ROW),
        ("length", PER_ROW),
        ("target_temperature", PER_ROW),
        ("draft_temperature", PER_ROW),
        ("draft_tokens", "u8"),
        ("draft_tokens_batch_stride", "i8"),
        ("draft_tokens_stride", "i8"),
        ("tokens", "u8"),
        ("num_accepted", "u8"),
        ("status", "u8"),
        ("log_normalizer", "u8"),
        ("pairs", "u8"),
        ("totals", "u8"),
        ("keys", "u8"),
        ("arrived", "u8"),
        ("batch_size", "i8"),
        ("num_drafts", "i8"),
        ("vocab_size", "i8"),
        ("segments", "i8"),
        ("all_drafts", "i8"),
        ("pair_rows", "i8"),
        ("lenience", "f8"),
        ("alpha", "f8"),
        ("beta", "f8"),
        ("positions_at_once", "i4"),
        ("pairs_known", "i4"),
        ("blocks_per_row", "i4"),
        ("purpose", "i4"),
        ("seed_kind", "i4"),
        ("has_draft", "i4"),
        ("flattened", "i4"),
        ("padding", "i4"),
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
ITEM_SIZES = {
    name: 1 if name == "bool" else int(name.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8 for name in PER_ROW_TYPES
}
_SEED_SPLIT, _SEED_PER_ROW, _SEED_PAIRS = range(3)

_STATS_WARPS = 4  # of a block, as in the kernel
_GRID_LIMIT = 2**31 - 1
_FEW_ROWS = 12  # batch rows up to which the whole device reads all score rows at once
_STATS_RESIDENT = 6  # blocks of chain_stats that a multiprocessor holds at once
_TOTALS_ABOVE = 32 * 1024  # bytes of pairs a batch row may have before chain_totals reduces them


class ChainPlan(NamedTuple):
    """How a call is run. The answer does not depend on it."""

    launches: tuple[Launch, ...]
    positions_at_once: int
    pairs_known: bool  # chain_stats makes the pairs, of all positions
    blocks_per_row: int
    pair_rows: int
    # Bytes of scratch.
    pairs: int
    totals: int
    keys: int
    arrived: int

    @property
    def scratch(self) -> int:
        """Bytes in all."""
        return self.pairs + self.totals + self.keys + self.arrived


forced_plan: Mapping[str, int] = {}


@contextmanager
def forced(**fields: int) -> Iterator[None]:
    """Within it calls are run another way: `pairs_known`, `blocks_per_row`, `positions_at_once`, `overlap`.

    For benchmarks and tests; a combination that the device cannot run is an error at the launch.
    """
    global forced_plan
    before, forced_plan = forced_plan, fields
    plan_chain.cache_clear()
    try:
        yield
    finally:
        forced_plan = before
        plan_chain.cache_clear()


@cache
def chain_specialisation(
    file: str, target_dtype: str, draft_dtype: str, token_dtype: str, sigmoid: bool, segment: int, threads: int = 0
) -> Specialisation:
    """The module for these dtypes and rule. One-hot drafts use that of equal dtypes; `threads` is chain_verify's."""
    return Specialisation(
        file=file,
        macros=(
            ("TARGET_TYPE", C_NAMES[target_dtype]),
            ("DRAFT_TYPE", C_NAMES[draft_dtype]),
            ("TOKEN_TYPE", C_NAMES[token_dtype]),
            ("CHAIN_RULE", "RULE_SIGMOID" if sigmoid else "RULE_TOKEN"),
            ("SEGMENT", str(segment)),
            *((("VERIFY_THREADS", str(threads)),) if threads else ()),
        ),
        params=CHAIN_PARAMS,
    )


@lru_cache(maxsize=1024)
def plan_chain(
    *,
    batch: int,
    drafts: int,
    vocab: int,
    segment: int,
    target_dtype: str,
    draft_dtype: str | None,
    token_dtype: str,
    sigmoid: bool,
    target_normalized: bool,
    draft_normalized: bool,
    multiprocessors: int,
    threads: int,
    max_cluster: int,
) -> ChainPlan:
    """Kernels, launch shapes and scratch of a call.

    Two ways. *Few rows*: chain_stats reads all score rows with the whole device, then chain_verify judges all positions
    at once. *Many rows*, or no score row that need be read before the decision: chain_verify alone, which reads a row's
    positions one after another and none behind a rejection.

    Parameters
    ----------
    batch, drafts, vocab, segment : int
        B >= 1, K, V and the ids of a segment.
    target_dtype, draft_dtype, token_dtype : str
        `draft_dtype` None: one-hot drafts.
    sigmoid, target_normalized, draft_normalized : bool
        The rule, and which normalisers are handed in.
    multiprocessors, threads, max_cluster : int
        Of the device, see `Backend`.
    """
    segments = segment_count(vocab, segment)
    sums = drafts > 0 and not sigmoid and not (target_normalized and (draft_normalized or draft_dtype is None))
    known = sums and batch <= (_FEW_ROWS if max_cluster > 1 else multiprocessors)
    known = bool(forced_plan.get("pairs_known", known))
    if not threads:
        # As many as leave the registers for what a thread has in flight; small vocabularies have no work for so many.
        wide = "float32" in (target_dtype, draft_dtype)
        threads = 128 if segments <= 4 else 256 if wide and not known else 384
    full = -(-segments * 32 // threads)  # blocks that give each segment a warp
    if max_cluster > 1:
        blocks = max(1, min(full, max_cluster, 2 * multiprocessors // batch))
    else:
        blocks = max(1, min(full, 4 * multiprocessors // batch)) if known else 1
    blocks = forced_plan.get("blocks_per_row", blocks)
    # Where many blocks share a row, judging costs as much as reading: two positions at a time.
    positions = forced_plan.get("positions_at_once", 2 if blocks >= 4 else 1)
    positions = drafts + 1 if known else min(positions, drafts + 1)
    # Two places for a group's pairs, by turns; a chain of one group needs one, and the last group has no draft rows.
    pair_rows = min(2 * drafts + 1, 4 * positions) if positions == 1 else 4 * positions
    if positions == drafts + 1:
        pair_rows = 2 * drafts + 1

    def specialisation(file: str, threads: int = 0) -> Specialisation:
        return chain_specialisation(
            file, target_dtype, draft_dtype or target_dtype, token_dtype, sigmoid, segment, threads
        )

    launches = []
    with_totals = known and pair_rows * segments * 8 > _TOTALS_ABOVE
    if known:
        score_rows = batch * (drafts + 1 + (drafts if draft_dtype else 0))
        stats = specialisation("chain_stats.cu")

        def strided(name: str, warps: int) -> Launch:
            limit = min(_STATS_RESIDENT * multiprocessors, _GRID_LIMIT)
            return Launch(stats, name, min(-(-warps // _STATS_WARPS), limit), 32 * _STATS_WARPS)

        launches.append(strided("chain_stats", score_rows * segments))
        if with_totals:
            launches.append(strided("chain_totals", score_rows))
    cluster = blocks if max_cluster > 1 else 1
    overlap = known and not with_totals and max_cluster > 1 and bool(forced_plan.get("overlap", 1))
    launches.append(
        Launch(specialisation("chain_verify.cu", threads), "chain_verify", batch * blocks, threads, cluster, overlap)
    )
    return ChainPlan(
        tuple(launches),
        positions,
        known,
        blocks,
        pair_rows,
        pairs=8 * batch * pair_rows * segments,
        totals=8 * batch * pair_rows * with_totals,
        keys=8 * batch * blocks * (max_cluster == 1),
        arrived=4 * batch,
    )


_PerRow: TypeAlias = tuple[int, int, int, int, int]  # as PER_ROW


def _per_row(array: Array, stride: int, column: int = 0) -> _PerRow:
    size = ITEM_SIZES[array.dtype]
    return array.pointer + column * size, stride, 0, PER_ROW_TYPES[array.dtype], size


def _integer(value: int | Array | None, default: int = 0) -> _PerRow:
    """An integer parameter: an array with one element serves all rows."""
    if isinstance(value, Array):
        return _per_row(value, _row_stride(value))
    return 0, 0, (default if value is None else value) & (2**64 - 1), PER_ROW_TYPES["int64"], 8


def _real(value: float | Array) -> _PerRow:
    """A real parameter: a host number travels as the bits of a double."""
    if isinstance(value, Array):
        return _per_row(value, _row_stride(value))
    return 0, 0, struct.unpack("=Q", struct.pack("=d", value))[0], PER_ROW_TYPES["float64"], 8


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
        return (0,) * 8
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
        is_double,
        scores.probs,
    )


def _seed(seed: int | Array) -> tuple[_PerRow, _PerRow, int]:
    """The seed, its second word where it is a pair, and the kind."""
    if isinstance(seed, Array):
        if len(seed.shape) == 2:
            stride, column = seed.strides
            return _per_row(seed, stride), _per_row(seed, stride, column), _SEED_PAIRS
        if len(seed.shape) == 1:
            return _per_row(seed, seed.strides[0]), _integer(0), _SEED_PER_ROW
    return _integer(seed), _integer(0), _SEED_SPLIT


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
    Scratch and launches: `plan_chain`; none without rows.
    """
    result = out or ChainResult(**{name: backend.empty(*spec) for name, spec in call.outputs().items()})
    batch, drafts = call.batch_size, call.num_drafts
    if batch == 0:
        return result
    draft = call.draft if drafts else None
    flattened = call.cu_num_draft_tokens is not None
    all_drafts = call.draft_tokens.shape[0] if flattened and call.draft_tokens is not None else 0
    plan = plan_chain(
        batch=batch,
        drafts=drafts,
        vocab=call.vocab_size,
        segment=call.segment,
        target_dtype=call.target.array.dtype,
        draft_dtype=draft.array.dtype if draft else None,
        token_dtype=call.token_dtype,
        sigmoid=isinstance(rule, Sigmoid),
        target_normalized=call.target.log_normalizer is not None,
        draft_normalized=draft is not None and draft.log_normalizer is not None,
        multiprocessors=backend.multiprocessors,
        threads=backend.threads,
        max_cluster=backend.max_cluster,
    )
    scratch = backend.empty((plan.scratch,), "uint8")
    pairs = backend.pointer(scratch)
    totals = pairs + plan.pairs
    keys = totals + plan.totals
    arrived = keys + plan.keys

    seed, seed_low, seed_kind = _seed(call.seed)
    length = call.cu_num_draft_tokens if flattened else call.num_draft_tokens
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
            seed_low,
            _integer(call.step),
            _integer(call.position),
            _integer(call.draw),
            _integer(length, drafts),
            _real(call.target.temperature),
            _real(draft.temperature if draft else 1.0),
            0 if call.draft_tokens is None else call.draft_tokens.pointer,
            *token_strides,
            backend.pointer(result.tokens),
            backend.pointer(result.num_accepted),
            backend.pointer(result.status),
            0 if result.log_normalizer is None else backend.pointer(result.log_normalizer),
            pairs,
            totals if plan.totals else 0,
            keys,
            arrived,
            batch,
            drafts,
            call.vocab_size,
            segment_count(call.vocab_size, call.segment),
            all_drafts,
            plan.pair_rows,
            1.0 if isinstance(rule, Sigmoid) else rule.lenience,
            alpha,
            beta,
            plan.positions_at_once,
            plan.pairs_known,
            plan.blocks_per_row,
            0 if call.purpose is None else int(call.purpose),
            seed_kind,
            draft is not None,
            flattened,
            0,
        ),
        CHAIN_PARAMS,
    )
    for launch in plan.launches:
        backend.launch(launch, params)
    return result
