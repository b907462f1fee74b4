"""cupyspec.testing's checks of samplers and verifiers: right ones pass, wrong ones fail and are told why."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import cupyspec
from cupyspec import Sampling, Sigmoid, Token
from cupyspec.testing import (
    CannotDecide,
    ErrorBudget,
    assert_independent,
    assert_same_law,
    assert_samples_from,
    assert_unbiased,
)

P = np.array([0.4, 0.3, 0.2, 0.1, 0.0])
LOGITS = np.array([1.0, 0.5, 0.0, -1.0, -2.0])
SHARES = np.exp(LOGITS) / np.exp(LOGITS).sum()


def categorical(p: Any) -> Callable[[int, int], np.ndarray]:
    return lambda n, seed: np.random.default_rng(seed).choice(len(p), n, p=p)


def rejects_three_and_then_accepts() -> Callable[[int, int], np.ndarray]:
    """A right sampler with one unlucky sample."""
    calls = []

    def draw(n: int, seed: int) -> np.ndarray:
        calls.append(n)
        return categorical([1.0, 0, 0, 0, 0] if len(calls) == 1 else P)(n, seed)

    return draw


def test_right_sampler_passes() -> None:
    """Catches a check that cannot be passed."""
    for test in ("chi-square", "G"):
        result = assert_samples_from(categorical(P), P, test=test)
        assert result.draws == 100_000 and result.impossible == 0 and result.detectable < 0.02
    assert assert_samples_from(rejects_three_and_then_accepts(), P, draws=1000, detects=None).draws == 4000


@pytest.mark.parametrize("temperature", [1.05, 0.95])
def test_temperature_five_percent_off_is_noticed(temperature: float) -> None:
    """The sampler that a cosine similarity above 0.99 lets pass."""
    sampling = Sampling(temperature=temperature)

    def draw(n: int, seed: int) -> Any:
        return cupyspec.sample(np.broadcast_to(LOGITS.astype(np.float32), (n, 5)), seed=seed, sampling=sampling).tokens

    with pytest.raises(
        AssertionError, match=r"do not follow .*p = .*TV seen 0\.01.*farthest off: id \d came \d+ times"
    ):
        assert_samples_from(draw, SHARES)


def test_failures_say_what_was_seen() -> None:
    """Catches messages without the sample, the statistic, the distance or the id."""
    with pytest.raises(AssertionError) as caught:
        assert_samples_from(categorical([0.4, 0.3, 0.2, 0.05, 0.05]), P, draws=10_000)
    assert "id 4 has probability 0 and came" in str(caught.value) and "impossible" in str(caught.value)
    with pytest.raises(AssertionError, match=r"gave 10000 of 10000 ids outside \[0, 5\), the first is"):
        assert_samples_from(lambda n, seed: categorical(P)(n, seed) + 5, P, draws=10_000)
    with pytest.raises(AssertionError, match="outside"):
        assert_samples_from(lambda n, seed: categorical(P)(n, seed) - 1, P, draws=10_000)


def test_a_rejection_is_confirmed() -> None:
    """Catches a failure at the first sample, or a confirmation of the same size."""
    sizes = []

    def draw(n: int, seed: int) -> np.ndarray:
        sizes.append((n, seed))
        return categorical(P[::-1])(n, seed)

    with pytest.raises(AssertionError, match="draws: p = 0"):
        assert_samples_from(draw, [0.02, 0.18, 0.2, 0.3, 0.3], draws=5000, seed=3)
    assert sizes == [(5000, 3), (20_000, 4)]


@pytest.mark.parametrize("batch", [1000, 7777])
def test_batches(batch: int) -> None:
    """Catches batches with one seed, or a last one that is left out."""
    seen = []

    def draw(n: int, seed: int) -> np.ndarray:
        seen.append((n, seed))
        return categorical(P)(n, seed)

    assert assert_samples_from(draw, P, draws=20_000, batch=batch).draws == 20_000
    assert sum(n for n, _ in seen) == 20_000 and len({seed for _, seed in seen}) == len(seen)


def test_a_sampler_that_ignores_its_seed_is_refused() -> None:
    """Catches a confirmation on the very draws that were rejected, and batches that are copies of one."""
    fixed = categorical(P)
    with pytest.raises(ValueError, match="draw must use its seed: 0 and 1 gave the same 100 ids"):
        assert_samples_from(lambda n, seed: fixed(n, 7), P, draws=10_000, batch=100)
    assert_samples_from(lambda n, seed: np.zeros(n, int), [1.0, 0.0], draws=1000, batch=100)  # one-hot: no seed shows
    with pytest.raises(AssertionError, match="do not follow"):  # one id for ever is wrong, whatever the seed does
        assert_samples_from(lambda n, seed: np.zeros(n, int), P, draws=1000)


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (lambda n: None, TypeError, "got None"),
        (lambda n: np.zeros(n), TypeError, "draw must be integers, got ndarray of dtype float64"),
        (lambda n: np.zeros((n, 1), int), ValueError, r"must have shape \(1000,\), got \(1000, 1\)"),
        (lambda n: np.zeros(n - 1, int), ValueError, "must have shape"),
        (lambda n: [[1], [1, 2]], TypeError, "integer array, got list"),
        (lambda n: "text", TypeError, "must be integers"),
    ],
)
def test_answers_of_the_wrong_type_are_refused(answer: Any, error: type[Exception], says: str) -> None:
    """Catches floats that are truncated, shapes that broadcast, and an error from deep inside NumPy."""
    with pytest.raises(error, match=says):
        assert_samples_from(lambda n, seed: answer(n), P, draws=1000)


def test_wrong_arguments_are_refused() -> None:
    """Catches settings that make a check pass by testing nothing."""
    for arguments, error in (
        ({"probs": [0.5, 0.4]}, ValueError),
        ({"draws": 0}, ValueError),
        ({"draws": 1e5}, TypeError),
        ({"batch": 0}, ValueError),
        ({"test": "cosine"}, ValueError),
    ):
        given: dict[str, Any] = {"probs": P} | arguments
        with pytest.raises(error, match=next(iter(arguments))):
            assert_samples_from(categorical(P), given.pop("probs"), **given)


def test_too_few_draws_cannot_decide() -> None:
    """Catches a check that passes because it could not have seen anything."""
    with pytest.raises(CannotDecide, match=r"1000 draws find a total variation of 0\.13 and not of 0\.05"):
        assert_samples_from(categorical(P), P, draws=1000)
    with pytest.raises(CannotDecide, match=r"give about 6\.\de\+03 draws"):
        assert_samples_from(categorical(P), P, draws=1000)
    assert_samples_from(categorical(P), P, draws=1000, detects=0.2)
    with pytest.raises(CannotDecide, match="too few"):
        assert_samples_from(categorical(P), P, draws=10, detects=None)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_arrays_of_frameworks(library: str, need_frontend: Callable[[str], ModuleType]) -> None:
    """Catches a kit for NumPy's arrays alone."""
    module = need_frontend(library)

    def draw(n: int, seed: int) -> Any:
        if library == "torch":
            return module.multinomial(module.tensor(P), n, True, generator=module.Generator().manual_seed(seed))
        return module.random.categorical(module.random.key(seed), module.numpy.log(module.numpy.asarray(P)), shape=(n,))

    assert_samples_from(draw, P, draws=20_000)
    with pytest.raises(AssertionError, match="do not follow"):
        assert_samples_from(draw, [0.37, 0.33, 0.2, 0.1, 0.0], draws=20_000)


