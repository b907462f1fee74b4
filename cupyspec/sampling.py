"""`sample()`: draw one token per row, the way `verify()` draws."""

from __future__ import annotations

from typing import Any, NamedTuple

from cupyspec import _params
from cupyspec._arrays import SCORE_DTYPES, TOKEN_DTYPES, Border
from cupyspec._call import Array, ChainCall, Scores
from cupyspec._checks import are_probs, check_flags, check_sampling, reject_unsupported, vocabulary
from cupyspec._philox import Purpose
from cupyspec._run import answer, repeat
from cupyspec._sampling import Sampling, is_plain
from cupyspec.rules import Token

_PURPOSES = {"draft": Purpose.DRAFT, "target": Purpose.TARGET}


class Sample(NamedTuple):
    """The answer of `sample`, in the caller's library and on the caller's device.

    Attributes
    ----------
    tokens : array [B], token_dtype
        One id per row; -1 where the row has a fault or is not active.
    status : array [B], int32
        0, or a sum of `Status` bits.
    log_normalizer : array [B], float32, or None
        Natural log-sum-exp of the row after temperature, if asked for; 0 where greedy or not active, NaN where the
        row has a fault.
    """

    tokens: Any
    status: Any
    log_normalizer: Any = None


def sample(
    logits: Any,
    *,
    seed: Any,
    step: Any = 0,
    position: Any = 0,
    draw: Any = 0,
    purpose: str = "draft",
    sampling: Sampling = Sampling(),
    active: Any = None,
    vocab_size: int | None = None,
    scores: str = "logits",
    logit_bias: Any = None,
    token_bitmask: Any = None,
    token_dtype: str = "int32",
    return_log_normalizer: bool = False,
    out: Sample | None = None,
    check: bool = False,
) -> Sample:
    """Draw one token per row from softmax(logits / temperature).

    A draft token drawn by ``sample(..., seed=seed, step=step, position=i)`` shares no random number with
    ``verify(..., seed=seed, step=step)``.

    Parameters
    ----------
    logits : array [B, V] float32, float16 or bfloat16
        Scores, from any library that speaks DLPack.
    seed : int, or integer array [B] or [B, 2] uint32
        As in `verify`: a scalar is split per row, an array holds each row's 64-bit seed, or pairs (high, low).
    step : int or integer array [1] or [B], default 0
        In [0, 2^56). A (seed, step, purpose, position, draw) is used once.
    position : int or integer array [1] or [B], default 0
        Column of ``draft_tokens`` that the token will stand in, in [0, 65536).
    draw : int or integer array [1] or [B], default 0
        Which of several tokens drawn at this position, in [0, 65536).
    purpose : {"draft", "target"}
        "target" is for ordinary sampling from the target model.
    sampling : Sampling
        Temperature of the rows.
    active : array [B] bool or uint8, optional
        False: the row answers -1 with status 0, and nothing of it is read.
    vocab_size : int, optional
        Columns from here on do not exist. Default: V.
    scores : {"logits", "probs"}
        Probabilities need not sum to 1; values below 2^-126 count as 0.
    logit_bias, token_bitmask : None
        Not supported by this version.
    token_dtype : {"int32", "int64"}
        Dtype of the answer.
    return_log_normalizer : bool, default False
        Return what `verify` takes as ``draft_log_normalizer``. Logits only. It is float32 and of the size of
        max(logits) / temperature, so at temperatures below about 0.1 its rounding (2^-24 of it) shows in
        probabilities: there, let `verify` sum the rows itself.
    out : Sample, optional
        Arrays to write the answer to.
    check : bool, default False
        Read the status back and raise if a row has a fault. Synchronises.

    Returns
    -------
    Sample
        (tokens [B], status [B], log_normalizer [B] or None).

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `verify`.

    Notes
    -----
    Segments of ids race with exponentials divided by their mass, and one uniform picks an id inside the winner: the
    categorical law exactly, without a normaliser.

    References
    ----------
    .. [1] Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (the generator, Philox4x32-10).

    Examples
    --------
    >>> import numpy as np
    >>> from cupyspec import Sampling, sample
    >>> logits = np.array([[0.0, 3.0, 1.0]], np.float32)
    >>> sample(logits, seed=0, sampling=Sampling(temperature=0)).tokens
    array([1], dtype=int32)
    """
    given: tuple[Any, ...] | None = None
    if (
        check is False
        and (out is None or type(out) is Sample)
        and is_plain(sampling)
        and logit_bias is token_bitmask is None
    ):
        given = (
            logits,
            seed,
            step,
            position,
            draw,
            sampling.temperature,
            purpose,
            token_dtype,
            return_log_normalizer,
            active,
            vocab_size,
            scores,
        )
        if out is not None:
            given += out
        values = repeat(Sample, given)
        if values is not None:
            return out or Sample(*values)
    reject_unsupported(logit_bias=logit_bias, token_bitmask=token_bitmask)
    check_flags(return_log_normalizer=return_log_normalizer, check=check)
    if not isinstance(purpose, str) or purpose not in _PURPOSES:
        raise ValueError(f'purpose must be "draft" or "target", got {purpose!r}')
    if not isinstance(token_dtype, str) or token_dtype not in TOKEN_DTYPES:
        raise ValueError(f'token_dtype must be "int32" or "int64", got {token_dtype!r}')
    with Border("logits", logits) as border:
        array = border.borrow("logits", logits, SCORE_DTYPES)
        border.library.check_answer_dtype("token_dtype", token_dtype)
        if len(array.shape) != 2:
            raise ValueError(f"logits must be [B, V], got shape {array.shape}")
        probs = are_probs("scores", scores)
        if probs and return_log_normalizer:
            raise ValueError('return_log_normalizer must be False with scores="probs": they have no normaliser')
        batch = array.shape[0]
        active_array = _params.active_rows(border, active, batch)
        looked_at = _params.host_bools(active_array)
        temperature = check_sampling("sampling", sampling, probs).temperature
        # A chain without drafts, whose bonus row is this one.
        row = Array(
            array.pointer,
            (batch, 1, array.shape[1]),
            (array.strides[0], 0, array.strides[1]),
            array.dtype,
            None if array.host is None else array.host[:, None, :],
            array.owner,
        )
        call = ChainCall(
            batch_size=batch,
            num_drafts=0,
            vocab_size=vocabulary(vocab_size, "logits", array),
            draft_tokens=None,
            target=Scores(
                row,
                probs,
                _params.temperatures(border, "sampling.temperature", temperature, batch, looked_at),
                None,
            ),
            draft=None,
            num_draft_tokens=None,
            cu_num_draft_tokens=None,
            active=active_array,
            seed=_params.seeds(border, seed, batch),
            step=_params.steps(border, step, batch, looked_at),
            position=_params.positions(border, "position", position, batch, looked_at),
            draw=_params.positions(border, "draw", draw, batch, looked_at),
            purpose=_PURPOSES[purpose],
            token_dtype=token_dtype,
        )
        outputs: dict[str, tuple[tuple[int, ...], str]] = {
            "tokens": ((batch,), token_dtype),
            "status": ((batch,), "int32"),
        }
        if return_log_normalizer:
            outputs["log_normalizer"] = ((batch,), "float32")
        return answer(Sample, border, call, Token(), outputs, out, check, given)
