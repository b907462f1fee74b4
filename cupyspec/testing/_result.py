"""What a statistical check found, and the error of one that cannot decide."""

from __future__ import annotations

from dataclasses import dataclass


class CannotDecide(Exception):
    """A check has too few draws for the power that was asked for, so that passing would mean nothing."""


@dataclass(frozen=True)
class CheckResult:
    """Draws against what they should be.

    Attributes
    ----------
    test : str
        Name of the test.
    statistic : float
        Its statistic; for an exact test, the probability of the counts.
    p_value : float
        Chance of counts at least this far off if nothing is wrong; 0 where something impossible was drawn.
    cells : int
        Cells compared, after pooling.
    draws : int
        Sample size.
    impossible : int
        Draws in cells of probability 0.
    distance : float
        Total variation seen between draws and law over the cells compared. Right draws have some too.
    detectable : float
        Smallest total variation, over the cells compared, that this test finds at this sample size with 99 %, whatever
        cells it is spread over (see `detectable_distance`); infinite if nothing would be found.
    alpha : float
        The p-value below which the draws are rejected, which `detectable` refers to.
    """

    test: str
    statistic: float
    p_value: float
    cells: int
    draws: int
    impossible: int
    distance: float
    detectable: float
    alpha: float

    @property
    def rejected(self) -> bool:
        """Whether the p-value is below alpha."""
        return self.p_value < self.alpha

    def __str__(self) -> str:
        impossible = f", {self.impossible} of them impossible" if self.impossible else ""
        return (
            f"{self.test} {self.statistic:.4g} on {self.cells} cells, {self.draws} draws{impossible}: "
            f"p = {self.p_value:.3g}, TV seen {self.distance:.2g}; TV found with 99 %: {self.detectable:.2g}"
        )
