"""`out=`: written in place and returned as it was given, or refused before anything is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyspec import Sample, Sampling, Verification, sample, verify
from frontends import FRONTENDS, NUMPY_WRITES_IMPORTS, Frontend, OldProducer, Producer, lib

__all__ = ["lib"]  # a fixture

B, K, V = 4, 3, 70
RANDOM = np.random.default_rng(6)
TOKENS = RANDOM.integers(0, V, (B, K)).astype(np.int32)
TARGET = RANDOM.normal(size=(B, K + 1, V)).astype(np.float32)
DRAFT = (TARGET[:, :K] + RANDOM.normal(size=(B, K, V)) / 2).astype(np.float32)
ARGUMENTS: dict[str, Any] = {"seed": 5, "sampling": Sampling(0.5)}


def integers(*shape: int) -> np.ndarray:
    return np.full(shape, 77, np.int32)


def verification(**fields: Any) -> Verification:
    values = {"tokens": integers(B, K + 1), "num_accepted": integers(B), "status": integers(B)}
    return Verification(**(values | fields))


def expect_refusal(words: str, out: Any, error: type[Exception] = ValueError, **arguments: Any) -> None:
    """A call on NumPy arrays is refused, and no field of `out` that can show it was written."""
    arrays: dict[str, Any] = {"draft_tokens": TOKENS, "target_logits": TARGET, "draft_logits": DRAFT}
    before = [np.array(field) for field in out if isinstance(field, np.ndarray)]
    with pytest.raises(error, match=words):
        verify(**(arrays | ARGUMENTS | arguments), out=out)
    for field, copy in zip((field for field in out if isinstance(field, np.ndarray)), before, strict=True):
        np.testing.assert_array_equal(field, copy)


def test_outputs_are_written_in_place_and_returned(lib: Frontend) -> None:
    """Catches new arrays beside those given, fields left unwritten, and a new tuple around the old arrays."""
    arrays = [lib.array(a) for a in (TOKENS, TARGET, DRAFT)]
    expected = verify(TOKENS, TARGET, DRAFT, **ARGUMENTS)
    out = Verification(*(lib.array(np.full_like(values, 77)) for values in expected[:3]))
    if not lib.writable:
        kind = "JAX array: they are immutable" if lib.name == "jax" else "read-only array"
        with pytest.raises(ValueError, match=rf"out\.tokens must be writable, got a {kind}"):
            verify(*arrays, **ARGUMENTS, out=out)
        return
    pointers = [lib.pointer(array) for array in out[:3]]
    for _ in range(2):  # the second call finds the first one's answer there
        assert verify(*arrays, **ARGUMENTS, out=out) is out
        for array, pointer, right in zip(out[:3], pointers, expected[:3], strict=True):
            assert lib.pointer(array) == pointer
            np.testing.assert_array_equal(lib.numpy(array), right)


def test_sample_outputs(lib: Frontend) -> None:
    """Catches the same in `sample`, with and without a log-normaliser, in both dtypes of ids."""
    if not lib.writable:
        return
    logits = lib.array(TARGET[:, 0])
    for token_dtype, normalizer in itertools.product(lib.token_dtypes, (False, True)):
        arguments = ARGUMENTS | {"token_dtype": token_dtype, "return_log_normalizer": normalizer}
        expected = sample(TARGET[:, 0], **arguments)
        out = Sample(*(None if values is None else lib.array(np.full_like(values, 77)) for values in expected))
        assert sample(logits, **arguments, out=out) is out
        for array, right in zip(out, expected, strict=True):
            if right is not None:
                np.testing.assert_array_equal(lib.numpy(array), right)


def test_one_tuple_may_serve_calls_of_other_sizes() -> None:
    """Catches shapes of an earlier call that stick to memory that is used again."""
    memory = integers(B, K + 1), integers(B), integers(B)
    for rows in (B, 1, 0, 3):
        out = Verification(*(array[:rows] for array in memory))
        verify(TOKENS[:rows], TARGET[:rows], DRAFT[:rows], **ARGUMENTS, out=out)
        np.testing.assert_array_equal(out.tokens, verify(TOKENS, TARGET, DRAFT, **ARGUMENTS).tokens[:rows])


STRIDED: dict[str, Callable[[tuple[int, ...]], np.ndarray]] = {
    "every second": lambda shape: integers(*(2 * n for n in shape))[tuple(slice(None, None, 2) for _ in shape)],
    "column-major": lambda shape: integers(*shape[::-1]).T,
    "inside a wider one": lambda shape: integers(*(n + 5 for n in shape))[tuple(slice(2, n + 2) for n in shape)],
    "flipped": lambda shape: np.flip(integers(*shape)),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_outputs(lib: Frontend, name: str) -> None:
    """Catches an output taken for contiguous: values in the wrong slots, or between them (F20)."""
    if not lib.writable or (lib.name == "torch" and name == "flipped"):  # it has no negative strides
        return
    expected = verify(TOKENS, TARGET, DRAFT, **ARGUMENTS)
    memory = [STRIDED[name](values.shape) for values in expected[:3]]
    out = Verification(*(lib.from_memory(array) for array in memory))
    verify(*(lib.array(a) for a in (TOKENS, TARGET, DRAFT)), **ARGUMENTS, out=out)
    for array, right in zip(memory, expected[:3], strict=True):
        np.testing.assert_array_equal(array, right)
        if array.base is not None:
            assert np.count_nonzero(array.base == 77) == array.base.size - array.size


# What is refused


@pytest.mark.parametrize(
    ("field", "value", "error", "words"),
    [
        ("tokens", integers(B, K + 1).astype(np.int64), TypeError, r"must have dtype int32, got int64"),
        ("tokens", np.zeros((B, K + 1), np.float32), TypeError, r"must have dtype int32, got float32"),
        ("tokens", integers(B, K), ValueError, r"must have shape \(4, 4\), got \(4, 3\)"),
        ("tokens", integers(B * (K + 1)), ValueError, r"must have shape \(4, 4\), got \(16,\)"),
        ("tokens", None, TypeError, r"must be an array of NumPy, .*, got None"),
        ("tokens", [[0] * (K + 1)] * B, TypeError, r"must be an array of NumPy, .*, got builtins\.list"),
        ("tokens", Producer(integers(B, K + 1)), TypeError, r"is a frontends array but target_logits is a numpy array"),
        ("num_accepted", integers(B).astype(np.int64), TypeError, r"must have dtype int32, got int64"),
        ("num_accepted", integers(B, 1), ValueError, r"must have shape \(4,\), got \(4, 1\)"),
        ("num_accepted", integers(B + 1), ValueError, r"must have shape \(4,\), got \(5,\)"),
        ("status", integers(B).view(np.uint32), TypeError, r"must have dtype int32, got uint32"),
        ("status", integers(1), ValueError, r"must have shape \(4,\), got \(1,\)"),
        ("status", np.broadcast_to(integers(1), (B,)), ValueError, r"must not repeat memory, .* strides \(0,\)"),
        ("diagnostics", np.zeros(B), ValueError, r"must be None in this call, got ndarray"),
    ],
)
def test_wrong_fields_are_named(field: str, value: Any, error: type[Exception], words: str) -> None:
    """Catches a field that is cast, broadcast or dropped in silence."""
    expect_refusal(rf"^out\.{field} {words}", verification(**{field: value}), error)


def test_draft_tokens_dtype_decides() -> None:
    """Catches int32 outputs filled with int64 ids."""
    expect_refusal(
        r"out\.tokens must have dtype int64, got int32", verification(), TypeError, draft_tokens=TOKENS.astype(np.int64)
    )
    out = verification(tokens=np.zeros((B, K + 1), np.int64))
    assert verify(TOKENS.astype(np.int64), TARGET, DRAFT, **ARGUMENTS, out=out) is out


def test_read_only_outputs() -> None:
    """Catches a write through a read-only array, and a copy of it that is written instead (F21)."""
    for field in ("tokens", "num_accepted", "status"):
        out = verification()
        getattr(out, field).flags.writeable = False
        expect_refusal(rf"out\.{field} must be writable, got a read-only array", out)
    arrays = [Producer(a) for a in (TOKENS, TARGET, DRAFT)]
    for tokens in (Producer(integers(B, K + 1), read_only=True), OldProducer(integers(B, K + 1))):
        # The protocol before 1.0 has no flag for it: NumPy takes such memory as read-only.
        out = Verification(tokens, Producer(integers(B)), Producer(integers(B)))
        with pytest.raises(ValueError, match=r"out\.tokens must be writable, got a read-only array"):
            verify(*arrays, **ARGUMENTS, out=out)
        assert (tokens.values == 77).all()


def test_outputs_that_repeat_their_own_memory() -> None:
    """Catches elements that overwrite each other without any stride being 0."""
    ring = np.lib.stride_tricks.as_strided(integers(B + K), (B, K + 1), (4, 4))
    expect_refusal(
        r"out\.tokens must not repeat memory, got shape \(4, 4\) with strides \(1, 1\)", verification(tokens=ring)
    )
    overlapping = np.lib.stride_tricks.as_strided(integers(20), (B, K + 1), (12, 4))
    expect_refusal(r"out\.tokens must not repeat memory", verification(tokens=overlapping))
    just_apart = np.lib.stride_tricks.as_strided(integers(20), (B, K + 1), (16, 4))
    assert (verify(TOKENS, TARGET, DRAFT, **ARGUMENTS, out=verification(tokens=just_apart)).tokens != 77).all()


def of_int32(array: np.ndarray) -> np.ndarray:
    """The first B 32-bit words of an array's memory, where an output would lie on it."""
    return array.reshape(-1).view(np.int32)[:B]


