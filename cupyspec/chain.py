"""`verify()`: check a chain of drafts against the target's scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cupyspec import _params
from cupyspec._arrays import SCORE_DTYPES, TOKEN_DTYPES, Border
from cupyspec._call import MAX_DRAFTS, Array, ChainCall, Scores
from cupyspec._checks import are_probs, check_flags, check_sampling, host_integer, reject_unsupported, vocabulary
from cupyspec._run import answer, repeat
from cupyspec._sampling import Sampling, is_plain
from cupyspec.rules import Sigmoid, Token


class Verification(NamedTuple):
    """The answer of `verify`, in the caller's library and on the caller's device.

    Attributes
    ----------
    tokens : array [B, K + 1], dtype of draft_tokens
        The accepted prefix, exactly one more token, then -1.
    num_accepted : array [B], int32
        Length of the accepted prefix.
    status : array [B], int32
        0, or a sum of `Status` bits.
    diagnostics : None
        Comes with a later version.
    """

    tokens: Any
    num_accepted: Any
    status: Any
    diagnostics: Any = None


def verify(
    draft_tokens: Any,
    target_logits: Any,
    draft_logits: Any = None,
    *,
    seed: Any,
    step: Any = 0,
    rule: Token | Sigmoid = Token(),
    sampling: Sampling = Sampling(),
    draft_sampling: Sampling | None = None,
    num_draft_tokens: Any = None,
    cu_num_draft_tokens: Any = None,
    max_draft_tokens: int | None = None,
    active: Any = None,
    vocab_size: int | None = None,
    draft_log_normalizer: Any = None,
    target_log_normalizer: Any = None,
    scores: str = "logits",
    draft_scores: str | None = None,
    logit_bias: Any = None,
    token_bitmask: Any = None,
    draft_logit_bias: Any = None,
    draft_token_bitmask: Any = None,
    draft_vocab: Any = None,
    diagnostics: Sequence[str] = (),
    out: Verification | None = None,
    check: bool = False,
) -> Verification:
    """Accept a prefix of each row's drafts and draw one more token, so that tokens follow the target's law.

    Arrays may come from NumPy, PyTorch, JAX, CuPy or any library that speaks DLPack, all of one library and on one
    device. Nothing of the caller's is modified.

    Parameters
    ----------
    draft_tokens : array [B, K] int32 or int64
        Drafted ids, K at most 255. -1 ends a row's drafts: later ones are ignored, and the next token comes from the
        target at that position. So does an id below -1 or not below `vocab_size`, and the row gets a status. Flattened layout: [T], see `cu_num_draft_tokens`.
    target_logits : array [B, K + 1, V] float32, float16 or bfloat16
        The target's scores at each draft position and at the one after the last. Flattened: [T + B, V].
    draft_logits : array [B, K, V], optional
        Scores that each draft was really drawn from. None: one-hot drafts (n-gram, prompt look-up, greedy drafter).
        Flattened: [T, V]. The dtype may differ from the target's.
    seed : int, or integer array [B] or [B, 2] uint32
        A scalar (also 0-d) is split into one seed per row, see `row_seeds`. [B]: one 64-bit seed per row, used as
        is. [B, 2] uint32: (high, low), JAX key data. In [-2^63, 2^64).
    step : int or integer array [1] or [B], default 0
        A number new to this seed at every call, for example the tokens generated so far. In [0, 2^56).
    rule : Token or Sigmoid, default Token()
        How drafts are accepted.
    sampling : Sampling
        Acts on target rows, and on draft rows unless `draft_sampling` is given.
    draft_sampling : Sampling, optional
        What the drafts were drawn with, where it differs.
    num_draft_tokens : integer array [B], optional
        Drafts of each row. A row's later drafts and score rows are never looked at. Outside [0, K] it is clamped and
        the row gets a status.
    cu_num_draft_tokens : integer array [B + 1], optional
        Flattened layout: row b's drafts are ``cu[b]`` to ``cu[b + 1]``, its target rows start at ``cu[b] + b``.
    max_draft_tokens : int, optional
        K of the answer in the flattened layout, and required there.
    active : array [B] bool or uint8, optional
        False: the row's answer is all -1, 0 accepted, status 0, and nothing of it is read.
    vocab_size : int, optional
        Columns from here on do not exist. Default: V.
    draft_log_normalizer, target_log_normalizer : array [B, K] / [B, K + 1] float32 or float64, optional
        Natural log-sum-exp of the rows after temperature, if known: saves reading rows whose drafts are accepted, of
        which then only the draft's score is checked. Flattened: [T] / [T + B]. Ignored on greedy rows. Rule Token
        and logits only.
    scores : {"logits", "probs"}
        What the scores are. Probabilities are used as given, never normalised; values below 2^-126 count as 0.
    draft_scores : {"logits", "probs"}, optional
        The same for the draft; None means as `scores`.
    logit_bias, token_bitmask, draft_logit_bias, draft_token_bitmask, draft_vocab : None
        Not supported by this version.
    diagnostics : ()
        Not supported by this version.
    out : Verification, optional
        Arrays to write the answer to, of the right shapes and dtypes, apart from the inputs.
    check : bool, default False
        Read the status back and raise if a row has a fault. Synchronises.

    Returns
    -------
    Verification
        (tokens [B, K + 1], num_accepted [B], status [B]) in the caller's library, on the caller's device.

    Raises
    ------
    TypeError
        Wrong kind or dtype of an argument, arrays of different libraries, JAX tracers.
    ValueError
        Wrong shape or host value of an argument, arrays on different devices; with `check`, a row with a fault.
    ImportError
        A CUDA array without CuPy, with several CuPy packages at once, or without CUDA's run-time compiler.
    RuntimeError
        A GPU older than compute capability 7.5, or kernels that do not compile with the compiler found.

    Notes
    -----
    Token rule: draft x at a position is accepted iff p(x) > 0 and ``u * q(x) < p(x)`` with a coin u on [0, 1). After
    the first rejection the next token comes from norm([p - q]+), or from p if that is zero everywhere; without a
    rejection it comes from the target's next row. Each number is a function of (row seed, step, position) alone: given
    its own seed, a row's tokens do not depend on its batch.

    Bad values get a status in their own row and never disturb another: see `Status`.

    References
    ----------
    .. [1] Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192.
    .. [2] Wagner et al., "Optimized Speculative Sampling for GPU Hardware Accelerators", arXiv 2406.11016.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyspec import verify
    >>> target = np.log(np.array([[[0.1, 0.8, 0.1], [0.05, 0.05, 0.9]]], np.float32))  # B = 1, K = 1, V = 3
    >>> draft = np.log(np.array([[[0.2, 0.6, 0.2]]], np.float32))
    >>> tokens, num_accepted, status, _ = verify(np.array([[1]]), target, draft, seed=0)
    >>> tokens, num_accepted, status  # p(1) > q(1): accepted whatever the coin
    (array([[1, 2]]), array([1], dtype=int32), array([0], dtype=int32))
    """
    if not isinstance(rule, (Token, Sigmoid)):
        raise TypeError(f"rule must be Token(...) or Sigmoid(...), got {rule!r}")
    given: tuple[Any, ...] | None = None
    if (
        check is False
        and (out is None or (type(out) is Verification and out.diagnostics is None))
        and is_plain(sampling, draft_sampling)
        and logit_bias is token_bitmask is draft_logit_bias is draft_token_bitmask is draft_vocab is None
        and type(diagnostics) is tuple
        and not diagnostics
    ):
        given = (draft_tokens, target_logits, draft_logits, seed, step, sampling.temperature, rule)
        if not (
            draft_sampling
            is num_draft_tokens
            is cu_num_draft_tokens
            is max_draft_tokens
            is active
            is vocab_size
            is draft_log_normalizer
            is target_log_normalizer
            is draft_scores
            is None
            and out is None
            and scores == "logits"
        ):
            given += (
                None if draft_sampling is None else draft_sampling.temperature,
                num_draft_tokens,
                cu_num_draft_tokens,
                max_draft_tokens,
                active,
                vocab_size,
                draft_log_normalizer,
                target_log_normalizer,
                scores,
                draft_scores,
            )
            if out is not None:
                given += out[:3]
        values = repeat(Verification, given)
        if values is not None:
            return out or Verification(*values)
    reject_unsupported(
        logit_bias=logit_bias,
        token_bitmask=token_bitmask,
        draft_logit_bias=draft_logit_bias,
        draft_token_bitmask=draft_token_bitmask,
        draft_vocab=draft_vocab,
        diagnostics=None if isinstance(diagnostics, (tuple, list)) and not diagnostics else diagnostics,
    )
    check_flags(check=check)
    with Border("target_logits", target_logits) as border:
        call = checked_call(
            border,
            draft_tokens,
            target_logits,
            draft_logits,
            seed=seed,
            step=step,
            rule=rule,
            sampling=sampling,
            draft_sampling=draft_sampling,
            num_draft_tokens=num_draft_tokens,
            cu_num_draft_tokens=cu_num_draft_tokens,
            max_draft_tokens=max_draft_tokens,
            active=active,
            vocab_size=vocab_size,
            draft_log_normalizer=draft_log_normalizer,
            target_log_normalizer=target_log_normalizer,
            scores=scores,
            draft_scores=draft_scores,
        )
        return answer(Verification, border, call, rule, call.outputs(), out, check, given)


class Bound(NamedTuple):
    """What the arrays of a call may be: a `Verifier` is bound to less than everything."""

    token_dtypes: Sequence[str] = TOKEN_DTYPES
    target_dtypes: Sequence[str] = SCORE_DTYPES
    draft_dtypes: Sequence[str] = SCORE_DTYPES
    max_batch_size: int | None = None
    max_draft_tokens: int = MAX_DRAFTS
    vocab_size: int | None = None

    def check_batch(self, name: str, batch: int) -> None:
        """ValueError for too many rows."""
        if self.max_batch_size is not None and batch > self.max_batch_size:
            raise ValueError(
                f"{name} must be of at most {self.max_batch_size} batch rows (max_batch_size), got {batch}"
            )

    def check_vocabulary(self, vocab_size: Any, target: Array, draft: Array | None) -> int:
        """The number of ids that exist."""
        vocab = vocabulary(vocab_size, "target_logits", target, draft)
        if self.vocab_size is not None and vocab_size is None and vocab != self.vocab_size:
            raise ValueError(
                f"target_logits must have {self.vocab_size} columns (vocab_size) unless vocab_size is given, got {vocab}"
            )
        if self.vocab_size is not None and vocab > self.vocab_size:
            raise ValueError(f"vocab_size must be at most {self.vocab_size}, got {vocab}")
        return vocab


_UNBOUND = Bound()


def checked_call(
    border: Border,
    draft_tokens: Any,
    target_logits: Any,
    draft_logits: Any,
    *,
    seed: Any,
    step: Any,
    rule: Any,
    sampling: Sampling,
    draft_sampling: Sampling | None,
    num_draft_tokens: Any,
    cu_num_draft_tokens: Any,
    max_draft_tokens: int | None,
    active: Any,
    vocab_size: int | None,
    draft_log_normalizer: Any,
    target_log_normalizer: Any,
    scores: str,
    draft_scores: str | None,
    bound: Bound | None = None,
) -> ChainCall:
    """The arguments of `verify`, each looked at, as a call for a back end."""
    bound = bound or _UNBOUND
    target = border.borrow("target_logits", target_logits, bound.target_dtypes)
    tokens = border.borrow("draft_tokens", draft_tokens, bound.token_dtypes)
    border.library.check_answer_dtype("draft_tokens", tokens.dtype)
    draft = None if draft_logits is None else border.borrow("draft_logits", draft_logits, bound.draft_dtypes)
    if num_draft_tokens is not None and cu_num_draft_tokens is not None:
        raise ValueError("num_draft_tokens and cu_num_draft_tokens must not both be given")
    if cu_num_draft_tokens is None:
        batch, width = _padded_layout(tokens, target, draft, max_draft_tokens, bound.max_draft_tokens)
    else:
        batch, width = _flattened_layout(tokens, target, draft, max_draft_tokens, bound.max_draft_tokens)
    bound.check_batch("draft_tokens" if cu_num_draft_tokens is None else "target_logits", batch)
    vocab = bound.check_vocabulary(vocab_size, target, draft)

    target_probs = are_probs("scores", scores)
    draft_probs = target_probs if draft_scores is None else are_probs("draft_scores", draft_scores)
    if isinstance(rule, Sigmoid) and (target_probs or (draft is not None and draft_probs)):
        raise ValueError('scores and draft_scores must be "logits" with rule Sigmoid, got "probs"')
    active_array = _params.active_rows(border, active, batch)
    looked_at = _params.host_bools(active_array)

    def side(array: Array, probs: bool, name: str, given: Sampling, normalizer_name: str, normalizer: Any) -> Scores:
        temperature = check_sampling(name, given, probs).temperature
        return Scores(
            array,
            probs,
            _params.temperatures(border, f"{name}.temperature", temperature, batch, looked_at),
            _normalizer(border, normalizer_name, normalizer, array, probs, rule),
        )

    target_side = side(target, target_probs, "sampling", sampling, "target_log_normalizer", target_log_normalizer)
    if draft_sampling is not None:
        draft_name = "draft_sampling"
    else:
        # Probabilities are what they are: a temperature given for the target's logits says nothing of them.
        draft_name, draft_sampling = "sampling", Sampling() if draft_probs and not target_probs else sampling
    if draft is not None:
        draft_side = side(draft, draft_probs, draft_name, draft_sampling, "draft_log_normalizer", draft_log_normalizer)
    else:
        draft_side = None
        check_sampling(draft_name, draft_sampling, draft_probs)
        if draft_log_normalizer is not None:
            raise ValueError("draft_log_normalizer must be None without draft_logits")

    return ChainCall(
        batch_size=batch,
        num_drafts=width,
        vocab_size=vocab,
        draft_tokens=tokens,
        target=target_side,
        draft=draft_side,
        num_draft_tokens=_params.lengths(border, "num_draft_tokens", num_draft_tokens, batch),
        cu_num_draft_tokens=_params.lengths(border, "cu_num_draft_tokens", cu_num_draft_tokens, batch + 1),
        active=active_array,
        seed=_params.seeds(border, seed, batch),
        step=_params.steps(border, step, batch, looked_at),
        position=0,
        draw=0,
        purpose=None,
        token_dtype=tokens.dtype,
    )


def _padded_layout(
    tokens: Array, target: Array, draft: Array | None, max_draft_tokens: int | None, limit: int
) -> tuple[int, int]:
    """(B, K) of padded arrays."""
    if max_draft_tokens is not None:
        raise ValueError(
            "max_draft_tokens must be None without cu_num_draft_tokens (the flattened layout), "
            f"got {max_draft_tokens!r}"
        )
    _check_rank("draft_tokens", tokens, 2, "[B, K]")
    batch, width = tokens.shape
    if width > limit:
        raise ValueError(f"draft_tokens must have at most {limit} columns, got shape {tokens.shape}")
    _check_rows("target_logits", target, (batch, width + 1), "[B, K + 1, V]")
    if draft is not None:
        _check_rows("draft_logits", draft, (batch, width), "[B, K, V]")
    return batch, width


def _flattened_layout(
    tokens: Array, target: Array, draft: Array | None, max_draft_tokens: int | None, limit: int
) -> tuple[int, int]:
    """(B, K) of flattened arrays, B by the target's T + B rows."""
    if max_draft_tokens is None:
        raise ValueError(
            "max_draft_tokens must be an integer with cu_num_draft_tokens, the width of the answer, got None"
        )
    width = host_integer("max_draft_tokens", max_draft_tokens, 0, limit)
    _check_rank("draft_tokens", tokens, 1, "[T] with cu_num_draft_tokens")
    _check_rank("target_logits", target, 2, "[T + B, V] with cu_num_draft_tokens")
    (total,) = tokens.shape
    batch = target.shape[0] - total
    if batch < 0:
        raise ValueError(
            f"target_logits must have T + B rows, at least the {total} of draft_tokens, got {target.shape[0]}"
        )
    if draft is not None:
        _check_rows("draft_logits", draft, (total,), "[T, V] (cu_num_draft_tokens is given)")
    return batch, width


def _check_rank(name: str, array: Array, rank: int, form: str) -> None:
    if len(array.shape) != rank:
        raise ValueError(f"{name} must be {form}, got shape {array.shape}")


def _check_rows(name: str, array: Array, rows: tuple[int, ...], form: str) -> None:
    _check_rank(name, array, len(rows) + 1, form)
    if array.shape[:-1] != rows:
        raise ValueError(f"{name} must be {form} with {' x '.join(map(str, rows))} rows, got shape {array.shape}")


def _normalizer(
    border: Border, name: str, normalizer: Any, scores: Array, probs: bool, rule: Token | Sigmoid
) -> Array | None:
    """Log-normalisers of a side's rows, where they have a use."""
    if normalizer is None:
        return None
    if probs or isinstance(rule, Sigmoid):
        raise ValueError(f"{name} must be None with {'probabilities' if probs else 'rule Sigmoid'}")
    array = border.borrow(name, normalizer, ("float32", "float64"))
    if array.shape != scores.shape[:-1]:
        raise ValueError(f"{name} must have shape {scores.shape[:-1]}, got {array.shape}")
    return array
