"""Golden tokens: fixed inputs and seeds give these tokens on every machine, in every version.

A change here is a change of the contract. Inputs come from integer arithmetic alone. The oracle says that no decision is
in a band, so that no rounding can change a token. After a change of the contract (the segment's size, say):
``python tests/test_golden.py`` prints the table anew.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import cupyspec
from cupyspec import Sampling, Sigmoid, Token
from cupyspec._philox import Purpose, coin, draw_words, unit_exponential
from cupyspec._segments import SEG, segment_count
from cupyspec.reference.race import race
from cupyspec.reference.rows import probabilities
from strategies import ChainCase

SIZE = 5  # rows


def integers(shape: tuple[int, ...], salt: int) -> np.ndarray:
    """Numbers in [0, 2^16) from a multiplicative hash of their index."""
    index = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(salt << 32)
    mixed = (index ^ (index >> np.uint64(15))) * np.uint64(0x2545F4914F6CDD1D)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(48)).astype(np.int64).reshape(shape)


def scores(shape: tuple[int, ...], salt: int) -> np.ndarray:
    """Logits in [-8, 8), multiples of 2^-5: exact in float16."""
    return ((integers(shape, salt) >> 7) / 32 - 8).astype(np.float32)


def case(V: int, K: int, *, kind: Any = np.float32, one_hot: bool = False, apart: int = 1, **options: Any) -> ChainCase:
    """A call whose drafts are likely ids; the draft's logits are `apart` eighths something else than the target's."""
    target = scores((SIZE, K + 1, V), V + K)
    draft = ((8 - apart) * target[:, :-1] + apart * scores((SIZE, K, V), V + K + 1)) / 8
    drafts = np.argmax(draft + scores((SIZE, K, V), V + K + 2) / 8, axis=2)
    if K:
        drafts[1::2] = np.argmax(target[1::2, :-1], axis=2)
    return ChainCase(
        draft_tokens=drafts,
        target=target.astype(kind),
        draft=None if one_hot else draft.astype(kind),
        vocab_size=V,
        **{"seed": cupyspec.row_seeds(20240607, SIZE), "step": 3, **options},
    )


CASES = {
    "token, V = 11": case(11, 3),
    "token, V = 100, K = 0": case(100, 0),
    "token, V = 5000, K = 4": case(5000, 4, temperature=0.4),
    "token, V = 3 SEG, float16": case(3 * SEG, 2, kind=np.float16, step=2**40 + 6, temperature=0.5),
    "one-hot, V = 300": case(300, 3, one_hot=True, temperature=0.3),
    "lenient, V = 300": case(300, 3, rule=Token(lenience=0.3)),
    "greedy rows mixed in, V = 50": case(50, 3, temperature=np.array([0, 0.25, 1, 0, 2])),
    "sigmoid, V = 300": case(300, 3, rule=Sigmoid(-1.0, 8.0), apart=8),
    "released sigmoid, V = 40": case(40, 3, rule=Sigmoid()),
    "sigmoid, one-hot, V = 40": case(40, 3, rule=Sigmoid(), one_hot=True),
    "seeds of every sign, V = 200": case(200, 2, seed=np.array([0, -1, 2**40, 2**62, -(2**63)])),
}
SAMPLES = {
    "draft, V = 5000": {"V": 5000, "position": 2},
    "target, V = 5000": {"V": 5000, "purpose": "target"},
    "draw 3, V = 17": {"V": 17, "draw": 3, "step": 2**33},
}
ROW_SEEDS = [2726573037951644265, 8608508462170252983, 14228616437354761209, 11601511959464110270, 7834879463458929396]
TOKENS: dict[str, Any] = {
    "token, V = 11": [[1, 8, 1, 7], [7, 2, 1, 5], [5, -1, -1, -1], [8, 6, 5, 0], [1, -1, -1, -1]],
    "token, V = 100, K = 0": [[31], [62], [27], [33], [94]],
    "token, V = 5000, K = 4": [
        [4831, -1, -1, -1, -1],
        [2868, -1, -1, -1, -1],
        [2211, -1, -1, -1, -1],
        [235, 708, 1531, 231, 3072],
        [2531, -1, -1, -1, -1],
    ],
    "token, V = 3 SEG, float16": [[2399, 874, 381], [1337, 793, 1091], [1395, -1, -1], [441, 108, -1], [156, 2438, -1]],
    "one-hot, V = 300": [[88, -1, -1, -1], [221, -1, -1, -1], [89, -1, -1, -1], [18, 271, -1, -1], [78, -1, -1, -1]],
    "lenient, V = 300": [
        [123, 66, 287, 213],
        [219, 2, 239, 17],
        [77, 117, 95, 77],
        [18, 34, 48, 170],
        [243, 203, 48, 158],
    ],
    "greedy rows mixed in, V = 50": [
        [25, -1, -1, -1],
        [0, 41, 24, 12],
        [17, 1, 43, -1],
        [22, 32, 29, 29],
        [41, 26, 38, 19],
    ],
    "sigmoid, V = 300": [[157, -1, -1, -1], [219, 2, 239, 17], [114, -1, -1, -1], [18, 34, 48, 170], [73, -1, -1, -1]],
    "released sigmoid, V = 40": [
        [20, 26, 29, 23],
        [9, 27, 26, 15],
        [28, 7, 25, 15],
        [38, 15, 33, 11],
        [12, 34, 10, 25],
    ],
    "sigmoid, one-hot, V = 40": [
        [19, -1, -1, -1],
        [26, -1, -1, -1],
        [14, -1, -1, -1],
        [38, 15, 33, 11],
        [7, -1, -1, -1],
    ],
    "seeds of every sign, V = 200": [[123, -1, -1], [14, 97, -1], [159, 10, 97], [77, 85, 65], [146, 151, 187]],
    "draft, V = 5000": [3078, 2484, 387, 3623, 4921],
    "target, V = 5000": [4803, 4408, 903, 1655, 2113],
    "draw 3, V = 17": [10, 0, 14, 0, 2],
}


def sampled(V: int, **options: Any) -> list[int]:
    """Tokens of `sample`."""
    return cupyspec.sample(scores((SIZE, V), V), seed=77, sampling=Sampling(0.8), **options).tokens.tolist()


@pytest.mark.parametrize("name", CASES)
def test_golden_verification(name: str) -> None:
    """Catches any change of a counter, a purpose, the segment's size, a comparison or an order."""
    got = CASES[name].verify()
    assert not got.status.any()
    assert got.tokens.tolist() == TOKENS[name]


