"""The CUDA kernels, run on the CPU by `host_cuda`, answer what the oracle answers, through the launches that CuPy gets."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp, softmax
from scipy.stats import poisson

import cupyspec
from cupyspec import Sampling, Sigmoid, Token
from cupyspec._call import Array, ChainResult
from cupyspec._compile import Launch
from cupyspec._philox import Purpose, coin, draw_words, split_seed, unit_exponential
from cupyspec._segments import SEG, segment_count
from cupyspec._status import Status
from cupyspec.reference.race import race
from cupyspec.rules import _launch
from cupyspec.rules._launch import CHAIN_PARAMS, PER_ROW_TYPES, chain_specialisation, run_chain
from host_cuda import backend as host_backend
from host_cuda.backend import HostCuda, build, checked_call, kernels_on_host, layout_checks
from strategies import SCORE_TYPES, SIGMOIDS, TOKENS, ChainCase, assert_agrees, chain_cases

pytestmark = pytest.mark.skipif(host_backend.compiler() is None, reason="needs g++")

SMALL = 256  # the smallest segment: one granule of 8 ids for each of 32 lanes
SIZES = (1, 2, 3, 7, 31, 33, 1000, SEG - 1, SEG, SEG + 1)
RULES = (*TOKENS, *SIGMOIDS)
orders = st.integers(0, 2**16)


@st.composite
def kernel_cases(draw: st.DrawFn, **switches: Any) -> ChainCase:
    """Calls whose segments are the contract's, or small so that several race."""
    small = draw(st.booleans())
    vocabularies = (1, 2, 33, SMALL - 1, SMALL, SMALL + 1, 1000, 5 * SMALL + 17) if small else SIZES
    case = draw(chain_cases(vocabularies=vocabularies, **switches))
    if case.target.dtype != np.float32 or (case.draft is not None and case.draft.dtype != np.float32):
        tokens = np.clip(case.draft_tokens, np.iinfo(np.int32).min, np.iinfo(np.int32).max)
        case.draft_tokens = tokens.astype(np.int32)  # int64 ids with float32 scores alone: fewer builds
    return dataclasses.replace(case, segment=SMALL if small else SEG)


def on_host(case: ChainCase, *, order: int = 0, multiprocessors: int = 4, clusters: bool = True, **changes: Any) -> Any:
    with kernels_on_host(HostCuda(order=order, multiprocessors=multiprocessors, clusters=clusters)):
        return case.verify(**changes)


@st.composite
def ways(draw: st.DrawFn, drafts: int) -> tuple[bool, dict[str, int]]:
    """Whether the machine has clusters, and a way to run a call on it, see `_launch.plan_chain`."""
    clusters, known = draw(st.booleans()), drafts > 0 and draw(st.booleans())
    blocks = draw(st.integers(1, 8)) if clusters or known else 1
    positions = draw(st.integers(1, drafts + 1))
    return clusters, {"pairs_known": known, "blocks_per_row": blocks, "positions_at_once": positions}


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a[:3], b[:3], strict=True))


# ------------------------------------------------------------------------------------------------ equal to the oracle


@given(case=kernel_cases(), order=orders)
def test_token_rule(case: ChainCase, order: int) -> None:
    assert_agrees(on_host(case, order=order), case.oracle())


@given(case=kernel_cases(rules=SIGMOIDS), order=orders)
def test_sigmoid_rule(case: ChainCase, order: int) -> None:
    assert_agrees(on_host(case, order=order), case.oracle())


@given(case=kernel_cases(rules=TOKENS, probs=True))
def test_probabilities(case: ChainCase) -> None:
    assert_agrees(on_host(case), case.oracle())


@given(case=kernel_cases(rules=TOKENS, normalizers=True, faults=True))
def test_log_normalizers(case: ChainCase) -> None:
    assert_agrees(on_host(case), case.oracle())


@given(case=kernel_cases(rules=RULES, faults=True))
def test_faults_get_a_status(case: ChainCase) -> None:
    assert_agrees(on_host(case), case.oracle())


@given(case=kernel_cases(rules=TOKENS, probs=True, faults=True))
def test_faults_of_probabilities(case: ChainCase) -> None:
    assert_agrees(on_host(case), case.oracle())


@pytest.mark.parametrize("vocab", [*SIZES, 50257])
@pytest.mark.parametrize("dtype", SCORE_TYPES)
def test_vocabulary_sizes(vocab: int, dtype: str) -> None:
    """Rows of odd width are misaligned, all but the first."""
    case = random_case(np.random.default_rng(vocab), batch=6, width=2, vocab=vocab, dtype=dtype)
    assert_agrees(on_host(case), case.oracle())


def random_case(
    rng: np.random.Generator,
    *,
    batch: int,
    width: int,
    vocab: int,
    dtype: str = "float32",
    distance: float = 1.0,
    **fields: Any,
) -> ChainCase:
    z = rng.normal(0, 2, (batch, width + 1, vocab))
    z_draft = z[:, :-1] + rng.normal(0, distance, (batch, width, vocab))
    tokens = np.argmax(z_draft + rng.gumbel(size=z_draft.shape), axis=-1).astype(np.int32)
    return ChainCase(
        draft_tokens=tokens,
        target=z.astype(SCORE_TYPES[dtype]),
        draft=z_draft.astype(SCORE_TYPES[dtype]),
        vocab_size=vocab,
        **({"seed": rng.integers(0, 2**64, batch, dtype=np.uint64)} | fields),
    )


