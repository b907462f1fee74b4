"""The sigmoid approximation (arXiv 2406.11016): a logit z stands for sigma((z - alpha) / (beta - alpha))."""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from cupyspec.reference.rows import Float64


def values(logits: Float64, alpha: float, beta: float) -> Float64:
    """p^ of scaled logits z / T: in [0.5, 0.731] inside [alpha, beta], 0 below, 1 above."""
    inside = expit((logits - alpha) / (beta - alpha))
    return np.where(logits < alpha, 0.0, np.where(logits > beta, 1.0, inside))


def residual(target: Float64, draft: Float64, alpha: float, beta: float) -> Float64:
    """[p^ - q^]+ of scaled logits, without the cancellation of a plain difference."""
    p, q = values(target, alpha, beta), values(draft, alpha, beta)
    both_inside = (target >= alpha) & (target <= beta) & (draft >= alpha) & (draft <= beta)
    with np.errstate(invalid="ignore", over="ignore"):
        b = (draft - alpha) / (beta - alpha)
        inside = p * expit(-b) * -np.expm1((draft - target) / (beta - alpha))
    return np.maximum(np.where(both_inside, inside, p - q), 0.0)
