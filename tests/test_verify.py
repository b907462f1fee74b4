"""`verify()` on the CPU: equal to the oracle outside the bands, and independent of everything but a row's own numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp, pdtrc

import cupyspec
from cupyspec import Sampling, Sigmoid, Status, Token, Verification
from cupyspec._segments import SEG
from cupyspec.cpu.rows import Weights
from cupyspec.testing import draws, seed_with
from strategies import SCORE_TYPES, SIGMOIDS, TOKENS, VOCABULARIES, ChainCase, assert_agrees, chain_cases, logits

SMALL = tuple(v for v in VOCABULARIES if v < 300)
FIELDS = ("tokens", "num_accepted", "status")


def assert_same(got: Verification, want: Verification) -> None:
    """Bit for bit."""
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)


# Against the oracle. Each test draws calls that the others do not; assert_agrees allows differences in bands alone.


@given(chain_cases())
def test_agrees_with_the_oracle(case: ChainCase) -> None:
    """Catches any wrong row, coin, temperature, length, mask or dtype in the float32 path."""
    assert_agrees(case.verify(), case.oracle())


@given(chain_cases(vocabularies=SMALL, small_segments=True))
def test_agrees_with_the_oracle_in_small_segments(case: ChainCase) -> None:
    """Catches a race whose winner, tail segment or offset is wrong: here most rows have several segments."""
    assert_agrees(case.verify(), case.oracle())


@given(chain_cases(faults=True))
def test_faults_agree_with_the_oracle(case: ChainCase) -> None:
    """Catches a status of rows that are not needed, a missing one, and faults that reach a neighbour."""
    assert_agrees(case.verify(), case.oracle())


@given(chain_cases(probs=True, faults=True))
def test_probabilities_agree_with_the_oracle(case: ChainCase) -> None:
    """Catches probabilities that are normalised, or judged as logits are; one or both sides."""
    assert_agrees(case.verify(), case.oracle())


@given(chain_cases(normalizers=True, faults=True, probs=True))
def test_log_normalizers_agree_with_the_oracle(case: ChainCase) -> None:
    """Catches a normaliser of another row or temperature, and rows judged that need not be read."""
    assert_agrees(case.verify(), case.oracle())


@given(chain_cases(rules=SIGMOIDS, faults=True))
def test_sigmoid_agrees_with_the_oracle(case: ChainCase) -> None:
    """Catches clamped values in the wrong branch and a residual without digits."""
    assert_agrees(case.verify(), case.oracle())


@given(chain_cases(rules=SIGMOIDS, vocabularies=SMALL, small_segments=True))
def test_sigmoid_agrees_with_the_oracle_in_small_segments(case: ChainCase) -> None:
    """Catches masses of sigmoid residuals summed over the wrong ids."""
    assert_agrees(case.verify(), case.oracle())


def many_rows(rule: Token | Sigmoid, kind: Any, vocab: int, segment: int) -> ChainCase:
    rng = np.random.default_rng([vocab, segment])
    batch, width = 1500, 3
    target = logits(rng, (batch, width + 1, vocab), scale=2.0, banned=0.1)
    draft = target[:, :-1] + rng.normal(0, 1.0, (batch, width, vocab))
    return ChainCase(
        draft_tokens=np.argmax(draft + rng.gumbel(size=draft.shape), axis=-1),
        target=target.astype(kind),
        draft=draft.astype(kind),
        vocab_size=vocab,
        seed=rng.integers(0, 2**64, batch, dtype=np.uint64),
        rule=rule,
        segment=segment,
    )


@pytest.mark.parametrize(
    ("rule", "kind", "vocab", "segment"),
    [
        (Token(), np.float32, 50, SEG),
        (Token(), np.float16, 400, 64),
        (Token(lenience=0.5), ml_dtypes.bfloat16, 90, 32),
        (Sigmoid(-20, 20), np.float32, 30, 8),
    ],
)
def test_mismatches_in_the_bands_are_as_rare_as_their_width(
    rule: Token | Sigmoid, kind: Any, vocab: int, segment: int
) -> None:
    """Catches bands that hide an error: decisions near a boundary, and answers that differ, must be few."""
    case = many_rows(rule, kind, vocab, segment)
    want = case.oracle()
    different = assert_agrees(case.verify(), want)
    width = float(want.width.sum())
    assert width < 0.05 * want.width.size
    # Poisson tails: each of these fails by chance once in 1e9 calls.
    assert pdtrc(max(int(want.in_band.sum()) - 1, 0), width) > 1e-9 or want.in_band.sum() == 0
    assert pdtrc(max(different - 1, 0), width) > 1e-9 or different == 0


# What an answer may not depend on.


@given(chain_cases(rules=(*TOKENS, *SIGMOIDS), faults=True, probs=False), st.randoms(use_true_random=False))
def test_rows_do_not_know_their_batch(case: ChainCase, random: Any) -> None:
    """Catches numbers keyed by slot, sums that depend on the batch, faults that spread: permuted, and alone."""
    whole = case.verify()
    order = np.array(random.sample(range(len(case.seed)), len(case.seed)), np.intp)
    permuted = case.rows(order).verify()
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(permuted, name), getattr(whole, name)[order])
    for b in range(len(case.seed)):
        alone = case.rows([b]).verify()
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(whole, name)[b])


@given(chain_cases(rules=(*TOKENS, *SIGMOIDS), faults=True, normalizers=True), st.integers(0, 2**32 - 1))
def test_flattened_equals_padded(case: ChainCase, seed: int) -> None:
    """Catches rows that start at cu[b] where the target's start at cu[b] + b, and lengths read one off."""
    if isinstance(case.rule, Sigmoid):
        case = dataclasses.replace(case, target_log_normalizer=None, draft_log_normalizer=None)
    padded, flattened = case.verify(), case.verify(**case.flattened(np.random.default_rng(seed)))
    given = case.num_draft_tokens
    width = case.draft_tokens.shape[1]
    # The flattened form cannot say that a length was out of range before it was clamped.
    clamped = np.zeros(len(case.seed), np.bool_) if given is None else (given < 0) | (given > width)
    if case.active is not None:
        clamped &= case.active.astype(np.bool_)
    want = padded._replace(status=padded.status - np.where(clamped, Status.LENGTH_OUT_OF_RANGE, 0))
    assert_same(flattened, want)


