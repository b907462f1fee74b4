"""Faults that users of other projects reported, by the numbers of the list they were collected in; each with neighbours.

Filters (F3, F4, F8a), trees (F9) and what only a device can get wrong (F22 to F25, F27) are not of this version or not of
the CPU. Layouts and libraries (F19 to F21) have files of their own.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

import cupyspec
from cupyspec import Sampling, Sigmoid, Status, Token
from cupyspec._segments import SEG
from cupyspec.cpu.rows import Side
from cupyspec.testing import assert_samples_from, draws, seed_with
from strategies import SCORE_TYPES

RULES = {"token": Token(), "lenient": Token(lenience=0.5), "sigmoid": Sigmoid()}
DTYPES = sorted(SCORE_TYPES)
LARGEST_COIN = (1 - 2.0**-24, 1 - 2.0**-24)
SEED_OF_LARGEST_COIN = 62_244_883  # at position 0, step 0; found by seed_with(LARGEST_COIN)


def logs(p: Any) -> np.ndarray:
    """Logits of probabilities, -inf for 0."""
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, np.float64)).astype(np.float32)


def verify_rows(p: Any, q: Any, x: Any, seed: Any, *, scores: str = "probs", **options: Any) -> cupyspec.Verification:
    """Every seed a row: the same target rows [K + 1, V], draft rows [K, V] and drafts [K] in each."""
    seed = np.asarray(seed)
    size = (len(seed),)

    def rows(values: Any) -> np.ndarray:
        values = np.asarray(values, np.float32) if not isinstance(values, np.ndarray) else values
        return np.broadcast_to(values, size + values.shape)

    drafts = np.broadcast_to(np.asarray(x, np.int64), size + np.shape(x))
    return cupyspec.verify(drafts, rows(p), None if q is None else rows(q), seed=seed, scores=scores, **options)


SEEDS = np.arange(20_000)


def test_f01_residual_zero_everywhere() -> None:
    """A division by the residual's sum: rejected where p < q by rounding alone, the next token must come from p."""
    q, p = [[0.5, 0.5, 0, 0]], [[0.5 - 2.0**-12, 0.5, 0, 0], [0, 0, 0, 1]]
    near_one = seed_with((1 - 2.0**-13, 1.0))
    got = verify_rows(p, q, [0], [near_one])
    assert got.num_accepted[0] == 0
    assert got.tokens[0, 0] in (0, 1)
    # Many rejected rows: coins above 1 - 2^-11, about one seed in 2,000.
    got = verify_rows(p, q, [0], np.arange(200_000))
    rejected = got.tokens[got.num_accepted == 0, 0]
    assert rejected.size > 30
    assert set(rejected.tolist()) == {0, 1}
    assert not got.status.any()
    got = verify_rows([q[0], p[1]], q, [0], SEEDS)
    assert (got.num_accepted == 1).all()
    assert (got.tokens == [0, 3]).all()


def test_f01_residual_zero_in_every_segment() -> None:
    """The weights fall back to p and their segment sums do not: only the first segment would be drawn from."""
    V = 3 * SEG
    q, p = np.full((1, V), 2.0**-12, np.float32), np.full((2, V), 2.0**-14, np.float32)
    got = verify_rows(p, q, [0], np.arange(200))
    segments = got.tokens[got.num_accepted == 0, 0] // SEG
    assert set(segments.tolist()) == {0, 1, 2}


def test_f01_residual_zero_beside_a_one_hot_draft() -> None:
    """The rejected id is removed from p itself, not from a copy: nothing is left to fall back to."""
    got = verify_rows([[0, 0.5, 0], [0, 0.5, 0]], None, [1], np.arange(200))
    assert (got.tokens[:, 0] == 1).all()
    assert 50 < got.num_accepted.sum() < 150


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_f01_equal_rows_accept_everything(kind: str, rule: str) -> None:
    """p = q must accept at every coin, the largest one too."""
    z = np.random.default_rng(0).normal(0, 3, (4, 33)).astype(SCORE_TYPES[kind])
    seeds = [SEED_OF_LARGEST_COIN, *range(2000)]
    got = verify_rows(z, z[:3], [5, 6, 7], seeds, scores="logits", rule=RULES[rule])
    assert (got.num_accepted == 3).all()


