"""What the demo measures its tokens against: the target's own law, and the plain unfused scheme."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import bdtrc, chdtrc  # scipy.stats would take half a second to import

Floats = npt.NDArray[np.float64]

SURE_FAULT = 1e-6  # a p-value that right tokens give at one seed in a million
MIN_EXPECTED = 5.0  # a cell that expects fewer draws is pooled: chi-square's law does not hold for it


def softmax(logits: npt.NDArray[np.floating[Any]], temperature: float) -> Floats:
    """Probabilities of rows [..., V] in float64; one-hot at the argmax where the temperature is 0 (below 2^-126)."""
    z = logits.astype(np.float64)
    if temperature < 2.0**-126:
        greedy: Floats = np.eye(z.shape[-1])[z.argmax(-1)]
        return greedy
    weights = np.exp((z - z.max(-1, keepdims=True)) / temperature)
    probabilities: Floats = weights / weights.sum(-1, keepdims=True)
    return probabilities


@dataclass(frozen=True)
class LawCheck:
    """Draws against the law that they should follow."""

    draws: int
    strays: int  # draws of tokens that should not, or all but certainly would not, come
    cells: int
    chi_square: float
    p_value: float
    distance: float  # total variation between the draws and the law, over the cells
    noise: float  # what that is on average for draws that do follow the law


def check_law(tokens: npt.NDArray[np.integer[Any]], law: Floats) -> LawCheck:
    """Pearson's chi-square of tokens [N] against a law [V], tokens of small expectation pooled."""
    draws = len(tokens)
    counts = np.bincount(tokens, minlength=len(law))
    strays = int(counts[law == 0].sum())
    by_size = np.argsort(-law, kind="stable")
    by_size = by_size[law[by_size] > 0]
    expected = law[by_size] * draws
    # Likely tokens have a cell each; of the others, some together, by size, expect MIN_EXPECTED and more.
    alone = np.count_nonzero(expected >= MIN_EXPECTED)
    pool = (np.cumsum(expected[alone:]) / (2 * MIN_EXPECTED)).astype(np.int64)
    cell = np.append(np.arange(alone), alone + pool)
    expected = np.bincount(cell, expected).astype(np.float64)
    observed = np.bincount(cell, counts[by_size].astype(np.float64))
    share, stray_share = expected / draws, strays / draws
    distance = float(np.abs(observed / draws - share).sum() + stray_share) / 2
    # Each cell's count is nearly normal, and a normal's mean absolute value is sqrt(2 / pi) of its deviation.
    noise = float(np.sqrt(2 * share * (1 - share).clip(0) / (math.pi * draws)).sum()) / 2

    p_value = 0.0 if strays else 1.0
    if expected[-1] < MIN_EXPECTED and len(expected) > 1:
        # What is left over joins the last full cell. Where that one is large it would hide any number of them.
        if observed[-1] and (tail := float(bdtrc(observed[-1] - 1, draws, share[-1]))) < SURE_FAULT:
            strays, p_value = strays + int(observed[-1]), min(p_value, tail)
        expected = np.append(expected[:-2], expected[-2] + expected[-1])
        observed = np.append(observed[:-2], observed[-2] + observed[-1])
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    if len(expected) > 1:
        p_value = min(p_value, float(chdtrc(len(expected) - 1, chi_square)))
    return LawCheck(draws, strays, len(expected), chi_square, p_value, distance, noise)


def plain_verify(
    xp: Any, draft_tokens: Any, target_logits: Any, draft_logits: Any, temperature: float, coins: Any, pick: float
) -> tuple[int, int]:
    """Token verification of one row as it is usually written: every matrix in full, one operation after another.

    `draft_tokens` [K], `target_logits` [K+1, V], `draft_logits` [K, V], `coins` [K] and `pick` uniform on [0, 1), in the
    arrays of `xp` (NumPy or CuPy). Returns how many drafts are accepted and the token after them.
    """
    drafts = len(draft_tokens)
    target, draft = _softmax_rows(xp, target_logits, temperature), _softmax_rows(xp, draft_logits, temperature)
    with np.errstate(divide="ignore", invalid="ignore"):  # q = 0, and a residual that is zero everywhere
        ratio = target[:-1] / draft
        residual = xp.maximum(target[:-1] - draft, 0)
        mass = residual.sum(-1, keepdims=True)
        residual = xp.where(mass > 0, residual / mass, target[:-1])
    accept = coins < ratio[xp.arange(drafts), draft_tokens]
    accepted = int(xp.cumprod(accept).sum()) if drafts else 0
    running = xp.cumsum(residual[accepted] if accepted < drafts else target[-1])
    return accepted, int(xp.searchsorted(running, pick * running[-1], side="right"))


def _softmax_rows(xp: Any, logits: Any, temperature: float) -> Any:
    weights = xp.exp((logits - logits.max(-1, keepdims=True)) / temperature)
    return weights / weights.sum(-1, keepdims=True)


def median_seconds(call: Callable[[], object], budget: float = 0.2) -> float:
    """Median time of a call over at most 1000 repeats within `budget` seconds, the first few left out."""
    for _ in range(3):
        call()
    times: list[float] = []
    while sum(times) < budget and len(times) < 1000:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))