def _strided(a: np.ndarray) -> np.ndarray:
    """Every second column of a wider array."""
    wide = np.zeros((*a.shape[:-1], 2 * a.shape[-1] + 1), a.dtype)
    wide[..., 1::2] = a
    return wide[..., 1::2]


def _columns_of_wider(a: np.ndarray) -> np.ndarray:
    wide = np.full((*a.shape[:-1], a.shape[-1] + 5), 7, a.dtype)
    wide[..., 2:-3] = a
    return wide[..., 2:-3]


def _odd_address(a: np.ndarray) -> np.ndarray:
    """The same values at an address that is a multiple of the item size alone."""
    buffer = np.zeros(a.size + 1, a.dtype)
    buffer[1:] = a.ravel()
    return buffer[1:].reshape(a.shape)


def _reversed(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a[..., ::-1])[..., ::-1]


def _batch_last(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(a, 0, -1)).transpose(a.ndim - 1, *range(a.ndim - 1))


def _read_only(a: np.ndarray) -> np.ndarray:
    a = a.copy()
    a.flags.writeable = False
    return a


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "every second column": _strided,
    "columns of a wider array": _columns_of_wider,
    "odd address": _odd_address,
    "reversed": _reversed,
    "Fortran order": np.asfortranarray,
    "batch last": _batch_last,
    "read-only": _read_only,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@given(case=chain_cases(rules=(*TOKENS, *SIGMOIDS), probs=False))
def test_layout_does_not_matter(layout: str, case: ChainCase) -> None:
    """Catches ignored strides and offsets."""
    view = LAYOUTS[layout]
    changed = {n: view(getattr(case, n)) for n in ("draft_tokens", "target", "draft") if getattr(case, n) is not None}
    assert_same(case.verify(**changed), case.verify())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("vocab", [7, SEG + 3])
