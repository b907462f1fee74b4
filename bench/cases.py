"""Inputs of a verification, copies of them, and which of their rows have to be read."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import cupyspec
from bench import harness

Ints = npt.NDArray[np.signedinteger[Any]]

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
LOGIT_SPREAD = 3.0  # standard deviation of the target's logits: a few tokens hold most of the mass, as in language
LEAST_COPIES = 16  # so that rows of small batches stop at many positions; less where a batch has many rows anyway
RATED_ROWS = 16  # at most, of a copy, whose acceptance rate is computed
_GAP = 128  # scores between target and draft in memory: the second starts aligned, as an allocation of its own would
_AT_ONCE = 1 << 25  # float32 numbers of noise that are made at once


class Inputs(NamedTuple):
    """One copy of a case's arrays, of PyTorch, or of NumPy where that is all there is."""

    draft_tokens: Any  # [B, K]
    target_logits: Any  # [B, K + 1, V]
    draft_logits: Any  # [B, K, V]
    scores: Any  # flat: the memory that holds both logits, for the read floor


def to_numpy(x: Any) -> npt.NDArray[Any]:
    """An array of either library, on the host."""
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)


class Shape(NamedTuple):
    """Sizes and dtype of a case."""

    batch: int
    drafts: int
    vocab: int
    dtype: str

    def __str__(self) -> str:
        return f"B={self.batch} K={self.drafts} V={self.vocab} {self.dtype}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``1,5,32000,float32``."""
        try:
            batch, drafts, vocab, dtype = (part.strip() for part in text.split(","))
            shape = cls(int(batch), int(drafts), int(vocab), dtype)
        except ValueError as error:
            raise ValueError(f"a shape must be B,K,V,dtype such as 1,5,32000,float32, got {text!r}") from error
        if min(shape[:3]) < 1 or shape.vocab < 2 or dtype not in ITEMSIZE:
            raise ValueError(f"a shape needs B, K >= 1, V >= 2 and dtype {' or '.join(ITEMSIZE)}, got {text!r}")
        return shape

    @property
    def columns(self) -> dict[str, Any]:
        """Of a row of results."""
        return self._asdict()

    @property
    def row_bytes(self) -> int:
        return self.vocab * ITEMSIZE[self.dtype]

    @property
    def score_rows(self) -> int:
        """Of the whole batch, target and draft."""
        return (2 * self.drafts + 1) * self.batch

    @property
    def all_bytes(self) -> int:
        """Every score row once."""
        return self.score_rows * self.row_bytes


MAIN_SHAPES = {
    "cpu": (
        Shape(1, 5, 32000, "float32"),
        Shape(1, 5, 151936, "float32"),
        Shape(1, 5, 151936, "float16"),
        Shape(8, 5, 32000, "float32"),
    ),
    "cuda": (
        Shape(1, 5, 51865, "float16"),
        Shape(1, 5, 32000, "float32"),
        Shape(1, 5, 256000, "float32"),
        Shape(1, 5, 128256, "bfloat16"),
        Shape(8, 5, 128256, "bfloat16"),
        Shape(64, 5, 128256, "bfloat16"),
        Shape(256, 3, 151936, "bfloat16"),
    ),
}


class Rows(NamedTuple):
    """Score rows that a verification reads, summed over the batch and averaged over copies."""

    full: float  # without early exit
    least: float  # what the answer depends on


def rows_read(reads: str, accepted: Ints, drafts: int) -> Rows:
    """Of rows that stop at `accepted` [copies, B].

    `reads` is what has to be summed before the decision: "all" rows; target rows alone ("draft known", "one-hot",
    "greedy"); or nothing ("known"). Where a draft was rejected the pair of rows there is looked at, once more if it was
    summed. After the last draft, and with one-hot drafts, a segment of a row that was summed is enough and not counted.
    """
    batch = accepted.shape[1]
    stopped_at_draft = accepted < drafts
    rejected, reached = float(stopped_at_draft.sum(1).mean()), float((accepted + 1).sum(1).mean())
    reached_drafts = float(np.minimum(accepted + 1, drafts).sum(1).mean())
    targets = float(batch * (drafts + 1))
    return {
        "all": Rows(batch * drafts + targets + 2 * rejected, reached + reached_drafts),
        "draft known": Rows(targets + 2 * rejected, reached + rejected),
        "known": Rows(batch + rejected, batch + rejected),
        "one-hot": Rows(targets, reached),
        "greedy": Rows(targets, reached),
    }[reads]


@dataclass(frozen=True)
class Case:
    """Copies of inputs."""

    shape: Shape
    device: str
    acceptance_wanted: float
    acceptance: float  # mean over rows of the sum over ids of min(p, q)
    copies: list[Inputs]
    accepted: Ints  # [copies, B] by the exact rule


