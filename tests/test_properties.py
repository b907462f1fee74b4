"""Facts of verification that every back end must show: the CPU path, the kernels compiled for the CPU, a GPU.

Segments have 256 ids, so that most rows race several. Laws are in test_planted_faults.py and test_law.py.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.special import bdtrc, softmax

import cupyspec
from cupyspec import Sampling, Sigmoid, Token, Verification
from cupyspec.testing import output_law, strategies
from experiments import WIDE_DRAFT, WIDE_TARGET, logs, row_seeds, rows_of
from host_cuda import backend as host_backend
from machines import MACHINES, SMALL, Machine
from strategies import SCORE_TYPES, SIGMOIDS, TOKENS, ChainCase, chain_cases, segments_of

RULES = (*TOKENS, *SIGMOIDS)
VOCABULARIES = (1, 2, 3, 33, SMALL - 1, SMALL + 1, 3 * SMALL + 5)
SIZE = {"numpy": 20_000, "host_cuda": 600, "gpu": 1_000_000}  # rows of one-off frequency tests
ALPHA = 1e-7


@pytest.fixture(
    scope="module",
    params=[
        "numpy",
        pytest.param("host_cuda", marks=pytest.mark.skipif(host_backend.compiler() is None, reason="needs g++")),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ],
)
def machine(request: pytest.FixtureRequest, need_frontend: Callable[[str], Any]) -> Machine:
    if request.param == "gpu":
        need_frontend("torch")
    return MACHINES[request.param]()


def verify_case(machine: Machine, case: ChainCase, **changes: Any) -> Verification:
    """A random call on a back end."""
    arguments = case.arguments() | changes
    arrays = [arguments.pop(name, getattr(case, name)) for name in ("draft_tokens", "target", "draft")]
    return machine.verify(*arrays, **arguments)


def same(a: Verification, b: Verification) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a[:3], b[:3], strict=True))


def drafts_of(draft: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """A draft for each row from one row of logits."""
    with segments_of(SMALL):
        return cupyspec.sample(np.broadcast_to(draft, (len(seeds), draft.size)), seed=seeds).tokens


def within(hits: int, draws: int, chance: float) -> bool:
    """Whether a count is inside both binomial tails of ALPHA."""
    return bool(bdtrc(hits - 1, draws, chance) > ALPHA or hits == 0) and bool(1 - bdtrc(hits, draws, chance) > ALPHA)


# ------------------------------------------------------------------------------------------------ facts


@given(
    pair=strategies.logit_pairs(vocab_sizes=VOCABULARIES, relations=("identical",)),
    seed=st.integers(0, 2**31),
    rule=st.sampled_from((Token(), Token(), Token(lenience=0.5), *SIGMOIDS)),
    temperature=st.sampled_from((1.0, 0.3, 2.0)),
)
def test_equal_rows_accept_everything(
    machine: Machine, pair: Any, seed: int, rule: Token | Sigmoid, temperature: float
) -> None:
    """Catches p and q formed in different ways: a rounding between them rejects drafts of p = q at coins near 1."""
    row = pair[0]
    p = softmax(row.astype(np.float64) / temperature)
    x = np.random.default_rng(seed).choice(row.size, (16, 3), p=p).astype(np.int32)
    if isinstance(rule, Sigmoid):
        assume((row.astype(np.float64)[x] / temperature >= rule.alpha).all())  # below, the rule gives nothing a chance
    got = machine.verify(
        x,
        np.broadcast_to(row, (16, 4, row.size)),
        np.broadcast_to(row, (16, 3, row.size)),
        seed=seed,
        rule=rule,
        sampling=Sampling(temperature),
    )
    assert (got.num_accepted == 3).all() and not got.status.any()


@given(
    pair=strategies.logit_pairs(vocab_sizes=VOCABULARIES[1:], relations=("disjoint",)),
    seed=st.integers(0, 2**31),
    rule=st.sampled_from(RULES),
    one_hot=st.booleans(),
)
def test_disjoint_supports_accept_nothing(
    machine: Machine, pair: Any, seed: int, rule: Token | Sigmoid, one_hot: bool
) -> None:
    """Catches `<=` at p = 0, and a residual that leaves the target's support."""
    target, draft = pair
    possible, drafted = (row.astype(np.float64) > -np.inf for row in (target, draft))
    assume(not (possible & drafted).any())
    x = np.random.default_rng(seed).choice(np.flatnonzero(drafted), (16, 2)).astype(np.int32)
    rows = np.broadcast_to(target, (16, 3, target.size)), np.broadcast_to(draft, (16, 2, target.size))
    got = machine.verify(x, rows[0], None if one_hot else rows[1], seed=seed, rule=rule)
    assert not got.num_accepted.any() and not got.status.any()
    assert possible[got.tokens[:, 0]].all()


