"""What each rule compares with the coin, and what replaces a rejected draft, for many rows at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from cupyspec.cpu.rows import Bools, Float64, Indices, Rows, Statuses, Weights
from cupyspec.rules import Sigmoid, Token


@dataclass(frozen=True)
class Proposal:
    """Drafts x [R] at one position, and their rows."""

    x: Indices
    target: Rows
    draft: Rows | None  # None: the drafter had no distribution, each draft is one-hot
    draft_greedy: bool  # the draft's temperature is 0: one-hot at the argmax of its row

    def take(self, rows: Indices) -> Proposal:
        """Some of the drafts."""
        draft = None if self.draft is None else self.draft.take(rows)
        return Proposal(self.x[rows], self.target.take(rows), draft, self.draft_greedy)

    def one_hot(self) -> tuple[Indices, Statuses] | None:
        """The only id [R] that the drafter could draw and the draft row's status; None: drafts have a distribution."""
        if self.draft is None:
            return self.x, np.zeros(self.x.size, np.int32)
        if self.draft_greedy:
            return self.draft.scores.argmax(axis=1), self.draft.status
        return None


def accept(rule: Token | Sigmoid, proposal: Proposal, coins: Float64) -> tuple[Bools, Statuses]:
    """Which drafts are accepted [R], and the status of what was read: never accepted where it is not 0."""
    x, target = proposal.x, proposal.target
    lenience = rule.lenience if isinstance(rule, Token) else 1.0
    if isinstance(rule, Sigmoid):
        p, status = _sigmoid_probability(rule, target, x)
    else:
        p, status = target.probability(x)
    one_hot = proposal.one_hot()
    if one_hot is not None:
        q, draft_status = (one_hot[0] == x).astype(np.float64), one_hot[1]
    elif proposal.draft is None:
        raise ValueError("a draft without a row is one-hot")
    elif isinstance(rule, Sigmoid):
        q, draft_status = _sigmoid_probability(rule, proposal.draft, x)
    else:
        q, draft_status = proposal.draft.probability(x)
    status = status | draft_status
    # Compared in float64, p(x) formed from float32 sums: tiny probabilities keep their ratio.
    return (status == 0) & (p > 0) & (coins * lenience * q < p), status


def residual(rule: Token | Sigmoid, proposal: Proposal) -> tuple[Weights, Statuses]:
    """Weights of the next token after every draft of the proposal was rejected, and the rows' status."""
    target, draft = proposal.target, proposal.draft
    status, one_hot = target.status, proposal.one_hot()
    if one_hot is not None:
        status = status | one_hot[1]
        w = _sigmoid(rule, target.scaled()).astype(np.float32) if isinstance(rule, Sigmoid) else target.weights.w.copy()
        w[np.arange(w.shape[0]), one_hot[0]] = 0
    elif draft is None:
        raise ValueError("a draft without a row is one-hot")
    else:
        status = status | draft.status
        if isinstance(rule, Sigmoid):
            w = _sigmoid_residual(rule, target.scaled(), draft.scaled()).astype(np.float32)
        else:
            # [p - q]+ in units that leave both sides at most as large as they are, since draws need no normaliser and
            # log-normalisers handed in may be anything. As max(p, q) - q: NumPy compares an array with a number
            # several times slower than two arrays.
            ratio = np.nan_to_num(draft.scale / target.scale, nan=1.0)
            w = target.weights.w * np.minimum(ratio, 1).astype(np.float32)[:, None]
            q = draft.weights.w
            if (ratio > 1).any():
                q = q * np.minimum(1 / ratio, 1).astype(np.float32)[:, None]
            np.maximum(w, q, out=w)
            w -= q
    weights = Weights.of(w, target.side.segment)
    zero = ~(weights.total() > 0)
    if zero.any():
        w[zero], weights.masses[zero] = target.weights.w[zero], target.weights.masses[zero]
    return weights, status


def _sigmoid_probability(rule: Sigmoid, rows: Rows, x: Indices) -> tuple[Float64, Statuses]:
    z = rows.scaled(x)
    return _sigmoid(rule, z), rows.judge_single(z)


def _sigmoid(rule: Sigmoid, z: Float64) -> Float64:
    inside = expit((z - rule.alpha) / (rule.beta - rule.alpha))
    return np.where(z < rule.alpha, 0.0, np.where(z > rule.beta, 1.0, inside))


def _sigmoid_residual(rule: Sigmoid, target: Float64, draft: Float64) -> Float64:
    """[p^ - q^]+ as sigma(a) sigma(-b) (1 - e^(b - a)): a plain difference of two values near 0.6 loses everything."""
    width = rule.beta - rule.alpha
    p, q = _sigmoid(rule, target), _sigmoid(rule, draft)
    inside = (target >= rule.alpha) & (target <= rule.beta) & (draft >= rule.alpha) & (draft <= rule.beta)
    product = p * expit((rule.alpha - draft) / width) * -np.expm1((draft - target) / width)
    return np.maximum(np.where(inside, product, p - q), 0.0)
