"""Every argument given wrongly: the type of the error, and that it names the argument, what it got and what is allowed.

The tables have an entry for every argument of `verify`, `sample`, `Sampling` and the rules; one without fails a test.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest

from cupyspec import Sample, Sampling, Sigmoid, Token, Verification, row_seeds, sample, verify
from frontends import FRONTENDS

B, K, V = 3, 2, 50
RANDOM = np.random.default_rng(5)
TOKENS = RANDOM.integers(0, V, (B, K)).astype(np.int32)
TARGET = RANDOM.normal(size=(B, K + 1, V)).astype(np.float32)
DRAFT = RANDOM.normal(size=(B, K, V)).astype(np.float32)
PADDED = {"draft_tokens": TOKENS, "target_logits": TARGET, "draft_logits": DRAFT, "seed": 1}
FLATTENED = {
    "draft_tokens": TOKENS.reshape(-1),
    "target_logits": TARGET.reshape(-1, V),
    "draft_logits": DRAFT.reshape(-1, V),
    "cu_num_draft_tokens": [0, 2, 4, 6],
    "max_draft_tokens": K,
    "seed": 1,
}
LOGITS = {"logits": TARGET[:, 0], "seed": 1}
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Bad:
    """A wrong value of an argument, beside others, and words of its error in order: got and allowed."""

    value: Any
    error: type[Exception]
    words: tuple[str, ...]
    beside: dict[str, Any]


def wrong_value(value: Any, *words: str, **beside: Any) -> Bad:
    return Bad(value, ValueError, words, beside)


def wrong_type(value: Any, *words: str, **beside: Any) -> Bad:
    return Bad(value, TypeError, words, beside)


def not_an_array(value: Any, kind: str) -> Bad:
    return wrong_type(value, "an array of NumPy, PyTorch, JAX, CuPy", f"got {kind}")


SCORE_TYPES = "must have dtype float32 or float16 or bfloat16"
TOKEN_TYPES = "must have dtype int32 or int64"

# What verify and sample have in common, by argument.

SEED_SHAPES = f"a scalar, [{B}], or [{B}, 2] uint32"
SEED = [
    not_an_array(None, "None"),
    not_an_array("1", "builtins.str"),
    not_an_array(b"1", "builtins.bytes"),
    not_an_array({1, 2, 3}, "builtins.set"),
    not_an_array(iter([1, 2, 3]), "builtins.list_iterator"),
    not_an_array(np.random.default_rng(0), "numpy.random"),
    wrong_type(True, "must be integers", "got bool"),
    wrong_type(1.0, "must be integers", "got float64"),
    wrong_type(np.float32(1), "must be integers", "got float32"),
    wrong_type(np.array(1.0), "must be integers", "got float64"),
    wrong_type([1, None, 3], "must be integers", "got None"),
    wrong_type([1, 2.0, 3], "must be integers", "got 2.0"),
    wrong_type([1, True, 3], "must be integers", "got True"),
    wrong_type([1.0, 2.0, 3.0], "must be integers", "got float64"),
    wrong_type(np.ones(B, bool), "must be integers", "got bool"),
    wrong_type(np.ones(B), "must be integers", "got float64"),
    wrong_type(np.ma.masked_array([1, 2, 3], mask=[0, 1, 0]), "masked arrays"),
    wrong_type(np.ones(B, np.dtype(np.int64).newbyteorder()), "native byte order"),
    wrong_value(2**64, "in [-2^63, 2^64)", f"got {2**64}"),
    wrong_value(-(2**63) - 1, "in [-2^63, 2^64)", f"got {-(2**63) - 1}"),
    wrong_value([1, 2**64, 3], "in [-2^63, 2^64)", f"got {2**64}"),
    wrong_value([1, 2], SEED_SHAPES, "got shape (2,)"),
    wrong_value(np.array([1]), SEED_SHAPES, "got shape (1,)"),
    wrong_value(np.ones((B, 2), np.int64), SEED_SHAPES, f"got shape ({B}, 2) of int64"),
    wrong_value(np.ones((B, 1), np.uint32), SEED_SHAPES, f"got shape ({B}, 1) of uint32"),
    wrong_value(np.ones(2, np.uint32), SEED_SHAPES, "got shape (2,) of uint32"),
]


def counter(limit: int) -> list[Bad]:
    return [
        not_an_array(None, "None"),
        not_an_array("1", "builtins.str"),
        wrong_type(True, "must be integers", "got bool"),
        wrong_type(1.0, "must be integers", "got float64"),
        wrong_type(np.ones(B), "must be integers", "got float64"),
        wrong_type([1, None, 3], "must be integers", "got None"),
        wrong_value(-1, f"in [0, {limit})", "got -1"),
        wrong_value(limit, f"in [0, {limit})", f"got {limit}"),
        wrong_value(10**30, f"in [0, {limit})", f"got {10**30}"),
        wrong_value([0, 1, -2], f"in [0, {limit})", "got -2"),
        wrong_value(np.array([0, limit, 1]), f"in [0, {limit})", f"got {limit}"),
        wrong_value(np.array([2**64 - 1], np.uint64), f"in [0, {limit})", f"got {2**64 - 1}"),
        wrong_value([1, 2], f"must be an integer, [1] or [{B}]", "got shape (2,)"),
        wrong_value(np.ones((B, 1), int), f"must be an integer, [1] or [{B}]", f"got shape ({B}, 1)"),
    ]


FILTERS = [
    wrong_value(Sampling(top_k=5), ".top_k must be 0 (off)", "got 5"),
    wrong_value(Sampling(top_k=True), ".top_k must be 0 (off)", "got True"),
    wrong_value(Sampling(top_k=np.zeros(B, int)), ".top_k must be 0 (off)", "got array"),
    wrong_value(Sampling(top_p=0.9), ".top_p must be 1.0 (off)", "got 0.9"),
    wrong_value(Sampling(top_p=NAN), ".top_p must be 1.0 (off)", "got nan"),
    wrong_value(Sampling(min_p=0.1), ".min_p must be 0.0 (off)", "got 0.1"),
    wrong_value(Sampling(min_p=[0.0] * B), ".min_p must be 0.0 (off)", "got [0.0"),
]
TEMPERATURE_RANGE = ".temperature must be finite and not negative"
TEMPERATURES = [
    wrong_value(np.array(-1), TEMPERATURE_RANGE, "got -1.0"),
    wrong_value(np.array(NAN), TEMPERATURE_RANGE, "got nan"),
    wrong_value(1e39, TEMPERATURE_RANGE, "got 1e+39"),  # infinite in float32
    wrong_value([1, 2, -3], TEMPERATURE_RANGE, "got -3.0"),
    wrong_value([1.0, NAN, 1.0], TEMPERATURE_RANGE, "got nan"),
    wrong_value(np.array([1, INF, 1]), TEMPERATURE_RANGE, "got inf"),
    wrong_value(np.array([1, 1, -0.5], np.float16), TEMPERATURE_RANGE, "got -0.5"),
    wrong_value([1, 10**400, 1], ".temperature must be finite", "too large"),
    wrong_type([1, None, 1], ".temperature must be real numbers", "got None"),
    wrong_type(["a", "b", "c"], ".temperature must be real numbers", "got 'a'"),
    wrong_type([1, True, 1], ".temperature must be real numbers", "got True"),
    wrong_type(np.ones(B, bool), ".temperature must be real numbers", "got bool"),
    wrong_type(np.array("1"), ".temperature must be real numbers", "got str"),
    wrong_type(np.ones(B, complex), ".temperature must be real numbers", "got complex128"),
    wrong_type(1j, ".temperature must be a number or an array", "got builtins.complex"),
    wrong_type(object(), ".temperature must be a number or an array", "got builtins.object"),
    wrong_value([1, 2], f".temperature must be a scalar or have shape ({B},)", "got (2,)"),
    wrong_value(np.ones((B, 1)), f".temperature must be a scalar or have shape ({B},)", f"got ({B}, 1)"),
]
SAMPLING = [
    wrong_type(0.5, "must be a Sampling", "got 0.5"),
    wrong_type({"temperature": 1}, "must be a Sampling", "got {'temperature'"),
    wrong_type(Sampling, "must be a Sampling", "got <class"),
    *FILTERS,
    *(Bad(Sampling(bad.value), bad.error, bad.words, {}) for bad in TEMPERATURES),
]
DEFAULT_ONLY = wrong_value(
    Sampling(0.5), 'must be Sampling() with "probs"', "got Sampling(temperature=0.5", scores="probs"
)
ACTIVE = [
    not_an_array("yes", "builtins.str"),
    wrong_type([1, 0, 1], "bool or uint8", "got 1"),
    wrong_type([True, None, True], "bool or uint8", "got None"),
    wrong_type(np.ones(B), "bool or uint8", "got float64"),
    wrong_type(np.ones(B, np.int32), "bool or uint8", "got int32"),
    wrong_value(True, f"must have shape ({B},)", "got ()"),
    wrong_value([True, False], f"must have shape ({B},)", "got (2,)"),
    wrong_value(np.ones((B, 1), bool), f"must have shape ({B},)", f"got ({B}, 1)"),
]
VOCABULARY = [
    wrong_value(0, f"in [1, {V}]", "got 0"),
    wrong_value(-1, f"in [1, {V}]", "got -1"),
    wrong_value(V + 1, f"in [1, {V}]", f"got {V + 1}"),
    wrong_type(True, "must be an integer", "got True"),
    wrong_type(float(V), "must be an integer", f"got {V}.0"),
    wrong_type("50", "must be an integer", "got '50'"),
    wrong_type(np.array(V), "must be an integer", "got array"),
]
KINDS = [
    wrong_value("prob", 'must be "logits" or "probs"', "got 'prob'"),
    wrong_value("Logits", 'must be "logits" or "probs"', "got 'Logits'"),
    wrong_value(True, 'must be "logits" or "probs"', "got True"),
    wrong_value(["logits"], 'must be "logits" or "probs"', "got ['logits']"),
]
FLAG = [
    wrong_type(1, "must be True or False", "got 1"),
    wrong_type(None, "must be True or False", "got None"),
    wrong_type("no", "must be True or False", "got 'no'"),
    wrong_type(np.ones(B, bool), "must be True or False", "got an array"),
]
LATER = [
    wrong_value(0, "must be None", "got 0"),
    wrong_value(np.zeros(V, np.float32), "must be None", "got an array (ndarray)"),
]


def normalizers(columns: int) -> list[Bad]:
    shape, values = (B, columns), np.ones((B, columns), np.float32)
    return [
        not_an_array(1.0, "builtins.float"),
        not_an_array(values.tolist(), "builtins.list"),
        wrong_type(values.astype(np.float16), "float32 or float64", "got float16"),
        wrong_type(values.astype(np.int32), "float32 or float64", "got int32"),
        wrong_value(values[:, 1:], f"must have shape {shape}", f"got {(B, columns - 1)}"),
        wrong_value(values[..., None], f"must have shape {shape}", f"got {(B, columns, 1)}"),
        wrong_value(values[0], f"must have shape {shape}", f"got {(columns,)}"),
        wrong_value(values, "must be None with probabilities", scores="probs"),
        wrong_value(values, "must be None with rule Sigmoid", rule=Sigmoid()),
    ]


VERIFY: dict[str, list[Bad]] = {
    "draft_tokens": [
        not_an_array(None, "None"),
        not_an_array(TOKENS.tolist(), "builtins.list"),
        wrong_type(TOKENS.astype(np.float32), TOKEN_TYPES, "got float32"),
        wrong_type(TOKENS.astype(np.int16), TOKEN_TYPES, "got int16"),
        wrong_type(TOKENS.astype(np.uint32), TOKEN_TYPES, "got uint32"),
        wrong_type(TOKENS > 0, TOKEN_TYPES, "got bool"),
        wrong_value(TOKENS[0], "must be [B, K]", "got shape (2,)"),
        wrong_value(TOKENS[..., None], "must be [B, K]", "got shape (3, 2, 1)"),
    ],
    "target_logits": [
        not_an_array(None, "None"),
        not_an_array(TARGET.tolist(), "builtins.list"),
        wrong_type(TARGET.astype(np.float64), SCORE_TYPES, "got float64"),
        wrong_type(TARGET.astype(np.complex64), SCORE_TYPES, "got complex64"),
        wrong_type(TARGET.astype(np.int32), SCORE_TYPES, "got int32"),
        wrong_type(TARGET > 0, SCORE_TYPES, "got bool"),
        wrong_value(TARGET[0], "must be [B, K + 1, V]", "got shape (3, 50)"),
        wrong_value(TARGET[1:], "must be [B, K + 1, V] with 3 x 3 rows", "got shape (2, 3, 50)"),
        wrong_value(TARGET[:, 1:], "must be [B, K + 1, V] with 3 x 3 rows", "got shape (3, 2, 50)"),
        wrong_value(TARGET[..., :0], "at least one column", "got 0"),
        wrong_value(TARGET[..., :40], "40 columns and draft_logits 50", "vocab_size"),
    ],
    "draft_logits": [
        not_an_array(DRAFT.tolist(), "builtins.list"),
        wrong_type(DRAFT.astype(np.float64), SCORE_TYPES, "got float64"),
        wrong_type(DRAFT.astype(np.int64), SCORE_TYPES, "got int64"),
        wrong_value(DRAFT[0], "must be [B, K, V]", "got shape (2, 50)"),
        wrong_value(DRAFT[1:], "must be [B, K, V] with 3 x 2 rows", "got shape (2, 2, 50)"),
        wrong_value(TARGET, "must be [B, K, V] with 3 x 2 rows", "got shape (3, 3, 50)"),
        wrong_value(DRAFT[..., :40], "target_logits has 50 columns and draft_logits 40", "vocab_size"),
        wrong_value(
            np.zeros((B, K, 128), np.float32), "target_logits has 50 columns and draft_logits 128", "vocab_size"
        ),
        wrong_value(DRAFT[..., :0], "at least one column", "got 0"),
    ],
    "seed": SEED,
    "step": counter(2**56),
    "rule": [
        wrong_type(None, "Token(...) or Sigmoid(...)", "got None"),
        wrong_type("token", "Token(...) or Sigmoid(...)", "got 'token'"),
        wrong_type(Token, "Token(...) or Sigmoid(...)", "got <class"),
        wrong_type(Sigmoid, "Token(...) or Sigmoid(...)", "got <class"),
        wrong_value(Sigmoid(), 'must be "logits" with rule Sigmoid', 'got "probs"', scores="probs"),
        wrong_value(Sigmoid(), 'must be "logits" with rule Sigmoid', 'got "probs"', draft_scores="probs"),
    ],
    "sampling": [*SAMPLING, wrong_type(None, "must be a Sampling", "got None"), DEFAULT_ONLY],
    "draft_sampling": [
        *SAMPLING,
        DEFAULT_ONLY,
        wrong_value(Sampling(0.5), 'must be Sampling() with "probs"', "got Sampling", draft_scores="probs"),
    ],
    "num_draft_tokens": [
        not_an_array("abc", "builtins.str"),
        wrong_type([1, 2.0, 1], "must be integers", "got 2.0"),
        wrong_type([1, None, 1], "must be integers", "got None"),
        wrong_type([True] * B, "must be integers", "got True"),
        wrong_type(np.ones(B), "must be integers", "got float64"),
        wrong_value(1, f"must have shape ({B},)", "got ()"),
        wrong_value([1, 2], f"must have shape ({B},)", "got (2,)"),
        wrong_value(np.ones((B, 1), int), f"must have shape ({B},)", f"got ({B}, 1)"),
        wrong_value([1] * B, "and cu_num_draft_tokens must not both be given", cu_num_draft_tokens=[0, 2, 4, 6]),
    ],
    "cu_num_draft_tokens": [
        wrong_value([0, 2, 4, 6], "max_draft_tokens must be an integer", "cu_num_draft_tokens", "got None"),
        wrong_value([0, 2, 4, 6], "draft_tokens must be [T] with", "got shape (3, 2)", max_draft_tokens=2),
    ],
    "max_draft_tokens": [
        wrong_value(2, "must be None without cu_num_draft_tokens", "got 2"),
        wrong_value(True, "must be None without cu_num_draft_tokens", "got True"),
    ],
    "active": ACTIVE,
    "vocab_size": VOCABULARY,
    "draft_log_normalizer": [
        *normalizers(K),
        wrong_value(np.zeros((B, K), np.float32), "must be None without draft_logits", draft_logits=None),
        wrong_value(np.zeros((B, K), np.float32), "must be None with probabilities", draft_scores="probs"),
    ],
    "target_log_normalizer": normalizers(K + 1),
    "scores": [*KINDS, wrong_value(None, 'must be "logits" or "probs"', "got None")],
    "draft_scores": KINDS,
    "logit_bias": LATER,
    "token_bitmask": LATER,
    "draft_logit_bias": LATER,
    "draft_token_bitmask": LATER,
    "draft_vocab": LATER,
    "diagnostics": [
        wrong_value(("alpha",), "must be ()", "got ('alpha',)"),
        wrong_value("alpha", "must be ()", "got 'alpha'"),
        wrong_value(np.zeros(0), "must be ()", "got an array"),
    ],
    "out": [
        wrong_type((), "must be a Verification", "got tuple"),
        wrong_type(TOKENS, "must be a Verification", "got ndarray"),
        wrong_type(Sample(None, None), "must be a Verification", "got Sample"),
        wrong_type(Verification, "must be a Verification", "got type"),
    ],
    "check": FLAG,
}
VERIFY_FLATTENED: dict[str, list[Bad]] = {
    "draft_tokens": [wrong_value(TOKENS, "must be [T] with cu_num_draft_tokens", "got shape (3, 2)")],
    "target_logits": [
        wrong_value(TARGET, "must be [T + B, V] with cu_num_draft_tokens", "got shape (3, 3, 50)"),
        wrong_value(TARGET.reshape(-1, V)[:5], "at least the 6 of draft_tokens", "got 5"),
    ],
    "draft_logits": [
        wrong_value(DRAFT, "must be [T, V]", "got shape (3, 2, 50)"),
        wrong_value(DRAFT.reshape(-1, V)[:5], "must be [T, V]", "6 rows", "got shape (5, 50)"),
    ],
    "cu_num_draft_tokens": [
        not_an_array("abc", "builtins.str"),
        wrong_value([0, 2, 4], "must have shape (4,)", "got (3,)"),
        wrong_value(7, "must have shape (4,)", "got ()"),
        wrong_type([0, 2, 4, 6.0], "must be integers", "got 6.0"),
        wrong_type([0, 2, None, 6], "must be integers", "got None"),
        wrong_value(None, "(the flattened layout)", "got 2"),
    ],
    "num_draft_tokens": [wrong_value([2, 2, 2], "and cu_num_draft_tokens must not both be given")],
    "max_draft_tokens": [
        wrong_value(None, "must be an integer with cu_num_draft_tokens", "got None"),
        wrong_value(-1, "in [0, ", "got -1"),
        wrong_value(2**16, "in [0, ", f"got {2**16}"),
        wrong_type(2.0, "must be an integer", "got 2.0"),
        wrong_type(True, "must be an integer", "got True"),
        wrong_type([2], "must be an integer", "got [2]"),
    ],
    "active": [wrong_value([True] * 4, f"must have shape ({B},)", "got (4,)")],
    "target_log_normalizer": [wrong_value(np.zeros((B, K + 1), np.float32), "must have shape (9,)", "got (3, 3)")],
    "draft_log_normalizer": [wrong_value(np.zeros(9, np.float32), "must have shape (6,)", "got (9,)")],
}
SAMPLE: dict[str, list[Bad]] = {
    "logits": [
        not_an_array(None, "None"),
        not_an_array(TARGET[:, 0].tolist(), "builtins.list"),
        wrong_type(TARGET[:, 0].astype(np.float64), SCORE_TYPES, "got float64"),
        wrong_value(TARGET, "must be [B, V]", "got shape (3, 3, 50)"),
        wrong_value(TARGET[0, 0], "must be [B, V]", "got shape (50,)"),
        wrong_value(TARGET[:, 0, :0], "at least one column", "got 0"),
    ],
    "seed": SEED,
    "step": counter(2**56),
    "position": counter(2**16),
    "draw": counter(2**16),
    "purpose": [
        wrong_value("bonus", 'must be "draft" or "target"', "got 'bonus'"),
        wrong_value(None, 'must be "draft" or "target"', "got None"),
        wrong_value(1, 'must be "draft" or "target"', "got 1"),
        wrong_value(["draft"], 'must be "draft" or "target"', "got ['draft']"),
    ],
    "sampling": [*SAMPLING, wrong_type(None, "must be a Sampling", "got None"), DEFAULT_ONLY],
    "active": ACTIVE,
    "vocab_size": VOCABULARY,
    "scores": [*KINDS, wrong_value(None, 'must be "logits" or "probs"', "got None")],
    "logit_bias": LATER,
    "token_bitmask": LATER,
    "token_dtype": [
        wrong_value("int16", 'must be "int32" or "int64"', "got 'int16'"),
        wrong_value(np.int32, 'must be "int32" or "int64"', "got <class"),
        wrong_value(None, 'must be "int32" or "int64"', "got None"),
    ],
    "return_log_normalizer": [
        *FLAG,
        wrong_value(True, 'must be False with scores="probs"', "no normaliser", scores="probs"),
    ],
    "out": [
        wrong_type((), "must be a Sample", "got tuple"),
        wrong_type(Verification(None, None, None), "must be a Sample", "got Verification"),
    ],
    "check": FLAG,
}


def cases(table: dict[str, list[Bad]]) -> list[Any]:
    return [pytest.param(name, bad, id=f"{name}-{i}") for name, bads in table.items() for i, bad in enumerate(bads)]


def refused(call: Any, base: dict[str, Any], name: str, bad: Bad) -> None:
    """A call with a bad argument raises what it should."""
    with pytest.raises(bad.error) as caught:
        call(**(base | bad.beside | {name: bad.value}))
    assert type(caught.value) is bad.error
    message, at = str(caught.value), 0
    assert name in message
    for word in bad.words:
        assert word in message[at:], f"{word!r} is not in {message!r}, or not in this order"
        at = message.index(word, at)


def untouched(out: tuple[Any, ...]) -> bool:
    return all((values == 77).all() for values in out if values is not None)


@pytest.mark.parametrize(("name", "bad"), cases(VERIFY))
def test_verify(name: str, bad: Bad) -> None:
    """Catches a bad argument that is used, ignored, refused without its name, or noticed after something is written."""
    out = verification()
    refused(verify, PADDED | {"out": out}, name, bad)
    assert untouched(out)


@pytest.mark.parametrize(("name", "bad"), cases(VERIFY_FLATTENED))
def test_verify_flattened(name: str, bad: Bad) -> None:
    """Catches the same in the flattened layout."""
    out = verification()
    refused(verify, FLATTENED | {"out": out}, name, bad)
    assert untouched(out)


@pytest.mark.parametrize(("name", "bad"), cases(SAMPLE))
def test_sample(name: str, bad: Bad) -> None:
    """Catches the same in `sample`."""
    out = Sample(np.full(B, 77, np.int32), np.full(B, 77, np.int32))
    refused(sample, LOGITS | {"out": out}, name, bad)
    assert untouched(out)


def verification() -> Verification:
    return Verification(np.full((B, K + 1), 77, np.int32), np.full(B, 77, np.int32), np.full(B, 77, np.int32))


CONSTRUCTORS: dict[type, dict[str, list[Bad]]] = {
    Sampling: {
        "temperature": [
            wrong_value(-1, "finite and not negative", "got -1"),
            wrong_value(-1e-9, "finite and not negative", "got -1e-09"),
            wrong_value(NAN, "finite and not negative", "got nan"),
            wrong_value(INF, "finite and not negative", "got inf"),
            wrong_value(10**400, "finite and not negative", "got 1000"),
            wrong_type(True, "a real number or an array [B]", "got True"),
            wrong_type("1", "a real number or an array [B]", "got '1'"),
            wrong_type(None, "a real number or an array [B]", "got None"),
        ],
        # Whatever they are given, they are not applied by this version: see "sampling" above.
        "top_k": [],
        "top_p": [],
        "min_p": [],
    },
    Token: {
        "lenience": [
            wrong_value(0, "in (0, 1]", "got 0"),
            wrong_value(-0.5, "in (0, 1]", "got -0.5"),
            wrong_value(1.0000001, "in (0, 1]", "got 1.0000001"),
            wrong_value(NAN, "must be finite", "got nan"),
            wrong_value(INF, "must be finite", "got inf"),
            wrong_type("1", "must be a real number", "got '1'"),
            wrong_type(True, "must be a real number", "got True"),
            wrong_type(None, "must be a real number", "got None"),
            wrong_type(np.ones(B), "must be a real number", "got array"),
        ]
    },
    Sigmoid: {
        "alpha": [
            wrong_value(1, "must be below beta", "alpha=1, beta=1", beta=1),
            wrong_value(2, "must be below beta", "alpha=2, beta=1", beta=1),
            wrong_value(-INF, "must be finite", "got -inf"),
            wrong_value(NAN, "must be finite", "got nan"),
            wrong_type("0", "must be a real number", "got '0'"),
        ],
        "beta": [
            wrong_value(INF, "must be finite", "got inf"),
            wrong_value(-2e4, "alpha=-10000.0", "beta=-20000.0"),
            wrong_type(None, "must be a real number", "got None"),
            wrong_type(False, "must be a real number", "got False"),
        ],
    },
}


@pytest.mark.parametrize(
    ("kind", "name", "bad"),
    [
        pytest.param(kind, name, bad, id=f"{kind.__name__}-{name}-{i}")
        for kind, table in CONSTRUCTORS.items()
        for name, bads in table.items()
        for i, bad in enumerate(bads)
    ],
)
def test_constructors(kind: type, name: str, bad: Bad) -> None:
    """Catches a rule or temperature that is wrong from the start and fails later, or never."""
    refused(kind, {}, name, bad)


def test_every_argument_has_a_bad_case() -> None:
    """Catches a new argument that nobody has tried to give wrongly."""
    assert set(VERIFY) == set(inspect.signature(verify).parameters)
    assert set(SAMPLE) == set(inspect.signature(sample).parameters)
    assert all(VERIFY.values())
    assert all(SAMPLE.values())
    assert set(VERIFY_FLATTENED) <= set(VERIFY)
    for kind, table in CONSTRUCTORS.items():
        assert set(table) == {field.name for field in fields(kind)}


def test_everything_after_the_arrays_is_keyword_only() -> None:
    """Catches an argument that a caller may give by position, so that its place can never change."""
    for call, arrays in ((verify, 3), (sample, 1)):
        kinds = [parameter.kind for parameter in inspect.signature(call).parameters.values()]
        assert kinds[:arrays] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * arrays
        assert set(kinds[arrays:]) == {inspect.Parameter.KEYWORD_ONLY}


def test_seed_is_required() -> None:
    """Catches a default seed: the same numbers in every call of every user."""
    for call, arguments in ((verify, PADDED), (sample, LOGITS)):
        arguments = {name: value for name, value in arguments.items() if name != "seed"}
        with pytest.raises(TypeError, match="seed"):
            call(**arguments)


@pytest.mark.parametrize("bad", [bad for bad in TEMPERATURES if isinstance(bad.value, np.ndarray) and bad.value.ndim])
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_temperatures_of_other_libraries(library: str, bad: Bad, need_frontend: Any) -> None:
    """Catches host values that are looked at only if they are NumPy's."""
    need_frontend(library)
    value = FRONTENDS[library]().array(bad.value)
    got = bad.words[1].replace("complex128", "complex") if library == "jax" else bad.words[1]  # JAX has complex64
    for name in ("sampling", "draft_sampling"):
        with pytest.raises(bad.error) as caught:
            verify(**PADDED, **{name: Sampling(value)})
        assert name + bad.words[0] in str(caught.value)
        assert got in str(caught.value)