def test_layout_and_batch_do_not_change_a_sum(layout: str, vocab: int) -> None:
    """Catches sums whose order follows the memory: a difference of one bit would show in a token once in 10^7 draws."""
    rows = np.random.default_rng(vocab).normal(0, 2, (300, vocab)).astype(np.float32)
    rows -= logsumexp(rows, axis=1, keepdims=True).astype(np.float32)  # a normaliser near 0 shows every bit
    want = cupyspec.sample(rows, seed=0, return_log_normalizer=True).log_normalizer
    assert np.abs(want).max() < 1e-5
    got = cupyspec.sample(LAYOUTS[layout](rows), seed=0, return_log_normalizer=True).log_normalizer
    np.testing.assert_array_equal(got, want)
    alone = [cupyspec.sample(r[None], seed=[0], return_log_normalizer=True).log_normalizer[0] for r in rows[:40]]
    np.testing.assert_array_equal(alone, want[:40])


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@given(case=chain_cases(rules=(*TOKENS, *SIGMOIDS), faults=True))
def test_storage_does_not_matter(kind: str, case: ChainCase) -> None:
    """Catches arithmetic in the storage dtype: 16-bit scores and their float32 casts give the same tokens."""
    arrays = {n: getattr(case, n) for n in ("target", "draft") if getattr(case, n) is not None}
    with np.errstate(over="ignore"):  # the extremes of float32 are faults in float16
        stored = {n: array.astype(SCORE_TYPES[kind]) for n, array in arrays.items()}
    assert_same(case.verify(**stored), case.verify(**{n: a.astype(np.float32) for n, a in stored.items()}))


@given(chain_cases(rules=(*TOKENS, *SIGMOIDS), faults=True))
def test_a_call_leaves_no_trace(case: ChainCase) -> None:
    """Catches inputs used as scratch, and state that outlives a call."""
    names = ("draft_tokens", "target", "draft", "seed", "num_draft_tokens", "active", "temperature")
    before = {n: np.array(getattr(case, n)).tobytes() for n in names}
    first = case.verify()
    copy = Verification(*(None if v is None else v.copy() for v in first))
    assert_same(case.verify(), copy)
    assert_same(first, copy)
    assert {n: np.array(getattr(case, n)).tobytes() for n in names} == before


@given(chain_cases(rules=(*TOKENS, *SIGMOIDS)))
def test_columns_beyond_the_vocabulary_do_not_exist(case: ChainCase) -> None:
    """Catches padded columns that are summed, raced or judged."""
    cut = {n: getattr(case, n)[..., : case.vocab_size] for n in ("target", "draft") if getattr(case, n) is not None}
    assert_same(case.verify(**cut, vocab_size=None), case.verify())


@pytest.mark.parametrize("segment", [SEG, 4])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_blocks_of_rows_do_not_matter(segment: int, size: int) -> None:
    """Catches rows lost or repeated where the CPU path cuts a batch into blocks."""
    case = many_rows(Token(), np.float32, 30, segment)
    with mock.patch("cupyspec.cpu.chain._BLOCK_ROWS", 101), mock.patch("cupyspec.cpu.chain._BLOCK_SCORES", 30 * size):
        got = case.verify()
    assert_same(got, case.verify())


@pytest.mark.parametrize("changed", ["seed", "seed above bit 32", "step", "step above bit 32"])
def test_other_numbers_give_other_tokens(changed: str) -> None:
    """Catches a seed or step that is dropped or cut: 1,500 rows that would all agree by chance do not exist."""
    case = many_rows(Token(), np.float32, 30, SEG)
    change: dict[str, Any] = {
        "seed": {"seed": case.seed + np.uint64(1)},
        "seed above bit 32": {"seed": case.seed ^ np.uint64(1 << 40)},
        "step": {"step": 1},
        "step above bit 32": {"step": 1 << 32},
    }[changed]
    assert (case.verify(**change).tokens != case.verify().tokens).any(axis=1).mean() > 0.3


def test_a_scalar_seed_is_split_into_row_seeds() -> None:
    """Catches equal noise in all rows of a call with one seed."""
    case = many_rows(Token(), np.float32, 30, SEG)
    assert_same(case.verify(seed=5), case.verify(seed=cupyspec.row_seeds(5, 1500)))


# Single cases, where the right answer is known beforehand.