@pytest.mark.parametrize("kind", DTYPES)
def test_f02_zero_and_tiny_temperatures_in_one_batch(kind: str) -> None:
    """inf - inf after a division by a tiny temperature, and greedy rows that change with their neighbours."""
    rows = np.tile(np.array([2.875, 2.955, 11.0625, -2.447]), (5, 1)).astype(SCORE_TYPES[kind])
    temperature = np.array([0, 1e-5, 1e-40, 1, 1e-30])
    for seed in range(200):
        got = cupyspec.sample(rows, seed=seed, sampling=Sampling(temperature))
        assert got.tokens[[0, 1, 2, 4]].tolist() == [2] * 4
        assert not got.status.any()
    greedy = cupyspec.verify(
        np.full((5, 1), 2), np.stack([rows, rows], axis=1), rows[:, None], seed=0, sampling=Sampling(temperature)
    )
    assert greedy.tokens[[0, 1, 2, 4]].tolist() == [[2, 2]] * 4


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("others", [0, 1, 9])
def test_f02_ties_go_to_the_lowest_id(kind: str, others: int) -> None:
    """Greedy emulated by a near-zero temperature leaves all tied maxima alive."""
    rows = np.tile(np.array([1, 1, 0]), (1 + others, 1)).astype(SCORE_TYPES[kind])
    temperature = np.ones(1 + others)
    temperature[0] = 0
    for seed in range(50):
        assert cupyspec.sample(rows, seed=seed, sampling=Sampling(temperature)).tokens[0] == 0


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf, -0.5])
def test_f02_wrong_temperatures_are_refused(bad: float) -> None:
    """A negative temperature turns the distribution upside down without a word."""
    rows = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match="temperature"):
        cupyspec.sample(rows, seed=0, sampling=Sampling(bad))
    with pytest.raises(ValueError, match="temperature"):
        cupyspec.sample(rows, seed=0, sampling=Sampling(np.array([1.0, bad])))


def test_f05_sums_in_bfloat16() -> None:
    """A running sum in bfloat16 stops at 2^-9 after 256 terms: the upper half would never come out."""
    row = np.full(131072, 2.0**-17).astype(ml_dtypes.bfloat16)
    tokens = cupyspec.sample(np.broadcast_to(row, (1500, row.size)), seed=0, scores="probs").tokens
    assert np.mean(tokens < 65536) == pytest.approx(0.5, abs=4 * 0.5 / 1500**0.5)
    assert tokens.max() > 131072 * 0.99


@pytest.mark.parametrize("scale", [1.0, 0.98, 1.02, 1e-3])
@pytest.mark.parametrize("kind", DTYPES)
def test_f05_rows_that_do_not_sum_to_one(scale: float, kind: str) -> None:
    """Draws by sample() and of the bonus token do not depend on a row's sum."""
    p = (np.array([0.4, 0.3, 0.2, 0.1, 0.0]) * scale).astype(SCORE_TYPES[kind])
    law = p.astype(np.float64) / p.astype(np.float64).sum()

    def draw(count: int, fresh: int) -> np.ndarray:
        return cupyspec.sample(np.broadcast_to(p, (count, 5)), seed=fresh, scores="probs").tokens

    def bonus(count: int, fresh: int) -> np.ndarray:
        rows = np.broadcast_to(p, (count, 1, 5))
        return cupyspec.verify(np.empty((count, 0), np.int32), rows, seed=fresh, scores="probs").tokens[:, 0]

    assert_samples_from(draw, law, draws=30_000)
    assert_samples_from(bonus, law, draws=30_000)


def test_f05_float32_row_with_a_float64_sum_above_one() -> None:
    """numpy.random.multinomial refuses such a row."""
    p = np.array([0.99, 0.99, *[1e-9] * 8], np.float32)
    p /= p.sum()
    got = cupyspec.sample(np.broadcast_to(p, (1000, 10)), seed=0, scores="probs", check=True)
    assert set(got.tokens.tolist()) == {0, 1}


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.0, 0.3])
def test_f06_masked_rows(kind: str, temperature: float) -> None:
    """softmax of an all -inf row is 0/0; other rows must not notice."""
    V = 100352
    rows = np.full((3, V), -np.inf).astype(SCORE_TYPES[kind])
    rows[1, 99999] = -25
    rows[2] = np.random.default_rng(0).normal(0, 2, V)
    sampling, seed = Sampling(temperature), np.array([4, 5, 6])
    got = cupyspec.sample(rows, seed=seed, sampling=sampling)
    alone = cupyspec.sample(rows[2:], seed=seed[2:], sampling=sampling)
    assert got.tokens.tolist() == [-1, 99999, alone.tokens[0]]
    assert got.status.tolist() == [Status.TARGET_EMPTY, 0, 0]
    with pytest.raises(ValueError, match="row 0"):
        cupyspec.sample(rows, seed=seed, sampling=sampling, check=True)
    chain = np.stack([rows, rows], axis=1)
    verified = cupyspec.verify(np.full((3, 1), 99999), chain, seed=seed, sampling=sampling)
    assert verified.tokens[:2].tolist() == [[-1, -1], [99999, 99999]]
    assert verified.status.tolist() == [Status.TARGET_EMPTY, 0, 0]


