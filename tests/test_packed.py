"""Calls like one before: `verify`, `sample` and `Verifier` on CUDA arrays, whose device is played by `fake_gpu`.

What a call finds out the second time must be what it found out the first time, and never what another call did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyspec
from cupyspec import Sampling, Sigmoid, Token, Verifier, _arrays
from cupyspec._needs import Range
from cupyspec._segments import SEG
from cupyspec.rules import _launch
from cupyspec.rules._launch import plan_chain
from host_cuda import backend as host_backend
from host_cuda.backend import HostCuda, kernels_on_host
from strategies import SCORE_TYPES, ChainCase
from test_verifier import (
    ARRAYS,
    CASES,
    WRONG,
    call,
    call_of,
    changes_of,
    layouts,
    on_device,
    same,
    simple_case,
    verifier_for,
)

pytest.importorskip("cupy")
from fake_gpu import FakeGpu, cupy_array, fake_gpu, numpy_of  # it needs CuPy

pytestmark = pytest.mark.skipif(host_backend.compiler() is None, reason="needs g++")

LIBRARIES = ("torch", "torch without guards", "cupy")


class Library:
    """Arrays of one library on the fake device."""

    def __init__(self, name: str) -> None:
        self.name, self.guards = name.partition(" ")[0], name != "torch without guards"

    def array(self, values: Any) -> Any:
        """A new array of the same values and strides."""
        values = np.asarray(values)
        if self.name == "cupy":
            return cupy_array(values)
        import torch

        values = values.copy(order="K")
        if values.dtype.name == "bfloat16":
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)

    @contextmanager
    def gpu(self, host: HostCuda | None = None) -> Iterator[FakeGpu]:
        with fake_gpu(host, guards=self.guards) as gpu:
            yield gpu


@pytest.fixture(params=LIBRARIES, scope="module")
def library(request: pytest.FixtureRequest, need_frontend: Callable[[str], Any]) -> Library:
    made = Library(request.param)
    need_frontend(made.name)
    return made


@contextmanager
def no_checks() -> Iterator[None]:
    """Within it a call that is not like one before is an error."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the call was checked again")

    with ExitStack() as stack:
        for name in ("chain.checked_call", "verifier.checked_call", "sampling.Border"):
            stack.enter_context(mock.patch(f"cupyspec.{name}", refuse))
        yield


def on_kernels(function: Any, arrays: list[Any], keywords: dict[str, Any]) -> Any:
    """The answer by the same kernels, to NumPy arrays."""
    arrays = [None if x is None else np.ascontiguousarray(x) for x in arrays]
    with kernels_on_host(HostCuda()):
        return function(*arrays, **keywords)


# ------------------------------------------------------------------------------------------------ equal to the first time


@pytest.mark.parametrize("function", ["Verifier", "verify"])
def test_repeated_calls_equal_checked_ones(function: str, library: Library) -> None:
    """An address, a number or a length of the first call in the struct of the second."""

    @given(
        case=st.one_of(*CASES.values()),
        layout=layouts,
        numbers=st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**56 - 1)),
    )
    def run(case: ChainCase, layout: tuple[bool, int], numbers: tuple[int, int]) -> None:
        name, changes = changes_of(case, layout)
        arrays, keywords = call_of(case, changes)
        fewer = {"seed": numbers[0], "step": numbers[1]}
        want = on_kernels(cupyspec.verify, arrays, keywords)
        want_fewer = on_kernels(cupyspec.verify, arrays, keywords | fewer)
        with library.gpu() as gpu:
            verifier = verifier_for(case, name, "cuda") if function == "Verifier" else None

            def answer(**changed: Any) -> Any:
                moved, moved_keywords = on_device(arrays, keywords | changed, library.array)
                if verifier is not None:
                    return call(verifier, moved, moved_keywords)
                return cupyspec.verify(*moved, **moved_keywords)

            before = gpu.allocations
            for changed, expected in (({}, want), (fewer, want_fewer)):
                for _ in range(1 if verifier else 2):  # `verify` makes plans of what comes twice
                    assert same(answer(**changed), expected, numpy_of)
                with no_checks() if len(case.draft_tokens) and arrays[0].size else ExitStack():
                    assert same(answer(**changed), expected, numpy_of)
                    other = {"seed": 3} if "seed" in changed else {}
                    answer(**changed | other)
                    assert same(answer(**changed), expected, numpy_of)
            if verifier is not None:
                assert gpu.allocations == before

    run()


