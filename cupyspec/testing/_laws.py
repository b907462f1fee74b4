"""The exact law of what a rule emits: every draft and every outcome, with the coins integrated out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cupyspec._checks import host_integer
from cupyspec._philox import POSITION_LIMIT
from cupyspec.reference import sigmoid
from cupyspec.rules import Sigmoid, Token

Prefix: TypeAlias = tuple[int, ...]
Row: TypeAlias = npt.NDArray[Any]  # float64, or Fractions as objects
Model: TypeAlias = Callable[[Prefix], Row]  # the row [V] for the tokens so far
Law: TypeAlias = dict[Prefix, Any]  # probability of each sequence of tokens: float, or Fraction
# (target row, draft row, draft x) -> (probability that x is accepted, weights of the token that replaces it).
Decide: TypeAlias = Callable[[Row, Row, int], tuple[Any, Row]]


def output_law(
    rule: Token | Sigmoid | Decide,
    p: Any,
    q: Any,
    num_draft_tokens: int,
    *,
    greedy: bool = False,
    one_hot_drafts: bool = False,
    ends: Callable[[Prefix], bool] | None = None,
    bonus: Any = None,
) -> Law:
    """Exact law of the tokens that a rule emits for drafts drawn from `q`: the accepted prefix and one more.

    Parameters
    ----------
    rule : Token, Sigmoid or callable
        A callable is a rule of one's own: ``rule(p_row, q_row, x)`` answers the probability that draft x is accepted and
        the weights [V] of the token that replaces it; weights of zero everywhere mean the target's row.
    p, q : array_like or callable
        Probabilities of target and draft; for rule Sigmoid their logits, after temperature. One of

        - [V]: the same row at every position,
        - [V + 1, V]: row t after token t, the last row at the start,
        - a function of the tokens so far, a tuple, that returns the row [V].

        Rows of ``fractions.Fraction`` give a law of Fractions, without any rounding.
    num_draft_tokens : int
        K. The cost is of the order of V^(K + 1).
    greedy : bool, default False
        Temperature 0 of the target: its argmax, the lowest id on ties.
    one_hot_drafts : bool, default False
        The verifier is not shown `q`: ``draft_logits=None``.
    ends : callable, optional
        Whether the drafter stops after the tokens so far; the next token then comes from the target.
    bonus : as `p`, optional
        Where the token after the last draft comes from, for the law of a wrong sampler. Default: `p`.

    Returns
    -------
    dict of tuple to float or Fraction
        Probability of each sequence of emitted tokens. The number of accepted drafts is its length less one.

    Raises
    ------
    TypeError, ValueError
        Rows that are no probabilities or logits, of another length, or Fractions with rule Sigmoid.

    Examples
    --------
    >>> from fractions import Fraction as F
    >>> from cupyspec import Token
    >>> from cupyspec.testing import output_law
    >>> law = output_law(Token(), [F(1, 3), F(2, 3)], [F(2, 3), F(1, 3)], 1)
    >>> law[1,]  # rejected, and replaced by token 1
    Fraction(1, 3)
    >>> sum(chance * (len(tokens) - 1) for tokens, chance in law.items())  # accepted: sum of min(p, q)
    Fraction(2, 3)
    """
    num_draft_tokens = host_integer("num_draft_tokens", num_draft_tokens, 0, POSITION_LIMIT - 1)
    logits = isinstance(rule, Sigmoid)
    scores, draft_scores = as_model("p", p, logits), as_model("q", q, logits)
    target, draft = (_softmaxed(model) if logits else model for model in (scores, draft_scores))
    if greedy:
        target = _argmaxed(scores)
    last = target if bonus is None else as_model("bonus", bonus, logits)
    if bonus is not None and logits:
        last = _softmaxed(last)
    decide = token_rule(rule.lenience if isinstance(rule, Token) else 1.0)
    if not (greedy or isinstance(rule, (Token, Sigmoid))):
        decide = rule
    law: Law = {}

    def emit(prefix: Prefix, chance: Any, row: Row) -> None:
        for t in np.flatnonzero(row).tolist():
            tokens = (*prefix, t)
            law[tokens] = law.get(tokens, 0) + chance * row[t]

    def walk(prefix: Prefix, chance: Any) -> None:
        if len(prefix) == num_draft_tokens or (prefix and ends is not None and ends(prefix)):
            emit(prefix, chance, last(prefix))
            return
        row, drawn = target(prefix), draft(prefix)
        if row.size != drawn.size:
            raise ValueError(f"p and q must have equal rows, got {row.size} and {drawn.size}")
        instead = 0 * row
        for x in np.flatnonzero(drawn).tolist():
            if isinstance(rule, Sigmoid) and not greedy:
                known = None if one_hot_drafts else draft_scores(prefix)
                accepted, weights = _sigmoid_rule(rule, scores(prefix), known, x)
            else:
                accepted, weights = decide(row, _one_hot(x, row) if one_hot_drafts else drawn, x)
            if accepted:
                walk((*prefix, x), chance * drawn[x] * accepted)
            if accepted != 1:
                instead = instead + drawn[x] * (1 - accepted) * _norm(weights if weights.sum() > 0 else row)
        emit(prefix, chance, instead)

    walk((), 1)
    return _plain(law)


def single_draft_law(rule: Token | Sigmoid, p: npt.ArrayLike, q: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Exact law of (accepted or not, first token) for one draft, at any vocabulary.

    Parameters
    ----------
    rule : Token or Sigmoid
    p, q : array_like [V]
        Probabilities of target and draft; for rule Sigmoid their logits, after temperature.

    Returns
    -------
    ndarray [2, V]
        Row 0: the draft is rejected and this token replaces it. Row 1: this draft is accepted.

    Examples
    --------
    >>> from cupyspec import Token
    >>> from cupyspec.testing import single_draft_law
    >>> single_draft_law(Token(), [0.5, 0.5], [0.75, 0.25])
    array([[0.  , 0.25],
           [0.5 , 0.25]])
    """
    logits = isinstance(rule, Sigmoid)
    target, draft = (np.asarray(as_model(name, row, logits)(()), np.float64) for name, row in (("p", p), ("q", q)))
    if isinstance(rule, Sigmoid):
        left = sigmoid.residual(target, draft, rule.alpha, rule.beta)
        above, below = (sigmoid.values(z, rule.alpha, rule.beta) for z in (target, draft))
        target, draft = _softmax(target), _softmax(draft)
    else:
        left, above, below = np.maximum(target - draft, 0), target, rule.lenience * draft
    with np.errstate(divide="ignore", invalid="ignore"):
        accepted = np.where(above > 0, np.minimum(1.0, above / below), 0.0)
    rejected = (draft * (1 - accepted)).sum()
    return np.stack([rejected * _norm(left if left.sum() > 0 else target), draft * accepted])


