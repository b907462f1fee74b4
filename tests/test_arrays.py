"""The border's own promises: what is read in place, what views mean, what is refused, and that inputs stay as they are."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyspec import Sampling, sample, verify
from cupyspec._arrays import SCORE_DTYPES, TOKEN_DTYPES, Border, aligned_empty
from frontends import FRONTENDS, Frontend, OldProducer, Producer, assert_answer, lib

__all__ = ["lib"]  # a fixture

B, K, V = 4, 3, 130
RANDOM = np.random.default_rng(4)


def buffer(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(0, 2, shape).astype(np.float32)


def repeated(row: np.ndarray, times: int) -> np.ndarray:
    """A batch whose rows are one piece of memory; writable, since torch warns of other ones."""
    return np.lib.stride_tricks.as_strided(row, (times, *row.shape), (0, *row.strides), writeable=True)


# Name: scores [B, rows, V] and what lies around them. Each is made anew, since a call must leave it as it is.
VIEWS = {
    "contiguous": lambda rows: buffer(B, rows, V),
    "every second column": lambda rows: buffer(B, rows, 2 * V)[..., ::2],
    "first columns of a wider buffer": lambda rows: buffer(B, rows, V + 9)[..., :V],
    "middle columns": lambda rows: buffer(B, rows, V + 9)[..., 3 : 3 + V],
    "vocabulary first": lambda rows: buffer(V, rows, B).T,
    "positions first": lambda rows: buffer(rows, B, V).swapaxes(0, 1),
    "every second row": lambda rows: buffer(2 * B, rows, V)[::2],
    "last rows": lambda rows: buffer(B + 1, rows, V)[1:],
    "one row for all": lambda rows: repeated(buffer(rows, V), B),
    "one position for all": lambda rows: repeated(buffer(B, V), rows).swapaxes(0, 1),
    "one column": lambda rows: repeated(buffer(B, rows), V).transpose(1, 2, 0),
}
NEGATIVE = {
    "columns flipped": lambda rows: buffer(B, rows, V)[..., ::-1],
    "rows flipped": lambda rows: buffer(B, rows, V)[::-1],
    "all flipped": lambda rows: np.flip(buffer(B, rows, V)),
}
UNIT_STRIDE = [
    name for name in VIEWS if name not in ("every second column", "vocabulary first", "one column", "contiguous")
]


def check_views(lib: Frontend, target: np.ndarray, draft: np.ndarray, ids: np.ndarray) -> None:
    """A call on views equals the call on contiguous copies, and the memory is what it was."""
    kept = [(whole, whole.copy()) for whole in (_base(a) for a in (target, draft, ids))]
    arguments: dict[str, Any] = {"seed": 3, "sampling": Sampling(np.array([1, 0, 0.5, 1]))}
    expected = verify(*(np.array(a, order="C") for a in (ids, target, draft)), **arguments)
    arrays = [lib.from_memory(a) for a in (ids, target, draft)]
    assert_answer(lib, arrays[1], verify(*arrays, **arguments), expected)
    expected = sample(np.array(target[:, 1], order="C"), return_log_normalizer=True, **arguments)
    answer = sample(lib.from_memory(target[:, 1]), return_log_normalizer=True, **arguments)
    assert_answer(lib, arrays[1], answer, expected)
    for whole, copy in kept:
        np.testing.assert_array_equal(whole, copy)


def _base(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@pytest.mark.parametrize("name", VIEWS)
def test_views(lib: Frontend, name: str) -> None:
    """Catches strides that are ignored: wrong values, or reads outside the array (F20)."""
    ids = np.arange(B * (K + 3), dtype=np.int32).reshape(B, K + 3)[:, 1 : 1 + K]
    check_views(lib, VIEWS[name](K + 1), VIEWS[name](K), ids)


@pytest.mark.parametrize("name", NEGATIVE)
@pytest.mark.parametrize("library", ["numpy", "array_api_strict", "producer"])  # torch has no negative strides
def test_negative_strides(library: str, name: str) -> None:
    """Catches an address taken for the lowest one of the array."""
    ids = np.arange(K * B, dtype=np.int32).reshape(K, B).T[::-1, ::-1]
    check_views(FRONTENDS[library](), NEGATIVE[name](K + 1), NEGATIVE[name](K), ids)


def test_memory_between_other_things() -> None:
    """Catches strides counted in elements where they are no multiple of one, and unaligned addresses."""
    lib = FRONTENDS["numpy"]()
    fields = np.zeros((B, K + 1, V), np.dtype([("other", "i1"), ("z", "f4")]))
    fields["z"] = buffer(B, K + 1, V)
    assert fields["z"].strides[-1] == 5
    unaligned = np.zeros(B * K * V * 4 + 1, np.uint8)[1:].view(np.float32).reshape(B, K, V)
    unaligned[...] = buffer(B, K, V)
    assert not unaligned.flags.aligned
    check_views(lib, fields["z"], unaligned, np.arange(B * K).reshape(B, K))


AXES = st.permutations((0, 1, 2))
CUTS = st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([1, 1, 2, 3, -1, -2]))  # before, after, step


@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 40)), axes=AXES, cuts=st.tuples(*[CUTS] * 3)
)
@pytest.mark.parametrize("library", ["numpy", "producer"])
def test_any_view(
    library: str, shape: tuple[int, int, int], axes: list[int], cuts: tuple[tuple[int, int, int], ...]
) -> None:
    """Catches a layout that nobody thought of: axes in any order, any slice of each, sizes of 0 and 1."""
    sizes = [before + size * abs(step) + after for size, (before, after, step) in zip(shape, cuts, strict=True)]
    whole = buffer(*(sizes[axis] for axis in axes)).transpose(np.argsort(axes))
    view = whole[
        tuple(slice(before, before + n * abs(s), abs(s)) for n, (before, _, s) in zip(shape, cuts, strict=True))
    ]
    view = view[tuple(slice(None, None, -1 if step < 0 else 1) for _, _, step in cuts)]
    assert view.shape == shape
    lib = FRONTENDS[library]()
    ids = np.arange(shape[0] * (shape[1] - 1), dtype=np.int32).reshape(shape[0], shape[1] - 1) % shape[2]
    expected = verify(ids, np.array(view, order="C"), seed=1)
    assert_answer(lib, view, verify(lib.from_memory(ids), lib.from_memory(view), seed=1), expected)


@pytest.mark.parametrize("strides", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 63, 64, 65])
def test_producer_offsets_and_null_strides(shift: int, strides: bool) -> None:
    """Catches byte_offset left out of the address, and NULL strides followed."""
    whole = buffer(B * (K + 1) * V + 65)
    target = whole[shift : shift + B * (K + 1) * V].reshape(B, K + 1, V)
    arguments = {"null_strides": not strides}
    ids = np.arange(B * K, dtype=np.int32).reshape(B, K)
    answer = verify(Producer(ids, **arguments), Producer(target, **arguments), seed=1)
    assert_answer(FRONTENDS["producer"](), None, answer, verify(ids, target, seed=1))


def test_producers_of_every_age() -> None:
    """Catches max_version that is not asked for (a read-only export fails) or demanded (an old one does, F21)."""
    ids, target, draft = np.arange(B * K, dtype=np.int32).reshape(B, K), buffer(B, K + 1, V), buffer(B, K, V)
    expected = verify(ids, target, draft, seed=1)
    for kind, options in ((OldProducer, {}), (Producer, {}), (Producer, {"read_only": True})):
        answer = verify(*(kind(a, **options) for a in (ids, target, draft)), seed=1)
        assert_answer(FRONTENDS["producer"](), None, answer, expected)


def test_read_only_arrays() -> None:
    """Catches a wish to write where only reading is due (F21)."""
    arrays = [np.arange(B * K, dtype=np.int32).reshape(B, K), buffer(B, K + 1, V), buffer(B, K, V)]
    expected = verify(*arrays, seed=1)
    for array in arrays:
        array.flags.writeable = False
    parameters = {"seed": np.ones(B, np.int64), "step": np.ones(B, np.int64), "num_draft_tokens": np.full(B, K)}
    for array in parameters.values():
        array.flags.writeable = False
    assert_answer(FRONTENDS["numpy"](), arrays[1], verify(*arrays, seed=1), expected)
    xp = FRONTENDS["array_api_strict"]()
    assert_answer(xp, xp.from_memory(arrays[1]), verify(*(xp.from_memory(a) for a in arrays), seed=1), expected)
    verify(*arrays, **parameters)


def test_subclasses_of_ndarray() -> None:
    """Catches a subclass whose indexing differs, and answers of that subclass."""

    class Halved(np.ndarray):
        def __getitem__(self, index: Any) -> Any:
            return np.asarray(self)[index] / 2

    target = buffer(B, K + 1, V)
    answer = verify(np.zeros((B, K), np.int32), target.view(Halved), seed=1)
    assert_answer(FRONTENDS["numpy"](), target, answer, verify(np.zeros((B, K), np.int32), target, seed=1))


# Zero copy

SCRATCH = 4 << 20  # bytes above what the CPU path takes for itself, whatever the size of a call (3 MiB)


def test_scores_and_ids_are_read_in_place(lib: Frontend) -> None:
    """Catches a copy on the way in: the address that is read is the caller's, in every dtype."""
    for dtype in lib.dtypes:
        array = lib.array(buffer(B, K, V), dtype)
        borrowed = Border("x", array).borrow("x", array, SCORE_DTYPES)
        assert (borrowed.pointer, borrowed.dtype) == (lib.pointer(array), dtype)
        assert (borrowed.shape, borrowed.strides) == ((B, K, V), (K * V, V, 1))
    for dtype in lib.token_dtypes:
        array = lib.array(np.zeros((B, K)), dtype)
        borrowed = Border("x", array).borrow("x", array, TOKEN_DTYPES)
        assert (borrowed.pointer, borrowed.dtype) == (lib.pointer(array), dtype)


