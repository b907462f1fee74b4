"""The per-row status of an answer."""

from __future__ import annotations

from enum import IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt


class Status(IntFlag):
    """What was wrong with a row: 0, or a sum of these bits.

    A fault in scores or in a parameter leaves -1 in the slot where the row stops. A bad id or length ends the row's
    drafts there and leaves a valid answer.
    """

    TARGET_NOT_FINITE = 1  # a target row with NaN or +inf, or a probability that is negative or not finite
    TARGET_EMPTY = 2  # a target row with no finite score, or no positive probability
    DRAFT_INVALID = 4  # a draft row with either fault
    TOKEN_OUT_OF_RANGE = 8
    LENGTH_OUT_OF_RANGE = 16
    PARAMETER_OUT_OF_RANGE = 32


_MEANING = {
    Status.TARGET_NOT_FINITE: "a target row is not finite (NaN, +inf or a negative probability)",
    Status.TARGET_EMPTY: "a target row has no finite score",
    Status.DRAFT_INVALID: "a draft row is invalid",
    Status.TOKEN_OUT_OF_RANGE: "a draft token id is out of range",
    Status.LENGTH_OUT_OF_RANGE: "a row's number of draft tokens is out of range",
    Status.PARAMETER_OUT_OF_RANGE: "a per-row parameter is out of range",
}


def raise_for_status(status: npt.NDArray[np.int32]) -> None:
    """ValueError naming the first row whose status is not 0; for ``check=True``."""
    bad: npt.NDArray[np.intp] = np.flatnonzero(status)
    if bad.size == 0:
        return
    row: Any = bad[0]
    faults = "; ".join(text for bit, text in _MEANING.items() if status[row] & bit)
    more = f" ({bad.size - 1} more rows have a fault)" if bad.size > 1 else ""
    raise ValueError(f"row {row}: {faults} (status {int(status[row])}){more}")