@given(data=st.data())
def test_sample_repeats_itself(library: Library, data: st.DataObject) -> None:
    """The same for `sample`: position, draw, and the log-normaliser where nobody asked for it."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    batch = data.draw(st.integers(1, 4))
    z = rng.normal(0, 3, (batch, data.draw(st.sampled_from((1, 33, SEG + 1))))).astype(
        SCORE_TYPES[data.draw(st.sampled_from(sorted(SCORE_TYPES)))]
    )

    def number(high: int) -> Any:
        return data.draw(st.sampled_from((int(rng.integers(high)), rng.integers(0, high, batch))))

    keywords: dict[str, Any] = {
        "seed": number(2**62),
        "step": number(2**56),
        "position": number(2**16),
        "draw": number(2**16),
        "purpose": data.draw(st.sampled_from(("draft", "target"))),
        "token_dtype": data.draw(st.sampled_from(("int32", "int64"))),
        "return_log_normalizer": data.draw(st.booleans()),
        "active": data.draw(st.sampled_from((None, rng.random(batch) < 0.5))),
    }
    temperature = data.draw(st.sampled_from((1.0, 0.0, 0.7, rng.choice([0.0, 1.0, 2.0], batch))))
    want = on_kernels(cupyspec.sample, [z], keywords | {"sampling": Sampling(temperature)})

    def move(x: Any) -> Any:
        return library.array(x) if isinstance(x, np.ndarray) else x

    with library.gpu():
        for again in (False, False, True, True):
            with no_checks() if again else ExitStack():
                got = cupyspec.sample(
                    library.array(z),
                    sampling=Sampling(move(temperature)),
                    **{name: move(x) for name, x in keywords.items()},
                )
            for mine, expected in zip(got, want, strict=True):
                if expected is None:
                    assert mine is None
                else:
                    assert np.array_equal(numpy_of(mine), expected, equal_nan=expected.dtype.kind == "f")


@given(data=st.data())
def test_calls_in_any_order(library: Library, data: st.DataObject) -> None:
    """A plan that is found by too little: one Verifier and one `verify`, whose calls differ in one thing at a time."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    case = simple_case(4, 2, SEG + 30)
    seeds = rng.integers(0, 2**32, (4, 2), dtype=np.uint32)
    temperature = rng.choice([0.5, 1.0, 0.0], 4)
    lengths = np.array([2, 0, 1, 2])
    variants: list[dict[str, Any]] = [
        {},
        {"seed": 7},
        {"seed": np.asarray(7)},
        {"seed": seeds},
        {"seed": seeds[:, ::-1]},
        {"seed": seeds[:, 0]},
        {"seed": seeds[:, 0].astype(np.int64)},
        {"seed": np.arange(8)[::2]},
        {"step": 3},
        {"step": np.array([5])},
        {"step": np.arange(4)},
        {"step": np.arange(4, dtype=np.uint8)},
        {"sampling": Sampling(0.5)},
        {"sampling": Sampling(0)},
        {"sampling": Sampling(temperature)},
        {"sampling": Sampling(temperature.astype(np.float32))},
        {"sampling": Sampling(temperature), "draft_sampling": Sampling(temperature[::-1])},
        {"sampling": Sampling(temperature), "draft_sampling": Sampling(1.0)},
        {"draft_sampling": Sampling(temperature)},
        {"draft": None},
        {"draft": None, "num_draft_tokens": lengths},
        {"num_draft_tokens": lengths.astype(np.int8)},
        {"active": np.array([True, False, True, True])},
        {"vocab_size": 1000},
        {"vocab_size": 1},
        {"draft_log_normalizer": rng.normal(8, 1, (4, 2)).astype(np.float32)},
        {"target_log_normalizer": rng.normal(8, 1, (4, 3))},
        {"target": np.asfortranarray(case.target)},
        {name: getattr(case, name)[:3] for name in (*ARRAYS, "seed")},
        {name: getattr(case, name)[:1].repeat(4, 0) for name in ARRAYS},
        {"draft_tokens": case.draft_tokens[:, :1], "target": case.target[:, :2], "draft": case.draft[:, :1]},
        {"scores": "probs", "target": np.exp(case.target), "draft": np.exp(case.draft)},
        {"scores": "logits", "draft_scores": "probs", "draft": np.exp(case.draft)},
        {"seed": [1, 2, 3, 4]},
        {"step": np.int64(4)},
    ]
    with library.gpu():
        verifier = verifier_for(case, "padded", "cuda")
        for changes in data.draw(st.lists(st.sampled_from(variants), min_size=2, max_size=6)):
            arrays, keywords = call_of(case, changes)
            want = on_kernels(cupyspec.verify, arrays, keywords)
            moved, moved_keywords = on_device(arrays, keywords, library.array)
            if isinstance(keywords["seed"], list):
                moved_keywords["seed"] = keywords["seed"]
            assert same(call(verifier, moved, moved_keywords), want, numpy_of)
            assert same(cupyspec.verify(*moved, **moved_keywords), want, numpy_of)


