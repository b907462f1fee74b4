"""`Verifier`: `verify()` with its memory, kernels and launch plans kept between calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyspec import _run
from cupyspec._arrays import (
    SCORE_DTYPES,
    TOKEN_DTYPES,
    Border,
    Library,
    aligned_empty,
    current_streams,
    parse_device,
    parse_dtype,
    quick_of,
)
from cupyspec._call import MAX_DRAFTS, Array, ChainCall
from cupyspec._checks import check_flags, host_integer
from cupyspec._sampling import Sampling, is_plain
from cupyspec._status import raise_for_status
from cupyspec.chain import Bound, Verification, checked_call
from cupyspec.rules import Sigmoid, Token

_LAYOUTS = ("padded", "flattened")
_DEFAULT = Sampling()
_ALIGNMENT = 256  # of the parts of its memory


class Verifier:
    """`verify()` for an engine's inner loop: it owns its results and scratch, and is compiled when it is made.

    Bound to largest sizes, dtypes, layout, rule and device. A call allocates nothing, waits for nothing, and can be
    captured in a CUDA graph by PyTorch or CuPy. The same program runs on the CPU.

    Parameters
    ----------
    max_batch_size : int
        The most rows B of a call.
    max_draft_tokens : int
        The most drafts K of a row, at most 255.
    vocab_size : int
        V: the columns of scores.
    target_dtype : {"float32", "float16", "bfloat16"} or a library's dtype
        Of the target's scores.
    draft_dtype : optional
        Of the draft's scores; None means as `target_dtype`. Calls without draft scores (one-hot drafts) work in any case.
    token_dtype : {"int32", "int64"}
        Of draft tokens and of the answer's tokens.
    layout : {"padded", "flattened"}
        See `verify`.
    rule : Token or Sigmoid, default Token()
        How drafts are accepted.
    filters : bool, default False
        Whether calls may use top-k, top-p and min-p. Not supported by this version.
    device : str or a library's device
        "cpu", "cuda" (the current device) or "cuda:N".

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind or out of range; a CUDA graph that is being recorded.
    ImportError, RuntimeError
        On a CUDA device, as `verify`.

    Notes
    -----
    **The answer is overwritten by the next call**: it is made of views of the same memory each time. Copy what must last
    longer, and never hand it back as an argument (ValueError). Calls must follow each other on one stream: make one
    Verifier for each stream. Keep it as long as a CUDA graph that was captured with it.

    Quick calls, of a few microseconds, are those on PyTorch or CuPy arrays with contiguous last axes, whose per-row
    parameters are device arrays of the same library or Python numbers. The rest goes the way of `verify` and costs as
    much: lists, NumPy arrays and scalars, CPU arrays (all copied to the device), last axes that are not contiguous (one
    copy), ``check=True``. JAX arrays, and those of other libraries with DLPack, get new arrays as their answer, since
    they cannot be written to.

    In a CUDA graph `seed` and `step` must be device arrays, whose content is changed between replays.

    Memory: about 8 bytes for each score row and segment of 1024 ids, see `scratch_bytes`; nothing of the size of the
    scores.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyspec import Verifier
    >>> verifier = Verifier(max_batch_size=8, max_draft_tokens=1, vocab_size=3, target_dtype="float32", device="cpu",
    ...     token_dtype="int64")
    >>> target = np.log(np.array([[[0.1, 0.8, 0.1], [0.05, 0.05, 0.9]]], np.float32))  # B = 1, K = 1, V = 3
    >>> draft = np.log(np.array([[[0.2, 0.6, 0.2]]], np.float32))
    >>> answer = verifier(np.array([[1]]), target, draft, seed=0, step=0)
    >>> answer.tokens, answer.num_accepted  # as verify() answers
    (array([[1, 2]]), array([1], dtype=int32))
    """

    def __init__(
        self,
        max_batch_size: int,
        max_draft_tokens: int,
        vocab_size: int,
        target_dtype: Any,
        *,
        draft_dtype: Any = None,
        token_dtype: Any = "int32",
        layout: str = "padded",
        rule: Token | Sigmoid = Token(),
        filters: bool = False,
        device: Any,
    ) -> None:
        self.max_batch_size = host_integer("max_batch_size", max_batch_size, 1, (1 << 31) - 1)
        self.max_draft_tokens = host_integer("max_draft_tokens", max_draft_tokens, 0, MAX_DRAFTS)
        self.vocab_size = host_integer("vocab_size", vocab_size, 1, (1 << 31) - 1)
        self.target_dtype = parse_dtype("target_dtype", target_dtype, SCORE_DTYPES)
        self.draft_dtype = (
            self.target_dtype if draft_dtype is None else parse_dtype("draft_dtype", draft_dtype, SCORE_DTYPES)
        )
        self.token_dtype = parse_dtype("token_dtype", token_dtype, TOKEN_DTYPES)
        if not isinstance(layout, str) or layout not in _LAYOUTS:
            raise ValueError(f'layout must be "padded" or "flattened", got {layout!r}')
        if not isinstance(rule, (Token, Sigmoid)):
            raise TypeError(f"rule must be Token(...) or Sigmoid(...), got {rule!r}")
        check_flags(filters=filters)
        if filters:
            raise ValueError("filters must be False: top-k, top-p and min-p are not supported by this version")
        self.layout, self.rule = layout, rule
        self._bound = Bound(
            (self.token_dtype,),
            (self.target_dtype,),
            (self.draft_dtype,),
            self.max_batch_size,
            self.max_draft_tokens,
            self.vocab_size,
        )
        self._device = parse_device("device", device)
        results = [np.dtype(self.token_dtype).itemsize * self.max_batch_size * (self.max_draft_tokens + 1)]
        results.append(8 * self.max_batch_size)  # num_accepted, status
        self._starts = [0, *np.cumsum([-(-size // _ALIGNMENT) * _ALIGNMENT for size in results]).tolist()]
        self._shared: dict[str, tuple[Any, Any]] = {}
        self._plans: Any = None
        self.scratch_bytes = 0
        if self._device.kind == "cpu":
            self._memory: Any = aligned_empty((self._starts[-1],), np.uint8)
            address = self._memory.ctypes.data
        else:
            self._memory = self._build()
            address = int(self._memory.data.ptr)
        self._own = (
            self._memory[: results[0]].view(np.dtype(self.token_dtype)),
            self._memory[self._starts[1] : self._starts[1] + results[1]].view(np.dtype(np.int32)),
        )
        self._addresses = range(address, address + self._memory.size)
        if self._device.kind == "cuda":
            from cupyspec import _packed

            self._plans = _packed.Plans(_packed.VERIFY, self._addresses)

    @property
    def device(self) -> str:
        """What it is bound to: "cpu" or "cuda:N"."""
        return str(self._device)

    def __call__(
        self,
        draft_tokens: Any,
        target_logits: Any,
        draft_logits: Any = None,
        *,
        seed: Any,
        step: Any,
        sampling: Sampling | None = None,
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
        check: bool = False,
    ) -> Verification:
        """Verify a batch of at most `max_batch_size` rows.

        Parameters
        ----------
        draft_tokens, target_logits, draft_logits, seed, step, sampling, draft_sampling, num_draft_tokens, active
            As in `verify`.
        cu_num_draft_tokens, max_draft_tokens
            The same, and only with the flattened layout, where the first is required; the second is the answer's K,
            by default what the Verifier is bound to.
        vocab_size, draft_log_normalizer, target_log_normalizer, scores, draft_scores, check
            As in `verify`. Without `vocab_size` scores have exactly as many columns as the Verifier is bound to.

        Returns
        -------
        Verification
            Views of the Verifier's own memory: overwritten by the next call.

        Raises
        ------
        TypeError, ValueError
            As `verify`; arrays of other sizes, dtypes or devices than it is bound to, or that lie in its own answers.

        Examples
        --------
        >>> import numpy as np
        >>> from cupyspec import Sampling, Verifier
        >>> verifier = Verifier(8, 2, 5, np.float32, layout="flattened", device="cpu")
        >>> drafts, cu = np.array([4, 3, 1], np.int32), np.array([0, 2, 3])  # a row of two drafts, a row of one
        >>> answer = verifier(drafts, np.eye(5, dtype=np.float32), seed=np.array([1, 2]), step=0,
        ...     cu_num_draft_tokens=cu, sampling=Sampling(temperature=0))
        >>> answer.tokens
        array([[ 0, -1, -1],
               [ 3, -1, -1]], dtype=int32)
        """
        plain = check is False
        if sampling is None and draft_sampling is None:
            sampling = _DEFAULT
        else:
            sampling = _DEFAULT if sampling is None else sampling
            plain = plain and is_plain(sampling, draft_sampling)
        given: tuple[Any, ...] = (
            draft_tokens,
            target_logits,
            draft_logits,
            seed,
            step,
            sampling.temperature if plain else None,
            self.rule,
        )
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
            and scores == "logits"
        ):
            given += (
                None if draft_sampling is None or not plain else draft_sampling.temperature,
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
        if plain and self._plans is not None:
            plan = self._plans.find(given)
            if plan is not None:
                plan.run()
                return plan.answer
        check_flags(check=check)
        if self.layout == "padded":
            if cu_num_draft_tokens is not None:
                raise ValueError('cu_num_draft_tokens must be None: the Verifier is bound to layout "padded"')
        elif cu_num_draft_tokens is None:
            raise ValueError('cu_num_draft_tokens must be given: the Verifier is bound to layout "flattened"')
        elif max_draft_tokens is None:
            max_draft_tokens = self.max_draft_tokens
        with Border("target_logits", target_logits) as border:
            if border.device != self._device:
                raise ValueError(
                    f"target_logits must be on {self._device}, which the Verifier is bound to, got {border.device}"
                )
            call = checked_call(
                border,
                draft_tokens,
                target_logits,
                draft_logits,
                seed=seed,
                step=step,
                rule=self.rule,
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
                bound=self._bound,
            )
            border.refuse_overlap(self._addresses, "the Verifier's own answer, which this call overwrites: copy it")
            if not border.library.shares_memory or (border.on_cuda and quick_of(type(target_logits)) is None):
                return _run.answer(Verification, border, call, self.rule, call.outputs(), None, check)
            if border.on_cuda:
                return self._run_on_cuda(border, given, call, check, keep=plain)
            result = _run.on_cpu(call, self.rule)
            for own, values in zip(self._views(self._own, call), result, strict=False):
                own[...] = values
            if check:
                raise_for_status(result.status)
            return self._answer(border.library, call)

    def _build(self) -> Any:
        """Compile, and get memory on the device."""
        from cupyspec import _cuda
        from cupyspec._compile import CupyBackend
        from cupyspec._needs import Range, compile_for

        with _cuda.Guard(self._device.ordinal, None):
            if any(_cuda.stream_is_capturing(stream) for stream in current_streams(self._device.ordinal)):
                raise ValueError("a Verifier cannot be made while a CUDA graph is recorded: make it before")
            calls = Range(
                self.max_batch_size,
                self.max_draft_tokens,
                self.vocab_size,
                self.target_dtype,
                self.draft_dtype,
                self.token_dtype,
                self.rule,
            )
            compile_for([calls])
            self.scratch_bytes = calls.scratch(CupyBackend())
            return _cuda.own((self._starts[-1] + self.scratch_bytes,), "uint8")

    def _views(self, memory: tuple[Any, Any], call: ChainCall) -> tuple[Any, Any, Any]:
        """The arrays of a call's answer."""
        rows, width = call.batch_size, call.num_drafts + 1
        tokens, counts = memory
        second = self.max_batch_size
        return tokens[: rows * width].reshape(rows, width), counts[:rows], counts[second : second + rows]

    def _answer(self, library: Library, call: ChainCall) -> Verification:
        """The answer as arrays of a library."""
        if library.name not in self._shared:
            share = library.share_cuda if self._device.kind == "cuda" else library.share_cpu
            self._shared[library.name] = share(self._own[0]), share(self._own[1])
        return Verification(*self._views(self._shared[library.name], call))

    def _run_on_cuda(
        self, border: Border, given: tuple[Any, ...], call: ChainCall, check: bool, keep: bool
    ) -> Verification:
        from cupyspec import _cuda, _run_cuda

        if _cuda.is_capturing():
            _run_cuda.refuse_host_values(border, call, check)
        call = _run_cuda.with_unit_strides(call)
        answer = self._answer(border.library, call)
        if call.batch_size == 0:
            return answer
        plan = self._plans.make(given, call, self.rule)
        if plan.scratch_size > self.scratch_bytes:
            raise RuntimeError(f"this call needs {plan.scratch_size} bytes of scratch, of {self.scratch_bytes} there")
        start = self._addresses.start
        status = start + self._starts[1] + 4 * self.max_batch_size
        plan.place("tokens", start)
        plan.place("num_accepted", start + self._starts[1])
        plan.place("status", status)
        plan.place_scratch(start + self._starts[-1])
        plan.answer = answer
        plan.run()
        if check:
            raise_for_status(_cuda.to_host(Array(status, (call.batch_size,), (1,), "int32", None, self._memory)))
        if keep:
            self._plans.keep(given, plan)
        return answer