def continued_law(law: Law, p: Any, length: int) -> Law:
    """Law of the first `length` tokens when the target goes on alone after what was emitted.

    A rule is exact iff this is `target_law`.

    Parameters
    ----------
    law : dict
        Of `output_law`.
    p : array_like or callable
        The target's probabilities, in any form of `output_law`.
    length : int

    Examples
    --------
    >>> from cupyspec import Token
    >>> from cupyspec.testing import continued_law, output_law, target_law, total_variation
    >>> p, q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    >>> law = continued_law(output_law(Token(), p, q, 2), p, 3)
    >>> total_variation(law, target_law(p, 3)) < 1e-12
    True
    """
    length = host_integer("length", length, 0, POSITION_LIMIT)
    model = as_model("p", p)
    joint: Law = {}
    stack = list(law.items())
    while stack:
        tokens, chance = stack.pop()
        if len(tokens) >= length:
            joint[tokens[:length]] = joint.get(tokens[:length], 0) + chance
        elif chance:
            row = model(tokens)
            stack += [((*tokens, t), chance * row[t]) for t in np.flatnonzero(row).tolist()]
    return _plain(joint)


def _plain(law: Law) -> Law:
    """Python's floats for NumPy's."""
    return {tokens: float(chance) if isinstance(chance, np.floating) else chance for tokens, chance in law.items()}


def target_law(p: Any, length: int) -> Law:
    """The target's own law of `length` tokens, `p` in any form of `output_law`."""
    return continued_law({(): 1}, p, length)


