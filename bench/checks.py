"""Whether a provider's answers are right, asked before it is timed. A wrong one raises `WrongAnswerError`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bench import harness
from bench.cases import Inputs, to_numpy
from bench.providers import Provider
from cupyspec import Sigmoid, Token
from cupyspec.testing import CannotDecide, chi_square, output_law

ALPHA = 1e-6  # of one chi-square: some ten are made for a provider, so a false alarm is one run in 100,000
LAW_ROWS = 20_000
LAW_CALLS = 2000  # of a provider that takes one row at a time
LAW_SPREAD, LAW_MEAN = 1.5, 8.0  # of logits: with this mean the rule of `ours.REJECTING` accepts and rejects
DIFFERENT_ROWS = 8


class WrongAnswerError(AssertionError):
    """A provider's answer is not what the law of speculative sampling allows."""


def as_inputs(
    draft_tokens: npt.NDArray[Any], target: npt.NDArray[Any], draft: npt.NDArray[Any], dtype: str, device: str
) -> Inputs:
    """NumPy arrays on a device: PyTorch's where it is installed. The read floor has no use here."""
    try:
        import torch
    except ImportError:
        return Inputs(draft_tokens, target.astype(dtype), draft.astype(dtype), None)
    place = harness.torch_device(device)
    scores = (torch.from_numpy(x).to(place, getattr(torch, dtype)) for x in (target, draft))
    return Inputs(torch.from_numpy(draft_tokens).to(place), *scores, None)


def check_shape(provider: Provider, inputs: Inputs, answer: Any, vocab: int) -> None:
    """The form of an answer: a prefix of the drafts, one more token, -1."""
    tokens, accepted = provider.unpack(inputs, answer)
    drafts = to_numpy(inputs.draft_tokens)
    batch, width = drafts.shape
    if tokens.shape != (batch, width + 1) or accepted.shape != (batch,):
        raise WrongAnswerError(
            f"{provider.name}: tokens {tokens.shape} and accepted {accepted.shape} for {drafts.shape}"
        )
    place = np.arange(width + 1)
    right = ((accepted >= 0) & (accepted <= width)).all()
    if right:
        prefix = place[:width] < accepted[:, None]
        last = tokens[np.arange(batch), accepted]
        right = (
            (tokens[:, :width][prefix] == drafts[prefix]).all()
            and ((last >= 0) & (last < vocab)).all()
            and (tokens[place > accepted[:, None]] == -1).all()
        )
    if not right:
        raise WrongAnswerError(f"{provider.name}: not a prefix of the drafts, one more token and -1")


class Certain:
    """Rows with one right answer, at the shape and dtype that are timed: every target row has one possible token.

    `alone` is how: all other ids at -inf, which makes the answer certain under rules without a softmax too. Otherwise
    they are a background of normals, 80 below: whatever else has a chance below 1e-28.
    """

    def __init__(self, batch: int, drafts: int, vocab: int, dtype: str, device: str, alone: bool = False) -> None:
        random = np.random.default_rng(1)
        rows = min(batch, DIFFERENT_ROWS)
        target, draft = (
            np.full((rows, count, vocab), -np.inf, np.float32)
            if alone
            else random.standard_normal((rows, count, vocab), np.float32)
            for count in (drafts + 1, drafts)
        )
        wanted = random.integers(0, vocab, (rows, drafts + 1))
        ids = wanted[:, :drafts].copy()
        stop = random.integers(0, drafts + 1, rows)
        stop[0] = drafts // 2
        wrong = np.arange(drafts) == stop[:, None]
        ids[wrong] = (ids[wrong] + 1) % vocab
        np.put_along_axis(target, wanted[..., None], 80, axis=2)
        np.put_along_axis(draft, ids[..., None], 80, axis=2)

        self.what = f"B={batch}, K={drafts}, V={vocab}, {dtype} on {device}"
        self.inputs = as_inputs(ids, target, draft, dtype, device)
        # A batch larger than the rows repeats them, on its device: that is many times quicker there.
        row = np.arange(batch) % rows
        self.inputs = Inputs(*(array[row] for array in self.inputs[:3]), None)
        self.accepted = stop[row]
        self.tokens = np.where(np.arange(drafts + 1) <= self.accepted[:, None], wanted[row], -1)

    @staticmethod
    def needs_alone(provider: Provider) -> bool:
        """Whether a provider's rule compares no probabilities."""
        return isinstance(provider.law.get("rule"), Sigmoid)

    def check(self, provider: Provider) -> None:
        """Compare a provider's answer with the only one."""
        tokens, accepted = provider.unpack(self.inputs, provider.bind(self.inputs, 0)())
        if not (np.array_equal(accepted, self.accepted) and np.array_equal(tokens, self.tokens)):
            raise WrongAnswerError(f"{provider.name}: not the only possible answer at {self.what}")