@pytest.mark.parametrize("scores", ["probs", "logits"])
def test_f07_residual_takes_away_all_of_the_draft(scores: str) -> None:
    """Taking away only the rejected token yields 2 in 3 of 8 draws where 0 alone is right."""
    form = np.array if scores == "probs" else logs
    p, q = form([[0.5, 0.2, 0.3], [1, 0, 0]]), form([[0.1, 0.6, 0.3]])
    got = verify_rows(p.astype(np.float32), q.astype(np.float32), [1], SEEDS, scores=scores)
    rejected = got.num_accepted == 0
    assert rejected.mean() == pytest.approx(2 / 3, abs=0.014)
    first = got.tokens[rejected, 0]
    # log and exp of .3 may differ by a rounding: then 2 has some 1e-8 of the residual.
    assert set(first.tolist()) == {0}
    one_hot = verify_rows(p.astype(np.float32), None, [1], SEEDS, scores=scores)
    first = one_hot.tokens[one_hot.num_accepted == 0, 0]
    assert set(first.tolist()) == {0, 2}
    assert np.mean(first == 0) == pytest.approx(5 / 8, abs=4 * 0.5 / first.size**0.5)


@pytest.mark.parametrize("form", ["scalar", "per row"])
def test_f08_temperature_acts_on_the_ratio(form: str) -> None:
    """Acceptance at temperature 1 whatever was asked for: .8300 where .8969 is right."""
    temperature = 0.5 if form == "scalar" else np.full(SEEDS.size, 0.5)
    target, draft = np.array([[1, 0], [0, 0]], np.float32), np.array([[2, 0]], np.float32)
    sampling = Sampling(temperature)
    got = verify_rows(target, draft, [0], SEEDS, scores="logits", sampling=sampling)
    assert got.num_accepted.mean() == pytest.approx(0.8969, abs=0.0087)
    x = cupyspec.sample(np.broadcast_to(draft[0], (SEEDS.size, 2)), seed=SEEDS, sampling=sampling).tokens
    got = cupyspec.verify(
        x[:, None],
        np.broadcast_to(target, (SEEDS.size, 2, 2)),
        np.broadcast_to(draft, (SEEDS.size, 1, 2)),
        seed=SEEDS,
        sampling=sampling,
    )
    assert got.num_accepted.mean() == pytest.approx(0.8988, abs=0.0086)
    assert np.mean(got.tokens[:, 0] == 0) == pytest.approx(softmax([2, 0])[0], abs=0.0093)


def test_f08_each_row_has_its_temperature_at_every_position() -> None:
    """A temperature read at row 0, or applied to the bonus token alone: cold rows among hot ones."""
    target = np.tile(np.array([3.0, 2.0, 0.0], np.float32), (1000, 4, 1))
    cold = np.arange(1000) % 2 == 0
    temperature = np.where(cold, 0.01, 1e4)
    got = cupyspec.verify(np.zeros((1000, 3), np.int32), target, seed=0, sampling=Sampling(temperature))
    assert (got.tokens[cold] == 0).all()
    assert got.num_accepted[~cold].mean() == pytest.approx(1 / 3 + 1 / 9 + 1 / 27, abs=0.15)


COIN_0 = seed_with((0.0, 0.0))


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("rule", ["token", "lenient"])
def test_f10_a_coin_of_zero(kind: str, rule: str) -> None:
    """An inclusive comparison accepts an impossible token once in 2^24 draws; p / q is 0/0 or x/0."""

    def first(p: list[float], q: list[float]) -> cupyspec.Verification:
        rows = np.array([p, [0, 0, 0, 1]]).astype(SCORE_TYPES[kind])
        return verify_rows(rows, np.array([q]).astype(SCORE_TYPES[kind]), [0], [COIN_0], rule=RULES[rule])

    assert draws([COIN_0], batch_size=1, num_draft_tokens=1, vocab_size=4).coins[0, 0] == 0
    assert first([0, 1, 0, 0], [1, 0, 0, 0]).tokens.tolist() == [[1, -1]]
    assert first([0, 1, 0, 0], [0, 0, 1, 0]).tokens.tolist() == [[1, -1]]
    assert first([0.25, 0.75, 0, 0], [0, 1, 0, 0]).tokens.tolist() == [[0, 3]]
    smallest = 2.0**-24  # float16's smallest subnormal
    assert first([0, 1, 0, 0], [smallest, 1, 0, 0]).num_accepted.tolist() == [0]
    assert first([smallest, 1, 0, 0], [1, 0, 0, 0]).num_accepted.tolist() == [1]


@pytest.mark.parametrize("rule", RULES)
def test_f10_a_coin_of_zero_beside_masked_logits(rule: str) -> None:
    """The same on logits, where -inf is what must not come out: for the sigmoid rule too."""
    target, draft = np.array([[-np.inf, 0, -np.inf], [0, 0, 0]], np.float32), np.array([[5, 0, 0]], np.float32)
    for q in (draft, None):
        got = verify_rows(target, q, [0], [COIN_0, *range(200)], scores="logits", rule=RULES[rule])
        assert (got.tokens == [1, -1]).all()
        assert not got.status.any()