def test_calls_that_alternate_stay_quick(library: Library) -> None:
    """Plans that push each other out: calls with and without draft scores, of two sizes, of two kinds of seeds."""
    case = simple_case()
    with library.gpu():
        verifier = verifier_for(case, "padded", "cuda")
        tokens, target, draft = (library.array(x) for x in (case.draft_tokens, case.target, case.draft))
        seeds, logits = library.array(np.arange(3)), library.array(case.target[:, 0])

        def calls() -> None:
            for function in (verifier, cupyspec.verify):
                function(tokens, target, draft, seed=1, step=0)
                function(tokens, target, seed=1, step=0)
                function(tokens, target, seed=seeds, step=0)
                function(tokens, target, draft, seed=1, step=0, num_draft_tokens=seeds)
                function(tokens, target, draft, seed=1, step=0, sampling=Sampling(0.5))
                function(tokens[:2], target[:2], draft[:2], seed=1, step=0, sampling=Sampling(0.5))
            cupyspec.sample(logits, seed=1)
            cupyspec.sample(logits, seed=seeds, sampling=Sampling(0.5))

        for _ in range(2):
            calls()
        with no_checks():
            for _ in range(2):
                calls()


def test_flattened_rows_of_any_number(library: Library) -> None:
    """T, or where a row's drafts end, of the call before; a plan of another B; arrays that do not belong together."""
    rng = np.random.default_rng(3)
    case = simple_case(6, 3, 60)
    calls_ = []
    for lengths in (
        [1, 2, 0, 3],
        [3, 3, 3, 3],
        [1, 0, 0, 0],
        [2, 1, 1],
        [0, 3, 1, 0, 1, 2],
        [0, 0, 0, 0],
        [1, 2, 0, 3],
    ):
        part = case.rows(np.arange(len(lengths)))
        part.num_draft_tokens = np.array(lengths)
        arrays, keywords = call_of(part, part.flattened(rng) | {"step": 7})
        keywords["cu_num_draft_tokens"] = keywords["cu_num_draft_tokens"].astype(np.int64)
        calls_.append((arrays, keywords, on_kernels(cupyspec.verify, arrays, keywords)))
    with library.gpu() as gpu:
        verifier = verifier_for(case, "flattened", "cuda", max_batch_size=6)
        for _ in range(3):
            for arrays, keywords, want in calls_:
                moved, moved_keywords = on_device(arrays, keywords, library.array)
                assert same(call(verifier, moved, moved_keywords), want, numpy_of)
                assert same(cupyspec.verify(*moved, **moved_keywords), want, numpy_of)
        # With these lengths once more, T differs from what was planned: quick all the same.
        arrays, keywords, want = calls_[0]
        more = [np.concatenate([x, x[-1:]]) for x in arrays]
        keywords = keywords | {"cu_num_draft_tokens": np.array([0, 1, 3, 3, 7])}
        want = on_kernels(cupyspec.verify, more, keywords)
        moved, moved_keywords = on_device(more, keywords, library.array)
        with no_checks():
            assert same(call(verifier, moved, moved_keywords), want, numpy_of)
            assert same(cupyspec.verify(*moved, **moved_keywords), want, numpy_of)
        launched = len(gpu.launches)
        for function in (lambda a, k: call(verifier, a, k), lambda a, k: cupyspec.verify(*a, **k)):
            with pytest.raises(ValueError, match=r"draft_logits must be \[T, V\] .* 7 rows"):
                function([*moved[:2], moved[2][:-1]], moved_keywords)
            with pytest.raises(ValueError, match="cu_num_draft_tokens must have shape"):
                function([moved[0], moved[1][:-1], moved[2]], moved_keywords)
        assert len(gpu.launches) == launched


def test_equal_values_of_other_types(library: Library) -> None:
    """True taken for 1, or 1.0 for 1, once a call with the right type was there."""
    case = simple_case(3, 2, 1)
    with library.gpu():
        verifier = verifier_for(case, "padded", "cuda")
        arrays = [library.array(x) for x in (case.draft_tokens, case.target, case.draft)]
        for function in (verifier, cupyspec.verify):
            for _ in range(3):
                function(*arrays, seed=1, step=1, vocab_size=1, sampling=Sampling(1))
            for wrong in ({"vocab_size": True}, {"vocab_size": 1.0}, {"seed": True}, {"step": 1.0}, {"step": True}):
                with pytest.raises(TypeError, match=f"{next(iter(wrong))} must be"):
                    function(*arrays, **{"seed": 1, "step": 1, "vocab_size": 1, "sampling": Sampling(1)} | wrong)