@pytest.mark.parametrize("kind", SCORE_TYPES)
def test_acceptance_is_the_sum_of_the_smaller(machine: Machine, kind: str) -> None:
    """Catches an acceptance that is right for each draft and wrong on the whole, as with rows of another temperature."""
    target, draft = (row.astype(SCORE_TYPES[kind]) for row in (WIDE_TARGET, WIDE_DRAFT))
    p, q = (softmax(row.astype(np.float64)) for row in (target, draft))
    size = SIZE[machine.name]
    hits = 0
    for start in range(0, size, 20_000):
        seeds = row_seeds(min(20_000, size - start), start)
        rows = len(seeds)
        wide = np.broadcast_to(target, (rows, 2, target.size)), np.broadcast_to(draft, (rows, 1, target.size))
        hits += int(machine.verify(drafts_of(draft, seeds)[:, None], *wide, seed=seeds).num_accepted.sum())
    assert within(hits, size, float(np.minimum(p, q).sum()))


@given(
    models=strategies.rational_models(max_vocab_size=3, max_draft_tokens=2),
    lenience=st.sampled_from((Fraction(1, 2), Fraction(1, 8), Fraction(9, 10))),
)
def test_lenience_is_bounded_by_enumeration(models: Any, lenience: Fraction) -> None:
    """Catches a lenience that is not what its documentation says: given its prefix, no token above p / lenience."""
    p, q, width = models
    law = output_law(Token(lenience=float(lenience)), p, q, width)
    vocab = len(p[0])
    for length in range(1, width + 2):
        for prefix in {tokens[: length - 1] for tokens in law if len(tokens) >= length}:
            reached = sum(chance for tokens, chance in law.items() if tokens[: length - 1] == prefix != tokens)
            row = p[prefix[-1] if prefix else -1]
            for x in range(vocab):
                emitted = sum(chance for tokens, chance in law.items() if tokens[:length] == (*prefix, x))
                assert emitted * lenience <= row[x] * reached


@pytest.mark.parametrize("lenience", [0.5, 0.1])
def test_lenience_is_bounded(machine: Machine, lenience: float) -> None:
    """Catches a lenience applied twice, or to the residual: the first token comes at most p / lenience often."""
    p, q = np.array([0.55, 0.3, 0.1, 0.04, 0.01]), np.array([0.05, 0.1, 0.2, 0.25, 0.4])
    size = min(SIZE[machine.name], 20_000)
    seeds = row_seeds(size, 1)
    rows = rows_of(logs(p), size, 2), rows_of(logs(q), size, 1)
    x = drafts_of(logs(q), seeds)[:, None]
    first = machine.verify(x, *rows, seed=seeds, rule=Token(lenience=lenience)).tokens[:, 0]
    for token, hits in enumerate(np.bincount(first, minlength=5)):
        bound = min(1.0, p[token] / lenience)
        assert bound == 1 or hits == 0 or bdtrc(hits - 1, size, bound) > ALPHA
    exact = machine.verify(x, *rows, seed=seeds).num_accepted
    assert machine.verify(x, *rows, seed=seeds, rule=Token(lenience=lenience)).num_accepted.sum() > exact.sum()


# ------------------------------------------------------------------------------------------------ seeds and steps


