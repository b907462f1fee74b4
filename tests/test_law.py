"""Do tokens follow their exact law? Whole answers are counted: how many were accepted, and every token."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from scipy.special import softmax

import cupyspec
from cupyspec import Sampling, Sigmoid, Token
from cupyspec._segments import SEG
from cupyspec.testing import (
    answer_cells,
    assert_samples_from,
    draws_needed,
    law_of_cells,
    output_law,
    single_draft_law,
)
from cupyspec.testing import draws as numbers_of
from strategies import segments_of

DRAWS = 150_000


@dataclass
class Chain:
    """Speculative decoding with two models whose rows depend on the last token: drafts by sample(), then verify()."""

    V: int = 4
    K: int = 2
    models: int = 0  # which random models
    scale: float = 1.5
    kind: Any = np.float32
    rule: Token | Sigmoid = Token()
    temperature: float = 1.0
    draft_temperature: float | None = None
    one_hot: bool = False  # the verifier is not shown the draft's rows
    probs: bool = False
    normalizers: bool = False
    ends_after: int | None = None  # the drafter stops after this token
    segment: int = SEG
    verify_options: dict[str, Any] = field(default_factory=dict)

    @property
    def draft_sampling(self) -> Sampling:
        return Sampling(self.temperature if self.draft_temperature is None else self.draft_temperature)

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Scores of target and draft after each token, and at the start [V + 1, V]."""
        rng = np.random.default_rng([self.models, self.V])
        z = rng.normal(0, self.scale, (2, self.V + 1, self.V))
        z[1] = 0.6 * z[0] + 0.8 * z[1]
        if self.V > 2:
            z[0, :, 1], z[1, 0, 2] = -np.inf, -np.inf  # ids that must not come out, or cannot be drafted
        if self.probs:
            z = softmax(z, axis=-1)
        return tuple(z.astype(self.kind))

    def law(self) -> np.ndarray:
        """Exact law of `answer_cells`."""
        law = output_law(
            self.rule,
            *(self._exact(*side) for side in zip(self.tables(), self._temperatures(), strict=True)),
            self.K,
            greedy=self.temperature == 0,
            one_hot_drafts=self.one_hot,
            ends=lambda prefix: prefix[-1] == self.ends_after,
        )
        return law_of_cells(law, self.V, self.K)

    def _temperatures(self) -> tuple[float, float]:
        return self.temperature or 1.0, self.draft_sampling.temperature

    def _exact(self, table: np.ndarray, temperature: float) -> np.ndarray:
        """Rows as `output_law` takes them: probabilities, or logits for rule Sigmoid."""
        table = table.astype(np.float64)
        if self.probs:
            return table / table.sum(axis=1, keepdims=True)
        if temperature == 0:
            return np.eye(self.V)[np.argmax(table, axis=1)]
        return table / temperature if isinstance(self.rule, Sigmoid) else softmax(table / temperature, axis=1)

    def draw(self, draws: int, fresh: int) -> np.ndarray:
        """Cells of as many answers."""
        target, draft = self.tables()
        last = np.full(draws, self.V)
        contexts, drafts, normalizers = [last], [], []
        scores = "probs" if self.probs else "logits"
        with segments_of(self.segment):
            for i in range(self.K):
                drawn = cupyspec.sample(
                    draft[last],
                    seed=fresh,
                    step=5,
                    position=i,
                    sampling=self.draft_sampling,
                    scores=scores,
                    return_log_normalizer=self.normalizers,
                )
                drafts.append(drawn.tokens)
                normalizers.append(drawn.log_normalizer)
                last = drawn.tokens
                contexts.append(last)
            context = np.stack(contexts, axis=1)
            x = np.stack(drafts, axis=1) if drafts else np.empty((draws, 0), np.int32)
            if self.ends_after is not None:
                x[:, 1:][x[:, :-1] == self.ends_after] = -1
            answer = cupyspec.verify(
                x,
                target[context],
                None if self.one_hot else draft[context[:, :-1]],
                seed=fresh,
                step=5,
                rule=self.rule,
                sampling=Sampling(self.temperature),
                draft_sampling=None if self.draft_temperature is None else Sampling(self.draft_temperature),
                scores=scores,
                draft_log_normalizer=np.stack(normalizers, axis=1) if self.normalizers else None,
                **self.verify_options,
            )
        assert not answer.status.any()
        assert (answer.num_accepted == (answer.tokens >= 0).sum(axis=1) - 1).all()
        return answer_cells(answer.tokens, self.V)


