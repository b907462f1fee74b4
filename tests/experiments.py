"""Calls whose counted answers have a known law, small enough for kernels that run on the CPU.

Laws come from enumeration or from a short formula, never from the CPU path or the kernels. Drafts are drawn by the CPU path
beforehand: what is tested is the call itself. Where one answer alone is right the cells are (right, wrong).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from scipy.special import logsumexp, softmax

import cupyspec
from cupyspec import Sampling, Sigmoid, Token
from cupyspec._philox import Purpose, coin, draw_words
from cupyspec.testing import (
    CheckResult,
    answer_cells,
    chi_square,
    draws,
    law_of_cells,
    output_law,
    seed_with,
    single_draft_law,
)
from machines import SMALL, Machine
from strategies import segments_of

Counts = np.ndarray
RIGHT_OR_WRONG = np.array([1.0, 0.0])


@dataclass(frozen=True)
class Experiment:
    """`count(machine, draws, seed)` answers counts whose law is `law`."""

    count: Callable[[Machine, int, int], Counts]
    law: np.ndarray
    draws: int  # that find the faults planted for it

    def check(self, machine: Machine, seed: int, size: int | None = None, alpha: float = 1e-6) -> CheckResult:
        """Fresh counts against the law."""
        return chi_square(self.count(machine, size or self.draws, seed), self.law, alpha=alpha)


def right_or_wrong(right: np.ndarray) -> Counts:
    return np.array([np.count_nonzero(right), np.count_nonzero(~right)])


def logs(p: Any) -> np.ndarray:
    """Logits of probabilities, -inf for 0."""
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, np.float64)).astype(np.float32)


def rows_of(row: Any, *shape: int) -> np.ndarray:
    """One array [..., V] in every place of a batch."""
    row = np.asarray(row, np.float32)
    return np.broadcast_to(row, (*shape, *row.shape))


def row_seeds(count: int, seed: int) -> np.ndarray:
    """Seeds that no other `seed` has."""
    return np.arange(count, dtype=np.uint64) + np.uint64(seed << 32)


# ------------------------------------------------------------------------------------------------ chains

CHAIN_VOCAB, CHAIN_DRAFTS = 4, 2
CHAIN_TARGET, CHAIN_DRAFT = (
    np.random.default_rng(321).normal(0, 1.5, (2, CHAIN_VOCAB + 1, CHAIN_VOCAB)).astype(np.float32)
)
CHAIN_TEMPERATURES = 0.7, 1.6


def count_chains(machine: Machine, size: int, seed: int) -> Counts:
    """Rows that depend on the last token; drafts of the same seed and step as their verification."""
    target_sampling, draft_sampling = (Sampling(t) for t in CHAIN_TEMPERATURES)
    context = np.full((size, CHAIN_DRAFTS + 1), CHAIN_VOCAB)
    for i in range(CHAIN_DRAFTS):
        scores = CHAIN_DRAFT[context[:, i]]
        drawn = cupyspec.sample(scores, seed=seed, step=5, position=i, sampling=draft_sampling)
        context[:, i + 1] = drawn.tokens
    answer = machine.verify(
        context[:, 1:].astype(np.int32),
        CHAIN_TARGET[context],
        CHAIN_DRAFT[context[:, :-1]],
        seed=seed,
        step=5,
        sampling=target_sampling,
        draft_sampling=draft_sampling,
    )
    cells = answer_cells(answer.tokens, CHAIN_VOCAB)
    return np.bincount(cells, minlength=(CHAIN_VOCAB + 1) ** (CHAIN_DRAFTS + 1))


def chain_law() -> np.ndarray:
    tables = (CHAIN_TARGET, CHAIN_DRAFT)
    p, q = (softmax(z.astype(np.float64) / t, axis=1) for z, t in zip(tables, CHAIN_TEMPERATURES, strict=True))
    return law_of_cells(output_law(Token(), p, q, CHAIN_DRAFTS), CHAIN_VOCAB, CHAIN_DRAFTS)


def count_single(rule: Token | Sigmoid, target: np.ndarray, draft: np.ndarray) -> Callable[..., Counts]:
    """One draft a row, from logits: (accepted or not, first token)."""

    def count(machine: Machine, size: int, seed: int) -> Counts:
        seeds = row_seeds(size, seed)
        x = cupyspec.sample(rows_of(draft, size), seed=seeds).tokens
        answer = machine.verify(x[:, None], rows_of(target, size, 2), rows_of(draft, size, 1), seed=seeds, rule=rule)
        return np.bincount(answer.num_accepted * target.size + answer.tokens[:, 0], minlength=2 * target.size)

    return count


LENIENT, LENIENT_TARGET, LENIENT_DRAFT = Token(lenience=0.3), [0.4, 0.3, 0.28, 0.02], [0.1, 0.4, 0.1, 0.4]
# Logits beyond beta on both sides, within on one.
SIGMOID, SIGMOID_TARGET, SIGMOID_DRAFT = Sigmoid(-1, 1), logs([0.5, 0.3, 0.2]) + 2, logs([0.9, 0.05, 0.05]) + 4
SIGMOID_TARGET[0] = 1.2


def count_one_hot(machine: Machine, size: int, seed: int) -> Counts:
    """Draft 1 of no known distribution: (accepted or not, first token)."""
    target = rows_of(logs(ONE_HOT_TARGET), size, 2)
    answer = machine.verify(np.ones((size, 1), np.int32), target, seed=row_seeds(size, seed))
    return np.bincount(answer.num_accepted * 3 + answer.tokens[:, 0], minlength=6)


ONE_HOT_TARGET = np.array([0.5, 0.2, 0.3])
ONE_HOT_LAW = np.concatenate([ONE_HOT_TARGET * [1, 0, 1], ONE_HOT_TARGET * [0, 1, 0]])


def count_tail(machine: Machine, size: int, seed: int) -> Counts:
    """A draft of probability e^-20 / 4 that the drafter gave twice as much, as a probability: half are accepted."""
    q = [0.4, 0.2, 0.2, 0.2, 2 * TAIL_TARGET[4]]
    answer = machine.verify(
        np.full((size, 1), 4, np.int32),
        rows_of(TAIL_LOGITS, size, 2),
        rows_of(q, size, 1),
        seed=row_seeds(size, seed),
        draft_scores="probs",
    )
    return np.bincount(np.where(answer.num_accepted == 1, 4, answer.tokens[:, 0]), minlength=5)


TAIL_LOGITS = np.array([0, 0, 0, 0, -20.0])
TAIL_TARGET = softmax(TAIL_LOGITS)
TAIL_LAW = np.array([0, 1 / 6, 1 / 6, 1 / 6, 1 / 2])


# ------------------------------------------------------------------------------------------------ several segments

WIDE_VOCAB = 3 * SMALL + 5


def _wide_row(masses: list[float], tilt: float) -> np.ndarray:
    """Given mass in each segment, `tilt` times as much on an id of its first half as on one of its second."""
    row = np.empty(WIDE_VOCAB)
    for s, mass in enumerate(masses):
        part = row[s * SMALL : (s + 1) * SMALL]
        part[...] = np.where(np.arange(part.size) < part.size / 2, tilt, 1.0)
        part *= mass / part.sum()
    return logs(row)


WIDE_TARGET = _wide_row([0.1, 0.25, 0.2, 0.45], 3.0)
WIDE_DRAFT = _wide_row([0.45, 0.1, 0.35, 0.1], 1.0)
# By id: segment and half of it. The last cell is for ids that do not exist.
WIDE_CELLS = np.full(4 * SMALL, 8)
for _s in range(4):
    _ids = np.arange(_s * SMALL, min((_s + 1) * SMALL, WIDE_VOCAB))
    WIDE_CELLS[_ids] = 2 * _s + (_ids - _ids[0] >= _ids.size / 2)


def count_wide(machine: Machine, size: int, seed: int) -> Counts:
    """Drafts and what comes after them, by accepted or not and by cell."""
    seeds = row_seeds(size, seed)
    with segments_of(SMALL):
        x = cupyspec.sample(rows_of(WIDE_DRAFT, size), seed=seeds).tokens
    answer = machine.verify(x[:, None], rows_of(WIDE_TARGET, size, 2), rows_of(WIDE_DRAFT, size, 1), seed=seeds)
    accepted = answer.num_accepted
    extra = WIDE_CELLS[answer.tokens[np.arange(size), accepted]]
    return np.bincount(9 * accepted + extra, minlength=18)


def wide_law() -> np.ndarray:
    """Rejected, by the cell of the replacement; accepted, by the cell of the bonus."""
    p, q = (softmax(z.astype(np.float64)) for z in (WIDE_TARGET, WIDE_DRAFT))

    def cells(row: np.ndarray) -> np.ndarray:
        return np.bincount(WIDE_CELLS[:WIDE_VOCAB], weights=row, minlength=9)

    rejected, accepted = single_draft_law(Token(), p, q)
    return np.concatenate([cells(rejected), accepted.sum() * cells(p)])


# ------------------------------------------------------------------------------------------------ random numbers

REJECTION_TARGET, REJECTION_DRAFT = [0.25] * 4, [1.0, 0, 0, 0]


def count_rejections(machine: Machine, size: int, seed: int) -> Counts:
    """Coin, in ninths of the range that rejects, and the token that replaced draft 0."""
    seeds = row_seeds(size, seed)
    rows = rows_of(REJECTION_TARGET, size, 2), rows_of(REJECTION_DRAFT, size, 1)
    answer = machine.verify(np.zeros((size, 1), np.int32), *rows, seed=seeds, scores="probs")
    coins = draws(seeds, batch_size=size, num_draft_tokens=1, vocab_size=4).coins[:, 0].astype(np.float64)
    rejected = answer.num_accepted == 0
    ninths = np.maximum((coins[rejected] - 0.25) * 12, 0).astype(np.int64)
    return np.bincount(ninths * 4 + answer.tokens[rejected, 0], minlength=36)


REJECTION_LAW = np.tile([0, 1 / 27, 1 / 27, 1 / 27], 9)

PAIR_SHARES = np.array([0.4, 0.3, 0.2, 0.1])
PAIR_LAW = np.outer(PAIR_SHARES, PAIR_SHARES).ravel()


def count_pairs(pair: Callable[..., tuple[np.ndarray, np.ndarray]]) -> Callable[[Machine, int, int], Counts]:
    """Tokens of two draws that must know nothing of each other."""

    def count(machine: Machine, size: int, seed: int) -> Counts:
        def tokens(seeds: Any, rows: int = size, **options: Any) -> np.ndarray:
            return machine.sample(rows_of(logs(PAIR_SHARES), rows), seed=seeds, **options).tokens

        first, second = pair(tokens, size, seed)
        return np.bincount(4 * first + second, minlength=16)

    return count


PAIRS: dict[str, Callable[..., Any]] = {
    "neighbouring rows": lambda tokens, n, seed: tokens(row_seeds(2 * n, seed), 2 * n).reshape(n, 2).T,
    "rows of one seed": lambda tokens, n, seed: tokens(seed, 2 * n).reshape(n, 2).T,
    "seeds that differ above bit 32": lambda tokens, n, seed: [
        tokens(row_seeds(n, high + 2 * seed)) for high in range(2)
    ],
    "steps": lambda tokens, n, seed: [tokens(row_seeds(n, seed), step=s) for s in range(2)],
    "positions": lambda tokens, n, seed: [tokens(row_seeds(n, seed), position=i) for i in range(2)],
}


CALL_MASSES = [0.3, 0.25, 0.2, 0.25]


def count_calls(machine: Machine, size: int, seed: int) -> Counts:
    """Two calls of one shape, in the same memory: the segments that replacements of an impossible draft come from."""
    row = _wide_row(CALL_MASSES, 1.0)
    row[7] = -np.inf
    pair = []
    for call in range(2):
        drafts = np.full((size, 1), 7, np.int32)
        tokens = machine.verify(drafts, rows_of(row, size, 2), seed=row_seeds(size, 2 * seed + call)).tokens
        pair.append(tokens[:, 0] // SMALL)
    return np.bincount(4 * pair[0] + pair[1], minlength=16)


def call_law() -> np.ndarray:
    masses = np.array(CALL_MASSES)
    masses[0] *= 255 / 256
    return np.outer(masses, masses).ravel() / masses.sum() ** 2


# ------------------------------------------------------------------------------------------------ coins that are known

COIN_ZERO = seed_with((0.0, 0.0))
COIN_HALF = 16_946_338  # seed_with((0.5, 0.5))
LARGEST_COIN = 62_244_883  # seed_with((1 - 2.0**-24, 1 - 2.0**-24)); its word would round to 1


def count_end_coins(machine: Machine, size: int, seed: int) -> Counts:
    """Coin 0 beside p = 0, a coin of exactly p / q, the largest one beside p = q: refused, refused, accepted."""
    tiny, p = 2.0**-24, np.empty((6, 2, 4), np.float32)
    p[:2], p[2:4], p[4], p[5] = [0, 0.5, 0.25, 0.25], [0.25, 0.25, 0.5, 0], [0.25] * 4, [tiny, 0.5, 0.5, 0]
    q = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0, 0, 0.5], p[4, 0], p[5, 0]], np.float32)
    seeds = np.array([COIN_ZERO] * 2 + [COIN_HALF] * 2 + [LARGEST_COIN] * 2, np.uint64)
    answer = machine.verify(np.zeros((6, 1), np.int32), p, q[:, None], seed=seeds, scores="probs")
    return right_or_wrong(answer.num_accepted == [0, 0, 0, 0, 1, 1])


NEAR_VOCAB, NEAR_ROWS = 300, 8


def count_near_coins(with_normalizer: bool) -> Callable[[Machine, int, int], Counts]:
    """Coins between 2^-14 and 2^-11 of p / q away from it, on both sides: of each decision the right one is known."""

    def count(machine: Machine, size: int, seed: int) -> Counts:
        rng = np.random.default_rng(seed)
        z = rng.normal(0, 1.0, (NEAR_ROWS, NEAR_VOCAB)).astype(np.float32)
        y = rng.normal(0, 1.0, (NEAR_ROWS, NEAR_VOCAB)).astype(np.float32)
        p, q = (softmax(scores.astype(np.float64), axis=1) for scores in (z, y))
        chosen, ids, seeds, right = [], [], [], []
        for r in range(NEAR_ROWS):
            (candidates,) = np.nonzero((p[r] < 0.9 * q[r]) & (p[r] > 0.4 * q[r]))
            x = int(rng.choice(candidates))
            ratio = p[r, x] / q[r, x]
            tried = row_seeds(1 << 16, NEAR_ROWS * seed + r)
            (word,) = draw_words(tried, 0, Purpose.ACCEPT, words=1)
            off = coin(word).astype(np.float64) / ratio - 1
            (near,) = np.nonzero((np.abs(off) > 2.0**-14) & (np.abs(off) < 2.0**-11))
            near = near[: size // NEAR_ROWS]
            chosen += [r] * near.size
            ids += [x] * near.size
            seeds += tried[near].tolist()
            right += (off[near] < 0).tolist()
        options: dict[str, Any] = {}
        if with_normalizer:
            options["draft_log_normalizer"] = logsumexp(y.astype(np.float64), axis=1)[chosen, None]
        answer = machine.verify(
            np.array(ids, np.int32)[:, None],
            np.repeat(z[chosen, None], 2, axis=1),
            y[chosen, None],
            seed=np.array(seeds, np.uint64),
            **options,
        )
        return right_or_wrong((answer.num_accepted == 1) == right)

    return count


# ------------------------------------------------------------------------------------------------ one answer is right


def count_tiny_residuals(machine: Machine, size: int, seed: int) -> Counts:
    """Draft 1, which is impossible; what is left has weights of 2^-26 beside an id that the draft covers."""
    target, draft = [0, -np.inf, -18, -18.5, -19], [0, *[-np.inf] * 4]
    rows = rows_of(target, size, 2), rows_of(draft, size, 1)
    answer = machine.verify(np.ones((size, 1), np.int32), *rows, seed=row_seeds(size, seed))
    return right_or_wrong((answer.num_accepted == 0) & (answer.tokens[:, 0] >= 2))


def count_ties(machine: Machine, size: int, seed: int) -> Counts:
    """Greedy rows whose highest score stands at several ids, near each other and far away."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(-3, 0.5, (size, WIDE_VOCAB)).astype(np.float32)
    for row in rows:
        first = rng.integers(WIDE_VOCAB - 1)
        row[[first, first + 1, *rng.integers(WIDE_VOCAB, size=2)]] = 2.0
    want = np.argmax(rows.astype(np.float64), axis=1)
    answer = machine.sample(rows, seed=seed, sampling=Sampling(0))
    return right_or_wrong(answer.tokens == want)