INPUTS: dict[str, Callable[[], tuple[dict[str, Any], np.ndarray]]] = {}


def _input(name: str, array: np.ndarray, wrap: Callable[[np.ndarray], Any] = lambda a: a) -> None:
    INPUTS[name if name not in INPUTS else f"{name} {array.dtype}"] = lambda: (
        {name: wrap(fresh := array.copy())},
        fresh,
    )


_input("draft_tokens", TOKENS)
_input("target_logits", TARGET)
_input("draft_logits", DRAFT)
_input("draft_logits", DRAFT.astype(np.float16))
_input("target_log_normalizer", np.zeros((B, K + 1), np.float32))
_input("draft_log_normalizer", np.zeros((B, K), np.float64))
_input("num_draft_tokens", np.full(B, K, np.int32))
_input("num_draft_tokens", np.full(B, K, np.int64))
_input("active", np.ones(4 * B, np.uint8), lambda a: a[:B])
for dtype in (np.int32, np.uint32, np.int64, np.uint64):
    _input("seed", np.arange(B, dtype=dtype))
    _input("step", np.arange(B, dtype=dtype))
_input("seed", np.ones((B, 2), np.uint32))
_input("sampling", np.ones(B, np.float32), Sampling)
_input("sampling", np.ones(B, np.float64), Sampling)
_input("draft_sampling", np.ones(2 * B, np.float16), lambda a: Sampling(a[::2]))