def one_row(p: Any, q: Any, x: int, coin: tuple[float, float], **options: Any) -> Verification:
    """B = K = 1 on probabilities, the bonus row equal to p, at the first seed with a coin in a range."""
    p = np.array(p, np.float32)
    return cupyspec.verify(
        np.array([[x]]),
        np.stack([p, p])[None],
        None if q is None else np.array(q, np.float32)[None, None],
        scores="probs",
        seed=np.array([seed_with(coin)], np.uint64),
        **options,
    )


@pytest.mark.parametrize("lenience", [1.0, 0.5])
def test_acceptance_turns_at_p_over_q(lenience: float) -> None:
    """Catches a comparison that is off by more than the band, and a lenience on the wrong side."""
    limit = 0.2 / (lenience * 0.8)
    below, above = (limit * (1 - 2.0**-10), limit * (1 - 2.0**-14)), (limit * (1 + 2.0**-14), limit * (1 + 2.0**-10))
    options = {"rule": Token(lenience=lenience)}
    assert one_row([0.2, 0.8], [0.8, 0.2], 0, below, **options).num_accepted[0] == 1
    rejected = one_row([0.2, 0.8], [0.8, 0.2], 0, above, **options)
    assert rejected.tokens.tolist() == [[1, -1]]


def test_acceptance_is_strict() -> None:
    """Catches u q <= p: a coin of exactly p / q rejects."""
    seed = 16_946_338  # seed_with((0.5, 0.5))
    p, q = np.array([[[0.25, 0.75]] * 2], np.float32), np.array([[[0.5, 0.5]]], np.float32)
    assert draws([seed], batch_size=1, num_draft_tokens=1, vocab_size=2).coins[0, 0] == 0.5
    assert cupyspec.verify(np.array([[0]]), p, q, seed=[seed], scores="probs").tokens.tolist() == [[1, -1]]
    p[0, 0, 0] = np.nextafter(np.float32(0.25), np.float32(1))
    assert cupyspec.verify(np.array([[0]]), p, q, seed=[seed], scores="probs").num_accepted.tolist() == [1]


FAULT_STATUS = {
    ("target", np.nan): Status.TARGET_NOT_FINITE,
    ("target", np.inf): Status.TARGET_NOT_FINITE,
    ("target", -np.inf): Status.TARGET_EMPTY,
    ("draft", np.nan): Status.DRAFT_INVALID,
    ("draft", np.inf): Status.DRAFT_INVALID,
    ("draft", -np.inf): Status.DRAFT_INVALID,
}


@pytest.mark.parametrize(("side", "value"), FAULT_STATUS)
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("draft_temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", [Token(), Sigmoid()])
def test_status_of_a_bad_row(side: str, value: float, position: int, draft_temperature: float, rule: Any) -> None:
    """Catches a fault that is missed, takes another's name or reaches a neighbour: one score row of three is bad."""
    target, draft = np.zeros((3, 3, 4), np.float32), np.zeros((3, 3, 4), np.float32)
    target[..., 2] = draft[..., 2] = 9
    (target if side == "target" else draft)[1, position] = value
    # Coins below 0.4 accept every good draft, whatever the rule.
    seed = next(s for s in range(100) if (draws([s], batch_size=1, num_draft_tokens=2, vocab_size=4).coins < 0.4).all())
    got = cupyspec.verify(
        np.full((3, 2), 2),
        target,
        draft[:, :2],
        seed=np.full(3, seed),
        rule=rule,
        draft_sampling=Sampling(draft_temperature),
    )
    status, stop = FAULT_STATUS[side, value], position
    not_read = side == "draft" and position == 2
    # The sigmoid rule reads one score of a draft: -inf there is a draft that could not be, and is accepted.
    accepted = side == "draft" and value == -np.inf and isinstance(rule, Sigmoid) and draft_temperature == 1
    if not_read or accepted:
        status, stop = Status(0), 2
    assert got.status.tolist() == [0, status, 0]
    assert got.num_accepted[[0, 1, 2]].tolist() == [2, stop, 2]
    assert got.tokens[1, :stop].tolist() == [2] * stop
    assert (got.tokens[1, stop:] == -1).all() == bool(status)


