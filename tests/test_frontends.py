"""The same call in every array library: tokens of the NumPy call, in the caller's library, type and device."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyspec import Sampling, Sigmoid, Token, row_seeds, sample, verify
from frontends import FRONTENDS, CudaProducer, Frontend, Producer, assert_answer, lent, lib

__all__ = ["lib"]  # a fixture

ROOT = Path(__file__).resolve().parent.parent
B, K, V = 7, 4, 300
SEEDS = np.array([7, 8, 9, 10, 2**40, -1, 0])


def scores(seed: int, *shape: int) -> np.ndarray:
    """Logits that float16 and bfloat16 hold exactly: what a library stores does not depend on its dtype."""
    return (np.random.default_rng(seed).integers(-64, 64, shape) / 16).astype(np.float32)


TARGET, DRAFT = scores(0, B, K + 1, V), scores(1, B, K, V)
TARGET[:, :K] += 2 * DRAFT  # alike, so that chains stop at every length
TOKENS = np.stack([sample(DRAFT[:, i], seed=SEEDS, position=i).tokens for i in range(K)], axis=1)
TOKENS[3, 2] = -1
TEMPERATURES = np.array([1, 0.5, 0, 2, 0.7, 1e-3, 1], np.float32)
RULES = (Token(), Token(lenience=0.5), Sigmoid(-20, 20))


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("one_hot", [False, True], ids=["draft", "one-hot"])
def test_verify_is_the_same_in_every_library(lib: Frontend, rule: Token | Sigmoid, one_hot: bool) -> None:
    """Catches an answer in another library, a dtype read as another one, an id dtype that is not draft_tokens'."""
    arguments: dict[str, Any] = {"seed": SEEDS, "step": 3, "rule": rule, "sampling": Sampling(TEMPERATURES)}
    for token_dtype in lib.token_dtypes:
        tokens = TOKENS.astype(token_dtype)
        expected = verify(tokens, TARGET, None if one_hot else DRAFT, **arguments)
        assert expected.tokens.dtype == token_dtype
        for target_dtype, draft_dtype in itertools.product(lib.dtypes, lib.dtypes):
            target, draft = lib.array(TARGET, target_dtype), None if one_hot else lib.array(DRAFT, draft_dtype)
            assert_answer(lib, target, verify(lib.array(tokens), target, draft, **arguments), expected)


def test_sample_is_the_same_in_every_library(lib: Frontend) -> None:
    """Catches the same mistakes in `sample`, and a log-normaliser that is not float32."""
    for token_dtype, dtype in itertools.product(lib.token_dtypes, lib.dtypes):
        logits = lib.array(TARGET[:, 0], dtype)
        arguments: dict[str, Any] = {"seed": 5, "step": 2**40, "position": 2, "token_dtype": token_dtype}
        arguments |= {"sampling": Sampling(TEMPERATURES), "return_log_normalizer": True}
        assert_answer(lib, logits, sample(logits, **arguments), sample(TARGET[:, 0], **arguments))


def test_flattened_layout_and_normalizers(lib: Frontend) -> None:
    """Catches arrays beside the scores that are not taken in the call's library, or are read padded."""
    lengths = np.array([4, 0, 2, 1, 0, 4, 3])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = np.concatenate([TOKENS[b, :n] for b, n in enumerate(lengths)])
    target = np.concatenate([TARGET[b, : n + 1] for b, n in enumerate(lengths)])
    draft = np.concatenate([DRAFT[b, :n] for b, n in enumerate(lengths)])
    normalizer = np.log(np.exp(target).sum(-1))
    expected = verify(
        tokens,
        target,
        draft,
        cu_num_draft_tokens=starts,
        max_draft_tokens=K,
        seed=SEEDS,
        target_log_normalizer=normalizer,
    )
    arrays = [lib.array(a) for a in (tokens, target, draft)]
    for cu in (starts, list(starts), lib.array(starts)):
        answer = verify(
            *arrays,
            cu_num_draft_tokens=cu,
            max_draft_tokens=np.int64(K),
            seed=SEEDS,
            target_log_normalizer=lib.array(normalizer),
        )
        assert_answer(lib, arrays[1], answer, expected)


