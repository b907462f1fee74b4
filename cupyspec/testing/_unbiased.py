"""The check of a whole verifier: drafts from q go in, tokens of the target must come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyspec._checks import host_integer
from cupyspec.rules import Sigmoid, Token
from cupyspec.testing._answers import answer_cells, law_of_cells, number_of_cells
from cupyspec.testing._budget import ErrorBudget
from cupyspec.testing._counts import Counts, Floats
from cupyspec.testing._goodness import chi_square
from cupyspec.testing._host import integers
from cupyspec.testing._laws import Decide, Model, as_model, output_law, target_law
from cupyspec.testing._result import CheckResult
from cupyspec.testing._samplers import _need_positive, _need_power

Ids = npt.NDArray[np.int64]
VerifyLike = Callable[[Ids, npt.NDArray[Any], npt.NDArray[Any], int], Any]


def assert_unbiased(
    verify_like: VerifyLike,
    *,
    p: Any,
    q: Any,
    num_draft_tokens: int,
    draws: int = 100_000,
    batch: int | None = None,
    seed: int = 0,
    rule: Token | Sigmoid | Decide | None = None,
    dtype: npt.DTypeLike = np.float32,
    budget: ErrorBudget = ErrorBudget(),
    detects: float | None = 0.05,
) -> CheckResult:
    """Check that a verifier of drafts emits tokens of the target's law, all positions together.

    Drafts are drawn from `q` token by token, the verifier answers, the target goes on alone where it stopped early, and
    the first K + 1 tokens are tested against the target's joint law: an error at one position that depends on the tokens
    before it shows, as marginal laws would not show it. How many drafts are accepted does not matter, unless a `rule` says
    what it should be.

    Parameters
    ----------
    verify_like : callable
        ``verify_like(draft_tokens [B, K], target_probs [B, K + 1, V], draft_probs [B, K, V], seed)``, NumPy arrays, answers
        tokens [B, K + 1] in any array library: the accepted drafts, one more token, then -1. It may answer (tokens,
        num_accepted).
    p, q : array_like or callable
        Probabilities of target and draft: a row [V], a table [V + 1, V] of rows after each token and at the start, or a
        function of the tokens so far. With a table an error that spoils the next position shows; the vocabulary must be
        small, the joint law has V^(K + 1) cells.
    num_draft_tokens : int
        K.
    draws, batch, seed, budget, detects
        As in `assert_samples_from`.
    rule : Token, Sigmoid or callable, optional
        Test accepted length and tokens together against `output_law` of this rule. For a lossy rule this is the only way.
        With Sigmoid `p` and `q` are logits, and `verify_like` gets them.
    dtype : dtype, default float32
        Of the rows that `verify_like` gets.

    Returns
    -------
    CheckResult

    Raises
    ------
    AssertionError
        A biased answer, or one that is not an accepted prefix, one token of the vocabulary, and -1 behind it.
    CannotDecide
        Too few draws for `detects`, or for any test.
    TypeError, ValueError
        Wrong arguments; an answer of the wrong type or shape.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyspec import verify
    >>> from cupyspec.testing import assert_unbiased
    >>> p = np.array([[0.1, 0.5, 0.4], [0.3, 0.1, 0.6], [0.1, 0.2, 0.7], [0.4, 0.3, 0.3]])  # after 0, 1, 2, at the start
    >>> q = np.array([[0.1, 0.8, 0.1], [0.1, 0.5, 0.4], [0.4, 0.5, 0.1], [0.1, 0.1, 0.8]])
    >>> def mine(drafts, target, draft, seed):
    ...     return verify(drafts, target, draft, seed=seed, scores="probs").tokens
    >>> print(assert_unbiased(mine, p=p, q=q, num_draft_tokens=2))
    chi-square ... on 27 cells, 100000 draws: p = ..., TV seen ...; TV found with 99 %: 0.016
    """
    width = host_integer("num_draft_tokens", num_draft_tokens, 0, 255)
    _need_positive("draws", draws)
    logits = isinstance(rule, Sigmoid)
    experiment = _Experiment(verify_like, as_model("p", p, logits), as_model("q", q, logits), width, logits, dtype)
    if experiment.draft(()).size != experiment.vocab_size:
        raise ValueError(f"p and q must have equal rows, got {experiment.vocab_size} and {experiment.draft(()).size}")
    number_of_cells(experiment.vocab_size, width + 1)  # before the work of enumerating them
    exact = target_law(p, width + 1) if rule is None else output_law(rule, p, q, width)
    law = law_of_cells(exact, experiment.vocab_size, width)
    chunk = draws if batch is None else _need_positive("batch", batch)
    seeds = iter(range(seed, seed + 2**40))
    last: list[Counts] = []

    def check(size: int, stage: int) -> CheckResult:
        counts = np.zeros(law.size, np.int64)
        limit = size if batch is None else chunk
        for start in range(0, size, limit):
            tokens = experiment.run(min(limit, size - start), next(seeds), continued=rule is None)
            counts += np.bincount(answer_cells(tokens, experiment.vocab_size), minlength=law.size)
        last[:] = [counts]
        return chi_square(counts, law, alpha=budget.alpha, power=budget.power)

    result, failed = budget.judge(check, draws)
    if failed:
        what = "the target's law" if rule is None else f"the law of {rule}"
        raise AssertionError(
            f"tokens do not follow {what}: {result}{_worst_answer(last[0], law, experiment.vocab_size, width)}"
        )
    _need_power(result, detects)
    return result


class _Experiment:
    """Drafts from q, a verifier, and the target that goes on."""

    def __init__(
        self, verify_like: VerifyLike, p: Model, q: Model, width: int, logits: bool, dtype: npt.DTypeLike
    ) -> None:
        self.verify_like, self.target, self.draft, self.width, self.dtype = verify_like, p, q, width, dtype
        self.vocab_size, self.logits = p(()).size, logits

    def run(self, batch: int, seed: int, *, continued: bool) -> Ids:
        """Answers [batch, K + 1] of the verifier, gone on with by the target if `continued`."""
        rng = np.random.default_rng([seed % 2**64, 0x6B6974])
        drafts = np.empty((batch, self.width), np.int64)
        target = np.empty((batch, self.width + 1, self.vocab_size))
        draft = np.empty((batch, self.width, self.vocab_size))
        for i in range(self.width + 1):
            target[:, i] = self._rows(self.target, drafts[:, :i])
            if i < self.width:
                draft[:, i] = self._rows(self.draft, drafts[:, :i])
                drafts[:, i] = self._pick(draft[:, i], rng)
        answer = self.verify_like(drafts.copy(), target.astype(self.dtype), draft.astype(self.dtype), seed)
        tokens = self._checked(answer, drafts)
        for i in range(1, self.width + 1):
            if continued and (absent := tokens[:, i] < 0).any():
                tokens[absent, i] = self._pick(self._rows(self.target, tokens[absent, :i]), rng)
        return tokens

    def _rows(self, model: Model, prefixes: Ids) -> Floats:
        """The model's row of each prefix [B, i]."""
        if not prefixes.shape[1]:
            return np.broadcast_to(np.asarray(model(()), np.float64), (len(prefixes), self.vocab_size))
        different, which = np.unique(prefixes, axis=0, return_inverse=True)
        rows = np.stack([np.asarray(model(tuple(prefix)), np.float64) for prefix in different.tolist()])
        return np.asarray(rows[which.ravel()])

    def _pick(self, rows: Floats, rng: np.random.Generator) -> Ids:
        """One id for each row of probabilities, or logits."""
        weights = np.exp(rows - rows.max(axis=1, keepdims=True)) if self.logits else rows
        running = np.cumsum(weights, axis=1)
        u = rng.random(len(rows)) * running[:, -1]
        return np.asarray((running <= u[:, None]).sum(axis=1), np.int64)

    def _checked(self, answer: Any, drafts: Ids) -> Ids:
        """Tokens of an answer that has the form of one."""
        accepted = None
        if isinstance(answer, tuple):
            if len(answer) != 2:
                raise TypeError(f"verify_like must answer tokens, or (tokens, num_accepted), got {len(answer)} things")
            answer, accepted = answer
        batch = len(drafts)
        tokens = integers("verify_like's tokens", answer, (batch, self.width + 1)).copy()
        present = tokens != -1
        length = present.sum(axis=1)
        wrong = {
            "an id outside the vocabulary": ((tokens < -1) | (tokens >= self.vocab_size)).any(axis=1),
            "no token": length == 0,
            "a token behind a -1": (present[:, 1:] & ~present[:, :-1]).any(axis=1),
            "an accepted token that is not the draft": (present[:, 1:] & (tokens[:, :-1] != drafts)).any(axis=1),
        }
        if accepted is not None:
            counted = integers("verify_like's num_accepted", accepted, (batch,))
            wrong["a num_accepted that is not the number of tokens less one"] = counted != length - 1
        for what, rows in wrong.items():
            if rows.any():
                b = int(np.argmax(rows))
                raise AssertionError(
                    f"{int(rows.sum())} of {batch} rows have {what}; row {b}: drafts {drafts[b].tolist()}, "
                    f"tokens {tokens[b].tolist()}"
                )
        return tokens


def _worst_answer(counts: Counts, law: Floats, vocab_size: int, width: int) -> str:
    """The answer that is farthest off, as tokens."""
    draws = int(counts.sum())
    impossible = np.flatnonzero(counts * (law == 0))
    if impossible.size:
        cell = int(impossible[0])
    else:
        cell = int(np.argmax(np.where(law > 0, (counts - draws * law) ** 2 / np.where(law > 0, law, 1), -1)))
    tokens = [cell // (vocab_size + 1) ** i % (vocab_size + 1) - 1 for i in range(width + 1)]
    shown = ", ".join(str(t) for t in tokens if t >= 0)
    return f"; farthest off: tokens ({shown}) came {counts[cell]} times of {draws}, {draws * law[cell]:.1f} expected"
