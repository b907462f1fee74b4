"""Score rows on the CPU in float32: what is wrong with a row, its weights and their segment sums."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyspec._arrays import as_float32, host
from cupyspec._call import PROBABILITY_LIMIT, Array, ChainCall, Scores
from cupyspec._segments import segment_count
from cupyspec._status import Status

Bools = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Statuses = npt.NDArray[np.int32]

SMALLEST = np.float32(2.0**-126)  # temperatures below it are greedy, probabilities below it are 0


class Weights(NamedTuple):
    """Rows of non-negative weights."""

    w: Float32  # [R, V]
    masses: Float32  # [R, S]: sums of w over segments

    @classmethod
    def of(cls, w: Float32, segment: int) -> Weights:
        """Weights [R, V] with their segment sums."""
        rows, vocab = w.shape
        whole = vocab // segment
        masses = np.empty((rows, segment_count(vocab, segment)), np.float32)
        if whole:
            np.add.reduce(w[:, : whole * segment].reshape(rows, whole, segment), axis=2, out=masses[:, :whole])
        if whole < masses.shape[1]:
            np.add.reduce(w[:, whole * segment :], axis=1, out=masses[:, whole])
        return cls(w, masses)

    def total(self) -> Float64:
        """Sum of each row."""
        total: Float64 = np.add.reduce(self.masses, axis=1, dtype=np.float64)
        return total


def per_row(value: float | Array, batch_size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A parameter's value for each of B rows."""
    if isinstance(value, Array):
        return host(value).astype(dtype, copy=False)
    return np.full(batch_size, value, dtype)


class Side:
    """The target's or the draft's score rows of a call, and the status of a row that is not finite or empty."""

    def __init__(
        self, call: ChainCall, scores: Scores, starts: Indices | None, not_finite: Status, empty: Status
    ) -> None:
        self._array, self._vocab_size = scores.array, call.vocab_size
        self._starts = starts  # flattened: index of each batch row's first score row
        self.not_finite, self.empty = np.int32(not_finite), np.int32(empty)
        self.segment = call.segment
        self.probs = scores.probs
        self.temperature = per_row(scores.temperature, call.batch_size, np.float32)
        self.tempered = bool((self.temperature != 1).any())
        self.greedy: Bools = (self.temperature < SMALLEST) & (not scores.probs)
        self.log_normalizer = None if scores.log_normalizer is None else host(scores.log_normalizer)

    def _at(self, b: Indices, i: int) -> tuple[Any, ...]:
        """Index of position i of batch rows b in arrays with one item per score row."""
        return (b, i) if self._starts is None else (self._starts[b] + i,)

    def load(self, b: Indices, i: int) -> Float32:
        """Scores [R, V] of position i, perhaps a view of the caller's memory."""
        columns = slice(self._vocab_size)
        row, *position = self._at(b, i)
        if b.size == 1:  # a slice, so that a float32 row is not copied
            row = slice(row[0], row[0] + 1)
        return as_float32(self._array, (row, *position, columns))

    def score(self, b: Indices, i: int, x: Indices) -> Float32:
        """Scores [R] of ids x at position i."""
        return as_float32(self._array, (*self._at(b, i), x))

    def normalizer(self, b: Indices, i: int) -> Float64 | None:
        """Log-normalisers [R] handed in for position i."""
        if self.log_normalizer is None:
            return None
        values: Float64 = self.log_normalizer[self._at(b, i)].astype(np.float64)
        return values


class Rows:
    """Rows b of one side at position i, read as far as somebody asks."""

    def __init__(self, side: Side, b: Indices, i: int) -> None:
        self.side, self.b, self.i = side, b, i
        self.temperature = side.temperature[b]

    def take(self, rows: Indices) -> Rows:
        """Some of the rows, with what has been read of them."""
        if rows.size == self.b.size:
            return self
        taken = Rows(self.side, self.b[rows], self.i)
        read = vars(self)
        for name in read.keys() & {"scores", "top", "status", "scale"}:
            setattr(taken, name, read[name][rows])
        if "weights" in read:
            taken.weights = Weights(*(values[rows] for values in self.weights))
        return taken

    @cached_property
    def scores(self) -> Float32:
        """All scores [R, V]."""
        return self.side.load(self.b, self.i)

    @cached_property
    def top(self) -> Float32:
        """The highest score of each row, NaN if any is."""
        highest: Float32 = np.maximum.reduce(self.scores, axis=1)
        return highest

    @cached_property
    def status(self) -> Statuses:
        """What is wrong with each whole row."""
        not_finite = ~(self.top < (PROBABILITY_LIMIT if self.side.probs else np.inf))
        if self.side.probs:
            not_finite |= np.minimum.reduce(self.scores, axis=1) < 0
            empty = self.top < SMALLEST
        else:
            empty = self.top == -np.inf
        return np.where(not_finite, self.side.not_finite, empty * self.side.empty)

    @cached_property
    def weights(self) -> Weights:
        """Weights of the whole rows: exp((z - top) / T), or probabilities as given."""
        if self.side.probs:
            return Weights.of(_flushed(self.scores), self.side.segment)
        w = self.scores - self.top[:, None]
        if self.side.tempered:
            w /= self.temperature[:, None]
        np.exp(w, out=w)
        return Weights.of(w, self.side.segment)

    @cached_property
    def scale(self) -> Float64:
        """What the weights are divided by to be probabilities."""
        if self.side.probs:
            return np.ones(self.b.size)
        normalizer = self.side.normalizer(self.b, self.i)
        if normalizer is None:
            return self.weights.total()
        return np.exp((normalizer * self.temperature - self.top) / self.temperature)

    @property
    def normalizer_status(self) -> Statuses:
        """What is wrong with the log-normalisers handed in."""
        normalizer = self.side.normalizer(self.b, self.i)
        if normalizer is None:
            return np.zeros(self.b.size, np.int32)
        return ~np.isfinite(normalizer) * self.side.not_finite

    def probability(self, x: Indices) -> tuple[Float64, Statuses]:
        """Probabilities [R] of ids x, and the status of what was read for them."""
        score = self.side.score(self.b, self.i, x)
        if self.side.probs:
            return _flushed(score).astype(np.float64), self.status
        normalizer = self.side.normalizer(self.b, self.i)
        if normalizer is None:
            return np.exp((score.astype(np.float64) - self.top) / self.temperature) / self.scale, self.status
        status = self.judge_single(score) | self.normalizer_status
        return np.exp((score - normalizer * self.temperature) / self.temperature), status

    def scaled(self, x: Indices | None = None) -> Float64:
        """z / T of ids x [R], or of the whole rows [R, V]."""
        if x is None:
            return self.scores.astype(np.float64) / self.temperature[:, None]
        return self.side.score(self.b, self.i, x).astype(np.float64) / self.temperature

    def judge_single(self, score: npt.NDArray[np.floating[Any]]) -> Statuses:
        """Status of rows of which one logit [R] alone is read."""
        return ~(score < np.inf) * self.side.not_finite


def _flushed(values: Float32) -> Float32:
    """Probabilities with subnormals as 0, as a GPU's float32 arithmetic has them."""
    return np.where(values >= SMALLEST, values, np.float32(0))