def test_two_samplers_of_one_law() -> None:
    """Catches a comparison that needs probabilities, or shares seeds between the two."""
    right = categorical(P)
    assert_same_law(right, lambda n, seed: 4 - categorical(P[::-1])(n, seed), vocab_size=5)
    with pytest.raises(AssertionError, match="different laws: two-sample"):
        assert_same_law(right, categorical([0.37, 0.33, 0.2, 0.1, 0.0]), vocab_size=5)
    with pytest.raises(CannotDecide):
        assert_same_law(right, right, vocab_size=5, draws=1000)
    with pytest.raises(AssertionError, match="outside"):
        assert_same_law(right, right, vocab_size=3)


def test_dependence_is_noticed() -> None:
    """Catches numbers that two rows share though each alone is right."""

    def pairs(n: int, seed: int, shared: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        first, second = rng.integers(0, 4, n), rng.integers(0, 3, n)
        return first, np.where(rng.random(n) < shared, first % 3, second)

    assert_independent(pairs, sizes=(4, 3))
    with pytest.raises(AssertionError, match="not independent"):
        assert_independent(lambda n, seed: pairs(n, seed, 0.05), sizes=(4, 3))
    with pytest.raises(CannotDecide):
        assert_independent(pairs, sizes=(4, 3), draws=2000)
    with pytest.raises(TypeError, match="two arrays"):
        assert_independent(lambda n, seed: 3, sizes=(4, 3))  # type: ignore[arg-type]


# Verifiers.

TARGET = np.array([[0.1, 0.5, 0.4], [0.3, 0.1, 0.6], [0.1, 0.2, 0.7], [0.4, 0.3, 0.3]])
DRAFT = np.array([[0.1, 0.8, 0.1], [0.1, 0.5, 0.4], [0.4, 0.5, 0.1], [0.1, 0.1, 0.8]])


def plain_verify(
    drafts: np.ndarray, p: np.ndarray, q: np.ndarray, seed: int, *, fault: str = "", coin_scale: float = 1.0
) -> np.ndarray:
    """Token verification in plain NumPy, with a fault by name."""
    rng = np.random.default_rng(seed)
    B, K = drafts.shape
    rows, tokens = np.arange(B), np.full((B, K + 1), -1)
    alive = np.ones(B, bool)
    coins = rng.random((B, K + 1)) * coin_scale
    picks = coins if fault == "coin used twice" else rng.random((B, K + 1))

    def pick(weights: np.ndarray, u: np.ndarray) -> np.ndarray:
        running = np.cumsum(weights, axis=1)
        return np.minimum((running <= u[:, None] * running[:, -1:]).sum(axis=1), 2)

    for i in range(K):
        x = drafts[:, i]
        here = p[:, i + 1] if fault == "off by one row" and i + 1 < K else p[:, i]
        accepted = coins[:, i] * q[rows, i, x] < here[rows, x]
        left = np.maximum(p[:, i] - q[:, i], 0)
        if fault == "residual not subtracted":
            left = p[:, i].copy()
        if fault == "only the rejected removed":
            left = np.where(np.arange(3) == x[:, None], 0, p[:, i])
        if fault == "residual of the row before" and i:
            left = np.maximum(p[:, i - 1] - q[:, i - 1], 0)
        left[left.sum(axis=1) == 0] = 1
        instead = pick(left, picks[:, i])
        tokens[alive, i] = np.where(accepted, x, instead)[alive]
        alive &= accepted
    bonus = q[:, -1] if fault == "bonus from the draft" else p[:, K - 1] if fault == "bonus a row early" else p[:, K]
    tokens[alive, K] = pick(bonus, picks[:, K])[alive]
    return tokens


FAULTS = (
    "residual not subtracted",
    "only the rejected removed",
    "residual of the row before",
    "bonus from the draft",
    "bonus a row early",
    "off by one row",
    "coin used twice",
)


@pytest.mark.parametrize("rule", [None, Token()], ids=str)
def test_right_verifiers_pass(rule: Any) -> None:
    """Catches a check that draws drafts or rows wrongly: nothing would pass it."""
    assert_unbiased(plain_verify, p=TARGET, q=DRAFT, num_draft_tokens=2, rule=rule)

    def ours(drafts: np.ndarray, p: np.ndarray, q: np.ndarray, seed: int) -> Any:
        answer = cupyspec.verify(drafts, p, q, seed=seed, scores="probs")
        return answer.tokens, answer.num_accepted

    assert_unbiased(ours, p=TARGET, q=DRAFT, num_draft_tokens=3, rule=rule, batch=40_000)
    assert_unbiased(ours, p=TARGET[0], q=DRAFT[0], num_draft_tokens=0, rule=rule)
    by_length = [DRAFT[1], DRAFT[0], DRAFT[2]]
    assert_unbiased(ours, p=TARGET[0], q=lambda prefix: by_length[len(prefix)], num_draft_tokens=2, rule=rule)


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_verifiers_are_noticed(fault: str) -> None:
    """Each is a fault that was shipped somewhere, and gives valid ids at a plausible rate."""

    def wrong(drafts: np.ndarray, p: np.ndarray, q: np.ndarray, seed: int) -> np.ndarray:
        return plain_verify(drafts, p, q, seed, fault=fault)

    with pytest.raises(
        AssertionError, match=r"do not follow the target's law: .*tokens \(\d(, \d)+\) came \d+ times of"
    ):
        assert_unbiased(wrong, p=TARGET, q=DRAFT, num_draft_tokens=2, draws=20_000, detects=None)


def test_a_right_first_token_is_not_enough() -> None:
    """Catches a check of marginal laws: the token after a rejection is right on average, and wrong for every prefix."""

    def wrong(drafts: np.ndarray, p: np.ndarray, q: np.ndarray, seed: int) -> np.ndarray:
        tokens = plain_verify(drafts, p, q, seed)
        last = tokens[:, 1] >= 0
        tokens[last, 1] = np.roll(tokens[last, 1], 1)  # another row's: the same law, unrelated to its own prefix
        return tokens[:, :2]

    with pytest.raises(AssertionError, match="do not follow"):
        assert_unbiased(wrong, p=TARGET, q=DRAFT, num_draft_tokens=1, draws=20_000, detects=None)


def test_lossy_rules_have_their_own_law() -> None:
    """Catches a lossy rule that passes for an exact one, and one that is not the rule it says."""

    def lenient(drafts: np.ndarray, p: np.ndarray, q: np.ndarray, seed: int) -> np.ndarray:
        return cupyspec.verify(drafts, p, q, seed=seed, scores="probs", rule=Token(0.5)).tokens

    assert_unbiased(lenient, p=TARGET, q=DRAFT, num_draft_tokens=2, rule=Token(0.5))
    with pytest.raises(AssertionError, match="the target's law"):
        assert_unbiased(lenient, p=TARGET, q=DRAFT, num_draft_tokens=2)
    with pytest.raises(AssertionError, match=r"the law of Token\(lenience=0.6\)"):
        assert_unbiased(lenient, p=TARGET, q=DRAFT, num_draft_tokens=2, rule=Token(0.6))

    def sigmoid(drafts: np.ndarray, z: np.ndarray, y: np.ndarray, seed: int) -> np.ndarray:
        return cupyspec.verify(drafts, z, y, seed=seed, rule=Sigmoid(-3, 2)).tokens

    assert_unbiased(sigmoid, p=np.log(TARGET), q=np.log(DRAFT), num_draft_tokens=2, rule=Sigmoid(-3, 2))


@pytest.mark.parametrize(
    ("columns", "values", "says"),
    [
        (0, 3, "an id outside the vocabulary"),
        (0, -2, "an id outside the vocabulary"),
        (slice(None), -1, "no token"),
        (2, 1, "a token behind a -1"),
        (slice(None), 2, "an accepted token that is not the draft"),
    ],
)
def test_answers_that_are_no_answers(columns: Any, values: int, says: str) -> None:
    """Catches answers whose law is meaningless because they are not a prefix and one token."""

    def wrong(drafts: np.ndarray, p: np.ndarray, q: np.ndarray, seed: int) -> np.ndarray:
        tokens = plain_verify(drafts, p, q, seed)
        tokens[:, columns] = values
        return tokens

    with pytest.raises(AssertionError, match=rf"of 1000 rows have {says}; row \d+: drafts \[\d, \d\], tokens \["):
        assert_unbiased(wrong, p=TARGET, q=DRAFT, num_draft_tokens=2, draws=1000, detects=None)


def test_verifiers_of_the_wrong_type_are_refused() -> None:
    """Catches a whole Verification, wrong shapes and counts, and models of different vocabularies."""

    def call(answer: Callable[..., Any], **changes: Any) -> None:
        given: dict[str, Any] = {"p": TARGET, "q": DRAFT, "num_draft_tokens": 2, "draws": 5000} | changes
        assert_unbiased(answer, **given)

    with pytest.raises(TypeError, match="got 4 things"):
        call(lambda d, p, q, seed: cupyspec.verify(d, p, q, seed=seed, scores="probs"))
    with pytest.raises(ValueError, match="tokens must have shape"):
        call(lambda d, p, q, seed: d)
    with pytest.raises(AssertionError, match="a num_accepted that is not"):
        call(lambda d, p, q, seed: (plain_verify(d, p, q, seed), np.zeros(len(d), int)))
    with pytest.raises(ValueError, match="p and q must have equal rows"):
        call(plain_verify, q=[0.5, 0.5])
    with pytest.raises(ValueError, match="sum to 1"):
        call(plain_verify, p=[0.5, 0.4, 0.0])
    with pytest.raises(CannotDecide):
        call(plain_verify)
    with pytest.raises(ValueError, match="use a smaller vocabulary"):
        call(plain_verify, p=np.full(100, 0.01), q=np.full(100, 0.01), num_draft_tokens=12)


def test_budgets_are_kept() -> None:
    """Catches a budget that the checks do not look at."""
    assert assert_samples_from(categorical(P), P, budget=ErrorBudget(alpha=1e-3)).alpha == 1e-3
    sizes = []

    def wrong(n: int, seed: int) -> np.ndarray:
        sizes.append(n)
        return categorical(P[::-1])(n, seed)

    with pytest.raises(AssertionError):
        assert_samples_from(wrong, np.full(5, 0.2), draws=100, budget=ErrorBudget(confirmations=2, growth=3))
    assert sizes == [100, 300, 900]