def test_mismatches_inside_the_bands_are_as_rare_as_the_bands_are_narrow() -> None:
    """A wide band hides nothing: what differs inside is compared with the bands' summed width."""
    found, width, rows = 0, 0.0, 0
    for n, rule in enumerate((Token(), Token(lenience=0.5))):
        for dtype in SCORE_TYPES:
            case = random_case(
                np.random.default_rng(n), batch=150, width=3, vocab=1500, dtype=dtype, rule=rule, segment=SMALL
            )
            want = case.oracle()
            found += assert_agrees(on_host(case), want)
            width += float(want.width.sum())
            rows += len(want.width)
    print(f"{found} of {rows} rows differ inside the bands, at most {width:.2f} expected")
    assert found <= poisson.isf(1e-6, width)


def test_two_hundred_fifty_five_drafts_need_the_totals_kernel() -> None:
    case = random_case(np.random.default_rng(0), batch=2, width=255, vocab=2400, distance=0.01, segment=SMALL)
    backend = HostCuda()
    with kernels_on_host(backend):
        got = case.verify()
    assert [name for name, *_ in backend.launches] == ["chain_stats", "chain_totals", "chain_verify"]
    assert_agrees(got, case.oracle())


def test_a_million_ids() -> None:
    case = random_case(np.random.default_rng(0), batch=1, width=4, vocab=1_000_000, dtype="float16")
    assert_agrees(on_host(case), case.oracle())


@pytest.mark.parametrize("dtype", SCORE_TYPES)
@pytest.mark.parametrize("vocab", [9, SMALL, 5 * SMALL + 17, 2 * SEG + 1])
def test_ties_go_to_the_lowest_id(vocab: int, dtype: str) -> None:
    """Among the ids of a thread, of a warp, and of segments; -0.0 is +0.0, and a subnormal is more than 0."""
    rng = np.random.default_rng(vocab)
    rows = np.full((60, 1, vocab), -3.0)
    for row in rows[:, 0]:
        best = rng.choice([2.0, 0.0])
        row[rng.choice(vocab, rng.integers(1, 6))] = best
        if best == 0:
            row[row == 0] *= rng.choice([1.0, -1.0], int((row == 0).sum()))
    rows[0] = -3.0
    rows[0, 0, 1:5] = 0.0, -0.0, 1e-40 if dtype != "float16" else 6e-8, 0.0
    want = np.argmax(rows[:, 0].astype(SCORE_TYPES[dtype]).astype(np.float64), axis=-1)
    assert want[0] == 3
    with kernels_on_host(HostCuda()):
        got = cupyspec.sample(rows[:, 0].astype(SCORE_TYPES[dtype]), seed=0, sampling=Sampling(temperature=0))
    assert (np.asarray(got.tokens) == want).all() and not np.asarray(got.status).any()


@pytest.mark.parametrize("second", [2, 8, 300])  # ids of one thread, of two, of two warps
def test_pick_at_a_boundary_takes_the_next_id(second: int) -> None:
    """The smallest id whose running sum exceeds u W: u = 1/2 of two equal weights is the second."""
    boundary_seed = np.array([9083354], np.uint64)  # its first pick is exactly 1/2
    assert coin(draw_words(boundary_seed, 0, Purpose.DRAFT)[1]) == 0.5
    probs = np.zeros((1, 310), np.float32)
    probs[0, [0, second]] = 0.5
    with kernels_on_host(HostCuda()):
        got = cupyspec.sample(probs, seed=boundary_seed, scores="probs")
    assert got.tokens.tolist() == [second]


# ------------------------------------------------------------------------------------------------ what must not matter


