"""Philox4x32-10, the counter layout, and the numbers made from its words."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyspec
from cupyspec import row_seeds
from cupyspec._philox import Purpose, coin, draw_words, philox4x32, split_seed, unit_exponential
from cupyspec.testing import draws, seed_with

WORDS = st.integers(0, 2**32 - 1)
SEEDS = st.integers(0, 2**64 - 1)
EXTREME_SEEDS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63))


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Ten rounds on Python integers, as in the paper."""
    x, y, z, w = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * x, 0xCD9E8D57 * z
        x, y, z, w = (b >> 32) ^ y ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ w ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [x, y, z, w]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_vectors(counter: Any, key: Any, words: Any) -> None:
    """Catches a wrong constant, a missing round, swapped lanes: vectors are Random123's own."""
    assert tuple(int(v) for v in philox4x32(counter, key)) == words
    assert tuple(philox(counter, key)) == words


@given(st.lists(st.tuples(WORDS, WORDS, WORDS, WORDS), min_size=1, max_size=5), WORDS, WORDS)
def test_arrays_equal_scalars(counters: list[tuple[int, ...]], k0: int, k1: int) -> None:
    """Catches a product that overflows 64 bits or a key schedule that forgets to wrap, on broadcast arrays."""
    x, y, z, w = (np.array(c, np.uint64)[:, None] for c in zip(*counters, strict=True))
    got = philox4x32((x, y, z, w), (np.array([k0, k1]), np.array([k1, k0])))
    for row, counter in enumerate(counters):
        assert [int(v[row, 0]) for v in got] == philox(counter, (k0, k1))
        assert [int(v[row, 1]) for v in got] == philox(counter, (k1, k0))


@given(
    SEEDS,
    st.integers(0, 2**56 - 1),
    st.sampled_from(Purpose),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**16 - 1),
    WORDS,
)
def test_counter_layout(seed: int, step: int, purpose: Purpose, position: int, draw: int, segment: int) -> None:
    """Catches a field in the wrong word or one that runs into its neighbour: tokens would change with the version."""
    counter = (segment, position | draw << 16, step & 0xFFFFFFFF, step >> 32 | purpose << 24)
    expected = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    got = draw_words(seed, step, purpose, position=position, draw=draw, segment=segment, words=4)
    assert [int(v) for v in got] == expected


@given(st.lists(SEEDS, min_size=1, max_size=4), st.integers(0, 2**56 - 1), st.integers(0, 2**16 - 1), st.integers(0, 9))
def test_few_and_many_counters_agree(seeds: list[int], step: int, position: int, segments: int) -> None:
    """Catches a carry between the lanes of a Python integer: a token would depend on how many are drawn together."""
    seed = np.array(seeds, np.uint64)[:, None]
    where = {"position": position, "draw": [[position]], "segment": 2**32 - 1 - np.arange(segments), "words": 4}
    few = draw_words(seed, step, Purpose.SPLIT, **where)
    with mock.patch("cupyspec._philox._FEW", -1):
        many = draw_words(seed, step, Purpose.SPLIT, **where)
    np.testing.assert_array_equal(few, many)
    assert [(v.shape, v.dtype) for v in few] == [(v.shape, v.dtype) for v in many]
    assert few[0].shape == (len(seeds), segments)


def test_purposes_are_distinct_bytes() -> None:
    """Catches two purposes that share their numbers, and one whose value changes (golden tokens would all change)."""
    assert {p.name: int(p) for p in Purpose} == {
        "DRAFT": 1,
        "TARGET": 2,
        "ACCEPT": 3,
        "RESIDUAL": 4,
        "BONUS": 5,
        "TREE": 6,
        "SPLIT": 255,
    }


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (0, 0.0),
        (1, 2.0**-32),
        (2**24 - 1, (2**24 - 1) * 2.0**-32),
        (2**24 + 1, 2.0**-8),  # bit 25 is cut
        (2**31, 0.5),
        (2**31 + 255, 0.5),
        (2**31 + 256, 0.5 + 2.0**-24),
        (2**32 - 256, 1 - 2.0**-24),
        (2**32 - 1, 1 - 2.0**-24),
    ],
)
def test_coin_values(word: int, value: float) -> None:
    """Catches rounding instead of truncation: the largest words would give a coin of 1."""
    got = coin(np.array(word, np.uint32))
    assert got.dtype == np.float32
    assert float(got) == value


@given(WORDS)
def test_coin_is_the_word_truncated_to_24_bits(word: int) -> None:
    """Catches a coin on a fixed grid of 2^-24, which would make small coins 0 too often."""
    kept = max(word.bit_length() - 24, 0)
    assert float(coin(np.array([word], np.uint32))[0]) == math.ldexp(word >> kept << kept, -32)