def test_copies_are_made_at_every_call(library: Library) -> None:
    """A copy of the first call's scores, read by the second: rows that no kernel can read where they are."""
    rng = np.random.default_rng(2)
    with library.gpu():
        verifier = verifier_for(simple_case(), "padded", "cuda")
        for _ in range(4):
            case = simple_case()
            case.target = np.asfortranarray(rng.normal(0, 2, case.target.shape).astype(np.float32))
            arrays, keywords = call_of(case, {"seed": 4})
            want = on_kernels(cupyspec.verify, arrays, keywords)
            moved, moved_keywords = on_device(arrays, keywords, library.array)
            assert same(call(verifier, moved, moved_keywords), want, numpy_of)
            assert same(cupyspec.verify(*moved, **moved_keywords), want, numpy_of)


def test_out(library: Library) -> None:
    """`out=` of the call before written to, new memory handed back instead, or outputs that lie in inputs let through."""
    case = simple_case()
    arrays, keywords = call_of(case, {"seed": 4})
    want = on_kernels(cupyspec.verify, arrays, keywords)
    drawn = on_kernels(cupyspec.sample, [case.target[:, 0]], {"seed": 4})

    def new(dtype: Any, *shape: int) -> Any:
        return library.array(np.full(shape, 77, dtype))

    with library.gpu() as gpu:
        moved, moved_keywords = on_device(arrays, keywords, library.array)
        logits = library.array(case.target[:, 0])
        for again in (False, False, True, True):
            outs = [
                cupyspec.Verification(new(np.int32, 3, 3), new(np.int32, 3), new(np.int32, 3)),
                cupyspec.Sample(new(np.int32, 3), new(np.int32, 3)),
            ]
            with no_checks() if again else ExitStack():
                assert cupyspec.verify(*moved, **moved_keywords, out=outs[0]) is outs[0]
                assert cupyspec.sample(logits, seed=4, out=outs[1]) is outs[1]
            assert same(outs[0], want, numpy_of) and same(outs[1][:2], drawn[:2], numpy_of)

        launched = len(gpu.launches)
        for out in (
            outs[0]._replace(num_accepted=outs[0].status),
            outs[0]._replace(tokens=new(np.int32, 12)[:9].reshape(3, 3), num_accepted=outs[0].tokens.reshape(9)[3:6]),
        ):
            shared = out._replace(tokens=outs[0].tokens)
            with pytest.raises(ValueError, match=r"must not overlap an input or another output"):
                cupyspec.verify(*moved, **moved_keywords, out=shared)
        inside = outs[0]._replace(tokens=moved[0].reshape(6)[0:6])
        with pytest.raises(ValueError, match=r"out.tokens must have shape \(3, 3\)"):
            cupyspec.verify(*moved, **moved_keywords, out=inside)
        both = new(np.int32, 15)
        tokens, overlapping = both[:6].reshape(3, 2), both[5:14].reshape(3, 3)
        with pytest.raises(ValueError, match=r"out.tokens must not overlap an input or another output"):
            cupyspec.verify(tokens, *moved[1:], **moved_keywords, out=outs[0]._replace(tokens=overlapping))
        assert len(gpu.launches) == launched


def test_a_view_at_another_offset(library: Library) -> None:
    """A call that takes an array's start for that of its memory."""
    case = simple_case(3, 2, 50)
    wide = np.random.default_rng(1).normal(0, 2, (3, 3, 53)).astype(np.float32)
    for start in (0, 1, 3, 2):
        wide_case = simple_case(3, 2, 50)
        wide_case.target = wide[..., start : start + 50]
        arrays, keywords = call_of(wide_case, {})
        want = on_kernels(cupyspec.verify, arrays, keywords)
        with library.gpu():
            verifier = verifier_for(case, "padded", "cuda")
            shared = library.array(wide)
            for at in (0, start, start):
                moved, moved_keywords = on_device(arrays, keywords, library.array)
                moved[1] = shared[..., at : at + 50]
                got, quick = call(verifier, moved, moved_keywords), cupyspec.verify(*moved, **moved_keywords)
            assert same(got, want, numpy_of) and same(quick, want, numpy_of)


