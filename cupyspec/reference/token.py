"""Token verification (arXiv 2211.17192, 2302.01318): p, q are the distributions of one position."""

from __future__ import annotations

import numpy as np

from cupyspec.reference.rows import Float64


def acceptance(p: Float64, q: Float64, token: int, lenience: float = 1.0) -> float:
    """Probability that the drafted `token` is accepted: a coin u does it iff u < this."""
    if p[token] <= 0:
        return 0.0
    scaled = lenience * q[token]
    return np.inf if scaled == 0 else float(p[token] / scaled)


def residual(p: Float64, q: Float64) -> Float64:
    """Weights of the token that replaces a rejected draft; zero everywhere if p <= q."""
    return np.maximum(p - q, 0.0)
