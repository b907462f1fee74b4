"""Checks of any sampler: give the function, get an AssertionError that says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyspec._checks import host_integer
from cupyspec.testing._budget import ErrorBudget
from cupyspec.testing._contingency import independence, two_sample
from cupyspec.testing._counts import Counts, as_probabilities
from cupyspec.testing._goodness import chi_square, g_test
from cupyspec.testing._host import integers
from cupyspec.testing._result import CannotDecide, CheckResult

_TESTS = {"chi-square": chi_square, "G": g_test}

Draw = Callable[[int, int], Any]


def assert_samples_from(
    draw: Draw,
    probs: npt.ArrayLike,
    *,
    draws: int = 100_000,
    batch: int | None = None,
    seed: int = 0,
    budget: ErrorBudget = ErrorBudget(),
    detects: float | None = 0.05,
    test: str = "chi-square",
) -> CheckResult:
    """Check that a sampler draws from given probabilities.

    Parameters
    ----------
    draw : callable
        ``draw(n, seed)`` answers n token ids [n], as an integer array of any library. Other seeds must give other draws.
    probs : array_like [V]
        What it should draw from.
    draws : int, default 100,000
        Sample size.
    batch : int, optional
        Call `draw` for so many at a time, where all at once would not fit in memory. Default: all.
    seed : int
        The calls get this seed and those that follow it.
    budget : ErrorBudget
        Significance, and how a rejection is confirmed.
    detects : float, optional
        Total variation that must be found with 99 %: CannotDecide where the draws are too few. None: whatever it is.
    test : {"chi-square", "G"}

    Returns
    -------
    CheckResult
        Of the last sample. Printed, it says what the check could see.

    Raises
    ------
    AssertionError
        The draws do not follow `probs`; it says by how much.
    CannotDecide
        Too few draws for `detects`, or for any test.
    TypeError, ValueError
        Wrong arguments; an answer that is no integer array [n]; the same draws at every seed.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyspec.testing import assert_samples_from
    >>> p = np.array([0.5, 0.25, 0.125, 0.125])
    >>> print(assert_samples_from(lambda n, seed: np.random.default_rng(seed).choice(4, n, p=p), p))
    chi-square ... on 4 cells, 100000 draws: p = ..., TV seen ...; TV found with 99 %: 0.013
    """
    law = as_probabilities("probs", probs).ravel()
    if test not in _TESTS:
        raise ValueError(f"test must be one of {sorted(_TESTS)}, got {test!r}")
    _need_positive("draws", draws)
    source = _Source(draw, law.size, batch, seed, float((law**2).sum()))
    last: list[Counts] = []

    def check(size: int, stage: int) -> CheckResult:
        last[:] = [source.counts(size)]
        return _TESTS[test](last[0], law, alpha=budget.alpha, power=budget.power)

    result, failed = budget.judge(check, draws)
    if failed:
        raise AssertionError(f"draws do not follow the probabilities: {result}{_worst(last[0], law)}")
    _need_power(result, detects)
    return result


def assert_same_law(
    draw: Draw,
    other: Draw,
    *,
    vocab_size: int,
    draws: int = 100_000,
    batch: int | None = None,
    seed: int = 0,
    budget: ErrorBudget = ErrorBudget(),
    detects: float | None = 0.05,
) -> CheckResult:
    """Check that two samplers draw from one law, for those who do not know the exact probabilities.

    Parameters
    ----------
    draw, other : callable
        As in `assert_samples_from`; they get different seeds.
    vocab_size : int
        Ids are in [0, vocab_size).
    draws : int, default 100,000
        Draws of each.
    batch, seed, budget, detects
        As in `assert_samples_from`; `detects` is between the two laws.

    Returns
    -------
    CheckResult

    Raises
    ------
    AssertionError, CannotDecide, TypeError, ValueError
        As `assert_samples_from`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyspec.testing import assert_same_law
    >>> dice = lambda n, seed: np.random.default_rng(seed).integers(0, 6, n)
    >>> assert_same_law(dice, lambda n, seed: 5 - dice(n, seed), vocab_size=6).rejected
    False
    """
    vocab_size = _need_positive("vocab_size", vocab_size)
    _need_positive("draws", draws)
    first = _Source(draw, vocab_size, batch, seed, None)
    second = _Source(other, vocab_size, batch, seed + (1 << 20), None)

    def check(size: int, stage: int) -> CheckResult:
        return two_sample(first.counts(size), second.counts(size), alpha=budget.alpha, power=budget.power)

    result, failed = budget.judge(check, draws)
    if failed:
        raise AssertionError(f"the two samplers draw from different laws: {result}")
    _need_power(result, detects)
    return result


def assert_independent(
    draw: Draw,
    *,
    sizes: tuple[int, int],
    draws: int = 100_000,
    seed: int = 0,
    budget: ErrorBudget = ErrorBudget(),
    detects: float | None = 0.05,
) -> CheckResult:
    """Check that two things drawn together are independent: neighbouring rows, positions, steps, a coin and a token.

    Parameters
    ----------
    draw : callable
        ``draw(n, seed)`` answers two integer arrays [n].
    sizes : (int, int)
        The first is in [0, sizes[0]), the second in [0, sizes[1]).
    draws, seed, budget, detects
        As in `assert_samples_from`; `detects` is between the joint law and that of independent draws.

    Returns
    -------
    CheckResult

    Raises
    ------
    AssertionError, CannotDecide, TypeError, ValueError
        As `assert_samples_from`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyspec import sample
    >>> from cupyspec.testing import assert_independent
    >>> def neighbours(n, seed):  # rows 0 and 1, 2 and 3, ... of one call
    ...     return sample(np.zeros((2 * n, 4), np.float32), seed=seed).tokens.reshape(n, 2).T
    >>> assert_independent(neighbours, sizes=(4, 4)).rejected
    False
    """
    rows, columns = (_need_positive("sizes", size) for size in sizes)
    _need_positive("draws", draws)

    def check(size: int, stage: int) -> CheckResult:
        answer = draw(size, seed + stage)
        try:
            first, second = answer
        except (TypeError, ValueError):
            raise TypeError(f"draw must answer two arrays, got {type(answer).__name__}") from None
        pair = (_ids("draw()[0]", first, size, rows), _ids("draw()[1]", second, size, columns))
        table = np.bincount(pair[0] * columns + pair[1], minlength=rows * columns).reshape(rows, columns)
        return independence(table, alpha=budget.alpha, power=budget.power)

    result, failed = budget.judge(check, draws)
    if failed:
        raise AssertionError(f"the two are not independent: {result}")
    _need_power(result, detects)
    return result


class _Source:
    """Calls a sampler, each time with a new seed, and counts."""

    def __init__(self, draw: Draw, size: int, batch: int | None, seed: int, collision: float | None) -> None:
        self.draw, self.size, self.seed, self.collision = draw, size, seed, collision
        self.batch = batch if batch is None else _need_positive("batch", batch)
        self.before: npt.NDArray[np.int64] | None = None

    def counts(self, draws: int) -> Counts:
        """Draws of each id."""
        counts = np.zeros(self.size, np.int64)
        while draws:
            now = draws if self.batch is None else min(self.batch, draws)
            ids = _ids("draw", self.draw(now, self.seed), now, self.size)
            self._need_fresh(ids)
            counts += np.bincount(ids, minlength=self.size)
            draws -= now
            self.seed += 1
        return counts

    def _need_fresh(self, ids: npt.NDArray[np.int64]) -> None:
        """A sampler that ignores its seed would confirm its own luck."""
        if self.before is not None and self.collision is not None:
            common = min(ids.size, self.before.size)
            repeats = bool((ids[:common] == self.before[:common]).all()) and ids.min() < ids.max()
            if repeats and self.collision**common < 1e-12:
                raise ValueError(f"draw must use its seed: {self.seed - 1} and {self.seed} gave the same {common} ids")
        self.before = ids


def _ids(name: str, answer: Any, draws: int, size: int) -> npt.NDArray[np.int64]:
    ids = integers(name, answer, (draws,))
    if ids.size and not (0 <= ids.min() and ids.max() < size):
        wrong = ids[(ids < 0) | (ids >= size)]
        raise AssertionError(f"{name} gave {wrong.size} of {draws} ids outside [0, {size}), the first is {wrong[0]}")
    return ids


def _worst(counts: Counts, law: npt.NDArray[np.float64]) -> str:
    """The cell that contributes most."""
    draws = counts.sum()
    impossible = np.flatnonzero(counts * (law == 0))
    if impossible.size:
        return f"; id {impossible[0]} has probability 0 and came {counts[impossible[0]]} times"
    with np.errstate(divide="ignore", invalid="ignore"):
        cell = int(np.nanargmax(np.where(law > 0, (counts - draws * law) ** 2 / law, -1)))
    return f"; farthest off: id {cell} came {counts[cell]} times of {draws}, {draws * law[cell]:.1f} expected"


def _need_positive(name: str, value: Any) -> int:
    return host_integer(name, value, 1, 2**62)


def _need_power(result: CheckResult, detects: float | None) -> None:
    if detects is not None and result.detectable > detects:
        times = (result.detectable / detects) ** 2
        more = f"about {times * result.draws:.2g} draws" if np.isfinite(times) else "many more draws"
        raise CannotDecide(
            f"nothing was found, but {result.draws} draws find a total variation of {result.detectable:.2g} and not of "
            f"{detects:g} with 99 %: give {more}, or detects=None"
        )