# ------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("function", ["Verifier", "verify"])
def test_a_good_call_before_hides_no_mistake(wrong: str, function: str, library: Library) -> None:
    """A check that is left out because another call passed it."""
    case = simple_case()
    change, error, words = WRONG[wrong]
    arrays, keywords = call_of(case, {"vocab_size": None})
    bad_arrays, bad_keywords = call_of(case, {"vocab_size": None} | change(case))
    with library.gpu() as gpu:
        verifier = verifier_for(case, "padded", "cuda")

        def answer(arrays: list[Any], keywords: dict[str, Any]) -> Any:
            moved, moved_keywords = keywords, keywords
            sampling = keywords["sampling"]
            moved, moved_keywords = on_device(arrays, keywords | {"sampling": Sampling()}, library.array)
            moved_keywords["sampling"] = sampling
            if function == "Verifier":
                return call(verifier, moved, moved_keywords)
            return cupyspec.verify(*moved, **moved_keywords)

        for _ in range(2):
            answer(arrays, keywords)
        launched = len(gpu.launches)
        try:
            with pytest.raises(error, match=words if function == "Verifier" else None):
                answer(bad_arrays, bad_keywords)
                assert function == "verify"
                raise error  # fine for `verify`, which is bound to nothing
        finally:
            assert len(gpu.launches) == launched or function == "verify"
        answer(arrays, keywords)


def test_another_device_is_named() -> None:
    """An address on another GPU, or in host memory, launched because its array looks like the one before."""
    torch = pytest.importorskip("torch")
    library = Library("torch without guards")  # PyTorch's own guards would see where the tensors really are
    case = simple_case()
    with library.gpu() as gpu:
        verifier = verifier_for(case, "padded", "cuda:0")
        for function in (verifier, cupyspec.verify):
            arrays = [library.array(x) for x in (case.draft_tokens, case.target, case.draft)]
            for _ in range(2):
                function(*arrays, seed=1, step=0)
            launched = len(gpu.launches)
            for at, name in enumerate(("draft_tokens", "target_logits", "draft_logits")):
                for where in ("cpu", "cuda:1", "xpu:0"):
                    others = list(arrays)
                    others[at] = library.array(numpy_of(arrays[at]))
                    others[at].on = where
                    with pytest.raises(ValueError, match=name) as error:
                        function(*others, seed=1, step=0)
                    assert where in str(error.value)
            assert len(gpu.launches) == launched
            seeds = torch.arange(3)
            seeds.on = "cpu"  # may be: a host value, copied
            function(*arrays, seed=seeds, step=0)


def test_its_own_answer_is_no_argument(library: Library) -> None:
    """Draft tokens overwritten while they are read, once the checks are left out."""
    case = simple_case()
    with library.gpu():
        verifier = verifier_for(case, "padded", "cuda")
        arrays = [library.array(x) for x in (case.draft_tokens, case.target, case.draft)]
        tokens = verifier(*arrays, seed=1, step=0).tokens
        for _ in range(2):
            with pytest.raises(ValueError, match="draft_tokens must not lie in the Verifier's own answer"):
                verifier(tokens[:, :2], *arrays[1:], seed=1, step=0)
            view = library.array(np.zeros((3, 3), np.int32))[:, :2]
            verifier(view, *arrays[1:], seed=1, step=0)  # now a plan of such strides is there
        lengths = verifier(*arrays, seed=1, step=0).num_accepted
        with pytest.raises(ValueError, match="num_draft_tokens must not lie in the Verifier's own answer"):
            verifier(*arrays, seed=1, step=0, num_draft_tokens=lengths)


def test_tensors_that_are_not_plain(need_frontend: Callable[[str], Any]) -> None:
    """Sparse tensors, subclasses and negative views taken for plain memory."""
    torch = need_frontend("torch")
    case = simple_case()
    arrays, keywords = call_of(case, {})
    want = on_kernels(cupyspec.verify, arrays, keywords)
    negative = on_kernels(cupyspec.verify, [arrays[0], -arrays[1], arrays[2]], keywords)
    for name in LIBRARIES[:2]:
        library = Library(name)
        with library.gpu():
            verifier = verifier_for(case, "padded", "cuda")
            moved, moved_keywords = on_device(arrays, keywords, library.array)
            for _ in range(2):
                assert same(call(verifier, moved, moved_keywords), want, numpy_of)
                assert same(cupyspec.verify(*moved, **moved_keywords), want, numpy_of)
            tokens, target, draft = moved
            view = torch._neg_view(target)
            for _ in range(2):
                assert same(call(verifier, [tokens, view, draft], moved_keywords), negative, numpy_of)
                assert same(cupyspec.verify(tokens, view, draft, **moved_keywords), negative, numpy_of)
            parameter = torch.nn.Parameter(target)
            assert same(call(verifier, [tokens, parameter, draft], moved_keywords), want, numpy_of)
            with pytest.raises(TypeError, match="target_logits: torch tensors must be dense"):
                cupyspec.verify(tokens, target.to_sparse(), draft, **moved_keywords)
            with pytest.raises(TypeError, match="target_logits: torch tensors must be dense"):
                call(verifier, [tokens, target.to_sparse(), draft], moved_keywords)