@given(case=kernel_cases(rules=RULES, faults=True), order=orders, data=st.data())
def test_launch_shape_order_layout_and_batch_change_nothing(case: ChainCase, order: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(order)
    want = on_host(case)
    assert same(want, on_host(case, order=order, multiprocessors=data.draw(st.sampled_from((1, 2, 64, 1000)))))
    clusters, way = data.draw(ways(case.draft_tokens.shape[1]))
    with _launch.forced(**way):
        assert same(want, on_host(case, order=order, clusters=clusters))
    flat = on_host(case, **case.flattened(rng))  # has no lengths that could be out of range
    assert same((*want[:2], np.asarray(want.status) & ~int(Status.LENGTH_OUT_OF_RANGE)), flat)
    batch = len(case.draft_tokens)
    rows = rng.permutation(batch)[: rng.integers(0, batch + 1)]
    assert same([np.asarray(x)[rows] for x in want[:3]], on_host(case.rows(rows)))


@given(case=kernel_cases(rules=RULES), offset=st.integers(1, 7), data=st.data())
def test_alignment_and_strides_change_nothing(case: ChainCase, offset: int, data: st.DataObject) -> None:
    def moved(array: np.ndarray | None, pad: int) -> np.ndarray | None:
        if array is None:
            return None
        buffer = np.full(int(np.prod(array.shape[:2])) * (array.shape[2] + pad) + offset, np.nan, array.dtype)
        view = buffer[offset:].reshape(*array.shape[:2], array.shape[2] + pad)[..., : array.shape[2]]
        view[...] = array
        return view

    pad = data.draw(st.integers(0, 3))
    tokens = np.full((*case.draft_tokens.shape, 2), -1, case.draft_tokens.dtype)
    tokens[..., 1] = case.draft_tokens
    got = on_host(case, target=moved(case.target, pad), draft=moved(case.draft, pad), draft_tokens=tokens[..., 1])
    assert same(on_host(case), got)


@given(case=kernel_cases(rules=RULES, probs=False))
def test_storage_type_of_equal_values_changes_nothing(case: ChainCase) -> None:
    wide = {n: None if v is None else v.astype(np.float32) for n, v in (("target", case.target), ("draft", case.draft))}
    assert same(on_host(case), on_host(case, **wide))


@given(case=kernel_cases(rules=RULES), blocks=st.integers(1, 5))
def test_grids_smaller_than_the_work(case: ChainCase, blocks: int) -> None:
    """What a grid limit of 2^31 - 1 does to huge calls."""
    want = on_host(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_launch, "_GRID_LIMIT", blocks)
        assert same(want, on_host(case))


def test_broadcast_rows_are_read_in_place() -> None:
    case = random_case(np.random.default_rng(1), batch=1, width=2, vocab=700)
    many = {
        "target": np.broadcast_to(case.target, (9, 3, 700)),
        "draft": np.broadcast_to(case.draft, (9, 2, 700)),
        "draft_tokens": np.broadcast_to(case.draft_tokens, (9, 2)),
        "seed": np.broadcast_to(case.seed, (9,)),
    }
    want, got = on_host(case), on_host(case, **many)
    assert (np.asarray(got.tokens) == np.asarray(want.tokens)).all()


@pytest.mark.parametrize(("batch", "width", "vocab"), [(1, 5, 51865), (3, 16, 5000), (200, 1, 3)])
def test_scratch_is_small(batch: int, width: int, vocab: int) -> None:
    call, rule = checked_call(random_case(np.random.default_rng(0), batch=batch, width=width, vocab=vocab).verify)
    backend = HostCuda()
    backend.launch = lambda launch, params: None  # type: ignore[method-assign]
    run_chain(call, rule, backend)
    assert sum(a.nbytes for a in backend.allocated) <= 8 * batch * (2 * width + 1) * segment_count(vocab) + 2**20


# ------------------------------------------------------------------------------------------------ parameters on the device


def device_array(values: np.ndarray) -> Array:
    """An array as the border describes a device's; bfloat16 by name."""
    name = values.dtype.name
    strides = tuple(s // values.itemsize for s in values.strides)
    return Array(values.ctypes.data, values.shape, strides, name, None, values)


@pytest.mark.parametrize("dtype", [t for t in PER_ROW_TYPES if t not in ("bool",)])
def test_parameters_of_every_dtype(dtype: str) -> None:
    """Read in place with any stride; the same as the same numbers from the host."""
    rng = np.random.default_rng(5)
    case = random_case(rng, batch=5, width=3, vocab=300)
    numbers = rng.integers(0, 4, (5, 2))
    stored = numbers.astype(SCORE_TYPES[dtype] if dtype in SCORE_TYPES else dtype)[:, 1]
    values = numbers[:, 1]
    case.temperature = values.astype(np.float64)
    call, rule = checked_call(case.verify)
    temperature = device_array(stored)
    sides = {
        "target": dataclasses.replace(call.target, temperature=temperature),
        "draft": dataclasses.replace(call.draft, temperature=temperature),  # type: ignore[type-var]
    }
    assert same(run_chain(dataclasses.replace(call, **sides), rule, HostCuda()), on_host(case))
    if "float" in dtype:
        return
    case = dataclasses.replace(case, temperature=1.0, seed=values, step=values, num_draft_tokens=values)
    call, rule = checked_call(case.verify)
    changes = {name: device_array(stored) for name in ("seed", "step", "num_draft_tokens")}
    assert same(run_chain(dataclasses.replace(call, **changes), rule, HostCuda()), on_host(case))


def test_seed_forms() -> None:
    case = random_case(np.random.default_rng(6), batch=4, width=2, vocab=40)
    high, low = np.arange(4, dtype=np.uint32) + 7, np.arange(4, dtype=np.uint32) * 3
    pairs = np.stack([low, high, low], 1)[:, 1:]  # rows 3 words apart
    want = on_host(case, seed=(high.astype(np.uint64) << np.uint64(32)) | low)
    call, rule = checked_call(case.verify)
    assert same(want, run_chain(dataclasses.replace(call, seed=device_array(pairs)), rule, HostCuda()))
    for scalar in (np.int32(-3), np.int64(-3), np.uint32(5), np.uint64(2**63 + 1)):
        want = on_host(case, seed=split_seed(int(scalar) & (2**64 - 1), 4))
        assert same(want, on_host(case, seed=int(scalar)))
        zero_d = device_array(np.array(scalar))
        assert same(want, run_chain(dataclasses.replace(call, seed=zero_d), rule, HostCuda()))
    negative = np.array([-1, -2, -3, -4], np.int8)  # per row: sign-extended
    want = on_host(case, seed=negative.astype(np.int64))
    assert same(want, run_chain(dataclasses.replace(call, seed=device_array(negative)), rule, HostCuda()))


def test_bad_parameters_on_the_device_get_a_status() -> None:
    case = random_case(np.random.default_rng(7), batch=8, width=2, vocab=50)
    good = np.ones(8)
    bad = np.array([1, np.nan, -1, np.inf, -1e-42, 0, 1e300, 1])
    call, rule = checked_call(case.verify)
    for dtype in (np.float64, np.float32):
        with np.errstate(over="ignore"):
            temperature = device_array(bad.astype(dtype))
        target = dataclasses.replace(call.target, temperature=temperature)
        got = run_chain(dataclasses.replace(call, target=target), rule, HostCuda())
        wrong = np.array([0, 1, 1, 1, 1, 0, 1, 0], bool)
        assert (got.status == np.where(wrong, Status.PARAMETER_OUT_OF_RANGE, 0)).all()
        assert (got.tokens[wrong] == -1).all() and (got.num_accepted[wrong] == 0).all()
        want = on_host(case, sampling=Sampling(temperature=np.where(wrong, 1, bad)), draft_sampling=Sampling())
        assert (got.tokens[~wrong] == np.asarray(want.tokens)[~wrong]).all()
    assert same(on_host(case), on_host(case, sampling=Sampling(temperature=good)))
    step = np.full(8, (3 << 56) + 5, np.uint64)  # masked to 56 bits
    got = run_chain(dataclasses.replace(call, step=device_array(step)), rule, HostCuda())
    assert same(on_host(case, step=5), got)


@pytest.mark.parametrize(
    "bounds", [[0, 5, 2, 6], [2, 3, 4, 6], [-7, 3, 2**40, 1], [0, -1, -1, 99], [6, 6, 6, 6], [0, 0, 9, 6]]
)
def test_malformed_bounds_disturb_no_row(bounds: list[int]) -> None:
    """Whatever the running sums say: no fault (AddressSanitizer looks on), and what the CPU path answers.

    Temperatures differ, so rows whose ranges overlap would show scratch that they share.
    """
    rng = np.random.default_rng(8)
    flat = {
        "draft_tokens": rng.integers(0, 30, 6).astype(np.int32),
        "target": rng.normal(size=(9, 30)).astype(np.float32),
        "draft": rng.normal(size=(6, 30)).astype(np.float32),
    }
    case = ChainCase(flat["draft_tokens"][None], flat["target"][None], flat["draft"][None], 30, seed=np.arange(3))
    case.temperature = np.array([0.2, 1.0, 3.0])
    changes = flat | {"cu_num_draft_tokens": np.array(bounds), "max_draft_tokens": 4}
    want, got = case.verify(**changes), on_host(case, **changes)
    assert same(want, got)


# ------------------------------------------------------------------------------------------------ sample()


@given(data=st.data(), seed_=st.integers(0, 2**64 - 1))
def test_sample(data: st.DataObject, seed_: int) -> None:
    rng = np.random.default_rng(seed_ % 2**32)
    vocab, batch = data.draw(st.sampled_from((1, 33, SMALL, SEG + 1, 5000))), data.draw(st.integers(0, 5))
    dtype = data.draw(st.sampled_from(sorted(SCORE_TYPES)))
    purpose = data.draw(st.sampled_from(("draft", "target")))
    logits = rng.normal(0, 3, (batch, vocab)).astype(SCORE_TYPES[dtype])
    temperature = rng.choice([0.0, 0.5, 1.0, 2.0], batch)
    position, draw = rng.integers(0, 2**16, batch), int(rng.integers(0, 2**16))
    arguments: dict[str, Any] = {
        "seed": seed_,
        "step": 2**40 + 3,
        "position": position,
        "draw": draw,
        "purpose": purpose,
        "token_dtype": data.draw(st.sampled_from(("int32", "int64"))),
        "sampling": Sampling(temperature=temperature),
        "return_log_normalizer": True,
    }
    with kernels_on_host(HostCuda(order=seed_ % 1000)):
        got = cupyspec.sample(logits, **arguments)
    assert got.tokens.dtype == arguments["token_dtype"] and not got.status.any()
    seeds = split_seed(seed_, batch)
    for b in range(batch):
        z = logits[b].astype(np.float64)
        if temperature[b] == 0:
            assert got.tokens[b] == np.argmax(z) and got.log_normalizer[b] == 0
            continue
        words = draw_words(
            seeds[b],
            2**40 + 3,
            Purpose.DRAFT if purpose == "draft" else Purpose.TARGET,
            position=position[b],
            draw=draw,
            segment=np.arange(segment_count(vocab)),
        )
        want = race(softmax(z / temperature[b]), unit_exponential(words[0]), coin(words[1]), segment=SEG)
        assert got.tokens[b] == want.token or want.in_band
        np.testing.assert_allclose(got.log_normalizer[b], logsumexp(z / temperature[b]), rtol=1e-6, atol=1e-6)


def test_sample_of_bad_and_inactive_rows() -> None:
    logits = np.zeros((4, 20), np.float32)
    logits[1, 3], logits[2] = np.nan, -np.inf
    with kernels_on_host(HostCuda()):
        got = cupyspec.sample(logits, seed=0, active=np.array([1, 1, 1, 0], bool), return_log_normalizer=True)
    assert (got.tokens[1:] == -1).all() and got.status.tolist() == [0, 1, 2, 0]
    assert np.isnan(got.log_normalizer[1:3]).all() and got.log_normalizer[3] == 0


def test_preallocated_result() -> None:
    case = random_case(np.random.default_rng(9), batch=3, width=2, vocab=100)
    call, rule = checked_call(case.verify)
    backend = HostCuda()
    out = ChainResult(**{name: backend.empty(*spec) for name, spec in call.outputs().items()})
    assert run_chain(call, rule, backend, out=out) is out and same(out, on_host(case))


# ------------------------------------------------------------------------------------------------ intermediate numbers


def launched(case: ChainCase) -> tuple[Any, np.ndarray, np.ndarray]:
    """(struct, pairs [B, 2K + 1, S, 2], smallest race key of each row's two blocks [B, 2]) that a call left behind."""
    backend = HostCuda(clusters=False)
    with kernels_on_host(backend), _launch.forced(pairs_known=1, blocks_per_row=2):
        case.verify()
    params = backend.launches[-1][2]
    batch, slots, segments = (int(params[n]) for n in ("batch_size", "num_drafts", "segments"))
    slots = 2 * slots + 1
    pairs = read(int(params["pairs"]), np.float32, (batch, slots, segments, 2))
    return params, pairs, read(int(params["keys"]), np.uint64, (batch, 2))


def read(address: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(address, size), dtype).reshape(shape)


@pytest.mark.parametrize("dtype", SCORE_TYPES)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_segment_sums_and_probabilities_are_good_to_1e_5(dtype: str, temperature: float) -> None:
    vocab, width = 2 * SEG + 77, 2
    case = random_case(
        np.random.default_rng(10), batch=2, width=width, vocab=vocab, dtype=dtype, temperature=temperature
    )
    _, pairs, _ = launched(case)
    assert case.draft is not None
    rows = np.concatenate([case.target, case.draft], axis=1).astype(np.float64) / np.float64(np.float32(temperature))
    for s in range(segment_count(vocab)):
        part = rows[..., s * SEG : (s + 1) * SEG]
        np.testing.assert_allclose(pairs[:, :, s, 0] / temperature, part.max(-1), rtol=1e-6)
        np.testing.assert_allclose(pairs[:, :, s, 1], np.exp(part - part.max(-1, keepdims=True)).sum(-1), rtol=1e-5)
    # What the acceptance test makes of them: exp(z / T - max) / sum over the segments.
    top = pairs[..., 0].max(-1, keepdims=True)
    total = (pairs[..., 1] * np.exp((pairs[..., 0] - top).astype(np.float64) / temperature)).sum(-1)
    x = case.draft_tokens[:, :, None]
    for slots, scores in ((slice(0, width), case.target[:, :width]), (slice(width + 1, None), case.draft)):
        z = np.take_along_axis(scores.astype(np.float64), x, -1)[..., 0]
        got = np.exp((z - top[:, slots, 0]) / temperature) / total[:, slots]
        want = np.take_along_axis(softmax(scores.astype(np.float64) / temperature, axis=-1), x, -1)[..., 0]
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("rule", [Token(), Sigmoid(-10, 10), Sigmoid()], ids=str)
def test_residual_masses_are_good_to_1e_5(rule: Token | Sigmoid) -> None:
    """The winner's key is exponential / mass: the mass that the kernel summed."""
    from cupyspec.reference.sigmoid import residual as sigmoid_residual
    from cupyspec.testing import draws

    case = random_case(np.random.default_rng(11), batch=40, width=1, vocab=3 * SMALL + 5, rule=rule, segment=SMALL)
    assert case.draft is not None
    case.draft_tokens[:] = np.argmax(case.draft - case.target[:, :-1], axis=-1)  # often rejected
    _, _, keys = launched(case)
    numbers = draws(case.seed, 0, batch_size=40, num_draft_tokens=1, vocab_size=case.vocab_size, segment=SMALL)
    checked = 0
    written = np.asarray(keys != 0xA5A5A5A5A5A5A5A5).all(-1)  # rejected
    smallest = keys.min(-1)
    for b in np.flatnonzero(written & (smallest != 2**64 - 1)):
        z, z_draft = case.target[b, 0].astype(np.float64), case.draft[b, 0].astype(np.float64)
        if isinstance(rule, Sigmoid):
            weights = sigmoid_residual(z, z_draft, rule.alpha, rule.beta)
        else:
            weights = np.maximum(softmax(z) - softmax(z_draft), 0)
        segment = int(smallest[b] & np.uint64(0xFFFFFFFF))
        key = np.array([smallest[b] >> np.uint64(32)], np.uint32).view(np.float32)[0]
        mass = numbers.exponentials[0, b, 0, segment] / key
        np.testing.assert_allclose(mass, weights[segment * SMALL : (segment + 1) * SMALL].sum(), rtol=1e-5)
        checked += 1
    assert checked >= (5 if isinstance(rule, Token) else 0)


# ------------------------------------------------------------------------------------------------ the struct, and the machine


STRUCT = "struct Params { int a; struct { double b; short c[2]; } inner; long long d; };"
INNER = np.dtype([("b", "f8"), ("c", "i2", 2)], align=True)
LAYOUT = {"a": "i4", "inner": INNER, "d": "i8"}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, None),
        ({"a": "i8"}, "a"),  # at the same place, as alignment has it
        ({"inner": np.dtype([("c", "i2", 2), ("b", "f8")], align=True)}, "inner.b"),
    ],
)
def test_kernels_whose_struct_is_not_numpys_do_not_compile(changes: dict[str, Any], wrong: str | None) -> None:
    """`library` asks this of every specialisation."""
    dtype = np.dtype([(name, (LAYOUT | changes)[name]) for name in LAYOUT], align=True)
    text = STRUCT + layout_checks("Params", dtype)
    if wrong is None:
        build(text)
        return
    with pytest.raises(RuntimeError, match=f"NumPy has another {wrong}\n"):
        build(text)