PLACEHOLDER_TARGET, PLACEHOLDER_DRAFT = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.3, 0.3, 0.3, 0.1])


def count_placeholders(machine: Machine, size: int, seed: int) -> Counts:
    """A draft of -1: (accepted or not, first token)."""
    rows = rows_of(logs(PLACEHOLDER_TARGET), size, 2), rows_of(logs(PLACEHOLDER_DRAFT), size, 1)
    answer = machine.verify(np.full((size, 1), -1, np.int32), *rows, seed=row_seeds(size, seed))
    return np.bincount(answer.num_accepted * 4 + answer.tokens[:, 0], minlength=8)


PADDED = np.array([0.3, *[0.07] * 10])


def count_padded(machine: Machine, size: int, seed: int) -> Counts:
    """11 ids in rows of 16 columns, whose rest holds high scores."""
    row = [*logs(PADDED), *[1.0] * 5]
    tokens = machine.sample(rows_of(row, size), seed=row_seeds(size, seed), vocab_size=11).tokens
    return np.bincount(tokens, minlength=16)


def count_temperatures(machine: Machine, size: int, seed: int) -> Counts:
    """Rows of temperature 0.3 and 3 in turn: (which, token)."""
    odd = np.arange(size) % 2
    sampling = Sampling(np.where(odd, *TEMPERATURES[::-1]))
    tokens = machine.sample(rows_of(TEMPERATURE_ROW, size), seed=row_seeds(size, seed), sampling=sampling).tokens
    return np.bincount(4 * odd + tokens, minlength=8)