@pytest.mark.parametrize("name", CASES)
def test_no_golden_decision_is_close(name: str) -> None:
    """Catches a golden token that another machine's rounding could change, and an oracle that has moved."""
    want = CASES[name].oracle()
    assert not want.in_band.any()
    assert want.tokens.tolist() == TOKENS[name]


@pytest.mark.parametrize("name", SAMPLES)
def test_golden_samples(name: str) -> None:
    """Catches the same for sample(), and draws that are close to another."""
    options = {"position": 0, "draw": 0, "step": 0, "purpose": "draft"} | SAMPLES[name]
    V, step, purpose = options.pop("V"), options.pop("step"), Purpose[options.pop("purpose").upper()]
    for b, seed in enumerate(cupyspec.row_seeds(77, SIZE)):
        race_word, pick = draw_words(seed, step, purpose, segment=np.arange(segment_count(V)), **options)
        p = probabilities(scores((SIZE, V), V)[b], probs=False, temperature=0.8)
        want = race(p, unit_exponential(race_word), coin(pick).astype(np.float64), segment=SEG)
        assert not want.in_band
        assert want.token == TOKENS[name][b]
    assert sampled(**SAMPLES[name]) == TOKENS[name]


def test_golden_row_seeds() -> None:
    """Catches another split of a scalar seed."""
    assert cupyspec.row_seeds(20240607, SIZE).tolist() == ROW_SEEDS


def test_golden_cases_reach_every_outcome() -> None:
    """Catches a table that looks long and says little: rejections at each place, and full acceptance."""
    accepted = {len(row) - 1 - row.count(-1) for name in CASES for row in TOKENS[name]}
    assert accepted >= {0, 1, 2, 3}


def print_table() -> None:
    """The two constants, for this file."""
    print(f"ROW_SEEDS = {cupyspec.row_seeds(20240607, SIZE).tolist()}\nTOKENS: dict[str, Any] = {{")
    for name in CASES:
        print(f'    "{name}": {CASES[name].verify().tokens.tolist()},')
    for name in SAMPLES:
        print(f'    "{name}": {sampled(**SAMPLES[name])},')
    print("}")


if __name__ == "__main__":
    print_table()