@pytest.mark.parametrize("name", [*VIEWS, *NEGATIVE])
def test_views_are_described_in_place(lib: Frontend, name: str) -> None:
    """Catches views that are made contiguous at the border, and strides in bytes."""
    if lib.copies or (lib.name == "torch" and name in NEGATIVE):
        return  # a library without such views
    values = (VIEWS | NEGATIVE)[name](K)
    array = lib.from_memory(values)
    borrowed = Border("x", array).borrow("x", array, SCORE_DTYPES)
    assert borrowed.pointer == lib.pointer(array) == values.ctypes.data
    assert borrowed.strides == tuple(stride // 4 for stride in values.strides)


def test_borrowed_memory_outlives_the_callers_reference(lib: Frontend) -> None:
    """Catches an address kept without what owns it."""
    array = lib.array(buffer(B, K, V))
    borrowed = Border("x", array).borrow("x", array, SCORE_DTYPES)
    del array
    gc.collect()
    assert borrowed.host is not None
    np.testing.assert_array_equal(borrowed.host, buffer(B, K, V))


def test_answers_are_handed_back_in_place(lib: Frontend) -> None:
    """Catches a copy on the way out; JAX takes memory as it is at 64 bytes only."""
    array = lib.array(buffer(B, K, V))
    for shape in ((1,), (B, K + 1), (1001,)):
        for dtype in ("int32", "float32", *lib.token_dtypes):
            values = aligned_empty(shape, dtype)
            assert values.ctypes.data % 64 == 0
            values[...] = 3
            answer = Border("x", array).hand_back(values)
            lib.assert_same_kind(answer, array)
            assert lib.pointer(answer) == values.ctypes.data


def test_answers_own_their_memory(lib: Frontend) -> None:
    """Catches answers that share memory with each other, with the inputs, or with what was freed."""
    ids, target = np.arange(B * K, dtype=np.int32).reshape(B, K), buffer(B, K + 1, V)
    arrays = lib.array(ids), lib.array(target)
    answers = [verify(*arrays, seed=seed) for seed in range(50)]
    del arrays
    gc.collect()
    for seed, answer in enumerate(answers):
        np.testing.assert_array_equal(lib.numpy(answer.tokens), verify(ids, target, seed=seed).tokens)


@pytest.mark.parametrize("name", UNIT_STRIDE)
def test_views_with_unit_last_stride_take_no_copy(name: str) -> None:
    """Catches a hidden full copy of row-strided scores: the peak of extra memory stays far below their size (F20)."""
    rows, batch, width = K + 1, 16, 40_000
    whole = np.zeros((2 * batch, batch, width + 9), np.float32)  # pages that are never touched take no memory
    logits = {
        "first columns of a wider buffer": whole[:batch, :rows, :width],
        "middle columns": whole[:batch, :rows, 3 : 3 + width],
        "positions first": whole[:rows, :batch, :width].swapaxes(0, 1),
        "every second row": whole[::2, :rows, :width],
        "last rows": whole[-batch:, :rows, :width],
        "one row for all": np.broadcast_to(whole[0, :rows, :width], (batch, rows, width)),
        "one position for all": np.broadcast_to(whole[:batch, :1, :width], (batch, rows, width)),
    }[name]
    ids = np.zeros((batch, K), np.int32)
    verify(ids, logits, seed=1)  # imports and caches
    assert _peak(lambda: verify(ids, logits, seed=1)) < SCRATCH < logits.size * 4 / 2


def test_half_scores_are_not_widened_as_a_whole(lib: Frontend) -> None:
    """Catches a float32 copy of 16-bit scores, twice their size."""
    values = np.zeros((32, K + 1, 40_000), np.float32)
    for dtype in set(lib.dtypes) - {"float32"}:
        ids, logits = lib.array(np.zeros((32, K), np.int32)), lib.array(values, dtype)
        verify(ids, logits, seed=1)
        assert _peak(lambda ids=ids, logits=logits: verify(ids, logits, seed=1)) < SCRATCH < values.size * 2 / 2


def _peak(call: Any) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# What is no array, or cannot be read


SCORES = buffer(B, V)
NOT_NATIVE = np.dtype(np.float32).newbyteorder()


@pytest.mark.parametrize(
    ("logits", "error", "words"),
    [
        (SCORES.tolist(), TypeError, "logits must be an array of NumPy, .*, got builtins.list"),
        (1.0, TypeError, "logits must be an array of NumPy, .*, got builtins.float"),
        (np.float32(1), TypeError, "logits must be an array of NumPy, .*, got numpy.float32"),
        (None, TypeError, "logits must be an array of NumPy, .*, got None"),
        (type(SCORES), TypeError, "logits must be an array of NumPy, .*, got builtins.type"),
        (memoryview(SCORES), TypeError, "logits must be an array of NumPy, .*, got builtins.memoryview"),
        (SCORES.astype(NOT_NATIVE), TypeError, f"logits: .* native byte order, got dtype {NOT_NATIVE.str}"),
        (np.ma.masked_less(SCORES, 0), TypeError, r"logits: masked arrays .*x\.filled\(-np\.inf\)"),
        (SCORES.astype(object), TypeError, "logits must have dtype .*, got object"),
        (SCORES.astype("U4"), TypeError, "logits must have dtype .*, got str128"),
        (SCORES.view([("z", "f4")]), TypeError, "logits must have dtype .*, got void32"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, (str, type)) else "",
)
def test_what_cannot_be_read_is_refused_by_name(logits: Any, error: type[Exception], words: str) -> None:
    """Catches a copy nobody asked for, an error without the argument's name, and masked values read as scores."""
    with pytest.raises(error, match=words):
        sample(logits, seed=1)


@pytest.mark.parametrize("dtype", ["float64", "int32", "uint8", "bool", "complex64"])
def test_score_dtypes_that_are_not_read(lib: Frontend, dtype: str) -> None:
    """Catches a hidden cast, and values of another dtype read as scores (F19, F28)."""
    if dtype == "float64" and lib.name == "jax":
        return  # without x64 it has none
    allowed = "float32 or float16 or bfloat16"
    ids, good, bad = (lib.array(a) for a in (np.zeros((B, K), np.int32), buffer(B, K + 1, V), buffer(B, K, V)))
    if lib.name == "producer" and dtype == "complex64":
        return  # the helper has no code for it
    bad = lib.array(np.ones((B, K, V)).astype(dtype))
    with pytest.raises(TypeError, match=f"draft_logits must have dtype {allowed}, got {dtype}"):
        verify(ids, good, bad, seed=1)
    with pytest.raises(TypeError, match=f"logits must have dtype {allowed}, got {dtype}"):
        sample(lib.array(np.ones((B, V)).astype(dtype)), seed=1)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_eight_bit_floats_are_refused_by_name(library: str, dtype: str, need_frontend: Any) -> None:
    """Catches a crash, or one byte read as two (F19)."""
    module = need_frontend(library)
    if library == "numpy":
        logits: Any = SCORES.astype(getattr(pytest.importorskip("ml_dtypes"), dtype))
    elif library == "torch":
        logits = module.from_numpy(SCORES).to(getattr(module, dtype))
    else:
        logits = module.numpy.array(SCORES, dtype=dtype)
    with pytest.raises(TypeError, match=f"logits must have dtype .*, got {dtype}"):
        sample(logits, seed=1)


def test_a_producer_that_refuses_is_named() -> None:
    """Catches a BufferError that does not say which argument could not be exported."""

    class Refusing(Producer):
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("not today")

    with pytest.raises(TypeError, match=r"^logits: numpy cannot import a .*Refusing by DLPack: not today"):
        sample(Refusing(SCORES), seed=1)


def test_recognition_imports_nothing() -> None:
    """Catches a library imported, or looked for, because an argument might be of it."""
    before = set(sys.modules)
    sample(Producer(SCORES), seed=1)
    sample(SCORES, seed=[1] * B, sampling=Sampling([1.0] * B))
    assert {name.partition(".")[0] for name in set(sys.modules) - before} <= {"cupyspec", "numpy"}
