"""Exact laws of small chains: all drafts, all outcomes, with coins integrated out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cupyspec.reference import token

Row = np.ndarray
Prefix = tuple[int, ...]
Model = Callable[[Prefix], Row]  # a distribution [V] for what was emitted so far
Law = dict[Prefix, float]  # chance of each sequence of emitted tokens
# For a prefix and a draft x: chance that x is accepted, and the law of what replaces it.
Decide = Callable[[Prefix, int], tuple[float, Row]]


def norm(row: Row) -> Row:
    """Weights as a distribution."""
    return row / row.sum()


def one_hot(x: int, size: int) -> Row:
    """All mass on x."""
    return np.eye(size)[x]


def token_rule(p: Row, q: Row, x: int, lenience: float = 1.0) -> tuple[float, Row]:
    """What rule Token decides about draft x, by the oracle's two functions."""
    left = token.residual(p, q)
    return min(1.0, token.acceptance(p, q, x, lenience)), norm(left if left.sum() > 0 else p)


def chain_law(
    p: Model,
    q: Model,
    K: int,
    *,
    decide: Decide | None = None,
    one_hot_drafts: bool = False,
    lenience: float = 1.0,
    ends: Callable[[Prefix], bool] = lambda _: False,
    bonus: Model | None = None,
) -> Law:
    """Law of the emitted tokens (the accepted prefix and one more) when drafts come from q.

    With `one_hot_drafts` the verifier does not know q. `ends` says after which drafts the drafter stops. `bonus` is
    where the token after the last draft comes from: p, unless a mutant says otherwise.
    """
    law: Law = {}

    def emit(tokens: Prefix, chance: float) -> None:
        law[tokens] = law.get(tokens, 0.0) + chance

    def walk(prefix: Prefix, chance: float) -> None:
        row, drawn = p(prefix), q(prefix)
        if len(prefix) == K or (prefix and ends(prefix)):
            for t, share in enumerate((bonus or p)(prefix)):
                emit((*prefix, t), chance * share)
            return
        for x in np.flatnonzero(drawn).tolist():
            if decide is None:
                known = one_hot(x, row.size) if one_hot_drafts else drawn
                accepted, instead = token_rule(row, known, x, lenience)
            else:
                accepted, instead = decide(prefix, x)
            if accepted:
                walk((*prefix, x), chance * drawn[x] * accepted)
            for t, share in enumerate(instead):
                emit((*prefix, t), chance * drawn[x] * (1 - accepted) * share)

    walk((), 1.0)
    return law


def joint_law(law: Law, p: Model, length: int) -> Law:
    """Law of the first `length` tokens when the target goes on alone after what was emitted."""
    joint: Law = {}
    stack = list(law.items())
    while stack:
        tokens, chance = stack.pop()
        if len(tokens) >= length:
            joint[tokens[:length]] = joint.get(tokens[:length], 0.0) + chance
        elif chance:
            stack += [((*tokens, t), chance * share) for t, share in enumerate(p(tokens))]
    return joint


def cells(tokens: np.ndarray, V: int) -> np.ndarray:
    """One number per row of an answer's tokens [B, K + 1], -1 included."""
    powers = (V + 1) ** np.arange(tokens.shape[1])
    return (tokens.astype(np.int64) + 1) @ powers


def law_of_cells(law: Law, V: int, K: int) -> Row:
    """A law of emitted tokens as probabilities of `cells`."""
    shares = np.zeros((V + 1) ** (K + 1))
    for tokens, chance in law.items():
        padded = np.array([[*tokens, *[-1] * (K + 1 - len(tokens))]])
        shares[cells(padded, V)[0]] += chance
    return shares
