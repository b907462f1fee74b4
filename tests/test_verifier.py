"""`Verifier` on the CPU: it answers what `verify` answers, and refuses what it is not bound to.

test_packed.py runs it through the CUDA border, test_gpu_graphs.py on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyspec
from cupyspec import Sampling, Verification, Verifier
from cupyspec._segments import SEG
from strategies import SIGMOIDS, TOKENS, ChainCase, chain_cases

ARRAYS = ("draft_tokens", "target", "draft")
PER_ROW = (
    "seed",
    "step",
    "num_draft_tokens",
    "cu_num_draft_tokens",
    "active",
    "target_log_normalizer",
    "draft_log_normalizer",
)
VOCABULARIES = (1, 7, 33, SEG - 1, SEG + 1, 2 * SEG + 904)


def call_of(case: ChainCase, changes: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of a call, with some changed."""
    keywords = case.arguments() | {k: v for k, v in changes.items() if k not in ARRAYS}
    return [changes.get(name, getattr(case, name)) for name in ARRAYS], keywords


def on_device(
    arrays: list[Any], keywords: dict[str, Any], to: Callable[[Any], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The call's arrays, and its per-row parameters that have several values, through `to`."""

    def move(x: Any) -> Any:
        return to(np.asarray(x)) if isinstance(x, (list, np.ndarray)) else x

    moved = {k: move(v) if k in PER_ROW else v for k, v in keywords.items()}
    for name in ("sampling", "draft_sampling"):
        if keywords[name] is not None:
            moved[name] = Sampling(temperature=move(keywords[name].temperature))
    return [move(x) for x in arrays], moved


def verifier_for(case: ChainCase, layout: str, device: str, /, **changes: Any) -> Verifier:
    """One that is large enough."""
    batch, width = case.draft_tokens.shape
    bound: dict[str, Any] = {
        "max_batch_size": batch + 1,
        "max_draft_tokens": width + 2,
        "vocab_size": case.vocab_size,
        "target_dtype": case.target.dtype.name,
        "draft_dtype": None if case.draft is None else case.draft.dtype.name,
        "token_dtype": case.draft_tokens.dtype.name,
        "layout": layout,
        "rule": case.rule,
        "device": device,
    }
    return Verifier(**bound | changes)


def call(verifier: Verifier, arrays: list[Any], keywords: dict[str, Any]) -> Verification:
    """A Verifier's answer to arguments of `verify`."""
    return verifier(*arrays, **{k: v for k, v in keywords.items() if k != "rule"})


def same(got: Any, want: Any, values: Callable[[Any], Any] = np.asarray) -> bool:
    return all(
        np.array_equal(values(a), b) and values(a).dtype == b.dtype for a, b in zip(got[:3], want[:3], strict=True)
    )


CASES = {
    "token": chain_cases(rules=TOKENS, vocabularies=VOCABULARIES),
    "sigmoid": chain_cases(rules=SIGMOIDS, vocabularies=VOCABULARIES),
    "probs": chain_cases(rules=TOKENS, probs=True, vocabularies=VOCABULARIES),
    "normalizers": chain_cases(rules=TOKENS, normalizers=True, faults=True, vocabularies=VOCABULARIES),
}
every_kind = pytest.mark.parametrize("kind", CASES)
layouts = st.tuples(st.booleans(), st.integers(0, 2**32 - 1))


def changes_of(case: ChainCase, layout: tuple[bool, int]) -> tuple[str, dict[str, Any]]:
    """The layout's name, and what the case's arguments become in it."""
    if layout[0]:
        return "flattened", case.flattened(np.random.default_rng(layout[1]))
    return "padded", {}


# ------------------------------------------------------------------------------------------------ on the CPU


@every_kind
def test_cpu_equals_verify(kind: str) -> None:
    """A Verifier that forgets an argument, or answers with what was in its memory before."""

    @given(case=CASES[kind], layout=layouts)
    def run(case: ChainCase, layout: tuple[bool, int]) -> None:
        name, changes = changes_of(case, layout)
        arrays, keywords = call_of(case, changes)
        verifier = verifier_for(case, name, "cpu")
        for seed in (case.seed, 5):
            keywords["seed"] = seed
            assert same(call(verifier, arrays, keywords), cupyspec.verify(*arrays, **keywords))

    run()


def simple_case(batch: int = 3, width: int = 2, vocab: int = 40, **fields: Any) -> ChainCase:
    rng = np.random.default_rng(0)
    target = rng.normal(0, 2, (batch, width + 1, vocab)).astype(np.float32)
    draft = rng.normal(0, 2, (batch, width, vocab)).astype(np.float32)
    tokens = rng.integers(0, vocab, (batch, width)).astype(np.int32)
    return ChainCase(tokens, target, draft, vocab, **({"seed": np.arange(batch)} | fields))


def test_answers_are_overwritten_and_of_the_callers_library(need_frontend: Callable[[str], ModuleType]) -> None:
    """New memory at each call, or another library's arrays."""
    torch = need_frontend("torch")
    case = simple_case()
    verifier = verifier_for(case, "padded", "cpu")
    arrays = [torch.from_numpy(x) for x in (case.draft_tokens, case.target, case.draft)]
    first = verifier(*arrays, seed=1, step=0)
    kept = first.tokens.clone()
    second = verifier(*arrays, seed=2, step=0)
    assert first.tokens.data_ptr() == second.tokens.data_ptr() and torch.equal(first.tokens, second.tokens)
    assert not torch.equal(kept, second.tokens)
    numpy_answer = verifier(case.draft_tokens, case.target, case.draft, seed=2, step=0)
    assert isinstance(numpy_answer.tokens, np.ndarray) and (numpy_answer.tokens == second.tokens.numpy()).all()
    smaller = verifier(*(x[:2] for x in arrays), seed=1, step=0)
    assert smaller.tokens.shape == (2, 3) and smaller.tokens.is_contiguous()


def test_jax_arrays_get_new_answers(need_frontend: Callable[[str], ModuleType]) -> None:
    """JAX arrays that share memory which is written to."""
    jax = need_frontend("jax")
    case = simple_case()
    verifier = verifier_for(case, "padded", "cpu")
    arrays = [jax.numpy.asarray(x) for x in (case.draft_tokens, case.target, case.draft)]
    first = verifier(*arrays, seed=1, step=0)
    want = np.array(first.tokens)
    verifier(*arrays, seed=2, step=0)
    assert isinstance(first.tokens, jax.Array) and (np.asarray(first.tokens) == want).all()


def test_its_own_answer_is_no_argument() -> None:
    """Draft tokens overwritten while they are read."""
    case = simple_case()
    verifier = verifier_for(case, "padded", "cpu")
    tokens = verifier(case.draft_tokens, case.target, case.draft, seed=1, step=0).tokens
    with pytest.raises(ValueError, match=r"draft_tokens must not lie in the Verifier's own answer"):
        verifier(tokens[:, :2], case.target, case.draft, seed=1, step=0)


def test_check_raises_for_a_bad_row() -> None:
    """`check=True` without effect."""
    case = simple_case()
    case.target[1, 0, 3] = np.nan
    verifier = verifier_for(case, "padded", "cpu")
    with pytest.raises(ValueError, match="row 1"):
        verifier(case.draft_tokens, case.target, case.draft, seed=1, step=0, check=True)
    assert verifier(case.draft_tokens, case.target, case.draft, seed=1, step=0).status[1]


def test_no_rows_and_no_drafts() -> None:
    """B = 0 or K = 0 refused, or answered with rows of another call."""
    case = simple_case()
    verifier = verifier_for(case, "padded", "cpu")
    answer = verifier(case.draft_tokens[:0], case.target[:0], case.draft[:0], seed=1, step=0)
    assert [x.shape for x in answer[:3]] == [(0, 3), (0,), (0,)]
    answer = verifier(case.draft_tokens[:, :0], case.target[:, :1], seed=1, step=0)
    assert same(answer, cupyspec.verify(case.draft_tokens[:, :0], case.target[:, :1], seed=1, step=0))


# Calls that do not fit: what is changed in a good one, the error, and its words.
WRONG: dict[str, tuple[Callable[[Any], dict[str, Any]], type[Exception], str]] = {
    "target dtype": (
        lambda c: {"target": c.target.astype(np.float16)},
        TypeError,
        "target_logits must have dtype float32, got float16",
    ),
    "draft dtype": (
        lambda c: {"draft": c.draft.astype(np.float16)},
        TypeError,
        "draft_logits must have dtype float32, got float16",
    ),
    "token dtype": (
        lambda c: {"draft_tokens": c.draft_tokens.astype(np.int64)},
        TypeError,
        "draft_tokens must have dtype int32, got int64",
    ),
    "too many rows": (
        lambda c: {n: np.concatenate([getattr(c, n)] * 3) for n in ARRAYS},
        ValueError,
        r"draft_tokens must be of at most 4 batch rows \(max_batch_size\), got 9",
    ),
    "too many drafts": (
        lambda c: {n: np.concatenate([getattr(c, n)] * 3, axis=1) for n in ARRAYS},
        ValueError,
        r"draft_tokens must have at most 4 columns, got shape \(3, 6\)",
    ),
    "a wider vocabulary": (
        lambda c: {n: np.pad(getattr(c, n), ((0, 0), (0, 0), (0, 1))) for n in ("target", "draft")},
        ValueError,
        r"target_logits must have 40 columns \(vocab_size\) unless vocab_size is given, got 41",
    ),
    "a smaller vocabulary": (
        lambda c: {n: getattr(c, n)[..., :39] for n in ("target", "draft")},
        ValueError,
        r"target_logits must have 40 columns \(vocab_size\) unless vocab_size is given, got 39",
    ),
    "vocab_size": (
        lambda c: (
            {n: np.pad(getattr(c, n), ((0, 0), (0, 0), (0, 1))) for n in ("target", "draft")} | {"vocab_size": 41}
        ),
        ValueError,
        "vocab_size must be at most 40, got 41",
    ),
    "layout": (
        lambda c: {"cu_num_draft_tokens": np.array([0, 1, 2])},
        ValueError,
        'cu_num_draft_tokens must be None: the Verifier is bound to layout "padded"',
    ),
    "rows that do not match": (
        lambda c: {"target": c.target[:2]},
        ValueError,
        r"target_logits must be \[B, K \+ 1, V\] with 3 x 3 rows",
    ),
    "number of seeds": (lambda c: {"seed": np.arange(4)}, ValueError, "seed must be a scalar"),
    "seed out of range": (lambda c: {"seed": 1 << 64}, ValueError, r"seed must be in \[-2\^63, 2\^64\), got"),
    "step out of range": (lambda c: {"step": 1 << 56}, ValueError, r"step must be in \[0, 72057594037927936\), got"),
    "step of another kind": (lambda c: {"step": 1.0}, TypeError, "step must be integers, got float64"),
    "sampling": (lambda c: {"sampling": Sampling(top_k=3)}, ValueError, "sampling.top_k must be 0"),
    "sampling of another kind": (lambda c: {"sampling": 0.7}, TypeError, "sampling must be a Sampling, got 0.7"),
    "scores": (lambda c: {"scores": "odds"}, ValueError, 'scores must be "logits" or "probs"'),
    "check": (lambda c: {"check": 1}, TypeError, "check must be True or False, got 1"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_cpu_calls_that_do_not_fit(wrong: str) -> None:
    """A call of another shape, dtype or kind than the Verifier is bound to, let through or refused without its name."""
    case = simple_case()
    change, error, words = WRONG[wrong]
    with pytest.raises(error, match=words):
        arrays, keywords = call_of(case, change(case))
        keywords["vocab_size"] = change(case).get("vocab_size")
        call(verifier_for(case, "padded", "cpu"), arrays, keywords)


def test_flattened_calls_that_do_not_fit() -> None:
    """The same for the flattened layout."""
    case = simple_case()
    verifier = verifier_for(case, "flattened", "cpu")
    arrays, keywords = call_of(case, case.flattened(np.random.default_rng(0)))
    keywords["vocab_size"] = None
    for change, words in (
        (
            {"cu_num_draft_tokens": None},
            'cu_num_draft_tokens must be given: the Verifier is bound to layout "flattened"',
        ),
        ({"max_draft_tokens": 5}, r"max_draft_tokens must be in \[0, 4\], got 5"),
    ):
        with pytest.raises(ValueError, match=words):
            call(verifier, arrays, keywords | change)
    target = np.concatenate([arrays[1], arrays[1]])
    with pytest.raises(ValueError, match=r"target_logits must be of at most 4 batch rows \(max_batch_size\), got 12"):
        call(verifier, [arrays[0], target, arrays[2]], keywords)
    answer = call(verifier, arrays, keywords | {"max_draft_tokens": None})
    assert answer.tokens.shape == (3, 5) and (answer.tokens[:, 3:] == -1).all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"max_batch_size": 0}, ValueError, r"max_batch_size must be in \[1, "),
        ({"max_batch_size": 2.0}, TypeError, "max_batch_size must be an integer"),
        ({"max_draft_tokens": 256}, ValueError, r"max_draft_tokens must be in \[0, 255\], got 256"),
        ({"vocab_size": 0}, ValueError, r"vocab_size must be in \[1, "),
        ({"target_dtype": "float64"}, TypeError, "target_dtype must be float32 or float16 or bfloat16, got 'float64'"),
        ({"target_dtype": None}, TypeError, "target_dtype must be float32 or"),
        ({"draft_dtype": np.int32}, TypeError, "draft_dtype must be float32 or"),
        ({"token_dtype": "uint32"}, TypeError, "token_dtype must be int32 or int64, got 'uint32'"),
        ({"layout": "ragged"}, ValueError, 'layout must be "padded" or "flattened"'),
        ({"rule": "token"}, TypeError, r"rule must be Token\(...\) or Sigmoid\(...\)"),
        ({"filters": True}, ValueError, "filters must be False"),
        ({"filters": 1}, TypeError, "filters must be True or False, got 1"),
        ({"device": "tpu"}, ValueError, 'device must be "cpu", "cuda" or "cuda:N", got \'tpu\''),
        ({"device": "cuda:x"}, ValueError, 'device must be "cpu", "cuda" or "cuda:N"'),
        ({"device": "cpu:1"}, ValueError, 'device must be "cpu", "cuda" or "cuda:N"'),
        ({"device": 0}, TypeError, "device must be .*, got 0"),
    ],
    ids=str,
)
def test_bounds_that_cannot_be(change: dict[str, Any], error: type[Exception], words: str) -> None:
    """A mistake that is noticed at the first call, or never."""
    with pytest.raises(error, match=words):
        verifier_for(simple_case(), "padded", "cpu", **change)


