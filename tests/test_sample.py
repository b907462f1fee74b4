"""`sample()`: the documented race, draw by draw, and the normaliser it returns."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp, softmax

import cupyspec
from cupyspec import Sampling
from cupyspec._philox import Purpose, coin, draw_words, unit_exponential
from cupyspec._segments import SEG, segment_count
from cupyspec.reference.race import race
from cupyspec.reference.rows import probabilities
from strategies import FAULTS, SCORE_TYPES, TEMPERATURES, VOCABULARIES, logits, segments_of

PURPOSES = {"draft": Purpose.DRAFT, "target": Purpose.TARGET}


@dataclass
class SampleCase:
    """A call of `sample`."""

    rows: np.ndarray  # [B, V or more]
    vocab_size: int
    seed: np.ndarray
    step: np.ndarray
    position: np.ndarray
    draw: np.ndarray
    purpose: str
    temperature: np.ndarray
    active: np.ndarray | None
    probs: bool
    segment: int

    def sample(self, **changes: Any) -> cupyspec.Sample:
        """The library's answer."""
        arguments = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("rows", "temperature", "probs", "segment"):
            del arguments[name]
        arguments["sampling"] = Sampling() if self.probs else Sampling(self.temperature)
        arguments["scores"] = "probs" if self.probs else "logits"
        with segments_of(self.segment):
            return cupyspec.sample(changes.pop("rows", self.rows), **(arguments | changes))

    def distribution(self, b: int) -> np.ndarray:
        """p of a row, in float64."""
        row = self.rows[b, : self.vocab_size].astype(np.float32)
        return probabilities(row, probs=self.probs, temperature=float(self.temperature[b]))