LSE_FAULTS = [("target", 0, 1), ("target", 1, 1), ("target", 2, 1), ("draft", 0, 4), ("draft", 1, 4)]


@pytest.mark.parametrize(("side", "position", "status"), LSE_FAULTS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_status_of_a_bad_log_normalizer(side: str, position: int, status: int, value: float, kind: Any) -> None:
    """Catches a normaliser that is not finite where its row is needed, the one after the last draft among them."""
    rows = np.zeros((2, 3, 4), np.float32)
    normalizers = {"target": np.full((2, 3), np.log(4), kind), "draft": np.full((2, 2), np.log(4), kind)}
    normalizers[side][1, position] = value
    got = cupyspec.verify(
        np.full((2, 2), 2),
        rows,
        rows[:, :2],
        seed=[3, 3],
        target_log_normalizer=normalizers["target"],
        draft_log_normalizer=normalizers["draft"],
    )
    assert got.status.tolist() == [0, status]
    assert got.num_accepted.tolist() == [2, position]
    assert got.tokens[1].tolist() == [2] * position + [-1] * (3 - position)


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
def test_subnormal_probabilities_count_as_zero(kind: Any) -> None:
    """Catches values that a GPU flushes to 0 and the CPU does not: accepted at no coin, drawn never, an empty row alone."""
    tiny = 2.0**-127
    p = np.array([[[tiny, tiny, 2.0**-126], [tiny] * 3]]).astype(kind)
    q = np.array([[[tiny, 2.0**-126, 0]]]).astype(kind)
    for x in (0, 1):
        got = cupyspec.verify(np.array([[x]]), p, q, seed=[seed_with((0, 0))], scores="probs")
        assert (got.tokens.tolist(), got.status.tolist()) == ([[2, -1]], [0])
    got = cupyspec.verify(np.array([[2]]), p, q, seed=0, scores="probs")
    assert got.tokens.tolist() == [[2, -1]]
    assert got.status.tolist() == [Status.TARGET_EMPTY]
    tokens = cupyspec.sample(np.broadcast_to(p[0, 0], (500, 3)), seed=0, scores="probs").tokens
    assert (tokens == 2).all()


def test_shared_numbers() -> None:
    """Catches a verification that reuses the draft's numbers: p = q, yet drafts of the same seed say nothing of coins."""
    rng = np.random.default_rng(0)
    z = np.repeat(rng.normal(0, 1, (1, 2, 8)), 4000, axis=0).astype(np.float32)
    seed = np.arange(4000)
    draft = cupyspec.sample(z[:, 0], seed=seed, step=3)
    bonus = cupyspec.verify(draft.tokens[:, None], z[:, ::-1], z[:, :1], seed=seed, step=3)
    same_row = cupyspec.verify(np.full((4000, 1), -1), z, z[:, :1], seed=seed, step=3)
    agreement = np.mean(same_row.tokens[:, 0] == draft.tokens)
    p = np.exp(z[0, 0]) / np.exp(z[0, 0]).sum()
    assert agreement == pytest.approx(np.square(p).sum(), abs=5 * 0.5 / 4000**0.5)
    assert 0 < bonus.num_accepted.mean() < 1


@pytest.mark.parametrize("rule", [Token(), Sigmoid()])
def test_greedy_reads_no_draft_row(rule: Token | Sigmoid) -> None:
    """Catches draft rows judged or compared where the target's temperature is 0."""
    target = np.array([[[0.0, 5.0, 5.0], [1.0, 0.0, -0.0], [0.0, 0.0, 2.0]]], np.float32)
    draft = np.full((1, 2, 3), np.nan, np.float32)
    got = cupyspec.verify(np.array([[1, 0]]), target, draft, seed=0, rule=rule, sampling=Sampling(temperature=0))
    assert (got.tokens.tolist(), got.status.tolist()) == ([[1, 0, 2]], [0])


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_greedy_ties_go_to_the_lowest_id(zero: float) -> None:
    """Catches an order in which -0.0 is below +0.0."""
    target = np.array([[[-1.0, zero, -zero, zero]]], np.float32)
    got = cupyspec.verify(np.empty((1, 0), np.int32), target, seed=0, sampling=Sampling(temperature=0))
    assert got.tokens.tolist() == [[1]]


BAD_LENGTHS: list[tuple[list[int], list[list[int]], list[int]]] = [
    # bounds, tokens of greedy rows that accept everything, status
    ([0, 2, 3], [[0, 0, 0], [0, 0, -1]], [0, 0]),
    ([1, 2, 3], [[0, 0, -1], [0, 0, -1]], [16, 0]),
    ([0, 2, 1], [[0, 0, 0], [0, -1, -1]], [0, 16]),
    ([0, 3, 3], [[0, 0, 0], [0, -1, -1]], [16, 0]),
    ([-5, 2, 9], [[0, 0, 0], [0, 0, -1]], [16, 16]),
    ([0, 9, 3], [[0, 0, 0], [0, -1, -1]], [16, 16]),
]


@pytest.mark.parametrize(("bounds", "tokens", "status"), BAD_LENGTHS)
@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64])
def test_bad_running_sums_are_clamped(bounds: list[int], tokens: Any, status: Any, kind: Any) -> None:
    """Catches reads before or after the arrays when running sums are nonsense."""
    got = cupyspec.verify(
        np.zeros(3, np.int64),
        np.ones((5, 4), np.float32),
        seed=0,
        sampling=Sampling(temperature=0),
        cu_num_draft_tokens=np.array(bounds, kind),
        max_draft_tokens=2,
    )
    assert got.status.tolist() == status
    assert got.tokens.tolist() == tokens


