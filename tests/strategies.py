"""Random calls of `verify` for property tests, each with the arguments that the oracle takes for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from scipy.special import logsumexp, softmax

import cupyspec
import cupyspec._run
from cupyspec import Sampling, Sigmoid, Token, Verification
from cupyspec._segments import SEG
from cupyspec.reference.chain import OracleAnswer
from cupyspec.reference.chain import verify as oracle_verify
from cupyspec.testing import draws
from cupyspec.testing.strategies import CORNERS, corner_row

SCORE_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
INTEGER_TYPES = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
VOCABULARIES = (1, 2, 3, 7, 31, 33, 257, SEG - 1, SEG, SEG + 1, 2 * SEG + 904)
TEMPERATURES = (0.0, 1e-40, 1e-30, 0.05, 0.7, 1.0, 1.0, 3.0)
SIGMOIDS = (Sigmoid(), Sigmoid(-10, 10), Sigmoid(-2, 3), Sigmoid(-0.5, 0.25), Sigmoid(1, 2), Sigmoid(-1e5, 1e5))
TOKENS = (Token(), Token(), Token(lenience=0.5), Token(lenience=1e-3))
FAULTS = {
    False: (np.nan, np.inf, "all -inf"),  # logits
    True: (np.nan, np.inf, -0.25, "all 0"),  # probabilities
}


@contextmanager
def segments_of(size: int) -> Iterator[None]:
    """Within it `verify` and `sample` race segments of `size` ids."""
    inner: Callable[..., Any] = cupyspec._run.answer

    def answer(kind: Any, border: Any, call: Any, rule: Any, outputs: Any, out: Any, check: bool, given: Any) -> Any:
        # Nothing is remembered, nor repeated: plans are not found by the segment.
        return inner(kind, border, dataclasses.replace(call, segment=size), rule, outputs, out, check, None)

    with ExitStack() as stack:
        for module in ("chain", "sampling"):
            stack.enter_context(mock.patch(f"cupyspec.{module}.answer", answer))
            stack.enter_context(mock.patch(f"cupyspec.{module}.repeat", lambda kind, given: None))
        yield


@dataclass
class ChainCase:
    """A call of `verify` in the padded layout."""

    draft_tokens: np.ndarray  # [B, K]
    target: np.ndarray  # [B, K + 1, V or more]
    draft: np.ndarray | None  # [B, K, V or more]
    vocab_size: int
    seed: Any = 0
    step: Any = 0
    rule: Token | Sigmoid = Token()
    temperature: Any = 1.0
    draft_temperature: Any = None
    target_probs: bool = False
    draft_probs: bool = False
    num_draft_tokens: np.ndarray | None = None
    active: np.ndarray | None = None
    target_log_normalizer: np.ndarray | None = None
    draft_log_normalizer: np.ndarray | None = None
    segment: int = SEG

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `verify`."""
        return {
            "seed": self.seed,
            "step": self.step,
            "rule": self.rule,
            "sampling": Sampling(temperature=self.temperature),
            "draft_sampling": None if self.draft_temperature is None else Sampling(temperature=self.draft_temperature),
            "num_draft_tokens": self.num_draft_tokens,
            "active": self.active,
            "vocab_size": self.vocab_size,
            "scores": "probs" if self.target_probs else "logits",
            "draft_scores": "probs" if self.draft_probs else "logits",
            "target_log_normalizer": self.target_log_normalizer,
            "draft_log_normalizer": self.draft_log_normalizer,
        }

    def verify(self, **changes: Any) -> Verification:
        """The library's answer, with some arguments changed."""
        arguments = self.arguments() | changes
        arrays = [arguments.pop(name, getattr(self, name)) for name in ("draft_tokens", "target", "draft")]
        with segments_of(self.segment):
            return cupyspec.verify(*arrays, **arguments)

    def rows(self, rows: Any) -> ChainCase:
        """The call of some of the rows. Seeds must be one per row."""
        per_row = ("seed", "step", "temperature", "draft_temperature", "num_draft_tokens", "active")
        arrays = ("draft_tokens", "target", "draft", "target_log_normalizer", "draft_log_normalizer")
        changed = {name: getattr(self, name) for name in (*per_row, *arrays)}
        taken = {n: np.asarray(v)[rows] for n, v in changed.items() if v is not None and np.ndim(v) > 0}
        return dataclasses.replace(self, **taken)

    def flattened(self, order: np.random.Generator) -> dict[str, Any]:
        """Changes that make `verify` see this call in the flattened layout; rows between hold what may be there."""
        batch, width = self.draft_tokens.shape
        given = [width] * batch if self.num_draft_tokens is None else self.num_draft_tokens.tolist()
        lengths = [min(max(n, 0), width) for n in given]
        bounds = np.cumsum([0, *lengths])
        drafts = [(b, i) for b in range(batch) for i in range(lengths[b])]
        targets = [(b, i) for b in range(batch) for i in range(lengths[b] + 1)]

        def gather(array: np.ndarray | None, rows: list[tuple[int, int]]) -> np.ndarray | None:
            if array is None:
                return None
            index = np.array(rows, np.intp).reshape(-1, 2)
            return array[index[:, 0], index[:, 1]]

        return {
            "draft_tokens": gather(self.draft_tokens, drafts),
            "target": gather(self.target, targets),
            "draft": gather(self.draft, drafts),
            "target_log_normalizer": gather(self.target_log_normalizer, targets),
            "draft_log_normalizer": gather(self.draft_log_normalizer, drafts),
            "num_draft_tokens": None,
            "cu_num_draft_tokens": bounds.astype(order.choice(INTEGER_TYPES)),
            "max_draft_tokens": width,
        }

    def oracle(self) -> OracleAnswer:
        """The oracle's answer."""
        batch, width = self.draft_tokens.shape
        numbers = draws(
            self.seed,
            self.step,
            batch_size=batch,
            num_draft_tokens=width,
            vocab_size=self.vocab_size,
            segment=self.segment,
        )
        draft_temperature = self.draft_temperature
        if draft_temperature is None and self.draft_probs:
            draft_temperature = 1.0
        return oracle_verify(
            self.draft_tokens,
            self.target.astype(np.float32),
            None if self.draft is None else self.draft.astype(np.float32),
            **numbers._asdict(),
            rule=self.rule,
            temperature=self.temperature,
            draft_temperature=draft_temperature,
            target_probs=self.target_probs,
            draft_probs=self.draft_probs,
            num_draft_tokens=self.num_draft_tokens,
            active=self.active,
            vocab_size=self.vocab_size,
            target_log_normalizer=self.target_log_normalizer,
            draft_log_normalizer=self.draft_log_normalizer,
            segment=self.segment,
        )