@st.composite
def sample_cases(draw: st.DrawFn, *, small_segments: bool = False, faults: bool = False) -> SampleCase:
    batch = draw(st.integers(0, 6))
    vocab = draw(st.sampled_from([v for v in VOCABULARIES if v < 300] if small_segments else VOCABULARIES))
    probs, kind = draw(st.booleans()), draw(st.sampled_from(sorted(SCORE_TYPES)))
    scale, banned = draw(st.sampled_from((0.3, 2.0, 12.0))), draw(st.sampled_from((0.0, 0.3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    z = logits(rng, (batch, vocab), scale=scale, banned=banned)
    rows = np.full((batch, vocab + rng.integers(0, 3)), np.nan).astype(SCORE_TYPES[kind])
    rows[:, :vocab] = softmax(z, axis=1) * 0.9 if probs else z
    if faults and batch:
        fault = FAULTS[probs][rng.integers(len(FAULTS[probs]))]
        b, v = rng.integers(batch), slice(vocab) if isinstance(fault, str) else rng.integers(vocab)
        rows[b, v] = (0 if probs else -np.inf) if isinstance(fault, str) else fault
    return SampleCase(
        rows=rows,
        vocab_size=vocab,
        seed=rng.integers(0, 2**64, batch, dtype=np.uint64),
        step=rng.integers(0, 2**56, batch, dtype=np.uint64),
        position=rng.integers(0, 2**16, batch).astype(rng.choice([np.uint16, np.int64])),
        draw=rng.integers(0, 2**16, batch).astype(rng.choice([np.uint16, np.int64])),
        purpose=str(rng.choice(["draft", "target"])),
        temperature=np.ones(batch) if probs else rng.choice(TEMPERATURES, batch),
        active=None if rng.random() < 0.6 else rng.random(batch) < 0.7,
        probs=probs,
        segment=int(rng.integers(4, 65)) if small_segments else SEG,
    )


def check(case: SampleCase) -> None:
    """Each row's token is the race's at the documented counters, unless float32 may answer otherwise."""
    got = case.sample()
    assert got.tokens.dtype == got.status.dtype == np.int32
    assert got.log_normalizer is None
    for b in range(len(case.seed)):
        if case.active is not None and not case.active[b]:
            assert (got.tokens[b], got.status[b]) == (-1, 0)
            continue
        row = case.rows[b, : case.vocab_size].astype(np.float64)
        if np.isnan(row).any() or (row == np.inf).any() or (case.probs and (row < 0).any()):
            assert (got.tokens[b], got.status[b]) == (-1, 1)
            continue
        if (row <= 0).all() if case.probs else (row == -np.inf).all():
            assert (got.tokens[b], got.status[b]) == (-1, 2)
            continue
        exponential, pick = draw_words(
            case.seed[b],
            case.step[b],
            PURPOSES[case.purpose],
            position=int(case.position[b]),
            draw=int(case.draw[b]),
            segment=np.arange(segment_count(case.vocab_size, case.segment)),
        )
        with np.errstate(all="ignore"):
            p = case.distribution(b)
            want = race(p, unit_exponential(exponential), coin(pick).astype(np.float64), segment=case.segment)
        assert got.status[b] == 0
        assert p[got.tokens[b]] > 0
        assert got.tokens[b] == want.token or want.in_band


@given(sample_cases())
def test_tokens_come_from_the_documented_counters(case: SampleCase) -> None:
    """Catches another purpose, position, draw, step or seed than the contract's, and a wrong temperature."""
    check(case)


@given(sample_cases(small_segments=True))
def test_tokens_come_from_the_documented_counters_in_small_segments(case: SampleCase) -> None:
    """Catches a race that mixes up segments."""
    check(case)


@given(sample_cases(faults=True))
def test_faults_have_a_status_in_their_row_alone(case: SampleCase) -> None:
    """Catches a NaN that is drawn, or one that spreads."""
    check(case)


@given(sample_cases(faults=True), st.randoms(use_true_random=False))
def test_rows_do_not_know_their_batch(case: SampleCase, random: Any) -> None:
    """Catches parameters or numbers of a neighbouring row."""
    order = np.array(random.sample(range(len(case.seed)), len(case.seed)), np.intp)
    per_row = ("rows", "seed", "step", "position", "draw", "temperature", "active")
    taken = {name: getattr(case, name)[order] for name in per_row if getattr(case, name) is not None}
    whole = case.sample(return_log_normalizer=not case.probs)
    permuted = dataclasses.replace(case, **taken).sample(return_log_normalizer=not case.probs)
    for name in ("tokens", "status", *(() if case.probs else ("log_normalizer",))):
        np.testing.assert_array_equal(getattr(permuted, name), getattr(whole, name)[order])


@given(sample_cases(faults=True))
def test_log_normalizer_is_the_log_sum_exp(case: SampleCase) -> None:
    """Catches a normaliser of raw logits, of padded columns, or one in base 2; 0 where greedy or off, NaN where bad."""
    if case.probs:
        return
    got = case.sample(return_log_normalizer=True)
    assert got.log_normalizer.dtype == np.float32
    for b, lse in enumerate(got.log_normalizer):
        temperature = np.float32(case.temperature[b])
        if case.active is not None and not case.active[b]:
            assert lse == 0
        elif got.status[b]:
            assert np.isnan(lse)
        elif temperature < 2.0**-126:
            assert lse == 0
        else:
            row = case.rows[b, : case.vocab_size].astype(np.float64)
            assert lse == pytest.approx(logsumexp(row / np.float64(temperature)), rel=1e-6, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_normalizers_of_sample_verify_as_none_do(temperature: float) -> None:
    """Catches a normaliser that verify() understands otherwise: the same drafts are accepted, and replaced alike."""
    rng = np.random.default_rng(0)
    draft, target = rng.normal(0, 3, (2, 2000, 1, 20)).astype(np.float32)
    target = np.repeat(target, 2, axis=1)
    sampling = Sampling(temperature)
    drafted = cupyspec.sample(draft[:, 0], seed=1, sampling=sampling, return_log_normalizer=True)
    x, lse = drafted.tokens[:, None], drafted.log_normalizer[:, None]
    plain = cupyspec.verify(x, target, draft, seed=1, sampling=sampling)
    known = cupyspec.verify(x, target, draft, seed=1, sampling=sampling, draft_log_normalizer=lse)
    assert 100 < plain.num_accepted.sum() < 1900
    # A float32 normaliser is off by 1e-6: of 2,000 rows with about 10 boundaries each 0.02 may differ.
    assert (plain.tokens != known.tokens).any(axis=1).sum() <= 2


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@given(case=sample_cases())
def test_storage_does_not_matter(kind: str, case: SampleCase) -> None:
    """Catches sums in the storage dtype."""
    stored = case.rows.astype(SCORE_TYPES[kind])
    got = case.sample(rows=stored)
    want = case.sample(rows=stored.astype(np.float32))
    np.testing.assert_array_equal(got.tokens, want.tokens)


@pytest.mark.parametrize("token_dtype", ["int32", "int64"])
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_shapes_and_dtypes(token_dtype: str, batch: int) -> None:
    """Catches an answer of another shape or dtype than promised, B = 0 included."""
    got = cupyspec.sample(np.zeros((batch, 3), np.float32), seed=1, token_dtype=token_dtype, return_log_normalizer=True)
    assert (got.tokens.shape, got.tokens.dtype) == ((batch,), token_dtype)
    assert (got.status.shape, got.status.dtype) == ((batch,), np.int32)
    assert (got.log_normalizer.shape, got.log_normalizer.dtype) == ((batch,), np.float32)


@pytest.mark.parametrize("name", ["position", "draw", "step", "purpose"])
def test_each_number_has_its_own_stream(name: str) -> None:
    """Catches an argument that has no effect."""
    rows = np.zeros((200, 50), np.float32)
    other = {name: "target" if name == "purpose" else 1}
    assert (cupyspec.sample(rows, seed=3).tokens != cupyspec.sample(rows, seed=3, **other).tokens).mean() > 0.9


def test_sample_draws_what_verify_would() -> None:
    """Catches two races: sample() with purpose BONUS's numbers is the bonus draw of verify()."""
    rows = np.random.default_rng(0).normal(0, 2, (300, 1, 40)).astype(np.float32)
    seed = np.arange(300, dtype=np.uint64)
    with segments_of(8):
        bonus = cupyspec.verify(np.empty((300, 0), np.int32), rows, seed=seed).tokens[:, 0]
    for b in range(300):
        exponential, pick = draw_words(seed[b], 0, Purpose.BONUS, segment=np.arange(5))
        p = softmax(rows[b, 0].astype(np.float64))
        want = race(p, unit_exponential(exponential), coin(pick).astype(np.float64), segment=8)
        assert bonus[b] == want.token or want.in_band


@pytest.mark.parametrize("name", ["position", "draw"])
@pytest.mark.parametrize("value", [-1, 2**16, [0, 2**16], np.array([-1, 0])])
def test_counters_out_of_range_are_refused(name: str, value: Any) -> None:
    """Catches a position that runs into the draw, or a draw that is cut."""
    with pytest.raises(ValueError, match=name):
        cupyspec.sample(np.zeros((2, 3), np.float32), seed=0, **{name: value})
