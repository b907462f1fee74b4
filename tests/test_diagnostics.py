from fractions import Fraction

import numpy as np
import pytest

from cupyspec.diagnostics import expected_tokens


def test_published_value():
    # Catches a K taken for K + 1.
    assert expected_tokens(2 / 3, 2) == pytest.approx(19 / 9, rel=1e-15)


@pytest.mark.parametrize("K", [0, 1, 5, 255])
def test_ends_are_exact(K):
    # Catches 0 / 0 at a = 1, and log(0) at a = 0.
    assert expected_tokens(1.0, K) == K + 1
    assert expected_tokens(0.0, K) == 1.0


@pytest.mark.parametrize("rate", [1 - 2.0**-53, 1 - 2.0**-40, 1 - 1e-9, 0.999, 0.5, 1e-9, 5e-324])
@pytest.mark.parametrize("K", [0, 1, 5, 255])
def test_keeps_its_digits_next_to_one(rate, K):
    # Catches (1 - a**(K + 1)) / (1 - a) as written, which is wrong by 10 % and more at 1 - 2^-53.
    exact = sum(Fraction(rate) ** i for i in range(K + 1))
    assert expected_tokens(rate, K) == pytest.approx(float(exact), rel=4e-15)


def test_arrays_broadcast():
    # Catches an answer of the wrong shape, and scalars handed back as 0-d arrays.
    tokens = expected_tokens(np.array([[0.0], [0.5], [1.0]]), [0, 1, 2])
    np.testing.assert_array_equal(tokens, [[1, 1, 1], [1, 1.5, 1.75], [1, 2, 3]])
    assert tokens.dtype == np.float64
    assert expected_tokens(np.empty(0), 3).shape == (0,)
    assert type(expected_tokens(np.float32(0.5), np.int64(1))) is float


@pytest.mark.parametrize(
    ("rate", "K", "error", "message"),
    [
        (1.5, 1, ValueError, r"rate must be in \[0, 1\]"),
        (-0.1, 1, ValueError, r"rate must be in \[0, 1\]"),
        ([0.5, float("nan")], 1, ValueError, r"rate must be in \[0, 1\]"),
        (0.5, -1, ValueError, "K must be at least 0"),
        (0.5, 1.0, TypeError, "K must be integers"),
        (0.5, True, TypeError, "K must be integers"),
        ("0.5", 1, TypeError, "rate must be real numbers"),
        (0.5 + 0j, 1, TypeError, "rate must be real numbers"),
        ([[0.5], [0.5, 1.0]], 1, ValueError, "rate must be a number or an array"),
        (0.5, [[1], [1, 2]], ValueError, "K must be a number or an array"),
        ([0.5, 0.5], [1, 2, 3], ValueError, "rate and K must broadcast"),
    ],
)
def test_wrong_arguments_are_named(rate, K, error, message):
    with pytest.raises(error, match=message):
        expected_tokens(rate, K)