TEMPERATURES, TEMPERATURE_ROW = (0.3, 3.0), np.array([2.0, 1.0, 0.0, -1.0])
TEMPERATURE_LAW = np.concatenate([softmax(TEMPERATURE_ROW / t) / 2 for t in TEMPERATURES])


def count_flattened(machine: Machine, size: int, seed: int) -> Counts:
    """Ragged rows end to end, each certain of an id of its own."""
    lengths = np.random.default_rng(seed).integers(0, 3, size)
    owner, target_owner = np.repeat(np.arange(size), lengths), np.repeat(np.arange(size), lengths + 1)
    answer = machine.verify(
        (owner % 7).astype(np.int32),
        logs(np.eye(7))[target_owner % 7],
        np.zeros((owner.size, 7), np.float32),
        seed=row_seeds(size, seed),
        cu_num_draft_tokens=np.cumsum([0, *lengths]),
        max_draft_tokens=2,
    )
    want = np.where(np.arange(3) <= lengths[:, None], np.arange(size)[:, None] % 7, -1)
    return right_or_wrong((answer.tokens == want).all(axis=1))


@cache
def experiments() -> dict[str, Experiment]:
    """Every experiment by its name in the table of planted faults."""
    lenient_law = single_draft_law(LENIENT, LENIENT_TARGET, LENIENT_DRAFT).ravel()
    lenient = count_single(LENIENT, logs(LENIENT_TARGET), logs(LENIENT_DRAFT))
    sigmoid_law = single_draft_law(SIGMOID, SIGMOID_TARGET, SIGMOID_DRAFT).ravel()
    placeholder_law = np.concatenate([PLACEHOLDER_TARGET, np.zeros(4)])
    padded_law = np.concatenate([PADDED, np.zeros(5)])
    return {
        "chain of two drafts": Experiment(count_chains, chain_law(), 1500),
        "lenient rule": Experiment(lenient, lenient_law, 800),
        "sigmoid rule": Experiment(count_single(SIGMOID, SIGMOID_TARGET, SIGMOID_DRAFT), sigmoid_law, 400),
        "one-hot draft": Experiment(count_one_hot, ONE_HOT_LAW, 300),
        "draft from the tail": Experiment(count_tail, TAIL_LAW, 200),
        "several segments": Experiment(count_wide, wide_law(), 800),
        "coin and replacement": Experiment(count_rejections, REJECTION_LAW, 1000),
        **{f"pairs: {name}": Experiment(count_pairs(pair), PAIR_LAW, 250) for name, pair in PAIRS.items()},
        "pairs: calls": Experiment(count_calls, call_law(), 500),
        "coins at the ends": Experiment(count_end_coins, RIGHT_OR_WRONG, 6),
        "coins near p / q": Experiment(count_near_coins(False), RIGHT_OR_WRONG, 200),
        "coins near p / q, normaliser given": Experiment(count_near_coins(True), RIGHT_OR_WRONG, 200),
        "tiny residual": Experiment(count_tiny_residuals, RIGHT_OR_WRONG, 60),
        "ties": Experiment(count_ties, RIGHT_OR_WRONG, 40),
        "placeholder": Experiment(count_placeholders, placeholder_law, 200),
        "padded columns": Experiment(count_padded, padded_law, 300),
        "rows of two temperatures": Experiment(count_temperatures, TEMPERATURE_LAW, 300),
        "flattened rows": Experiment(count_flattened, RIGHT_OR_WRONG, 60),
    }