def assert_agrees(got: Verification, want: OracleAnswer) -> int:
    """Every row equal to the oracle's unless a decision fell within a band; the number of rows that differ there."""
    equal = (
        (np.asarray(got.tokens) == want.tokens).all(axis=1)
        & (np.asarray(got.num_accepted) == want.num_accepted)
        & (np.asarray(got.status) == want.status)
    )
    wrong = np.flatnonzero(~equal & ~want.in_band)
    if wrong.size:
        b = wrong[0]
        raise AssertionError(
            f"row {b}: got {got.tokens[b]}, {got.num_accepted[b]}, status {got.status[b]}; "
            f"oracle {want.tokens[b]}, {want.num_accepted[b]}, status {want.status[b]}"
        )
    return int(np.count_nonzero(~equal))


def logits(rng: np.random.Generator, shape: tuple[int, ...], *, scale: float, banned: float) -> np.ndarray:
    """Normal logits, a share of them -inf, at least one id of a row left."""
    z = rng.normal(0, scale, shape)
    if banned:
        forbidden = rng.random(shape) < banned
        forbidden[..., :1] &= ~forbidden.all(axis=-1, keepdims=True)
        z[forbidden] = -np.inf
    return z


def _per_row(rng: np.random.Generator, batch: int, values: tuple[Any, ...], scalar: bool) -> Any:
    """A value for all rows, or one for each, as a list or an array."""
    if scalar:
        return float(rng.choice(values))
    chosen = rng.choice(values, batch).astype(np.float64)
    return chosen.tolist() if rng.random() < 0.3 else chosen.astype(rng.choice([np.float32, np.float64]))


def _plant(rng: np.random.Generator, array: np.ndarray, vocab: int, probs: bool) -> None:
    """Put a fault into one random row."""
    if array.shape[0] == 0 or array.shape[1] == 0:
        return
    row = array[rng.integers(array.shape[0]), rng.integers(array.shape[1])]
    kind = FAULTS[probs][rng.integers(len(FAULTS[probs]))]
    if isinstance(kind, str):
        row[:vocab] = 0 if probs else -np.inf
    else:
        row[rng.integers(vocab)] = kind