@pytest.mark.parametrize("word", [0, 1, 2, 2**24, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1])
def test_unit_exponential_is_positive_and_finite(word: int) -> None:
    """Catches log(0) at either end, cancellation near 0, and a seam at 2^31."""
    value = float(unit_exponential(np.array(word, np.uint32)))
    half_open = (word + 0.5) * 2.0**-32
    assert 0 < value < math.inf
    # 1 - half_open is exact in float64 (33 bits), but its logarithm has few digits where it is near 1.
    exact = -math.log1p(-half_open) if word < 2**31 else -math.log(1 - half_open)
    assert value == pytest.approx(exact, rel=1e-14)
    assert word or value == pytest.approx(2.0**-33, rel=1e-9)


def test_unit_exponential_ascends() -> None:
    """Catches two branches that do not meet: the race would favour segments on one side of 2^31."""
    words = np.concatenate([np.arange(k - 3, k + 3) for k in (3, 2**20, 2**31, 2**32 - 3)]).astype(np.uint32)
    assert (np.diff(unit_exponential(words)) > 0).all()


def test_row_seeds_are_words_of_the_split_purpose() -> None:
    """Catches another order of words or rows, and B = 1 left unsplit."""
    key = 0x0123456789ABCDEF
    expected = []
    for b in range(5):
        low, high, *_ = philox((b, 0, 0, 255 << 24), (key & 0xFFFFFFFF, key >> 32))
        expected.append(low | high << 32)
    assert row_seeds(key, 5).tolist() == expected
    assert row_seeds(key, 1).tolist() == expected[:1] != [key]
    assert row_seeds(-1, 3).tolist() == row_seeds(2**64 - 1, 3).tolist()
    assert row_seeds(7, 0).shape == (0,)


def coins(seed: Any, batch_size: int, step: Any = 0) -> list[list[float]]:
    """Acceptance coins of three positions: equal coins mean equal seeds."""
    return draws(seed, step, batch_size=batch_size, num_draft_tokens=3, vocab_size=1).coins.tolist()


def coins_of(seeds: list[int]) -> list[list[float]]:
    """The same from 64-bit row seeds, by the definition."""
    words = [[philox((0, i, 0, 3 << 24), (s & 0xFFFFFFFF, s >> 32))[0] for i in range(3)] for s in seeds]
    return coin(np.array(words, np.uint32).reshape(-1, 3)).tolist()


@pytest.mark.parametrize("seed", EXTREME_SEEDS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_scalar_seed_is_split(seed: int, batch_size: int) -> None:
    """Catches a scalar used as every row's seed, one used as is at B = 1, and a negative one that loses its high half."""
    assert coins(seed, batch_size) == coins_of(split_seed(seed % 2**64, batch_size).tolist())


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64])
def test_seed_dtypes(kind: Any) -> None:
    """Catches int32 seeds that are zero-extended and uint32 seeds that are sign-extended, per row and 0-d."""
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    values = [low, low + 1, 0, 1, high - 1, high]
    array = np.array(values, kind)
    assert coins(array, 6) == coins_of([v % 2**64 for v in values])
    assert coins(np.repeat(array, 2)[::2], 6) == coins(array, 6)
    for v in (low, high):
        assert coins(np.array(v, kind), 2) == coins(kind(v), 2) == coins(int(v), 2)


def test_seed_pairs_are_high_then_low() -> None:
    """Catches JAX key data read as (low, high)."""
    pairs = np.array([[0, 5], [1, 5], [0xFFFFFFFF, 0xFFFFFFFE]], np.uint32)
    assert coins(pairs, 3) == coins_of([5, (1 << 32) + 5, 2**64 - 2])
    assert coins(np.asfortranarray(pairs), 3) == coins(pairs, 3)


@pytest.mark.parametrize("container", [list, tuple])
def test_seed_lists(container: Any) -> None:
    """Catches a list that NumPy turns into floats: huge and negative seeds together have no integer dtype."""
    values = [2**64 - 1, -1, -(2**63), 2**63, 0, np.int32(-7), np.uint64(2**64 - 3)]
    assert coins(container(values), 7) == coins_of([int(v) % 2**64 for v in values])


@pytest.mark.parametrize(
    ("seed", "error"),
    [
        (None, TypeError),
        (1.0, TypeError),
        (True, TypeError),
        ([1, None], TypeError),
        ([1, 2.0], TypeError),
        (np.array([1.0, 2.0]), TypeError),
        (2**64, ValueError),
        (-(2**63) - 1, ValueError),
        ([0, 2**64], ValueError),
        ([1, 2, 3], ValueError),
        (np.zeros((2, 2), np.int64), ValueError),
        (np.zeros((3, 2), np.uint32), ValueError),
    ],
)
def test_wrong_seeds_are_refused(seed: Any, error: type[Exception]) -> None:
    """Catches a seed that is rounded, wrapped or broadcast without a word."""
    with pytest.raises(error, match="seed"):
        coins(seed, 2)
    with pytest.raises(error, match="seed"):
        cupyspec.sample(np.zeros((2, 3), np.float32), seed=seed)