CHAINS = {
    "K = 0": Chain(K=0),
    "K = 1": Chain(K=1),
    "K = 2": Chain(K=2, models=1),
    "K = 3": Chain(K=3, V=3, models=2),
    "V = 2": Chain(K=3, V=2, models=3),
    "one-hot": Chain(one_hot=True),
    "one-hot from an argmax": Chain(draft_temperature=0.0),
    "cold": Chain(temperature=0.5),
    "hot, another temperature for the draft": Chain(temperature=2.0, draft_temperature=0.7),
    "greedy target": Chain(temperature=0.0, draft_temperature=1.0),
    "float16": Chain(kind=np.float16, models=4),
    "bfloat16": Chain(kind=ml_dtypes.bfloat16, models=5),
    "probabilities": Chain(probs=True, models=6),
    "log-normalisers": Chain(normalizers=True, temperature=0.8, models=7),
    "drafts end after a token": Chain(K=3, V=3, ends_after=0, models=8),
    "lenience": Chain(rule=Token(lenience=0.4), models=9),
    "sigmoid": Chain(rule=Sigmoid(-3.0, 2.0), models=10),
    "released sigmoid": Chain(rule=Sigmoid(), K=3, V=3, models=11),
    "small segments": Chain(V=11, K=1, segment=4, models=12),
    "sigmoid in small segments": Chain(V=11, K=1, segment=3, rule=Sigmoid(-1.0, 2.0), models=13),
}


@pytest.mark.parametrize("name", CHAINS)
def test_answers_follow_their_law(name: str) -> None:
    """Catches every bias that the oracle and the CPU path could share: laws come from enumeration, not from either."""
    assert_samples_from(CHAINS[name].draw, CHAINS[name].law(), draws=DRAWS)


@pytest.mark.parametrize("rows_are", ["given by num_draft_tokens", "flattened"])
def test_ragged_rows_follow_their_law(rows_are: str) -> None:
    """Catches rows that use a neighbour's drafts or scores where lengths differ."""
    chain = Chain(K=2, V=3, models=14)
    by_length = [dataclasses.replace(chain, K=k) for k in range(3)]
    law = np.zeros(4**3)
    for k, short in enumerate(by_length):
        part = short.law()
        law[: part.size] += part / 3  # absent tokens are 0 in the number of a cell
        assert part.size == 4 ** (k + 1)
    target, draft = chain.tables()

    def draw(draws: int, fresh: int) -> np.ndarray:
        lengths = np.random.default_rng(fresh).integers(0, 3, draws)
        first = cupyspec.sample(draft[np.full(draws, 3)], seed=fresh, position=0).tokens
        second = cupyspec.sample(draft[first], seed=fresh, position=1).tokens
        context = np.stack([np.full(draws, 3), first, second], axis=1)
        x, z_target, z_draft = np.stack([first, second], axis=1), target[context], draft[context[:, :2]]
        if rows_are == "flattened":
            used = np.arange(3) < lengths[:, None] + 1
            bounds = np.cumsum([0, *lengths])
            answer = cupyspec.verify(
                x[used[:, 1:]],
                z_target[used],
                z_draft[used[:, 1:]],
                seed=fresh,
                cu_num_draft_tokens=bounds,
                max_draft_tokens=2,
            )
        else:
            answer = cupyspec.verify(x, z_target, z_draft, seed=fresh, num_draft_tokens=lengths)
        # The law of a shorter row in the number of cells of a longer one.
        return answer_cells(answer.tokens, 3)

    assert_samples_from(draw, law, draws=DRAWS)


def groups(tokens: np.ndarray) -> np.ndarray:
    """64 groups of ids: the segment they are in, and their place there."""
    return tokens // SEG * 16 + tokens % 16


def grouped(p: np.ndarray) -> np.ndarray:
    """Mass of each group."""
    return np.bincount(groups(np.arange(p.size)), weights=p, minlength=64)


class LargeVocabulary:
    """V = 3 SEG + 5 with 4 % of the target's mass in the last five ids; K = 1, cells of grouped ids."""

    def __init__(self) -> None:
        self.target, self.draft = self._row(0), self._row(1)

    @staticmethod
    def _row(number: int) -> np.ndarray:
        z = np.random.default_rng(number).normal(0, 2.0, 3 * SEG + 5)
        z -= np.log(np.exp(z[:-5]).sum())
        z[-5:] += np.log(0.04 / 0.96) - np.log(np.exp(z[-5:]).sum())
        return z.astype(np.float32)

    def law(self) -> np.ndarray:
        p, q = (softmax(z.astype(np.float64)) for z in (self.target, self.draft))
        rejected, accepted = single_draft_law(Token(), p, q)
        return np.concatenate([grouped(rejected), np.outer(grouped(accepted), grouped(p)).ravel()])

    def draw(self, draws: int, fresh: int, **options: Any) -> np.ndarray:
        cell = []
        for start in range(0, draws, 1000):
            rows = min(1000, draws - start)
            seed = np.arange(start, start + rows) + (fresh << 32)
            target = np.broadcast_to(self.target, (rows, 2, self.target.size))
            draft = np.broadcast_to(self.draft, (rows, 1, self.draft.size))
            x = cupyspec.sample(draft[:, 0], seed=seed).tokens
            got = cupyspec.verify(x[:, None], target, draft, seed=seed, **options)
            first, second = groups(got.tokens).T
            cell.append(np.where(got.num_accepted == 0, first, 64 * (first + 1) + second))
        return np.concatenate(cell)