def test_empty_batch_keeps_the_library(lib: Frontend) -> None:
    """Catches answers of an empty batch that come from another place than others."""
    arrays = [lib.array(a[:0]) for a in (TOKENS, TARGET, DRAFT)]
    assert_answer(lib, arrays[1], verify(*arrays, seed=1), verify(TOKENS[:0], TARGET[:0], DRAFT[:0], seed=1))
    assert_answer(lib, arrays[1], sample(lib.array(TARGET[:0, 0]), seed=1), sample(TARGET[:0, 0], seed=1))


@pytest.mark.parametrize("form", ["numpy", "same library", "another library", "list", "tuple of scalars"])
def test_parameters_of_any_kind_beside_any_library(lib: Frontend, form: str, need_frontend: Any) -> None:
    """Catches per-row parameters that must be of the scores' library, or mean something else as a list."""
    other = FRONTENDS["numpy" if lib.name == "torch" else "torch"]
    if form == "another library" and other.name == "torch":
        need_frontend("torch")

    def given(values: np.ndarray) -> Any:
        match form:
            case "same library":
                return lib.array(values)
            case "another library":
                return other().array(values)
            case "list":
                return values.tolist()
            case "tuple of scalars":
                return tuple(values)
        return values

    counts, active = np.array([4, 3, 0, 4, 1, 2, 4]), np.array([True, True, False, True, True, True, True])
    arrays = TOKENS.astype(np.int32), TARGET, DRAFT
    integers = np.arange(7, dtype=np.int32)
    expected = verify(
        *arrays,
        seed=integers,
        step=integers * 5,
        sampling=Sampling(TEMPERATURES),
        num_draft_tokens=counts,
        active=active,
    )
    answer = verify(
        *(lib.array(a) for a in arrays),
        seed=given(integers),
        step=given(integers * 5),
        sampling=Sampling(given(TEMPERATURES)),
        num_draft_tokens=given(counts.astype(np.int32)),
        active=given(active),
    )
    assert_answer(lib, lib.array(TARGET), answer, expected)
    positions = {"position": given(integers + 1), "draw": given(integers * 9)}
    answer = sample(lib.array(TARGET[:, 0]), seed=3, **positions)
    assert_answer(
        lib,
        lib.array(TARGET),
        answer,
        sample(TARGET[:, 0], seed=3, position=integers + 1, draw=integers * 9),
    )


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integer_parameters_have_one_meaning_in_every_dtype(dtype: str) -> None:
    """Catches a parameter read at another width than it is stored in (F28)."""
    rows, counts = np.arange(7), np.array([4, 3, 0, 4, 1, 2, 4])
    expected = verify(TOKENS, TARGET, DRAFT, seed=rows, step=rows, num_draft_tokens=counts)
    answer = verify(
        TOKENS,
        TARGET,
        DRAFT,
        seed=rows.astype(dtype),
        step=rows.astype(dtype),
        num_draft_tokens=counts.astype(dtype),
    )
    np.testing.assert_array_equal(answer.tokens, expected.tokens)
    for scalar in (np.array(5, dtype), np.array(5, dtype)[()], np.full(1, 5, dtype)):
        answer = verify(TOKENS, TARGET, DRAFT, seed=5, step=scalar)
        np.testing.assert_array_equal(answer.tokens, verify(TOKENS, TARGET, DRAFT, seed=5, step=5).tokens)


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        (np.array([-1, -2], np.int32), [2**64 - 1, 2**64 - 2]),
        (np.array([-1, -2], np.int64), [2**64 - 1, 2**64 - 2]),
        (np.array([2**32 - 1, 5], np.uint32), [2**32 - 1, 5]),
        (np.array([2**64 - 1, 5], np.uint64), [2**64 - 1, 5]),
        ([-1, 2**64 - 1], [2**64 - 1, 2**64 - 1]),
        ([2**63, -(2**63)], [2**63, 2**63]),
        (np.array([[1, 2], [3, 4]], np.uint32), [2**32 + 2, 3 * 2**32 + 4]),
        (np.array([[1, 2], [3, 4]], np.uint32).T, [2**32 + 3, 2 * 2**32 + 4]),
    ],
)
def test_seed_words(seed: Any, words: list[int]) -> None:
    """Catches sign- and zero-extension mixed up, and the words of a pair in the wrong order."""
    logits = scores(2, 2, V)
    expected = sample(logits, seed=np.array(words, np.uint64), step=np.arange(2)).tokens
    np.testing.assert_array_equal(sample(logits, seed=seed, step=np.arange(2)).tokens, expected)


