"""What `cupyspec check` draws: each experiment's exact law, and cells of one batch, counted where they are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import cupyspec
from cupyspec._segments import SEG
from cupyspec.rules import Sigmoid, Token
from cupyspec.testing import law_of_cells, output_law, single_draft_law

Floats = npt.NDArray[np.float64]

DTYPES = ("float32", "float16", "bfloat16")
LARGE = 3 * SEG + 5  # three segments, and a last one that is nearly empty
SMALL, CHAIN = 4, 3  # vocabulary and drafts of the chains whose whole answers are counted

# (array library, rows, seed, step) -> cells of the rows for each law; a cell behind the last one is not counted.
Draw = Callable[[Any, int, int, int], list[Any]]


class Case(NamedTuple):
    """An experiment. Its draws are counted against one or more laws."""

    name: str
    laws: dict[str, Floats]  # by what is counted
    prepare: Callable[[Callable[[Any], Any]], Draw]  # takes what puts an array on the device
    large: bool = False


def cases(bfloat16: npt.DTypeLike | None) -> list[Case]:
    """All experiments; without a bfloat16 dtype those that need none."""
    kinds: dict[str, Any] = {"float32": np.float32, "float16": np.float16}
    if bfloat16 is not None:
        kinds["bfloat16"] = bfloat16
    found = [_sample(name, kind) for name, kind in kinds.items()]
    for rule in (Token(), Sigmoid(-10.0, 10.0)):
        found += [_verify(rule, name, kind) for name, kind in kinds.items()]
    found.append(_verify(Token(lenience=0.5), "float32", np.float32))
    found += [
        _chain("Token", Token()),
        _chain("Token, lenience 0.5", Token(lenience=0.5)),
        _chain("Sigmoid", Sigmoid(-3.0, 2.0)),
        _chain("temperatures 0.7 and 1.3", Token(), 0.7, 1.3),
        _chain("one-hot drafts", Token(), one_hot=True),
    ]
    return found + [_pairs(name, draw) for name, draw in PAIRS.items()]


def _softmax(rows: npt.NDArray[Any]) -> Floats:
    z = rows.astype(np.float64)
    weights = np.exp(z - z.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def _large_rows(kind: Any) -> npt.NDArray[Any]:
    """Logits [2, V] of target and draft, with 4 % of the mass in the last five ids.

    No cell is so small, or such a small difference of p and q, that float32's resolution inside a segment (about 2^-24 of
    its mass) would show among 10^9 draws: faults of the method are looked for.
    """
    rng = np.random.default_rng(0)
    target = rng.normal(0, 1.2, LARGE)
    rows = np.stack([target, target + rng.choice([-1.5, 0.5, 2.0], LARGE)])
    rows -= np.log(np.exp(rows[:, :-5]).sum(-1, keepdims=True))
    rows[:, -5:] += np.log(0.04 / 0.96) - np.log(np.exp(rows[:, -5:]).sum(-1, keepdims=True))
    return np.asarray((rows + 4).astype(kind))


def _sound(xp: Any, answer: Any, cells: Any, size: int) -> Any:
    """The cells, -1 (which cannot be counted) where a row has a fault or an id that does not exist."""
    return xp.where((answer.status == 0) & (cells >= 0) & (cells < size), cells, -1)


def _sample(name: str, kind: Any) -> Case:
    row = _large_rows(kind)[0]

    def prepare(array: Callable[[Any], Any]) -> Draw:
        held = array(row)

        def draw(xp: Any, rows: int, seed: int, step: int) -> list[Any]:
            got = cupyspec.sample(xp.broadcast_to(held, (rows, LARGE)), seed=seed, step=step)
            return [_sound(xp, got, got.tokens, LARGE)]

        return draw

    return Case(f"sample, {name}", {"token": _softmax(row)}, prepare, large=True)


def _verify(rule: Token | Sigmoid, name: str, kind: Any) -> Case:
    """One draft, what it is accepted or replaced by, and the bonus token."""
    target, draft = _large_rows(kind)
    sides = [row.astype(np.float64) if isinstance(rule, Sigmoid) else _softmax(row) for row in (target, draft)]
    laws = {
        "draft": _softmax(draft),
        "acceptance, token": single_draft_law(rule, *sides).ravel(),
        "bonus": _softmax(target),
    }

    def prepare(array: Callable[[Any], Any]) -> Draw:
        held = array(target), array(draft)

        def run(xp: Any, rows: int, seed: int, step: int) -> list[Any]:
            z = xp.broadcast_to(held[0], (rows, 2, LARGE))
            y = xp.broadcast_to(held[1], (rows, 1, LARGE))
            drawn = cupyspec.sample(y[:, 0], seed=seed, step=step)
            drafts = _sound(xp, drawn, drawn.tokens, LARGE)
            got = cupyspec.verify(drawn.tokens[:, None], z, y, seed=seed, step=step, rule=rule)
            bonus = xp.where(got.num_accepted == 1, got.tokens[:, 1], LARGE)
            first = _sound(xp, got, got.tokens[:, 0], LARGE)
            return [drafts, xp.where(first < 0, -1, got.num_accepted * LARGE + first), bonus]

        return run

    title = f"Token, lenience {rule.lenience:g}" if rule == Token(0.5) else type(rule).__name__
    return Case(f"verify, {title}, {name}", laws, prepare, large=True)


def _chain(
    name: str, rule: Token | Sigmoid, temperature: float = 1.0, draft_temperature: float = 1.0, one_hot: bool = False
) -> Case:
    """Three drafts of two models whose rows depend on the last token; every answer as a whole is a cell."""
    rng = np.random.default_rng(1)
    target = rng.normal(0, 1.5, (SMALL + 1, SMALL)).astype(np.float32)
    draft = (0.6 * target + rng.normal(0, 1.0, target.shape)).astype(np.float32)
    target[:, 1], draft[-1, 2] = -np.inf, -np.inf  # an id that must not come out, and one that is not drafted at first
    scaled = [rows.astype(np.float64) / t for rows, t in ((target, temperature), (draft, draft_temperature))]
    sides = scaled if isinstance(rule, Sigmoid) else [_softmax(rows) for rows in scaled]
    law = law_of_cells(output_law(rule, sides[0], sides[1], CHAIN, one_hot_drafts=one_hot), SMALL, CHAIN)

    def prepare(array: Callable[[Any], Any]) -> Draw:
        tables, powers = (array(target), array(draft)), array((SMALL + 1) ** np.arange(CHAIN + 1))
        samplings = cupyspec.Sampling(temperature), cupyspec.Sampling(draft_temperature)

        def run(xp: Any, rows: int, seed: int, step: int) -> list[Any]:
            last = xp.full(rows, SMALL, np.int32)
            contexts, drafts = [last], []
            for i in range(CHAIN):
                last = cupyspec.sample(tables[1][last], seed=seed, step=step, position=i, sampling=samplings[1]).tokens
                drafts.append(last)
                contexts.append(last)
            context = xp.stack(contexts, axis=1)
            got = cupyspec.verify(
                xp.stack(drafts, axis=1),
                tables[0][context],
                None if one_hot else tables[1][context[:, :-1]],
                seed=seed,
                step=step,
                rule=rule,
                sampling=samplings[0],
                draft_sampling=None if one_hot else samplings[1],
            )
            return [_sound(xp, got, ((got.tokens + 1) * powers).sum(axis=1), len(law))]

        return run

    return Case(f"chain, {name}", {"whole answer": law}, prepare)


_PAIR_ROW = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))


def _tokens(xp: Any, row: Any, rows: int, seed: int, step: int, **options: Any) -> Any:
    return cupyspec.sample(xp.broadcast_to(row, (rows, SMALL)), seed=seed, step=step, **options).tokens


def _verified(xp: Any, row: Any, rows: int, seed: int, step: int) -> Any:
    nothing = xp.empty((rows, 0), np.int32)
    return cupyspec.verify(nothing, xp.broadcast_to(row, (rows, 1, SMALL)), seed=seed, step=step).tokens[:, 0]


# Two tokens that must be independent. Each draws with steps of its own.
PAIRS: dict[str, Callable[[Any, Any, int, int, int], tuple[Any, Any]]] = {
    "neighbouring rows": lambda xp, row, n, seed, step: tuple(_tokens(xp, row, 2 * n, seed, step).reshape(n, 2).T),
    "consecutive steps": lambda xp, row, n, seed, step: (
        _tokens(xp, row, n, seed, 2 * step),
        _tokens(xp, row, n, seed, 2 * step + 1),
    ),
    "draft and verification": lambda xp, row, n, seed, step: (
        _tokens(xp, row, n, seed, step),
        _verified(xp, row, n, seed, step),
    ),
}


def _pairs(name: str, pair: Callable[[Any, Any, int, int, int], tuple[Any, Any]]) -> Case:
    share = _softmax(_PAIR_ROW)

    def prepare(array: Callable[[Any], Any]) -> Draw:
        row = array(_PAIR_ROW)

        def draw(xp: Any, rows: int, seed: int, step: int) -> list[Any]:
            first, second = pair(xp, row, rows, seed, step)
            return [first * SMALL + second]

        return draw

    return Case(f"independence, {name}", {"both tokens": np.outer(share, share).ravel()}, prepare)