MACHINE = """
struct Params { int* out; };
extern "C" __global__ void missing_barrier(Params p) {
    if (threadIdx.x != 5) { __syncthreads(); }
}
extern "C" __global__ void different_collectives(Params p) {
    if (threadIdx.x % 2) { __ballot_sync(0xFFFFFFFFu, 1); } else { __shfl_sync(0xFFFFFFFFu, 1, 0); }
}
extern "C" __global__ void race(Params p) {
    CUPYSPEC_SHARED(int, last);
    last = threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) { p.out[blockIdx.x] = last; }
}
extern "C" __global__ void collectives(Params p) {
    const int lane = threadIdx.x % 32;
    int sum = lane;
    for (int offset = 16; offset > 0; offset /= 2) { sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset); }
    const int below = __shfl_up_sync(0xFFFFFFFFu, lane, 3);
    const unsigned int odd = __ballot_sync(0xFFFFFFFFu, lane % 2);
    p.out[threadIdx.x] = sum == 496 && below == (lane < 3 ? lane : lane - 3) && odd == 0xAAAAAAAAu;
}
// What the others of two had written before: nothing, the first number, or the last.
extern "C" __global__ void warp_sees_warp(Params p) {
    const int warp = threadIdx.x / 32;
    p.out[2 + warp] = p.out[!warp];
    for (int n = 1; n < 5; ++n) { __syncwarp(); p.out[warp] = n; }
}
extern "C" __global__ void block_sees_block(Params p) {
    p.out[2 + blockIdx.x] = p.out[!blockIdx.x];
    for (int n = 1; n < 5; ++n) { __syncthreads(); p.out[blockIdx.x] = n; }
}
extern "C" __global__ void order_of_blocks(Params p) {
    if (threadIdx.x == 0) { p.out[atomicAdd(&p.out[255], 1) + 7] = blockIdx.x; }
}

// In clusters of four.
extern "C" __global__ void missing_block(Params p) {
    if (blockIdx.x != 6) { ::host_cuda::cluster_barrier(); }
}
extern "C" __global__ void missing_thread(Params p) {
    if (blockIdx.x != 6 || threadIdx.x != 33) { ::host_cuda::cluster_barrier(); }
}
extern "C" __global__ void two_barriers(Params p) {
    p.out[blockIdx.x] = 1;
    ::host_cuda::cluster_barrier();
    int sum = 0;
    for (int rank = 0; rank < 4; ++rank) { sum += p.out[blockIdx.x / 4 * 4 + rank]; }
    ::host_cuda::cluster_arrive();
    p.out[128 + blockIdx.x] = sum;
    ::host_cuda::cluster_wait();
    p.out[blockIdx.x] = p.out[128 + blockIdx.x / 4 * 4 + (blockIdx.x + 1) % 4];
}
extern "C" __global__ void one_barrier(Params p) {
    p.out[blockIdx.x] = 1;
    int sum = 0;
    for (int rank = 0; rank < 4; ++rank) { sum += p.out[blockIdx.x / 4 * 4 + rank]; }
    ::host_cuda::cluster_barrier();
    p.out[blockIdx.x] = sum;
}
extern "C" __global__ void arrives_twice(Params p) { ::host_cuda::cluster_arrive(); ::host_cuda::cluster_arrive(); }
extern "C" __global__ void never_arrives(Params p) { ::host_cuda::cluster_wait(); }

// Each has it twice, so that addresses have an offset.
struct alignas(32) Shared { int unused[3], value; };
extern "C" __global__ void own_memory(Params p) {
    CUPYSPEC_SHARED(Shared, mine);
    if (threadIdx.x == 40) {
        p.out[blockIdx.x] = mine.value;
        p.out[64 + blockIdx.x] = (size_t)&mine % 32;
        mine.value = blockIdx.x;
    }
    ::host_cuda::cluster_barrier();
    p.out[128 + blockIdx.x] = mine.value;
}
extern "C" __global__ void to_the_next(Params p) {
    CUPYSPEC_SHARED(Shared, mine);
    ::host_cuda::cluster_barrier();
    if (threadIdx.x == 40) { *(int*)::host_cuda::cluster_address(&mine.value, (blockIdx.x + 1) % 4) = blockIdx.x; }
    ::host_cuda::cluster_barrier();
    p.out[blockIdx.x] = mine.value;
}
extern "C" __global__ void to_one_that_does_not_run(Params p) {
    CUPYSPEC_SHARED(Shared, mine);
    if (threadIdx.x == 0) { *(int*)::host_cuda::cluster_address(&mine.value, (blockIdx.x + 1) % 4) = 1; }
    ::host_cuda::cluster_barrier();
}
extern "C" __global__ void to_one_that_has_ended(Params p) {
    CUPYSPEC_SHARED(Shared, mine);
    ::host_cuda::cluster_barrier();
    *(int*)::host_cuda::cluster_address(&mine.value, (blockIdx.x + 1) % 4) = 1;
}
extern "C" __global__ void to_no_rank(Params p) {
    CUPYSPEC_SHARED(Shared, mine);
    *(int*)::host_cuda::cluster_address(&mine.value, 4) = 1;
}
extern "C" __global__ void not_shared(Params p) {
    CUPYSPEC_SHARED(Shared, mine);
    mine.value = *(int*)::host_cuda::cluster_address(&p.out, 1) != 0;
}
extern "C" __global__ void declares_twice(Params p) {
    CUPYSPEC_SHARED(int, one);
    CUPYSPEC_SHARED(int, two);
    one = two = 0;
}
"""