@given(case=chain_cases(rules=RULES, vocabularies=VOCABULARIES), words=st.tuples(*[st.integers(0, 2**32 - 1)] * 2))
def test_split_seeds_are_row_seeds(machine: Machine, case: ChainCase, words: tuple[int, int]) -> None:
    """Catches a scalar seed that is split otherwise than `row_seeds` says, at B = 1 too, and steps of one row."""
    seed, step = words[0] << 32 | words[1], words[1] << 20
    batch = len(case.draft_tokens)
    want = verify_case(machine, case, seed=cupyspec.row_seeds(seed, batch), step=np.full(batch, step, np.int64))
    assert same(verify_case(machine, case, seed=seed, step=step), want)
    pairs = cupyspec.row_seeds(seed, batch)
    pairs = np.stack([pairs >> np.uint64(32), pairs & np.uint64(2**32 - 1)], axis=1).astype(np.uint32)
    assert same(verify_case(machine, case, seed=pairs, step=step), want)


@pytest.mark.parametrize("changed", ["seed", "seed above bit 32", "step", "step above bit 32"])
def test_other_numbers_give_other_tokens(machine: Machine, changed: str) -> None:
    """Catches a seed or step that is dropped or cut: 100 rows that would all agree by chance do not exist."""
    seeds = row_seeds(100, 3)
    rows = rows_of(WIDE_TARGET, 100, 2), rows_of(WIDE_DRAFT, 100, 1)
    x = drafts_of(WIDE_DRAFT, seeds)[:, None]
    change: dict[str, Any] = {
        "seed": {"seed": seeds + np.uint64(1)},
        "seed above bit 32": {"seed": seeds ^ np.uint64(1 << 40)},
        "step": {"seed": seeds, "step": 1},
        "step above bit 32": {"seed": seeds, "step": 1 << 32},
    }[changed]
    different = machine.verify(x, *rows, **change).tokens != machine.verify(x, *rows, seed=seeds).tokens
    assert different.any(axis=1).mean() > 0.3


# ------------------------------------------------------------------------------------------------ what must not matter


@given(case=chain_cases(rules=RULES, vocabularies=VOCABULARIES, faults=True), order=st.integers(0, 2**32 - 1))
def test_rows_do_not_know_their_slot(machine: Machine, case: ChainCase, order: int) -> None:
    """Catches numbers keyed by slot, state left by the call before, and faults that spread: permuted, and twice over."""
    whole = verify_case(machine, case)
    batch = len(case.draft_tokens)
    rows = np.random.default_rng(order).permutation(np.repeat(np.arange(batch), 2))
    assert same(verify_case(machine, case.rows(rows)), Verification(*(x[rows] for x in whole[:3])))
    assert same(verify_case(machine, case), whole)


@given(case=chain_cases(rules=RULES, vocabularies=VOCABULARIES, faults=True), kind=st.sampled_from(sorted(SCORE_TYPES)))
def test_storage_and_layout_do_not_matter(machine: Machine, case: ChainCase, kind: str) -> None:
    """Catches arithmetic in the storage dtype and ignored strides: 16-bit scores, their float32 casts, and views."""
    names = [name for name in ("target", "draft") if getattr(case, name) is not None]
    with np.errstate(over="ignore"):
        stored = {name: getattr(case, name).astype(SCORE_TYPES[kind]) for name in names}
    want = verify_case(machine, case, **stored)
    wide = {name: values.astype(np.float32) for name, values in stored.items()}
    assert same(verify_case(machine, case, **wide), want)
    # Where the last axis is not contiguous a copy is made before the kernels, by what host_cuda replaces.
    order = np.ascontiguousarray if machine.name == "host_cuda" else np.asfortranarray
    views: dict[str, Any] = {
        name: order(np.pad(values, ((0, 0), (1, 0), (3, 2)), constant_values=7))[:, 1:, 3:-2]
        for name, values in wide.items()
    }
    views["draft_tokens"] = np.repeat(case.draft_tokens, 2, axis=1)[:, 1::2]
    assert same(verify_case(machine, case, **views), want)