def check_law(provider: Provider, device: str) -> None:
    """Chi-square on a small vocabulary: accepted counts, and the token at each position, by the provider's own rule.

    The rows of the drafts are drawn afresh; score rows depend on the position alone, so a token that is given out at a
    position follows that position's law whatever came before. For an exact rule that is the target's row.
    """
    random = np.random.default_rng(2)
    drafts, vocab = 2, 11
    rows = LAW_CALLS if provider.one_row else LAW_ROWS
    target = random.normal(LAW_MEAN, LAW_SPREAD, (drafts + 1, vocab)).astype(np.float32)
    draft = (target[:drafts] + random.normal(0, 1, (drafts, vocab))).astype(np.float32)
    q = softmax(draft)
    ids = np.stack([random.choice(vocab, rows, p=row) for row in q], axis=1)
    if "torch" in provider.needs:
        import torch

        torch.manual_seed(3)
    groups = np.arange(rows).reshape(-1, 1) if provider.one_row else np.arange(rows).reshape(1, -1)
    answers = []
    for copy, group in enumerate(groups):
        target_rows = np.broadcast_to(target, (group.size, drafts + 1, vocab)).copy()
        draft_rows = np.broadcast_to(draft, (group.size, drafts, vocab)).copy()
        inputs = as_inputs(ids[group], target_rows, draft_rows, "float32", device)
        answers.append(provider.unpack(inputs, provider.bind(inputs, copy)()))
    tokens, accepted = (np.concatenate(parts) for parts in zip(*answers, strict=True))

    rates, laws = zip(*(_position_law(provider, *pair) for pair in zip(target, draft, strict=False)), strict=True)
    last = softmax(target[drafts])
    if provider.law.get("greedy"):
        last = (np.arange(vocab) == target[drafts].argmax()).astype(np.float64)
    reached = np.append(1, np.cumprod(rates))
    compare(
        f"{provider.name}: accepted drafts",
        np.bincount(accepted, minlength=drafts + 1),
        reached - np.append(reached[1:], 0),
    )
    for i, law in enumerate((*laws, last)):
        counts = np.bincount(tokens[accepted >= i, i], minlength=vocab)
        compare(f"{provider.name}: tokens at position {i}", counts, law)


def softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """In float64, along the last axis."""
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _position_law(
    provider: Provider, target: npt.NDArray[Any], draft: npt.NDArray[Any]
) -> tuple[float, npt.NDArray[np.float64]]:
    """(chance that a draft is accepted, law of the token given out) where a draft is judged."""
    options = {"rule": Token(), **provider.law}
    rows = (target, draft) if isinstance(options["rule"], Sigmoid) else (softmax(target), softmax(draft))
    law, rate = np.zeros(target.size), 0.0
    for tokens, chance in output_law(options.pop("rule"), *rows, 1, **options).items():
        law[tokens[0]] += chance
        rate += chance * (len(tokens) == 2)
    return rate, law


def compare(what: str, counts: npt.NDArray[Any], law: npt.NDArray[np.float64]) -> None:
    """Chi-square of counts against a law; the certain case too."""
    law = np.maximum(law, 0)  # differences of rounded sums may be below
    if counts[law <= 0].any():
        raise WrongAnswerError(f"{what} do not follow the law: {counts[law <= 0].sum()} impossible ones")
    if not counts.sum() or np.count_nonzero(law > 0) == 1:
        return
    try:
        result = chi_square(counts, law / law.sum(), alpha=ALPHA)
    except CannotDecide:  # all but one token rare: the other positions tell
        return
    if result.rejected:
        raise WrongAnswerError(f"{what} do not follow the law ({result})")