def test_scalar_seeds_are_split(lib: Frontend) -> None:
    """Catches a scalar of another kind (0-d, NumPy's, the library's) taken as one seed for all rows, also at B = 1."""
    logits = lib.array(TARGET[:, 0])
    expected = sample(TARGET[:, 0], seed=row_seeds(12, B)).tokens
    for seed in (12, np.int64(12), np.array(12, np.int32), lib.array(np.array(12, np.int32))):
        np.testing.assert_array_equal(lib.numpy(sample(logits, seed=seed).tokens), expected)
        alone = sample(lib.array(TARGET[:1, 0]), seed=seed).tokens
        np.testing.assert_array_equal(lib.numpy(alone), expected[:1])


@pytest.mark.parametrize("other", ["torch", "jax", "array_api_strict", "producer"])
def test_mixed_libraries_are_refused_by_name(other: str, need_frontend: Any) -> None:
    """Catches a silent conversion, or an error deep inside, where arrays of two libraries meet."""
    if other in ("torch", "jax"):
        need_frontend(other)
    foreign = FRONTENDS[other]()
    normalizer = np.zeros((B, K + 1), np.float32)
    for name in ("draft_tokens", "draft_logits", "target_log_normalizer"):
        arrays: dict[str, Any] = {"draft_tokens": TOKENS, "draft_logits": DRAFT, "target_log_normalizer": normalizer}
        arrays[name] = foreign.array(arrays[name])
        with pytest.raises(TypeError, match=f"{name} is a .* array but target_logits is a numpy array") as caught:
            verify(target_logits=TARGET, **arrays, seed=1)
        assert ("frontends" if other == "producer" else other) in str(caught.value)


# CUDA and other devices, as far as the CPU can tell.