@pytest.mark.parametrize("bit", range(56))
def test_every_step_bit_counts(bit: int) -> None:
    """Catches a step cut to 32 bits: numbers would repeat."""
    assert coins([1, 2], 2, step=1 << bit) != coins([1, 2], 2)
    expected = philox((0, 0, (1 << bit) & 0xFFFFFFFF, (1 << bit) >> 32 | 3 << 24), (1, 0))[0]
    assert coins([1], 1, step=np.array([1 << bit], np.uint64))[0][0] == float(coin(np.array(expected, np.uint32)))


@pytest.mark.parametrize("step", [-1, 2**56, [0, 2**56], np.array([-1, 0]), np.array([0, 2**63], np.uint64)])
def test_wrong_steps_are_refused(step: Any) -> None:
    """Catches a step that runs into the purpose byte."""
    with pytest.raises(ValueError, match="step"):
        coins([1, 2], 2, step=step)


def test_step_forms_agree() -> None:
    """Catches a per-row step read at row 0 only."""
    assert coins([5, 5], 2, step=3) == coins([5, 5], 2, step=[3]) == coins([5, 5], 2, step=np.uint8([3, 3]))
    mixed = coins([5, 5], 2, step=np.int16([3, 4]))
    assert mixed == [coins([5], 1, step=3)[0], coins([5], 1, step=4)[0]]
    assert mixed[0] != mixed[1]


@pytest.mark.parametrize("seed", [3, 2**40, 2**63 + 5])
@pytest.mark.parametrize("bit", [32, 45, 63])
def test_seeds_that_differ_above_bit_32_differ(seed: int, bit: int) -> None:
    """Catches a key word that is dropped."""
    assert coins([seed], 1) != coins([seed ^ 1 << bit], 1)


@pytest.mark.parametrize("position", [0, 1, 7])
@pytest.mark.parametrize("coin_range", [(0.25, 0.2501), (0.0, 1e-5), (1 - 2.0**-16, 1 - 2.0**-24)])
def test_seed_with_finds_a_coin(coin_range: tuple[float, float], position: int) -> None:
    """Catches a search at another counter than `verify` uses."""
    low, high = coin_range
    seed = seed_with(coin_range, position, step=9, start=100)
    assert seed >= 100
    assert low <= float(draws([seed], 9, batch_size=1, num_draft_tokens=8, vocab_size=1).coins[0, position]) <= high


@pytest.mark.parametrize("position", range(8))
def test_seed_with_knows_coins_of_exactly_zero(position: int) -> None:
    """Catches a table of seeds that another counter layout has made wrong."""
    seed = seed_with((0.0, 0.0), position)
    assert float(draws([seed], batch_size=1, num_draft_tokens=8, vocab_size=1).coins[0, position]) == 0.0


@pytest.mark.parametrize("coin_range", [(0.5, 0.4), (-0.1, 0.5), (1.0, 1.0), (math.nan, 0.5)])
def test_seed_with_refuses_ranges_without_coins(coin_range: tuple[float, float]) -> None:
    """Catches an endless search."""
    with pytest.raises(ValueError, match="coin_range"):
        seed_with(coin_range)


def test_draws_have_their_own_counters() -> None:
    """Catches exponentials and picks from another purpose, position or segment than documented."""
    numbers = draws([11], 2**33, batch_size=1, num_draft_tokens=2, vocab_size=20, segment=8)
    assert numbers.coins.shape == (1, 2)
    assert numbers.exponentials.shape == numbers.picks.shape == (2, 1, 3, 3)
    for index, purpose in enumerate((Purpose.RESIDUAL, Purpose.BONUS)):
        for position in range(3):
            for segment in range(3):
                words = philox((segment, position, 0, 2 | purpose << 24), (11, 0))
                race, pick = np.array(words[:2], np.uint32)
                assert numbers.exponentials[index, 0, position, segment] == unit_exponential(race)
                assert numbers.picks[index, 0, position, segment] == coin(pick)


def test_no_two_numbers_of_a_run_are_equal() -> None:
    """Catches two uses that share a counter: 7,168 numbers of 64 bits all differ."""
    fields = np.meshgrid(np.arange(4), np.arange(4), np.arange(4), np.arange(4), np.arange(4))
    seeds, steps, positions, draw, segments = (f.ravel() for f in fields)
    pairs = [draw_words(seeds, steps, purpose, position=positions, draw=draw, segment=segments) for purpose in Purpose]
    numbers = np.array(pairs, np.uint64)  # [purposes, 2, counters]
    assert np.unique(numbers[:, 0] | numbers[:, 1] << np.uint64(32)).size == len(Purpose) * seeds.size