@pytest.mark.parametrize("dtype", ["float16", np.float16, np.dtype(np.float16), "torch.float16", "jax.numpy.float16"])
def test_dtypes_and_devices_of_libraries(dtype: Any, need_frontend: Callable[[str], ModuleType]) -> None:
    """A dtype or device that has to be spelt as a string."""
    device: Any = "cpu"
    if dtype == "torch.float16":
        torch = need_frontend("torch")
        dtype, device = torch.float16, torch.device("cpu")
    elif dtype == "jax.numpy.float16":
        jax = need_frontend("jax")
        dtype, device = jax.numpy.float16, jax.devices("cpu")[0]
    verifier = Verifier(1, 1, 5, dtype, device=device)
    assert (verifier.target_dtype, verifier.draft_dtype, verifier.device) == ("float16", "float16", "cpu")


def test_cuda_is_named_where_there_is_none() -> None:
    """An error from deep inside CuPy, or none."""
    pytest.importorskip("cupy")
    with (
        mock.patch("cupyspec._cuda.device_count", lambda: 1),
        pytest.raises(ValueError, match=r"device must be a CUDA device that is there \(1 are\), got 'cuda:3'"),
    ):
        Verifier(1, 1, 5, "float32", device="cuda:3")


def test_arrays_on_another_device_are_named() -> None:
    """CPU arrays where the Verifier is bound to a CUDA device, and the other way round."""
    pytest.importorskip("cupy")
    from fake_gpu import cupy_array, fake_gpu

    case = simple_case()
    with fake_gpu() as gpu:
        on_cpu, on_gpu = (verifier_for(case, "padded", device) for device in ("cpu", "cuda"))
        arrays = case.draft_tokens, case.target, case.draft
        with pytest.raises(
            ValueError, match="target_logits must be on cuda:0, which the Verifier is bound to, got cpu"
        ):
            on_gpu(*arrays, seed=1, step=0)
        with pytest.raises(
            ValueError, match="target_logits must be on cpu, which the Verifier is bound to, got cuda:0"
        ):
            on_cpu(*map(cupy_array, arrays), seed=1, step=0)
        assert not gpu.launches


def test_examples_of_the_docs(need_frontend: Callable[[str], ModuleType]) -> None:
    """docs/engines.md: a loop that an engine's author copies and that does not run."""
    need_frontend("torch")
    page = (Path(__file__).parent.parent / "docs" / "engines.md").read_text(encoding="utf-8")
    variables: dict[str, Any] = {}
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 3
    for code in examples:
        exec(code, variables)
    assert variables["answer"].tokens.shape == (8, 5) and not variables["answer"].status.any()
    assert variables["generated"].min() >= 3
