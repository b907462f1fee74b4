"""How small a fault a check can see, and how many draws it takes."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.special import chdtri, chndtrinc

POWER = 0.99
ALPHA = 1e-6


def noncentrality(degrees: int, alpha: float = ALPHA, power: float = POWER) -> float:
    """Noncentrality at which a chi-square test rejects at `alpha` with probability `power`."""
    return float(chndtrinc(chdtri(degrees, alpha), degrees, 1 - power))


def detectable_distance(draws: float, degrees: int, *, alpha: float = ALPHA, power: float = POWER) -> float:
    """The total variation from which on a chi-square test of exact probabilities rejects, whatever cells it is spread over.

    Parameters
    ----------
    draws : float
        Sample size.
    degrees : int
        Degrees of freedom: cells less one.
    alpha, power : float
        The test rejects below the p-value `alpha`; it must do so with probability `power`.

    Returns
    -------
    float
        Infinite where no law is as far away as that.

    Notes
    -----
    A law at total variation t has a chi-square distance of at least 4 t^2 (Cauchy-Schwarz), and exactly that where all
    probabilities of half the mass rise, and of the other half fall, by one factor: the least favourable way, for which
    this is the power. A shift between two rare cells is found from a far smaller t. The law of the statistic is the
    noncentral chi-square, which counts follow approximately.

    Examples
    --------
    >>> from cupyspec.testing import detectable_distance
    >>> round(detectable_distance(100_000, 63), 4)
    0.0174
    """
    distance = math.sqrt(noncentrality(degrees, alpha, power) / draws) / 2
    return distance if distance < 1 else math.inf


def draws_needed(wrong: npt.ArrayLike, right: npt.ArrayLike, *, alpha: float = ALPHA, power: float = POWER) -> int:
    """Draws at which a sampler of the law `wrong` is told from the law `right` by a chi-square test.

    Parameters
    ----------
    wrong, right : array_like
        Probabilities of the same cells.
    alpha, power : float
        The test rejects below the p-value `alpha`; it must do so with probability `power`.

    Returns
    -------
    int
        By the noncentral chi-square. Small cells must not be so small that they are pooled.

    Raises
    ------
    ValueError
        The laws are equal or have different shapes.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyspec.testing import draws_needed
    >>> logits = np.arange(8.0)
    >>> p, hot = (np.exp(logits / t) / np.exp(logits / t).sum() for t in (1.0, 1.05))
    >>> round(draws_needed(hot, p), -2)  # a temperature that is 5 % off
    30400
    """
    wrong, right = (np.asarray(law, np.float64).ravel() for law in (wrong, right))
    if wrong.shape != right.shape:
        raise ValueError(f"wrong and right must have one shape, got {wrong.shape} and {right.shape}")
    possible = right > 0
    distance = float(((wrong - right)[possible] ** 2 / right[possible]).sum())
    impossible = float(wrong[~possible].sum())
    if distance == 0 and impossible == 0:
        raise ValueError("wrong must differ from right, got two equal laws")
    needed = math.inf
    if distance and possible.sum() > 1:
        needed = noncentrality(int(possible.sum()) - 1, alpha, power) / distance
    if impossible:
        needed = min(needed, math.log(1 - power) / math.log1p(-impossible) if impossible < 1 else 1)
    return math.ceil(needed)