@pytest.mark.parametrize(
    ("seed", "B", "error", "words"),
    [
        (None, 3, TypeError, "seed .* got None"),
        (1.5, 3, TypeError, "seed must be integers, got float64"),
        (2**64, 3, ValueError, r"seed must be in \[-2\^63, 2\^64\), got 18446744073709551616"),
        ([1, 2, 3], 3, ValueError, r"seed must be a scalar.*, got shape \(3,\)"),
        (1, -1, ValueError, r"B must be in \[0, .*\], got -1"),
        (1, 2.0, TypeError, "B must be an integer, got 2.0"),
        (1, True, TypeError, "B must be an integer, got True"),
        (1, None, TypeError, "B must be an integer, got None"),
    ],
)
def test_row_seeds(seed: Any, B: Any, error: type[Exception], words: str) -> None:
    """Catches the same in `row_seeds`."""
    with pytest.raises(error, match=words):
        row_seeds(seed, B)


# Values that only one row has wrong


def test_values_of_inactive_rows_are_not_looked_at() -> None:
    """Catches a whole batch refused because of a slot that is not in use."""
    active = [True, False, True]
    good = verify(**PADDED, step=[4, 0, 6], sampling=Sampling([1.0, 1.0, 0.5]), active=active)
    for junk in (NAN, -1.0, INF, 1e39):
        temperatures = np.array([1.0, junk, 0.5])
        answer = verify(**PADDED, step=[4, -9, 6], sampling=Sampling(temperatures), active=active)
        np.testing.assert_array_equal(answer.tokens, good.tokens)
        np.testing.assert_array_equal(answer.status, [0, 0, 0])
    assert good.tokens[1].tolist() == [-1] * (K + 1)
    expected = sample(**LOGITS, position=[3, 0, 5], active=active)
    answer = sample(**LOGITS, position=[3, 2**16, 5], draw=[0, -1, 0], step=[0, 2**60, 0], active=active)
    np.testing.assert_array_equal(answer.tokens, expected.tokens)
    assert answer.tokens[1] == -1
    with pytest.raises(ValueError, match=r"sampling\.temperature must be finite"):
        verify(**PADDED, sampling=Sampling([1.0, NAN, 0.5]), active=[True, True, False])