@pytest.mark.parametrize("kind", DTYPES)
def test_f10_equal_tiny_probabilities_at_the_largest_coin(kind: str) -> None:
    """float16 underflow makes a tiny ratio a rejection, or an unconditional accept."""
    coin = draws([SEED_OF_LARGEST_COIN], batch_size=1, num_draft_tokens=1, vocab_size=1).coins[0, 0]
    assert coin == LARGEST_COIN[0]
    rows = np.array([[2.0**-24, 1], [1, 0]]).astype(SCORE_TYPES[kind])
    assert verify_rows(rows, rows[:1], [0], [SEED_OF_LARGEST_COIN]).num_accepted[0] == 1
    twice = np.array([[2.0**-23, 1]]).astype(SCORE_TYPES[kind])
    assert verify_rows(rows, twice, [0], [SEED_OF_LARGEST_COIN]).num_accepted[0] == 0


@pytest.mark.parametrize("scores", ["probs", "logits"])
@pytest.mark.parametrize("row", [[0, 1], [1, 0], [0, 1, 0]])
def test_f11_impossible_ids_in_many_draws(scores: str, row: list[int]) -> None:
    """Noise at the end of its range picks a masked token once in 2^24 draws or more often."""
    values = np.array(row, np.float32) if scores == "probs" else logs(row)
    for step in range(5):
        got = cupyspec.sample(np.broadcast_to(values, (100_000, values.size)), seed=1, step=step, scores=scores)
        assert (got.tokens == row.index(1)).all()


def test_f11_probabilities_that_underflow() -> None:
    """0/0 = NaN wins an argmax: every other weight is exactly 0."""
    row = np.random.default_rng(0).normal(0, 1, 151936).astype(np.float32)
    row[12345] += 200
    assert (cupyspec.sample(np.broadcast_to(row, (1000, row.size)), seed=0).tokens == 12345).all()