def test_large_vocabulary_follows_its_law() -> None:
    """Catches a tail segment that is dropped or misplaced, and a pick that is off in long segments."""
    experiment = LargeVocabulary()
    assert_samples_from(experiment.draw, experiment.law(), draws=15_000, detects=0.1)


REJECTION_TARGET, REJECTION_DRAFT = np.full(4, 0.25, np.float32), np.array([1, 0, 0, 0], np.float32)


def rejections(draws: int, fresh: int) -> np.ndarray:
    """Token and coin (in ninths of its range) of rows whose draft was rejected; three in four are."""
    rows = 2 * draws
    got = cupyspec.verify(
        np.zeros((rows, 1), np.int32),
        np.broadcast_to(REJECTION_TARGET, (rows, 2, 4)),
        np.broadcast_to(REJECTION_DRAFT, (rows, 1, 4)),
        seed=fresh,
        scores="probs",
    )
    coins = numbers_of(fresh, batch_size=rows, num_draft_tokens=1, vocab_size=4).coins[:, 0]
    rejected = got.num_accepted == 0
    assert (rejected == (coins >= 0.25)).all()
    ninths = ((coins[rejected].astype(np.float64) - 0.25) * 12).astype(np.int64)
    return (ninths * 4 + got.tokens[rejected, 0])[:draws]


REJECTION_LAW = np.tile([0, 1 / 27, 1 / 27, 1 / 27], 9)


def test_coin_says_nothing_of_the_token_after_a_rejection() -> None:
    """Catches the coin that rejected used again for the draw."""
    assert_samples_from(rejections, REJECTION_LAW, draws=DRAWS)


PAIR_ROW = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
PAIR_SHARES = softmax(PAIR_ROW.astype(np.float64))
PAIR_LAW = np.outer(PAIR_SHARES, PAIR_SHARES).ravel()


def one_token(seed: Any, **options: Any) -> np.ndarray:
    """Tokens of rows that are all alike."""
    rows = np.broadcast_to(PAIR_ROW, (len(seed) if np.ndim(seed) else options.pop("rows"), 4))
    return cupyspec.sample(rows, seed=seed, **options).tokens.astype(np.int64)


PAIRS = {
    "neighbouring rows of one seed": lambda n, fresh: one_token(fresh, rows=2 * n).reshape(n, 2).T,
    "neighbouring seeds": lambda n, fresh: one_token(np.arange(2 * n) + (fresh << 40)).reshape(n, 2).T,
    "seeds that differ above bit 32": lambda n, fresh: [
        one_token(np.arange(n) + (high + 2 * fresh << 32)) for high in range(2)
    ],
    "steps": lambda n, fresh: [one_token(fresh, rows=n, step=s) for s in range(2)],
    "steps that differ above bit 32": lambda n, fresh: [one_token(fresh, rows=n, step=s << 32) for s in range(2)],
    "positions": lambda n, fresh: [one_token(fresh, rows=n, position=i) for i in range(2)],
    "draws": lambda n, fresh: [one_token(fresh, rows=n, draw=i) for i in range(2)],
    "purposes": lambda n, fresh: [one_token(fresh, rows=n, purpose=p) for p in ("draft", "target")],
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_independent(name: str) -> None:
    """Catches a number used twice, and streams of near seeds that run together."""

    def draw(draws: int, fresh: int) -> np.ndarray:
        first, second = PAIRS[name](draws, fresh)
        return 4 * first + second

    assert_samples_from(draw, PAIR_LAW, draws=DRAWS)


def test_draft_and_verification_are_independent() -> None:
    """Catches sample(purpose="draft") and verify() sharing numbers: same seed, step, position and row."""

    def draw(draws: int, fresh: int) -> np.ndarray:
        drafted = one_token(fresh, rows=draws, step=2)
        rows = np.broadcast_to(PAIR_ROW, (draws, 1, 4))
        verified = cupyspec.verify(np.empty((draws, 0), np.int32), rows, seed=fresh, step=2).tokens[:, 0]
        return 4 * drafted + verified

    assert_samples_from(draw, PAIR_LAW, draws=DRAWS)


def test_the_sample_size_has_the_power_that_is_claimed() -> None:
    """Catches a check that passes because it sees too little: 5 % of temperature must show."""
    chain = CHAINS["K = 2"]
    wrong = dataclasses.replace(chain, temperature=1.05)
    assert draws_needed(wrong.law(), chain.law(), power=0.999) <= DRAWS