# ------------------------------------------------------------------------------------------------ devices, streams, graphs


def test_streams(library: Library) -> None:
    """Kernels of a later call on the stream of the first one."""
    case = simple_case()
    with library.gpu() as gpu:
        verifier = verifier_for(case, "padded", "cuda")
        arrays = [library.array(x) for x in (case.draft_tokens, case.target, case.draft)]
        for function in (verifier, cupyspec.verify):
            for stream in (0, 0, 77, 77, 0, 1234):
                gpu.launches.clear()
                gpu.stream = stream
                function(*arrays, seed=1, step=0)
                assert {at for _, at, _ in gpu.launches} == {stream}


def test_another_current_device(library: Library) -> None:
    """F25: kernels launched in another device's context, or that device left behind as the current one."""
    case = simple_case()
    arrays, keywords = call_of(case, {"seed": 1})
    want = on_kernels(cupyspec.verify, arrays, keywords)
    with library.gpu() as gpu:
        verifier = verifier_for(case, "padded", "cuda:0")
        arrays = [library.array(x) for x in arrays]
        for function in (verifier, cupyspec.verify):
            for device in (0, 1, 1, 0):
                gpu.device = device
                gpu.launches.clear()
                answer = function(*arrays, seed=1, step=0)
                assert {context for _, _, context in gpu.launches} == {0} and gpu.device == device
                assert same(answer, want, numpy_of)


def test_capture(library: Library) -> None:
    """F23, F24: host numbers, copies or allocations inside a capture; kernels that a first call would compile there."""
    case = simple_case()
    with library.gpu() as gpu:
        verifier = verifier_for(case, "padded", "cuda")
        arrays = [library.array(x) for x in (case.draft_tokens, case.target, case.draft)]
        numbers = {"seed": library.array(np.arange(3)), "step": library.array(np.arange(3))}
        for host in ({"seed": 1, "step": 0}, {"seed": 1, "step": numbers["step"]}, {**numbers, "step": 0}):
            for _ in range(2):
                gpu.capturing = False
                verifier(*arrays, **host)
                gpu.capturing = True
                with pytest.raises(ValueError, match="a host seed or step cannot be part of a CUDA graph"):
                    verifier(*arrays, **host)
        before = gpu.allocations
        for _ in range(2):
            with pytest.raises(ValueError, match="check=True cannot be part of a CUDA graph"):
                verifier(*arrays, **numbers, check=True)
            with pytest.raises(ValueError, match="an array of host values cannot be part of a CUDA graph"):
                verifier(*arrays, **numbers, num_draft_tokens=[1, 2, 0])
            verifier(*arrays, **numbers)
            verifier(*(x[:2] for x in arrays), **{name: x[:2] for name, x in numbers.items()})
            verifier(arrays[0], arrays[1], **numbers)
        assert gpu.allocations == before
        with pytest.raises(ValueError, match="a Verifier cannot be made while a CUDA graph is recorded"):
            verifier_for(case, "padded", "cuda")
        gpu.capturing = False
        verifier(*arrays, seed=1, step=0)


def test_what_a_captured_verify_allocates_is_kept_for_replays(library: Library) -> None:
    """CuPy's pool handing a graph's memory to somebody else; PyTorch's belongs to the graph by itself."""
    from cupyspec import _cuda

    case = simple_case()
    with library.gpu() as gpu:
        arrays = [library.array(x) for x in (case.draft_tokens, case.target, case.draft)]
        numbers = {"seed": library.array(np.arange(3)), "step": library.array(np.arange(3))}
        for _ in range(2):
            cupyspec.verify(*arrays, **numbers)
            cupyspec.sample(arrays[1][:, 0], **numbers)
            cupyspec.verify(*arrays, seed=1, step=0)
        gpu.capturing = True
        cupyspec.verify(*arrays, **numbers)
        cupyspec.sample(arrays[1][:, 0], **numbers)
        assert len(_cuda._captured) == (2 if library.name == "cupy" else 0)
        for _ in range(2):
            with pytest.raises(ValueError, match="a host seed or step cannot be part of a CUDA graph"):
                cupyspec.verify(*arrays, seed=1, step=0)


def test_threads_have_plans_of_their_own() -> None:
    """Two threads that fill in one struct."""
    library, case = Library("cupy"), simple_case(2, 2, 300)
    arrays, keywords = call_of(case, {})
    want = [on_kernels(cupyspec.verify, arrays, keywords | {"seed": seed}) for seed in range(2)]
    with library.gpu(), mock.patch("cupyspec._run._plans", threading.local()):
        moved, moved_keywords = on_device(arrays, keywords, library.array)
        lock, failures = threading.Lock(), []

        def work(seed: int) -> None:
            for _ in range(5):
                with lock:  # the fake device is one thread's at a time; plans are not
                    got = cupyspec.verify(*moved, **moved_keywords | {"seed": seed})
                if not same(got, want[seed], numpy_of):
                    failures.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