@pytest.fixture(scope="module")
def machine() -> ctypes.CDLL:
    return build(MACHINE)


def run(
    machine: ctypes.CDLL, name: str, *, blocks: int = 1, threads: int = 64, cluster: int = 1, order: int = 0
) -> tuple[str, np.ndarray]:
    """(message, the numbers that the kernel wrote; -7 where it did not)."""
    out = np.full(256, -7, np.int32)
    params = np.array([out.ctypes.data], np.uintp)
    message = machine.host_cuda_launch(name.encode(), blocks, threads, cluster, params.ctypes.data, order)
    return message.decode(), out


def run_all(machine: ctypes.CDLL, name: str, **shape: int) -> np.ndarray:
    """The numbers under many orders [order, 256]."""
    answers = [run(machine, name, order=order, **shape) for order in range(64)]
    assert {message for message, _ in answers} == {""}
    return np.array([out for _, out in answers])


def test_machine_tells_deadlocks_and_divergence(machine: ctypes.CDLL) -> None:
    assert "deadlock in block 0: thread 0 waits at __syncthreads()" in run(machine, "missing_barrier")[0]
    assert "different collectives" in run(machine, "different_collectives")[0]
    message, out = run(machine, "collectives")  # works again after a failure
    assert message == "" and (out[:64] == 1).all()


