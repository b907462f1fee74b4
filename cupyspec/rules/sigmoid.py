"""The sigmoid approximation of arXiv 2406.11016: no softmax, not exact."""

from __future__ import annotations

from dataclasses import dataclass

from cupyspec.rules._check import finite_number


@dataclass(frozen=True)
class Sigmoid:
    """Accept and resample by elementwise sigmoids of the logits instead of probabilities. Not exact, by design.

    A logit z (after temperature) stands for ``sigmoid((z - alpha) / (beta - alpha))``, 0 below `alpha` and 1 above
    `beta`. Nearly every draft is accepted whatever the constants, so tokens follow nearly the *draft's* law. Drafts
    reached without a rejection are followed by an exact draw from the target.

    Parameters
    ----------
    alpha, beta : float, default -1e4 and 1e4
        Scale of the logits, ``alpha < beta``.

    Raises
    ------
    ValueError
        `alpha` >= `beta`, or one of them is not finite.
    TypeError
        One of them is not a real number.

    References
    ----------
    .. [1] Wagner et al., "Optimized Speculative Sampling for GPU Hardware Accelerators", arXiv 2406.11016.

    Examples
    --------
    >>> from cupyspec import Sigmoid
    >>> Sigmoid(alpha=-1e3, beta=1e3).exact
    False
    """

    alpha: float = -1e4
    beta: float = 1e4

    def __post_init__(self) -> None:
        if not finite_number("alpha", self.alpha) < finite_number("beta", self.beta):
            raise ValueError(f"alpha must be below beta, got alpha={self.alpha!r}, beta={self.beta!r}")
        finite_number("beta - alpha", self.beta - self.alpha)
        object.__setattr__(self, "alpha", float(self.alpha))
        object.__setattr__(self, "beta", float(self.beta))

    @property
    def exact(self) -> bool:
        """Whether tokens follow the target's law exactly: never."""
        return False