@pytest.mark.parametrize("answer", [True, False, 1, None])
def test_guards_of_pytorch_are_tried_before_they_are_trusted(answer: Any, need_frontend: Callable[[str], Any]) -> None:
    """A private class of PyTorch that changed: one that says yes to every tensor would let any address through."""
    torch = need_frontend("torch")
    import torch._C._dynamo.guards as guards

    find = _arrays._tensor_guards.__wrapped__
    assert find() is guards.TensorGuards, f"PyTorch {torch.__version__} is looked at the slow way"
    kind = mock.Mock(return_value=SimpleNamespace(check=lambda *tensors: answer))
    for patch in (mock.patch.object(guards, "TensorGuards", kind), mock.patch.object(torch._C, "_dynamo", None)):
        with patch:
            assert find() is None


def test_a_plan_holds_no_array() -> None:
    """Memory of a caller's logits kept alive by a cache."""
    import gc
    import weakref

    torch = pytest.importorskip("torch")
    case = simple_case()
    with fake_gpu():
        verifier = verifier_for(case, "padded", "cuda")
        arrays = [torch.from_numpy(x.copy()) for x in (case.draft_tokens, case.target, case.draft)]
        seeds, temperature = torch.arange(3), torch.ones(3)
        references = [weakref.ref(x) for x in (*arrays, seeds, temperature)]
        for _ in range(2):
            verifier(*arrays, seed=seeds, step=0, sampling=Sampling(temperature))
            cupyspec.verify(*arrays, seed=seeds, step=0, sampling=Sampling(temperature))
            cupyspec.sample(arrays[1][:, 0], seed=seeds, sampling=Sampling(temperature))
        del arrays, seeds, temperature
        gc.collect()
        assert [r() for r in references] == [None] * 5


def test_forced_ways_are_taken() -> None:
    """A benchmark that times another launch than it says, since a plan from before was used; or leaves its own behind."""
    case = simple_case(2, 2, 3 * SEG)
    arrays, keywords = call_of(case, {"seed": 1})
    want = on_kernels(cupyspec.verify, arrays, keywords)
    with fake_gpu() as gpu:
        verifier = verifier_for(case, "padded", "cuda")
        moved, moved_keywords = on_device(arrays, keywords, cupy_array)
        for known in (None, 0, 1, None, 0):
            with _launch.forced(**({} if known is None else {"pairs_known": known})):
                for _ in range(3):
                    for function in (cupyspec.verify, lambda *a, **k: call(verifier, [*a], k)):
                        gpu.launches.clear()
                        assert same(function(*moved, **moved_keywords), want, numpy_of)
                        assert len(gpu.launches) == (1 if known == 0 else 2)


def test_plans_do_not_pile_up() -> None:
    """A cache that grows with every new shape."""
    case = simple_case(1, 1, 8)
    with fake_gpu(), mock.patch("cupyspec._packed._LIMIT", 3):
        from cupyspec import _run

        for batch in range(1, 9):
            arrays = [cupy_array(x.repeat(batch, 0)) for x in (case.draft_tokens, case.target, case.draft)]
            for _ in range(2):
                cupyspec.verify(*arrays, seed=0)
        plans = _run._plans.Verification
        assert 0 < len(plans._plans) <= 3 and len(plans._seen) <= 3


# ------------------------------------------------------------------------------------------------ what a range of calls needs