def total_variation(first: Any, second: Any) -> Any:
    """Total-variation distance of two laws: dicts of `output_law`, or arrays of one shape.

    Examples
    --------
    >>> from cupyspec.testing import total_variation
    >>> total_variation([0.5, 0.5], [0.75, 0.25])
    0.25
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return sum(abs(first.get(key, 0) - second.get(key, 0)) for key in first.keys() | second.keys()) / 2
    if isinstance(first, Mapping) or isinstance(second, Mapping):
        raise TypeError("first and second must both be dicts, or both be arrays")
    a, b = (_row_values(law) for law in (first, second))
    if a.shape != b.shape:
        raise ValueError(f"first and second must have one shape, got {a.shape} and {b.shape}")
    distance = abs(a - b).sum() / 2
    return float(distance) if isinstance(distance, np.floating) else distance


def expected_accepted(law: Law) -> Any:
    """Expected number of accepted drafts under a law of `output_law`.

    Examples
    --------
    >>> from cupyspec import Token
    >>> from cupyspec.testing import expected_accepted, output_law
    >>> round(expected_accepted(output_law(Token(), [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 3)), 6)
    1.533
    """
    return sum(chance * (len(tokens) - 1) for tokens, chance in law.items())


def token_rule(lenience: float = 1.0) -> Decide:
    """Token verification as a `Decide`; Fractions stay Fractions."""

    def decide(p: Row, q: Row, x: int) -> tuple[Any, Row]:
        scale = Fraction(repr(float(lenience))) if isinstance(p[x], Fraction) else lenience
        limit = scale * q[x]
        accepted = 0 if p[x] <= 0 else 1 if p[x] >= limit else p[x] / limit
        return accepted, np.maximum(p - q, 0 * p)

    return decide


def _sigmoid_rule(rule: Sigmoid, target: Row, draft: Row | None, x: int) -> tuple[Any, Row]:
    """The sigmoid rule of logits; one-hot drafts without the draft's."""
    above = sigmoid.values(target, rule.alpha, rule.beta)
    if draft is None:
        return above[x], np.where(np.arange(above.size) == x, 0.0, above)
    below = sigmoid.values(draft, rule.alpha, rule.beta)
    accepted = 0.0 if above[x] <= 0 else 1.0 if above[x] >= below[x] else above[x] / below[x]
    return accepted, sigmoid.residual(target, draft, rule.alpha, rule.beta)


def as_model(name: str, given: Any, logits: bool = False) -> Model:
    """Rows for the tokens so far, from any form that `output_law` takes; each row is checked once."""
    if callable(given):
        rows: dict[Prefix, Row] = {}

        def model(prefix: Prefix) -> Row:
            if prefix not in rows:
                row = _row_values(given(prefix))
                if row.ndim != 1:
                    raise ValueError(f"{name} must return rows [V], got shape {row.shape}")
                rows[prefix] = _checked(name, row, logits)
            return rows[prefix]

        return model
    table = _row_values(given)
    if table.ndim == 1:
        only = _checked(name, table, logits)
        return lambda _: only
    if table.ndim != 2 or table.shape[0] != table.shape[1] + 1:
        raise ValueError(f"{name} must be a function, a row [V] or a table [V + 1, V], got shape {table.shape}")
    checked = [_checked(name, row, logits) for row in table]
    return lambda prefix: checked[prefix[-1] if prefix else -1]


def _row_values(given: Any) -> Row:
    """float64, or objects where there are Fractions."""
    array = np.asarray(given)
    if array.dtype == object:
        if not all(isinstance(value, (Fraction, int)) for value in array.ravel()):
            raise TypeError("rows must be real numbers, or all be fractions.Fraction")
        return array * Fraction(1)
    if array.dtype.kind not in "iuf" and array.dtype.name not in ("bfloat16", "float16"):
        raise TypeError(f"rows must be real numbers, got dtype {array.dtype}")
    return array.astype(np.float64)


def _checked(name: str, row: Row, logits: bool) -> Row:
    if logits:
        if row.dtype == object:
            raise TypeError(f"{name} must be float logits with rule Sigmoid, got Fractions")
        if np.isnan(row).any() or (row == np.inf).any() or not (row > -np.inf).any():
            raise ValueError(f"{name} must be logits: no NaN, no +inf, at least one finite")
        return row
    total = row.sum() if row.size else 0
    exact = row.dtype == object
    if not row.size or min(row.tolist()) < 0 or (total != 1 if exact else not abs(total - 1) <= 1e-6):
        raise ValueError(f"{name} must be probabilities that sum to 1, got a row with sum {total}")
    return row


def _softmax(row: Row) -> Row:
    return _norm(np.exp(row - row.max()))


def _softmaxed(model: Model) -> Model:
    return lambda prefix: _softmax(model(prefix))


def _argmaxed(model: Model) -> Model:
    return lambda prefix: _one_hot(int(np.argmax(model(prefix))), model(prefix))


def _one_hot(x: int, like: Row) -> Row:
    row = 0 * np.where(np.isfinite(like), like, 0.0) if like.dtype != object else 0 * like
    row[x] = row[x] + 1
    return row


def _norm(row: Row) -> Row:
    return row / row.sum()