def test_huge_unsigned_running_sums_are_clamped() -> None:
    """Catches a running sum that becomes negative."""
    got = cupyspec.verify(
        np.zeros(3, np.int64),
        np.ones((5, 4), np.float32),
        seed=0,
        sampling=Sampling(temperature=0),
        cu_num_draft_tokens=np.array([0, 2**64 - 1, 2**63], np.uint64),
        max_draft_tokens=2,
    )
    assert got.tokens.tolist() == [[0, 0, 0], [0, -1, -1]]
    assert got.status.tolist() == [16, 16]


@pytest.mark.parametrize("given", [[2**64 - 1, 2**63], [2**63, 1], [255, 0]])
def test_huge_unsigned_lengths_are_clamped(given: list[int]) -> None:
    """Catches an unsigned length that becomes negative."""
    got = cupyspec.verify(
        np.zeros((2, 2), np.int32),
        np.ones((2, 3, 4), np.float32),
        seed=0,
        sampling=Sampling(temperature=0),
        num_draft_tokens=np.array(given, np.uint64),
    )
    assert got.num_accepted.tolist() == [min(g, 2) for g in given]
    assert got.status.tolist() == [16 if g > 2 else 0 for g in given]


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("error", [-1e30, -300.0, -50.0, 50.0, 300.0, 1e30])
def test_a_wrong_normalizer_yields_ids_that_exist(side: str, error: float) -> None:
    """Catches an overflow to infinite weights, after which a pick runs past the last id."""
    rng = np.random.default_rng(1)
    target = logits(rng, (200, 2, 9), scale=3.0, banned=0.3).astype(np.float32)
    draft = logits(rng, (200, 1, 9), scale=3.0, banned=0.0).astype(np.float32)
    rows = target if side == "target" else draft
    lse = (logsumexp(rows.astype(np.float64), axis=-1) + error).astype(np.float32)
    got = cupyspec.verify(rng.integers(0, 9, (200, 1)), target, draft, seed=0, **{f"{side}_log_normalizer": lse})
    assert not got.status.any()
    for n in (0, 1):
        rows_n = np.flatnonzero(got.num_accepted == n)
        assert np.isfinite(target[rows_n, n, got.tokens[rows_n, n]]).all()


def test_weights_are_summed_per_segment() -> None:
    """Catches a tail segment that is dropped or summed into its neighbour."""
    w = np.arange(1, 12, dtype=np.float32)[None].repeat(2, 0)
    np.testing.assert_array_equal(Weights.of(w, 4).masses, [[10, 26, 30]] * 2)
    np.testing.assert_array_equal(Weights.of(w, 16).masses, [[66]] * 2)
    np.testing.assert_array_equal(Weights.of(w, 11).masses, [[66]] * 2)
