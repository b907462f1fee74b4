"""Token verification: the exact rule of speculative sampling."""

from __future__ import annotations

from dataclasses import dataclass

from cupyspec.rules._check import finite_number


@dataclass(frozen=True)
class Token:
    """Accept each draft with probability min(1, p/q), resample the first rejected one from norm([p - q]+).

    Exact: tokens follow the target's law. This is also the exact method of the GPU paper [3]_.

    Parameters
    ----------
    lenience : float, default 1.0
        In (0, 1]. Below 1 the test becomes ``u * lenience * q(x) < p(x)``: more drafts are accepted and the result is
        no longer exact. Given its prefix no token comes out with probability above ``p(x) / lenience``.

    Raises
    ------
    ValueError
        `lenience` outside (0, 1].
    TypeError
        `lenience` is not a real number.

    References
    ----------
    .. [1] Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192.
    .. [2] Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", arXiv 2302.01318.
    .. [3] Wagner et al., "Optimized Speculative Sampling for GPU Hardware Accelerators", arXiv 2406.11016.

    Examples
    --------
    >>> from cupyspec import Token
    >>> Token().exact, Token(lenience=0.5).exact
    (True, False)
    """

    lenience: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < finite_number("lenience", self.lenience) <= 1.0:
            raise ValueError(f"lenience must be in (0, 1], got {self.lenience!r}")
        object.__setattr__(self, "lenience", float(self.lenience))

    @property
    def exact(self) -> bool:
        """Whether tokens follow the target's law exactly."""
        return self.lenience == 1.0