@pytest.mark.parametrize("name", INPUTS)
def test_outputs_that_overlap_an_input(name: str) -> None:
    """Catches an input that is destroyed, or read after it was written, whatever it is converted to on the way."""
    given, memory = INPUTS[name]()
    for field in ("status", "num_accepted"):
        out = verification(**{field: of_int32(memory)})
        expect_refusal(rf"out\.{field} must not overlap an input or another output", out, **given)
    assert verify(
        **({"draft_tokens": TOKENS, "target_logits": TARGET, "draft_logits": DRAFT} | ARGUMENTS | given),
        out=verification(),
    )


def test_partial_overlap() -> None:
    """Catches overlap looked for at the first element only, or by bounds alone."""
    memory = integers(200)
    for start in range(B * K + 4 + 1):
        tokens = memory[4 : 4 + B * K].reshape(B, K)
        tokens[...] = TOKENS
        status = memory[start : start + B]
        overlaps = start + B > 4 and start < 4 + B * K
        if overlaps:
            expect_refusal("must not overlap", verification(status=status), draft_tokens=tokens)
        else:
            verify(tokens, TARGET, DRAFT, **ARGUMENTS, out=verification(status=status))
    # Columns of one matrix: their bounds cross, they share nothing.
    matrix = integers(B, 2 * K + 1)
    matrix[:, :K] = TOKENS
    out = verification(tokens=matrix[:, K:])
    answer = verify(matrix[:, :K], TARGET, DRAFT, **ARGUMENTS, out=out)
    np.testing.assert_array_equal(answer.tokens, verify(TOKENS, TARGET, DRAFT, **ARGUMENTS).tokens)
    np.testing.assert_array_equal(matrix[:, :K], TOKENS)
    woven = integers(B, 2 * K + 1)
    woven[:, 1::2] = TOKENS
    answer = verify(woven[:, 1::2], TARGET, DRAFT, **ARGUMENTS, out=verification(tokens=woven[:, ::2]))
    np.testing.assert_array_equal(answer.tokens, verify(TOKENS, TARGET, DRAFT, **ARGUMENTS).tokens)
    expect_refusal("must not overlap", verification(tokens=matrix[:, K - 1 : -1]), draft_tokens=matrix[:, :K])