@st.composite
def chain_cases(
    draw: st.DrawFn,
    *,
    rules: tuple[Token | Sigmoid, ...] = TOKENS,
    vocabularies: tuple[int, ...] = VOCABULARIES,
    small_segments: bool = False,
    faults: bool = False,
    probs: bool = False,
    normalizers: bool = False,
) -> ChainCase:
    """Calls of every kind; switches add what only some tests are about."""
    rule = draw(st.sampled_from(rules))
    batch, width = draw(st.integers(0, 6)), draw(st.integers(0, 5))
    vocab = draw(st.sampled_from(vocabularies))
    one_hot = draw(st.integers(0, 4)) == 0
    target_probs, draft_probs = (draw(st.booleans()), draw(st.booleans())) if probs else (False, False)
    target_type, draft_type = (draw(st.sampled_from(sorted(SCORE_TYPES))) for _ in range(2))
    scale = draw(st.sampled_from((0.3, 2.0, 12.0)))
    banned = draw(st.sampled_from((0.0, 0.0, 0.3)))
    distance = draw(st.sampled_from((0.0, 0.3, 2.0)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    padding = rng.integers(0, 4, 2) * (rng.random() < 0.5)
    z = logits(rng, (batch, width + 1, vocab + padding[0]), scale=scale, banned=banned)
    z_draft = logits(rng, (batch, width, vocab + padding[1]), scale=scale, banned=banned)
    near = z[:, :-1, :vocab] + rng.normal(0, distance, (batch, width, vocab))
    z_draft[..., :vocab] = np.where(rng.random((batch, 1, 1)) < 0.7, near, z_draft[..., :vocab])
    if rng.random() < 0.1:  # rows of ties
        z, z_draft = np.round(z / 4), np.round(z_draft / 4)
    corners = CORNERS[:-1] if normalizers else CORNERS  # a log-sum-exp of extremes has no digits either
    for rows, kind, width_of_rows in ((z, target_type, width + 1), (z_draft, draft_type, width)):
        if rng.random() < 0.4:
            for b, i in zip(*np.nonzero(rng.random((batch, width_of_rows)) < 0.5), strict=True):
                rows[b, i, :vocab] = corner_row(rng, vocab, str(rng.choice(corners)), kind)

    # A log-sum-exp of scores / T has no digits left for a tiny T.
    temperatures = tuple(t for t in TEMPERATURES if not (normalizers and 1e-40 < t < 0.01))
    temperature = 1.0 if target_probs else _per_row(rng, batch, temperatures, rng.random() < 0.4)
    draft_temperature = None
    if not draft_probs and (rng.random() < 0.4 or target_probs):
        draft_temperature = _per_row(rng, batch, temperatures, rng.random() < 0.4)

    def stored(values: np.ndarray, kind: str, are_probs: bool) -> np.ndarray:
        if are_probs:
            values = softmax(values, axis=-1) * rng.choice([1.0, 1.0, 0.98, 1.02])
        array = values.astype(SCORE_TYPES[kind])
        array[..., vocab:] = rng.choice([np.nan, np.inf, 100.0])
        return array

    with np.errstate(over="ignore", invalid="ignore"):  # rows without a finite score are welcome
        target = stored(z, target_type, target_probs)
        draft = None if one_hot else stored(z_draft, draft_type, draft_probs)

    target_lse = draft_lse = None
    if normalizers:
        which = rng.integers(1, 4)
        if which & 1 and not target_probs:
            target_lse = _log_normalizers(rng, target[..., :vocab], temperature)
        if which & 2 and draft is not None and not draft_probs:
            t = temperature if draft_temperature is None else draft_temperature
            draft_lse = _log_normalizers(rng, draft[..., :vocab], t)

    proposals = z_draft[..., :vocab] + rng.gumbel(size=(batch, width, vocab)) * rng.choice([0.0, 1.0])
    tokens = np.argmax(proposals, axis=-1).astype(rng.choice([np.int32, np.int64]))
    odd = rng.random((batch, width)) < rng.choice([0.0, 0.1])
    ends = np.array([-1, -2, vocab, vocab + 3, np.iinfo(tokens.dtype).min, np.iinfo(tokens.dtype).max], tokens.dtype)
    tokens[odd] = rng.choice(ends, int(odd.sum()))
    lengths = active = None
    if rng.random() < 0.4:
        lengths = rng.integers(-2, width + 3, batch).astype(rng.choice(INTEGER_TYPES))
    if rng.random() < 0.3:
        active = (rng.random(batch) < 0.7).astype(rng.choice([np.bool_, np.uint8]))
    if faults:
        for _ in range(rng.integers(1, 4)):
            if draft is not None and rng.random() < 0.5:
                _plant(rng, draft, vocab, draft_probs)
            else:
                _plant(rng, target, vocab, target_probs)
        for lse in (target_lse, draft_lse):
            if lse is not None and lse.size and rng.random() < 0.5:
                lse.flat[rng.integers(lse.size)] = rng.choice([np.nan, np.inf, -np.inf])

    step: Any = int(rng.choice([0, 1, 2**32, 2**55 + 12345]))
    if rng.random() < 0.3:
        step = rng.integers(0, 2**56, batch, dtype=np.uint64)
    return ChainCase(
        draft_tokens=tokens,
        target=target,
        draft=draft,
        vocab_size=vocab,
        seed=rng.integers(0, 2**64, batch, dtype=np.uint64),
        step=step,
        rule=rule,
        temperature=temperature,
        draft_temperature=draft_temperature,
        target_probs=target_probs,
        draft_probs=draft_probs,
        num_draft_tokens=lengths,
        active=active,
        target_log_normalizer=target_lse,
        draft_log_normalizer=draft_lse,
        segment=int(rng.integers(4, 65)) if small_segments else SEG,
    )


def _log_normalizers(rng: np.random.Generator, rows: np.ndarray, temperature: Any) -> np.ndarray:
    """log-sum-exp of rows [B, rows, V], in float32 or float64; anything where the row is greedy."""
    t = np.broadcast_to(np.float32(temperature), rows.shape[:1]).astype(np.float64)
    with np.errstate(all="ignore"):
        lse = logsumexp(rows.astype(np.float64) / np.where(t < 2.0**-126, 1.0, t)[:, None, None], axis=-1)
    lse[t < 2.0**-126] = np.nan
    return lse.astype(np.float64 if rng.random() < 0.5 else np.float32)