@pytest.mark.parametrize("order", range(8))
def test_machine_tells_misuse_of_clusters(machine: ctypes.CDLL, order: int) -> None:
    for name, message in {
        "missing_block": "deadlock in block 4: thread 0 waits at the cluster's barrier for threads that never come",
        "missing_thread": "deadlock in block 4: thread 0 waits at the cluster's barrier for threads that never come",
        "arrives_twice": "a thread arrives at the cluster's barrier twice and does not wait in between",
        "never_arrives": "a thread waits at the cluster's barrier and did not arrive",
        "to_no_rank": "cluster_address() in block 4 of a cluster of 4",
        "not_shared": "cluster_address() of what is not this block's shared memory",
        "declares_twice": "a kernel declares shared memory twice",
    }.items():
        assert run(machine, name, blocks=8, cluster=4, order=order)[0] == message
    assert run(machine, "own_memory", blocks=6, cluster=4)[0] == "the grid is not made of whole clusters"


def test_machine_tells_use_of_shared_memory_that_does_not_exist(machine: ctypes.CDLL) -> None:
    """Whether the other block runs depends on the order; not in all of many."""
    for name, when in (("to_one_that_does_not_run", "before it runs"), ("to_one_that_has_ended", "after its end")):
        messages = {run(machine, name, blocks=4, cluster=4, order=order)[0] for order in range(16)}
        assert any(message.startswith("shared memory of block ") and when in message for message in messages), messages