def test_outputs_that_overlap_each_other() -> None:
    """Catches one output written over another."""
    both = integers(B)
    expect_refusal(r"out\.status must not overlap", verification(num_accepted=both, status=both))
    tokens = integers(B, K + 1)
    expect_refusal(r"out\.status must not overlap", verification(tokens=tokens, status=tokens[:, K]))
    expect_refusal(r"out\.num_accepted must not overlap", verification(tokens=tokens, num_accepted=tokens[1]))
    half = integers(B + 2)
    expect_refusal(r"out\.status must not overlap", verification(num_accepted=half[:B], status=half[2:]))
    pairs = integers(B, 2)
    answer = verify(TOKENS, TARGET, DRAFT, **ARGUMENTS, out=verification(num_accepted=pairs[:, 0], status=pairs[:, 1]))
    np.testing.assert_array_equal(answer.status, np.zeros(B))


def test_overlap_in_other_libraries(lib: Frontend) -> None:
    """Catches overlap that is found between NumPy arrays only."""
    if not lib.writable:
        return
    tokens = lib.array(TOKENS)
    status = lib.from_memory(lib.numpy(tokens).reshape(-1)[2 : 2 + B])
    out = Verification(lib.array(integers(B, K + 1)), lib.array(integers(B)), status)
    with pytest.raises(ValueError, match=r"out\.status must not overlap"):
        verify(tokens, lib.array(TARGET), lib.array(DRAFT), **ARGUMENTS, out=out)
    np.testing.assert_array_equal(lib.numpy(tokens), TOKENS)


def test_sample_fields() -> None:
    """Catches a log-normaliser that is dropped, or asked for and has no place."""
    out = Sample(integers(B), integers(B), np.full(B, 77, np.float32))
    with pytest.raises(ValueError, match=r"out\.log_normalizer must be None in this call, got ndarray"):
        sample(TARGET[:, 0], **ARGUMENTS, out=out)
    with pytest.raises(TypeError, match=r"out\.log_normalizer must be an array of NumPy, .*, got None"):
        sample(TARGET[:, 0], **ARGUMENTS, out=out._replace(log_normalizer=None), return_log_normalizer=True)
    with pytest.raises(TypeError, match=r"out\.log_normalizer must have dtype float32, got float64"):
        sample(TARGET[:, 0], **ARGUMENTS, out=out._replace(log_normalizer=np.zeros(B)), return_log_normalizer=True)
    with pytest.raises(TypeError, match=r"out\.tokens must have dtype int64, got int32"):
        sample(TARGET[:, 0], **ARGUMENTS, out=out._replace(log_normalizer=None), token_dtype="int64")
    with pytest.raises(TypeError, match=r"out must be a Sample, got tuple"):
        sample(TARGET[:, 0], **ARGUMENTS, out=tuple(out))
    assert all((values == 77).all() for values in out)


def test_torch_outputs_that_are_not_plain_memory(need_frontend: Any) -> None:
    """Catches values that are written to a copy of a lazily negated tensor, and lost."""
    torch = need_frontend("torch")
    lazy = torch.complex(torch.zeros(B), torch.zeros(B)).conj().imag
    assert lazy.is_neg()
    ids = torch.zeros(B, dtype=torch.int32)
    out = Sample(ids, ids.clone(), lazy)
    with pytest.raises(ValueError, match=r"out\.log_normalizer must be writable, got a torch tensor that stands for"):
        sample(torch.from_numpy(TARGET[:, 0]), **ARGUMENTS, out=out, return_log_normalizer=True)
    with pytest.raises(ValueError, match=r"out\.tokens is on meta:0 but logits is on cpu"):
        sample(torch.from_numpy(TARGET[:, 0]), **ARGUMENTS, out=Sample(ids.to("meta"), ids))


def test_outputs_are_written_before_check_raises() -> None:
    """Catches an answer that is lost because one row has a fault."""
    target = TARGET.copy()
    target[2] = np.nan
    out = verification()
    with pytest.raises(ValueError, match="row 2"):
        verify(TOKENS, target, DRAFT, **ARGUMENTS, out=out, check=True)
    expected = verify(TOKENS, target, DRAFT, **ARGUMENTS)
    for values, right in zip(out[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(values, right)


def test_frontends_that_cannot_be_written_are_known() -> None:
    """Catches a library that is skipped above by accident."""
    assert [name for name, kind in FRONTENDS.items() if kind.copies] == ["jax"]
    unwritable = ["jax"] if NUMPY_WRITES_IMPORTS else ["jax", "array_api_strict", "producer"]
    assert [name for name, kind in FRONTENDS.items() if not kind.writable] == unwritable
