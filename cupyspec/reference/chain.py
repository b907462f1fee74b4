"""The walk down a chain of drafts, in float64 and row by row, with every random number handed in."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyspec._segments import SEG
from cupyspec._status import Status
from cupyspec.reference import sigmoid, token
from cupyspec.reference.race import race
from cupyspec.reference.rows import (
    Float64,
    Floats,
    is_empty,
    is_greedy,
    not_finite,
    one_hot,
    probabilities,
)
from cupyspec.rules import Sigmoid, Token

COIN_BAND = 2.0**-17  # relative to p: decisions closer than this may differ in float32


class OracleAnswer(NamedTuple):
    """What `verify` must answer, and where float32 may answer otherwise."""

    tokens: npt.NDArray[np.int64]  # [B, K + 1]
    num_accepted: npt.NDArray[np.int32]  # [B]
    status: npt.NDArray[np.int32]  # [B]
    in_band: npt.NDArray[np.bool_]  # [B]: a decision fell within a band of contract section 7
    width: Float64  # [B]: probability of that, to compare the number of mismatches with


class _Side(NamedTuple):
    """Target or draft of one batch row."""

    rows: Floats  # [K + 1, V] or [K, V]
    probs: bool
    temperature: float
    log_normalizer: Floats | None  # [K + 1] or [K]

    @property
    def greedy(self) -> bool:
        return not self.probs and is_greedy(self.temperature)

    def faults(self, i: int, x: int, whole: bool) -> Status:
        """What is wrong with row i where all of it is read, or else only the score of x."""
        whole = whole or self.greedy
        row = self.rows[i] if whole else self.rows[i, x : x + 1]
        fault = Status(0)
        if self.log_normalizer is not None and not self.greedy and not np.isfinite(self.log_normalizer[i]):
            fault |= Status.TARGET_NOT_FINITE
        if not_finite(row, self.probs):
            fault |= Status.TARGET_NOT_FINITE
        elif whole and is_empty(row, self.probs):
            fault |= Status.TARGET_EMPTY
        return fault

    def distribution(self, i: int) -> Float64:
        """p or q of row i."""
        normalizer = None if self.log_normalizer is None else float(self.log_normalizer[i])
        return probabilities(self.rows[i], probs=self.probs, temperature=self.temperature, log_normalizer=normalizer)

    def scaled(self, i: int) -> Float64:
        """z / T of row i."""
        return np.asarray(self.rows[i], np.float64) / float(np.float32(self.temperature))


def verify(
    draft_tokens: npt.NDArray[np.signedinteger[Any]],
    target_scores: Floats,
    draft_scores: Floats | None = None,
    *,
    coins: Floats,
    exponentials: Floats,
    picks: Floats,
    rule: Token | Sigmoid = Token(),
    temperature: npt.ArrayLike = 1.0,
    draft_temperature: npt.ArrayLike | None = None,
    target_probs: bool = False,
    draft_probs: bool = False,
    num_draft_tokens: npt.ArrayLike | None = None,
    active: npt.ArrayLike | None = None,
    vocab_size: int | None = None,
    target_log_normalizer: Floats | None = None,
    draft_log_normalizer: Floats | None = None,
    segment: int = SEG,
) -> OracleAnswer:
    """Verify padded drafts [B, K] against scores [B, K + 1, V] and [B, K, V] (None: one-hot drafts).

    `coins` [B, K]; `exponentials` and `picks` [2, B, K + 1, segments]: index 0 for the draw after a rejection at a
    position, 1 for a draw from the target there.
    """
    batch, width = draft_tokens.shape
    vocab = target_scores.shape[-1] if vocab_size is None else vocab_size
    temperature = np.broadcast_to(np.asarray(temperature, np.float64), (batch,))
    draft_temperature = (
        temperature
        if draft_temperature is None
        else np.broadcast_to(np.asarray(draft_temperature, np.float64), (batch,))
    )
    lengths = np.full(batch, width) if num_draft_tokens is None else np.asarray(num_draft_tokens)
    answer = OracleAnswer(
        np.full((batch, width + 1), -1, np.int64),
        np.zeros(batch, np.int32),
        np.zeros(batch, np.int32),
        np.zeros(batch, np.bool_),
        np.zeros(batch),
    )
    for b in range(batch):
        if active is not None and not np.asarray(active)[b]:
            continue
        status = Status(0)
        length = min(max(int(lengths[b]), 0), width)
        if length != lengths[b]:
            status |= Status.LENGTH_OUT_OF_RANGE
        drafts: list[int] = []
        for x in draft_tokens[b, :length].tolist():
            if not 0 <= x < vocab:
                status |= Status.TOKEN_OUT_OF_RANGE if x != -1 else 0
                break
            drafts.append(x)
        target_lse = None if target_log_normalizer is None else target_log_normalizer[b]
        target = _Side(target_scores[b, :, :vocab], target_probs, float(temperature[b]), target_lse)
        draft = None
        if draft_scores is not None:
            draft_lse = None if draft_log_normalizer is None else draft_log_normalizer[b]
            draft = _Side(draft_scores[b, :, :vocab], draft_probs, float(draft_temperature[b]), draft_lse)
        with np.errstate(all="ignore"):  # tiny temperatures overflow to the infinities that are meant
            emitted, fault, in_band, band_width = _walk(
                drafts, target, draft, rule, coins[b], exponentials[:, b], picks[:, b], segment
            )
        answer.tokens[b, : len(emitted)] = emitted
        answer.num_accepted[b] = len(emitted) - (0 if fault else 1)
        answer.status[b] = status | fault
        answer.in_band[b] = in_band
        answer.width[b] = min(1.0, band_width)
    return answer


def _walk(
    drafts: list[int],
    target: _Side,
    draft: _Side | None,
    rule: Token | Sigmoid,
    coins: Floats,
    exponentials: Floats,
    picks: Floats,
    segment: int,
) -> tuple[list[int], Status, bool, float]:
    """Tokens emitted for one row, its fault, whether a decision was in a band, and a bound on the chance of that."""
    if target.greedy:
        draft = None  # a greedy row neither reads nor judges its draft rows
    in_band, width = False, 0.0
    stop, purpose = len(drafts), 1
    for i, x in enumerate(drafts):
        fault = _faults(i, x, target, draft, rule)
        if fault:
            return drafts[:i], fault, in_band, width
        limit = _acceptance(i, x, target, draft, rule)
        u = float(coins[i])
        if not target.greedy and 0 < limit < np.inf:
            in_band |= abs(u - limit) <= COIN_BAND * limit
            width += 2 * COIN_BAND * min(1.0, limit)
        if u >= limit:
            stop, purpose = i, 0
            break

    rejected = purpose == 0
    fault = _faults(stop, 0, target, draft if rejected else None, None)
    if fault:
        return drafts[:stop], fault, in_band, width
    weights, terms = target.distribution(stop), None
    if rejected and not target.greedy:
        left, left_terms = _residual(stop, drafts[stop], target, draft, rule)
        if left.sum() > 0:
            weights, terms = left, left_terms
    drawn = race(
        weights,
        np.asarray(exponentials[purpose, stop], np.float64),
        np.asarray(picks[purpose, stop], np.float64),
        segment=segment,
        terms=terms,
    )
    if target.greedy:
        return [*drafts[:stop], drawn.token], fault, in_band, width
    return [*drafts[:stop], drawn.token], fault, in_band or drawn.in_band, width + drawn.width


def _faults(i: int, x: int, target: _Side, draft: _Side | None, rule: Token | Sigmoid | None) -> Status:
    """Faults in what position i reads: to test x under a rule, or (None) to draw from its rows."""

    def whole(side: _Side) -> bool:
        return rule is None or (isinstance(rule, Token) and side.log_normalizer is None)

    fault = target.faults(i, x, whole(target))
    if draft is not None and draft.faults(i, x, whole(draft)):
        fault |= Status.DRAFT_INVALID
    return fault


def _acceptance(i: int, x: int, target: _Side, draft: _Side | None, rule: Token | Sigmoid) -> float:
    """The number that the coin of position i must stay below for x to be accepted."""
    if target.greedy:
        return float(np.argmax(target.rows[i]) == x)
    p, q, _ = _values(i, x, target, draft, rule)
    return token.acceptance(p, q, x, rule.lenience if isinstance(rule, Token) else 1.0)


def _residual(i: int, x: int, target: _Side, draft: _Side | None, rule: Token | Sigmoid) -> tuple[Float64, Float64]:
    """Weights after x was rejected at position i, and the size of the terms they are differences of."""
    p, q, one_hot_draft = _values(i, x, target, draft, rule)
    if one_hot_draft:
        return np.where(q > 0, 0.0, p), p
    if isinstance(rule, Sigmoid) and draft is not None:
        z_target, z_draft = target.scaled(i), draft.scaled(i)
        left = sigmoid.residual(z_target, z_draft, rule.alpha, rule.beta)
        # Only z_draft - z_target cancels: its float32 error is relative to the logits.
        size = np.nan_to_num((np.abs(z_target) + np.abs(z_draft)) / (rule.beta - rule.alpha), posinf=0.0)
        return left, left + size
    return token.residual(p, q), p + q


def _values(i: int, x: int, target: _Side, draft: _Side | None, rule: Token | Sigmoid) -> tuple[Float64, Float64, bool]:
    """What the rule compares at position i, target and draft [V], and whether the draft's is one-hot."""
    if isinstance(rule, Sigmoid):
        p = sigmoid.values(target.scaled(i), rule.alpha, rule.beta)
    else:
        p = target.distribution(i)
    if draft is None:
        return p, one_hot(x, p.size), True
    if isinstance(rule, Sigmoid) and not draft.greedy:
        return p, sigmoid.values(draft.scaled(i), rule.alpha, rule.beta), False
    return p, draft.distribution(i), draft.greedy