@given(data=st.data())
def test_scratch_and_kernels_are_enough_for_every_smaller_call(data: st.DataObject) -> None:
    """A Verifier that writes behind its memory, or compiles inside a graph."""
    rule = data.draw(st.sampled_from((Token(), Sigmoid())))
    kinds = st.sampled_from(sorted(SCORE_TYPES))
    machine: Any = SimpleNamespace(
        multiprocessors=data.draw(st.sampled_from((1, 16, 132, 148))),
        threads=0,
        max_cluster=data.draw(st.sampled_from((1, 8))),
    )
    needs = Range(
        max_batch_size=data.draw(st.integers(1, 400)),
        max_draft_tokens=data.draw(st.integers(0, 20)),
        vocab_size=data.draw(st.sampled_from((1, 5000, 32_000, 128_256, 1_000_000))),
        target_dtype=data.draw(kinds),
        draft_dtype=data.draw(kinds),
        token_dtype="int32",
        rule=rule,
    )
    enough, kernels = needs.scratch(machine), set(needs.kernels(machine))
    for _ in range(20):
        drafts = data.draw(st.integers(0, needs.max_draft_tokens))
        draft_dtype = data.draw(st.sampled_from((None, needs.draft_dtype))) if drafts else None
        plan = plan_chain(
            batch=data.draw(st.integers(1, needs.max_batch_size)),
            drafts=drafts,
            vocab=(vocab := data.draw(st.one_of(st.just(needs.vocab_size), st.integers(1, needs.vocab_size)))),
            segment=SEG,
            target_dtype=needs.target_dtype,
            draft_dtype=draft_dtype,
            token_dtype="int32",
            sigmoid=isinstance(rule, Sigmoid),
            target_normalized=rule == Token() and data.draw(st.booleans()),
            draft_normalized=rule == Token() and draft_dtype is not None and data.draw(st.booleans()),
            **vars(machine),
        )
        assert plan.scratch <= enough
        if vocab == needs.vocab_size:
            assert {(launch.specialisation, launch.name) for launch in plan.launches} <= kernels


def test_a_verifier_is_compiled_when_it_is_made() -> None:
    """F24: a kernel left for the first call, which may be captured."""
    case = simple_case()
    with fake_gpu() as gpu:
        verifier = verifier_for(case, "padded", "cuda")
        there = list(gpu.kernels)
        arrays = [cupy_array(x) for x in (case.draft_tokens, case.target, case.draft)]
        verifier(*arrays, seed=1, step=0)
        verifier(arrays[0], arrays[1], seed=1, step=0)
        verifier(arrays[0][:, :0], arrays[1][:, :1], seed=1, step=0)
        assert gpu.kernels == there and gpu.launches


def test_warm_up_leaves_nothing_to_compile() -> None:
    """F24: a kernel that the first call in a capture would have to compile, of `verify` or `sample`."""
    case = simple_case(draft_temperature=0.5)
    with fake_gpu() as gpu:
        assert cupyspec.warm_up("float32", draft_dtype=np.float16) == len(gpu.kernels) > 0
        gpu.capturing, there = True, list(gpu.kernels)
        arrays = [cupy_array(x) for x in (case.draft_tokens, case.target, case.draft.astype(np.float16))]
        numbers = {"seed": cupy_array(np.arange(3)), "step": cupy_array(np.arange(3))}
        cupyspec.verify(*arrays, **numbers)
        cupyspec.verify(*arrays, **numbers, rule=Token(lenience=0.5))
        cupyspec.verify(*arrays[:2], **numbers)
        cupyspec.sample(arrays[1][:, 0], **numbers)
        cupyspec.sample(arrays[2][:, 0], **numbers, return_log_normalizer=True)
        assert gpu.kernels == there
        before = gpu.allocations  # which would end the capture, and hide what is wrong
        with pytest.raises(ValueError, match=r"not compiled yet.*warm_up"):
            cupyspec.verify(*arrays, **numbers, rule=Sigmoid())
        assert gpu.allocations == before
        with pytest.raises(ValueError, match="warm_up cannot be called while a CUDA graph is recorded"):
            cupyspec.warm_up("float32")
        gpu.capturing = False
        cupyspec.warm_up("float32", draft_dtype="float16", rule=Sigmoid(-1, 1), device="cuda:0")
        gpu.capturing = True
        cupyspec.verify(*arrays, **numbers, rule=Sigmoid())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"target_dtype": "float64"}, TypeError, "target_dtype must be float32 or float16 or bfloat16"),
        ({"rule": None}, TypeError, "rule must be Token"),
        ({"max_batch_size": 0}, ValueError, r"max_batch_size must be in \[1, "),
        ({"max_draft_tokens": 300}, ValueError, r"max_draft_tokens must be in \[0, 255\], got 300"),
        ({"device": "cuda:2"}, ValueError, r"device must be a CUDA device that is there \(2 are\), got 'cuda:2'"),
    ],
    ids=str,
)
def test_warm_up_names_what_is_wrong(change: dict[str, Any], error: type[Exception], words: str) -> None:
    """Hours of compiling for a dtype that nobody meant."""
    with fake_gpu() as gpu, pytest.raises(error, match=words):
        cupyspec.warm_up(**{"target_dtype": "float32"} | change)
    assert not gpu.kernels


def test_scratch_is_as_small_as_promised() -> None:
    """Memory of the size of the scores."""
    with fake_gpu(multiprocessors=132):
        verifier = Verifier(256, 3, 151_936, "bfloat16", device="cuda")
        assert verifier.scratch_bytes <= 8 * 256 * 7 * -(-151_936 // SEG) + 2**20
