"""`Sampling`: identity, immutability, JAX pytrees, forms of a temperature; and what `row_seeds` promises."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyspec import Sampling, row_seeds, sample, verify
from frontends import FRONTENDS, Frontend, lib

__all__ = ["lib"]  # a fixture

ROOT = Path(__file__).resolve().parent.parent
B, V = 6, 200
LOGITS = np.random.default_rng(7).normal(0, 2, (B, V)).astype(np.float32)


def test_instances_compare_by_identity() -> None:
    """Catches `==` on array fields: an array in a truth value, or two samplings taken for one by a cache."""
    a, b = Sampling(temperature=np.ones(3)), Sampling(temperature=np.ones(3))
    assert a == a
    assert a != b
    assert len({a, b, a}) == 2
    assert Sampling() != Sampling()


def test_instances_are_frozen() -> None:
    """Catches a default instance that one caller changes for all."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sampling().temperature = 0.5  # type: ignore[misc]
    assert dataclasses.replace(Sampling(0.5), top_k=3).temperature == 0.5
    with pytest.raises(ValueError, match="temperature must be finite and not negative, got -1"):
        dataclasses.replace(Sampling(), temperature=-1)


def test_instances_can_be_pickled() -> None:
    """Catches a dataclass that cannot go to another process."""
    assert pickle.loads(pickle.dumps(Sampling(0.5))).temperature == 0.5


def test_defaults() -> None:
    """Catches a default that filters, or that is not recognised as one in another form."""
    assert [field.default for field in dataclasses.fields(Sampling)] == [1.0, 0, 1.0, 0.0]
    for same in (Sampling(), Sampling(1), Sampling(np.float32(1)), Sampling(1, np.int64(0), 1, 0)):
        assert same.is_default()
        np.testing.assert_array_equal(sample(LOGITS, seed=1, sampling=same).tokens, sample(LOGITS, seed=1).tokens)
    for other in (Sampling(0.5), Sampling(top_k=1), Sampling(np.ones(B)), Sampling([1.0] * B)):
        assert not other.is_default()


@pytest.mark.parametrize("temperature", [0.7, 1, 0])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int64", "uint64"])
def test_every_form_of_a_temperature_is_the_same(temperature: float, dtype: str) -> None:
    """Catches a temperature read at another width, 1 (int) that is not 1.0, and per-row values shifted (F28)."""
    value = np.array(temperature, dtype)
    expected = sample(LOGITS, seed=1, sampling=Sampling(float(value))).tokens
    forms = [value, value[()], np.full(B, value), np.full(2 * B, value)[::2], np.full((B, 3), value)[:, 1]]
    forms += [value.tolist(), [value.tolist()] * B, (value[()],) * B]
    for form in forms:
        np.testing.assert_array_equal(sample(LOGITS, seed=1, sampling=Sampling(form)).tokens, expected)
        np.testing.assert_array_equal(
            verify(np.zeros((B, 0), np.int32), LOGITS[:, None], seed=1, sampling=Sampling(form)).tokens[:, 0],
            verify(np.zeros((B, 0), np.int32), LOGITS[:, None], seed=1, sampling=Sampling(float(value))).tokens[:, 0],
        )


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_bfloat16_temperatures(library: str, need_frontend: Any) -> None:
    """Catches bfloat16 that NumPy does not count among numbers (F19)."""
    need_frontend(library)
    temperatures = np.array([0.5, 1, 2, 0, 0.25, 1.5], np.float32)
    expected = sample(LOGITS, seed=1, sampling=Sampling(temperatures)).tokens
    given = FRONTENDS[library]().array(temperatures, "bfloat16")
    np.testing.assert_array_equal(sample(LOGITS, seed=1, sampling=Sampling(given)).tokens, expected)
    np.testing.assert_array_equal(
        sample(LOGITS, seed=1, sampling=Sampling(given[0])).tokens,
        sample(LOGITS, seed=1, sampling=Sampling(0.5)).tokens,
    )


def test_rows_have_their_own_temperature() -> None:
    """Catches a per-row temperature read at the first row, or greedy rows that change sampled ones."""
    temperatures = [1.0, 0.0, 0.5, 1e-40, 2.0, 1]
    answer = sample(LOGITS, seed=np.arange(B), sampling=Sampling(temperatures)).tokens
    for row, temperature in enumerate(temperatures):
        alone = sample(LOGITS[row : row + 1], seed=np.array([row]), sampling=Sampling(temperature)).tokens
        assert answer[row] == alone[0]
    assert answer[1] == LOGITS[1].argmax()
    assert answer[3] == LOGITS[3].argmax()


# JAX


@pytest.fixture
def jax(need_frontend: Any) -> Any:
    return need_frontend("jax")


