"""`warm_up()`: compile before the first call."""

from __future__ import annotations

from typing import Any

from cupyspec._arrays import SCORE_DTYPES, TOKEN_DTYPES, current_streams, parse_device, parse_dtype
from cupyspec._call import MAX_DRAFTS
from cupyspec._checks import host_integer
from cupyspec.rules import Sigmoid, Token


def warm_up(
    target_dtype: Any,
    *,
    draft_dtype: Any = None,
    token_dtype: Any = "int32",
    rule: Token | Sigmoid = Token(),
    max_batch_size: int = 1024,
    max_draft_tokens: int = 16,
    vocab_size: int = 262_144,
    device: Any = "cuda",
) -> int:
    """Compile and load the kernels of `verify()` and `sample()` for a range of calls, so that none of them waits for it.

    For engines, and before a CUDA graph is captured: nothing can be compiled inside a capture. A `Verifier` does this for
    its own calls when it is made.

    Parameters
    ----------
    target_dtype : {"float32", "float16", "bfloat16"} or a library's dtype
        Of the target's scores.
    draft_dtype : optional
        Of the draft's scores; None means as `target_dtype`. Calls without draft scores are warm in any case.
    token_dtype : {"int32", "int64"}
        Of draft tokens, and of what `sample()` returns.
    rule : Token or Sigmoid, default Token()
        Its constants do not matter.
    max_batch_size, max_draft_tokens, vocab_size : int
        The largest calls. Sizes are no part of what is compiled, but large calls may use other kernels than small ones.
    device : str or a library's device, default "cuda"
        "cuda" (the current one) or "cuda:N". Nothing is done for "cpu".

    Returns
    -------
    int
        How many kernels are ready.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind or out of range; a CUDA graph that is being recorded.
    ImportError, RuntimeError
        As `verify`.

    Notes
    -----
    CuPy keeps compiled kernels on disk, in ``CUPY_CACHE_DIR`` (by default ``~/.cupy/kernel_cache``): a process compiles
    what none before it did with the same cupyspec, compiler and kind of GPU, and loads the rest. Dtypes and the kind of
    rule are compiled in; sizes, layouts, temperatures and a rule's constants are not.

    Examples
    --------
    >>> from cupyspec import warm_up
    >>> warm_up("bfloat16", device="cpu")
    0
    """
    target = parse_dtype("target_dtype", target_dtype, SCORE_DTYPES)
    draft = target if draft_dtype is None else parse_dtype("draft_dtype", draft_dtype, SCORE_DTYPES)
    token = parse_dtype("token_dtype", token_dtype, TOKEN_DTYPES)
    if not isinstance(rule, (Token, Sigmoid)):
        raise TypeError(f"rule must be Token(...) or Sigmoid(...), got {rule!r}")
    batch = host_integer("max_batch_size", max_batch_size, 1, (1 << 31) - 1)
    drafts = host_integer("max_draft_tokens", max_draft_tokens, 0, MAX_DRAFTS)
    vocab = host_integer("vocab_size", vocab_size, 1, (1 << 31) - 1)
    where = parse_device("device", device)
    if where.kind == "cpu":
        return 0

    from cupyspec import _cuda
    from cupyspec._needs import Range, compile_for

    with _cuda.Guard(where.ordinal, None):
        if any(_cuda.stream_is_capturing(stream) for stream in current_streams(where.ordinal)):
            raise ValueError("warm_up cannot be called while a CUDA graph is recorded: call it before")
        verify = Range(batch, drafts, vocab, target, draft, token, rule)
        # A row of sample() is a chain of no drafts, whatever the rule.
        samples = [Range(batch, 0, vocab, dtype, dtype, token, Token()) for dtype in {target, draft}]
        return compile_for([verify, *samples])
