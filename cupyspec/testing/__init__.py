"""Statistical tests for samplers and verifiers of any framework, exact laws of rules, and the random numbers of a call.

`cupyspec.testing.strategies` holds Hypothesis strategies and needs Hypothesis; nothing else here does.
"""

from cupyspec._draws import Draws
from cupyspec.testing._answers import answer_cells, law_of_cells
from cupyspec.testing._budget import ErrorBudget
from cupyspec.testing._contingency import independence, two_sample
from cupyspec.testing._exact import exact_multinomial
from cupyspec.testing._goodness import chi_square, g_test
from cupyspec.testing._laws import (
    continued_law,
    expected_accepted,
    output_law,
    single_draft_law,
    target_law,
    total_variation,
)
from cupyspec.testing._power import detectable_distance, draws_needed
from cupyspec.testing._result import CannotDecide, CheckResult
from cupyspec.testing._samplers import assert_independent, assert_same_law, assert_samples_from
from cupyspec.testing._unbiased import assert_unbiased
from cupyspec.testing.randomness import draws, seed_with

__all__ = [
    # Checks of any sampler or verifier
    "assert_samples_from",
    "assert_unbiased",
    "assert_same_law",
    "assert_independent",
    # Their tests, on counts
    "chi_square",
    "g_test",
    "exact_multinomial",
    "independence",
    "two_sample",
    "CheckResult",
    "CannotDecide",
    # False alarms and power
    "ErrorBudget",
    "detectable_distance",
    "draws_needed",
    # Exact laws
    "output_law",
    "single_draft_law",
    "continued_law",
    "target_law",
    "total_variation",
    "expected_accepted",
    "answer_cells",
    "law_of_cells",
    # Random numbers of a call
    "Draws",
    "draws",
    "seed_with",
]