def test_machine_shows_races(machine: ctypes.CDLL) -> None:
    assert len({tuple(out) for out in run_all(machine, "race", blocks=4)}) > 1
    assert len({tuple(out) for out in run_all(machine, "one_barrier", blocks=4, cluster=4)}) > 1
    warps = run_all(machine, "warp_sees_warp")[:, 2:4]
    blocks = run_all(machine, "block_sees_block", blocks=2, cluster=2)[:, 2:4]
    assert set(warps.flat) >= {-7, 4} and set(blocks.flat) >= {-7, 4}  # one ahead of the other, even to its end


def test_machine_orders_what_cluster_barriers_divide(machine: ctypes.CDLL) -> None:
    assert (run_all(machine, "two_barriers", blocks=8, cluster=4)[:, :8] == 4).all()


def test_machine_permutes_clusters_and_their_blocks(machine: ctypes.CDLL) -> None:
    orders = run_all(machine, "order_of_blocks", blocks=8, cluster=4)[:, :8].reshape(-1, 2, 4)
    assert (np.sort(orders) % 4 == np.arange(4)).all() and (orders // 4 == orders[:, :, :1] // 4).all()
    assert len(np.unique(orders[:, 0, 0] // 4)) == 2 and len(np.unique(orders[:, 0] % 4, axis=0)) > 16


def test_machine_gives_each_block_its_own_uninitialised_shared_memory(machine: ctypes.CDLL) -> None:
    for out in run_all(machine, "own_memory", blocks=8, cluster=4):
        assert (out[:8].view(np.uint32) == 0xA5A5A5A5).all() and (out[64:72] == 0).all()
        assert (out[128:136] == np.arange(8)).all()


def test_machine_writes_to_the_shared_memory_of_another_block(machine: ctypes.CDLL) -> None:
    out = run_all(machine, "to_the_next", blocks=8, cluster=4)[:, :8]
    assert (out == [3, 0, 1, 2, 7, 4, 5, 6]).all()


def test_machine_without_clusters_refuses_them() -> None:
    specialisation = chain_specialisation("chain_verify.cu", "float32", "float32", "int32", False, SEG, 64)
    params = np.zeros((), CHAIN_PARAMS)
    for launch in (
        Launch(specialisation, "chain_verify", 2, 32, cluster=2),
        Launch(specialisation, "chain_verify", 2, 32, overlap=True),
    ):
        with pytest.raises(ValueError, match="knows no such launch"):
            HostCuda(clusters=False).launch(launch, params)


# ------------------------------------------------------------------------------------------------ sanitizers


@pytest.mark.skipif(host_backend.sanitized(), reason="this is the run under sanitizers")
def test_under_address_and_undefined_behaviour_sanitizers() -> None:
    """The tests below, in a process of their own: the sanitizers' runtime must be loaded before Python."""
    compiler = host_backend.compiler()
    assert compiler is not None
    runtimes = [
        subprocess.run(
            [compiler, f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("asan", "ubsan")
    ]
    if not all(Path(runtime).is_absolute() for runtime in runtimes):
        pytest.skip("this g++ has no sanitizers")
    environment = os.environ | {
        "CUPYSPEC_TEST_SANITIZE": "1",
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",  # Python itself leaks
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run([*command, "-k", "sanitized"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "passed" in done.stdout


def sanitized_cases() -> Iterator[ChainCase]:
    """Exactly as much memory as the call may touch, in every form of a row's end."""
    rng = np.random.default_rng(12)
    for n, (vocab, dtype) in enumerate([(1, "float32"), (33, "float16"), (SMALL + 1, "bfloat16"), (1000, "float32")]):
        for rule in (Token(), Sigmoid(-10, 10)):
            case = random_case(rng, batch=3, width=3, vocab=vocab, dtype=dtype, rule=rule, segment=SMALL)
            case.draft_tokens[n % 3, 1] = (-1, vocab, np.iinfo(np.int32).max, np.iinfo(np.int32).min)[n]
            yield case
            greedy = np.array([0.0, 1.0, 0.0])
            yield dataclasses.replace(case, temperature=greedy, draft=None)
    yield random_case(rng, batch=1, width=255, vocab=2400, distance=0.01, segment=SMALL)


@pytest.mark.skipif(not host_backend.sanitized(), reason="runs under sanitizers, see above")
def test_sanitized_calls() -> None:
    for n, case in enumerate(sanitized_cases()):
        assert_agrees(on_host(case, order=n), case.oracle())


@pytest.mark.skipif(not host_backend.sanitized(), reason="runs under sanitizers, see above")
def test_sanitized_malformed_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for bounds in ([0, 5, 2, 6], [-7, 3, 2**40, 1], [6, 6, 6, 6]):
        test_malformed_bounds_disturb_no_row(bounds)


@pytest.mark.skipif(not host_backend.sanitized(), reason="runs under sanitizers, see above")
def test_sanitized_kernel_may_not_leave_its_memory() -> None:
    """A kernel that reads past its array, or writes past its shared memory, must end the process."""
    code = (
        "import sys; sys.path[:0] = ['tests', '.']\n"
        "import test_kernels as t\n"
        "m = t.build('''struct Params { int* out; }; struct Shared { int few[3]; };\n"
        'extern "C" __global__ void heap(Params p) { int* few = new int[9 + p.out[0]]; p.out[1] = few[threadIdx.x]; }\n'
        'extern "C" __global__ void shared(Params p) { CUPYSPEC_SHARED(Shared, s); (&s.few[0])[threadIdx.x] = 1; }\n'
        "''')\n"
        "t.run(m, sys.argv[1], threads=32)\n"
    )
    for name in ("heap", "shared"):
        done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True)
        assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stderr[-3000:]


@pytest.mark.parametrize("side", ["target", "draft"])
def test_probabilities_whose_sum_could_overflow(side: str) -> None:
    """A float32 sum that is infinite makes the last segment win, or the last id."""
    p, q = (np.full((1, n, 3000), 1e-3, np.float32) for n in (2, 1))
    (p if side == "target" else q)[:, 0] = 2.0**64
    case = ChainCase(np.array([[1]]), p, q, 3000, seed=np.zeros(1, np.uint64), target_probs=True, draft_probs=True)
    assert same(case.verify(), on_host(case)) and on_host(case).status[0] == (1 if side == "target" else 4)
    p[:], q[:] = 2.0**63, 2.0**60
    assert_agrees(on_host(case), case.oracle())