def test_pytree_round_trip(jax: Any) -> None:
    """Catches fields that are lost or change places, and leaves that are checked while JAX passes placeholders."""
    sampling = Sampling(0.5, 3, 0.9, 0.1)
    leaves, tree = jax.tree.flatten(sampling)
    assert leaves == [0.5, 3, 0.9, 0.1]
    again = jax.tree.unflatten(tree, leaves)
    assert isinstance(again, Sampling)
    assert dataclasses.astuple(again) == (0.5, 3, 0.9, 0.1)
    for placeholder in (None, object(), "leaf", -1):
        assert jax.tree.unflatten(tree, [placeholder] * 4).temperature is placeholder
    doubled = jax.tree.map(lambda leaf: leaf * 2, Sampling(jax.numpy.arange(3.0)))
    np.testing.assert_array_equal(doubled.temperature, [0, 2, 4])
    nested = jax.tree.map(lambda leaf: leaf, {"a": [sampling]})
    assert nested["a"][0].top_k == 3
    names = [str(path[0]) for path, _ in jax.tree_util.tree_flatten_with_path(sampling)[0]]
    assert len(set(names)) == 4


def test_samplings_cross_a_jit_boundary(jax: Any) -> None:
    """Catches a class that cannot be an argument or a result of a compiled function."""

    @jax.jit
    def colder(sampling: Sampling) -> Sampling:
        return Sampling(sampling.temperature / 2, sampling.top_k, sampling.top_p, sampling.min_p)

    cold = colder(Sampling(jax.numpy.ones(B)))
    assert isinstance(cold, Sampling)
    np.testing.assert_array_equal(cold.temperature, np.full(B, 0.5))
    # What comes out has array fields: a top_k array is not taken for "off", whatever it holds.
    kept = dataclasses.replace(Sampling(), temperature=cold.temperature)
    logits = jax.numpy.array(LOGITS)
    np.testing.assert_array_equal(
        np.asarray(sample(logits, seed=1, sampling=kept).tokens), sample(LOGITS, seed=1, sampling=Sampling(0.5)).tokens
    )
    assert colder(Sampling(0.5)).temperature == 0.25


@pytest.mark.parametrize(
    "order",
    [
        "import jax; import cupyspec; s = cupyspec.Sampling(0.5)",
        "import cupyspec; import jax; s = cupyspec.Sampling(0.5)",
        "import cupyspec; cupyspec.Sampling(); import jax; s = cupyspec.Sampling(0.5)",
        "import cupyspec; s = cupyspec.Sampling(0.5); import jax; cupyspec.Sampling()",
    ],
)
def test_import_order_does_not_matter(jax: Any, order: str) -> None:
    """Catches a registration at import time alone, or one that is made twice."""
    code = f"{order}; print(jax.tree.leaves(s))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "[0.5, 0, 1.0, 0.0]", result.stderr


# row_seeds


def test_row_seeds_give_the_call_with_a_scalar_seed() -> None:
    """Catches a split that differs from the documented one, and rows whose seed depends on the batch."""
    for seed in (0, 7, -1, 2**63, 2**64 - 1, -(2**63)):
        seeds = row_seeds(seed, B)
        assert (seeds.dtype, seeds.shape) == (np.dtype(np.uint64), (B,))
        expected = sample(LOGITS, seed=seed, step=3).tokens
        np.testing.assert_array_equal(sample(LOGITS, seed=seeds, step=3).tokens, expected)
        np.testing.assert_array_equal(row_seeds(seed, 2 * B)[:B], seeds)
        for row in range(B):
            alone = sample(LOGITS[row : row + 1], seed=seeds[row : row + 1], step=3).tokens
            assert alone[0] == expected[row]
    assert len(set(row_seeds(7, 10_000).tolist()) | set(row_seeds(8, 10_000).tolist())) == 20_000
    assert row_seeds(7, 0).shape == (0,)


def test_row_seeds_take_scalars_of_every_kind(lib: Frontend) -> None:
    """Catches a 0-d seed that means another number than the Python integer."""
    for seed in (7, -1):
        for given in (np.int8(seed), np.array(seed), lib.array(np.array(seed, np.int32))):
            np.testing.assert_array_equal(row_seeds(given, B), row_seeds(seed % 2**64, B))


def test_equal_seeds_make_equal_noise() -> None:
    """Catches a per-row seed that is split again, or mixed with the row's number (F13)."""
    logits = np.repeat(LOGITS[:1], B, axis=0)
    tokens = sample(logits, seed=np.full(B, 11), step=np.zeros(B, np.int64)).tokens
    assert len(set(tokens.tolist())) == 1
    seeds = np.array([7, 8, 9, 10, 2**40 + 7, -1])
    together = sample(LOGITS, seed=seeds).tokens
    order = np.array([3, 5, 0, 1, 4, 2])
    np.testing.assert_array_equal(sample(LOGITS[order], seed=seeds[order]).tokens, together[order])
    many = np.concatenate([LOGITS] * 11)
    np.testing.assert_array_equal(sample(many, seed=np.concatenate([seeds, *[seeds + 1] * 10])).tokens[:B], together)