@pytest.mark.parametrize("argument", ["logits", "target_logits"])
def test_cuda_array_without_cupy_names_the_extra(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an ImportError from inside that leaves the user to guess what to install."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"cupyspec\[cuda12\]"):
        if argument == "logits":
            sample(CudaProducer(), seed=1)
        else:
            verify(TOKENS, CudaProducer(), DRAFT, seed=1)


def test_cuda_scores_without_cupy_in_a_fresh_interpreter() -> None:
    """Catches a path to CUDA arrays that imports CuPy only where it happens to be loaded already."""
    code = """
import sys
sys.modules["cupy"] = None
from frontends import CudaProducer
import cupyspec
try:
    cupyspec.sample(CudaProducer(), seed=1)
except ImportError as error:
    print(error)
"""
    assert "pip install 'cupyspec[cuda12]'" in run(code)


@pytest.mark.parametrize("kind", [4, 7, 8, 10, 14, 99])
def test_other_devices_are_refused_by_name(kind: int) -> None:
    """Catches memory of a device that nobody here can address taken for the host's."""

    class Elsewhere(CudaProducer):
        def __dlpack_device__(self) -> tuple[int, int]:
            return kind, 3

    with pytest.raises(ValueError, match=f"logits must be on the CPU or a CUDA device, got device .*{kind}:3"):
        sample(Elsewhere(), seed=1)


def test_arrays_on_two_devices_are_refused_by_name() -> None:
    """Catches a silent copy between devices (F25)."""
    with pytest.raises(ValueError, match="draft_logits is on cuda:0 but target_logits is on cpu"):
        verify(Producer(TOKENS), Producer(TARGET), CudaProducer(), seed=1)


def test_array_api_devices_are_kept() -> None:
    """Catches answers on the namespace's default device instead of the caller's."""
    xp = importlib.import_module("array_api_strict")
    logits = xp.asarray(TARGET[:, 0], device=xp.Device("device1"))
    assert sample(logits, seed=1).tokens.device == xp.Device("device1")


# DLPack by hand.


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_producers_memory_is_given_back(dtype: str) -> None:
    """Catches capsules that are consumed and never released."""
    before = len(lent)
    verify(Producer(TOKENS), Producer(TARGET.astype(dtype)), Producer(DRAFT.astype(dtype)), seed=1)
    assert len(lent) == before


def test_a_producers_bfloat16_is_refused_with_what_it_is() -> None:
    """NumPy takes no bfloat16 from a capsule: catches a crash, or 16-bit integers read as scores (F19)."""
    bits = (TARGET.view(np.uint32) >> 16).astype(np.uint16)
    with pytest.raises(TypeError, match=r"target_logits: numpy cannot import a frontends\.Producer by DLPack"):
        verify(Producer(TOKENS), Producer(bits, bfloat16=True), Producer(DRAFT), seed=1)


# PyTorch


@pytest.fixture
def torch(need_frontend: Any) -> Any:
    return need_frontend("torch")


def test_torch_tensors_that_require_grad(torch: Any) -> None:
    """Catches torch's refusal to export them, and answers that carry a graph."""
    target = torch.nn.Parameter(torch.from_numpy(TARGET))
    draft = (torch.from_numpy(DRAFT).requires_grad_() * 1.0).float()
    temperature = torch.ones(B, requires_grad=True)
    answer = verify(torch.from_numpy(TOKENS), target, draft, seed=1, sampling=Sampling(temperature))
    assert_answer(FRONTENDS["torch"](), target, answer, verify(TOKENS, TARGET, DRAFT, seed=1))
    assert target.grad is None
    assert draft.requires_grad


def test_torch_views_that_stand_for_other_values(torch: Any) -> None:
    """Catches memory read as it is where a tensor's negative or conjugate bit says that its values differ."""
    expected = verify(TOKENS, TARGET, DRAFT, seed=1)
    complex_scores = torch.complex(torch.zeros(TARGET.shape), torch.from_numpy(-TARGET))
    lazy = complex_scores.conj().imag
    assert lazy.is_neg()
    answer = verify(torch.from_numpy(TOKENS), lazy, torch.from_numpy(DRAFT), seed=1)
    assert_answer(FRONTENDS["torch"](), lazy, answer, expected)
    with pytest.raises(TypeError, match=r"target_logits must have dtype .*, got complex64"):
        verify(torch.from_numpy(TOKENS), complex_scores.conj(), torch.from_numpy(DRAFT), seed=1)
    assert lazy.is_neg()


def test_torch_tensors_without_plain_memory(torch: Any) -> None:
    """Catches an obscure error, or a densified copy, for tensors that have no strided memory."""
    dense = torch.from_numpy(TARGET[:, 0].copy())
    for logits, word in (
        (dense.to_sparse(), "sparse_coo"),
        (dense.to_mkldnn(), "_mkldnn"),
        (dense.to("meta"), "meta"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"logits.*{word}"):
            sample(logits, seed=1)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_torch_quantized_tensors(torch: Any) -> None:
    """Catches codes of a quantised tensor read as scores."""
    with pytest.raises(TypeError, match=r"logits must have dtype .*, got quint8"):
        sample(torch.quantize_per_tensor(torch.from_numpy(TARGET[:, 0].copy()), 0.1, 0, torch.quint8), seed=1)


def test_torch_tensors_that_have_no_values(torch: Any) -> None:
    """Catches torch's own error, which does not name the argument, under vmap and for fake tensors."""
    fake = importlib.import_module("torch._subclasses.fake_tensor")
    with pytest.raises(ValueError, match="logits: "):
        torch.vmap(lambda row: sample(row, seed=1).tokens)(torch.from_numpy(TARGET))
    with fake.FakeTensorMode() as mode, pytest.raises(ValueError, match="logits: "):
        sample(mode.from_tensor(torch.from_numpy(TARGET[:, 0].copy())), seed=1)


def test_torch_inference_mode(torch: Any) -> None:
    """Catches version counters or autograd touched where inference tensors forbid it."""
    with torch.inference_mode():
        tensors = [torch.from_numpy(a).clone() for a in (TOKENS, TARGET, DRAFT)]
        answer = verify(*tensors, seed=1)
    np.testing.assert_array_equal(answer.tokens.numpy(), verify(TOKENS, TARGET, DRAFT, seed=1).tokens)


# JAX


@pytest.fixture
def jax(need_frontend: Any) -> Any:
    return need_frontend("jax")


def test_jax_tracers_are_told_what_to_do(jax: Any) -> None:
    """Catches a ConcretizationTypeError from deep inside wherever a traced value comes in."""
    logits = jax.numpy.array(TARGET[:, 0])
    calls = {
        "logits": jax.jit(lambda x: sample(x, seed=1).tokens),
        "seed": jax.jit(lambda s: sample(logits, seed=s).tokens),
        "step": jax.jit(lambda s: sample(logits, seed=1, step=s).tokens),
        r"sampling\.temperature": jax.jit(lambda t: sample(logits, seed=1, sampling=Sampling(t)).tokens),
        "active": jax.jit(lambda a: sample(logits, seed=1, active=a > 0).tokens),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{name}: .*outside jax\.jit.*jax\.pure_callback"):
            call(logits if name == "logits" else 1)
    with pytest.raises(TypeError, match=r"^logits: .*tracer"):
        jax.vmap(lambda x: sample(x, seed=1).tokens)(jax.numpy.array(TARGET))


def test_jax_pure_callback_is_the_way_that_the_error_promises(jax: Any) -> None:
    """Catches advice that does not work."""
    shape = jax.ShapeDtypeStruct((B,), "int32")
    call = jax.jit(lambda x: jax.pure_callback(lambda x: sample(np.asarray(x), seed=1).tokens, shape, x))
    np.testing.assert_array_equal(call(TARGET[:, 0]), sample(TARGET[:, 0], seed=1).tokens)


def test_jax_keys(jax: Any) -> None:
    """Catches keys whose two words are swapped or cut, and typed keys that fail without a hint."""
    logits = jax.numpy.array(TARGET[:, 0])
    keys = jax.random.split(jax.random.key(3), B)
    data = jax.random.key_data(keys)
    assert data.shape == (B, 2)
    high, low = np.asarray(data).astype(np.uint64).T
    expected = sample(TARGET[:, 0], seed=(high << np.uint64(32)) | low).tokens
    np.testing.assert_array_equal(np.asarray(sample(logits, seed=data).tokens), expected)
    np.testing.assert_array_equal(sample(TARGET[:, 0], seed=data).tokens, expected)
    for typed in (keys, jax.random.key(3)):
        with pytest.raises(TypeError, match=r"^seed: .*jax\.random\.key_data"):
            sample(logits, seed=typed)
    with pytest.raises(TypeError, match=r"logits must have dtype .*, got key"):
        sample(jax.random.split(jax.random.key(3), (B, V)), seed=1)


def test_jax_int64(jax: Any) -> None:
    """Catches answers that JAX quietly turned into int32."""
    logits = jax.numpy.array(TARGET[:, 0])
    with pytest.raises(ValueError, match=r"token_dtype must be int32 .* unless jax_enable_x64 is set, got int64"):
        sample(logits, seed=1, token_dtype="int64")
    with jax.enable_x64(True):
        tokens = jax.numpy.array(TOKENS.astype(np.int64))
        answer = verify(tokens, jax.numpy.array(TARGET), jax.numpy.array(DRAFT), seed=1)
        assert answer.tokens.dtype == np.int64
        np.testing.assert_array_equal(np.asarray(answer.tokens), verify(TOKENS, TARGET, DRAFT, seed=1).tokens)
        assert sample(logits, seed=1, token_dtype="int64").tokens.dtype == np.int64
    with pytest.raises(ValueError, match=r"draft_tokens must be int32 .* unless jax_enable_x64 is set, got int64"):
        verify(tokens, jax.numpy.array(TARGET), jax.numpy.array(DRAFT), seed=1)


def test_jax_deleted_array_is_named(jax: Any) -> None:
    """Catches an error that does not say which of the arguments was donated."""
    draft = jax.numpy.array(DRAFT)
    draft.delete()
    with pytest.raises(ValueError, match="draft_logits: Array has been deleted"):
        verify(jax.numpy.array(TOKENS), jax.numpy.array(TARGET), draft, seed=1)


def run(code: str, **environment: str) -> str:
    """What a fresh interpreter prints that can import the package and the helpers of the tests."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_jax_with_two_devices(jax: Any) -> None:
    """Catches answers on JAX's default device, devices mixed without a word, and shards taken for whole arrays."""
    assert run(TWO_DEVICES, XLA_FLAGS="--xla_force_host_platform_device_count=2").split() == ["done"]


TWO_DEVICES = """
import jax, numpy as np
from test_frontends import B, DRAFT, SEEDS, TARGET, TOKENS
from cupyspec import Sample, Sampling, sample, verify

arrays = TOKENS, TARGET, DRAFT
expected = verify(*arrays, seed=SEEDS, step=4)
first, second = jax.devices()

def refused(*words, call):
    try:
        call()
    except ValueError as error:
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError("not refused")

def put(x, device):
    return jax.device_put(x, device)

for device in (first, second):
    answer = verify(*(put(a, device) for a in arrays), seed=SEEDS, step=4)
    for value, right in zip(answer[:3], expected[:3]):
        assert value.devices() == {device} and value.committed
        np.testing.assert_array_equal(np.asarray(value), right)

# The current default device is not the data's.
with jax.default_device(first):
    assert sample(put(TARGET[:, 0], second), seed=1).tokens.devices() == {second}

# Parameters are copied from anywhere.
parameters = {"seed": put(np.arange(B, dtype=np.int32), first), "sampling": Sampling(put(np.ones(B), first))}
answer = verify(*(put(a, second) for a in arrays), **parameters)
assert answer.tokens.devices() == {second}

refused("draft_logits", "cpu:1", "target_logits", "on cpu:", call=lambda: verify(
    put(TOKENS, first), put(TARGET, first), put(DRAFT, second), seed=1))
refused("draft_tokens", "on cpu ", "target_logits", "cpu:1", call=lambda: verify(
    put(TOKENS, first), put(TARGET, second), put(DRAFT, second), seed=1))

mesh = jax.make_mesh((2,), ("b",))
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("b"))
whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
for sharding in (rows, whole):
    refused("logits", "one device", "2", call=lambda: sample(put(TARGET[:6, 0], sharding), seed=1))
    refused("seed", "one device", "2", call=lambda: sample(
        put(TARGET[:6, 0], first), seed=put(np.arange(6, dtype=np.int32), sharding)))
print("done")
"""