def faulty(name: str) -> dict[str, Any]:
    """A call whose row 1 has one fault."""
    arguments: dict[str, Any] = {key: np.array(value) for key, value in PADDED.items()}
    match name:
        case "NaN":
            arguments["target_logits"][1, 0, 7] = NAN
        case "inf":
            arguments["target_logits"][1, 0, 7] = INF
        case "no finite score":
            arguments["target_logits"][1, 0] = -INF
        case "draft NaN":
            arguments["draft_logits"][1, 0, 7] = NAN
        case "draft empty":
            arguments["draft_logits"][1, 0] = -INF
        case "id at V":
            arguments["draft_tokens"][1, 0] = V
        case "id -2":
            arguments["draft_tokens"][1, 0] = -2
        case "negative length":
            arguments["num_draft_tokens"] = np.array([2, -1, 2])
        case "length over K":
            arguments["num_draft_tokens"] = np.array([2, 3, 2])
    return arguments


FAULTS = {
    "NaN": (1, "a target row is not finite"),
    "inf": (1, "a target row is not finite"),
    "no finite score": (2, "no finite score"),
    "draft NaN": (4, "a draft row is invalid"),
    "draft empty": (4, "a draft row is invalid"),
    "id at V": (8, "id is out of range"),
    "id -2": (8, "id is out of range"),
    "negative length": (16, "number of draft tokens is out of range"),
    "length over K": (16, "number of draft tokens is out of range"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_bad_rows_have_a_status_and_check_names_them(name: str) -> None:
    """Catches a fault without a status, a neighbour that it disturbs, and `check` that does not say which row."""
    bit, words = FAULTS[name]
    arguments = faulty(name)
    clean, answer = verify(**PADDED), verify(**arguments)
    np.testing.assert_array_equal(answer.status, [0, bit, 0])
    np.testing.assert_array_equal(answer.tokens[[0, 2]], clean.tokens[[0, 2]])
    if bit < 8:
        assert answer.tokens[1].tolist() == [-1] * (K + 1)
    with pytest.raises(ValueError, match=rf"row 1: .*{words}.*status {bit}"):
        verify(**arguments, check=True)
    verify(**PADDED, check=True)


def test_check_in_sample() -> None:
    """Catches `check` that looks at nothing in `sample`, and names the wrong row where several are bad."""
    logits = TARGET[:, 0].copy()
    logits[1:] = -INF
    answer = sample(logits, seed=1)
    np.testing.assert_array_equal(answer.status, [0, 2, 2])
    np.testing.assert_array_equal(answer.tokens[1:], -1)
    with pytest.raises(ValueError, match=r"row 1: a target row has no finite score .*1 more row"):
        sample(logits, seed=1, check=True)
    sample(logits, seed=1, check=True, active=[True, False, False])
