"""Inputs of test_faults.py, in few rows, on the CUDA kernels: compiled for the CPU, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

import cupyspec
from cupyspec import Sampling, Sigmoid, Status, Token, Verification
from cupyspec._segments import SEG
from cupyspec.testing import chi_square, draws
from experiments import COIN_ZERO, LARGEST_COIN, logs, row_seeds, rows_of
from host_cuda import backend as host_backend
from machines import MACHINES, SMALL, Machine
from strategies import SCORE_TYPES

RULES = {"token": Token(), "lenient": Token(lenience=0.5), "sigmoid": Sigmoid()}
DTYPES = sorted(SCORE_TYPES)
KERNELS = (
    pytest.param("host_cuda", marks=pytest.mark.skipif(host_backend.compiler() is None, reason="needs g++")),
    pytest.param("gpu", marks=pytest.mark.gpu),
)


@pytest.fixture(scope="module", params=KERNELS)
def machine(request: pytest.FixtureRequest, need_frontend: Callable[[str], Any]) -> Machine:
    if request.param == "gpu":
        need_frontend("torch")
    return MACHINES[request.param]()


def segment_of(machine: Machine) -> int:
    """The library's own on a GPU."""
    return SEG if machine.name == "gpu" else SMALL


def verify_rows(machine: Machine, p: Any, q: Any, x: Any, seeds: Any, **options: Any) -> Verification:
    """Every seed a row: the same target rows [K + 1, V], draft rows [K, V] and drafts [K] in each; probabilities."""
    size = len(seeds)
    p, q = (v if v is None else np.asarray(v) for v in (p, q))
    kind = np.float32 if p.dtype == np.float64 else p.dtype
    p, q = (v if v is None else np.broadcast_to(v.astype(kind), (size, *v.shape)) for v in (p, q))
    drafts = np.broadcast_to(np.asarray(x, np.int32), (size, *np.shape(x)))
    options = {"scores": "probs", "segment": segment_of(machine)} | options
    return machine.verify(drafts, p, q, seed=np.asarray(seeds, np.uint64), **options)


def seeds_with_coins(low: float, high: float, count: int) -> np.ndarray:
    """Row seeds whose first coin is in a range."""
    tried = np.arange(1 << 18, dtype=np.uint64)
    coins = draws(tried, batch_size=tried.size, num_draft_tokens=1, vocab_size=1).coins[:, 0]
    return tried[(coins >= low) & (coins <= high)][:count]


def test_f01_residual_zero_everywhere(machine: Machine) -> None:
    """A division by the residual's sum: p < q by rounding alone, and the next token must come from p."""
    q, p = [[0.5, 0.5, 0, 0]], [[0.5 - 2.0**-12, 0.5, 0, 0], [0, 0, 0, 1]]
    got = verify_rows(machine, p, q, [0], seeds_with_coins(1 - 2.0**-12, 1, 40))
    assert not got.num_accepted.any() and not got.status.any()
    assert set(got.tokens[:, 0].tolist()) == {0, 1}


