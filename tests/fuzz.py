"""A fuzzer of `verify` and `sample`: random calls, some of them nonsense, each judged by what must hold for any call.

    python tests/fuzz.py --minutes 10 --backend numpy
    python tests/fuzz.py --minutes 10 --backend host_cuda [--sanitize]

- A call answers, or raises ValueError or TypeError with an argument's name in it. Nothing else, no warning, no hang.
- Every row is an accepted prefix of its drafts, one id of the vocabulary (or -1 with a status), then -1.
- Inputs keep every byte, and so does the memory around inputs, outputs and, on host_cuda, the kernels' own arrays.
- A call that makes sense answers what the float64 oracle answers, outside the bands.

A call is a function of (seed, number): what failed is repeated by `--seed S --first N --calls 1`.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import inspect
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count, islice
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import numpy as np
from scipy.special import logsumexp, softmax

import cupyspec
from cupyspec import Sample, Sampling, Sigmoid, Token, Verification
from host_cuda import backend as host_backend
from machines import SMALL, HostMachine, Machine, Patch
from strategies import FAULTS, INTEGER_TYPES, SCORE_TYPES, ChainCase, assert_agrees

VOCABULARIES = (1, 2, 3, 8, 31, 33, SMALL - 1, SMALL, SMALL + 1, 300, 3 * SMALL + 5)
TEMPERATURES = (0.0, 1e-40, 1e-30, 0.05, 0.7, 1.0, 1.0, 3.0, 1e30)
RULES = (Token(), Token(), Token(lenience=0.5), Token(lenience=1e-3), Sigmoid(), Sigmoid(-10, 10), Sigmoid(-0.5, 0.25))
# Kernels are compiled for each of these: few in CI, all on demand.
FEW_BUILDS = (("float32", "float32", "int32", Token), ("bfloat16", "float16", "int64", Sigmoid))
SENTINEL = 0x5A
BAND = 64  # bytes before and behind an array


class Wrong(AssertionError):
    """What a call did that no call may do."""


# ------------------------------------------------------------------------------------------------ memory that is watched


class Watch:
    """Arrays in buffers of their own, and what the buffers held."""

    def __init__(self, band: int = BAND) -> None:
        self.band = band
        self.seen: list[tuple[str, np.ndarray, np.ndarray | None, bytes]] = []

    def place(self, name: str, values: np.ndarray, layout: str, *, output: bool = False) -> np.ndarray:
        """The same values in a layout; for an output the bytes that are its elements may change."""
        item, axes, last = values.itemsize, list(range(values.ndim)), max(values.ndim - 1, 0)
        columns = {"columns of a wider array": (1, 3), "every second column": (2, 3)}.get(layout, (1, 0))
        before, odd = int(columns[1] > 0 and values.ndim > 0), int(layout == "odd address")
        fastest_first = {"Fortran order": axes, "batch last": [*axes[:1], *axes[:0:-1]]}.get(layout, axes[::-1])
        strides, step = [0] * values.ndim, 1
        for axis in fastest_first:
            strides[axis] = step
            length = values.shape[axis] if axis != last else columns[0] * values.shape[axis] + columns[1]
            step *= max(length, 1)
        if values.ndim:
            strides[last] *= columns[0]
        buffer = np.full((step + odd) * item + 2 * self.band, SENTINEL, np.uint8)
        offset = self.band + (before + odd) * item
        view = np.ndarray(values.shape, values.dtype, buffer, offset, [s * item for s in strides])
        view[...] = values
        if layout == "reversed" and values.ndim:
            view[...] = values[..., ::-1]
            view = view[..., ::-1]
        mask = None
        if output:
            mask = np.zeros(buffer.size, np.bool_)
            at = view.__array_interface__["data"][0] - buffer.ctypes.data
            np.ndarray(view.shape, f"V{item}", mask, at, view.strides)[...] = np.void(b"\1" * item)
        elif layout == "read-only":
            view.flags.writeable = False
        self.seen.append((name, buffer, mask, buffer.tobytes()))
        return view

    def check(self) -> None:
        """Nothing has changed that may not."""
        for name, buffer, mask, before in self.seen:
            changed = np.frombuffer(before, np.uint8) != buffer
            if mask is not None:
                changed &= ~mask
            if changed.any():
                raise Wrong(f"{name}: {int(changed.sum())} bytes changed that are not an output's")


class GuardedHost(HostMachine):
    """Kernels whose results and scratch lie between bands that are looked at after each call.

    Under sanitizers in memory of exactly their size, so that the next byte is the sanitizer's.
    """

    def __init__(self, patches: Sequence[Patch] = ()) -> None:
        super().__init__(patches)
        self.exact, self.guards = host_backend.sanitized(), Watch()
        self.backend.empty = self._empty  # type: ignore[method-assign]

    def _empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        if self.exact:
            array = np.empty(shape, dtype)
            array.reshape(-1).view(np.uint8)[...] = 0xA5
            return array
        rubbish = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype).reshape(shape)
        return self.guards.place(f"{dtype}{list(shape)} of the kernels", rubbish, "plain", output=True)

    def at_work(self) -> AbstractContextManager[Any]:
        self.guards = Watch()
        return super().at_work()


# ------------------------------------------------------------------------------------------------ calls


@dataclasses.dataclass
class Call:
    """A call, and what is known of it."""

    function: str
    arrays: list[Any]
    options: dict[str, Any]
    watch: Watch
    case: ChainCase | None  # of `verify`, as long as it makes sense
    vocab_size: int
    notes: list[str]
    lengths_are_clamped: bool = False  # by the flattened layout, before the library sees them

    def __str__(self) -> str:
        def short(value: Any) -> str:
            return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)[:80]

        parts = [short(a) for a in self.arrays] + [f"{k}={short(v)}" for k, v in self.options.items()]
        return f"{self.function}({', '.join(parts)})" + "".join(f"; {note}" for note in self.notes)


def scores(rng: np.random.Generator, shape: tuple[int, ...], probs: bool) -> np.ndarray:
    """Values of every kind, in float64."""
    style = rng.choice(["plain", "wide", "ties", "masked", "narrow", "extreme"])
    z = rng.normal(0, {"wide": 12.0, "narrow": 1e-3}.get(style, 2.0), shape)
    if style == "ties":
        z = np.round(z)
    if style == "masked":
        banned = rng.random(shape) < 0.5
        banned[..., :1] = False
        z[banned] = -np.inf
    if style == "extreme":
        z = rng.choice([65504.0, -65504.0, 6e-8, -6e-8, 0.0, -0.0, -np.inf, 1.0, 30000.0], shape)
        z[..., :1] = 0.0
    if not probs:
        return z
    p = softmax(z, axis=-1) * rng.choice([1.0, 1.0, 0.98, 1.02, 1e-3])
    if rng.random() < 0.3:
        p[rng.random(shape) < 0.3] = rng.choice([0.0, 2.0**-127, 2.0**-24])
    return p


def plant(rng: np.random.Generator, array: np.ndarray, vocab: int, probs: bool) -> None:
    """A bad value in some row."""
    if array.shape[0] and array.shape[1]:
        row = array[rng.integers(array.shape[0]), rng.integers(array.shape[1])]
        kinds = FAULTS[probs]
        kind = kinds[rng.integers(len(kinds))]
        if isinstance(kind, str):
            row[:vocab] = 0 if probs else -np.inf
        else:
            row[rng.integers(vocab)] = kind


def per_row(rng: np.random.Generator, batch: int, values: Sequence[float]) -> Any:
    """One for all rows or one each, in some form."""
    if rng.random() < 0.4:
        return float(rng.choice(values))
    chosen = rng.choice(values, batch)
    form = rng.integers(3)
    return chosen.tolist() if form == 0 else chosen.astype(np.float32 if form == 1 else np.float64)


def random_case(rng: np.random.Generator, builds: Sequence[tuple[Any, ...]] | None) -> ChainCase:
    """A call of `verify` that makes sense, whatever its values."""
    batch, width = int(rng.choice([0, 1, 2, 3, 7])), int(rng.choice([0, 1, 2, 3, 6]))
    if rng.random() < 0.02:
        width = int(rng.choice([33, 100, 255]))
    vocab = int(rng.choice(VOCABULARIES if width < 10 else VOCABULARIES[:6]))
    rule = RULES[rng.integers(len(RULES))]
    kinds = [str(rng.choice(sorted(SCORE_TYPES))) for _ in range(2)]
    token_type = str(rng.choice(["int32", "int64"]))
    if builds is not None:
        *kinds, token_type, rule_type = builds[rng.integers(len(builds))]
        while not isinstance(rule, rule_type):
            rule = RULES[rng.integers(len(RULES))]
    probs = [isinstance(rule, Token) and rng.random() < 0.3 for _ in range(2)]
    padding = rng.integers(0, 4, 2) * (rng.random() < 0.5)
    sides = []
    for side, rows in enumerate((width + 1, width)):
        values = scores(rng, (batch, rows, vocab + int(padding[side])), probs[side])
        sides.append(values)
    if rng.random() < 0.6 and probs[0] == probs[1]:  # drafts that stand a chance
        near = sides[0][:, :-1, :vocab]
        sides[1][..., :vocab] = near if probs[0] else near + rng.normal(0, rng.choice([0, 0.3]), near.shape)
    weights = sides[1][..., :vocab] if not probs[1] else np.log(np.maximum(sides[1][..., :vocab], 1e-300))
    noise = rng.gumbel(size=weights.shape) * rng.choice([0.0, 1.0])
    tokens = np.argmax(np.maximum(weights, -1e300) + noise, axis=-1).astype(token_type)
    odd = rng.random(tokens.shape) < rng.choice([0.0, 0.1])
    limits = np.iinfo(tokens.dtype)
    tokens[odd] = rng.choice([-1, -2, vocab, vocab + 3, limits.min, limits.max], int(odd.sum()))
    with np.errstate(all="ignore"):
        stored = [values.astype(SCORE_TYPES[kind]) for values, kind in zip(sides, kinds, strict=True)]
    for values, is_probs in zip(stored, probs, strict=True):
        if rng.random() < 0.2:
            plant(rng, values, vocab, is_probs)
        values[..., vocab:] = rng.choice([np.nan, np.inf, 100.0])
    temperature = 1.0 if probs[0] else per_row(rng, batch, TEMPERATURES)
    draft_temperature = None
    if not probs[1] and (probs[0] or rng.random() < 0.4):
        draft_temperature = per_row(rng, batch, TEMPERATURES)
    normalizers: list[Any] = [None, None]
    if isinstance(rule, Token) and rng.random() < 0.2:
        for side, values in enumerate(stored):
            if not probs[side] and np.ndim(temperature) == 0 and temperature == 1.0 and draft_temperature is None:
                with np.errstate(all="ignore"):
                    lse = logsumexp(values[..., :vocab].astype(np.float64), axis=-1)
                normalizers[side] = lse.astype(rng.choice([np.float32, np.float64]))
    one_hot = rng.random() < 0.2
    seed: Any = rng.integers(0, 2**64, batch, dtype=np.uint64)
    return ChainCase(
        draft_tokens=tokens,
        target=stored[0],
        draft=None if one_hot else stored[1],
        vocab_size=vocab,
        seed=seed,
        step=int(rng.choice([0, 1, 2**32, 2**56 - 1])),
        rule=rule,
        temperature=temperature,
        draft_temperature=None if one_hot else draft_temperature,
        target_probs=probs[0],
        draft_probs=probs[0] if one_hot else probs[1],
        num_draft_tokens=_lengths(rng, batch, width),
        active=(rng.random(batch) < 0.7).astype(rng.choice([np.bool_, np.uint8])) if rng.random() < 0.3 else None,
        target_log_normalizer=normalizers[0],
        draft_log_normalizer=None if one_hot else normalizers[1],
        segment=SMALL,
    )


def _lengths(rng: np.random.Generator, batch: int, width: int) -> Any:
    if rng.random() < 0.6:
        return None
    kind = rng.choice(INTEGER_TYPES)
    low = 0 if np.dtype(kind).kind == "u" else -2
    return rng.integers(low, min(width + 3, 127), batch).astype(kind)


LAYOUTS = (
    "plain",
    "odd address",
    "columns of a wider array",
    "read-only",
    # Not in place on CUDA: copied before the kernels, by what host_cuda replaces.
    "batch last",
    "Fortran order",
    "every second column",
    "reversed",
)

JUNK: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: -1,
    lambda: 0,
    lambda: 1,
    lambda: 2**70,
    lambda: -(2**70),
    lambda: 1.5,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: True,
    lambda: 1j,
    lambda: "x",
    lambda: b"x",
    list,
    lambda: [1],
    lambda: [[1, 2], [3]],
    dict,
    object,
    lambda: Token,
    lambda: np.float32(2),
    lambda: np.float64("nan"),
    lambda: np.array(3),
    lambda: np.array(2.5),
    lambda: np.zeros(0),
    lambda: np.zeros(0, np.int64),
    lambda: np.zeros((2, 2), np.int32),
    lambda: np.zeros((1, 2, 3), np.float32),
    lambda: np.zeros((1, 2, 0), np.float32),
    lambda: np.zeros((1, 2, 3), np.complex64),
    lambda: np.zeros((1, 2, 3), ">f4"),
    lambda: np.zeros((1,) * 20, np.float32),
    lambda: np.array("a"),
    lambda: np.array([None, 1], object),
    lambda: np.array(["1"], "datetime64[D]"),
    lambda: np.ma.masked_array(np.zeros((1, 2, 3), np.float32), mask=True),
    lambda: np.full(3, -1, np.int8),
    lambda: np.full((2, 2), 2**63, np.uint64),
    lambda: memoryview(b"abcd"),
    lambda: Sampling(temperature=[1.0, 2.0, 3.0]),
    lambda: Sampling(temperature=0.5),
    lambda: Verification(None, None, None),
    lambda: Sample(np.zeros(2), np.zeros(2)),
)

ARRAYS = {"verify": ("draft_tokens", "target_logits", "draft_logits"), "sample": ("logits",)}
# Of these only the errors are judged.
PLAIN: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (cupyspec.row_seeds, cupyspec.expected_tokens, Sampling, Token, Sigmoid)
}
NAMES = {
    f.__name__: tuple(inspect.signature(f).parameters) for f in (cupyspec.verify, cupyspec.sample, *PLAIN.values())
}


def make_call(rng: np.random.Generator, back_end: str, builds: Sequence[tuple[Any, ...]] | None) -> Call:
    """Any call."""
    exact = host_backend.sanitized()
    watch = Watch(0 if exact else BAND)
    layouts = LAYOUTS[: 4 if back_end == "host_cuda" else None]
    if exact:
        layouts = LAYOUTS[:1]

    def placed(name: str, values: Any, *, output: bool = False, any_layout: bool = False) -> Any:
        if not isinstance(values, np.ndarray):
            return values
        choice = str(rng.choice(LAYOUTS if any_layout and not exact else layouts))
        if output and choice == "read-only":
            choice = "plain"
        return watch.place(name, values, choice, output=output)

    case = random_case(rng, builds)
    batch, width = case.draft_tokens.shape
    notes: list[str] = []
    if rng.random() < 0.03:
        function = str(rng.choice(list(PLAIN)))
        nonsense = [JUNK[i]() for i in rng.integers(0, len(JUNK), len(NAMES[function]))]
        return Call(function, nonsense, {}, watch, None, 1, notes)
    if rng.random() < 0.2:
        call = _sample_call(rng, case, placed, watch)
    else:
        options = case.arguments()
        arrays: dict[str, Any] = {name: getattr(case, name) for name in ("draft_tokens", "target", "draft")}
        clamped = False
        if rng.random() < 0.3 and batch * width < 128:  # running sums of any dtype
            changes = case.flattened(rng)
            arrays = {name: changes.pop(name) for name in arrays}
            options |= changes
            clamped = True
        ids = placed("draft_tokens", arrays.pop("draft_tokens"), any_layout=True)
        rows = [placed(name, values) for name, values in arrays.items()]
        options = {
            name: placed(name, value) if "normalizer" in name else placed(name, value, any_layout=True)
            for name, value in options.items()
        }
        if rng.random() < 0.3:
            options["check"] = True
        call = Call("verify", [ids, *rows], options, watch, case, case.vocab_size, notes, clamped)
        if rng.random() < 0.3:
            fields = [((batch, width + 1), case.draft_tokens.dtype), ((batch,), np.int32), ((batch,), np.int32)]
            new = [
                placed(f"out.{n}", np.full(shape, 77, kind), output=True, any_layout=True)
                for n, (shape, kind) in zip(("tokens", "num_accepted", "status"), fields, strict=True)
            ]
            options["out"] = Verification(*new)
    if rng.random() < 0.35:
        _spoil(rng, call)
    return call


def _sample_call(rng: np.random.Generator, case: ChainCase, placed: Callable[..., Any], watch: Watch) -> Call:
    options = {
        "seed": placed("seed", case.seed, any_layout=True),
        "step": case.step,
        "position": int(rng.integers(0, 2**16)),
        "draw": int(rng.integers(0, 2**16)),
        "purpose": str(rng.choice(["draft", "target"])),
        "sampling": Sampling(temperature=case.temperature),
        "active": placed("active", case.active, any_layout=True),
        "vocab_size": case.vocab_size,
        "scores": "probs" if case.target_probs else "logits",
        "token_dtype": str(case.draft_tokens.dtype),
        "return_log_normalizer": bool(rng.random() < 0.5),
    }
    rows = placed("logits", np.ascontiguousarray(case.target[:, 0]))
    return Call("sample", [rows], options, watch, None, case.vocab_size, [])


def _spoil(rng: np.random.Generator, call: Call) -> None:
    """Nonsense for one argument."""
    junk = JUNK[rng.integers(len(JUNK))]()
    arrays = ARRAYS[call.function]
    name = str(rng.choice([*arrays, *NAMES[call.function]]))
    if name in arrays:
        call.arrays[arrays.index(name)] = junk
    else:
        call.options[name] = junk
    call.case = None
    call.notes.append(f"{name} is nonsense")


# ------------------------------------------------------------------------------------------------ judgement


def run_call(machine: Machine, call: Call) -> str:
    """Make a call and judge it; how it ended."""
    function = PLAIN.get(call.function) or getattr(machine, call.function)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            answer = function(*call.arrays, **call.options)
        except (ValueError, TypeError) as error:
            if not any(name in str(error) for name in (*NAMES[call.function], "temperature", "row ")):
                raise Wrong(f"an error that names no argument: {type(error).__name__}: {error}") from error
            ended = _judge_refusal(call, error)
        else:
            ended = "answered"
            _judge_answer(call, answer)
    call.watch.check()
    if isinstance(machine, GuardedHost):
        machine.guards.check()
    return ended


def _judge_refusal(call: Call, error: Exception) -> str:
    if call.case is None:
        return "refused"
    want = call.case.oracle()
    if call.options.get("check") and want.status.any():
        return "refused by check"
    raise Wrong(f"refused though it makes sense: {error}") from error


def _judge_answer(call: Call, answer: Any) -> None:
    if call.function in PLAIN:
        return
    if call.case is None:
        tokens = np.asarray(answer.tokens)
        if tokens.size and not (-1 <= tokens.min() and tokens.max() < _columns(call)):
            raise Wrong(f"an id outside the vocabulary: {tokens.min()} to {tokens.max()}")
        return
    case = call.case
    want = case.oracle()
    if call.lengths_are_clamped and case.num_draft_tokens is not None:
        want.status[...] &= ~16
    batch, width = case.draft_tokens.shape
    shapes = {"tokens": (batch, width + 1), "num_accepted": (batch,), "status": (batch,)}
    for name, shape in shapes.items():
        if getattr(answer, name).shape != shape:
            raise Wrong(f"{name} has shape {getattr(answer, name).shape}, not {shape}")
    if answer.tokens.dtype != case.draft_tokens.dtype:
        raise Wrong(f"tokens have dtype {answer.tokens.dtype}")
    for b in range(batch):
        n, row = int(answer.num_accepted[b]), answer.tokens[b]
        active = case.active is None or bool(case.active[b])
        good = 0 <= n <= width and (row[:n] == case.draft_tokens[b, :n]).all() and (row[n + 1 :] == -1).all()
        last = good and (0 <= row[n] < case.vocab_size or (row[n] == -1 and (answer.status[b] != 0 or not active)))
        if not last:
            raise Wrong(f"row {b} is no answer: {row.tolist()}, {n} accepted, status {answer.status[b]}")
    try:
        assert_agrees(answer, want)
    except AssertionError as error:
        raise Wrong(str(error)) from error
    if "out" in call.options and not all(
        np.array_equal(x, y) for x, y in zip(call.options["out"][:3], answer[:3], strict=True)
    ):
        raise Wrong("out= does not hold the answer")


def _columns(call: Call) -> int:
    """Ids that a call with nonsense in it may give: there are as many columns."""
    given = call.arrays[0 if call.function == "sample" else 1]
    return int(np.shape(given)[-1]) if np.ndim(given) else 1


# ------------------------------------------------------------------------------------------------ runs


def machine_of(back_end: str, patches: Sequence[Patch] = ()) -> Machine:
    """A back end to be fuzzed."""
    return GuardedHost(patches) if back_end == "host_cuda" else Machine(patches)


def run(machine: Machine, seed: int, numbers: Iterator[int] | range, *, few_builds: bool = True) -> Counter[str]:
    """Calls by number; how many ended how. AssertionError for the first that is wrong."""
    ended: Counter[str] = Counter()
    back_end = machine.name
    builds = FEW_BUILDS if few_builds and back_end == "host_cuda" else None
    for number in numbers:
        call = make_call(np.random.default_rng([seed, number]), back_end, builds)
        description = str(call)
        try:
            ended[run_call(machine, call)] += 1
        except Exception as error:
            what = error if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
            raise AssertionError(
                f"seed {seed}, number {number} on {back_end}: {what}\n  {description}\n"
                f"  again: python tests/fuzz.py --backend {back_end} --seed {seed} --first {number} --calls 1"
                f"{'' if few_builds else ' --all-builds'}"
            ) from error
    return ended


def sanitizer_environment() -> dict[str, str] | None:
    """Variables under which a Python process loads the sanitizers before itself; None: this g++ has none."""
    compiler = host_backend.compiler()
    if compiler is None:
        return None
    runtimes = [
        subprocess.run([compiler, f"-print-file-name=lib{n}.so"], capture_output=True, text=True, check=True).stdout
        for n in ("asan", "ubsan")
    ]
    paths = [runtime.strip() for runtime in runtimes]
    if not all(Path(path).is_absolute() for path in paths):
        return None
    return {
        "CUPYSPEC_TEST_SANITIZE": "1",
        "LD_PRELOAD": " ".join(paths),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",  # Python itself leaks
    }


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Random calls of cupyspec, each judged.")
    parser.add_argument("--backend", choices=("numpy", "host_cuda"), default="numpy")
    parser.add_argument("--minutes", type=float, help="run so long")
    parser.add_argument("--calls", type=int, help="run so many calls")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument(
        "--all-builds", action="store_true", help="kernels for every dtype, not for two choices of them"
    )
    parser.add_argument(
        "--sanitize", action="store_true", help="host_cuda: under address and undefined-behaviour sanitizers"
    )
    given = parser.parse_args(arguments)
    if given.minutes is None and given.calls is None:
        parser.error("one of --minutes and --calls is needed")
    if given.sanitize and not host_backend.sanitized():
        environment = sanitizer_environment()
        if given.backend != "host_cuda" or environment is None:
            parser.error("--sanitize needs --backend host_cuda and a g++ that has sanitizers")
        again = [sys.executable, __file__, *(sys.argv[1:] if arguments is None else arguments)]
        return subprocess.run(again, env=os.environ | environment).returncode
    machine = machine_of(given.backend)
    print(f"{given.backend}, seed {given.seed}", flush=True)
    numbers: Iterator[int] = count(given.first)
    if given.calls is not None:
        numbers = islice(numbers, given.calls)
    end = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    ended: Counter[str] = Counter()
    for number in numbers:
        if end is not None and time.monotonic() > end:
            break
        faulthandler.dump_traceback_later(120, exit=True)  # a call that hangs
        try:
            ended += run(machine, given.seed, range(number, number + 1), few_builds=not given.all_builds)
        except AssertionError as error:
            print(error)
            return 1
    faulthandler.cancel_dump_traceback_later()
    print(f"{sum(ended.values())} calls: {', '.join(f'{n} {how}' for how, n in ended.most_common())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
