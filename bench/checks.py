"""Whether a provider's answers are right, asked before it is timed. A wrong one raises `WrongAnswerError`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bench.peers import Inputs, Provider, to_numpy
from cupyspec.testing import CannotDecide, chi_square

ALPHA = 1e-6  # of one chi-square: some ten are made for a provider, so a false alarm is one run in 100,000
LAW_ROWS = 20_000
DIFFERENT_ROWS = 16
LAW_CALLS = 2000  # of a provider that takes one row at a time


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
    scores = (torch.from_numpy(x).to(device, getattr(torch, dtype)) for x in (target, draft))
    return Inputs(torch.from_numpy(draft_tokens).to(device), *scores, None)


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
    """Rows with one right answer, at the shape and dtype that are timed: every target row has one possible token."""

    def __init__(self, batch: int, drafts: int, vocab: int, dtype: str, device: str) -> None:
        random = np.random.default_rng(1)
        rows = min(batch, DIFFERENT_ROWS)
        target = random.standard_normal((rows, drafts + 1, vocab), np.float32)
        draft = random.standard_normal((rows, drafts, vocab), np.float32)
        wanted = random.integers(0, vocab, (rows, drafts + 1))
        ids = wanted[:, :drafts].copy()
        stop = random.integers(0, drafts + 1, rows)
        stop[0] = drafts // 2
        wrong = np.arange(drafts) == stop[:, None]
        ids[wrong] = (ids[wrong] + 1) % vocab
        # 80 above a background of normals: whatever else has a chance below 1e-28.
        np.put_along_axis(target, wanted[..., None], 80, axis=2)
        np.put_along_axis(draft, ids[..., None], 80, axis=2)

        self.what = f"B={batch}, K={drafts}, V={vocab}, {dtype} on {device}"
        self.inputs = as_inputs(ids, target, draft, dtype, device)
        # A batch larger than the rows repeats them, on its device: that is many times quicker there.
        row = np.arange(batch) % rows
        self.inputs = Inputs(*(array[row] for array in self.inputs[:3]), None)
        self.accepted = stop[row]
        self.tokens = np.where(np.arange(drafts + 1) <= self.accepted[:, None], wanted[row], -1)

    def check(self, provider: Provider) -> None:
        """Compare a provider's answer with the only one."""
        tokens, accepted = provider.unpack(self.inputs, provider.bind(self.inputs, 0)())
        if not (np.array_equal(accepted, self.accepted) and np.array_equal(tokens, self.tokens)):
            raise WrongAnswerError(f"{provider.name}: not the only possible answer at {self.what}")


def check_law(provider: Provider, device: str) -> None:
    """Chi-square on a small vocabulary: accepted counts, and the token at each position, which must follow the target.

    The rows of the drafts are drawn afresh; score rows depend on the position alone, so a token that is given out at a
    position follows that position's target law whatever came before.
    """
    random = np.random.default_rng(2)
    drafts, vocab = 2, 11
    rows = LAW_CALLS if provider.one_row else LAW_ROWS
    target = random.normal(0, 1.5, (drafts + 1, vocab)).astype(np.float32)
    draft = (target[:drafts] + random.normal(0, 1, (drafts, vocab))).astype(np.float32)
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True) for x in (target, draft))
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

    rate = np.minimum(p[:drafts], q).sum(-1)  # chance that a draft of this position is accepted
    reached = np.append(1, np.cumprod(rate))
    _compare(
        f"{provider.name}: accepted drafts",
        np.bincount(accepted, minlength=drafts + 1),
        reached - np.append(reached[1:], 0),
    )
    for i in range(drafts + 1):
        counts = np.bincount(tokens[accepted >= i, i], minlength=vocab)
        _compare(f"{provider.name}: tokens at position {i}", counts, p[i])


def _compare(what: str, counts: npt.NDArray[Any], law: npt.NDArray[np.float64]) -> None:
    try:
        result = chi_square(counts, law / law.sum(), alpha=ALPHA)
    except CannotDecide:  # all but one token rare: the other positions tell
        return
    if result.rejected:
        raise WrongAnswerError(f"{what} do not follow the law ({result})")