def seeds(copy: int, batch: int, like: Any) -> dict[str, Any]:
    """Seed and step of a copy's call, other ones for each: on a GPU in device memory, as CUDA graphs ask for."""
    if getattr(like, "is_cuda", False):
        import torch

        each = torch.arange(batch, dtype=torch.int64, device=like.device) + copy * batch
        return {"seed": each, "step": torch.full((1,), copy, dtype=torch.int64, device=like.device)}
    if type(like).__module__.startswith("cupy"):
        import cupy

        return {"seed": cupy.arange(batch) + copy * batch, "step": cupy.full((1,), copy)}
    return {"seed": 2024, "step": copy}


def make_case(shape: Shape, device: str, acceptance: float, copies: int | None = None) -> Case:
    """Random logits whose drafts are accepted at about the wanted rate, 1 included.

    `copies` is how many; by default enough for a cold cache and for many positions to stop at.
    """
    if copies is None:
        copies = harness.copies_for(shape.all_bytes, device, max(2, LEAST_COPIES // shape.batch))
    # Noise of this deviation on the draft's logits: where many ids share the mass, sum min(p, q) = 2 Phi(-noise / 2).
    noise = -2 * NormalDist().inv_cdf(acceptance / 2) if acceptance < 1 else 0.0
    scores = _Scores(shape, device, noise)
    made, rates = zip(*(scores.copy(number) for number in range(copies)), strict=True)
    accepted = [
        to_numpy(cupyspec.verify(*inputs[:3], **seeds(number, shape.batch, inputs.draft_tokens)).num_accepted)
        for number, inputs in enumerate(made)
    ]
    return Case(shape, device, acceptance, float(np.mean(rates)), list(made), np.stack(accepted))


class _Scores:
    """Makes copies of a case's inputs, with PyTorch, or with NumPy where that is all there is."""

    def __init__(self, shape: Shape, device: str, noise: float) -> None:
        self.shape, self.noise = shape, noise
        self.device = harness.torch_device(device)
        try:
            import torch
        except ImportError:
            if shape.dtype == "bfloat16":
                raise ValueError("bfloat16 needs PyTorch: NumPy has no such dtype") from None
            self.torch: Any = None
            self.random: Any = np.random.default_rng(0)
        else:
            self.torch = torch
            self.random = torch.Generator(self.device).manual_seed(0)

    def copy(self, number: int) -> tuple[Inputs, float]:
        """Inputs, and the mean acceptance rate of their rows."""
        batch, drafts, vocab, _ = self.shape
        size = batch * (drafts + 1) * vocab
        start = -(-size // _GAP) * _GAP
        scores = self._empty(start + batch * drafts * vocab)
        target, draft = scores[:size].reshape(batch, drafts + 1, vocab), scores[start:].reshape(batch, drafts, vocab)
        scores[size:start] = 0
        rows = max(1, _AT_ONCE // (self.shape.score_rows // batch * vocab))
        for b in range(0, batch, rows):
            part = slice(b, min(b + rows, batch))
            clean = LOGIT_SPREAD * self._normal((part.stop - b, drafts + 1, vocab))
            target[part] = clean
            draft[part] = clean[:, :drafts] + (self.noise and self.noise * self._normal(clean[:, :drafts].shape))
        rated = max(1, min(RATED_ROWS, _AT_ONCE // (drafts * vocab)))
        rate = self._rate(target[:rated, :drafts], draft[:rated])
        # As a drafter would: each token drawn from its own row.
        ids = [
            cupyspec.sample(draft[:, i], seed=1, step=number, position=i, token_dtype="int64").tokens
            for i in range(drafts)
        ]
        tokens = np.stack(ids, 1) if self.torch is None else self.torch.stack(ids, 1)
        return Inputs(tokens, target, draft, scores), rate

    def _empty(self, size: int) -> Any:
        if self.torch is None:
            return np.empty(size, self.shape.dtype)
        return self.torch.empty(size, dtype=getattr(self.torch, self.shape.dtype), device=self.device)

    def _normal(self, shape: tuple[int, ...]) -> Any:
        if self.torch is None:
            return self.random.standard_normal(shape, np.float32)
        return self.torch.randn(shape, generator=self.random, device=self.device)

    def _rate(self, target: Any, draft: Any) -> float:
        if self.torch is None:
            p, q = (np.exp(x.astype(np.float32) - x.max(-1, keepdims=True)) for x in (target, draft))
            return float(np.minimum(p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)).sum(-1).mean())
        p, q = (self.torch.softmax(x, -1, dtype=self.torch.float32) for x in (target, draft))
        return float(self.torch.minimum(p, q).sum(-1).mean())