def test_f01_residual_zero_in_every_segment(machine: Machine) -> None:
    """A fall-back to p that knows the first segment alone."""
    segment = segment_of(machine)
    q, p = np.full((1, 3 * segment), 2.0**-12, np.float32), np.full((2, 3 * segment), 2.0**-14, np.float32)
    got = verify_rows(machine, p, q, [0], range(100))
    assert set((got.tokens[got.num_accepted == 0, 0] // segment).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", DTYPES)
def test_f01_equal_rows_accept_everything(machine: Machine, kind: str, rule: str) -> None:
    """p = q must accept at every coin, the largest one too."""
    z = np.random.default_rng(0).normal(0, 3, (4, 33)).astype(SCORE_TYPES[kind])
    seeds = [LARGEST_COIN, *range(60)]
    got = verify_rows(machine, z, z[:3], [5, 6, 7], seeds, scores="logits", rule=RULES[rule])
    assert (got.num_accepted == 3).all()


@pytest.mark.parametrize("kind", DTYPES)
def test_f02_zero_and_tiny_temperatures_in_one_batch(machine: Machine, kind: str) -> None:
    """inf - inf after a division by a tiny temperature, and greedy rows that change with their neighbours."""
    rows = np.tile(np.array([2.875, 2.955, 11.0625, -2.447]), (5, 1)).astype(SCORE_TYPES[kind])
    temperature = np.array([0, 1e-5, 1e-40, 1, 1e-30])
    for seed in range(10):
        got = machine.sample(rows, seed=seed, sampling=Sampling(temperature))
        assert got.tokens[[0, 1, 2, 4]].tolist() == [2] * 4
        assert not got.status.any()
    ties = np.tile(np.array([1, 1, 0]), (5, 1)).astype(SCORE_TYPES[kind])
    for seed in range(10):
        assert machine.sample(ties, seed=seed, sampling=Sampling(temperature)).tokens[[0, 2]].tolist() == [0, 0]


def test_f05_sums_in_bfloat16(machine: Machine) -> None:
    """A running sum in bfloat16 stops at 2^-9 after 256 terms: the upper half would never come out."""
    row = np.full(131072, 2.0**-17).astype(SCORE_TYPES["bfloat16"])
    rows = np.broadcast_to(row, (40, row.size))
    tokens = machine.sample(rows, seed=0, scores="probs", segment=segment_of(machine)).tokens
    assert 4 <= np.count_nonzero(tokens < 65536) <= 36


@pytest.mark.parametrize("scale", [0.98, 1.02, 1e-3])
def test_f05_rows_that_do_not_sum_to_one(machine: Machine, scale: float) -> None:
    """Draws of sample() and of the bonus do not depend on a row's sum."""
    p = np.array([0.4, 0.3, 0.2, 0.1, 0.0])
    seeds = row_seeds(400, 0)
    drawn = machine.sample(rows_of(p * scale, 400), seed=seeds, scores="probs").tokens
    bonus = machine.verify(np.empty((400, 0), np.int32), rows_of(p * scale, 400, 1), seed=seeds, scores="probs").tokens
    for tokens in (drawn, bonus[:, 0]):
        assert not chi_square(np.bincount(tokens, minlength=5), p).rejected


@pytest.mark.parametrize("temperature", [1.0, 0.0, 0.3])
@pytest.mark.parametrize("kind", DTYPES)
def test_f06_masked_rows(machine: Machine, kind: str, temperature: float) -> None:
    """softmax of an all -inf row is 0/0; other rows must not notice."""
    rows = np.full((3, 100352), -np.inf).astype(SCORE_TYPES[kind])
    rows[1, 99999] = -25
    rows[2] = np.random.default_rng(0).normal(0, 2, 100352)
    options: dict[str, Any] = {"sampling": Sampling(temperature), "segment": segment_of(machine)}
    got = machine.sample(rows, seed=np.array([4, 5, 6]), **options)
    alone = machine.sample(rows[2:], seed=np.array([6]), **options)
    assert got.tokens.tolist() == [-1, 99999, alone.tokens[0]]
    assert got.status.tolist() == [Status.TARGET_EMPTY, 0, 0]
    verified = machine.verify(
        np.full((2, 1), 99999, np.int32), np.stack([rows[:2]] * 2, axis=1), seed=np.array([4, 5]), **options
    )
    assert verified.tokens.tolist() == [[-1, -1], [99999, 99999]]


@pytest.mark.parametrize("scores", ["probs", "logits"])
def test_f07_residual_takes_away_all_of_the_draft(machine: Machine, scores: str) -> None:
    """Taking away only the rejected token yields 2 in 3 of 8 draws where 0 alone is right."""
    form = np.asarray if scores == "probs" else logs
    p, q = form([[0.5, 0.2, 0.3], [1, 0, 0]]), form([[0.1, 0.6, 0.3]])
    got = verify_rows(machine, p, q, [1], range(300), scores=scores)
    rejected = got.num_accepted == 0
    assert 150 < np.count_nonzero(rejected) < 250
    assert set(got.tokens[rejected, 0].tolist()) == {0}
    one_hot = verify_rows(machine, p, None, [1], range(300), scores=scores)
    assert set(one_hot.tokens[one_hot.num_accepted == 0, 0].tolist()) == {0, 2}


def test_f08_temperature_acts_on_the_ratio(machine: Machine) -> None:
    """Acceptance at temperature 1 whatever was asked for: .8300 where .8969 is right. Coins between the two tell."""
    target, draft = np.array([[1.0, 0], [0, 0]]), np.array([[2.0, 0]])
    right, wrong = (softmax(np.array([1, 0]) / t)[0] / softmax(np.array([2, 0]) / t)[0] for t in (0.5, 1.0))
    assert (round(right, 4), round(wrong, 4)) == (0.8969, 0.83)
    for low, high, accepted in ((wrong + 1e-3, right - 1e-3, 1), (right + 1e-3, 0.95, 0)):
        seeds = seeds_with_coins(low, high, 50)
        got = verify_rows(machine, target, draft, [0], seeds, scores="logits", sampling=Sampling(0.5))
        assert (got.num_accepted == accepted).all()


@pytest.mark.parametrize("rule", ["token", "lenient"])
@pytest.mark.parametrize("kind", DTYPES)
def test_f10_a_coin_of_zero(machine: Machine, kind: str, rule: str) -> None:
    """An inclusive comparison accepts an impossible token once in 2^24 draws; p / q is 0/0 or x/0."""
    smallest = 2.0**-24  # float16's smallest subnormal
    cases = [
        ([0, 1, 0, 0], [1, 0, 0, 0], [1, -1]),
        ([0, 1, 0, 0], [0, 0, 1, 0], [1, -1]),
        ([0.25, 0.75, 0, 0], [0, 1, 0, 0], [0, 3]),
        ([0, 1, 0, 0], [smallest, 1, 0, 0], [1, -1]),
        ([smallest, 1, 0, 0], [1, 0, 0, 0], [0, 3]),
    ]
    for p, q, tokens in cases:
        rows = np.array([p, [0, 0, 0, 1]]).astype(SCORE_TYPES[kind])
        got = verify_rows(machine, rows, np.array([q]), [0], [COIN_ZERO], rule=RULES[rule])
        assert got.tokens.tolist() == [tokens]


@pytest.mark.parametrize("rule", RULES)
def test_f10_a_coin_of_zero_beside_masked_logits(machine: Machine, rule: str) -> None:
    """The same on logits, where -inf is what must not come out: for the sigmoid rule too."""
    target, draft = np.array([[-np.inf, 0, -np.inf], [0, 0, 0]]), np.array([[5.0, 0, 0]])
    for q in (draft, None):
        got = verify_rows(machine, target, q, [0], [COIN_ZERO, *range(20)], scores="logits", rule=RULES[rule])
        assert (got.tokens == [1, -1]).all() and not got.status.any()


def test_f11_probabilities_that_underflow(machine: Machine) -> None:
    """0/0 = NaN wins an argmax: every other weight is exactly 0."""
    row = np.random.default_rng(0).normal(0, 1, 151936).astype(np.float32)
    row[12345] += 200
    tokens = machine.sample(np.broadcast_to(row, (30, row.size)), seed=0, segment=segment_of(machine)).tokens
    assert (tokens == 12345).all()
    for p in ([0, 1], [1, 0]):
        for form, scores in ((np.asarray, "probs"), (logs, "logits")):
            assert (machine.sample(rows_of(form(p), 300), seed=1, scores=scores).tokens == p.index(1)).all()


@pytest.mark.parametrize("seeds", [[7, 8, 9, 10], [0, 2**32, 2**63 - 1, -1], [1, 1 + 2**32, 1 + 2**33, 1 + 2**63]])
@pytest.mark.parametrize("rule", RULES)
def test_f13_a_row_depends_on_its_own_seed(machine: Machine, rule: str, seeds: list[int]) -> None:
    """Seeds read at row 0, or streams keyed by slot: alone, permuted, and with more rows."""
    rng = np.random.default_rng(13)
    p, q = rng.normal(0, 1, (5, 1000)), rng.normal(0, 1, (4, 1000))
    own = np.array([seed % 2**64 for seed in seeds], np.uint64)

    def tokens(of: np.ndarray) -> np.ndarray:
        x = np.argmax(q, axis=1)
        return verify_rows(machine, p, q, x, of, scores="logits", rule=RULES[rule], sampling=Sampling(2.0)).tokens

    whole = tokens(own)
    np.testing.assert_array_equal(tokens(own[[2, 0, 3, 1]]), whole[[2, 0, 3, 1]])
    np.testing.assert_array_equal(tokens(np.concatenate([own, row_seeds(60, 100)]))[:4], whole)
    for b in range(4):
        np.testing.assert_array_equal(tokens(own[[b]])[0], whole[b])
    assert len({tuple(row) for row in whole.tolist()}) == 4


def test_f14_offsets_past_32_bits(tmp_path: Path) -> None:
    """row * V in 32 bits: rows 2^31 + 8 and 2^32 + 16 elements into a sparse file."""
    if host_backend.compiler() is None:
        pytest.skip("needs g++")
    stride, V = (1 << 31) + 8, 300
    file = np.memmap(tmp_path / "scores", np.float16, "w+", shape=(3, stride))
    for row, hot in enumerate((1, 7, V - 3)):
        file[row, hot] = 100
    rows, machine = np.asarray(file)[:, :V], MACHINES["host_cuda"]()
    assert machine.sample(rows, seed=0).tokens.tolist() == [1, 7, V - 3]
    got = machine.verify(np.array([[1, 7]], np.int32), rows[None], rows[None, :2], seed=0)
    assert got.tokens.tolist() == [[1, 7, V - 3]]
    flat = machine.verify(
        np.array([1, 7], np.int32), rows, seed=0, cu_num_draft_tokens=np.array([0, 2]), max_draft_tokens=2
    )
    assert flat.tokens.tolist() == [[1, 7, V - 3]]


@pytest.mark.parametrize("V", [SMALL - 1, SMALL, SMALL + 1, SEG - 1, SEG, SEG + 1, 8193, 10000, 50257, 151936])
def test_f15_nothing_past_the_vocabulary(machine: Machine, V: int) -> None:
    """Masked lanes of a last tile score 0 and tie with real zeros: id 5 alone has residual mass."""
    p, q = np.zeros((2, V)), np.zeros((1, V))
    p[:, 5], q[0, 7] = 1, 1
    for draft in (q, None):
        assert (verify_rows(machine, p, draft, [7], range(4)).tokens == [5, -1]).all()
    equal = np.full((2, V), 1 / V)
    got = verify_rows(machine, equal, equal[:1], [V - 1], range(4))
    assert (got.tokens[:, 0] == V - 1).all() and (got.tokens[:, 1] < V).all()


@pytest.mark.parametrize("draft", ["random", "on the last id", "one-hot"])
@pytest.mark.parametrize("negative", [-1, -2, -(2**31)])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_f16_placeholders(machine: Machine, negative: int, kind: Any, draft: str) -> None:
    """-1 as an index reads the entry before the row, or comes out as a token."""
    x = np.array([[2, negative, -1], [negative, -1, negative]], kind)
    p = np.zeros((2, 4, 4), np.float32)
    p[:, 0, 2], p[:, 1:, 3] = 1, 1
    q = {
        "random": np.random.default_rng(0).dirichlet(np.ones(4), (2, 3)).astype(np.float32),
        "on the last id": np.tile(np.array([0, 0, 0, 1], np.float32), (2, 3, 1)),
        "one-hot": None,
    }[draft]
    if q is not None and draft == "on the last id":
        q[0, 0] = [0, 0, 1, 0]  # a draft that q allows
    got = machine.verify(x, p, q, seed=0, scores="probs")
    assert got.tokens.tolist() == [[2, 3, -1, -1], [2, -1, -1, -1]] and got.tokens.dtype == kind
    assert got.num_accepted.tolist() == [1, 0]
    assert got.status.tolist() == ([0, 0] if negative == -1 else [Status.TOKEN_OUT_OF_RANGE] * 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_f17_padded_columns(machine: Machine, temperature: float) -> None:
    """Padded columns have logit 0 and win where all real logits are negative."""
    options: dict[str, Any] = {"seed": 0, "vocab_size": 3, "sampling": Sampling(temperature)}
    rows = rows_of([-1, -2, -3, 0, 0], 200)
    assert set(machine.sample(rows, **options).tokens.tolist()) == ({0} if temperature == 0 else {0, 1, 2})
    wide = np.full((200, 1, 9), np.nan, np.float32)
    wide[..., :3] = 0
    got = machine.verify(np.full((200, 1), 2, np.int32), rows_of([-1, -2, -3, 0, 0], 200, 2), wide, **options)
    assert got.tokens.max() <= 2 and not got.status.any()


@pytest.mark.parametrize("x", [100, 101, 2**31 + 5, 2**32 + 5, 2**63 - 1])
def test_f17_ids_past_the_vocabulary(machine: Machine, x: int) -> None:
    """Ids read out of bounds, or wrapped: 2^32 + 5 is not 5."""
    p = np.zeros((1, 2, 100), np.float32)
    p[0, 0, 5] = 1
    got = machine.verify(np.array([[x]]), p, p[:, :1], seed=0, scores="probs")
    assert got.tokens.tolist() == [[5, -1]] and got.status.tolist() == [Status.TOKEN_OUT_OF_RANGE]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", ["padded", "flattened"])
def test_f18_ragged_batches(machine: Machine, rule: str, layout: str) -> None:
    """Rows that shift where one has no drafts: lengths 0, 3, 1, 0, each row one-hot on its own index."""
    lengths = np.array([0, 3, 1, 0], np.int32)
    p = np.full((4, 4, 4), -np.inf, np.float32)
    for b in range(4):
        p[b, :, b] = 0
    x = np.tile(np.arange(4, dtype=np.int32)[:, None], (1, 3))
    used = np.arange(4) <= lengths[:, None]
    options: dict[str, Any] = {"seed": 0, "rule": RULES[rule]}
    if layout == "padded":
        p[~used] = np.nan
        got = machine.verify(x, p, p[:, :3], num_draft_tokens=lengths, **options)
    else:
        drafts = used[:, 1:]
        bounds = np.cumsum([0, *lengths])
        flat = p[used], p[:, :3][drafts]
        got = machine.verify(x[drafts], *flat, cu_num_draft_tokens=bounds, max_draft_tokens=3, **options)
    assert got.num_accepted.tolist() == lengths.tolist()
    assert got.tokens.tolist() == [[0, -1, -1, -1], [1, 1, 1, 1], [2, 2, -1, -1], [3, -1, -1, -1]]
    assert not got.status.any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_f18_smallest_shapes(machine: Machine, rule: str, temperature: float) -> None:
    """Zero-size arrays, rows without drafts, a vocabulary of one: every slot of every output is written."""
    options: dict[str, Any] = {"seed": 0, "rule": RULES[rule], "sampling": Sampling(temperature)}
    for K, B, V in np.ndindex(3, 3, 2):
        x, p = np.zeros((B, K), np.int32), np.zeros((B, K + 1, V + 1), np.float32)
        for q in (None, p[:, :K]):
            got = machine.verify(x, p, q, **options)
            assert got.tokens.shape == (B, K + 1) and got.num_accepted.shape == got.status.shape == (B,)
            assert ((got.tokens >= 0).sum(axis=1) == got.num_accepted + 1).all() and not got.status.any()


@pytest.mark.parametrize("K", [1, 32, 33, 64, 100, 255])
def test_f18_many_drafts(machine: Machine, K: int) -> None:
    """Limits at 32 lanes or 64 bits: all accepted gives K + 1 tokens; a mismatch at the last one K."""
    p = np.full((2, K + 1, 3), -np.inf, np.float32)
    p[:, :, 1] = 0
    x = np.ones((2, K), np.int32)
    x[1, K - 1] = 2
    for q in (np.zeros((2, K, 3), np.float32), None):
        got = machine.verify(x, p, q, seed=0)
        assert got.num_accepted.tolist() == [K, K - 1]
        assert got.tokens[1].tolist() == [1] * K + [-1]


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "cupy", "jax"])
def test_f25_arrays_of_another_device(library: str, need_frontend: Callable[[str], Any]) -> None:
    """Kernels launched on the current device where the arrays are on another, and a device or stream left changed."""
    module = need_frontend(library)
    z = np.random.default_rng(0).normal(size=(3, 2, 2000)).astype(np.float32)
    x, seeds = np.argmax(z[:, :1], axis=-1).astype(np.int32), np.arange(3)
    want = cupyspec.verify(x, z, seed=seeds)
    if library == "torch":
        count, current = module.cuda.device_count(), module.cuda.current_device
    elif library == "cupy":
        count, current = module.cuda.runtime.getDeviceCount(), lambda: module.cuda.Device().id
    else:
        count, current = len(module.devices("gpu")), lambda: 0
    if count < 2:
        pytest.skip("needs two GPUs")

    def placed(values: np.ndarray, device: int) -> Any:
        if library == "torch":
            return module.from_numpy(values).to(f"cuda:{device}")
        if library == "cupy":
            with module.cuda.Device(device):
                return module.asarray(values)
        return module.device_put(values, module.devices("gpu")[device])

    before = current()
    for device in (1, 0, 1):
        got = cupyspec.verify(placed(x, device), placed(z, device), seed=seeds).tokens
        assert str(getattr(got, "device", device)) in (str(placed(x, device).device), f"{device}")
        host = got.get() if library == "cupy" else np.asarray(got.cpu() if library == "torch" else got)
        np.testing.assert_array_equal(host, want.tokens)
    assert current() == before
    with pytest.raises(ValueError, match="device"):
        cupyspec.verify(placed(x, 0), placed(z, 1), seed=seeds)
