"""How often right samplers may fail: a stated number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from cupyspec._checks import host_integer
from cupyspec.testing._power import POWER
from cupyspec.testing._result import CheckResult


@dataclass(frozen=True)
class ErrorBudget:
    """The false-alarm rate of checks: a small alpha, and rejections confirmed on a fresh larger sample.

    Parameters
    ----------
    alpha : float, default 1e-6
        A check rejects a right sampler with this probability.
    confirmations : int, default 1
        Fresh samples that must be rejected as well before a check fails. A draw of probability 0 needs none.
    growth : int, default 4
        Each is so many times as large as the one before: a small fault shows better, chance does not.

    Notes
    -----
    With exact p-values and one confirmation a right sampler would fail with probability alpha^2. Chi-square's tail is
    an approximation that is several times off at 1e-6, so the stated rate counts only one alpha.

    Examples
    --------
    >>> from cupyspec.testing import ErrorBudget
    >>> ErrorBudget().false_alarm_rate(checks=1000)  # of a run of 1000 checks: 0.1 %
    0.000999...
    """

    alpha: float = 1e-6
    confirmations: int = 1
    growth: int = 4

    def __post_init__(self) -> None:
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, Real) or not 0 < self.alpha < 1:
            raise ValueError(f"alpha must be in (0, 1), got {self.alpha!r}")
        host_integer("confirmations", self.confirmations, 0, 10)
        host_integer("growth", self.growth, 1, 1000)

    def false_alarm_rate(self, checks: int) -> float:
        """Bound on the probability that any of so many checks fails though nothing is wrong."""
        return -math.expm1(checks * math.log1p(-self.alpha))

    @property
    def power(self) -> float:
        """Of each sample, so that all of them reject with 99 %."""
        return float(POWER ** (1 / (self.confirmations + 1)))

    def judge(self, check: Callable[[int, int], CheckResult], draws: int) -> tuple[CheckResult, bool]:
        """Run a check, ``check(draws, stage)``, and confirm what it rejects; the last result, and whether it failed.

        Stage 0 is the first sample; each further one must be fresh.
        """
        for stage in range(self.confirmations + 1):
            result = check(draws * self.growth**stage, stage)
            if result.impossible:
                return result, True
            if not result.rejected:
                return result, False
        return result, True