@pytest.mark.parametrize("race", [0, 1, 2**31 - 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("pick", [0, 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("V", [5, SEG + 1, 3 * SEG])
def test_f11_injected_noise_at_the_ends_of_its_range(race: int, pick: int, V: int) -> None:
    """The same word at every segment, as the worst generator would have it."""
    p = np.zeros((2, V), np.float32)
    p[0, [1, V - 2]], p[1, 3] = 0.5, 1

    def words(seed: Any, *_: Any, segment: Any, **__: Any) -> tuple[np.ndarray, np.ndarray]:
        shape = np.broadcast_shapes(np.shape(seed), np.shape(segment))
        return np.full(shape, race, np.uint32), np.full(shape, pick, np.uint32)

    with mock.patch("cupyspec.cpu.race.draw_words", words):
        for scores, rows in (("probs", p), ("logits", logs(p))):
            tokens = cupyspec.sample(rows, seed=0, scores=scores).tokens
            assert tokens[0] in (1, V - 2)
            assert tokens[1] == 3


def test_f12_coin_and_extra_token_are_not_correlated() -> None:
    """The coin that rejected used again: .111/.444/.444 instead of thirds (test_law.py has the whole joint law)."""
    p, q = [[0.25] * 4, [0.25] * 4], [[1, 0, 0, 0]]
    seeds = np.arange(300_000)
    got = verify_rows(p, q, [0], seeds)
    coins = draws(seeds, batch_size=seeds.size, num_draft_tokens=1, vocab_size=4).coins[:, 0]
    rejected = got.num_accepted == 0
    tokens = got.tokens[:, 0]
    for t in (1, 2, 3):
        assert np.mean(tokens[rejected] == t) == pytest.approx(1 / 3, abs=0.004)
    for coin, token in (
        (coins[rejected], tokens[rejected]),
        (coins[~rejected], got.tokens[~rejected, 1]),
        (coins[:-1], coins[1:]),
        (coins[:-1], got.tokens[1:, 0]),
    ):
        assert abs(np.corrcoef(coin, token)[0, 1]) < 4.5 / coin.size**0.5 or token is tokens


def random_chain(batch: int, K: int, V: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(13)
    target = rng.normal(0, 1, (batch, K + 1, V)).astype(np.float32)
    draft = (target[:, :-1] + rng.normal(0, 0.5, (batch, K, V))).astype(np.float32)
    return np.argmax(draft, axis=2), target, draft


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seeds", [[7, 8, 9, 10], [0, 2**32, 2**63 - 1, -1], [1, 1 + 2**32, 1 + 2**33, 1 + 2**63]])
def test_f13_a_row_depends_on_its_own_seed(rule: str, seeds: list[int]) -> None:
    """Seeds read at row 0, or streams keyed by slot: alone, permuted, and with 60 more rows."""
    x, target, draft = (np.repeat(a[:1], 4, axis=0) for a in random_chain(4, 4, 1000))
    options: dict[str, Any] = {"rule": RULES[rule], "sampling": Sampling(2.0)}
    whole = cupyspec.verify(x, target, draft, seed=seeds, **options).tokens
    order = [2, 0, 3, 1]
    permuted = cupyspec.verify(x, target, draft, seed=[seeds[i] for i in order], **options).tokens
    np.testing.assert_array_equal(permuted, whole[order])
    more = [np.concatenate([a] * 16) for a in (x, target, draft)]
    longer = cupyspec.verify(*more, seed=[*seeds, *range(100, 160)], **options).tokens
    np.testing.assert_array_equal(longer[:4], whole)
    for b, seed in enumerate(seeds):
        alone = cupyspec.verify(x[:1], target[:1], draft[:1], seed=[seed], **options).tokens
        np.testing.assert_array_equal(alone[0], whole[b])
    assert len({tuple(row) for row in whole.tolist()}) == 4


@pytest.mark.parametrize("seed", [None, [7, None, 9, 10]])
def test_f13_no_seed_is_refused(seed: Any) -> None:
    """None beside seeds gave wrong tokens elsewhere."""
    with pytest.raises(TypeError, match="seed"):
        cupyspec.verify(*random_chain(4, 1, 5), seed=seed)


@pytest.mark.parametrize(("rows", "V"), [(8570, 250880), (32769, 131072)])
def test_f14_offsets_past_32_bits(rows: int, V: int, tmp_path: Path) -> None:
    """row * V in 32 bits: a sparse file of 4.3 and 8.6 GB, of which two rows are read."""
    file = np.memmap(tmp_path / "scores", np.float16, "w+", shape=(rows, V))
    file[0, 1], file[-1, V - 3] = 100, 100
    scores, active = np.asarray(file), np.zeros(rows, np.bool_)
    active[[0, -1]] = True
    got = cupyspec.sample(scores, seed=0, active=active)
    assert got.tokens[[0, -1]].tolist() == [1, V - 3]
    assert (got.tokens[1:-1] == -1).all()
    verified = cupyspec.verify(np.empty((rows, 0), np.int32), scores[:, None], seed=0, active=active)
    assert verified.tokens[[0, -1], 0].tolist() == [1, V - 3]
    flattened = cupyspec.verify(
        np.zeros(rows - 2, np.int32),
        scores,
        seed=0,
        sampling=Sampling(0),
        cu_num_draft_tokens=np.array([0, rows - 2, rows - 2]),
        max_draft_tokens=0,
    )
    assert flattened.tokens.tolist() == [[1], [V - 3]]


@pytest.mark.parametrize("V", [SEG - 1, SEG, SEG + 1, 8193, 10000, 50257, 151936])
@pytest.mark.parametrize("kind", DTYPES)
def test_f15_nothing_past_the_vocabulary(V: int, kind: str) -> None:
    """Masked lanes of a last tile score 0 and tie with real zeros: id 5 alone has residual mass."""
    p, q = np.zeros((2, V)), np.zeros((1, V))
    p[:, 5], q[0, 7] = 1, 1
    p, q = p.astype(SCORE_TYPES[kind]), q.astype(SCORE_TYPES[kind])
    got = verify_rows(p, q, [7], np.arange(20))
    assert (got.tokens == [5, -1]).all()
    got = verify_rows(p, None, [7], np.arange(20))
    assert (got.tokens == [5, -1]).all()
    equal = np.full((2, V), 1 / V).astype(SCORE_TYPES[kind])
    got = verify_rows(equal, equal[:1], [V - 1], np.arange(20))
    assert (got.tokens[:, 0] == V - 1).all()
    assert (got.tokens[:, 1] < V).all()


@pytest.mark.parametrize("negative", [-1, -2, -(2**31)])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("draft", ["random", "on the last id", "one-hot"])
def test_f16_placeholders(negative: int, kind: Any, draft: str) -> None:
    """-1 as an index reads the last entry, or comes out as a token."""
    x = np.array([[2, negative, -1], [negative, -1, negative]], kind)
    p = np.zeros((2, 4, 4), np.float32)
    p[:, 0, 2], p[:, 1:, 3] = 1, 1
    q = {
        "random": np.random.default_rng(0).dirichlet(np.ones(4), (2, 3)).astype(np.float32),
        "on the last id": np.tile(np.array([0, 0, 0, 1], np.float32), (2, 3, 1)),
        "one-hot": None,
    }[draft]
    if draft == "on the last id":
        q[0, 0] = [0, 0, 1, 0]  # a draft that q allows
    for seed in range(20):
        got = cupyspec.verify(x, p, q, seed=seed, scores="probs")
        assert got.tokens.tolist() == [[2, 3, -1, -1], [2, -1, -1, -1]]
        assert got.num_accepted.tolist() == [1, 0]
        assert got.status.tolist() == ([0, 0] if negative == -1 else [Status.TOKEN_OUT_OF_RANGE] * 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_f17_padded_columns(temperature: float) -> None:
    """Padded columns have logit 0 and win where all real logits are negative."""
    row = np.tile(np.array([-1, -2, -3, 0, 0], np.float32), (5000, 1))
    tokens = cupyspec.sample(row, seed=0, vocab_size=3, sampling=Sampling(temperature)).tokens
    assert set(tokens.tolist()) == ({0} if temperature == 0 else {0, 1, 2})
    got = cupyspec.verify(
        np.full((5000, 1), 2), row[:, None].repeat(2, 1), seed=0, vocab_size=3, sampling=Sampling(temperature)
    )
    assert got.tokens.max() <= 2


def test_f17_other_widths_need_a_vocabulary() -> None:
    """A shape crash deep inside, or columns shifted by the other side's width."""
    x = np.zeros((1, 1), np.int64)
    p, q = np.zeros((1, 2, 100), np.float32), np.zeros((1, 1, 128), np.float32)
    with pytest.raises(ValueError, match=r"100.*128"):
        cupyspec.verify(x, p, q, seed=0)
    q[..., 100:] = np.nan
    assert cupyspec.verify(x, p, q, seed=0, vocab_size=100).status.tolist() == [0]


@pytest.mark.parametrize("x", [100, 101, 2**31 + 5, 2**32 + 5, 2**63 - 1])
def test_f17_ids_past_the_vocabulary(x: int) -> None:
    """Ids read out of bounds, or wrapped: 2^32 + 5 is not 5."""
    p = np.zeros((1, 2, 100), np.float32)
    p[0, 0, 5] = 1
    got = cupyspec.verify(np.array([[x]]), p, p[:, :1], seed=0, scores="probs")
    assert got.tokens.tolist() == [[5, -1]]
    assert got.status.tolist() == [Status.TOKEN_OUT_OF_RANGE]
    with pytest.raises(ValueError, match="row 0"):
        cupyspec.verify(np.array([[x]]), p, p[:, :1], seed=0, scores="probs", check=True)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", ["padded", "flattened"])
def test_f18_ragged_batches(rule: str, layout: str) -> None:
    """Rows that shift where one has no drafts: lengths 0, 3, 1, 0, each row one-hot on its own index."""
    lengths = np.array([0, 3, 1, 0])
    p = np.full((4, 4, 4), -np.inf, np.float32)
    for b in range(4):
        p[b, :, b] = 0
    x = np.tile(np.arange(4)[:, None], (1, 3))
    used = np.arange(4) <= lengths[:, None]
    options: dict[str, Any] = {"seed": 0, "rule": RULES[rule]}
    if layout == "padded":
        p[~used] = np.nan
        got = cupyspec.verify(x, p, p[:, :3], num_draft_tokens=lengths, **options)
    else:
        rows, drafts = p[used], used[:, 1:]
        got = cupyspec.verify(
            x[drafts],
            rows,
            p[:, :3][drafts],
            cu_num_draft_tokens=np.cumsum([0, *lengths]),
            max_draft_tokens=3,
            **options,
        )
    assert got.num_accepted.tolist() == lengths.tolist()
    assert got.tokens.tolist() == [[0, -1, -1, -1], [1, 1, 1, 1], [2, 2, -1, -1], [3, -1, -1, -1]]
    assert not got.status.any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("K", [0, 1, 2])
@pytest.mark.parametrize("B", [0, 1, 3])
@pytest.mark.parametrize("V", [1, 2])
def test_f18_smallest_shapes(rule: str, temperature: float, K: int, B: int, V: int) -> None:
    """Zero-size arrays, rows without drafts, a vocabulary of one: every slot of every output is written."""
    options: dict[str, Any] = {"seed": 0, "rule": RULES[rule], "sampling": Sampling(temperature)}
    for kind in (np.int32, np.int64):
        x, p = np.zeros((B, K), kind), np.zeros((B, K + 1, V), np.float32)
        for q in (None, p[:, :K]):
            got = cupyspec.verify(x, p, q, **options)
            assert (got.tokens.shape, got.tokens.dtype) == ((B, K + 1), kind)
            assert (got.num_accepted.shape, got.num_accepted.dtype) == ((B,), np.int32)
            assert (got.status.shape, got.status.dtype) == ((B,), np.int32)
            assert not got.status.any()
            assert ((got.tokens >= 0).sum(axis=1) == got.num_accepted + 1).all()
            if V == 1:
                assert set(got.tokens.ravel().tolist()) <= {0, -1}
            if V == 1 and rule != "sigmoid":  # which may reject a one-hot draft
                assert (got.num_accepted == K).all()
            none = cupyspec.verify(x, p, q, num_draft_tokens=np.zeros(B, np.int64), **options)
            assert not none.num_accepted.any()
    flat = cupyspec.verify(
        np.zeros(B * K, np.int64),
        np.zeros((B * (K + 1), V), np.float32),
        cu_num_draft_tokens=np.arange(B + 1) * K,
        max_draft_tokens=K,
        **options,
    )
    assert flat.tokens.shape == (B, K + 1)
    assert not flat.status.any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("K", [1, 32, 33, 64, 100, 255])
def test_f18_many_drafts(rule: str, K: int) -> None:
    """Limits at 32 lanes or 64 bits: all accepted gives K + 1 tokens; a mismatch at the last one K."""
    p = np.full((2, K + 1, 3), -np.inf, np.float32)
    p[:, :, 1] = 0
    x = np.ones((2, K), np.int64)
    x[1, K - 1] = 2
    # The sigmoid rule rejects half of the one-hot drafts, whatever the target.
    for q in (np.zeros((2, K, 3), np.float32), None)[: 1 if rule == "sigmoid" else 2]:
        got = cupyspec.verify(x, p, q, seed=0, rule=RULES[rule])
        assert got.num_accepted.tolist() == [K, K - 1]
        assert got.tokens[0].tolist() == [1] * (K + 1)
        assert got.tokens[1].tolist() == [1] * K + [-1]


def test_f18_more_rows_than_a_grid_has() -> None:
    """grid.y ends at 65,535: with 70,001 rows the last must be answered as if alone."""
    B = 70_001
    x, target, draft = (a[np.arange(B) % 64] for a in random_chain(64, 2, 5))
    seed = np.arange(B)
    got = cupyspec.verify(x, target, draft, seed=seed)
    for b in (0, 4095, 4096, 65_535, 65_536, 70_000):
        alone = cupyspec.verify(x[[b]], target[[b]], draft[[b]], seed=seed[[b]])
        assert got.tokens[b].tolist() == alone.tokens[0].tolist()
        assert got.num_accepted[b] == alone.num_accepted[0]
    assert not got.status.any()


@pytest.mark.parametrize("view", ["row of stride 0", "rows of a larger batch", "drafts as a column of a matrix"])
def test_f20_views(view: str) -> None:
    """The base pointer without strides or offset."""
    x, target, draft = random_chain(6, 2, 40)
    if view == "row of stride 0":
        views = [np.broadcast_to(a[:1], a.shape) for a in (x, target, draft)]
    elif view == "rows of a larger batch":
        views = [a[1::2] for a in (x, target, draft)]
    else:
        views = [np.asfortranarray(np.hstack([x, x]))[:, 1:3], target, draft]
    seed = np.arange(len(views[0]))
    before = [a.copy() for a in views]
    got = cupyspec.verify(*views, seed=seed)
    want = cupyspec.verify(*(np.ascontiguousarray(a) for a in before), seed=seed)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    for a, b in zip(views, before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("K", [1, 8])
def test_f26_positions_that_are_thrown_away_are_not_read(K: int) -> None:
    """Work that grows with K where every row stops at position 0, and copies of B x K x V."""
    B, V = 16, 50_000
    p = np.zeros((B, K + 1, V), ml_dtypes.bfloat16)
    p[:, 0, 7] = 1
    q = np.broadcast_to(np.eye(1, V, 3, dtype=np.float32).astype(ml_dtypes.bfloat16), (B, K, V))
    x = np.full((B, K), 3)
    loaded = []
    load = Side.load

    def count(self: Side, b: np.ndarray, i: int) -> np.ndarray:
        loaded.extend((int(row), i) for row in b)
        return load(self, b, i)

    with mock.patch.object(Side, "load", count):
        got = cupyspec.verify(x, p, q, seed=0, scores="probs")
    assert (got.tokens[:, 0] == 7).all()
    assert sorted(loaded) == sorted([(b, 0) for b in range(B)] * 2)

    tracemalloc.start()
    cupyspec.verify(x, p, q, seed=0, scores="probs")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (8 << 20) + (64 << 10) * B  # blocks of 2^18 scores, a few at a time


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_f28_forms_of_a_temperature(kind: Any) -> None:
    """A Python float handed to a float32 parameter is read as garbage or 0."""
    x, target, draft = random_chain(30, 3, 50)

    def tokens(temperature: Any) -> list[list[int]]:
        got = cupyspec.verify(x.astype(kind), target, draft, seed=0, sampling=Sampling(temperature))
        assert got.tokens.dtype == kind
        return got.tokens.tolist()

    want = tokens(0.7)
    every_row = [np.full(30, 0.7), np.full(30, 0.7, np.float32), [0.7] * 30, np.full(60, 0.7)[::2]]
    for form in (np.float32(0.7), np.float64(0.7), np.array(0.7), np.array(0.7, np.float32), *every_row):
        assert tokens(form) == want
    assert want != tokens(1.0)
    for form in (1, np.int8(1), np.array(1), np.ones(30, np.uint8), np.ones(30, np.int64), [1] * 30, np.float16(1)):
        assert tokens(form) == tokens(1.0)
    half = np.full(30, 0.7).astype(ml_dtypes.bfloat16)
    assert tokens(half) == tokens(half.astype(np.float32))


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64])
def test_f28_dtypes_of_integer_parameters(kind: Any) -> None:
    """int32 read as int64, or an unsigned value as signed."""
    x, target, draft = random_chain(6, 4, 20)
    lengths, steps = np.array([0, 1, 2, 3, 4, 5]), np.array([0, 5, 9, 100, 127, 1])
    want = cupyspec.verify(x, target, draft, seed=0, num_draft_tokens=lengths.tolist(), step=steps.tolist())
    got = cupyspec.verify(x, target, draft, seed=0, num_draft_tokens=lengths.astype(kind), step=steps.astype(kind))
    assert got.tokens.tolist() == want.tokens.tolist()
    assert got.status.tolist() == want.status.tolist() == [0, 0, 0, 0, 0, Status.LENGTH_OUT_OF_RANGE]


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.bool_, np.uint8, np.int16, np.uint32])
def test_f28_draft_tokens_of_other_dtypes_are_refused(kind: Any) -> None:
    """Ids cast without a word."""
    x, target, draft = random_chain(2, 1, 5)
    with pytest.raises(TypeError, match="draft_tokens"):
        cupyspec.verify(x.astype(kind), target, draft, seed=0)


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from((2, 5, 1030, 2000)),
    side=st.sampled_from(("logits", "probs beside logits")),
)
def test_garbage_normalizers_still_give_possible_ids(seed: int, vocab: int, side: str) -> None:
    """Sides of a residual scaled apart until one overflows: an id above the vocabulary came out, with status 0."""
    rng = np.random.default_rng(seed)
    z, y = rng.normal(0, 3, (8, 2, vocab)).astype(np.float32), rng.normal(0, 3, (8, 1, vocab)).astype(np.float32)
    x = rng.integers(0, vocab, (8, 1))
    z[np.arange(8), 0, x[:, 0]] -= rng.choice([0, 90])
    y[np.arange(8), 0, x[:, 0]] += rng.choice([0, 30])
    z[:, :, -1] = -np.inf
    options: dict[str, Any] = {"draft_log_normalizer": rng.uniform(-100, 100, (8, 1))}
    if side == "logits":
        options["target_log_normalizer"] = rng.uniform(-100, 100, (8, 2))
    else:
        z = np.where(z > 0, np.float32(2.0) ** rng.integers(-120, 63, z.shape), 0).astype(np.float32)
        z[:, :, 0] = 1
        options |= {"scores": "probs", "draft_scores": "logits"}
    with np.errstate(all="ignore"):
        answer = cupyspec.verify(x, z, y, seed=np.arange(8), **options)
    assert not answer.status.any()
    assert ((answer.tokens >= -1) & (answer.tokens < vocab - (side == "logits"))).all()


@pytest.mark.parametrize("value", [2.0**64, 3e38])
@pytest.mark.parametrize("side", ["target", "draft"])
def test_probabilities_whose_sum_could_overflow(value: float, side: str) -> None:
    """A float32 sum that is infinite draws the last id, or one that does not exist."""
    p, q = (np.full((1, n, 5000), 1e-3, np.float32) for n in (2, 1))
    (p if side == "target" else q)[:, 0] = value
    answer = cupyspec.verify(np.array([[1]]), p, q, seed=[0], scores="probs")
    assert answer.status.tolist() == [1 if side == "target" else 4] and answer.tokens.tolist() == [[-1, -1]]
    fine = np.full((1, 5000), 2.0**63, np.float32)
    assert 0 <= cupyspec.sample(fine, seed=0, scores="probs").tokens[0] < 5000


def test_empty_lists_for_an_empty_batch() -> None:
    """A list of nothing is a float array to NumPy."""
    answer = cupyspec.verify(
        np.ones((0, 2), np.int32), np.zeros((0, 3, 5), np.float32), seed=[], step=[], num_draft_tokens=[], active=[]
    )
    assert answer.tokens.shape == (0, 3)
    assert cupyspec.sample(np.zeros((0, 5), np.float32), seed=[], position=[], draw=[]).tokens.shape == (0,)
